"""The gradients of a linear layer in float8, and the wide formulas by which higher derivatives are taken."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm.ops.float8_linear.formula import (
    Rounded,
    Saved,
    Variables,
    Wanted,
    last_and_first,
    rounded_along,
    saved_kernel,
    saved_x,
)
from jaxnorm.ops.float8_linear.products import Float8Linear, Multiply, Product, by_xla, of_rank, sharding_of, wide_dot
from jaxnorm.ops.quantize import rounding
from jaxnorm.ops.quantize.rounding import Derivative
from jaxnorm.ops.quantized_dot.formula import of_batch


def backward(
    spec: Float8Linear, dy: jax.Array, saved: Saved, wanted: Variables, multiply: Multiply = by_xla
) -> Variables:
    """The wanted gradients, dy rounded once for each product."""
    if spec.batch:
        return of_batch(spec, lambda inner, dy, saved: backward(inner, dy, saved, wanted, multiply), dy, saved)
    wide = dy.astype(np.float32)
    # With a scale for each tensor both products take the same.
    whole = rounded_along(spec, wide, ()) if spec.scaling == "tensor" else None
    gradients = {}
    if wanted.x is not None:
        kernel = saved_kernel(spec, saved)
        u = _folded(spec, wide, of_rank(dy.ndim, kernel.scales[0]), (-1,), whole)
        gradients["x"] = multiply(
            spec,
            Product(
                u.values,
                kernel.values,
                ((dy.ndim - 1,), (1,)),
                u.scales,
                None,
                wanted.x.dtype,
                out_sharding=sharding_of(dy, wanted.x.spec),
            ),
        )
    if wanted.kernel is not None:
        gradients["kernel"] = _of_kernel(spec, dy, saved, wanted.kernel, whole, multiply)
    if wanted.bias is not None:
        gradients["bias"] = wide.sum(tuple(range(dy.ndim - 1))).astype(wanted.bias.dtype)
    return Variables(**gradients)


def _folded(
    spec: Float8Linear, dy: jax.Array, scales: jax.Array, axes: tuple[int, ...], whole: Rounded | None
) -> Rounded:
    """dy times the scales of the other factor, rounded with a scale for what lies along these axes.

    A single scale of the other factor goes to the result.
    """
    if scales.size != 1:
        return rounded_along(spec, dy * scales, axes)
    rounded = whole or rounded_along(spec, dy, axes)
    return rounded._replace(scales=rounded.scales * scales)


def _of_kernel(
    spec: Float8Linear, dy: jax.Array, saved: Saved, wanted: Wanted, whole: Rounded | None, multiply: Multiply
) -> jax.Array:
    x, rows, out_sharding = saved_x(spec, saved), tuple(range(dy.ndim - 1)), sharding_of(dy, wanted.spec)
    if spec.weight_gradient == "float8":
        v = _folded(spec, dy.astype(np.float32), x.scales, rows, whole)
        of_columns = v.scales.reshape(v.scales.shape[-1])
        product = Product(x.values, v.values, (rows, rows), None, of_columns, wanted.dtype, out_sharding=out_sharding)
        return multiply(spec, product)
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
