"""Calls at random for the fuzzer: ops of the table, and what it has no rows of, as masks and labels."""

import itertools
from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from cases import ADDS, DTYPES, NORMS
from jax import lax
from op import Op, Size
from ops.gated_activation import halves
from ops.gated_activation_quantized import plain as activated
from ops.gated_norm import VARIANTS, gated
from quantizing import GRANULARITIES, LARGEST, static_scale_of
from table import OPS

import jaxnorm
from jaxnorm import Quantization

# Around whole vectors, warps and blocks, and what lies between; some meshes divide them, all do and none does.
COLS = (1, 3, 4, 5, 7, 8, 12, 16, 17, 24, 31, 33, 64, 64, 65, 100, 127, 128, 128, 129, 256, 257, 384, 1000, 1021)
LENGTHS, HEADS, GROUPS = (1, 2, 3, 4, 5, 7, 8, 8, 8), (1, 2, 3, 4, 8), (1, 2, 3, 5, 8)
HEAD_SIZES = (2, 8, 64)  # the first not with LayerNorm: of two columns its derivatives are what cancellation leaves
# A row that is split over so many devices may have nothing finite on one of them.
PARTS = (2, 4, 8)
IGNORED = -100


def _alike(op: Op) -> tuple[Any, ...]:
    """What ops of one kind share, whatever the norm, the activation or the dtype is."""
    return op.forward.replace(op.kind, ""), op.arrays, len(op.small.weights), *op.small.options


KINDS_OF_OPS = [list(alike) for _, alike in itertools.groupby(sorted(OPS, key=_alike), _alike)]


class Call(NamedTuple):
    """A call of a public function.

    `by_example` are the operands whose first axis has the examples, which may be computed apart; none where the op goes
    over these.
    """

    name: str
    function: Callable  # of the operands and `implementation`: a flat tuple of results
    operands: Mapping[str, jax.Array]
    moving: tuple[str, ...]  # what is transformed
    by_example: tuple[str, ...]
    meant: Callable | None = None  # the like, where results are quantised, of what these mean

    def __str__(self) -> str:
        given = ", ".join(f"{name} {a.dtype}{a.shape}" for name, a in self.operands.items())
        return f"{self.name} of {given}"


