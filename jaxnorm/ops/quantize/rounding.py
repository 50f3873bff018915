"""The formula of a quantised array in plain jnp, and the straight-through derivative of its rounding."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad

from jaxnorm.ops.mask import nan_where
from jaxnorm.ops.quantize.checks import SMALLEST_SCALE
from jaxnorm.primitive.op import O
from jaxnorm.primitive.registry import Request
from jaxnorm.primitive.rules import Rules, no_tangent
from jaxnorm.quantization import Quantization
from jaxnorm.sharding.shards import Shards


class Derivative(NamedTuple):
    """That of rounded values: straight through where a carrier carries it, else the error of whoever takes one."""

    has_carrier: bool
    error: str


def rounded(
    quantization: Quantization,
    v: jax.Array,
    axes: tuple[int, ...],
    given: jax.Array | None = None,
    shards: Shards | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The values that v, of float32, is quantised to, and their scales, one for all elements along `axes` or a group.

    On a CPU this is bit for bit what NumPy gives, but for subnormal numbers, which XLA counts as zero there, and for a
    given scale that is a quotient in the same program: of 1 / (a / b) XLA makes b / a.
    """
    shape, group = v.shape, quantization.group_size
    if group is not None:
        v = v.reshape(*shape[:-1], shape[-1] // group, group)
    scale = given
    if scale is None:
        amax = largest_magnitude(v, axes if group is None else (-1,))
        if shards is not None and group is None:
            amax = shards.max(amax)
        scale = scale_of(quantization, amax)
    values = values_of(quantization, v, scale, shape)
    return values, scale if given is not None or group is None else scale.squeeze(-1)


def largest_magnitude(v: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """The greatest |v| along these axes, of length 1 then; NaN if there is one."""

    def of_numbers(v: jax.Array) -> jax.Array:
        return jnp.max(jnp.abs(v), axes, keepdims=True, initial=0)

    def with_nan(v: jax.Array) -> jax.Array:
        # XLA for a CPU (JAX 0.10) loses a NaN in the maximum of a long row.
        return of_numbers(v) + nan_where(jnp.any(jnp.isnan(v), axes, keepdims=True), 0)

    largest: jax.Array = lax.platform_dependent(v, cpu=with_nan, default=of_numbers)
    return largest


def values_of(quantization: Quantization, v: jax.Array, scale: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    largest = quantization.largest
    values = jnp.clip(v * (1 / scale), -largest, largest)
    if jnp.issubdtype(quantization.dtype, jnp.integer):
        values = jnp.where(jnp.isnan(values), 0, jnp.round(values))
    # Without the barrier XLA for GPUs leaves out the rounding to float8 where the same program converts the values
    # back: its option `xla_allow_excess_precision`.
    rounded: jax.Array = lax.optimization_barrier(values.astype(quantization.dtype).reshape(shape))
    return rounded


def scale_of(quantization: Quantization, amax: jax.Array) -> jax.Array:
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


def attributes(quantization: Quantization) -> dict[str, Any]:
    return {
        "group": np.int64(quantization.group_size or 0),
        "max_scale": np.float32(np.inf if quantization.max_scale is None else quantization.max_scale),
        "power_of_two": quantization.power_of_two,
    }


def straight_through(
    derivative: Derivative, v: jax.Array, given: jax.Array | None, dtype: Any
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """v and the given scale, which do not move from here on, and a carrier of this dtype that moves as v does.

    A primitive of its own, for JAX to differentiate what is around. A `custom_jvp` would not do: JAX drops its rule
    where it linearises the body of a loop.
    """
    operands = (v,) if given is None else (v, given)
    values = _STRAIGHT_THROUGH.primitive.bind(*operands, derivative=derivative, dtype=np.dtype(dtype))
    carrier = values.pop() if derivative.has_carrier else None
    return values[0], None if given is None else values[1], carrier


def check(derivative: Derivative) -> None:
    if not derivative.has_carrier:
        raise ValueError(derivative.error)


def requested(
    unquantized: Callable[[Request], tuple[Any, Any]], operands: type[O]
) -> Callable[[Request], tuple[Any, O]]:
    """A call as `jaxnorm.info` asks for it, from that of the op whose result is quantised, which is float32."""

    def of_request(request: Request) -> tuple[Any, O]:
        spec, given = unquantized(request._replace(out_dtype=np.dtype(np.float32)))
        return dataclasses.replace(spec, quantization=Quantization(request.out_dtype)), operands(*given)

    return of_request


def can_shard(spec: Any, cols: int) -> bool:
    """Whether a shard of so many columns holds whole groups that share a scale."""
    return spec.quantization is None or cols % (spec.quantization.group_size or 1) == 0


class _StraightThrough(Rules):
    is_checked = False

    def abstract(self, *types: Any, derivative: Derivative, dtype: np.dtype[Any]) -> list[Any]:
        given = [operand.update(weak_type=False) for operand in types]
        return [*given, given[0].update(dtype=dtype)] if derivative.has_carrier else given

    def formula(self, *operands: jax.Array, derivative: Derivative, dtype: np.dtype[Any]) -> list[jax.Array]:
        # Made of v, so that under vmap and over a mesh it varies as v does.
        carrier = [jnp.where(False, operands[0].astype(dtype), 0)] if derivative.has_carrier else []
        return [*operands, *carrier]

    def batch(self, operands: Any, axes: Any, *, derivative: Derivative, dtype: np.dtype[Any]) -> tuple[Any, Any]:
        results = self.primitive.bind(*operands, derivative=derivative, dtype=dtype)
        return results, [*axes, axes[0]][: len(axes) + derivative.has_carrier]

    def jvp(self, primals: Any, dots: Any, *, derivative: Derivative, dtype: np.dtype[Any]) -> tuple[Any, Any]:
        check(derivative)
        results = self.primitive.bind(*primals, derivative=derivative, dtype=dtype)
        *zeros, of_carrier = map(no_tangent, results)
        moving = type(dots[0]) is not ad.Zero
        return results, [*zeros, lax.convert_element_type(dots[0], dtype) if moving else of_carrier]

    def jet(self, primals: Any, series: Any, *, derivative: Derivative, dtype: np.dtype[Any]) -> tuple[Any, Any]:
        check(derivative)
        results = self.primitive.bind(*primals, derivative=derivative, dtype=dtype)
        return results, [*(None for _ in primals), [term.astype(dtype) for term in series[0]]]


_STRAIGHT_THROUGH = _StraightThrough("jaxnorm_straight_through")
