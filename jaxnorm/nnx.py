"""`flax.nnx`'s norms on jaxnorm's kernels: change the import line, keep the model and its checkpoints."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxnorm import _flax
from jaxnorm._flax import nnx
from jaxnorm.norms import add_layer_norm, add_rms_norm, layer_norm, rms_norm

__all__ = ["AddLayerNorm", "AddRMSNorm", "LayerNorm", "RMSNorm"]


class RMSNorm(nnx.RMSNorm):
    """`flax.nnx.RMSNorm` with the same constructor, parameters and result dtype, computed by `jaxnorm.rms_norm`.

    The kernels serve the calls whose `reduction_axes` and `feature_axes` are the same trailing axes. A `mask`, an
    `axis_name`, other axes, a `promote_dtype` of one's own, and dtypes other than float32, bfloat16 and float16 are
    computed by Flax's own code.
    """

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        y: jax.Array | None = _fused(rms_norm, self, mask, (x,), _value(self.scale))
        return super().__call__(x, mask) if y is None else y


class LayerNorm(nnx.LayerNorm):
    """`flax.nnx.LayerNorm` with the same constructor, parameters and result dtype, computed by `jaxnorm.layer_norm`.

    The kernels serve the same calls as for `RMSNorm`. Their variance is always that of the centred values, so
    `use_fast_variance=True`, Flax's default, costs no accuracy here: results differ from Flax's by rounding, and where
    the mean is large against the deviation, Flax's lose digits.
    """

    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        y: jax.Array | None = _fused(layer_norm, self, mask, (x,), _value(self.scale), _value(self.bias))
        return super().__call__(x, mask=mask) if y is None else y


class AddRMSNorm(RMSNorm):
    """The sum of a residual connection and its `RMSNorm`, computed by `jaxnorm.add_rms_norm`.

        y, new_residual = norm(x, residual)  # new_residual = x + residual, y = RMSNorm(...)(new_residual)

    Constructor, parameters and the dtype of y are those of `RMSNorm`, whose input is the sum. That has residual's
    dtype, and is not rounded to another `dtype` before it is normalised, as flax.nnx rounds its input: only y is. What
    the kernels of `RMSNorm` do not serve is added first and then computed by Flax's own code.
    """

    def __call__(  # type: ignore[override]
        self, x: jax.Array, residual: jax.Array, *, mask: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        rows = _flax.with_residual(self, x, residual)
        results = _fused(add_rms_norm, self, mask, rows, _value(self.scale))
        return _flax.add_first(super().__call__, *rows, mask) if results is None else results


class AddLayerNorm(LayerNorm):
    """The sum of a residual connection and its `LayerNorm`, computed by `jaxnorm.add_layer_norm`; see `AddRMSNorm`."""

    def __call__(  # type: ignore[override]
        self, x: jax.Array, residual: jax.Array, *, mask: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        rows = _flax.with_residual(self, x, residual)
        results = _fused(add_layer_norm, self, mask, rows, _value(self.scale), _value(self.bias))
        return _flax.add_first(super().__call__, *rows, mask) if results is None else results


def _value(parameter: Any) -> jax.Array | None:
    return None if parameter is None else parameter[...]


def _fused(
    norm: Callable[..., Any],
    module: RMSNorm | LayerNorm,
    mask: jax.Array | None,
    rows: tuple[jax.Array, ...],
    *parameters: jax.Array | None,
) -> Any:
    """`norm` of x, or of x and a residual, called as `module` says, or None where it does not say the same as Flax."""
    if module.promote_dtype is not nnx.nn.dtypes.promote_dtype:
        return None
    rows = tuple(map(jnp.asarray, rows))
    *_, normalised = rows  # with a residual the sum, which is like it
    dtype = nnx.nn.dtypes.canonicalize_dtype(normalised, *parameters, dtype=module.dtype)
    axis = _flax.kernel_axes(module, normalised, mask)
    if axis is None or not _flax.kernel_dtypes(dtype, *(a.dtype for a in (*rows, *parameters) if a is not None)):
        return None
    features = normalised.shape[axis[0] :]
    parameters = tuple(None if p is None else _promote(p, dtype).reshape(features) for p in parameters)
    if len(rows) == 1:
        rows = (_promote(normalised, dtype),)
    return norm(*rows, *parameters, epsilon=module.epsilon, axis=axis, out_dtype=dtype)


def _promote(array: jax.Array, dtype: Any) -> jax.Array:
    """`array` as Flax's promotion to `dtype` rounds it. Mere widening is left to the kernel: fewer bytes to read."""
    return array if dtype in (array.dtype, jnp.float32) else array.astype(dtype)
