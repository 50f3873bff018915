"""The gated RMSNorm with a quantised result: what is static about one, its formula in plain jnp, and its op.

The last axis is normalised. Where that is a group of a longer one, scale and smooth have the shape of the last two
axes, and several groups may share a scale of the quantisation: all of a token, or those in which a run of columns lies.
No kernel sees more than one group, so the formula serves these.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from jaxnorm.ops import speed
from jaxnorm.ops.norm import gated_formula as formula
from jaxnorm.ops.norm.formula import Norm, broadcastable
from jaxnorm.ops.norm.gated_formula import QuantizedOperands as Operands
from jaxnorm.ops.norm.op import GATED_NORM, attributes, gate_of_another_dtype, plan, requested, row_too_long
from jaxnorm.ops.quantize import rounding
from jaxnorm.ops.quantize.rounding import Derivative
from jaxnorm.ops.quantized_norm.formula import SCALES, attributes_of, can_shard, scales_type
from jaxnorm.primitive.described import Function, Request
from jaxnorm.primitive.family import Family
from jaxnorm.primitive.op import LIKE_X, SCALAR, WEIGHT, Convention, Native, Op, Statistics
from jaxnorm.quantization import LARGEST, Quantization
from jaxnorm.sharding import dims


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedNormQuantized(Norm):
    """What is static about one gated norm with a quantised result."""

    quantization: Quantization
    straight_through: bool = False
    grouped: bool = False  # the last axis is a group of a longer one, which is the last two

    def unquantized(self, **changes: Any) -> Norm:
        """The norm whose result is quantised."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(Norm)}
        return Norm(**fields | changes)


class Results(NamedTuple):
    values: jax.Array
    scales: jax.Array | None = None  # None where the scale is given
    carrier: jax.Array | None = None  # zeros that straight_through asks for


def forward(norm: GatedNormQuantized, operands: Operands) -> tuple[Results, Statistics]:
    (y,), stats = formula.forward(norm, operands.of_norm())
    return quantize(norm, y, operands), stats


def plain(norm: GatedNormQuantized, operands: Operands) -> Results:
    return quantize(norm, formula.forward(norm, operands.of_norm())[0].y, operands)


def quantize(norm: GatedNormQuantized, y: jax.Array, operands: Operands) -> Results:
    """The values that y, of float32, is quantised to, and their scales unless one is given."""
    smooth, given = operands.smooth, operands.given
    if norm.straight_through:
        smooth, given = (None if factor is None else lax.stop_gradient(factor) for factor in (smooth, given))
    v = y if smooth is None else y * broadcastable(norm, y, smooth)
    v, given, carrier = rounding.straight_through(derivative(norm), v, given, operands.x.dtype)
    shape = v.shape
    if _spans_groups(norm, operands):
        v = v.reshape(*shape[:-2], 1, shape[-2] * shape[-1])
    values, scales = rounding.rounded(norm.quantization, v, (-1,), given, norm.shards)
    return Results(values.reshape(shape), scales if given is None else None, carrier)


def _spans_groups(norm: GatedNormQuantized, operands: Operands) -> bool:
    """Whether several groups share a scale that is computed."""
    granularity, run = norm.quantization.granularity, norm.quantization.group_size
    is_whole = run is not None and operands.x.shape[-1] % run == 0
    return norm.grouped and granularity != "tensor" and not is_whole


def derivative(norm: GatedNormQuantized) -> Derivative:
    """That of what the norm rounds."""
    return Derivative(
        norm.straight_through,
        "gated_rms_norm_quantized: rounded values have no derivative, and one is taken; pass straight_through=True for "
        "that of the norm before it is quantised; or apply jax.lax.stop_gradient to the operands, not to the result.",
    )


