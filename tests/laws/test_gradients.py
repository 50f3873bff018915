"""Law 1: gradients against the formula in float64."""

import math
from functools import partial
from itertools import product

import jax
import numpy as np
import pytest
from cases import DTYPES, draw_bias, draw_scale, draw_x
from coverage import over
from hypothesis import given
from hypothesis import strategies as st
from table import NORMS, OPS, PER_HEAD
from tolerances import gradient_errors, result_errors

EXACT = [op for op in OPS if op.exact_gradients]


def sizes(op):
    # RMSNorm of one number and LayerNorm of two are a sign, whose gradient vanishes but for epsilon and for rounding.
    least = 1 if op in NORMS else 24
    table = (*op.sizes, *op.backward_sizes)
    return [size for size in table if math.prod(size.dims) < 2**22 and size.dims[-1] >= least]


def lengths(op):
    return [size for size in op.lengths if 31 <= size.dims[-1] <= 4096]


def errors(op, args, implementation=None, **options) -> dict[str, float]:
    """The gradients' errors as multiples of law 1's limits, where they are above; and the complaints about y."""
    cotangents = op.cotangents(args, **options)

    def function(cotangents, *args):
        results, pullback = jax.vjp(partial(op.function, implementation=implementation, **options), *args)
        return results, pullback(cotangents)

    results, gradients = jax.jit(function)(cotangents, *args)
    above = {"results": np.inf} if result_errors(op, results, args, **options) else {}
    return above | gradient_errors(op, gradients, cotangents, args, **options)


@pytest.mark.on_emulator
@over(EXACT, dtypes=lambda op: op.dtypes, size=sizes)
def test_gradients_of_every_size(op, dtypes, size):
    assert errors(op, op.draw(size, dtypes), **size.options) == {}


# dy has the output's dtype.
@pytest.mark.on_emulator
@over(NORMS + PER_HEAD, dtypes=lambda op: [(x, y) for x, y in product(DTYPES, DTYPES) if x != y], size=lengths)
def test_gradients_for_an_output_of_another_dtype(op, dtypes, size):
    x_dtype, out_dtype = dtypes
    assert errors(op, op.draw(size, (x_dtype,)), out_dtype=np.dtype(out_dtype)) == {}


# None is a call without that operand; the gradient of each has its own dtype.
@pytest.mark.on_emulator
@over(
    EXACT,
    dtypes=lambda op: op.dtypes,
    scale=lambda op: [None, *DTYPES] if op.weights else [],
    bias=lambda op: [None, *DTYPES] if len(op.weights) > 1 else [None],
    size=lambda op: lengths(op)[-1:],
)
def test_gradients_for_weights_of_any_dtype(op, dtypes, scale, bias, size):
    assert errors(op, op.draw(size, dtypes, (scale, bias)), **size.options) == {}


@pytest.mark.on_emulator
@over(EXACT, dtypes=lambda op: op.dtypes, options=lambda op: op.options, size=lambda op: lengths(op)[-2:])
def test_gradients_with_options(op, dtypes, options, size):
    assert errors(op, op.draw(size, dtypes), **options, **size.options) == {}


@pytest.mark.parametrize("op", EXACT, ids=str)
def test_gradients_of_the_formula(op):
    size = lengths(op)[-1]
    assert errors(op, op.draw(size), implementation="jnp", **size.options) == {}


@pytest.mark.parametrize("op", OPS, ids=str)
def test_gradients_have_the_dtypes_of_their_primals(op):
    args = op.draw(op.small, ("bfloat16", "float32", "float32")[: op.arrays], ("bfloat16", "float16", "float32"))
    gradients = op.gradient()(*args)
    assert [gradient.dtype for gradient in gradients] == [args[i].dtype for i in op.all]


@pytest.mark.parametrize("op", NORMS, ids=str)
@given(
    st.sampled_from(DTYPES), st.lists(st.integers(1, 9), max_size=3), st.integers(3, 3000), st.booleans(), st.booleans()
)
def test_gradients_of_random_shapes(op, dtype, leading, cols, has_scale, has_bias):
    scale = draw_scale((cols,)) if has_scale else None
    bias = draw_bias((cols,)) if has_bias else None
    assert errors(op, (draw_x((*leading, cols), dtype), scale, bias)) == {}
