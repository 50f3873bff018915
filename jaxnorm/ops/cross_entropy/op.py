"""The op of cross-entropy with integer labels."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray

from jaxnorm.ops import speed
from jaxnorm.ops.cross_entropy import formula
from jaxnorm.ops.cross_entropy.formula import IGNORED, CrossEntropy, Operands, Results, Saved
from jaxnorm.ops.logits import log_of_1_and, origin_of, several_axes, widened
from jaxnorm.ops.mask import columns, only
from jaxnorm.primitive import op
from jaxnorm.primitive.family import Family
from jaxnorm.primitive.registry import Function, Request
from jaxnorm.sharding import dims
from jaxnorm.sharding.shards import Shards


def _types(spec: CrossEntropy, operands: Operands) -> Results:
    log_sum, label_logit, total, top = op.statistics_of(spec, operands.x, 4)
    return Results(log_sum, label_logit, total if spec.with_total else None, top if spec.with_top else None)


def _slower(_: CrossEntropy, rows: op.CallRows) -> str | None:
    """Of the gradient alone: it has no sum over a row, and XLA's one loop over its elements goes at the copy rate."""
    if rows.way == "forward":
        return None
    if rows.platform == "cuda" and rows.dtype.itemsize == 4:
        return "XLA's code is faster for the gradient of float32 logits"  # see docs/benchmarks/gpu.md
    return None if speed.vectors_divide(rows) else speed.why(rows, "gradients of logits")


def _of_shard(spec: CrossEntropy, x: jax.Array, labels: jax.Array) -> tuple[CrossEntropy, jax.Array]:
    """The spec and labels of shards of rows as though they were rows of their own."""
    assert spec.shards is not None
    (axis,) = spec.axes
    return dataclasses.replace(spec, shards=None), labels_of_shard(spec.shards, labels, x.shape[axis])


def labels_of_shard(shards: Shards, labels: jax.Array, cols: int) -> jax.Array:
    """Labels as numbers of the columns of this shard, which has so many; negative ones name none as they are."""
    return jnp.where(labels < 0, labels, labels - shards.index() * cols)


def _forward_of_shard(spec: CrossEntropy, operands: Operands) -> tuple[Results, op.Statistics]:
    """That of the device's shard, by the kernel, and an exchange of what it gives for each row."""
    assert spec.shards is not None
    whole, labels = _of_shard(spec, operands.x, operands.labels)
    whole, operands = dataclasses.replace(whole, with_top=True, is_part=True), operands._replace(labels=labels)
    results, _ = CROSS_ENTROPY.bind(whole, operands)
    results = exchanged(whole, spec.shards, operands, results)
    return results if spec.with_top else _without_top(spec, spec.shards, operands, results), ()


def _without_top(spec: CrossEntropy, shards: Shards, operands: Operands, results: Results) -> Results:
    log_sum, label_logit, total, top = results
    shift = spec.logits.unit * origin_of(top)
    if total is not None:
        total = total + shards.sum(count_of(spec, operands) * jnp.ones_like(log_sum)) * shift
    is_class = shards.sum(_names_column(spec, operands).astype(log_sum.dtype)) > 0
    return Results(log_sum + shift, label_logit + jnp.where(is_class, shift, 0), total)


def _backward_of_shard(
    spec: CrossEntropy, cotangents: Results, saved: Saved, wanted: op.OnlyX[op.Dtype], batch_dims: op.BatchDims
) -> op.OnlyX[jax.Array]:
    whole, labels = _of_shard(spec, saved.x, saved.labels)
    gradients: op.OnlyX[jax.Array] = CROSS_ENTROPY.gradients(
        whole, cotangents, saved._replace(labels=labels), wanted, batch_dims
    )
    return gradients


def exchanged(spec: CrossEntropy, shards: Shards, operands: Operands, of_shard: Results) -> Results:
    """The results of whole rows from those of their shards, which operands are: a maximum of 4 bytes a row, and sums.

    A shard of which nothing counts, or all is -inf, has the log_sum -inf, and adds nothing to that of the whole.
    """
    log_sum, label_logit, total, own_top = of_shard
    own_top = lax.stop_gradient(own_top)
    top = shards.top(own_top)
    further = (origin_of(own_top) - origin_of(top)) * spec.logits.unit
    is_there = log_sum != -jnp.inf
    is_top = is_there & (own_top == top)
    each = jnp.where(is_top, jnp.expm1(log_sum), jnp.exp(log_sum + jnp.where(is_there, further, 0)))
    label_logit = jnp.where(_names_column(spec, operands), label_logit + further, 0)
    parts = [each, is_top.astype(each.dtype), label_logit]
    if total is not None:
        counts = count_of(spec, operands)
        parts.append(jnp.where(counts == 0, 0, total + counts * further))
    rest, tops, label_logit, *totals = shards.sum(jnp.stack(parts))
    return Results(log_of_1_and(rest + (tops - 1)), label_logit, totals[0] if totals else None, top)


