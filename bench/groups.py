"""Device time of group_norm with silu on one NVIDIA GPU, beside XLA's code for the formula and a copy, in one run.

    python -m bench groups --out bench/results/h200_groups

As `bench.beside_xla` says: x is read and y written, and with all gradients ("step") x read again, dy read and dx
written.
"""

import math

import jax
import jax.numpy as jnp

import jaxnorm
from bench import beside_xla
from bench.beside_xla import add_arguments as add_arguments

# (examples, positions..., channels), of 32 groups, or of as many channels as they have. The first three are the
# largest.
SHAPES = {
    "high": (8, 256, 256, 128),
    "middle": (8, 128, 128, 256),
    "low": (8, 64, 64, 512),
    "one image": (1, 512, 512, 128),
    "bottom": (2, 32, 32, 1280),
    "many": (64, 16, 16, 640),
    "odd channels": (8, 64, 64, 63),
}


def operands(shape, dtype, seed):
    """x, scale, bias and dy."""
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), 2)
    x, dy = (jax.random.normal(key, shape, dtype) for key in keys)
    scale, bias = (1 + jnp.sin(i + jnp.arange(float(shape[-1]))) / 2 for i in range(2))
    return x, scale, bias, dy


def programs(implementation):
    """By name: a function of the operands."""

    def forward(x, scale, bias, _):
        groups = math.gcd(32, x.shape[-1])
        return jaxnorm.group_norm(x, scale, bias, num_groups=groups, activation="silu", implementation=implementation)

    def step(x, scale, bias, dy):
        y, pull = jax.vjp(lambda *arrays: forward(*arrays, None), x, scale, bias)
        return y, pull(dy)

    return {"forward": forward, "step": step}


def text(shape):
    return "x".join(map(str, shape))


SUBJECT = beside_xla.Subject("group_norm", SHAPES, operands, programs, math.prod, text)


def main(args):
    beside_xla.measure((SUBJECT,), args)
