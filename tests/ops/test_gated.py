"""What is particular to the gated norm: gates of every size, dtypes that differ, the longest row of a kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import DTYPES, bits, draw, draw_gate, draw_scale, draw_x
from coverage import cover, over
from gating import VARIANTS, exact_forward, exact_gradients, gated, variants
from hlo import compiled_text, count_native_calls
from op import rows
from table import GATED
from tolerances import forward_errors, gradient_error

ops = pytest.mark.parametrize("op", GATED, ids=str)


# Arrays beyond every cache, whose results may go past it.
@pytest.mark.parametrize("op", GATED[:2], ids=str)
def test_large_arrays_have_the_bits_of_small_ones(op):
    x, gate, scale = op.draw(rows(6144, 2048))
    norm = jax.jit(op.function)
    assert bits(norm(x, gate, scale)[0][3000:3005]) == bits(norm(x[3000:3005], gate[3000:3005], scale))


# From where the exponential of the gate is the smallest number to where one minus sigmoid is lost in it.
@pytest.mark.on_emulator
@variants
def test_every_gate_keeps_its_digits(variant):
    # Each row has gates of all sizes: of nothing but very small ones a mean square is too small for float32.
    gate = jnp.linspace(-80, 80, 64 * 1000).reshape(1000, 64).T
    x, scale = draw_x((64, 1000)), draw_scale((1000,))
    y = jax.jit(gated(variant, epsilon=0.0))(x, gate, scale)
    assert forward_errors(y, exact_forward(variant, x, gate, scale, epsilon=0.0)) == []


@pytest.mark.on_emulator
@cover(variant=VARIANTS, value=[25.0, -25.0, 60.0])
def test_the_slope_of_a_large_gate_keeps_its_digits(variant, value):
    x, scale, dy = draw_x((5, 1000)), draw_scale((1000,)), draw("dy", (5, 1000))
    args = x, value + draw("small", (5, 1000)), scale
    norm = gated(variant, epsilon=0.0)
    _, dgate, _ = jax.jit(lambda dy, *args: jax.vjp(norm, *args)[1](dy))(dy, *args)
    exact = exact_gradients(variant, *args, dy, epsilon=0.0)
    assert gradient_error(dgate, exact.dgate, {"float32": 1e-5}) <= 1


# Of a gate below -87.3 sigmoid is subnormal: 0 in the kernels, and on a CPU in XLA's code as well, but not on a GPU.
@pytest.mark.on_emulator
@cover(variant=VARIANTS, dtype=DTYPES)
def test_extreme_gates_are_as_in_the_formula(variant, dtype):
    values = jnp.array([np.nan, np.inf, -np.inf, 1e4, -1e4, 3e38, -3e38, 88.5, -87.0, 0.0, -0.0]).astype(dtype)
    x, gate, scale = draw_x((11, 133), dtype), draw_gate((11, 133), dtype), draw_scale((133,))
    gate = gate.at[:, 131].set(values).at[:, 0].set(values)
    y = jax.jit(gated(variant))(x, gate, scale)
    expected = jax.jit(gated(variant, implementation="jnp"))(x, gate, scale)
    close = {"rtol": 1e-6, "atol": 1e-37} if dtype == "float32" else {"rtol": 2 * float(jnp.finfo(dtype).eps)}
    np.testing.assert_allclose(np.float32(y), np.float32(expected), **close)


# Without a kernel: the formula, computed as if the operands were float32, or float64 where one is.
@over(
    GATED[:2],
    dtypes=lambda op: [
        ("bfloat16", "float32", "bfloat16"),
        ("float32", "bfloat16", "float32"),
        ("bfloat16", "bfloat16", "float32"),
    ],
)
def test_dtypes_that_differ(op, dtypes):
    *dtypes, out_dtype = dtypes
    args = op.draw(rows(7, 100), dtypes)
    y, *_ = jax.jit(lambda *args: op.function(*args, out_dtype=out_dtype))(*args)
    assert forward_errors(y, op.exact(*args, out_dtype=out_dtype)) == []


@ops
def test_rows_too_long_for_a_kernel(op):
    args = op.draw(rows(2, 16_385))
    assert forward_errors(jax.jit(op.function)(*args)[0], op.exact(*args)) == []
    assert count_native_calls(compiled_text(op.function, *args)) == {}


@ops
def test_long_rows_of_short_groups_have_a_kernel(op):
    text = compiled_text(lambda *args: op.function(*args, group_size=16_384), *op.draw(rows(2, 3 * 16_384)))
    assert count_native_calls(text) == op.calls(fwd=1)
