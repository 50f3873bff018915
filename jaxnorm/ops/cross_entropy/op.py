"""The op of cross-entropy with integer labels."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm.ops import speed
from jaxnorm.ops.cross_entropy.formula import (
    CrossEntropy,
    Operands,
    Results,
    Saved,
    Variables,
    backward,
    forward,
    linear,
)
from jaxnorm.ops.softmax.op import several_axes
from jaxnorm.primitive.family import Family
from jaxnorm.primitive.op import (
    BROADCAST,
    LIKE_X,
    STATISTIC,
    BatchDims,
    Derivative,
    Function,
    Native,
    Op,
    Request,
    Statistics,
    statistics_of,
)
from jaxnorm.sharding import dims
from jaxnorm.sharding.shards import Shards

NAME = "jaxnorm_cross_entropy"


def _types(spec: CrossEntropy, operands: Operands) -> Results:
    logsumexp, label_logit, total = statistics_of(spec, operands.x, 3)
    return Results(logsumexp, label_logit, total if spec.with_total else None)


def _of_shard(spec: CrossEntropy, x: jax.Array, labels: jax.Array) -> tuple[CrossEntropy, jax.Array]:
    """The spec and labels of shards of rows as though they were rows of their own."""
    assert spec.shards is not None
    (axis,) = spec.axes
    return dataclasses.replace(spec, shards=None), labels - spec.shards.index() * x.shape[axis]


def _forward_of_shard(spec: CrossEntropy, operands: Operands) -> tuple[Results, Statistics]:
    """That of the device's shard, by the kernel, and an exchange of what it gives for each row."""
    assert spec.shards is not None
    whole, labels = _of_shard(spec, operands.x, operands.labels)
    results, _ = CROSS_ENTROPY.bind(whole, operands._replace(labels=labels))
    return exchanged(spec.shards, results), ()


def _backward_of_shard(
    spec: CrossEntropy, cotangents: Results, saved: Saved, wanted: Variables[Any], batch_dims: BatchDims
) -> Variables[jax.Array]:
    whole, labels = _of_shard(spec, saved.x, saved.labels)
    gradients: Variables[jax.Array] = CROSS_ENTROPY.gradients(
        whole, cotangents, saved._replace(labels=labels), wanted, batch_dims
    )
    return gradients


def exchanged(shards: Shards, of_shard: Results) -> Results:
    """The results of whole rows from those of their shards: a maximum and a sum over these, of 12 or 16 bytes a row."""
    logsumexp, *others = of_shard
    top = shards.top(logsumexp)
    top = jnp.where(top == -jnp.inf, 0, top)  # no column counts: the exponentials below are 0
    parts = [jnp.exp(logsumexp - top), *(part for part in others if part is not None)]
    total, *added = shards.sum(jnp.stack(parts))
    # The logarithm of 0 has no derivative.
    nothing = total == 0
    whole = jnp.where(nothing, -jnp.inf, jnp.log(jnp.where(nothing, 1, total)) + top)
    given = iter(added)
    return Results(whole, *(None if part is None else next(given) for part in others))


def _attributes(spec: CrossEntropy, _: Any) -> dict[str, Any]:
    return {"scale": np.float32(spec.scale), "soft_cap": np.float32(spec.soft_cap)}


NATIVE: Native[CrossEntropy, Operands] = Native(
    names=(NAME,),
    name=lambda _: NAME,
    forward=lambda spec, operands: {**_attributes(spec, operands), "with_total": spec.with_total},
    backward=_attributes,
    slower=speed.cross_entropy,
)


def _requested(request: Request) -> tuple[CrossEntropy, Operands]:
    x = request.array(request.shape)
    wide = dims.wide_dtype((request.dtype,))
    spec = CrossEntropy(scale=1.0, soft_cap=0.0, with_total=False, compute_dtype=wide, out_dtype=wide)
    return spec, Operands(x, request.array((*request.shape[:-1], 1), np.dtype(np.int32)))


CROSS_ENTROPY = Family(
    Op(
        name="cross_entropy",
        spec=CrossEntropy,
        operands=Operands,
        results=Results,
        roles={
            "x": LIKE_X,
            "labels": STATISTIC,
            "where": BROADCAST,
            "logsumexp": STATISTIC,
            "label_logit": STATISTIC,
            "total": STATISTIC,
        },
        types=_types,
        forward=forward,
        statistics=lambda *_: [],
        derivative=Derivative(
            saved=Saved,
            variables=Variables,
            linear=linear,
            backward=backward,
            backward_of_shard=_backward_of_shard,
            in_place={"x": "x"},
        ),
        native=NATIVE,
        reasons=(several_axes,),
        can_shard=lambda *_: True,
        forward_of_shard=_forward_of_shard,
        functions=(
            Function(
                "softmax_cross_entropy_with_integer_labels",
                _requested,
                out_dtypes=(np.dtype(np.float32),),
                last_axis_only=True,
            ),
        ),
    )
)
