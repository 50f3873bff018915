"""The public function that quantises an array."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxnorm.ops import checks as shared_checks
from jaxnorm.ops.misuse import explained
from jaxnorm.ops.quantize import checks, rounding
from jaxnorm.ops.quantize.rounding import Derivative
from jaxnorm.primitive import fallback
from jaxnorm.primitive.described import WITHOUT_OP, Function
from jaxnorm.quantization import LARGEST, LARGEST_OF_WEIGHTS, Quantization, Quantized, quantized

_EVERYWHERE = "it is a formula in jax.numpy on every platform, which XLA fuses"
_NO_DERIVATIVE = (
    "quantize: rounded values have no derivative, and one is taken; pass straight_through=True for that of x itself, "
    "or apply jax.lax.stop_gradient to x, not to the result."
)


class Operands(NamedTuple):
    x: Any


@explained
def quantize(
    x: Any, quantization: Quantization, *, axis: int | Sequence[int] = -1, straight_through: bool = False
) -> Quantized:
    """Quantises weights, or any array, to 8 or 4 bits.

        scales = max|x| / largest       over `axis`, a group or everything, 1 where that is 0; at least 2**-126
        values = x * (1 / scales)       clipped to ±largest, rounded to nearest, ties to even

    with the `largest` of quantization's dtype, in float32 throughout, as `rms_norm_quantized` does with the result of a
    norm. A NaN makes the scale of its row or group NaN, and an infinity makes it infinite, if there is no max_scale:
    what is dequantised is NaN in both cases. It is a formula in jax.numpy on every platform. Weights (outputs, inputs)
    of `quantized_dot` have the summed axis last, so a scale for each output channel is the default.

    By default to take a derivative is an error. With straight_through=True it is that of x, by convention: `dequantize`
    and `quantized_dot` pass the cotangent of what they take for x on to it.

    Args:
      x: floating-point array of at most 32 bits, of rank 1 or more.
      quantization: dtype, what shares a scale, and how a scale is made. With granularity "tensor" the scale is that of
        all of x.
      axis: the axes that share a scale with granularity "token"; "group" groups the last.
      straight_through: whether the result has a derivative, and with it a carrier of x's shape and dtype.

    Returns:
      A `Quantized`: values of x's shape; scales of x's shape with `axis` of length 1, or its last axis as long as there
      are groups, or a scalar; a carrier.

    Raises:
      ValueError: axis is out of range, groups do not divide the last axis, or a derivative is taken without
        straight_through.
      TypeError: x is no floating-point array or of float64, or quantization is no `Quantization`.

    Source: Micikevicius et al., FP8 Formats for Deep Learning, 2022, https://arxiv.org/abs/2209.05433; Jacob et al.,
    Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference, 2017,
    https://arxiv.org/abs/1712.05877.
    """
    if isinstance(x, Quantization):
        raise TypeError(
            "quantize: x is a jaxnorm.Quantization; are x and quantization in each other's place? Pass the array first."
        )
    x = shared_checks.check_x("quantize", x)
    axes = shared_checks.check_axes("quantize", axis, x.ndim)
    checks.check_quantization("quantize", quantization, Quantization, x, axes)
    checks.check_float32("quantize", {"x": x})
    fallback.tell("quantize", Operands(x), "forward", _EVERYWHERE)
    derivative = Derivative(shared_checks.check_flag("quantize", "straight_through", straight_through), _NO_DERIVATIVE)
    over_all = quantization.granularity == "tensor"
    v, _, carrier = rounding.straight_through(derivative, x.astype(jnp.float32), None, x.dtype)
    values, scales = rounding.rounded(quantization, v, tuple(range(-x.ndim, 0)) if over_all else axes)
    return quantized(quantization, values, scales.reshape(()) if over_all else scales, carrier)


WITHOUT_OP.append(
    Function(
        "quantize",
        why_formula=lambda *_: _EVERYWHERE,
        dtypes=tuple(map(np.dtype, (np.float32, jnp.bfloat16, np.float16))),
        out_dtypes=(*LARGEST, *LARGEST_OF_WEIGHTS),
    )
)
