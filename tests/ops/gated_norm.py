"""The gated norm: its rows, of whole rows and of groups; gates of every size, dtypes that differ, the longest rows."""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import bad_calls
import formulas
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import ALIKE, DTYPES, bits, draw, draw_gate, draw_scale, draw_x
from coverage import cover, over
from hlo import compiled_text, count_native_calls
from op import Op, rows
from oracle import ACTIVATIONS, f64, round_to
from tolerances import forward_errors, gradient_error

import jaxnorm


class Variant(NamedTuple):
    gate_first: bool
    activation: str

    def __str__(self):
        return f"{self.activation} {'first' if self.gate_first else 'last'}"


MAMBA, QWEN = Variant(True, "silu"), Variant(False, "silu")
VARIANTS = (MAMBA, QWEN, Variant(True, "sigmoid"), Variant(False, "sigmoid"))


def gated(variant: Variant, **options: Any):
    return partial(jaxnorm.gated_rms_norm, **variant._asdict(), **options)


def by_groups(v, group_size):
    return v.reshape(*v.shape[:-1], -1, group_size or v.shape[-1])


def normalised(variant, x, a, group_size, epsilon):
    """h_hat, and rstd of each group."""
    h = by_groups(x * a if variant.gate_first else x, group_size)
    rstd = 1 / np.sqrt(np.square(h).mean(-1, keepdims=True) + epsilon)
    return (h * rstd).reshape(x.shape), rstd


def exact(variant, x, gate, scale=None, *, group_size=None, epsilon=1e-6, scale_offset=0.0, out_dtype=None):
    a, *_ = ACTIVATIONS[variant.activation](f64(gate))
    h_hat, _ = normalised(variant, f64(x), a, group_size, epsilon)
    y = h_hat if scale is None else h_hat * (f64(scale) + scale_offset)
    y = y if variant.gate_first else y * a
    return oracle.Forward(y, round_to(y, out_dtype or x.dtype), np.abs(y), np.zeros(()))


def exact_gradients(variant, dy, x, gate, scale, *, group_size=None, epsilon=1e-6, scale_offset=0.0):
    x, dy, scale = f64(x), f64(dy[0]), np.float64(1) if scale is None else f64(scale) + scale_offset
    a, slope, _ = ACTIVATIONS[variant.activation](f64(gate))
    h_hat, rstd = normalised(variant, x, a, group_size, epsilon)
    u = dy if variant.gate_first else dy * a
    g, groups = by_groups(u * scale, group_size), by_groups(h_hat, group_size)
    dh = (rstd * (g - groups * (g * groups).mean(-1, keepdims=True))).reshape(x.shape)
    dscale = (u * h_hat).reshape(-1, x.shape[-1]).sum(0)
    dx, dgate = (dh * a, dh * x * slope) if variant.gate_first else (dh, dy * scale * h_hat * slope)
    return {"x": (dx, None), "gate": (dgate, None), "scale": (dscale, None)}


def as_norm(f):
    def function(x, scale=None, bias=None):
        return f(x, 1.5 + jnp.cos(x), scale)[0] + (0 if bias is None else bias)

    return function


def gate(variant):
    return Op(
        name=f"gated {variant}",
        public="gated_rms_norm",
        kind="rms",
        operands=("x", "gate", "scale"),
        arrays=2,
        dtypes=ALIKE,
        function=lambda *args, **options: (gated(variant)(*args, **options),),
        formula=lambda *args, **options: (formulas.gated(variant)(*args, **options),),
        as_norm=as_norm,
        exact=partial(exact, variant),
        exact_gradients=partial(exact_gradients, variant),
        small=rows(6, 10),
        # Heads, models' rows, whole vectors with and without a rest, several rows at once, the longest row of a kernel;
        # more rows than one task has, in an odd number.
        sizes=(
            *(rows(7, cols) for cols in (1, 64, 100, 128, 1000, 1024, 4096, 8192, 12_288, 16_384)),
            rows(3, 1367, 128),
        ),
        options=({"scale_offset": 1.0}, {"epsilon": 1.0}),
        # Few rows and many, short ones and long ones.
        backward_sizes=(rows(600, 1000), rows(4099, 128), rows(2000, 256), rows(70, 4096), rows(70, 5120)),
        lengths=tuple(rows(9, cols) for cols in (1, 31, 128, 4096)),
        many=tuple(rows(600, cols) for cols in (128, 256, 2048, 4096, 5120, 8192)),
        statistics=1,
        bad_calls=bad_calls.GATED,
        without_kernel=bad_calls.GATED_WITHOUT_KERNEL,
    )


