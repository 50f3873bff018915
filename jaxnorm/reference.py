"""The norms as plain jnp: the specification, the oracle of the tests and the fallback, in one.

A native kernel computes what stands here. Everything is computed in float32 (float64 where an operand has it) and
rounded once, at the end.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm import layouts
from jaxnorm.quantization import SMALLEST_SCALE, Quantization
from jaxnorm.split import Split

Kind = Literal["rms", "layer"]
# Row statistics, shaped like x with normalised axes of length 1: (rstd,) of RMSNorm, (mean, rstd) of LayerNorm.
Statistics = Sequence[jax.Array]


@dataclasses.dataclass(frozen=True)
class Norm:
    """What is static about one norm; hashable, so that a primitive carries it as a parameter.

    Axes are counted from the end, so that leading axes that vmap adds change nothing.
    """

    kind: Kind
    axes: tuple[int, ...]
    epsilon: float
    scale_offset: float
    multiply_before_cast: bool
    compute_dtype: np.dtype[Any]
    out_dtype: np.dtype[Any]
    native_for: str | None = None  # the function that was asked for a kernel and nothing else
    pad_to: int = 1  # y's last axis, the only normalised one then, has zeros after it up to a multiple
    split: Split | None = None  # the devices that hold equal parts of each row; what is global is computed by all

    def padded(self, shape: tuple[Any, ...]) -> tuple[Any, ...]:
        """y's shape for x's."""
        return shape if self.pad_to == 1 else (*shape[:-1], shape[-1] + -shape[-1] % self.pad_to)

    def whole(self) -> "Norm":
        """The norm of rows that are not split."""
        return dataclasses.replace(self, split=None)


def add(x: jax.Array, residual: jax.Array) -> jax.Array:
    """`x + residual`, rounded once, to residual's dtype.

    The wider of their dtypes is enough for that, float32 for two half types. Where they are of one dtype nothing is
    converted, in the cotangents neither.
    """
    if x.dtype == residual.dtype:
        return x + residual
    dtype = layouts.wide_dtype((x.dtype, residual.dtype))
    return (x.astype(dtype) + residual.astype(dtype)).astype(residual.dtype)


def statistics(norm: Norm, x: jax.Array) -> Statistics:
    """`(rstd,)` or `(mean, rstd)`; the variance is the mean of squared deviations, never E[x²] - mean²."""
    return merged(norm, moments(norm, x))


def moments(norm: Norm, x: jax.Array) -> Sequence[jax.Array]:
    """The mean square, or mean and variance, of x alone, though it were a part of rows that are split."""
    x = x.astype(norm.compute_dtype)
    if norm.kind == "rms":
        return (_mean(norm, x * x),)
    mean = _mean(norm, x)
    return mean, _mean(norm, lax.square(x - mean))


def merged(norm: Norm, of_part: Sequence[jax.Array]) -> Statistics:
    """The statistics of whole rows by the moments of their parts."""
    if norm.kind == "rms":
        (mean_square,) = of_part if norm.split is None else norm.split.mean(*of_part)
        return (lax.rsqrt(mean_square + norm.epsilon),)
    mean, variance = of_part
    if norm.split is not None:
        # Chan, Golub and LeVeque's merge of the parts: as exact as the sum over all, with one exchange.
        parts = norm.split.gather(mean, variance)
        mean = jnp.mean(parts[0], axis=0)
        variance = jnp.mean(parts[1] + lax.square(parts[0] - mean), axis=0)
    return mean, lax.rsqrt(variance + norm.epsilon)


def forward(norm: Norm, x: jax.Array, stats: Statistics, scale: jax.Array | None, bias: jax.Array | None) -> jax.Array:
    """`y = x_hat * (scale + scale_offset) + bias`."""
    y = _x_hat(norm, x, stats)
    if not norm.multiply_before_cast:
        y = y.astype(norm.out_dtype).astype(norm.compute_dtype)
    if scale is not None:
        y = y * _factor(norm, x, scale)
    if bias is not None:
        y = y + broadcastable(norm, x, bias)
    return _pad(norm, y.astype(norm.out_dtype))


def apply(
    norm: Norm, x: jax.Array, residual: jax.Array | None, scale: jax.Array | None, bias: jax.Array | None
) -> tuple[jax.Array, ...]:
    """`(y,)`, or `(y, sum)` of the norm of `x + residual`."""
    normalised = x if residual is None else add(x, residual)
    # Cast once, so that the cotangents of its uses are added before they are rounded to its dtype.
    wide = normalised.astype(norm.compute_dtype)
    y = forward(norm, wide, statistics(norm, wide), scale, bias)
    return (y,) if residual is None else (y, wide.astype(residual.dtype))


def linear(
    norm: Norm,
    x: jax.Array,
    stats: Statistics,
    scale: jax.Array | None,
    tangents: tuple[jax.Array | None, jax.Array | None, jax.Array | None],
) -> jax.Array:
    """The tangent of y for the tangents of x, scale and bias; None is a zero tangent."""
    x_dot, scale_dot, bias_dot = tangents
    terms = []
    if x_dot is not None:
        x_dot = x_dot.astype(norm.compute_dtype)
        x_hat_dot = _project(norm, x_dot, x, stats)
        terms.append(x_hat_dot if scale is None else x_hat_dot * _factor(norm, x, scale))
    if scale_dot is not None:
        terms.append(_x_hat(norm, x, stats) * broadcastable(norm, x, scale_dot))
    if bias_dot is not None:
        terms.append(layouts.broadcast(broadcastable(norm, x, bias_dot), x.shape, jax.typeof(x), layouts.whole(x.ndim)))
    return _pad(norm, sum(terms[1:], start=terms[0]).astype(norm.out_dtype))


def backward(
    norm: Norm,
    dy: jax.Array,
    x: jax.Array,
    stats: Statistics,
    scale: jax.Array | None,
    dtypes: tuple[np.dtype[Any] | None, np.dtype[Any] | None, np.dtype[Any] | None],
    dsum: jax.Array | None = None,
    lead: tuple[int, ...] = (),
) -> list[jax.Array]:
    """The cotangents of x, scale and bias whose dtype is given, in this order: the transpose of `linear`.

    dsum is the cotangent of x from elsewhere, where x is the sum of a residual connection: it is added to dx. lead are
    the axes that scale and bias have before the normalised ones.
    """
    dx_dtype, dscale_dtype, dbias_dtype = dtypes
    dy = (dy if norm.pad_to == 1 else dy[..., : x.shape[-1]]).astype(norm.compute_dtype)
    cotangents = []
    if dx_dtype is not None:
        g = dy if scale is None else dy * _factor(norm, x, scale)
        dx = _project(norm, g, x, stats)
        cotangents.append((dx if dsum is None else dx + dsum.astype(norm.compute_dtype)).astype(dx_dtype))
    if dscale_dtype is not None:
        cotangents.append(_sum_rows(norm, dy * _x_hat(norm, x, stats), lead).astype(dscale_dtype))
    if dbias_dtype is not None:
        cotangents.append(_sum_rows(norm, dy, lead).astype(dbias_dtype))
    return cotangents


def quantize(
    quantization: Quantization, norm: Norm, y: jax.Array, smooth: jax.Array | None, given: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """The values that y, of float32, is quantised to, and their scales unless one is given.

    On a CPU this is bit for bit what NumPy gives, but for subnormal numbers, which XLA counts as zero there, and for a
    given scale that is a quotient in the same program: of 1 / (a / b) XLA makes b / a. On a GPU XLA may also leave out
    the rounding to float8 where the same program converts the values back.
    """
    v = y if smooth is None else y * broadcastable(norm, y, smooth)
    shape, group = v.shape, quantization.group_size
    if group is not None:
        v = v.reshape(*shape[:-1], shape[-1] // group, group)
    scale = given
    if scale is None:
        amax = jnp.max(jnp.abs(v), norm.axes if group is None else -1, keepdims=True, initial=0)
        if norm.split is not None and group is None:
            amax = norm.split.max(amax)
        scale = _scale(quantization, amax)
    largest = quantization.largest
    values = jnp.clip(v * (1 / scale), -largest, largest)
    if quantization.dtype == jnp.int8:
        values = jnp.where(jnp.isnan(values), 0, jnp.round(values))
    scales = None if given is not None else scale if group is None else scale.squeeze(-1)
    return values.astype(quantization.dtype).reshape(shape), scales


def _scale(quantization: Quantization, amax: jax.Array) -> jax.Array:
    is_zero = amax == 0
    # By a constant XLA would not divide but multiply by its rounded reciprocal.
    scale = amax / jnp.where(is_zero, 1, jnp.float32(quantization.largest))
    if quantization.power_of_two:
        rounded_up = (lax.bitcast_convert_type(scale, jnp.int32) + 0x7FFFFF) & 0x7F800000
        scale = jnp.where(scale < jnp.inf, lax.bitcast_convert_type(rounded_up, jnp.float32), scale)
    scale = jnp.maximum(scale, SMALLEST_SCALE)
    if quantization.max_scale is not None:
        scale = jnp.minimum(scale, quantization.max_scale)
    return jnp.where(is_zero, 1, scale)


def means(norm: Norm, *values: jax.Array) -> Sequence[jax.Array]:
    """The mean of each over the normalised axes, in one exchange where they are split."""
    of_parts = [_mean(norm, v) for v in values]
    return of_parts if norm.split is None else norm.split.mean(*of_parts)


def _mean(norm: Norm, v: jax.Array) -> jax.Array:
    return jnp.mean(v, axis=norm.axes, keepdims=True)


def _x_hat(norm: Norm, x: jax.Array, stats: Statistics) -> jax.Array:
    *mean, rstd = stats
    x = x.astype(norm.compute_dtype)
    return (x - mean[0] if mean else x) * rstd


def _project(norm: Norm, v: jax.Array, x: jax.Array, stats: Statistics) -> jax.Array:
    """The derivative of x_hat by x applied to v; it is symmetric, so it serves both directions."""
    x_hat = _x_hat(norm, x, stats)
    along, *mean = means(norm, v * x_hat, *([v] if norm.kind == "layer" else []))
    inner = v - x_hat * along
    if mean:
        inner = inner - mean[0]
    return inner * stats[-1]


def _factor(norm: Norm, x: jax.Array, scale: jax.Array) -> jax.Array:
    return broadcastable(norm, x, scale) + norm.scale_offset


def broadcastable(norm: Norm, x: jax.Array, weight: jax.Array) -> jax.Array:
    """weight in the compute dtype and with x's rank: a lead that it has is aligned to the right with x's other axes."""
    missing = [axis for axis in range(-x.ndim, 0) if axis not in norm.axes][: x.ndim - weight.ndim]
    return jnp.expand_dims(weight.astype(norm.compute_dtype), missing)


def _sum_rows(norm: Norm, v: jax.Array, lead: tuple[int, ...]) -> jax.Array:
    """The sums over the axes along which weights of this lead do not differ."""
    others = [axis for axis in range(-v.ndim, 0) if axis not in norm.axes]
    of_lead = others[len(others) - len(lead) :]
    ones = [axis for axis, length in zip(of_lead, lead, strict=True) if length == 1]
    sums = jnp.sum(v, axis=(*others[: len(others) - len(lead)], *ones))
    return jnp.expand_dims(sums, ones)


def _pad(norm: Norm, y: jax.Array) -> jax.Array:
    if norm.pad_to == 1:
        return y
    y = layouts.unsplit(y, -1)
    return jnp.pad(y, [*((0, 0) for _ in y.shape[:-1]), (0, norm.padded(y.shape)[-1] - y.shape[-1])])
