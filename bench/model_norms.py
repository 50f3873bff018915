"""What computes the norms of the models that `bench model` times."""

import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

import jaxnorm


class Variant(NamedTuple):
    """What computes the norms of the residual stream, those of queries and keys, and the loss.

    None leaves a norm out, its weights too; "default" is what a user gets who asks for nothing; "flax" is XLA's code
    for what Flax's modules compute. A loss is XLA's, or the kernel's of the logits, or "linear", which never has all
    logits.
    """

    stream: str | None
    head: str | None
    loss: str = "jnp"
    # The norms of the stream add to it first, as `add_rms_norm` and `rms_norm_add_rms_norm` do; those of a U-Net have
    # its activation.
    adds: bool = False
    rotates: bool = False  # those of queries and keys rotate too, as `qk_norm_rotary` does
    tunes: bool = False  # `jaxnorm.tune` chooses
    wide: bool = False  # XLA's rotation and gates are computed in float32 and rounded once, as the kernels' are
    rounds: bool = False  # RMSNorms of the stream, and the gates of an MLP, give values of float8 and their scales


VARIANTS = {
    "jnp": Variant("jnp", "jnp"),
    "jnp-float32": Variant("jnp", "jnp", wide=True),
    "flax": Variant("flax", "flax"),
    "jaxnorm": Variant("native", "native"),
    "jaxnorm-add": Variant("native", "native", adds=True),
    "jaxnorm-rotary": Variant("native", "native", adds=True, rotates=True),
    "jaxnorm-only-rotary": Variant("jnp", "native", rotates=True),
    "jaxnorm-norm-rotary": Variant("native", "native", rotates=True),
    "jaxnorm-default": Variant("default", "default", adds=True, rotates=True),
    "jaxnorm-tuned": Variant("default", "default", adds=True, rotates=True, tunes=True),
    "jaxnorm-default-loss": Variant("default", "default", "native", adds=True, rotates=True),
    "jaxnorm-default-linear-loss": Variant("default", "default", "linear", adds=True, rotates=True),
    "jaxnorm-float8": Variant("default", "default", adds=True, rotates=True, rounds=True),
    "jaxnorm-default-norm": Variant("default", "default"),
    "none": Variant(None, None),
    "jaxnorm-loss": Variant("jnp", "jnp", "native"),
    "jaxnorm-linear-loss": Variant("jnp", "jnp", "linear"),
    "jaxnorm-all": Variant("native", "native", "native", adds=True),
}


def tuned(variant, function, args):
    """What `jaxnorm.tune` chooses for a program, if the variant has it choose."""
    if not VARIANTS[variant].tunes:
        return {}
    choice = jaxnorm.tune(function, *args)
    print(choice, file=sys.stderr, flush=True)
    return choice


class Pending(NamedTuple):
    """A residual stream with what is yet to be added to it. The sum is the same stream in every variant."""

    residual: jax.Array
    part: jax.Array  # what a block gave
    post: tuple = ()  # weights of a norm of the part; () is none
    gate: jax.Array | None = None  # factor of the part

    def scaled(self):
        """The part and its gate, by XLA."""
        return self.part if self.gate is None else self.gate * self.part


class Norms(NamedTuple):
    """What the blocks of a model call. A residual stream is an array, or `Pending` where norms add to it first."""

    start: Callable  # the embedding -> the stream
    stream: Callable  # the stream, weights -> y, the stream with nothing yet to be added
    closing: Callable  # the stream, weights -> y, where nothing else reads the stream
    add: Callable  # the fields of `Pending` -> the stream
    heads: Callable  # queries, keys, values, the weights of the first two, positions -> all three
    joint_heads: Callable  # the same of all three in one array
    gated: Callable  # gate and up of an MLP side by side, in one array -> activation(gate) * up


def norms_of(spec, variant):
    given = VARIANTS[variant]
    heads = rotating_norm_of(spec, given.head) if given.rotates else heads_of(spec, given.head, given.wide)
    joint_heads = joint_norm_of(spec, given.head) if given.rotates else split_of(spec, heads)
    start, norm, add = (adding_stream_of if given.adds else stream_of)(spec, given.stream)
    gated = gated_of(spec, given.stream) if given.adds else xla_gated_of(spec, given.wide)
    norms = Norms(start, norm, lambda *stream: norm(*stream)[0], add, heads, joint_heads, gated)
    return norms._replace(stream=rounding_stream_of(spec), gated=rounding_gated_of(spec)) if given.rounds else norms


def stream_of(spec, name):
    """XLA adds: (start, stream, add)."""
    norm = norm_of(spec, name)

    def add(*pending):
        pending = Pending(*pending)
        return pending.residual + (norm(pending.part, pending.post) if pending.post else pending.scaled())

    return lambda x: x, lambda x, weights: (norm(x, weights), x), add


