"""Losses of which a mask, a label or a weight hides something, and what it hides: for law 11."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxnorm

IMPLEMENTATIONS = ("native", "jnp")
IGNORED = -100


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


def cross_entropy(where=None, labels=LABELS, **options):
    hidden = np.zeros((ROWS, COLS), bool) if where is None else ~where
    ignored = np.asarray(labels) == options.get("ignore_index")
    function = partial(jaxnorm.softmax_cross_entropy_with_integer_labels, labels=labels, where=where, **options)
    hidden = hidden | ignored[:, None]
    return Case(function, ((ROWS, COLS),), (hidden,), ignored | hidden.all(-1))


HALF_IGNORED = jnp.asarray([0, IGNORED, 3, IGNORED, 5])


def linear(reduction, *, vmapped=False, depth=6, **options):
    def function(x, kernel, implementation):
        of_rows = partial(
            jaxnorm.linear_cross_entropy,
            labels=HALF_IGNORED,
            ignore_index=IGNORED,
            reduction=reduction,
            implementation=implementation,
            **options,
        )
        return jax.vmap(of_rows, (0, None))(x, kernel) if vmapped else of_rows(x, kernel)

    ignored = np.asarray(HALF_IGNORED) == IGNORED
    lead = (2,) * vmapped
    hidden = np.broadcast_to(ignored[:, None], (*lead, ROWS, depth))
    return Case(function, ((*lead, ROWS, depth), (depth, COLS)), (hidden, False), reduction == "none" and ignored)


# With all that a call may have: a row of weight 0, and classes of which one is a label and does not count.
ZERO = np.arange(ROWS) == 2
OF_CLASSES = (np.arange(COLS) != 1) & (np.arange(COLS) != 5)
OF_ROWS = np.roll(WHERE, -1, 0)  # the first row has no class


def linear_of_all(reduction, where, *, depth=6, **options):
    def function(x, kernel, bias, weights, scale, implementation):
        return jaxnorm.linear_cross_entropy(
            x,
            kernel,
            HALF_IGNORED,
            bias=bias,
            where=where,
            weights=jnp.where(ZERO, 0, weights),
            logit_scale=scale,
            reduction=reduction,
            ignore_index=IGNORED,
            implementation=implementation,
            **options,
        )

    labels, counts = np.asarray(HALF_IGNORED), np.broadcast_to(where, (ROWS, COLS))
    has_no_weight = ZERO | (labels == IGNORED)
    is_out = has_no_weight | ~counts.any(-1)
    is_unread = (is_out[:, None] | ~(counts | (np.arange(COLS) == labels[:, None]))).all(0)
    dims = (ROWS, depth), (depth, COLS), (COLS,), (ROWS,), ()
    hidden = np.broadcast_to(is_out[:, None], dims[0]), np.broadcast_to(is_unread, dims[1]), is_unread, has_no_weight
    return Case(function, dims, (*hidden, False), reduction == "none" and is_out)


LOSSES = {
    "loss, where": cross_entropy(WHERE),
    "loss, where and soft_cap": cross_entropy(WHERE, soft_cap=3.0, logit_scale=-0.5),
    "loss, where and smoothing": cross_entropy(WHERE, label_smoothing=0.2, z_loss=0.1),
    "loss, ignored rows": cross_entropy(labels=HALF_IGNORED, ignore_index=IGNORED),
    "loss, ignored rows and all": cross_entropy(
        WHERE | (np.arange(COLS) == 5),
        HALF_IGNORED,
        ignore_index=IGNORED,
        soft_cap=3.0,
        label_smoothing=0.2,
        z_loss=0.1,
    ),
    "linear, mean": linear("mean"),
    "linear, sum": linear("sum", z_loss=0.1, label_smoothing=0.2, soft_cap=3.0),
    "linear, none": linear("none"),
    "linear, mean of chunks": linear("mean", rows_per_chunk=2),
    "linear, none of chunks": linear("none", rows_per_chunk=2),
    "linear, mean of examples' chunks": linear("mean", vmapped=True, rows_per_chunk=2),
    **{
        f"linear, {reduction} of all, where of {name}": linear_of_all(reduction, where, **given)
        for name, where in {"classes": OF_CLASSES, "rows": OF_ROWS}.items()
        for reduction, given in {
            "mean": {"rows_per_chunk": 2},
            "sum": {"z_loss": 0.1, "label_smoothing": 0.2, "soft_cap": 3.0},
            "none": {"rows_per_chunk": 2},
        }.items()
    },
}
