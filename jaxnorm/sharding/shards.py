"""Rows with sharded axes, of which each device holds an equal shard, and how a call's arrays lie on devices."""

import dataclasses
import itertools
import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm.native import compat, private
from jaxnorm.sharding.dims import DimMap


@dataclasses.dataclass(frozen=True)
class Shards:
    """The axes over which the shards of a row exchange something; hashable, so that a primitive carries it."""

    names: tuple[Hashable, ...]  # mesh axes, or those that a vmap named
    groups: tuple[tuple[int, ...], ...] | None = None  # of the positions along the only name; None is all of them

    def mean(self, *shards: jax.Array) -> list[jax.Array]:
        """The mean of each array over the shards, in one exchange."""
        check_no_jet(shards)
        stacked = shards[0] if len(shards) == 1 else jnp.stack(shards)
        mean = lax.pmean(stacked, self.names, axis_index_groups=self.groups)
        # Typed as different on each device, as what it is computed with is: so are all results of a primitive.
        mean, _ = compat.match_varying_axes(mean, stacked)
        return [mean] if len(shards) == 1 else list(mean)

    def gather(self, *shards: jax.Array) -> list[jax.Array]:
        """Each array from all shards, along a new axis in front, in one exchange."""
        check_no_jet(shards)
        # Along an axis that is there: beside one that is new, JAX mistakes which axes an Explicit mesh shards.
        stacked = jnp.expand_dims(jnp.stack(shards), 1)
        return list(lax.all_gather(stacked, self.names, axis=1, tiled=True, axis_index_groups=self.groups))

    def max(self, shard: jax.Array) -> jax.Array:
        """The greatest over the shards, for float32 that is not negative; NaN if there is one.

        Such numbers are ordered as their bits are, with NaN above all others; of floats, not every backend's maximum
        over devices keeps a NaN.
        """
        bits = lax.bitcast_convert_type(shard, jnp.int32)
        greatest = lax.pmax(bits, self.names, axis_index_groups=self.groups)
        return lax.bitcast_convert_type(greatest, jnp.float32)

    def top(self, shard: jax.Array) -> jax.Array:
        """The greatest over the shards, for what is only subtracted: it has no derivative, and NaN may be lost."""
        check_no_jet([shard])
        greatest: jax.Array = lax.pmax(lax.stop_gradient(shard), self.names, axis_index_groups=self.groups)
        return greatest

    def sum(self, shard: jax.Array | int) -> jax.Array:
        total: jax.Array = lax.psum(shard, self.names, axis_index_groups=self.groups)
        return total

    def add(self, shard: jax.Array) -> jax.Array:
        """The sum over the shards, typed as different on each device."""
        check_no_jet([shard])
        total, _ = compat.match_varying_axes(self.sum(shard), shard)
        return total

    def index(self) -> jax.Array:
        """Which of the shards this one is."""
        position = lax.axis_index(self.names)
        if self.groups is None:
            return position
        order = np.zeros(sum(map(len, self.groups)), np.int32)
        for group in self.groups:
            order[list(group)] = range(len(group))
        return jnp.asarray(order)[position]


def check_no_jet(shards: Iterable[jax.Array]) -> None:
    if any(map(private.has_jet_terms, shards)):
        raise NotImplementedError(
            "jaxnorm: axis_name is not supported under jax.experimental.jet, which has no rules for what devices "
            "exchange; nest jax.jvp instead, or leave axis_name out and let XLA split the rows."
        )


Parts = dict[int, np.ndarray[Any, Any]]  # of each axis that is split: which part a device has


class Array(NamedTuple):
    shape: tuple[int, ...]
    dtype: Any
    sharding: Any

    @property
    def ndim(self) -> int:
        return len(self.shape)


