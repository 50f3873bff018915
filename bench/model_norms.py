"""What computes the norms of the models that `bench model` times, the lookup and the loss."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

import jaxnorm


class Variant(NamedTuple):
    """What computes the norms, the lookup and the loss.

    None leaves norms out, their weights too; "default" is what a user gets who asks for nothing; "flax" is XLA's code
    for what Flax's modules compute. A loss is XLA's, or the kernel's of the logits, or "linear", which never has all
    logits.
    """

    norms: str | None
    # Norms of the stream add to it first, as `add_rms_norm` and `rms_norm_add_rms_norm` do; those of queries and keys
    # rotate too, as `qk_norm_rotary` does; those of a U-Net have its activation. Gates are `gated_activation`'s.
    joins: bool = False
    loss: str = "xla"
    rounds: bool = False  # RMSNorms of the stream, and the gates of an MLP, give values of float8 and their scales
    lookup: str = "xla"
    wide: bool = False  # XLA rotates and gates in float32 and rounds once, as the kernels do


VARIANTS = {
    "xla": Variant("xla"),
    "xla-float32": Variant("xla", wide=True),
    "flax": Variant("flax", lookup="flax"),
    "jaxnorm": Variant("native"),
    "jaxnorm-joint": Variant("native", joins=True),
    "jaxnorm-default-norm": Variant("default"),
    "jaxnorm-default": Variant("default", joins=True),
    "jaxnorm-default-loss": Variant("default", joins=True, loss="native"),
    "jaxnorm-default-linear-loss": Variant("default", joins=True, loss="linear"),
    "jaxnorm-float8": Variant("default", joins=True, rounds=True),
    "jaxnorm-flax-lookup": Variant("default", joins=True, loss="native", lookup="flax"),
    "jaxnorm-lookup": Variant("default", joins=True, loss="native", lookup="default"),
    "jaxnorm-layers": Variant("default", lookup="default"),  # what `replace_layers` puts in
    "none": Variant(None),
}
# What has another lookup, and what it is compared with: by the lookup alone, and by all that `replace_layers` does.
TWINS = {"jaxnorm-lookup": "jaxnorm-flax-lookup", "jaxnorm-layers": "flax"}
# Rows of a table in another dtype. The gradient of XLA's is a sum in the table's, that of Flax's in the rows'.
LOOKUPS = {
    "xla": lambda table, ids, dtype: table[ids].astype(dtype),
    "flax": lambda table, ids, dtype: jnp.take(table.astype(dtype), ids, axis=0),
    "default": lambda table, ids, dtype: jaxnorm.embedding(table, ids, dtype=dtype),
}
TO_FLOAT8 = {"quantization": jaxnorm.Quantization(jnp.float8_e4m3fn), "straight_through": True}


class Pending(NamedTuple):
    """A residual stream with what is yet to be added to it. The sum is the same stream in every variant."""

    residual: jax.Array
    part: jax.Array  # what a block gave
    post: tuple = ()  # weights of a norm of the part; () is none
    gate: jax.Array | None = None  # factor of the part


class Norms(NamedTuple):
    """What the blocks of a model call. A residual stream is an array, or `Pending` where norms add to it first."""

    stream: Callable  # the stream, weights -> y, the stream with nothing yet to be added
    closing: Callable  # the stream, weights -> y, where nothing else reads the stream
    add: Callable  # the fields of `Pending` -> the stream
    heads: Callable  # queries, keys, values, the weights of the first two, positions -> all three
    joint_heads: Callable  # the same of all three in one array
    gated: Callable  # gate and up of an MLP side by side, in one array -> activation(gate) * up
    lookup: Callable = LOOKUPS["xla"]  # a table, ids, a dtype -> rows


def norms_of(spec, variant):
    name, joins, _, rounds, lookup, wide = VARIANTS[variant]
    norms = joined(spec, name) if joins else separate(spec, name, in_float32 if wide else lambda function: function)
    norms = norms._replace(lookup=LOOKUPS[lookup])
    return norms._replace(**rounding(spec)) if rounds else norms


def in_float32(function):
    """A function of an array that is computed in float32, and whose result is rounded to the array's dtype."""
    return lambda x, *args: function(x.astype(jnp.float32), *args).astype(x.dtype)


