"""Law 8: NaN and infinity, nothing, one, a million, more than 2**31. Memory aligned to nothing is in test_bits.py."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import DTYPES, KINDS, NORMS, bits, draw, draw_scale, draw_x, formula

kinds = pytest.mark.parametrize("kind", KINDS)
# Inside a vector, in the rest after the last vector, at the row's ends.
POSITIONS = (0, 5, 64, 1020)


def gradients(norm):
    def function(x, scale, bias, dy):
        y, pullback = jax.vjp(norm, x, scale, bias)
        return y, *pullback(dy)

    return jax.jit(function)


def inputs(dims, dtype="float32"):
    weight = draw_scale(dims[-1:], dtype)
    return draw_x(dims, dtype), weight, weight, draw("dy", dims, dtype)


def classes(array) -> np.ndarray:
    """Of each number: finite (0), NaN, or an infinity of which sign."""
    return np.where(np.isfinite(np.float32(array)), 0, np.float32(array))


def assert_spreads_alike(actual, expected):
    """The result alike in every number; in the gradients, where it is not finite: what the difference of two infinite
    sums becomes depends on which of them is subtracted first."""
    np.testing.assert_array_equal(classes(actual[0]), classes(expected[0]))
    for a, e in zip(actual[1:], expected[1:], strict=True):
        np.testing.assert_array_equal(np.isfinite(np.float32(a)), np.isfinite(np.float32(e)))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("column", POSITIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@kinds
def test_what_is_not_finite_in_x_spreads_as_in_the_formula(kind, dtype, column, value):
    x, *rest = inputs((4, 1021), dtype)
    x = x.at[1, column].set(value)
    assert_spreads_alike(gradients(NORMS[kind])(x, *rest), gradients(formula(kind))(x, *rest))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("operand", [1, 2, 3], ids=["scale", "bias", "dy"])
@kinds
def test_what_is_not_finite_elsewhere_spreads_as_in_the_formula(kind, operand, value):
    args = list(inputs((4, 1021)))
    args[operand] = args[operand].at[..., 1020].set(value)
    assert_spreads_alike(gradients(NORMS[kind])(*args), gradients(formula(kind))(*args))


@pytest.mark.parametrize("dtype", DTYPES)
@kinds
def test_a_row_of_nan_leaves_its_neighbours_alone(kind, dtype):
    x, scale, bias, _ = inputs((4, 1021), dtype)
    norm = jax.jit(NORMS[kind])
    spoilt = norm(x.at[1].set(np.nan), scale, bias)
    assert bits(spoilt[jnp.array([0, 2, 3])]) == bits(norm(x, scale, bias)[jnp.array([0, 2, 3])])


# An output of a half type overflows to infinity as a cast does.
@kinds
def test_an_output_too_large_for_its_dtype(kind):
    x, scale = draw_x((4, 64), "float16"), jnp.full((64,), 6e4, jnp.float16)
    np.testing.assert_array_equal(classes(jax.jit(NORMS[kind])(x, scale)), classes(formula(kind)(x, scale)))


# Squares beyond float32 are infinite in the formula, and rstd zero.
@kinds
def test_squares_that_overflow(kind):
    x = 1e30 * draw_x((4, 64))
    np.testing.assert_array_equal(jax.jit(NORMS[kind])(x), formula(kind)(x))


# Past a row's end x is 0, and its x_hat is not finite where the mean is so large; none of it belongs to the row.
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [3, 600])
@pytest.mark.parametrize(
    ("cols", "value", "epsilon"),
    [
        *((cols, 2e36, 1e-5) for cols in (5, 16, 17, 100)),
        *((cols, 1e33, 1e-12) for cols in (5, 16, 17, 100, 1021, 1056, 5376, 140_001)),  # whose sums are finite, too
    ],
)
def test_the_gradient_of_a_constant_row_near_the_largest_number(cols, value, epsilon, rows, dtype):
    dims = (min(rows, 2**20 // cols), cols)
    norm = partial(NORMS["layer"], epsilon=epsilon)
    results = gradients(norm)(jnp.full(dims, value, dtype), *inputs(dims, dtype)[1:])
    assert all(np.isfinite(np.float32(result)).all() for result in results)


@pytest.mark.parametrize("dims", [(0, 64), (3, 0, 64), (0, 0, 1), (0, 100_003)])
@kinds
def test_no_rows(kind, dims):
    y, dx, dscale, dbias = gradients(NORMS[kind])(*inputs(dims))
    assert (y.shape, dx.shape) == (dims, dims)
    np.testing.assert_array_equal((dscale, dbias), np.zeros((2, dims[-1])))


# An axis of length 0 has no mean; the formula says what comes of it, which is nothing.
@kinds
def test_rows_of_no_elements(kind):
    assert jax.jit(NORMS[kind])(jnp.zeros((3, 0))).shape == (3, 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_one_element(dtype):
    x = jnp.asarray([[3.0], [-2.0], [0.0]], dtype)
    signs = np.sign(np.float32(x))
    np.testing.assert_allclose(np.float32(jax.jit(NORMS["rms"])(x)), signs, rtol=1e-6)
    np.testing.assert_array_equal(jax.jit(NORMS["layer"])(x), jnp.zeros((3, 1), dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", [2**20, 2**21 + 1])
@kinds
def test_rows_of_a_million(kind, cols, dtype):
    signs = jnp.where(jnp.arange(cols) % 2 == 0, 1, -1).astype(dtype)
    y = jax.jit(NORMS[kind])(3 * signs[None])
    np.testing.assert_allclose(np.float32(y), np.float32(signs[None]), atol=2e-6 if dtype == "float32" else 0)


@pytest.mark.parametrize("rows", [70_000, 2**20 + 1])
@kinds
def test_more_rows_than_a_cuda_grid_has_in_two_dimensions(kind, rows):
    x = jnp.tile(draw_x((1, 8)), (rows, 1))
    y, dx = gradients(lambda x, *_: NORMS[kind](x))(x, None, None, x)[:2]
    assert bits((y[-1], dx[-1])) == bits((y[0], dx[0]))


# Byte offsets of 2**32 and element offsets of 2**31 do not fit 32 bits. The rows repeat, and so must the results.
@pytest.mark.large
@pytest.mark.parametrize("cols", [4096, 100_003])
@kinds
def test_more_elements_than_an_int32_counts(kind, cols):
    period = 64
    rows = (2**31 // cols // period + 2) * period
    block = draw_x((period, cols), "bfloat16")
    x = jnp.tile(block, (rows // period, 1))
    scale = draw_scale((cols,))
    y, dx = jax.jit(lambda x: (NORMS[kind](x, scale), jax.vjp(lambda x: NORMS[kind](x, scale), x)[1](x)[0]))(x)
    alone = jax.jit(lambda x: (NORMS[kind](x, scale), jax.vjp(lambda x: NORMS[kind](x, scale), x)[1](x)[0]))(block)
    assert bits((y[-period:], dx[-period:])) == bits(alone)


# A whole row of more than 2**31 elements.
@pytest.mark.large
def test_a_row_longer_than_an_int32_counts():
    cols = 2**31 + 8
    x = jnp.tile(jnp.asarray([2.0, -2.0], "bfloat16"), cols // 2).reshape(1, cols)
    y = jax.jit(NORMS["rms"])(x)
    assert bits(jax.lax.slice_in_dim(y[0], cols - 4, cols)) == bits(jnp.asarray([1.0, -1.0, 1.0, -1.0], "bfloat16"))
