"""Embed and GatedActivation of `jaxnorm.nnx`."""

from typing import Any

import jax

from jaxnorm.flax import calls
from jaxnorm.flax.calls import nnx
from jaxnorm.flax.explained import explained
from jaxnorm.ops.activation import Synonym
from jaxnorm.ops.gated_activation.api import gated_activation
from jaxnorm.ops.gated_activation.formula import Activation
from jaxnorm.ops.options import Implementation


@explained
class Embed(nnx.Embed):
    """`flax.nnx.Embed` with the same constructor, parameter and result, by `jaxnorm.embedding`.

        embed = Embed(50_257, 768, dtype=jnp.bfloat16, rngs=rngs)
        x = embed(ids)
        logits = embed.attend(x)

    The rows have Flax's bits, with NaN where an id is out of range; negative ids count from the end. Flax rounds the
    table to `dtype` and sums its gradient in that. Here the rows are rounded, and the gradient is summed in float32 and
    rounded once, to the table's dtype; so it is of `num_embeddings=1`, whose row is broadcast to all ids, as in Flax.
    `attend` is Flax's.

    The constructor also takes `implementation` of the function. A `promote_dtype` of one's own, and dtypes other than
    float32, bfloat16 and float16, are computed by Flax's own code, and are errors with `implementation="native"`.
    """

    # An Embed of Flax that became one of these has no attribute for it.
    implementation: Implementation | None = None

    _why_never = staticmethod(calls.why_never_looked_up)

    def __init__(
        self, num_embeddings: int, features: int, *, implementation: Implementation | None = None, **flax: Any
    ) -> None:
        super().__init__(num_embeddings, features, **flax)
        self.implementation = implementation

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        rows = calls.looked_up(self, self.embedding[...], inputs, out_sharding)
        return super().__call__(inputs, out_sharding) if rows is None else rows


@explained
class GatedActivation(nnx.Module):
    """An activation of a gate, times what it gates: `jaxnorm.gated_activation`, without parameters.

        gate = GatedActivation(activation="silu")
        h = gate(linear(x))

    The options are the function's.
    """

    def __init__(
        self, *, activation: Activation | Synonym = "silu", axis: int = -1, implementation: Implementation | None = None
    ) -> None:
        self.activation, self.axis, self.implementation = activation, axis, implementation

    def __call__(self, x: jax.Array | tuple[jax.Array, jax.Array]) -> jax.Array:
        return gated_activation(x, activation=self.activation, axis=self.axis, implementation=self.implementation)
