"""The op of queries, keys and values of one product, of which the queries and keys are normalised and rotated."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxnorm.native import compat
from jaxnorm.ops import speed
from jaxnorm.ops.qk_norm_rotary.formula import STATISTICS
from jaxnorm.ops.qk_norm_rotary.op import (
    ROLES as OF_PARTS,
    attributes,
    head_too_long,
    other_dtypes,
    requested,
    weights_of,
    workspace,
)
from jaxnorm.ops.qk_norm_rotary.packed import (
    Operands,
    QKVNormRotary,
    Results,
    Saved,
    Variables,
    backward,
    forward,
    linear,
    plain,
)
from jaxnorm.primitive.family import Family
from jaxnorm.primitive.op import LIKE_X, BatchDims, Derivative, Native, Op, Role
from jaxnorm.primitive.registry import Function, Request
from jaxnorm.sharding import dims
from jaxnorm.sharding.dims import DimMap


def _part_map(spec: QKVNormRotary, ndim: int, _: Sequence[Any]) -> DimMap:
    """Its heads are some of qkv's, which are all on one device."""
    return tuple(None if axis == ndim + spec.heads_axis else axis for axis in range(ndim))


def _statistics_map(spec: QKVNormRotary, ndim: int, shape: Sequence[Any]) -> DimMap:
    return (*_part_map(spec, ndim, shape)[:-1], None)


def _scale_map(_: QKVNormRotary, ndim: int, shape: Sequence[Any]) -> DimMap:
    return (*[None] * (len(shape) - 1), ndim - 1)


def _packed_shape(spec: QKVNormRotary, shape: Sequence[Any], _: BatchDims) -> tuple[Any, ...]:
    """Also by a result's shape, where nothing of qkv is kept."""
    return (*shape[: spec.heads_axis], spec.packed, shape[-1])


PART = Role(_part_map)
SCALE = Role(_scale_map, "formula")
ROLES = {
    "qkv": dataclasses.replace(LIKE_X, shape=_packed_shape),
    "q_scale": SCALE,
    "k_scale": SCALE,
    **{name: OF_PARTS[name] for name in ("positions", "frequencies", "cos", "sin")},
    "q_out": PART,
    "k_out": PART,
    "v_out": PART,
    "stats": Role(_statistics_map),
}


def _part(qkv: Any, heads: int, cols: int, dtype: Any) -> Any:
    """The type of an array with so many heads and elements for each token of qkv."""
    ndim = len(qkv.shape)
    dim_map = (*range(ndim - 2), None, ndim - 1 if cols == qkv.shape[-1] else None)
    return dims.result_like(qkv, dim_map, (*qkv.shape[:-2], heads, cols), dtype)


def types(spec: QKVNormRotary, operands: Operands) -> Results:
    qkv: Any = operands.qkv
    q, k = (_part(qkv, heads, qkv.shape[-1], qkv.dtype) for heads in (spec.heads, spec.kv_heads))
    return Results(q, k, k if spec.with_v else None)


def statistics_types(spec: QKVNormRotary, operands: Operands) -> list[Any]:
    of_parts = (_part(operands.qkv, heads, 1, spec.compute_dtype) for heads in (spec.heads, spec.kv_heads))
    return [type_ for of_part in of_parts for type_ in [of_part] * STATISTICS[spec.norm]]


def _unsaved(spec: QKVNormRotary) -> dict[str, str]:
    return {"qkv": "q_out"} if spec.norm == "none" else {}


def _split(spec: QKVNormRotary, operands: Operands) -> str | None:
    if compat.shard_count(operands.qkv, spec.heads_axis) == 1:
        return None
    return "an Explicit mesh splits the heads of qkv, and parts of q, k and v are on other devices than the results'"


def _attributes(spec: QKVNormRotary, arrays: Any) -> dict[str, Any]:
    of_heads = {"heads": np.int64(spec.heads), "kv_heads": np.int64(spec.kv_heads)}
    return {name: value for name, value in attributes(spec, arrays).items() if name != "heads_axis"} | of_heads


NATIVE: Native[QKVNormRotary, Operands] = Native(
    names=("jaxnorm_qkv_norm_rotary",),
    name=lambda _: "jaxnorm_qkv_norm_rotary",
    forward=lambda spec, operands: {
        **_attributes(spec, operands),
        "epsilon": np.float32(spec.epsilon),
        "with_v": spec.gives_v,
    },
    backward=_attributes,
    workspace=workspace,
    slower=speed.rotary,
)


def _requested(request: Request) -> tuple[QKVNormRotary, Operands]:
    """qkv of this shape, whose heads are in six parts: four of q, one of k, one of v; or in three."""
    of_qk, operands = requested(request)
    qkv, scale = operands.q, operands.q_scale
    *_, packed, _ = qkv.shape
    kv_heads = packed // (6 if packed % 6 == 0 else 3)
    fields = {field.name: getattr(of_qk, field.name) for field in dataclasses.fields(of_qk)}
    spec = QKVNormRotary(**fields, heads=packed - 2 * kv_heads, kv_heads=kv_heads)
    return spec, Operands(qkv, scale, scale, operands.positions, operands.frequencies)


def _arguments(request: Request) -> dict[str, Any]:
    spec, _ = _requested(request)
    heads = {"heads": spec.heads, "kv_heads": spec.kv_heads}
    return {"qkv": request.array(request.shape), **heads, **weights_of(request)}


QKV_NORM_ROTARY = Family(
    Op(
        name="qkv_norm_rotary",
        spec=QKVNormRotary,
        operands=Operands,
        results=Results,
        roles=ROLES,
        types=types,
        forward=forward,
        plain=plain,
        statistics=statistics_types,
        derivative=Derivative(saved=Saved, variables=Variables, linear=linear, backward=backward, unsaved=_unsaved),
        native=NATIVE,
        reasons=(head_too_long, other_dtypes, _split),
        may_omit=lambda *_: ("v_out",),
        linear_in=lambda _: ("q_scale", "k_scale"),
        functions=(
            Function(
                "qkv_norm_rotary",
                _requested,
                arguments=_arguments,
                last_axis_only=True,
                shape=(8, 2048, 48, 128),
            ),
        ),
    )
)
