"""The norms of x + residual, which is a result with a cotangent of its own, plain and padded.

Of the padded the last axis of y ends in zeros, which the backward does not read.
"""

import re
from dataclasses import replace
from functools import partial

import bad_calls
import formulas
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import ADDS, KINDS, NORMS, PAIRS, assert_close, bits, draw, with_gradients
from coverage import over
from hlo import compiled_text, count_native_calls, lowered_calls
from native import is_platform_with_kernels
from op import Size, rows
from quantizing import sum_of
from tolerances import DSCALE, gradient_error

from ops.norm import HUB, norm, norm_of_sum
from ops.sandwich_norm import sandwich


def added(kind):
    def unfused(x, residual, *weights, out_dtype=None, **options):
        total = sum_of(x, residual)
        return jax.jit(partial(NORMS[kind], out_dtype=out_dtype or x.dtype, **options))(total, *weights), total

    def exact(x, residual, *weights, out_dtype=None, **options):
        total = sum_of(x, residual)
        return norm(kind).exact(total, *weights, out_dtype=out_dtype or x.dtype, **options)

    def exact_gradients(cotangents, x, residual, *weights, **options):
        dy, dsum = cotangents
        found = norm(kind).exact_gradients((dy,), sum_of(x, residual), *weights, **options)
        # The gradient of x is that of the residual in x's dtype.
        return {"residual": (found.pop("x")[0] + oracle.f64(dsum), None), **found}

    return replace(
        norm(kind),
        name=f"add {kind}",
        public=f"add_{kind}_norm",
        operands=("x", "residual", "scale", "bias"),
        arrays=2,
        dtypes=PAIRS,
        function=ADDS[kind],
        formula=formulas.added(kind),
        as_norm=norm_of_sum,
        exact=exact,
        exact_gradients=exact_gradients,
        unfused=unfused,
        # No whole vector, several rows at once, with and without a rest, long.
        sizes=(
            *(rows(7, cols) for cols in (1, 24, 128, 257, 1024, 4096, 4097, 40_000)),
            *(rows(n, 24) for n in (1, 2, 3, 4, 5, 4099)),  # what a thread takes at once, and more than a task has
            rows(2048, 4096),  # beyond every cache: results may go past it
            Size((5, 6, 40), (6, 40), {"axis": (-2, -1)}),
            Size((3, 4, 4, 64), (4, 64)),
            Size((3, 4, 4, 64), (4, 1, 64)),
        ),
        options=(
            *({"scale_offset": 1.0}, {"epsilon": 1.0}, {"multiply_before_cast": False}),
            *({"out_dtype": np.dtype("float32")}, HUB),
        ),
        backward_sizes=(),
        lengths=tuple(rows(9, cols) for cols in (1, 31, 128, 1021, 4096, 40_000)),
        many=(),
        gradients=("dx", "dx", "dscale", "dbias"),
        kept=("residual", "scale"),
        bad_calls=bad_calls.PADDING,
        without_kernel=bad_calls.RESIDUAL_WITHOUT_KERNEL,
    )


def padded(kind):
    def unfused(*args, pad_to):
        y, total = jax.jit(ADDS[kind])(*args)
        return formulas.padded(y, pad_to), total

    def as_norm(f):
        def function(x, scale=None, bias=None):
            y, total = f(x, jnp.cos(x), scale, bias)
            return jnp.roll(y, 3, -1)[..., : x.shape[-1]] * jnp.sin(total)

        return function

    # No padding, less and more than a vector, longer than the row; short and long rows.
    sizes = ((64, 64), (100, 128), (100, 101), (3, 256), (1000, 256), (4097, 128), (40_000, 4096))
    return replace(
        added(kind),
        name=f"padded {kind}",
        dtypes=PAIRS[:4],
        as_norm=as_norm,
        unfused=unfused,
        has_unfused_gradients=True,
        small=rows(6, 10, pad_to=16),
        sizes=tuple(rows(7, cols, pad_to=pad_to) for cols, pad_to in sizes),
        options=(),
        lengths=(rows(9, 100, pad_to=64), rows(9, 1021, pad_to=128)),
        exact=None,
        exact_gradients=None,
    )


ADDED = tuple(added(kind) for kind in KINDS)
PADDED = tuple(padded(kind) for kind in KINDS)
WITH_SUMS = (*ADDED, sandwich())


ops, with_sums = pytest.mark.parametrize("op", ADDED, ids=str), pytest.mark.parametrize("op", WITH_SUMS, ids=str)
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
        exact = gradient(op, which, implementation="xla")(*wide)
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


@over(WITH_SUMS, which=lambda op: {"y": ("y", "false"), "both": ("both", "true")})
def test_the_backward_reads_the_cotangent_of_the_sum_where_there_is_one(op, which):
    name, has = which
    calls = lowered_calls(gradient(op, name), op.backward, *op.draw(SIZE))
    found = [re.search(r"has_d(sum|new_residual) = (\w+)", call)[2] for call in calls]
    assert found == [has] * is_platform_with_kernels()


