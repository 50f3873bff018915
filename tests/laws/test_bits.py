"""Laws 3 and 4: a row's results do not depend on its neighbours, and nothing depends on the run."""

import os
import subprocess
import sys
from functools import cache

import jax
import numpy as np
import pytest
from cases import bits
from coverage import over
from op import rows
from table import EACH, NORMS, OPS


@cache
def by_row(op, **options):
    """A compiled function of arrays, weights and cotangents: what has a row for each row of x."""

    def function(arrays, weights, cotangents):
        def results(*arrays):
            return op.function(*arrays, *weights, **options)

        if op.derived:  # whose gradient is bit for bit that of another op
            return [result for result in results(*arrays) if result.ndim]
        y, pullback = jax.vjp(results, *arrays)
        return *y, *pullback(cotangents)

    return jax.jit(function)


def make(op, size, dtypes):
    args = op.draw(size, dtypes)
    inputs = args[: op.arrays], args[op.arrays :], () if op.derived else op.cotangents(args, **size.options)
    return jax.device_get(inputs)  # of which NumPy takes rows: JAX would compile that for each shape


def take(tree, rows):
    return jax.tree.map(lambda a: a[rows], tree)


def rows_of(inputs, rows):
    arrays, weights, cotangents = inputs
    return take(arrays, rows), weights, take(cotangents, rows)


def at_an_odd_element(inputs):
    """Where XLA hands a kernel the slice itself, it is aligned to nothing."""
    flat = jax.tree.map(lambda a: np.pad(a.reshape(-1), (1, 0)), inputs)
    return flat, lambda flat: jax.tree.map(lambda f, a: f[1:].reshape(a.shape), flat, inputs), slice(None)


# How rows come to lie otherwise: what the program is given, what it makes of that, and which rows these are.
ONE, SOME, BACK = slice(1, 2), slice(1, 4), slice(None, None, -1)
MOVES = {
    "alone": lambda inputs: (rows_of(inputs, ONE), lambda given: given, ONE),
    "in another order": lambda inputs: (rows_of(inputs, BACK), lambda given: given, BACK),
    "a slice": lambda inputs: (inputs, lambda given: rows_of(given, SOME), SOME),
    "at an odd element": at_an_odd_element,
}


@pytest.mark.on_emulator
@over(OPS, move=lambda op: MOVES, dtypes=lambda op: op.dtypes, size=lambda op: op.lengths)
def test_rows_that_lie_otherwise(op, move, dtypes, size):
    inputs, run = make(op, size, dtypes), by_row(op, **size.options)
    given, then, which = move(inputs)
    assert bits(jax.jit(lambda given: run(*then(given)))(given)) == bits(take(jax.device_get(run(*inputs)), which))


# On a GPU few rows have kernels of their own, forward and backward.
@pytest.mark.on_emulator
@over([op for op in OPS if op.many], dtypes=lambda op: op.dtypes, size=lambda op: op.many)
def test_few_rows_among_many(op, dtypes, size):
    inputs, run, few = make(op, size, dtypes), by_row(op, **size.options), slice(300, 315)
    assert bits(run(*rows_of(inputs, few))) == bits(take(jax.device_get(run(*inputs)), few))


@pytest.mark.parametrize("op", NORMS, ids=str)
def test_the_layout_of_leading_axes(op):
    arrays, weights, cotangents = make(op, rows(24, 96), ("float32",))
    arrays_of_four, cotangents_of_four = jax.tree.map(lambda a: a.reshape(2, 3, 4, 96), (arrays, cotangents))
    run = by_row(op)
    assert bits(run(arrays_of_four, weights, cotangents_of_four)) == bits(run(arrays, weights, cotangents))


@over(EACH, size=lambda op: [op.small])
def test_vmap_over_rows(op, size):
    args = op.draw(size)
    axes = [0 if i < op.arrays else None for i in range(len(args))]
    function = lambda *args: op.function(*args, **size.options)  # noqa: E731
    assert bits(jax.jit(jax.vmap(function, axes))(*args)) == bits(jax.jit(function)(*args))


@over(OPS, dtypes=lambda op: op.dtypes, size=lambda op: op.lengths)
def test_runs_repeat_themselves(op, dtypes, size):
    args = op.draw(size, dtypes)
    cotangents, run = op.cotangents(args, **size.options), jax.jit(op.everything(size))
    first = bits(run(args, cotangents))
    assert all(bits(run(args, cotangents)) == first for _ in range(3))


@pytest.mark.parametrize("op", EACH, ids=str)
def test_compilations_repeat_each_other(op):
    args = op.draw(op.small)
    cotangents = op.cotangents(args, **op.small.options)
    first = bits(jax.jit(op.everything(op.small))(args, cotangents))
    jax.clear_caches()
    assert bits(jax.jit(op.everything(op.small))(args, cotangents)) == first


# What XLA's CPU client makes its thread pool of: NPROC, then the processors it may run on.
HASH_OF_GRADIENTS = """
import hashlib, sys
import jax, numpy as np
import jaxnorm
generator = np.random.default_rng(0)
x, dy = generator.standard_normal((2, 1537, 333), np.float32)
scale = np.ones(333, np.float32)
digest = hashlib.sha256()
def add(gradients):
    for gradient in gradients:
        digest.update(np.asarray(gradient).tobytes())
for norm in (jaxnorm.rms_norm, jaxnorm.layer_norm):
    with_bias = lambda x, scale, bias: norm(x, scale, bias=bias)
    add(jax.jit(lambda x, s, b, dy: jax.vjp(with_bias, x, s, b)[1](dy))(x, scale, scale, dy))
    x_of_heads, dy_of_heads, scales = (a.reshape(29, 53, 333) for a in (x, dy, np.ones_like(x)))
    add(jax.jit(lambda x, s, dy: jax.vjp(norm, x, s)[1](dy))(x_of_heads, scales[0], dy_of_heads))
def gated(*args):
    return jaxnorm.gated_rms_norm(*args, gate_first=True)
add(jax.jit(lambda x, s, dy: jax.vjp(gated, x, dy, s)[1](dy))(x, scale, dy))
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
