"""A small model that is trained in float8 gets where it gets in bfloat16."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxnorm

pytestmark = pytest.mark.jax_version

TEXT = np.frombuffer((Path(__file__).resolve().parents[2] / "LICENSE").read_bytes(), np.uint8)
STEPS, BATCH, CONTEXT, WIDTH, EMBEDDING = 200, 64, 8, 64, 16
SEEDS = 3


class NextByte(nnx.Module):
    """A perceptron that predicts a byte from those before it."""

    def __init__(self, seed):
        linear = partial(nnx.Linear, dtype=jnp.bfloat16, rngs=(rngs := nnx.Rngs(seed)))
        self.embed = nnx.Embed(256, EMBEDDING, rngs=rngs)
        self.up, self.middle = linear(CONTEXT * EMBEDDING, WIDTH), linear(WIDTH, WIDTH)
        self.head = linear(WIDTH, 256)

    def __call__(self, context):
        x = self.embed(context).reshape(len(context), -1)
        return self.head(nnx.gelu(self.middle(nnx.gelu(self.up(x))))).astype(jnp.float32)


@partial(jax.jit, static_argnums=0)
def losses(definition, parameters, windows):
    adam = optax.adam(3e-3)

    def step(carry, windows):
        parameters, state = carry

        def loss(parameters):
            logits = nnx.merge(definition, parameters)(windows[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, -1]).mean()

        value, gradient = jax.value_and_grad(loss)(parameters)
        updates, state = adam.update(gradient, state, parameters)
        return (optax.apply_updates(parameters, updates), state), value

    return jax.lax.scan(step, (parameters, adam.init(parameters)), windows)[1]


def leave(model):
    """The layers stay Flax's."""


def last_tenth(change, seed):
    """The mean loss of the last steps of a model that starts from this seed and is changed before."""
    model = NextByte(seed)
    change(model)
    starts = np.random.default_rng(seed).integers(0, len(TEXT) - CONTEXT, (STEPS, BATCH, 1))
    windows = TEXT[starts + np.arange(CONTEXT + 1)].astype(np.int32)
    return losses(*nnx.split(model), windows)[-STEPS // 10 :].mean()


# Over 16 seeds, the losses in bfloat16 have a standard deviation of 1.7 % (2.21 to 2.34). Those in float8 are 0.16 %
# above them in the mean, with a standard deviation of 0.13 %, so of three seeds 0.08 %; each three of them stayed below
# 0.23 %. The bound is what a whole model is allowed, and far less than what a seed does.
@pytest.mark.long
def test_losses_are_those_of_bfloat16():
    runs = [[last_tenth(change, seed) for seed in range(SEEDS)] for change in (leave, jaxnorm.float8_linears)]
    wide, float8 = np.array(runs)
    assert (wide < 0.6 * np.log(256)).all()  # it learns
    assert abs(float8.mean() / wide.mean() - 1) <= 0.003
    assert wide.min() <= float8.mean() <= wide.max()
