"""Weights for each head: scale and bias that have leading axes before the normalised ones.

The shape of such a weight is (lead..., normalised...), its lead aligned to the right with x's other axes, each 1 or as
long as x's. Kernels see rows: row r of x takes row r // inner % count of the weights, so the axes along which these
differ have to be neighbours. In primitives all weights have one lead, which does not begin with a 1.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm import layouts

# Longer rows have no kernels with weights for each head.
LONGEST = 8192

Lead = tuple[int, ...]


def is_lead(lead: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    """Whether weights may have these axes in front, for an x with these others before its normalised ones."""
    aligned = zip(reversed(lead), reversed(others), strict=False)
    return len(lead) <= len(others) and all(a in (1, b) for a, b in aligned)


def heads_of(shape: tuple[Any, ...], axes: int, lead: Lead) -> tuple[int, int]:
    """(count, inner): how many heads such an x has, of `axes` normalised axes, and neighbouring rows of each."""
    _, end = _span(shape, axes, lead)
    inner = math.prod(shape[end : len(shape) - axes]) if lead else 1
    return math.prod(lead), max(1, inner)


def unsupported(shape: tuple[Any, ...], axes: int, lead: Lead, op: str = "") -> str | None:
    """Why no kernel, of this op, takes weights of this lead, as a sentence; None if one does."""
    if not lead:
        return None
    if op.endswith("_quantized"):
        return f"no kernel that quantises takes a scale or bias with leading axes, {lead}"
    first, end = _span(shape, axes, lead)
    if not all(isinstance(length, int) for length in (*lead, *shape[first : len(shape) - axes])):
        return f"the leading axes {lead} of scale or bias, or x's axes after them, have a symbolic length"
    if 0 in lead:
        return f"the leading axes {lead} of scale or bias hold no element"
    if any(a != b for a, b in zip(lead, shape[first:end], strict=False)):
        return f"the leading axes {lead} of scale or bias differ along axes of x that are not neighbours"
    if (cols := math.prod(shape[len(shape) - axes :])) > LONGEST:
        return f"scale or bias has leading axes and rows have {cols} elements, more than {LONGEST}"
    return None


def lead_of(axes: int, weights: Iterable[jax.Array | None]) -> Lead:
    """The lead that all weights broadcast to, less the ones that it begins with."""
    leads = [weight.shape[: weight.ndim - axes] for weight in weights if weight is not None]
    return stripped(tuple(lax.broadcast_shapes(*leads)) if leads else ())


def with_lead(x: Any, lead: Lead, axes: int, weight: jax.Array | None) -> jax.Array | None:
    """The weight with this lead, for an x of this type."""
    if weight is None:
        return None
    if (more := weight.ndim - axes - len(lead)) > 0:
        weight = lax.squeeze(weight, range(more))
    shape = (*lead, *weight.shape[weight.ndim - axes :])
    return weight if weight.shape == shape else layouts.broadcast(weight, shape, x, layouts.weight(x.ndim, axes, lead))


def aligned(x: Any, axes: int, weights: Sequence[jax.Array | None]) -> tuple[jax.Array | None, ...]:
    """The weights with the lead that they have in common, for an x of this type; in `wide_dtype` if one is repeated.

    So the gradients of its copies are added before they are rounded to its dtype. The others go with it: a tangent has
    the dtype of its weight.
    """
    lead = lead_of(axes, weights)
    present = [weight for weight in weights if weight is not None]
    if any(math.prod(lead) > math.prod(weight.shape[: weight.ndim - axes]) for weight in present):
        dtype = layouts.wide_dtype(weight.dtype for weight in present)
        weights = [None if weight is None else weight.astype(dtype) for weight in weights]
    return tuple(with_lead(x, lead, axes, weight) for weight in weights)


def in_front(weight: jax.Array | None, dim: int | None, rank: int) -> jax.Array | None:
    """A weight of a batch with the batch where an x of this rank has its own: in front."""
    if weight is None or dim is None:
        return weight
    weight = jnp.moveaxis(weight, dim, 0)
    return lax.expand_dims(weight, range(1, 1 + rank - weight.ndim))


def batch(
    x: jax.Array, x_dim: int | None, axes: int, weights: Sequence[jax.Array | None], dims: Sequence[int | None]
) -> tuple[jax.Array | None, ...] | None:
    """The weights of a batch for an x with the batch in front; None where no kernel takes them."""
    moving = [
        (weight, dim) for weight, dim in zip(weights, dims, strict=True) if weight is not None and dim is not None
    ]
    if not moving:
        return tuple(weights)
    (weight, dim), *_ = moving
    type_of_all = _type_of_batch(x, x_dim, weight.shape[dim])
    whole = [in_front(weight, dim, type_of_all.ndim) for weight, dim in zip(weights, dims, strict=True)]
    no_kernel = unsupported(type_of_all.shape, axes, lead_of(axes, whole))
    return None if no_kernel else aligned(type_of_all, axes, whole)


def _type_of_batch(x: jax.Array, dim: int | None, size: int) -> Any:
    """The type of x with its batch in front, or repeated over one."""
    x_type: Any = jax.typeof(x)
    layout = [None if dim is None else dim, *(axis for axis in range(x.ndim) if axis != dim)]
    shape = [size if axis is None else x.shape[axis] for axis in layout]
    return layouts.result_like(x_type, tuple(layout), shape, x.dtype)


def batch_lead(x: jax.Array, x_dim: int, axes: int, lead: Lead) -> Lead | None:
    """The lead of weights that each example of x has for itself; None where no kernel takes them."""
    example = (*x.shape[:x_dim], *x.shape[x_dim + 1 :])
    ones = (1,) * (len(example) - axes - len(lead))
    whole = stripped((x.shape[x_dim], *ones, *lead))
    no_kernel = unsupported((x.shape[x_dim], *example), axes, whole)
    return None if no_kernel else whole


def _span(shape: tuple[Any, ...], axes: int, lead: Lead) -> tuple[int, int]:
    """The axes of x, from the first to beyond the last, along which weights of this lead differ."""
    others = len(shape) - axes
    trailing = 0
    while trailing < len(lead) and lead[-1 - trailing] == 1:
        trailing += 1
    return others - len(lead), others - trailing


def stripped(lead: Lead) -> Lead:
    """The lead of a weight in a primitive: it does not begin with a 1."""
    while lead and lead[0] == 1:
        lead = lead[1:]
    return lead
