"""Why no kernel takes a call of an op: the one list of reasons, in the order in which they are told.

Here is what `jaxnorm.primitive.decide` asks of a call of an `Op`. A reason is a part of a sentence.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxnorm.native import compat, ffi
from jaxnorm.primitive import decide, fallback
from jaxnorm.primitive.op import AnyOp, CallRows, Record, RowSpec, Way, rows_and_cols

MOST_ROWS = 2**31 - 1  # what CUDA counts the blocks of a grid in


class Traced(NamedTuple):
    """A call as it is traced, by the types of its operands."""

    op: AnyOp
    spec: RowSpec
    operands: Record

    @property
    def x(self) -> Any:
        return self.operands[0]

    @property
    def addend(self) -> Any:
        return getattr(self.operands, self.op.addend) if self.op.addend else None

    def with_role(self, *batch: str) -> list[tuple[str, Any]]:
        """The operands that a vmap treats so, see `Role`."""
        operands = self.operands._asdict().items()
        return [(n, a) for n, a in operands if a is not None and self.op.roles[n].batch in batch]

    def of_weights(self) -> list[tuple[str, Any]]:
        """The operands that have one value, or one row, for several rows of x."""
        broadcast = [(name, array) for name, array in self.with_role("fold") if self.op.roles[name].broadcasts]
        return [*self.with_role("weight", "formula"), *broadcast]


@dataclasses.dataclass(frozen=True)
class RowCall(decide.Call):
    """One direction of a call of an op, by the type of what it normalises, which is x or the sum.

    `traced` has the operands where they are a caller's; what a primitive has is known to be what kernels take.
    """

    op: AnyOp
    spec: RowSpec
    way: str  # of `registry.DIRECTIONS`
    normalised: Any
    adds: bool = False  # whether an addend is added first, or the cotangent of the sum
    differentiated: bool = True
    conditioned: bool = False
    traced: Traced | None = None

    @classmethod
    def of(
        cls, op: AnyOp, spec: RowSpec, operands: Record, way: Way = "forward", *, differentiated: bool = True
    ) -> "RowCall":
        """That of a caller, by the types of the operands."""
        traced = Traced(op, spec, operands)
        normalised, adds = traced.x if traced.addend is None else traced.addend, traced.addend is not None
        return cls(op, spec, way, normalised, adds, differentiated, is_conditioned(op, spec, operands), traced)

    @property
    def native_for(self) -> str | None:  # type: ignore[override]
        return self.spec.native_in(self.way)

    def rows(self, platform: str) -> CallRows:
        """The rows of its kernel."""
        x = self.normalised
        way: Way = "backward" if self.way == "backward" else "forward"
        rows, cols = rows_and_cols(self.spec, x)
        known = rows if isinstance(rows, int) else None
        shape = tuple(x.shape)
        return CallRows(platform, way, x.dtype, known, cols, self.adds, shape, self.differentiated, self.conditioned)

    def nowhere(self) -> str | None:
        if self.way == "linear":
            return "tangents have no kernel"
        if self.traced is not None and (why := why_nowhere(self.traced)) is not None:
            return why
        if self.spec.shards is not None:
            return "axis_name is given: jax.numpy exchanges the statistics, and calls kernels for what lies between"
        return None if self.op.has_kernels else "it has no kernels"

    def unserved(self, platform: str) -> str | None:
        rows, _ = rows_and_cols(self.spec, self.normalised)
        if platform != "cuda" or not isinstance(rows, int) or rows <= MOST_ROWS:
            return None
        return f"there are {rows} rows, and a CUDA kernel takes at most {MOST_ROWS}"

    def left_out(self, platform: str) -> str | None:
        if self.op.native is None:
            return None
        if (how := self.spec.formula_in(self.way)) is not None:
            return f"{fallback.ASKED_FOR}{how}"
        return None if self.native_for else slower(self.op, self.spec, self.rows(platform))


def is_conditioned(op: AnyOp, spec: RowSpec, operands: Record) -> bool:
    """Whether weights differ from row to row, and the op's factor is none."""
    given = {name: a for name, a in operands._asdict().items() if a is not None and op.roles[name].batch == "weight"}
    return op.factor not in given and any(array.ndim > spec.row_ndim for array in given.values())


def sharded_axes(call: Traced) -> str | None:
    if call.spec.shards is None:
        return None
    return "axis_name is given, and what is exchanged over devices is exchanged by jax.numpy"


def axes_not_trailing(call: Traced) -> str | None:
    axes = call.spec.axes
    if is_trailing(axes) or not call.op.is_trailing:
        return None
    return f"the normalised axes {axes} are not the trailing axes of x"


def unknown_or_no_length(call: Traced) -> str | None:
    lengths = [call.x.shape[axis] for axis in call.spec.axes]
    if not all(isinstance(length, int) for length in lengths):
        return f"the normalised axes have a symbolic length {lengths}"
    return "a normalised axis has length 0" if 0 in lengths else None


def reason_of_op(call: Traced) -> str | None:
    return next((why for reason in call.op.reasons if (why := reason(call.spec, call.operands))), None)


def dtypes(call: Traced) -> str | None:
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


def unreduced(call: Traced) -> str | None:
    arrays = [call.x, *(array for _, array in call.with_role("weight", "formula"))]
    if any(map(compat.awaits_reduction, arrays)):
        return "x or a weight awaits a reduction over an axis of an Explicit mesh"
    return None


def sharded_unlike_x(call: Traced) -> str | None:
    spec = call.x.sharding.spec
    for name, array in call.with_role("fold"):
        dim_map = call.op.roles[name].dim_map(call.spec, call.x.ndim, array.shape)
        like_x = tuple(None if axis is None else spec[axis] for axis in dim_map)
        if tuple(array.sharding.spec) != like_x:
            return f"{call.operands._fields[0]} and {name} are sharded differently over an Explicit mesh"
    return None


OF_CALL: tuple[Callable[[Traced], str | None], ...] = (
    lambda _: compat.UNKNOWN,
    sharded_axes,
    axes_not_trailing,
    unknown_or_no_length,
    reason_of_op,
    dtypes,
    sharded_unlike_x,
    unreduced,
)


@functools.lru_cache(maxsize=4096)  # or a call outside jit would spend most of its time here
def why_nowhere(call: Traced) -> str | None:
    """Why no platform has a kernel for a call; None if one has."""
    return next(filter(None, (predicate(call) for predicate in OF_CALL)), None)


def slower(op: AnyOp, spec: RowSpec, rows: CallRows) -> str | None:
    """Why XLA's code for the formula is faster than the kernel of a call."""
    return None if op.native is None else op.native.slower(spec, rows)


def is_trailing(axes: tuple[int, ...]) -> bool:
    return axes == tuple(range(-len(axes), 0))
