"""Device time of qk_norm_rotary on one NVIDIA GPU, beside XLA's code for the formula and a copy, in one run.

    python -m bench rotary --out bench/results/h200_rotary

As `bench.beside_xla` says: 2 arrays of queries and of keys are moved forward, and 5 with all gradients ("step"). A
token is decoded from the cache, so its arrays are not read from memory and have no copy.
"""

import jax
import jax.numpy as jnp

import jaxnorm
from bench import beside_xla
from bench.beside_xla import add_arguments as add_arguments

# (sequences, tokens, heads of queries, heads of keys, head size)
SHAPES = {
    "Llama 3 8B": (4, 2048, 32, 8, 128),
    "Llama 3 70B": (2, 2048, 64, 8, 128),
    "Gemma 3 12B": (4, 2048, 16, 8, 256),
    "heads of 64": (8, 2048, 32, 8, 64),
    "a token of 4": (4, 1, 32, 8, 128),
    "a token of 64": (64, 1, 32, 8, 128),
}


def operands(shape, dtype, seed):
    """q, k, their scales, the positions, and the cotangents of both results."""
    batch, tokens, *heads, size = shape
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), 4)
    pairs = zip(keys, [*heads, *heads], strict=True)
    q, k, dq, dk = (jax.random.normal(key, (batch, tokens, n, size), dtype) for key, n in pairs)
    scales = tuple(1 + jnp.sin(i + jnp.arange(float(size))) / 2 for i in range(2))
    return q, k, scales, jnp.arange(tokens), (dq, dk)


def programs(implementation):
    """By name: a function of the operands."""

    def forward(q, k, scales, positions, _):
        return jaxnorm.qk_norm_rotary(q, k, *scales, positions, implementation=implementation)

    def step(q, k, scales, positions, cotangents):
        results, pull = jax.vjp(lambda q, k, scales: forward(q, k, scales, positions, None), q, k, scales)
        return results, pull(cotangents)

    return {"forward": forward, "step": step}


def elements(shape):
    batch, tokens, queries, keys, size = shape
    return batch * tokens * (queries + keys) * size


def text(shape):
    batch, tokens, queries, keys, size = shape
    return f"{batch}x{tokens}x({queries}+{keys})x{size}"


SUBJECT = beside_xla.Subject(
    "qk_norm_rotary", SHAPES, operands, programs, elements, text, is_cached=lambda shape: shape[1] == 1
)


def main(args):
    beside_xla.measure(SUBJECT, args)