def adding_stream_of(spec, name):
    """The norms add: (start, stream, add)."""
    pre_norm = {"rms": jaxnorm.add_rms_norm, "layer": jaxnorm.add_layer_norm}[spec.norm]
    function = jaxnorm.rms_norm_add_rms_norm if spec.sandwich else pre_norm
    norm = norm_of(spec, name)

    def start(x):
        """In a scan the first layer finds what all others do."""
        if not spec.scan or spec.after_sum:
            return x
        post = (jnp.zeros(spec.dim),) if spec.sandwich else ()
        return Pending(x, jnp.zeros_like(x), post, jnp.zeros_like(x[:, :1]) if spec.conditioned else None)

    def stream(x, weights):
        if not isinstance(x, Pending):
            return norm(x, weights), x
        return function(x.part, x.residual, *x.post, *weights, branch_scale=x.gate, **options_of(spec, name))

    return start, stream, Pending


TO_FLOAT8 = {"quantization": jaxnorm.Quantization(jnp.float8_e4m3fn), "straight_through": True}


def rounding_stream_of(spec):
    norm = partial(jaxnorm.rms_norm_quantized, scale_offset=spec.scale_offset, **TO_FLOAT8)

    def stream(x, weights):
        return norm(x.part, *weights, residual=x.residual) if isinstance(x, Pending) else (norm(x, *weights), x)

    return stream


def rounding_gated_of(spec):
    return partial(jaxnorm.gated_activation_quantized, activation=spec.activation, **TO_FLOAT8)


def gated_of(spec, name):
    options = implementation_of(name) if name in ("default", "native") else {"implementation": "jnp"}
    return partial(jaxnorm.gated_activation, activation=spec.activation, **options)


def xla_gated_of(spec, wide):
    def gated(packed):
        gate, up = jnp.split(packed, 2, axis=-1)
        return getattr(jax.nn, spec.activation)(gate) * up

    return in_float32(gated) if wide else gated


def in_float32(function):
    """A function of an array that is computed in float32, and whose result is rounded to the array's dtype."""
    return lambda x, *args: function(x.astype(jnp.float32), *args).astype(x.dtype)


def implementation_of(name):
    return {"implementation": None if name == "default" else name}


def options_of(spec, name):
    """The keywords of every norm of a row."""
    return {"scale_offset": spec.scale_offset, **implementation_of(name)}


def flax_norm(x, weights, axes=-1):
    """As Flax's LayerNorm and GroupNorm have it by default, by E[x²] - mean²: all that is summed up at one reading."""
    wide = x.astype(jnp.float32)
    mean, square = wide.mean(axes, keepdims=True), jnp.square(wide).mean(axes, keepdims=True)
    scale, bias = weights
    rstd = jax.lax.rsqrt(jnp.maximum(square - jnp.square(mean), 0) + 1e-6)
    return ((wide - mean) * (rstd * scale) + bias).astype(x.dtype)


def norm_of(spec, name):
    """A norm as a function of x and its weights. Flax's RMSNorm is the formula."""
    if name is None:
        return lambda x, weights: x
    if name == "flax" and spec.norm == "layer":
        return flax_norm
    name = "jnp" if name == "flax" else name
    function = {"rms": jaxnorm.rms_norm, "layer": jaxnorm.layer_norm}[spec.norm]
    return lambda x, weights: function(x, *weights, **options_of(spec, name))


def heads_of(spec, name, wide):
    """The norms of queries and keys, and then the rotation."""
    norm, rotation = norm_of(spec, name), in_float32(rotate) if wide else rotate

    def heads(q, k, v, q_weights, k_weights, positions):
        q, k = norm(q, q_weights), norm(k, k_weights)
        return (rotation(q, positions), rotation(k, positions), v) if spec.rotary else (q, k, v)

    return heads


def split_of(spec, heads):
    """`heads` of the parts of one array."""
    ends = spec.heads, spec.heads + spec.groups
    return lambda qkv, *weights_and_positions: heads(*jnp.split(qkv, ends, axis=-2), *weights_and_positions)


def rotating_norm_of(spec, name):
    if not spec.rotary:
        raise SystemExit("a model without rotation has no norms that rotate")

    def heads(q, k, v, q_weights, k_weights, positions):
        return *jaxnorm.qk_norm_rotary(q, k, *q_weights, *k_weights, positions, **options_of(spec, name)), v

    return heads


def joint_norm_of(spec, name):
    counts = {"heads": spec.heads, "kv_heads": spec.groups}

    def heads(qkv, q_weights, k_weights, positions):
        # A decoded token has no axis of tokens: its sequences stand there.
        scales = *q_weights, *k_weights
        return jaxnorm.qkv_norm_rotary(qkv, *scales, positions, **counts, **options_of(spec, name))

    return heads


def rotate(x, positions):
    """Rotary position embedding (https://arxiv.org/abs/2104.09864) of x: (..., head, feature)."""
    half = x.shape[-1] // 2
    angle = positions[..., None, None] * 10_000.0 ** (-jnp.arange(half) / half)
    sin, cos = (f(angle).astype(x.dtype) for f in (jnp.sin, jnp.cos))
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
