"""The norms as plain jnp: the specification, the oracle of the tests and the fallback, in one.

`Norm` says what is static about every norm. `gated.py` has the formulas around a gate, `quantized.py` the rounding
of a quantised result.

A native kernel computes what stands here. Everything is computed in float32 (float64 where an operand has it) and
rounded once, at the end.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Generic, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad

from jaxnorm.primitive import rules
from jaxnorm.primitive.addend import add, rounded
from jaxnorm.primitive.op import BatchDims, Dtype, RowSpec, Statistics, T
from jaxnorm.primitive.weights import of_rank
from jaxnorm.sharding import dims
from jaxnorm.sharding.shards import Shards, check_no_jet

Kind = Literal["rms", "layer"]
KINDS: tuple[Kind, ...] = ("rms", "layer")
STATISTICS = {"rms": 1, "layer": 2}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Norm(RowSpec):
    kind: Kind = "rms"
    epsilon: float
    scale_offset: float
    multiply_before_cast: bool = True
    x_hat_dtype: Dtype | None = None  # what x_hat is rounded to before it is multiplied, if not to the result's dtype
    pad_to: int = 1  # y's last axis, the only normalised one then, has zeros after it up to a multiple
    activation: str | None = None  # of the gate, where there is one
    gate_first: bool = False  # x * activation(gate) is normalised; otherwise the normalised x is multiplied by it
    quantization: Any = None  # of the result a `Quantization`, and what follows belongs to it
    straight_through: bool = False
    with_unquantized: bool = False
    grouped: bool = False  # the last axis is a group of a longer one, which is the last two

    @property
    def name(self) -> str:
        """The public function, as if nothing were added first."""
        return f"{'gated_' if self.activation else ''}{self.kind}_norm{'_quantized' if self.quantization else ''}"

    @property
    def wide(self) -> Self:
        """The norm whose result is not rounded yet."""
        return dataclasses.replace(self, out_dtype=self.compute_dtype)

    def unquantized(self, out_dtype: Dtype) -> "Norm":
        """The norm whose result is quantised."""
        plain: Any = {"quantization": None, "straight_through": False, "with_unquantized": False, "grouped": False}
        return dataclasses.replace(self, out_dtype=out_dtype, **plain)

    def padded(self, shape: tuple[Any, ...]) -> tuple[Any, ...]:
        return shape if self.pad_to == 1 else (*shape[:-1], shape[-1] + -shape[-1] % self.pad_to)

    def whole(self) -> "Norm":
        return dataclasses.replace(self, shards=None)


def x_hat_dtype(x: Dtype, out_dtype: Dtype, *, multiply_before_cast: bool) -> Dtype | None:
    """What x_hat is rounded to if that is x's dtype and not the result's: where x's is the narrower one."""
    return x if not multiply_before_cast and x.itemsize < out_dtype.itemsize else None


class Operands(NamedTuple):
    x: jax.Array
    residual: jax.Array | None = None
    scale: jax.Array | None = None
    bias: jax.Array | None = None
    branch_scale: jax.Array | None = None  # by which x is multiplied before the addend is added


class Results(NamedTuple):
    y: jax.Array
    sum: jax.Array | None = None  # of x and an addend


class Saved(NamedTuple):
    x: jax.Array  # what is normalised
    stats: Statistics  # of x's shape with normalised axes of length 1: (rstd,) of RMSNorm, (mean, rstd) of LayerNorm
    scale: jax.Array | None = None


class Variables(NamedTuple, Generic[T]):
    """What a derivative is taken by: the tangents, the gradients, or the dtypes of those that are wanted."""

    x: T | None = None
    scale: T | None = None
    bias: T | None = None


def statistics(norm: Norm, x: jax.Array) -> Statistics:
    """`(rstd,)` or `(mean, rstd)`; the variance is the mean of squared deviations, never E[x²] - mean²."""
    return merged(norm, moments(norm, x))


def moments(norm: Norm, x: jax.Array) -> Sequence[jax.Array]:
    """The mean square, or mean and variance, of x alone, though it were a shard of each row."""
    x = x.astype(norm.compute_dtype)
    if norm.kind == "rms":
        return (_mean(norm, x * x),)
    mean = _mean(norm, x)
    return mean, _mean(norm, lax.square(x - mean))


def merged(norm: Norm, of_shard: Sequence[jax.Array]) -> Statistics:
    """The statistics of whole rows, from the moments of their shards."""
    if norm.kind == "rms":
        (mean_square,) = of_shard if norm.shards is None else norm.shards.mean(*of_shard)
        return (lax.rsqrt(mean_square + norm.epsilon),)
    mean, variance = of_shard if norm.shards is None else _of_whole_rows(norm.shards, *of_shard)
    return mean, lax.rsqrt(variance + norm.epsilon)


