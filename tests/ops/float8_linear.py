"""`float8_linear`: the product of rounded operands, its gradient with dy rounded once for each, and its calls."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import draw
from coverage import cover
from internals import Float8Linear, Rounded, by_columns, by_rows
from quantizing import array_by_numpy, assert_same, to

from jaxnorm import Float8Recipe, Quantized, float8_linear, quantize, quantized_dot
from ops.products import E4M3, RECIPES, assert_norms_close, of_each, value_and_gradients, with_zeros

ROWS, DEPTH, COLUMNS = (4, 6), 96, 48
ALL = RECIPES | {"powers of two": Float8Recipe(power_of_two=True)}
operands = partial(with_zeros, (*ROWS, DEPTH, COLUMNS))


def wide(array):
    return np.asarray(array, np.float64)


def of_rows(a):
    return wide(a).reshape(-1, a.shape[-1])


def float8(recipe):
    return dataclasses.replace(E4M3, power_of_two=recipe.power_of_two)


def rounded(recipe, array, axes):
    """The array as it is rounded with a scale for what lies along these axes, in float64."""
    if recipe.scaling == "row":
        values, scales = array_by_numpy(array, float8(recipe), axes)
    else:  # as XLA divides
        values, scales = jax.tree.leaves(quantize(array, float8(recipe), axis=tuple(range(array.ndim))))
    return wide(values.astype(jnp.float32)) * wide(scales)


def step(recipe, *args):
    return value_and_gradients(lambda x, kernel, bias: float8_linear(x, kernel, bias=bias, recipe=recipe), *args)


def folded(recipe, dy, factor, axes, along):
    """dy as it is rounded for one product, in float64, without the scales of the other factor that went into it."""
    if recipe.scaling == "tensor":
        return rounded(recipe, dy, axes)
    _, scales = array_by_numpy(factor, float8(recipe), along)
    scales = jnp.where(jnp.abs(factor).max(along, keepdims=True) == 0, 0, scales)
    with np.errstate(invalid="ignore"):
        return np.nan_to_num(rounded(recipe, dy.astype(jnp.float32) * scales, axes) / wide(scales))


def products_of(x_tilde, w_tilde, of_x, of_kernel):
    """dx and dw of rounded operands, and the sums of the terms' magnitudes."""
    factors = (of_rows(of_x), w_tilde.T), (of_rows(x_tilde).T, of_rows(of_kernel))
    return [(a @ b, np.abs(a) @ np.abs(b)) for a, b in factors]


def expected_gradients(recipe, x, kernel, dy, *, rounds=True):
    """Those of the rounded operands, dy rounded once for each product, or not at all."""
    x_tilde, w_tilde = rounded(recipe, x, -1), rounded(recipe, kernel, 0)
    u = folded(recipe, dy, kernel, -1, 0) if rounds else dy
    is_wide = recipe.weight_gradient == "compute" or not rounds
    return products_of(x_tilde, w_tilde, u, dy if is_wide else folded(recipe, dy, x, (0, 1), -1))


# GPUs add up products of float8 with fewer digits by default.
def digits(all_of_them):
    return jax.default_matmul_precision("highest" if all_of_them and jax.default_backend() == "gpu" else "default")


# Sums of float32 in any order, and one rounding to the result's dtype.
def assert_within(actual, expected, magnitudes, bound=2.0**-12):
    step = 0 if actual.dtype == jnp.float32 else 2.0 ** -(jnp.finfo(actual.dtype).nmant + 1)
    found = wide(actual).reshape(expected.shape)
    assert (np.abs(found - expected) <= bound * magnitudes + step * np.abs(expected)).all()


# XLA for GPUs decides how exactly `quantize` divides, and what lies between two values may become the other one.
def assert_same_but_for_xlas_division(actual, expected):
    away = 0 if jax.default_backend() == "cpu" else 2.0**-5
    np.testing.assert_allclose(wide(actual), wide(expected), rtol=0, atol=away * np.abs(wide(expected)).max())


def swapped(spec, kernel):
    values, scales = by_columns(spec, kernel)
    return Rounded(values.T, scales)


@cover(power_of_two=[False, True], dtype=["float32", "bfloat16", "float16"], scaling=["row", "tensor"])
def test_operands_are_rounded_as_numpy_does(power_of_two, dtype, scaling):
    x, kernel, *_ = operands(dtype, std=0.02)
    spec = Float8Linear(out_dtype=np.dtype("float32"), scaling=scaling, power_of_two=power_of_two)
    to_float8 = dataclasses.replace(E4M3, power_of_two=power_of_two)
    for function, array, axis in ((by_rows, x, -1), (swapped, kernel, 0)):
        axes = (axis,) if scaling == "row" else tuple(range(-array.ndim, 0))
        values, scales = array_by_numpy(array, to_float8, axes)
        is_zero = np.abs(np.asarray(array, np.float32)).max(axes, keepdims=True) == 0
        scales, actual = np.where(is_zero, np.float32(0), scales), jax.jit(partial(function, spec))(array)
        if jax.default_backend() == "cpu":
            assert_same([actual.values, actual.scales], [values, scales])
        else:  # XLA for GPUs decides how exactly it divides: by the scale's last bits, and so the other way from halves
            np.testing.assert_allclose(actual.scales, scales, rtol=2.0**-22)
            between = (wide(actual.values) + wide(values)) / 2 * scales
            is_same = wide(actual.values) == wide(values)
            np.testing.assert_allclose(wide(array)[~is_same], between[~is_same], rtol=2.0**-20)


