"""Device time of gated_activation with silu on one NVIDIA GPU, beside XLA's code for the formula and a copy, in one run.

    python -m bench activations --out bench/results/h200_activations

As `bench.beside_xla` says: x, which has both halves of each row, is read and y, half as large, written, and with the
gradient ("step") x read again, dy read and dx written.
"""

import math

import jax

import jaxnorm
from bench import beside_xla
from bench.beside_xla import add_arguments as add_arguments

# (tokens, columns of the result)
SHAPES = {
    "Llama 3 8B": (8192, 14336),
    "Llama 3 70B": (4096, 28672),
    "Gemma 2 2B": (8192, 9216),
    "an expert of Qwen3 30B-A3B": (65536, 768),
    "odd columns": (8192, 10001),
    "a token of 32": (32, 14336),
}


def operands(shape, dtype, seed):
    """x and dy."""
    tokens, cols = shape
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), 2)
    return tuple(jax.random.normal(key, (tokens, n), dtype) for key, n in zip(keys, (2 * cols, cols), strict=True))


def programs(implementation):
    """By name: a function of the operands."""

    def forward(x, _):
        return jaxnorm.gated_activation(x, implementation=implementation)

    def step(x, dy):
        y, pull = jax.vjp(lambda x: forward(x, None), x)
        return y, *pull(dy)

    return {"forward": forward, "step": step}


def text(shape):
    return "x".join(map(str, shape))


SUBJECT = beside_xla.Subject(
    "gated_activation", SHAPES, operands, programs, math.prod, text, arrays={"forward": 3, "step": 8}
)


def main(args):
    beside_xla.measure(SUBJECT, args)
