"""Law 8: NaN and infinity, nothing, one, a million, more than 2**31; no NaN that `jax.debug_nans` would find elsewhere.

Memory aligned to nothing is in test_bits.py.
"""

from functools import partial

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import DTYPES, KINDS, NORMS, bits, both_ways, draw, draw_scale, draw_x, with_gradients
from coverage import cover, over
from native import is_platform_with_kernels
from op import COTANGENTS, rows
from table import CROSS_ENTROPY, EACH, EACH_OF_ALL, EVERY, GROUPED, NORMS as PLAIN, OPS, PER_HEAD

import jaxnorm
from jaxnorm.ops.norm import formula

pytestmark = pytest.mark.any_code


def large(test):
    """On one worker: each takes many GiB of a GPU."""
    return pytest.mark.needs("memory")(pytest.mark.xdist_group("large")(test))


# Where a value that is not finite spreads as in the formula: a quantised one has bits of its own to keep, and in a
# product with a gate a zero is on its way to infinity.
SPREAD = [op for op in OPS if op.exact and op.public != "gated_rms_norm"]


def size_of(op):
    """Rows with a rest after the last vector."""
    return op.lengths[1] if len(op.small.dims) > 2 else rows(4, 1021)


with_gradients_of_ones = partial(both_ways, cotangents_of=partial(jax.tree.map, jnp.ones_like))


def classes(array) -> np.ndarray:
    """Of each number: finite (0), NaN, or an infinity of which sign."""
    return np.where(np.isfinite(np.float32(array)), 0, np.float32(array))


def assert_spreads_alike(op, cotangents, args):
    """The results alike in every number; in the gradients, where it is not finite: what the difference of two infinite
    sums becomes depends on which of them is subtracted first."""
    actual, expected = (jax.jit(with_gradients(f))(cotangents, *args) for f in (op.function, op.formula))
    for a, e in zip(actual[0], expected[0], strict=True):
        np.testing.assert_array_equal(classes(a), classes(e))
    for a, e in zip(actual[1], expected[1], strict=True):
        np.testing.assert_array_equal(np.isfinite(np.float32(a)), np.isfinite(np.float32(e)))


def inputs(op, size, dtypes=None):
    args = op.draw(size, dtypes, dtypes[0] if dtypes else "float32")
    return args, op.cotangents(args, **size.options)


