"""Checks of the arguments of norms, from which their spec follows; as `jaxnorm.ops.checks`."""

import dataclasses
from typing import Any, NamedTuple, get_args

import jax
import numpy as np

from jaxnorm.ops import checks
from jaxnorm.ops.activation import check_activation
from jaxnorm.ops.misuse import GATE_FIRST
from jaxnorm.ops.norm import gated_formula
from jaxnorm.ops.norm.formula import Kind, Norm, Operands, x_hat_dtype
from jaxnorm.ops.norm.op import ADDEND
from jaxnorm.ops.options import Choice, Implementation, NormOptions
from jaxnorm.ops.quantize import checks as quantize_checks
from jaxnorm.quantization import LARGEST, Quantization
from jaxnorm.sharding import dims
from jaxnorm.sharding.shards import Shards

Checked = tuple[Norm, Operands, Implementation | None]


def check_norm(
    function: str, kind: Kind, options: NormOptions, arrays: Operands, *, needs_addend: bool = False
) -> Checked:
    """What is static about a call of a norm without a gate, the operands, and the chosen implementation."""
    choice = checks.check_implementation(function, options.implementation)
    x, addend, scale, bias, branch_scale = arrays
    x = checks.check_x(function, x)
    if addend is not None or needs_addend:
        addend = checks.check_like_x(function, ADDEND, addend, x, "added")
    axes = checks.check_axes(function, options.axis, x.ndim)
    scale, bias = (checks.check_weight(function, n, w, x, axes) for n, w in (("scale", scale), ("bias", bias)))
    branch_scale = check_branch_scale(function, branch_scale, x, axes)
    if branch_scale is not None and addend is None:
        raise ValueError(f"{function}: branch_scale without residual; multiply x by it, or pass residual, too.")
    operands = Operands(x, addend, scale, bias, branch_scale)
    out_dtype = checks.check_out_dtype(function, options.out_dtype, x)
    multiplies = checks.check_flag(function, "multiply_before_cast", options.multiply_before_cast)
    normalised = x if addend is None else addend
    norm = Norm(
        kind=kind,
        axes=axes,
        multiply_before_cast=multiplies,
        x_hat_dtype=x_hat_dtype(normalised.dtype, out_dtype, multiply_before_cast=multiplies),
        **_every(function, options, choice, operands, out_dtype),
        pad_to=checks.check_pad_to(function, options.pad_to, axes, options.axis_name),
        shards=checks.check_axis_name(function, options.axis_name),
    )
    return norm, operands, choice.implementation


def check_branch_scale(function: str, value: object, x: jax.Array, axes: tuple[int, ...]) -> jax.Array | None:
    """value as a weight whose batch dims, if it has some, are as many as x's other axes: which is which is written."""
    if value is None:
        return None
    branch_scale = checks.check_array(function, "branch_scale", value)
    shape, lead = branch_scale.shape, branch_scale.ndim - len(axes)
    if 0 < lead < x.ndim - len(axes):
        whole = (*shape[:lead], *[1] * (x.ndim - branch_scale.ndim), *shape[lead:])
        raise ValueError(
            f"{function}: branch_scale has shape {shape} and x {x.shape}: with axes before the normalised ones it has "
            f"x's rank, so that it is seen along which of x's it differs. Reshape it to {whole}, if it is those."
        )
    return checks.check_weight(function, "branch_scale", branch_scale, x, axes)


def _every(function: str, options: NormOptions, choice: Choice, operands: Any, out_dtype: Any) -> dict[str, Any]:
    """What is static about every norm."""
    return {
        "epsilon": checks.check_epsilon(function, options.epsilon),
        "scale_offset": checks.check_scale_offset(function, options.scale_offset),
        "compute_dtype": dims.wide_dtype([out_dtype, *(array.dtype for array in operands if array is not None)]),
        "out_dtype": out_dtype,
        **choice.asks(function),
    }


class Gating(NamedTuple):
    """The keywords that only gated norms have, as a caller gave them."""

    gate_first: Any
    activation: Any
    group_size: Any


