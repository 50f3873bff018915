"""The norms of `jaxnorm.linen` but for those of groups of channels."""

import inspect
from collections.abc import Callable
from dataclasses import field
from functools import partial
from typing import Any, Unpack, overload

import jax
import jax.numpy as jnp

from jaxnorm.flax import calls, linen_calls
from jaxnorm.flax.calls import linen
from jaxnorm.flax.replacement import explained
from jaxnorm.ops.activation import Synonym
from jaxnorm.ops.norm.gated import Activation, gated_rms_norm
from jaxnorm.ops.options import Implementation
from jaxnorm.ops.qk_norm_rotary.api import Normalize
from jaxnorm.quantization import Quantization, Quantized
from jaxnorm.results import QK

# Flax's functions without the wrapper that makes them calls of the module: through it, a call would be captured,
# intercepted and tabulated twice.
_OF_FLAX = {calls.RMS: inspect.unwrap(linen.RMSNorm.__call__), calls.LAYER: inspect.unwrap(linen.LayerNorm.__call__)}


class _Options(linen.Module):
    """What all norms have beside Flax's fields, and by keyword only: positions are Flax's."""

    scale_init: Callable[..., Any] = linen_calls.default_scale_init
    scale_offset: float = field(default=0.0, kw_only=True)
    multiply_before_cast: bool = field(default=True, kw_only=True)
    implementation: Implementation | None = field(default=None, kw_only=True)

    # The arguments of a call of one of these or of Flax's norm, what computes it, and why Flax has to.
    _arguments = staticmethod(linen_calls.arguments)
    _why_flax = staticmethod(linen_calls.why_flax)

    @classmethod
    def _fused(cls, module: Any, x: jax.Array, mask: jax.Array | None) -> Any:
        functions: calls.Functions = cls._functions  # type: ignore[attr-defined]
        return linen_calls.fused(functions.norm, module, (x,), mask)


@explained
class RMSNorm(_Options, linen.RMSNorm):
    """`flax.linen.RMSNorm` with the same fields, parameters and result dtype, computed by `jaxnorm.rms_norm`.

    Options and the calls that kernels serve are those of `jaxnorm.nnx.RMSNorm`, the options by keyword.
    `force_float32_reductions=False` is computed by Flax's own code as well.
    """

    _functions = calls.RMS

    @linen.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        y: jax.Array | None = self._fused(self, jnp.asarray(x), mask)
        return _OF_FLAX[self._functions](self, x, mask=mask) if y is None else y


@explained
class LayerNorm(_Options, linen.LayerNorm):
    """`flax.linen.LayerNorm` with the same fields, parameters and result dtype, computed by `jaxnorm.layer_norm`.

    All else is as of `jaxnorm.nnx.LayerNorm`.
    """

    _functions = calls.LAYER

    @linen.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        y: jax.Array | None = self._fused(self, jnp.asarray(x), mask)
        return _OF_FLAX[self._functions](self, x, mask=mask) if y is None else y


class _Add(linen.Module):
    """What makes a norm one of the sum of x and a residual."""

    @linen.compact
    def __call__(
        self, x: jax.Array, residual: jax.Array, *, mask: jax.Array | None = None, **of_sum: Unpack[calls.OfSum]
    ) -> Any:
        module: Any = self
        rows = calls.with_other(self, x, "residual", residual, "added")
        results: Any = linen_calls.fused(partial(module._functions.add, **of_sum), module, rows, mask)
        of_flax = partial(_OF_FLAX[module._functions], self)
        return calls.add_first(of_flax, rows, mask, **of_sum) if results is None else results


@explained
class AddRMSNorm(_Add, RMSNorm):  # type: ignore[misc]
    """The sum of a residual connection and its `RMSNorm`, computed by `jaxnorm.add_rms_norm`.

        y, new_residual = norm(x, residual)  # and all else as of `jaxnorm.nnx.AddRMSNorm`

    A module without a name is called after its class, "AddRMSNorm_0". To read the parameters of an `RMSNorm`, give it
    the name that one had.
    """


