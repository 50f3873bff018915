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
    assert_close,
    bits,
    draw,
    draw_bias,
    draw_residual,
    draw_scale,
    draw_smooth,
    draw_x,
)
from coverage import cover
from hlo import count_native_calls
from jax import lax
from native import native_calls
from quantizing import GRANULARITIES, QUANTIZED, STATIC_SCALE, TO, quantize

from jaxnorm import Quantization

pytestmark = pytest.mark.any_code

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


def state_of(y, given):
    """What a layer hands to the next one: a sum with y, or y and the residual stream."""
    x, *residual = given
    return (x + y,) if not residual else (y[0], y[1])


# How layers follow each other: each is a function of (layer, state, weights), where a layer gives the next state.
STRUCTURES = {
    "once": lambda layer, state, weights: layer(state, weights),
    "jit": lambda layer, state, weights: jax.jit(layer)(state, weights),
    "scan": lambda layer, state, weights: lax.scan(lambda s, _: (layer(s, weights), None), state, length=2)[0],
    "fori_loop": lambda layer, state, weights: lax.fori_loop(0, 2, lambda _, s: layer(s, weights), state),
    "cond": lambda layer, state, weights: lax.cond(weights[0][0] < jnp.inf, layer, lambda s, _: s, state, weights),
    "checkpoint": lambda layer, state, weights: jax.checkpoint(layer)(state, weights),
    "scan of checkpoint": lambda layer, state, weights: lax.scan(
        lambda s, w: (jax.checkpoint(layer)(s, w), None), state, jax.tree.map(lambda w: jnp.stack([w, -w]), weights)
    )[0],
    "vmap over x": lambda layer, state, weights: jax.vmap(layer, (0, None))(state, weights),
    "vmap over weights": lambda layer, state, weights: jax.vmap(layer, (None, 0))(
        state, jax.tree.map(lambda w: jnp.stack([w, -w]), weights)
    ),
}


def jvp_of_grad(loss, args, dots):
    return jax.jvp(jax.grad(loss), (args,), (dots,))[1]


def grad_of_jvp(loss, args, dots):
    return jax.grad(lambda args: jax.jvp(loss, (args,), (dots,))[1])(args)


# Ways to a product with the Hessian.
PRODUCTS = {
    "jvp of grad": jvp_of_grad,
    "grad of jvp": grad_of_jvp,
    "grad of grad": lambda loss, args, dots: jax.vjp(jax.grad(loss), args)[1](dots)[0],
    "linearize": lambda loss, args, dots: jax.linearize(jax.grad(loss), args)[1](dots),
}


def layer_of(kind, quantization, *, smooth, implementation, reference):
    """A layer that adds what is dequantised; as a reference, by the norm in jax.numpy and what JAX knows of that."""
    options = {"quantization": quantization, "implementation": implementation}
    if quantization.granularity == "tensor":
        options["static_scale"] = STATIC_SCALE

    def layer(state, weights):
        x, *residual = state
        given = {"residual": residual[0]} if residual else {}
        if not reference:
            result = QUANTIZED[kind](
                x, weights[0], bias=weights[1], smooth_scale=smooth, straight_through=True, **given, **options
            )
            quantized, *total = result if residual else (result,)
            return state_of((quantized.dequantize(), *total) if residual else quantized.dequantize(), state)
        fixed = lax.stop_gradient((x, *weights, given))
        result = QUANTIZED[kind](fixed[0], fixed[1], bias=fixed[2], smooth_scale=smooth, **fixed[3], **options)
        exact = (result[0] if residual else result).dequantize()
        total = x + residual[0] if residual else x
        y = NORMS[kind](total, weights[0], bias=weights[1], implementation="jnp")
        y = y if smooth is None else y * smooth
        y = lax.stop_gradient(exact) + (y - lax.stop_gradient(y))
        return state_of((y, total) if residual else y, state)

    return layer


def loss_of(structure, layer):
    def loss(args):
        return sum(jnp.sin(leaf).sum() for leaf in jax.tree.leaves(structure(layer, *args)))

    return loss


def draw_state(with_residual, smooth):
    x, scale, bias = draw_operands()
    args = ((x, draw_residual(DIMS)) if with_residual else (x,)), (scale, bias)
    return args, jax.tree.map(jnp.cos, args), draw_smooth(DIMS[-1:]) if smooth else None


