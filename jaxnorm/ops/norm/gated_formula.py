"""The RMSNorm beside a gate in plain jnp: the norm's formulas, and a product by the gate's activations around them.

The last axis is normalised. A scale has its shape or, where that axis is a group of a longer one, that of the last two.
For a derivative x, gate and rstd are kept.
"""

from typing import Any, Generic, Literal, NamedTuple

import jax

from jaxnorm.ops.activation import FORMULAS
from jaxnorm.ops.norm import formula
from jaxnorm.ops.norm.formula import Dtype, Norm, T, normalised, product, summed
from jaxnorm.primitive.op import BatchDims, Statistics

Activation = Literal["silu", "sigmoid"]


class Operands(NamedTuple):
    x: jax.Array
    gate: jax.Array
    scale: jax.Array | None = None


class Results(NamedTuple):
    y: jax.Array


class Saved(NamedTuple):
    x: jax.Array
    gate: jax.Array
    stats: Statistics  # (rstd,) of what is normalised, with x's shape but for a last axis of length 1
    scale: jax.Array | None = None


class Variables(NamedTuple, Generic[T]):
    x: T | None = None
    gate: T | None = None
    scale: T | None = None


def forward(norm: Norm, operands: Operands) -> tuple[Results, Statistics]:
    """The norm of x * a, or the norm of x times a; and rstd."""
    # Cast once, so that the cotangents of their uses are added before they are rounded to their dtypes.
    x, gate = (array.astype(norm.compute_dtype) for array in operands[:2])
    activate = FORMULAS[norm.activation].of

    def h() -> jax.Array:  # anew for each use, whose cotangents JAX then adds as those of x and of the gate
        return x * activate(gate) if norm.gate_first else x

    stats = formula.statistics(norm, h())
    y = formula.affine(norm.wide, h(), stats, operands.scale, None)
    return Results((y if norm.gate_first else y * activate(gate)).astype(norm.out_dtype)), stats


def linear(norm: Norm, saved: Saved, dots: Variables[jax.Array]) -> Results:
    """The tangent of y."""
    x, gate = saved.x.astype(norm.compute_dtype), saved.gate.astype(norm.compute_dtype)
    x_dot, gate_dot, scale_dot = (None if dot is None else dot.astype(norm.compute_dtype) for dot in dots)
    activation = FORMULAS[norm.activation]
    a = activation.of(gate)
    a_dot = None if gate_dot is None else activation.sloped(gate_dot, gate)
    h, h_dot = x, x_dot
    if norm.gate_first:
        h = x * a
        by_both = [x_dot if x_dot is None else x_dot * a, a_dot if a_dot is None else x * a_dot]
        moving = [dot for dot in by_both if dot is not None]
        h_dot = summed(moving) if moving else None
    of_norm = formula.Saved(h, saved.stats, saved.scale)
    terms = formula.tangents(norm, of_norm, formula.Variables(h_dot, scale_dot))
    if not norm.gate_first:
        terms = [term * a for term in terms]
        if a_dot is not None:
            terms.append(product(norm, normalised(norm, h, saved.stats), saved.scale) * a_dot)
    return Results(summed(terms).astype(norm.out_dtype))


def backward(
    norm: Norm, cotangents: Results, saved: Saved, wanted: Variables[Dtype], batch_dims: BatchDims
) -> Variables[jax.Array]:
    """The wanted gradients: the transpose of `linear`."""
    dy, x, gate = (array.astype(norm.compute_dtype) for array in (cotangents.y, saved.x, saved.gate))
    activation = FORMULAS[norm.activation]
    a = activation.of(gate)
    h, u = (x * a, dy) if norm.gate_first else (x, dy * a)
    moves_h = wanted.x is not None or (wanted.gate is not None and norm.gate_first)
    of_norm = formula.Saved(h, saved.stats, saved.scale)
    of_h = formula.Variables(norm.compute_dtype if moves_h else None, wanted.scale)
    gradients = formula.backward(norm, formula.Results(u), of_norm, of_h, batch_dims)
    dh: Any = gradients.x
    dx = dgate = None
    if wanted.x is not None:
        dx = (dh * a if norm.gate_first else dh).astype(wanted.x)
    if wanted.gate is not None:
        da = dh * x if norm.gate_first else dy * product(norm, normalised(norm, h, saved.stats), saved.scale)
        dgate = activation.sloped(da, gate).astype(wanted.gate)
    return Variables(dx, dgate, gradients.scale)
