"""The record of an op: what its author writes, and everything else follows from. See `jaxnorm.primitive.family`.

An op takes x and other operands, and gives results and, where a derivative follows, *statistics*: a few numbers for
each row of x, which is all that is kept for the derivative beside operands or results. Operands, results and what a
derivative reads are NamedTuples, in which a field that may be absent has None as its default. Fields of one name are
one array, so its role is said once. They have the names that users know: messages, `jaxnorm.info` and exported programs
have these too.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import jax
import numpy as np

from jaxnorm.primitive import broadcast, registry
from jaxnorm.primitive.registry import Function
from jaxnorm.sharding import dims
from jaxnorm.sharding.dims import DimMap
from jaxnorm.sharding.shards import Shards

Record = Any  # a NamedTuple of an op, whose fields are known by their names only
BatchDims = tuple[int, ...]  # of weights, see `jaxnorm.primitive.weights`
Statistics = tuple[jax.Array, ...]
Dtype = np.dtype[Any]
T = TypeVar("T")


class OnlyY(NamedTuple):
    """The results of an op that has one."""

    y: jax.Array


class OnlyX(NamedTuple, Generic[T]):
    """What a derivative by x alone is taken by."""

    x: T | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """What is static about a call: hashable, since a primitive carries it as a parameter."""

    native_for: str | None = None  # the function that was asked for a kernel and nothing else
    native_ways: tuple[str, ...] = ("forward", "backward")  # the directions in which it was
    formula_for: tuple[tuple[str, str], ...] = ()  # those in which the formula is asked for, each with how
    shards: Shards | None = None  # where x has a shard of each row: the devices with the others
    omitted: tuple[str, ...] = ()  # results that nobody reads, and the call does not give

    @property
    def joint_axes(self) -> tuple[int, ...]:
        """The axes, from the end, whose parts on several devices exchange something."""
        return ()

    @property
    def whole_axes(self) -> tuple[int, ...]:
        """The axes, from the end, that stay on one device."""
        return ()

    def native_in(self, direction: str) -> str | None:
        """`native_for` in a direction."""
        return self.native_for if direction in self.native_ways else None

    def formula_in(self, direction: str) -> str | None:
        """How the formula is asked for in a direction; None where it is not."""
        return dict(self.formula_for).get(direction)

    def asks(self) -> dict[str, Any]:
        """The fields that say what a call is asked for, for another that it is made of."""
        return {name: getattr(self, name) for name in ("native_for", "native_ways", "formula_for")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowSpec(Spec):
    """What is static about an op on rows.

    Axes are counted from the end, so that leading axes that vmap adds change nothing.
    """

    axes: tuple[int, ...] = (-1,)  # those of a row, ascending
    compute_dtype: Dtype = np.dtype(np.float32)  # noqa: RUF009
    out_dtype: Dtype = np.dtype(np.float32)  # noqa: RUF009

    @property
    def row_ndim(self) -> int:
        return len(self.axes)

    @property
    def joint_axes(self) -> tuple[int, ...]:
        """The row's axes over which what it is made of depends on all of it: its parts exchange something."""
        return self.axes


@dataclasses.dataclass(frozen=True)
class Role:
    """How an array goes with x: its dim map, by x's rank and its own shape, and what vmap does with a batch of it.

    "fold": the batch becomes the first of its axes, as of x's. "weight": it becomes a batch dim of the weight, where a
    kernel takes that. "formula": XLA's code runs.

    `shape`, from the spec, x's shape and the batch dims of weights, is needed of a variable that is not saved. An array
    that `broadcasts` may be 1 long along axes of x, and so it is along that of a batch that it does not have; it is
    `fitted` if it differs along as few axes as let a kernel take it. `rows_of` names the array whose rows a gradient
    with this role is a sum over, if not x.
    """

    dim_map: Callable[[Any, int, Sequence[Any]], DimMap]
    batch: Literal["fold", "weight", "formula"] = "fold"
    shape: Callable[[Any, Sequence[Any], BatchDims], tuple[Any, ...]] | None = None
    broadcasts: bool = False
    fitted: bool = False
    rows_of: str | None = None

    @property
    def is_of_rows(self) -> bool:
        """Whether an array with a batch makes x one: a weight has none where x has none."""
        return self.batch == "fold" and (self.fitted or not self.broadcasts)


