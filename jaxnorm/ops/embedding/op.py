"""The primitives of rows with an index, and the kernel behind sums of segments.

They are no `Op` of a `Family`, as what they give has not the rows of x. Both are linear, and each is the other's
transpose, so that derivatives of any order are these two.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching
from jax.sharding import PartitionSpec

from jaxnorm.native import compat, ffi, jet
from jaxnorm.ops.embedding import formula
from jaxnorm.ops.embedding.formula import Lookup, Positions, Rows, SegmentSum
from jaxnorm.primitive import fallback, lowering, reasons, rules
from jaxnorm.primitive.described import DESCRIBERS, WITHOUT_OP, Described, Function, Request
from jaxnorm.sharding import partition, text
from jaxnorm.sharding.dims import CallMaps, wide_dtype
from jaxnorm.sharding.placement import Placement

TARGET = "jaxnorm_segment_sum"
MOST = 2**31 - 2**10  # positions and segments: int32 counts them, and what a kernel looks ahead
GATHERS = "XLA gathers rows at the rate of memory"
OF_EXAMPLES = "no kernel takes examples of these operands, as jax.vmap makes them"
# XLA's code is faster where it takes less time than a kernel saves beside the sort, as measured on an H200 (see
# docs/findings.md): in elements of float32 sums, of which an element of the data, added by an atomic operation, is as
# many, and one of sums in a half type, which XLA has in float32 first.
FEW, OF_DATA, OF_HALF = 3 * 10**8, 13, 11
SHORT = 512  # columns; of fewer XLA's code for CPUs adds up in the cache what a kernel reads in the order of segments


def bind_lookup(spec: Lookup, table: Any, ids: Any) -> jax.Array:
    (rows,) = rules.bind(LOOKUP, Rows(table, ids), spec=spec)
    return rows


def bind_sum(spec: SegmentSum, data: Any, ids: Any) -> jax.Array:
    (sums,) = rules.bind(SUM, Positions(data, ids), spec=spec)
    return sums


def why_not(spec: SegmentSum, operands: Positions) -> str | None:
    """Why no kernel serves operands of these types."""
    data = operands.data
    for name, dtype in {"the rows": data.dtype, "the sums": spec.out_dtype}.items():
        if dtype not in ffi.DTYPES:
            return f"{name} are {dtype}, kernels take {', '.join(sorted(d.name for d in ffi.DTYPES))}"
    if not all(isinstance(length, int) for length in (spec.segments, data.shape[-1])):
        return f"the sums have a symbolic shape {(spec.segments, data.shape[-1])}"
    positions = _known(data.shape[:-1])
    if max(positions, spec.segments) > MOST:
        return f"there are {positions} positions and {spec.segments} segments, and kernels count to {MOST}"
    return None


def why_formula(platform: str, spec: SegmentSum, operands: Positions) -> str | None:
    """Why XLA makes the sums of operands of these types on a platform."""
    place = reasons.Place(platform, has_native=True)
    return reasons.why_not(place=place) or _slower(platform, *operands, spec=spec)


def _known(lengths: Sequence[Any]) -> int:
    """The product of those that are known while tracing."""
    return int(np.prod([n for n in lengths if isinstance(n, int)], dtype=object))


def _slower(platform: str, *types: Any, spec: SegmentSum, tree: Any = None) -> str | None:
    operands = Positions(*types)
    if reason := why_not(spec, operands):
        return reason
    how = spec.formula_in("forward")
    if how is not None:
        return f"{fallback.ASKED_FOR}{how}"
    if spec.native_for:
        return None
    if platform == "cpu" and spec.out_dtype == np.float32 and operands.data.shape[-1] < SHORT:
        return f"XLA's code is faster for float32 sums of fewer than {SHORT} columns"
    if platform != "cuda":
        return None
    of_sums = 1 if spec.out_dtype == np.float32 else OF_HALF
    work = OF_DATA * _known(operands.data.shape) + of_sums * spec.segments * operands.data.shape[-1]
    return None if work >= FEW else "XLA's code is faster for so few rows and sums"


def _lookup_abstract(*leaves: Any, tree: Any, spec: Lookup) -> list[Any]:
    return list(jax.make_jaxpr(lambda *values: formula.lookup(spec, Rows(*values)))(*leaves).out_avals)


def _lookup_formula(*leaves: Any, tree: Any, spec: Lookup) -> list[jax.Array]:
    return [formula.lookup(spec, Rows(*leaves))]


def _lookup_transpose(cotangents: Any, table: Any, ids: Any, *, tree: Any, spec: Lookup) -> list[Any]:
    (rows,) = cotangents
    if type(rows) is ad.Zero or not ad.is_undefined_primal(table):
        return [None, None]
    backward = "backward" if spec.function == "embedding" else "forward"
    sums = SegmentSum(
        function=spec.function,
        out_dtype=np.dtype(table.aval.dtype),
        segments=table.aval.shape[0],
        positions=ids.ndim,
        # By themselves sums have columns as rows have them, which may be split where the table's are not.
        out_spec=table.aval.sharding.spec if jax.typeof(rows).sharding.spec[-1:] != (None,) else _split(table.aval),
        native_for=spec.native_in(backward),
        formula_for=tuple(("forward", how) for way, how in spec.formula_for if way == backward),
    )
    return [bind_sum(sums, rows, ids), None]


def _split(aval: Any) -> PartitionSpec | None:
    return aval.sharding.spec if any(aval.sharding.spec) else None


def _lookup_batch(leaves: Any, axes: Any, *, tree: Any, spec: Lookup) -> tuple[Any, Any]:
    of_rows = None if spec.out_spec is None else PartitionSpec(None, *spec.out_spec)
    if axes[0] is None:
        table, ids = leaves[0], jnp.moveaxis(leaves[1], axes[1], 0)
        return [bind_lookup(dataclasses.replace(spec, out_spec=of_rows), table, ids)], [0]
    tables, ids = rules.fold(leaves, axes)
    if (numbers := _folded(ids, tables.shape[1], tables)) is None:
        fallback.tell(spec.function, Rows(*leaves), _lookup_direction(spec), OF_EXAMPLES)
        # JAX sums the gradient in the dtype of what is gathered.
        tables = tables.astype(wide_dtype([tables.dtype]))
        return rules.at_front(jax.vmap(lambda *values: formula.lookup(spec, Rows(*values)))(tables, ids))
    return [bind_lookup(spec, tables.reshape(-1, tables.shape[-1]), numbers)], [0]


def _folded(ids: jax.Array, length: Any, of_examples: jax.Array) -> jax.Array | None:
    """The numbers of rows where those of all examples make one table; None where kernels cannot count them, or a mesh
    splits them."""
    size = ids.shape[0]
    if not isinstance(length, int) or size * length > MOST or any(jax.typeof(of_examples).sharding.spec):
        return None
    first = lax.broadcasted_iota(jnp.int32, ids.shape, 0) * length
    return jnp.where((ids >= 0) & (ids < length), ids + first, size * length)


def _lookup_direction(spec: Lookup) -> str:
    return "forward" if spec.function == "embedding" else "backward"


def _lookup_described(table: Any, ids: Any, *, tree: Any, spec: Lookup) -> Described:
    return Described(spec.function, Rows(table, ids), _lookup_direction(spec), lambda _: GATHERS)


def _sum_abstract(*leaves: Any, tree: Any, spec: SegmentSum) -> list[Any]:
    return [formula.result_type(spec, Positions(*leaves))]


def _sum_formula(*leaves: Any, tree: Any, spec: SegmentSum) -> list[jax.Array]:
    return [formula.segment_sum(spec, Positions(*leaves))]


def _sum_native(platform: str, ctx: Any, *leaves: Any, tree: Any, spec: SegmentSum) -> Sequence[Any]:
    sorts = platform == "cuda" and not spec.is_sorted

    def taken(data: jax.Array, ids: jax.Array) -> list[jax.Array]:
        """What a kernel takes: a matrix, whose rows are in order on a GPU."""
        rows, ids = data.reshape(ids.size, data.shape[-1]), ids.ravel()
        if not sorts:
            return [rows, ids]
        return [rows, *lax.sort((ids, lax.iota(jnp.int32, ids.size)), num_keys=1, is_stable=True)]

    ctx, values = lowering.replaced(taken, ctx, leaves)
    rows, columns = ctx.avals_in[0].shape
    return ffi.call(
        platform,
        TARGET,
        ctx,
        values,
        workspace=ffi.workspace(platform, TARGET, spec.out_dtype, rows + spec.segments, max(1, columns)),
        attributes={"has_order": sorts, "segments": np.int64(spec.segments)},
    )


def _sum_of_shard(*leaves: Any, tree: Any, spec: SegmentSum) -> list[jax.Array]:
    """Of a device's positions in the segments that it owns. Sums over devices are rounded once, too."""
    data, ids = leaves
    if spec.owned is not None:
        ids = jnp.clip(ids - spec.owned.index() * spec.segments, -1, spec.segments)
    dtype = spec.out_dtype if spec.summed is None else np.dtype(np.float32)
    part = bind_sum(dataclasses.replace(spec, shards=None, summed=None, owned=None, out_dtype=dtype), data, ids)
    return [part if spec.summed is None else spec.summed.sum(part).astype(spec.out_dtype)]


