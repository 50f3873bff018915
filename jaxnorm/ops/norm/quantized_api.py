"""The public functions with a quantised result."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxnorm.ops.misuse import explained
from jaxnorm.ops.norm.checks import Quantizing, check_norm, check_quantized
from jaxnorm.ops.norm.formula import Kind, Operands
from jaxnorm.ops.norm.quantized_formula import Operands as QuantizedOperands
from jaxnorm.ops.norm.quantized_op import QUANTIZED_NORM
from jaxnorm.ops.options import Implementation, NormOptions
from jaxnorm.quantization import Quantization, quantized
from jaxnorm.results import QuantizedNorm, RowStatistics


@explained
def rms_norm_quantized(
    x: Any,
    scale: Any = None,
    *,
    quantization: Quantization,
    residual: Any = None,
    bias: Any = None,
    branch_scale: Any = None,
    static_scale: Any = None,
    smooth_scale: Any = None,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    axis: int | Sequence[int] = -1,
    straight_through: bool = False,
    with_unquantized: bool = False,
    axis_name: Any = None,
    implementation: Implementation | None = None,
) -> QuantizedNorm:
    """Divides x by its root mean square over `axis` and quantises the result to 8 bits.

        v = rms_norm(x, scale, bias=bias, out_dtype=float32, ...) * smooth_scale
        scales = max|v| / largest       over each row or group, 1 where that is 0; at least 2**-126, at most max_scale
        values = v * (1 / scales)       clipped to ±largest, rounded to nearest, ties to even

        >>> q = rms_norm_quantized(jnp.ones((2, 8)), jnp.ones(8), quantization=Quantization("float8_e4m3fn"))

    with the `largest` of quantization's dtype, in float32, bit for bit as NumPy does it from the same implementation's
    norm. A derivative is an error, but with straight_through=True.

    Args:
      x: array of float32, bfloat16 or float16 of rank 1 or more. What is not named here is as for `add_rms_norm`.
      residual: None, or x's addend; then the sum is returned, too.

    Returns:
      `QuantizedNorm`, (quantized, residual, y, statistics): a `Quantized` of x's shape, the sum and y or None, and the
      statistics of the rows.

    Raises:
      ValueError, TypeError, RuntimeError: an array is float64, or quantization does not fit; or as `rms_norm`.

    Source: https://arxiv.org/abs/2209.05433 (FP8 formats), https://arxiv.org/abs/2211.10438 (SmoothQuant).
    """
    options = NormOptions(
        epsilon=epsilon, scale_offset=scale_offset, axis=axis, axis_name=axis_name, implementation=implementation
    )
    own = Quantizing(quantization, static_scale, smooth_scale, straight_through, with_unquantized)
    operands = Operands(x, residual, scale, bias, branch_scale)
    return _quantized("rms_norm_quantized", "rms", options, operands, own)


@explained
def layer_norm_quantized(
    x: Any,
    scale: Any = None,
    bias: Any = None,
    *,
    quantization: Quantization,
    residual: Any = None,
    branch_scale: Any = None,
    static_scale: Any = None,
    smooth_scale: Any = None,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    axis: int | Sequence[int] = -1,
    straight_through: bool = False,
    with_unquantized: bool = False,
    axis_name: Any = None,
    implementation: Implementation | None = None,
) -> QuantizedNorm:
    """Shifts and scales x to mean 0 and variance 1 over `axis` and quantises the result to 8 bits.

        v = layer_norm(x, scale, bias, out_dtype=float32, ...) * smooth_scale

        >>> q = layer_norm_quantized(jnp.ones((2, 8)), jnp.ones(8), jnp.zeros(8), quantization=Quantization("int8"))

    and from there as `rms_norm_quantized`, whose dtypes, result, derivative and errors these are.

    Args:
      x: array of float32, bfloat16 or float16 of rank 1 or more. What is not named here is as for `rms_norm_quantized`.
      epsilon: non-negative Python number added to the variance.

    Returns:
      As `rms_norm_quantized` does.

    Raises:
      ValueError, TypeError, RuntimeError: as `rms_norm_quantized` does.

    Source: those of `layer_norm` and `rms_norm_quantized`.
    """
    options = NormOptions(
        epsilon=epsilon, scale_offset=scale_offset, axis=axis, axis_name=axis_name, implementation=implementation
    )
    own = Quantizing(quantization, static_scale, smooth_scale, straight_through, with_unquantized)
    arrays = Operands(x, residual, scale, bias, branch_scale)
    return _quantized("layer_norm_quantized", "layer", options, arrays, own)


def _quantized(function: str, kind: Kind, options: NormOptions, arrays: Operands, own: Quantizing) -> QuantizedNorm:
    norm, of_norm, chosen = check_norm(function, kind, dataclasses.replace(options, out_dtype=np.float32), arrays)
    norm, (smooth, given) = check_quantized(function, norm, of_norm, own)
    results, stats = QUANTIZED_NORM.with_statistics(norm, QuantizedOperands(*of_norm, smooth, given), chosen)
    scales: Any = results.scales if given is None else given
    result = quantized(own.quantization, results.values, scales, results.carrier)
    return QuantizedNorm(result, results.sum, results.y, RowStatistics(*reversed(stats)))
