"""The public functions without a gate, of x alone."""

from collections.abc import Sequence
from typing import Any

import jax

from jaxnorm.ops.misuse import explained
from jaxnorm.ops.norm.checks import check_norm
from jaxnorm.ops.norm.formula import Operands
from jaxnorm.ops.norm.op import NORM
from jaxnorm.ops.options import Implementation, NormOptions


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

    All of it is computed in float32 (in float64 where x, a weight or the result is float64) and rounded once, at the
    end. It may be transformed and differentiated as the formula may be; a gradient has its argument's shape and dtype.

    Over trailing axes, scale and bias may have more axes before the normalised ones, which broadcast against x's: for x
    of shape (batch, sequence, heads, D) a scale for each head is (heads, D). Kernels serve such weights if the axes
    along which they differ are neighbours in x, and rows have up to 8192 elements. A vmapped weight is one of these.

    Args:
      x: floating-point array of rank 1 or more.
      scale: factor with the shape of the normalised axes, in x's order, or with axes before them; None is 1.
      bias: summand, as scale; None is 0.
      epsilon: non-negative Python number added to the mean square.
      scale_offset: Python number added to scale; 1.0 is Gemma's convention. Ignored without scale.
      axis: the axis, or the set of axes, to normalise over. Kernels serve trailing axes, the formula any.
      multiply_before_cast: False rounds x * rsqrt(...) before scale multiplies it, as Llama and T5 in the model hubs
        do: to the result's dtype, or to x's if that is narrower. Then XLA multiplies what the kernel gives.
      out_dtype: dtype of the result; None is x's.
      axis_name: None, or the axes of a surrounding `jax.shard_map` or `jax.vmap` over which rows are split evenly, a
        name or a tuple. The statistics are of whole rows, by one exchange each way. XLA's code runs.
      implementation: "native" is the CPU or CUDA kernel, "xla" XLA's code for the formula, None what
        `jaxnorm.implementation` says, or else the kernel where it exists. Under vmap over weights alone: the formula.

    Returns:
      An array of x's shape.

    Raises:
      ValueError: an axis is out of range or repeated, the shape or sharding of a weight does not go with x's, a name in
        axis_name is unbound or repeated, epsilon is negative, a number is not finite, or implementation is unknown.
      TypeError: an array or out_dtype is not floating-point of 16, 32 or 64 bits, axis is no int, or an option traced.
      RuntimeError: implementation="native" and there is no kernel for this call; the message says why.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019, https://arxiv.org/abs/1910.07467.
    """
    options = NormOptions(
        epsilon=epsilon,
        scale_offset=scale_offset,
        axis=axis,
        multiply_before_cast=multiply_before_cast,
        out_dtype=out_dtype,
        axis_name=axis_name,
        implementation=implementation,
    )
    return NORM(*check_norm("rms_norm", "rms", options, Operands(x, None, scale, bias))).y


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

    The variance is the mean of squared deviations as written, never E[x²] - mean², so that rows far from 0 keep their
    precision. It is computed, rounded and transformed as `rms_norm` says.

    Args:
      x: floating-point array of rank 1 or more.
      scale: array with the shape of the normalised axes, or with axes before them, or None, as for `rms_norm`.
      bias: as scale.
      epsilon: non-negative Python number added to the variance.
      scale_offset: as for `rms_norm`.
      axis: as for `rms_norm`.
      multiply_before_cast: as for `rms_norm`.
      out_dtype: as for `rms_norm`.
      axis_name: as for `rms_norm`.
      implementation: as for `rms_norm`.

    Returns:
      An array of x's shape.

    Raises:
      ValueError, TypeError, RuntimeError: as `rms_norm` does.

    Source: Ba, Kiros and Hinton, Layer Normalization, 2016, https://arxiv.org/abs/1607.06450.
    """
    options = NormOptions(
        epsilon=epsilon,
        scale_offset=scale_offset,
        axis=axis,
        multiply_before_cast=multiply_before_cast,
        out_dtype=out_dtype,
        axis_name=axis_name,
        implementation=implementation,
    )
    return NORM(*check_norm("layer_norm", "layer", options, Operands(x, None, scale, bias))).y
