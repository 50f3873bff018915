"""Quantised norms with a derivative.

Rounding has the derivative zero nearly everywhere, which no one wants. So quantised norms have another by convention,
or none: the *straight-through* one takes what was quantised for its values times scales. 8 bits are too few for a
cotangent, and integers have none, so it flows through a result of zeros besides, the carrier, whose tangent is that of
the unquantised norm.

Two primitives have this rule: that of the op, for which `linear` and `backward` of the norm's op compute it, one native
call each way; and one within the formula, between what is quantised and its rounding.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax import lax
from jax.interpreters import ad

from jaxnorm.ops.norm import formula
from jaxnorm.ops.norm.op import NORM
from jaxnorm.ops.quantize import rounding
from jaxnorm.ops.quantize.rounding import Derivative
from jaxnorm.ops.quantized_norm.spec import Operands, QuantizedNorm, Results
from jaxnorm.primitive.op import Statistics


def tangents(
    norm: QuantizedNorm, operands: Operands, results: Results, stats: Statistics, dots: Operands
) -> tuple[Results, Callable[[], Sequence[Any]]]:
    """The tangents of the carrier, y and the sum; others are None. And as a function those of the statistics."""
    rounding.check(derivative(norm))
    dtype, smooth = operands.x.dtype, operands.smooth
    unquantized = norm.unquantized(dtype if smooth is None else norm.compute_dtype)
    of_norm = formula.Results(results.carrier, results.sum)  # type: ignore[arg-type]
    y_dot: Any
    (y_dot, sum_dot), of_stats = NORM.tangents(unquantized, operands.of_norm(), of_norm, stats, dots.of_norm())
    v_dot = y_dot
    if smooth is not None and type(y_dot) is not ad.Zero:
        v_dot = (y_dot * lax.stop_gradient(formula.broadcastable(norm, operands.x, smooth))).astype(dtype)
        y_dot = y_dot.astype(dtype)
    of_y = {"y": y_dot} if norm.with_unquantized else {}
    of_results: Any = {"values": None, "scales": None, "carrier": v_dot, "sum": sum_dot, **of_y}
    return results._replace(**of_results), of_stats


def derivative(norm: QuantizedNorm) -> Derivative:
    """That of what the norm rounds."""
    return Derivative(
        norm.straight_through,
        f"{norm.kind}_norm_quantized: rounded values have no derivative, and one is taken; pass straight_through=True "
        f"for that of the norm before it is quantised, and of new_residual the true one; or apply "
        f"jax.lax.stop_gradient to x, residual, scale and bias, not to the result.",
    )
