"""What cross-entropy with integer labels needs of a row of logits x, in plain jnp.

With z = soft_cap * tanh(x * scale / soft_cap), or z = x * scale without a soft cap, and over the columns that count:

    logsumexp = log(sum(exp(z))),   label_logit = z[label],   total = sum(z)

Each is a number a row, float32 (float64 of logits of float64), and a loss is made of them by plain arithmetic. A label
that names no column has the label_logit 0; one that names a column that does not count has that of the column.
"""

import dataclasses
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm.ops.softmax.mask import Mask, columns, counted, exponentials, only, sum_over_row
from jaxnorm.primitive.op import BatchDims, RowSpec, Statistics

Dtype = np.dtype[Any]
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CrossEntropy(RowSpec):
    """What is static about one cross-entropy."""

    scale: float
    soft_cap: float  # 0: there is none
    with_total: bool


class Operands(NamedTuple):
    x: jax.Array
    labels: jax.Array  # int32, of x's rank, as are the results
    where: jax.Array | None = None


class Results(NamedTuple):
    logsumexp: jax.Array
    label_logit: jax.Array | None = None
    total: jax.Array | None = None


class Saved(NamedTuple):
    x: jax.Array
    labels: jax.Array
    logsumexp: jax.Array
    where: jax.Array | None = None


class Variables(NamedTuple, Generic[T]):
    """What a derivative is taken by, see `Op`."""

    x: T | None = None


def _logits(spec: CrossEntropy, x: jax.Array) -> jax.Array:
    """z."""
    z = x.astype(spec.compute_dtype) * spec.scale
    return spec.soft_cap * jnp.tanh(z / spec.soft_cap) if spec.soft_cap else z


def _slope(spec: CrossEntropy, z: jax.Array) -> jax.Array | float:
    """dz/dx."""
    return spec.scale * (1 - jnp.square(z / spec.soft_cap)) if spec.soft_cap else spec.scale


def _is_label(spec: CrossEntropy, x: jax.Array, labels: jax.Array) -> jax.Array:
    return columns(spec, x) == labels


def _sum(spec: CrossEntropy, v: jax.Array) -> jax.Array:
    return sum_over_row(spec, v)


def forward(spec: CrossEntropy, operands: Operands) -> tuple[Results, Statistics]:
    x, labels, where = operands
    z, counts = _logits(spec, x), counted(spec, x, Mask(where))
    label_logit = _sum(spec, jnp.where(_is_label(spec, x, labels), z, 0))
    total = _sum(spec, only(counts, z)) if spec.with_total else None
    return Results(exponentials(spec, z, counts).logsumexp, label_logit, total), ()


def loss(results: Results, counts: Any, label_smoothing: float, z_loss: float) -> jax.Array:
    """The losses of rows, of which so many columns count."""
    lse, label_logit, total = results
    assert label_logit is not None
    losses = lse - (1 - label_smoothing) * label_logit
    if total is not None:
        losses = losses - label_smoothing * (total / counts)
    return losses + z_loss * jnp.square(lse) if z_loss else losses


def _probabilities(spec: CrossEntropy, z: jax.Array, logsumexp: jax.Array, counts: jax.Array | None) -> jax.Array:
    return only(counts, jnp.exp(only(counts, z - logsumexp)))


def linear(spec: CrossEntropy, saved: Saved, dots: Any) -> Results:
    x, labels, logsumexp, where = saved
    z, counts = _logits(spec, x), counted(spec, x, Mask(where))
    z_dot = _slope(spec, z) * dots.x.astype(spec.compute_dtype)
    return Results(
        _sum(spec, _probabilities(spec, z, logsumexp, counts) * only(counts, z_dot)),
        _sum(spec, jnp.where(_is_label(spec, x, labels), z_dot, 0)),
        _sum(spec, only(counts, z_dot)) if spec.with_total else None,
    )


def backward(
    spec: CrossEntropy, cotangents: Results, saved: Saved, wanted: Variables[Any], _: BatchDims
) -> Variables[jax.Array]:
    """The gradient of the logits. Of a shard of a row it is that of the whole, by the row's logsumexp."""
    x, labels, logsumexp, where = saved
    z, counts = _logits(spec, x), counted(spec, x, Mask(where))
    dz = cotangents.logsumexp * _probabilities(spec, z, logsumexp, counts)
    if cotangents.label_logit is not None:
        dz = dz + jnp.where(_is_label(spec, x, labels), cotangents.label_logit, 0)
    if cotangents.total is not None:
        dz = dz + only(counts, jnp.broadcast_to(cotangents.total, dz.shape))
    return Variables((_slope(spec, z) * dz).astype(wanted.x))
