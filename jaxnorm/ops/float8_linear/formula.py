"""A linear layer in float8: the formulas of its product, of its derivative, and of its gradients.

    y[m,n]  = s_x[m] s_w[n] Σ_k q_x[m,k] q_w[k,n] + bias[n]
    dx[m,k] = s_u[m] Σ_n q_u[m,n] q_w[k,n]              u[m,n] = dy[m,n] s_w[n], quantised by rows
    dw[k,n] = s_v[n] Σ_m q_x[m,k] q_v[m,n]              v[m,n] = dy[m,n] s_x[m], quantised by columns
    db[n]   = Σ_m dy[m,n]

Here the scale of a row or column of zeros is 0 and not 1, as `quantize` has it: it adds nothing, and as 1 it would set
the largest value of all others in u or v.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jaxnorm.ops.float8_linear.products import FLOAT8, Arithmetic, Float8Linear, Product, by_xla, of_rank, wide_dot
from jaxnorm.ops.quantize import rounding
from jaxnorm.ops.quantize.rounding import Derivative
from jaxnorm.ops.quantized_dot.formula import of_batch, sharding_of
from jaxnorm.quantization import Quantization

Wants = tuple[bool, bool]  # what is rounded by rows, and what by columns


class Operands(NamedTuple):
    """Arrays, or their types or tangents. A carrier is zeros and changes no result; tangents flow through it."""

    x: Any  # (..., K), quantised where it has scales
    kernel: Any  # (K, N)
    bias: Any = None  # (N,)
    x_scales: Any = None  # (..., 1), or of as many axes of length 1 as x has
    x_carrier: Any = None


class Rounded(NamedTuple):
    """Values of float8 and their scales, 0 for a row or column of zeros."""

    values: Any = None
    scales: Any = None
    transposed: Any = None  # the values of columns as rows, where kernels made them


class Saved(NamedTuple):
    """What a derivative reads: both factors of a product.

    Where they are rounded already, x, or its carrier, and the kernel are there for higher derivatives alone.
    """

    x: Any = None
    kernel: Any = None
    rounded_x: Rounded = Rounded()
    rounded_kernel: Rounded = Rounded()


class Variables(NamedTuple):
    """What a derivative is taken by: tangents, gradients, or how these are to be. None is zero, or not wanted."""

    x: Any = None
    kernel: Any = None
    bias: Any = None


class Wanted(NamedTuple):
    """How a gradient is to be: its dtype, and over an Explicit mesh how it is split."""

    dtype: np.dtype[Any]
    spec: PartitionSpec | None = None


def forward(
    spec: Float8Linear, operands: Operands, by: Arithmetic | None = None, *, keeps: bool = True
) -> tuple[jax.Array, Rounded, Rounded]:
    """y, and both factors as they were rounded, if a derivative `keeps` them."""
    if spec.batch:
        return of_batch(spec, functools.partial(forward, by=by, keeps=keeps), operands)
    by = by or BY_XLA
    if operands.x_scales is None:
        x = by.rounded(spec, operands.x, (-1,))
    else:
        x = Rounded(operands.x, live(operands.x, operands.x_scales))
    kernel = by.rounded(spec, operands.kernel, (0,), keeps=keeps)
    last, out_sharding = last_and_first(spec, operands.x)
    product = Product(
        "y",
        x.values,
        kernel.values,
        last,
        x.scales,
        kernel.scales[0],
        spec.out_dtype,
        operands.bias,
        out_sharding,
        kernel.transposed,
    )
    return by.multiply(spec, product), x, kernel._replace(transposed=None)


def live(values: jax.Array, scales: jax.Array) -> jax.Array:
    """The scales of given values, 0 for those of zeros."""
    axes = tuple(axis for axis, length in enumerate(scales.shape) if length == 1)
    return jnp.where(jnp.any(values != 0, axes, keepdims=True), scales, 0)


def rounded_x(spec: Float8Linear, x: jax.Array) -> Rounded:
    return rounded_along(spec, x, (-1,))


def rounded_kernel(spec: Float8Linear, kernel: jax.Array) -> Rounded:
    return rounded_along(spec, kernel, (0,))


def rounded_along(spec: Float8Linear, array: jax.Array, axes: tuple[int, ...], *, keeps: bool = True) -> Rounded:
    """The array in float8, with a scale for what lies along these axes, or one for all."""
    v = lax.stop_gradient(array).astype(np.float32)
    axes = axes if spec.scaling == "row" else tuple(range(v.ndim))
    quantization, amax = Quantization(FLOAT8, power_of_two=spec.power_of_two), rounding.largest_magnitude(v, axes)
    scales = rounding.scale_of(quantization, amax)
    return Rounded(rounding.values_of(quantization, v, scales, v.shape), jnp.where(amax == 0, 0, scales))


def rounded_gradient(
    spec: Float8Linear, dy: jax.Array, of_columns: jax.Array | None, of_rows: jax.Array | None, *, wants: Wants
) -> tuple[Any, Any]:
    """dy times a factor for each column, rounded by rows; and times a factor for each row, rounded by columns; if it
    wants them."""
    wide = dy.astype(np.float32)
    u = wide if of_columns is None else wide * of_rank(dy.ndim, of_columns)
    v = wide if of_rows is None else wide * of_rows
    rows = tuple(range(dy.ndim - 1))
    return (rounded_along(spec, u, (-1,)) if wants[0] else None, rounded_along(spec, v, rows) if wants[1] else None)


BY_XLA = Arithmetic(rounded_along, rounded_gradient, by_xla)


def linear(spec: Float8Linear, saved: Saved, dots: Variables) -> jax.Array:
    """The tangent of y: wide products of the rounded factors, whose scales come after the sum."""
    if spec.batch:
        return of_batch(spec, linear, saved, dots)
    terms = []
    if dots.x is not None:
        values, scales, _ = saved_kernel(spec, saved)
        dot = wide_dot(spec, dots.x, values.astype(dots.x.dtype), *last_and_first(spec, dots.x))
        terms.append(dot * of_rank(dot.ndim, scales[0]))
    if dots.kernel is not None:
        values, scales, _ = saved_x(spec, saved)
        dot = wide_dot(spec, values.astype(dots.kernel.dtype), dots.kernel, *last_and_first(spec, values))
        terms.append(dot * scales)
    total = functools.reduce(jnp.add, terms)
    if dots.bias is not None:
        total = total + of_rank(total.ndim, dots.bias.astype(total.dtype))
    return total.astype(spec.out_dtype)


def last_and_first(spec: Float8Linear, x: jax.Array) -> tuple[Any, Any]:
    """The axes of x and of a kernel that are summed, and the sharding of the result."""
    return ((x.ndim - 1,), (0,)), sharding_of(x, spec.out_spec)


def saved_x(spec: Float8Linear, saved: Saved, by: Arithmetic = BY_XLA) -> Rounded:
    return by.rounded(spec, saved.x, (-1,)) if saved.rounded_x.values is None else saved.rounded_x


def saved_kernel(spec: Float8Linear, saved: Saved, by: Arithmetic = BY_XLA) -> Rounded:
    return by.rounded(spec, saved.kernel, (0,)) if saved.rounded_kernel.values is None else saved.rounded_kernel


def backward(spec: Float8Linear, dy: jax.Array, saved: Saved, wanted: Variables, by: Arithmetic = BY_XLA) -> Variables:
    """The wanted gradients, dy rounded once for each product."""
    if spec.batch:
        return of_batch(spec, lambda inner, dy, saved: backward(inner, dy, saved, wanted, by), dy, saved)
    x: Any = None if wanted.kernel is None else saved_x(spec, saved, by)
    kernel: Any = None if wanted.x is None else saved_kernel(spec, saved, by)
    u, v = _rounded(spec, dy, x if spec.weight_gradient == "float8" else None, kernel, by)
    gradients = {}
    if wanted.x is not None:
        last, out_sharding = ((dy.ndim - 1,), (1,)), sharding_of(dy, wanted.x.spec)
        dx = Product("dx", u.values, kernel.values, last, u.scales, _single(kernel), wanted.x.dtype, None, out_sharding)
        gradients["x"] = by.multiply(spec, dx)
    if wanted.kernel is not None:
        rows, out_sharding = tuple(range(dy.ndim - 1)), sharding_of(dy, wanted.kernel.spec)
        if v is None:
            gradients["kernel"] = _wide_of_kernel(spec, dy, x, saved, wanted.kernel, out_sharding)
        else:
            scales, both = v.scales.reshape(v.scales.shape[-1]), (rows, rows)
            dw = Product("dw", x.values, v.values, both, _single(x), scales, wanted.kernel.dtype, None, out_sharding)
            gradients["kernel"] = by.multiply(spec, dw._replace(b_depth_last=v.transposed))
    if wanted.bias is not None:
        gradients["bias"] = dy.astype(np.float32).sum(tuple(range(dy.ndim - 1))).astype(wanted.bias.dtype)
    return Variables(**gradients)


def _rounded(spec: Float8Linear, dy: jax.Array, x: Rounded | None, kernel: Rounded | None, by: Arithmetic) -> Any:
    """dy times the scales of the kernel's columns, rounded by rows, and times those of x's rows, rounded by columns.

    Without the other factor there is none of it. A single scale of the other factor goes to the result.
    """
    if spec.scaling == "tensor":  # both products take the same
        rounded = rounded_along(spec, dy, ())
        return kernel and rounded, x and rounded
    of_columns = None if kernel is None or kernel.scales.size == 1 else kernel.scales[0]
    of_rows = None if x is None or x.scales.size == 1 else x.scales
    return by.gradient(spec, dy, of_columns, of_rows, wants=(kernel is not None, x is not None))


def _single(other: Rounded) -> jax.Array | None:
    """The scale of a factor that has one for all, and so did not go into dy."""
    return other.scales.reshape(()) if other.scales.size == 1 else None


def _wide_of_kernel(
    spec: Float8Linear, dy: jax.Array, x: Rounded, saved: Saved, wanted: Wanted, out_sharding: Any
) -> jax.Array:
    rows = tuple(range(dy.ndim - 1))
    dtype = dy.dtype if saved.x is None else jnp.promote_types(saved.x.dtype, dy.dtype)
    wide = (x.values.astype(np.float32) * x.scales).astype(dtype)
    return wide_dot(spec, wide, dy.astype(dtype), (rows, rows), out_sharding).astype(wanted.dtype)


def wide_linear(spec: Float8Linear, saved: Saved, dots: Variables) -> jax.Array:
    """`linear`, whose derivative has the rounded factors move as what they were made of."""
    if spec.batch:
        return of_batch(spec, wide_linear, saved, dots)
    terms = []
    if dots.x is not None:
        kernel = _moving(saved.kernel, saved_kernel(spec, saved))
        terms.append(_wide(spec, dots.x, kernel, *last_and_first(spec, dots.x)))
    if dots.kernel is not None:
        x = _moving(saved.x, saved_x(spec, saved))
        terms.append(_wide(spec, x, dots.kernel, *last_and_first(spec, x)))
    total = functools.reduce(jnp.add, terms)
    if dots.bias is not None:
        total = total + of_rank(total.ndim, dots.bias.astype(total.dtype))
    return total.astype(spec.out_dtype)


def wide_backward(spec: Float8Linear, dy: jax.Array, saved: Saved, wanted: Variables) -> Variables:
    """The gradients of the product of the rounded factors, dy not rounded."""
    if spec.batch:
        return of_batch(spec, lambda inner, dy, saved: wide_backward(inner, dy, saved, wanted), dy, saved)
    rows = tuple(range(dy.ndim - 1))
    gradients = {}
    if wanted.x is not None:
        kernel = _moving(saved.kernel, saved_kernel(spec, saved))
        gradients["x"] = _wide(spec, dy, kernel, ((dy.ndim - 1,), (1,)), sharding_of(dy, wanted.x.spec))
    if wanted.kernel is not None:
        x = _moving(saved.x, saved_x(spec, saved))
        gradients["kernel"] = _wide(spec, x, dy, (rows, rows), sharding_of(dy, wanted.kernel.spec))
    if wanted.bias is not None:
        gradients["bias"] = dy.astype(np.float32).sum(rows)
    return Variables(**{name: array.astype(getattr(wanted, name).dtype) for name, array in gradients.items()})


def _wide(spec: Float8Linear, a: jax.Array, b: jax.Array, contracted: Any, out_sharding: Any = None) -> jax.Array:
    return wide_dot(spec, a.astype(np.float32), b.astype(np.float32), contracted, out_sharding)


def _moving(primal: jax.Array | None, rounded: Rounded) -> jax.Array:
    """A rounded factor, whose tangent is that of what was rounded."""
    array: jax.Array = lax.stop_gradient(rounded.values.astype(np.float32) * rounded.scales)
    if primal is None:
        return array
    *_, carrier = rounding.straight_through(Derivative(True, ""), primal.astype(np.float32), None, np.float32)
    assert carrier is not None
    moving: jax.Array = array + carrier
    return moving
