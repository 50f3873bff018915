"""The public function of products with quantised operands."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxnorm.ops import checks as shared_checks, products
from jaxnorm.ops.misuse import explained
from jaxnorm.ops.options import Implementation
from jaxnorm.ops.quantized_dot import checks, op
from jaxnorm.ops.quantized_dot.formula import Operands, QuantizedDot
from jaxnorm.primitive import decide
from jaxnorm.quantization import Quantized

NAME = "quantized_dot"


@explained
def quantized_dot(
    x: Any,
    kernel: Quantized,
    *,
    bias: Any = None,
    out_dtype: DTypeLike | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Multiplies x by a quantised kernel, without rounding anything before the end.

        y = x @ kernel                                summed up in float32, products of integers exactly
        y = y * x.scales * kernel.scales + bias       in float32, the lesser scale first, then rounded to out_dtype

        >>> y = quantized_dot(jnp.ones((2, 8)), quantize_kernel(jnp.ones((8, 4)), Quantization("int8")))

    An array x is summed before the scale of the kernel: beyond 1e34 the sum may be infinite where y is not. The
    derivative is a convention: each quantised operand stands for what it was made of, and has it by its carrier.

    Args:
      x: floating-point array (..., K), or a `Quantized` of this shape with a scale for each row or one for all.
      kernel: `Quantized` (K, N), as of `quantize_kernel`, with a scale for each output or one for all.
      out_dtype: dtype of the result. None is x's of an array, and bfloat16 of a `Quantized`.
      bias: None, or an array (N,).
      implementation: "xla" leaves the product to XLA, "native" is an error where cuBLASLt cannot make it; None chooses.

    Raises:
      ValueError: K differs, kernel is no matrix, an operand has scales of groups, or bias has another shape.
      TypeError: kernel is not quantised, or no product takes values of both dtypes.
      RuntimeError: implementation="native", and no kernel serves the call.

    Source: Dettmers et al., LLM.int8(), 2022, https://arxiv.org/abs/2208.07339.
    """
    choice = shared_checks.check_implementation(NAME, implementation).forward  # there is no other kernel
    kernel = checks.check_kernel(NAME, kernel, x)
    x = checks.check_x(NAME, x, kernel)
    checks.check_scales(NAME, "kernel", kernel)
    values, scales, carrier = (x.values, x.scales, x.carrier) if isinstance(x, Quantized) else (x, None, None)
    spec = QuantizedDot(
        out_dtype=checks.check_out_dtype(NAME, out_dtype, x),
        implementation=choice.implementation,
        how=choice.how,
        wants_all_digits=products.wants_all_digits(),
        native_for=choice.native_for(NAME),
    )
    operands = Operands(
        values,
        kernel.values,
        _of_rows(kernel.scales, kernel.values),
        None if scales is None else _of_rows(scales, values),
        checks.check_bias(NAME, bias, kernel.values.shape[0]),
        carrier,
        kernel.carrier,
    )
    decide.check_native(op.ProductCall(spec, jax.tree.map(jax.typeof, operands)))
    return op.product(spec, operands)


def _of_rows(scales: jax.Array, values: jax.Array) -> jax.Array:
    """A scale for each row, also where there is one for all."""
    return jnp.broadcast_to(scales, (*values.shape[:-1], 1))
