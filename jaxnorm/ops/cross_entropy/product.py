"""The logits of a product, x @ kernel + bias, and how a traced scale and a mask of classes go with it.

Without a bias or a scale the product is rounded to x's dtype as it is made. With one of them it is float32 (float64 of
x of float64) until both are there, and rounded once then.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from jaxnorm.native import compat
from jaxnorm.ops import checks
from jaxnorm.ops.cross_entropy.formula import IGNORED
from jaxnorm.ops.mask import only
from jaxnorm.primitive import broadcast
from jaxnorm.sharding import dims


def product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jnp.einsum("...d,dv->...v", x, kernel)


@jax.custom_jvp
def wide_product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """The product as it is added up. The products of its derivatives are of x's dtype, as are those of `product`."""
    return jnp.einsum("...d,dv->...v", x, kernel, preferred_element_type=dims.wide_dtype([x.dtype]))


def _wide_product_jvp(primals: Any, dots: Any) -> tuple[jax.Array, jax.Array]:
    (x, kernel), (x_dot, kernel_dot) = primals, dots
    wide = wide_product(x, kernel)
    terms = [] if isinstance(x_dot, SymbolicZero) else [product(x_dot, kernel)]
    terms += [] if isinstance(kernel_dot, SymbolicZero) else [product(x, kernel_dot)]
    return wide, sum(terms[1:], start=terms[0]).astype(wide.dtype) if terms else jnp.zeros_like(wide)


wide_product.defjvp(_wide_product_jvp, symbolic_zeros=True)


def unscaled(x: jax.Array, kernel: jax.Array, bias: jax.Array | None, scale: jax.Array | None) -> jax.Array:
    """The logits before they are scaled, still to be rounded if there is a bias or a scale."""
    if bias is None and scale is None:
        return product(x, kernel)
    wide = wide_product(x, kernel)
    return wide if bias is None else wide + broadcast.with_rank_of(wide, bias)


def scaled(logits: jax.Array, scale: jax.Array | None, dtype: np.dtype[Any]) -> jax.Array:
    return (logits if scale is None else logits * scale).astype(dtype)


def are_read(where: jax.Array, labels: jax.Array) -> jax.Array:
    """Of which classes anything is read, for each row: those that count and the label's; labels have an axis of 1."""
    where, numbers = (broadcast.with_rank_of(labels, array) for array in (where, jnp.arange(where.shape[-1])))
    return (labels != IGNORED) & (where | (labels == numbers))


def _are_labels(labels: jax.Array, classes: Any) -> jax.Array:
    """Which classes are labels; by a scatter, for booleans of all logits would be written out."""
    for axis in range(labels.ndim):
        labels = dims.unsharded(labels, axis)
    none, named = compat.match_varying_axes(jnp.zeros(classes, jnp.int32), jnp.where(labels < 0, classes, labels))
    return none.at[named.ravel()].add(1, mode="drop") > 0


def only_what_is_read(
    function: str, kernel: jax.Array, bias: jax.Array | None, where: jax.Array, labels: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """kernel and bias with zeros for the classes of which no row reads anything: what is there may be no number."""
    by_any = _are_labels(labels, kernel.shape[1])
    if where.ndim == 1:
        by_any |= where & jnp.any(labels != IGNORED)
    else:
        by_any |= jnp.any((labels != IGNORED) & where, axis=tuple(range(where.ndim - 1)))

    def of(name: str, array: jax.Array) -> jax.Array:
        # As the op does with its operands, but before a selection lets array vary in a dtype of its own.
        array, is_read = compat.match_varying_axes(array, by_any)
        is_read = checks.sharded_along(function, "where", is_read, name, array, (array.ndim - 1,))
        return only(broadcast.with_rank_of(array, is_read), array)

    return of("kernel", kernel), None if bias is None else of("bias", bias)
