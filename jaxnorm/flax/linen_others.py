"""GroupNorm, InstanceNorm, Embed and GatedActivation of `jaxnorm.linen`."""

import inspect
from collections.abc import Callable
from dataclasses import field
from typing import Any

import jax
import jax.numpy as jnp

from jaxnorm.flax import calls, group_calls, linen_calls
from jaxnorm.flax.calls import linen
from jaxnorm.flax.replacement import explained
from jaxnorm.ops.activation import Synonym
from jaxnorm.ops.gated_activation.api import gated_activation
from jaxnorm.ops.gated_activation.formula import Activation as OfGate
from jaxnorm.ops.group_norm.api import group_norm
from jaxnorm.ops.group_norm.formula import Activation
from jaxnorm.ops.options import Implementation

# Flax's functions, as in `jaxnorm.linen`.
_GROUP_NORM = inspect.unwrap(linen.GroupNorm.__call__)
_INSTANCE_NORM = inspect.unwrap(linen.InstanceNorm.__call__)
_EMBED = inspect.unwrap(linen.Embed.__call__)


def _why_flax(module: Any, x: jax.Array, mask: jax.Array | None) -> str | None:
    """Why Flax's own code computes `module(x)`."""
    return group_calls.why_flax(module, x, mask, linen_calls.given(module), linen_calls.dtypes(module, x))


def grouped(
    module: Any,
    x: jax.Array,
    mask: jax.Array | None,
    parameters_of: Callable[..., Any] = linen_calls.parameters,
    **more: Any,
) -> jax.Array | None:
    """`group_norm` of x, called as `module` and `more` say; `parameters_of` as of `linen_calls.fused`.

    None, with no parameter made yet, where Flax's own code computes it.
    """
    if not group_calls.is_called(module, x, mask, _why_flax(module, x, mask)):
        return None
    keywords = group_calls.keywords(module, x.ndim) | more
    scale, bias = parameters_of(module, x, (keywords["channel_axis"],))
    dtype = linen.dtypes.canonicalize_dtype(x, scale, bias, dtype=module.dtype)
    return group_norm(x, scale, bias, out_dtype=dtype, **keywords)


class _Groups(linen.Module):
    """What a GroupNorm and an InstanceNorm have beside Flax's fields."""

    scale_init: Callable[..., Any] = linen_calls.default_scale_init
    activation: Activation | Synonym | None = field(default=None, kw_only=True)
    scale_offset: float = field(default=0.0, kw_only=True)
    implementation: Implementation | None = field(default=None, kw_only=True)

    _arguments = staticmethod(linen_calls.arguments)
    _why_flax = staticmethod(_why_flax)
    _fused = staticmethod(grouped)


@explained
class GroupNorm(_Groups, linen.GroupNorm):
    """`flax.linen.GroupNorm` with the same fields, parameters and result dtype, computed by `jaxnorm.group_norm`.

        y = GroupNorm(num_groups=32, activation="silu")(x)

    Options and the calls that kernels serve are those of `jaxnorm.nnx.GroupNorm`, the options by keyword. An x without
    an axis of examples and `force_float32_reductions=False` are computed by Flax's own code as well.
    """

    @linen.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        x = jnp.asarray(x)
        y = grouped(self, x, mask)
        return group_calls.activated(self, _GROUP_NORM(self, x, mask=mask)) if y is None else y


@explained
class InstanceNorm(_Groups, linen.InstanceNorm):
    """`flax.linen.InstanceNorm` with the same fields, parameters and result dtype: a `GroupNorm` of single channels.

    The kernels serve the calls whose `feature_axes` are the last axis. Fields and all else are as of `GroupNorm`.
    """

    @linen.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        x = jnp.asarray(x)
        y = grouped(self, x, mask)
        return group_calls.activated(self, _INSTANCE_NORM(self, x, mask=mask)) if y is None else y


@explained
class Embed(linen.Embed):
    """`flax.linen.Embed` with the same fields, parameter and result, by `jaxnorm.embedding`.

    All else is as of `jaxnorm.nnx.Embed`, `implementation` by keyword.
    """

    implementation: Implementation | None = field(default=None, kw_only=True)

    # As of the norms.
    @staticmethod
    def _arguments(inputs: Any) -> tuple[Any, ...]:
        return (inputs,)

    @staticmethod
    def _why_flax(module: Any, ids: Any) -> str | None:
        return calls.why_flax_looks_up(module, module.embedding, ids)

    @staticmethod
    def _fused(module: Any, ids: Any) -> jax.Array | None:
        return calls.looked_up(module, module.embedding, ids)

    def __call__(self, inputs: jax.Array) -> jax.Array:
        rows = calls.looked_up(self, self.embedding, inputs)
        return _EMBED(self, inputs) if rows is None else rows


@explained
class GatedActivation(linen.Module, kw_only=True):
    """An activation of a gate, times what it gates: `jaxnorm.gated_activation`, without parameters.

        h = GatedActivation(activation="silu")(linen.Dense(2 * features)(x))

    The fields are the function's options.
    """

    activation: OfGate | Synonym = "silu"
    axis: int = -1
    implementation: Implementation | None = None

    def __call__(self, x: jax.Array | tuple[jax.Array, jax.Array]) -> jax.Array:
        return gated_activation(x, activation=self.activation, axis=self.axis, implementation=self.implementation)
