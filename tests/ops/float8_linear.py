"""`float8_linear`: the product of rounded operands, its gradient with dy rounded once for each, and its calls."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import draw
from internals import Float8Linear
from oracle import f64
from quantizing import array_by_numpy

from jaxnorm import Float8Recipe, Quantized, float8_linear, quantize_kernel, quantized_dot
from ops.products import E4M3, assert_norms_close, gradients_of, of_recipe, rows_of, value_and_gradients, with_zeros

ROWS, DEPTH, COLUMNS = (4, 6), 96, 48
operands = partial(with_zeros, (*ROWS, DEPTH, COLUMNS))


def step(recipe, *args):
    return value_and_gradients(lambda x, kernel, bias: float8_linear(x, kernel, bias=bias, recipe=recipe), *args)


# GPUs add up products of float8 with fewer digits by default.
def digits(all_of_them):
    return jax.default_matmul_precision("highest" if all_of_them and jax.default_backend() == "gpu" else "default")


# Sums of float32 in any order, and one rounding to the result's dtype.
def assert_within(actual, expected, magnitudes, bound=2.0**-12):
    step = 0 if actual.dtype == jnp.float32 else 2.0 ** -(jnp.finfo(actual.dtype).nmant + 1)
    found = f64(actual).reshape(expected.shape)
    assert (np.abs(found - expected) <= bound * magnitudes + step * np.abs(expected)).all()


def test_it_is_quantized_dot_of_what_is_quantised():
    x, kernel, bias, _ = operands("bfloat16")
    x_8, lying = (Quantized(*map(jnp.asarray, array_by_numpy(a, E4M3))) for a in (x, kernel.T))
    kernel_8 = dataclasses.replace(lying, transposed=True)
    np.testing.assert_array_equal(float8_linear(x, kernel, bias=bias), quantized_dot(x_8, kernel_8, bias=bias))


@pytest.mark.parametrize("recipe", [Float8Recipe(power_of_two=True)])
def test_a_dy_of_few_bits_is_not_rounded(recipe):
    x, kernel, bias, dy = operands()
    dy = jnp.round(dy)
    with digits(all_of_them=True):
        _, dx, dw, _ = step(recipe, x, kernel, bias, dy)
    for actual, expected in zip((dx, dw), gradients_of(of_recipe(recipe), x, kernel, dy, rounds=False), strict=True):
        assert_within(actual, *expected, 2.0**-18)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_powers_of_two_are_exact(dtype):
    x, kernel, bias, dy = (jnp.sign(a) * 2.0 ** jnp.clip(jnp.round(a), -2, 2).astype(dtype) for a in operands(dtype))
    with digits(all_of_them=True):
        actual = step(Float8Recipe(power_of_two=True), x, kernel, bias, dy)
    plain = partial(jnp.matmul, preferred_element_type=np.float32, precision="highest")
    y, dx = (plain(x, kernel) + bias.astype(np.float32)).astype(dtype), plain(dy, kernel.T).astype(dtype)
    dw = plain(x.reshape(-1, DEPTH).T, dy.reshape(-1, COLUMNS)).astype(dtype)
    db = dy.astype(np.float32).sum((0, 1)).astype(dtype)
    for a, e in zip(actual, (y, dx, dw, db), strict=True):
        np.testing.assert_array_equal(a, e)


# Of a normal dy 3 bits of significand leave 2.6 % at most; a dead row that counted would set all others' largest value.
@pytest.mark.parametrize("recipe", [Float8Recipe(), Float8Recipe(save="inputs"), Float8Recipe(power_of_two=True)])
def test_what_is_dead_changes_no_scale(recipe):
    x, kernel, bias, dy = operands(std=2e-3)
    _, dx, dw, _ = step(recipe, x, kernel, bias, dy)
    (exact_dx, _), (exact_dw, _) = gradients_of(of_recipe(recipe), x, kernel, dy, rounds=False)
    assert_norms_close((rows_of(dx), rows_of(dw)), (exact_dx, exact_dw), 0.029)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_row_and_column(value):
    x, kernel, bias, dy = operands()
    good = step(Float8Recipe(), x, kernel, bias, dy)
    y, dx, dw, _ = step(Float8Recipe(), x.at[2, 3, 7].set(value), kernel, bias, dy)
    assert np.isnan(y[2, 3]).all()
    assert np.isnan(dw).all()
    np.testing.assert_array_equal(*(np.delete(rows_of(of), 15, 0) for of in (y, good[0])))
    np.testing.assert_array_equal(dx, good[1])
    y, dx, dw, _ = step(Float8Recipe(), x, kernel.at[7, 3].set(value), bias, dy)
    assert (np.isnan(y).any((0, 1)) == (np.arange(COLUMNS) == 3)).all()
    assert np.isnan(dx).all()
    np.testing.assert_array_equal(dw, good[2])


# y goes forward, dx and dw backward.
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_products_are_chosen_by_direction(direction):
    asked = Float8Linear(out_dtype=np.dtype("float32"), formula_for=((direction, " as asked"),))
    formula = [name for name in ("y", "dx", "dw") if asked.of_product(name, np.float32).implementation == "xla"]
    native = Float8Linear(out_dtype=np.dtype("float32"), native_for="a function", native_ways=(direction,))
    kernels = [name for name in ("y", "dx", "dw") if native.of_product(name, np.float32).native_for == "a function"]
    assert formula == kernels == {"forward": ["y"], "backward": ["dx", "dw"]}[direction]


@pytest.mark.parametrize("options", [{}, {"save": "inputs"}, {"weight_gradient": "compute"}, {"power_of_two": True}])
def test_a_kernel_that_was_rounded_ahead_is_as_good(options):
    recipe, (*args, dy) = Float8Recipe(**options), operands("bfloat16", "float32")
    rounds = partial(quantize_kernel, quantization=of_recipe(recipe).kernel, straight_through=True)
    each = lambda x, kernel, bias: float8_linear(x, kernel, bias=bias, recipe=recipe)  # noqa: E731
    ways = lambda x, kernel, bias: each(x, rounds(kernel), bias), each
    for of in (lambda way: way, lambda way: jax.vmap(way, (0, None, None))):
        for a, e in zip(*(jax.jit(partial(value_and_gradients, of(way)))(*args, dy) for way in ways), strict=True):
            np.testing.assert_array_equal(a, e)

    def penalty(way, *args):
        return (jax.grad(lambda x: jnp.sin(way(x, *args[1:])).sum().astype("float32"))(args[0]) ** 2).sum()

    assert_norms_close(*(jax.jvp(way, tuple(args), tuple(args)) for way in ways), 1e-3)
    assert_norms_close(*(jax.grad(partial(penalty, way), (0, 1))(*args) for way in ways), 1e-2)


def test_what_was_rounded_ahead_without_a_carrier_has_no_gradient():
    x, kernel, *_ = operands()
    kernel_8, of_x = quantize_kernel(kernel, E4M3), jax.grad(lambda x, kernel: float8_linear(x, kernel).sum())
    np.testing.assert_array_equal(of_x(x, kernel_8), of_x(x, kernel))
    exported = jax.export.export(jax.jit(float8_linear))(x, kernel_8)
    assert_norms_close(exported.call(x, kernel_8), float8_linear(x, kernel), 2.0**-7)


# It goes to the result of dw, and not into dy.
def test_an_x_of_one_scale():
    values, kernel, dy = draw("x", (8, 16)).astype(E4M3.dtype), draw("kernel", (16, 32)), draw("dy", (8, 32))

    def gradient(scales):
        of_kernel = lambda kernel: float8_linear(Quantized(values, scales), kernel, out_dtype="float32")  # noqa: E731
        return jax.vjp(of_kernel, kernel)[1](dy)[0]

    np.testing.assert_allclose(gradient(jnp.float32(0.125)), gradient(jnp.full((8, 1), 0.125)), rtol=1e-6, atol=1e-6)


# Examples of rows are rows, each with its example's scale.
@pytest.mark.parametrize("scales", [(), (3,), (3, 8, 1)], ids=str)
def test_gradients_of_examples_of_quantized(scales):
    values, kernel = draw("x", (3, 8, 16)).astype(E4M3.dtype), draw("kernel", (16, 32))
    scales, dy = jnp.exp2(draw("scales", scales)), draw("dy", (3, 8, 32))
    of_x = partial(float8_linear, out_dtype="float32")

    def examples(kernel):
        return jax.vmap(lambda *x: of_x(Quantized(*x), kernel), (0, 0 if scales.ndim else None))(values, scales)

    def rows(kernel):
        of_rows = scales.reshape(-1, *(1,) * (3 - max(1, scales.ndim)), *scales.shape[1:])
        return of_x(Quantized(values, jnp.broadcast_to(of_rows, (3, 8, 1))), kernel)

    actual, expected = (jax.jit(lambda k, dy, f=f: jax.vjp(f, k)[1](dy)[0])(kernel, dy) for f in (examples, rows))
    np.testing.assert_allclose(actual, expected, rtol=2.0**-7, atol=2.0**-7 * np.abs(expected).max())


@pytest.mark.parametrize("save", ["quantized", "inputs"])
@pytest.mark.parametrize("lengths", [(0, 16, 32), (4, 0, 32), (4, 16, 0), (None, 0, 32)], ids=str)
def test_gradients_of_empty_operands(lengths, save):
    rows, depth, columns = lengths
    x, kernel = jnp.ones((depth,) if rows is None else (rows, depth)), jnp.ones((depth, columns))
    step = jax.grad(lambda *args: float8_linear(*args, recipe=Float8Recipe(save=save)).sum(), (0, 1))
    for actual, of in zip(jax.jit(step)(x, kernel), (x, kernel), strict=True):
        np.testing.assert_array_equal(actual, jnp.zeros_like(of))