def _sum_maps(types: Any, *, spec: SegmentSum) -> CallMaps:
    """The axes are those of positions, that of segments and that of columns."""
    *positions, segments, columns = range(spec.positions + 2)
    return CallMaps(columns + 1, [(*positions, columns), tuple(positions)], [(segments, columns)], [()], [None])


def _sum_on_device(spec: SegmentSum, placement: Placement) -> SegmentSum:
    *positions, segments, columns = range(spec.positions + 2)
    (own, _) = placement.shard_shape((segments, columns), (spec.segments, 1))
    return dataclasses.replace(
        spec, segments=own, summed=placement.shards(positions), owned=placement.shards([segments])
    )


def _sum_transpose(cotangents: Any, data: Any, ids: Any, *, tree: Any, spec: SegmentSum) -> list[Any]:
    (sums,) = cotangents
    if type(sums) is ad.Zero or not ad.is_undefined_primal(data):
        return [None, None]
    ways = {name: getattr(spec, name) for name in ("native_for", "formula_for")}
    rows = Lookup(function=spec.function, out_dtype=np.dtype(data.aval.dtype), out_spec=_split(data.aval), **ways)
    return [bind_lookup(rows, sums, ids), None]


def _sum_batch(leaves: Any, axes: Any, *, tree: Any, spec: SegmentSum) -> tuple[Any, Any]:
    data, ids = rules.fold(leaves, axes)
    if spec.out_spec is not None or (numbers := _folded(ids, spec.segments, data)) is None:
        fallback.tell(spec.function, Positions(*leaves), _sum_direction(spec), OF_EXAMPLES)
        return rules.at_front(jax.vmap(lambda *values: formula.segment_sum(spec, Positions(*values)))(data, ids))
    size = data.shape[0]
    # What is in no sum of an example stands behind those of all examples.
    folded = dataclasses.replace(spec, segments=size * spec.segments, positions=spec.positions + 1, is_sorted=False)
    return [bind_sum(folded, data, numbers).reshape(size, spec.segments, data.shape[-1])], [0]


