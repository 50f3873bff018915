"""The sandwich norm as an op: what its kernels take, and its record."""

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxnorm.native import ffi
from jaxnorm.ops import speed
from jaxnorm.ops.norm import formula as one
from jaxnorm.ops.norm.op import NORM
from jaxnorm.ops.sandwich_norm import formula
from jaxnorm.ops.sandwich_norm.formula import Operands, Results, SandwichNorm, Saved, Variables
from jaxnorm.primitive import weights
from jaxnorm.primitive.family import Family
from jaxnorm.primitive.op import LIKE_X, WEIGHT, Derivative, Native, Op, Statistics, statistics_of
from jaxnorm.primitive.registry import Function, Request
from jaxnorm.sharding import dims


def _types(norm: SandwichNorm, operands: Operands) -> Results:
    return Results(dims.like(operands.x, norm.out_dtype), dims.like(operands.x, norm.residual_dtype))


def _other_dtypes(norm: SandwichNorm, operands: Operands) -> str | None:
    x, addend = operands.x.dtype, operands.residual.dtype
    if norm.out_dtype != x:
        return f"x is {x} and the result {norm.out_dtype}; kernels with two norms want them equal"
    if addend not in ffi.DTYPES:
        return f"residual is {addend}, kernels take {', '.join(sorted(d.name for d in ffi.DTYPES))}"
    if x != addend and np.float32 not in (x, addend):
        return f"x is {x} and residual {addend}; kernels want them equal, or one of them float32"
    return None


def _weights_with_batch_dims(norm: SandwichNorm, operands: Operands) -> str | None:
    batch_dims = weights.batch_dims_of(norm.row_ndim, (operands.post_scale, operands.scale))
    return f"no kernel with two norms takes scales with leading axes, {batch_dims}" if batch_dims else None


def _in_parts(norm: SandwichNorm) -> Callable[..., tuple[Results, Statistics]] | None:
    """By one norm after the other, where the second rounds x_hat to another dtype than y."""
    if norm.second.x_hat_dtype is None:
        return None

    def forward(_: SandwichNorm, operands: Operands, *, with_stats: bool) -> tuple[Results, Statistics]:
        x, addend, post_scale, scale = operands
        first = norm.norm(x.dtype)
        normed, of_x = NORM.bind(first, one.Operands(x, None, post_scale), with_stats=with_stats)
        results, of_sum = NORM.bind(norm.second, one.Operands(normed.y, addend, scale), with_stats=with_stats)
        return Results(results.y, results.sum), (*of_x, *of_sum)

    return forward


def _attributes(norm: SandwichNorm, _: Any) -> dict[str, Any]:
    return {"scale_offset": np.float32(norm.scale_offset)}


def _kept_rows(saved: Saved, wanted: Variables[Any]) -> dict[str, Any]:
    """Whether the addend's gradient is kept in the workspace: as it is not a result and still read, and as float32.

    The first norm's gradient is computed from it, which of two calls one after the other gets it in x's dtype.
    """
    is_read = wanted.x is not None or wanted.post_scale is not None
    is_widened = saved.x.dtype == np.float32 and saved.new_residual.dtype != np.float32
    return {"keeps_row": is_read and wanted.residual is None, "widens_row": is_read and is_widened}


def _requested(request: Request) -> tuple[SandwichNorm, Operands]:
    norm = SandwichNorm(
        epsilon=1e-6,
        scale_offset=-0.0,
        multiply_before_cast=True,
        compute_dtype=dims.wide_dtype((request.dtype, request.out_dtype)),
        out_dtype=request.out_dtype,
        residual_dtype=request.dtype,
    )
    x, scale = request.array(request.shape), request.array(request.scale_shape)
    return norm, Operands(x, x, scale, scale)


SANDWICH_NORM = Family(
    Op(
        name="sandwich_norm",
        spec=SandwichNorm,
        operands=Operands,
        results=Results,
        roles={
            "x": LIKE_X,
            "residual": LIKE_X,
            "post_scale": WEIGHT,
            "scale": WEIGHT,
            "y": LIKE_X,
            "new_residual": LIKE_X,
        },
        types=_types,
        forward=formula.forward,
        plain=formula.plain,
        statistics=lambda norm, operands: statistics_of(norm, operands.x, 2),
        derivative=Derivative(saved=Saved, variables=Variables, linear=formula.linear, backward=formula.backward),
        native=Native(
            names=("jaxnorm_rms_norm_add_rms_norm",),
            forward=lambda norm, operands: {
                **_attributes(norm, operands),
                "epsilon": np.float32(norm.epsilon),
                "multiply_before_cast": norm.multiply_before_cast,
            },
            backward=_attributes,
            workspace=_kept_rows,
            plan=lambda *_: {"kind": "rms", "adds": True},
            slower=speed.any_kernel,
        ),
        reasons=(_other_dtypes, _weights_with_batch_dims),
        in_place={"residual": "new_residual"},
        linear_in=lambda _: ("scale",),
        can_shard=lambda *_: True,
        in_parts=_in_parts,
        functions=(
            Function(
                "rms_norm_add_rms_norm",
                _requested,
                arguments=lambda request: {"post_scale": request.array(request.scale_shape)},
                last_axis_only=True,
            ),
        ),
    )
)
