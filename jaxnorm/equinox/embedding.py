"""Equinox' Embedding, whose gradient is a sum of this package."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from jaxnorm.equinox.norms import why_no_arrays
from jaxnorm.flax import replacement
from jaxnorm.ops.embedding.api import embedding


class Embedding(eqx.nn.Embedding):
    """`equinox.nn.Embedding` with the same constructor, field and result, by `jaxnorm.embedding`.

        x = jax.vmap(Embedding(50_257, 768, key=key))(ids)

    The rows have Equinox' bits. As there negative indices count from the end, and what is out of range is the first or
    the last row, in the gradient too. That is summed in float32, in the same order in each run, and rounded once. Under
    `jax.vmap` over x, in any depth, it stays one native call. Weights of other dtypes than float32, bfloat16 and
    float16, and indices that are no array of integers, are computed by Equinox' own code.
    """

    def __call__(self, x: Any, *, key: Any = None) -> jax.Array:
        if not _is_index(x) or why_no_lookup(self) is not None or self.weight.ndim != 2 or not len(self.weight):
            return super().__call__(x)
        rows: jax.Array = embedding(self.weight, _clamped(x, self.weight.shape[0]))
        return rows


def why_no_lookup(module: Any) -> str | None:
    """Why Equinox' own code computes the calls of an Embedding; None if ours does."""
    if why := why_no_arrays({"weight": module.weight}):
        return why
    why = replacement.why_dtypes(module.weight.dtype)
    return why and f"no kernel serves {why}"


def _is_index(x: Any) -> bool:
    """Whether x is a scalar that is not cast before it counts, as uint32 is."""
    if not isinstance(x, jax.Array) or x.shape or not jnp.issubdtype(x.dtype, jnp.integer):
        return False
    return jnp.issubdtype(x.dtype, jnp.signedinteger) or x.dtype.itemsize < 4


def _clamped(x: jax.Array, length: int) -> jax.Array:
    x = x if x.dtype.itemsize >= 4 else x.astype(jnp.int32)
    return jnp.clip(jnp.where(x < 0, x + length, x), 0, length - 1)
