"""GatedActivation of `jaxnorm.nnx`."""

import jax

from jaxnorm.flax.calls import nnx
from jaxnorm.flax.explained import explained
from jaxnorm.ops.activation import Synonym
from jaxnorm.ops.gated_activation.api import gated_activation
from jaxnorm.ops.gated_activation.formula import Activation
from jaxnorm.ops.options import Implementation


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
