"""The norms with a quantised result as ops: what their kernels take, their derivative, and their records."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import lax
from jax.interpreters import ad

from jaxnorm.native import compat
from jaxnorm.ops import speed
from jaxnorm.ops.norm import formula, op as norms
from jaxnorm.ops.norm.formula import KINDS, Kind, Norm, broadcastable
from jaxnorm.ops.norm.op import ADDEND, NORM
from jaxnorm.ops.norm.quantized_formula import Operands, Results, derivative, forward, plain
from jaxnorm.ops.quantize import rounding
from jaxnorm.primitive import weights
from jaxnorm.primitive.family import Family
from jaxnorm.primitive.op import LIKE_X, SCALAR, WEIGHT, Convention, Native, Op, Role, Statistics
from jaxnorm.primitive.registry import Function, Request
from jaxnorm.quantization import LARGEST, Quantization
from jaxnorm.sharding import dims

# The scales of groups stand along the last axis, fewer than it is long.
SCALES = Role(
    lambda norm, ndim, _: dims.per_row(ndim, norm.axes) if norm.quantization.group_size is None else dims.like_x(ndim)
)
ROLES = norms.ROLES | {
    # One by itself: it may have batch dims, and scale and bias none.
    norms.BRANCH_SCALE: dataclasses.replace(WEIGHT, batch="formula"),
    "smooth": dataclasses.replace(WEIGHT, batch="formula"),
    "given": SCALAR,
    "values": LIKE_X,
    "scales": SCALES,
    "carrier": LIKE_X,
}


def types(norm: Norm, operands: Operands) -> Results:
    """The types of the results of a call in which no groups share a scale: so it is in primitives."""
    assert norm.quantization is not None
    x: Any = operands.x
    addend: Any = operands.residual
    like_x = dims.like(x, x.dtype)
    return Results(
        values=dims.like(x, norm.quantization.dtype),
        scales=None if operands.given is not None else _scales_type(norm, norm.quantization.group_size, x),
        y=like_x if norm.with_unquantized else None,
        sum=None if addend is None else dims.like(addend, addend.dtype),
        carrier=like_x if norm.straight_through else None,
    )


def _scales_type(norm: Norm, group: int | None, x: Any) -> Any:
    if group is not None:
        shape = (*x.shape[:-1], x.shape[-1] // group)
    else:
        shape = (*x.shape[: -norm.row_ndim], *(1 for _ in norm.axes))
    scales = dims.result_like(x, SCALES.dim_map(norm, x.ndim, shape), shape, np.float32)
    if norm.shards is not None and group is None:
        scales = compat.same_along(scales, norm.shards.names)
    return scales


def _weights_with_batch_dims(norm: Norm, operands: Operands) -> str | None:
    batch_dims = weights.batch_dims_of(norm.row_ndim, (operands.scale, operands.bias))
    if batch_dims:
        return f"no kernel that quantises takes a scale or bias with leading axes, {batch_dims}"
    of_branch = weights.batch_dims_of(norm.row_ndim, [operands.branch_scale])
    return weights.unsupported(operands.x.shape, norm.row_ndim, of_branch)


def attributes(norm: Norm, operands: Operands) -> dict[str, Any]:
    assert norm.quantization is not None
    max_scale = norm.quantization.max_scale
    return norms.forward_attributes(norm, operands) | {
        "group": np.int64(norm.quantization.group_size or 0),
        "max_scale": np.float32(np.inf if max_scale is None else max_scale),
        "power_of_two": norm.quantization.power_of_two,
        # Kernels of before know nothing of it.
        **({"with_y": True} if norm.with_unquantized else {}),
    }


Tangents = tuple[Results, Callable[[], Sequence[Any]]]


def _tangents(norm: Norm, operands: Operands, results: Results, stats: Statistics, dots: Operands) -> Tangents:
    """The tangents of the carrier, y and the sum; others are None. And as a function those of the statistics.

    `linear` and `backward` of the unquantised norm compute them, one native call each way.
    """
    rounding.check(derivative(norm))
    dtype, smooth = operands.x.dtype, operands.smooth
    unquantized = norm.unquantized(dtype if smooth is None else norm.compute_dtype)
    of_norm = formula.Results(results.carrier, results.sum)  # type: ignore[arg-type]
    y_dot: Any
    (y_dot, sum_dot), of_stats = NORM.tangents(unquantized, operands.of_norm(), of_norm, stats, dots.of_norm())
    v_dot = y_dot
    if smooth is not None and type(y_dot) is not ad.Zero:
        v_dot = (y_dot * lax.stop_gradient(broadcastable(norm, operands.x, smooth))).astype(dtype)
        y_dot = y_dot.astype(dtype)
    of_y = y_dot if norm.with_unquantized else None
    return Results(None, y=of_y, sum=sum_dot, carrier=v_dot), of_stats  # type: ignore[arg-type]


def _requested(kind: Kind) -> Callable[[Request], tuple[Norm, Any]]:
    def of_request(request: Request) -> tuple[Norm, Any]:
        # What is quantised is float32.
        norm, operands = norms.requested(kind)(request._replace(out_dtype=np.dtype(np.float32)))
        quantized = dataclasses.replace(norm, quantization=Quantization(request.out_dtype))
        return quantized, Operands(*operands)

    return of_request


QUANTIZED_NORM = Family(
    Op(
        name="quantized_norm",
        spec=Norm,
        operands=Operands,
        results=Results,
        roles=ROLES,
        types=types,
        forward=forward,
        plain=plain,
        convention=Convention(carrier="carrier", tangents=_tangents),
        statistics=norms.statistics_types,
        native=Native(
            names=tuple(f"jaxnorm_{kind}_norm_quantized" for kind in KINDS),
            name=norms.target,
            forward=attributes,
            # A quantised result changes no plan; the straight-through gradient's is the norm's.
            plan=norms.plan,
            slower=speed.quantized_norm,
        ),
        reasons=(_weights_with_batch_dims,),
        addend=ADDEND,
        factor=norms.BRANCH_SCALE,
        in_place={ADDEND: "sum"},
        can_shard=norms.can_shard,
        static_types=(Quantization,),
        functions=tuple(
            Function(f"{kind}_norm_quantized", _requested(kind), out_dtypes=tuple(LARGEST)) for kind in KINDS
        ),
    )
)
