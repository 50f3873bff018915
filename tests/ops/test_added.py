"""What is particular to the norms of x + residual: the sum is a result, with a cotangent of its own."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import bits
from coverage import over
from hlo import compiled_text, count_native_calls, lowered_calls
from native import is_platform_with_kernels
from op import rows
from table import ADDED
from tolerances import DSCALE, gradient_error

ops = pytest.mark.parametrize("op", ADDED, ids=str)
SIZE = rows(12, 80)

# A loss that depends on y, on the sum, on both.
LOSSES = {
    "y": lambda y, _: jnp.sin(y).sum(),
    "sum": lambda _, total: jnp.sin(total).sum(),
    "both": lambda y, total: (jnp.sin(y) * jnp.cos(total)).sum(),
}


def gradient(op, which, argnums=(0, 1, 2, 3), **options):
    return jax.grad(lambda *args: LOSSES[which](*op.function(*args, **options)), argnums)


@over(ADDED, which=lambda op: list(LOSSES))
def test_gradients_against_the_formula_in_float64(op, which):
    args = op.draw(rows(33, 1021))
    actual = jax.jit(gradient(op, which))(*args)
    with jax.enable_x64(True):
        wide = [jnp.asarray(arg, "float64") for arg in args]
        exact = gradient(op, which, implementation="jnp")(*wide)
    # sin and cos are float32 here, so dy has an error of its own.
    errors = [gradient_error(a, np.asarray(e), DSCALE) for a, e in zip(actual, exact, strict=True)]
    assert max(errors) <= 1, errors


# The sum has the residual's dtype, and so has its cotangent.
@over(ADDED, dtypes=lambda op: op.dtypes)
def test_the_gradient_of_x_is_that_of_the_residual_cast(op, dtypes):
    args = op.draw(rows(33, 1021), dtypes)
    dx, dresidual, *_ = jax.jit(lambda c, *args: jax.vjp(op.function, *args)[1](c))(op.cotangents(args), *args)
    assert bits(dx) == bits(dresidual.astype(dtypes[0]))


# What is not used costs nothing: no dsum, or no call.
@over(ADDED, which=lambda op: {"y": ("y", 1), "sum": ("sum", 0), "both": ("both", 1)})
def test_native_calls_of_a_gradient(op, which):
    name, bwd = which
    assert count_native_calls(compiled_text(gradient(op, name), *op.draw(SIZE))) == op.calls(fwd=1, bwd=bwd)


@over(ADDED, which=lambda op: {"y": ("y", "false"), "both": ("both", "true")})
def test_the_backward_reads_dsum_where_there_is_one(op, which):
    name, has_dsum = which
    calls = lowered_calls(gradient(op, name), op.backward, *op.draw(SIZE))
    assert [f"has_dsum = {has_dsum}" in call for call in calls] == [True] * is_platform_with_kernels()


@over(ADDED, dtype=lambda op: ["float32", "bfloat16"])
def test_the_gradients_of_x_and_of_the_residual_are_one_array(op, dtype):
    args = op.draw(SIZE, (dtype, dtype))
    dx, dresidual = jax.make_jaxpr(gradient(op, "both", (0, 1)))(*args).jaxpr.outvars
    assert dx is dresidual


# A layer's sum is the next one's residual and is wanted again by its own backward: it must not be copied.
@ops
def test_no_layer_of_a_stack_copies_its_residual(op):
    def stack(x, residual, scale):
        for _ in range(4):
            y, residual = op.function(x, residual, scale)
            x = jnp.sin(y)
        return (x * residual).sum()

    assert "f32[12,80]{1,0} copy(" not in compiled_text(jax.grad(stack, 2), *op.draw(SIZE)[:3])


@ops
def test_a_donated_residual_is_the_sums_buffer(op):
    args = op.draw(SIZE, ("bfloat16", "float32"))[:2]
    text = compiled_text(op.function, *args, donate_argnums=1)
    assert "input_output_alias={ {1}: (1" in text


@ops
def test_a_residual_that_lives_on_keeps_its_values(op):
    x, residual, *_ = op.draw(SIZE)
    before = bits(residual)
    _, _, after = jax.jit(lambda x, residual: (*op.function(x, residual), residual))(x, residual)
    assert (bits(after), bits(residual)) == (before, before)


@pytest.mark.parametrize("op", ADDED, ids=str)
def test_strict_promotion(op):
    with jax.numpy_dtype_promotion("strict"):
        x, residual = op.draw(op.small, ("bfloat16", "float32"))[:2]
        y, total = jax.vmap(op.function)(x, residual)
        assert (y.dtype, total.dtype) == (jnp.bfloat16, jnp.float32)
        assert jax.grad(lambda x: op.function(x, residual)[1].sum())(x).dtype == jnp.bfloat16


def results_of(text):
    """How many results a native call in a lowered program has."""
    return text.rsplit("->", 1)[1].count("tensor<")


def in_scan(function):
    return lambda x, residual: jax.lax.scan(lambda carry, _: (function(carry, residual), None), x, None, length=2)[0]


# Where nobody reads the sum: y alone is a result.
UNREAD = {
    "y": lambda f: lambda *args: f(*args)[0],
    "return_sum=False": lambda f: lambda *args: f(*args, return_sum=False),
    "jit of jit": lambda f: lambda *args: jax.jit(f)(*args)[0],
    "scan": lambda f: in_scan(lambda *args: f(*args)[0]),
    "cond": lambda f: lambda x, r: jax.lax.cond(x[0, 0] > 0, lambda: f(x, r)[0], lambda: x),
    "vmap": lambda f: jax.vmap(lambda *args: f(*args)[0]),
    "a sum that is padded is written": lambda f: lambda *args: f(*args, pad_to=128)[0],
    "a gradient reads it": lambda f: jax.grad(lambda *args: f(*args, return_sum=False).sum(), (0, 1)),
}
GIVES = {"a sum that is padded is written": 2, "a gradient reads it": 4}


@pytest.mark.kernels
@over(ADDED, unread=lambda op: list(UNREAD))
def test_a_sum_that_nobody_reads_is_not_a_result(op, unread):
    function = UNREAD[unread](partial(op.function, implementation="native"))
    calls = lowered_calls(function, op.forward, *op.draw(SIZE)[:2])
    statistics = op.statistics - 1 if unread in GIVES and GIVES[unread] == 4 else 0
    assert [results_of(call) for call in calls] == [GIVES.get(unread, 1) - (GIVES.get(unread) == 4) + statistics]


@over(ADDED, dtypes=lambda op: op.dtypes, size=lambda op: [rows(33, 1021), rows(7, 4096), rows(3, 40_000)])
def test_without_the_sum_y_is_the_same(op, dtypes, size):
    args = op.draw(size, dtypes)
    y, _ = jax.jit(op.function)(*args)
    assert bits(jax.jit(lambda *args: op.function(*args)[0])(*args)) == bits(y)
    assert bits(op.function(*args, return_sum=False)) == bits(y)


@ops
def test_the_gradient_without_the_sum(op):
    args = op.draw(SIZE)
    without = jax.jit(jax.grad(lambda *args: jnp.sin(op.function(*args, return_sum=False)).sum(), (0, 1, 2, 3)))(*args)
    assert bits(without) == bits(jax.jit(gradient(op, "y"))(*args))
