"""The models that `bench model` times: pre-norm transformers as plain functions of their parameters.

Matrices are float32 and cast to bfloat16 where they are used; activations are bfloat16; the norms' weights stay
float32, as in the model hubs. Query, key and value are three products, so that a norm over heads reads a whole array:
of one joint product it would read slices, which XLA's fusion does in place and a kernel call needs copied.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

import jaxnorm

PATCH = 768  # features of an image's 16 x 16 patch
RATE = 1e-4  # of the update: the weights, and with them the power that a product draws, stay what they were


@dataclass(frozen=True)
class Spec:
    """A model and its batch, and how its layers are compiled."""

    name: str
    norm: str  # "rms" or "layer", the latter with a bias
    language: bool  # reads tokens: causal, gated MLP, queries and keys normalised per head and rotated
    layers: int
    dim: int
    heads: int
    hidden: int
    batch: int
    tokens: int
    classes: int
    rotary: bool = True
    attention: str = "xla"
    scan: bool = False  # over stacked layers; otherwise they are unrolled
    remat: str = "none"  # "full" keeps a layer's input only


LLAMA = Spec("Llama-like", "rms", True, 8, 2048, 16, 8192, batch=4, tokens=2048, classes=1024)
# Half the layers of ViT-L/16.
VIT = Spec("ViT-like", "layer", False, 12, 1024, 16, 4096, batch=64, tokens=197, classes=1000)


class Variant(NamedTuple):
    """What computes the norms of the residual stream, those of queries and keys, and the loss.

    None leaves a norm out, its weights too; "copy" stands for the fastest kernel of its own that could be there; "add"
    is a native norm with the residual add before it. A loss is XLA's, or the kernel's of the logits, or "linear", which
    never has all logits.
    """

    stream: str | None
    head: str | None
    loss: str = "jnp"


VARIANTS = {
    "jnp": Variant("jnp", "jnp"),
    "jaxnorm": Variant("native", "native"),
    "jaxnorm-add": Variant("add", "native"),
    "copy": Variant("copy", "copy"),
    "none": Variant(None, None),
    "jnp-no-qk": Variant("jnp", None),
    "jaxnorm-jnp-qk": Variant("native", "jnp"),
    "jaxnorm-loss": Variant("jnp", "jnp", "native"),
    "jaxnorm-linear-loss": Variant("jnp", "jnp", "linear"),
    "jaxnorm-all": Variant("add", "native", "native"),
}


def small(spec):
    """The same code at the size of a toy."""
    return replace(spec, layers=2, dim=64, heads=2, hidden=96, batch=16, tokens=12, classes=32)


def random_key(seed):
    """Of the generator that compiles fastest."""
    return jax.random.key(seed, impl="rbg")


def init(spec, seed=0):
    """The parameters: products keep the size of activations, so that no variant meets zeros or infinities."""
    keys = iter(jax.random.split(random_key(seed), 2 + 7 * spec.layers))

    def matrix(rows, cols, gain=1.0):
        return gain / math.sqrt(rows) * jax.random.normal(next(keys), (rows, cols))

    def weights(cols):
        return (jnp.ones(cols),) if spec.norm == "rms" else (jnp.ones(cols), jnp.zeros(cols))

    def layer():
        dim, hidden, gain = spec.dim, spec.hidden, 1 / math.sqrt(2 * spec.layers)
        head = {name: weights(dim // spec.heads) for name in ("query_norm", "key_norm")} if spec.language else {}
        gate = {"gate": matrix(dim, hidden)} if spec.language else {}
        products = {name: matrix(dim, dim) for name in ("query", "key", "value")}
        joins = {"out": matrix(dim, dim, gain), "up": matrix(dim, hidden), "down": matrix(hidden, dim, gain)}
        return {"attention_norm": weights(dim), "mlp_norm": weights(dim), **head, **gate, **products, **joins}

    layers = [layer() for _ in range(spec.layers)]
    return {
        "embed": matrix(spec.classes, spec.dim, math.sqrt(spec.classes)) if spec.language else matrix(PATCH, spec.dim),
        "layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers) if spec.scan else layers,
        "norm": weights(spec.dim),
        "head": matrix(spec.dim, spec.classes),
    }


def batch(spec, seed=1):
    """Random inputs and targets: a class for each token of a language model, one for each image."""
    keys = jax.random.split(random_key(seed))
    dims = (spec.batch, spec.tokens)
    if spec.language:
        return tuple(jax.random.randint(key, dims, 0, spec.classes) for key in keys)
    patches = jax.random.normal(keys[0], (*dims, PATCH), jnp.bfloat16)
    return patches, jax.random.randint(keys[1], dims[:1], 0, spec.classes)


@jax.custom_vjp
def copy(x):
    """As much as a norm must move and nothing more: reads x and writes y; backward reads x and dy and writes dx.

    XLA fuses neither with its neighbours, as it would not a kernel call.
    """
    return jax.lax.optimization_barrier(-jax.lax.optimization_barrier(x))


def _copy_backward(x, dy):
    x, dy = jax.lax.optimization_barrier((x, dy))
    return (jax.lax.optimization_barrier(jnp.copysign(dy, x)),)


copy.defvjp(lambda x: (copy(x), x), _copy_backward)


class Norms(NamedTuple):
    """The norms of a model, and its residual stream as they want it: an array, or (what is yet to be added, an array).

    Their sum is the same stream in every variant.
    """

    start: Callable  # the embedding -> the stream
    stream: Callable  # the stream, weights -> y, the stream with nothing yet to be added
    add: Callable  # an array, what a layer gives -> the stream
    head: Callable  # queries or keys, weights -> y


def norms_of(spec, variant):
    stream, head, _ = VARIANTS[variant]
    head = norm_of(spec, head)
    if stream == "add":
        # In a scan the first layer finds what all others do.
        start = (lambda x: (x, jnp.zeros_like(x))) if spec.scan else (lambda x: x)
        return Norms(start, add_norm_of(spec), lambda x, part: (part, x), head)
    norm = norm_of(spec, stream)
    return Norms(lambda x: x, lambda x, weights: (norm(x, weights), x), lambda x, part: x + part, head)


def norm_of(spec, implementation):
    """A norm as a function of x and its weights."""
    if implementation is None:
        return lambda x, weights: x
    if implementation == "copy":
        return lambda x, weights: copy(x)
    function = {"rms": jaxnorm.rms_norm, "layer": jaxnorm.layer_norm}[spec.norm]
    return lambda x, weights: function(x, *weights, implementation=implementation)


def add_norm_of(spec):
    """A norm of a stream with what is yet to be added, or of one that is an array still."""
    function = {"rms": jaxnorm.add_rms_norm, "layer": jaxnorm.add_layer_norm}[spec.norm]
    norm = norm_of(spec, "native")

    def add_norm(stream, weights):
        if not isinstance(stream, tuple):
            return norm(stream, weights), stream
        return function(*stream, *weights, implementation="native")

    return add_norm


def product(x, matrix):
    return x @ matrix.astype(x.dtype)


def rotate(x, positions):
    """Rotary position embedding (https://arxiv.org/abs/2104.09864) of x: (..., head, feature)."""
    half = x.shape[-1] // 2
    angle = positions[..., None, None] * 10_000.0 ** (-jnp.arange(half) / half)
    sin, cos = (f(angle).astype(x.dtype) for f in (jnp.sin, jnp.cos))
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def block(spec, norms, layer, stream, positions, attend):
    """One layer: the next stream, and what `attend` keeps besides its result."""
    y, x = norms.stream(stream, layer["attention_norm"])
    heads = (*x.shape[:-1], spec.heads, spec.dim // spec.heads)
    q, k, v = (product(y, layer[name]).reshape(heads) for name in ("query", "key", "value"))
    if spec.language:
        q, k = norms.head(q, layer["query_norm"]), norms.head(k, layer["key_norm"])
        if spec.rotary:
            q, k = rotate(q, positions), rotate(k, positions)
    y, kept = attend(q, k, v)
    stream = norms.add(x, product(y.reshape(x.shape), layer["out"]))

    y, x = norms.stream(stream, layer["mlp_norm"])
    if spec.language:
        y = jax.nn.silu(product(y, layer["gate"])) * product(y, layer["up"])
    else:
        y = jax.nn.gelu(product(y, layer["up"]))
    return norms.add(x, product(y, layer["down"])), kept


def hidden(spec, norms, params, inputs):
    """What the layers and the last norm make of the inputs."""
    positions = jnp.arange(spec.tokens)

    def attend(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=spec.language, implementation=spec.attention), None

    def layer_of(stream, layer):
        return block(spec, norms, layer, stream, positions, attend)

    if spec.remat == "full":
        layer_of = jax.checkpoint(layer_of)
    embed = params["embed"]
    x = embed[inputs].astype(jnp.bfloat16) if spec.language else product(inputs, embed)
    stream = norms.start(x)
    if spec.scan:
        stream, _ = jax.lax.scan(layer_of, stream, params["layers"])
    else:
        for layer in params["layers"]:
            stream, _ = layer_of(stream, layer)
    return norms.stream(stream, params["norm"])[0]


def loss(spec, variant, params, inputs, targets):
    """Mean cross-entropy, of every token or, where the model reads an image, of the mean over its patches."""
    x = hidden(spec, norms_of(spec, variant), params, inputs)
    x, head = x if spec.language else x.mean(1), params["head"].astype(x.dtype)
    how = VARIANTS[variant].loss
    if how == "linear":
        return jaxnorm.linear_cross_entropy(x, head, targets)
    losses = _losses if how == "jnp" else jaxnorm.softmax_cross_entropy_with_integer_labels
    return losses(x @ head, targets).mean()


def _losses(logits, labels):
    """As Optax computes them, which XLA compiles better than what reads `log_softmax`."""
    logits = logits.astype(jnp.float32)
    label_logits = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - label_logits


# Programs: functions of (state, *inputs) that give (the next state, a result). A state of None is the same one again.


def train_step(spec, variant):
    def step(params, inputs, targets):
        value, grads = jax.value_and_grad(functools.partial(loss, spec, variant))(params, inputs, targets)
        return jax.tree.map(lambda param, grad: param - RATE * grad, params, grads), value

    return step


def forward(spec, variant):
    return lambda params, inputs, targets: (None, loss(spec, variant, params, inputs, targets))


def serving(params):
    """The parameters as a server holds them: every matrix in bfloat16, the norms' weights in float32."""
    return jax.tree.map(lambda param: param.astype(jnp.bfloat16) if param.ndim > 1 else param, params)


def full_cache(spec):
    """State before a token: the tokens, their position, and random keys and values of every layer and position."""
    dims = (spec.batch, spec.heads, spec.tokens, spec.dim // spec.heads)
    cache = [tuple(jax.random.normal(random_key(i), dims, jnp.bfloat16) for i in range(2)) for _ in range(spec.layers)]
    return jnp.arange(spec.batch) % spec.classes, jnp.array(0), cache


def decode_step(spec, variant):
    """One token for each sequence, the likeliest; the result is the logits.

    All of the cache is read, and its oldest position is replaced.
    """
    norms = norms_of(spec, variant)

    def step(state, params):
        tokens, position, cache = state

        def attend(keys, values, q, k, v):
            slot = position % spec.tokens
            keys, values = (jax.lax.dynamic_update_index_in_dim(*pair, slot, 2) for pair in ((keys, k), (values, v)))
            logits = jnp.einsum("bhd,bhsd->bhs", q, keys, preferred_element_type=jnp.float32)
            weights = jax.nn.softmax(logits / math.sqrt(q.shape[-1])).astype(q.dtype)
            return jnp.einsum("bhs,bhsd->bhd", weights, values), (keys, values)

        stream = norms.start(params["embed"][tokens])
        kept = []
        for layer, (keys, values) in zip(params["layers"], cache, strict=True):
            stream, entry = block(spec, norms, layer, stream, position, functools.partial(attend, keys, values))
            kept.append(entry)
        logits = product(norms.stream(stream, params["norm"])[0], params["head"])
        return (jnp.argmax(logits, -1).astype(tokens.dtype), position + 1, kept), logits

    return step
