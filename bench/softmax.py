"""What `bench.programs` has, of softmax and cross-entropy: what to time, and the check that comes first.

A kind is an op of `bench.rows`, which has the functions, ours and XLA's, their operands and what they move.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from bench import rows as table
from bench.programs import TOLERANCE, each_direction, jitted, relative_error, sampled_rows
from bench.rows import CAUSAL, LOSS, WINDOWS

KINDS = tuple(kind for kind in table.FUNCTIONS if kind not in WINDOWS)
OPS = tuple(kind for kind in KINDS if kind != CAUSAL)
CHECKED = "step"


def moved(kind, dtype, rows, cols):
    """How many bytes each program reads or writes once, by direction."""
    return table.moved(table.Cell(kind, dtype, (rows, cols)))


def operands(kind, dtype, rows, cols, seed=0):
    """x, of a loss (logits, labels); no weights; and dy."""
    *x, dy = table.operands(table.Cell(kind, dtype, (rows, cols)), seed)
    return tuple(x) if kind == LOSS else x[0], (), dy


def norm_of(kind, implementation):
    """The op as a function of x."""
    function = table.FUNCTIONS[kind](implementation)
    return (lambda pair: function(*pair)) if kind == LOSS else function


@functools.cache
def functions(kind, implementation):
    """Each program as one jitted function, as `bench.programs.functions` has them. Labels have no gradient."""
    return jitted(norm_of(kind, implementation), lambda dx: jax.tree.leaves(dx)[0])


def programs(kind, implementation, x, weights, dy):
    """The `Program` of each direction. XLA's backward starts from what its forward keeps: that is faster here."""
    return each_direction(functions(kind, implementation), "native", x, weights, dy)


def check(kind, x, weights, dy, step=None):
    """The largest error of sampled rows of y and dx, relative to its tolerance.

    `step` is the program to check; jaxnorm's own if it is not given.
    """
    y, (dx, _) = (step or functions(kind, "native")["step"])(x, weights, dy)
    x, *labels = x if kind == LOSS else (x,)
    rows = jax.device_get(_samples({"x": x, "dy": dy, "y": y, "dx": dx, "row": jnp.arange(len(x))}, labels))
    tolerances = {"y": TOLERANCE[y.dtype.name], "dx": TOLERANCE[dx.dtype.name]}
    exact = _reference(kind, **{name: array for name, array in rows.items() if name != "dx"})
    return max(relative_error(rows[name], exact[name]) / tolerance for name, tolerance in tolerances.items())


@jax.jit
def _samples(arrays, labels):
    return sampled_rows(arrays | ({"label": labels[0]} if labels else {}))


def _reference(kind, x, dy, y, row, label=None):
    """y and dx of whole rows in float64; the gradient of softmax is that of y as it was rounded."""
    x, dy, cols = np.float64(x), np.float64(dy), np.arange(x.shape[1])
    if kind == CAUSAL:
        x = np.where(cols <= row[:, None], x, -np.inf)
    x = x - x.max(1, keepdims=True)
    lse = np.log(np.exp(x).sum(1, keepdims=True))
    p = np.exp(x - lse)
    if kind == LOSS:
        is_label = cols == label[:, None]
        return {"y": lse[:, 0] - x[is_label], "dx": dy[:, None] * (p - is_label)}
    if kind == "log_softmax":
        return {"y": x - lse, "dx": dy - p * dy.sum(1, keepdims=True)}
    y = np.float64(y)
    return {"y": p, "dx": y * (dy - (dy * y).sum(1, keepdims=True))}
