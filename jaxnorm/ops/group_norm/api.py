"""The public function `group_norm`."""

from collections.abc import Callable
from typing import Any, get_args

import jax

from jaxnorm.native import compat
from jaxnorm.ops import checks, misuse
from jaxnorm.ops.activation import Synonym, check_activation
from jaxnorm.ops.group_norm.formula import Activation, GroupNorm, Operands
from jaxnorm.ops.group_norm.op import GROUP_NORM
from jaxnorm.ops.misuse import explained
from jaxnorm.ops.norm.checks import of_every_norm
from jaxnorm.ops.options import Implementation


@explained
def group_norm(
    x: Any,
    scale: Any = None,
    bias: Any = None,
    *,
    activation: Activation | Synonym | None = None,
    num_groups: int | None = None,
    group_size: int | None = None,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    channel_axis: int = -1,
    out_dtype: Any = None,
    axis_name: Any = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Normalises groups of neighbouring channels of each example, over all positions, and applies an activation.

        y = activation((x - mean) * rsqrt(mean((x - mean)²) + epsilon) * (scale + scale_offset) + bias)

        >>> y = group_norm(jnp.ones((2, 4, 4, 64)), jnp.ones(64), jnp.zeros(64), num_groups=32, activation="silu")

    The means go over the positions and channels of one group of one example. The variance is that of `layer_norm`. It
    computes, rounds (after the activation) and transforms as `rms_norm` does. One group is a LayerNorm over each
    example, a group for each channel (group_size=1) is instance normalisation.

    Args:
      x: floating-point array (examples, ..., channels), with any number of axes of positions between.
      scale: factors (channels,), or (examples, channels) as in adaptive GroupNorm and FiLM; None is 1.
      bias: summands, as scale; None is 0.
      activation: None, "silu", "relu", or "gelu", the approximation by tanh; or one of these functions of jax.nn.
      num_groups: how many groups the channels make. Give this or group_size.
      channel_axis: the axis of channels; not the first, which is that of examples. Kernels serve the last one.
      axis_name: as for `rms_norm`, of positions that are split.

    Raises:
      ValueError, TypeError, RuntimeError: none or both of num_groups and group_size, or no divisor; or as `rms_norm`.

    Source: https://arxiv.org/abs/1803.08494, https://arxiv.org/abs/1607.08022 (instances),
    https://arxiv.org/abs/1709.07871.
    """
    name = "group_norm"
    choice = checks.check_implementation(name, implementation)
    x = checks.check_x(name, x)
    if x.ndim < 2:
        raise ValueError(
            f"{name}: x has shape {x.shape}, expected an axis of examples, one of channels, and between them those of "
            f"positions. Of one example x[None] makes a batch."
        )
    axis = _check_channel_axis(name, channel_axis, x)
    split = _check_groups(name, {"num_groups": num_groups, "group_size": group_size}, x, axis)
    scale, bias = (_check_weight(name, n, w, x, axis) for n, w in (("scale", scale), ("bias", bias)))
    out_dtype = checks.check_out_dtype(name, out_dtype, x.dtype)
    # Channels become two axes, of which the second is a group's. Those of positions come after that of examples.
    norm = GroupNorm(
        axes=tuple(a for a in range(-x.ndim, 0) if a != axis - 1),
        **of_every_norm(name, choice, epsilon, scale_offset, out_dtype, (x, scale, bias)),
        shards=checks.check_axis_name(name, axis_name),
        activation=check_activation(name, activation, (None, *get_args(Activation))),
    )
    weights = (None if weight is None else _in_groups(weight, axis, split) for weight in (scale, bias))
    operands = Operands(_in_groups(x, axis, split), *weights)
    return GROUP_NORM(norm, operands, choice.implementation).y.reshape(x.shape)


def _in_groups(array: jax.Array, axis: int, split: tuple[int, int]) -> jax.Array:
    """The array, of x's rank, with the axis of channels split into that of groups and that of the channels of each."""
    return array.reshape(*array.shape[:axis], *split, *array.shape[array.ndim + axis + 1 :])


def _check_channel_axis(name: str, channel_axis: object, x: jax.Array) -> int:
    """The axis of channels, counted from the end."""
    axis = checks.check_int(name, "channel_axis", channel_axis, "-1 is the last")
    (axis,) = checks.check_axes(name, axis, x.ndim)
    if axis == -x.ndim:
        raise ValueError(
            f"{name}: channel_axis={channel_axis} is the first axis of x, which has shape {x.shape}; expected another: "
            f"the first is that of examples."
        )
    return axis


def _check_groups(name: str, keywords: dict[str, Any], x: jax.Array, axis: int) -> tuple[int, int]:
    """How many groups there are, and channels in each."""
    given = {key: value for key, value in keywords.items() if value is not None}
    if len(given) != 1:
        raise ValueError(
            f"{name}: got {'both' if given else 'neither'} of num_groups and group_size; expected one of them, as "
            f"num_groups=32."
        )
    ((key, value),) = given.items()
    number = checks.check_int(name, key, value, "num_groups=32 is usual")
    channels = x.shape[axis]
    if number < 1 or not isinstance(channels, int) or channels % number:
        raise ValueError(
            f"{name}: {key}={number} is not a positive divisor of the channels of x, which has shape {x.shape} and "
            f"channels along axis {axis}.{_fitting(x, axis, lambda n: number > 0 == n % number)}"
        )
    groups, size = (number, channels // number) if key == "num_groups" else (channels // number, number)
    if groups % (shards := compat.shard_count(x, axis)):
        raise ValueError(
            f"{name}: the channels of x, which has shape {x.shape}, are split over {shards} devices of an Explicit "
            f"mesh, and so would be one of {groups} groups; take another {key}, or reshard x."
        )
    return groups, size


def _fitting(x: jax.Array, axis: int, fits: Callable[[int], bool]) -> str:
    """The remedy where the channels have another axis than the one that is taken."""
    others = (a for a in range(1, x.ndim) if a != x.ndim + axis and isinstance(x.shape[a], int))
    return misuse.fitting("channel_axis", [a for a in others if fits(x.shape[a])][:1])


def _check_weight(name: str, weight_name: str, value: object, x: jax.Array, axis: int) -> jax.Array | None:
    """The weight with x's rank, 1 long along the axes of positions, and of examples if it is the same for all."""
    if value is None:
        return None
    weight = checks.check_array(name, weight_name, value)
    examples, channels = x.shape[0], x.shape[axis]
    if weight.shape not in ((channels,), (examples, channels)):
        remedy = "For weights that differ between positions, apply group_norm without them."
        if weight.size == channels:
            remedy = f"Reshape it, as with {weight_name}.reshape(-1)."
        elif fitting := _fitting(x, axis, lambda n: weight.shape in ((n,), (examples, n))):
            remedy = fitting.strip()
        raise ValueError(
            f"{name}: {weight_name} has shape {weight.shape}, expected ({channels},), a value for each channel, or "
            f"({examples}, {channels}), for each channel of each example of x, which has shape {x.shape}. {remedy}"
        )
    along = (axis,) if weight.ndim == 1 else (-x.ndim, axis)
    weight = checks.sharded_along(name, weight_name, weight, "x", x, along)
    ones = [a for a in range(x.ndim) if a != x.ndim + axis and (a or weight.ndim == 1)]
    return jax.lax.expand_dims(weight, ones)