# The contract: the product of the rounded operands, and its gradient with dy rounded to 8 bits once for each product.
@cover(recipe=ALL, dtype=["float32", "bfloat16", "float16"], has_all_digits=[False, True])
def test_the_product_of_the_rounded_operands(recipe, dtype, has_all_digits):
    x, kernel, bias, dy = operands(dtype)
    is_wide, bound = recipe.weight_gradient == "compute", 2.0**-12
    if has_all_digits and recipe == Float8Recipe():
        bound = 2.0**-20
    precision = jax.default_matmul_precision("highest" if has_all_digits else "default")
    with precision:
        y = jax.jit(partial(float8_linear, recipe=recipe))(x, kernel, bias=bias)
    # GPUs multiply what is wide as TF32 by default.
    with precision if has_all_digits else digits(all_of_them=is_wide and dtype == "float32"):
        _, dx, dw, db = jax.jit(partial(step, recipe))(x, kernel, bias, dy)
    assert [a.dtype for a in (y, dx, dw, db)] == [dtype] * 4
    a, b = rounded(recipe, x, -1), rounded(recipe, kernel, 0)
    assert_within(y, a @ b + wide(bias), np.abs(a) @ np.abs(b), bound)
    of_x, of_kernel = expected_gradients(recipe, x, kernel, dy)
    assert_within(dx, *of_x, bound)
    # The wide product takes x as it was rounded to its own dtype again.
    assert_within(dw, *of_kernel, 2.0**-8 if is_wide and dtype != "float32" else bound)
    assert_within(db, wide(dy).sum((0, 1)), np.abs(wide(dy)).sum((0, 1)), 2.0**-22)


def test_it_is_quantized_dot_of_what_is_quantised():
    x, kernel, bias, _ = operands("bfloat16")
    x_8, lying = (Quantized(*map(jnp.asarray, array_by_numpy(a, E4M3))) for a in (x, kernel.T))
    kernel_8 = dataclasses.replace(lying, transposed=True)
    np.testing.assert_array_equal(float8_linear(x, kernel, bias=bias), quantized_dot(x_8, kernel_8, bias=bias))


@pytest.mark.parametrize("recipe", [Float8Recipe(power_of_two=True), Float8Recipe("tensor", power_of_two=True)])
def test_a_dy_of_few_bits_is_not_rounded(recipe):
    x, kernel, bias, dy = operands()
    dy = jnp.round(dy)
    with digits(all_of_them=True):
        _, dx, dw, _ = step(recipe, x, kernel, bias, dy)
    for actual, expected in zip((dx, dw), expected_gradients(recipe, x, kernel, dy, rounds=False), strict=True):
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
    (exact_dx, _), (exact_dw, _) = expected_gradients(recipe, x, kernel, dy, rounds=False)
    assert_norms_close((of_rows(dx), of_rows(dw)), (exact_dx, exact_dw), 0.029)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_row_and_column(value):
    x, kernel, bias, dy = operands()
    good = step(Float8Recipe(), x, kernel, bias, dy)
    y, dx, dw, _ = step(Float8Recipe(), x.at[2, 3, 7].set(value), kernel, bias, dy)
    assert np.isnan(y[2, 3]).all()
    assert np.isnan(dw).all()
    np.testing.assert_array_equal(*(np.delete(of_rows(of), 15, 0) for of in (y, good[0])))
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


@cover(granularity=["token", "tensor"], save=["quantized", "inputs"])
def test_a_quantised_x(granularity, save):
    x, kernel, bias, dy = operands()

    def of_quantized(x, kernel):
        quantized = quantize(x, to("float8_e4m3fn", granularity), straight_through=True)
        return float8_linear(quantized, kernel, bias=bias, recipe=Float8Recipe(save=save))

    y, pull_back = jax.vjp(of_quantized, x, kernel)
    dx, dw = pull_back(dy.astype(y.dtype))
    assert (y.dtype, dx.dtype) == (jnp.bfloat16, jnp.float32)
    if granularity == "token":
        expected = step(Float8Recipe(), x, kernel, bias, dy.astype(y.dtype).astype(jnp.float32))
        for a, e in zip((y, dx, dw), (expected[0].astype(y.dtype), *expected[1:]), strict=False):
            assert_same_but_for_xlas_division(a, e)
    else:
        a = of_rows(quantize(x, to("float8_e4m3fn", "tensor")).dequantize())
        v = of_rows(rounded(Float8Recipe(), dy.astype(y.dtype), (0, 1)))
        assert_within(dw, a.T @ v, np.abs(a).T @ np.abs(v))


# XLA for CPUs has products of bfloat16 with float32 sums for some orders of their axes.
@cover(
    recipe=list(ALL.values()),
    save=["quantized", "inputs"],
    mapped=[(0, None, None), (None, 0, None), (None, None, 0), (None, 0, 0)],
    dtype=["bfloat16", "float32"],
)
def test_gradients_of_mapped_operands_are_those_of_a_loop(recipe, save, mapped, dtype):
    recipe, shapes = dataclasses.replace(recipe, save=save), {"x": (8, 16), "kernel": (16, 32), "dy": (8, 32)}
    arrays = [
        draw(name, shape if axis is None else (3, *shape)).astype(dtype)
        for (name, shape), axis in zip(shapes.items(), mapped, strict=True)
    ]

    gradients = jax.jit(lambda *args: value_and_gradients(partial(float8_linear, recipe=recipe), *args)[1:])
    expected = of_each(gradients, mapped, arrays)
    # On a GPU a value halfway between two of float8 may go to the other one.
    assert_norms_close(jax.vmap(gradients, mapped)(*arrays), expected, 2.0**-5)


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
