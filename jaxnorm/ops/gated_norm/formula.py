"""The gated RMSNorm: what is static about it, its formulas in plain jnp, and its op.

The last axis is normalised. A scale has its shape or, where that axis is a group of a longer one, that of the last two.
For a derivative x, gate and rstd are kept.
"""

import dataclasses
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import jax
import numpy as np
from jax import lax

from jaxnorm.ops import speed
from jaxnorm.ops.norm.formula import broadcastable, means, sum_rows
from jaxnorm.primitive.described import Function, Request
from jaxnorm.primitive.family import Family
from jaxnorm.primitive.op import LIKE_X, WEIGHT, BatchDims, Derivative, Native, Op, RowSpec, Statistics
from jaxnorm.sharding import dims

Activation = Literal["silu", "sigmoid"]
Dtype = np.dtype[Any]
T = TypeVar("T")

# The longest row that kernels gate.
LONGEST = 1 << 14


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


def _types(norm: GatedNorm, operands: Operands) -> Results:
    return Results(dims.like(operands.x, norm.out_dtype))


def row_too_long(_: GatedNorm, operands: Any) -> str | None:
    cols = operands.x.shape[-1]
    if isinstance(cols, int) and cols > LONGEST:
        return f"rows of {cols} elements are normalised, kernels with a gate take at most {LONGEST}"
    return None


def gate_of_another_dtype(_: GatedNorm, operands: Any) -> str | None:
    return _unlike_x(operands.x, "gate", operands.gate.dtype)


def _result_of_another_dtype(norm: GatedNorm, operands: Operands) -> str | None:
    return _unlike_x(operands.x, "the result", norm.out_dtype)


def _unlike_x(x: jax.Array, name: str, dtype: Dtype) -> str | None:
    return None if dtype == x.dtype else f"x is {x.dtype} and {name} {dtype}; kernels with a gate want them equal"


def _attributes(norm: GatedNorm, operands: Operands | Saved) -> dict[str, Any]:
    return {
        "scale_offset": np.float32(norm.scale_offset),
        "activation": norm.activation,
        "gate_first": norm.gate_first,
        "grouped": operands.scale is not None and operands.scale.ndim == 2,
    }


def _requested(request: Request) -> tuple[GatedNorm, Operands]:
    norm = GatedNorm(
        epsilon=1e-6,
        scale_offset=-0.0,
        activation="silu",
        gate_first=True,
        compute_dtype=dims.wide_dtype((request.dtype, request.out_dtype)),
        out_dtype=request.out_dtype,
    )
    x = request.array(request.shape)
    return norm, Operands(x, x, request.array(request.scale_shape))


GATED_NORM = Family(
    Op(
        name="gated_norm",
        spec=GatedNorm,
        operands=Operands,
        results=Results,
        roles={"x": LIKE_X, "gate": LIKE_X, "scale": WEIGHT, "y": LIKE_X},
        types=_types,
        forward=forward,
        plain=plain,
        derivative=Derivative(
            saved=Saved,
            variables=Variables,
            linear=linear,
            backward=backward,
        ),
        native=Native(
            names=("jaxnorm_gated_rms_norm",),
            name=lambda _: "jaxnorm_gated_rms_norm",
            forward=lambda norm, operands: {**_attributes(norm, operands), "epsilon": np.float32(norm.epsilon)},
            backward=_attributes,
            plan=lambda norm, _: {"kind": "rms", "gated": "first" if norm.gate_first else "last"},
            slower=speed.any_kernel,
        ),
        reasons=(row_too_long, gate_of_another_dtype, _result_of_another_dtype),
        can_shard=lambda *_: True,
        functions=(Function("gated_rms_norm", _requested, last_axis_only=True),),
    )
)
