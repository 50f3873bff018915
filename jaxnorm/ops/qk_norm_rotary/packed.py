"""Queries, keys and values of one product, of which the queries and keys are normalised and rotated: formulas and op.

The formulas are those of `qk_norm_rotary`, for parts of one array; the values are copied. For a derivative the array
is kept, the statistics of its queries and keys, and the angles; without a norm the angles alone.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm.native import compat
from jaxnorm.ops.qk_norm_rotary import formula as apart, op
from jaxnorm.primitive.family import Family
from jaxnorm.primitive.op import LIKE_X, BatchDims, Derivative, Dtype, Native, Op, Role, Statistics, T
from jaxnorm.primitive.registry import Function, Request
from jaxnorm.sharding import dims
from jaxnorm.sharding.dims import DimMap


@dataclasses.dataclass(frozen=True, kw_only=True)
class QKVNormRotary(apart.QKNormRotary):
    """What is static about one: along the last axis but one stand the heads of q, then those of k, then those of v."""

    heads_axis: int = -2
    heads: int  # of q
    kv_heads: int  # of k, and of v
    with_v: bool = True  # whether v is a result

    @property
    def whole_axes(self) -> tuple[int, ...]:
        """A device that has all of it has the parts of each result."""
        return (self.heads_axis,)

    @property
    def packed(self) -> int:
        return self.heads + 2 * self.kv_heads

    @property
    def gives_v(self) -> bool:
        return self.with_v and "v_out" not in self.omitted


class Operands(NamedTuple):
    """As those of `qk_norm_rotary`, with qkv in the place of q and k."""

    qkv: jax.Array
    q_scale: jax.Array | None = None
    k_scale: jax.Array | None = None
    positions: jax.Array | None = None
    frequencies: jax.Array | None = None
    cos: jax.Array | None = None
    sin: jax.Array | None = None


class Results(NamedTuple):
    q_out: jax.Array
    k_out: jax.Array
    v_out: jax.Array | None = None


class Saved(NamedTuple):
    qkv: jax.Array | None = None
    q_scale: jax.Array | None = None
    k_scale: jax.Array | None = None
    positions: jax.Array | None = None
    frequencies: jax.Array | None = None
    cos: jax.Array | None = None
    sin: jax.Array | None = None
    stats: Statistics = ()  # those of q, then of k; qkv is None where there are none


class Variables(NamedTuple, Generic[T]):
    qkv: T | None = None
    q_scale: T | None = None
    k_scale: T | None = None


class Parts(NamedTuple):
    q: Any
    k: Any
    v: Any


def parts(spec: QKVNormRotary, qkv: jax.Array | None) -> Parts:
    """Of nothing, nothing."""
    if qkv is None:
        return Parts(None, None, None)
    ends = (0, spec.heads, spec.heads + spec.kv_heads, spec.packed)
    axis = qkv.ndim + spec.heads_axis
    return Parts(*(lax.slice_in_dim(qkv, *bounds, axis=axis) for bounds in itertools.pairwise(ends)))


def forward(spec: QKVNormRotary, operands: Operands) -> tuple[Results, Statistics]:
    """q and k, normalised and rotated, and v; and the statistics of q and k."""
    qkv, *others = operands
    q, k, v = parts(spec, qkv)
    rotated, stats = apart.forward(spec, apart.Operands(q, k, *others))
    return Results(*rotated, v if spec.with_v else None), stats


def plain(spec: QKVNormRotary, operands: Operands) -> Results:
    qkv, *others = operands
    q, k, v = parts(spec, qkv)
    return Results(*apart.plain(spec, apart.Operands(q, k, *others)), v if spec.with_v else None)


def linear(spec: QKVNormRotary, saved: Saved, dots: Variables[jax.Array]) -> Results:
    q, k, v = parts(spec, dots.qkv)
    results = apart.linear(spec, _apart(spec, saved), apart.Variables(q, k, dots.q_scale, dots.k_scale))
    if v is None and spec.with_v:
        v, _ = compat.match_varying_axes(jnp.zeros_like(results.k_out), results.k_out)
    return Results(*results, v if spec.with_v else None)


def backward(
    spec: QKVNormRotary, cotangents: Results, saved: Saved, wanted: Variables[Dtype], batch_dims: BatchDims
) -> Variables[jax.Array]:
    """The wanted gradients: the transpose of `linear`. That of qkv has zeros for v where no cotangent came."""
    q_out, k_out, v_out = cotangents
    each = apart.Variables(wanted.qkv, wanted.qkv, wanted.q_scale, wanted.k_scale)
    found = apart.backward(spec, apart.Results(q_out, k_out), _apart(spec, saved), each, batch_dims)
    if found.q is None or found.k is None:
        return Variables(None, found.q_scale, found.k_scale)
    v = jnp.zeros_like(found.k) if v_out is None else v_out.astype(wanted.qkv)
    return Variables(jnp.concatenate([found.q, found.k, v], spec.heads_axis), found.q_scale, found.k_scale)


def _apart(spec: QKVNormRotary, saved: Saved) -> apart.Saved:
    q, k, _ = parts(spec, saved.qkv)
    return apart.Saved(q, k, **{name: array for name, array in saved._asdict().items() if name != "qkv"})


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
    **{name: op.ROLES[name] for name in ("positions", "frequencies", "cos", "sin")},
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
    return [type_ for of_part in of_parts for type_ in [of_part] * apart.STATISTICS[spec.norm]]


def _unsaved(spec: QKVNormRotary) -> dict[str, str]:
    return {"qkv": "q_out"} if spec.norm == "none" else {}


def _split(spec: QKVNormRotary, operands: Operands) -> str | None:
    if compat.shard_count(operands.qkv, spec.heads_axis) == 1:
        return None
    return "an Explicit mesh splits the heads of qkv, and parts of q, k and v are on other devices than the results'"


def _attributes(spec: QKVNormRotary, arrays: Any) -> dict[str, Any]:
    of_heads = {"heads": np.int64(spec.heads), "kv_heads": np.int64(spec.kv_heads)}
    return {name: value for name, value in op.attributes(spec, arrays).items() if name != "heads_axis"} | of_heads


def _requested(request: Request) -> tuple[QKVNormRotary, Operands]:
    """qkv of this shape, whose heads are in six parts: four of q, one of k, one of v; or in three."""
    of_qk, operands = op.requested(request)
    qkv, scale = operands.q, operands.q_scale
    *_, packed, _ = qkv.shape
    kv_heads = packed // (6 if packed % 6 == 0 else 3)
    fields = {field.name: getattr(of_qk, field.name) for field in dataclasses.fields(of_qk)}
    spec = QKVNormRotary(**fields, heads=packed - 2 * kv_heads, kv_heads=kv_heads)
    return spec, Operands(qkv, scale, scale, operands.positions, operands.frequencies)


def _arguments(request: Request) -> dict[str, Any]:
    spec, _ = _requested(request)
    heads = {"heads": spec.heads, "kv_heads": spec.kv_heads}
    return {"qkv": request.array(request.shape), **heads, **op.weights_of(request)}


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
        native=Native(
            names=("jaxnorm_qkv_norm_rotary",),
            forward=lambda spec, operands: {
                **_attributes(spec, operands),
                "epsilon": np.float32(spec.epsilon),
                "with_v": spec.gives_v,
            },
            backward=_attributes,
            workspace=op.workspace,
            slower=op.slower,
        ),
        reasons=(op.head_too_long, op.other_dtypes, _split),
        may_omit=lambda *_: ("v_out",),
        linear_in=lambda _: ("q_scale", "k_scale"),
        functions=(
            Function(
                "qkv_norm_rotary", _requested, arguments=_arguments, last_axis_only=True, shape=(8, 2048, 48, 128)
            ),
        ),
    )
)
