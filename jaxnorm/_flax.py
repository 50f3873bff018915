"""What the modules of both Flax APIs share: which of their calls the kernels express.

Each module is a subclass of Flax's own that only decides how a call is computed, so that constructor, parameters,
metadata and checkpoints are Flax's. A call that the kernels do not express is computed by Flax.
"""

from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxnorm import ffi, reference, validation

try:
    from flax import linen as linen
    from flax import nnx as nnx
except ModuleNotFoundError as error:
    if error.name != "flax":
        raise
    raise ImportError("jaxnorm.nnx and jaxnorm.linen need Flax: pip install 'jaxnorm[flax]'") from error


class FlaxNorm(Protocol):
    """The fields of a norm of either API that say what is normalised."""

    epsilon: Any
    reduction_axes: Any
    feature_axes: Any
    axis_name: Any


def kernel_axes(module: FlaxNorm, x: jax.Array, mask: jax.Array | None) -> tuple[int, ...] | None:
    """The axes that a kernel would normalise for `module(x, mask=mask)`, or None where no kernel says the same."""
    if mask is not None or module.axis_name is not None or not isinstance(module.epsilon, Real):
        return None
    reduction = _from_the_end(x.ndim, module.reduction_axes)
    trailing = tuple(range(-len(reduction), 0))
    if not 0 < len(trailing) <= x.ndim:
        return None
    return trailing if reduction == trailing == _from_the_end(x.ndim, module.feature_axes) else None


def kernel_dtypes(*dtypes: Any) -> bool:
    """Whether the kernels read and write all of `dtypes`; integers, float64 and complex are left to Flax."""
    return ffi.DTYPES.issuperset(map(jnp.dtype, dtypes))


def with_residual(module: FlaxNorm, x: Any, residual: Any) -> tuple[jax.Array, jax.Array]:
    """x and residual as arrays of one shape, or an error."""
    x = jnp.asarray(x)
    return x, validation.check_residual(type(module).__name__, residual, x)


def add_first(norm: Callable[..., Any], x: jax.Array, residual: jax.Array, mask: Any) -> tuple[jax.Array, jax.Array]:
    """The norm of the sum, and the sum, where no kernel computes both."""
    new_residual = reference.add(x, residual)
    return norm(new_residual, mask=mask), new_residual


def _from_the_end(rank: int, axes: int | Iterable[int]) -> tuple[int, ...]:
    """`axes` counted from the last one, sorted and without repetitions."""
    axes = axes if isinstance(axes, Iterable) else (axes,)
    return tuple(sorted({axis if axis < 0 else axis - rank for axis in axes}))
