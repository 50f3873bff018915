"""Which calls of Flax's modules, of either API, the kernels express, and the errors where none does.

Each module of this package is a subclass of Flax's own that only decides how a call is computed, so that constructor,
parameters, metadata and checkpoints are Flax's. A call that the kernels do not express is computed by Flax. Where Flax
has no code, as for a quantised norm, the function's formula computes it if that says the same, and it is an error
otherwise.
"""

from collections.abc import Iterable
from itertools import chain
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp

from jaxnorm.integrations.replacing import why_dtypes
from jaxnorm.ops import checks

try:
    from flax import linen as linen, nnx as nnx
except ModuleNotFoundError as error:
    if error.name != "flax":
        raise
    raise ImportError("jaxnorm.nnx and jaxnorm.linen need Flax: pip install 'flax>=0.12.7'") from error


# The options of either API that only Flax's own code has another value for.
FLAXS_OWN = {"promote_dtype": nnx.nn.dtypes.promote_dtype, "force_float32_reductions": True}

SPLIT_OTHERWISE = "parameters that an Explicit mesh splits otherwise than x"


def options(module: object) -> dict[str, Any]:
    """What a module says beside Flax's fields, as keywords of the functions. A module of Flax says their defaults."""
    offset = checks.check_number(type(module).__name__, "scale_offset", getattr(module, "scale_offset", 0.0))
    return {
        "scale_offset": offset,
        "multiply_before_cast": getattr(module, "multiply_before_cast", True),
        "implementation": getattr(module, "implementation", None),
    }


def rounded_once(module: object, what: str) -> dict[str, Any]:
    """The same without `multiply_before_cast`, which has one meaning for `what`, as "a gated norm"."""
    _must_be(module, "multiply_before_cast", True, f"{what} is rounded once, at the end")
    keywords = options(module)
    del keywords["multiply_before_cast"]
    return keywords


def why_never(module: Any) -> str | None:
    """Why no kernel says the same as a norm of Flax, whatever is normalised; None if that depends on the call."""
    if (why := why_options(module)) is not None:
        return why
    # A number that counts from the front is known with x.
    axes = [axes if isinstance(axes, Iterable) else (axes,) for axes in (module.reduction_axes, module.feature_axes)]
    return None if any(axis >= 0 for axis in chain(*axes)) else _why_not_trailing(*map(_sorted, axes))


def why_options(module: Any) -> str | None:
    """The same of a norm's options but for its axes."""
    if module.axis_name is not None and module.axis_index_groups is not None:
        return "axis_index_groups"
    return _changed(module) if isinstance(module.epsilon, Real) else "an epsilon that is no Python number"


def why_flax(
    module: Any, x: jax.Array, mask: jax.Array | None, parameters: Iterable[jax.Array | None], dtypes: Iterable[Any]
) -> str | None:
    """Why no kernel says the same as Flax for `module(x, mask=mask)`; None if one does.

    `dtypes` are those of all that the call reads and writes.
    """
    reduction, features = _axes(module, x.ndim)
    return (
        why_never(module)
        or ("a mask" if mask is not None else None)
        or _why_not_trailing(reduction, features)
        or (f"{len(features)} axes of an x that has {x.ndim}" if len(features) > x.ndim else None)
        or (SPLIT_OTHERWISE if is_split_otherwise(x, parameters, len(features)) else None)
        or why_dtypes(*dtypes)
    )


def is_split_otherwise(x: jax.Array, parameters: Iterable[jax.Array | None], axes: int = 1) -> bool:
    """Whether an Explicit mesh splits one of the parameters, which then splits the module's result."""
    split = tuple(jax.typeof(x).sharding.spec)[-axes:]
    given = (parameter for parameter in parameters if parameter is not None)
    return any(tuple(jax.typeof(p).sharding.spec) not in ((None,) * p.ndim, split) for p in given)