second_derivatives = cover(
    kind=KINDS,
    implementation=[None, "jnp"],
    structure=STRUCTURES.keys(),
    product=PRODUCTS.keys(),
    granularity=GRANULARITIES.keys(),
    given=["x", "residual", "smooth", "residual and smooth"],
)


@second_derivatives
def test_a_product_with_the_hessian(kind, implementation, structure, product, granularity, given):
    args, dots, smooth = draw_state("residual" in given, "smooth" in given)
    ours, theirs = (
        layer_of(
            kind,
            Quantization("int8", **GRANULARITIES[granularity]),
            smooth=smooth,
            implementation=implementation,
            reference=reference,
        )
        for reference in (False, True)
    )
    of_structure = STRUCTURES[structure]
    actual = jax.jit(lambda args, dots: PRODUCTS[product](loss_of(of_structure, ours), args, dots))(args, dots)
    expected = jax.jit(lambda args, dots: jvp_of_grad(loss_of(of_structure, theirs), args, dots))(args, dots)
    assert_close(actual, expected)


# JAX has no gradient of a while loop, but takes those in its body.
@cover(kind=KINDS, implementation=[None, "jnp"], product=PRODUCTS.keys())
def test_a_product_with_the_hessian_in_a_while_loop(kind, implementation, product):
    args, dots, _ = draw_state(with_residual=False, smooth=False)

    def repeated(product, *, reference):
        layer = layer_of(kind, INT8, smooth=None, implementation=implementation, reference=reference)

        def step(state):
            count, dots = state
            products = product(loss_of(STRUCTURES["scan"], layer), args, dots)
            return count + 1, jax.tree.map(lambda leaf: leaf / 100, products)

        return lax.while_loop(lambda state: state[0] < 3, step, (0, dots))[1]

    actual = jax.jit(lambda: repeated(PRODUCTS[product], reference=False))()
    assert_close(actual, jax.jit(lambda: repeated(jvp_of_grad, reference=True))())


# Law 6 where JAX linearises a body that it has traced before.
@cover(kind=KINDS, structure=["jit", "scan", "fori_loop", "cond"], given=["x", "residual"])
def test_one_native_call_each_way(kind, structure, given):
    args, _, _ = draw_state("residual" in given, smooth=False)
    layer = layer_of(kind, INT8, smooth=None, implementation=None, reference=False)
    lowered = jax.jit(jax.grad(loss_of(STRUCTURES[structure], layer))).lower(args)
    for text in (lowered.as_text(), lowered.compile().as_text()):
        assert count_native_calls(text) == native_calls(kind, quantized=1, bwd=1)


@cover(kind=KINDS, implementation=[None, "jnp"])
def test_a_static_scale_has_the_gradient_zero(kind, implementation):
    def loss(scale):
        result = QUANTIZED[kind](
            draw_x(DIMS),
            quantization=Quantization("int8", "tensor"),
            static_scale=scale,
            straight_through=True,
            implementation=implementation,
        )
        return result.dequantize().sum()

    assert jax.grad(loss)(STATIC_SCALE) == 0


# Law 8: rows that a norm makes NaN of have a carrier of zeros, too.
@cover(kind=KINDS, implementation=[None, "jnp"])
def test_a_carrier_is_zero_beside_nan(kind, implementation):
    x = draw_x(DIMS).at[1, 3].set(jnp.nan).at[2, 4].set(jnp.inf)
    carrier = quantize(kind, INT8, implementation, straight_through=True)(x).carrier
    np.testing.assert_array_equal(carrier, np.zeros(DIMS))


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


# By convention their gradients are zero, and without the convention there is none.
@cover(kind=KINDS, implementation=[None, "jnp"], name=["smooth_scale", "static_scale"])
def test_a_derivative_by_a_factor_without_straight_through(kind, implementation, name):
    granularity, factor = ("token", draw_smooth(DIMS[-1:])) if name == "smooth_scale" else ("tensor", STATIC_SCALE)
    quantization = Quantization("int8", granularity)

    def loss(factor):
        given = {name: factor, "implementation": implementation}
        return QUANTIZED[kind](draw_x(DIMS), quantization=quantization, **given).dequantize().sum()

    with pytest.raises(ValueError, match=rf"^{kind}_norm_quantized: .*straight_through=True"):
        jax.grad(loss)(factor)


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
