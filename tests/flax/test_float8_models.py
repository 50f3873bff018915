"""Models with `nnx.Float8Linear`: a quantised norm or activation in front of one, and a small model that is trained."""

import re
from functools import partial
from pathlib import Path

import flax.nnx
import jax
import jax.numpy as jnp
import library_models
import numpy as np
import optax
import pytest
from cases import bits, draw, draw_scale
from flax_apis import assert_gradients_close
from hlo import compiled_text

import jaxnorm
from jaxnorm import Quantization, float8_linear
from jaxnorm.nnx import Float8Linear, QuantizedRMSNorm

pytestmark = pytest.mark.jax_version

ROWS, FEATURES, COLUMNS = 48, 64, 96
E4M3 = Quantization(jnp.float8_e4m3fn)


class Block(flax.nnx.Module):
    """What ends in float8, `front`, and the layer that takes it."""

    def __init__(self, dtype):
        self.layer = Float8Linear(FEATURES, COLUMNS, dtype=dtype, rngs=flax.nnx.Rngs(0))

    def __call__(self, x):
        return self.layer(self.front(x))

    def unfused(self, x, out_dtype=jnp.float32):
        h = self.wide(x, out_dtype)
        return float8_linear(h, self.layer.kernel[...], bias=self.layer.bias[...], out_dtype=self.layer.dtype)


class Normed(Block):
    inputs = FEATURES

    def __init__(self, dtype):
        super().__init__(dtype)
        options = {"straight_through": True, "scale_init": lambda key, shape, dtype: draw_scale(shape, dtype)}
        self.front = QuantizedRMSNorm(FEATURES, quantization=E4M3, **options, rngs=flax.nnx.Rngs(0))

    def wide(self, x, out_dtype):
        return jaxnorm.rms_norm(x, self.front.scale[...], out_dtype=out_dtype)


class Gated(Block):
    inputs = 2 * FEATURES  # the gate, and what it gates

    def front(self, x):
        return jaxnorm.gated_activation_quantized(x, quantization=E4M3, straight_through=True)

    def wide(self, x, out_dtype):
        return jaxnorm.gated_activation(x.astype(jnp.float32)).astype(out_dtype)


BLOCKS = {"norm": Normed, "gated activation": Gated}
each_block = pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)


def value_and_gradients(model, call, x, dy):
    definition, state = flax.nnx.split(model)
    return library_models.value_and_gradients(lambda s, x: call(flax.nnx.merge(definition, s), x), dy, state, x)


# What is quantised is the float32 result of the norm or activation, so the unfused path quantises that too.
@each_block
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_values_and_gradients_are_those_of_the_unfused_path(block, dtype):
    model, x, dy = block(dtype), draw("x", (ROWS, block.inputs), dtype), draw("dy", (ROWS, COLUMNS), dtype)
    y, *gradients = value_and_gradients(model, block.__call__, x, dy)
    expected, *expected_gradients = value_and_gradients(model, block.unfused, x, dy)
    assert y.dtype == dtype
    assert bits(y) == bits(expected)
    # The carrier has x's dtype, and so has what flows through it.
    assert_gradients_close(gradients, expected_gradients, through=dtype)
    assert all(jnp.linalg.norm(leaf) > 0 for leaf in jax.tree.leaves(gradients))


def arrays_between(call, x, *dtypes):
    """The instructions that make an array as the layer takes it, of one of these dtypes."""
    with jaxnorm.implementation({"gated_activation_quantized": "native", "gated_activation": "native"}):
        text = compiled_text(call, x)
    entry = text.split("ENTRY", 1)[1]
    made = rf"= (?:{'|'.join(dtypes)})\[{ROWS},{FEATURES}\]\S* (?!parameter)\w"
    lines = re.findall(rf"^.*{made}.*$", entry, re.MULTILINE)
    # XLA's code for CPUs multiplies float8 as float32, and may write out the one operand that it makes so.
    widened = [line for line in lines if "= f32" in line and "branch_0_fun/convert_element_type" in line]
    assert len(widened) <= (jax.default_backend() == "cpu")
    return [line for line in lines if line not in widened]


@each_block
@pytest.mark.needs("kernels")
def test_no_wide_array_lies_between(block):
    model, x = block("float16"), draw("x", (ROWS, block.inputs), "float16")
    assert arrays_between(model, x, "f16", "f32") == []
    assert arrays_between(partial(block.unfused, model, out_dtype=jnp.float16), x, "f16", "f32") != []


TEXT = np.frombuffer((Path(__file__).resolve().parents[2] / "LICENSE").read_bytes(), np.uint8)
STEPS, BATCH, CONTEXT, WIDTH, EMBEDDING = 200, 64, 8, 64, 16
SEEDS = 3


class NextByte(flax.nnx.Module):
    """A perceptron that predicts a byte from those before it."""

    def __init__(self, seed):
        linear = partial(flax.nnx.Linear, dtype=jnp.bfloat16, rngs=(rngs := flax.nnx.Rngs(seed)))
        self.embed = flax.nnx.Embed(256, EMBEDDING, rngs=rngs)
        self.up, self.middle = linear(CONTEXT * EMBEDDING, WIDTH), linear(WIDTH, WIDTH)
        self.head = linear(WIDTH, 256)

    def __call__(self, context):
        x = self.embed(context).reshape(len(context), -1)
        return self.head(flax.nnx.gelu(self.middle(flax.nnx.gelu(self.up(x))))).astype(jnp.float32)


@partial(jax.jit, static_argnums=0)
def losses(definition, parameters, windows):
    adam = optax.adam(3e-3)

    def step(carry, windows):
        parameters, state = carry

        def loss(parameters):
            logits = flax.nnx.merge(definition, parameters)(windows[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, -1]).mean()

        value, gradient = jax.value_and_grad(loss)(parameters)
        updates, state = adam.update(gradient, state, parameters)
        return (optax.apply_updates(parameters, updates), state), value

    return jax.lax.scan(step, (parameters, adam.init(parameters)), windows)[1]


def last_tenth(change, seed):
    """The mean loss of the last steps of a model that starts from this seed, with what `change` makes of its layers."""
    model = NextByte(seed)
    if change:
        change(model)
    starts = np.random.default_rng(seed).integers(0, len(TEXT) - CONTEXT, (STEPS, BATCH, 1))
    windows = TEXT[starts + np.arange(CONTEXT + 1)].astype(np.int32)
    return losses(*flax.nnx.split(model), windows)[-STEPS // 10 :].mean()


# Over 16 seeds, the losses in bfloat16 have a standard deviation of 1.7 % (2.21 to 2.34). Those in float8 are 0.16 %
# above them in the mean, with a standard deviation of 0.13 %, so of three seeds 0.08 %; each three of them stayed below
# 0.23 %. The bound is what a whole model is allowed, and far less than what a seed does.
@pytest.mark.long
def test_losses_are_those_of_bfloat16():
    runs = [[last_tenth(change, seed) for seed in range(SEEDS)] for change in (None, jaxnorm.float8_linears)]
    wide, float8 = np.array(runs)
    assert (wide < 0.6 * np.log(256)).all()  # it learns
    assert abs(float8.mean() / wide.mean() - 1) <= 0.003
    assert wide.min() <= float8.mean() <= wide.max()
