"""What tests use of the package beside its public names: every such import stands here."""

import jax.numpy as jnp

from jaxnorm import compat, ffi, heads

__all__ = ["backward_workspaces", "heads"]


def backward_workspaces(sums, dtype, cols, heads=1):
    """The shapes of float32 that a backward call of the default platform has behind so many sums over rows."""
    return ffi.weight_sums(compat.default_platform(), sums, jnp.dtype(dtype), cols, heads)
