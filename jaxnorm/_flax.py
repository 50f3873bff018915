"""What the modules of both Flax APIs share: which of their calls the kernels express.

Each module is a subclass of Flax's own that only decides how a call is computed, so that constructor, parameters,
metadata and checkpoints are Flax's. A call that the kernels do not express is computed by Flax. Where Flax has no code,
as for a quantised norm, the function's formula computes it if that says the same, and it is an error otherwise.
"""

from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any, NamedTuple, Protocol, TypedDict

import jax
import jax.numpy as jnp

from jaxnorm.native import ffi
from jaxnorm.ops import checks
from jaxnorm.ops.norm.added import add_layer_norm, add_rms_norm
from jaxnorm.ops.norm.api import layer_norm, rms_norm
from jaxnorm.ops.quantized_norm.api import layer_norm_quantized, rms_norm_quantized
from jaxnorm.primitive.addend import add

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
    axis_index_groups: Any


class Functions(NamedTuple):
    """The functions of this package that compute one norm of Flax."""

    norm: Callable[..., Any]
    add: Callable[..., Any]
    quantized: Callable[..., Any]


RMS = Functions(rms_norm, add_rms_norm, rms_norm_quantized)
LAYER = Functions(layer_norm, add_layer_norm, layer_norm_quantized)


class Scales(TypedDict, total=False):
    """For type checkers: the keywords in the call of a quantised norm."""

    static_scale: Any
    smooth_scale: jax.Array | None
    mask: None


def kernel_axes(
    module: FlaxNorm, x: jax.Array, mask: jax.Array | None, parameters: Iterable[jax.Array | None]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The axes that a kernel would normalise for `module(x, mask=mask)` and those of its parameters.

    None where no kernel says the same as Flax. Parameters may have axes before the normalised ones: those of heads.
    """
    in_groups = module.axis_name is not None and module.axis_index_groups is not None
    if mask is not None or in_groups or not isinstance(module.epsilon, Real):
        return None
    reduction, features = (_from_the_end(x.ndim, axes) for axes in (module.reduction_axes, module.feature_axes))
    if not 0 < len(reduction) <= len(features) <= x.ndim:
        return None
    if any(axes != tuple(range(-len(axes), 0)) for axes in (reduction, features)):
        return None
    # Over an Explicit mesh, a parameter that is split otherwise than x splits Flax's result.
    split = tuple(jax.typeof(x).sharding.spec)[-len(features) :]
    if any(p is not None and tuple(jax.typeof(p).sharding.spec) not in ((None,) * p.ndim, split) for p in parameters):
        return None
    return reduction, features


def function_axes(module: FlaxNorm, x: jax.Array, mask: object, what: str) -> tuple[int, ...]:
    """The axes that a function of this package normalises for `module(x)`, or an error where none says the same.

    `what` says which norm Flax has no code for, as "quantised".
    """
    name = type(module).__name__
    if mask is not None:
        raise ValueError(
            f"{name}: got a mask, expected None: a {what} norm is of all elements of its rows. "
            f"Take the norm that is not {what} for what is masked."
        )
    if module.axis_name is not None and module.axis_index_groups is not None:
        raise ValueError(
            f"{name}: axis_index_groups={module.axis_index_groups}, expected None: a {what} norm exchanges its "
            f"statistics over all of axis_name. Leave it out, or take the norm that is not {what}."
        )
    reduction, features = (_from_the_end(x.ndim, axes) for axes in (module.reduction_axes, module.feature_axes))
    if reduction != features:
        raise ValueError(
            f"{name}: reduction_axes={module.reduction_axes} and feature_axes={module.feature_axes} are not the same "
            f"axes of x, which has shape {x.shape}: parameters have the shape of what is normalised. Give both alike."
        )
    return checks.check_axes(name, reduction, x.ndim)


def last_axis(module: FlaxNorm, x: jax.Array, mask: object, what: str) -> None:
    """An error unless a function of this package, see `function_axes`, normalises the last axis alone."""
    axes = function_axes(module, x, mask, what)
    if axes != (-1,):
        raise ValueError(
            f"{type(module).__name__}: reduction_axes={module.reduction_axes}, expected -1: the {what} norm is of the "
            f"last axis of x, which has shape {x.shape}. Transpose or reshape x."
        )


def must_be(module: object, option: str, expected: object, why: str) -> None:
    """That an option which only Flax's own code has another value for is not set to one."""
    value = getattr(module, option)
    if value is not expected:
        raise ValueError(f"{type(module).__name__}: {option}={value}, expected {expected}: {why}. Leave it out.")


def kernel_dtypes(*dtypes: Any) -> bool:
    """Whether the kernels read and write all of `dtypes`; integers, float64 and complex are left to Flax."""
    return ffi.DTYPES.issuperset(map(jnp.dtype, dtypes))


def with_residual(module: object, x: Any, residual: Any) -> tuple[jax.Array, jax.Array]:
    """x and residual as arrays of one shape, or an error."""
    return with_other(module, x, "residual", residual, "added")


def with_other(module: object, x: Any, name: str, other: Any, they_are: str) -> tuple[jax.Array, jax.Array]:
    """x and another argument as arrays of one shape, or an error; `they_are` says what is done with both."""
    x = jnp.asarray(x)
    return x, checks.check_like_x(type(module).__name__, name, other, x, they_are)


def add_first(norm: Callable[..., Any], x: jax.Array, residual: jax.Array, mask: Any) -> tuple[jax.Array, jax.Array]:
    """The norm of the sum, and the sum, where no kernel computes both."""
    new_residual = add(x, residual)
    return norm(new_residual, mask=mask), new_residual


def _from_the_end(rank: int, axes: int | Iterable[int]) -> tuple[int, ...]:
    """`axes` counted from the last one, sorted and without repetitions; those out of range stay so."""
    axes = axes if isinstance(axes, Iterable) else (axes,)
    return tuple(sorted({axis - rank if 0 <= axis < rank else axis for axis in axes}))
