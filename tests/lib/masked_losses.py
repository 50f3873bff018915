"""Losses of which a mask, a label or a weight hides something, and what it hides: for law 11."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxnorm

IMPLEMENTATIONS, IGNORED = ("native", "xla"), -100


@dataclass(frozen=True, eq=False)
class Case:
    function: Callable[..., Any]  # of operands, and of an implementation
    dims: tuple[tuple[int, ...], ...]  # those of the operands
    hidden: tuple[Any, ...]  # where each is hidden
    hidden_results: Any = False
    implementations: tuple[str, ...] = IMPLEMENTATIONS


# Of each row something else, of one nothing, of another all but one place.
ROWS, COLS = 5, 7
WHERE = np.random.default_rng(1).random((ROWS, COLS)) < 0.6
WHERE[:, 0] = True
WHERE[1] = False
WHERE[2] = np.arange(COLS) == 3
LABELS = jnp.asarray([0, 2, 3, 0, 0])  # classes that count, but in the row of which nothing does


def cross_entropy(where=None, labels=LABELS, *, has_scale=False, **options):
    """With a scale that is an array, if it has one; for half types that has no kernel."""
    hidden = np.zeros((ROWS, COLS), bool) if where is None else ~where
    ignored = np.asarray(labels) == options.get("ignore_index")
    of_logits = partial(jaxnorm.softmax_cross_entropy_with_integer_labels, labels=labels, where=where, **options)

    def function(x, *scale, implementation):
        return of_logits(x, implementation=implementation, **({"logit_scale": scale[0]} if scale else {}))

    hidden, results = hidden | ignored[:, None], ignored | (hidden | ignored[:, None]).all(-1)
    if has_scale:
        return Case(function, ((ROWS, COLS), ()), (hidden, False), results, (None, "xla"))
    return Case(function, ((ROWS, COLS),), (hidden,), results)


HALF_IGNORED = jnp.asarray([0, IGNORED, 3, IGNORED, 5])
SOME_IGNORED, SMOOTH = {"labels": HALF_IGNORED, "ignore_index": IGNORED}, {"label_smoothing": 0.2, "z_loss": 0.1}


# A row of weight 0, and classes of which one is a label and does not count.
ZERO = np.arange(ROWS) == 2
OF_CLASSES = (np.arange(COLS) != 1) & (np.arange(COLS) != 5)
OF_ROWS = np.roll(WHERE, -1, 0)  # the first row has no class
WHICH_ROWS = np.arange(ROWS) > 0


def linear(reduction, where=None, *, vmapped=False, depth=6, **options):
    """With a mask also all else that a call may have; of what gives logsumexp that alone."""

    def function(x, kernel, *others, implementation):
        given = {"ignore_index": IGNORED, "reduction": reduction, "implementation": implementation, **options}
        if others:
            bias, weights, scale = others
            given |= {"bias": bias, "where": where, "row_weights": jnp.where(ZERO, 0, weights), "logit_scale": scale}

        def of_rows(x):
            found = jaxnorm.linear_cross_entropy(x, kernel, HALF_IGNORED, **given)
            return found[1] if "return_logsumexp" in options else found

        return jax.vmap(of_rows)(x) if vmapped else of_rows(x)

    labels, counts = np.asarray(HALF_IGNORED), np.ones((ROWS, COLS), bool)
    counts &= True if where is None else where[:, None] if where.shape == (ROWS,) else where
    has_no_weight = (labels == IGNORED) if where is None else ZERO | (labels == IGNORED)
    is_out = has_no_weight | ~counts.any(-1)
    is_unread = (is_out[:, None] | ~(counts | (np.arange(COLS) == labels[:, None]))).all(0)
    dims = ((2,) * vmapped + (ROWS, depth), (depth, COLS), (COLS,), (ROWS,), ())
    hidden = np.broadcast_to(is_out[:, None], dims[0]), np.broadcast_to(is_unread, dims[1]), is_unread, has_no_weight
    count = 2 if where is None else 5
    return Case(function, dims[:count], (*hidden, False)[:count], reduction == "none" and is_out)


LOSSES = {
    "loss, where": cross_entropy(WHERE),
    "loss, where and soft_cap": cross_entropy(WHERE, soft_cap=3.0, logit_scale=-0.5),
    "loss, where and a traced scale": cross_entropy(WHERE, has_scale=True, soft_cap=3.0),
    "loss, where and smoothing": cross_entropy(WHERE, **SMOOTH),
    "loss, ignored rows": cross_entropy(**SOME_IGNORED),
    "loss, ignored rows and all": cross_entropy(WHERE | (np.arange(COLS) == 5), **SOME_IGNORED, soft_cap=3.0, **SMOOTH),
    "linear, mean": linear("mean"),
    "linear, sum": linear("sum", soft_cap=3.0, **SMOOTH),
    "linear, none": linear("none"),
    "linear, mean of chunks": linear("mean", rows_per_chunk=2),
    "linear, none of chunks": linear("none", rows_per_chunk=2),
    "linear, mean of examples' chunks": linear("mean", vmapped=True, rows_per_chunk=2),
    **{
        f"linear, {of} of all, where of {name}": linear(of.replace("logsumexp", "none"), where, **given)
        for name, where in {"classes": OF_CLASSES, "rows": OF_ROWS, "labels": WHICH_ROWS}.items()
        for of, given in {
            "mean": {"rows_per_chunk": 2},
            "sum": {"soft_cap": 3.0, **SMOOTH},
            "none": {"rows_per_chunk": 2},
            "logsumexp": {"rows_per_chunk": 2, "return_logsumexp": True, "soft_cap": 3.0},
        }.items()
    },
}
