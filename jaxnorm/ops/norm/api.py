"""The public functions without a gate and without quantisation, of x alone and of its sum with a residual."""

from collections.abc import Sequence
from typing import Any

import jax

from jaxnorm.ops.misuse import explained
from jaxnorm.ops.norm.checks import check_norm
from jaxnorm.ops.norm.formula import Kind
from jaxnorm.ops.norm.op import NORM
from jaxnorm.ops.options import Implementation, NormOptions
from jaxnorm.results import AddedNorm


@explained
def rms_norm(
    x: Any,
    scale: Any = None,
    *,
    bias: Any = None,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    axis: int | Sequence[int] = -1,
    multiply_before_cast: bool = True,
    out_dtype: Any = None,
    axis_name: Any = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Divides x by its root mean square over `axis`.

        y = x * rsqrt(mean(x², axis) + epsilon) * (scale + scale_offset) + bias

        >>> y = rms_norm(jnp.ones((2, 8), "bfloat16"), jnp.ones(8), epsilon=1e-5)

    It computes in float32 (in float64 where x, a weight or the result is float64) and rounds once, at the end. It
    transforms and differentiates as the formula does; a gradient has its argument's shape and dtype.

    Args:
      x: floating-point array of rank 1 or more. What is not named here is said for all functions in `jaxnorm`.
      scale: factor with the shape of the normalised axes, in x's order, or with axes before them that broadcast against
        x's: for x of shape (batch, sequence, heads, D) a scale for each head is (heads, D). None is 1.
      bias: summand, as scale; None is 0.

    Returns:
      An array of x's shape, of x's dtype or out_dtype.

    Raises:
      ValueError, TypeError, RuntimeError: a shape or number, a dtype, or "native" without a kernel: see `jaxnorm`.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019, https://arxiv.org/abs/1910.07467.
    """
    options = NormOptions(epsilon, scale_offset, axis, multiply_before_cast, out_dtype, axis_name, implementation)
    return NORM(*check_norm("rms_norm", "rms", options, x, None, scale, bias)).y


@explained
def layer_norm(
    x: Any,
    scale: Any = None,
    bias: Any = None,
    *,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    axis: int | Sequence[int] = -1,
    multiply_before_cast: bool = True,
    out_dtype: Any = None,
    axis_name: Any = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Shifts x to mean 0 and scales it to variance 1 over `axis`.

        y = (x - mean) * rsqrt(mean((x - mean)², axis) + epsilon) * (scale + scale_offset) + bias,  mean = mean(x, axis)

        >>> y = layer_norm(jnp.ones((2, 8), "bfloat16"), jnp.ones(8), jnp.zeros(8))

    The variance is the mean of squared deviations as written, never E[x²] - mean², so that rows far from 0 keep their
    precision. It is computed, rounded and transformed as `rms_norm` says.

    Args:
      x: floating-point array of rank 1 or more. Weights and all other arguments are as for `rms_norm`.
      epsilon: non-negative Python number added to the variance.

    Returns:
      An array of x's shape, of x's dtype or out_dtype.

    Raises:
      ValueError, TypeError, RuntimeError: as `rms_norm` does.

    Source: Ba, Kiros and Hinton, Layer Normalization, 2016, https://arxiv.org/abs/1607.06450.
    """
    options = NormOptions(epsilon, scale_offset, axis, multiply_before_cast, out_dtype, axis_name, implementation)
    return NORM(*check_norm("layer_norm", "layer", options, x, None, scale, bias)).y


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

    as a pre-norm transformer does between its blocks. The bits are those of the two lines, the product rounded to
    float32 and the sum to residual's dtype. In a gradient one native call serves the cotangents of both results.
    Without one, new_residual takes residual's buffer: to donate that, return new_residual before y.

    Args:
      x: floating-point array of rank 1 or more, which is added. What is not named here is as for `rms_norm`.
      residual: the residual stream, of x's shape, perhaps of another dtype, as float32 with an x of bfloat16.

    Returns:
      `AddedNorm`, (y, new_residual): arrays of x's shape, y's last axis padded, new_residual of residual's dtype.

    Raises:
      ValueError, TypeError, RuntimeError: residual, branch_scale or pad_to does not fit; otherwise as `rms_norm` does.

    Source: that of `rms_norm`; before each block: Xiong et al., 2020, https://arxiv.org/abs/2002.04745.
    """
    options = NormOptions(
        epsilon, scale_offset, axis, multiply_before_cast, out_dtype, axis_name, implementation, pad_to
    )
    return _added("add_rms_norm", "rms", options, x, residual, scale, bias, branch_scale)


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

    The kernel has the bits of these two lines and saves a pass over memory, as for `add_rms_norm`.

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
        epsilon, scale_offset, axis, multiply_before_cast, out_dtype, axis_name, implementation, pad_to
    )
    return _added("add_layer_norm", "layer", options, x, residual, scale, bias, branch_scale)


def _added(function: str, kind: Kind, options: NormOptions, *arrays: Any) -> AddedNorm:
    results = NORM(*check_norm(function, kind, options, *arrays, needs_addend=True))
    assert results.sum is not None
    return AddedNorm(results.y, results.sum)
