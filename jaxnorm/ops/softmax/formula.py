"""Softmax and log-softmax in plain jnp: what is static about them, and their formulas.

With z = x * scale, and the sum over the columns that count:

    softmax:      y = exp(z) / sum(exp(z)), 0 where a column does not count
    log-softmax:  y = z - log(sum(exp(z))), -inf where a column does not count

Everything is computed in float32 (float64 where an operand has it), from differences to the row's largest number, and
rounded once, at the end. The derivative of softmax reads y as it was rounded. What is of columns that do not count is
left out before anything is computed with it, and so are its tangents and cotangents.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxnorm.ops.logits import MOST_OF_ROW, LogitScale, exponentials, less_1, of_whole_row, origin_of, sum_over_row
from jaxnorm.ops.mask import Mask, counted, only
from jaxnorm.primitive.op import BatchDims, OnlyX, OnlyY, RowSpec, Statistics


@dataclasses.dataclass(frozen=True, kw_only=True)
class Softmax(RowSpec):
    scale: float
    is_widened: bool = False  # whether x is of a half type, times a traced scale in the compute dtype
    with_top: bool = False  # of log-softmax: whether a statistic is the largest w, and the other relative to that
    window: int | None = None  # how many columns before its length a row has at most

    @property
    def logits(self) -> LogitScale:
        return LogitScale.of(self.scale, self.compute_dtype)


class Operands(NamedTuple):
    x: jax.Array
    where: jax.Array | None = None
    lengths: jax.Array | None = None  # of a row the columns before it count
    starts: jax.Array | None = None  # and of these the columns from it on, in programs of before


class SavedOfSoftmax(NamedTuple):
    y: jax.Array
    lengths: jax.Array | None = None
    where: jax.Array | None = None
    starts: jax.Array | None = None


class SavedOfLog(NamedTuple):
    x: jax.Array
    stats: Statistics  # (the logarithm of the sum of exponentials, the largest w)
    where: jax.Array | None = None
    lengths: jax.Array | None = None
    starts: jax.Array | None = None


def softmax(spec: Softmax, operands: Operands) -> tuple[OnlyY, Statistics]:
    counts, scale = _counts(spec, operands), spec.logits
    e = exponentials(spec, scale, scale.w(_wide(spec, operands.x, counts)), counts)
    # A row in which no column counts is one of zeros; one of nothing but -inf is no number.
    y = only(counts, e.each / jnp.where(e.top == -jnp.inf, 1, e.sum))
    return OnlyY(y.astype(spec.out_dtype)), ()


def _counts(spec: Softmax, arrays: Operands | SavedOfSoftmax | SavedOfLog) -> jax.Array | None:
    return counted(spec, arrays[0], Mask(arrays.where, arrays.lengths, arrays.starts, spec.window))


def _wide(spec: Softmax, v: jax.Array, counts: jax.Array | None) -> jax.Array:
    return only(counts, v.astype(spec.compute_dtype))


def times(spec: Softmax, operands: Operands, scale: jax.Array) -> Operands:
    """With x times a traced scale, in the compute dtype, whose gradient sees no column that does not count."""
    return operands._replace(x=_wide(spec, operands.x, _counts(spec, operands)) * scale.astype(spec.compute_dtype))


def log_softmax(spec: Softmax, operands: Operands) -> tuple[OnlyY, Statistics]:
    counts, scale = _counts(spec, operands), spec.logits
    e = exponentials(spec, scale, scale.w(_wide(spec, operands.x, counts)), counts)
    log_sum = of_whole_row(e.log_sum, e.top)
    y = only(counts, e.differences - log_sum, -jnp.inf)
    stats = (log_sum, e.top) if spec.with_top else (log_sum + scale.unit * origin_of(e.top),)
    return OnlyY(y.astype(spec.out_dtype)), stats


def _derivative(spec: Softmax, saved: SavedOfSoftmax, v: jax.Array) -> jax.Array:
    """The derivative of softmax by x applied to v; it is symmetric, so it serves both directions."""
    counts = _counts(spec, saved)
    y, v = (_wide(spec, array, counts) for array in (saved.y, v))
    return only(counts, spec.scale * y * (v - sum_over_row(spec, v * y)))


def linear(spec: Softmax, saved: SavedOfSoftmax, dots: Any) -> OnlyY:
    return OnlyY(_derivative(spec, saved, dots.x).astype(spec.out_dtype))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def plain(spec: Softmax, operands: Operands) -> OnlyY:
    return softmax(spec, operands)[0]


@plain.defjvp
def _plain_jvp(spec: Softmax, primals: Any, dots: Any) -> tuple[OnlyY, OnlyY]:
    (operands,), (moving,) = primals, dots
    results = plain(spec, operands)
    return results, linear(spec, SavedOfSoftmax(results.y, operands.lengths, operands.where), OnlyX(moving.x))


def backward(
    spec: Softmax, cotangents: OnlyY, saved: SavedOfSoftmax, wanted: OnlyX[Any], _: BatchDims
) -> OnlyX[jax.Array]:
    return OnlyX(_derivative(spec, saved, cotangents.y).astype(wanted.x))


class _Shares(NamedTuple):
    """The logarithms of softmax(x), and which of its elements count."""

    log: jax.Array
    counts: jax.Array | None

    @classmethod
    def of(cls, spec: Softmax, saved: SavedOfLog) -> "_Shares":
        counts, scale = _counts(spec, saved), spec.logits
        log_sum, *rest = saved.stats
        top = rest[0] if rest else None
        differences = scale.differences(scale.w(_wide(spec, saved.x, counts)), top)
        return cls(only(counts, differences - log_sum), counts)


def log_linear(spec: Softmax, saved: SavedOfLog, dots: Any) -> OnlyY:
    p, counts = _Shares.of(spec, saved)
    x_dot = _wide(spec, dots.x, counts)
    y_dot = only(counts, x_dot - sum_over_row(spec, only(counts, jnp.exp(p)) * x_dot))
    return OnlyY((spec.scale * y_dot).astype(spec.out_dtype))


def log_backward(
    spec: Softmax, cotangents: OnlyY, saved: SavedOfLog, wanted: OnlyX[Any], _: BatchDims
) -> OnlyX[jax.Array]:
    p, counts = _Shares.of(spec, saved)
    dy = _wide(spec, cotangents.y, counts)
    dx = only(counts, dy_less_shares(dy, sum_over_row(spec, dy), p))
    return OnlyX((spec.scale * dx).astype(wanted.x))


def dy_less_shares(dy: jax.Array, whole: jax.Array, log_share: jax.Array) -> jax.Array:
    """dy - whole * exp(log_share), of which no digit is lost where dy is close to whole and the share to 1."""
    is_most = log_share > MOST_OF_ROW
    return jnp.where(is_most, dy - whole, dy) - whole * jnp.where(is_most, less_1(log_share), jnp.exp(log_share))
