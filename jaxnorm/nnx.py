"""`flax.nnx`'s norms on jaxnorm's kernels: change the import line, keep the model and its checkpoints."""

import math
from collections.abc import Callable
from typing import Any, Unpack, overload

import jax
import jax.numpy as jnp

from jaxnorm import _flax
from jaxnorm._flax import nnx
from jaxnorm.added import add_layer_norm, add_rms_norm
from jaxnorm.gated import gated_rms_norm
from jaxnorm.gated_reference import Activation
from jaxnorm.norms import layer_norm, rms_norm
from jaxnorm.quantization import Quantization, Quantized
from jaxnorm.quantized import layer_norm_quantized, rms_norm_quantized

__all__ = [
    "AddLayerNorm",
    "AddRMSNorm",
    "GatedRMSNorm",
    "LayerNorm",
    "QuantizedLayerNorm",
    "QuantizedRMSNorm",
    "RMSNorm",
]


class RMSNorm(nnx.RMSNorm):
    """`flax.nnx.RMSNorm` with the same constructor, parameters and result dtype, computed by `jaxnorm.rms_norm`.

    The kernels serve the calls whose `reduction_axes` and `feature_axes` are trailing axes: the same ones, or with
    features before those that are reduced, a scale for each head: `reduction_axes=-1, feature_axes=(-2, -1)`. A `mask`,
    `axis_index_groups`, other axes, parameters that an Explicit mesh splits otherwise than x, a `promote_dtype` of
    one's own, and dtypes other than float32, bfloat16 and float16 are computed by Flax's own code.
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


class GatedRMSNorm(RMSNorm):
    """An `RMSNorm` that is gated, computed by `jaxnorm.gated_rms_norm`.

        norm = GatedRMSNorm(features, gate_first=True, group_size=1024, rngs=rngs)  # Mamba2's
        y = norm(x, gate)

    Constructor and parameters are those of `RMSNorm`, and of the function `gate_first`, `activation` and `group_size`.
    As in flax.nnx, `dtype` is that of the operands, which are rounded to it, and of y; None is what they promote to.
    The kernels want x, gate and y of one dtype: with float32 parameters, give `dtype` for a gated norm of half types.

    `reduction_axes` and `feature_axes` must be -1. A `mask`, `axis_index_groups` and a `promote_dtype` of one's own are
    errors.
    """

    def __init__(
        self,
        num_features: int,
        *,
        gate_first: bool,
        activation: Activation = "silu",
        group_size: int | None = None,
        **flax: Any,
    ) -> None:
        super().__init__(num_features, **flax)
        self.gate_first = gate_first
        self.activation = activation
        self.group_size = group_size

    def __call__(  # type: ignore[override]
        self, x: jax.Array, gate: jax.Array, *, mask: None = None
    ) -> jax.Array:
        _flax.must_be(self, "promote_dtype", nnx.nn.dtypes.promote_dtype, "what is gated is computed in float32")
        x, gate = _flax.with_gate(self, x, gate)
        _flax.gated_axis(self, x, mask)
        scale = _value(self.scale)
        dtype = nnx.nn.dtypes.canonicalize_dtype(x, gate, scale, dtype=self.dtype)
        return gated_rms_norm(
            _promote(x, dtype),
            _promote(gate, dtype),
            None if scale is None else _promote(scale, dtype),
            gate_first=self.gate_first,
            activation=self.activation,
            group_size=self.group_size,
            epsilon=self.epsilon,
            axis_name=self.axis_name,
            out_dtype=dtype,
        )


class QuantizedRMSNorm(RMSNorm):
    """An `RMSNorm` of which the result is quantised, computed by `jaxnorm.rms_norm_quantized`.

        norm = QuantizedRMSNorm(features, quantization=Quantization(jnp.float8_e4m3fn), rngs=rngs)
        quantized = norm(x)
        quantized, new_residual = norm(x, residual)

    Constructor and parameters are those of `RMSNorm`, and of the function `quantization`, `straight_through` and the
    call's `residual`, `static_scale` and `smooth_scale`. `dtype` is that of the operands, as in flax.nnx: the
    parameters, and x where there is no residual, are rounded to it; what comes of them is float32 until it is
    quantised.

    `reduction_axes` and `feature_axes` must be the same axes: kernels serve trailing ones, the jnp formula others.
    A `mask`, `axis_index_groups` and a `promote_dtype` of one's own are errors.
    """

    def __init__(
        self, num_features: int, *, quantization: Quantization, straight_through: bool = False, **flax: Any
    ) -> None:
        super().__init__(num_features, **flax)
        self.quantization = quantization
        self.straight_through = straight_through

    @overload  # type: ignore[override]
    def __call__(self, x: jax.Array, residual: None = None, **_: Unpack[_flax.Scales]) -> Quantized: ...

    @overload
    def __call__(self, x: jax.Array, residual: jax.Array, **_: Unpack[_flax.Scales]) -> tuple[Quantized, jax.Array]: ...

    def __call__(
        self,
        x: jax.Array,
        residual: jax.Array | None = None,
        *,
        static_scale: Any = None,
        smooth_scale: jax.Array | None = None,
        mask: None = None,
    ) -> Quantized | tuple[Quantized, jax.Array]:
        scales = {"static_scale": static_scale, "smooth_scale": smooth_scale}
        return _quantized(rms_norm_quantized, self, mask, x, residual, scales, _value(self.scale))


class QuantizedLayerNorm(LayerNorm):
    """A `LayerNorm` of which the result is quantised, by `jaxnorm.layer_norm_quantized`; see `QuantizedRMSNorm`."""

    def __init__(
        self, num_features: int, *, quantization: Quantization, straight_through: bool = False, **flax: Any
    ) -> None:
        super().__init__(num_features, **flax)
        self.quantization = quantization
        self.straight_through = straight_through

    @overload  # type: ignore[override]
    def __call__(self, x: jax.Array, residual: None = None, **_: Unpack[_flax.Scales]) -> Quantized: ...

    @overload
    def __call__(self, x: jax.Array, residual: jax.Array, **_: Unpack[_flax.Scales]) -> tuple[Quantized, jax.Array]: ...

    def __call__(
        self,
        x: jax.Array,
        residual: jax.Array | None = None,
        *,
        static_scale: Any = None,
        smooth_scale: jax.Array | None = None,
        mask: None = None,
    ) -> Quantized | tuple[Quantized, jax.Array]:
        scales = {"static_scale": static_scale, "smooth_scale": smooth_scale}
        return _quantized(layer_norm_quantized, self, mask, x, residual, scales, _value(self.scale), _value(self.bias))


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
    axes = _flax.kernel_axes(module, normalised, mask, parameters)
    if axes is None or not _flax.kernel_dtypes(dtype, *(a.dtype for a in (*rows, *parameters) if a is not None)):
        return None
    axis, features = axes
    rows, parameters = _operands(rows, parameters, dtype, features)
    return norm(*rows, *parameters, epsilon=module.epsilon, axis=axis, out_dtype=dtype, axis_name=module.axis_name)


def _quantized(
    norm: Callable[..., Quantized | tuple[Quantized, jax.Array]],
    module: QuantizedRMSNorm | QuantizedLayerNorm,
    mask: object,
    x: jax.Array,
    residual: jax.Array | None,
    scales: dict[str, Any],
    *parameters: jax.Array | None,
) -> Quantized | tuple[Quantized, jax.Array]:
    """The quantised `norm` of x, or of x and a residual, called as `module` says."""
    _flax.must_be(module, "promote_dtype", nnx.nn.dtypes.promote_dtype, "what is quantised is computed in float32")
    rows: tuple[jax.Array, ...] = (jnp.asarray(x),)
    if residual is not None:
        rows = _flax.with_residual(module, x, residual)
    axis = _flax.function_axes(module, rows[-1], mask, "quantised")
    dtype = nnx.nn.dtypes.canonicalize_dtype(rows[-1], *parameters, dtype=module.dtype)
    rows, parameters = _operands(rows, parameters, dtype, axis)
    x, *added = rows
    options = {"quantization": module.quantization, "straight_through": module.straight_through, **scales}
    options["axis_name"] = module.axis_name
    return norm(x, *parameters, residual=added[0] if added else None, epsilon=module.epsilon, axis=axis, **options)


def _operands(
    rows: tuple[jax.Array, ...], parameters: tuple[jax.Array | None, ...], dtype: Any, axes: tuple[int, ...]
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array | None, ...]]:
    """x, or x and a residual, and parameters: rounded to `dtype` as Flax rounds them, parameters with `axes`' shape."""
    features = tuple(rows[-1].shape[axis] for axis in axes)
    for parameter in parameters:
        if parameter is not None and parameter.size != math.prod(features):
            raise ValueError(
                f"the norm's parameters are of {parameter.size} features, expected {math.prod(features)}: x has shape "
                f"{rows[-1].shape}, of which the axes {axes} are features. Construct it with that many."
            )
    parameters = tuple(None if p is None else _promote(p, dtype).reshape(features) for p in parameters)
    return (tuple(_promote(x, dtype) for x in rows) if len(rows) == 1 else rows), parameters


def _promote(array: jax.Array, dtype: Any) -> jax.Array:
    """`array` as Flax's promotion to `dtype` rounds it. Mere widening is left to the kernel: fewer bytes to read."""
    return array if dtype in (array.dtype, jnp.float32) else array.astype(dtype)