class Placement(NamedTuple):
    """How x is sharded: the devices, along x's axes as often as each is sharded and then along one of copies.

    They have XLA's numbers in this call, of devices that stand for one in each of its groups.
    """

    devices: np.ndarray[Any, Any]
    groups: np.ndarray[Any, Any]  # a row for each group, its devices by their numbers in the program

    @classmethod
    def of(cls, sharding: Any, ndim: int, groups: np.ndarray[Any, Any] | None) -> "Placement":
        if sharding is None or not sharding.is_tiled():
            devices = np.zeros((1,) * (ndim + 1), int)
        else:
            counts = sharding.tile_assignment_dimensions()
            devices = np.reshape(sharding.tile_assignment_devices(), (*counts[:ndim], -1))
        return cls(devices, np.arange(devices.size)[None] if groups is None else groups)

    @property
    def counts(self) -> tuple[int, ...]:
        *counts, _ = self.devices.shape
        return tuple(counts)

    def joined(self, axes: Sequence[int]) -> "Placement":
        """With copies along those axes of x, instead of shards."""
        devices = np.moveaxis(self.devices, axes, range(-1 - len(axes), -1))
        counts = (1 if axis in axes else n for axis, n in enumerate(self.counts))
        return self._replace(devices=devices.reshape(*counts, -1))

    def sharding(self, dim_map: DimMap) -> Any:
        """That of an array with this dim map."""
        own = [axis for axis in dim_map if axis is not None]
        rest = [axis for axis in range(self.devices.ndim) if axis not in own]
        counts = [1 if axis is None else self.counts[axis] for axis in dim_map]
        return compat.hlo_sharding(np.transpose(self.devices, [*own, *rest]).reshape(*counts, -1))

    def shard_shape(self, dim_map: DimMap, shape: Sequence[int]) -> tuple[int, ...]:
        sizes = zip(dim_map, shape, strict=True)
        return tuple(n if axis is None else -(-n // self.counts[axis]) for axis, n in sizes)

    def shards(self, axes: Sequence[int]) -> Shards | None:
        """The devices with different shards along those axes of x, and else the same; None if there is no other."""
        if all(self.counts[axis] == 1 for axis in axes):
            return None
        together = self.groups[:, np.moveaxis(self.devices, axes, range(-len(axes), 0))]
        together = together.reshape(-1, math.prod(self.counts[axis] for axis in axes))
        return Shards((compat.ALL_DEVICES,), tuple(map(tuple, together.tolist())))


def of_product(
    operands: Sequence[tuple[Array, DimMap]],
    result: tuple[Array, DimMap],
    ndim: int,
    groups: np.ndarray[Any, Any] | None,
) -> Placement:
    """That of a product, none of whose arrays has all axes.

    What is summed is split as in both operands, and added up. Else the result says how its axes are split, then x, and
    then the other operands, as far as devices can have these parts beside those before. So weights are gathered that
    are split over the devices of x's rows.
    """
    x, weights, *others = [_parts_of(*pair) for pair in operands]
    alike = {axis: part for axis, part in x.items() if axis in weights and _is_alike(part, weights[axis])}
    parts = _beside(alike, _parts_of(*result), x, weights, *others)
    if not parts:
        return Placement.of(None, ndim, groups)
    order = np.lexsort([parts[axis] for axis in sorted(parts, reverse=True)])
    counts = (parts[axis].max() + 1 if axis in parts else 1 for axis in range(ndim))
    devices = order.reshape(*counts, -1)
    return Placement(devices, np.arange(devices.size)[None] if groups is None else groups)


def _parts_of(array: Array, dim_map: DimMap) -> Parts:
    devices = Placement.of(array.sharding, array.ndim, None).devices
    parts: Parts = {}
    for own, axis in enumerate(dim_map):
        if axis is not None and devices.shape[own] > 1:
            parts[axis] = np.empty(devices.size, int)
            parts[axis][devices] = np.indices(devices.shape)[own]
    return parts


def _is_alike(*parts: np.ndarray[Any, Any]) -> bool:
    """Whether one of two ways to split an axis splits the parts of the other."""
    return bool(np.unique(parts, axis=1).shape[1] == max(part.max() + 1 for part in parts))


def _beside(*all_parts: Parts) -> Parts:
    """The parts of all axes, each as the first has it that devices can have beside those before."""
    found: Parts = {}
    for axis, part in itertools.chain.from_iterable(parts.items() for parts in all_parts):
        if axis not in found:
            together, many = np.unique([*found.values(), part], axis=1, return_counts=True)
            if len(many) == math.prod(together.max(1) + 1) and len(set(many)) == 1:
                found[axis] = part
    return found
