"""What cross-entropy with integer labels needs of a row of logits x, in plain jnp.

With z = soft_cap * tanh(x * scale / soft_cap), or z = x * scale without a soft cap, top the largest z, and over the
columns that count:

    log_sum = log(sum(exp(z - top))),   label_logit = z[label] - top,   total = sum(z - top)

Each is a number a row, float32 (float64 of logits of float64), and a loss is made of them by plain arithmetic: of
differences of logits alone, but for its z-loss. top is a result as well, as the w of `ops.logits`; it is any number
to a derivative, for no loss depends on it. A label that names no column has the label_logit 0; one that names a column
that does not count has that of the column. A row with the label IGNORED has no derivative, whatever its logits are.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm.ops.logits import (
    MOST_OF_ROW,
    LogitScale,
    exponentials,
    less_1,
    of_whole_row,
    origin_of,
    sum_over_row,
    top_of,
)
from jaxnorm.ops.mask import Mask, columns, counted, only
from jaxnorm.primitive.op import BatchDims, Dtype, OnlyX, RowSpec, Statistics

IGNORED = -(2**31)  # kernels know it


@dataclasses.dataclass(frozen=True, kw_only=True)
class CrossEntropy(RowSpec):
    scale: float
    soft_cap: float  # 0: there is none
    with_total: bool
    with_top: bool = False  # in programs of before top is 0
    is_part: bool = False  # whether rows may be shards of others
    is_widened: bool = False  # whether x is of a half type, times a traced scale in the compute dtype

    @property
    def logits(self) -> LogitScale:
        return LogitScale.of(self.scale, self.compute_dtype, self.soft_cap)


class Operands(NamedTuple):
    x: jax.Array
    labels: jax.Array  # int32, of x's rank, as are the results
    where: jax.Array | None = None


class Results(NamedTuple):
    log_sum: jax.Array
    # Arrays too; None where they are not wanted, and as cotangents that are zero.
    label_logit: Any = None
    total: Any = None
    top: Any = None


class Saved(NamedTuple):
    x: jax.Array
    labels: jax.Array
    log_sum: jax.Array
    where: jax.Array | None = None
    top: jax.Array | None = None


class _Columns(NamedTuple):
    """What a row's columns are: those that count, the label's, and those of which anything is read."""

    counts: jax.Array | None
    is_label: jax.Array
    are_read: jax.Array | None

    @classmethod
    def of(
        cls, spec: CrossEntropy, x: jax.Array, labels: jax.Array, where: jax.Array | None, top: jax.Array | None
    ) -> "_Columns":
        """`top`: of the whole row, if that is known."""
        counts, is_label = counted(spec, x, Mask(where)), columns(spec, x) == labels
        is_row = labels != IGNORED
        if counts is None:
            return cls(None, is_label, is_row)
        # A label that does not count is read, but of a row in which nothing counts.
        return cls(counts, is_label, is_row & (counts | (is_label if top is None else is_label & (top > -jnp.inf))))

    def wide(self, spec: CrossEntropy, v: jax.Array) -> jax.Array:
        return only(self.are_read, v.astype(spec.compute_dtype))

    def at_label(self, spec: CrossEntropy, v: jax.Array) -> jax.Array:
        return sum_over_row(spec, jnp.where(self.is_label, v, 0))


def forward(spec: CrossEntropy, operands: Operands) -> tuple[Results, Statistics]:
    x, labels, where = operands
    scale = spec.logits
    of = _Columns.of(spec, x, labels, where, None)
    top = top_of(spec, scale.w(of.wide(spec, x)), of.counts)
    of = of if spec.is_part else _Columns.of(spec, x, labels, where, top)
    e = exponentials(spec, scale, scale.w(of.wide(spec, x)), of.counts, top)
    log_sum, differences = e.log_sum, e.differences
    if not spec.with_top:
        log_sum, differences = (v + scale.unit * origin_of(top) for v in (log_sum, differences))
    total = sum_over_row(spec, only(of.counts, differences)) if spec.with_total else None
    return Results(log_sum, of.at_label(spec, differences), total, top if spec.with_top else None), ()


def without(left_out: jax.Array | None, results: Results) -> Results:
    """Rows that are left out, without any class or ignored, have no results, and no derivative."""
    return results if left_out is None else jax.tree.map(lambda v: jnp.where(left_out, 0, v), results)


def log_sum_exp(spec: CrossEntropy, results: Results) -> jax.Array:
    """The logarithm of the sum of the exponentials of all logits, which `results` have beside the largest."""
    beside: jax.Array = spec.logits.unit * lax.stop_gradient(results.top)
    return of_whole_row(results.log_sum, results.top) + beside


def loss(spec: CrossEntropy, results: Results, counts: int | jax.Array, smoothing: float, z_loss: float) -> jax.Array:
    """The losses of rows, of which so many columns count."""
    log_sum, label_logit, total, top = results
    log_sum = of_whole_row(log_sum, top)
    losses: jax.Array = log_sum - (1 - smoothing) * label_logit
    if total is not None:
        losses = losses - smoothing * (total / counts)
    return losses + z_loss * jnp.square(log_sum_exp(spec, results)) if z_loss else losses


class _Shares(NamedTuple):
    """Of a row, what a derivative is made of."""

    columns: _Columns
    log: jax.Array  # the logarithm of softmax
    slope: jax.Array | float  # dz/dx

    @classmethod
    def of(cls, spec: CrossEntropy, saved: Saved) -> "_Shares":
        x, labels, log_sum, where, top = saved
        of, scale = _Columns.of(spec, x, labels, where, None if spec.is_part else top), spec.logits
        x = of.wide(spec, x)
        # A shard that is -inf throughout has no share of anything.
        log_sum = jnp.where(log_sum == -jnp.inf, 0, log_sum)
        log = only(of.counts, scale.differences(scale.w(only(of.counts, x)), top) - log_sum)
        return cls(of, log, scale.slope(x))


def linear(spec: CrossEntropy, saved: Saved, dots: OnlyX[jax.Array]) -> Results:
    assert dots.x is not None
    of, log_share, slope = _Shares.of(spec, saved)
    z_dot = slope * of.wide(spec, dots.x)
    counted_dot = only(of.counts, z_dot)
    return Results(
        sum_over_row(spec, only(of.counts, jnp.exp(log_share)) * counted_dot),
        of.at_label(spec, z_dot),
        sum_over_row(spec, counted_dot) if spec.with_total else None,
        jnp.zeros_like(saved.log_sum) if spec.with_top else None,
    )


def backward(
    spec: CrossEntropy, cotangents: Results, saved: Saved, wanted: OnlyX[Dtype], _: BatchDims
) -> OnlyX[jax.Array]:
    """The gradient of the logits. Of a shard of a row it is that of the whole, by the row's log_sum and top."""
    of, log_share, slope = _Shares.of(spec, saved)
    of_sum, of_label, of_total = cotangents[:3]
    dz = of_sum * jnp.exp(log_share)
    if of_label is not None:
        # They cancel at the label of a row whose loss is small.
        small = of_sum * less_1(log_share) + (of_sum + of_label)
        at_label = jnp.where(log_share > MOST_OF_ROW, small, dz + of_label)
        dz = jnp.where(of.is_label, at_label, dz)
    if of_total is not None:
        dz = dz + of_total
    if of.counts is not None:
        dz = jnp.where(of.counts, dz, 0 if of_label is None else jnp.where(of.is_label, of_label, 0))
    return OnlyX(only(of.are_read, slope * dz).astype(wanted.x))
