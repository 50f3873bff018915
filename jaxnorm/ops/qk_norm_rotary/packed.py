"""Queries, keys and values of one product, of which the queries and keys are normalised and rotated, in plain jnp.

The formulas are those of `qk_norm_rotary`, for parts of one array; the values are copied. For a derivative the array
is kept, the statistics of its queries and keys, and the angles; without a norm the angles alone.
"""

import dataclasses
import itertools
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm.native import compat
from jaxnorm.ops.qk_norm_rotary import formula as apart
from jaxnorm.primitive.op import BatchDims, Statistics

Dtype = np.dtype[Any]
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class QKVNormRotary(apart.QKNormRotary):
    """What is static about one: along the last axis but one stand the heads of q, then those of k, then those of v."""

    heads_axis: int = -2
    heads: int  # of q
    kv_heads: int  # of k, and of v
    with_v: bool = True  # whether v is a result

    @property
    def whole_axes(self) -> tuple[int, ...]:
        """A device that has all of it has the parts of each result."""
        return (self.heads_axis,)

    @property
    def packed(self) -> int:
        """How many heads there are."""
        return self.heads + 2 * self.kv_heads

    @property
    def gives_v(self) -> bool:
        return self.with_v and "v_out" not in self.omitted


class Operands(NamedTuple):
    """As those of `qk_norm_rotary`, with qkv in the place of q and k."""

    qkv: jax.Array
    q_scale: jax.Array | None = None
    k_scale: jax.Array | None = None
    positions: jax.Array | None = None
    frequencies: jax.Array | None = None
    cos: jax.Array | None = None
    sin: jax.Array | None = None


class Results(NamedTuple):
    q_out: jax.Array
    k_out: jax.Array
    v_out: jax.Array | None = None


class Saved(NamedTuple):
    qkv: jax.Array | None = None
    q_scale: jax.Array | None = None
    k_scale: jax.Array | None = None
    positions: jax.Array | None = None
    frequencies: jax.Array | None = None
    cos: jax.Array | None = None
    sin: jax.Array | None = None
    stats: Statistics = ()  # those of q, then of k; qkv is None where there are none


class Variables(NamedTuple, Generic[T]):
    qkv: T | None = None
    q_scale: T | None = None
    k_scale: T | None = None


class Parts(NamedTuple):
    q: Any
    k: Any
    v: Any


def parts(spec: QKVNormRotary, qkv: jax.Array | None) -> Parts:
    """Of nothing, nothing."""
    if qkv is None:
        return Parts(None, None, None)
    ends = (0, spec.heads, spec.heads + spec.kv_heads, spec.packed)
    axis = qkv.ndim + spec.heads_axis
    return Parts(*(lax.slice_in_dim(qkv, *bounds, axis=axis) for bounds in itertools.pairwise(ends)))


def forward(spec: QKVNormRotary, operands: Operands) -> tuple[Results, Statistics]:
    """q and k, normalised and rotated, and v; and the statistics of q and k."""
    qkv, *others = operands
    q, k, v = parts(spec, qkv)
    rotated, stats = apart.forward(spec, apart.Operands(q, k, *others))
    return Results(*rotated, v if spec.with_v else None), stats


def plain(spec: QKVNormRotary, operands: Operands) -> Results:
    """The results of `forward`, for JAX to differentiate."""
    qkv, *others = operands
    q, k, v = parts(spec, qkv)
    return Results(*apart.plain(spec, apart.Operands(q, k, *others)), v if spec.with_v else None)


def linear(spec: QKVNormRotary, saved: Saved, dots: Variables[jax.Array]) -> Results:
    """The tangents of the results."""
    q, k, v = parts(spec, dots.qkv)
    results = apart.linear(spec, _apart(spec, saved), apart.Variables(q, k, dots.q_scale, dots.k_scale))
    if v is None and spec.with_v:
        v, _ = compat.match_varying_axes(jnp.zeros_like(results.k_out), results.k_out)
    return Results(*results, v if spec.with_v else None)


def backward(
    spec: QKVNormRotary, cotangents: Results, saved: Saved, wanted: Variables[Dtype], batch_dims: BatchDims
) -> Variables[jax.Array]:
    """The wanted gradients: the transpose of `linear`. That of qkv has zeros for v where no cotangent came."""
    q_out, k_out, v_out = cotangents
    each = apart.Variables(wanted.qkv, wanted.qkv, wanted.q_scale, wanted.k_scale)
    found = apart.backward(spec, apart.Results(q_out, k_out), _apart(spec, saved), each, batch_dims)
    if found.q is None or found.k is None:
        return Variables(None, found.q_scale, found.k_scale)
    v = jnp.zeros_like(found.k) if v_out is None else v_out.astype(wanted.qkv)
    return Variables(jnp.concatenate([found.q, found.k, v], spec.heads_axis), found.q_scale, found.k_scale)


def _apart(spec: QKVNormRotary, saved: Saved) -> apart.Saved:
    q, k, _ = parts(spec, saved.qkv)
    return apart.Saved(q, k, **{name: array for name, array in saved._asdict().items() if name != "qkv"})
