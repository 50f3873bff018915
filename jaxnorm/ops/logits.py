"""Rows of logits, and the exponentials of their differences.

A logit is z = x * scale, or z = soft_cap * tanh(x * scale / soft_cap). Only differences of logits count, and these are
to be exact however large the logits are. So z is never formed, but a w that is not rounded, of which z = w * unit: a
difference of logits is (w - w') * unit.

    w = x * power,      unit = |scale| / |power|, from 1 to 2      where power is a power of two of the scale's sign
    w = z,              unit = 1                                   with a soft cap
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm.ops import checks
from jaxnorm.ops.mask import nan_where, only
from jaxnorm.primitive.op import Dtype, RowSpec


class LogitScale(NamedTuple):
    """How logits follow from x."""

    power: float
    unit: float
    of_cap: float  # what tanh is taken of is x * of_cap
    soft_cap: float  # 0: there is none

    @classmethod
    def of(cls, scale: float, dtype: Dtype, soft_cap: float = 0.0) -> "LogitScale":
        """`dtype`: what is computed in, to which kernels round the scale too."""
        rounded = float(dtype.type(scale))
        if soft_cap:
            return cls(1.0, 1.0, rounded / soft_cap, soft_cap)
        mantissa, exponent = math.frexp(abs(rounded))  # from 1/2 to 1
        if mantissa == 0:
            return cls(1.0, 0.0, 0.0, 0.0)
        power = math.ldexp(1.0, max(exponent - 1, -126))
        return cls(math.copysign(power, rounded), abs(rounded) / power, 0.0, 0.0)

    def w(self, x: jax.Array) -> jax.Array:
        return self.soft_cap * tanh(x * self.of_cap) if self.soft_cap else x * self.power

    def slope(self, x: jax.Array) -> jax.Array | float:
        """dz/dx."""
        whole = self.of_cap * self.soft_cap
        return whole * tanh_slope(x * self.of_cap) if self.soft_cap else self.power * self.unit

    def differences(self, w: jax.Array, top: jax.Array | None) -> jax.Array:
        """Those of logits from the one at `top`; the logits where that is -inf, or None."""
        return (w if top is None else w - origin_of(top)) * self.unit


def origin_of(top: jax.Array) -> jax.Array:
    """What is subtracted: not -inf, so that no difference of it is NaN."""
    return jnp.where(top == -jnp.inf, 0, top)


@jax.custom_jvp
def tanh(v: jax.Array) -> jax.Array:
    """As jnp.tanh, with a slope of which every digit is right: that of JAX is 1 - tanh(v)², which cancels."""
    return jnp.tanh(v)


@jax.custom_jvp
def tanh_slope(v: jax.Array) -> jax.Array:
    power = jnp.exp(-2 * jnp.abs(v))
    return 4 * power / jnp.square(1 + power)


@tanh.defjvp
def _tanh_jvp(primals: Any, dots: Any) -> tuple[jax.Array, jax.Array]:
    (v,), (dot,) = primals, dots
    return tanh(v), tanh_slope(v) * dot


@tanh_slope.defjvp
def _tanh_slope_jvp(primals: Any, dots: Any) -> tuple[jax.Array, jax.Array]:
    (v,), (dot,) = primals, dots
    slope = tanh_slope(v)
    return slope, -2 * tanh(v) * slope * dot


# The logarithm of a share of a row that has most of it: where a gradient is a difference to 1, its digits are few.
MOST_OF_ROW = -0.25


def less_1(log_share: jax.Array) -> jax.Array:
    """exp(log_share) - 1, of one above MOST_OF_ROW: XLA's own takes longer than memory does, for every element."""
    if log_share.dtype == np.float64:
        return jnp.expm1(log_share)
    v = jnp.maximum(log_share, -1)  # beyond, no derivative may be infinite
    factor: Any = 1 / 720
    for coefficient in (1 / 120, 1 / 24, 1 / 6, 1 / 2, 1):
        factor = factor * v + coefficient
    product: jax.Array = factor * v
    return product


