"""The public function that quantises an array."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxnorm.ops import checks as shared_checks
from jaxnorm.ops.misuse import explained
from jaxnorm.ops.options import Implementation
from jaxnorm.ops.quantize import checks
from jaxnorm.ops.quantize.op import DTYPES, OUT_DTYPES, QUANTIZE, Operands, Quantize, Results, by_columns_of, of_kernel
from jaxnorm.primitive import fallback, registry
from jaxnorm.primitive.decide import Call, Formula
from jaxnorm.primitive.registry import Function, Request
from jaxnorm.quantization import Quantization, Quantized, quantized

_BY_XLA = "it is a formula in jax.numpy on every platform, which XLA fuses with the transposition"


@explained
def quantize(
    x: Any,
    quantization: Quantization,
    *,
    axis: int | Sequence[int] = -1,
    straight_through: bool = False,
    implementation: Implementation | None = None,
) -> Quantized:
    """Quantises any array to 8 or 4 bits; a kernel for `quantized_dot` by `quantize_kernel`.

        scales = max|x| / largest       over `axis`, a group or everything, 1 where that is 0; at least 2**-126
        values = x * (1 / scales)       clipped to ±largest, rounded to nearest, ties to even

        >>> w = quantize(jnp.ones((16, 8)), Quantization("int4"))

    with the `largest` of quantization's dtype, in float32 throughout, as `rms_norm_quantized` does. What trailing axes
    or groups share is found and rounded by one kernel, to 8 bits; all else is XLA's code. A derivative is an error;
    with straight_through=True it is that of x, by convention.

    Args:
      x: floating-point array of at most 32 bits, of rank 1 or more.
      quantization: dtype, what shares a scale, and how a scale is made; with granularity "tensor" all of x shares one.
      axis: the axes that share a scale with granularity "token"; "group" groups the last.

    Returns:
      A `Quantized`: values of x's shape; scales with `axis` of length 1, or a last axis of groups, or a scalar.

    Raises:
      ValueError, TypeError, RuntimeError: axis or groups do not fit, a derivative is taken, x is float64; or as
        `rms_norm`.

    Source: FP8 formats, https://arxiv.org/abs/2209.05433; integers, https://arxiv.org/abs/1712.05877.
    """
    _check_order("quantize", x, "x")
    x = shared_checks.check_x("quantize", x)
    axes = shared_checks.check_axes("quantize", axis, x.ndim)
    choice = shared_checks.check_implementation("quantize", implementation)
    spec = _spec(("quantize", "x"), x, quantization, axes, straight_through, **choice.asks("quantize"))
    return _result(spec, QUANTIZE(spec, Operands(x), choice.implementation))


@explained
def quantize_kernel(kernel: Any, quantization: Quantization, *, straight_through: bool = False) -> Quantized:
    """Quantises the kernel of a linear layer for `quantized_dot` or `float8_linear`, with a scale for each output.

        scales = max|kernel| / largest      over the inputs, otherwise as of `quantize`
        values = kernel * (1 / scales)      clipped and rounded as those

        >>> kernel = quantize_kernel(jnp.ones((8, 4)), Quantization("int8"))  # its dequantize() has this shape

    They lie in memory as 8-bit products read them, outputs first, and say so themselves (`transposed`). An output of
    zeros has the scale 2**-126 in float8_e4m3fn by "token", so that in `float8_linear` it changes no other's gradient.

    Args:
      kernel: floating-point array (..., inputs, outputs) of at most 32 bits; stacked layers have axes in front.
      quantization: as for `quantize`; "group" groups the inputs.
      straight_through: as for `quantize`.

    Returns:
      A transposed `Quantized`: values (..., outputs, inputs), scales (..., outputs, 1), (..., outputs, groups) or ().

    Raises:
      ValueError, TypeError: as `quantize` does, and where kernel has less than two axes.
    """
    name = "quantize_kernel"
    _check_order(name, kernel, "kernel")
    kernel = shared_checks.check_x(name, kernel, "kernel")
    if kernel.ndim < 2:
        raise ValueError(f"{name}: kernel has shape {kernel.shape}, expected two axes or more: (..., inputs, outputs).")
    lying = jax.eval_shape(lambda kernel: jnp.swapaxes(kernel, -1, -2), kernel)
    spec = _spec((name, "kernel"), lying, quantization, (-1,), straight_through)
    if kernel.ndim > 2 or by_columns_of(quantization, kernel) is None:
        fallback.tell(name, Operands(lying), "forward", _BY_XLA)
    return dataclasses.replace(_result(spec, of_kernel(spec, kernel)), transposed=True)


def _check_order(function: str, array: Any, name: str) -> None:
    if isinstance(array, Quantization):
        raise TypeError(
            f"{function}: {name} is a jaxnorm.Quantization; are {name} and quantization in each other's place? Pass "
            f"the array first."
        )


def _spec(
    function: tuple[str, str],
    x: Any,
    quantization: Quantization,
    axes: tuple[int, ...],
    straight_through: Any,
    **asks: Any,
) -> Quantize:
    name, argument = function
    checks.check_quantization(name, quantization, Quantization, x, axes)
    checks.check_float32(name, {argument: x})
    return Quantize(
        axes=tuple(range(-x.ndim, 0)) if quantization.granularity == "tensor" else axes,
        quantization=quantization,
        straight_through=shared_checks.check_flag(name, "straight_through", straight_through),
        function=function,
        **asks,
    )


def _result(spec: Quantize, results: Results) -> Quantized:
    values, scales, carrier = results
    over_all = spec.quantization.granularity == "tensor"
    return quantized(spec.quantization, values, scales.reshape(()) if over_all else scales, carrier)


def _call(request: Request) -> Call:
    kernel = request.array(request.shape)
    by_columns = by_columns_of(Quantization(request.out_dtype), kernel)
    return Formula(_BY_XLA) if by_columns is None else by_columns.call(kernel)


registry.add_functions(
    Function(
        "quantize_kernel",
        call=_call,
        arguments=lambda request: {"kernel": request.array(request.shape)},
        dtypes=DTYPES,
        out_dtypes=OUT_DTYPES,
    )
)
