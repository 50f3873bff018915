"""`flax.nnx`'s norms on jaxnorm's kernels: change the import line, keep the model and its checkpoints."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxnorm import _flax
from jaxnorm._flax import nnx
from jaxnorm.norms import layer_norm, rms_norm

__all__ = ["LayerNorm", "RMSNorm"]


class RMSNorm(nnx.RMSNorm):
    """`flax.nnx.RMSNorm` with the same constructor, parameters and result dtype, computed by `jaxnorm.rms_norm`.

    The kernels serve the calls whose `reduction_axes` and `feature_axes` are the same trailing axes. A `mask`, an
    `axis_name`, other axes, a `promote_dtype` of one's own, and dtypes other than float32, bfloat16 and float16 are
    computed by Flax's own code.
    """

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        y = _fused(rms_norm, self, mask, x, _value(self.scale))
        return super().__call__(x, mask) if y is None else y


class LayerNorm(nnx.LayerNorm):
    """`flax.nnx.LayerNorm` with the same constructor, parameters and result dtype, computed by `jaxnorm.layer_norm`.

    The kernels serve the same calls as for `RMSNorm`. Their variance is always that of the centred values, so
    `use_fast_variance=True`, Flax's default, costs no accuracy here: results differ from Flax's by rounding, and where
    the mean is large against the deviation, Flax's lose digits.
    """

    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        y = _fused(layer_norm, self, mask, x, _value(self.scale), _value(self.bias))
        return super().__call__(x, mask=mask) if y is None else y


def _value(parameter: Any) -> jax.Array | None:
    return None if parameter is None else parameter[...]


def _fused(
    norm: Callable[..., jax.Array],
    module: RMSNorm | LayerNorm,
    mask: jax.Array | None,
    x: jax.Array,
    *parameters: jax.Array | None,
) -> jax.Array | None:
    """`norm` called as `module` says, or None where it does not say the same as Flax."""
    if module.promote_dtype is not nnx.nn.dtypes.promote_dtype:
        return None
    x = jnp.asarray(x)
    operands = (x, *parameters)
    dtype = nnx.nn.dtypes.canonicalize_dtype(*operands, dtype=module.dtype)
    axis = _flax.kernel_axes(module, x, mask)
    if axis is None or not _flax.kernel_dtypes(dtype, *(a.dtype for a in operands if a is not None)):
        return None
    features = x.shape[axis[0] :]
    parameters = tuple(None if p is None else _promote(p, dtype).reshape(features) for p in parameters)
    return norm(_promote(x, dtype), *parameters, epsilon=module.epsilon, axis=axis, out_dtype=dtype)


def _promote(array: jax.Array, dtype: Any) -> jax.Array:
    """`array` as Flax's promotion to `dtype` rounds it. Mere widening is left to the kernel: fewer bytes to read."""
    return array if dtype in (array.dtype, jnp.float32) else array.astype(dtype)
