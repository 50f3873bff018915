"""Softmax and log-softmax in plain jnp: what is static about them, and their formulas.

With z = x * scale, and the sum over the columns that count:

    softmax:      y = exp(z) / sum(exp(z)), 0 where a column does not count
    log-softmax:  y = z - log(sum(exp(z))), -inf where a column does not count

Everything is computed in float32 (float64 where an operand has it), from differences to the row's largest number, and
rounded once, at the end. The derivative of softmax reads y as it was rounded.
"""

import dataclasses
import functools
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm.ops.softmax.mask import Mask, counted, exponentials, only, sum_over_row
from jaxnorm.primitive.op import BatchDims, RowSpec, Statistics

Dtype = np.dtype[Any]
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Softmax(RowSpec):
    """What is static about one softmax or log-softmax."""

    scale: float


class Operands(NamedTuple):
    x: jax.Array
    where: jax.Array | None = None
    lengths: jax.Array | None = None  # of a row the columns before it count


class Results(NamedTuple):
    y: jax.Array


class SavedOfSoftmax(NamedTuple):
    y: jax.Array  # 0 where `where` is false
    lengths: jax.Array | None = None


class SavedOfLog(NamedTuple):
    x: jax.Array
    stats: Statistics  # (logsumexp,)
    where: jax.Array | None = None
    lengths: jax.Array | None = None


class Variables(NamedTuple, Generic[T]):
    """What a derivative is taken by, see `Op`."""

    x: T | None = None


def _scaled(spec: Softmax, x: jax.Array) -> jax.Array:
    return x.astype(spec.compute_dtype) * spec.scale


def softmax(spec: Softmax, operands: Operands) -> tuple[Results, Statistics]:
    x, *mask = operands
    e = exponentials(spec, _scaled(spec, x), counted(spec, x, Mask(*mask)))
    # A row in which no column counts is one of zeros.
    y = e.each / jnp.where(e.sum == 0, 1, e.sum)
    return Results(y.astype(spec.out_dtype)), ()


def log_softmax(spec: Softmax, operands: Operands) -> tuple[Results, Statistics]:
    x, *mask = operands
    z, counts = _scaled(spec, x), counted(spec, x, Mask(*mask))
    e = exponentials(spec, z, counts)
    y = only(counts, z - e.top - jnp.log(e.sum), -jnp.inf)
    return Results(y.astype(spec.out_dtype)), (e.logsumexp,)


def _derivative(spec: Softmax, saved: SavedOfSoftmax, v: jax.Array) -> jax.Array:
    """The derivative of softmax by x applied to v; it is symmetric, so it serves both directions."""
    y = saved.y.astype(spec.compute_dtype)
    v = only(counted(spec, y, Mask(lengths=saved.lengths)), v.astype(spec.compute_dtype))
    return spec.scale * y * (v - sum_over_row(spec, v * y))


def linear(spec: Softmax, saved: SavedOfSoftmax, dots: Any) -> Results:
    return Results(_derivative(spec, saved, dots.x).astype(spec.out_dtype))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def plain(spec: Softmax, operands: Operands) -> Results:
    """The result of `softmax`, whose derivative keeps y alone."""
    return softmax(spec, operands)[0]


@plain.defjvp
def _plain_jvp(spec: Softmax, primals: Any, dots: Any) -> tuple[Results, Results]:
    (operands,), (moving,) = primals, dots
    results = plain(spec, operands)
    return results, linear(spec, SavedOfSoftmax(results.y, operands.lengths), Variables(moving.x))


def backward(
    spec: Softmax, cotangents: Results, saved: SavedOfSoftmax, wanted: Variables[Any], _: BatchDims
) -> Variables[jax.Array]:
    return Variables(_derivative(spec, saved, cotangents.y).astype(wanted.x))


def _probabilities(spec: Softmax, saved: SavedOfLog) -> tuple[jax.Array, jax.Array | None]:
    """softmax(x), and which of its elements count."""
    counts = counted(spec, saved.x, Mask(saved.where, saved.lengths))
    (logsumexp,) = saved.stats
    return only(counts, jnp.exp(only(counts, _scaled(spec, saved.x) - logsumexp))), counts


def log_linear(spec: Softmax, saved: SavedOfLog, dots: Any) -> Results:
    p, counts = _probabilities(spec, saved)
    z_dot = spec.scale * only(counts, dots.x.astype(spec.compute_dtype))
    y_dot = only(counts, z_dot - sum_over_row(spec, p * z_dot))
    return Results(y_dot.astype(spec.out_dtype))


def log_backward(
    spec: Softmax, cotangents: Results, saved: SavedOfLog, wanted: Variables[Any], _: BatchDims
) -> Variables[jax.Array]:
    p, counts = _probabilities(spec, saved)
    dy = only(counts, cotangents.y.astype(spec.compute_dtype))
    dx = spec.scale * (dy - p * sum_over_row(spec, dy))
    return Variables(dx.astype(wanted.x))
