"""`flax.linen`'s norms on jaxnorm's kernels: change the import line, keep the model and its checkpoints."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, Unpack, overload

import jax
import jax.numpy as jnp

from jaxnorm import _flax
from jaxnorm._flax import linen
from jaxnorm.ops.gated_norm.api import gated_rms_norm
from jaxnorm.ops.gated_norm.formula import Activation
from jaxnorm.quantization import Quantization, Quantized

__all__ = [
    "AddLayerNorm",
    "AddRMSNorm",
    "GatedRMSNorm",
    "LayerNorm",
    "QuantizedLayerNorm",
    "QuantizedRMSNorm",
    "RMSNorm",
]

# Flax's functions without the wrapper that makes them calls of the module: through it, a call would be captured,
# intercepted and tabulated twice.
_OF_FLAX = {_flax.RMS: inspect.unwrap(linen.RMSNorm.__call__), _flax.LAYER: inspect.unwrap(linen.LayerNorm.__call__)}


class RMSNorm(linen.RMSNorm):
    """`flax.linen.RMSNorm` with the same fields, parameters and result dtype, computed by `jaxnorm.rms_norm`.

    The kernels serve the calls whose `reduction_axes` and `feature_axes` are trailing axes: the same ones, or with
    features before those that are reduced, a scale for each head: `reduction_axes=-1, feature_axes=(-2, -1)`. A `mask`,
    `axis_index_groups`, other axes, parameters that an Explicit mesh splits otherwise than x,
    `force_float32_reductions=False`, and dtypes other than float32, bfloat16 and float16 are computed by Flax's own
    code.
    """

    _functions = _flax.RMS

    @linen.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        y: jax.Array | None = _fused(self._functions.norm, self, (jnp.asarray(x),), mask)
        return _OF_FLAX[self._functions](self, x, mask=mask) if y is None else y


class LayerNorm(linen.LayerNorm):
    """`flax.linen.LayerNorm` with the same fields, parameters and result dtype, computed by `jaxnorm.layer_norm`.

    The kernels serve the same calls as for `RMSNorm`. Their variance is always that of the centred values, so
    `use_fast_variance=True`, Flax's default, costs no accuracy here: results differ from Flax's by rounding, and where
    the mean is large against the deviation, Flax's lose digits.
    """

    _functions = _flax.LAYER

    @linen.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        y: jax.Array | None = _fused(self._functions.norm, self, (jnp.asarray(x),), mask)
        return _OF_FLAX[self._functions](self, x, mask=mask) if y is None else y


class _Add(linen.Module):
    """What makes a norm one of the sum of x and a residual."""

    @linen.compact
    def __call__(
        self, x: jax.Array, residual: jax.Array, *, mask: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        module: Any = self
        rows = _flax.with_residual(self, x, residual)
        results: tuple[jax.Array, jax.Array] | None = _fused(module._functions.add, module, rows, mask)
        of_flax = partial(_OF_FLAX[module._functions], self)
        return _flax.add_first(of_flax, *rows, mask) if results is None else results


class AddRMSNorm(_Add, RMSNorm):  # type: ignore[misc]
    """The sum of a residual connection and its `RMSNorm`, computed by `jaxnorm.add_rms_norm`.

        y, new_residual = norm(x, residual)  # new_residual = x + residual, y = RMSNorm(...)(new_residual)

    Fields, parameters and the dtype of y are those of `RMSNorm`, whose input is the sum; that has residual's dtype.
    What the kernels of `RMSNorm` do not serve is added first and then computed by Flax's own code.

    A module without a name is called after its class, "AddRMSNorm_0". To read the parameters of an `RMSNorm`, give it
    the name that one had.
    """


class AddLayerNorm(_Add, LayerNorm):  # type: ignore[misc]
    """The sum of a residual connection and its `LayerNorm`, computed by `jaxnorm.add_layer_norm`; see `AddRMSNorm`."""


class GatedRMSNorm(RMSNorm, kw_only=True):
    """An `RMSNorm` that is gated, computed by `jaxnorm.gated_rms_norm`.

        norm = GatedRMSNorm(gate_first=True, group_size=1024)  # Mamba2's
        y = norm(x, gate)

    Fields and parameters are those of `RMSNorm`, and of the function `gate_first`, `activation` and `group_size`.
    `dtype` is that of y; None is what x, gate and scale promote to. The kernels want x, gate and y of one dtype: with
    float32 parameters, give `dtype` for a gated norm of half types. A module without a name is called after its class,
    as `AddRMSNorm` says.

    `reduction_axes` and `feature_axes` must be -1. A `mask`, `axis_index_groups` and
    `force_float32_reductions=False` are errors.
    """

    gate_first: bool
    activation: Activation = "silu"
    group_size: int | None = None

    @linen.compact
    def __call__(  # type: ignore[override]
        self, x: jax.Array, gate: jax.Array, *, mask: None = None
    ) -> jax.Array:
        _flax.must_be(self, "force_float32_reductions", True, "what is gated is computed in float32")
        x, gate = _flax.with_other(self, x, "gate", gate, "multiplied")
        _flax.last_axis(self, x, mask, "gated")
        scale, _ = _parameters(self, x, (-1,))
        return gated_rms_norm(
            x,
            gate,
            scale,
            gate_first=self.gate_first,
            activation=self.activation,
            group_size=self.group_size,
            epsilon=self.epsilon,
            axis_name=self.axis_name,
            out_dtype=linen.dtypes.canonicalize_dtype(x, gate, scale, dtype=self.dtype),
        )


class _Quantized(linen.Module, kw_only=True):
    """What makes a norm one with a quantised result."""

    quantization: Quantization
    straight_through: bool = False

    @overload
    def __call__(self, x: jax.Array, residual: None = None, **_: Unpack[_flax.Scales]) -> Quantized: ...

    @overload
    def __call__(self, x: jax.Array, residual: jax.Array, **_: Unpack[_flax.Scales]) -> tuple[Quantized, jax.Array]: ...

    @linen.compact
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
        return _quantized(self, x, residual, mask, scales)


class QuantizedRMSNorm(_Quantized, RMSNorm, kw_only=True):  # type: ignore[misc]
    """An `RMSNorm` with a quantised result, computed by `jaxnorm.rms_norm_quantized`.

        norm = QuantizedRMSNorm(quantization=Quantization(jnp.float8_e4m3fn))
        quantized = norm(x)
        quantized, new_residual = norm(x, residual)

    Fields and parameters are those of `RMSNorm`, and of the function `quantization`, `straight_through` and the call's
    `residual`, `static_scale` and `smooth_scale`. `dtype`, which flax.linen gives to its result, does not matter: what
    is quantised is float32. A module without a name is called after its class, as `AddRMSNorm` says.

    `reduction_axes` and `feature_axes` must be the same axes: kernels serve trailing ones, the jnp formula others.
    A `mask`, `axis_index_groups` and `force_float32_reductions=False` are errors.
    """


class QuantizedLayerNorm(_Quantized, LayerNorm, kw_only=True):  # type: ignore[misc]
    """A `LayerNorm` with a quantised result, computed by `jaxnorm.layer_norm_quantized`; see `QuantizedRMSNorm`."""


def _fused(norm: Callable[..., Any], module: Any, rows: tuple[jax.Array, ...], mask: jax.Array | None) -> Any:
    """`norm` of x, or of x and a residual, called as `module` says.

    None, with no parameter made yet, where it does not say the same as Flax.
    """
    *_, normalised = rows  # with a residual the sum, which is like it
    axes = _flax.kernel_axes(module, normalised, mask, _given(module))
    dtypes = (module.param_dtype, jnp.float32 if module.dtype is None else module.dtype, *(a.dtype for a in rows))
    if axes is None or not module.force_float32_reductions or not _flax.kernel_dtypes(*dtypes):
        return None
    axis, features = axes
    scale, bias = _parameters(module, normalised, features)
    dtype = linen.dtypes.canonicalize_dtype(normalised, scale, bias, dtype=module.dtype)
    options = {"epsilon": module.epsilon, "axis": axis, "out_dtype": dtype, "axis_name": module.axis_name}
    return norm(*rows, scale, bias=bias, **options)


def _quantized(
    module: Any, x: jax.Array, residual: jax.Array | None, mask: object, scales: dict[str, Any]
) -> Quantized | tuple[Quantized, jax.Array]:
    """The quantised norm of x, or of x and a residual, called as `module` says."""
    _flax.must_be(module, "force_float32_reductions", True, "what is quantised is computed in float32")
    x = jnp.asarray(x)
    if residual is not None:
        x, residual = _flax.with_residual(module, x, residual)
    axis = _flax.function_axes(module, x, mask, "quantised")
    scale, bias = _parameters(module, x, axis)
    quantized: Quantized | tuple[Quantized, jax.Array] = module._functions.quantized(
        x,
        scale,
        bias=bias,
        quantization=module.quantization,
        residual=residual,
        straight_through=module.straight_through,
        epsilon=module.epsilon,
        axis=axis,
        axis_name=module.axis_name,
        **scales,
    )
    return quantized


def _given(module: Any) -> list[jax.Array]:
    """The parameters that the call comes with; while they are initialised, none."""
    names = (name for name in ("scale", "bias") if module.has_variable("params", name))
    return [linen.meta.unbox(module.get_variable("params", name)) for name in names]


def _parameters(module: Any, x: jax.Array, axis: tuple[int, ...]) -> tuple[jax.Array | None, jax.Array | None]:
    """The module's scale and bias, of the shape of these axes of x. An RMSNorm has no bias."""
    features = [x.shape[a] for a in axis]
    scale = module.param("scale", module.scale_init, features, module.param_dtype) if module.use_scale else None
    has_bias = getattr(module, "use_bias", False)
    bias = module.param("bias", module.bias_init, features, module.param_dtype) if has_bias else None
    return scale, bias
