"""Law 7: everything that works on the jnp formula works on the norms and gives the same."""

import threading
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import KINDS, NORMS, draw, draw_x, formula, operands
from hlo import count_native_calls
from native import native_calls, target
from transformations import POLICIES, TRANSFORMATIONS, loss_of

DIMS = (6, 10)


def assert_close(actual, expected):
    """As two float32 programs that round in different places."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (e.shape, e.dtype)
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5 * max(1.0, float(jnp.abs(e).max())))


transformations = pytest.mark.parametrize("name", TRANSFORMATIONS)
kinds = pytest.mark.parametrize("kind", KINDS)


@cache
def compiled(kind, name):
    """The norm under one of the transformations, compiled once for the tests of its values and of its program."""
    return jax.jit(TRANSFORMATIONS[name].transform(NORMS[kind])).lower(*operands(DIMS)).compile()


@cache
def expected(kind, name):
    return jax.jit(TRANSFORMATIONS[name].transform(formula(kind)))(*operands(DIMS))


@transformations
@kinds
def test_transformed_and_compiled(kind, name):
    assert_close(compiled(kind, name)(*operands(DIMS)), expected(kind, name))


@transformations
@kinds
def test_transformed_outside_jit(kind, name):
    assert_close(TRANSFORMATIONS[name].transform(NORMS[kind])(*operands(DIMS)), expected(kind, name))


@transformations
@kinds
def test_native_calls_in_the_compiled_program(kind, name):
    _, fwd, bwd = TRANSFORMATIONS[name]
    calls = count_native_calls(compiled(kind, name).as_text())
    counted = {target(kind, way) for way, count in (("fwd", fwd), ("bwd", bwd)) if count is not None}
    assert {name: count for name, count in calls.items() if name in counted} == native_calls(kind, fwd or 0, bwd or 0)


def test_every_policy_is_in_the_table():
    # JAX 0.11 has the classes of policies there too; a policy is what makes or is one, in lower case.
    assert set(POLICIES) == {name for name in vars(jax.checkpoint_policies) if name.islower()}


def lowered_under_policy(kind, name):
    gradient = jax.grad(loss_of(jax.checkpoint(NORMS[kind], policy=POLICIES[name].policy)), (0, 1, 2))
    return jax.jit(gradient).lower(*operands(DIMS))


@pytest.mark.parametrize("name", POLICIES)
@kinds
def test_gradient_under_a_checkpoint_policy(kind, name):
    assert_close(lowered_under_policy(kind, name).compile()(*operands(DIMS)), expected(kind, "grad"))


# Counted as lowered: XLA's CPU compiler may merge what a policy recomputes, as there is no memory to be saved there.
@pytest.mark.parametrize("name", POLICIES)
@kinds
def test_native_calls_under_a_checkpoint_policy(kind, name):
    calls = count_native_calls(lowered_under_policy(kind, name).as_text())
    assert calls == native_calls(kind, fwd=POLICIES[name].fwd, bwd=1)


@kinds
def test_donated_memory_may_hold_the_result(kind):
    x, scale, bias = operands(DIMS)
    expected = formula(kind)(x, scale, bias)
    y = jax.jit(NORMS[kind], donate_argnums=0)(x, scale, bias)
    assert_close(y, expected)


@kinds
def test_donated_memory_may_hold_the_gradient(kind):
    step = jax.jit(lambda x, scale, bias: x - jax.grad(loss_of(NORMS[kind]))(x, scale, bias), donate_argnums=0)
    expected = operands(DIMS)[0] - jax.grad(loss_of(formula(kind)))(*operands(DIMS))
    assert_close(step(*operands(DIMS)), expected)


@kinds
def test_compiled_ahead_of_time(kind):
    compiled = jax.jit(NORMS[kind]).lower(*operands(DIMS)).compile()
    assert_close(compiled(*operands(DIMS)), formula(kind)(*operands(DIMS)))


@kinds
def test_evaluated_for_its_shape_only(kind):
    y = jax.eval_shape(NORMS[kind], jax.ShapeDtypeStruct((2**40, 64), "bfloat16"))
    assert (y.shape, y.dtype) == ((2**40, 64), jnp.bfloat16)


@kinds
def test_called_from_several_threads(kind):
    gradient = jax.jit(jax.grad(loss_of(NORMS[kind]), (0, 1, 2)))
    inputs = [operands((rows, 64)) for rows in (1, 2, 3, 50, 51, 52, 500, 501)]
    results = [None] * len(inputs)

    def work(i):
        for _ in range(5):
            results[i] = gradient(*inputs[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_close(results, [gradient(*args) for args in inputs])


# A jnp norm converts weak types and NumPy arrays; so must these.
@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
@kinds
def test_arrays_of_numpy(kind, convert):
    args = [convert(a) for a in operands(DIMS)]
    assert_close(NORMS[kind](*args), formula(kind)(*operands(DIMS)))


@kinds
def test_float64(kind):
    with jax.enable_x64(True):
        x = jnp.asarray(draw_x(DIMS), "float64") + 1e-12 * jnp.asarray(draw("tiny", DIMS), "float64")
        y = NORMS[kind](x)
        centred = np.asarray(x) - (np.asarray(x).mean(-1, keepdims=True) if kind == "layer" else 0)
        exact = centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + 1e-6)
        np.testing.assert_allclose(y, exact, rtol=1e-12)
