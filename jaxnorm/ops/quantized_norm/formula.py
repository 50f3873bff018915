"""The quantised norms: their formula in plain jnp, and their op."""

from typing import Any

import numpy as np
from jax import lax

from jaxnorm.native import compat
from jaxnorm.ops import speed
from jaxnorm.ops.norm import formula, op
from jaxnorm.ops.norm.formula import KINDS, Kind, broadcastable
from jaxnorm.ops.norm.op import ADDEND, ROLES
from jaxnorm.ops.quantize import rounding
from jaxnorm.ops.quantized_norm import gradient
from jaxnorm.ops.quantized_norm.spec import Operands, QuantizedNorm, Results
from jaxnorm.primitive import weights
from jaxnorm.primitive.described import Function, Request
from jaxnorm.primitive.family import Family
from jaxnorm.primitive.op import FEATURES, LIKE_X, SCALAR, Convention, Native, Op, Role, Statistics
from jaxnorm.quantization import LARGEST, Quantization
from jaxnorm.sharding import dims


def forward(norm: QuantizedNorm, operands: Operands) -> tuple[Results, Statistics]:
    unquantized, stats = formula.forward(norm, operands.of_norm())
    return quantize(norm, unquantized, operands), stats


def plain(norm: QuantizedNorm, operands: Operands) -> Results:
    return quantize(norm, formula.plain(norm, operands.of_norm()), operands)


def quantize(norm: QuantizedNorm, unquantized: formula.Results, operands: Operands) -> Results:
    """The values that y, of float32, is quantised to, and their scales unless one is given."""
    y, total = unquantized
    smooth, given = operands.smooth, operands.given
    if norm.straight_through:
        smooth, given = (None if factor is None else lax.stop_gradient(factor) for factor in (smooth, given))
    v = y if smooth is None else y * broadcastable(norm, y, smooth)
    v, given, carrier = rounding.straight_through(gradient.derivative(norm), v, given, operands.x.dtype)
    values, scales = rounding.rounded(norm.quantization, v, norm.axes, given, norm.shards)
    of_x = y.astype(operands.x.dtype) if norm.with_unquantized else None
    return Results(values, scales if given is None else None, of_x, total, carrier)


def _types(norm: QuantizedNorm, operands: Operands) -> Results:
    x: Any = operands.x
    y, total = op.types(norm, operands.of_norm())
    values = y.update(dtype=norm.quantization.dtype)  # type: ignore[attr-defined]
    like_x = y.update(dtype=x.dtype)  # type: ignore[attr-defined]
    others = Results(
        values, None, like_x if norm.with_unquantized else None, total, like_x if norm.straight_through else None
    )
    if operands.given is not None:
        return others
    return others._replace(scales=scales_type(norm, x))


# Those of groups stand along the last axis, fewer than it is long.
SCALES = Role(
    lambda norm, ndim, _: dims.per_row(ndim, norm.axes) if norm.quantization.group_size is None else dims.like_x(ndim)
)


def scales_type(norm: Any, x: Any) -> Any:
    """The type of scales that an op on rows of x computes; its spec has a `quantization`."""
    group = norm.quantization.group_size
    if group is not None:
        shape = (*x.shape[:-1], x.shape[-1] // group)
    else:
        shape = (*x.shape[: -norm.row_ndim], *(1 for _ in norm.axes))
    scales = dims.result_like(x, SCALES.dim_map(norm, x.ndim, shape), shape, np.float32)
    if norm.shards is not None and group is None:
        scales = compat.same_along(scales, norm.shards.names)
    return scales


def _weights_with_batch_dims(norm: QuantizedNorm, operands: Operands) -> str | None:
    batch_dims = weights.batch_dims_of(norm.row_ndim, (operands.scale, operands.bias))
    return f"no kernel that quantises takes a scale or bias with leading axes, {batch_dims}" if batch_dims else None


def attributes_of(quantization: Quantization) -> dict[str, Any]:
    """Those of a native call that quantises."""
    return {
        "group": np.int64(quantization.group_size or 0),
        "max_scale": np.float32(np.inf if quantization.max_scale is None else quantization.max_scale),
        "power_of_two": quantization.power_of_two,
    }


def _attributes(norm: QuantizedNorm, _: Operands) -> dict[str, Any]:
    return attributes_of(norm.quantization) | {
        "axes": np.int64(norm.row_ndim),
        "epsilon": np.float32(norm.epsilon),
        "scale_offset": np.float32(norm.scale_offset),
        # Kernels of before know nothing of it.
        **({"with_y": True} if norm.with_unquantized else {}),
    }


def can_shard(norm: Any, cols: int) -> bool:
    """A shard holds whole groups."""
    group = norm.quantization.group_size
    return group is None or cols % group == 0


def _requested(kind: Kind) -> Any:
    def of_request(request: Request) -> tuple[QuantizedNorm, Operands]:
        # What is quantised is float32.
        norm, operands = op.requested(kind)(request._replace(out_dtype=np.dtype(np.float32)))
        spec = QuantizedNorm(**vars(norm), quantization=Quantization(request.out_dtype))
        return spec, Operands(*operands)

    return of_request


QUANTIZED_NORM = Family(
    Op(
        name="quantized_norm",
        spec=QuantizedNorm,
        operands=Operands,
        results=Results,
        roles={
            **ROLES,
            "smooth": FEATURES,
            "given": SCALAR,
            "values": LIKE_X,
            "y": LIKE_X,
            "scales": SCALES,
            "carrier": LIKE_X,
        },
        types=_types,
        forward=forward,
        plain=plain,
        convention=Convention(carrier="carrier", tangents=gradient.tangents),
        statistics=lambda norm, operands: op.statistics_types(norm, operands.of_norm()),
        native=Native(
            names=tuple(f"jaxnorm_{kind}_norm_quantized" for kind in KINDS),
            name=lambda norm: f"jaxnorm_{norm.kind}_norm_quantized",
            forward=_attributes,
            # A quantised result changes no plan; the straight-through gradient's is the norm's.
            plan=op.plan,
            slower=speed.quantized_norm,
        ),
        reasons=(_weights_with_batch_dims,),
        addend=ADDEND,
        in_place={ADDEND: "sum"},
        can_shard=can_shard,
        static_types=(Quantization,),
        functions=tuple(
            Function(f"{kind}_norm_quantized", _requested(kind), out_dtypes=tuple(LARGEST)) for kind in KINDS
        ),
    )
)
