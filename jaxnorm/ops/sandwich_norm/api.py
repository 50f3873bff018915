"""The public function of the sandwich norm."""

import dataclasses
from typing import Any

from jaxnorm.ops import checks
from jaxnorm.ops.misuse import explained
from jaxnorm.ops.norm import formula as one
from jaxnorm.ops.norm.checks import check_branch_scale, of_every_norm
from jaxnorm.ops.norm.op import NORM
from jaxnorm.ops.options import Implementation
from jaxnorm.ops.sandwich_norm.formula import Operands, SandwichNorm
from jaxnorm.ops.sandwich_norm.op import SANDWICH_NORM
from jaxnorm.results import AddedNorm
from jaxnorm.sharding import dims


@explained
def rms_norm_add_rms_norm(
    x: Any,
    residual: Any,
    post_scale: Any = None,
    scale: Any = None,
    *,
    branch_scale: Any = None,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    multiply_before_cast: bool = True,
    out_dtype: Any = None,
    axis_name: Any = None,
    implementation: Implementation | None = None,
) -> AddedNorm:
    """Normalises a block's output, adds it to a residual stream, and normalises the sum for the next block.

        new_residual = residual + rms_norm(x, post_scale, ...)        (branch_scale * rms_norm(...))
        y = rms_norm(new_residual, scale, out_dtype=x.dtype, ...)

        >>> y, stream = rms_norm_add_rms_norm(jnp.ones((2, 8)), jnp.zeros((2, 8)), jnp.ones(8), jnp.ones(8))

    as Gemma 2 and later do between their blocks. One native call each way has the bits of these two lines, the first
    norm rounded to x's dtype and the sum to residual's. Without a gradient new_residual takes residual's buffer.

    Args:
      x: floating-point array of rank 1 or more, the last axis of which is normalised.
      residual: the residual stream, of x's shape. Where its dtype is another, kernels want one of the two in float32.
      post_scale: factor of the first norm, as scale of `rms_norm`.
      scale: factor of the second norm, likewise. All other arguments are as for `add_rms_norm`, of both norms.

    Returns:
      `AddedNorm`, (y, new_residual): arrays of x's shape, new_residual of residual's dtype.

    Raises:
      ValueError, TypeError, RuntimeError: residual has another shape than x; otherwise as `rms_norm` does.

    Source: CogView, https://arxiv.org/abs/2105.13290; with RMSNorm: Gemma 2, https://arxiv.org/abs/2408.00118.
    """
    name = "rms_norm_add_rms_norm"
    choice = checks.check_implementation(name, implementation)
    x = checks.check_x(name, x)
    residual = checks.check_like_x(name, "residual", residual, x, "added")
    post_scale = checks.check_weight(name, "post_scale", post_scale, x, (-1,))
    operands = Operands(x, residual, post_scale, checks.check_weight(name, "scale", scale, x, (-1,)))
    out_dtype = checks.check_out_dtype(name, out_dtype, x.dtype)
    norm = SandwichNorm(
        **of_every_norm(name, choice, epsilon, scale_offset, out_dtype, operands),
        multiply_before_cast=checks.check_flag(name, "multiply_before_cast", multiply_before_cast),
        residual_dtype=residual.dtype,
        shards=checks.check_axis_name(name, axis_name),
    )
    if branch_scale is not None:
        checked = check_branch_scale(name, branch_scale, x, (-1,))
        return _two_norms(norm, operands, checked, choice.implementation)
    y, new_residual = SANDWICH_NORM(norm, operands, choice.implementation)
    assert new_residual is not None
    return AddedNorm(y, new_residual)


def _two_norms(norm: SandwichNorm, operands: Operands, branch_scale: Any, chosen: Implementation | None) -> AddedNorm:
    """One norm after the other, with a product between them."""
    x, residual, post_scale, scale = operands
    norm = dataclasses.replace(norm, compute_dtype=dims.wide_dtype((norm.compute_dtype, branch_scale.dtype)))
    normed = NORM(norm.norm(x.dtype), one.Operands(x, None, post_scale), chosen).y
    y, total = NORM(norm.second, one.Operands(normed, residual, scale, None, branch_scale), chosen)
    assert total is not None
    return AddedNorm(y, total)
