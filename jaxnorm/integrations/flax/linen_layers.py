"""The norms of `jaxnorm.linen`, and its Embed and GatedActivation."""

import inspect
from collections.abc import Callable
from dataclasses import field
from functools import partial
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from jaxnorm.integrations.flax import calls, served
from jaxnorm.integrations.flax.served import linen
from jaxnorm.integrations.replacing import explained
from jaxnorm.ops.activation import Synonym
from jaxnorm.ops.gated_activation.api import gated_activation
from jaxnorm.ops.gated_activation.formula import Activation as OfGate
from jaxnorm.ops.group_norm.formula import Activation as OfGroups
from jaxnorm.ops.norm.gated import Activation
from jaxnorm.ops.options import Implementation
from jaxnorm.ops.qk_norm_rotary.api import Normalize
from jaxnorm.quantization import Quantization
from jaxnorm.results import QK

# Flax's functions without the wrapper that makes them calls of the module: through it, a call would be captured,
# intercepted and tabulated twice.
_OF_FLAX = {calls.RMS: inspect.unwrap(linen.RMSNorm.__call__), calls.LAYER: inspect.unwrap(linen.LayerNorm.__call__)}
_GROUP_NORM, _INSTANCE_NORM = (inspect.unwrap(cls.__call__) for cls in (linen.GroupNorm, linen.InstanceNorm))
_EMBED = inspect.unwrap(linen.Embed.__call__)


class _Options(linen.Module):
    """Options of all norms of rows beside Flax's fields, by keyword only: positions are Flax's."""

    scale_init: Callable[..., Any] = calls.default_scale_init
    scale_offset: float = field(default=0.0, kw_only=True)
    multiply_before_cast: bool = field(default=True, kw_only=True)
    implementation: Implementation | None = field(default=None, kw_only=True)


def _arguments(x: Any, *, mask: jax.Array | None = None) -> tuple[jax.Array, jax.Array | None]:
    return jnp.asarray(x), mask


class _Rows(_Options):
    """Computes a norm of Flax, or one of these."""

    # The arguments of a call, why Flax has to compute it, and what does else.
    _arguments = staticmethod(_arguments)

    @staticmethod
    def _why_flax(module: Any, x: jax.Array, mask: jax.Array | None) -> str | None:
        there = calls.parameters_there(module)
        return served.why_flax(module, x, mask, there, calls.dtypes(module, (x,), there))

    @classmethod
    def _fused(cls, module: Any, x: jax.Array, mask: jax.Array | None) -> Any:
        functions: calls.Functions = cls._functions  # type: ignore[attr-defined]
        return calls.fused(functions.norm, module, (x,), mask)

    @linen.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        module: Any = self
        y: jax.Array | None = self._fused(self, jnp.asarray(x), mask)
        return _OF_FLAX[module._functions](self, x, mask=mask) if y is None else y


@explained
class RMSNorm(_Rows, linen.RMSNorm):
    """`flax.linen.RMSNorm` with the same fields, parameters and result dtype, computed by `jaxnorm.rms_norm`.

    It has the options of `jaxnorm.nnx.RMSNorm`, by keyword, and kernels serve the same calls. Flax's own code also runs
    for `force_float32_reductions=False`.
    """

    _functions = calls.RMS


@explained
class LayerNorm(_Rows, linen.LayerNorm):
    """`flax.linen.LayerNorm` with the same fields, parameters and result dtype, computed by `jaxnorm.layer_norm`.

    All else is as for `jaxnorm.nnx.LayerNorm`.
    """

    _functions = calls.LAYER


class _Add(linen.Module):
    @linen.compact
    def __call__(
        self, x: jax.Array, residual: jax.Array, *, mask: jax.Array | None = None, **of_sum: Unpack[calls.OfSum]
    ) -> Any:
        module: Any = self
        rows = calls.with_other(self, x, "residual", residual, "added")
        results: Any = calls.fused(partial(module._functions.add, **of_sum), module, rows, mask)
        of_flax = partial(_OF_FLAX[module._functions], self)
        return calls.add_first(of_flax, rows, mask, **of_sum) if results is None else results


@explained
class AddRMSNorm(_Add, RMSNorm):  # type: ignore[misc]
    """Adds x to a residual stream, and applies `RMSNorm` to the sum, by `jaxnorm.add_rms_norm`.

        y, new_residual = norm(x, residual)  # all else is as for `jaxnorm.nnx.AddRMSNorm`

    Unnamed, it is called after its class, "AddRMSNorm_0". To read an `RMSNorm`'s parameters, give it the norm's name.
    """


@explained
class AddLayerNorm(_Add, LayerNorm):  # type: ignore[misc]
    """Adds x to a residual stream, and applies `LayerNorm`, by `jaxnorm.add_layer_norm`; see `AddRMSNorm`."""


@explained
class GatedRMSNorm(RMSNorm, kw_only=True):
    """An `RMSNorm` with a gate, computed by `jaxnorm.gated_rms_norm`; see `jaxnorm.nnx.GatedRMSNorm`.

    `dtype` is y's; None is what x, gate and scale promote to. Unnamed, it is called after its class, as an
    `AddRMSNorm` is. `force_float32_reductions=False` is an error.
    """

    gate_first: bool
    activation: Activation | Synonym = "silu"
    group_size: int | None = None

    @linen.compact
    def __call__(  # type: ignore[override]
        self, x: jax.Array, gate: jax.Array, *, mask: None = None
    ) -> jax.Array:
        return calls.gated(self, x, gate, mask)


