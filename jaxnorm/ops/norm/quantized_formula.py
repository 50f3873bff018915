"""Norms with a quantised result in plain jnp: the norm's formulas, and a rounding after them.

Rounding has the derivative zero nearly everywhere, which no one wants. So quantised norms have another by convention,
or none: the *straight-through* one takes what was quantised for its values times scales. 8 bits are too few for a
cotangent, and integers have none, so it flows through a result of zeros besides, the carrier, whose tangent is that of
the unquantised norm.
"""

from typing import NamedTuple

import jax
from jax import lax

from jaxnorm.ops.norm import formula
from jaxnorm.ops.norm.formula import Norm, broadcastable
from jaxnorm.ops.quantize import rounding
from jaxnorm.ops.quantize.rounding import Derivative
from jaxnorm.primitive.op import Statistics


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
    """The results of `forward`, for JAX to differentiate."""
    y, total = formula.plain(norm, operands.of_norm())
    return quantize(norm, y, operands)._replace(sum=total)


def quantize(norm: Norm, y: jax.Array, operands: Operands) -> Results:
    """The values that y, of float32, is quantised to, and their scales unless one is given."""
    assert norm.quantization is not None
    smooth, given = operands.smooth, operands.given
    if norm.straight_through:
        smooth, given = (None if factor is None else lax.stop_gradient(factor) for factor in (smooth, given))
    v = y if smooth is None else y * broadcastable(norm, y, smooth)
    v, given, carrier = rounding.straight_through(derivative(norm), v, given, operands.x.dtype)
    values, scales = rounding.rounded(norm.quantization, v, norm.axes, given, norm.shards)
    of_x = y.astype(operands.x.dtype) if norm.with_unquantized else None
    return Results(values, scales if given is None else None, of_x, None, carrier)


def derivative(norm: Norm) -> Derivative:
    """What the rounding has for a derivative."""
    of_sum, operands = ", and of new_residual the true one", "x, residual, scale and bias"
    if norm.activation is not None:
        of_sum, operands = "", "the operands"
    return Derivative(
        norm.straight_through,
        f"{norm.name}: rounded values have no derivative, and one is taken; pass straight_through=True for that of the "
        f"norm before it is quantised{of_sum}; or apply jax.lax.stop_gradient to {operands}, not to the result.",
    )