def by_group(function):
    """The op by a call for each group."""

    def unfused(*args, group_size):
        starts = range(0, args[0].shape[-1], group_size)
        calls = [function(*(a[..., at : at + group_size] for a in args)) for at in starts]
        return tuple(jnp.concatenate(results, -1) for results in zip(*calls, strict=True))

    return unfused


def grouped(variant):
    op = gate(variant)
    # Mamba2's, more groups than rows at once, groups without whole vectors.
    sizes = ((4096, 1024), (512, 64), (1000, 100), (96, 3), (64, 64))
    return replace(
        op,
        name=f"grouped {variant}",
        unfused=by_group(jax.jit(op.function)),
        has_unfused_gradients=True,
        small=rows(6, 10, group_size=5),
        sizes=(*(rows(7, cols, group_size=group) for cols, group in sizes), rows(37, 640, group_size=128)),
        options=(),
        backward_sizes=(rows(65, 4096, group_size=1024),),
        lengths=(rows(9, 640, group_size=128),),
        many=(rows(600, 640, group_size=128),),
    )


GATED = tuple(gate(variant) for variant in VARIANTS)
GROUPED = tuple(grouped(variant) for variant in (MAMBA, QWEN))
ops = pytest.mark.parametrize("op", GATED, ids=str)


# Arrays beyond every cache, whose results may go past it.
@pytest.mark.parametrize("op", GATED[:2], ids=str)
def test_large_arrays_have_the_bits_of_small_ones(op):
    x, gate, scale = op.draw(rows(6144, 2048))
    norm = jax.jit(op.function)
    assert bits(norm(x, gate, scale)[0][3000:3005]) == bits(norm(x[3000:3005], gate[3000:3005], scale))


# From where the exponential of the gate is the smallest number to where one minus sigmoid is lost in it.
@pytest.mark.on_emulator
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_gate_keeps_its_digits(variant):
    # Each row has gates of all sizes: of nothing but very small ones a mean square is too small for float32.
    gate = jnp.linspace(-80, 80, 64 * 1000).reshape(1000, 64).T
    x, scale = draw_x((64, 1000)), draw_scale((1000,))
    y = jax.jit(gated(variant, epsilon=0.0))(x, gate, scale)
    assert forward_errors(y, exact(variant, x, gate, scale, epsilon=0.0)) == []


@pytest.mark.on_emulator
@cover(variant=VARIANTS, value=[25.0, -25.0, 60.0])
def test_the_slope_of_a_large_gate_keeps_its_digits(variant, value):
    x, scale, dy = draw_x((5, 1000)), draw_scale((1000,)), draw("dy", (5, 1000))
    args = x, value + draw("small", (5, 1000)), scale
    norm = gated(variant, epsilon=0.0)
    _, dgate, _ = jax.jit(lambda dy, *args: jax.vjp(norm, *args)[1](dy))(dy, *args)
    expected, _ = exact_gradients(variant, (dy,), *args, epsilon=0.0)["gate"]
    assert gradient_error(dgate, expected, {"float32": 1e-5}) <= 1


# Of a gate below -87.3 sigmoid is subnormal: 0 in the kernels, and on a CPU in XLA's code as well, but not on a GPU.
@pytest.mark.on_emulator
@cover(variant=VARIANTS, dtype=DTYPES)
def test_extreme_gates_are_as_in_the_formula(variant, dtype):
    values = jnp.array([np.nan, np.inf, -np.inf, 1e4, -1e4, 3e38, -3e38, 88.5, -87.0, 0.0, -0.0]).astype(dtype)
    x, gate, scale = draw_x((11, 133), dtype), draw_gate((11, 133), dtype), draw_scale((133,))
    gate = gate.at[:, 131].set(values).at[:, 0].set(values)
    y = jax.jit(gated(variant))(x, gate, scale)
    expected = jax.jit(gated(variant, implementation="xla"))(x, gate, scale)
    close = {"rtol": 1e-6, "atol": 1e-37} if dtype == "float32" else {"rtol": 2 * float(jnp.finfo(dtype).eps)}
    np.testing.assert_allclose(np.float32(y), np.float32(expected), **close)


# Without a kernel: the formula, computed as if the operands were float32, or float64 where one is.
@over(
    GATED[:2],
    dtypes=lambda op: [
        *(("bfloat16", "float32", "bfloat16"), ("float32", "bfloat16", "float32"), ("bfloat16", "bfloat16", "float32"))
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