@explained
class QKNormRotary(_Options, kw_only=True):
    """RMSNorm or LayerNorm of each head of queries and keys, and their rotary embedding, by `jaxnorm.qk_norm_rotary`.

        q, k = QKNormRotary(theta=500_000.0)(q, k, positions)  # or cos=cos, sin=sin

    As `jaxnorm.nnx.QKNormRotary`, but `per_head` gives the parameters one row a head.
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
        scales = [calls.made_scale(self, jnp.asarray(x), axes, name) if self.normalize else None for name, x in pairs]
        return calls.rotated(self, (q, k, *scales, positions), **tables)


class _Quantized(linen.Module, kw_only=True):
    quantization: Quantization
    straight_through: bool = False

    __call__ = linen.compact(calls.Quantizes.__call__)


@explained
class QuantizedRMSNorm(_Quantized, RMSNorm, kw_only=True):  # type: ignore[misc]
    """An `RMSNorm` with a quantised result, by `jaxnorm.rms_norm_quantized`; see `jaxnorm.nnx.QuantizedRMSNorm`.

    `dtype`, the result's in flax.linen, has no effect: float32 is quantised. Unnamed, it is called after its class, as
    an `AddRMSNorm` is. `force_float32_reductions=False` is an error.
    """


@explained
class QuantizedLayerNorm(_Quantized, LayerNorm, kw_only=True):  # type: ignore[misc]
    """A `LayerNorm` with a quantised result, computed by `jaxnorm.layer_norm_quantized`; see `QuantizedRMSNorm`."""


class _Groups(linen.Module):
    """Options of GroupNorm and InstanceNorm beside Flax's fields."""

    scale_init: Callable[..., Any] = calls.default_scale_init
    activation: OfGroups | Synonym | None = field(default=None, kw_only=True)
    scale_offset: float = field(default=0.0, kw_only=True)
    implementation: Implementation | None = field(default=None, kw_only=True)

    # As of the norms of rows.
    _arguments = staticmethod(_arguments)
    _fused = staticmethod(calls.grouped)

    @staticmethod
    def _why_flax(module: Any, x: jax.Array, mask: jax.Array | None) -> str | None:
        there = calls.parameters_there(module)
        return served.why_flax_groups(module, x, mask, there, calls.dtypes(module, (x,), there))

    @linen.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        x = jnp.asarray(x)
        y = calls.grouped(self, x, mask)
        of_flax = _INSTANCE_NORM if isinstance(self, linen.InstanceNorm) else _GROUP_NORM
        return calls.activated(self, of_flax(self, x, mask=mask)) if y is None else y


@explained
class GroupNorm(_Groups, linen.GroupNorm):
    """`flax.linen.GroupNorm` with the same fields, parameters and result dtype, computed by `jaxnorm.group_norm`.

        y = GroupNorm(num_groups=32, activation="silu")(x)

    It has the options of `jaxnorm.nnx.GroupNorm`, by keyword, and kernels serve the same calls. Flax's own code also
    runs for an x without an axis of examples, and for `force_float32_reductions=False`.
    """


@explained
class InstanceNorm(_Groups, linen.InstanceNorm):
    """`flax.linen.InstanceNorm` with the same fields, parameters and result dtype: a `GroupNorm` of single channels.

    Kernels serve the last axis as `feature_axes`. All else is as for `GroupNorm`.
    """


@explained
class Embed(linen.Embed):
    """`flax.linen.Embed` with the same fields, parameter and result, computed by `jaxnorm.embedding`.

    All else is as for `jaxnorm.nnx.Embed`, with `implementation` by keyword.
    """

    implementation: Implementation | None = field(default=None, kw_only=True)

    # As of the norms of rows.
    @staticmethod
    def _arguments(inputs: Any) -> tuple[Any, ...]:
        return (inputs,)

    @staticmethod
    def _why_flax(module: Any, ids: Any) -> str | None:
        return served.why_flax_looks_up(module, module.embedding, ids)

    @staticmethod
    def _fused(module: Any, ids: Any) -> jax.Array | None:
        return calls.looked_up(module, module.embedding, ids)

    def __call__(self, inputs: jax.Array) -> jax.Array:
        rows = calls.looked_up(self, self.embedding, inputs)
        return _EMBED(self, inputs) if rows is None else rows


@explained
class GatedActivation(linen.Module, kw_only=True):
    """`activation(gate) * up`, the elementwise step of a gated MLP, by `jaxnorm.gated_activation`, without parameters.

        h = GatedActivation(activation="silu")(linen.Dense(2 * features)(x))

    The fields are the function's options.
    """

    activation: OfGate | Synonym = "silu"
    axis: int = -1
    implementation: Implementation | None = None

    def __call__(self, x: jax.Array | tuple[jax.Array, jax.Array]) -> jax.Array:
        return gated_activation(x, activation=self.activation, axis=self.axis, implementation=self.implementation)
