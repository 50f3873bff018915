"""The straight-through gradient of a quantised norm is that of the norm; without it there is none."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ADDS, DTYPES, KINDS, NORMS, PAIRS, assert_close, bits, draw, draw_residual, draw_smooth, draw_x
from coverage import cover
from hlo import count_native_calls
from jax import lax
from jax.experimental import jet
from native import native_calls
from quantizing import GRANULARITIES, QUANTIZED, STATIC_SCALE, TO, call, quantize, to

from jaxnorm import Quantization, gated_rms_norm_quantized
from ops.quantized_norm_bits import TO_INT8, draw_operands, kinds

pytestmark = pytest.mark.any_code

DIMS = (12, 128)
WEIGHTS = DIMS[-1:]


def pull_back(function, args, cotangents):
    return jax.jit(lambda args, cotangents: jax.vjp(function, *args)[1](cotangents))(args, cotangents)


# That of the norm, with factors of float32 times these; of the formula, which has other programs, nearly.
@cover(
    kind=KINDS,
    how=[
        *(((dtype, None), None) for dtype in DTYPES),
        *((pair, None) for pair in PAIRS),
        *((("float32", None), "xla"), (("float32", "float32"), "xla")),
    ],
    to=TO,
    granularity=GRANULARITIES.keys(),
    has_smooth=[False, True],
)
def test_the_gradient_is_that_of_the_norm(kind, how, to, granularity, has_smooth):
    (dtype, residual_dtype), implementation = how
    args, smooth = draw_operands(DIMS, dtype)[:3], draw_smooth(WEIGHTS) if has_smooth else None
    dy, dsum = draw("dy", DIMS, dtype), draw("dsum", DIMS, residual_dtype or dtype)
    quantized = quantize(kind, Quantization(to, **GRANULARITIES[granularity]), implementation, straight_through=True)
    options = {"implementation": implementation} | ({"out_dtype": "float32"} if has_smooth else {})

    def ours(x, scale, bias, smooth, *residual):
        result = quantized(x, scale, bias, smooth, *residual)
        return (result[0].dequantize(dtype), result[1]) if residual else result.dequantize(dtype)

    def theirs(x, scale, bias, *residual):
        results = (ADDS if residual else NORMS)[kind](x, *residual, scale, bias, **options)
        return tuple(results) if residual else results

    residual = (draw_residual(DIMS, residual_dtype),) if residual_dtype else ()
    of_norm = dy.astype("float32") * smooth if has_smooth else dy
    cotangents, expected = ((dy, dsum), (of_norm, dsum)) if residual else (dy, of_norm)
    *of_args, dsmooth = [*pull_back(ours, (*args, smooth, *residual), cotangents)]
    if residual:
        of_args, dsmooth = [*of_args[:3], dsmooth], of_args[3]
    if has_smooth:
        np.testing.assert_array_equal(dsmooth, jnp.zeros_like(smooth))
    others = pull_back(theirs, (*args, *residual), expected)
    if implementation is None:
        assert bits(of_args) == bits(others)
    for a, e in zip(of_args, others, strict=True):
        np.testing.assert_allclose(np.float32(a), np.float32(e), rtol=1e-5, atol=1e-5)


def state_of(y, given):
    """What a layer hands to the next one: a sum with y, or y and the residual stream."""
    x, *residual = given
    return (x + y,) if not residual else (y[0], y[1])


def both_signs(weights):
    return jax.tree.map(lambda w: jnp.stack([w, -w]), weights)


# How layers follow each other: each is a function of (layer, state, weights), where a layer gives the next state.
STRUCTURES = {
    "once": lambda layer, state, weights: layer(state, weights),
    "jit": lambda layer, state, weights: jax.jit(layer)(state, weights),
    "scan": lambda layer, state, weights: lax.scan(lambda s, _: (layer(s, weights), None), state, length=2)[0],
    "fori_loop": lambda layer, state, weights: lax.fori_loop(0, 2, lambda _, s: layer(s, weights), state),
    "cond": lambda layer, state, weights: lax.cond(weights[0][0] < jnp.inf, layer, lambda s, _: s, state, weights),
    "checkpoint": lambda layer, state, weights: jax.checkpoint(layer)(state, weights),
    "scan of checkpoint": lambda layer, state, weights: lax.scan(
        lambda s, w: (jax.checkpoint(layer)(s, w), None), state, both_signs(weights)
    )[0],
    "vmap over x": lambda layer, state, weights: jax.vmap(layer, (0, None))(state, weights),
    "vmap over weights": lambda layer, state, weights: jax.vmap(layer, (None, 0))(state, both_signs(weights)),
}


def jvp_of_grad(loss, args, dots):
    return jax.jvp(jax.grad(loss), (args,), (dots,))[1]


# Ways to a product with the Hessian.
PRODUCTS = {
    "jvp of grad": jvp_of_grad,
    "grad of jvp": lambda loss, args, dots: jax.grad(lambda args: jax.jvp(loss, (args,), (dots,))[1])(args),
    "grad of grad": lambda loss, args, dots: jax.vjp(jax.grad(loss), args)[1](dots)[0],
    "linearize": lambda loss, args, dots: jax.linearize(jax.grad(loss), args)[1](dots),
}


def layer_of(kind, quantization, *, smooth=None, implementation=None, reference=False):
    """A layer that adds what is dequantised; as a reference, by the norm in jax.numpy and what JAX knows of that."""
    run = partial(call, kind, quantization, implementation=implementation)

    def layer(state, weights):
        x, *residual = state
        args = (x, *weights, smooth, *residual)
        if not reference:
            result = run(*args, straight_through=True)
            return state_of((result[0].dequantize(), result[1]) if residual else result.dequantize(), state)
        result = run(*lax.stop_gradient(args))
        exact = (result[0] if residual else result).dequantize()
        total = x + residual[0] if residual else x
        y = NORMS[kind](total, *weights, implementation="xla")
        y = y if smooth is None else y * smooth
        y = lax.stop_gradient(exact) + (y - lax.stop_gradient(y))
        return state_of((y, total) if residual else y, state)

    return layer


def loss_of(structure, layer):
    def loss(args):
        return sum(jnp.sin(leaf).sum() for leaf in jax.tree.leaves(STRUCTURES[structure](layer, *args)))

    return loss


def draw_state(with_residual):
    x, scale, bias, _ = draw_operands(DIMS)
    return ((x, draw_residual(DIMS)) if with_residual else (x,)), (scale, bias)


def in_a_while_loop(product):
    """JAX has no gradient of a while loop, but takes those in its body."""

    def step(args, state):
        return state[0] + 1, jax.tree.map(lambda leaf: leaf / 100, product(args, state[1]))

    return lambda args, dots: lax.while_loop(lambda state: state[0] < 3, partial(step, args), (0, dots))[1]


@cover(
    kind=KINDS,
    implementation=[None, "xla"],
    structure=STRUCTURES.keys(),
    product=PRODUCTS.keys(),
    granularity=GRANULARITIES.keys(),
    given=["x", "residual", "smooth", "residual and smooth"],
    around={"alone": lambda product: product, "while loop": in_a_while_loop},
)
def test_a_product_with_the_hessian(kind, implementation, structure, product, granularity, given, around):
    args = draw_state("residual" in given)
    smooth = draw_smooth(WEIGHTS) if "smooth" in given else None

    def of(product, **how):
        layer = layer_of(kind, to("int8", granularity), smooth=smooth, implementation=implementation, **how)
        return jax.jit(around(partial(product, loss_of(structure, layer))))(args, jax.tree.map(jnp.cos, args))

    assert_close(of(PRODUCTS[product]), of(jvp_of_grad, reference=True))


# Law 6 where JAX linearises a body that it has traced before.
@cover(kind=KINDS, structure=["jit", "scan", "fori_loop", "cond"], given=["x", "residual"])
def test_one_native_call_each_way(kind, structure, given):
    loss = loss_of(structure, layer_of(kind, TO_INT8))
    lowered = jax.jit(jax.grad(loss)).lower(draw_state("residual" in given))
    for text in (lowered.as_text(), lowered.compile().as_text()):
        assert count_native_calls(text) == native_calls(kind, quantized=1, bwd=1)


def gated(x, **options):
    return gated_rms_norm_quantized(x, jnp.cos(x), gate_first=True, **options)


@cover(norm=QUANTIZED | {"gated": gated}, implementation=[None, "xla"])
def test_factors_have_the_gradient_zero(norm, implementation):
    norm = partial(norm, quantization=to("int8", "tensor"), implementation=implementation, straight_through=True)

    def loss(smooth, scale):
        return norm(draw_x(DIMS), smooth_scale=smooth, static_scale=scale).dequantize().sum()

    dsmooth, dscale = jax.jit(jax.grad(loss, (0, 1)))(draw_smooth(WEIGHTS), STATIC_SCALE)
    np.testing.assert_array_equal(dsmooth, np.zeros(WEIGHTS))
    assert dscale == 0


# Law 8: rows that a norm makes NaN of have a carrier of zeros, too.
@cover(kind=KINDS, implementation=[None, "xla"])
def test_a_carrier_is_zero_beside_nan(kind, implementation):
    x = draw_x(DIMS).at[1, 3].set(jnp.nan).at[2, 4].set(jnp.inf)
    carrier = quantize(kind, TO_INT8, implementation, straight_through=True)(x).carrier
    np.testing.assert_array_equal(carrier, np.zeros(DIMS))


@kinds
def test_a_carrier_changes_no_value(kind):
    args = (*draw_operands(DIMS, "bfloat16")[:3], None, draw_residual(DIMS))
    (quantized, total), (expected, expected_total) = (
        quantize(kind, TO_INT8, None, straight_through=True)(*args),
        quantize(kind, TO_INT8)(*args),
    )
    assert (quantized.carrier.shape, quantized.carrier.dtype, expected.carrier) == (DIMS, "bfloat16", None)
    assert bits((quantized.values, quantized.scales, total)) == bits((expected.values, expected.scales, expected_total))
    np.testing.assert_array_equal(quantized.dequantize(), expected.dequantize())


# What asks for a derivative without a carrier, and asks for it of anything that moves the values; the gradients of
# factors are zero by convention, and without the convention there is none.
DERIVATIVES = {
    "grad of x": lambda q, x, s: jax.grad(lambda x: q(x, s))(x),
    "grad of scale": lambda q, x, s: jax.grad(lambda s: q(x, s))(s),
    "grad of smooth_scale": lambda q, x, s: jax.grad(lambda factor: q(x, s, smooth_scale=factor))(s),
    "grad of static_scale": lambda q, x, s: jax.grad(lambda factor: q(x, s, static_scale=factor))(STATIC_SCALE),
    "grad of y": lambda q, x, s: jax.grad(lambda x: q(x, s, with_unquantized=True))(x),
    "jvp": lambda q, x, s: jax.jvp(lambda x: q(x, s), (x,), (x,)),
    "jet": lambda q, x, s: jet.jet(lambda x: q(x, s), (x,), ([x, x],)),
    "vmap of grad": lambda q, x, s: jax.vmap(jax.grad(lambda x: q(x, s)))(x[None]),
    "grad of vmap over scale": lambda q, x, s: jax.grad(lambda s: jax.vmap(q, (None, 0))(x, s).sum())(s[None]),
    "grad of scan": lambda q, x, s: jax.grad(
        lambda x: jax.lax.scan(lambda c, _: (c + q(c, s), None), x, length=2)[0].sum()
    )(x),
    "grad of checkpoint": lambda q, x, s: jax.grad(jax.checkpoint(lambda x: q(x, s)))(x),
}


@cover(kind=KINDS, dtype=TO, name=DERIVATIVES.keys(), implementation=[None, "xla"])
def test_a_derivative_without_straight_through(kind, dtype, name, implementation):
    quantization = to(dtype, "tensor" if "static" in name else "token")

    def loss(x, scale, **given):
        result = QUANTIZED[kind](x, scale, quantization=quantization, implementation=implementation, **given)
        return result[1].sum() if "with_unquantized" in given else result.dequantize().sum()

    with pytest.raises(ValueError, match=rf"^{kind}_norm_quantized: .*straight_through=True"):
        jax.eval_shape(lambda x, scale: DERIVATIVES[name](loss, x, scale), *draw_operands(DIMS)[:2])


@kinds
def test_values_and_scales_by_themselves_pass_no_gradient_on(kind):
    def loss(x):
        quantized = QUANTIZED[kind](x, quantization=Quantization("float8_e4m3fn"), straight_through=True)
        return (quantized.values.astype("float32") * quantized.scales).sum()

    np.testing.assert_array_equal(jax.grad(loss)(draw_x(DIMS)), np.zeros(DIMS))


@kinds
def test_a_quantised_branch_that_is_not_differentiated(kind):
    def loss(x):
        return (x * quantize(kind, TO_INT8)(jax.lax.stop_gradient(x)).dequantize()).sum()

    assert jax.grad(loss)(draw_x(DIMS)).shape == DIMS
