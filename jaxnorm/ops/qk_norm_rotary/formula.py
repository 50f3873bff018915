"""The norms of queries and keys over each head, and their rotary embedding: the formulas in plain jnp.

Each is that of a norm, and a rotation, for q and for k. For a derivative q, k, their statistics and the angles are
kept; without a norm the angles alone.
"""

import dataclasses
from typing import Generic, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm.native import compat
from jaxnorm.ops.norm import formula as one
from jaxnorm.primitive.op import BatchDims, Dtype, RowSpec, Statistics, T

HeadNorm = Literal["none", "rms", "layer"]
NORMS: tuple[HeadNorm, ...] = get_args(HeadNorm)
STATISTICS = {"none": 0, **one.STATISTICS}


@dataclasses.dataclass(frozen=True, kw_only=True)
class QKNormRotary(RowSpec):
    norm: HeadNorm
    heads_axis: int  # -2, or -3 where the heads come before the tokens
    rotary_dim: int
    interleaved: bool
    epsilon: float
    scale_offset: float

    def of_heads(self) -> one.Norm:
        """The norm of each head, whose result is not rounded."""
        assert self.norm != "none"
        return one.Norm(
            kind=self.norm,
            epsilon=self.epsilon,
            scale_offset=self.scale_offset,
            compute_dtype=self.compute_dtype,
            out_dtype=self.compute_dtype,
        )


class Operands(NamedTuple):
    """Positions and tables have q's axes of tokens, each as long or 1, and tables an axis of pairs behind them."""

    q: jax.Array
    k: jax.Array
    q_scale: jax.Array | None = None
    k_scale: jax.Array | None = None
    positions: jax.Array | None = None  # with frequencies, or cos and sin
    frequencies: jax.Array | None = None
    cos: jax.Array | None = None
    sin: jax.Array | None = None


class Results(NamedTuple):
    q_out: jax.Array
    k_out: jax.Array


class Saved(NamedTuple):
    q: jax.Array | None = None
    k: jax.Array | None = None
    q_scale: jax.Array | None = None
    k_scale: jax.Array | None = None
    positions: jax.Array | None = None
    frequencies: jax.Array | None = None
    cos: jax.Array | None = None
    sin: jax.Array | None = None
    stats: Statistics = ()  # those of q, then of k; q and k are None where there are none


class Variables(NamedTuple, Generic[T]):
    q: T | None = None
    k: T | None = None
    q_scale: T | None = None
    k_scale: T | None = None


class _Heads(NamedTuple):
    """What a derivative reads of q, or of k."""

    x: jax.Array | None
    stats: Statistics
    scale: jax.Array | None


class Angles(NamedTuple):
    """With an axis of length 1 in the heads' place."""

    cos: jax.Array
    sin: jax.Array


def angles(norm: QKNormRotary, arrays: Operands | Saved) -> Angles:
    cos, sin = arrays.cos, arrays.sin
    if cos is None or sin is None:
        assert arrays.positions is not None
        assert arrays.frequencies is not None
        angle = arrays.positions[..., None] * lax.expand_dims(arrays.frequencies, range(arrays.positions.ndim))
        cos, sin = jnp.cos(angle), jnp.sin(angle)
    return Angles(jnp.expand_dims(cos, norm.heads_axis), jnp.expand_dims(sin, norm.heads_axis))