@over(ADDED, dtype=lambda op: ["float32", "bfloat16"])
def test_the_gradients_of_x_and_of_the_residual_are_one_array(op, dtype):
    args = op.draw(SIZE, (dtype, dtype))
    dx, dresidual = jax.make_jaxpr(gradient(op, "both", (0, 1)))(*args).jaxpr.outvars
    assert dx is dresidual


# A layer's sum is the next one's residual and is wanted again by its own backward: it must not be copied.
@with_sums
def test_no_layer_of_a_stack_copies_its_residual(op):
    def stack(x, residual, *weights):
        for _ in range(4):
            y, residual = op.function(x, residual, *weights)
            x = jnp.sin(y)
        return (x * residual).sum()

    text = compiled_text(jax.grad(stack, (2, 3)), *op.draw(SIZE))
    assert "f32[12,80]{1,0} copy(" not in text
    assert count_native_calls(text) == op.calls(fwd=4, bwd=4)


@with_sums
def test_a_residual_that_lives_on_keeps_its_values(op):
    args = op.draw(SIZE)
    before = bits(args[1])
    *_, after = jax.jit(lambda *args: (*op.function(*args), args[1]))(*args)
    assert (bits(after), bits(args[1])) == (before, before)


@ops
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
    "jit of jit": lambda f: lambda *args: jax.jit(f)(*args)[0],
    "scan": lambda f: in_scan(lambda *args: f(*args)[0]),
    "cond": lambda f: lambda x, r: jax.lax.cond(x[0, 0] > 0, lambda: f(x, r)[0], lambda: x),
    "vmap": lambda f: jax.vmap(lambda *args: f(*args)[0]),
    "a sum that is padded is written": lambda f: lambda *args: f(*args, pad_to=128)[0],
    "a gradient reads it": lambda f: jax.grad(lambda *args: f(*args)[0].sum(), (0, 1)),
}


@pytest.mark.needs("kernels")
@over(ADDED, unread=lambda op: list(UNREAD))
def test_a_sum_that_nobody_reads_is_not_a_result(op, unread):
    function = UNREAD[unread](partial(op.function, implementation="native"))
    calls = lowered_calls(function, op.forward, *op.draw(SIZE)[:2])
    is_written, has_statistics = unread in list(UNREAD)[-2:], unread == "a gradient reads it"
    assert [results_of(call) for call in calls] == [1 + is_written + op.statistics * has_statistics]


@over(ADDED, dtypes=lambda op: op.dtypes, size=lambda op: [rows(33, 1021), rows(7, 4096), rows(3, 40_000)])
def test_without_the_sum_y_is_the_same(op, dtypes, size):
    args = op.draw(size, dtypes)
    y, _ = jax.jit(op.function)(*args)
    assert bits(jax.jit(lambda *args: op.function(*args)[0])(*args)) == bits(y)


# `pad_to`.
padded_ops = pytest.mark.parametrize("op", PADDED, ids=str)
TO_64 = rows(5, 100, pad_to=64)


def results_and_gradients(op, **options):
    return jax.jit(with_gradients(partial(op.function, **options)))


# dy's rows may lie on other boundaries than the plain norm's, and sums over rows are then added in another order.
@pytest.mark.on_emulator
@over(PADDED, dtypes=lambda op: op.dtypes, size=lambda op: op.sizes)
def test_gradients_of_weights_are_those_of_the_plain_norm(op, dtypes, size):
    args = op.draw(size, dtypes)
    cotangents = op.cotangents(args, **size.options)
    plain = cotangents[0][..., : size.dims[-1]], cotangents[1]
    _, gradients = results_and_gradients(op, **size.options)(cotangents, *args)
    assert_close(gradients[2:], results_and_gradients(op)(plain, *args)[1][2:])


# Many rows, arrays beyond the caches, whose results may go past them; and what is not finite.
@over(PADDED, size=lambda op: [rows(4099, 24, pad_to=32), rows(2048, 4000, pad_to=4096), rows(2048, 4096, pad_to=4097)])
def test_large_arrays(op, size):
    x, *others = op.draw(size)
    args = x.at[3, 5].set(jnp.inf), *others
    assert bits(jax.jit(partial(op.function, **size.options))(*args)) == bits(op.unfused(*args, **size.options))


@padded_ops
def test_weights_for_each_head(op):
    args = op.draw(Size((5, 4, 100), (4, 100)))
    assert bits(op.function(*args, pad_to=64)[0]) == bits(formulas.padded(op.function(*args)[0], 64))


@padded_ops
def test_the_formula(op):
    args = op.draw(TO_64)
    cotangents = op.cotangents(args, pad_to=64)
    actual, expected = (
        results_and_gradients(op, pad_to=64, implementation=i)(cotangents, *args) for i in (None, "xla")
    )
    assert_close(actual, expected)


@padded_ops
def test_no_pass_pads(op):
    """y comes padded from the native call, and dy goes into one as it is."""
    text = compiled_text(
        results_and_gradients(op, pad_to=64), (draw("a", (5, 128)), draw("b", (5, 100))), *op.draw(TO_64)
    )
    assert count_native_calls(text) == op.calls(fwd=1, bwd=1)
    assert " pad(" not in text
