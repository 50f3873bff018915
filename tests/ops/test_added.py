"""The norms of x + residual. Law 5: bit for bit the sum and then the norm; its gradients; one call each way."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import ADDS, KINDS, NORMS, bits, draw, draw_bias, draw_residual, draw_scale, draw_x
from hlo import compiled_text, count_native_calls
from native import is_platform_with_kernels, native_calls, target
from test_residuals import STATISTICS, lowered_calls
from tolerances import DSCALE, DX, forward_errors, gradient_error

# The dtypes of x and of the residual: the same, a wide stream that takes narrow parts, and the reverse.
PAIRS = [
    ("float32", "float32"),
    ("bfloat16", "bfloat16"),
    ("float16", "float16"),
    ("bfloat16", "float32"),
    ("float16", "float32"),
    ("float32", "bfloat16"),
]
# No whole vector, several rows at once, with and without a rest, long.
LENGTHS = (1, 24, 128, 257, 1024, 4096, 4097, 40_000)
OPTIONS = {
    "no weights": {"scale": None, "bias": None},
    "scale alone": {"bias": None},
    "bias alone": {"scale": None},
    "Gemma's offset": {"scale_offset": 1.0},
    "a large epsilon": {"epsilon": 1.0},
    "x_hat rounded": {"multiply_before_cast": False},
    "a float32 result": {"out_dtype": np.dtype("float32")},
}
ROWS, COLS = 12, 80

kinds = pytest.mark.parametrize("kind", KINDS)
pairs = pytest.mark.parametrize(("dtype", "residual_dtype"), PAIRS)


def draw_pair(dims, dtype="float32", residual_dtype="float32"):
    return draw_x(dims, dtype), draw_residual(dims, residual_dtype)


def draw_operands(dims, dtype="float32", residual_dtype="float32", weight_dtype="float32"):
    weights = (draw(dims[-1:], weight_dtype) for draw in (draw_scale, draw_bias))
    return *draw_pair(dims, dtype, residual_dtype), *weights


def sum_of(x, residual):
    """By NumPy."""
    return jnp.asarray((np.float32(x) + np.float32(residual)).astype(residual.dtype))


def assert_exact(kind, x, residual, scale, bias, out_dtype=None, **options):
    """The fused call against the two that it stands for."""
    fused = jax.jit(lambda *args: ADDS[kind](*args, out_dtype=out_dtype, **options))
    norm = jax.jit(lambda *args: NORMS[kind](*args, out_dtype=out_dtype or x.dtype, **options))
    total = sum_of(x, residual)
    assert bits(fused(x, residual, scale, bias)) == bits((norm(total, scale, bias), total))


@pytest.mark.parametrize("cols", LENGTHS)
@pytest.mark.parametrize(
    ("dtype", "residual_dtype", "weight_dtype"),
    [(*pair, weights) for pair in PAIRS for weights in sorted({pair[0], "float32"})],
)
@kinds
def test_rows_of_every_length_are_exact(kind, dtype, residual_dtype, weight_dtype, cols):
    assert_exact(kind, *draw_operands((7, cols), dtype, residual_dtype, weight_dtype))


@pytest.mark.parametrize("name", OPTIONS)
@pairs
@kinds
def test_every_option_is_exact(kind, dtype, residual_dtype, name):
    x, residual, scale, bias = draw_operands((5, 1021), dtype, residual_dtype)
    assert_exact(kind, x, residual, **({"scale": scale, "bias": bias} | OPTIONS[name]))


@pairs
@kinds
def test_several_axes_are_exact(kind, dtype, residual_dtype):
    x, residual = draw_pair((5, 6, 40), dtype, residual_dtype)
    assert_exact(kind, x, residual, draw_scale((6, 40)), draw_bias((6, 40)), axis=(-2, -1))


# The rows that a thread takes at once, and more of them than one task has.
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 4099])
@kinds
def test_any_number_of_rows_is_exact(kind, rows):
    assert_exact(kind, *draw_operands((rows, 24), "bfloat16", "bfloat16"))


# Arrays beyond every cache, whose results may go past it.
@kinds
def test_large_arrays_are_exact(kind):
    assert_exact(kind, *draw_operands((2048, 4096)))


@pairs
@kinds
def test_the_result_against_float64(kind, dtype, residual_dtype):
    x, residual, scale, bias = draw_operands((33, 1024), dtype, residual_dtype)
    y, total = jax.jit(ADDS[kind])(x, residual, scale, bias)
    assert forward_errors(y, oracle.forward(kind, total, scale, bias, out_dtype=x.dtype)) == []


def cotangents(kind, dtype="float32", residual_dtype="float32", dims=(33, 1021)):
    """The operands, the cotangents of y and of the sum, and the gradients for them."""
    args = draw_operands(dims, dtype, residual_dtype)
    dy, dsum = draw("dy", dims, dtype), draw("dsum", dims, residual_dtype)
    return args, dy, dsum, jax.jit(lambda *args: jax.vjp(ADDS[kind], *args)[1]((dy, dsum)))(*args)


@pairs
@kinds
def test_gradients_against_float64(kind, dtype, residual_dtype):
    (x, residual, scale, _), dy, dsum, (_, dresidual, dscale, dbias) = cotangents(kind, dtype, residual_dtype)
    exact = oracle.gradients(kind, sum_of(x, residual), dy, scale)
    errors = {
        "dresidual": gradient_error(dresidual, exact.dx + oracle.f64(dsum), DX),
        "dscale": gradient_error(dscale, exact.dscale, DSCALE),
        "dbias": gradient_error(dbias, exact.dbias, DSCALE),
    }
    assert all(error <= 1 for error in errors.values()), errors


# The sum has the residual's dtype, and so has its cotangent.
@pairs
@kinds
def test_the_gradient_of_x_is_that_of_the_residual_cast(kind, dtype, residual_dtype):
    *_, (dx, dresidual, _, _) = cotangents(kind, dtype, residual_dtype)
    assert bits(dx) == bits(dresidual.astype(dtype))


# A loss that depends on y, on the sum, on both.
LOSSES = {
    "y": lambda y, _: jnp.sin(y).sum(),
    "sum": lambda _, total: jnp.sin(total).sum(),
    "both": lambda y, total: (jnp.sin(y) * jnp.cos(total)).sum(),
}


def loss_of(kind, which, implementation=None):
    return lambda *args: LOSSES[which](*ADDS[kind](*args, implementation=implementation))


@pytest.mark.parametrize("which", LOSSES)
@kinds
def test_gradients_against_the_formula_in_float64(kind, which):
    args = draw_operands((33, 1021))
    gradients = jax.jit(jax.grad(loss_of(kind, which), (0, 1, 2, 3)))(*args)
    with jax.enable_x64(True):
        wide = [jnp.asarray(arg, "float64") for arg in args]
        exact = jax.grad(loss_of(kind, which, "jnp"), (0, 1, 2, 3))(*wide)
    # sin and cos are float32 here, so dy has an error of its own.
    errors = [gradient_error(a, np.asarray(e), DSCALE) for a, e in zip(gradients, exact, strict=True)]
    assert max(errors) <= 1, errors


# What is not used costs nothing: no dsum, or no call.
@pytest.mark.parametrize(("which", "bwd"), [("y", 1), ("sum", 0), ("both", 1)])
@kinds
def test_native_calls_of_a_gradient(kind, which, bwd):
    gradient = jax.grad(loss_of(kind, which), (0, 1, 2, 3))
    calls = count_native_calls(compiled_text(gradient, *draw_operands((ROWS, COLS))))
    assert calls == native_calls(kind, fwd=1, bwd=bwd)


@pytest.mark.parametrize(("which", "has_dsum"), [("y", "false"), ("both", "true")])
@kinds
def test_the_backward_reads_dsum_where_there_is_one(kind, which, has_dsum):
    gradient = jax.grad(loss_of(kind, which), (0, 1, 2, 3))
    calls = lowered_calls(gradient, target(kind, "bwd"), *draw_operands((ROWS, COLS)))
    assert [f"has_dsum = {has_dsum}" in call for call in calls] == [True] * is_platform_with_kernels()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@kinds
def test_the_gradients_of_x_and_of_the_residual_are_one_array(kind, dtype):
    args = draw_operands((ROWS, COLS), dtype, dtype)
    dx, dresidual = jax.make_jaxpr(jax.grad(loss_of(kind, "both"), (0, 1)))(*args).jaxpr.outvars
    assert dx is dresidual


@pairs
@kinds
def test_between_forward_and_backward_only_the_sum_the_scale_and_statistics_live(kind, dtype, residual_dtype):
    args = draw_operands((ROWS, COLS), dtype, residual_dtype)
    pullback = jax.eval_shape(lambda *args: jax.vjp(ADDS[kind], *args)[1], *args)
    kept = sorted((leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(pullback) if leaf.size > 1)
    statistics = [((ROWS, 1), "float32")] * STATISTICS[kind]
    assert kept == sorted([((ROWS, COLS), residual_dtype), ((COLS,), "float32"), *statistics])


# A layer's sum is the next one's residual and is wanted again by its own backward: it must not be copied.
@kinds
def test_no_layer_of_a_stack_copies_its_residual(kind):
    def stack(x, residual, scale):
        for _ in range(4):
            y, residual = ADDS[kind](x, residual, scale)
            x = jnp.sin(y)
        return (x * residual).sum()

    args = draw_operands((ROWS, COLS))[:3]
    text = compiled_text(jax.grad(stack, 2), *args)
    assert f"f32[{ROWS},{COLS}]{{1,0}} copy(" not in text


@kinds
def test_a_donated_residual_becomes_the_sum(kind):
    x, residual = draw_pair((ROWS, COLS), "bfloat16", "float32")
    expected = jax.jit(ADDS[kind])(x, residual)
    compiled = jax.jit(ADDS[kind], donate_argnums=1).lower(x, residual).compile()
    assert "input_output_alias={ {1}: (1" in compiled.as_text()
    assert f"f32[{ROWS},{COLS}]{{1,0}} copy(" not in compiled.as_text()
    assert bits(compiled(x, residual)) == bits(expected)


@kinds
def test_a_residual_that_lives_on_keeps_its_values(kind):
    x, residual = draw_pair((ROWS, COLS))
    before = bits(residual)
    _, _, after = jax.jit(lambda x, residual: (*ADDS[kind](x, residual), residual))(x, residual)
    assert (bits(after), bits(residual)) == (before, before)


@kinds
def test_one_array_added_to_itself(kind):
    x = draw_x((ROWS, COLS))
    assert_exact(kind, x, x, None, None)


def all_results(kind, dtype, residual_dtype, rows, cols, among):
    """Of the rows given, out of many."""
    x, residual, scale, bias = draw_operands((rows, cols), dtype, residual_dtype)
    dy, dsum = draw("dy", (rows, cols), dtype), draw("dsum", (rows, cols), residual_dtype)

    def function(x, residual, dy, dsum):
        results, pullback = jax.vjp(lambda x, r: ADDS[kind](x, r, scale, bias), x, residual)
        return *results, *pullback((dy, dsum))

    return jax.jit(function)(x[among], residual[among], dy[among], dsum[among])


@pytest.mark.parametrize("cols", [1, 31, 128, 1021, 4096, 40_000])
@pairs
@kinds
def test_a_row_alone(kind, dtype, residual_dtype, cols):
    alone = all_results(kind, dtype, residual_dtype, 9, cols, slice(2, 3))
    many = all_results(kind, dtype, residual_dtype, 9, cols, slice(None))
    assert bits(alone) == bits([result[2:3] for result in many])


@pairs
@kinds
def test_runs_repeat_themselves(kind, dtype, residual_dtype):
    first = bits(cotangents(kind, dtype, residual_dtype, (513, 640))[-1])
    assert bits(cotangents(kind, dtype, residual_dtype, (513, 640))[-1]) == first


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("operand", [0, 1], ids=["x", "residual"])
@kinds
def test_what_is_not_finite_spreads_as_in_the_composition(kind, operand, value):
    args = list(draw_operands((4, 1021)))
    args[operand] = args[operand].at[1, 1020].set(value)
    y, total = jax.jit(ADDS[kind])(*args)
    np.testing.assert_array_equal(total, sum_of(*args[:2]))
    np.testing.assert_array_equal(y, jax.jit(NORMS[kind])(total, *args[2:]))


@pytest.mark.parametrize("dims", [(0, 64), (3, 0, 64), (0, 100_003)])
@kinds
def test_no_rows(kind, dims):
    *_, (dx, dresidual, dscale, dbias) = cotangents(kind, dims=dims)
    assert (dx.shape, dresidual.shape) == (dims, dims)
    np.testing.assert_array_equal((dscale, dbias), np.zeros((2, dims[-1])))


@kinds
def test_float64(kind):
    with jax.enable_x64(True):
        x, residual = (array.astype("float64") / 3 for array in draw_pair((6, 10)))
        y, total = ADDS[kind](x, residual)
        np.testing.assert_array_equal(total, np.asarray(x) + np.asarray(residual))
        exact = oracle.forward(kind, total, out_dtype="float64").exact
        np.testing.assert_allclose(y, exact, rtol=1e-12)
