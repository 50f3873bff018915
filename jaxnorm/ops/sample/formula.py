"""The draw of a column from each row of logits z in plain jnp, by a uniform number u and the temperature T.

Of the columns that count, in float32 (float64 of logits of float64):

    e = exp((z - max(z)) / T)
    kept: by descending z, equals by ascending column, the first top_k; of these the shortest prefix with a sum of e of
          at least top_p times theirs; of these those with e >= min_p; the first always
    id = the first kept column, by ascending column, at which the sum of e over what is kept exceeds u times all of it
    log_prob = (z[id] - max(z)) / T - log(sum of e over what is kept)

A T of 0 gives the first column of max(z), with the log_prob 0. A row has the id -1 and the log_prob NaN if NaN or +inf
counts, if nothing above -inf does, or if one of its numbers is not in its range.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm.ops.mask import columns, nan_where, only
from jaxnorm.primitive.op import RowSpec, Statistics
from jaxnorm.sharding import dims

INVALID = -1  # the id of a row from which nothing is drawn


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample(RowSpec):
    is_greedy: bool = False  # the temperature of all rows is 0


class Operands(NamedTuple):
    logits: jax.Array
    uniform: jax.Array  # of logits' rank, as all that has a number a row
    temperature: jax.Array
    top_k: jax.Array | None = None  # int32; of 0, -1 or more than there are columns: all
    top_p: jax.Array | None = None
    min_p: jax.Array | None = None
    where: jax.Array | None = None


class Results(NamedTuple):
    ids: jax.Array
    log_probs: jax.Array


class _Kept(NamedTuple):
    """What is kept of rows: (z - max(z)) / T, e, which is 0 where a column is not kept, and its cumulative sum."""

    t: jax.Array
    e: jax.Array
    sums: jax.Array
    first: jax.Array  # the first column of max(z)
    is_row: jax.Array  # whether max(z) is finite, and nothing NaN

    @property
    def total(self) -> jax.Array:
        return self.sums[..., -1:]

    @classmethod
    def of(cls, spec: Sample, operands: Operands) -> "_Kept":
        _, _, temperature, top_k, top_p, min_p, _ = operands
        z = _counted(spec, operands)
        numbers, top = columns(spec, z), jnp.max(z, -1, keepdims=True)
        is_row = jnp.isfinite(top) & ~jnp.any(jnp.isnan(z), -1, keepdims=True)
        first = _least(z == top, numbers)
        divisor = jnp.where(temperature > 0, temperature, 1)
        t = (z - top) / divisor
        e = jnp.exp(t)
        is_kept = None if top_k is None and top_p is None else _in_prefix(z, top, numbers, divisor, top_k, top_p)
        if min_p is not None:
            is_most = jnp.where(min_p > 1, numbers == first, e >= min_p)
            is_kept = is_most if is_kept is None else is_most & is_kept
        e = only(is_kept, e)
        return cls(t, e, jnp.cumsum(e, -1), first, is_row)


def _counted(spec: Sample, operands: Operands) -> jax.Array:
    """Whole rows of logits, -inf where a column does not count."""
    where = operands.where if operands.where is None else dims.unsharded(operands.where, -1)
    return only(where, dims.unsharded(operands.logits, -1).astype(spec.compute_dtype), -jnp.inf)


def _least(is_one: jax.Array, numbers: jax.Array) -> jax.Array:
    """The first of the columns that are one; their count where none is."""
    return jnp.min(jnp.where(is_one, numbers, is_one.shape[-1]), -1, keepdims=True)


def _in_prefix(
    z: jax.Array,
    top: jax.Array,
    numbers: jax.Array,
    divisor: jax.Array,
    top_k: jax.Array | None,
    top_p: jax.Array | None,
) -> jax.Array:
    """Which columns top_k and top_p keep: those up to the last one in their order."""
    cols = z.shape[-1]
    every = dims.broadcast(numbers, z.shape, jax.typeof(z), dims.like_x(z.ndim))
    falling, order = lax.sort((-z, every), num_keys=1, is_stable=True)
    count: Any = cols if top_k is None else jnp.where((top_k > 0) & (top_k < cols), top_k, cols)
    if top_p is not None:
        each = jnp.exp((-falling - top) / divisor)
        sums = jnp.cumsum(each, -1)
        whole = jnp.sum(jnp.where(numbers == count - 1, sums, 0), -1, keepdims=True)
        goes_on = (sums - each < top_p * whole) | (top_p >= 1)
        count = jnp.maximum(1, jnp.sum(goes_on & (numbers < count), -1, keepdims=True, dtype=np.int32))
    is_last = numbers == count - 1
    least, last = (jnp.sum(jnp.where(is_last, a, 0), -1, keepdims=True) for a in (-falling, order))
    return (z > least) | ((z == least) & (numbers <= last))


def _are_valid(operands: Operands) -> jax.Array:
    _, uniform, temperature, top_k, top_p, min_p, _ = operands
    valid = (uniform >= 0) & (uniform < 1) & (temperature >= 0) & (temperature < jnp.inf)
    valid = valid if top_k is None else valid & (top_k >= -1)
    valid = valid if top_p is None else valid & ~jnp.isnan(top_p)
    return valid if min_p is None else valid & (min_p >= 0)


def _greedy(spec: Sample, operands: Operands) -> Results:
    """By one maximum, which NaN is."""
    z = _counted(spec, operands)
    first = jnp.argmax(z, -1, keepdims=True).astype(np.int32)
    is_drawn = jnp.isfinite(jnp.take_along_axis(z, first, -1)) & _are_valid(operands)
    log_probs = nan_where(~is_drawn, 0).astype(spec.compute_dtype)
    return Results(jnp.where(is_drawn, first, INVALID), log_probs)


def forward(spec: Sample, operands: Operands) -> tuple[Results, Statistics]:
    uniform, temperature = operands.uniform, operands.temperature
    if operands.logits.shape[-1] == 0:
        none = jnp.full_like(uniform, INVALID, np.int32)
        return Results(none, nan_where(none < 0, 0).astype(spec.compute_dtype)), ()
    if spec.is_greedy:
        return _greedy(spec, operands), ()
    kept = _Kept.of(spec, operands)
    numbers = columns(spec, kept.e)
    is_likely = kept.e > 0
    last = jnp.max(jnp.where(is_likely, numbers, INVALID), -1, keepdims=True)
    drawn = jnp.minimum(_least((kept.sums > uniform * kept.total) & is_likely, numbers), last)
    log_probs = jnp.sum(jnp.where(numbers == drawn, kept.t, 0), -1, keepdims=True) - jnp.log(kept.total)
    is_greedy, is_valid = temperature == 0, kept.is_row & _are_valid(operands)
    ids = jnp.where(is_valid, jnp.where(is_greedy, kept.first, drawn), INVALID)
    return Results(ids, jnp.where(is_greedy, 0, log_probs) + nan_where(~is_valid, 0).astype(log_probs.dtype)), ()


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def differentiable(spec: Sample, operands: Operands, results: Results) -> jax.Array:
    """The log-probabilities among the results, with their derivative by logits and temperature.

    The ids, and what is kept, are constant: it is 0 where nothing is drawn, and where nothing else could be.
    """
    return results.log_probs


@differentiable.defjvp
def _jvp(spec: Sample, primals: Any, dots: Any) -> tuple[jax.Array, jax.Array]:
    (operands, results), (moving, _) = primals, dots
    is_drawn = (results.ids != INVALID) & (operands.temperature > 0)
    temperature = jnp.where(is_drawn, operands.temperature, 1)
    kept = _Kept.of(spec, operands._replace(temperature=temperature))
    is_kept = kept.e > 0
    is_id = columns(spec, kept.e) == results.ids
    share = jnp.where(is_kept & is_drawn, is_id - kept.e / kept.total, 0)
    t, z_dot = (jnp.where(is_kept, dims.unsharded(a, -1).astype(share.dtype), 0) for a in (kept.t, moving.logits))
    t_dot = z_dot - t * moving.temperature
    return results.log_probs, jnp.sum(share * t_dot, -1, keepdims=True) / temperature
