"""The ops of `bench gpu` and `bench cpu`: what each is called, its shapes, and the module with programs and check."""

import jax.numpy as jnp

from bench import activations, gated, heads, programs, quantized, shapes, softmax

# "gated" and "heads" are of several kinds or of shapes of their own; the others are kinds.
OPS = (*(op for op in programs.OPS if op != programs.PADDED), *quantized.NORMS, "gated", "heads")
CPU_OPS = (*OPS, *softmax.OPS, activations.KIND)  # on a GPU `bench rows` and `bench activations` measure those
SUITES = (*shapes.suites(4), "variants")


def module_of(kind):
    """`bench.programs` or what has functions of the same names: operands, programs, moved and check."""
    if kind in gated.VARIANTS:
        return gated
    if kind == heads.KIND:
        return heads
    if kind == activations.KIND:
        return activations
    if kind in softmax.KINDS:
        return softmax
    return quantized if kind.partition(", ")[0] in quantized.NORMS else programs


def suites_of(op, dtype):
    """(kind, shape) of each cell, by suite. A variant is another kind: "rms_quantized, int8"."""
    itemsize = jnp.dtype(dtype).itemsize
    if op == "gated":
        return _gated_suites(itemsize)
    if op == "heads":
        return {"models": [(heads.KIND, shape) for shape in shapes.PER_HEAD]}
    if op not in quantized.NORMS:
        tables = (shapes.added_suites if op in programs.ADDED_NORMS else shapes.suites)(itemsize)
        suites = {suite: [(op, shape) for shape in table] for suite, table in tables.items()}
        if op == "add_rms":
            suites["models"].append((programs.PADDED, shapes.PADDED))
        return suites
    table = shapes.quantized_suites(itemsize)
    suites = {suite: [(op, shape) for shape in table[suite]] for suite in ("grid", "small", "odd")}
    if dtype == "bfloat16":  # one dtype for all variants: they differ in what is written
        suites["variants"] = [(f"{op}, {name}", shape) for name in quantized.VARIANTS for shape in table["variants"]]
    return suites


def _gated_suites(itemsize):
    """Either order on the grid, and each model with its own; the gate of a Mamba2 comes first."""
    table = shapes.gated_suites(itemsize)
    models = [(kind, shape) for shape in table["models"] for kind in (gated.PLAIN, gated.GROUPED)]
    return {
        "grid": [(kind, shape) for kind in (gated.PLAIN, gated.LAST) for shape in table["grid"]],
        "models": [*models, (gated.LAST, shapes.QWEN3_NEXT)],
        "small": [(gated.PLAIN, shape) for shape in table["small"]],
        "odd": [(kind, shape) for kind in (gated.PLAIN, gated.LAST) for shape in table["odd"]],
    }
