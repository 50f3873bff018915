"""The public functions of rows with an index."""

import math
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxnorm.native import compat
from jaxnorm.ops import checks, misuse
from jaxnorm.ops.embedding import op
from jaxnorm.ops.embedding.formula import Lookup, Positions, SegmentSum
from jaxnorm.ops.misuse import explained
from jaxnorm.ops.options import Choice, Implementation
from jaxnorm.primitive import decide


class _Options(TypedDict, total=False):
    dtype: Any
    out_sharding: Any
    implementation: Implementation | None


@overload
def embedding(table: Any, ids: Any, *, return_table: Literal[False] = False, **_: Unpack[_Options]) -> jax.Array: ...
@overload
def embedding(
    table: Any, ids: Any, *, return_table: Literal[True], **_: Unpack[_Options]
) -> tuple[jax.Array, jax.Array]: ...
@explained
def embedding(
    table: Any,
    ids: Any,
    *,
    dtype: Any = None,
    out_sharding: Any = None,
    return_table: bool = False,
    implementation: Implementation | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Looks up rows of a table, and sums its gradient in float32, in a fixed order, rounded once.

        rows[i] = table[ids[i]]                         rounded to dtype; NaN where the table has no such row
        dtable[v] = sum of drows[i] over ids[i] = v     a row that nobody reads has the gradient 0

        >>> rows = embedding(jnp.ones((8, 4)), jnp.array([0, 3, 3]), dtype=jnp.bfloat16)

    XLA gathers the rows everywhere. A kernel computes the gradient, with the same bits in each run. XLA adds rows by
    atomic operations on GPUs, in any order, and for `table.astype(dtype)[ids]` in dtype.

    Args:
      table: floating-point array (rows, columns).
      ids: integers of any shape, the numbers of rows; negative ones count from the end.
      dtype: that of the result, to which the rows are rounded once. None is table's.
      out_sharding: the result's over an Explicit mesh, as for `jax.numpy.take`.
      return_table: whether to return table too, for the head that is tied to it: the kernel adds the gradient of the
        rows into that of this result, where JAX would add up two arrays of table's size.

    Raises:
      ValueError: table is no matrix.
      TypeError: table is not floating-point, or ids are no integers.
      RuntimeError: implementation="native", and no kernel serves the gradient.
    """
    name = "embedding"
    checks.check_order(name, "ids", ids, table=table)
    weights, numbers = checks.check_array(name, "table", table), _check_ids(name, "ids", ids)
    if weights.ndim != 2:
        raise ValueError(f"{name}: table has shape {weights.shape}, expected (rows, columns). Reshape table.")
    out_dtype = checks.check_out_dtype(name, dtype, weights.dtype, "dtype")
    choice = checks.check_implementation(name, implementation)
    with_table, of_table = checks.check_flag(name, "return_table", return_table), weights.dtype
    if compat.are_summed(weights, numbers)[0]:
        weights = weights.astype(np.float32)  # in which the gradient is summed over devices, too
    length = _check_length(name, "table has", "rows", weights.shape[0])
    spec = Lookup(
        function=name,
        out_dtype=out_dtype,
        fill=np.nan,
        out_spec=_check_sharding(name, out_sharding),
        with_table=with_table,
        **choice.asks(name),
    )
    if choice.backward.implementation == "native":
        sums = SegmentSum(
            function=name,
            out_dtype=np.dtype(weights.dtype),
            segments=length,
            positions=numbers.ndim,
            native_for=spec.native_in("backward"),
        )
        of_rows = jax.ShapeDtypeStruct((*numbers.shape, weights.shape[1]), out_dtype)
        decide.check_native(op.SumCall(sums, Positions(of_rows, numbers)))
    rows, *tables = op.bind_lookup(spec, weights, _from_the_end(numbers, length))
    return (rows, tables[0].astype(of_table)) if tables else rows


@explained
def segment_sum(
    data: Any,
    segment_ids: Any,
    num_segments: Any = None,
    *,
    indices_are_sorted: bool = False,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Sums rows by the numbers of their segments, in float32, in a fixed order, and rounds once.

        sums[v] = sum of data[i] over segment_ids[i] = v     numbers that are negative or too large are in no sum

        >>> sums = segment_sum(jnp.ones((3, 4)), jnp.array([0, 3, 3]), 8)

    It replaces `jax.ops.segment_sum`, whose bits differ from run to run on GPUs, and which still sums integers and
    complex numbers. XLA computes the gradient, a gather.

    Args:
      data: array of rank 1 or more, with the rows along its first axis.
      segment_ids: integers of the length of that axis.
      num_segments: how many sums there are. None is one more than the largest number, which must be known.
      indices_are_sorted: promises that the numbers ascend, which saves the sort. If they do not, sums are wrong.

    Raises:
      ValueError: shapes do not fit, or num_segments is negative.
      TypeError: segment_ids are no integers, or num_segments must be known and is traced.
      RuntimeError: implementation="native", and no kernel serves the call.
    """
    name = "segment_sum"
    checks.check_order(name, "segment_ids", segment_ids, data=data)
    numbers = _check_ids(name, "segment_ids", segment_ids)
    is_sorted = checks.check_flag(name, "indices_are_sorted", indices_are_sorted)
    choice = checks.check_implementation(name, implementation)
    array = jnp.asarray(data) if checks.is_array(data) else None
    segments = _check_segments(name, num_segments, numbers)
    if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
        _check_rows(name, array, numbers)
        if choice.forward.implementation == "native":
            raise decide.not_native(f"{name}{choice.forward.how}", "cannot serve this call", f"data is {array.dtype}")
        return jax.ops.segment_sum(array, numbers, segments, indices_are_sorted=is_sorted)
    array = checks.check_array(name, "data", data)
    _check_rows(name, array, numbers)
    rest = array.shape[1:]
    rows = _as_matrix(array)
    spec = SegmentSum(
        function=name, out_dtype=np.dtype(array.dtype), segments=segments, is_sorted=is_sorted, **_forward(choice, name)
    )
    decide.check_native(op.SumCall(spec, Positions(jax.typeof(rows), numbers)))
    return op.bind_sum(spec, rows, _in_order(numbers, segments)).reshape(segments, *rest)


def _forward(choice: Choice, name: str) -> dict[str, Any]:
    asked = choice.asks(name)
    is_native = "forward" in asked.get("native_ways", ())
    return {**asked, "native_for": asked["native_for"] if is_native else None}


def _check_ids(function: str, name: str, value: Any) -> Any:
    """value as an array of integers, of the dtype that it has."""
    if not checks.is_array(value) and not isinstance(value, (int, list, tuple)):
        raise TypeError(
            f"{function}: {name} must be an array of integers, got {type(value).__name__}; "
            f"{misuse.no_array(name, value)}"
        )
    # Of integers of 64 bits jax.numpy makes others of 32, which may be those of rows.
    numbers: Any = value if isinstance(value, (np.ndarray, np.generic)) else jnp.asarray(value)
    if not jnp.issubdtype(numbers.dtype, jnp.integer):
        raise TypeError(f"{function}: {name} must be an array of integers, got {numbers.dtype}; they number rows.")
    return numbers


def _check_sharding(function: str, value: Any) -> PartitionSpec | None:
    spec = getattr(value, "spec", value)
    if spec is None or isinstance(spec, PartitionSpec):
        return spec
    raise TypeError(
        f"{function}: out_sharding must be a jax.sharding.NamedSharding or PartitionSpec, got {type(value).__name__}."
    )


def _check_rows(function: str, data: Any, numbers: Any) -> None:
    if data.ndim == 0:
        raise ValueError(f"{function}: data must have at least one axis, got a scalar: the first one has the rows.")
    if numbers.shape != data.shape[:1]:
        raise ValueError(
            f"{function}: segment_ids have shape {numbers.shape}, expected {data.shape[:1]}: a number for each row of "
            f"data, which has shape {data.shape}."
        )


def _as_matrix(data: jax.Array) -> jax.Array:
    """With one axis of columns; several are gathered where an Explicit mesh splits one of them."""
    sharding: Any = jax.typeof(data).sharding
    if data.ndim > 2 and any(sharding.spec[1:]):
        data = jax.sharding.reshard(data, sharding.update(spec=PartitionSpec(sharding.spec[0])))
    return data.reshape(data.shape[0], math.prod(data.shape[1:]))


def _check_segments(function: str, value: Any, numbers: Any) -> Any:
    if value is None:
        if isinstance(numbers, jax.core.Tracer):
            raise TypeError(
                f"{function}: segment_ids are traced, and num_segments must be known while tracing; pass an int."
            )
        return max(0, int(np.max(np.asarray(numbers))) + 1) if numbers.size else 0
    if jax.export.is_symbolic_dim(value):
        return value
    if (segments := checks.check_int(function, "num_segments", value, "it is how many sums there are")) < 0:
        raise ValueError(f"{function}: num_segments must not be negative, got {segments}.")
    return _check_length(function, "num_segments is", "", segments)


def _check_length(function: str, what: str, unit: str, length: Any) -> Any:
    if isinstance(length, int) and length >= 2**31:
        raise ValueError(
            f"{function}: {what} {length}{unit and ' '}{unit}, expected less than 2³¹, as int32 numbers them."
        )
    return length


def _from_the_end(numbers: Any, length: Any) -> jax.Array:
    """The numbers of rows as int32: those from the end are counted from the front, others that no row has are length.

    Nothing is cast before: 2³² of 64 bits is no row, and the greatest of uint32 not the last one.
    """
    if numbers.dtype.itemsize < 4:
        numbers = numbers.astype(np.int32)
    of = np if isinstance(numbers, np.ndarray) else jnp
    is_signed = jnp.issubdtype(numbers.dtype, jnp.signedinteger)
    wrapped = of.where(numbers < 0, numbers + length, numbers) if is_signed else numbers
    is_there = (wrapped >= 0) & (wrapped < length) if is_signed else wrapped < length
    return jnp.asarray(of.where(is_there, wrapped, length).astype(np.int32))


def _in_order(numbers: Any, segments: Any) -> jax.Array:
    """The numbers of segments as int32, in the order that they have: of those that are none -1, or `segments`."""
    if numbers.dtype.itemsize < 4:
        numbers = numbers.astype(np.int32)
    of = np if isinstance(numbers, np.ndarray) else jnp
    at_least = of.maximum(numbers, -1) if jnp.issubdtype(numbers.dtype, jnp.signedinteger) else numbers
    return jnp.asarray(of.where(at_least < segments, at_least, segments).astype(np.int32))