def tangents(
    norm: GatedNormQuantized, operands: Operands, results: Results, stats: Statistics, dots: Operands
) -> tuple[Results, Callable[[], Sequence[Any]]]:
    """The tangent of the carrier; others are None. And as a function those of the statistics."""
    rounding.check(derivative(norm))
    unquantized = norm.unquantized(out_dtype=operands.x.dtype)
    of_norm, of_dots = operands.of_norm(), dots.of_norm()
    if operands.smooth is not None:
        # The norm is linear in its scale, so that its kernel multiplies by smooth as well: a cotangent that is
        # multiplied here would have another dtype than x, which gated kernels do not take.
        unquantized = dataclasses.replace(unquantized, scale_offset=-0.0)
        of_norm, of_dots = _smoothed(norm, of_norm, of_dots, lax.stop_gradient(operands.smooth))
    carrier = formula.Results(results.carrier)  # type: ignore[arg-type]
    (y_dot,), of_stats = GATED_NORM.tangents(unquantized, of_norm, carrier, stats, of_dots)
    of_results: Any = {"values": None, "scales": None, "carrier": y_dot}
    return results._replace(**of_results), of_stats


def _smoothed(
    norm: GatedNormQuantized, operands: formula.Operands, dots: formula.Operands, smooth: jax.Array
) -> tuple[formula.Operands, formula.Operands]:
    """The operands of the norm times smooth, whose scale has its offset in it, and their tangents."""
    smooth = smooth.astype(norm.compute_dtype)
    if operands.scale is None:
        return operands._replace(scale=smooth), dots
    scale = (operands.scale.astype(norm.compute_dtype) + norm.scale_offset) * smooth
    scale_dot = None if dots.scale is None else dots.scale.astype(norm.compute_dtype) * smooth
    return operands._replace(scale=scale), dots._replace(scale=scale_dot)


def _types(norm: GatedNormQuantized, operands: Operands) -> Results:
    """Of a call in which no groups share a scale, as those of primitives are."""
    x: Any = operands.x
    values = dims.like(x, norm.quantization.dtype)
    carrier = dims.like(x, x.dtype) if norm.straight_through else None
    if operands.given is not None:
        return Results(values, None, carrier)
    return Results(values, scales_type(norm, x), carrier)


def _scale_of_several_groups(norm: GatedNormQuantized, operands: Operands) -> str | None:
    if not _spans_groups(norm, operands):
        return None
    group, run = operands.x.shape[-1], norm.quantization.group_size
    shared = "a token has one scale" if run is None else f"{run} columns share a scale"
    return f"groups of {group} columns are normalised and {shared}; gated kernels see one group at a time"


def _attributes(norm: GatedNormQuantized, _: Operands) -> dict[str, Any]:
    return attributes_of(norm.quantization) | {
        **attributes(norm),
        "epsilon": np.float32(norm.epsilon),
        "grouped": norm.grouped,
    }


def _requested(request: Request) -> tuple[GatedNormQuantized, Operands]:
    # What is quantised is float32.
    norm, operands = requested("rms", gates=True)(request._replace(out_dtype=np.dtype(np.float32)))
    return GatedNormQuantized(**vars(norm), quantization=Quantization(request.out_dtype)), Operands(*operands)


GATED_NORM_QUANTIZED = Family(
    Op(
        name="gated_norm_quantized",
        spec=GatedNormQuantized,
        operands=Operands,
        results=Results,
        roles={
            **GATED_NORM.op.roles,
            "smooth": dataclasses.replace(WEIGHT, batch="formula"),
            "given": SCALAR,
            "values": LIKE_X,
            "scales": SCALES,
            "carrier": LIKE_X,
        },
        types=_types,
        forward=forward,
        plain=plain,
        convention=Convention(carrier="carrier", tangents=tangents),
        native=Native(
            names=("jaxnorm_gated_rms_norm_quantized",),
            name=lambda _: "jaxnorm_gated_rms_norm_quantized",
            forward=_attributes,
            plan=plan,
            slower=speed.any_kernel,
        ),
        reasons=(row_too_long, gate_of_another_dtype, _scale_of_several_groups),
        can_shard=can_shard,
        static_types=(Quantization,),
        functions=(Function("gated_rms_norm_quantized", _requested, out_dtypes=tuple(LARGEST), last_axis_only=True),),
    )
)