def called_axes(
    module: Any, x: jax.Array, mask: object, why: str | None
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The axes that a function normalises for `module(x)`, and those of its parameters; None where Flax computes it.

    `why` no kernel does is what `why_flax` says. Parameters may have axes before the normalised ones: those of heads.
    """
    if why is None:
        return _axes(module, x.ndim)
    said = options(module)
    if said["implementation"] == "native":
        raise not_served(module, why)
    if said["scale_offset"] == 0 and said["multiply_before_cast"]:
        return None
    what = "a norm with scale_offset" if said["scale_offset"] else "a norm with multiply_before_cast=False"
    axis = function_axes(module, x, mask, what)
    return axis, axis


def function_axes(module: Any, x: jax.Array, mask: object, what: str) -> tuple[int, ...]:
    """The axes that a function of this package normalises for `module(x)`, or an error where none says the same.

    `what` says which norm Flax has no code for, as "a quantised norm".
    """
    _check_not_flaxs_own(module, mask, what)
    reduction, features = _axes(module, x.ndim)
    if reduction != features:
        raise ValueError(
            f"{type(module).__name__}: reduction_axes={module.reduction_axes} and feature_axes={module.feature_axes} "
            f"are not the same axes of x, which has shape {x.shape}: parameters have the shape of what is normalised. "
            f"Give both alike."
        )
    return checks.check_axes(type(module).__name__, reduction, x.ndim)


def not_served(module: object, why: str) -> RuntimeError:
    return RuntimeError(
        f"{type(module).__name__}: implementation='native', but no kernel serves {why}. Leave implementation out."
    )


def _check_not_flaxs_own(module: Any, mask: object, what: str) -> None:
    """An error where a module or its call asks for what only Flax's code computes."""
    name = type(module).__name__
    for option, expected in FLAXS_OWN.items():
        _must_be(module, option, expected, f"{what} is computed in float32")
    if mask is not None:
        raise ValueError(
            f"{name}: got a mask, expected None: {what} is of all elements of its rows. "
            f"Take the plain norm for what is masked."
        )
    if module.axis_name is not None and module.axis_index_groups is not None:
        raise ValueError(
            f"{name}: axis_index_groups={module.axis_index_groups}, expected None: {what} exchanges its "
            f"statistics over all of axis_name. Leave it out, or take the plain norm."
        )


def last_axis(module: Any, x: jax.Array, mask: object, what: str) -> None:
    """An error unless a function of this package, see `function_axes`, normalises the last axis alone."""
    axes = function_axes(module, x, mask, what)
    if axes != (-1,):
        raise ValueError(
            f"{type(module).__name__}: reduction_axes={module.reduction_axes}, expected -1: {what} is of the "
            f"last axis of x, which has shape {x.shape}. Transpose or reshape x."
        )


def _changed(module: object) -> str | None:
    """The option that only Flax's own code has another value for, if it is set to one."""
    names = (name for name, expected in FLAXS_OWN.items() if getattr(module, name, expected) is not expected)
    return next(names, None)


def _must_be(module: object, option: str, expected: object, why: str) -> None:
    """That an option which some norms have one value for is not set to another."""
    value = getattr(module, option, expected)
    if value is not expected:
        raise ValueError(f"{type(module).__name__}: {option}={value}, expected {expected}: {why}. Leave it out.")


def _axes(module: Any, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes that are reduced and those of features, counted from the last of `rank`; out of range they stay so."""
    return _from_the_end(module.reduction_axes, rank), _from_the_end(module.feature_axes, rank)


def _from_the_end(axes: Any, rank: int) -> tuple[int, ...]:
    """The axes, or the one, that a module names for an x of this rank, counted from the last and sorted."""
    each = axes if isinstance(axes, Iterable) else (axes,)
    return _sorted(axis - rank if 0 <= axis < rank else axis for axis in each)


def _sorted(axes: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(axes)))


def _why_not_trailing(reduction: tuple[int, ...], features: tuple[int, ...]) -> str | None:
    trailing = all(axes == tuple(range(-len(axes), 0)) for axes in (reduction, features))
    if trailing and 0 < len(reduction) <= len(features):
        return None
    return f"reduction_axes={reduction} with feature_axes={features}"


def why_flax_groups(
    module: Any, x: jax.Array, mask: object, parameters: Iterable[jax.Array | None], dtypes: Iterable[Any]
) -> str | None:
    """Why no kernel says the same as Flax for `module(x, mask=mask)`; None if one does, as of `why_flax`."""
    # Of channels before positions Flax's fast variance, of one pass over x, is as fast as kernels and XLA or faster.
    return (
        why_options(module)
        or ("a mask" if mask is not None else None)
        or _why_other_axes(module, x.ndim)
        or (f"feature_axes={module.feature_axes}" if channel_axis(module, x.ndim) != -1 else None)
        or (SPLIT_OTHERWISE if is_split_otherwise(x, parameters) else None)
        or why_dtypes(*dtypes)
    )


def is_grouped(module: Any, x: jax.Array, mask: object, why: str | None) -> bool:
    """Whether the function computes `module(x)`, and not Flax; `why` no kernel does is what `why_flax_groups` says."""
    if why is None:
        return True
    said = options(module)
    if said["implementation"] == "native":
        raise not_served(module, why)
    if said["scale_offset"] == 0 or _has_no_groups(module):  # of which Flax's error tells
        return False
    what = "a norm with scale_offset"
    _check_not_flaxs_own(module, mask, what)
    if (other := _why_other_axes(module, x.ndim)) is not None:
        raise ValueError(f"{type(module).__name__}: got {other}: {what} has no code for that. Leave scale_offset out.")
    return True


def channel_axis(module: Any, rank: int) -> int:
    if not is_instance_norm(module):
        return -1
    (axis,) = _from_the_end(module.feature_axes, rank)
    return axis


def is_instance_norm(module: Any) -> bool:
    return hasattr(module, "feature_axes")


def _has_no_groups(module: Any) -> bool:
    """Whether a GroupNorm of flax.linen has neither number nor size of its groups, or both."""
    if is_instance_norm(module) or isinstance(module, nnx.Module):
        return False
    return (module.num_groups is None) is (module.group_size is None)


def _why_other_axes(module: Any, rank: int) -> str | None:
    """Why what is normalised for an x of this rank is not what the function normalises."""
    if rank < 2:
        return f"an x with {rank} axes"
    if _has_no_groups(module):
        return f"num_groups={module.num_groups} with group_size={module.group_size}"
    if is_instance_norm(module):
        axes = _from_the_end(module.feature_axes, rank)
        return None if len(axes) == 1 and -rank < axes[0] < 0 else f"feature_axes={module.feature_axes}"
    axes = module.reduction_axes
    whole = axes is None or _from_the_end(axes, rank) == tuple(range(1 - rank, 0))
    return None if whole else f"reduction_axes={axes}"


def why_never_looked_up(module: Any) -> str | None:
    """Why Flax's own code computes every call of an Embed; None if that depends on the call."""
    flaxs = (linen if isinstance(module, linen.Module) else nnx.nn).dtypes.promote_dtype
    return None if module.promote_dtype is flaxs else "promote_dtype"


def why_flax_looks_up(module: Any, table: jax.Array, ids: Any) -> str | None:
    """Why Flax's own code computes a call of an Embed; None if `looked_up` does."""
    if (why := why_never_looked_up(module)) is not None:
        return why
    if not are_integers(ids):
        return "ids that are no integers"  # for which Flax has an error
    if table.ndim != 2:
        return f"a table of {table.ndim} axes"
    return why_dtypes(table.dtype, module.dtype)


def are_integers(ids: Any) -> bool:
    return hasattr(ids, "dtype") and jnp.issubdtype(ids.dtype, jnp.integer)
