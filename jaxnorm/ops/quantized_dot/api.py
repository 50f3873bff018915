"""The public function of products with quantised operands."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm.native import compat
from jaxnorm.ops import checks as shared_checks
from jaxnorm.ops.misuse import explained
from jaxnorm.ops.options import Implementation
from jaxnorm.ops.quantized_dot import checks, op
from jaxnorm.ops.quantized_dot.formula import Operands, QuantizedDot
from jaxnorm.primitive import reasons
from jaxnorm.quantization import Quantized

NAME = "quantized_dot"


@explained
def quantized_dot(
    x: Any, weights: Quantized, *, bias: Any = None, out_dtype: Any = None, implementation: Implementation | None = None
) -> jax.Array:
    """Multiplies x by quantised weights, without rounding anything before the end.

        y = x @ weights.T               summed up in float32, products of integers exactly, see below
        y = y * x.scales * weights.scales + bias        in float32, the lesser scale first, then rounded to out_dtype

    With x quantised, as `rms_norm_quantized` gives it, both operands of the product have 8 bits: float8 by float8, or
    int8 by int8. Weights of 4 bits are widened to x's values: int4 to int8, float4 to float8. With x an array the
    weights alone are quantised, and are widened to x's dtype, which has each of their values. XLA makes the product; a
    large one of float8 cuBLASLt makes on a GPU of compute capability 9.0, and scales its rows and columns, as long as
    XLA does not split the program over devices. Its sum has the digits that XLA's has by default; under
    `jax.default_matmul_precision("highest")` XLA makes all.

    An array x is summed before the scale of the weights: beyond 1e34 the sum may be infinite where y is not.

    Sums of integers are exact, and are rounded once to float32. An int32 holds those of 131,071 products of int8, or of
    2,097,151 of int8 and int4, whatever the values; longer ones are made of parts that it holds.

    The derivative is a convention: each quantised operand stands for what it was made of. The gradient of an array x is
    `dy @ weights.dequantize()`; a quantised x or weights have theirs through their carriers, if they were asked for one
    (straight_through=True); that of bias is the true one. Those of values and scales are zero.

    Args:
      x: floating-point array (..., K), or a `Quantized` of this shape with a scale for each row or one for all.
      weights: `Quantized` (N, K) with a scale for each row, or one for all: outputs first, so that K is last in both,
        as 8-bit products want it.
      out_dtype: dtype of the result. None is x's of an array, and bfloat16 of a `Quantized`.
      bias: None, or an array (N,).
      implementation: "xla" leaves the product to XLA, "native" is an error where cuBLASLt cannot make it; None chooses.

    Returns:
      An array (..., N).

    Raises:
      ValueError: K differs, weights are no matrix, an operand has a scale for each group, or bias has another shape.
      TypeError: weights are not quantised, or no product takes values of both dtypes.
      RuntimeError: implementation="native", and no kernel serves the call.

    Source: Dettmers et al., LLM.int8(), 2022, https://arxiv.org/abs/2208.07339; Micikevicius et al., FP8 Formats for
    Deep Learning, 2022, https://arxiv.org/abs/2209.05433.
    """
    return _quantized_dot(x, weights, out_dtype, bias, implementation)


def _quantized_dot(x: Any, weights: Any, out_dtype: Any, bias: Any, implementation: Any) -> jax.Array:
    choice = shared_checks.check_implementation(NAME, implementation).forward  # there is no other kernel
    weights = checks.check_weights(NAME, weights, x)
    x = checks.check_x(NAME, x, weights)
    is_quantized = isinstance(x, Quantized)
    values = x.values if is_quantized else x
    spec = QuantizedDot(
        out_dtype=np.dtype(jnp.bfloat16) if is_quantized and out_dtype is None else _out_dtype(out_dtype, values),
        implementation=choice.implementation,
        how=choice.how,
        wants_all_digits=_wants_all_digits(),
        native_for=choice.native_for(NAME),
    )
    operands = Operands(
        values,
        weights.values,
        _of_rows(weights.scales, weights.values),
        _of_rows(x.scales, values) if is_quantized else None,
        checks.check_bias(NAME, bias, weights.values),
        x.carrier if is_quantized else None,
        weights.carrier,
    )
    if spec.native_for:
        _check_native(spec, operands)
    return op.bind(spec, operands)


def _wants_all_digits() -> bool:
    config: Any = jax.config
    return config.jax_default_matmul_precision in ("highest", "float32")


def _out_dtype(out_dtype: Any, values: jax.Array) -> np.dtype[Any]:
    return shared_checks.check_out_dtype(NAME, out_dtype, values)


def _of_rows(scales: jax.Array, values: jax.Array) -> jax.Array:
    """A scale for each row, also where there is one for all."""
    return jnp.broadcast_to(scales, (*values.shape[:-1], 1))


def _check_native(spec: QuantizedDot, operands: Operands) -> None:
    platform = compat.default_platform()
    reason = op.why_not(spec, jax.tree.map(jax.typeof, operands))
    reason = reason or reasons.why_not(place=reasons.Place(platform, has_native=True))
    if reason or platform != "cuda":
        raise RuntimeError(
            f"{spec.native_for}: implementation='native' cannot serve this call: "
            f"{reason or f'there is a kernel for cuda, none for {platform}'}. With implementation=None XLA serves it."
        )
