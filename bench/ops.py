"""The ops of `bench gpu`: what each is called, its shapes, and the module that has its programs and their check."""

import jax.numpy as jnp

from bench import programs, quantized, shapes

OPS = (*programs.OPS, *quantized.NORMS)
SUITES = (*shapes.suites(4), "variants")


def module_of(kind):
    """`bench.programs` or what has functions of the same names: operands, programs, moved and check."""
    return quantized if kind.partition(", ")[0] in quantized.NORMS else programs


def suites_of(op, dtype):
    """(kind, shape) of each cell, by suite. A variant is another kind: "rms_quantized, int8"."""
    itemsize = jnp.dtype(dtype).itemsize
    if op not in quantized.NORMS:
        suites = (shapes.added_suites if op in programs.ADDED_NORMS else shapes.suites)(itemsize)
        return {suite: [(op, shape) for shape in table] for suite, table in suites.items()}
    table = shapes.quantized_suites(itemsize)
    suites = {suite: [(op, shape) for shape in table[suite]] for suite in ("grid", "small")}
    if dtype == "bfloat16":  # one dtype for all variants: they differ in what is written
        suites["variants"] = [(f"{op}, {name}", shape) for name in quantized.VARIANTS for shape in table["variants"]]
    return suites
