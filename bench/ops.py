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
    "float8_linear": shapes.ROUNDED,
}
LOGITS = ("softmax", "log_softmax")
OPS = (*NORMS, *LOGITS, *OF_MODELS)
CPU_OPS = (*NORMS, *LOGITS, "cross_entropy", "gated_activation")
SUITES = (*shapes.suites(4), "variants")


def suites_of(op, dtype):
    """(kind, shape) of each cell, by suite. A variant is another kind: "rms_quantized, int8"."""
    itemsize = jnp.dtype(dtype).itemsize
    if op in OF_MODELS:
        return _of_models(op)
    if op in LOGITS:
        return _of_logits(op, itemsize)
    if op == "gated":
        return _gated_suites(itemsize)
    if op == "heads":
        return {"models": [(norms.HEADS, shape) for shape in shapes.PER_HEAD]}
    if op not in norms.QUANTIZED:
        tables = (shapes.added_suites if op in norms.ADDED else shapes.suites)(itemsize)
        suites = {suite: [(op, shape) for shape in table] for suite, table in tables.items()}
        if op == "add_rms":
            suites["models"].append((norms.PADDED, shapes.PADDED))
        return suites
    table = shapes.quantized_suites(itemsize)
    suites = {suite: [(op, shape) for shape in table[suite]] for suite in ("grid", "small", "odd")}
    if dtype == "bfloat16":  # one dtype for all variants: they differ in what is written
        variants = [f"{op}, {name}" for name in norms.QUANTIZATIONS]
        suites["variants"] = [(kind, shape) for kind in variants for shape in table["variants"]]
    return suites


def _of_models(op):
    """Decoded tokens are in the cache in earnest, too."""
    suites = {"models": [], "small": []}
    for kind in [op] if op in KINDS else [f"{op}, {way}" for way in others.ROUNDINGS]:
        for shape in OF_MODELS[op]:
            is_small = shape.name.startswith("a token") and op.endswith("rotary")
            suites["small" if is_small else "models"].append((kind, shape))
    return suites


def _of_logits(op, itemsize):
    table = {"grid": shapes.logits_grid(itemsize), "odd": shapes.odd_logits(itemsize)}
    suites = {suite: [(op, shape) for shape in of] for suite, of in table.items()}
    if op == "softmax":
        suites["models"] = [(others.CAUSAL, shapes.HEADS_OF_SCORES)]
        suites["models"] += [(kind, shapes.CACHED_SCORES) for kind in others.WINDOWS]
    return suites


def _gated_suites(itemsize):
    """Either order on the grid, and each model with its own; the gate of a Mamba2 comes first."""
    table = shapes.gated_suites(itemsize)
    either = (norms.GATED, norms.GATE_LAST)
    models = [(kind, shape) for shape in table["models"] for kind in (norms.GATED, norms.GROUPED)]
    return {
        "grid": [(kind, shape) for kind in either for shape in table["grid"]],
        "models": [*models, (norms.GATE_LAST, shapes.QWEN3_NEXT)],
        "small": [(norms.GATED, shape) for shape in table["small"]],
        "odd": [(kind, shape) for kind in either for shape in table["odd"]],
    }
