"""The primitives of rows with an index, and the kernel behind sums of segments.

They are no `Op` of a `Family`, as what they give has not the rows of x. Both are linear, and each is the other's
transpose, so that derivatives of any order are these two.
"""

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad
from jax.sharding import PartitionSpec

from jaxnorm.native import ffi
from jaxnorm.ops.embedding import formula
from jaxnorm.ops.embedding.formula import Lookup, Positions, Rows, SegmentSum
from jaxnorm.primitive import fallback, lowering, registry, rules
from jaxnorm.primitive.decide import Call, Formula
from jaxnorm.primitive.registry import Described, Function, Request
from jaxnorm.primitive.rules import Rules
from jaxnorm.sharding.dims import CallMaps, DimMap, wide_dtype
from jaxnorm.sharding.shards import Placement

TARGET = "jaxnorm_segment_sum"
MOST = 2**31 - 2**10  # positions and segments: int32 counts them, and what a kernel looks ahead
GATHERS = "XLA gathers rows at the rate of memory"
OF_EXAMPLES = "no kernel takes examples of these operands, as jax.vmap makes them"
# XLA's code is faster where it takes less time than a kernel saves beside the sort, as measured on an H200 (see
# docs/findings.md): in elements of float32 sums, of which an element of the data, added by an atomic operation, is as
# many, and one of sums in a half type, which XLA has in float32 first.
FEW, OF_DATA, OF_HALF = 3 * 10**8, 13, 11
SHORT = 512  # columns; of fewer XLA's code for CPUs adds up in the cache what a kernel reads in the order of segments


def bind_lookup(spec: Lookup, table: Any, ids: Any) -> list[jax.Array]:
    """The rows, and the table if it is asked for."""
    return rules.bind(LOOKUP.primitive, Rows(table, ids), spec=spec)


def bind_sum(spec: SegmentSum, data: Any, ids: Any, onto: Any = None) -> jax.Array:
    (sums,) = rules.bind(SUM.primitive, Positions(data, ids, onto), spec=spec)
    return sums


@dataclasses.dataclass(frozen=True)
class SumCall(Call):
    """Sums of segments, by the types of the operands."""

    spec: SegmentSum
    operands: Positions

    @property
    def native_for(self) -> str | None:  # type: ignore[override]
        return self.spec.native_for

    def unserved(self, platform: str) -> str | None:
        spec, data = self.spec, self.operands.data
        for name, dtype in {"the rows": data.dtype, "the sums": spec.out_dtype}.items():
            if dtype not in ffi.DTYPES:
                return f"{name} are {dtype}, kernels take {', '.join(sorted(d.name for d in ffi.DTYPES))}"
        if not all(isinstance(length, int) for length in (spec.segments, data.shape[-1])):
            return f"the sums have a symbolic shape {(spec.segments, data.shape[-1])}"
        positions = _known(data.shape[:-1])
        if max(positions, spec.segments) > MOST:
            return f"there are {positions} positions and {spec.segments} segments, and kernels count to {MOST}"
        return None

    def left_out(self, platform: str) -> str | None:
        spec, data = self.spec, self.operands.data
        if (how := spec.formula_in("forward")) is not None:
            return f"{fallback.ASKED_FOR}{how}"
        if spec.native_for:
            return None
        if platform == "cpu" and spec.out_dtype == np.float32 and data.shape[-1] < SHORT:
            return f"XLA's code is faster for float32 sums of fewer than {SHORT} columns"
        if platform != "cuda":
            return None
        of_sums = 1 if spec.out_dtype == np.float32 else OF_HALF
        work = OF_DATA * _known(data.shape) + of_sums * spec.segments * data.shape[-1]
        return None if work >= FEW else "XLA's code is faster for so few rows and sums"


def _known(lengths: Sequence[Any]) -> int:
    """The product of those that are known while tracing."""
    return int(np.prod([n for n in lengths if isinstance(n, int)], dtype=object))


class _ByIds(Rules):
    """One whose second operand are ids; it is linear in the others."""

    @abstractmethod
    def along(self, dots: Sequence[Any], ids: Any, spec: Any) -> list[Any]:
        """The tangents of the results."""

    def jvp(self, primals: Any, dots: Any, *, tree: Any, spec: Any) -> tuple[Any, Any]:
        results = self.primitive.bind(*primals, tree=tree, spec=spec)
        variables = [dots[0], *dots[2:]]
        if all(type(dot) is ad.Zero for dot in variables):
            return results, list(map(rules.no_tangent, results))
        return results, self.along(variables, primals[1], spec)

    def jet(self, primals: Any, series: Any, *, tree: Any, spec: Any) -> tuple[Any, Any]:
        variables = [series[0], *series[2:]]
        terms = [self.along(dots, primals[1], spec) for dots in zip(*variables, strict=True)]
        return self.primitive.bind(*primals, tree=tree, spec=spec), list(map(list, zip(*terms, strict=True)))


