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

        >>> y = float8_linear(jnp.ones((2, 8)), jnp.ones((8, 4)))

    q are float8_e4m3fn and s float32, as `quantize` makes them. Sums are float32, and a result is rounded once. The
    gradient is that of the product of the rounded operands, with dy rounded once for each; jvp rounds no tangent.

    Args:
      x: floating-point array (..., K) of at most 32 bits; or a `Quantized` of float8_e4m3fn with a scale for each row
        or one for all, whose gradient is its carrier's.
      kernel: floating-point array (K, N) of at most 32 bits, as Flax has it.
      recipe: a `Float8Recipe`: what shares a scale, which products are float8, what is kept for the derivative.
      implementation: as of `quantized_dot`, for rounding and products; None chooses for each product.

    Raises:
      ValueError: K differs, kernel is no matrix, bias has another shape, or x has a scale for each group.
      TypeError: an operand is not floating-point or of float64, or recipe is no `Float8Recipe`.
      RuntimeError: implementation="native", and no kernel serves the call.

    Source: Micikevicius et al., FP8 Formats for Deep Learning, 2022, https://arxiv.org/abs/2209.05433.
    """
    recipe = check_recipe(op.NAME, recipe)
    return call.linear(op.NAME, x, kernel, bias, out_dtype, recipe, implementation)