# Inside a vector, in the rest after the last vector, at the row's ends.
@pytest.mark.on_emulator
@over(
    SPREAD,
    value=lambda op: [np.nan, np.inf, -np.inf],
    column=lambda op: [0, 5, size_of(op).dims[-1] // 2, -1],
    array=lambda op: [i for i in range(op.arrays) if op.gradients[i]],
    dtypes=lambda op: op.dtypes,
)
def test_what_is_not_finite_in_arrays_spreads_as_in_the_formula(op, value, column, array, dtypes):
    args, cotangents = inputs(op, size_of(op), dtypes)
    spoilt = [a.at[1, ..., column].set(value) if i == array else a for i, a in enumerate(args)]
    assert_spreads_alike(op, cotangents, spoilt)


@over(
    SPREAD,
    value=lambda op: [np.nan, np.inf, -np.inf],
    operand=lambda op: [*op.weights, *COTANGENTS[: min(2, op.arrays) if op.has_sum else 1]],
)
def test_what_is_not_finite_elsewhere_spreads_as_in_the_formula(op, value, operand):
    args, cotangents = inputs(op, size_of(op))
    named = dict(zip((*op.operands, *COTANGENTS), (*args, *cotangents), strict=False))
    named[operand] = named[operand].at[..., -1].set(value)
    args, cotangents = [named[name] for name in op.operands], tuple(named[n] for n in COTANGENTS if n in named)
    assert_spreads_alike(op, cotangents, args)


@pytest.mark.on_emulator
@over(OPS, value=lambda op: [np.nan, np.inf], dtypes=lambda op: op.dtypes)
def test_a_row_that_is_not_finite_leaves_its_neighbours_alone(op, value, dtypes):
    args, function = op.draw(op.small, dtypes), jax.jit(op.run(op.function))
    spoilt, others = function(args[0].at[1].set(value), *args[1:]), jnp.array([0, *range(2, op.small.dims[0])])
    of_rows = [(a[others], b[others]) for a, b in zip(spoilt, function(*args), strict=True) if a.ndim]
    assert bits([a for a, _ in of_rows]) == bits([b for _, b in of_rows])


@pytest.mark.parametrize("op", GROUPED, ids=str)
def test_a_group_that_is_not_finite_leaves_its_neighbours_alone(op):
    args, norm = op.draw(rows(4, 256)), jax.jit(partial(op.function, group_size=64))
    y, clean = norm(args[0].at[1, 70].set(np.nan), *args[1:])[0], np.asarray(norm(*args)[0]).copy()
    clean[1, 64:128] = y[1, 64:128]
    np.testing.assert_array_equal(y, clean)
    assert np.isnan(y[1, 70])


@pytest.mark.parametrize("op", PLAIN, ids=str)
def test_an_output_too_large_for_its_dtype(op):
    args = draw_x((4, 64), "float16"), jnp.full((64,), 6e4, jnp.float16)
    np.testing.assert_array_equal(*(classes(jax.jit(f)(*args)[0]) for f in (op.function, op.formula)))


# Squares beyond float32 are infinite in the formula, and rstd zero.
@pytest.mark.parametrize("op", PLAIN, ids=str)
def test_squares_that_overflow(op):
    x = 1e30 * draw_x((4, 64))
    np.testing.assert_array_equal(jax.jit(op.function)(x)[0], op.formula(x)[0])


# Without epsilon, rstd is infinite where the squares are below the smallest number: results and gradients are infinite
# or no numbers, as the formulas say. Where dy has the signs of x_hat the sums over a row are infinite, else no numbers.
@pytest.mark.on_emulator
@cover(op=PLAIN, dtype=DTYPES, cols=[5, 64, 1021, 5376, 40_001], alike=[True, False])
@emulated.wherever
def test_squares_that_vanish(op, dtype, cols, alike):
    tiny = 1e-25 if dtype != "float16" else 6e-8  # whose square float32 holds
    fourth = jnp.arange(cols) % 3 == 0
    x = jnp.stack([jnp.where(fourth, 4 * tiny, tiny), jnp.where(fourth, 4, 1)]).astype(dtype)
    dy = jnp.where(fourth | (not alike) | (op.kind == "rms"), 1, -1) * jnp.ones_like(x)
    norm = formula.Norm(kind=op.kind, epsilon=0.0, scale_offset=0.0, out_dtype=jnp.dtype(dtype))
    wanted = formula.Variables(jnp.dtype(dtype))

    @jax.jit
    def expected(x):
        results, stats = formula.forward(norm, formula.Operands(x))
        saved = formula.Saved(x, stats)
        return results.y, formula.backward(norm, formula.Results(dy), saved, wanted, ()).x

    (y,), (dx,) = jax.jit(with_gradients(partial(op.function, epsilon=0.0)))((dy,), x)
    for actual, value in zip((y, dx), expected(x), strict=True):
        np.testing.assert_array_equal(classes(actual), classes(value))


# Past a row's end x is 0, and its x_hat is not finite where the mean is so large; none of it belongs to the row.
@cover(
    dtype=["float32", "bfloat16"],
    rows=[3, 600],
    row=[
        *((cols, 2e36, 1e-5) for cols in (5, 16, 17, 100)),
        *((cols, 1e33, 1e-12) for cols in (5, 16, 17, 100, 1021, 1056, 5376, 140_001)),  # whose sums are finite, too
    ],
)
def test_the_gradient_of_a_constant_row_near_the_largest_number(dtype, rows, row):
    cols, value, epsilon = row
    (_, op), dims = PLAIN, (min(rows, 2**20 // cols), cols)
    args, cotangents = inputs(op, op.small._replace(dims=dims, weights=(cols,)), (dtype,))
    run = jax.jit(with_gradients(partial(op.function, epsilon=epsilon)))
    results = run(cotangents, jnp.full(dims, value, dtype), *args[1:])
    assert all(np.isfinite(np.float32(result)).all() for result in jax.tree.leaves(results))


def empty(op):
    dims, weights, _ = op.small
    shapes = [(0, *dims[1:]), *([(3, 0, *dims[1:])] if weights == dims[-1:] else [])]
    table = [op.small._replace(dims=shape) for shape in shapes]
    of_heads = [op.small._replace(dims=(3, 0, 64), weights=(0, 64))] if op in PER_HEAD else []
    return [*table, *of_heads, *([rows(0, 0, 1), rows(0, 100_003), rows(4, 0, 128)] if op in PLAIN else [])]


@over(EVERY, size=empty)
def test_no_rows(op, size):
    args = op.draw(size)
    cotangents = op.cotangents(args, **size.options)
    results, gradients = jax.jit(with_gradients(op.run(**size.options)))(cotangents, *args)
    values, *_ = op.function(*args, **size.options)
    assert values.shape[:-1] == results[0].shape[:-1] == op.normalised(jnp.zeros(size.dims)).shape[:-1]
    for i, gradient in enumerate(gradients):
        np.testing.assert_array_equal(gradient, jnp.zeros_like(args[i]))


@over(EACH_OF_ALL, moving=lambda op: ["all", 0, len(op.operands) - 1])
def test_no_examples(op, moving):
    args = op.draw(op.small)
    moves = [moving in ("all", i) for i in range(len(args))]
    examples = [jnp.zeros((0, *a.shape), a.dtype) if moved else a for a, moved in zip(args, moves, strict=True)]
    of_examples = jax.vmap(op.run(), [0 if moved else None for moved in moves])
    results, gradients = jax.jit(both_ways(of_examples))(*examples)
    assert [r.shape for r in results] == [(0, *r.shape) for r in jax.eval_shape(op.run(), *args)]
    for gradient, example in zip(gradients, examples, strict=True):
        np.testing.assert_array_equal(gradient, jnp.zeros_like(example))


@over(EACH, implementation=lambda op: ["native", "xla"] if is_platform_with_kernels() else ["xla"])
def test_ranks_are_not_promoted(op, implementation):
    def both(*args):
        return both_ways(op.run())(*args), jax.vmap(op.run())(*(jnp.stack([a, a]) for a in args))

    with jax.numpy_rank_promotion("raise"), jaxnorm.implementation(implementation):
        assert jax.jit(both).lower(*op.draw(op.small))


# An axis of length 0 has no mean; the formula says what comes of it, which is nothing.
@over([op for op in EACH if len(op.small.dims) == 2], cols=lambda op: [0])
def test_rows_of_no_elements(op, cols):
    y, *_ = jax.jit(op.function)(*op.draw(rows(3, cols)))
    assert y.shape == (3, op in CROSS_ENTROPY)  # a loss is one number a row


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_one_element(dtype):
    x = jnp.asarray([[3.0], [-2.0], [0.0]], dtype)
    signs = np.sign(np.float32(x))
    np.testing.assert_allclose(np.float32(jax.jit(NORMS["rms"])(x)), signs, rtol=1e-6)
    np.testing.assert_array_equal(jax.jit(NORMS["layer"])(x), jnp.zeros((3, 1), dtype))


@cover(kind=KINDS, dtype=DTYPES, cols=[2**20, 2**21 + 1])
def test_rows_of_a_million(kind, dtype, cols):
    signs = jnp.where(jnp.arange(cols) % 2 == 0, 1, -1).astype(dtype)
    y = jax.jit(NORMS[kind])(3 * signs[None])
    np.testing.assert_allclose(np.float32(y), np.float32(signs[None]), atol=2e-6 if dtype == "float32" else 0)


@over([op for op in EACH if len(op.small.dims) == 2 and not op.derived], count=lambda op: [70_000, 2**20 + 1])
def test_more_rows_than_a_cuda_grid_has_in_two_dimensions(op, count):
    args = op.draw(op.small)
    repeated = [jnp.tile(a[:1], (count, 1)) for a in args[: op.arrays]]
    results = jax.jit(both_ways(lambda *arrays: op.run()(*arrays, *args[op.arrays :])))(*repeated)
    assert bits(jax.tree.map(lambda a: a[-1], results)) == bits(jax.tree.map(lambda a: a[0], results))


# Byte offsets of 2**32 and element offsets of 2**31 do not fit 32 bits. The rows repeat, and so must the results.
@large
@pytest.mark.parametrize("cols", [4096, 100_003])
@pytest.mark.parametrize("kind", KINDS)
def test_more_elements_than_an_int32_counts(kind, cols):
    period = 64
    rows, block = (2**31 // cols // period + 2) * period, draw_x((period, cols), "bfloat16")
    x = jnp.tile(block, (rows // period, 1))
    scale = draw_scale((cols,))
    run = jax.jit(lambda x: (NORMS[kind](x, scale), jax.vjp(lambda x: NORMS[kind](x, scale), x)[1](x)[0]))
    y, dx = run(x)
    assert bits((y[-period:], dx[-period:])) == bits(run(block))


@large
def test_a_row_longer_than_an_int32_counts():
    cols = 2**31 + 8
    x = jnp.tile(jnp.asarray([2.0, -2.0], "bfloat16"), cols // 2).reshape(1, cols)
    y = jax.jit(NORMS["rms"])(x)
    assert bits(jax.lax.slice_in_dim(y[0], cols - 4, cols)) == bits(jnp.asarray([1.0, -1.0, 1.0, -1.0], "bfloat16"))


# `jax.debug_nans` raises at no finite operands: no NaN is made on the way, nor as a constant.
IMPLEMENTATIONS = [None, "xla"]
HOW = {"eager": lambda f: f, "jit": jax.jit}


def no_alarm(function, *args):
    with jax.debug_nans(True):
        jax.block_until_ready(function(*args))


@over(EVERY, implementation=lambda _: IMPLEMENTATIONS, how=lambda _: HOW, pairs=True)
def test_no_alarm_by_the_table(op, implementation, how):
    args, given = op.draw(op.small), {**op.small.options, "implementation": implementation}
    no_alarm(how(partial(op.function, **given)), *args)
    no_alarm(how(with_gradients_of_ones(partial(op.differentiable, **given))), *args)


X, KERNEL, LABELS = draw_x((4, 6, 32)), draw("kernel", (32, 48)), jnp.zeros((4, 6), int)
LOSS = jaxnorm.softmax_cross_entropy_with_integer_labels
LINEAR_LOSS = partial(jaxnorm.linear_cross_entropy, kernel=KERNEL, labels=LABELS)
FILTERS = {"uniform": 0.5, "temperature": jnp.arange(6.0), "top_k": 9, "top_p": 0.9, "min_p": 0.01}
OTHERS = {
    "softmax, axis 0": partial(jaxnorm.softmax, axis=0),
    "softmax, axes": partial(jaxnorm.softmax, axis=(0, 1)),
    "softmax, causal": partial(jaxnorm.softmax, causal=True, window=2, offset=-2),
    "log_softmax, axis 0": partial(jaxnorm.log_softmax, axis=0),
    "log_softmax, causal": partial(jaxnorm.log_softmax, causal=True, offset=-2),
    "loss, axis 0": partial(LOSS, labels=jnp.zeros((6, 32), int), axis=0),
    "loss, options": partial(LOSS, labels=LABELS, label_smoothing=0.1, z_loss=1e-4, soft_cap=5.0, ignore_index=0),
    "linear loss": LINEAR_LOSS,
    "linear loss, none": partial(LINEAR_LOSS, reduction="none", ignore_index=0),
    "float8_linear": partial(jaxnorm.float8_linear, kernel=KERNEL),
    "embedding": lambda x, **how: jaxnorm.embedding(x[0], LABELS, dtype="bfloat16", **how),
    "sample": lambda x, **how: jaxnorm.sample(x, **FILTERS, return_log_prob=True, **how)[1],
    "segment_sum": partial(jaxnorm.segment_sum, segment_ids=jnp.array([2, 0, 7, -1]), num_segments=3),
}


@cover(function=OTHERS, implementation=IMPLEMENTATIONS, how=HOW)
def test_no_alarm_elsewhere(function, implementation, how):
    no_alarm(how(with_gradients_of_ones(partial(function, implementation=implementation))), X)


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_no_alarm_at_quantize(how):
    no_alarm(how(lambda x: jaxnorm.quantize(x, jaxnorm.Quantization("int8")).dequantize(jnp.float32)), X)
