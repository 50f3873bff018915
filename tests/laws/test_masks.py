"""Law 11: what a mask hides reaches no result, in any mode of differentiation.

Each case is a function, and which places of its operands and of its result are hidden. With anything at these places,
of values, tangents and cotangents, the same program gives what it gives of zeros there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import DTYPES, bits, draw
from coverage import cover, over
from table import PADDED

import jaxnorm

pytestmark = pytest.mark.any_code

IMPLEMENTATIONS, IGNORED = ("native", "xla"), -100


@dataclass(frozen=True, eq=False)
class Case:
    function: Callable[..., Any]  # of operands, and of an implementation
    dims: tuple[tuple[int, ...], ...]  # those of the operands
    hidden: tuple[Any, ...]  # where each is hidden
    hidden_results: Any = False
    implementations: tuple[str, ...] = IMPLEMENTATIONS


# Of each row something else, of one nothing, of another all but one place.
ROWS, COLS = 5, 7
WHERE = np.random.default_rng(1).random((ROWS, COLS)) < 0.6
WHERE[:, 0] = True
WHERE[1] = False
WHERE[2] = np.arange(COLS) == 3
LABELS = jnp.asarray([0, 2, 3, 0, 0])  # classes that count, but in the row of which nothing does


def cross_entropy(where=None, labels=LABELS, *, has_scale=False, **options):
    """With a scale that is an array, if it has one; for half types that has no kernel."""
    hidden = np.zeros((ROWS, COLS), bool) if where is None else ~where
    ignored = np.asarray(labels) == options.get("ignore_index")
    of_logits = partial(jaxnorm.softmax_cross_entropy_with_integer_labels, labels=labels, where=where, **options)

    def function(x, *scale, implementation):
        return of_logits(x, implementation=implementation, **({"logit_scale": scale[0]} if scale else {}))

    hidden, results = hidden | ignored[:, None], ignored | (hidden | ignored[:, None]).all(-1)
    if has_scale:
        return Case(function, ((ROWS, COLS), ()), (hidden, False), results, (None, "xla"))
    return Case(function, ((ROWS, COLS),), (hidden,), results)


HALF_IGNORED = jnp.asarray([0, IGNORED, 3, IGNORED, 5])
SOME_IGNORED, SMOOTH = {"labels": HALF_IGNORED, "ignore_index": IGNORED}, {"label_smoothing": 0.2, "z_loss": 0.1}


# A row of weight 0, and classes of which one is a label and does not count.
ZERO = np.arange(ROWS) == 2
OF_CLASSES = (np.arange(COLS) != 1) & (np.arange(COLS) != 5)
OF_ROWS = np.roll(WHERE, -1, 0)  # the first row has no class
WHICH_ROWS = np.arange(ROWS) > 0


def linear(reduction, where=None, *, vmapped=False, depth=6, **options):
    """With a mask also all else that a call may have; of what gives logsumexp that alone."""

    def function(x, kernel, *others, implementation):
        given = {"ignore_index": IGNORED, "reduction": reduction, "implementation": implementation, **options}
        if others:
            bias, weights, scale = others
            given |= {"bias": bias, "where": where, "row_weights": jnp.where(ZERO, 0, weights), "logit_scale": scale}

        def of_rows(x):
            found = jaxnorm.linear_cross_entropy(x, kernel, HALF_IGNORED, **given)
            return found[1] if "return_logsumexp" in options else found

        return jax.vmap(of_rows)(x) if vmapped else of_rows(x)

    labels, counts = np.asarray(HALF_IGNORED), np.ones((ROWS, COLS), bool)
    counts &= True if where is None else where[:, None] if where.shape == (ROWS,) else where
    has_no_weight = (labels == IGNORED) if where is None else ZERO | (labels == IGNORED)
    is_out = has_no_weight | ~counts.any(-1)
    is_unread = (is_out[:, None] | ~(counts | (np.arange(COLS) == labels[:, None]))).all(0)
    dims = ((2,) * vmapped + (ROWS, depth), (depth, COLS), (COLS,), (ROWS,), ())
    hidden = np.broadcast_to(is_out[:, None], dims[0]), np.broadcast_to(is_unread, dims[1]), is_unread, has_no_weight
    count = 2 if where is None else 5
    return Case(function, dims[:count], (*hidden, False)[:count], reduction == "none" and is_out)


LOSSES = {
    "loss, where": cross_entropy(WHERE),
    "loss, where and soft_cap": cross_entropy(WHERE, soft_cap=3.0, logit_scale=-0.5),
    "loss, where and a traced scale": cross_entropy(WHERE, has_scale=True, soft_cap=3.0),
    "loss, where and smoothing": cross_entropy(WHERE, **SMOOTH),
    "loss, ignored rows": cross_entropy(**SOME_IGNORED),
    "loss, ignored rows and all": cross_entropy(WHERE | (np.arange(COLS) == 5), **SOME_IGNORED, soft_cap=3.0, **SMOOTH),
    "linear, mean": linear("mean"),
    "linear, sum": linear("sum", soft_cap=3.0, **SMOOTH),
    "linear, none": linear("none"),
    "linear, mean of chunks": linear("mean", rows_per_chunk=2),
    "linear, none of chunks": linear("none", rows_per_chunk=2),
    "linear, mean of examples' chunks": linear("mean", vmapped=True, rows_per_chunk=2),
    **{
        f"linear, {of} of all, where of {name}": linear(of.replace("logsumexp", "none"), where, **given)
        for name, where in {"classes": OF_CLASSES, "rows": OF_ROWS, "labels": WHICH_ROWS}.items()
        for of, given in {
            "mean": {"rows_per_chunk": 2},
            "sum": {"soft_cap": 3.0, **SMOOTH},
            "none": {"rows_per_chunk": 2},
            "logsumexp": {"rows_per_chunk": 2, "return_logsumexp": True, "soft_cap": 3.0},
        }.items()
    },
}

SPOILERS, CAUSAL = (np.nan, np.inf, -np.inf, "largest"), np.tri(ROWS, COLS, dtype=bool)


def normalised(function, counts, *, dims=(ROWS, COLS), implementations=IMPLEMENTATIONS, has_scale=False, **options):
    hidden = np.broadcast_to(~counts, dims)
    if has_scale:  # an array, for half types without a kernel
        of = partial(function, **options)
        return Case(lambda x, s, **how: of(x, logit_scale=s, **how), (dims, ()), (hidden, False), hidden, (None, "xla"))
    return Case(partial(function, **options), (dims,), (hidden,), hidden, implementations)


def entropy(x, implementation):
    """Of the probabilities that count: at the others the logarithm has an infinite derivative."""
    p = jaxnorm.softmax(x, where=WHERE, implementation=implementation)
    return jnp.where(WHERE, -p * jnp.log(p), 0).sum(-1)


SOFTMAX, LOG_SOFTMAX = jaxnorm.softmax, jaxnorm.log_softmax
LOSS = jaxnorm.softmax_cross_entropy_with_integer_labels
FIRST = {"dims": (COLS, ROWS), "implementations": ("xla",), "where": WHERE.T, "axis": 0}
MASKS = {
    "where": (WHERE, {"where": WHERE}),
    "causal": (CAUSAL, {"causal": True}),
    "offset": (np.tri(ROWS, COLS, 2, bool), {"causal": True, "offset": 2}),
    "window": (CAUSAL & ~np.tri(ROWS, COLS, -2, bool), {"causal": True, "window": 2}),
    "where and a traced scale": (WHERE, {"where": WHERE, "has_scale": True}),
    "causal and a traced scale": (CAUSAL, {"causal": True, "has_scale": True}),
    "where and causal": (WHERE & CAUSAL, {"where": WHERE, "causal": True, "logit_scale": -0.5}),
}
CASES = {
    **{f"softmax, {name}": normalised(SOFTMAX, counts, **given) for name, (counts, given) in MASKS.items()},
    **{f"log_softmax, {name}": normalised(LOG_SOFTMAX, counts, **given) for name, (counts, given) in MASKS.items()},
    **{f"{f.__name__} over the first axis": normalised(f, WHERE.T, **FIRST) for f in (SOFTMAX, LOG_SOFTMAX)},
    "entropy": Case(entropy, ((ROWS, COLS),), (~WHERE,), ~WHERE.any(-1)),
    **LOSSES,
}


class Run(NamedTuple):
    name: str
    case: Case
    implementation: str

    def __str__(self):
        return f"{self.name}, {self.implementation}"


EACH = [Run(name, case, how) for name, case in CASES.items() for how in case.implementations]


def modes(function):
    """What each mode gives of operands, of what is like them, and of two cotangents of the result."""

    def gradient(args, dy):
        return jax.vjp(function, *args)[1](dy)

    def tangent(args, dots):
        return jax.jvp(function, args, dots)

    def all_of(args, dots, dy, ddy):
        return {
            "value": function(*args),
            "gradient": gradient(args, dy),
            "tangent": tangent(args, dots)[1],
            "tangent of gradient": jax.jvp(gradient, (args, dy), (dots, ddy))[1],
            "gradient of gradient": jax.vjp(gradient, args, dy)[1](dots),
            "gradient of tangent": jax.vjp(tangent, args, dots)[1]((dy, ddy)),
        }

    return jax.jit(all_of)


def inputs(case, function, dtype):
    args, dots = (tuple(draw(f"{of} {i}", at, dtype) for i, at in enumerate(case.dims)) for of in ("operand", "dot"))
    result = jax.eval_shape(function, *args)
    return args, dots, *(draw(name, result.shape, result.dtype) for name in ("dy", "ddy"))


def put(value, hidden, array):
    value = float(jnp.finfo(array.dtype).max) if value == "largest" else value
    return jnp.where(hidden, jnp.asarray(value, array.dtype), array)


def differing(actual, expected):
    """The names of the modes whose results are not the same."""

    def same(a, b):
        return np.array_equal(np.float32(a), np.float32(b), equal_nan=True)

    return [name for name in expected if not jax.tree.all(jax.tree.map(same, actual[name], expected[name]))]


@pytest.mark.on_emulator
@over(EACH, pairs=False, dtype=lambda _: DTYPES)
def test_what_is_hidden_reaches_no_result(op, dtype):
    case, function = op.case, partial(op.case.function, implementation=op.implementation)
    run, given = modes(function), inputs(case, function, dtype)
    hidden = case.hidden, case.hidden, case.hidden_results, case.hidden_results

    def of(value, only):
        """The results with this value where something is hidden in these inputs, and 0 in the others."""
        values = [value if i in only else 0.0 for i in range(4)]
        return run(*(jax.tree.map(partial(put, v), *pair) for v, *pair in zip(values, hidden, given, strict=True)))

    expected = of(0.0, ())
    for name, derivative in expected.items():
        assert name == "value" or jax.tree.all(jax.tree.map(lambda a: np.isfinite(np.float32(a)).all(), derivative))
    for dx, place in zip(expected["gradient"], case.hidden, strict=True):
        assert not np.asarray(dx)[np.broadcast_to(place, dx.shape)].any()
    wrong = {
        f"{value} in {place}": names
        for value in SPOILERS
        for place, only in {"all": range(4), "operands": [0], "tangents": [1], "dy": [2], "ddy": [3]}.items()
        if (names := differing(of(value, only), expected))
    }
    assert not wrong


# Law 8: where y is 0 because the exponential is too small, and not by a mask, a cotangent is seen.
@cover(
    function={f.__name__: f for f in (SOFTMAX, LOG_SOFTMAX)},
    implementation=IMPLEMENTATIONS,
    dtype=DTYPES,
    options=["none", "where", "causal"],
)
def test_what_is_small_is_not_hidden(function, implementation, dtype, options):
    x = jnp.zeros((3, 6, 6), dtype).at[1, 4, 2].set(-1000)
    given = {"none": {}, "where": {"where": np.arange(6) != 5}, "causal": {"causal": True}}[options]
    dy = jnp.ones_like(x).at[1, 4, 2].set(jnp.nan)
    _, pullback = jax.vjp(jax.jit(partial(function, implementation=implementation, **given)), x)
    (dx,) = pullback(dy)
    is_nan = np.zeros(x.shape, bool)
    is_nan[1, 4] = np.broadcast_to(given.get("where", True), 6) & (np.arange(6) <= (4 if "causal" in given else 5))
    np.testing.assert_array_equal(np.isnan(np.float32(dx)), is_nan)


# A sum of nothing is no reason for an alarm, whatever x is there.
NOTHING = {
    "softmax": (partial(SOFTMAX, where=False), 0.0),
    "log_softmax": (partial(LOG_SOFTMAX, where=False), -np.inf),
    "loss": (partial(LOSS, labels=jnp.zeros(2, int), where=False), 0.0),
    "ignored": (partial(LOSS, labels=jnp.full(2, -1), ignore_index=-1), 0.0),
}


@cover(case=NOTHING, transform={"jit": jax.jit, "eager": lambda f: f}, what=["value", "gradient"])
def test_no_false_alarm(case, transform, what):
    function, expected = partial(case[0], implementation="xla"), case[1]
    x = jnp.full((2, 4), -jnp.inf)
    with jax.debug_nans(True):
        if what == "value":
            np.testing.assert_array_equal(transform(function)(x), expected)
        else:
            dx = transform(lambda x: jax.vjp(function, x)[1](jnp.ones_like(function(x)))[0])(x)
            np.testing.assert_array_equal(dx, 0)


# Zeros behind a row, which a result is padded with, hide their cotangents as a mask does.
@pytest.mark.on_emulator
@cover(op=PADDED, dtype=DTYPES, value=SPOILERS[:3])
def test_cotangents_of_padding(op, dtype, value):
    args = op.draw(op.small, (dtype,) * op.arrays)
    _, pullback = jax.vjp(jax.jit(op.run()), *args)
    dy, *others = op.cotangents(args, **op.small.options)
    is_padding = jnp.arange(dy.shape[-1]) >= args[0].shape[-1]
    assert is_padding.any()
    zeros, spoilt = (pullback((jnp.where(is_padding, v, dy).astype(dy.dtype), *others)) for v in (0, value))
    assert bits(spoilt) == bits(zeros)


OF_MASKS = {
    "softmax": jaxnorm.softmax,
    "log_softmax": lambda x, **given: jnp.exp(jaxnorm.log_softmax(x, **given)),
    "causal": partial(jaxnorm.softmax, causal=True),
    "loss": lambda x, **given: LOSS(x, jnp.zeros(x.shape[:-1], "int32"), **given),
}


# Of 8192 rows of 128256 classes the booleans of all logits are a gigabyte.
@pytest.mark.needs("kernels")
@cover(name=[*OF_MASKS], shape=[(4, 16, 1), (4, 1, 24), (1, 1, 24), (1, 16, 1), (1, 1, 1)], way=["forward", "gradient"])
def test_a_mask_is_not_written_out(name, shape, way):
    def called(implementation):
        def of(x, where):
            return OF_MASKS[name](x, where=where, implementation=implementation)

        return jax.jit(of if way == "forward" else jax.grad(lambda x, where: jnp.sin(of(x, where)).sum()))

    x, where = draw("x", (4, 16, 24)), (draw("where", shape) > -0.5).at[:, :1, :1].set(True)
    native = called("native").lower(x, where).compile()
    assert "pred[4,16,24]" not in native.as_text()
    np.testing.assert_allclose(native(x, where), called("xla")(x, where), rtol=1e-5, atol=1e-6)
    whole = jnp.broadcast_to(where, x.shape)
    np.testing.assert_array_equal(native(x, where), called("native")(x, whole))


# Of a shard one column may hide all: of other shards' classes it says nothing.
@cover(name=[name for name in OF_MASKS if name != "causal"], implementation=[None, "xla"])
def test_a_mask_of_one_column_is_of_its_shard_alone(name, implementation):
    x, where = draw("x", (2, 4, 24)), jnp.asarray([True, True, False])[:, None, None, None]
    parts, wheres = jnp.moveaxis(x.reshape(2, 4, 3, 8), 2, 0), jnp.broadcast_to(where, (3, 2, 4, 1))

    def of_parts(x):
        def of_part(x, where):
            return OF_MASKS[name](x, where=where, axis_name="part", implementation=implementation)

        return jax.vmap(of_part, axis_name="part")(x, wheres)

    whole = OF_MASKS[name](x, where=jnp.arange(24) < 16)
    expected = jnp.stack([whole] * 3) if whole.ndim == 2 else jnp.moveaxis(whole.reshape(2, 4, 3, 8), 2, 0)
    np.testing.assert_allclose(of_parts(parts), expected, rtol=1e-5, atol=1e-6)
