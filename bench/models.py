"""The models that `bench model` times: transformers as plain functions of their parameters.

Activations are bfloat16, or what `Spec.dtype` says; matrices are float32 and cast to that where they are used; the
norms' weights stay float32, as in the model hubs. Query, key and value are three products, so that a norm over heads
reads a whole array, or one joint product, of which XLA's fusion and `qkv_norm_rotary` read each in place.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

import jaxnorm
from bench import model_norms

PATCH = 768  # features of an image's 16 x 16 patch
RATE = 1e-4  # of the update: the weights, and with them the power that a product draws, stay what they were


def wide_product(x, matrix):
    return x @ matrix.astype(x.dtype)


@dataclass(frozen=True)
class Spec:
    """A model and its batch, and how its layers are compiled."""

    name: str
    norm: str  # "rms" or "layer", the latter with a bias
    language: bool  # reads tokens, and is causal
    layers: int
    dim: int
    heads: int
    hidden: int
    batch: int
    tokens: int
    classes: int
    dtype: str = "bfloat16"  # of activations
    attention: str | Callable = "xla"  # `jax.nn`'s implementation, or a function of queries, keys and values
    product: Callable = wide_product  # of x and a matrix
    kv_heads: int | None = None  # of keys and values, each for a group of queries; None is as many as heads
    activation: str = "silu"  # of the MLP
    packed: bool = False  # gate and up of a gated MLP are one product, side by side
    joint: bool = False  # queries, keys and values are one product
    scale_offset: float = 0.0  # what norms add to their scales
    sandwich: bool = False  # a norm of what attention and MLP give as well, before it is added to the stream
    after_sum: bool = False  # each norm comes after an addition and is the next stream, as in BERT: post-norm
    conditioned: bool = False  # scales and shifts of the norms, and gates, from a vector for each example: adaLN-Zero
    learned: bool = False  # the positions of a language model are learned and added, as in GPT-2

    @property
    def head_size(self):
        return self.dim // self.heads

    @property
    def groups(self):
        return self.kv_heads or self.heads

    @property
    def rotates(self):
        """Queries and keys are normalised per head and rotated, and the MLP is gated."""
        return self.language and not self.learned


LLAMA = Spec("Llama-like", "rms", True, 8, 2048, 16, 8192, batch=4, tokens=2048, classes=1024)
LLAMA_PACKED = replace(LLAMA, name="Llama-like, packed", packed=True)
LLAMA_JOINT = replace(LLAMA_PACKED, name="Llama-like, joint", joint=True, classes=32000)
QWEN = replace(LLAMA_JOINT, name="Qwen-like", dim=2560, heads=20, kv_heads=4, hidden=9728, classes=151936)
GEMMA = replace(LLAMA, name="Gemma-like", heads=8, kv_heads=4, activation="gelu", scale_offset=1.0, sandwich=True)
# Half the layers of ViT-L/16.
VIT = Spec("ViT-like", "layer", False, 12, 1024, 16, 4096, batch=64, tokens=197, classes=1000, activation="gelu")
GPT2 = replace(
    VIT, name="GPT-2-like", language=True, dim=768, heads=12, hidden=3072, tokens=1024, classes=50257, learned=True
)
# Half the layers of BERT large, whose input is the patches of an image here.
BERT = replace(VIT, name="BERT-like", batch=32, tokens=512, after_sum=True)
# Less than half the layers of DiT-XL/2, at 256 x 256 pixels.
DIT = replace(VIT, name="DiT-like", dim=1152, hidden=4608, batch=32, tokens=256, conditioned=True)


def small(spec):
    """The same code at the size of a toy."""
    heads = {"heads": 4, "kv_heads": 2} if spec.kv_heads else {"heads": 2}
    return replace(spec, layers=2, dim=64, hidden=96, batch=16, tokens=12, classes=32, **heads)


def random_key(seed):
    """Of the generator that compiles fastest."""
    return jax.random.key(seed, impl="rbg")


def init(spec, seed=0):
    """The parameters: products keep the size of activations, so that no variant meets zeros or infinities.

    Gates are random for the same reason, though adaLN-Zero starts them at zero.
    """
    keys = iter(jax.random.split(random_key(seed), 4 + 8 * spec.layers))

    def matrix(rows, cols, gain=1.0):
        return gain / math.sqrt(rows) * jax.random.normal(next(keys), (rows, cols))

    def weights(cols):
        scale = jnp.full(cols, 1 - spec.scale_offset)
        return (scale,) if spec.norm == "rms" else (scale, jnp.zeros(cols))

    def layer():
        dim, hidden, gain = spec.dim, spec.hidden, 1 / math.sqrt(2 * spec.layers)
        if spec.conditioned:
            stream = {"modulation": matrix(dim, 6 * dim)}
        else:
            post = ["attention_post_norm", "mlp_post_norm"] if spec.sandwich else []
            stream = {name: weights(dim) for name in ("attention_norm", "mlp_norm", *post)}
        head = {name: weights(spec.head_size) for name in ("query_norm", "key_norm")} if spec.rotates else {}
        ups = {"gate_up": 2 * hidden} if spec.packed else {"gate": hidden, "up": hidden}
        ups = {name: matrix(dim, cols) for name, cols in ups.items() if spec.rotates or name == "up"}
        heads = {"query": spec.heads, "key": spec.groups, "value": spec.groups}
        heads = {"qkv": sum(heads.values())} if spec.joint else heads
        products = {name: matrix(dim, count * spec.head_size) for name, count in heads.items()}
        joins = {"out": matrix(dim, dim, gain), "down": matrix(hidden, dim, gain)}
        return {**stream, **head, **ups, **products, **joins}

    def table(rows):
        return matrix(rows, spec.dim, math.sqrt(rows))

    return {
        "embed": table(spec.classes) if spec.language else matrix(PATCH, spec.dim),
        **({"positions": table(spec.tokens)} if spec.learned else {}),
        "layers": [layer() for _ in range(spec.layers)],
        "norm": matrix(spec.dim, 2 * spec.dim) if spec.conditioned else weights(spec.dim),
        "head": matrix(spec.dim, spec.classes),
    }


def batch(spec, seed=1):
    """Random inputs and targets: a class for each token of a language model, one for each image.

    Tokens are log-uniform, targets uniform. The inputs of a conditioned model are patches and a vector for each image.
    """
    keys = jax.random.split(random_key(seed), 3)
    dims = (spec.batch, spec.tokens)
    if spec.language:
        return log_uniform(keys[0], dims, spec.classes), jax.random.randint(keys[1], dims, 0, spec.classes)
    patches = jax.random.normal(keys[0], (*dims, PATCH), spec.dtype)
    condition = jax.random.normal(keys[2], (spec.batch, spec.dim), spec.dtype)
    inputs = (patches, condition) if spec.conditioned else patches
    return inputs, jax.random.randint(keys[1], dims[:1], 0, spec.classes)


def log_uniform(key, dims, classes):
    """Ids whose frequencies fall about as those of words do: exp(u) - 1, for u uniform in [0, log(classes))."""
    return jnp.exp(jax.random.uniform(key, dims, maxval=math.log(classes))).astype(jnp.int32) - 1


class Around(NamedTuple):
    """What stands around attention or an MLP."""

    norm: tuple  # weights of the norm of what it reads or, where norms come after the sum, of that
    post: tuple = ()  # weights of a norm of what it gives; () is none
    gate: jax.Array | None = None  # factor of what it gives


def modulations(spec, condition, matrix):
    """The shifts, scales and gates that a condition (batch, dim) asks for, each (batch, 1, dim).

    Source: adaLN-Zero, Peebles and Xie, Scalable Diffusion Models with Transformers, https://arxiv.org/abs/2212.09748.
    """
    joint = spec.product(jax.nn.silu(condition), matrix)[:, None, :]
    return jnp.split(joint, joint.shape[-1] // condition.shape[-1], axis=-1)


def adaptive(shift, scale):
    """The weights of a norm that is modulated, `norm(x) * (1 + scale) + shift`: float32, as those of every norm."""
    return 1 + scale.astype(jnp.float32), shift.astype(jnp.float32)


def arounds(spec, layer, condition):
    """Of attention, and of the MLP."""
    if not spec.conditioned:
        return [Around(layer[f"{name}_norm"], layer.get(f"{name}_post_norm", ())) for name in ("attention", "mlp")]
    parts = modulations(spec, condition, layer["modulation"])
    return [Around(adaptive(shift, scale), gate=gate) for shift, scale, gate in (parts[:3], parts[3:])]


def block(spec, norms, layer, stream, attend, positions=None, condition=None):
    """One layer: the next stream, and what `attend` keeps besides its result."""

    def attention(y):
        names = ("qkv",) if spec.joint else ("query", "key", "value")
        products = [spec.product(y, layer[name]) for name in names]
        heads = [product.reshape(*product.shape[:-1], -1, spec.head_size) for product in products]
        if spec.rotates:
            rotate = norms.joint_heads if spec.joint else norms.heads
            heads = [*rotate(*heads, layer["query_norm"], layer["key_norm"], positions)]
        result, kept = attend(*heads)
        return spec.product(result.reshape(*heads[-1].shape[:-2], -1), layer["out"]), kept

    def mlp(y):
        if spec.packed:
            y = norms.gated(spec.product(y, layer["gate_up"]))
        else:
            activation, up = getattr(jax.nn, spec.activation), spec.product(y, layer["up"])
            y = activation(spec.product(y, layer["gate"])) * up if spec.rotates else activation(up)
        return spec.product(y, layer["down"]), None

    around_attention, around_mlp = arounds(spec, layer, condition)
    stream, kept = _half(spec, norms, around_attention, stream, attention)
    stream, _ = _half(spec, norms, around_mlp, stream, mlp)
    return stream, kept


def _half(spec, norms, around, stream, apply):
    y, x = (stream, stream) if spec.after_sum else norms.stream(stream, around.norm)
    part, kept = apply(y)
    stream = norms.add(x, part, around.post, around.gate)
    return norms.closing(stream, around.norm) if spec.after_sum else stream, kept


def hidden(spec, norms, params, inputs):
    """What the layers and the last norm make of the inputs. Norms after sums have their first one before the layers."""
    inputs, condition = inputs if spec.conditioned else (inputs, None)
    positions = jnp.arange(spec.tokens)

    attention = spec.attention
    if not callable(attention):
        attention = functools.partial(jax.nn.dot_product_attention, is_causal=spec.language, implementation=attention)

    def attend(q, k, v):
        return attention(q, k, v), None

    embed = params["embed"]
    stream = norms.lookup(embed, inputs, spec.dtype) if spec.language else spec.product(inputs, embed)
    if spec.learned:
        stream = stream + params["positions"].astype(stream.dtype)
    if spec.after_sum:
        stream = norms.closing(stream, params["norm"])
    for layer in params["layers"]:
        stream, _ = block(spec, norms, layer, stream, attend, positions, condition)
    if spec.after_sum:
        return stream
    weights = params["norm"]
    if spec.conditioned:
        weights = adaptive(*modulations(spec, condition, weights))
    return norms.closing(stream, weights)


def loss(spec, variant, params, inputs, targets):
    """Mean cross-entropy, of every token or, where the model reads an image, of the mean over its patches."""
    x = hidden(spec, model_norms.norms_of(spec, variant), params, inputs)
    x, head = x if spec.language else x.mean(1), params["head"].astype(x.dtype)
    how = model_norms.VARIANTS[variant].loss
    if how == "linear":
        return jaxnorm.linear_cross_entropy(x, head, targets)
    of_logits = {"xla": losses, "native": jaxnorm.softmax_cross_entropy_with_integer_labels}[how]
    return of_logits(x @ head, targets).mean()


def losses(logits, labels):
    """As Optax computes them, which XLA compiles better than what reads `log_softmax`."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    label_logits = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - label_logits


