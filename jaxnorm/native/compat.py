"""Every private name of JAX that jaxnorm uses, each with its reason; the file to read when a JAX release breaks one."""

import contextlib
import contextvars
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.extend.mlir import ir

from jaxnorm.native import private

checkify = private.module("jax._src.checkify")
core = private.module("jax._src.core")
custom_partitioning = private.module("jax.experimental.custom_partitioning")
dispatch = private.module("jax._src.dispatch")
jaxlib = private.module("jax._src.lib")
mlir = private.module("jax._src.interpreters.mlir")
sharding_impls = private.module("jax._src.sharding_impls")
sharding_rule = private.module("jax._src.custom_partitioning_sharding_rule")
xla_bridge = private.module("jax._src.xla_bridge")
export = private.module("jax._src.export._export")  # it is done without where it is gone

# Why no kernel may be called here; None where JAX has every name.
UNKNOWN = private.why_unknown()

ALL_DEVICES = "devices"  # the name of the axis of all devices in a program of `program_of_a_device`


def run_eagerly(primitive: Primitive) -> None:
    """Let primitive be called outside jit: JAX compiles it alone. No public name does that for a new primitive."""
    if UNKNOWN:  # at the cost of a compilation for each call
        primitive.def_impl(lambda *args, **params: jax.jit(partial(primitive.bind, **params))(*args))
    else:
        primitive.def_impl(partial(dispatch.apply_primitive, primitive))


def check_nans(primitive: Primitive) -> None:
    """Let `jax.experimental.checkify` look for NaN in the results of primitive. It knows no others than JAX's own."""
    if not UNKNOWN:
        checkify.error_checks[primitive] = partial(checkify.nan_error_check, primitive)