class Exponentials(NamedTuple):
    """Of a row exp((w - top) * unit), 0 where a column does not count, and which of them are the top's.

    top is the largest w that counts, and no less than the least finite number; of a row where none counts it is -inf.
    So a shard of a row that is -inf throughout is as any other, and a whole row of these has a sum of 0 and a top that
    is not -inf.
    """

    spec: RowSpec
    differences: jax.Array  # (w - top) * unit, of columns that do not count too
    each: jax.Array
    is_top: jax.Array
    top: jax.Array

    @property
    def sum(self) -> jax.Array:
        return sum_over_row(self.spec, self.each)

    @property
    def log_sum(self) -> jax.Array:
        """The logarithm of the sum, which keeps its digits where it is close to 0."""
        rest, tops = sums_over_row(self.spec, self.each - self.is_top, self.is_top)
        return log_of_1_and(rest + (tops - 1))


def log_of_1_and(rest: jax.Array) -> jax.Array:
    """log(1 + rest). Where that is -inf a derivative is that of 0: of exponentials that are 0 it makes 0, or NaN."""
    is_zero = rest == -1
    return jnp.log1p(rest + jnp.where(is_zero, 1, 0)) + jnp.where(is_zero, -jnp.inf, 0)


def of_whole_row(log_sum: jax.Array, top: jax.Array) -> jax.Array:
    """The same, but no number where all that counts is -inf: nor is a derivative there."""
    return log_sum * nan_where((log_sum == -jnp.inf) & (top > -jnp.inf), 1)


def top_of(spec: RowSpec, w: jax.Array, counts: jax.Array | None) -> jax.Array:
    """The largest w that counts, as `Exponentials` has it; it has no derivative."""
    least = jnp.finfo(w.dtype).min  # type: ignore[no-untyped-call]
    at_least = jnp.maximum(lax.stop_gradient(w), least)
    greatest = jnp.max(only(counts, at_least, -jnp.inf), axis=spec.axes, keepdims=True, initial=-jnp.inf)
    return greatest if spec.shards is None else spec.shards.top(greatest)


def exponentials(
    spec: RowSpec, scale: LogitScale, w: jax.Array, counts: jax.Array | None, top: jax.Array | None = None
) -> Exponentials:
    """`w`: anything that is a number where a column does not count; `top`: what `top_of` gives, if that is known."""
    top = top_of(spec, w, counts) if top is None else top
    # Of what does not count the difference may be infinite, and so would be its exponential, of which the gradient is
    # no number then, though it is not chosen.
    differences = scale.differences(w, top)
    is_top = only(counts, (w == top).astype(w.dtype))
    return Exponentials(spec, differences, only(counts, jnp.exp(only(counts, differences))), is_top, top)


def sum_over_row(spec: RowSpec, v: jax.Array) -> jax.Array:
    of_shard = jnp.sum(v, axis=spec.axes, keepdims=True)
    return of_shard if spec.shards is None else spec.shards.add(of_shard)


def sums_over_row(spec: RowSpec, *values: jax.Array) -> list[jax.Array]:
    """The same of several, in one exchange."""
    of_shard = [jnp.sum(v, axis=spec.axes, keepdims=True) for v in values]
    return of_shard if spec.shards is None else list(spec.shards.add(jnp.stack(of_shard)))


def check_logit_scale(function: str, value: object) -> float | jax.Array:
    """value as a finite Python float, or if it is an array of JAX as a scalar one."""
    if isinstance(value, (np.ndarray, np.generic)) or not checks.is_array(value):
        return checks.check_number(function, "logit_scale", value)
    scale = checks.check_array(function, "logit_scale", value)
    if scale.ndim:
        raise ValueError(
            f"{function}: logit_scale has shape {scale.shape}, expected (): one number for all logits, as "
            f"logit_scale.reshape(()) is if it has one element. Others multiply x or logits first."
        )
    return scale


def several_axes(spec: Any, _: Any) -> str | None:
    axes = spec.axes
    return None if len(axes) == 1 else f"the result is of the axes {axes} together, kernels take one"


def widened(spec: Any, _: Any) -> str | None:
    if not spec.is_widened:
        return None
    return "logits of a half type times a traced logit_scale are float32, and a kernel would want a copy of them"
