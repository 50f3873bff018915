"""Laws 3 and 4: a row's results do not depend on its neighbours, and nothing depends on the run."""

import os
import subprocess
import sys
from functools import cache

import jax
import jax.numpy as jnp
import pytest
from cases import DTYPES, KINDS, NORMS, bits, draw, draw_scale, draw_x

# Short, odd, and long rows: with and without vectors, of one team of threads, of a block, of a cluster, looped.
LENGTHS = (1, 31, 128, 1021, 4096, 16_384, 65_536, 100_003, 262_144)


def rows_for(cols: int) -> int:
    return max(5, min(65, 2**18 // cols))


def make(cols, dtype):
    rows = rows_for(cols)
    return draw_x((rows, cols), dtype), draw("dy", (rows, cols), dtype), draw_scale((cols,))


@cache
def y_and_dx(kind):
    """(x, dy, scale) -> (y, dx), compiled once for each shape."""

    def function(x, dy, scale):
        y, pullback = jax.vjp(lambda x: NORMS[kind](x, scale), x)
        return y, *pullback(dy)

    return jax.jit(function)


table = pytest.mark.parametrize(("kind", "dtype", "cols"), [(k, d, n) for k in KINDS for d in DTYPES for n in LENGTHS])


@table
def test_a_row_alone(kind, dtype, cols):
    x, dy, scale = make(cols, dtype)
    among_many = [result[2:3] for result in y_and_dx(kind)(x, dy, scale)]
    assert bits(y_and_dx(kind)(x[2:3], dy[2:3], scale)) == bits(among_many)


# On a GPU few rows have kernels of their own, forward and backward.
@pytest.mark.parametrize("cols", [128, 384, 768, 1021, 2048, 2880, 5120, 5376, 8192, 16384])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_few_rows_among_many(kind, dtype, cols):
    x, dy, scale = draw_x((600, cols), dtype), draw("dy", (600, cols), dtype), draw_scale((cols,))
    among_many = [result[300:315] for result in y_and_dx(kind)(x, dy, scale)]
    assert bits(y_and_dx(kind)(x[300:315], dy[300:315], scale)) == bits(among_many)


@table
def test_rows_in_another_order(kind, dtype, cols):
    x, dy, scale = make(cols, dtype)
    expected = [result[::-1] for result in y_and_dx(kind)(x, dy, scale)]
    assert bits(y_and_dx(kind)(x[::-1], dy[::-1], scale)) == bits(expected)


# XLA may hand a kernel the slice itself, whose first row is aligned to nothing if rows are of odd length.
@table
def test_a_slice_of_rows(kind, dtype, cols):
    x, dy, scale = make(cols, dtype)
    expected = [result[1:4] for result in y_and_dx(kind)(x, dy, scale)]
    sliced = jax.jit(lambda x, dy, scale: y_and_dx(kind)(x[1:4], dy[1:4], scale))
    assert bits(sliced(x, dy, scale)) == bits(expected)


@table
def test_rows_at_an_odd_element(kind, dtype, cols):
    x, dy, scale = make(cols, dtype)
    expected = y_and_dx(kind)(x, dy, scale)

    def shifted(flat_x, flat_dy, scale):
        return y_and_dx(kind)(flat_x[1:].reshape(x.shape), flat_dy[1:].reshape(x.shape), scale)

    pad = [jnp.pad(a.reshape(-1), (1, 0)) for a in (x, dy)]
    assert bits(jax.jit(shifted)(*pad, scale)) == bits(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_the_layout_of_leading_axes(kind):
    x, dy, scale = draw_x((24, 96)), draw("dy", (24, 96)), draw_scale((96,))
    expected = y_and_dx(kind)(x, dy, scale)
    assert bits(y_and_dx(kind)(x.reshape(2, 3, 4, 96), dy.reshape(2, 3, 4, 96), scale)) == bits(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_vmap_over_rows(kind):
    x, scale = draw_x((24, 96)), draw_scale((96,))
    rows = jax.jit(jax.vmap(NORMS[kind], (0, None)))(x, scale)
    assert bits(rows) == bits(jax.jit(NORMS[kind])(x, scale))


def all_results(kind, x, dy, scale, bias):
    y, pullback = jax.vjp(NORMS[kind], x, scale, bias)
    return y, *pullback(dy)


@table
def test_runs_repeat_themselves(kind, dtype, cols):
    x, dy, scale = make(cols, dtype)
    run = jax.jit(lambda *args: all_results(kind, *args))
    first = bits(run(x, dy, scale, scale))
    assert all(bits(run(x, dy, scale, scale)) == first for _ in range(3))


@pytest.mark.parametrize("kind", KINDS)
def test_compilations_repeat_each_other(kind):
    args = (draw_x((513, 640)), draw("dy", (513, 640)), draw_scale((640,)), draw_scale((640,)))
    first = bits(jax.jit(lambda *args: all_results(kind, *args))(*args))
    jax.clear_caches()
    assert bits(jax.jit(lambda *args: all_results(kind, *args))(*args)) == first


# What XLA's CPU client makes its thread pool of: NPROC, then the processors it may run on.
HASH_OF_GRADIENTS = """
import hashlib, sys
import jax, numpy as np
import jaxnorm
generator = np.random.default_rng(0)
x, dy = generator.standard_normal((2, 1537, 333), np.float32)
scale = np.ones(333, np.float32)
digest = hashlib.sha256()
for norm in (jaxnorm.rms_norm, jaxnorm.layer_norm):
    for gradient in jax.jit(lambda x, s, b, dy: jax.vjp(norm, x, s, b)[1](dy))(x, scale, scale, dy):
        digest.update(np.asarray(gradient).tobytes())
    x_of_heads, dy_of_heads, scales = (a.reshape(29, 53, 333) for a in (x, dy, np.ones_like(x)))
    for gradient in jax.jit(lambda x, s, dy: jax.vjp(norm, x, s)[1](dy))(x_of_heads, scales[0], dy_of_heads):
        digest.update(np.asarray(gradient).tobytes())
print(digest.hexdigest())
"""


def hash_with_threads(count: int, directory) -> str:
    environment = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu", "NPROC": str(count)}
    run = subprocess.run(
        [sys.executable, "-c", HASH_OF_GRADIENTS], env=environment, cwd=directory, capture_output=True, text=True
    )
    return run.stdout or run.stderr


def test_gradients_do_not_depend_on_the_number_of_cpu_threads(tmp_path):
    assert hash_with_threads(1, tmp_path) == hash_with_threads(3, tmp_path)
