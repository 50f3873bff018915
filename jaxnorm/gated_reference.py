"""The gated norm as plain jnp: the specification, the oracle of the tests and the fallback, as `jaxnorm.reference`."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm.reference import Norm, means

Activation = Literal["silu", "sigmoid"]
Dtypes = tuple[np.dtype[Any] | None, np.dtype[Any] | None, np.dtype[Any] | None]


@dataclasses.dataclass(frozen=True)
class Gate:
    """What is static about a gate; hashable, as `Norm` is."""

    activation: Activation
    first: bool  # x * a is normalised; otherwise the normalised x is multiplied by a


def activate(kind: Gate, gate: jax.Array) -> jax.Array:
    """`a`: sigmoid(gate), or silu(gate) = gate * sigmoid(gate)."""
    sigmoid = lax.logistic(gate)
    return sigmoid if kind.activation == "sigmoid" else gate * sigmoid


def slope(kind: Gate, gate: jax.Array) -> jax.Array:
    """The derivative of `activate`. 1 - sigmoid(v) is sigmoid(-v), which loses nothing where it is small."""
    sigmoid, rest = lax.logistic(gate), lax.logistic(-gate)
    return sigmoid * rest if kind.activation == "sigmoid" else sigmoid + gate * sigmoid * rest


def statistics(norm: Norm, kind: Gate, x: jax.Array, gate: jax.Array) -> jax.Array:
    """rstd of what is normalised, with x's shape but for a last axis of length 1."""
    h = _normalised(norm, kind, x, gate)
    (mean_square,) = means(norm, h * h)
    return lax.rsqrt(mean_square + norm.epsilon)


def forward(
    norm: Norm, kind: Gate, x: jax.Array, gate: jax.Array, rstd: jax.Array, scale: jax.Array | None
) -> jax.Array:
    """`h_hat * (scale + scale_offset)`, by the activations where they do not come first."""
    y = _scaled(norm, _normalised(norm, kind, x, gate) * rstd, scale)
    if not kind.first:
        y = y * activate(kind, gate.astype(norm.compute_dtype))
    return y.astype(norm.out_dtype)


def apply(norm: Norm, kind: Gate, x: jax.Array, gate: jax.Array, scale: jax.Array | None) -> jax.Array:
    # Cast once, so that the cotangents of their uses are added before they are rounded to their dtypes.
    x, gate = x.astype(norm.compute_dtype), gate.astype(norm.compute_dtype)
    return forward(norm, kind, x, gate, statistics(norm, kind, x, gate), scale)


def linear(
    norm: Norm,
    kind: Gate,
    x: jax.Array,
    gate: jax.Array,
    rstd: jax.Array,
    scale: jax.Array | None,
    tangents: tuple[jax.Array | None, jax.Array | None, jax.Array | None],
) -> jax.Array:
    """The tangent of y for the tangents of x, gate and scale; None is a zero tangent."""
    x, gate = x.astype(norm.compute_dtype), gate.astype(norm.compute_dtype)
    x_dot, gate_dot, scale_dot = (None if dot is None else dot.astype(norm.compute_dtype) for dot in tangents)
    a = activate(kind, gate)
    h_hat = _normalised(norm, kind, x, gate) * rstd
    a_dot = None if gate_dot is None else gate_dot * slope(kind, gate)
    if kind.first:
        parts = [x_dot if x_dot is None else x_dot * a, a_dot if a_dot is None else x * a_dot]
        moving = [part for part in parts if part is not None]
    else:
        moving = [] if x_dot is None else [x_dot]
    terms = []
    if moving:
        terms.append(_scaled(norm, _project(norm, sum(moving[1:], start=moving[0]), h_hat, rstd), scale))
    if scale_dot is not None:
        terms.append(h_hat * scale_dot)
    if not kind.first:
        terms = [term * a for term in terms]
        if a_dot is not None:
            terms.append(_scaled(norm, h_hat, scale) * a_dot)
    return sum(terms[1:], start=terms[0]).astype(norm.out_dtype)


def backward(
    norm: Norm,
    kind: Gate,
    dy: jax.Array,
    x: jax.Array,
    gate: jax.Array,
    rstd: jax.Array,
    scale: jax.Array | None,
    dtypes: Dtypes,
) -> list[jax.Array]:
    """The cotangents of x, gate and scale whose dtype is given, in this order: the transpose of `linear`."""
    dx_dtype, dgate_dtype, dscale_dtype = dtypes
    dy, x, gate = (array.astype(norm.compute_dtype) for array in (dy, x, gate))
    a = activate(kind, gate)
    h_hat = _normalised(norm, kind, x, gate) * rstd
    u = dy if kind.first else dy * a
    cotangents = []
    if dx_dtype is not None or (dgate_dtype is not None and kind.first):
        dh = _project(norm, _scaled(norm, u, scale), h_hat, rstd)
    if dx_dtype is not None:
        cotangents.append((dh * a if kind.first else dh).astype(dx_dtype))
    if dgate_dtype is not None:
        da = dh * x if kind.first else dy * _scaled(norm, h_hat, scale)
        cotangents.append((da * slope(kind, gate)).astype(dgate_dtype))
    if dscale_dtype is not None and scale is not None:
        rows = tuple(range(x.ndim - scale.ndim))
        cotangents.append(jnp.sum(u * h_hat, axis=rows).astype(dscale_dtype))
    return cotangents


def _normalised(norm: Norm, kind: Gate, x: jax.Array, gate: jax.Array) -> jax.Array:
    """`h`: x * a or x."""
    x = x.astype(norm.compute_dtype)
    return x * activate(kind, gate.astype(norm.compute_dtype)) if kind.first else x


def _scaled(norm: Norm, v: jax.Array, scale: jax.Array | None) -> jax.Array:
    """scale has v's last axis, or its last two."""
    if scale is None:
        return v
    scale = scale.astype(norm.compute_dtype)
    return v * (jnp.expand_dims(scale, tuple(range(v.ndim - scale.ndim))) + norm.scale_offset)


def _project(norm: Norm, v: jax.Array, h_hat: jax.Array, rstd: jax.Array) -> jax.Array:
    """The derivative of h_hat by h applied to v; it is symmetric, so it serves both directions."""
    (along,) = means(norm, v * h_hat)
    return (v - h_hat * along) * rstd