class GatedCall(NamedTuple):
    """A checked call, whose operands are not divided into groups yet."""

    norm: Norm
    operands: gated_formula.Operands
    group_size: int | None
    chosen: Implementation | None


def check_gated(function: str, options: NormOptions, gating: Gating, arrays: gated_formula.Operands) -> GatedCall:
    choice = checks.check_implementation(function, options.implementation)
    x = checks.check_x(function, arrays.x)
    gate = checks.check_like_x(function, "gate", arrays.gate, x, "multiplied")
    operands = gated_formula.Operands(x, gate, _check_scale(function, arrays.scale, x))
    group_size = _check_group_size(function, gating.group_size, x)
    out_dtype = checks.check_out_dtype(function, options.out_dtype, x)
    norm = Norm(
        **_every(function, options, choice, operands, out_dtype),
        shards=_check_axis_name(function, options.axis_name, group_size),
        activation=check_activation(function, gating.activation, get_args(gated_formula.Activation)),
        gate_first=checks.check_flag(function, "gate_first", gating.gate_first, GATE_FIRST),
    )
    return GatedCall(norm, operands, group_size, choice.implementation)


def _check_scale(function: str, value: object, x: jax.Array) -> jax.Array | None:
    if value is None:
        return None
    scale = checks.check_array(function, "scale", value)
    if scale.shape != x.shape[-1:]:
        raise ValueError(
            f"{function}: scale has shape {scale.shape}, expected {x.shape[-1:]}: the last axis of x, which has shape "
            f"{x.shape}, whatever group_size is. Reshape scale."
        )
    return checks.sharded_like(function, "scale", scale, x, (-1,))


def _check_axis_name(function: str, axis_name: object, group_size: int | None) -> Shards | None:
    if axis_name is not None and group_size is not None:
        raise ValueError(
            f"{function}: axis_name={axis_name!r} with group_size={group_size}: a group is normalised by itself, on "
            f"the device that has it. Leave axis_name out."
        )
    return checks.check_axis_name(function, axis_name)


def _check_group_size(function: str, group_size: Any, x: jax.Array) -> int | None:
    """group_size as a divisor of the last axis; None for None."""
    if group_size is None:
        return None
    if isinstance(group_size, (bool, np.bool)) or not isinstance(group_size, (int, np.integer)):
        raise TypeError(
            f"{function}: group_size must be a positive int, got {group_size!r}; None normalises the whole axis."
        )
    cols = x.shape[-1]
    if group_size < 1 or not isinstance(cols, int) or cols % group_size:
        raise ValueError(
            f"{function}: group_size {group_size} is not a positive divisor of the last axis of x, which has shape "
            f"{x.shape}; it is the number of columns of a group, not that of groups."
        )
    checks.check_whole_groups(function, int(group_size), x)
    return int(group_size)


class Quantizing(NamedTuple):
    """The keywords that only quantised norms have, as a caller gave them."""

    quantization: Any
    static_scale: Any
    smooth_scale: Any
    straight_through: Any
    with_unquantized: Any = False


def check_quantized(function: str, norm: Norm, operands: Any, own: Quantizing) -> tuple[Norm, tuple[Any, Any]]:
    """The norm with a quantised result; and the operands that only such a one has, smooth and given."""
    x, quantization = operands.x, own.quantization
    quantize_checks.check_quantization(function, quantization, Quantization, x, norm.axes)
    quantize_checks.check_activations(function, quantization, LARGEST)
    given = quantize_checks.check_static_scale(function, own.static_scale, quantization.granularity)
    smooth = checks.check_weight(function, "smooth_scale", own.smooth_scale, x, norm.axes, with_batch_dims=False)
    quantize_checks.check_float32(function, {**operands._asdict(), "smooth_scale": smooth})
    norm = dataclasses.replace(
        norm,
        quantization=quantization,
        straight_through=checks.check_flag(function, "straight_through", own.straight_through),
        with_unquantized=checks.check_flag(function, "with_unquantized", own.with_unquantized),
    )
    return norm, (smooth, given)