def affine(norm: Norm, x: jax.Array, stats: Statistics, scale: jax.Array | None, bias: jax.Array | None) -> jax.Array:
    """`y = x_hat * (scale + scale_offset) + bias`."""
    x_hat = normalised(norm, x, stats)
    y = product(norm, x_hat, scale)
    if not norm.multiply_before_cast:
        narrow = rounded(x_hat.astype(norm.x_hat_dtype or norm.out_dtype))
        y = _with_value(y, product(norm, narrow, scale))
    return _with_bias(norm, y, bias)


def weighted(norm: Norm, x_hat: jax.Array, scale: jax.Array | None, bias: jax.Array | None) -> jax.Array:
    """y from an x_hat that is rounded already."""
    return _with_bias(norm, product(norm, x_hat, scale), bias)


def product(norm: Norm, x_hat: jax.Array, scale: jax.Array | None) -> jax.Array:
    y = x_hat.astype(norm.compute_dtype)
    return y if scale is None else y * _factor(norm, y, scale)


def _with_value(array: jax.Array, value: jax.Array) -> jax.Array:
    """The value, with array's derivative, as `linear` takes no note of a rounding. So near, the sum is exact."""
    difference = lax.stop_gradient(value) - lax.stop_gradient(array)
    return jnp.where(difference == difference, array + difference, array)  # infinities have none


def _with_bias(norm: Norm, y: jax.Array, bias: jax.Array | None) -> jax.Array:
    if bias is not None:
        y = y + broadcastable(norm, y, bias)
    return _pad(norm, y.astype(norm.out_dtype))


def forward(norm: Norm, operands: Operands) -> tuple[Results, Statistics]:
    """y and the statistics; with an addend, of the sum, and that."""
    x = summed_operands(norm, operands)
    stats = statistics(norm, x)
    y = affine(norm, x, stats, operands.scale, operands.bias)
    return Results(y, None if operands.residual is None else x), stats


def plain(norm: Norm, operands: Operands) -> Results:
    addend = operands.residual
    # Cast once, so that the cotangents of its uses are added before they are rounded to its dtype.
    wide = summed_operands(norm, operands).astype(norm.compute_dtype)
    y = affine(norm, wide, statistics(norm, wide), operands.scale, operands.bias)
    return Results(y, None if addend is None else wide.astype(addend.dtype))


def linear(norm: Norm, saved: Saved, dots: Variables[jax.Array]) -> Results:
    return Results(_pad(norm, summed(tangents(norm, saved, dots)).astype(norm.out_dtype)))


def tangents(norm: Norm, saved: Saved, dots: Variables[jax.Array]) -> list[jax.Array]:
    """The tangents of y by each variable that moves, in the compute dtype."""
    x, stats, scale = saved
    terms = []
    if dots.x is not None:
        x_hat_dot = _project(norm, dots.x.astype(norm.compute_dtype), x, stats)
        terms.append(x_hat_dot if scale is None else x_hat_dot * _factor(norm, x, scale))
    if dots.scale is not None:
        terms.append(normalised(norm, x, stats) * broadcastable(norm, x, dots.scale))
    if dots.bias is not None:
        terms.append(dims.broadcast(broadcastable(norm, x, dots.bias), x.shape, jax.typeof(x), dims.like_x(x.ndim)))
    return terms


def summed(terms: Sequence[jax.Array]) -> jax.Array:
    return sum(terms[1:], start=terms[0])


def backward(
    norm: Norm, cotangents: Results, saved: Saved, wanted: Variables[Dtype], batch_dims: BatchDims
) -> Variables[jax.Array]:
    """The wanted gradients: the transpose of `linear`. The cotangent of a sum is added to x's."""
    dy, dsum = cotangents
    x, stats, scale = saved
    dy = (dy if norm.pad_to == 1 else dy[..., : x.shape[-1]]).astype(norm.compute_dtype)
    dx = dscale = dbias = None
    if wanted.x is not None:
        dx = _project(norm, dy if scale is None else dy * _factor(norm, x, scale), x, stats)
        dx = (dx if dsum is None else dx + dsum.astype(norm.compute_dtype)).astype(wanted.x)
    if wanted.scale is not None:
        dscale = sum_rows(norm, dy * normalised(norm, x, stats), batch_dims).astype(wanted.scale)
    if wanted.bias is not None:
        dbias = sum_rows(norm, dy, batch_dims).astype(wanted.bias)
    return Variables(dx, dscale, dbias)


