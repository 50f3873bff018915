"""The gradients of a linear layer in float8, and the wide formulas by which higher derivatives are taken."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm.ops.float8_linear.formula import (
    BY_XLA,
    Rounded,
    Saved,
    Variables,
    Wanted,
    last_and_first,
    rounded_along,
    saved_kernel,
    saved_x,
)
from jaxnorm.ops.float8_linear.products import Arithmetic, Float8Linear, Product, of_rank, wide_dot
from jaxnorm.ops.quantize import rounding
from jaxnorm.ops.quantize.rounding import Derivative
from jaxnorm.ops.quantized_dot.formula import of_batch, sharding_of


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
