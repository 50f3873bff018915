"""`jax.debug_nans` raises at no finite operands: no NaN is made on the way, nor as a constant."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from cases import draw, draw_x
from coverage import cover, over
from table import OPS

import jaxnorm

pytestmark = pytest.mark.any_code

IMPLEMENTATIONS = [None, "jnp"]
HOW = {"eager": lambda f: f, "jit": jax.jit}


def results_and_gradients(function, *args):
    results, pullback = jax.vjp(function, *args)
    return results, pullback(jax.tree.map(jnp.ones_like, results))


@over(OPS, implementation=lambda _: IMPLEMENTATIONS, how=lambda _: HOW, pairs=True)
def test_no_alarm_by_the_table(op, implementation, how):
    args = op.draw(op.small)
    forward = partial(op.function, **op.small.options, implementation=implementation)
    function = partial(op.differentiable, **op.small.options, implementation=implementation)
    with jax.debug_nans(True):
        jax.block_until_ready((how(forward)(*args), how(partial(results_and_gradients, function))(*args)))


X, KERNEL, LABELS = draw_x((4, 6, 32)), draw("kernel", (32, 48)), jnp.zeros((4, 6), int)
INT8 = jaxnorm.Quantization("int8")
LOSS = jaxnorm.softmax_cross_entropy_with_integer_labels
OTHERS = {
    "softmax, axis 0": partial(jaxnorm.softmax, axis=0),
    "softmax, axes": partial(jaxnorm.softmax, axis=(0, 1)),
    "softmax, causal": partial(jaxnorm.softmax, causal=True, window=2, offset=-2),
    "log_softmax, axis 0": partial(jaxnorm.log_softmax, axis=0),
    "log_softmax, causal": partial(jaxnorm.log_softmax, causal=True, offset=-2),
    "loss, axis 0": lambda x, **kwargs: LOSS(x, jnp.zeros((6, 32), int), axis=0, **kwargs),
    "loss, options": lambda x, **kwargs: LOSS(
        x, LABELS, label_smoothing=0.1, z_loss=1e-4, soft_cap=5.0, ignore_index=0, **kwargs
    ),
    "linear loss": lambda x, **kwargs: jaxnorm.linear_cross_entropy(x, KERNEL, LABELS, **kwargs),
    "linear loss, none": lambda x, **kwargs: jaxnorm.linear_cross_entropy(
        x, KERNEL, LABELS, reduction="none", ignore_index=0, **kwargs
    ),
    "float8_linear": lambda x, **kwargs: jaxnorm.float8_linear(x, KERNEL, **kwargs),
}


@cover(function=OTHERS, implementation=IMPLEMENTATIONS, how=HOW)
def test_no_alarm_elsewhere(function, implementation, how):
    with jax.debug_nans(True):
        jax.block_until_ready(how(partial(results_and_gradients, partial(function, implementation=implementation)))(X))


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_no_alarm_at_quantize(how):
    with jax.debug_nans(True):
        jax.block_until_ready(how(lambda x: jaxnorm.quantize(x, INT8).dequantize(jnp.float32))(X))
