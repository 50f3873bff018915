"""The ops of `bench gpu` and `bench cpu`, by what their options call them: their kinds and shapes."""

import jax.numpy as jnp

from bench import norms, others, shapes

KINDS = norms.OPS | others.OPS
# "gated" and "heads" are of several kinds or of shapes of their own; the others are kinds.
NORMS = (*norms.NORMS, *norms.ADDED, *norms.QUANTIZED, "gated", "heads")
# Which have no shapes but those of models.
OF_MODELS = {
    "cross_entropy": shapes.VOCABULARIES,
    "qk_norm_rotary": shapes.ROTARY,
    "qkv_norm_rotary": shapes.ROTARY,
    "group_norm": shapes.IMAGES,
    "gated_activation": shapes.GATES,
    "gated_activation_quantized": shapes.GATES,
    "quantize": shapes.ROUNDED,
    "float8_linear": shapes.ROUNDED,
    "embedding": shapes.TABLES,
    "segment_sum": (shapes.SEGMENTED,),
}
LOGITS = ("softmax", "log_softmax")
OPS = (*NORMS, *LOGITS, *OF_MODELS)
CPU_OPS = (*NORMS, *LOGITS, "cross_entropy", "gated_activation", "embedding", "segment_sum")
SUITES = ("grid", "models", "small", "odd", "variants")
GATED_COLS = 16_384  # the longest row of a gated norm that a kernel holds


def suites_of(op, dtype):
    """(kind, shape) of each cell, by suite. All arrays of "grid" are of one size, those of "small" stay in the cache.

    A variant is another kind: "rms_quantized, int8".
    """
    if op in OF_MODELS:
        return _of_models(op)
    if op == "heads":
        return {"models": [(norms.HEADS, shape) for shape in shapes.PER_HEAD]}
    itemsize = jnp.dtype(dtype).itemsize
    if op in LOGITS:
        return _of_logits(op, itemsize)
    grid, gated = shapes.grid(itemsize), op == "gated"

    def cells(table, *kinds):
        return [(kind, shape) for kind in kinds for shape in table if not gated or shape.cols <= GATED_COLS]

    kinds = (norms.GATED, norms.GATE_LAST) if gated else (op,)
    suites = {"grid": cells(grid, *kinds), "models": []}
    suites |= {"small": cells(shapes.DECODE, kinds[0]), "odd": cells(shapes.LARGE_ODD, *kinds)}
    if gated:  # each model with its own; the gate of a Mamba2 comes first
        suites["models"] = cells(shapes.MAMBA2, norms.GATED, norms.GROUPED)
        suites["models"] += [(norms.GATE_LAST, shapes.QWEN3_NEXT)]
    elif op in norms.ADDED:
        suites["models"] = cells(shapes.STREAMS, op)
        suites["models"] += [(norms.PADDED, shapes.PADDED)] if op == "add_rms" else []
    elif op not in norms.QUANTIZED:
        suites["models"] = cells(shapes.MODELS + shapes.LARGE_MODELS, op)
    elif dtype == "bfloat16":  # one dtype for all variants: they differ in what is written
        variants = (f"{op}, {name}" for name in norms.QUANTIZATIONS)
        suites["variants"] = cells([shape for shape in grid if shape.cols in (4096, 8192)], *variants)
    return suites


def kinds_of(op):
    """An op, or those of an op that has several."""
    return [kind for kind in KINDS if op in (kind, kind.partition(", ")[0])]


def _of_models(op):
    """Decoded tokens are in the cache in earnest, too."""
    suites = {"models": [], "small": []}
    for kind in kinds_of(op):
        for shape in OF_MODELS[op]:
            is_small = shape.name.startswith("a token") and op.endswith("rotary")
            suites["small" if is_small else "models"].append((kind, shape))
    return suites


def _of_logits(op, itemsize):
    grid = shapes.grid(itemsize, lengths=tuple(sorted({*shapes.GRID_COLS, 32_768, 131_072})))
    odd = shapes.grid(itemsize, lengths=(1001, 4097, 50_257))
    suites = {
        "grid": [(op, shape) for shape in grid],
        "odd": [(op, shape._replace(name=f"odd {shape.cols}")) for shape in odd],
    }
    if op == "softmax":
        suites["models"] = [(others.CAUSAL, shapes.HEADS_OF_SCORES)]
        suites["models"] += [(kind, shapes.CACHED_SCORES) for kind in others.WINDOWS]
    return suites
