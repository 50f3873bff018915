"""The gated norm with a quantised result: public function, formula, derivative by convention, record.

Where groups of a longer axis are normalised, several may share a scale: all of a token, or those that a run of columns
covers.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from jaxnorm.ops import speed
from jaxnorm.ops.activation import Synonym
from jaxnorm.ops.misuse import explained
from jaxnorm.ops.norm import gated, op as norms, quantized as quantized_norms
from jaxnorm.ops.norm.checks import Quantizing, check_quantized
from jaxnorm.ops.norm.formula import Norm
from jaxnorm.ops.norm.gated import Activation, check_gated, in_groups
from jaxnorm.ops.norm.quantized import Results
from jaxnorm.ops.options import Implementation, NormOptions
from jaxnorm.ops.quantize import rounding
from jaxnorm.primitive import registry
from jaxnorm.primitive.family import Family
from jaxnorm.primitive.op import Convention, Native, OnlyY, Op, Statistics
from jaxnorm.primitive.registry import Function
from jaxnorm.quantization import LARGEST, Quantization, Quantized, quantized


class Operands(NamedTuple):
    x: jax.Array
    gate: jax.Array
    scale: jax.Array | None = None
    smooth: jax.Array | None = None
    given: jax.Array | None = None  # the scale of everything

    def of_gate(self) -> gated.Operands:
        return gated.Operands(self.x, self.gate, self.scale)

    def of_quantization(self) -> quantized_norms.Operands:
        return quantized_norms.Operands(self.x, scale=self.scale, smooth=self.smooth, given=self.given)


def _spans_groups(norm: Norm, cols: Any) -> bool:
    """Whether several groups that are normalised, of so many columns, share a scale that is computed."""
    granularity, run = norm.quantization.granularity, norm.quantization.group_size
    is_whole = run is not None and cols % run == 0
    return norm.grouped and granularity != "tensor" and not is_whole


def _forward(norm: Norm, operands: Operands) -> tuple[Results, Statistics]:
    (y,), stats = gated.forward(norm, operands.of_gate())
    rounds = operands.of_quantization()
    if not _spans_groups(norm, y.shape[-1]):
        return quantized_norms.quantize(norm, y, rounds), stats

    def whole(groups: jax.Array) -> jax.Array:
        return groups.reshape(*groups.shape[:-2], 1, groups.shape[-2] * groups.shape[-1])

    rounds = rounds._replace(smooth=None if rounds.smooth is None else whole(rounds.smooth))
    values, scales, *_, carrier = quantized_norms.quantize(norm, whole(y), rounds)
    carrier = None if carrier is None else carrier.reshape(y.shape)
    return Results(values.reshape(y.shape), scales, carrier=carrier), stats


def _scale_of_several_groups(norm: Norm, operands: Operands) -> str | None:
    group = operands.x.shape[-1]
    if norm.quantization is None or not _spans_groups(norm, group):
        return None
    run = norm.quantization.group_size
    shared = "a token has one scale" if run is None else f"{run} columns share a scale"
    return f"groups of {group} columns are normalised and {shared}; gated kernels see one group at a time"


def _unfit_gate(norm: Norm, operands: Operands) -> str | None:
    return gated.unfit_gate(norm.unquantized(operands.x.dtype), operands)


def _tangents(
    norm: Norm, operands: Operands, results: Results, stats: Statistics, dots: Operands
) -> tuple[Results, Callable[[], Sequence[Any]]]:
    """The tangent of the carrier, by the kernels of the unquantised norm.

    The norm is linear in its scale, so that its kernel multiplies by smooth as well: a cotangent that is multiplied
    here would have another dtype than x, which gated kernels do not take.
    """
    rounding.check(quantized_norms.derivative(norm))
    unquantized, given, moving = norm.unquantized(operands.x.dtype), operands.of_gate(), dots.of_gate()
    if operands.smooth is not None:
        unquantized = dataclasses.replace(unquantized, scale_offset=-0.0)
        smooth = scale = lax.stop_gradient(operands.smooth).astype(norm.compute_dtype)
        if given.scale is not None:
            scale = (given.scale.astype(norm.compute_dtype) + norm.scale_offset) * smooth
        scale_dot = None if moving.scale is None else moving.scale.astype(norm.compute_dtype) * smooth
        given, moving = given._replace(scale=scale), moving._replace(scale=scale_dot)
    of_norm = OnlyY(results.carrier)  # type: ignore[arg-type]
    (y_dot,), of_stats = gated.GATED_NORM.tangents(unquantized, given, of_norm, stats, moving)
    return Results(None, carrier=y_dot), of_stats  # type: ignore[arg-type]


# The name of the spec in programs of older builds.
registry.add_types(GatedNormQuantized=Norm)

GATED_NORM_QUANTIZED = Family(
    Op(
        name="gated_norm_quantized",
        spec=Norm,
        operands=Operands,
        results=Results,
        roles=quantized_norms.ROLES,
        types=lambda norm, operands: quantized_norms.types(norm, operands.of_quantization()),
        forward=_forward,
        plain=lambda norm, operands: _forward(norm, operands)[0],
        convention=Convention(carrier="carrier", tangents=_tangents),
        native=Native(
            names=("jaxnorm_gated_rms_norm_quantized",),
            which=norms.target,
            forward=quantized_norms.attributes,
            plan=norms.plan,
            slower=speed.any_kernel,
        ),
        reasons=(_unfit_gate, _scale_of_several_groups),
        can_shard=norms.can_shard,
        functions=(
            Function(
                "gated_rms_norm_quantized",
                rounding.requested(gated.requested, Operands),
                arguments=gated.with_gate,
                out_dtypes=tuple(LARGEST),
                last_axis_only=True,
            ),
        ),
    )
)


@explained
def gated_rms_norm_quantized(
    x: Any,
    gate: Any,
    scale: Any = None,
    *,
    gate_first: bool,
    quantization: Quantization,
    activation: Activation | Synonym = "silu",
    group_size: int | None = None,
    static_scale: Any = None,
    smooth_scale: Any = None,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    straight_through: bool = False,
    axis_name: Any = None,
    implementation: Implementation | None = None,
) -> Quantized:
    """Normalises x with a gate as `gated_rms_norm` does, and quantises the result to 8 bits.

        v = gated_rms_norm(x, gate, scale, gate_first=gate_first, ...) * smooth_scale           in float32

        >>> x, int8 = jnp.ones((2, 8)), Quantization("int8")
        >>> q = gated_rms_norm_quantized(x, x, jnp.ones(8), gate_first=True, quantization=int8)

    It quantises v as `rms_norm_quantized` does, with the same dtypes, bits, derivative and errors. group_size tells
    which columns are normalised together, `quantization` which share a scale: with granularity "token" all of x's last
    axis, with "group" `quantization.group_size` columns of it. A kernel sees one normalised group at a time, so XLA's
    code runs where several share a computed scale.

    Args:
      x: array of float32, bfloat16 or float16 of rank 1 or more. What is not named here is as for the two functions.
      gate: array of x's shape. The kernels want x and gate of one dtype; the formula takes any.

    Returns:
      A `Quantized`: values of x's shape, scales, a carrier.

    Raises:
      ValueError, TypeError, RuntimeError: as `gated_rms_norm` and `rms_norm_quantized` do.

    Source: those of `gated_rms_norm` and `rms_norm_quantized`.
    """
    options = NormOptions(
        epsilon, scale_offset, out_dtype=np.float32, axis_name=axis_name, implementation=implementation
    )
    name = "gated_rms_norm_quantized"
    norm, operands, size, chosen = check_gated(name, options, x, gate, scale, gate_first, activation, group_size)
    own = Quantizing(quantization, static_scale, smooth_scale, straight_through)
    norm, of_quantization = check_quantized(name, norm, operands, own)
    return _quantized(norm, Operands(*operands, *of_quantization), size, chosen)


def _quantized(norm: Norm, operands: Operands, size: int | None, chosen: Implementation | None) -> Quantized:
    shape, given = operands.x.shape, operands.given
    norm = dataclasses.replace(norm, grouped=size not in (None, shape[-1]))
    divided = in_groups(operands, size if norm.grouped else None)
    values, scales, *_, carrier = GATED_NORM_QUANTIZED(norm, divided, chosen)
    if norm.grouped and scales is not None:
        scales = scales.reshape(*shape[:-1], math.prod(scales.shape[-2:]))
    return quantized(
        norm.quantization,
        values.reshape(shape),
        scales if given is None else given,  # type: ignore[arg-type]
        None if carrier is None else carrier.reshape(shape),
    )
