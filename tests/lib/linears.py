"""A model of `flax.nnx` with linear layers in every place, for what changes such layers."""

from functools import partial

import flax.nnx
import jax
import jax.numpy as jnp

DIMS = (3, 4, 16)
FEATURES = DIMS[-1]

own_dot = partial(jax.lax.dot_general, precision="highest")


def own_promotion(arrays, *, dtype):
    return arrays


class NamedLinear(flax.nnx.Linear):
    """Flax's under another name and with another constructor."""

    def __init__(self, rngs):
        super().__init__(FEATURES, FEATURES, rngs=rngs)


class ScaledLinear(flax.nnx.Linear):
    """A subclass that computes something else."""

    def __call__(self, x):
        return 2 * super().__call__(x)


class Mixed(flax.nnx.Module):
    """Layers in every place where a model may have them."""

    def __init__(self, rngs):
        linear = partial(flax.nnx.Linear, FEATURES, FEATURES, rngs=rngs)
        self.listed = flax.nnx.List([linear(), NamedLinear(rngs)])
        self.by_name = flax.nnx.Dict(inner=linear(use_bias=False))
        self.sequence = flax.nnx.Sequential(linear(), jnp.tanh)
        self.shared = self.listed[0]
        self.norm = flax.nnx.RMSNorm(FEATURES, rngs=rngs)
        self.general = flax.nnx.LinearGeneral(FEATURES, FEATURES, rngs=rngs)
        self.scaled = ScaledLinear(FEATURES, FEATURES, rngs=rngs)
        self.lora = flax.nnx.LoRALinear(FEATURES, FEATURES, lora_rank=2, rngs=rngs)
        self.own_dot = linear(dot_general=own_dot)
        self.own_promotion = linear(promote_dtype=own_promotion)
        self.complex = linear(param_dtype=jnp.complex64)

    def __call__(self, x):
        x = x + self.listed[1](jnp.sin(self.listed[0](self.norm(x))))
        return self.shared(self.by_name.inner(self.sequence(x)))


# The path and class of each that is changed.
CHANGED = {
    ("listed", 0): flax.nnx.Linear,
    ("listed", 1): NamedLinear,
    ("by_name", "inner"): flax.nnx.Linear,
    ("sequence", "layers", 0): flax.nnx.Linear,
}
# And of each that is left, with the reason; for `general` it depends on the change.
LEFT = {
    ("scaled",): (ScaledLinear, "its __call__ is not Flax's"),
    ("lora",): (flax.nnx.LoRALinear, "its __call__ is not Flax's"),
    ("own_dot",): (flax.nnx.Linear, "it has a dot_general of its own"),
    ("own_promotion",): (flax.nnx.Linear, "it has a promote_dtype of its own"),
    ("complex",): (flax.nnx.Linear, "it is of complex64"),
}


def mixed():
    return Mixed(flax.nnx.Rngs(0))


@flax.nnx.split_rngs(splits=3)
@flax.nnx.vmap
def stacked(rngs):
    return flax.nnx.Linear(FEATURES, FEATURES, rngs=rngs)
