"""A model of `flax.linen` with linear layers in every place, for what changes such layers."""

from functools import partial

import flax.linen
import jax.numpy as jnp
from linears import FEATURES, own_dot


class ScaledDense(flax.linen.Dense):
    """A subclass that computes something else."""

    @flax.linen.compact
    def __call__(self, inputs):
        return 2 * flax.linen.Dense(self.features, name="inner")(inputs)


class NamedDense(flax.linen.Dense):
    """Flax's under another name."""


class Mixed(flax.linen.Module):
    """Layers in every place where a model may have them."""

    def setup(self):
        self.listed = [flax.linen.Dense(FEATURES), NamedDense(FEATURES, use_bias=False)]

    @flax.linen.compact
    def __call__(self, x):
        dense = partial(flax.linen.Dense, FEATURES)
        for layer in self.listed:
            x = jnp.sin(layer(x))
        x = flax.linen.LayerNorm()(dense(name="own_dot", dot_general=own_dot)(x))
        x = ScaledDense(FEATURES, name="scaled")(dense(name="own_class", dot_general_cls=lambda: own_dot)(x))
        x = x + flax.linen.DenseGeneral(FEATURES, name="general")(inputs=x) + dense(name="last")(inputs=x)
        y = flax.linen.Einsum((FEATURES, FEATURES), "...d,df->...f", name="einsum")(x)
        return y + flax.linen.Embed(4, FEATURES, name="embed")(jnp.arange(4))


# The path and class of each Dense that is changed.
CHANGED = {
    ("listed_0",): flax.linen.Dense,
    ("listed_1",): NamedDense,
    ("scaled", "inner"): flax.linen.Dense,
    ("last",): flax.linen.Dense,
}
# And of each that no change is for, with the reason.
LEFT_ALWAYS = {
    ("own_dot",): (flax.linen.Dense, "it has a dot_general of its own"),
    ("own_class",): (flax.linen.Dense, "it has a dot_general_cls of its own"),
    ("scaled",): (ScaledDense, "its __call__ is not Flax's"),
}
