"""Law 5: an op that joins several gives bit for bit what they give one after the other."""

import math
from functools import partial

import jax
import pytest
from cases import bits, draw_x
from coverage import over
from op import rows
from quantizing import assert_same
from table import ADDED, OPS, SANDWICH

FUSED = [op for op in OPS if op.unfused]


def run(op, args, **options):
    return jax.jit(partial(op.function, **options))(*args)


def sizes(op):
    return [size for size in op.unfused_sizes or op.sizes if math.prod(size.dims) < 2**22]


def dtypes_of(op):
    return op.unfused_dtypes or op.dtypes


@pytest.mark.on_emulator
@over(FUSED, dtypes=dtypes_of, weights=lambda op: ["x's", "float32"], size=sizes)
def test_sizes(op, dtypes, weights, size):
    args = op.draw(size, dtypes, dtypes[0] if weights == "x's" else weights)
    assert_same(run(op, args, **size.options), op.unfused(*args, **size.options))


# Few columns, of whose rows a thread has several at once.
@pytest.mark.on_emulator
@pytest.mark.parametrize(
    ("op", "dtypes"), [(op, dtypes) for op in (*ADDED, *SANDWICH) for dtypes in dtypes_of(op)], ids=str
)
def test_several_rows_at_once(op, dtypes):
    args = op.draw(rows(9, 24), dtypes, dtypes[0])
    assert_same(run(op, args), op.unfused(*args))


# Beyond every cache, where results may go past it.
@over(FUSED, size=lambda op: [size for size in op.unfused_sizes or op.sizes if math.prod(size.dims) >= 2**22])
def test_large_arrays(op, size):
    args = op.draw(size)
    assert_same(run(op, args, **size.options), op.unfused(*args, **size.options))


@pytest.mark.on_emulator
@over(
    FUSED,
    dtypes=dtypes_of,
    options=lambda op: op.options,
    size=lambda op: op.lengths[:2] if "per head" in op.name else op.lengths[2:4],
)
def test_options(op, dtypes, options, size):
    args = op.draw(size, dtypes)
    assert_same(run(op, args, **options, **size.options), op.unfused(*args, **options, **size.options))


@pytest.mark.on_emulator
@over(
    (*ADDED, *SANDWICH),
    dtypes=lambda op: op.dtypes,
    weights=lambda op: [(None, None), ("float32", None), (None, "float32")],
)
def test_weights_that_are_absent(op, dtypes, weights):
    args = op.draw(op.lengths[3], dtypes, weights)
    assert_same(run(op, args), op.unfused(*args))


@pytest.mark.on_emulator
@over(
    [op for op in FUSED if op.has_unfused_gradients or op.unfused_with_gradients],
    dtypes=lambda op: op.gradient_dtypes or op.dtypes,
    size=sizes,
)
def test_gradients_of_arrays(op, dtypes, size):
    args = op.draw(size, dtypes)
    cotangents = op.cotangents(args, **size.options)

    def gradients(function):
        _, pullback = jax.vjp(lambda *arrays: function(*arrays, *args[op.arrays :], **size.options), *args[: op.arrays])
        return pullback(cotangents)

    expected = gradients(op.unfused_with_gradients or op.unfused)
    assert bits(jax.jit(partial(gradients, op.function))()) == bits(expected)


@pytest.mark.parametrize("op", [*ADDED, *SANDWICH], ids=str)
def test_one_array_added_to_itself(op):
    x = draw_x((12, 80))
    assert_same(run(op, (x, x, None, None)), op.unfused(x, x, None, None))
