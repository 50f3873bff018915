"""The gated RMSNorm: what is static about it, and its formulas in plain jnp.

The last axis is normalised. A scale has its shape or, where that axis is a group of a longer one, that of the last two.
For a derivative x, gate and rstd are kept.
"""

import dataclasses
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import jax
import numpy as np
from jax import lax

from jaxnorm.ops.norm.formula import broadcastable, means, sum_rows
from jaxnorm.primitive.op import BatchDims, RowSpec, Statistics

Activation = Literal["silu", "sigmoid"]
Dtype = np.dtype[Any]
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedNorm(RowSpec):
    """What is static about one gated norm."""

    epsilon: float
    scale_offset: float
    activation: Activation
    gate_first: bool  # x * a is normalised; otherwise the normalised x is multiplied by a


class Operands(NamedTuple):
    x: jax.Array
    gate: jax.Array
    scale: jax.Array | None = None


class QuantizedOperands(NamedTuple):
    """Those of the norm and of the quantisation of its result."""

    x: jax.Array
    gate: jax.Array
    scale: jax.Array | None = None
    smooth: jax.Array | None = None
    given: jax.Array | None = None  # the scale of everything

    def of_norm(self) -> Operands:
        return Operands(self.x, self.gate, self.scale)


class Results(NamedTuple):
    y: jax.Array


class Saved(NamedTuple):
    x: jax.Array
    gate: jax.Array
    stats: Statistics  # (rstd,) of what is normalised, with x's shape but for a last axis of length 1
    scale: jax.Array | None = None


class Variables(NamedTuple, Generic[T]):
    """What a derivative is taken by, see `Op`."""

    x: T | None = None
    gate: T | None = None
    scale: T | None = None


def activate(norm: GatedNorm, gate: jax.Array) -> jax.Array:
    """`a`: sigmoid(gate), or silu(gate) = gate * sigmoid(gate)."""
    sigmoid = lax.logistic(gate)
    return sigmoid if norm.activation == "sigmoid" else gate * sigmoid


def slope(norm: GatedNorm, gate: jax.Array) -> jax.Array:
    """The derivative of `activate`. 1 - sigmoid(v) is sigmoid(-v), which loses nothing where it is small."""
    sigmoid, rest = lax.logistic(gate), lax.logistic(-gate)
    return sigmoid * rest if norm.activation == "sigmoid" else sigmoid + gate * sigmoid * rest


def statistics(norm: GatedNorm, x: jax.Array, gate: jax.Array) -> jax.Array:
    """rstd of what is normalised."""
    h = _normalised(norm, x, gate)
    (mean_square,) = means(norm, h * h)
    return lax.rsqrt(mean_square + norm.epsilon)


def forward(norm: GatedNorm, operands: Operands) -> tuple[Results, Statistics]:
    """`y = h_hat * (scale + scale_offset)`, multiplied by the activations where they do not come first; and rstd."""
    x, gate, scale = operands
    rstd = statistics(norm, x, gate)
    y = _scaled(norm, _normalised(norm, x, gate) * rstd, scale)
    if not norm.gate_first:
        y = y * activate(norm, gate.astype(norm.compute_dtype))
    return Results(y.astype(norm.out_dtype)), (rstd,)


def plain(norm: GatedNorm, operands: Operands) -> Results:
    """The result of `forward`, for JAX to differentiate."""
    x, gate, scale = operands
    # Cast once, so that the cotangents of their uses are added before they are rounded to their dtypes.
    wide = Operands(x.astype(norm.compute_dtype), gate.astype(norm.compute_dtype), scale)
    return forward(norm, wide)[0]


def linear(norm: GatedNorm, saved: Saved, dots: Variables[jax.Array]) -> Results:
    """The tangent of y."""
    (rstd,), scale = saved.stats, saved.scale
    x, gate = saved.x.astype(norm.compute_dtype), saved.gate.astype(norm.compute_dtype)
    x_dot, gate_dot, scale_dot = (None if dot is None else dot.astype(norm.compute_dtype) for dot in dots)
    a = activate(norm, gate)
    h_hat = _normalised(norm, x, gate) * rstd
    a_dot = None if gate_dot is None else gate_dot * slope(norm, gate)
    if norm.gate_first:
        of_both = [x_dot if x_dot is None else x_dot * a, a_dot if a_dot is None else x * a_dot]
        moving = [h_dot for h_dot in of_both if h_dot is not None]
    else:
        moving = [] if x_dot is None else [x_dot]
    terms = []
    if moving:
        terms.append(_scaled(norm, _project(norm, sum(moving[1:], start=moving[0]), h_hat, rstd), scale))
    if scale_dot is not None:
        terms.append(h_hat * broadcastable(norm, x, scale_dot))
    if not norm.gate_first:
        terms = [term * a for term in terms]
        if a_dot is not None:
            terms.append(_scaled(norm, h_hat, scale) * a_dot)
    return Results(sum(terms[1:], start=terms[0]).astype(norm.out_dtype))


def backward(
    norm: GatedNorm, cotangents: Results, saved: Saved, wanted: Variables[Dtype], batch_dims: BatchDims
) -> Variables[jax.Array]:
    """The wanted gradients: the transpose of `linear`."""
    (rstd,), scale = saved.stats, saved.scale
    dy, x, gate = (array.astype(norm.compute_dtype) for array in (cotangents.y, saved.x, saved.gate))
    a = activate(norm, gate)
    h_hat = _normalised(norm, x, gate) * rstd
    u = dy if norm.gate_first else dy * a
    dx = dgate = dscale = None
    if wanted.x is not None or (wanted.gate is not None and norm.gate_first):
        dh = _project(norm, _scaled(norm, u, scale), h_hat, rstd)
    if wanted.x is not None:
        dx = (dh * a if norm.gate_first else dh).astype(wanted.x)
    if wanted.gate is not None:
        da = dh * x if norm.gate_first else dy * _scaled(norm, h_hat, scale)
        dgate = (da * slope(norm, gate)).astype(wanted.gate)
    if wanted.scale is not None:
        dscale = sum_rows(norm, u * h_hat, batch_dims).astype(wanted.scale)
    return Variables(dx, dgate, dscale)


def _normalised(norm: GatedNorm, x: jax.Array, gate: jax.Array) -> jax.Array:
    """`h`: x * a or x."""
    x = x.astype(norm.compute_dtype)
    return x * activate(norm, gate.astype(norm.compute_dtype)) if norm.gate_first else x


def _scaled(norm: GatedNorm, v: jax.Array, scale: jax.Array | None) -> jax.Array:
    return v if scale is None else v * (broadcastable(norm, v, scale) + norm.scale_offset)


def _project(norm: GatedNorm, v: jax.Array, h_hat: jax.Array, rstd: jax.Array) -> jax.Array:
    """The derivative of h_hat by h applied to v; it is symmetric, so it serves both directions."""
    (along,) = means(norm, v * h_hat)
    return (v - h_hat * along) * rstd
