"""Rows with an index: what is static about a call, and its formulas in jax.numpy."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxnorm.primitive.op import Spec
from jaxnorm.sharding.dims import wide_dtype
from jaxnorm.sharding.shards import Shards


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lookup(Spec):
    function: str  # the public one
    out_dtype: np.dtype[Any]
    fill: float = 0.0  # what stands in a row that the table has not
    out_spec: PartitionSpec | None = None  # of the rows over an Explicit mesh, where table and ids do not say it
    with_table: bool = False  # as a second result, whose gradient that of the rows is added to


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentSum(Spec):
    function: str
    out_dtype: np.dtype[Any]
    segments: Any  # how many there are; an int, or symbolic
    positions: int = 1  # how many axes of data positions have
    is_sorted: bool = False
    out_spec: PartitionSpec | None = None  # of the sums over an Explicit mesh
    summed: Shards | None = None  # of positions that are split: the devices with the others
    owned: Shards | None = None  # of segments that are split: those with the others

    @property
    def joint_axes(self) -> tuple[int, ...]:
        """Of the axes of positions, that of segments and that of columns all but the last."""
        return tuple(range(-2 - self.positions, -1))


class Rows(NamedTuple):
    table: Any  # (length, columns)
    ids: Any  # int32; a row that is not in [0, length) is filled


class Positions(NamedTuple):
    """The operands of sums: where ids is not in [0, segments) data is in none."""

    data: Any  # (..., columns)
    ids: Any  # (...), int32
    onto: Any = None  # (segments, columns) of the sums' dtype, to which they are added


def lookup(spec: Lookup, operands: Rows) -> jax.Array:
    """table[ids], rounded once."""
    table, ids = operands
    if table.shape[0] == 0:  # of which JAX gathers nothing
        return jnp.full((*ids.shape, table.shape[1]), spec.fill, spec.out_dtype)
    sharding: Any = jax.typeof(table).sharding
    out_sharding = None if spec.out_spec is None else sharding.update(spec=spec.out_spec)
    rows: jax.Array = table.at[ids].get(
        mode="fill", fill_value=spec.fill, wrap_negative_indices=False, out_sharding=out_sharding
    )
    return rows.astype(spec.out_dtype)


def segment_sum(spec: SegmentSum, operands: Positions) -> jax.Array:
    """The sum of data over the positions of each segment, in float32 or wider, rounded once."""
    sharding: Any = result_type(spec, operands).sharding

    def sums(data: jax.Array, ids: jax.Array, *onto: jax.Array) -> jax.Array:
        wide = wide_dtype([data.dtype, spec.out_dtype])
        start = onto[0].astype(wide) if onto else jnp.zeros((spec.segments, data.shape[-1]), wide)
        total = start.at[ids].add(
            data.astype(wide), mode="drop", wrap_negative_indices=False, indices_are_sorted=spec.is_sorted
        )
        return total.astype(spec.out_dtype)

    arrays = jax.tree.leaves(operands)
    if any(any(jax.typeof(array).sharding.spec) for array in arrays):
        # What becomes of axes that are split JAX does not say of a sum by numbers.
        split: jax.Array = jax.sharding.auto_axes(sums, out_sharding=sharding)(*arrays)
        return split
    return sums(*arrays)


def result_type(spec: SegmentSum, operands: Positions) -> Any:
    """The type of the sums: columns are split over an Explicit mesh as data's are, if nothing else is said."""
    data: Any = jax.typeof(operands.data) if isinstance(operands.data, jax.Array) else operands.data
    out_spec = PartitionSpec(None, data.sharding.spec[-1]) if spec.out_spec is None else spec.out_spec
    return data.update(
        shape=(spec.segments, data.shape[-1]),
        dtype=spec.out_dtype,
        sharding=data.sharding.update(spec=out_spec),
        weak_type=False,
    )
