"""How native calls are split over the devices of one program.

XLA gathers what a custom call reads if it does not know the call. So a primitive whose program spans several devices is
lowered to a call of `ffi.PARTITIONED`. Shardy takes shardings through it by a rule, which says along which axis of x
each axis of an operand or a result goes, its *layout*; and when XLA then partitions the program, it asks `_partition`
for what each device computes. Rows are computed where they are. Of rows that are split over devices the formula
exchanges the statistics. Weight gradients are summed over the devices that hold different rows.

A `shard_map` over some axes of a mesh leaves XLA groups of devices, which it numbers anew for each call. There a call
has one operand more, whose sharding tells which device has which number; nothing is computed with it.

What a call computes stands in its text, and nothing in it refers to the process that made it, so a program may be
cached or exported and compiled elsewhere.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive

from jaxnorm import compat, ffi, layouts
from jaxnorm.gated_reference import Gate
from jaxnorm.layouts import Layout
from jaxnorm.quantization import Quantization
from jaxnorm.reference import Norm
from jaxnorm.signatures import Layouts
from jaxnorm.split import Split

_partitionable: dict[str, tuple[Primitive, Layouts]] = {}


def register(primitive: Primitive, layouts: Layouts) -> None:
    _partitionable[primitive.name] = primitive, layouts


def lower(platform: str, primitive: Primitive, ctx: Any, *operands: Any, tree: Any, **params: Any) -> Sequence[Any]:
    """Lowers the primitive to a call that XLA has to partition, on a platform that has its kernel."""
    _, layouts_of = _partitionable[primitive.name]
    layouts_in, layouts_out = layouts_of(jax.tree.unflatten(tree, ctx.avals_in), **params)
    places = jax.tree.unflatten(tree, range(len(operands)))
    mesh = compat.partly_manual(ctx)
    text = json.dumps([platform, primitive.name, places, params, mesh], default=_encode, sort_keys=True)
    if mesh is not None:
        ctx, devices = compat.with_devices(ctx)
        operands, layouts_in = (*operands, devices), [*layouts_in, (None,) * devices.type.rank]
    return compat.partitioned_call(ctx, ffi.PARTITIONED, text, operands, layouts_in, layouts_out)


def _encode(value: object) -> dict[str, Any]:
    if isinstance(value, np.dtype):
        return {"dtype": value.name}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {type(value).__name__: fields}
    raise TypeError(f"{value!r} cannot stand in a call's text")


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_decode, value))
    if not isinstance(value, dict):
        return value
    decoded = {key: _decode(item) for key, item in value.items()}
    for kind in (Norm, Gate, Quantization):
        if kind.__name__ in decoded:
            return kind(**decoded[kind.__name__])
    return np.dtype(decoded["dtype"]) if "dtype" in decoded and len(decoded) == 1 else decoded


class Tiles(NamedTuple):
    """How x is split: the devices, along x's axes as often as each is split and then along one of copies.

    They have XLA's numbers in this call, of devices that stand for one in each of its groups.
    """

    devices: np.ndarray[Any, Any]
    groups: np.ndarray[Any, Any]  # a row for each group, its devices by their numbers in the program

    @classmethod
    def of(cls, sharding: Any, ndim: int, groups: np.ndarray[Any, Any] | None) -> "Tiles":
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

    def joined(self, axes: Sequence[int]) -> "Tiles":
        """With copies along those axes of x, instead of parts."""
        devices = np.moveaxis(self.devices, axes, range(-1 - len(axes), -1))
        counts = (1 if axis in axes else n for axis, n in enumerate(self.counts))
        return self._replace(devices=devices.reshape(*counts, -1))

    def sharding(self, layout: Layout) -> Any:
        """That of an array of this layout."""
        own = [axis for axis in layout if axis is not None]
        rest = [axis for axis in range(self.devices.ndim) if axis not in own]
        counts = [1 if axis is None else self.counts[axis] for axis in layout]
        return compat.hlo_sharding(np.transpose(self.devices, [*own, *rest]).reshape(*counts, -1))

    def part(self, layout: Layout, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of a device's part of an array."""
        sizes = zip(layout, shape, strict=True)
        return tuple(n if axis is None else -(-n // self.counts[axis]) for axis, n in sizes)

    def split(self, axes: Sequence[int]) -> Split | None:
        """The devices that hold different parts along those axes of x, and else the same; None if there is no other."""
        if all(self.counts[axis] == 1 for axis in axes):
            return None
        together = self.groups[:, np.moveaxis(self.devices, axes, range(-len(axes), 0))]
        together = together.reshape(-1, math.prod(self.counts[axis] for axis in axes))
        return Split((compat.ALL_DEVICES,), tuple(map(tuple, together.tolist())))


class Array(NamedTuple):
    """An array of a whole program."""

    shape: tuple[int, ...]
    dtype: Any
    sharding: Any

    @property
    def ndim(self) -> int:
        return len(self.shape)


def _groups(mesh: compat.PartlyManual, devices: Any) -> np.ndarray[Any, Any]:
    """The devices of each group that a `shard_map` over some axes leaves to XLA, in the order of their numbers there.

    XLA's numbers are those of the sharding of an array with an element for each of a group's devices.
    """
    numbers = np.ravel(devices.tile_assignment_devices())
    program = np.moveaxis(np.arange(math.prod(mesh.sizes)).reshape(mesh.sizes), mesh.manual, range(len(mesh.manual)))
    return program.reshape(-1, numbers.size)[:, np.argsort(numbers)]


class Call(NamedTuple):
    """One such call, as its text and XLA describe it."""

    platform: str
    primitive: Primitive
    places: Any
    params: dict[str, Any]
    operands: list[Array]
    results: list[Array]
    operand_layouts: list[Layout]
    result_layouts: list[Layout]
    groups: np.ndarray[Any, Any] | None  # of devices, in a `shard_map` over some axes

    @classmethod
    def read(cls, text: bytes, operands: list[Array], results: list[Array]) -> "Call":
        platform, name, places, params, mesh = _decode(json.loads(text))
        groups = None
        if mesh is not None:
            *operands, devices = operands
            groups = _groups(compat.PartlyManual(*mesh), devices.sharding)
        primitive, layouts_of = _partitionable[name]
        both = layouts_of(_at(places, operands), **params)
        return cls(platform, primitive, places, params, operands, results, *both, groups)

    @property
    def rank(self) -> int:
        return max(array.ndim for array in self.operands)

    @property
    def features(self) -> list[int]:
        """x's normalised axes."""
        return list(range(self.rank - len(self.params["norm"].axes), self.rank))

    def tiles(self) -> Tiles:
        """How x is split: as that one of the arrays which go along all its axes that is split most."""
        arrays = zip([*self.operands, *self.results], [*self.operand_layouts, *self.result_layouts], strict=True)
        like_x = [array for array, layout in arrays if layout == layouts.whole(self.rank)]
        shape = like_x[0].shape
        tiles = max(
            (Tiles.of(array.sharding, self.rank, self.groups) for array in like_x), key=lambda t: math.prod(t.counts)
        )
        # The last part of rows may be shorter, and what is computed beyond it is dropped. It must not be in a sum.
        have_sums = any(self._rows_without(layout) for layout in self.result_layouts)
        uneven = [axis for axis, n in enumerate(shape) if n % tiles.counts[axis]]
        tiles = tiles.joined([axis for axis in uneven if have_sums or axis in self.features])
        return tiles if self._can_split_rows(shape[-1] // tiles.counts[-1]) else tiles.joined(self.features)

    def _can_split_rows(self, cols: int) -> bool:
        """Whether parts of rows, of so many elements, can be computed: not with padding, nor with a part of a group."""
        group = getattr(self.params.get("quantization"), "group_size", None)
        return self.params["norm"].pad_to == 1 and (group is None or cols % group == 0)

    def local(self, tiles: Tiles) -> Callable[..., list[jax.Array]]:
        """What a device computes of its parts of the operands."""
        params = dict(self.params)
        sums = [tiles.split(self._rows_without(layout)) for layout in self.result_layouts]
        if "lead" in params:
            layout = layouts.weight(self.rank, len(self.features), params["lead"])[: len(params["lead"])]
            params["lead"] = tiles.part(layout, params["lead"])
        if any(sums):
            # What is added up has the dtype of weights: it is not rounded to that before.
            wide = iter(
                np.dtype(np.float32) if split else array.dtype for split, array in zip(sums, self.results, strict=True)
            )
            params["dtypes"] = tuple(None if dtype is None else next(wide) for dtype in params["dtypes"])
        # Where rows are whole on a device, this is the native call there.
        params["norm"] = dataclasses.replace(params["norm"], split=tiles.split(self.features))

        def compute(*operands: jax.Array) -> list[jax.Array]:
            operands = operands[: len(self.operands)]
            if any(sums):
                pairs = zip(operands, self.operand_layouts, strict=True)
                operands = tuple(v.astype(jnp.float32) if self._rows_without(layout) else v for v, layout in pairs)
            results = self.primitive.bind(*operands, tree=jax.tree.structure(self.places), **params)
            added = [v if split is None else split.sum(v) for split, v in zip(sums, results, strict=True)]
            return [v.astype(array.dtype) for v, array in zip(added, self.results, strict=True)]

        return compute

    def _rows_without(self, layout: Layout) -> list[int]:
        """x's axes, other than the normalised ones, that such an array does not go along."""
        return [axis for axis in range(self.features[0]) if axis not in layout]


def _at(places: Any, values: Sequence[Any]) -> Any:
    return jax.tree.map(lambda place: values[place], places)


def _partition(
    arg_shapes: Any, arg_shardings: Any, shapes: Any, shardings: Any, text: bytes
) -> tuple[bytes, list[Any], list[Any]]:
    """The program of one device, with the shardings of what it takes and gives."""
    operands, results = (
        [Array(tuple(shape.dimensions()), np.dtype(shape.numpy_dtype()), of) for shape, of in zip(*both, strict=True)]
        for both in ((arg_shapes, arg_shardings), (shapes, shardings))
    )
    call = Call.read(text, operands, results)
    tiles = call.tiles()
    pairs = zip(call.operands, call.operand_layouts, strict=True)
    parts = [jax.ShapeDtypeStruct(tiles.part(layout, array.shape), array.dtype) for array, layout in pairs]
    taken, given = (list(map(tiles.sharding, of)) for of in (call.operand_layouts, call.result_layouts))
    for devices in operands[len(parts) :]:  # which are there to be read by `Call.read`, not to be computed with
        parts.append(jax.ShapeDtypeStruct((1,) * devices.ndim, devices.dtype))
        taken.append(devices.sharding)
    program = compat.program_of_a_device(call.local(tiles), parts, call.platform, tiles.groups.size)
    return program, taken, given


compat.register_partitioner(ffi.PARTITIONED, _partition)
