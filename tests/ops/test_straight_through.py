"""The straight-through gradient of a quantised norm is that of the norm; without it there is none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    ADDS,
    DTYPES,
    KINDS,
    NORMS,
    PAIRS,
    bits,
    draw,
    draw_bias,
    draw_residual,
    draw_scale,
    draw_smooth,
    draw_x,
)
from coverage import cover
from quantizing import GRANULARITIES, QUANTIZED, STATIC_SCALE, TO, quantize

from jaxnorm import Quantization

ROWS, COLS = 12, 128
DIMS = (ROWS, COLS)
INT8 = Quantization("int8")

kinds = pytest.mark.parametrize("kind", KINDS)


def straight_through(kind, quantization=INT8, implementation=None, dtype="float32"):
    """A function of (x, scale, bias, smooth, residual) that gives what is dequantised, and the sum."""
    function = quantize(kind, quantization, implementation, straight_through=True)

    def dequantized(*args):
        result = function(*args)
        if isinstance(result, tuple):
            return result[0].dequantize(dtype), result[1]
        return result.dequantize(dtype)

    return dequantized


def pull_back(function, args, cotangents):
    return jax.jit(lambda args, cotangents: jax.vjp(function, *args)[1](cotangents))(args, cotangents)


def draw_operands(dtype="float32"):
    return draw_x(DIMS, dtype), draw_scale(DIMS[-1:]), draw_bias(DIMS[-1:])


@cover(kind=KINDS, dtype=DTYPES, to=TO, granularity=GRANULARITIES.keys())
def test_the_gradient_is_that_of_the_norm(kind, dtype, to, granularity):
    args, dy = draw_operands(dtype), draw("dy", DIMS, dtype)
    quantization = Quantization(to, **GRANULARITIES[granularity])
    gradients = pull_back(straight_through(kind, quantization, dtype=dtype), args, dy)
    assert bits(gradients) == bits(pull_back(NORMS[kind], args, dy))


@cover(kind=KINDS, dtypes=PAIRS)
def test_the_gradient_with_a_residual_is_that_of_the_norm(kind, dtypes):
    dtype, residual_dtype = dtypes
    x, scale, bias = draw_operands(dtype)
    residual = draw_residual(DIMS, residual_dtype)
    cotangents = draw("dy", DIMS, dtype), draw("dsum", DIMS, residual_dtype)
    function = straight_through(kind, dtype=dtype)
    gradients = pull_back(lambda x, r, s, b: function(x, s, b, None, r), (x, residual, scale, bias), cotangents)
    assert bits(gradients) == bits(pull_back(ADDS[kind], (x, residual, scale, bias), cotangents))


@cover(kind=KINDS, dtype=DTYPES)
def test_the_gradient_with_smooth_factors_is_that_of_the_norm_times_them(kind, dtype):
    args, dy, smooth = draw_operands(dtype), draw("dy", DIMS, dtype), draw_smooth(DIMS[-1:])

    def plain(*args):
        return NORMS[kind](*args, out_dtype="float32")

    *gradients, dsmooth = pull_back(straight_through(kind, dtype=dtype), (*args, smooth), dy)
    assert bits(gradients) == bits(pull_back(plain, args, dy.astype("float32") * smooth))
    np.testing.assert_array_equal(dsmooth, jnp.zeros_like(smooth))


@kinds
def test_the_gradient_of_the_formula(kind):
    args, dy = draw_operands(), draw("dy", DIMS)
    for a, e in zip(
        pull_back(straight_through(kind, implementation="jnp"), args, dy),
        pull_back(lambda *args: NORMS[kind](*args, implementation="jnp"), args, dy),
        strict=True,
    ):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5)


@kinds
def test_a_static_scale_has_the_gradient_zero(kind):
    def loss(scale):
        result = QUANTIZED[kind](
            draw_x(DIMS), quantization=Quantization("int8", "tensor"), static_scale=scale, straight_through=True
        )
        return result.dequantize().sum()

    assert jax.grad(loss)(STATIC_SCALE) == 0


# The values are those without a carrier; scales and sums too.
@kinds
def test_a_carrier_changes_no_value(kind):
    args = (*draw_operands("bfloat16"), None, draw_residual(DIMS))
    (quantized, total), (expected, expected_total) = (
        quantize(kind, INT8, None, straight_through=True)(*args),
        quantize(kind, INT8)(*args),
    )
    assert (quantized.carrier.shape, quantized.carrier.dtype, expected.carrier) == (DIMS, "bfloat16", None)
    assert bits((quantized.values, quantized.scales, total)) == bits((expected.values, expected.scales, expected_total))
    np.testing.assert_array_equal(quantized.dequantize(), expected.dequantize())


# What asks for a derivative without a carrier, and asks for it of anything that moves the values.
DERIVATIVES = {
    "grad of x": lambda q, x, s: jax.grad(lambda x: q(x, s))(x),
    "grad of scale": lambda q, x, s: jax.grad(lambda s: q(x, s))(s),
    "jvp": lambda q, x, s: jax.jvp(lambda x: q(x, s), (x,), (x,)),
    "vmap of grad": lambda q, x, s: jax.vmap(jax.grad(lambda x: q(x, s)))(x[None]),
    "grad of vmap over scale": lambda q, x, s: jax.grad(lambda s: jax.vmap(q, (None, 0))(x, s).sum())(s[None]),
    "grad of scan": lambda q, x, s: jax.grad(
        lambda x: jax.lax.scan(lambda c, _: (c + q(c, s), None), x, length=2)[0].sum()
    )(x),
    "grad of checkpoint": lambda q, x, s: jax.grad(jax.checkpoint(lambda x: q(x, s)))(x),
}


@cover(kind=KINDS, to=TO, name=DERIVATIVES.keys(), implementation=[None, "jnp"])
def test_a_derivative_without_straight_through(kind, to, name, implementation):
    def loss(x, scale):
        quantized = QUANTIZED[kind](x, scale, quantization=Quantization(to), implementation=implementation)
        return quantized.dequantize().sum()

    with pytest.raises(ValueError, match=rf"^{kind}_norm_quantized: .*straight_through=True"):
        jax.eval_shape(lambda x, scale: DERIVATIVES[name](loss, x, scale), *draw_operands()[:2])


@kinds
def test_values_and_scales_by_themselves_pass_no_gradient_on(kind):
    def loss(x):
        quantized = QUANTIZED[kind](x, quantization=Quantization("float8_e4m3fn"), straight_through=True)
        return (quantized.values.astype("float32") * quantized.scales).sum()

    np.testing.assert_array_equal(jax.grad(loss)(draw_x(DIMS)), np.zeros(DIMS))


@kinds
def test_a_quantised_branch_that_is_not_differentiated(kind):
    def loss(x):
        return (x * quantize(kind, INT8)(jax.lax.stop_gradient(x)).dequantize()).sum()

    assert jax.grad(loss)(draw_x(DIMS)).shape == DIMS
