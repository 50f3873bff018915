"""What is particular to the gated norm with a quantised result: every granularity, over groups too, its gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import DTYPES, assert_close, draw, draw_gate, draw_scale, draw_smooth, draw_x
from coverage import cover
from gated_quantized_rows import call, plain, quantize
from gating import VARIANTS, gated, variants
from hlo import compiled_text, count_native_calls
from quantizing import GRANULARITIES, IMPLEMENTATIONS, TO, assert_same, by_numpy, static_scale_of
from table import GATED_QUANTIZED

import jaxnorm
from jaxnorm import Quantization

ROWS, COLS = 5, 512
OP = GATED_QUANTIZED[0]


def draw_operands(dtype="float32"):
    weights = draw_scale((COLS,), dtype), draw_smooth((COLS,))
    return draw_x((ROWS, COLS), dtype), draw_gate((ROWS, COLS), dtype), *weights


def formula_only(quantization, group_size):
    """Whether groups that are normalised share a scale."""
    is_whole = quantization.group_size is not None and group_size % quantization.group_size == 0
    return group_size != COLS and quantization.granularity != "tensor" and not is_whole


# Of whole rows, with whole runs of columns in a group, and with several groups in a run: the formula, whose bits are
# XLA's to choose on a GPU.
@cover(
    variant=VARIANTS,
    to=TO,
    granularity=GRANULARITIES.keys(),
    group_size=[COLS, 256, 32] if jax.default_backend() == "cpu" else [COLS],
    implementation=IMPLEMENTATIONS,
)
def test_it_is_the_norm_quantised(variant, to, granularity, group_size, implementation):
    quantization = Quantization(to, **GRANULARITIES[granularity])
    x, gate, scale, smooth = draw_operands()
    q = quantize(variant, quantization, implementation, group_size=group_size)(x, gate, scale, smooth)
    same = "jnp" if formula_only(quantization, group_size) else implementation
    y = plain(variant, same, group_size=group_size)(x, gate, scale)
    values, scales = by_numpy(y, quantization, smooth, static_scale_of(quantization))
    assert_same([q.values, q.scales], [values, scales])


# With smooth factors, too, in one native call: they go into the scale of the unquantised norm.
@cover(variant=VARIANTS, dtype=DTYPES, group_size=[None, 128], scale_offset=[0.0, 1.0], given=["scale", "nothing"])
def test_the_gradient_is_that_of_the_norm_times_smooth_factors(variant, dtype, group_size, scale_offset, given):
    x, gate, scale, smooth = draw_operands(dtype)
    to, options = Quantization("int8", "group"), {"group_size": group_size, "scale_offset": scale_offset}
    args = (x, gate, scale if given == "scale" else None)
    dy = draw("dy", (ROWS, COLS))

    def quantized(*args):
        return call(variant, to, *args, smooth, straight_through=True, **options).dequantize()

    def norm(*args):
        wide = (None if a is None else a.astype("float32") for a in args)
        return gated(variant, implementation="jnp", **options)(*wide) * smooth

    def pull_back(function):
        return lambda args: jax.vjp(function, *args)[1](dy)

    found, expected = (jax.jit(pull_back(function))(args) for function in (quantized, norm))
    eps = float(jnp.finfo(dtype).eps)
    for a, e in zip(found[: 3 if given == "scale" else 2], expected, strict=False):
        error = np.linalg.norm(np.float32(a) - np.float32(e)) / np.linalg.norm(np.float32(e))
        assert error < max(eps, 1e-6)
    calls = count_native_calls(compiled_text(pull_back(quantized), args))
    assert calls == OP.calls(fwd=1, bwd=1)


# What the formula alone serves has the derivative as well.
@variants
def test_the_gradient_over_groups(variant):
    args, to = draw_operands()[:3], Quantization("int8")

    def loss(function):
        return lambda *args: (function(*args) * jnp.cos(jnp.arange(COLS))).sum()

    found = jax.grad(
        loss(lambda *args: call(variant, to, *args, group_size=64, straight_through=True).dequantize()), (0, 1, 2)
    )
    expected = jax.grad(loss(gated(variant, group_size=64, implementation="jnp")), (0, 1, 2))
    assert_close(jax.jit(found)(*args), jax.jit(expected)(*args))


def test_factors_have_the_gradient_zero():
    x, gate, _, smooth = draw_operands()
    to = Quantization("int8", "tensor")

    def loss(smooth, given):
        q = jaxnorm.gated_rms_norm_quantized(
            x, gate, gate_first=True, quantization=to, smooth_scale=smooth, static_scale=given, straight_through=True
        )
        return q.dequantize().sum()

    dsmooth, dgiven = jax.jit(jax.grad(loss, (0, 1)))(smooth, 0.01)
    np.testing.assert_array_equal(dsmooth, np.zeros(COLS))
    assert dgiven == 0


def test_without_straight_through_a_derivative_is_an_error():
    x, gate, scale, _ = draw_operands()
    with pytest.raises(ValueError, match=r"^gated_rms_norm_quantized: .*straight_through=True.*stop_gradient"):
        jax.grad(lambda x: call(VARIANTS[0], Quantization("int8"), x, gate, scale).dequantize().sum())(x)


@variants
def test_the_scales_of_groups_stand_along_the_last_axis(variant):
    q = quantize(variant, Quantization("int8", "group", 64), group_size=128)(*draw_operands())
    assert (q.values.shape, q.scales.shape, q.carrier) == ((ROWS, COLS), (ROWS, COLS // 64), None)
    token = quantize(variant, Quantization("int8"), group_size=128)(*draw_operands())
    assert token.scales.shape == (ROWS, 1)
