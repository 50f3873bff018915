"""Device time of qk_norm_rotary on one NVIDIA GPU, beside XLA's code for the formula and a copy, in one run.

    python -m bench rotary --out bench/results/h200_rotary

Kernel time comes from CUPTI and is the median of many calls, of arrays that are read from memory. "copy us" is what
XLA's `x + 1` takes for as many bytes: 2 arrays of queries and of keys forward, and 5 with all gradients ("step"). A
token is decoded from the cache, so its arrays are not read from memory and have no copy. With --default the programs
are those of `implementation=None`, else of "native".
"""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp

import jaxnorm
from bench import report
from bench.rows import copy_rate
from bench.timing import device_time, sets_needed

# (sequences, tokens, heads of queries, heads of keys, head size)
SHAPES = {
    "Llama 3 8B": (4, 2048, 32, 8, 128),
    "Llama 3 70B": (2, 2048, 64, 8, 128),
    "Gemma 3 12B": (4, 2048, 16, 8, 256),
    "heads of 64": (8, 2048, 32, 8, 64),
    "a token of 4": (4, 1, 32, 8, 128),
    "a token of 64": (64, 1, 32, 8, 128),
}


def add_arguments(parser):
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--iterations", type=int, default=20, help="calls of each program")
    parser.add_argument("--default", action="store_true", help="what runs by default")
    parser.add_argument("--commit", help="what is measured, where there is no git (default: the checkout's)")


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


def measured(shape, dtype, implementation, iterations):
    """The device time of each program."""
    batch, tokens, queries, keys, size = shape
    nbytes = batch * tokens * (queries + keys) * size * jnp.dtype(dtype).itemsize
    sets = [operands(shape, dtype, seed) for seed in range(1 if tokens == 1 else sets_needed(2 * nbytes, 2 * nbytes))]
    return {name: device_time(jax.jit(program), sets, iterations) for name, program in programs(implementation).items()}


def rows_of(name, dtype, implementation, iterations):
    batch, tokens, queries, keys, size = shape = SHAPES[name]
    time_of = functools.partial(measured, shape, dtype, iterations=iterations)
    ours, xla = time_of(implementation=implementation), time_of(implementation="jnp")
    array = batch * tokens * (queries + keys) * size * jnp.dtype(dtype).itemsize
    for way, time in ours.items():
        moved = {"forward": 2, "step": 5}[way] * array
        yield {
            "op": f"qk_norm_rotary {way}",
            "dtype": dtype,
            "shape": f"{name}, {batch}x{tokens}x({queries}+{keys})x{size}",
            "us": 1e6 * time.seconds,
            "kernels": len(time.kernels),
            "copy us": None if tokens == 1 else 1e6 * moved / copy_rate(moved, iterations),
            "XLA us": 1e6 * xla[way].seconds,
            "XLA kernels": len(xla[way].kernels),
            "x XLA": xla[way].seconds / time.seconds,
        }


def main(args):
    header, rows = report.device(args.commit), []
    for name in SHAPES:
        for dtype in args.dtypes:
            rows += rows_of(name, dtype, None if args.default else "native", args.iterations)
            report.write(header, rows, args.out)  # after each: a run that is cut off keeps the others
