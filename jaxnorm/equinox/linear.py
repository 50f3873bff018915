"""Linear layers of Equinox with quantised kernels."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxnorm.equinox.norms import why_no_arrays
from jaxnorm.flax import replacement
from jaxnorm.flax.replacement import explained, pair
from jaxnorm.ops.quantize.api import quantize
from jaxnorm.ops.quantized_dot.api import quantized_dot
from jaxnorm.quantization import Quantization, Quantized


@explained
class QuantizedLinear(eqx.Module):
    """An `equinox.nn.Linear` whose weight is quantised, computed by `jaxnorm.quantized_dot`.

        layer = QuantizedLinear(linear, jnp.int8)
        y = jax.vmap(layer)(x)

    In place of the weight there are `values`, of its shape (out_features, in_features), and `scales` of shape
    (out_features, 1); `quantized` has both, as a kernel. With `inputs` x is quantised too, on the way; then it has no
    derivative. The result has the dtype that Equinox' has. No gradient goes to `values` and `scales`, but
    `equinox.filter_grad` gives zeros: an optimiser that decays what it is given must not be given these.

    Args:
      linear: the layer that is quantised, or a stack of such that `equinox.filter_vmap` made.
      kernels: to float8_e4m3fn, float8_e5m2, int8 or int4, with granularity "token"; a dtype alone stands for that.
      inputs: how x is quantised, likewise: to float8 for kernels of float8, to int8 for those of int8 and int4.
        None leaves x as it is.

    Raises:
      TypeError: linear is no `equinox.nn.Linear` that can be quantised, kernels or inputs is no `Quantization`, or
        their dtypes do not go together.
      ValueError: a granularity is not "token".
    """

    values: Any
    scales: Any
    bias: Any
    in_features: int = eqx.field(static=True)
    out_features: int = eqx.field(static=True)
    use_bias: bool = eqx.field(static=True)
    kernels: Quantization = eqx.field(static=True)
    inputs: Quantization | None = eqx.field(static=True)
    weight_dtype: Any = eqx.field(static=True)

    def __init__(
        self,
        linear: eqx.nn.Linear,
        kernels: Quantization | DTypeLike,
        inputs: Quantization | DTypeLike | None = None,
    ) -> None:
        self.kernels, self.inputs = pair("QuantizedLinear", kernels, inputs)
        if (why := why_left(linear)) is not None:
            raise TypeError(
                f"QuantizedLinear: linear must be an equinox.nn.Linear, got a {type(linear).__name__} that cannot be "
                f"quantised: {why}."
            )
        # Of a model without values there is only what shapes and dtypes come of it.
        is_abstract = isinstance(linear.weight, jax.ShapeDtypeStruct)
        quantise = partial(quantize, quantization=self.kernels)
        quantized = jax.eval_shape(quantise, linear.weight) if is_abstract else quantise(linear.weight)
        self.values, self.scales, self.bias = quantized.values, quantized.scales, linear.bias
        self.in_features, self.out_features = int(linear.in_features), int(linear.out_features)
        self.use_bias, self.weight_dtype = linear.use_bias, jnp.dtype(linear.weight.dtype)

    @property
    def quantized(self) -> Quantized:
        """The kernel: its `dequantize()` is the layer's weight transposed, rounded."""
        return Quantized(self.values, self.scales, transposed=True)

    def __call__(self, x: Any, *, key: Any = None) -> jax.Array:
        if jnp.shape(x) != (self.in_features,):
            raise ValueError(
                f"QuantizedLinear: x has shape {jnp.shape(x)}, expected ({self.in_features},): a layer of Equinox "
                f"takes one example. Map it, as jax.vmap(layer)(x)."
            )
        dtype = jnp.result_type(x, self.weight_dtype, *([] if self.bias is None else [self.bias.dtype]))
        x = jnp.asarray(x, dtype)
        quantized = x if self.inputs is None else quantize(x, self.inputs)
        kernel = jax.lax.stop_gradient(self.quantized)
        y: jax.Array = quantized_dot(quantized, kernel, out_dtype=dtype, bias=self.bias)
        return y


def why_left(module: Any) -> str | None:
    """Why a linear layer stays as it is; None if it can be quantised."""
    if isinstance(module, QuantizedLinear):
        return "it is quantised already"
    if type(module) is not eqx.nn.Linear:
        return f"only equinox.nn.Linear{' itself' if isinstance(module, eqx.nn.Linear) else ''} is quantised"
    if "scalar" in (module.in_features, module.out_features):
        return "it has scalar features"
    arrays = {"weight": module.weight} | ({} if module.bias is None else {"bias": module.bias})
    if why := why_no_arrays(arrays):
        return why
    why = replacement.why_dtypes(*(array.dtype for array in arrays.values()))
    return why and f"it is of {why}"
