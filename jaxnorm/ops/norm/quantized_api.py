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

    with the `largest` of quantization's dtype, in float32, bit for bit as NumPy does it from the same implementation's
    norm. A NaN or infinity makes its row's scale NaN, float8 values NaN, int8 values 0; numbers beyond 1e19 all are 0.

    By default a derivative is an error. With straight_through=True it is by convention that of `rms_norm` or
    `add_rms_norm`, of whose y `dequantize` passes on the cotangent; by smooth_scale and static_scale it is zero.

    Args:
      x: array of float32, bfloat16 or float16 of rank 1 or more.
      scale: as for `rms_norm`; no kernel serves one with axes before the normalised ones.
      bias: as scale.
      quantization: dtype, what shares a scale, and how a scale is made.
      residual: None, or x's addend, as in `add_rms_norm`.
      branch_scale: None, or a factor of x beside it, as in `add_rms_norm`.
      static_scale: the scale with granularity "tensor", a scalar; None with others, which compute it.
      smooth_scale: factor with the shape of the normalised axes that makes v easier to quantise; None is 1.
      epsilon: as for `rms_norm`.
      scale_offset: as for `rms_norm`.
      axis: as for `rms_norm`.
      axis_name: as for `rms_norm`.
      implementation: as for `rms_norm`.
      straight_through: whether the result has a derivative, and with it a carrier of x's shape and dtype.
      with_unquantized: whether y is computed, too, bit for bit `rms_norm`'s; straight_through allows its derivative.

    Returns:
      `QuantizedNorm`, (quantized, residual, y, statistics): a `Quantized` of x's shape, the sum and y or None, and the
      statistics of the rows.

    Raises:
      ValueError, TypeError, RuntimeError: groups do not divide the one normalised axis, static_scale does not go with
        quantization, an array is float64, a derivative is taken without straight_through; otherwise as `rms_norm`.

    Source: that of `rms_norm`; Micikevicius et al., FP8 Formats for Deep Learning, 2022,
    https://arxiv.org/abs/2209.05433; Xiao et al., SmoothQuant, 2022, https://arxiv.org/abs/2211.10438.
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

    and from there as `rms_norm_quantized`, whose dtypes, result, derivative and errors these are.

    Args:
      x: array of float32, bfloat16 or float16 of rank 1 or more.
      epsilon: non-negative Python number added to the variance.
      residual: None, or x's addend, as in `add_layer_norm`.
      branch_scale: None, or a factor of x beside it, as in `add_layer_norm`.
      scale: as for `rms_norm_quantized`.
      bias: as for `rms_norm_quantized`.
      quantization: as for `rms_norm_quantized`.
      static_scale: as for `rms_norm_quantized`.
      smooth_scale: as for `rms_norm_quantized`.
      scale_offset: as for `rms_norm_quantized`.
      axis: as for `rms_norm_quantized`.
      straight_through: as for `rms_norm_quantized`.
      with_unquantized: as for `rms_norm_quantized`.
      axis_name: as for `rms_norm_quantized`.
      implementation: as for `rms_norm_quantized`.

    Returns:
      As `rms_norm_quantized` does.

    Raises:
      ValueError, TypeError, RuntimeError: as `rms_norm_quantized` does.

    Source: Ba, Kiros and Hinton, Layer Normalization, 2016, https://arxiv.org/abs/1607.06450; Micikevicius et al., FP8
    Formats for Deep Learning, 2022, https://arxiv.org/abs/2209.05433; Xiao et al., SmoothQuant, 2022,
    https://arxiv.org/abs/2211.10438.
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
