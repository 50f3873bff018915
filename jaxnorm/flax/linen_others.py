"""Embed and GatedActivation of `jaxnorm.linen`."""

import inspect
from dataclasses import field
from typing import Any

import jax

from jaxnorm.flax import calls
from jaxnorm.flax.calls import linen
from jaxnorm.flax.explained import explained
from jaxnorm.ops.activation import Synonym
from jaxnorm.ops.gated_activation.api import gated_activation
from jaxnorm.ops.gated_activation.formula import Activation
from jaxnorm.ops.options import Implementation

# Flax's function, as in `jaxnorm.linen`.
_EMBED = inspect.unwrap(linen.Embed.__call__)


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

    activation: Activation | Synonym = "silu"
    axis: int = -1
    implementation: Implementation | None = None

    def __call__(self, x: jax.Array | tuple[jax.Array, jax.Array]) -> jax.Array:
        return gated_activation(x, activation=self.activation, axis=self.axis, implementation=self.implementation)
