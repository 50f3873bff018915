"""The gated norm against float64, its gradients, its bits, and what of a program it is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import DTYPES, bits, draw, draw_scale, draw_x
from gating import (
    MAMBA,
    QWEN,
    draw_gate,
    draw_operands,
    exact_forward,
    exact_gradients,
    formula,
    gated,
    gated_calls,
    variants,
)
from hlo import compiled_text, count_native_calls
from test_transformations import assert_close
from tolerances import DSCALE, DX, forward_errors, gradient_error

# Heads, models' rows, whole vectors with and without a rest, several rows at once, and the longest row of a kernel.
LENGTHS = (1, 64, 100, 128, 1000, 1024, 4096, 8192, 12_288, 16_384)
# The length of a row and of its groups: Mamba2's, more groups than rows at once, groups without whole vectors.
GROUPS = [(4096, 1024), (512, 64), (1000, 100), (96, 3), (64, 64)]
OPTIONS = {
    "no scale": {"scale": None},
    "a scale of a half type": {"scale": draw_scale((1000,), "bfloat16")},
    "Gemma's offset": {"scale_offset": 1.0},
    "a large epsilon": {"epsilon": 1.0},
}

dtypes = pytest.mark.parametrize("dtype", DTYPES)
orders = pytest.mark.parametrize("variant", [MAMBA, QWEN], ids=str)


@pytest.mark.parametrize("cols", LENGTHS)
@dtypes
@variants
def test_rows_of_every_length(variant, dtype, cols):
    args = draw_operands((7, cols), dtype)
    assert forward_errors(jax.jit(gated(variant))(*args), exact_forward(variant, *args)) == []


@pytest.mark.parametrize(("cols", "group_size"), GROUPS)
@dtypes
@orders
def test_groups(variant, dtype, cols, group_size):
    args = draw_operands((7, cols), dtype)
    y = jax.jit(gated(variant, group_size=group_size))(*args)
    assert forward_errors(y, exact_forward(variant, *args, group_size=group_size)) == []


@pytest.mark.parametrize("name", OPTIONS)
@variants
def test_every_option(variant, name):
    x, gate, scale = draw_operands((5, 1000))
    options = {"scale": scale} | OPTIONS[name]
    y = jax.jit(lambda x, gate: gated(variant)(x, gate, **options))(x, gate)
    assert forward_errors(y, exact_forward(variant, x, gate, **options)) == []


# More rows than one task has, in an odd number.
@dtypes
@variants
def test_many_rows(variant, dtype):
    args = draw_operands((3, 1367, 128), dtype)
    assert forward_errors(jax.jit(gated(variant))(*args), exact_forward(variant, *args)) == []


# The formula keeps the law too, and serves where no kernel does.
@dtypes
@variants
def test_the_formula(variant, dtype):
    args = draw_operands((7, 1000), dtype)
    y = jax.jit(gated(variant, group_size=100, implementation="jnp"))(*args)
    assert forward_errors(y, exact_forward(variant, *args, group_size=100)) == []


# Arrays beyond every cache, whose results may go past it.
@orders
def test_large_arrays_have_the_bits_of_small_ones(variant):
    x, gate, scale = draw_operands((6144, 2048))
    norm = jax.jit(gated(variant))
    assert bits(norm(x, gate, scale)[3000:3005]) == bits(norm(x[3000:3005], gate[3000:3005], scale))


def gradients(variant, args, dy, group_size=None):
    norm = gated(variant, group_size=group_size)
    return jax.jit(lambda dy, *args: jax.vjp(norm, *args)[1](dy))(dy, *args)


def gradient_errors(actual, exact):
    laws = {"dx": DX, "dgate": DX, "dscale": DSCALE}
    errors = {name: gradient_error(a, e, law) for (name, law), a, e in zip(laws.items(), actual, exact, strict=True)}
    return {name: error for name, error in errors.items() if not error <= 1}


# Few rows and many, short ones and long ones.
@pytest.mark.parametrize(
    "dims",
    [(33, 64), (2, 100), (600, 1000), (4099, 128), (2000, 256), (9, 4096), (70, 4096), (70, 5120), (3, 16_384)],
    ids=str,
)
@dtypes
@variants
def test_gradients(variant, dtype, dims):
    args, dy = draw_operands(dims, dtype), draw("dy", dims, dtype)
    assert gradient_errors(gradients(variant, args, dy), exact_gradients(variant, *args, dy)) == {}


@pytest.mark.parametrize(("cols", "group_size"), GROUPS)
@dtypes
@orders
def test_gradients_of_groups(variant, dtype, cols, group_size):
    args, dy = draw_operands((65, cols), dtype), draw("dy", (65, cols), dtype)
    exact = exact_gradients(variant, *args, dy, group_size=group_size)
    assert gradient_errors(gradients(variant, args, dy, group_size), exact) == {}


@variants
def test_gradients_of_the_formula(variant):
    args, dy = draw_operands((65, 1000)), draw("dy", (65, 1000))
    norm = gated(variant, group_size=100, implementation="jnp")
    actual = jax.jit(lambda dy, *args: jax.vjp(norm, *args)[1](dy))(dy, *args)
    assert gradient_errors(actual, exact_gradients(variant, *args, dy, group_size=100)) == {}


# From where the exponential of the gate is the smallest number to where one minus sigmoid is lost in it.
@variants
def test_every_gate_keeps_its_digits(variant):
    # Each row has gates of all sizes: of nothing but very small ones a mean square is too small for float32.
    gate = jnp.linspace(-80, 80, 64 * 1000).reshape(1000, 64).T
    x, scale = draw_x((64, 1000)), draw_scale((1000,))
    y = jax.jit(gated(variant, epsilon=0.0))(x, gate, scale)
    assert forward_errors(y, exact_forward(variant, x, gate, scale, epsilon=0.0)) == []


@pytest.mark.parametrize("value", [25.0, -25.0, 60.0])
@variants
def test_the_slope_of_a_large_gate_keeps_its_digits(variant, value):
    x, scale, dy = draw_x((5, 1000)), draw_scale((1000,)), draw("dy", (5, 1000))
    args = x, value + draw("small", (5, 1000)), scale
    norm = gated(variant, epsilon=0.0)
    _, dgate, _ = jax.jit(lambda dy, *args: jax.vjp(norm, *args)[1](dy))(dy, *args)
    exact = exact_gradients(variant, *args, dy, epsilon=0.0)
    assert gradient_error(dgate, exact.dgate, {"float32": 1e-5}) <= 1


# Of a gate below -87.3 sigmoid is subnormal: 0 in the kernels, and on a CPU in XLA's code as well, but not on a GPU.
@dtypes
@variants
def test_extreme_gates_are_as_in_the_formula(variant, dtype):
    values = jnp.array([np.nan, np.inf, -np.inf, 1e4, -1e4, 3e38, -3e38, 88.5, -87.0, 0.0, -0.0]).astype(dtype)
    x, gate, scale = draw_operands((11, 133), dtype)
    gate = gate.at[:, 131].set(values).at[:, 0].set(values)
    y = jax.jit(gated(variant))(x, gate, scale)
    expected = jax.jit(gated(variant, implementation="jnp"))(x, gate, scale)
    close = {"rtol": 1e-6, "atol": 1e-37} if dtype == "float32" else {"rtol": 2 * float(jnp.finfo(dtype).eps)}
    np.testing.assert_allclose(np.float32(y), np.float32(expected), **close)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@variants
def test_what_is_not_finite_in_x_stays_in_its_row_and_group(variant, value):
    x, gate, scale = draw_operands((4, 256))
    y = jax.jit(gated(variant, group_size=64))(x.at[1, 70].set(value), gate, scale)
    clean = np.asarray(jax.jit(gated(variant, group_size=64))(x, gate, scale)).copy()
    clean[1, 64:128] = y[1, 64:128]
    np.testing.assert_array_equal(y, clean)
    assert np.isnan(y[1, 70])


def everything(variant, args, dy, group_size=None):
    """y and the cotangents of x and gate, and that of scale apart."""

    def function(dy, *args):
        y, pullback = jax.vjp(gated(variant, group_size=group_size), *args)
        dx, dgate, dscale = pullback(dy)
        return (y, dx, dgate), dscale

    return jax.jit(function)(dy, *args)


@pytest.mark.parametrize(("cols", "group_size"), [(1, None), (31, None), (128, None), (640, 128), (4096, None)])
@dtypes
@orders
def test_a_row_alone(variant, dtype, cols, group_size):
    (x, gate, scale), dy = draw_operands((9, cols), dtype), draw("dy", (9, cols), dtype)
    many, _ = everything(variant, (x, gate, scale), dy, group_size)
    alone, _ = everything(variant, (x[2:3], gate[2:3], scale), dy[2:3], group_size)
    assert bits(alone) == bits([result[2:3] for result in many])


# On a GPU few rows have a kernel of their own for the backward.
@pytest.mark.parametrize(
    ("cols", "group_size"),
    [(128, None), (640, 128), (256, None), (2048, None), (4096, None), (5120, None), (8192, None)],
)
@dtypes
@orders
def test_few_rows_among_many(variant, dtype, cols, group_size):
    (x, gate, scale), dy = draw_operands((600, cols), dtype), draw("dy", (600, cols), dtype)
    many, _ = everything(variant, (x, gate, scale), dy, group_size)
    few, _ = everything(variant, (x[300:315], gate[300:315], scale), dy[300:315], group_size)
    assert bits(few) == bits([result[300:315] for result in many])


@dtypes
@variants
def test_runs_repeat_themselves(variant, dtype):
    args, dy = draw_operands((1030, 640), dtype), draw("dy", (1030, 640), dtype)
    assert bits(everything(variant, args, dy, 128)) == bits(everything(variant, args, dy, 128))


# A group is a row: one call of groups gives what a call of each group gives.
@variants
def test_groups_have_the_bits_of_rows(variant):
    (x, gate, scale), dy = draw_operands((37, 640), "bfloat16"), draw("dy", (37, 640), "bfloat16")
    (y, dx, dgate), _ = everything(variant, (x, gate, scale), dy, 128)
    for group in (slice(at, at + 128) for at in range(0, 640, 128)):
        alone, _ = everything(variant, (x[:, group], gate[:, group], scale[group]), dy[:, group])
        assert bits(alone) == bits([result[:, group] for result in (y, dx, dgate)])


@pytest.mark.parametrize("dims", [(0, 64), (3, 0, 64)], ids=str)
@orders
def test_no_rows(variant, dims):
    args = draw_operands(dims)
    dx, dgate, dscale = gradients(variant, args, draw("dy", dims))
    assert (dx.shape, dgate.shape) == (dims, dims)
    np.testing.assert_array_equal(dscale, np.zeros(64))


# Without a kernel: the formula, computed as if the operands were float32, or float64 where one is.
@pytest.mark.parametrize(
    ("dtype", "gate_dtype", "out_dtype"),
    [("bfloat16", "float32", "bfloat16"), ("float32", "bfloat16", "float32"), ("bfloat16", "bfloat16", "float32")],
)
@orders
def test_dtypes_that_differ(variant, dtype, gate_dtype, out_dtype):
    x, gate, scale = draw_x((7, 100), dtype), draw_gate((7, 100), gate_dtype), draw_scale((100,))
    y = jax.jit(gated(variant, out_dtype=out_dtype))(x, gate, scale)
    assert forward_errors(y, exact_forward(variant, x, gate, scale, out_dtype=out_dtype)) == []


@orders
def test_gradients_have_the_dtypes_of_their_primals(variant):
    x, gate, scale = draw_x((7, 100), "bfloat16"), draw_gate((7, 100)), draw_scale((100,), "float16")
    found = gradients(variant, (x, gate, scale), draw("dy", (7, 100), "bfloat16"))
    assert [gradient.dtype for gradient in found] == ["bfloat16", "float32", "float16"]


@variants
def test_rows_too_long_for_a_kernel(variant):
    args = draw_operands((2, 16_385))
    y = jax.jit(gated(variant))(*args)
    assert forward_errors(y, exact_forward(variant, *args)) == []
    assert count_native_calls(compiled_text(gated(variant), *args)) == {}


@variants
def test_long_rows_of_short_groups_have_a_kernel(variant):
    args = draw_operands((2, 3 * 16_384))
    assert count_native_calls(compiled_text(gated(variant, group_size=16_384), *args)) == gated_calls(fwd=1)


@pytest.mark.parametrize("operand", [0, 1, 2], ids=["x", "gate", "scale"])
@variants
def test_float64(variant, operand):
    with jax.enable_x64(True):
        args = list(draw_operands((6, 10)))
        args[operand] = args[operand].astype("float64") / 3
        y = gated(variant, out_dtype="float64")(*args)
        np.testing.assert_allclose(y, exact_forward(variant, *args, out_dtype="float64").exact, rtol=1e-12)


def test_numpy_arrays():
    args = draw_operands((6, 10))
    assert_close(gated(QWEN)(*map(np.asarray, args)), formula(QWEN)(*args))
