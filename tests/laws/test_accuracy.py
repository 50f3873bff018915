"""Law 1: results against the formula in float64 with one final rounding."""

import math
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import DTYPES, KINDS, NORMS, draw_bias, draw_scale, draw_x
from coverage import cover, over
from hypothesis import given
from hypothesis import strategies as st
from table import ADDED, OPS, PER_HEAD, SANDWICH
from table import NORMS as PLAIN
from tolerances import forward_errors, result_errors

EXACT = [op for op in OPS if op.exact]
# Every kernel's pair of input and output; and float16 with bfloat16, which has none and still must be right.
DTYPE_PAIRS = [(x, y) for x, y in product(DTYPES, DTYPES) if x != y]


def sizes(op):
    return [size for size in op.sizes if math.prod(size.dims) < 2**22]


def lengths(op):
    """Rows with and without a vectorised part, and with a rest."""
    return [size for size in op.lengths if 31 <= size.dims[-1] <= 4096]


def short(op):
    """The like, two of them."""
    return [size for size in lengths(op) if size.dims[-1] in (64, 100, 128, 640, 1021)][:2]


def dtypes(op):
    return op.dtypes


def errors(op, args, implementation=None, **options) -> list[str]:
    """Law 1's complaints about one call."""
    results = jax.jit(partial(op.function, implementation=implementation, **options))(*args)
    return result_errors(op, results, args, **options)


@pytest.mark.on_emulator
@over(EXACT, dtypes=dtypes, size=sizes)
def test_results_of_every_size(op, dtypes, size):
    args = op.draw(size, dtypes, (dtypes[0], None))
    assert errors(op, args, **size.options) == []


@pytest.mark.on_emulator
@over(PLAIN + PER_HEAD, dtypes=lambda op: DTYPE_PAIRS, size=lengths)
def test_results_of_another_dtype(op, dtypes, size):
    x_dtype, out_dtype = dtypes
    assert errors(op, op.draw(size, (x_dtype,)), out_dtype=np.dtype(out_dtype)) == []


# None is a call without that operand, which other kernels serve than one of ones or zeros. Of short rows, which vectors
# divide, float32 weights of half types come another way than those of x's dtype.
@pytest.mark.on_emulator
@over(
    EXACT,
    dtypes=dtypes,
    scale=lambda op: [None, *DTYPES] if op.weights else [],
    bias=lambda op: [None, *DTYPES] if len(op.weights) > 1 else [None],
    size=short,
)
def test_weights_of_any_dtype(op, dtypes, scale, bias, size):
    assert errors(op, op.draw(size, dtypes, (scale, bias)), **size.options) == []


@pytest.mark.on_emulator
@over(
    EXACT,
    dtypes=dtypes,
    options=lambda op: op.options,
    weight_dtype=lambda op: DTYPES[: None if op.weights else 1],
    size=short,
)
def test_every_option(op, dtypes, options, weight_dtype, size):
    assert errors(op, op.draw(size, dtypes, weight_dtype), **options, **size.options) == []


# The formula keeps the law too, and serves where no kernel does. A sum of half types is left out: XLA may not round it
# before it is normalised.
@over(EXACT, dtypes=lambda op: [d for d in op.dtypes if op not in (*ADDED, *SANDWICH) or d[1] == "float32"])
def test_the_formula(op, dtypes):
    size = lengths(op)[0]
    assert errors(op, op.draw(size, dtypes), implementation="jnp", **size.options) == []


# Axes that have no kernel take the jnp path and keep the same promise.
@cover(kind=KINDS, axis=[0, 1, (0, 1), (0, 2)])
def test_results_over_leading_axes(kind, axis):
    axes = axis if isinstance(axis, tuple) else (axis,)
    last = tuple(range(-len(axes), 0))
    x = draw_x(np.moveaxis(np.empty((6, 10, 14)), axes, last).shape)
    expected = oracle.forward(kind, np.asarray(x), axes=len(axes), out_dtype=x.dtype)
    y = np.moveaxis(np.asarray(NORMS[kind](jnp.moveaxis(x, last, axes), axis=axis)), axes, last)
    assert forward_errors(y, expected) == []


@pytest.mark.parametrize("op", PLAIN, ids=str)
@given(
    st.sampled_from(DTYPES), st.lists(st.integers(1, 9), max_size=3), st.integers(1, 3000), st.booleans(), st.booleans()
)
def test_results_of_random_shapes(op, dtype, leading, cols, has_scale, has_bias):
    scale = draw_scale((cols,), dtype) if has_scale else None
    bias = draw_bias((cols,), dtype) if has_bias else None
    assert errors(op, (draw_x((*leading, cols), dtype), scale, bias)) == []