class _Lookup(_ByIds):
    def abstract(self, *leaves: Any, tree: Any, spec: Lookup) -> list[Any]:
        (rows,) = jax.make_jaxpr(lambda *values: formula.lookup(spec, Rows(*values)))(*leaves).out_avals
        return [rows, leaves[0]] if spec.with_table else [rows]

    def formula(self, *leaves: Any, tree: Any, spec: Lookup) -> list[jax.Array]:
        rows = formula.lookup(spec, Rows(*leaves))
        return [rows, leaves[0]] if spec.with_table else [rows]

    def along(self, dots: Sequence[Any], ids: Any, spec: Lookup) -> list[Any]:
        """Linear, but for what fills the rows that no table has."""
        (table,) = dots
        return bind_lookup(dataclasses.replace(spec, fill=0.0), table, ids)

    def transpose(self, cotangents: Any, table: Any, ids: Any, *, tree: Any, spec: Lookup) -> list[Any]:
        rows, *others = cotangents
        if not ad.is_undefined_primal(table):
            return [None, None]
        (onto,) = [other for other in others if type(other) is not ad.Zero] or [None]
        if type(rows) is ad.Zero:
            return [onto, None]
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
        return [bind_sum(sums, rows, ids, onto), None]

    def batch(self, leaves: Any, axes: Any, *, tree: Any, spec: Lookup) -> tuple[Any, Any]:
        of_rows = None if spec.out_spec is None else PartitionSpec(None, *spec.out_spec)
        if axes[0] is None:
            table, ids = leaves[0], jnp.moveaxis(leaves[1], axes[1], 0)
            results = bind_lookup(dataclasses.replace(spec, out_spec=of_rows), table, ids)
            return results, [0, None][: len(results)]
        tables, ids = rules.fold(leaves, axes)
        if (numbers := _folded(ids, tables.shape[1], tables)) is None:
            fallback.tell(spec.function, Rows(*leaves), self._direction(spec), OF_EXAMPLES)
            # JAX sums the gradient in the dtype of what is gathered.
            wide = tables.astype(wide_dtype([tables.dtype]))
            rows = jax.vmap(lambda *values: formula.lookup(spec, Rows(*values)))(wide, ids)
            return rules.at_front([rows, tables] if spec.with_table else [rows])
        rows, *folded = bind_lookup(spec, lax.collapse(tables, 0, -1), numbers)
        return rules.at_front([rows, *(table.reshape(tables.shape) for table in folded)])

    def _direction(self, spec: Lookup) -> str:
        return "forward" if spec.function == "embedding" else "backward"

    def described(self, table: Any, ids: Any, *, tree: Any, spec: Lookup) -> Described:
        return Described(spec.function, Rows(table, ids), self._direction(spec), Formula(GATHERS))


def _folded(ids: jax.Array, length: Any, of_examples: jax.Array) -> jax.Array | None:
    """The numbers of rows where those of all examples make one table; None where kernels cannot count them, or a mesh
    splits them."""
    size = ids.shape[0]
    if not isinstance(length, int) or size * length > MOST or any(jax.typeof(of_examples).sharding.spec):
        return None
    first = lax.broadcasted_iota(jnp.int32, ids.shape, 0) * length
    return jnp.where((ids >= 0) & (ids < length), ids + first, size * length)


def _split(aval: Any) -> PartitionSpec | None:
    return aval.sharding.spec if any(aval.sharding.spec) else None


