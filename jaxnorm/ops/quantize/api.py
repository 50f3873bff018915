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

        >>> w = quantize(jnp.ones((16, 8)), Quantization("int4"))

    with the `largest` of quantization's dtype, in float32 throughout, as `rms_norm_quantized` does; it is a formula in
    jax.numpy on every platform. A derivative is an error; with straight_through=True it is that of x, by convention.

    Args:
      x: floating-point array of at most 32 bits, of rank 1 or more.
      quantization: dtype, what shares a scale, and how a scale is made; with granularity "tensor" all of x shares one.
      axis: the axes that share a scale with granularity "token"; "group" groups the last.

    Returns:
      A `Quantized`: values of x's shape; scales of x's shape with `axis` of length 1, or its last axis as long as there
      are groups, or a scalar; a carrier.

    Raises:
      ValueError, TypeError: axis or groups do not fit, a derivative is taken, x is float64; or as `rms_norm`.

    Source: FP8 formats, https://arxiv.org/abs/2209.05433; integers, https://arxiv.org/abs/1712.05877.
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