@explained
class AddLayerNorm(_Add, LayerNorm):  # type: ignore[misc]
    """The sum of a residual connection and its `LayerNorm`, computed by `jaxnorm.add_layer_norm`; see `AddRMSNorm`."""


@explained
class GatedRMSNorm(RMSNorm, kw_only=True):
    """An `RMSNorm` that is gated, computed by `jaxnorm.gated_rms_norm`; see `jaxnorm.nnx.GatedRMSNorm`.

    `dtype` is that of y; None is what x, gate and scale promote to. A module without a name is called after its class,
    as `AddRMSNorm` says. `force_float32_reductions=False` is an error.
    """

    gate_first: bool
    activation: Activation | Synonym = "silu"
    group_size: int | None = None

    @linen.compact
    def __call__(  # type: ignore[override]
        self, x: jax.Array, gate: jax.Array, *, mask: None = None
    ) -> jax.Array:
        x, gate = calls.with_other(self, x, "gate", gate, "multiplied")
        calls.last_axis(self, x, mask, "a gated norm")
        scale, _ = linen_calls.parameters(self, x, (-1,))
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
            **calls.rounded_once(self, "a gated norm"),
        )


@explained
class QKNormRotary(_Options, kw_only=True):
    """RMSNorm or LayerNorm of each head of queries and keys, and their rotary embedding: `jaxnorm.qk_norm_rotary`.

        q, k = QKNormRotary(theta=500_000.0)(q, k, positions)  # or cos=cos, sin=sin

    As `jaxnorm.nnx.QKNormRotary`; the parameters are of a head's elements or, with `per_head`, a row for each head.
    """

    theta: float = 10000.0
    rotary_dim: int | None = None
    interleaved: bool = False
    normalize: Normalize = True
    epsilon: float = 1e-6
    heads_axis: int = -2
    use_scale: bool = True
    per_head: bool = False
    dtype: Any = None
    param_dtype: Any = jnp.float32

    @linen.compact
    def __call__(
        self, q: jax.Array, k: jax.Array, positions: jax.Array | None = None, **tables: Unpack[calls.Tables]
    ) -> QK:
        axes = (self.heads_axis, -1) if self.per_head else (-1,)
        pairs = (("q_scale", q), ("k_scale", k))
        scales = [linen_calls.scale(self, jnp.asarray(x), axes, name) if self.normalize else None for name, x in pairs]
        return calls.rotated(self, (q, k, *scales, positions), **tables)


class _Quantized(linen.Module, kw_only=True):
    """What makes a norm one with a quantised result."""

    quantization: Quantization
    straight_through: bool = False

    @overload
    def __call__(self, x: jax.Array, residual: None = None, **_: Unpack[calls.Scales]) -> Quantized: ...

    @overload
    def __call__(self, x: jax.Array, residual: jax.Array, **_: Unpack[calls.Scales]) -> tuple[Quantized, jax.Array]: ...

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
        x, addend = calls.with_addend(self, x, residual=residual)
        return linen_calls.quantized(self, x, addend, mask, scales)


@explained
class QuantizedRMSNorm(_Quantized, RMSNorm, kw_only=True):  # type: ignore[misc]
    """An `RMSNorm` with a quantised result: `jaxnorm.rms_norm_quantized`; see `jaxnorm.nnx.QuantizedRMSNorm`.

    `dtype`, which flax.linen gives to its result, does not matter: what is quantised is float32. A module without a
    name is called after its class, as `AddRMSNorm` says. `force_float32_reductions=False` is an error.
    """


@explained
class QuantizedLayerNorm(_Quantized, LayerNorm, kw_only=True):  # type: ignore[misc]
    """A `LayerNorm` with a quantised result, computed by `jaxnorm.layer_norm_quantized`; see `QuantizedRMSNorm`."""
