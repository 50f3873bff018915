"""A model of `flax.nnx` with norms in every place, for what replaces them."""

import flax.nnx
import jax
import jax.numpy as jnp
from cases import draw

import jaxnorm

DIMS = (3, 4, 8)
FEATURES = DIMS[-1]


def gemma_formula(x, scale):
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * (1 + scale)


class GemmaNorm(flax.nnx.Module):
    """A norm of a model's own."""

    def __init__(self, rngs):
        self.scale = flax.nnx.Param(jax.random.normal(rngs.params(), (FEATURES,)))

    def __call__(self, x):
        return gemma_formula(x, self.scale[...])


class NamedNorm(flax.nnx.RMSNorm):
    """Flax's under another name and with another constructor."""

    def __init__(self, rngs):
        super().__init__(FEATURES, rngs=rngs)


class CentredNorm(flax.nnx.RMSNorm):
    """A subclass that computes something else."""

    def __call__(self, x, mask=None):
        return super().__call__(x - x.mean(-1, keepdims=True), mask)


class Mixed(flax.nnx.Module):
    """Norms in every place where a model may have one."""

    def __init__(self, rngs):
        self.attention = flax.nnx.MultiHeadAttention(2, FEATURES, normalize_qk=True, decode=False, rngs=rngs)
        self.listed = flax.nnx.List([flax.nnx.RMSNorm(FEATURES, rngs=rngs), NamedNorm(rngs)])
        self.by_name = flax.nnx.Dict(own=GemmaNorm(rngs), norm=flax.nnx.LayerNorm(FEATURES, rngs=rngs))
        self.sequence = flax.nnx.Sequential(flax.nnx.LayerNorm(FEATURES, rngs=rngs), jnp.tanh)
        self.shared = self.listed[0]
        self.groups = flax.nnx.GroupNorm(FEATURES, num_groups=2, rngs=rngs)
        self.batch = flax.nnx.BatchNorm(FEATURES, use_running_average=True, rngs=rngs)
        self.centred = CentredNorm(FEATURES, rngs=rngs)
        self.heads = flax.nnx.RMSNorm(FEATURES, feature_axes=-2, reduction_axes=-2, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.listed[0](x))
        x = x + self.sequence(self.listed[1](x)) + self.by_name.norm(self.by_name.own(x))
        return self.shared(self.centred(self.batch(self.groups(x))))


def gemma_norm(norm, x):
    return jaxnorm.rms_norm(x, norm.scale[...], scale_offset=1.0)


CUSTOM = {GemmaNorm: gemma_norm}
REPLACED = {
    ("attention", "query_ln"): flax.nnx.LayerNorm,
    ("attention", "key_ln"): flax.nnx.LayerNorm,
    ("listed", 0): flax.nnx.RMSNorm,
    ("listed", 1): NamedNorm,
    ("by_name", "norm"): flax.nnx.LayerNorm,
    ("by_name", "own"): GemmaNorm,
    ("sequence", "layers", 0): flax.nnx.LayerNorm,
    ("groups",): flax.nnx.GroupNorm,
}


def why_own(line):
    """Why a class of a model's own is left, with the line of a mapping."""
    return (
        f"its __call__ is not Flax's: if it is a norm, say what it computes, as by custom={{{line}}}, and check that "
        f"by compare"
    )


LEFT = {
    ("batch",): (flax.nnx.BatchNorm, "jaxnorm has no such norm"),
    ("centred",): (CentredNorm, why_own("CentredNorm: lambda norm, x: jaxnorm.rms_norm(x, norm.scale[...])")),
    ("heads",): (flax.nnx.RMSNorm, "no kernel serves reduction_axes=(-2,) with feature_axes=(-2,)"),
}


def mixed():
    return Mixed(flax.nnx.Rngs(0))


def loss(model, x):
    return (model(x) * draw("dy", DIMS)).sum()