class Draw(NamedTuple):
    rng: np.random.Generator

    def pick(self, values: Any) -> Any:
        return values[self.rng.integers(len(values))]

    def floats(self, shape: tuple[int, ...], dtype: str, mean: float = 0.0) -> jax.Array:
        return jnp.asarray(mean + 2 * self.rng.standard_normal(shape), dtype)

    def weight(self, shape: tuple[int, ...], dtype: str) -> jax.Array | None:
        """Or none, in a dtype of its own."""
        kind = self.pick((dtype, dtype, None, *DTYPES))
        return kind and self.floats(shape, kind, 1.0)

    def chance(self, of: float) -> bool:
        return bool(self.rng.random() < of)

    def leading(self) -> tuple[int, ...]:
        return tuple(self.pick(LENGTHS) for _ in range(self.pick((1, 1, 2))))

    def rows(self) -> tuple[int, ...]:
        """Or none: a row alone."""
        return () if self.chance(0.2) else self.leading()

    def mask(self, shape: tuple[int, ...]) -> jax.Array:
        """One that broadcasts against an array of this shape."""
        own = [self.pick((1, n)) for n in shape]
        return jnp.asarray(self.rng.random(own[self.rng.integers(len(own)) :]) < 0.7)

    def logits(self, shape: tuple[int, ...], dtype: str) -> jax.Array:
        """Some of them with columns of -inf, in all rows or in some."""
        x = self.floats(shape, dtype)
        if self.chance(0.6):
            return x
        width = max(1, shape[-1] // self.pick(PARTS))
        first = width * int(self.rng.integers(-(-shape[-1] // width)))
        columns = (np.arange(shape[-1]) >= first) & (np.arange(shape[-1]) < first + width)
        rows = self.rng.random((*shape[:-1], 1)) < self.pick((0.5, 2.0))
        return jnp.where(columns & rows, -jnp.inf, x)

    def labels(self, shape: tuple[int, ...], classes: int) -> jax.Array:
        """Some of them ignored."""
        labels = self.rng.integers(classes, size=shape)
        return jnp.asarray(np.where(self.rng.random(shape) < 0.2, IGNORED, labels), "int32")


def of_table(draw: Draw) -> Call:
    """An op with dtypes of its arrays and of its weights, some of them absent, and options."""
    op = draw.pick(draw.pick(KINDS_OF_OPS))
    dtypes, size = draw.pick(op.dtypes), _size(op, draw)
    drawn = op.draw(size, dtypes, tuple(draw.pick((dtypes[0], None, *DTYPES)) for _ in op.weights))

    def of_given(function: Callable) -> Callable:
        def call(*given: jax.Array, **implementation: str | None) -> tuple:
            values = iter(given)
            args = (None if array is None else next(values) for array in drawn)
            return tuple(function(*args, **size.options, **implementation))

        return call

    queries_are_first = size.options.get("causal") and len(size.dims) == 2
    operands = {name: array for name, array in zip(op.operands, drawn, strict=True) if array is not None}
    return Call(
        f"{op} at {size}",
        of_given(op.differentiable),
        operands,
        tuple(operands),
        () if queries_are_first else op.operands[: op.arrays],
        of_given(partial(_dequantized, op)) if "quantized" in op.forward else None,
    )


def _size(op: Op, draw: Draw) -> Size:
    """A shape that the op takes, of a few thousand elements at most, with its options."""
    dims, weights, options = op.small
    fewest = 1 if op.kind == "logits" else 2
    last = draw.pick([n for n in COLS if n >= fewest and not (op.has_pairs and n % 2)])
    for unit in (options.get("group_size"), *(group for group in (64, 128) if f"groups of {group}" in op.name)):
        last = last if unit is None else unit * draw.pick(GROUPS)
    lead: list[int] = []
    while len(lead) < draw.pick((1, 2, 3)) and np.prod(lead) * last < 2000:
        lead.append(draw.pick(LENGTHS))
    fewest = 3 if "qkv" in op.operands else 1  # a head of each
    if "qkv" in op.operands:
        lead = [1] * (2 - len(lead)) + lead  # of four axes: of fewer, the last may have the heads
    head = [draw.pick([n for n in HEADS if n >= fewest])] if len(dims) > 2 else []
    options = {**options, **(draw.pick(op.options) if op.options and draw.chance(0.5) else {})}
    return Size((*lead, *head, last), (*head, last)[-len(weights) :], options)


def _unquantized(op: Op, name: str, *args: Any, **options: Any) -> Any:
    """The result in float32, with the sum if there is one."""
    if op.kind == "elements":
        return activated(name.rpartition(" ")[2])(*(halves(*args) if len(args) == 1 else args))
    if "gate" in op.operands:
        x, gate, scale = args
        (variant,) = [variant for variant in VARIANTS if name.endswith(f" {variant}")]
        # No kernel gives float32 of half types.
        return gated(variant)(x.astype("float32"), gate.astype("float32"), scale, **options)
    *arrays, scale, bias = args
    norm = ADDS[op.kind] if len(arrays) > 1 else NORMS[op.kind]
    return norm(*arrays, scale, bias=bias, out_dtype="float32", **options)


def _dequantized(op: Op, *args: Any, **options: Any) -> tuple[Any, ...]:
    """What a quantised norm means, by the norm's own kernel: a last bit of difference might round to another value."""
    *of_norm, smooth = args if "smooth" in op.operands else (*args, None)
    of, shared = op.name.split(" to ")
    granularity, to = shared.split(", ")
    quantization = Quantization(to, **GRANULARITIES[granularity])
    y, *total = jax.tree.leaves(_unquantized(op, of, *of_norm, **options))
    v = y if smooth is None else y * lax.stop_gradient(smooth.astype(jnp.float32))
    groups = lax.stop_gradient(v).reshape(*v.shape[:-1], -1, quantization.group_size or v.shape[-1])
    amax, given = jnp.abs(groups).max(-1, keepdims=True), static_scale_of(quantization)
    # By a constant XLA would not divide but multiply by its rounded reciprocal.
    scale = amax / jnp.where(amax == 0, 1, jnp.float32(LARGEST[to])) if given is None else jnp.float32(given)
    values = jnp.clip(groups * (1 / scale), -LARGEST[to], LARGEST[to])
    # Behind a barrier, or XLA for GPUs would leave the rounding out: it allows itself more precision than that.
    values = lax.optimization_barrier(jnp.round(values) if to == "int8" else values.astype(to))
    exact = (values.astype(jnp.float32) * scale).reshape(v.shape)
    carrier = v.astype(args[0].dtype).astype(jnp.float32)  # whose cotangents have x's dtype
    return carrier + lax.stop_gradient(exact - carrier), *total


def _call(public: Callable, operands: Mapping[str, Any], moving: tuple[str, ...], by_example, **options) -> Call:
    """Of operands by their names in the public function, those that are None left out."""
    given = {name: array for name, array in operands.items() if array is not None}

    def function(*arrays: jax.Array, implementation: str | None) -> tuple:
        results = public(**dict(zip(given, arrays, strict=True)), **options, implementation=implementation)
        return tuple(jax.tree.leaves(results))

    name = " ".join([public.__name__, *(f"{name}={value}" for name, value in options.items())])
    there = tuple(name for name in moving if name in given)
    return Call(name, function, given, there, tuple(name for name in by_example if name in given))


def _examples_of(x: jax.Array, arrays: Mapping[str, Any]) -> tuple[str, ...]:
    """Those whose first axis is that of x's examples, where x has one."""
    there = ((name, array) for name, array in arrays.items() if array is not None and x.ndim > 1)
    return tuple(name for name, array in there if array.ndim == x.ndim and array.shape[0] == x.shape[0])


def softmax(draw: Draw) -> Call:
    public = draw.pick((jaxnorm.softmax, jaxnorm.log_softmax))
    x = draw.logits((*draw.rows(), draw.pick(COLS)), draw.pick(DTYPES))
    where = draw.mask(x.shape) if draw.chance(0.6) else None
    causal = public is jaxnorm.softmax and x.ndim > 2 and draw.chance(0.3)
    by_example = _examples_of(x, {"x": x, "where": where})
    options = {"logit_scale": draw.pick((1.0, 0.3)), "causal": causal}
    if causal:
        options |= {"offset": draw.pick((0, 3)), "window": draw.pick((None, 2))}
    scale = {"logit_scale": jnp.float32(options.pop("logit_scale"))} if draw.chance(0.3) else {}
    return _call(public, {"x": x, "where": where, **scale}, ("x", "logit_scale"), by_example, **options)


def cross_entropy(draw: Draw) -> Call:
    lead, classes = draw.rows(), draw.pick(COLS)
    logits, labels = draw.logits((*lead, classes), draw.pick(DTYPES)), draw.labels(lead, classes)
    where = draw.mask(logits.shape) if draw.chance(0.3) else None
    if where is not None:  # of fewer axes it might be one of labels, too
        where = where.reshape((1,) * (logits.ndim - where.ndim) + where.shape)
    return _call(
        jaxnorm.softmax_cross_entropy_with_integer_labels,
        {"logits": logits, "labels": labels, "where": where},
        ("logits",),
        (*_examples_of(logits, {"logits": logits, "where": where}), *(["labels"] if lead else [])),
        **_loss_options(draw),
    )


def _loss_options(draw: Draw) -> dict[str, Any]:
    return {
        "label_smoothing": draw.pick((0.0, 0.1)),
        "z_loss": draw.pick((0.0, 1e-2)),
        "logit_scale": draw.pick((1.0, 0.7)),
        "soft_cap": draw.pick((None, 5.0)),
        "ignore_index": IGNORED,
    }


def linear_cross_entropy(draw: Draw) -> Call:
    lead = draw.rows()
    width, classes, dtype = draw.pick((8, 16, 24)), draw.pick(COLS), draw.pick(DTYPES)
    operands: dict[str, Any] = {
        "x": draw.floats((*lead, width), dtype) / 4,
        "kernel": draw.floats((width, classes), draw.pick((dtype, *DTYPES))) / 4,
        "labels": draw.labels(lead, classes),
    }
    if draw.chance(0.5):
        mask = jnp.asarray(draw.rng.random((*lead, classes)[draw.pick((0, len(lead))) :]) < 0.7)
        operands |= {
            "bias": draw.pick((None, draw.floats((classes,), draw.pick((dtype, *DTYPES))))),
            "where": draw.pick((None, mask)),
            "row_weights": draw.pick((None, jnp.abs(draw.floats(lead, "float32")) + 0.1)),
        }
    options = _loss_options(draw)
    if draw.chance(0.3):
        operands["logit_scale"] = jnp.float32(options.pop("logit_scale"))
    reduction, mask = draw.pick(("mean", "sum", "none")), operands.get("where")
    of_rows = ("x", "labels", "row_weights", *["where"] * (mask is not None and mask.ndim == len(lead) + 1))
    return _call(
        jaxnorm.linear_cross_entropy,
        operands,
        ("x", "kernel", "bias", "row_weights", "logit_scale"),
        of_rows if lead and reduction == "none" else (),
        reduction=reduction,
        rows_per_chunk=draw.pick((None, 2, 3)),
        **options,
    )


def _rotated(draw: Draw) -> tuple[str, tuple[int, int], int, dict[str, Any], dict[str, Any]]:
    """The dtype, the numbers of heads, their columns, the scales of some or of each, and options."""
    normalize, dtype, heads = draw.pick((True, "layer", False)), draw.pick(DTYPES), (draw.pick(HEADS), draw.pick(HEADS))
    cols = draw.pick(HEAD_SIZES[normalize == "layer" :])
    shapes = [draw.pick(((cols,), (count, cols))) for count in heads]
    q_scale, k_scale = (draw.weight(shape, dtype) if normalize else None for shape in shapes)
    options = {"normalize": normalize, "interleaved": draw.chance(0.3)}
    return dtype, heads, cols, {"q_scale": q_scale, "k_scale": k_scale}, options


def rotary(draw: Draw) -> Call:
    dtype, heads, cols, scales, options = _rotated(draw)
    lead, axis = draw.leading(), draw.pick((-2, -2, -3))
    q, k = (
        draw.floats((*lead, count, cols) if axis == -2 else (*lead[:-1], count, lead[-1], cols), dtype)
        for count in heads
    )
    own = tuple(draw.pick((1, n)) for n in lead)
    tables: dict[str, Any] = {"positions": draw.pick((None, jnp.asarray(draw.rng.integers(99, size=own), "int32")))}
    if draw.chance(0.3):
        tables = {name: draw.floats((*own, cols // 2), draw.pick((dtype, "float32"))) for name in ("cos", "sin")}
    by_example = ("q", "k", *tables) if own[0] == lead[0] and len(lead) > 1 else ()
    operands = {"q": q, "k": k, **scales, **tables}
    return _call(jaxnorm.qk_norm_rotary, operands, ("q", "k", *scales), by_example, heads_axis=axis, **options)


def rotary_of_product(draw: Draw) -> Call:
    dtype, (heads, kv_heads), cols, scales, options = _rotated(draw)
    lead = draw.leading()
    lead = (1,) * (2 - len(lead)) + lead  # of four axes
    positions = draw.pick((None, jnp.asarray(draw.rng.integers(99, size=lead), "int32")))
    operands = {"qkv": draw.floats((*lead, heads + 2 * kv_heads, cols), dtype), **scales, "positions": positions}
    options |= {"heads": heads, "kv_heads": kv_heads}
    return _call(jaxnorm.qkv_norm_rotary, operands, ("qkv", *scales), ("qkv", "positions"), **options)


def group_norm(draw: Draw) -> Call:
    """With weights of all examples or of each."""
    lead, size, dtype = draw.leading(), draw.pick((1, 4, 5)), draw.pick(DTYPES)
    channels = size * draw.pick(GROUPS)
    shapes = [draw.pick(((channels,), (lead[0], channels))) for _ in range(2)]
    scale, bias = (draw.weight(shape, dtype) for shape in shapes)
    of_examples = [name for name, a in (("scale", scale), ("bias", bias)) if a is not None and a.ndim > 1]
    return _call(
        jaxnorm.group_norm,
        {"x": draw.floats((*lead, channels), dtype), "scale": scale, "bias": bias},
        ("x", "scale", "bias"),
        ("x", *of_examples),
        group_size=size,
        activation=draw.pick((None, "silu", "gelu")),
    )


def per_head(draw: Draw) -> Call:
    """A norm whose scale and bias have leading axes, each of its own."""
    public = draw.pick((jaxnorm.rms_norm, jaxnorm.layer_norm))
    shape, dtype = (draw.pick(LENGTHS), *draw.leading(), draw.pick(COLS[2:])), draw.pick(DTYPES)

    def dims() -> tuple[int, ...]:
        return shape[int(draw.rng.integers(1, len(shape))) :]

    return _call(
        public,
        {"x": draw.floats(shape, dtype), "scale": draw.weight(dims(), dtype), "bias": draw.weight(dims(), dtype)},
        ("x", "scale", "bias"),
        ("x",),
    )


def lookup(draw: Draw) -> Call:
    """Of rows that are there, some counted from the end."""
    lead, dtype = draw.rows(), draw.pick(DTYPES)
    table = draw.floats((draw.pick((1, *GROUPS, 40, 300)), draw.pick(COLS)), dtype)
    ids = jnp.asarray(draw.rng.integers(-len(table), len(table), lead), "int32")
    args = {"table": table, "ids": ids}
    return _call(jaxnorm.embedding, args, ("table",), ("ids",) if lead else (), dtype=draw.pick((None, dtype, *DTYPES)))


def segment_sum(draw: Draw) -> Call:
    """Some of the rows are in no segment."""
    shape, segments = (draw.pick((*LENGTHS, 100)), *draw.rows(), draw.pick(COLS)), draw.pick((1, *GROUPS, 40))
    is_sorted, ids = draw.chance(0.3), draw.rng.integers(-1, segments + 2, shape[0])
    operands = {
        "data": draw.floats(shape, draw.pick(DTYPES)),
        "segment_ids": jnp.asarray(np.sort(ids) if is_sorted else ids, "int32"),
    }
    return _call(jaxnorm.segment_sum, operands, ("data",), (), num_segments=segments, indices_are_sorted=is_sorted)


def log_prob(logits, **given):
    return jaxnorm.sample(logits, uniform=0.5, return_log_prob=True, **given)[1]


def sample(draw: Draw) -> Call:
    """The logarithms, of rows that have one column which is nearly all of them, so that no rounding changes the id."""
    lead, cols = draw.rows(), draw.pick(COLS)
    logits = draw.floats((*lead, cols), draw.pick(DTYPES))
    most = jnp.asarray(draw.rng.integers(0, cols, (*lead, 1)))
    operands: dict[str, Any] = {"logits": jnp.where(jnp.arange(cols) == most, 12, logits)}
    settings = {"temperature": (0.25, 1.0), "top_p": (0.5, 2.0), "min_p": (0.0, 0.25)}
    for name, values in settings.items():
        if draw.chance(0.5):
            operands[name] = jnp.asarray(draw.rng.choice(values, lead), "float32")
    return _call(log_prob, operands, ("logits",), tuple(operands) if lead else ())


def quantized_dot(draw: Draw) -> Call:
    """By a kernel that stands still."""
    lead, depth, columns, dtype = draw.rows(), draw.pick(COLS), draw.pick(COLS), draw.pick(DTYPES)
    kernel = jaxnorm.quantize_kernel(draw.floats((depth, columns), "float32"), Quantization("int8"))
    operands = {"x": draw.floats((*lead, depth), dtype) / 4, "bias": draw.weight((columns,), dtype)}
    public = wraps(jaxnorm.quantized_dot)(partial(jaxnorm.quantized_dot, kernel=kernel))
    return _call(public, operands, ("x", "bias"), ("x",) if lead else ())


OTHERS = (softmax, cross_entropy, linear_cross_entropy, rotary, rotary, rotary_of_product, group_norm, per_head)
OTHERS += (lookup, segment_sum, sample, quantized_dot)


def draw_call(draw: Draw) -> Call:
    return of_table(draw) if draw.chance(0.5) else draw.pick(OTHERS)(draw)
