"""`multiply_before_cast=False`: x_hat is rounded to the narrower of the dtypes of what is normalised and the result."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import ADDS, KINDS, NORMS, draw, draw_bias, draw_residual, draw_scale, draw_x
from hlo import compiled_text, count_native_calls
from native import native_calls

import jaxnorm

DIMS = (6, 5, 160)
HALF = ("bfloat16", "float16")
IMPLEMENTATIONS = ("native", "jnp", None)
hub = partial(NORMS["rms"], multiply_before_cast=False, out_dtype="float32")


def of_hub(kind, x, scale, bias=None, *, scale_offset=0.0, out_dtype="float32"):
    """Cast to the input's dtype, then multiplied, as the model hubs' classes do."""
    x_hat = oracle.round_to(oracle.forward(kind, x, out_dtype=np.dtype("float64")).exact, x.dtype)
    y = np.asarray(x_hat, np.float32) * (np.asarray(scale, np.float32) + np.float32(scale_offset))
    return np.asarray(y if bias is None else y + np.asarray(bias, np.float32), out_dtype)


def assert_rounded_alike(y, expected):
    """Sums in another order may move a rounding of x_hat, of one element in a thousand."""
    assert (y.shape, y.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_allclose(y, expected, 0.02, 1e-6)
    apart = np.abs(np.asarray(y, np.float64) - np.asarray(expected, np.float64))
    assert np.mean(apart > 4e-7 * np.abs(expected) + 1e-6) < 1e-3


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("scale_dtype", ["float32", "same"])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("kind", KINDS)
def test_a_wide_result_is_of_a_rounded_x_hat(kind, dtype, scale_dtype, implementation):
    weight = dtype if scale_dtype == "same" else scale_dtype
    x, scale, bias = draw_x(DIMS, dtype), draw_scale(DIMS[-1:], weight), draw_bias(DIMS[-1:], weight)
    options = {"multiply_before_cast": False, "out_dtype": "float32", "implementation": implementation}
    y = jax.jit(partial(NORMS[kind], scale_offset=0.5, **options))(x, scale, bias)
    assert_rounded_alike(y, of_hub(kind, x, scale, bias, scale_offset=0.5))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("pad_to", [None, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_so_it_is_of_a_sum_and_padded(kind, pad_to, implementation):
    x, residual, scale = draw_x(DIMS), draw_residual(DIMS, "bfloat16"), draw_scale(DIMS[-1:])
    options = {"multiply_before_cast": False, "pad_to": pad_to, "implementation": implementation}
    y, total = jax.jit(partial(ADDS[kind], **options))(x, residual, scale)
    assert_rounded_alike(y[..., : DIMS[-1]], of_hub(kind, total, scale))
    assert not y[..., DIMS[-1] :].any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_so_it_is_of_weights_for_each_head(implementation):
    x, scale = draw_x(DIMS, "bfloat16"), draw_scale(DIMS[1:])
    assert_rounded_alike(jax.jit(partial(hub, implementation=implementation))(x, scale), of_hub("rms", x, scale))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_so_it_is_of_two_norms(implementation):
    x, residual, scale = draw_x(DIMS), draw_residual(DIMS, "bfloat16"), draw_scale(DIMS[-1:])
    sandwich = partial(jaxnorm.rms_norm_add_rms_norm, multiply_before_cast=False, implementation=implementation)
    y, total = jax.jit(sandwich)(x, residual, scale, scale)
    assert_rounded_alike(y, of_hub("rms", total, scale))


def test_a_wide_x_is_rounded_to_a_narrow_result():
    x, scale = draw_x(DIMS), draw_scale(DIMS[-1:])
    y = NORMS["rms"](x, scale, multiply_before_cast=False, out_dtype="bfloat16")
    x_hat = oracle.round_to(oracle.forward("rms", x, out_dtype=np.dtype("float64")).exact, jnp.bfloat16)
    expected = jnp.asarray(np.asarray(x_hat, np.float32) * np.asarray(scale)).astype(jnp.bfloat16)
    assert np.mean(np.asarray(y != expected)) < 1e-3


def test_native_is_one_call_each_way():
    x, scale, dy = draw_x(DIMS, "bfloat16"), draw_scale(DIMS[-1:]), draw("dy", DIMS)
    loss = lambda x, scale: (hub(x, scale, implementation="native") * dy).sum()  # noqa: E731
    text = compiled_text(jax.grad(loss, argnums=(0, 1)), x, scale)
    assert count_native_calls(text) == native_calls("rms", fwd=1, bwd=1)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_take_no_note_of_the_rounding(kind, dtype, implementation):
    args = draw_x(DIMS, dtype), draw_scale(DIMS[-1:]), draw_bias(DIMS[-1:])
    options = {"multiply_before_cast": False, "out_dtype": "float32", "implementation": implementation}
    dy = draw("dy", DIMS)
    found = jax.jit(lambda *args: jax.vjp(partial(NORMS[kind], **options), *args)[1](dy))(*args)
    exact = oracle.gradients(kind, args[0], dy, args[1])
    limits = {"bfloat16": 2e-3, "float16": 3e-4}[dtype], 5e-6, 5e-6
    for gradient, expected, limit in zip(found, (exact.dx, exact.dscale, exact.dbias), limits, strict=True):
        error = np.linalg.norm(np.asarray(gradient, np.float64) - expected) / np.linalg.norm(expected)
        assert error <= limit
