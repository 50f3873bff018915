"""A linear layer in float8, as `jaxnorm.float8_linear` says: how its operands are rounded, and derivatives by wide
products. Those of float8 have the formula of `jaxnorm.ops.quantized_dot`.

Here the scale of a row or column of zeros is 0 and not 1, as `quantize` has it: it adds nothing, and as 1 it would set
the largest value of all others in u or v.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Generic, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jaxnorm.ops.products import Contracted
from jaxnorm.ops.quantize import rounding
from jaxnorm.ops.quantize.rounding import Derivative
from jaxnorm.ops.quantized_dot.formula import QuantizedDot, T_co, of_batch, wide_product
from jaxnorm.primitive.broadcast import with_rank_of
from jaxnorm.primitive.convention import ProductSpec
from jaxnorm.quantization import Quantization

FLOAT8 = jnp.dtype("float8_e4m3fn")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8Linear(ProductSpec):
    """What is static about one linear layer: the fields of a `Float8Recipe`, and of the call."""

    weight_gradient: str = "float8"
    fast_accumulation: tuple[str, ...] = ()
    power_of_two: bool = False
    save: str = "quantized"

    def of_product(self, name: str, dtype: np.dtype, spec: PartitionSpec | None = None, rows: int = 1) -> QuantizedDot:
        """What is static about one of its products: "y", "dx", or "dw" over so many axes of rows."""
        direction = "forward" if name == "y" else "backward"
        asked = self.formula_in(direction)
        return QuantizedDot(
            out_dtype=dtype,
            implementation=None if asked is None else "xla",
            how=asked or "",
            wants_all_digits=self.wants_all_digits,
            native_for=self.native_in(direction),
            fast_accumulation=name in self.fast_accumulation,
            batch=self.batch,
            summed=rows,
            x_first=name == "dw",
            weights_first=name == "dx",
            out_spec=spec,
        )


class Operands(NamedTuple, Generic[T_co]):
    """Arrays, or their types. Carriers are zeros and change no result; tangents flow through them."""

    x: T_co  # (..., K), quantised where it has scales
    kernel: T_co  # (K, N), or (N, K), quantised, where it has scales
    bias: T_co | None = None  # (N,)
    x_scales: T_co | None = None  # (..., 1), or of as many axes of length 1 as x has
    x_carrier: T_co | None = None
    kernel_scales: T_co | None = None  # (N, 1)
    kernel_carrier: T_co | None = None  # (K, N)


class Rounded(NamedTuple):
    """Values of float8 and their scales, 0 for a row or column of zeros."""

    values: jax.Array
    scales: jax.Array


class Saved(NamedTuple):
    """What a derivative reads: both factors of a product, the rounded kernel as (N, K).

    Where they are rounded already, x and the kernel, or their carriers, are there for higher derivatives alone.
    """

    x: jax.Array | None = None
    rounded_x: Rounded | None = None
    kernel: jax.Array | None = None
    rounded_kernel: Rounded | None = None
    bias: jax.Array | None = None


class Variables(NamedTuple, Generic[T_co]):
    """What a derivative is taken by: tangents, gradients, or how these are to be. None is zero, or not wanted."""

    x: T_co | None = None
    kernel: T_co | None = None
    bias: T_co | None = None


class Wanted(NamedTuple):
    """How a gradient is to be: its dtype, and over an Explicit mesh how it is split."""

    dtype: np.dtype
    spec: PartitionSpec | None = None


def live(values: jax.Array, scales: jax.Array) -> jax.Array:
    """The scales of given values, 0 for those of zeros."""
    axes = tuple(axis for axis, length in enumerate(scales.shape) if length == 1)
    return jnp.where(jnp.any(values != 0, axes, keepdims=True), scales, 0)


def rounded_along(spec: Float8Linear, array: jax.Array, axes: tuple[int, ...]) -> Rounded:
    """The array in float8, with a scale for what lies along these axes."""
    v = lax.stop_gradient(array).astype(np.float32)
    quantization, amax = Quantization(FLOAT8, power_of_two=spec.power_of_two), rounding.largest_magnitude(v, axes)
    scales = rounding.scale_of(quantization, amax)
    return Rounded(rounding.values_of(quantization, v, scales, v.shape), jnp.where(amax == 0, 0, scales))


def by_rows(spec: Float8Linear, array: jax.Array, of_columns: jax.Array | None = None) -> Rounded:
    """The array, times a factor for each column, with a scale for each row."""
    wide = array.astype(np.float32)
    return rounded_along(spec, wide if of_columns is None else wide * with_rank_of(array, of_columns), (-1,))


def by_columns(spec: Float8Linear, array: jax.Array, of_rows: jax.Array | None = None) -> Rounded:
    """The array, times a factor for each row, with a scale for each column, which is the first axis of the values."""
    wide = array.astype(np.float32)
    v = wide if of_rows is None else wide * of_rows
    values, scales = rounded_along(spec, v, tuple(range(array.ndim - 1)))
    return Rounded(jnp.moveaxis(values, -1, 0), scales)


def saved_x(spec: Float8Linear, saved: Saved, round_again: Callable[..., Rounded] = by_rows) -> Rounded:
    return saved.rounded_x or round_again(spec, saved.x)


def saved_kernel(spec: Float8Linear, saved: Saved, round_again: Callable[..., Rounded] = by_columns) -> Rounded:
    return saved.rounded_kernel or round_again(spec, saved.kernel)


def linear(spec: Float8Linear, saved: Saved, dots: Variables[jax.Array]) -> jax.Array:
    """The tangent of y: wide products of the rounded factors, whose scales come after the sum."""
    if spec.batch:
        return of_batch(spec, linear, saved, dots)
    terms = []
    if dots.x is not None:
        values, scales = saved_kernel(spec, saved)
        dot = wide_product(dots.x, values, _last(dots.x, 1), spec, spec.out_spec, dots.x.dtype)
        terms.append(dot * with_rank_of(dot, scales[0]))
    if dots.kernel is not None:
        values, scales = saved_x(spec, saved)
        dot = wide_product(values, dots.kernel, _last(values, 0), spec, spec.out_spec, dots.kernel.dtype)
        terms.append(dot * scales)
    return _total(spec, terms, dots.bias)


def _total(spec: Float8Linear, terms: list[jax.Array], bias: jax.Array | None) -> jax.Array:
    total = functools.reduce(jnp.add, terms)
    if bias is not None:
        total = total + with_rank_of(total, bias.astype(total.dtype))
    return total.astype(spec.out_dtype)


def _last(array: jax.Array, other: int) -> Contracted:
    """The last axis of an array, and one of another, as those that are summed."""
    return (array.ndim - 1,), (other,)


def wide_linear(spec: Float8Linear, saved: Saved, dots: Variables[jax.Array]) -> jax.Array:
    """`linear`, whose derivative has the rounded factors move as what they were made of."""
    if spec.batch:
        return of_batch(spec, wide_linear, saved, dots)
    terms = []
    if dots.x is not None:
        terms.append(wide_product(dots.x, _moving_kernel(spec, saved), _last(dots.x, 0), spec, spec.out_spec))
    if dots.kernel is not None:
        x = _moving(saved.x, saved_x(spec, saved))
        terms.append(wide_product(x, dots.kernel, _last(x, 0), spec, spec.out_spec))
    return _total(spec, terms, dots.bias)


def wide_backward(spec: Float8Linear, dy: jax.Array, saved: Saved, wanted: Variables[Wanted]) -> Variables[jax.Array]:
    """The gradients of the product of the rounded factors, dy not rounded."""
    if spec.batch:
        return of_batch(spec, lambda inner, dy, saved: wide_backward(inner, dy, saved, wanted), dy, saved)
    rows = tuple(range(dy.ndim - 1))
    gradients = {}
    if wanted.x is not None:
        gradients["x"] = wide_product(dy, _moving_kernel(spec, saved), _last(dy, 1), spec, wanted.x.spec)
    if wanted.kernel is not None:
        x = _moving(saved.x, saved_x(spec, saved))
        gradients["kernel"] = wide_product(x, dy, (rows, rows), spec, wanted.kernel.spec)
    if wanted.bias is not None:
        gradients["bias"] = dy.astype(np.float32).sum(rows)
    return Variables(**{name: array.astype(getattr(wanted, name).dtype) for name, array in gradients.items()})


def wide_of_kernel(spec: Float8Linear, dy: jax.Array, x: Rounded, saved: Saved, wanted: Wanted) -> jax.Array:
    """The kernel's gradient where the recipe does not round dy for it."""
    rows = tuple(range(dy.ndim - 1))
    dtype = dy.dtype if saved.x is None else jnp.promote_types(saved.x.dtype, dy.dtype)
    wide = x.values.astype(np.float32) * x.scales
    return wide_product(wide, dy, (rows, rows), spec, wanted.spec, dtype).astype(wanted.dtype)


def _moving_kernel(spec: Float8Linear, saved: Saved) -> jax.Array:
    values, scales = saved_kernel(spec, saved)
    return _moving(saved.kernel, Rounded(values.T, scales))


def _moving(primal: jax.Array | None, rounded: Rounded) -> jax.Array:
    """A rounded factor, whose tangent is that of what was rounded."""
    array: jax.Array = lax.stop_gradient(rounded.values.astype(np.float32) * rounded.scales)
    if primal is None:
        return array
    *_, carrier = rounding.straight_through(Derivative(True, ""), primal.astype(np.float32), None, np.float32)
    assert carrier is not None
    moving: jax.Array = array + carrier
    return moving