# Of x's shape; one element for each row, with axes of length 1 for the row's; of a row's shape, with batch dims where a
# row's axes are the last; one element for all; of x's rank, and one row for several of x's, and the same of a weight.
LIKE_X = Role(lambda spec, ndim, _: dims.like_x(ndim))
STATISTIC = Role(lambda spec, ndim, _: dims.per_row(ndim, spec.axes))
WEIGHT = Role(
    lambda spec, ndim, shape: dims.weight(ndim, spec.row_ndim, shape[: len(shape) - spec.row_ndim]),
    batch="weight",
    shape=lambda spec, shape, batch_dims: (*batch_dims, *shape[-spec.row_ndim :]),
)
SCALAR = Role(lambda *_: (), "formula")
BROADCAST = Role(lambda spec, ndim, shape: broadcast.dim_map(shape), broadcasts=True, fitted=True)
BROADCAST_WEIGHT = dataclasses.replace(BROADCAST, fitted=False)


def statistics_of(spec: RowSpec, x: Any, count: int = 1) -> list[Any]:
    """The types of so many statistics for each row of x."""
    shape = [1 if axis - x.ndim in spec.axes else length for axis, length in enumerate(x.shape)]
    return [dims.result_like(x, dims.per_row(x.ndim, spec.axes), shape, spec.compute_dtype)] * count


def rows_and_cols(spec: RowSpec, x: Any) -> tuple[Any, int]:
    """How many rows an x of this type has, and elements each; the first may be symbolic."""
    lengths = {axis - x.ndim: length for axis, length in enumerate(x.shape)}
    cols = math.prod(lengths.pop(axis) for axis in spec.axes)
    return math.prod(lengths.values()), cols


S = TypeVar("S", bound=RowSpec)
O = TypeVar("O", bound=NamedTuple)  # noqa: E741
R = TypeVar("R", bound=NamedTuple)
D = TypeVar("D", bound=NamedTuple)

Way = Literal["forward", "backward"]


class CallRows(NamedTuple):
    """The rows of a native call, as far as its speed depends on them."""

    platform: str
    way: Way
    dtype: Dtype  # of what is normalised
    rows: int | None  # None: not known before the program runs
    cols: int
    adds: bool  # whether an addend is added first, or the cotangent of the sum
    shape: tuple[Any, ...]  # of what is normalised
    differentiated: bool = True  # whether a gradient follows, or this is one
    conditioned: bool = False  # whether weights differ from row to row, and the op's factor is none


@dataclasses.dataclass(frozen=True)
class Native(Generic[S, O]):
    """The native calls of an op: their targets are `<name>_fwd` and `<name>_bwd`, for every name that it has.

    Attributes come from the spec and the types of operands. To these are added `has_<operand>` for each operand that
    may be absent; and backward `with_d<variable>` for each gradient that may be wanted, and `has_d<result>` for each
    result that may be absent. Operands and results stand in the order of their fields; backward, the first result's
    cotangent stands first, and those of others last.
    """

    names: tuple[str, ...]
    forward: Callable[[S, O], dict[str, Any]] = lambda *_: {}
    backward: Callable[[S, Any], dict[str, Any]] | None = None
    # By the operands; and by what is saved and the wanted gradients, beside or in place of what holds for weights; see
    # `ffi.workspace`.
    forward_workspace: Callable[[O], dict[str, int]] = lambda _: {}
    workspace: Callable[[Any, Any], dict[str, int]] = lambda *_: {}
    plan: Callable[[S, O], dict[str, Any]] | None = None  # what `_cuda.plan` wants to know, for `jaxnorm.info`
    # Why XLA's code for the formula is faster: it runs then, unless the call must be native.
    slower: Callable[[S, CallRows], str | None] = lambda *_: None
    which: Callable[[S], str] | None = None  # of several names

    def name(self, spec: S) -> str:
        return self.names[0] if self.which is None else self.which(spec)

    @property
    def targets(self) -> list[str]:
        directions = ["fwd"] if self.backward is None else ["fwd", "bwd"]
        return [f"{name}_{direction}" for name in self.names for direction in directions]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Derivative(Generic[S, R, D]):
    """What the derivative of an op is made of.

    `saved` is what it reads, `stats` among it. `variables` are what it is taken by: a NamedTuple of their tangents, in
    which None is zero, of their gradients, or of the dtypes of the gradients that are wanted, None for the others.
    `linear` gives the tangents of the results. `backward` is its transpose: from the cotangents of the results, the
    first of which is always there, it gives the wanted gradients, those of weights with the given batch dims. Of what
    is read, an array that `in_place` names gives its buffer to the gradient named there, if it is dead then.

    `unsaved` are variables that a derivative, though it has such fields, need not read for this spec, and the result
    that is like each. They are None in `saved`; all of their tangents are given to `linear`, zeros too.
    """

    saved: type[D]
    variables: type[Any]
    linear: Callable[[S, D, Any], R]
    backward: Callable[[S, R, D, Any, BatchDims], Any]
    backward_of_shard: Callable[[S, R, D, Any, BatchDims], Any] | None = None
    in_place: Mapping[str, str] = dataclasses.field(default_factory=dict)
    unsaved: Callable[[S], Mapping[str, str]] = lambda _: {}
    in_parts: Callable[[S], Callable[..., Any] | None] = lambda _: None  # a backward, as that of `Op` is a forward


