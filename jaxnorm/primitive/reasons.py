"""Why no kernel: the one list of reasons, in the order in which they are told.

The public functions ask it before they bind a primitive, lowering rules when they make code of one, `jaxnorm.info` for
a call that is only described. A reason is a part of a sentence.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm.native import compat, ffi
from jaxnorm.primitive import fallback
from jaxnorm.primitive.op import AnyOp, CallRows, Record, Way, rows_and_cols
from jaxnorm.primitive.spec import RowSpec


class Call(NamedTuple):
    """A call of an op, by the types of its operands."""

    op: AnyOp
    spec: RowSpec
    operands: Record

    @property
    def x(self) -> Any:
        return self.operands[0]

    @property
    def addend(self) -> Any:
        return getattr(self.operands, self.op.addend) if self.op.addend else None

    def rows(self, platform: str, way: Way, *, differentiated: bool = True) -> CallRows:
        """The rows of its kernel."""
        normalised, adds = self.x if self.addend is None else self.addend, self.addend is not None
        return call_rows(self.spec, normalised, platform, way, adds=adds, differentiated=differentiated)

    def with_role(self, *batch: str) -> list[tuple[str, Any]]:
        """The operands that a vmap treats so, see `Role`."""
        operands = self.operands._asdict().items()
        return [(n, a) for n, a in operands if a is not None and self.op.roles[n].batch in batch]

    def of_weights(self) -> list[tuple[str, Any]]:
        """The operands that have one value, or one row, for several rows of x."""
        broadcast = [(name, array) for name, array in self.with_role("fold") if self.op.roles[name].broadcasts]
        return [*self.with_role("weight", "formula"), *broadcast]


def call_rows(spec: RowSpec, x: Any, platform: str, way: Way, *, adds: bool, differentiated: bool = True) -> CallRows:
    """The rows of a kernel that normalises an x of this type."""
    rows, cols = rows_and_cols(spec, x)
    known = rows if isinstance(rows, int) else None
    return CallRows(platform, way, x.dtype, known, cols, adds, tuple(x.shape), differentiated)


# What CUDA counts the blocks of a grid in.
MOST_ROWS = 2**31 - 1


def too_many_rows(rows: CallRows) -> str | None:
    if rows.platform != "cuda" or rows.rows is None or rows.rows <= MOST_ROWS:
        return None
    return f"there are {rows.rows} rows, and a CUDA kernel takes at most {MOST_ROWS}"


class Place(NamedTuple):
    """A platform, and whether the op has native calls at all."""

    platform: str
    has_native: bool


def unknown_jax(_: Call) -> str | None:
    return compat.UNKNOWN


def sharded_axes(call: Call) -> str | None:
    if call.spec.shards is None:
        return None
    return "axis_name is given, and what is exchanged over devices is exchanged by jax.numpy"


def axes_not_trailing(call: Call) -> str | None:
    axes = call.spec.axes
    if is_trailing(axes) or not call.op.is_trailing:
        return None
    return f"the normalised axes {axes} are not the trailing axes of x"


def unknown_or_no_length(call: Call) -> str | None:
    lengths = [call.x.shape[axis] for axis in call.spec.axes]
    if not all(isinstance(length, int) for length in lengths):
        return f"the normalised axes have a symbolic length {lengths}"
    return "a normalised axis has length 0" if 0 in lengths else None


def reason_of_op(call: Call) -> str | None:
    return next((why for reason in call.op.reasons if (why := reason(call.spec, call.operands))), None)


def dtypes(call: Call) -> str | None:
    x, result = ("x", call.x.dtype), ("the result", call.spec.out_dtype)
    addend = [] if call.addend is None else [(str(call.op.addend), call.addend.dtype)]
    others = [(name, a.dtype) for name, a in call.of_weights()]
    for name, dtype in (x, *addend, result, *others):
        if jnp.issubdtype(dtype, jnp.floating) and dtype not in ffi.DTYPES:
            return f"{name} is {dtype}, kernels take {', '.join(sorted(d.name for d in ffi.DTYPES))}"
    # What is normalised has the addend's dtype, where there is one.
    for (a, a_dtype), (b, b_dtype) in itertools.pairwise((x, *addend, result)):
        if a_dtype != b_dtype and np.float32 not in (a_dtype, b_dtype):
            return f"{a} is {a_dtype} and {b} {b_dtype}; kernels want them equal, or one of them float32"
    return None


def unreduced(call: Call) -> str | None:
    arrays = [call.x, *(array for _, array in call.with_role("weight", "formula"))]
    if any(map(compat.awaits_reduction, arrays)):
        return "x or a weight awaits a reduction over an axis of an Explicit mesh"
    return None


def sharded_unlike_x(call: Call) -> str | None:
    spec = call.x.sharding.spec
    for name, array in call.with_role("fold"):
        dim_map = call.op.roles[name].dim_map(call.spec, call.x.ndim, array.shape)
        like_x = tuple(None if axis is None else spec[axis] for axis in dim_map)
        if tuple(array.sharding.spec) != like_x:
            return f"{call.operands._fields[0]} and {name} are sharded differently over an Explicit mesh"
    return None


def no_native(place: Place) -> str | None:
    return None if place.has_native else "it has no kernels"


def not_on_this_platform(place: Place) -> str | None:
    return None if ffi.available(place.platform) else ffi.why_not(place.platform)


def not_on_this_gpu(place: Place) -> str | None:
    return ffi.why_unfit(place.platform)


class Program(NamedTuple):
    """A program that a call is lowered in, by the context of the lowering rule."""

    ctx: Any
    is_partitionable: bool  # whether the call may be split over devices

    @property
    def is_split(self) -> bool:
        return compat.is_split_by_xla(self.ctx)


def not_partitionable(program: Program) -> str | None:
    if program.is_split and not program.is_partitionable:
        return "it has no rule for a program that XLA splits over devices"
    return None


def no_partitioner(program: Program) -> str | None:
    if program.is_split and not compat.has_partitioner():
        return "XLA splits kernels over devices with its partitioner Shardy only, which is switched off"
    return None


def unknown_shape_on_devices(program: Program) -> str | None:
    if program.is_split and not all(isinstance(n, int) for aval in program.ctx.avals_in for n in aval.shape):
        return "a program for several devices has arrays of unknown shape"
    return None


def partly_manual_on_platforms(program: Program) -> str | None:
    platforms = program.ctx.module_context.platforms
    if program.is_split and compat.partly_manual(program.ctx) and len(platforms) > 1:
        # It has branches for platforms then, and XLA does not remove those in which devices exchange something.
        return "a program for several platforms has a shard_map over some axes of a mesh"
    return None


OF_CALL: tuple[Callable[[Call], str | None], ...] = (
    unknown_jax,
    sharded_axes,
    axes_not_trailing,
    unknown_or_no_length,
    reason_of_op,
    dtypes,
    sharded_unlike_x,
    unreduced,
)
OF_PLACE: tuple[Callable[[Place], str | None], ...] = (no_native, not_on_this_platform, not_on_this_gpu)
OF_PROGRAM: tuple[Callable[[Program], str | None], ...] = (
    not_partitionable,
    no_partitioner,
    unknown_shape_on_devices,
    partly_manual_on_platforms,
)


def why_not(*, call: Call | None = None, place: Place | None = None, program: Program | None = None) -> str | None:
    """The first reason, by what is known: a call, a place, a program. None: a kernel runs."""
    if call is not None and (reason := _why_not_call(call)):
        return reason
    facts: tuple[tuple[Any, Any], ...] = ((OF_PLACE, place), (OF_PROGRAM, program))
    asked = (predicate(known) for predicates, known in facts if known is not None for predicate in predicates)
    return next(filter(None, asked), None)


@functools.lru_cache(maxsize=4096)  # or a call outside jit would spend most of its time here
def _why_not_call(call: Call) -> str | None:
    return next(filter(None, (predicate(call) for predicate in OF_CALL)), None)


def slower(op: AnyOp, spec: RowSpec, rows: CallRows) -> str | None:
    """Why XLA's code for the formula is faster than the kernel of a call; None of one that must be native."""
    return None if op.native is None or spec.native_in(rows.way) else op.native.slower(spec, rows)


