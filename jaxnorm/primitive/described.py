"""Calls and public functions as `jaxnorm.explain` and `jaxnorm.info` tell of them."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Primitive

DIRECTIONS = {"forward": "forward", "linear": "tangent", "backward": "backward"}


class Described(NamedTuple):
    """A call, by the name of its public function and the types of its operands, a NamedTuple."""

    name: str
    operands: Any
    direction: str  # of DIRECTIONS
    why_formula: Callable[[str], str | None]  # on a platform; None: a kernel runs
    native_for: str | None = None  # as in the spec


# Of each primitive that is such a call: from the types of its operands and its parameters.
DESCRIBERS: dict[Primitive, Callable[..., Described]] = {}


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
    why_formula: Callable[[str, Request], str | None] = lambda *_: None  # on a platform, of one without an op
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


WITHOUT_OP: list[Function] = []
