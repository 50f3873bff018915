"""Law 1: gradients against the formula in float64."""

from itertools import product

import jax
import numpy as np
import oracle
import pytest
from cases import DTYPES, KINDS, NORMS, axis_of, draw, draw_bias, draw_scale, draw_x
from hypothesis import given
from hypothesis import strategies as st
from tolerances import DSCALE, DX, gradient_error

from bench import shapes

TABLE = (*shapes.MODELS, *shapes.DECODE, *shapes.ODD, *shapes.RANKS, *shapes.grid(itemsize=4))


def errors(kind, x, scale=None, bias=None, *, axes=1, out_dtype=None, **options) -> dict[str, float]:
    """The gradients' errors as multiples of law 1's limits: at most 1 each. Absent operands have none."""

    def norm(*args):
        return NORMS[kind](*args, axis=axis_of(axes), out_dtype=out_dtype, **options)

    dy = draw("dy", x.shape, out_dtype or x.dtype)
    dx, dscale, dbias = jax.jit(lambda *args: jax.vjp(norm, *args)[1](dy))(x, scale, bias)
    options.pop("multiply_before_cast", None)  # a cast's derivative is 1
    exact = oracle.gradients(kind, x, dy, scale, axes=axes, **options)
    # RMSNorm of one number and LayerNorm of two are a sign: the gradient vanishes but for epsilon and for rounding.
    cols = np.prod(x.shape[x.ndim - axes :])
    errors = {"dx": gradient_error(dx, exact.dx, DX, exact.dx_terms if cols <= 2 else None)}
    if scale is not None:
        errors["dscale"] = gradient_error(dscale, exact.dscale, DSCALE)
    if bias is not None:
        errors["dbias"] = gradient_error(dbias, exact.dbias, DSCALE)
    return errors


def within_limits(errors: dict[str, float]) -> bool:
    return all(error <= 1 for error in errors.values())


@pytest.mark.parametrize("shape", TABLE, ids=lambda shape: shape.name)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_every_shape(kind, dtype, shape):
    dims, axes = shapes.few_rows(shape).dims, shape.axes
    features = dims[len(dims) - axes :]
    found = errors(kind, draw_x(dims, dtype), draw_scale(features), draw_bias(features), axes=axes)
    assert within_limits(found), found


# Rows beyond the number of partial sums that dscale is made of, and a number of rows that it does not divide.
@pytest.mark.parametrize("dims", [(4099, 8), (2000, 129), (70_001, 3)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_many_rows(kind, dtype, dims):
    found = errors(kind, draw_x(dims, dtype), draw_scale(dims[-1:]), draw_bias(dims[-1:]))
    assert within_limits(found), found


# dy has the output's dtype.
@pytest.mark.parametrize(("x_dtype", "out_dtype"), [(x, y) for x, y in product(DTYPES, DTYPES) if x != y])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_for_an_output_of_another_dtype(kind, x_dtype, out_dtype):
    found = errors(kind, draw_x((33, 1021), x_dtype), draw_scale((1021,)), out_dtype=np.dtype(out_dtype))
    assert within_limits(found), found


# None is a call without that operand; the gradient of each has its own dtype.
@pytest.mark.parametrize("bias_dtype", [None, *DTYPES])
@pytest.mark.parametrize("scale_dtype", [None, *DTYPES])
@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_for_weights_of_any_dtype(kind, x_dtype, scale_dtype, bias_dtype):
    scale = None if scale_dtype is None else draw_scale((1021,), scale_dtype)
    bias = None if bias_dtype is None else draw_bias((1021,), bias_dtype)
    found = errors(kind, draw_x((33, 1021), x_dtype), scale, bias)
    assert within_limits(found), found


@pytest.mark.parametrize("options", [{"scale_offset": 1.0}, {"epsilon": 1.0}, {"multiply_before_cast": False}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_with_options(kind, dtype, options):
    found = errors(kind, draw_x((33, 1000), dtype), draw_scale((1000,)), **options)
    assert within_limits(found), found


@pytest.mark.parametrize("shape", shapes.EMPTY, ids=lambda shape: shape.name)
@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_give_weights_no_gradient(kind, shape):
    features = shape.dims[len(shape.dims) - shape.axes :]

    def loss(scale, bias):
        return NORMS[kind](draw_x(shape.dims), scale, bias, axis=axis_of(shape.axes)).sum()

    gradients = jax.jit(jax.grad(loss, (0, 1)))(draw_scale(features), draw_bias(features))
    np.testing.assert_array_equal(gradients, np.zeros((2, *features), np.float32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_have_the_dtypes_of_their_primals(kind, dtype):
    x, scale, bias = draw_x((4, 8), dtype), draw_scale((8,), "bfloat16"), draw_bias((8,), "float16")
    gradients = jax.grad(lambda *args: NORMS[kind](*args).astype("float32").sum(), (0, 1, 2))(x, scale, bias)
    assert [gradient.dtype for gradient in gradients] == [dtype, "bfloat16", "float16"]


@given(
    st.sampled_from(KINDS),
    st.sampled_from(DTYPES),
    st.lists(st.integers(1, 9), max_size=3),
    st.integers(3, 3000),
    st.booleans(),
    st.booleans(),
)
def test_gradients_of_random_shapes(kind, dtype, leading, cols, has_scale, has_bias):
    scale = draw_scale((cols,)) if has_scale else None
    bias = draw_bias((cols,)) if has_bias else None
    found = errors(kind, draw_x((*leading, cols), dtype), scale, bias)
    assert within_limits(found), found
