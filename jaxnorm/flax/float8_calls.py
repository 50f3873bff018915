"""How a linear layer of either Flax API is computed by `jaxnorm.float8_linear`."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxnorm.flax import calls
from jaxnorm.flax.calls import linen
from jaxnorm.native import ffi
from jaxnorm.ops.float8_linear import call
from jaxnorm.ops.float8_linear.recipe import Float8Recipe
from jaxnorm.quantization import Quantized


def linear(
    module: Any,
    recipe: Float8Recipe,
    inputs: jax.Array | Quantized,
    kernel: jax.Array,
    bias: jax.Array | None,
    out_sharding: Any = None,
) -> jax.Array:
    """The call of a layer with these parameters, which are read as they are; the result has Flax's dtype.

    That of a `Quantized` is the module's, or bfloat16 where it has none.
    """
    preferred = getattr(module, "preferred_element_type", None)
    if isinstance(inputs, Quantized):
        x: Any = inputs
        dtype = module.dtype
    else:
        dtype = linen.dtypes.canonicalize_dtype(inputs, kernel, bias, dtype=module.dtype)
        x = _rounded(jnp.asarray(inputs), dtype)
    out_dtype = calls.linear_dtype(preferred, dtype, bias)
    name, precision = type(module).__name__, module.precision
    return call.linear(name, x, kernel, bias, out_dtype, recipe, None, precision, out_sharding)


def _rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """x as Flax's promotion to `dtype` rounds it. Mere widening changes no value, and takes bytes."""
    return x if jnp.dtype(dtype) == jnp.float32 and x.dtype in ffi.DTYPES else x.astype(dtype)