def left_out(op: AnyOp, spec: RowSpec, rows: CallRows) -> str | None:
    """Why the kernel of a call is not chosen: the formula is asked for, or faster."""
    how = None if op.native is None else spec.formula_in(rows.way)
    return slower(op, spec, rows) if how is None else f"{fallback.ASKED_FOR}{how}"


def not_here(op: AnyOp, spec: RowSpec, rows: CallRows) -> str | None:
    """Why the kernel of a call does not run, by how many rows it has and how long they are, or as it is chosen."""
    return too_many_rows(rows) or left_out(op, spec, rows)


def is_trailing(axes: tuple[int, ...]) -> bool:
    return axes == tuple(range(-len(axes), 0))


def wants_primitive(op: AnyOp, spec: RowSpec, operands: Record) -> bool:
    """Whether a call should be the op's primitive: a kernel on some platform, and little kept for a derivative.

    If it must be native, an error where no kernel is at hand.
    """
    call = Call(op, spec, jax.tree.map(jax.typeof, operands))
    if spec.native_for:
        if reason := why_not(call=call, place=Place(compat.default_platform(), op.has_kernels)):
            raise cannot_serve(spec.native_for, reason)
        return True
    if spec.shards is None or compat.UNKNOWN:
        return why_not(call=call) is None
    # A primitive that exchanges shards would not know what to do with the axis of a vmap.
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return set(spec.shards.names) <= set(manual) and (is_trailing(spec.axes) or not op.is_trailing)


def cannot_serve(function: str, reason: str) -> RuntimeError:
    return RuntimeError(
        f"{function}: implementation='native' cannot serve this call: {reason}. "
        "With implementation=None XLA's code runs."
    )


def cannot_compile(function: str, platform: str, reason: str) -> RuntimeError:
    return RuntimeError(
        f"{function}: implementation='native' cannot be compiled for {platform}: {reason}. "
        "With implementation=None XLA's code runs."
    )
