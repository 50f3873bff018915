"""The check before each cell of `bench gpu`: it passes what is right and sees what is wrong."""

import functools

import jax
import jax.numpy as jnp
import pytest

from bench import gated, heads, programs, quantized, shapes, softmax


def spoilt(step, spoil):
    """The step, with spoil(y, dx, dweights) in place of its results."""

    def wrong(*arrays):
        y, (dx, dweights) = step(*arrays)
        return spoil(y, dx, dweights)

    return wrong


def wrong_bias_gradient(y, dx, dweights):
    return y, (dx, (*dweights[:-1], 1.001 * dweights[-1]))


def wrong_sum(y, dx, dweights):
    return (y[0], 1.001 * y[1]), (dx, dweights)


def without_dsum(y, dx, dweights):
    return y, (dx - 1, dweights)


def ones_for_zeros(y, dx, dweights):
    return (y[0].at[69, -1].set(1), y[1]), (dx, dweights)


@pytest.mark.parametrize(
    ("kind", "spoil"),
    [
        ("layer", wrong_bias_gradient),
        ("add_layer", wrong_sum),
        ("add_rms", without_dsum),
        (programs.PADDED, ones_for_zeros),
    ],
)
def test_the_check_sees_what_is_wrong(kind, spoil):
    operands = programs.operands(kind, "float32", 70, 33)
    step = programs.functions(kind, "jnp")["step"]

    check = functools.partial(programs.check, kind, *operands)
    assert check(step) < 1 < check(spoilt(step, spoil))


def wrong_dgate(y, pair, dweights):
    return y, ((pair[0], 1.001 * pair[1]), dweights)


def wrong_dscale(y, dx, dweights):
    return y, (dx, tuple(1.001 * dweight for dweight in dweights))


@pytest.mark.parametrize("spoil", [wrong_dgate, wrong_dscale])
@pytest.mark.parametrize("kind", gated.VARIANTS)
def test_the_check_of_the_gated_norm_sees_what_is_wrong(kind, spoil):
    operands = gated.operands(kind, "float32", 70, 2 * gated.GROUP)
    step = gated.functions(kind, "jnp")["step"]

    check = functools.partial(gated.check, kind, *operands)
    assert check(step) < 1 < check(spoilt(step, spoil))


# By the formula of one head after another, which needs no per-head scale of the package.
def test_the_check_of_heads_sees_what_is_wrong():
    operands = heads.operands(heads.KIND, "float32", 3 * shapes.HEADS, 32)

    def step(x, weights, dy):
        def forward(x, scale):
            of_heads = x.reshape(-1, *scale.shape)
            rstd = jax.lax.rsqrt((of_heads**2).mean(-1, keepdims=True) + programs.EPSILON)
            return (of_heads * rstd * scale).reshape(x.shape)

        y, vjp = jax.vjp(lambda x, weights: forward(x, *weights), x, weights)
        return y, vjp(dy)

    check = functools.partial(heads.check, heads.KIND, *operands)
    assert check(step) < 1 < check(spoilt(step, wrong_dscale))


def wrong_result(y, dx, dweights):
    return 1.001 * y, (dx, dweights)


def wrong_gradient(y, dx, dweights):
    return y, (1.001 * dx, dweights)


@pytest.mark.parametrize("spoil", [wrong_result, wrong_gradient])
@pytest.mark.parametrize("kind", softmax.KINDS)
def test_the_check_of_softmax_and_losses_sees_what_is_wrong(kind, spoil):
    operands = softmax.operands(kind, "float32", 70, 33)
    step = softmax.functions(kind, "jnp")["step"]
    check = functools.partial(softmax.check, kind, *operands)
    assert check(step) < 1 < check(spoilt(step, spoil))


def one_step_lower(values, *scales):
    """The value before each, in magnitude if it is a float8."""
    bits = jax.lax.bitcast_convert_type(values, jnp.int8)
    return jax.lax.bitcast_convert_type(bits - 1, values.dtype), *scales


def wrong_scales(values, *scales):
    return values, *(1.00001 * array for array in scales)


@pytest.mark.parametrize("spoil", [one_step_lower, wrong_scales])
@pytest.mark.parametrize("kind", ["rms_quantized", "layer_quantized, int8", "layer_quantized, groups of 128"])
def test_the_check_of_quantised_norms_sees_what_is_wrong(kind, spoil):
    operands = quantized.operands(kind, "float32", 70, 256)
    forward = quantized.functions(kind, "jnp")["forward"]
    check = functools.partial(quantized.check, kind, *operands)
    assert check(forward) < 1 < check(lambda *arrays: spoil(*forward(*arrays)))


def test_the_check_sees_values_that_are_truncated():
    kind = "rms_quantized, static scale"
    x, weights, static_scale = quantized.operands(kind, "float32", 70, 256)

    def truncated(*arrays):
        (values,) = quantized.functions(kind, "jnp")["forward"](*arrays)
        exact = programs.NORMS["rms"](x, *weights, implementation="jnp") / static_scale
        is_rounded_up = jnp.abs(values.astype("float32")) > jnp.abs(exact)
        return (jnp.where(is_rounded_up, *one_step_lower(values), values),)

    assert quantized.check(kind, x, weights, static_scale, truncated) > 1
