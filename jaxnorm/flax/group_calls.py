"""When a GroupNorm or an InstanceNorm of either API of Flax is computed by `jaxnorm.group_norm`, and how."""

from collections.abc import Iterable
from typing import Any, get_args

import jax

from jaxnorm.flax import calls
from jaxnorm.ops.activation import FORMULAS, check_activation
from jaxnorm.ops.group_norm.formula import Activation

WHAT = "a norm with scale_offset"


def why_flax(
    module: Any, x: jax.Array, mask: object, parameters: Iterable[jax.Array | None], dtypes: Iterable[Any]
) -> str | None:
    """Why no kernel says the same as Flax for `module(x, mask=mask)`; None if one does, as of `calls.why_flax`."""
    if (why := calls.why_options(module)) is not None:
        return why
    if mask is not None:
        return "a mask"
    if (why := _why_other_axes(module, x.ndim)) is not None:
        return why
    # Of channels before positions Flax's fast variance, of one pass over x, is as fast as kernels and XLA or faster.
    if channel_axis(module, x.ndim) != -1:
        return f"feature_axes={module.feature_axes}"
    if calls.is_split_otherwise(x, parameters):
        return calls.SPLIT_OTHERWISE
    return calls.why_dtypes(*dtypes)


def is_called(module: Any, x: jax.Array, mask: object, why: str | None) -> bool:
    """Whether the function computes `module(x)`, and not Flax; `why` no kernel does is what `why_flax` says."""
    if why is None:
        return True
    said = calls.options(module)
    if said["implementation"] == "native":
        raise calls.not_served(module, why)
    if said["scale_offset"] == 0 or _has_no_groups(module):  # of which Flax's error tells
        return False
    calls.check_not_flaxs_own(module, mask, WHAT)
    if (other := _why_other_axes(module, x.ndim)) is not None:
        raise ValueError(f"{type(module).__name__}: got {other}: {WHAT} has no code for that. Leave scale_offset out.")
    return True


def keywords(module: Any, rank: int) -> dict[str, Any]:
    """What a module says, as keywords of the function."""
    said = calls.options(module)
    del said["multiply_before_cast"]
    axis = channel_axis(module, rank)
    groups = {"group_size": 1} if _is_instance_norm(module) else _groups(module)
    own = {"epsilon": module.epsilon, "axis_name": module.axis_name, "activation": _activation(module)}
    return {**said, **groups, **own, "channel_axis": axis}


def channel_axis(module: Any, rank: int) -> int:
    """The axis of channels, counted from the last."""
    if not _is_instance_norm(module):
        return -1
    (axis,) = calls.from_the_end(module.feature_axes, rank)
    return axis


def activated(module: Any, y: jax.Array) -> jax.Array:
    """What Flax's code has computed, with the activation that it does not know."""
    name = check_activation(type(module).__name__, _activation(module), (None, *get_args(Activation)))
    if name is None:
        return y
    wide = y.astype(jax.numpy.promote_types(y.dtype, "float32"))
    return FORMULAS[name].of(wide).astype(y.dtype)


def _activation(module: Any) -> Any:
    """None of a module of Flax."""
    return getattr(module, "activation", None)


def _is_instance_norm(module: Any) -> bool:
    return hasattr(module, "feature_axes")


def _groups(module: Any) -> dict[str, Any]:
    """How many groups there are, or how large they are. Those of flax.nnx know both."""
    return {"num_groups": module.num_groups} if module.group_size is None else {"group_size": module.group_size}


def _has_no_groups(module: Any) -> bool:
    """Whether a GroupNorm of flax.linen has neither number nor size of its groups, or both."""
    if _is_instance_norm(module) or isinstance(module, calls.nnx.Module):
        return False
    return (module.num_groups is None) is (module.group_size is None)


def _why_other_axes(module: Any, rank: int) -> str | None:
    """Why what is normalised for an x of this rank is not what the function normalises."""
    if rank < 2:
        return f"an x with {rank} axes"
    if _has_no_groups(module):
        return f"num_groups={module.num_groups} with group_size={module.group_size}"
    if _is_instance_norm(module):
        axes = calls.from_the_end(module.feature_axes, rank)
        return None if len(axes) == 1 and -rank < axes[0] < 0 else f"feature_axes={module.feature_axes}"
    axes = module.reduction_axes
    whole = axes is None or calls.from_the_end(axes, rank) == tuple(range(1 - rank, 0))
    return None if whole else f"reduction_axes={axes}"