def _sum_direction(spec: SegmentSum) -> str:
    return "backward" if spec.function == "embedding" else "forward"


def _sum_described(data: Any, ids: Any, *, tree: Any, spec: SegmentSum) -> Described:
    operands = Positions(data, ids)

    def why(platform: str) -> str | None:
        return why_formula(platform, spec, operands)

    return Described(spec.function, operands, _sum_direction(spec), why, spec.native_for)


def _of_tangent(spec: Any) -> Any:
    """The spec of the same call of a tangent: both are linear, but for what fills the rows that no table has."""
    return dataclasses.replace(spec, fill=0.0) if isinstance(spec, Lookup) else spec


def _primitive(name: str, abstract: Any, transpose: Any, batch: Any, describe: Any) -> Primitive:
    primitive = Primitive(name)

    def along(tangent: Any, ids: Any, tree: Any, spec: Any) -> Any:
        (result,) = rules.bind(primitive, jax.tree.unflatten(tree, (tangent, ids)), spec=_of_tangent(spec))
        return result

    def jvp(primals: Any, dots: Any, *, tree: Any, spec: Any) -> tuple[Any, Any]:
        (value,) = primitive.bind(*primals, tree=tree, spec=spec)
        if type(dots[0]) is ad.Zero:
            return [value], [ad.Zero(jax.typeof(value).to_tangent_aval())]
        return [value], [along(dots[0], primals[1], tree, spec)]

    def of_terms(primals: Any, series: Any, *, tree: Any, spec: Any) -> tuple[Any, Any]:
        terms = [along(term, primals[1], tree, spec) for term in series[0]]
        return primitive.bind(*primals, tree=tree, spec=spec), [terms]

    primitive.multiple_results = True
    primitive.def_abstract_eval(abstract)
    compat.run_eagerly(primitive)
    compat.check_nans(primitive)
    jet.register(primitive, of_terms)
    batching.primitive_batchers[primitive] = batch
    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transpose
    DESCRIBERS[primitive] = describe
    return primitive


