"""Norms with a quantised result: their formulas in plain jnp, their record, their public functions.

The formulas are the norm's, then a rounding. Its derivative, zero nearly everywhere, is of no use, so quantised norms
have none, or one by convention: the *straight-through* derivative takes values times scales for what was quantised. 8
bits are too few for a cotangent, and integers have none, so it flows through another result, of zeros: the carrier,
whose tangent is that of the unquantised norm.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.interpreters import ad

from jaxnorm.native import compat
from jaxnorm.ops import speed
from jaxnorm.ops.misuse import explained
from jaxnorm.ops.norm import formula, op as norms
from jaxnorm.ops.norm.checks import Quantizing, check_norm, check_quantized
from jaxnorm.ops.norm.formula import KINDS, Kind, Norm, broadcastable
from jaxnorm.ops.norm.op import ADDEND, NORM
from jaxnorm.ops.options import Implementation, NormOptions
from jaxnorm.ops.quantize import rounding
from jaxnorm.ops.quantize.rounding import Derivative
from jaxnorm.primitive import weights
from jaxnorm.primitive.family import Family
from jaxnorm.primitive.op import LIKE_X, SCALAR, WEIGHT, CallRows, Convention, Native, Op, Role, Statistics
from jaxnorm.primitive.registry import Function
from jaxnorm.quantization import LARGEST, Quantization, quantized
from jaxnorm.results import QuantizedNorm, RowStatistics
from jaxnorm.sharding import dims


class Operands(NamedTuple):
    x: jax.Array
    residual: jax.Array | None = None
    scale: jax.Array | None = None
    bias: jax.Array | None = None
    branch_scale: jax.Array | None = None
    smooth: jax.Array | None = None
    given: jax.Array | None = None  # the scale of everything

    def of_norm(self) -> formula.Operands:
        return formula.Operands(self.x, self.residual, self.scale, self.bias, self.branch_scale)


class Results(NamedTuple):
    values: jax.Array
    scales: jax.Array | None = None  # None where the scale is given
    y: jax.Array | None = None  # of x's dtype, where it is wanted
    sum: jax.Array | None = None
    carrier: jax.Array | None = None  # zeros that straight_through asks for


def forward(norm: Norm, operands: Operands) -> tuple[Results, Statistics]:
    (y, total), stats = formula.forward(norm, operands.of_norm())
    return quantize(norm, y, operands)._replace(sum=total), stats


def plain(norm: Norm, operands: Operands) -> Results:
    y, total = formula.plain(norm, operands.of_norm())
    return quantize(norm, y, operands)._replace(sum=total)


def quantize(norm: Norm, y: jax.Array, operands: Operands) -> Results:
    """The values that y, of float32, is quantised to, and their scales unless one is given."""
    smooth, given = operands.smooth, operands.given
    if norm.straight_through:
        smooth, given = (None if factor is None else lax.stop_gradient(factor) for factor in (smooth, given))
    v = y if smooth is None else y * broadcastable(norm, y, smooth)
    v, given, carrier = rounding.straight_through(derivative(norm), v, given, operands.x.dtype)
    values, scales = rounding.rounded(norm.quantization, v, norm.axes, given, norm.shards)
    of_x = y.astype(operands.x.dtype) if norm.with_unquantized else None
    return Results(values, scales if given is None else None, of_x, None, carrier)


def derivative(norm: Norm) -> Derivative:
    of_sum, operands = ", and of new_residual the true one", "x, residual, scale and bias"
    if norm.activation is not None:
        of_sum, operands = "", "the operands"
    return Derivative(
        norm.straight_through,
        f"{norm.name}: rounded values have no derivative, and one is taken; pass straight_through=True for that of the "
        f"norm before it is quantised{of_sum}; or apply jax.lax.stop_gradient to {operands}, not to the result.",
    )


# The scales of groups stand along the last axis, fewer than it is long.
# The most columns of rows of which one kernel writes y beside its quantised values. Of longer ones two read x, which of
# float32 takes longer than XLA's code: 2048 x 20480 in 205 to 187 µs on an H200, of bfloat16 in 114 to 132
# (docs/benchmarks/gpu.md has the table).
LONGEST_WITH_Y = 2**14
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
    # Kernels of before know nothing of with_y.
    with_y = {"with_y": True} if norm.with_unquantized else {}
    return norms.forward_attributes(norm, operands) | rounding.attributes(norm.quantization) | with_y


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


def _slower(spec: Any, rows: CallRows) -> str | None:
    is_apart = spec.with_unquantized and rows.cols > LONGEST_WITH_Y and rows.way == "forward"
    if is_apart and rows.platform == "cuda" and rows.dtype.itemsize == 4:
        return f"XLA's code is faster for y beside quantised float32 rows of more than {LONGEST_WITH_Y} columns"
    return speed.any_kernel(spec, rows)


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
            which=norms.target,
            forward=attributes,
            # A quantised result changes no plan; the straight-through gradient's is the norm's.
            plan=norms.plan,
            slower=_slower,
        ),
        reasons=(_weights_with_batch_dims,),
        addend=ADDEND,
        factor=norms.BRANCH_SCALE,
        in_place={ADDEND: "sum"},
        can_shard=norms.can_shard,
        static_types=(Quantization,),
        functions=tuple(
            Function(
                f"{kind}_norm_quantized", rounding.requested(norms.requested(kind), Operands), out_dtypes=tuple(LARGEST)
            )
            for kind in KINDS
        ),
    )
)


@explained
def rms_norm_quantized(
    x: Any,
    scale: Any = None,
    *,
    quantization: Quantization,
    residual: Any = None,
    bias: Any = None,
    branch_scale: Any = None,
    static_scale: Any = None,
    smooth_scale: Any = None,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    axis: int | Sequence[int] = -1,
    straight_through: bool = False,
    with_unquantized: bool = False,
    axis_name: Any = None,
    implementation: Implementation | None = None,
) -> QuantizedNorm:
    """Divides x by its root mean square over `axis` and quantises the result to 8 bits.

        v = rms_norm(x, scale, bias=bias, out_dtype=float32, ...) * smooth_scale
        scales = max|v| / largest       over each row or group, 1 where that is 0; at least 2**-126, at most max_scale
        values = v * (1 / scales)       clipped to ±largest, rounded to nearest, ties to even

        >>> q = rms_norm_quantized(jnp.ones((2, 8)), jnp.ones(8), quantization=Quantization("float8_e4m3fn"))

    `largest` is that of quantization's dtype. All is computed in float32, with the bits that NumPy gives for the same
    implementation's norm. Taking a derivative is an error unless straight_through=True.

    Args:
      x: array of float32, bfloat16 or float16 of rank 1 or more. What is not named here is as for `add_rms_norm`.
      residual: None, or an array to add to x; then the sum is returned too.

    Returns:
      `QuantizedNorm`, (quantized, residual, y, statistics): a `Quantized` of x's shape, the sum or None, y or None, and
      the statistics of the rows.

    Raises:
      ValueError, TypeError, RuntimeError: an array is float64, or quantization does not fit; or as `rms_norm`.

    Source: https://arxiv.org/abs/2209.05433 (FP8 formats), https://arxiv.org/abs/2211.10438 (SmoothQuant).
    """
    options = NormOptions(
        epsilon=epsilon, scale_offset=scale_offset, axis=axis, axis_name=axis_name, implementation=implementation
    )
    own = Quantizing(quantization, static_scale, smooth_scale, straight_through, with_unquantized)
    return _quantized("rms_norm_quantized", "rms", options, own, x, residual, scale, bias, branch_scale)


@explained
def layer_norm_quantized(
    x: Any,
    scale: Any = None,
    bias: Any = None,
    *,
    quantization: Quantization,
    residual: Any = None,
    branch_scale: Any = None,
    static_scale: Any = None,
    smooth_scale: Any = None,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    axis: int | Sequence[int] = -1,
    straight_through: bool = False,
    with_unquantized: bool = False,
    axis_name: Any = None,
    implementation: Implementation | None = None,
) -> QuantizedNorm:
    """Shifts and scales x to mean 0 and variance 1 over `axis` and quantises the result to 8 bits.

        v = layer_norm(x, scale, bias, out_dtype=float32, ...) * smooth_scale

        >>> q = layer_norm_quantized(jnp.ones((2, 8)), jnp.ones(8), jnp.zeros(8), quantization=Quantization("int8"))

    It quantises v as `rms_norm_quantized` does, with the same dtypes, result, derivative and errors.

    Args:
      x: array of float32, bfloat16 or float16 of rank 1 or more. What is not named here is as for `rms_norm_quantized`.
      epsilon: non-negative Python number added to the variance.

    Returns:
      As `rms_norm_quantized` does.

    Raises:
      ValueError, TypeError, RuntimeError: as `rms_norm_quantized` does.

    Source: those of `layer_norm` and `rms_norm_quantized`.
    """
    options = NormOptions(
        epsilon=epsilon, scale_offset=scale_offset, axis=axis, axis_name=axis_name, implementation=implementation
    )
    own = Quantizing(quantization, static_scale, smooth_scale, straight_through, with_unquantized)
    return _quantized("layer_norm_quantized", "layer", options, own, x, residual, scale, bias, branch_scale)


def _quantized(function: str, kind: Kind, options: NormOptions, own: Quantizing, *arrays: Any) -> QuantizedNorm:
    norm, of_norm, chosen = check_norm(function, kind, options._replace(out_dtype=np.float32), *arrays)
    norm, (smooth, given) = check_quantized(function, norm, of_norm, own)
    results, stats = QUANTIZED_NORM.with_statistics(norm, Operands(*of_norm, smooth, given), chosen)
    scales: Any = results.scales if given is None else given
    result = quantized(own.quantization, results.values, scales, results.carrier)
    return QuantizedNorm(result, results.sum, results.y, RowStatistics(*reversed(stats)))