def rotated(norm: QKNormRotary, h: jax.Array, by: Angles) -> jax.Array:
    dim = norm.rotary_dim
    rest = [h[..., dim:]] if dim < h.shape[-1] else []
    if norm.interleaved:
        a, b = h[..., :dim:2], h[..., 1:dim:2]
        pairs = jnp.stack([a * by.cos - b * by.sin, b * by.cos + a * by.sin], -1)
        parts = [pairs.reshape(*h.shape[:-1], dim)]
    else:
        a, b = h[..., : dim // 2], h[..., dim // 2 : dim]
        parts = [a * by.cos - b * by.sin, b * by.cos + a * by.sin]
    return jnp.concatenate([*parts, *rest], -1)


def forward(norm: QKNormRotary, operands: Operands) -> tuple[Results, Statistics]:
    """q and k, normalised and rotated; and the statistics of both."""
    by = angles(norm, operands)
    q, of_q = _normalised(norm, operands.q, operands.q_scale)
    k, of_k = _normalised(norm, operands.k, operands.k_scale)
    q, k = rotated(norm, q, by), rotated(norm, k, by)
    return Results(q.astype(operands.q.dtype), k.astype(operands.k.dtype)), (*of_q, *of_k)


def plain(norm: QKNormRotary, operands: Operands) -> Results:
    q, k, *_ = operands
    # Cast once, so that the cotangents of their uses are added before they are rounded to their dtypes.
    wide = operands._replace(q=q.astype(norm.compute_dtype), k=k.astype(norm.compute_dtype))
    (q_out, k_out), _ = forward(norm, wide)
    return Results(q_out.astype(q.dtype), k_out.astype(k.dtype))


def linear(norm: QKNormRotary, saved: Saved, dots: Variables[jax.Array]) -> Results:
    by = angles(norm, saved)
    q_dot = _linear(norm, _of_q(saved), one.Variables(dots.q, dots.q_scale), by)
    k_dot = _linear(norm, _of_k(saved), one.Variables(dots.k, dots.k_scale), by)
    return Results(q_dot, k_dot)


def backward(
    norm: QKNormRotary, cotangents: Results, saved: Saved, wanted: Variables[Dtype], _: BatchDims
) -> Variables[jax.Array]:
    cos, sin = angles(norm, saved)
    back = Angles(cos, -sin)
    of_q = _backward(norm, cotangents.q_out, _of_q(saved), one.Variables(wanted.q, wanted.q_scale), back)
    of_k = _backward(norm, cotangents.k_out, _of_k(saved), one.Variables(wanted.k, wanted.k_scale), back)
    return Variables(of_q.x, of_k.x, of_q.scale, of_k.scale)


def _of_q(saved: Saved) -> _Heads:
    return _Heads(saved.q, saved.stats[: len(saved.stats) // 2], saved.q_scale)


def _of_k(saved: Saved) -> _Heads:
    return _Heads(saved.k, saved.stats[len(saved.stats) // 2 :], saved.k_scale)


def _normalised(norm: QKNormRotary, x: jax.Array, scale: jax.Array | None) -> tuple[jax.Array, Statistics]:
    """`h`, and the statistics of x."""
    if norm.norm == "none":
        return x.astype(norm.compute_dtype), ()
    results, stats = one.forward(norm.of_heads(), one.Operands(x, None, _aligned(norm, scale)))
    return results.y, stats


def _linear(norm: QKNormRotary, heads: _Heads, dots: one.Variables[jax.Array], by: Angles) -> jax.Array:
    if norm.norm == "none":
        assert dots.x is not None
        return rotated(norm, dots.x.astype(norm.compute_dtype), by).astype(dots.x.dtype)
    x = heads.x
    assert x is not None
    if dots == one.Variables():
        zeros, _ = compat.match_varying_axes(jnp.zeros_like(x), x)
        return zeros
    saved = one.Saved(x, heads.stats, _aligned(norm, heads.scale))
    h_dot = one.linear(norm.of_heads(), saved, dots._replace(scale=_aligned(norm, dots.scale))).y
    return rotated(norm, h_dot, by).astype(x.dtype)


def _backward(
    norm: QKNormRotary, dy: jax.Array, heads: _Heads, wanted: one.Variables[Dtype], back: Angles
) -> one.Variables[jax.Array]:
    if wanted == one.Variables():
        return one.Variables()
    dh = rotated(norm, dy.astype(norm.compute_dtype), back)
    if norm.norm == "none":
        return one.Variables(dh.astype(wanted.x))
    assert heads.x is not None
    scale = _aligned(norm, heads.scale)
    # The axes of a scale before the row's.
    batch_dims = () if scale is None else scale.shape[:-1]
    found = one.backward(norm.of_heads(), one.Results(dh), one.Saved(heads.x, heads.stats, scale), wanted, batch_dims)
    if found.scale is None or heads.scale is None:
        return found
    return found._replace(scale=found.scale.reshape(heads.scale.shape))


def _aligned(norm: QKNormRotary, scale: jax.Array | None) -> jax.Array | None:
    """A scale as norms take it: one for each head has an axis more where tokens come after the heads."""
    if scale is None or scale.ndim == 1 or norm.heads_axis == -2:
        return scale
    return jnp.expand_dims(scale, 1)
