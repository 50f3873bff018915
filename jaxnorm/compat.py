"""Every private name of JAX that jaxnorm uses, each with its reason; the file to read when a JAX release breaks one."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
from jax._src import core, dispatch, xla_bridge
from jax._src.export import _export
from jax.extend.core import Primitive


def run_eagerly(primitive: Primitive) -> None:
    """Let primitive be called outside jit: JAX compiles it alone. No public name does that for a new primitive."""
    primitive.def_impl(partial(dispatch.apply_primitive, primitive))


def match_varying_axes(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The arrays, each varying over every manual mesh axis over which one of them varies.

    JAX does this before its own primitives. Without it the gradient of a weight that is replicated under `shard_map`
    would not be summed over the mesh.
    """
    # standard_insert_pvary became auto_insert_reshard after JAX 0.10.
    insert: Any = getattr(core, "auto_insert_reshard", None) or getattr(core, "standard_insert_pvary")  # noqa: B009
    return tuple(insert(*arrays))


def allow_export(targets: Iterable[str]) -> None:
    """Let `jax.export` serialise calls of these FFI targets.

    Export refuses custom calls that are not known to stay compatible, unless each user disables the check. jaxnorm
    keeps the operands and attributes of its targets stable, so its functions export as jnp code does.
    """
    stable = getattr(_export, "_CUSTOM_CALL_TARGETS_GUARANTEED_STABLE", None)
    if isinstance(stable, set):
        stable.update(targets)


def default_platform() -> str:
    """The default backend as lowering rules name it: `jax.default_backend` says "gpu" for CUDA and ROCm alike."""
    return xla_bridge.canonicalize_platform(jax.default_backend())


def is_sharded(array: jax.Array, axes: Iterable[int]) -> bool:
    """Whether one of the axes is sharded over, or the array awaits a reduction over, an Explicit mesh axis."""
    spec: Any = jax.typeof(array).sharding.spec
    return any(spec[axis] is not None for axis in axes) or bool(spec.unreduced) or bool(spec.reduced)
