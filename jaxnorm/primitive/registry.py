"""The one registry, which importing an op fills: its primitives, its public functions, the dataclasses of its calls.

Whoever meets a call in a program, or a function by its name, looks here: `jaxnorm.explain`, `jaxnorm.info`, messages,
policies of `jax.checkpoint`, and what splits calls over devices.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Primitive

from jaxnorm.primitive.decide import Call

DIRECTIONS = {"forward": "forward", "linear": "tangent", "backward": "backward"}


class Described(NamedTuple):
    """A call in a program, by the name of its public function and the types of its operands, a NamedTuple."""

    name: str
    operands: Any
    direction: str  # of DIRECTIONS
    call: Call
    note: tuple[str, ...] = ()  # beside the operands


class Request(NamedTuple):
    """A call as `jaxnorm.info` describes it. `columns` are those of the matrix that x is multiplied by."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    out_dtype: np.dtype[Any]
    axes: int
    scale_shape: tuple[int, ...]
    columns: int
    addend_dtype: np.dtype[Any] | None = None  # x's if the function cannot do without an addend, else for none

    @property
    def matrix(self) -> Any:
        """The type of the matrix, with a column for each result."""
        return self.array((self.shape[-1], self.columns))

    def array(self, shape: tuple[int, ...], dtype: Any = None) -> Any:
        """The type of an operand, of x's dtype if no other is given."""
        return jax.core.ShapedArray(shape, self.dtype if dtype is None else dtype)


@dataclasses.dataclass(frozen=True)
class Function:
    """A public function as `jaxnorm.info` knows it: of an op, or by itself."""

    name: str
    request: Callable[[Request], tuple[Any, Any]] = lambda _: ((), ())  # -> the spec and the types of the operands
    call: Callable[[Request], Call] | None = None  # of one without an op
    # By name what the function takes beside or in place of x, scale, residual, axis, out_dtype and quantization.
    arguments: Callable[[Request], dict[str, Any]] = lambda _: {}
    dtypes: tuple[np.dtype[Any], ...] | None = None  # those of x, the usual one first; None: what norms take
    # Those of the result, the usual one first; None: x's or any other, (): x's.
    out_dtypes: tuple[np.dtype[Any], ...] | None = None
    last_axis_only: bool = False
    shape: tuple[int, ...] = (4096, 4096)  # x's, where none is given
    matrix: str | None = None  # the argument that x is multiplied by, or that says which rows there are
    columns: str = "columns"  # what the matrix has so many of
    over: Callable[[tuple[int, ...]], str] | None = None  # what is computed of an x of this shape, if not over axes
    by_xla: tuple[str, str] | None = None  # the direction that has no kernel anywhere, and why


@dataclasses.dataclass
class Known:
    describe: Callable[..., Described] | None = None  # the call, by the types of its operands and its parameters
    is_forward: bool = False  # of an op
    partitionable: Any = None  # see `jaxnorm.sharding.partition`


PRIMITIVES: dict[str, Known] = {}  # by name; those of exported programs of before too
OPS: dict[str, Any] = {}  # each an `Op`
FUNCTIONS: dict[str, Function] = {}  # those without an op
SIGNATURES: dict[str, Mapping[str, inspect.Parameter]] = {}  # of all public functions that take arrays
TYPES: dict[str, type[Any]] = {}  # of what is static about a call, by their names, and by those of older builds


def known(primitive: Primitive) -> Known:
    """What is known of a primitive, which may be of any package."""
    return PRIMITIVES.get(primitive.name) or Known()


def entry(primitive: Primitive) -> Known:
    """The same of one of this package, to be filled."""
    return PRIMITIVES.setdefault(primitive.name, Known())


def add_op(op: Any) -> None:
    if op.name in OPS:
        raise ValueError(f"an op {op.name!r} is registered already; give this one another name.")
    OPS[op.name] = op


def add_functions(*functions: Function) -> None:
    FUNCTIONS.update({function.name: function for function in functions})


def add_types(*types: type[Any], **former: type[Any]) -> None:
    TYPES.update({cls.__name__: cls for cls in types} | former)


def functions() -> dict[str, tuple[Any, Function]]:
    """Every public function with its op, None if it has none, in the alphabet's order."""
    of_ops = {function.name: (op, function) for op in OPS.values() for function in op.functions}
    return dict(sorted((of_ops | {name: (None, function) for name, function in FUNCTIONS.items()}).items()))
