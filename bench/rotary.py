"""Device time of rotary embedding with its norms on one NVIDIA GPU, beside XLA's code and a copy, in one run.

    python -m bench rotary --out bench/results/h100_rotary

As `bench.beside_xla` says: 2 arrays of queries and of keys are moved forward, and 5 with all gradients ("step"). In
`qkv_norm_rotary` they come with values in one array, of which 2 are moved each way. A token is decoded from the cache,
so its arrays are not read from memory and have no copy.
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


def joint_operands(shape, dtype, seed):
    """As `operands`, with queries, keys and values in one array, and three cotangents."""
    batch, tokens, queries, keys, size = shape
    of_array, of_v = jax.random.split(jax.random.key(seed + 100, impl="rbg"))
    _, _, scales, positions, cotangents = operands(shape, dtype, seed)
    qkv = jax.random.normal(of_array, (batch, tokens, queries + 2 * keys, size), dtype)
    dv = jax.random.normal(of_v, (batch, tokens, keys, size), dtype)
    return qkv, scales, positions, (*cotangents, dv)


def joint_programs(implementation):
    def forward(qkv, scales, positions, cotangents):
        heads, kv_heads = (cotangent.shape[-2] for cotangent in cotangents[:2])
        counts = {"heads": heads, "kv_heads": kv_heads}
        return jaxnorm.qkv_norm_rotary(qkv, *scales, positions, **counts, implementation=implementation)

    def step(qkv, scales, positions, cotangents):
        results, pull = jax.vjp(lambda *moving: forward(*moving, positions, cotangents), qkv, scales)
        return results, pull(cotangents)

    return {"forward": forward, "step": step}


def joint_elements(shape):
    batch, tokens, queries, keys, size = shape
    return batch * tokens * (queries + 2 * keys) * size


def joint_arrays(_, shape):
    *_, queries, keys, _ = shape
    return {"forward": 2, "step": 5 - keys / (queries + 2 * keys)}


def elements(shape):
    batch, tokens, queries, keys, size = shape
    return batch * tokens * (queries + keys) * size


def text(shape):
    batch, tokens, queries, keys, size = shape
    return f"{batch}x{tokens}x({queries}+{keys})x{size}"


SUBJECT = beside_xla.Subject(
    "qk_norm_rotary", SHAPES, operands, programs, elements, text, is_cached=lambda shape: shape[1] == 1
)
JOINT = SUBJECT._replace(
    op="qkv_norm_rotary",
    operands=joint_operands,
    programs=joint_programs,
    elements=joint_elements,
    arrays=joint_arrays,
)


def main(args):
    beside_xla.measure((SUBJECT, JOINT), args)
