"""GroupNorm as an op: what its kernels take, what runs where channels stand before the positions, and its record.

There a group lies in one piece, so it is a row of LayerNorm's kernels. XLA makes all else, weights and the activation,
in one pass over what they give, which takes less time than to transpose x and the result.
"""

import functools
import math
from typing import Any

import jax
import numpy as np

from jaxnorm.ops.activation import FORMULAS
from jaxnorm.ops.group_norm import formula
from jaxnorm.ops.group_norm.formula import GroupNorm, Operands, Saved
from jaxnorm.ops.norm import formula as layer
from jaxnorm.ops.norm.formula import Norm
from jaxnorm.ops.norm.op import NORM
from jaxnorm.primitive import op
from jaxnorm.primitive.family import Family
from jaxnorm.primitive.reasons import is_trailing
from jaxnorm.primitive.registry import Function, Request
from jaxnorm.sharding import dims

# The most channels of a group without positions that a CPU's kernels are slower for; measured on 2 cores with AVX2,
# (512, 640) in 32 groups: 0.4 to 0.9 of XLA's speed.
SHORT = 64
# Examples of fewer positions XLA's code is faster for on a GPU; measured on an H200 with `python -m bench gpu`.
FEW_POSITIONS = {"forward": 64, "backward": 16}
# And for a result of as little float32, for which three launches take too long: (2, 16, 16, 1280) 11.6 to 10.5 µs.
FEW_WIDE = 2**20
# And with channels before positions, few elements in all or short groups; measured on 2 cores with AVX2, x of
# (1, 64, 8, 8) and of (256, 32, 2, 2) in 32 groups: 0.8 of XLA's speed.
LITTLE, SHORT_ROW = 2**13, 16

ROLES = {"x": op.LIKE_X, "scale": op.BROADCAST_WEIGHT, "bias": op.BROADCAST_WEIGHT, "y": op.LIKE_X}


def _types(norm: GroupNorm, operands: Operands) -> op.OnlyY:
    return op.OnlyY(dims.like(operands.x, norm.out_dtype))


def is_channels_first(norm: GroupNorm) -> bool:
    """Whether all positions, of which there are some, come after the channels."""
    return norm.row_ndim > 1 and is_trailing(norm.axes)


def _channels_between(norm: GroupNorm, _: Any) -> str | None:
    is_last = norm.axes[-1] == -1 and -2 not in norm.axes
    return None if is_last or is_channels_first(norm) else "channels are between the positions of x"


def _no_channels(norm: GroupNorm, operands: Any) -> str | None:
    groups = -1 - norm.row_ndim if is_channels_first(norm) else -2
    return "x has no channels" if operands[0].shape[groups] == 0 else None


def _slower_with_channels_first(rows: op.CallRows) -> str | None:
    """Why kernels are slower than XLA's code.

    The kernel writes x_hat in float32 and XLA reads it again, so that with x and y 16 bytes move for an element of
    float32, and 12 of half types. The formula reads x once more, or twice, for the statistics: 12 to 16 bytes, and 6 to
    8; and so it is backward. Kernels took 0.90 to 1.14 times the formula's time forward in float32 and 0.97 to 1.26
    backward, in bfloat16 1.10 to 1.38 and 1.07 to 2.11 (four images of a U-Net, 32 groups and silu; H100, JAX 0.11.2).
    """
    if rows.platform == "cpu":
        is_little = rows.cols <= SHORT_ROW or (rows.rows is not None and rows.rows * rows.cols < LITTLE)
        which = f"less than {LITTLE} elements, or {SHORT_ROW} of a group, with channels before positions"
        return f"XLA's code is faster for {which}" if is_little else None
    return "XLA's code is faster for channels before positions, whose kernels leave what XLA multiplies in float32"


def _slower(norm: GroupNorm, rows: op.CallRows) -> str | None:
    """Kernels go down the positions of an example: of few, or none, they have little to do at once."""
    if is_channels_first(norm):
        return _slower_with_channels_first(rows)
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


def _of_rows(norm: GroupNorm) -> Norm:
    """The LayerNorm of groups. By a kernel: it is this op's lowering rule that chooses."""
    return Norm(
        kind="layer",
        axes=norm.axes,
        epsilon=norm.epsilon,
        scale_offset=-0.0,
        compute_dtype=norm.compute_dtype,
        out_dtype=norm.compute_dtype,
        native_for="group_norm",
    )


def _forward_in_parts(norm: GroupNorm, operands: Operands, *, with_stats: bool) -> tuple[op.OnlyY, op.Statistics]:
    """As the formula's, of which a kernel computes x_hat."""
    x, scale, bias = operands
    of_rows, stats = NORM.bind(_of_rows(norm), layer.Operands(x), with_stats=with_stats)
    z = layer.weighted(norm.wide, of_rows.y, scale, bias)
    return op.OnlyY(FORMULAS[norm.activation].of(z).astype(norm.out_dtype)), stats


def _gradient_of_x(
    norm: GroupNorm, dx_hat: jax.Array, x: jax.Array, stats: op.Statistics, wanted: op.Dtype
) -> jax.Array:
    of_rows: layer.Variables[op.Dtype] = layer.Variables(wanted)
    cotangents, saved = layer.Results(dx_hat), layer.Saved(x, stats)
    dx: jax.Array = NORM.gradients(_of_rows(norm), cotangents, saved, of_rows, ()).x
    return dx


_backward_in_parts = functools.partial(formula.backward, of_x=_gradient_of_x)


GROUP_NORM = Family(
    op.Op(
        name="group_norm",
        spec=GroupNorm,
        operands=Operands,
        results=op.OnlyY,
        roles=ROLES,
        types=_types,
        forward=formula.forward,
        plain=formula.plain,
        statistics=lambda norm, operands: op.statistics_of(norm, operands.x, 2),
        derivative=op.Derivative(
            saved=Saved,
            variables=layer.Variables,
            linear=formula.linear,
            backward=formula.backward,
            in_parts=lambda norm: _backward_in_parts if is_channels_first(norm) else None,
        ),
        native=op.Native(
            names=("jaxnorm_group_norm",),
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
        in_parts=lambda norm: _forward_in_parts if is_channels_first(norm) else None,
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
