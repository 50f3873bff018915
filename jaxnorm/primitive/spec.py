"""What is static about a call of a primitive."""

import dataclasses
from typing import Any

import numpy as np

from jaxnorm.sharding.shards import Shards


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
    compute_dtype: np.dtype[Any] = np.dtype(np.float32)  # noqa: RUF009
    out_dtype: np.dtype[Any] = np.dtype(np.float32)  # noqa: RUF009

    @property
    def row_ndim(self) -> int:
        """How many axes a row has."""
        return len(self.axes)

    @property
    def joint_axes(self) -> tuple[int, ...]:
        """The row's axes over which what it is made of depends on all of it: its parts exchange something."""
        return self.axes
