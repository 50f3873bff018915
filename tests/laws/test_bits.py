"""Laws 3, 4 and 5: bits depend neither on a row's neighbours, nor on the run, nor on how ops are joined."""

import math
import os
import subprocess
import sys
import threading
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import bits, draw_x
from coverage import over
from internals import ffi
from op import rows, without_names
from quantizing import assert_same
from table import ADDED, EACH, EACH_OF_ALL, EVERY, GATED, NORMS, OPS, SANDWICH, SOFTMAX


def dtypes_of(op):
    return op.dtypes


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
@over(OPS, move=lambda op: MOVES, dtypes=dtypes_of, size=lambda op: op.lengths)
def test_rows_that_lie_otherwise(op, move, dtypes, size):
    inputs, run = make(op, size, dtypes), by_row(op, **size.options)
    given, then, which = move(inputs)
    assert bits(jax.jit(lambda given: run(*then(given)))(given)) == bits(take(jax.device_get(run(*inputs)), which))


# On a GPU few rows have kernels of their own, forward and backward.
@pytest.mark.on_emulator
@over([op for op in OPS if op.many], dtypes=dtypes_of, size=lambda op: op.many)
def test_few_rows_among_many(op, dtypes, size):
    inputs, run, few = make(op, size, dtypes), by_row(op, **size.options), slice(300, 315)
    assert bits(run(*rows_of(inputs, few))) == bits(take(jax.device_get(run(*inputs)), few))


@pytest.mark.parametrize("op", NORMS, ids=str)
def test_the_layout_of_leading_axes(op):
    arrays, weights, cotangents = make(op, rows(24, 96), ("float32",))
    arrays_of_four, cotangents_of_four = jax.tree.map(lambda a: a.reshape(2, 3, 4, 96), (arrays, cotangents))
    run = by_row(op)
    assert bits(run(arrays_of_four, weights, cotangents_of_four)) == bits(run(arrays, weights, cotangents))


def everything(op, size, dtypes=None):
    """A compiled function of no operands: results, and gradients of all that it has."""
    args = op.draw(size, dtypes)
    return partial(jax.jit(op.everything(size)), args, op.cotangents(args, **size.options))


@over(EVERY, dtypes=dtypes_of, size=lambda op: op.lengths)
def test_runs_repeat_themselves(op, dtypes, size):
    run = everything(op, size, dtypes)
    first = bits(run())
    assert all(bits(run()) == first for _ in range(3))


@pytest.mark.parametrize("op", EACH_OF_ALL, ids=str)
def test_compilations_repeat_each_other(op):
    first = bits(everything(op, op.small)())
    jax.clear_caches()
    assert bits(everything(op, op.small)()) == first


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


# An op that joins several gives bit for bit what they give one after the other.
FUSED = [op for op in OPS if op.unfused]


def assert_as_unfused(op, args, **options):
    assert_same(jax.jit(partial(op.function, **options))(*args), op.unfused(*args, **options))


def sizes(op):
    return [size for size in op.unfused_sizes or op.sizes if math.prod(size.dims) < 2**22]


def unfused_dtypes(op):
    return op.unfused_dtypes or op.dtypes


@pytest.mark.on_emulator
@over(FUSED, dtypes=unfused_dtypes, weights=lambda op: ["x's", "float32"], size=sizes)
def test_fused_sizes(op, dtypes, weights, size):
    assert_as_unfused(op, op.draw(size, dtypes, dtypes[0] if weights == "x's" else weights), **size.options)


# Few columns, of whose rows a thread has several at once.
@pytest.mark.on_emulator
@pytest.mark.parametrize(
    ("op", "dtypes"), [(op, dtypes) for op in (*ADDED, *SANDWICH) for dtypes in unfused_dtypes(op)], ids=str
)
def test_fused_rows_at_once(op, dtypes):
    assert_as_unfused(op, op.draw(rows(9, 24), dtypes, dtypes[0]))


# Beyond every cache, where results may go past it.
@over(FUSED, size=lambda op: [size for size in op.unfused_sizes or op.sizes if math.prod(size.dims) >= 2**22])
def test_fused_large_arrays(op, size):
    assert_as_unfused(op, op.draw(size), **size.options)


@pytest.mark.on_emulator
@over(
    FUSED,
    dtypes=unfused_dtypes,
    options=lambda op: op.options,
    size=lambda op: op.lengths[:2] if "per head" in op.name else op.lengths[2:4],
)
def test_fused_options(op, dtypes, options, size):
    assert_as_unfused(op, op.draw(size, dtypes), **options, **size.options)