# Programs: functions of (state, *inputs) that give (the next state, a result). A state of None is the same one again.


def train_step(loss):
    """A loss's gradients, and a step along them: no optimiser with a state."""

    def step(params, inputs, targets):
        value, grads = jax.value_and_grad(loss)(params, inputs, targets)
        return jax.tree.map(lambda param, grad: param - RATE * grad, params, grads), value

    return step


def forward(loss):
    return lambda params, inputs, targets: (None, loss(params, inputs, targets))


def serving(spec):
    """The parameters as a server holds them: every matrix in the activations' dtype, the norms' weights in float32."""
    return jax.tree.map(lambda param: param.astype(spec.dtype) if param.ndim > 1 else param, init(spec))


def full_cache(spec):
    """State before a token: the tokens, their position, and random keys and values of every layer and position."""
    dims = (spec.batch, spec.groups, spec.tokens, spec.head_size)
    cache = [tuple(jax.random.normal(random_key(i), dims, spec.dtype) for i in range(2)) for _ in range(spec.layers)]
    return jnp.arange(spec.batch) % spec.classes, jnp.array(0), cache


def likeliest(logits, position):
    return jnp.argmax(logits, -1)


def decode_step(spec, variant, choose=likeliest):
    """One token for each sequence, by choose(logits, position); the result is the logits.

    All of the cache is read, and its oldest position is replaced.
    """
    norms = model_norms.norms_of(spec, variant)

    def step(state, params):
        tokens, position, cache = state

        def attend(keys, values, q, k, v):
            slot = position % spec.tokens
            keys, values = (jax.lax.dynamic_update_index_in_dim(*pair, slot, 2) for pair in ((keys, k), (values, v)))
            grouped = q.reshape(-1, spec.groups, spec.heads // spec.groups, spec.head_size)
            logits = jnp.einsum("bgrd,bgsd->bgrs", grouped, keys, preferred_element_type=jnp.float32)
            weights = jax.nn.softmax(logits / math.sqrt(spec.head_size)).astype(q.dtype)
            return jnp.einsum("bgrs,bgsd->bgrd", weights, values), (keys, values)

        stream = params["embed"][tokens]
        kept = []
        for layer, (keys, values) in zip(params["layers"], cache, strict=True):
            attend_to = functools.partial(attend, keys, values)
            stream, entry = block(spec, norms, layer, stream, attend_to, position)
            kept.append(entry)
        logits = spec.product(norms.closing(stream, params["norm"]), params["head"])
        return (choose(logits, position).astype(tokens.dtype), position + 1, kept), logits

    return step


def decode_loop(spec, variant, length, choose=likeliest):
    """So many tokens for each sequence in one program, in which the host has no part.

    The result is the logits of the last one.
    """
    step = decode_step(spec, variant, choose)

    def loop(state, params):
        logits = jax.eval_shape(step, state, params)[1]
        carry = state, jnp.zeros(logits.shape, logits.dtype)
        return jax.lax.fori_loop(0, length, lambda _, carry: step(carry[0], params), carry)

    return loop