class _Sum(_ByIds):
    is_product = True

    def abstract(self, *leaves: Any, tree: Any, spec: SegmentSum) -> list[Any]:
        return [formula.result_type(spec, Positions(*leaves))]

    def formula(self, *leaves: Any, tree: Any, spec: SegmentSum) -> list[jax.Array]:
        return [formula.segment_sum(spec, Positions(*leaves))]

    def native(self, platform: str, ctx: Any, *leaves: Any, tree: Any, spec: SegmentSum) -> Sequence[Any]:
        sorts = platform == "cuda" and not spec.is_sorted

        def taken(data: jax.Array, ids: jax.Array, *onto: jax.Array) -> list[jax.Array]:
            """What a kernel takes: a matrix, whose rows are in order on a GPU."""
            rows, ids = data.reshape(ids.size, data.shape[-1]), ids.ravel()
            if not sorts:
                return [rows, ids, *onto]
            return [rows, *lax.sort((ids, lax.iota(jnp.int32, ids.size)), num_keys=1, is_stable=True), *onto]

        has_onto = len(leaves) == len(Positions._fields)
        ctx, values = lowering.replaced(taken, ctx, leaves)
        rows, columns = ctx.avals_in[0].shape
        items = rows if has_onto else rows + spec.segments
        attributes = {"has_order": sorts, "segments": np.int64(spec.segments)}
        return ffi.call(
            platform,
            TARGET,
            ctx,
            values,
            workspace=ffi.workspace(platform, TARGET, spec.out_dtype, items, max(1, columns)),
            attributes=attributes | ({"has_onto": True} if has_onto else {}),
            aliases={len(values) - 1: 0} if has_onto else None,
        )

    def of_shard(self, *leaves: Any, tree: Any, spec: SegmentSum) -> list[jax.Array]:
        """Of a device's positions in the segments that it owns. Sums over devices are rounded once, too."""
        data, ids, *onto = leaves
        if spec.owned is not None:
            ids = jnp.clip(ids - spec.owned.index() * spec.segments, -1, spec.segments)
        own = dataclasses.replace(spec, shards=None, summed=None, owned=None)
        if spec.summed is None:
            return [bind_sum(own, data, ids, *onto)]
        total = spec.summed.sum(bind_sum(dataclasses.replace(own, out_dtype=np.dtype(np.float32)), data, ids))
        return [sum((array.astype(np.float32) for array in onto), start=total).astype(spec.out_dtype)]

    def dim_maps(self, types: Any, *, spec: SegmentSum) -> CallMaps:
        """The axes are those of positions, that of segments and that of columns."""
        *positions, segments, columns = range(spec.positions + 2)
        sums = (segments, columns)
        _, _, *onto = jax.tree.leaves(types)
        of_operands: list[DimMap] = [(*positions, columns), tuple(positions), *(sums for _ in onto)]
        return CallMaps(columns + 1, of_operands, [sums], [()], [None])

    def on_device(self, spec: SegmentSum, placement: Placement) -> SegmentSum:
        *positions, segments, columns = range(spec.positions + 2)
        (own, _) = placement.shard_shape((segments, columns), (spec.segments, 1))
        return dataclasses.replace(
            spec, segments=own, summed=placement.shards(positions), owned=placement.shards([segments])
        )

    def along(self, dots: Sequence[Any], ids: Any, spec: SegmentSum) -> list[Any]:
        data, *onto = dots
        if type(data) is ad.Zero:
            return list(onto)
        return [bind_sum(spec, data, ids, *(array for array in onto if type(array) is not ad.Zero))]

    def transpose(self, cotangents: Any, data: Any, ids: Any, *onto: Any, tree: Any, spec: SegmentSum) -> list[Any]:
        (sums,) = cotangents
        if type(sums) is ad.Zero:
            return [None] * (2 + len(onto))
        of_onto = [sums if ad.is_undefined_primal(array) else None for array in onto]
        if not ad.is_undefined_primal(data):
            return [None, None, *of_onto]
        ways = {name: getattr(spec, name) for name in ("native_for", "formula_for")}
        spec_of_rows = Lookup(
            function=spec.function, out_dtype=np.dtype(data.aval.dtype), out_spec=_split(data.aval), **ways
        )
        (rows,) = bind_lookup(spec_of_rows, sums, ids)
        return [rows, None, *of_onto]

    def batch(self, leaves: Any, axes: Any, *, tree: Any, spec: SegmentSum) -> tuple[Any, Any]:
        data, ids, *onto = rules.fold(leaves, axes)
        if spec.out_spec is not None or (numbers := _folded(ids, spec.segments, data)) is None:
            fallback.tell(spec.function, Positions(*leaves), self._direction(spec), OF_EXAMPLES)
            results = jax.vmap(lambda *values: formula.segment_sum(spec, Positions(*values)))(data, ids, *onto)
            return rules.at_front(results)
        size = data.shape[0]
        # What is in no sum of an example stands behind those of all examples.
        folded = dataclasses.replace(spec, segments=size * spec.segments, positions=spec.positions + 1, is_sorted=False)
        sums = bind_sum(folded, data, numbers, *(lax.collapse(array, 0, -1) for array in onto))
        return [sums.reshape(size, spec.segments, data.shape[-1])], [0]

    def _direction(self, spec: SegmentSum) -> str:
        return "backward" if spec.function == "embedding" else "forward"

    def call(self, *leaves: Any, tree: Any, spec: SegmentSum) -> SumCall:
        return SumCall(spec, Positions(*leaves))

    def described(self, *leaves: Any, tree: Any, spec: SegmentSum) -> Described:
        call = SumCall(spec, Positions(*leaves))
        return Described(spec.function, call.operands, self._direction(spec), call)


LOOKUP, SUM = _Lookup("jaxnorm_lookup"), _Sum(TARGET)
registry.add_types(SegmentSum)


def _of_lookup(request: Request) -> SumCall:
    """The sums of its gradient."""
    ids = request.array(request.shape[:-1], np.int32)
    spec = SegmentSum(
        function="embedding", out_dtype=request.dtype, segments=request.columns, positions=len(request.shape) - 1
    )
    return SumCall(spec, Positions(request.array(request.shape, request.out_dtype), ids))


def _of_sum(request: Request) -> SumCall:
    rows, *rest = request.shape
    spec = SegmentSum(function="segment_sum", out_dtype=request.dtype, segments=request.columns)
    return SumCall(spec, Positions(request.array((rows, math.prod(rest))), request.array((rows,), np.int32)))


registry.add_functions(
    Function(
        "embedding",
        call=_of_lookup,
        last_axis_only=True,
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
    Function(
        "segment_sum",
        call=_of_sum,
        last_axis_only=True,
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
)
