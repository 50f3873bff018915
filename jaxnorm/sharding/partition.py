"""How native calls are split over the devices of one program.

XLA gathers what a custom call reads if it does not know the call. So a primitive whose program spans several devices is
lowered to a call of `ffi.PARTITIONED`. Shardy takes shardings through it by a rule made of dim maps, which say along
which axis of x each axis of an operand or a result goes; and when XLA then partitions the program, it asks `_partition`
for what each device computes. Rows are computed where they are. Shards of rows exchange their statistics, by the
formula. Weight gradients are summed over the devices that hold different rows.

A `shard_map` over some axes of a mesh leaves XLA groups of devices, which it numbers anew for each call. There a call
has one operand more, whose sharding tells which device has which number; nothing is computed with it.

What a call computes stands in its text, in JSON. Nothing in that refers to the process that made it, so a program may
be cached or exported and compiled elsewhere. An exported program outlives the package's code, so what is in it stays
readable: a dataclass may get fields with defaults, and anything else needs a new VERSION.
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
from jax.sharding import PartitionSpec

from jaxnorm.native import compat, ffi
from jaxnorm.primitive import registry
from jaxnorm.primitive.registry import TYPES
from jaxnorm.sharding import dims
from jaxnorm.sharding.dims import CallMaps
from jaxnorm.sharding.shards import Array, Placement, of_product

# (the types of the operands at their places, params) -> the dim maps of the operands that are there, and of the results
DimMaps = Callable[..., CallMaps]


class Partitionable(NamedTuple):
    """A primitive that XLA may partition; one of its parameters is `spec`, with the axes of a row."""

    primitive: Primitive
    dim_maps: DimMaps
    can_shard: Callable[[Any, int], bool] = lambda *_: True  # whether there may be shards of a row of so many columns
    is_product: bool = False  # none of its arrays has all axes
    on_device: Callable[[Any, Placement], Any] = lambda spec, _: spec  # of what a device computes, by how arrays lie


def register(partitionable: Partitionable) -> None:
    primitive = partitionable.primitive
    known = registry.PRIMITIVES[_former_name(primitive)] = registry.entry(primitive)
    known.partitionable = partitionable


def _former_name(primitive: Primitive) -> str:
    """In exported programs of before."""
    op, _, direction = primitive.name.rpartition("_")
    return f"{op}_{'forward' if direction == 'fwd' else 'backward' if direction == 'bwd' else direction}"


def lower(
    platform: str, primitive: Primitive, ctx: Any, *operands: Any, tree: Any, in_place: bool, **params: Any
) -> Sequence[Any]:
    """Lowers the primitive to a call that XLA has to partition, on a platform that has its kernel.

    in_place: its native rule asks where an operand comes from.
    """
    types = jax.tree.unflatten(tree, ctx.avals_in)
    maps = registry.known(primitive).partitionable.dim_maps(types, **params)
    places = jax.tree.unflatten(tree, range(len(operands)))
    if in_place:
        params["computed"] = [place for place, operand in enumerate(operands) if compat.is_computed(operand)]
    mesh = compat.partly_manual(ctx)
    call = encode(platform, primitive.name, places, params, mesh)
    if mesh is not None:
        ctx, devices = compat.with_devices(ctx)
        operands = *operands, devices
        maps.operands.append((None,) * devices.type.rank)
    return compat.partitioned_call(ctx, ffi.PARTITIONED, call, operands, maps.operands, maps.results)


def _groups(mesh: compat.PartlyManual, devices: Any) -> np.ndarray[Any, Any]:
    """The devices of each group that a `shard_map` over some axes leaves to XLA, in the order of their numbers there.

    XLA's numbers are those of the sharding of an array with an element for each of a group's devices.
    """
    numbers = np.ravel(devices.tile_assignment_devices())
    program = np.moveaxis(np.arange(math.prod(mesh.sizes)).reshape(mesh.sizes), mesh.manual, range(len(mesh.manual)))
    return program.reshape(-1, numbers.size)[:, np.argsort(numbers)]


class PartitionedCall(NamedTuple):
    platform: str
    partitionable: Partitionable
    places: Any
    params: dict[str, Any]
    operands: list[Array]
    results: list[Array]
    maps: CallMaps
    groups: np.ndarray[Any, Any] | None  # of devices, in a `shard_map` over some axes
    computed: tuple[int, ...]  # the operands that the whole program has computed, as far as that is asked

    @classmethod
    def read(cls, call: bytes, operands: list[Array], results: list[Array]) -> "PartitionedCall":
        platform, name, places, params, mesh = decode(call)
        groups = None
        if mesh is not None:
            *operands, devices = operands
            groups = _groups(compat.PartlyManual(*mesh), devices.sharding)
        computed = params.pop("computed", ())
        partitionable: Partitionable = registry.PRIMITIVES[name].partitionable
        types = jax.tree.map(lambda place: jax.core.ShapedArray(operands[place].shape, operands[place].dtype), places)
        maps = partitionable.dim_maps(types, **params)
        return cls(platform, partitionable, places, params, operands, results, maps, groups, computed)

    @property
    def features(self) -> list[int]:
        """The axes of x whose parts on several devices exchange something."""
        return [self.maps.ndim + axis for axis in self.params["spec"].joint_axes]

    def placement(self) -> Placement:
        """How x is sharded: as that one of the arrays with all of its axes which is sharded most."""
        arrays = [*self.operands, *self.results]
        ndim = self.maps.ndim
        pairs = list(zip(arrays, [*self.maps.operands, *self.maps.results], strict=True))
        cols = 0
        if self.partitionable.is_product:
            *of_operands, of_result = pairs
            placement = of_product(of_operands, of_result, ndim, self.groups)
        else:
            like_x = [array for array, dim_map in pairs if dim_map == dims.like_x(ndim)]
            placements = (Placement.of(array.sharding, ndim, self.groups) for array in like_x)
            placement = max(placements, key=lambda placement: math.prod(placement.counts))
            cols = like_x[0].shape[-1]
        # The last shard of rows may be shorter, and what is computed beyond it is dropped. It must not be in a sum, nor
        # in what goes along no axis of x because it has one element there.
        lengths = {(axis, n) for array, dim_map in pairs for axis, n in zip(dim_map, array.shape, strict=True)}
        uneven = {(axis, n) for axis, n in lengths if axis is not None and n % placement.counts[axis]}
        has_sum = any(self.maps.summed)
        whole = {axis for axis, n in uneven if has_sum or axis in self.features or n == 1}
        whole |= {ndim + axis for axis in self.params["spec"].whole_axes}
        placement = placement.joined(sorted(whole))
        can_shard = self.partitionable.can_shard(self.params["spec"], cols // placement.counts[-1])
        return placement if can_shard else placement.joined(self.features)

    def local(self, placement: Placement) -> Callable[..., list[jax.Array]]:
        """What a device computes of its shards of the operands."""
        params = dict(self.params)
        sums = [placement.shards(axes) for axes in self.maps.summed]
        if "batch_dims" in params:
            dim_map = dims.weight(self.maps.ndim, len(self.features), params["batch_dims"])[: len(params["batch_dims"])]
            params["batch_dims"] = placement.shard_shape(dim_map, params["batch_dims"])
        wide: set[int | None] = set()
        if "wanted" in params:
            # A gradient that is added up over devices has the dtype of its weight: it is not rounded to that before. A
            # kernel gives it in the dtype in which it takes the weight.
            wide = {place for place, over in zip(self.maps.gradient_of, sums, strict=True) if over}
            dtypes = iter(
                np.dtype(np.float32) if over else array.dtype for over, array in zip(sums, self.results, strict=True)
            )
            params["wanted"] = tuple(None if dtype is None else next(dtypes) for dtype in params["wanted"])
        # Where rows are whole on a device, this is the native call there.
        spec = dataclasses.replace(params["spec"], shards=placement.shards(self.features))
        params["spec"] = self.partitionable.on_device(spec, placement)

        def compute(*operands: jax.Array) -> list[jax.Array]:
            own = enumerate(operands[: len(self.operands)])
            given = (v.astype(jnp.float32) if place in wide else v for place, v in own)
            results = self.partitionable.primitive.bind(*given, tree=jax.tree.structure(self.places), **params)
            added = [v if over is None else over.sum(v) for over, v in zip(sums, results, strict=True)]
            return [v.astype(array.dtype) for v, array in zip(added, self.results, strict=True)]

        return compute


def _partition(
    arg_shapes: Any, arg_shardings: Any, shapes: Any, shardings: Any, call_text: bytes
) -> tuple[bytes, list[Any], list[Any]]:
    """The program of one device, with the shardings of what it takes and gives."""
    operands, results = (
        [Array(tuple(shape.dimensions()), np.dtype(shape.numpy_dtype()), of) for shape, of in zip(*both, strict=True)]
        for both in ((arg_shapes, arg_shardings), (shapes, shardings))
    )
    call = PartitionedCall.read(call_text, operands, results)
    placement = call.placement()
    pairs = zip(call.operands, call.maps.operands, strict=True)
    shards = [jax.ShapeDtypeStruct(placement.shard_shape(dim_map, a.shape), a.dtype) for a, dim_map in pairs]
    taken, given = (list(map(placement.sharding, of)) for of in (call.maps.operands, call.maps.results))
    for devices in operands[len(shards) :]:  # there to be read above, not to be computed with
        shards.append(jax.ShapeDtypeStruct((1,) * devices.ndim, devices.dtype))
        taken.append(devices.sharding)
    with compat.computed_arguments(call.computed):
        program = compat.program_of_a_device(call.local(placement), shards, call.platform, placement.groups.size)
    return program, taken, given


compat.register_partitioner(ffi.PARTITIONED, _partition)


VERSION = 1


def encode(*call: Any) -> str:
    return json.dumps([VERSION, *call], default=_encode, sort_keys=True)


def decode(text: bytes) -> Any:
    """The arguments of `encode`, with tuples in place of lists."""
    version, *call = _decode(json.loads(text))
    if version != VERSION:
        raise ValueError(
            f"jaxnorm: a program has a call of version {version}, this jaxnorm reads {VERSION}; export it again."
        )
    return call


def _encode(value: object) -> dict[str, Any] | None:
    if isinstance(value, np.dtype):
        return {"dtype": value.name}
    if isinstance(value, PartitionSpec):  # over an Explicit mesh, which a device's program has no axis of
        return None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {type(value).__name__: fields}
    raise TypeError(f"{value!r} cannot stand in a call's text")


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_decode, value))
    if value == "jnp":  # what the implementation "xla" was called
        return "xla"
    if not isinstance(value, dict):
        return value
    decoded = {key: _decode(item) for key, item in value.items()}
    if len(decoded) > 1:
        return decoded
    ((name, content),) = decoded.items()
    if name == "dtype":
        return np.dtype(content)
    return TYPES[name](**content) if name in TYPES else decoded