def match_varying_axes(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The arrays, each varying over every manual mesh axis over which one of them varies.

    JAX does this before its own primitives. Without it the gradient of a weight that is replicated under `shard_map`
    would not be summed over the mesh. Half types go through float32, in which their gradients are summed then.
    """
    if UNKNOWN:  # no primitive of jaxnorm is among what they go to
        return arrays
    # standard_insert_pvary became auto_insert_reshard after JAX 0.10.
    insert: Any = getattr(core, "auto_insert_reshard", None) or getattr(core, "standard_insert_pvary")  # noqa: B009
    summed = are_summed(*arrays)
    wide = (array.astype(np.float32) if sums else array for sums, array in zip(summed, arrays, strict=True))
    varying = zip(summed, insert(*wide), arrays, strict=True)
    return tuple(array.astype(of.dtype) if sums else array for sums, array, of in varying)


def are_summed(*arrays: jax.Array) -> list[bool]:
    """Which arrays, of half types, vary over fewer manual mesh axes than all together: their gradients are summed."""
    if UNKNOWN:
        return [False] * len(arrays)
    types: list[Any] = list(map(jax.typeof, arrays))
    all_axes = frozenset[Any]().union(*(aval.mat.varying for aval in types))
    return [aval.mat.varying != all_axes and aval.dtype in (jnp.bfloat16, jnp.float16) for aval in types]


def shard_count(array: Any, axis: int) -> int:
    """The number of devices over which an Explicit mesh shards an axis of an array, or of one of this type."""
    sharding: Any = (array if isinstance(array, jax.core.ShapedArray) else jax.typeof(array)).sharding
    names = sharding.spec[axis]
    names = names if isinstance(names, tuple) else (names,)
    return math.prod(sharding.mesh.shape[name] for name in names if name is not None)


def same_along(aval: Any, names: Iterable[Any]) -> Any:
    """The type of an array that does not vary over those manual mesh axes."""
    varying = aval.mat.varying - set(names)
    return aval.update(
        manual_axis_type=type(aval.mat)(varying=varying, unreduced=aval.mat.unreduced, reduced=aval.mat.reduced)
    )


def allow_export(targets: Iterable[str]) -> None:
    """Let `jax.export` serialise calls of these FFI targets.

    Export refuses custom calls that are not known to stay compatible, unless each user disables the check. jaxnorm
    keeps the operands and attributes of its targets stable, so its functions export as jnp code does.
    """
    stable = getattr(export, "_CUSTOM_CALL_TARGETS_GUARANTEED_STABLE", None)
    if isinstance(stable, set):
        stable.update(targets)


def default_platform(backend: str | None = None) -> str:
    """A backend, or the default one, as lowering rules name it: JAX says "gpu" for CUDA and ROCm alike."""
    backend = backend or jax.default_backend()
    return backend if UNKNOWN else str(xla_bridge.canonicalize_platform(backend))


def awaits_reduction(aval: Any) -> bool:
    """Whether an array of this type, or its cotangent, is to be reduced over an Explicit mesh axis."""
    spec = aval.sharding.spec
    return bool(spec.unreduced) or bool(spec.reduced)


def is_split_by_xla(ctx: Any) -> bool:
    """Whether XLA splits what is lowered in this context over devices; a `shard_map` over all axes has done so."""
    context = ctx.module_context.axis_context
    if isinstance(context, sharding_impls.ShardingContext):
        return context.num_devices is not None and context.num_devices > 1
    return isinstance(context, sharding_impls.SPMDAxisContext) and math.prod(_left(ctx).values()) > 1


def is_exported(ctx: Any) -> bool:
    """Whether what is lowered in this context may run on another machine. Lowering rules are told by no public name."""
    return bool(getattr(getattr(ctx.module_context, "lowering_parameters", None), "for_export", True))


def _left(ctx: Any) -> dict[Any, int]:
    """The mesh axes that a `shard_map`, and those around it, leave to XLA, with their sizes."""
    context = ctx.module_context.axis_context
    # JAX 0.10 has those of the ones around it in types only.
    manual = context.manual_axes.union(*(aval.sharding.mesh.manual_axes for aval in ctx.avals_in))
    return {name: size for name, size in context.mesh.shape.items() if name not in manual}


def has_partitioner() -> bool:
    """Whether XLA asks the partitioners of `register_partitioner`, which Shardy makes possible, how to split a call."""
    # Where there is no choice it is Shardy.
    return bool(getattr(jax.config, "jax_use_shardy_partitioner", True))


def partitioned_call(
    ctx: Any,
    target: str,
    text: str,
    operands: Sequence[Any],
    operand_maps: Iterable[Sequence[int | None]],
    result_maps: Iterable[Sequence[int | None]],
) -> Sequence[Any]:
    """A call that says to Shardy how shardings go through it, and of which XLA asks `target`'s partitioner.

    Axes of operands and results that have the same number in their dim maps are split alike, those of None are not. JAX
    sets the attribute for its own `custom_partitioning` alone.
    """
    results: Any = jax.ffi.ffi_lowering(target, api_version=2, backend_config=text)(ctx, *operands)
    own = itertools.count()
    mappings = [
        tuple(
            custom_partitioning.ArrayMapping(*(f"own{next(own)}" if axis is None else f"x{axis}" for axis in dim_map))
            for dim_map in maps
        )
        for maps in (operand_maps, result_maps)
    ]
    types = [[value.type for value in values] for values in (operands, results)]
    rule = custom_partitioning.SdyShardingRule(*mappings)
    results[0].owner.attributes["sdy.sharding_rule"] = sharding_rule.sdy_sharding_rule_to_mlir(rule, *types)
    return list(results)


class PartlyManual(NamedTuple):
    """The mesh of a `shard_map` over some of its axes, which leaves others to XLA."""

    sizes: tuple[int, ...]
    manual: tuple[int, ...]  # the axes that are the shard_map's


def partly_manual(ctx: Any) -> PartlyManual | None:
    """The mesh, in the order of the devices, if this context is in a `shard_map` over some of its axes."""
    context = ctx.module_context.axis_context
    if not isinstance(context, sharding_impls.SPMDAxisContext):
        return None
    left = _left(ctx)
    manual = (i for i, name in enumerate(context.mesh.axis_names) if name not in left)
    return PartlyManual(tuple(context.mesh.shape.values()), tuple(manual))


def with_devices(ctx: Any) -> tuple[Any, Any]:
    """The context of one operand more, and that: an array of an element for each device that a `shard_map` left to XLA.

    Its axes are the mesh axes that were left, and it is split over all of them. So its sharding says which device is
    which: XLA numbers them anew where a `shard_map` leaves it some axes only, in an order of its own for each call.
    """
    context = ctx.module_context.axis_context
    left = _left(ctx)
    axis_types = (jax.sharding.AxisType.Auto,) * len(context.mesh.axis_names)
    mesh = jax.sharding.AbstractMesh(context.mesh.axis_sizes, context.mesh.axis_names, axis_types=axis_types)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*left))
    aval = jax.core.ShapedArray(tuple(left.values()), np.dtype(np.int32))

    def spread() -> Any:
        return jax.lax.with_sharding_constraint(jnp.zeros(aval.shape, aval.dtype), sharding)

    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        (value,) = mlir.lower_fun(spread, multiple_results=False)(ctx.replace(avals_in=[], avals_out=[aval]))
    return ctx.replace(avals_in=[*ctx.avals_in, aval]), value


# What has its operand's elements, for which XLA need not compute anything.
_PASSED_ON = ("stablehlo.reshape", "stablehlo.optimization_barrier", "sdy.sharding_constraint", "sdy.reshard")


# Of the program of a device, the arguments that the whole program has computed.
_computed: contextvars.ContextVar[tuple[int, ...]] = contextvars.ContextVar("computed", default=())


@contextlib.contextmanager
def computed_arguments(places: tuple[int, ...]) -> Iterator[None]:
    """Within, `is_computed` holds for these arguments of the program that is lowered."""
    token = _computed.set(places)
    try:
        yield
    finally:
        _computed.reset(token)


def is_computed(value: Any) -> bool:
    """Whether a value of the program that is lowered is the result of an operation there.

    The others are arguments, of the program or one of its functions or loops.
    """
    while not isinstance(value.owner, ir.Block):
        operation = value.owner
        if operation.name not in _PASSED_ON:
            return True
        value = operation.operands[ir.OpResult(value).result_number]
    return ir.BlockArgument(value).arg_number in _computed.get()


def register_partitioner(target: str, partition: Callable[..., tuple[bytes, Sequence[Any], Sequence[Any]]]) -> None:
    """Let XLA ask `partition` in this process, for every backend, how to split the calls of target.

    It gets shapes and shardings of operands and of results and the call's text, and gives the program of one device and
    both shardings. JAX does this for its own `custom_partitioning` alone; that names a call by an address in its
    process, so programs with it are compiled anew in each and are not exported.
    """

    def split(arg_shapes: Any, arg_shardings: Any, shape: Any, sharding: Any, text: bytes) -> tuple[Any, Any, Any]:
        shapes, shardings = [shape], [sharding]
        if shape.is_tuple():
            shapes, shardings = shape.tuple_shapes(), sharding.tuple_elements()
        program, operands, results = partition(arg_shapes, arg_shardings, shapes, shardings, text)
        whole = jaxlib.xla_client.HloSharding.tuple_sharding(shape, results) if shape.is_tuple() else results[0]
        return program, operands, whole

    def only_for_gspmd(*_: Any) -> Any:
        raise NotImplementedError("jaxnorm is partitioned by Shardy")

    if UNKNOWN:
        return
    register = partial(
        jaxlib.xla_client.register_custom_call_partitioner,
        name=target,
        prop_user_sharding=only_for_gspmd,
        partition=split,
        infer_sharding_from_operands=only_for_gspmd,
        can_side_effecting_have_replicated_sharding=True,
    )
    register()
    xla_bridge.register_plugin_callbacks(register)


def program_of_a_device(function: Callable[..., Any], shards: Sequence[Any], platform: str, devices: int) -> bytes:
    """The program that computes function of arrays like shards on each of so many devices, ALL_DEVICES its axis.

    XLA asks for it in the midst of a compilation, perhaps under the user's mesh, which has no part in it.
    """
    mesh = jax.sharding.AbstractMesh((devices,), (ALL_DEVICES,))
    no_mesh = jax.sharding.AbstractMesh((), ())
    with jax.sharding.use_abstract_mesh(no_mesh), core.extend_axis_env_nd([(ALL_DEVICES, devices)]):
        jaxpr = jax.make_jaxpr(function)(*shards)
        module = mlir.build_mlir_module_helper(
            jaxpr,
            name="jaxnorm_shard",
            platforms=(platform,),
            backend=None,
            axis_context=sharding_impls.SPMDAxisContext(mesh, frozenset(mesh.axis_names)),
        )
        program: bytes = mlir.module_to_bytecode(module)
    return program


def hlo_sharding(devices: np.ndarray[Any, Any]) -> Any:
    """The sharding over these devices: of the axes of an array, then of one axis of copies."""
    if math.prod(devices.shape[:-1]) == 1:
        return jaxlib.xla_client.HloSharding.replicate()
    sharding = jaxlib.xla_client.OpSharding()
    sharding.type = jaxlib.xla_client.OpSharding.Type.OTHER
    sharding.tile_assignment_dimensions = list(devices.shape)
    sharding.tile_assignment_devices = devices.ravel().tolist()
    sharding.last_tile_dims = [jaxlib.xla_client.OpSharding.Type.REPLICATED]
    return jaxlib.xla_client.HloSharding.from_proto(sharding)