@dataclasses.dataclass(frozen=True, kw_only=True)
class Convention(Generic[S, O, R]):
    """A derivative by convention, of an op that has no true one, as where it rounds.

    `tangents` gives the tangents of the results, None for those that do not move, and as a function those of the
    statistics; dots are the tangents of the operands, of which None is zero. The formula has the same derivative, for
    where JAX differentiates that. `carrier` is the result of zeros that moves in place of others; no kernel writes it.
    """

    carrier: str
    tangents: Callable[[S, O, R, Statistics, O], tuple[R, Callable[[], Sequence[Any]]]]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Op(Generic[S, O, R]):
    """An op on rows. x is the first field of its operands.

    Where `addend` names an operand that is there, the forward adds it to x, which it multiplies by `factor` before, a
    weight, if that is there; and it gives the sum as the result `sum`. Then
    what a derivative reads as x is the sum, and `linear` gives no tangent of it; `backward` adds the sum's cotangent to
    x's.
    """

    name: str
    spec: type[S]
    operands: type[O]
    results: type[R]
    roles: Mapping[str, Role]
    types: Callable[[S, O], R]  # of the results, from those of the operands
    forward: Callable[[S, O], tuple[R, Statistics]]
    plain: Callable[[S, O], R] | None = None  # the results in jax.numpy, for JAX to differentiate, if not `forward`'s
    # The types of the statistics, from those of the operands. Their role is `roles["stats"]`, STATISTIC if not given.
    statistics: Callable[[S, O], Sequence[Any]] = lambda spec, operands: statistics_of(spec, operands[0])
    derivative: Derivative[S, R, Any] | None = None
    convention: Convention[S, O, R] | None = None  # in place of a derivative

    native: Native[S, O] | None = None
    # Whether the formula calls kernels of other ops, and is what each device computes of the rows that it has.
    calls_others: bool = False
    reasons: tuple[Callable[[S, O], str | None], ...] = ()  # why no kernel serves a call, beside what holds for all
    is_trailing: bool = True  # whether kernels want a row's axes to be the last of x
    weights_batch: bool = False  # whether kernels take weights with batch dims, so that vmap may make some
    addend: str | None = None
    factor: str | None = None
    later: tuple[str, ...] = ()  # operands that programs of before do not have, and calls without them do not tell of
    may_omit: Callable[[S, O], tuple[str, ...]] = lambda *_: ()  # results that a call need not give
    in_place: Mapping[str, str] = dataclasses.field(default_factory=dict)  # operands, and the results in their buffers
    linear_in: Callable[[S], tuple[str, ...]] | None = None  # weights, in each of which y is linear; None: all

    # Rows with sharded axes: whether shards of so many columns can be computed, and how where it is not by the formula.
    can_shard: Callable[[S, int], bool] = lambda *_: False
    forward_of_shard: Callable[[S, O], tuple[R, Statistics]] | None = None
    # A forward of this spec by calls of ops and jax.numpy, told with_stats, where a kernel alone does not do it.
    in_parts: Callable[[S], Callable[..., tuple[R, Statistics]] | None] = lambda _: None

    note: Callable[[S, O], tuple[str, ...]] = lambda *_: ()  # what `explain` tells beside the operands
    static_types: tuple[type[Any], ...] = ()  # dataclasses within the spec
    functions: tuple[Function, ...] = ()

    @property
    def has_kernels(self) -> bool:
        return self.native is not None or self.calls_others


AnyOp = Op[Any, Any, Any]


def public_name(op: AnyOp, spec: RowSpec, arrays: Record) -> str:
    """The name of the function that such a call is one of, by its operands or the cotangents of its results."""
    known = registry.functions()
    name = op.name if op.native is None else op.native.name(spec).removeprefix("jaxnorm_")
    adds = op.addend is not None and any(getattr(arrays, field, None) is not None for field in (op.addend, "sum"))
    if adds and f"add_{name}" in known:
        return f"add_{name}"
    return op.functions[0].name if name not in known and op.functions else name