def _names_column(spec: CrossEntropy, operands: Operands) -> jax.Array:
    return (operands.labels >= 0) & (operands.labels < operands.x.shape[spec.axes[0]])


def count_of(spec: CrossEntropy, operands: Operands) -> int | jax.Array:
    x, _, where = operands
    (axis,) = spec.axes
    if where is None:
        return x.shape[axis]
    return jnp.sum(jnp.broadcast_to(where, x.shape), axis=axis, keepdims=True, dtype=spec.compute_dtype)


def times(spec: CrossEntropy, operands: Operands, scale: jax.Array, shards: Shards | None) -> Operands:
    """With logits times a traced scale, in the compute dtype; its gradient sees none of which nothing is read."""
    x, labels, where = operands
    is_read = labels != IGNORED
    if where is not None:
        counts = count_of(spec, operands)
        counts = counts if shards is None else shards.sum(counts)
        is_read &= where | ((columns(spec, x) == labels) & (counts > 0))
    x = only(is_read, x).astype(spec.compute_dtype) * scale.astype(spec.compute_dtype)
    return operands._replace(x=x)


def _attributes(spec: CrossEntropy, _: Operands | Saved) -> dict[str, np.float32]:
    return {"scale": np.float32(spec.scale), "soft_cap": np.float32(spec.soft_cap)}


def _requested(request: Request) -> tuple[CrossEntropy, Operands]:
    x = request.array(request.shape)
    wide = dims.wide_dtype((request.dtype,))
    spec = CrossEntropy(scale=1.0, soft_cap=0.0, with_total=False, with_top=True, compute_dtype=wide, out_dtype=wide)
    return spec, Operands(x, request.array((*request.shape[:-1], 1), np.dtype(np.int32)))


def _labels(request: Request) -> ShapedArray:
    return ShapedArray(request.shape[:-1], np.int32)


CROSS_ENTROPY = Family(
    op.Op(
        name="cross_entropy",
        spec=CrossEntropy,
        operands=Operands,
        results=Results,
        roles={
            "x": op.LIKE_X,
            "labels": op.STATISTIC,
            "where": op.BROADCAST,
            "log_sum": op.STATISTIC,
            "label_logit": op.STATISTIC,
            "total": op.STATISTIC,
            "top": op.STATISTIC,
        },
        types=_types,
        forward=formula.forward,
        statistics=lambda *_: [],
        derivative=op.Derivative(
            saved=Saved,
            variables=op.OnlyX,
            linear=formula.linear,
            backward=formula.backward,
            backward_of_shard=_backward_of_shard,
            in_place={"x": "x"},
        ),
        native=op.Native(
            names=("jaxnorm_cross_entropy",),
            forward=lambda spec, operands: {
                **_attributes(spec, operands),
                "with_total": spec.with_total,
                "with_top": spec.with_top,
            },
            backward=_attributes,
            slower=_slower,
        ),
        reasons=(several_axes, widened),
        can_shard=lambda *_: True,
        forward_of_shard=_forward_of_shard,
        functions=(
            Function(
                "softmax_cross_entropy_with_integer_labels",
                _requested,
                arguments=lambda request: {"logits": request.array(request.shape), "labels": _labels(request)},
                out_dtypes=(np.dtype(np.float32),),
                last_axis_only=True,
            ),
            Function(
                "linear_cross_entropy",
                lambda request: _requested(request._replace(shape=(*request.shape[:-1], request.columns))),
                arguments=lambda request: {"kernel": request.matrix, "labels": _labels(request)},
                out_dtypes=(np.dtype(np.float32),),
                last_axis_only=True,
                matrix="kernel",
                columns="classes",
                over=lambda _: " by chunks of rows, whose products are XLA's,",
            ),
        ),
    )
)
