"""Checks of what is passed to the gated norm beside a norm's own arguments, in the way of `jaxnorm.validation`."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxnorm import validation
from jaxnorm.split import Split
from jaxnorm.validation import check_array, check_flag, check_whole_groups, sharded_like


def check_gate(op: str, value: object, x: jax.Array) -> jax.Array:
    gate = check_array(op, "gate", value)
    if gate.shape != x.shape:
        raise ValueError(
            f"{op}: gate has shape {gate.shape}, expected x's shape {x.shape}: they are multiplied element by "
            f"element. Reshape or broadcast one of them, as with jax.numpy.broadcast_to(gate, x.shape)."
        )
    return gate


def check_scale(op: str, value: object, x: jax.Array) -> jax.Array | None:
    if value is None:
        return None
    scale = check_array(op, "scale", value)
    if scale.shape != x.shape[-1:]:
        raise ValueError(
            f"{op}: scale has shape {scale.shape}, expected {x.shape[-1:]}: the last axis of x, which has shape "
            f"{x.shape}, whatever group_size is. Reshape scale."
        )
    return sharded_like(op, "scale", scale, x, (-1,))


def check_axis_name(op: str, axis_name: object, group_size: int | None) -> Split | None:
    if axis_name is not None and group_size is not None:
        raise ValueError(
            f"{op}: axis_name={axis_name!r} with group_size={group_size}: a group is normalised by itself, on the "
            f"device that has it. Leave axis_name out."
        )
    return validation.check_axis_name(op, axis_name)


def check_activation(op: str, activation: Any, known: Sequence[str]) -> Any:
    if activation not in known:
        raise ValueError(f"{op}: unknown activation {activation!r}; expected {' or '.join(map(repr, known))}.")
    return activation


def check_gate_first(op: str, gate_first: object) -> bool:
    what = "True multiplies by the gate before x is normalised (Mamba2), False after (Qwen3-Next)"
    return check_flag(op, "gate_first", gate_first, what)


def check_group_size(op: str, group_size: Any, x: jax.Array) -> int | None:
    """group_size as a divisor of the last axis, or None where that is one group."""
    if group_size is None:
        return None
    if isinstance(group_size, (bool, np.bool)) or not isinstance(group_size, (int, np.integer)):
        raise TypeError(f"{op}: group_size must be a positive int, got {group_size!r}; None normalises the whole axis.")
    cols = x.shape[-1]
    if group_size < 1 or not isinstance(cols, int) or cols % group_size:
        raise ValueError(
            f"{op}: group_size {group_size} is not a positive divisor of the last axis of x, which has shape "
            f"{x.shape}; it is the number of columns of a group, not that of groups."
        )
    check_whole_groups(op, int(group_size), x)
    return int(group_size)
