"""Checks of the arguments of norms without a gate, from which their spec follows; as `jaxnorm.ops.checks`."""

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax

from jaxnorm.ops import checks
from jaxnorm.ops.norm.formula import Kind, Norm, Operands, x_hat_dtype
from jaxnorm.ops.norm.op import ADDEND
from jaxnorm.ops.options import Choice, Implementation, NormOptions
from jaxnorm.ops.quantize import checks as quantize_checks
from jaxnorm.quantization import LARGEST, Quantization
from jaxnorm.sharding import dims


def check_norm(
    function: str,
    kind: Kind,
    options: NormOptions,
    x: Any,
    residual: Any,
    scale: Any,
    bias: Any,
    branch_scale: Any = None,
    *,
    needs_addend: bool = False,
) -> tuple[Norm, Operands, Implementation | None]:
    """What is static about a call of a norm without a gate, the operands, and the chosen implementation."""
    choice = checks.check_implementation(function, options.implementation)
    x = checks.check_x(function, x)
    if residual is not None or needs_addend:
        residual = checks.check_like_x(function, ADDEND, residual, x, "added")
    axes = checks.check_axes(function, options.axis, x.ndim)
    scale, bias = (checks.check_weight(function, n, w, x, axes) for n, w in (("scale", scale), ("bias", bias)))
    if branch_scale is not None:
        branch_scale = check_branch_scale(function, branch_scale, x, axes)
        if residual is None:
            raise ValueError(f"{function}: branch_scale without residual; multiply x by it, or pass residual, too.")
    operands = Operands(x, residual, scale, bias, branch_scale)
    out_dtype = checks.check_out_dtype(function, options.out_dtype, x.dtype)
    multiplies = checks.check_flag(function, "multiply_before_cast", options.multiply_before_cast)
    normalised = x.dtype if residual is None else residual.dtype
    norm = Norm(
        kind=kind,
        axes=axes,
        multiply_before_cast=multiplies,
        x_hat_dtype=x_hat_dtype(normalised, out_dtype, multiply_before_cast=multiplies),
        **of_every_norm(function, choice, options.epsilon, options.scale_offset, out_dtype, operands),
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


def of_every_norm(
    function: str, choice: Choice, epsilon: Any, scale_offset: Any, out_dtype: Any, operands: Iterable[Any]
) -> dict[str, Any]:
    return {
        "epsilon": checks.check_epsilon(function, epsilon),
        # A sum with -0 is the weight itself, one of -0 too, and kernels may leave it out.
        "scale_offset": checks.check_number(function, "scale_offset", scale_offset) or -0.0,
        "compute_dtype": dims.wide_dtype([out_dtype, *(array.dtype for array in operands if array is not None)]),
        "out_dtype": out_dtype,
        **choice.asks(function),
    }


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
