"""Models of Flax's two APIs and of Equinox with norms and embeddings in every place, for what replaces them."""

import equinox as eqx
import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
from cases import draw
from library_models import DIMS, FEATURES, EquinoxModel, NnxModel, linen_model
from native import native_calls

import jaxnorm


def gemma_formula(x, scale):
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * (1 + scale)


class GemmaNorm(flax.nnx.Module):
    """A norm of a model's own."""

    def __init__(self, rngs):
        self.scale = flax.nnx.Param(jax.random.normal(rngs.params(), (FEATURES,)))

    def __call__(self, x):
        return gemma_formula(x, self.scale[...])


class NamedNorm(flax.nnx.RMSNorm):
    def __init__(self, rngs):
        super().__init__(FEATURES, rngs=rngs)


class CentredNorm(flax.nnx.RMSNorm):
    def __call__(self, x, mask=None):
        return super().__call__(x - x.mean(-1, keepdims=True), mask)


class NamedEmbed(flax.nnx.Embed):
    def __init__(self, rngs):
        super().__init__(DIMS[1], FEATURES, rngs=rngs)


class ScaledEmbed(flax.nnx.Embed):
    def __call__(self, inputs, out_sharding=None):
        return 2 * super().__call__(inputs, out_sharding)


class Mixed(flax.nnx.Module):
    """Norms and embeddings in every place where a model may have one."""

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
        self.embed = flax.nnx.Embed(DIMS[1], FEATURES, rngs=rngs)
        self.embeds = flax.nnx.List([NamedEmbed(rngs), ScaledEmbed(DIMS[1], FEATURES, rngs=rngs)])

    def __call__(self, x):
        positions = jnp.arange(x.shape[-2])
        x = x + self.embed(positions) + self.embeds[0](positions) + self.embeds[1](positions)
        x = x + self.attention(self.listed[0](x))
        x = x + self.sequence(self.listed[1](x)) + self.by_name.norm(self.by_name.own(x))
        return self.shared(self.centred(self.batch(self.groups(x))))


def gemma_norm(norm, x):
    return jaxnorm.rms_norm(x, norm.scale[...], scale_offset=1.0)


CUSTOM = {GemmaNorm: gemma_norm}
REPLACED = {("attention", "query_ln"): flax.nnx.LayerNorm, ("attention", "key_ln"): flax.nnx.LayerNorm}
REPLACED |= {("listed", 0): flax.nnx.RMSNorm, ("listed", 1): NamedNorm, ("by_name", "norm"): flax.nnx.LayerNorm}
REPLACED |= {("by_name", "own"): GemmaNorm, ("sequence", "layers", 0): flax.nnx.LayerNorm}
REPLACED |= {("groups",): flax.nnx.GroupNorm, ("embed",): flax.nnx.Embed, ("embeds", 0): NamedEmbed}


def why_own(line):
    """Why a class of a model's own is left, with the line of a mapping."""
    return (
        f"its __call__ is not Flax's: if it is a norm, say what it computes, as by custom={{{line}}}, and check that "
        f"by compare_layers"
    )


_OWN_CALL = "its __call__ is not Flax's"
LEFT = {
    ("embeds", 1): (ScaledEmbed, _OWN_CALL),
    ("batch",): (flax.nnx.BatchNorm, "jaxnorm has no such norm"),
    ("centred",): (CentredNorm, why_own("CentredNorm: lambda norm, x: jaxnorm.rms_norm(x, norm.scale[...])")),
    ("heads",): (flax.nnx.RMSNorm, "no kernel serves reduction_axes=(-2,) with feature_axes=(-2,)"),
}


def mixed():
    return Mixed(flax.nnx.Rngs(0))


def loss(model, x):
    return (model(x) * draw("dy", DIMS)).sum()


class LinenGemmaNorm(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x):
        return gemma_formula(x, self.param("scale", flax.linen.initializers.normal(), x.shape[-1:]))


class LinenNamedNorm(flax.linen.LayerNorm):
    """Flax's under another name."""


class LinenScaledEmbed(flax.linen.Embed):
    def __call__(self, inputs):
        return 2 * super().__call__(inputs)


class LinenMixed(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x):
        h = flax.linen.RMSNorm()(x)
        x = x + flax.linen.MultiHeadDotProductAttention(2, normalize_qk=True, name="attention")(h)
        x = LinenNamedNorm()(LinenGemmaNorm(name="own")(x))
        x = flax.linen.GroupNorm(2, name="groups")(x)
        x = flax.linen.BatchNorm(use_running_average=True, name="batch")(x)
        x = flax.linen.GroupNorm(2, name="masked_groups")(x, mask=x > 0)
        x = flax.linen.LayerNorm(name="masked")(x, mask=x > 0)
        positions = jnp.arange(x.shape[-2])
        return x + sum(cls(x.shape[-2], FEATURES)(positions) for cls in (flax.linen.Embed, LinenScaledEmbed))


