"""Per-head weights: scale and bias with batch dims, which are axes before those of a row.

The shape of such a weight is (batch dims..., row...). Its batch dims are aligned to the right with x's other axes, each
1 or as long as x's. Kernels see rows: row r of x takes row r // inner % count of the weights, so the axes along which
these differ have to be neighbours. In primitives all weights have the same batch dims, which do not begin with a 1.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm.primitive.op import BatchDims
from jaxnorm.sharding import dims

# Longer rows have no kernels with per-head weights.
LONGEST = 8192


def are_batch_dims(batch_dims: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    """Whether weights may have these axes in front, for an x with these others before its normalised ones."""
    aligned = zip(reversed(batch_dims), reversed(others), strict=False)
    return len(batch_dims) <= len(others) and all(a in (1, b) for a, b in aligned)


def heads_of(shape: tuple[Any, ...], axes: int, batch_dims: BatchDims) -> tuple[int, int]:
    """(count, inner): how many heads such an x has, of `axes` normalised axes, and neighbouring rows of each."""
    _, end = _span(shape, axes, batch_dims)
    inner = math.prod(shape[end : len(shape) - axes]) if batch_dims else 1
    return math.prod(batch_dims), max(1, inner)


def unsupported(shape: tuple[Any, ...], axes: int, batch_dims: BatchDims) -> str | None:
    """Why no kernel takes weights with these batch dims, as a part of a sentence; None if one does."""
    if not batch_dims:
        return None
    first, end = _span(shape, axes, batch_dims)
    if not all(isinstance(length, int) for length in (*batch_dims, *shape[first : len(shape) - axes])):
        return f"the leading axes {batch_dims} of scale or bias, or x's axes after them, have a symbolic length"
    if 0 in batch_dims:
        return f"the leading axes {batch_dims} of scale or bias hold no element"
    if any(a != b for a, b in zip(batch_dims, shape[first:end], strict=False)):
        return f"the leading axes {batch_dims} of scale or bias differ along axes of x that are not neighbours"
    if (cols := math.prod(shape[len(shape) - axes :])) > LONGEST:
        return f"scale or bias has leading axes and rows have {cols} elements, more than {LONGEST}"
    return None


def batch_dims_of(axes: int, weights: Iterable[jax.Array | None]) -> BatchDims:
    """The batch dims that all weights broadcast to, less the ones that they begin with."""
    all_dims = [weight.shape[: weight.ndim - axes] for weight in weights if weight is not None]
    return stripped(tuple(lax.broadcast_shapes(*all_dims)) if all_dims else ())


def with_batch_dims(x: Any, batch_dims: BatchDims, axes: int, weight: jax.Array | None) -> jax.Array | None:
    """The weight with these batch dims, for an x of this type."""
    if weight is None:
        return None
    if (more := weight.ndim - axes - len(batch_dims)) > 0:
        weight = lax.squeeze(weight, range(more))
    shape = (*batch_dims, *weight.shape[weight.ndim - axes :])
    return weight if weight.shape == shape else dims.broadcast(weight, shape, x, dims.weight(x.ndim, axes, batch_dims))


def aligned(x: Any, axes: int, weights: Sequence[jax.Array | None]) -> tuple[jax.Array | None, ...]:
    """The weights, for an x of this type, with the batch dims that they have in common.

    If one is repeated they come in `dims.wide_dtype`, so that the gradients of its copies are added before they are
    rounded to its dtype. The others go with it: a tangent has the dtype of its weight.
    """
    batch_dims = batch_dims_of(axes, weights)
    present = [weight for weight in weights if weight is not None]
    if any(math.prod(batch_dims) > math.prod(weight.shape[: weight.ndim - axes]) for weight in present):
        dtype = dims.wide_dtype(weight.dtype for weight in present)
        weights = [None if weight is None else weight.astype(dtype) for weight in weights]
    return tuple(with_batch_dims(x, batch_dims, axes, weight) for weight in weights)


def of_one_type(x: Any, axes: int, weights: Sequence[jax.Array]) -> tuple[jax.Array | None, ...]:
    """The weights with one dtype and the batch dims that they have in common, as kernels read them beside a factor."""
    dtypes = {weight.dtype for weight in weights}
    dtype = dims.wide_dtype(dtypes) if len(dtypes) > 1 else dtypes.pop()
    return aligned(x, axes, [weight.astype(dtype) for weight in weights])


def of_rank(rank: int, axes: Sequence[int], weight: jax.Array) -> jax.Array:
    """A weight with the rank of an x, of which these axes are normalised: batch dims are aligned to the right."""
    missing = [axis for axis in range(-rank, 0) if axis not in axes][: rank - weight.ndim]
    return jnp.expand_dims(weight, missing)


def in_front(weight: jax.Array | None, axis: int | None, rank: int) -> jax.Array | None:
    """A weight with its batch, which it has along this axis, where an x of this rank has its own: in front."""
    if weight is None or axis is None:
        return weight
    weight = jnp.moveaxis(weight, axis, 0)
    return lax.expand_dims(weight, range(1, 1 + rank - weight.ndim))


def batch(
    x: jax.Array,
    x_axis: int | None,
    axes: int,
    weights: Sequence[jax.Array | None],
    batch: Sequence[int | None],
    aligned: Callable[[Any, Sequence[jax.Array | None]], Sequence[jax.Array | None]],
) -> Sequence[jax.Array | None] | None:
    """The weights of a batch, `aligned`, for an x with the batch in front; None where no kernel takes them."""
    pairs = list(zip(weights, batch, strict=True))
    sizes = [weight.shape[axis] for weight, axis in pairs if weight is not None and axis is not None]
    if not sizes:
        return weights
    type_of_all = _type_of_batch(x, x_axis, sizes[0])
    whole = [in_front(weight, axis, type_of_all.ndim) for weight, axis in pairs]
    no_kernel = unsupported(type_of_all.shape, axes, batch_dims_of(axes, whole))
    return None if no_kernel else aligned(type_of_all, whole)


def _type_of_batch(x: jax.Array, axis: int | None, size: int) -> Any:
    """The type of x with its batch, along this axis, in front; None: repeated over a batch of this size."""
    x_type: Any = jax.typeof(x)
    dim_map = (axis, *(other for other in range(x.ndim) if other != axis))
    shape = [size if other is None else x.shape[other] for other in dim_map]
    return dims.result_like(x_type, dim_map, shape, x.dtype)


def batch_dims_in_front(x: jax.Array, x_axis: int, axes: int, batch_dims: BatchDims) -> BatchDims | None:
    """The batch dims of weights that each example of x has for itself; None where no kernel takes them."""
    example = (*x.shape[:x_axis], *x.shape[x_axis + 1 :])
    ones = (1,) * (len(example) - axes - len(batch_dims))
    whole = stripped((x.shape[x_axis], *ones, *batch_dims))
    no_kernel = unsupported((x.shape[x_axis], *example), axes, whole)
    return None if no_kernel else whole


def _span(shape: tuple[Any, ...], axes: int, batch_dims: BatchDims) -> tuple[int, int]:
    """The axes of x, from the first to beyond the last, along which weights with these batch dims differ."""
    others = len(shape) - axes
    trailing = 0
    while trailing < len(batch_dims) and batch_dims[-1 - trailing] == 1:
        trailing += 1
    return others - len(batch_dims), others - trailing


def stripped(batch_dims: BatchDims) -> BatchDims:
    """Batch dims as weights have them in a primitive: they do not begin with a 1."""
    while batch_dims and batch_dims[0] == 1:
        batch_dims = batch_dims[1:]
    return batch_dims
