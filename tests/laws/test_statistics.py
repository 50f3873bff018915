"""Law 2: statistics are float32 and the variance is that of the deviations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import DTYPES, KINDS, NORMS, bits, draw
from oracle import f64

# E[x²] - mean² loses everything here: 1e8 + 1 has no float32 of its own. The lengths meet every regime.
FAR_OFF_CENTRE = [(64, 128), (16, 1021), (8, 8192), (4, 32_768), (3, 100_003)]


@pytest.mark.parametrize("dims", FAR_OFF_CENTRE)
def test_rows_far_off_centre_have_unit_variance(dims):
    y = jax.jit(NORMS["layer"])(draw("x", dims, "float32", 1e4, 1.0))
    np.testing.assert_allclose(f64(y).std(-1), 1.0, atol=1e-3)


@pytest.mark.parametrize("dims", FAR_OFF_CENTRE)
def test_rows_far_off_centre_are_centred(dims):
    y = jax.jit(NORMS["layer"])(draw("x", dims, "float32", 1e4, 1.0))
    np.testing.assert_allclose(f64(y).mean(-1), 0.0, atol=2e-3)  # a float32 near 1e4 is good to 5e-4


@pytest.mark.parametrize("dims", FAR_OFF_CENTRE)
def test_gradients_of_rows_far_off_centre(dims):
    x = draw("x", dims, "float32", 1e4, 1.0)
    dy = draw("dy", dims)
    dx = jax.jit(lambda x: jax.vjp(NORMS["layer"], x)[1](dy)[0])(x)
    centred = f64(x) - f64(x).mean(-1, keepdims=True)
    exact = jax.jit(lambda x: jax.vjp(NORMS["layer"], x)[1](dy)[0])(jnp.asarray(centred, "float32"))
    np.testing.assert_allclose(dx, exact, atol=5e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cols", [64, 1021, 8192, 100_003])
def test_float16_near_its_maximum_does_not_overflow(kind, cols):
    signs = jnp.where(jnp.arange(cols) % 2 == 0, 1, -1).astype("float16")
    y = jax.jit(NORMS[kind])(65_504 * signs[None])
    np.testing.assert_allclose(f64(y), f64(signs[None]), atol=2e-3 if kind == "layer" else 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_power_of_two_scales_out(kind, dtype):
    x = draw("x", (8, 1000), dtype)
    norm = jax.jit(lambda x: NORMS[kind](x, epsilon=0.0))
    assert bits(norm(x * 64)) == bits(norm(x))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_zeros_give_the_bias(kind):
    bias = draw("bias", (100,))
    y = jax.jit(NORMS[kind])(jnp.zeros((3, 100)), draw("scale", (100,)), bias)
    np.testing.assert_array_equal(y, np.broadcast_to(bias, (3, 100)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_constant_row_has_no_deviation(dtype):
    y = jax.jit(NORMS["layer"])(jnp.full((3, 1024), 3.0, dtype))
    assert not np.any(y)