def separate(spec, name, widened):
    """XLA adds, rotates and gates; the last two are `widened`."""
    norm = norm_of(spec, name)
    rotated = widened(lambda x, weights, positions: rotate(norm(x, weights), positions))

    def stream(x, weights):
        return norm(x, weights), x

    def add(x, part, post=(), gate=None):
        return x + (norm(part, post) if post else part if gate is None else gate * part)

    def heads(q, k, v, q_weights, k_weights, positions):
        return rotated(q, q_weights, positions), rotated(k, k_weights, positions), v

    def joint_heads(qkv, *weights_and_positions):
        ends = spec.heads, spec.heads + spec.groups
        return heads(*jnp.split(qkv, ends, axis=-2), *weights_and_positions)

    def gated(packed):
        gate, up = jnp.split(packed, 2, axis=-1)
        return getattr(jax.nn, spec.activation)(gate) * up

    return Norms(stream, norm, add, heads, joint_heads, widened(gated))


def joined(spec, name):
    """The kernels do."""
    options, norm = options_of(spec, name), norm_of(spec, name)
    pre_norm = {"rms": jaxnorm.add_rms_norm, "layer": jaxnorm.add_layer_norm}[spec.norm]
    function = jaxnorm.rms_norm_add_rms_norm if spec.sandwich else pre_norm

    def stream(x, weights):
        if not isinstance(x, Pending):
            return norm(x, weights), x
        return function(x.part, x.residual, *x.post, *weights, branch_scale=x.gate, **options)

    def heads(q, k, v, q_weights, k_weights, positions):
        return *jaxnorm.qk_norm_rotary(q, k, *q_weights, *k_weights, positions, **options), v

    def joint_heads(qkv, q_weights, k_weights, positions):
        # A decoded token has no axis of tokens: its sequences stand there.
        counts = {"heads": spec.heads, "kv_heads": spec.groups}
        return jaxnorm.qkv_norm_rotary(qkv, *q_weights, *k_weights, positions, **counts, **options)

    gated = partial(jaxnorm.gated_activation, activation=spec.activation, **implementation_of(name))
    return Norms(stream, lambda *args: stream(*args)[0], Pending, heads, joint_heads, gated)


def rounding(spec):
    """What gives float8 in place of what is joined."""
    norm = partial(jaxnorm.rms_norm_quantized, scale_offset=spec.scale_offset, **TO_FLOAT8)

    def stream(x, weights):
        if not isinstance(x, Pending):
            return norm(x, *weights).quantized, x
        return norm(x.part, *weights, residual=x.residual)[:2]

    gated = partial(jaxnorm.gated_activation_quantized, activation=spec.activation, **TO_FLOAT8)
    return {"stream": stream, "gated": gated}


def implementation_of(name):
    return {"implementation": None if name == "default" else name}


def options_of(spec, name):
    """The keywords of every norm of a row."""
    return {"scale_offset": spec.scale_offset, **implementation_of(name)}


def norm_of(spec, name):
    """A norm as a function of x and its weights. Flax's RMSNorm is the formula."""
    if name is None:
        return lambda x, weights: x
    if name == "flax" and spec.norm == "layer":
        return flax_norm
    name = "xla" if name == "flax" else name
    function = {"rms": jaxnorm.rms_norm, "layer": jaxnorm.layer_norm}[spec.norm]
    return lambda x, weights: function(x, *weights, **options_of(spec, name))


def flax_norm(x, weights, axes=-1):
    """As Flax's LayerNorm and GroupNorm have it by default, by E[x²] - mean²: all that is summed at one reading."""
    wide = x.astype(jnp.float32)
    mean, square = wide.mean(axes, keepdims=True), jnp.square(wide).mean(axes, keepdims=True)
    scale, bias = weights
    rstd = jax.lax.rsqrt(jnp.maximum(square - jnp.square(mean), 0) + 1e-6)
    return ((wide - mean) * (rstd * scale) + bias).astype(x.dtype)


def rotate(x, positions):
    """Rotary position embedding (https://arxiv.org/abs/2104.09864) of x: (..., head, feature)."""
    half = x.shape[-1] // 2
    angle = positions[..., None, None] * 10_000.0 ** (-jnp.arange(half) / half)
    sin, cos = (f(angle).astype(x.dtype) for f in (jnp.sin, jnp.cos))
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
