"""How the arrays of a call that XLA partitions lie on devices."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxnorm.native import compat
from jaxnorm.sharding.dims import DimMap
from jaxnorm.sharding.shards import Shards

Parts = dict[int, np.ndarray[Any, Any]]  # of each axis that is split: which part a device has


class Array(NamedTuple):
    """An array of a whole program."""

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
        """The shape of an array's shard."""
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
