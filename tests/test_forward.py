"""Law 1: outputs against the formula in float64 with one final rounding."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import DTYPES, KINDS, NORMS, axis_of, draw, draw_bias, draw_scale, draw_x
from hypothesis import given
from hypothesis import strategies as st
from tolerances import forward_errors

from bench import shapes

TABLE = (*shapes.MODELS, *shapes.DECODE, *shapes.ODD, *shapes.RANKS, *shapes.EMPTY, *shapes.grid(itemsize=4))
# Every kernel's pair of input and output; and float16 with bfloat16, which has none and still must be right.
DTYPE_PAIRS = [(x, y) for x, y in product(DTYPES, DTYPES) if x != y]
# Rows with and without a vectorised part, and with a rest.
OPTION_SHAPES = ((5, 64), (9, 1021), (3, 4097))


def errors(kind, x, scale=None, bias=None, *, axes=1, **options) -> list[str]:
    """Law 1's complaints about one call."""
    y = jax.jit(lambda *args: NORMS[kind](*args, axis=axis_of(axes), **options))(x, scale, bias)
    options["out_dtype"] = options.get("out_dtype") or x.dtype
    return forward_errors(y, oracle.forward(kind, x, scale, bias, axes=axes, **options))


@pytest.mark.parametrize("shape", TABLE, ids=lambda shape: shape.name)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_output_of_every_shape(kind, dtype, shape):
    dims, axes = shapes.few_rows(shape).dims, shape.axes
    x, scale = draw_x(dims, dtype), draw_scale(dims[len(dims) - axes :], dtype)
    assert errors(kind, x, scale, axes=axes) == []


@pytest.mark.parametrize("dims", OPTION_SHAPES)
@pytest.mark.parametrize(("x_dtype", "out_dtype"), DTYPE_PAIRS)
@pytest.mark.parametrize("kind", KINDS)
def test_output_of_another_dtype(kind, x_dtype, out_dtype, dims):
    assert errors(kind, draw_x(dims, x_dtype), draw_scale(dims[-1:]), out_dtype=np.dtype(out_dtype)) == []


# None is a call without that operand, which other kernels serve than one of ones or zeros. Of short rows, which vectors
# divide, float32 weights of half types come another way than those of x's dtype.
@pytest.mark.parametrize("cols", [128, 1021])
@pytest.mark.parametrize("bias_dtype", [None, *DTYPES])
@pytest.mark.parametrize("scale_dtype", [None, *DTYPES])
@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_output_for_weights_of_any_dtype(kind, x_dtype, scale_dtype, bias_dtype, cols):
    scale = None if scale_dtype is None else draw_scale((cols,), scale_dtype)
    bias = None if bias_dtype is None else draw_bias((cols,), bias_dtype)
    assert errors(kind, draw_x((9, cols), x_dtype), scale, bias) == []


@pytest.mark.parametrize("dims", OPTION_SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_output_with_gemmas_offset(kind, dtype, dims):
    scale = draw("offset scale", dims[-1:], dtype, 0.0, 0.3)
    assert errors(kind, draw_x(dims, dtype), scale, scale_offset=1.0) == []


# Llama's and T5's order rounds x_hat to the output's dtype first, whatever the scale's.
@pytest.mark.parametrize(("scale_dtype", "has_bias"), [("float32", False), ("bfloat16", True), ("float16", False)])
@pytest.mark.parametrize("dims", OPTION_SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_output_rounded_before_the_multiplication(kind, dtype, dims, scale_dtype, has_bias):
    bias = draw_bias(dims[-1:]) if has_bias else None
    scale = draw_scale(dims[-1:], scale_dtype)
    assert errors(kind, draw_x(dims, dtype), scale, bias, multiply_before_cast=False) == []


# 0 is a legal epsilon; 1e-12 is BERT's, 1e-5 Llama's, 1 is seen in the output's first digit.
@pytest.mark.parametrize("epsilon", [0.0, 1e-12, 1e-5, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_output_for_other_epsilons(kind, dtype, epsilon):
    assert errors(kind, draw_x((9, 257), dtype), draw_scale((257,), dtype), epsilon=epsilon) == []


# Axes that have no kernel take the jnp path and keep the same promise.
@pytest.mark.parametrize("axis", [0, 1, (0, 1), (0, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_output_over_leading_axes(kind, axis):
    axes = axis if isinstance(axis, tuple) else (axis,)
    last = tuple(range(-len(axes), 0))
    rows = draw_x(np.moveaxis(np.empty((6, 10, 14)), axes, last).shape)
    expected = oracle.forward(kind, np.asarray(rows), axes=len(axes), out_dtype=rows.dtype)
    y = np.moveaxis(np.asarray(NORMS[kind](jnp.moveaxis(rows, last, axes), axis=axis)), axes, last)
    assert forward_errors(y, expected) == []


@given(
    st.sampled_from(KINDS),
    st.sampled_from(DTYPES),
    st.lists(st.integers(1, 9), max_size=3),
    st.integers(1, 3000),
    st.booleans(),
    st.booleans(),
)
def test_output_of_random_shapes(kind, dtype, leading, cols, has_scale, has_bias):
    scale = draw_scale((cols,), dtype) if has_scale else None
    bias = draw_bias((cols,), dtype) if has_bias else None
    assert errors(kind, draw_x((*leading, cols), dtype), scale, bias) == []