def gradient_of_x(norm: Norm, dx_hat: jax.Array, x: jax.Array, stats: Statistics, wanted: Dtype) -> jax.Array:
    """The gradient by x, of this dtype, of an x_hat that has the cotangent dx_hat."""
    return _project(norm, dx_hat, x, stats).astype(wanted)


def means(norm: RowSpec, *values: jax.Array) -> Sequence[jax.Array]:
    """The mean of each over the normalised axes, in one exchange where these are sharded."""
    of_shard = [_mean(norm, v) for v in values]
    return of_shard if norm.shards is None else norm.shards.mean(*of_shard)


def _mean(norm: RowSpec, v: jax.Array) -> jax.Array:
    return jnp.mean(v, axis=norm.axes, keepdims=True)


def normalised(norm: Norm, x: jax.Array, stats: Statistics) -> jax.Array:
    *mean, rstd = stats
    x = x.astype(norm.compute_dtype)
    return (x - mean[0] if mean else x) * rstd


def _project(norm: Norm, v: jax.Array, x: jax.Array, stats: Statistics) -> jax.Array:
    """The derivative of x_hat by x applied to v; it is symmetric, so it serves both directions."""
    x_hat = normalised(norm, x, stats)
    along, *mean = means(norm, v * x_hat, *([v] if norm.kind == "layer" else []))
    inner = v - x_hat * along
    if mean:
        inner = inner - mean[0]
    return inner * stats[-1]


def _factor(norm: Norm, x: jax.Array, scale: jax.Array) -> jax.Array:
    return broadcastable(norm, x, scale) + norm.scale_offset


def broadcastable(norm: RowSpec, x: jax.Array, weight: jax.Array) -> jax.Array:
    """weight in the compute dtype and with x's rank."""
    return of_rank(x.ndim, norm.axes, weight.astype(norm.compute_dtype))


def summed_operands(norm: RowSpec, operands: Operands) -> jax.Array:
    """What is normalised: x, or its sum with an addend."""
    x, addend, _, _, factor = operands
    if addend is None:
        return x
    return add(x, addend, None if factor is None else of_rank(x.ndim, norm.axes, factor))


def sum_rows(norm: RowSpec, v: jax.Array, batch_dims: BatchDims) -> jax.Array:
    """The sums over the axes along which weights with these batch dims do not differ."""
    others = [axis for axis in range(-v.ndim, 0) if axis not in norm.axes]
    first = len(others) - len(batch_dims)
    ones = [axis for axis, length in zip(others[first:], batch_dims, strict=True) if length == 1]
    sums = jnp.sum(v, axis=(*others[:first], *ones))
    return jnp.expand_dims(sums, ones)


def _pad(norm: Norm, y: jax.Array) -> jax.Array:
    if norm.pad_to == 1:
        return y
    y = dims.unsharded(y, -1)
    return jnp.pad(y, [*((0, 0) for _ in y.shape[:-1]), (0, norm.padded(y.shape)[-1] - y.shape[-1])])


def _of_whole_rows(shards: Shards, mean: jax.Array, variance: jax.Array) -> list[jax.Array]:
    """Chan, Golub and LeVeque's merge of mean and variance of shards: as exact as the sum over all, with one exchange.

    Over axes of a `shard_map`, a primitive whose derivative is by means: JAX cannot transpose a gather beside an
    Explicit axis, and drops a `custom_jvp`'s rule where it linearises the body of a loop.
    """
    check_no_jet([mean, variance])
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return (_MERGE.primitive.bind if set(shards.names) <= set(manual) else _MERGE.formula)(
        mean, variance, shards=shards
    )


class _Merge(rules.Rules):
    is_checked = False

    def abstract(self, *of_shard: Any, shards: Shards) -> list[Any]:
        return [a.update(weak_type=False) for a in of_shard]

    def formula(self, *of_shard: jax.Array, shards: Shards) -> list[jax.Array]:
        means, variances = shards.gather(*of_shard)
        mean = jnp.mean(means, axis=0)
        return [mean, jnp.mean(variances + lax.square(means - mean), axis=0)]

    def batch(self, of_shard: Any, axes: Any, *, shards: Shards) -> tuple[Any, Any]:
        return rules.at_front(self.primitive.bind(*rules.fold(of_shard, axes), shards=shards))

    def jvp(self, of_shard: Any, dots: Any, *, shards: Shards) -> tuple[Any, Any]:
        mean, variance = self.primitive.bind(*of_shard, shards=shards)
        mean_dot, variance_dot = map(ad.instantiate_zeros, dots)
        return [mean, variance], shards.mean(mean_dot, variance_dot + 2 * (of_shard[0] - mean) * mean_dot)


_MERGE = _Merge("jaxnorm_merge")
