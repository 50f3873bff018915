"""The op of GroupNorm."""

import math
from typing import Any

import numpy as np

from jaxnorm.ops.group_norm import channels_first
from jaxnorm.ops.group_norm.channels_first import is_channels_first
from jaxnorm.ops.group_norm.formula import (
    GroupNorm,
    Operands,
    Results,
    Saved,
    Variables,
    backward,
    forward,
    linear,
    plain,
)
from jaxnorm.primitive.family import Family
from jaxnorm.primitive.op import BROADCAST_WEIGHT, LIKE_X, CallRows, Derivative, Native, Op, statistics_of
from jaxnorm.primitive.registry import Function, Request
from jaxnorm.sharding import dims

# The most channels of a group without positions that a CPU's kernels are slower for; measured on 2 cores with AVX2,
# (512, 640) in 32 groups: 0.4 to 0.9 of XLA's speed.
SHORT = 64
# Examples of fewer positions XLA's code is faster for on a GPU; measured on an H200 with `python -m bench gpu`.
FEW_POSITIONS = {"forward": 64, "backward": 16}
# And for a result of as little float32, for which three launches take too long: (2, 16, 16, 1280) 11.6 to 10.5 µs.
FEW_WIDE = 2**20

ROLES = {"x": LIKE_X, "scale": BROADCAST_WEIGHT, "bias": BROADCAST_WEIGHT, "y": LIKE_X}


def _types(norm: GroupNorm, operands: Operands) -> Results:
    return Results(dims.like(operands.x, norm.out_dtype))


def _channels_between(norm: GroupNorm, _: Any) -> str | None:
    is_last = norm.axes[-1] == -1 and -2 not in norm.axes
    return None if is_last or is_channels_first(norm) else "channels are between the positions of x"


def _no_channels(norm: GroupNorm, operands: Any) -> str | None:
    groups = -1 - norm.row_ndim if is_channels_first(norm) else -2
    return "x has no channels" if operands[0].shape[groups] == 0 else None


def _slower(norm: GroupNorm, rows: CallRows) -> str | None:
    """Kernels go down the positions of an example: of few, or none, they have little to do at once."""
    if is_channels_first(norm):
        return channels_first.slower(rows)
    positions = math.prod(rows.shape[axis] for axis in norm.axes[:-1])
    if rows.platform == "cpu":
        loses = norm.row_ndim == 1 and rows.cols <= SHORT
        return f"XLA's code is faster for groups of at most {SHORT} channels without positions" if loses else None
    if rows.shape[-2] * rows.shape[-1] % 4:
        return f"XLA's code is faster for channels that 4 does not divide, as {rows.shape[-2] * rows.shape[-1]}"
    if rows.way == "forward" and rows.dtype.itemsize == 4 and rows.rows and rows.rows * rows.cols <= FEW_WIDE:
        return f"XLA's code is faster for the result of at most {FEW_WIDE} elements of float32"
    few = FEW_POSITIONS[rows.way]
    return f"XLA's code is faster for examples of less than {few} positions" if positions < few else None


def _attributes(norm: GroupNorm, _: Any) -> dict[str, Any]:
    return {
        "axes": np.int64(norm.row_ndim),
        "scale_offset": np.float32(norm.scale_offset),
        "activation": norm.activation or "none",
    }


def _sizes(x: Any) -> dict[str, int]:
    """How many groups there are, and channels in each: what a workspace depends on beside the elements of a group."""
    *_, groups, group_size = x.shape
    return {"count": groups, "inner": group_size}


def _requested(request: Request) -> tuple[GroupNorm, Operands]:
    *others, channels = request.shape
    groups = math.gcd(32, channels)
    x = request.array((*others, groups, channels // groups))
    norm = GroupNorm(
        axes=(*range(-1 - len(others), -2), -1),
        epsilon=1e-6,
        scale_offset=-0.0,
        compute_dtype=dims.wide_dtype((request.dtype, request.out_dtype)),
        out_dtype=request.out_dtype,
    )
    weight = request.array((*(1 for _ in others), groups, channels // groups))
    return norm, Operands(x, weight, weight)


GROUP_NORM = Family(
    Op(
        name="group_norm",
        spec=GroupNorm,
        operands=Operands,
        results=Results,
        roles=ROLES,
        types=_types,
        forward=forward,
        plain=plain,
        statistics=lambda norm, operands: statistics_of(norm, operands.x, 2),
        derivative=Derivative(
            saved=Saved,
            variables=Variables,
            linear=linear,
            backward=backward,
            in_parts=lambda norm: channels_first.backward if is_channels_first(norm) else None,
        ),
        native=Native(
            names=("jaxnorm_group_norm",),
            name=lambda _: "jaxnorm_group_norm",
            forward=lambda norm, operands: _attributes(norm, operands) | {"epsilon": np.float32(norm.epsilon)},
            backward=_attributes,
            forward_workspace=lambda operands: _sizes(operands.x),
            slower=_slower,
            workspace=lambda saved, wanted: _sizes(saved.x) | {"weights": sum(v is not None for v in wanted[1:])},
        ),
        reasons=(_channels_between, _no_channels),
        is_trailing=False,
        linear_in=lambda norm: () if norm.activation else ("scale", "bias"),
        can_shard=lambda *_: True,
        in_parts=lambda norm: channels_first.forward if is_channels_first(norm) else None,
        functions=(
            Function(
                "group_norm",
                _requested,
                arguments=lambda request: {"num_groups": math.gcd(32, request.shape[-1])},
                last_axis_only=True,
                shape=(8, 64, 64, 320),
                over=lambda shape: f" in {math.gcd(32, shape[-1])} groups of channels",
            ),
        ),
    )
)
