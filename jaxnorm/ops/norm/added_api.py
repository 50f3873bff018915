"""The public functions of the sum of x and a residual."""

from collections.abc import Sequence
from typing import Any

from jaxnorm.ops.misuse import explained
from jaxnorm.ops.norm.checks import check_norm
from jaxnorm.ops.norm.formula import Kind, Operands
from jaxnorm.ops.norm.op import NORM
from jaxnorm.ops.options import Implementation, NormOptions
from jaxnorm.results import AddedNorm


@explained
def add_rms_norm(
    x: Any,
    residual: Any,
    scale: Any = None,
    *,
    bias: Any = None,
    branch_scale: Any = None,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    axis: int | Sequence[int] = -1,
    multiply_before_cast: bool = True,
    out_dtype: Any = None,
    pad_to: int | None = None,
    axis_name: Any = None,
    implementation: Implementation | None = None,
) -> AddedNorm:
    """Adds x to a residual stream and divides the sum by its root mean square over `axis`.

        new_residual = x + residual        (branch_scale * x + residual)
        y = rms_norm(new_residual, scale, bias=bias, out_dtype=x.dtype, ...)

        >>> y, stream = add_rms_norm(jnp.ones((2, 8), "bfloat16"), jnp.zeros((2, 8)), jnp.ones(8))

    as a pre-norm transformer does between its blocks, bit for bit, the product rounded to float32 and the sum to
    residual's dtype. In a gradient one native call serves the cotangents of both results. Outside of one new_residual
    takes residual's buffer: to donate that, return new_residual before y.

    Args:
      x: floating-point array of rank 1 or more, which is added. What is not named here is as for `rms_norm`.
      residual: the residual stream, of x's shape; its dtype may be another, as float32 with an x of bfloat16.

    Returns:
      `AddedNorm`, (y, new_residual): arrays of x's shape, y's last axis padded, new_residual of residual's dtype.

    Raises:
      ValueError, TypeError, RuntimeError: residual, branch_scale or pad_to does not fit; otherwise as `rms_norm` does.

    Source: that of `rms_norm`; before each block: Xiong et al., 2020, https://arxiv.org/abs/2002.04745.
    """
    options = NormOptions(
        epsilon=epsilon,
        scale_offset=scale_offset,
        axis=axis,
        multiply_before_cast=multiply_before_cast,
        out_dtype=out_dtype,
        pad_to=pad_to,
        axis_name=axis_name,
        implementation=implementation,
    )
    return _added("add_rms_norm", "rms", options, Operands(x, residual, scale, bias, branch_scale))


@explained
def add_layer_norm(
    x: Any,
    residual: Any,
    scale: Any = None,
    bias: Any = None,
    *,
    branch_scale: Any = None,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    axis: int | Sequence[int] = -1,
    multiply_before_cast: bool = True,
    out_dtype: Any = None,
    pad_to: int | None = None,
    axis_name: Any = None,
    implementation: Implementation | None = None,
) -> AddedNorm:
    """Adds x to a residual stream and shifts and scales the sum to mean 0 and variance 1 over `axis`.

        new_residual = x + residual        (branch_scale * x + residual)
        y = layer_norm(new_residual, scale, bias, out_dtype=x.dtype, ...)

        >>> y, stream = add_layer_norm(jnp.ones((2, 8), "bfloat16"), jnp.zeros((2, 8)), jnp.ones(8), jnp.zeros(8))

    The kernel gives bit for bit what these two lines give and saves a pass over memory, as for `add_rms_norm`.

    Args:
      x: floating-point array of rank 1 or more. What is not named here is as for `add_rms_norm`.
      residual: array of x's shape, as for `add_rms_norm`.
      epsilon: non-negative Python number added to the variance.

    Returns:
      As `add_rms_norm`.

    Raises:
      ValueError, TypeError, RuntimeError: as `add_rms_norm` does.

    Source: that of `layer_norm`; before each block: Xiong et al., 2020, https://arxiv.org/abs/2002.04745.
    """
    options = NormOptions(
        epsilon=epsilon,
        scale_offset=scale_offset,
        axis=axis,
        multiply_before_cast=multiply_before_cast,
        out_dtype=out_dtype,
        pad_to=pad_to,
        axis_name=axis_name,
        implementation=implementation,
    )
    return _added("add_layer_norm", "layer", options, Operands(x, residual, scale, bias, branch_scale))


def _added(function: str, kind: Kind, options: NormOptions, arrays: Operands) -> AddedNorm:
    results = NORM(*check_norm(function, kind, options, arrays, needs_addend=True))
    assert results.sum is not None
    return AddedNorm(results.y, results.sum)