def linen_function(norm, x):
    scale = norm.param("scale", flax.linen.initializers.normal(), x.shape[-1:])
    return jaxnorm.rms_norm(x, scale, scale_offset=1.0)


LINEN_CUSTOM = {LinenGemmaNorm: linen_function}
LINEN_REPLACED = {("Embed_0",): flax.linen.Embed, ("RMSNorm_0",): flax.linen.RMSNorm}
LINEN_REPLACED |= {("attention", "query_ln"): flax.linen.LayerNorm, ("attention", "key_ln"): flax.linen.LayerNorm}
LINEN_REPLACED |= {("LinenNamedNorm_0",): LinenNamedNorm, ("own",): LinenGemmaNorm, ("groups",): flax.linen.GroupNorm}
LINEN_LEFT = {
    ("LinenScaledEmbed_0",): (LinenScaledEmbed, _OWN_CALL),
    ("batch",): (flax.linen.BatchNorm, "jaxnorm has no such norm"),
    ("masked",): (flax.linen.LayerNorm, "no kernel serves a mask"),
    ("masked_groups",): (flax.linen.GroupNorm, "no kernel serves a mask"),
}


class OwnNorm(eqx.Module):
    def __call__(self, x):
        return x


class SubNorm(eqx.nn.RMSNorm):
    pass


class SubEmbedding(eqx.nn.Embedding):
    pass


class NormedBlock(eqx.Module):
    """A module with norms, called one."""

    inner: eqx.nn.LayerNorm


class EquinoxMixed(eqx.Module):
    norm: eqx.nn.RMSNorm
    listed: list
    named: dict
    block: NormedBlock
    batch: eqx.nn.BatchNorm
    mlp: eqx.nn.MLP
    embedding: eqx.nn.Embedding
    sub_embedding: SubEmbedding

    def __init__(self, key):
        self.norm, self.block = eqx.nn.RMSNorm(FEATURES), NormedBlock(eqx.nn.LayerNorm(FEATURES))
        self.listed = [eqx.nn.LayerNorm(FEATURES), jnp.tanh, eqx.nn.GroupNorm(4, FEATURES)]
        integers = eqx.nn.RMSNorm(FEATURES, dtype=jnp.int32)
        self.named = {"a": eqx.nn.RMSNorm(FEATURES), "own": OwnNorm(), "sub": SubNorm(FEATURES), "integers": integers}
        self.batch = eqx.nn.BatchNorm(FEATURES, "batch", mode="batch")
        self.mlp = eqx.nn.MLP(FEATURES, FEATURES, 2 * FEATURES, 1, key=key)
        self.embedding, self.sub_embedding = (cls(4, FEATURES, key=key) for cls in (eqx.nn.Embedding, SubEmbedding))

    def __call__(self, x):
        x = x + self.embedding(jnp.int32(3)) + self.sub_embedding(jnp.int32(0))
        x = x + self.mlp(self.listed[2](self.listed[0](self.norm(x))))
        return self.block.inner(self.named["a"](x))


EQUINOX_REPLACED = {("norm",): eqx.nn.RMSNorm, ("listed", 0): eqx.nn.LayerNorm, ("listed", 2): eqx.nn.GroupNorm}
EQUINOX_REPLACED |= {("named", "a"): eqx.nn.RMSNorm, ("block", "inner"): eqx.nn.LayerNorm}
EQUINOX_REPLACED |= {("embedding",): eqx.nn.Embedding}
_OWN = "it is a class of the model's own"
EQUINOX_LEFT = {
    ("block",): (NormedBlock, _OWN),
    ("named", "own"): (OwnNorm, _OWN),
    ("named", "sub"): (SubNorm, f"{_OWN}: derive SubNorm from jaxnorm.equinox.RMSNorm"),
    ("sub_embedding",): (SubEmbedding, f"{_OWN}: derive SubEmbedding from jaxnorm.equinox.Embedding"),
    ("batch",): (eqx.nn.BatchNorm, "jaxnorm has no such norm"),
    ("named", "integers"): (eqx.nn.RMSNorm, "no kernel serves int32"),
}


def _calls(**counts):
    return {name: count for kind, fwd in counts.items() for name, count in native_calls(kind, fwd=fwd).items()}


MIXED = {
    "nnx": lambda: NnxModel(mixed()),
    "linen": lambda: linen_model(LinenMixed()),
    "equinox": lambda: EquinoxModel(EquinoxMixed(jax.random.key(0))),
}
# What `replaced` is given beside a library's model, what is replaced, what is left, and the native calls then.
LIBRARIES = {
    # The shared norm runs twice.
    "nnx": ([CUSTOM], REPLACED, LEFT, _calls(rms=4, layer=4, group=1)),
    "linen": ([LINEN_CUSTOM], LINEN_REPLACED, LINEN_LEFT, _calls(rms=2, layer=3, group=1)),
    "equinox": ([], EQUINOX_REPLACED, EQUINOX_LEFT, _calls(rms=2, layer=2, group=1)),
}
