"""Ops that are not part of the package enter by files of their own: an L2 norm, and a matmul that is no norm at all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import load

# One worker builds them for all.
pytestmark = [pytest.mark.toys, pytest.mark.xdist_group("toys")]


@pytest.fixture(scope="module")
def l2_norm():
    load("l2_norm_cpu", "l2_norm_fwd", "l2_norm_bwd")


@pytest.fixture(scope="module")
def matmul():
    load("scaled_matmul_cpu", "scaled_matmul")


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def norm(x, with_rstd=False):
    results = [struct(*x.shape, dtype=x.dtype), struct(*x.shape[:-1], 1)][: 1 + with_rstd]
    return jax.ffi.ffi_call("toy_l2_norm_fwd", results)(x, epsilon=np.float32(1e-6))


def formula(x):
    x = np.asarray(x, np.float64)
    return x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)


# A row alone and among others, short ones and long ones, with and without a rest beside whole vectors.
SHAPES = [(1, 1), (7, 3), (2, 5, 128), (3, 513), (2, 20_000)]
TOLERANCES = {jnp.float32: 5e-7, jnp.float16: 2**-10, jnp.bfloat16: 2**-7}


@pytest.mark.usefixtures("l2_norm")
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_l2_norm(shape, dtype):
    x = jax.random.normal(jax.random.key(0), shape, dtype)
    (y,) = jax.jit(norm)(x)
    np.testing.assert_allclose(np.asarray(y, np.float64), formula(x), rtol=TOLERANCES[dtype], atol=1e-7)


@pytest.mark.usefixtures("l2_norm")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_gradient_of_an_l2_norm(shape):
    x, dy = (jax.random.normal(jax.random.key(seed), shape) for seed in range(2))
    _, rstd = norm(x, with_rstd=True)
    (dx,) = jax.ffi.ffi_call("toy_l2_norm_bwd", [struct(*shape)])(dy, x, rstd, with_dx=True)
    x_hat, dy = formula(x), np.asarray(dy, np.float64)
    expected = np.asarray(rstd, np.float64) * (dy - x_hat * (dy * x_hat).sum(-1, keepdims=True))
    assert np.linalg.norm(dx - expected) <= 1e-6 * np.linalg.norm(dy * rstd)


@pytest.mark.usefixtures("l2_norm")
def test_an_error_names_the_op_that_was_called():
    x, short = jnp.ones((2, 8)), struct(2, 7)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"toy_l2_norm_fwd: y is F32\[2,7\], expected F32\[2,8\]"):
        jax.block_until_ready(jax.ffi.ffi_call("toy_l2_norm_fwd", [short])(x, epsilon=np.float32(1e-6)))


def multiply(a, b, *workspace):
    results = [struct(a.shape[0], b.shape[1]), struct(), *workspace]
    return jax.ffi.ffi_call("toy_scaled_matmul", results)(a, b, scale=np.float32(2))


@pytest.mark.usefixtures("matmul")
@pytest.mark.parametrize("floats", [None, 0, 1, 1000])
def test_a_matmul_with_a_workspace_of_any_size_or_none(floats):
    a, b = jax.random.normal(jax.random.key(0), (3, 5)), jax.random.normal(jax.random.key(1), (5, 4))
    y, came, *_ = multiply(a, b, *([] if floats is None else [struct(floats)]))
    np.testing.assert_allclose(y, 2 * np.asarray(a) @ np.asarray(b), rtol=1e-5, atol=1e-6)
    assert came == (floats or 0)


NOT_A_WORKSPACE = {
    "of rank 2": [struct(3, 4)],
    "of bfloat16": [struct(12, dtype=jnp.bfloat16)],
    "two": [struct(12), struct(12)],
}


@pytest.mark.usefixtures("matmul")
@pytest.mark.parametrize("name", NOT_A_WORKSPACE)
def test_what_is_not_a_workspace(name):
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"toy_scaled_matmul: number of results is"):
        jax.block_until_ready(multiply(jnp.ones((3, 5)), jnp.ones((5, 4)), *NOT_A_WORKSPACE[name]))


@pytest.mark.usefixtures("matmul")
def test_operands_of_a_matmul_that_do_not_fit():
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"toy_scaled_matmul: b is F32\[6,4\], expected F32\[5,4\]"):
        jax.block_until_ready(multiply(jnp.ones((3, 5)), jnp.ones((6, 4))))
