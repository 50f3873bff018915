"""The public function of linear layers in float8."""

from typing import Any

import jax

from jaxnorm.ops.float8_linear import call, op
from jaxnorm.ops.float8_linear.recipe import Float8Recipe, check_recipe
from jaxnorm.ops.misuse import explained
from jaxnorm.ops.options import Implementation

DEFAULT = Float8Recipe()


@explained
def float8_linear(
    x: Any,
    kernel: Any,
    *,
    bias: Any = None,
    out_dtype: Any = None,
    recipe: Float8Recipe = DEFAULT,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Multiplies x by a kernel in float8, forward and backward, without state.

        y[m,n]  = s_x[m] s_w[n] Σ_k q_x[m,k] q_w[k,n] + bias[n]
        dx[m,k] = s_u[m] Σ_n q_u[m,n] q_w[k,n]              u[m,n] = dy[m,n] s_w[n], rounded by rows
        dw[k,n] = s_v[n] Σ_m q_x[m,k] q_v[m,n]              v[m,n] = dy[m,n] s_x[m], rounded by columns
        db[n]   = Σ_m dy[m,n]

    q are float8_e4m3fn and s float32, made as `quantize` makes them: x by rows, the kernel by columns, each rounded
    once. Sums, scales and bias are float32, and a result is rounded once, at the end. A row or column of zeros counts
    with a scale of 0 in u and v.

    The gradient is exactly that of the product of the rounded operands, with dy rounded to 8 bits once for each
    product. Forward mode rounds no tangent: jvp is the wide product of the rounded operands with the tangents, so that
    jvp and vjp are not each other's transposes. Higher derivatives are those of the jvp. An operand that was rounded
    moves as what it was made of, x through its carrier where it is a `Quantized`.

    Under `jax.default_matmul_precision("highest")` the products of the rounded operands are those of float32. NaN stays
    NaN, and an infinity makes its row of x, or its column of the kernel, NaN.

    Args:
      x: floating-point array (..., K) of at most 32 bits; or a `Quantized` of float8_e4m3fn with a scale for each row
        or one for all, whose gradient is its carrier's.
      kernel: floating-point array (K, N) of at most 32 bits, as Flax has it.
      bias: None, or an array (N,).
      out_dtype: dtype of the result. None is x's of an array, and bfloat16 of a `Quantized`.
      recipe: a `Float8Recipe`: what shares a scale, which products are float8, what is kept for the derivative.
      implementation: "xla" leaves rounding and products to XLA, "native" is an error where cuBLASLt cannot make one, as
        of `quantized_dot`; None chooses for each product.

    Returns:
      An array (..., N).

    Raises:
      ValueError: K differs, kernel is no matrix, bias has another shape, or x has a scale for each group.
      TypeError: an operand is not floating-point or of float64, or recipe is no `Float8Recipe`.
      RuntimeError: implementation="native", and no kernel serves the call.

    Source: Micikevicius et al., FP8 Formats for Deep Learning, 2022, https://arxiv.org/abs/2209.05433.
    """
    recipe = check_recipe(op.NAME, recipe)
    return call.linear(op.NAME, x, kernel, bias, out_dtype, recipe, implementation)