@pytest.mark.on_emulator
@over((*ADDED, *SANDWICH), dtypes=dtypes_of, weights=lambda op: [(None, None), ("float32", None), (None, "float32")])
def test_fused_without_weights(op, dtypes, weights):
    assert_as_unfused(op, op.draw(op.lengths[3], dtypes, weights))


@pytest.mark.on_emulator
@over(
    [op for op in FUSED if op.has_unfused_gradients or op.unfused_with_gradients],
    dtypes=lambda op: op.gradient_dtypes or op.dtypes,
    size=sizes,
)
def test_fused_gradients_of_arrays(op, dtypes, size):
    args = op.draw(size, dtypes)
    cotangents = op.cotangents(args, **size.options)

    def gradients(function):
        function = without_names(partial(function, **size.options))
        _, pullback = jax.vjp(lambda *arrays: function(*arrays, *args[op.arrays :]), *args[: op.arrays])
        return pullback(cotangents)

    expected = gradients(op.unfused_with_gradients or op.unfused)
    assert bits(jax.jit(partial(gradients, op.function))()) == bits(expected)


@pytest.mark.parametrize("op", [*ADDED, *SANDWICH], ids=str)
def test_a_fused_array_added_to_itself(op):
    x = draw_x((12, 80))
    assert_as_unfused(op, (x, x, None, None))


# CPU kernels in a thread with a small stack, which is what musl gives a thread and some servers theirs. What kernels
# keep of rows depends on the op, and with a gate on where that stands.
@pytest.fixture
def small_stacks():
    before = threading.stack_size(128 << 10)
    yield
    threading.stack_size(before)


@pytest.mark.any_code
@pytest.mark.needs("kernels")
@pytest.mark.parametrize("op", dict.fromkeys((*EACH, *SOFTMAX, *GATED[1:])), ids=str)
def test_a_small_stack(op, small_stacks):
    def run(*args):
        results, pullback = jax.vjp(op.differentiable, *args)
        return op.function(*args), pullback(results)

    results = []
    with jax.default_device(jax.devices("cpu")[0]):
        args = op.draw(op.small)
        program = jax.jit(run).lower(*args).compile()
        thread = threading.Thread(target=lambda: results.append(jax.block_until_ready(program(*args))))
        thread.start()
        thread.join()
        assert bits(results) == bits(program(*args))


# Programs that were exported where kernels wanted another workspace: the same results, or an error that says so.
WORKSPACES = {
    "larger": lambda floats: 2 * floats + 3,
    "less by one": lambda floats: floats - 1,
    "half": lambda floats: floats // 2,
    "a twentieth": lambda floats: floats // 20,
}


def sizes_with_workspaces(op):
    """Few rows and many, and long ones."""
    return [*op.many[:1], *op.lengths[-1:], *[size for size in op.sizes if size.dims[0] == 600][:1]]


@pytest.mark.needs("cuda")
@over((*EACH, NORMS[0]), floats=lambda op: WORKSPACES, dtypes=dtypes_of, size=sizes_with_workspaces)
def test_a_workspace_of_another_size(op, floats, dtypes, size, monkeypatch):
    expected = jax.device_get(everything(op, size, dtypes)())
    wanted, changed = ffi.workspace, []

    def workspace(*call, **needs):
        found = [(floats(count),) for (count,) in wanted(*call, **needs)]
        changed.extend(found)
        return found

    monkeypatch.setattr(ffi, "workspace", workspace)
    try:
        actual = jax.device_get(everything(op, size, dtypes)())
    except jax.errors.JaxRuntimeError as error:
        actual = str(error)
    if isinstance(actual, str):
        assert "export it again" in actual
        assert floats is not WORKSPACES["larger"]
    elif floats is WORKSPACES["larger"] or not changed:
        assert bits(actual) == bits(expected)
    else:
        for a, e in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
            # Sums of another order, rounded once.
            eps = float(jnp.finfo(e.dtype).eps) if jnp.issubdtype(e.dtype, jnp.floating) else 0.0
            a, e = np.float32(a), np.float32(e)
            np.testing.assert_allclose(a, e, rtol=max(1e-4, eps), atol=1e-5 * max(1.0, np.abs(e).max(initial=0)))