LOOKUP = _primitive("jaxnorm_lookup", _lookup_abstract, _lookup_transpose, _lookup_batch, _lookup_described)
SUM = _primitive(TARGET, _sum_abstract, _sum_transpose, _sum_batch, _sum_described)
lowering.register_formula(LOOKUP, _lookup_formula)
partition.register(SUM, _sum_maps, is_product=True, on_device=_sum_on_device)
lowering.register(SUM, _sum_formula, _sum_native, _sum_of_shard, _slower)
text.register_types(SegmentSum)


def _of_lookup(request: Request) -> tuple[SegmentSum, Positions]:
    """The sums of its gradient."""
    ids = request.array(request.shape[:-1], np.int32)
    spec = SegmentSum(
        function="embedding", out_dtype=request.dtype, segments=request.columns, positions=len(request.shape) - 1
    )
    return spec, Positions(request.array(request.shape, request.out_dtype), ids)


def _of_sum(request: Request) -> tuple[SegmentSum, Positions]:
    rows, *rest = request.shape
    spec = SegmentSum(function="segment_sum", out_dtype=request.dtype, segments=request.columns)
    return spec, Positions(request.array((rows, math.prod(rest))), request.array((rows,), np.int32))


def _function(name: str, of: Callable[[Request], tuple[SegmentSum, Positions]], **described: Any) -> Function:
    return Function(
        name,
        why_formula=lambda platform, request: why_formula(platform, *of(request)),
        last_axis_only=True,
        **described,
    )


WITHOUT_OP += [
    _function(
        "embedding",
        _of_lookup,
        arguments=lambda request: {
            "table": request.array((request.columns, request.shape[-1])),
            "ids": request.array(request.shape[:-1], np.int32),
            "dtype": request.out_dtype,
        },
        shape=(8192, 2560),
        matrix="table",
        columns="rows",
        over=lambda _: ", of which the gradient is sums of rows,",
        by_xla=("forward", GATHERS),
    ),
    _function(
        "segment_sum",
        _of_sum,
        arguments=lambda request: {
            "data": request.array(request.shape),
            "segment_ids": request.array(request.shape[:1], np.int32),
            "num_segments": request.columns,
        },
        out_dtypes=(),
        shape=(1048576, 128),
        matrix="segment_ids",
        columns="segments",
        over=lambda _: "",
        by_xla=("backward", GATHERS),
    ),
]
