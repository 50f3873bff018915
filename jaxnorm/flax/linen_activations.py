"""GatedActivation of `jaxnorm.linen`."""

import jax

from jaxnorm.flax.calls import linen
from jaxnorm.flax.explained import explained
from jaxnorm.ops.activation import Synonym
from jaxnorm.ops.gated_activation.api import gated_activation
from jaxnorm.ops.gated_activation.formula import Activation
from jaxnorm.ops.options import Implementation


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
