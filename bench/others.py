"""What `bench gpu` measures beside norms: logits, rotary embedding, GroupNorm, gates, rounding, and sums of rows.

XLA's softmax is `jax.nn.softmax`, its cross-entropy Optax's formula, which XLA compiles better than one that reads
`log_softmax`, its lookup Flax's, and its sum by segments `jax.ops.segment_sum`; of the others it is the formula. What a
mask hides is not read, and labels, positions and ids are not counted.
"""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import jaxnorm
from bench import shapes
from bench.models import log_uniform, losses
from bench.programs import Op, draw, nbytes
from jaxnorm.ops.float8_linear import kernels
from jaxnorm.ops.float8_linear.formula import Float8Linear

CAUSAL, CACHED = "softmax, causal", "softmax, causal, cache"
# Of scores behind a cache: how many keys a query has at most.
WINDOWS = {CACHED: None, "softmax, window 1024": 1024, "softmax, window 4096": 4096}
ROUNDINGS = ("rows", "kernel", "gradient")
IDS = {
    "log-uniform ids": log_uniform,
    "uniform ids": lambda key, dims, classes: jax.random.randint(key, dims, 0, classes),
    "one id": lambda key, dims, classes: jnp.full(dims, classes // 2),
}
EACH = 16  # rows of a segment, on average
NOT_PURE = {"is_pure": False}  # XLA converts positions, adds up the gradients of scales, or has a direction


def logits(shape, dtype, seed):
    x, dy = draw(seed, dtype, shape.dims, shape.dims, kind="logits")
    return x, (), dy


def softmax(log=False):
    def function(how):
        module, options = (jax.nn, {}) if how == "xla" else (jaxnorm, {"implementation": how})
        return partial(module.log_softmax if log else module.softmax, **options)

    return Op(function, logits, partial(nbytes, forward=2, backward=3), is_kept=True, **NOT_PURE)


def causal(cached=False, window=None):
    """Of scores behind a cache the last query has the last key."""

    def offset_of(dims):
        return dims[-1] - dims[-2] if cached else 0

    def function(how):
        def of_jax(x):
            return jax.nn.softmax(jnp.where(seen(x.shape, offset_of(x.shape), window), x, -jnp.inf))

        def ours(x):
            return jaxnorm.softmax(x, causal=True, offset=offset_of(x.shape), window=window, implementation=how)

        return of_jax if how == "xla" else ours

    def moved(shape, itemsize):
        read = float(seen(shape.dims, offset_of(shape.dims), window).mean()) if cached else 0.5
        return nbytes(shape, itemsize, read + 1, 2 * read + 1)

    return Op(function, logits, moved, is_kept=True, **NOT_PURE)


def seen(dims, offset, window):
    """Which keys each query of causal rows sees."""
    queries, keys = dims[-2:]
    last = jnp.arange(queries)[:, None] + offset
    before = jnp.arange(keys) <= last
    return before if window is None else before & (jnp.arange(keys) > last - window)


def cross_entropy():
    def operands(shape, dtype, seed):
        x, _, _ = logits(shape, dtype, seed)
        labels = jax.random.randint(jax.random.key(seed), (shape.rows,), 0, shape.cols)
        return x, (labels,), jnp.full(shape.rows, 1 / shape.rows, jnp.float32)

    def function(how):
        ours = partial(jaxnorm.softmax_cross_entropy_with_integer_labels, implementation=how)
        return losses if how == "xla" else ours

    moved = partial(nbytes, forward=1, backward=2)
    return Op(function, operands, moved, is_kept=True, is_last=True, **NOT_PURE)


def heads_of(shape, dtype, seed, *counts):
    """Arrays of so many heads, two scales, and the positions."""
    batch, tokens, _, size = shape.dims
    arrays = draw(seed, dtype, *((batch, tokens, count, size) for count in counts))
    return arrays, (*draw(seed, jnp.float32, (size,), (size,), kind="weights"), jnp.arange(tokens))


def rotary():
    """Queries and keys, of which the last `shapes.KEYS` are; 2 arrays of both are moved forward, and 5 in all."""

    def operands(shape, dtype, seed):
        counts = (shape.dims[-2] - shapes.KEYS, shapes.KEYS)
        arrays, weights = heads_of(shape, dtype, seed, *counts, *counts)
        return arrays[:2], weights, arrays[2:]

    def function(how):
        return lambda pair, *weights: jaxnorm.qk_norm_rotary(*pair, *weights, implementation=how)

    return Op(function, operands, partial(nbytes, forward=2, backward=3), is_last=True, fixed=2, **NOT_PURE)


def joint_rotary():
    """Values stand behind the keys in one array; their cotangent is not read with x again."""

    def operands(shape, dtype, seed):
        heads = shape.dims[-2]
        counts = (heads - shapes.KEYS, shapes.KEYS, shapes.KEYS)
        (qkv, *cotangents), weights = heads_of(shape, dtype, seed, heads + shapes.KEYS, *counts)
        return qkv, weights, tuple(cotangents)

    def function(how):
        def of_array(qkv, *weights):
            counts = {"heads": qkv.shape[-2] - 2 * shapes.KEYS, "kv_heads": shapes.KEYS}
            return jaxnorm.qkv_norm_rotary(qkv, *weights, **counts, implementation=how)

        return of_array

    def moved(shape, itemsize):
        *_, heads, _ = shape.dims
        joint = (heads + shapes.KEYS) / heads
        return nbytes(shape, itemsize, 2 * joint, 3 * joint - shapes.KEYS / heads)

    return Op(function, operands, moved, is_last=True, fixed=2, **NOT_PURE)


def group_norm():
    """With silu, of 32 groups, or of as many channels as they have."""

    def operands(shape, dtype, seed):
        x, dy = draw(seed, dtype, shape.dims, shape.dims)
        return x, draw(seed, jnp.float32, shape.dims[-1:], shape.dims[-1:], kind="weights"), dy

    def function(how):
        def norm(x, *weights):
            groups = math.gcd(32, x.shape[-1])
            return jaxnorm.group_norm(x, *weights, num_groups=groups, activation="silu", implementation=how)

        return norm

    return Op(function, operands, partial(nbytes, forward=2, backward=3), **NOT_PURE)


def both_halves(shape, dtype, seed):
    """x, which has gate and what it gates, side by side; and dy."""
    x, dy = draw(seed, dtype, (shape.rows, 2 * shape.cols), (shape.rows, shape.cols))
    return x, (), dy


def gated_activation():
    function = jaxnorm.gated_activation
    moved = partial(nbytes, forward=3, backward=5)
    return Op(lambda how: partial(function, implementation=how), both_halves, moved, is_last=True, **NOT_PURE)


def whole(shape, dtype, seed):
    return draw(seed, dtype, (shape.rows, shape.cols))


def quantized(function, operands, arrays, **shared):
    """To float8 with a scale for each row, or for what `shared` says; of so many arrays like the values."""

    def of(how):
        def of_array(x):
            to = jaxnorm.Quantization(jnp.float8_e4m3fn, **shared)
            result = function(x, quantization=to, implementation=how)
            return result.values, result.scales

        return of_array

    def moved(shape, itemsize):
        return nbytes(shape, 1, arrays * itemsize + 1)

    return Op(of, lambda *args: (operands(*args)[0], (), None), moved, is_last=True, is_rounded=True, **NOT_PURE)


def rounding(way):
    """Around the products of `float8_linear`: x by "rows", a "kernel" by columns, which are rows then, and the
    "gradient" dy by both, with the scales of the other factors, which reads it twice."""
    spec = Float8Linear(out_dtype=np.dtype(np.float32))

    def operands(shape, dtype, seed):
        (x,) = draw(seed, dtype, (shape.rows, shape.cols))
        columns, rows = draw(seed, jnp.float32, (shape.cols,), (shape.rows, 1))
        return x, (jnp.exp(columns), jnp.exp(rows)) if way == "gradient" else (), None

    def function(how):
        asked = tuple((direction, "") for direction in ("forward", "backward") if how == "xla")
        of = dataclasses.replace(spec, formula_for=asked)
        return {
            "rows": partial(kernels.by_rows, of, direction="forward"),
            "kernel": partial(kernels.by_columns, of, direction="forward"),
            "gradient": partial(kernels.gradient, of, wants=(True, True)),
        }[way]

    def moved(shape, itemsize):
        return nbytes(shape, 1, itemsize + (itemsize + 2 if way == "gradient" else 1))

    return Op(function, operands, moved, is_last=True, is_rounded=True, **NOT_PURE)


def narrow(dtype):
    """Of the rows of a table."""
    return jnp.bfloat16 if dtype == jnp.float32 else dtype


def embedding(ids_of):
    """The gradient of a lookup, of bfloat16 if the table is float32: the rows' is read, and the table's written."""

    def count(shape):
        return shapes.LOOKED_UP.get(shape.name, 8192)

    def operands(shape, dtype, seed):
        (table,) = draw(seed, dtype, shape.dims)
        (dy,) = draw(seed, narrow(jnp.dtype(dtype)), (count(shape), shape.cols))
        return table, (ids_of(jax.random.key(seed), dy.shape[:1], shape.rows),), dy

    def function(how):
        def of_flax(table, ids):
            return jnp.take(table.astype(narrow(table.dtype)), ids, axis=0)

        def ours(table, ids):
            return jaxnorm.embedding(table, ids, dtype=narrow(table.dtype), implementation=how)

        return of_flax if how == "xla" else ours

    def moved(shape, itemsize):
        return {"backward": shape.cols * (shape.rows * itemsize + count(shape) * min(itemsize, 2))}

    return Op(function, operands, moved, is_last=True, few=4096, orders=True, **NOT_PURE)


def segment_sum(is_sorted):
    def segments(rows):
        return -(-rows // EACH)

    def operands(shape, dtype, seed):
        (x,) = draw(seed, dtype, shape.dims)
        ids = jax.random.randint(jax.random.key(seed), shape.dims[:1], 0, segments(shape.rows))
        return x, (jnp.sort(ids) if is_sorted else ids,), None

    def function(how):
        of_jax = how == "xla"
        sums = jax.ops.segment_sum if of_jax else partial(jaxnorm.segment_sum, implementation=how)
        return lambda x, ids: sums(x, ids, segments(len(x)), indices_are_sorted=is_sorted)

    moved = partial(nbytes, forward=1 + 1 / EACH)
    return Op(function, operands, moved, is_last=True, few=4096, orders=True, **NOT_PURE)


OPS = {
    "softmax": softmax(),
    "log_softmax": softmax(log=True),
    CAUSAL: causal(),
    **{kind: causal(cached=True, window=window) for kind, window in WINDOWS.items()},
    "cross_entropy": cross_entropy(),
    "qk_norm_rotary": rotary(),
    "qkv_norm_rotary": joint_rotary(),
    "group_norm": group_norm(),
    "gated_activation": gated_activation(),
    "gated_activation_quantized": quantized(jaxnorm.gated_activation_quantized, both_halves, 2),
    "quantize, rows": quantized(jaxnorm.quantize, whole, 1),
    "quantize, groups of 128": quantized(jaxnorm.quantize, whole, 1, granularity="group"),
    **{f"float8_linear, {way}": rounding(way) for way in ROUNDINGS},
    **{f"embedding, {way}": embedding(ids_of) for way, ids_of in IDS.items()},
    "segment_sum, sorted": segment_sum(is_sorted=True),
    "segment_sum, unsorted": segment_sum(is_sorted=False),
}
