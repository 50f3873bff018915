"""The public functions `softmax` and `log_softmax`."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jaxnorm.ops import checks
from jaxnorm.ops.logits import check_logit_scale
from jaxnorm.ops.misuse import explained
from jaxnorm.ops.options import Implementation
from jaxnorm.ops.softmax.checks import Causal, check_mask
from jaxnorm.ops.softmax.formula import Operands, Softmax, times
from jaxnorm.ops.softmax.op import LOG_SOFTMAX, SOFTMAX
from jaxnorm.primitive.family import Family
from jaxnorm.primitive.op import OnlyY
from jaxnorm.sharding import dims


@explained
def softmax(
    x: Any,
    *,
    axis: int | Sequence[int] = -1,
    where: Any = None,
    logit_scale: Any = 1.0,
    causal: bool = False,
    offset: Any = 0,
    window: int | None = None,
    out_dtype: Any = None,
    axis_name: Any = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Exponentials of x, divided by their sum over `axis`, as `jax.nn.softmax`.

        y = exp(x * logit_scale) / sum(exp(x * logit_scale), axis)

        >>> y = softmax(jnp.ones((2, 4, 16, 24)), logit_scale=64**-0.5, causal=True, offset=jnp.array([3, 8]))

    It computes in float32 (in float64 where x or the result is float64), from differences to the row's largest number,
    and rounds once. It transforms as the formula does. A gradient keeps the rounded y alone.

    Args:
      x: floating-point array of rank 1 or more. What is not named here is said for all functions in `jaxnorm`.
      where: None, or an array of booleans that broadcasts to x's shape: y is 0 where it is false, whatever x is there.
        A row in which nothing is true is 0 everywhere, where `jax.nn.softmax` gives NaN.
      offset: with causal, query t has the keys 0 to t + offset. An int, or an array of integers, traced or not, by
        x's leading axes, as (batch,) for x (batch, heads, queries, keys). A query without any key is a row of zeros.

    Returns:
      An array of x's shape. Rows with NaN or +inf, and those whose counted elements are all -inf, are NaN.

    Raises:
      ValueError, TypeError, RuntimeError: where or offset does not fit x, or goes without causal; or as `rms_norm`.

    Source: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018, https://arxiv.org/abs/1805.02867.
    """
    given = _Given(axis, where, logit_scale, Causal(causal, offset, window), out_dtype, axis_name, implementation)
    return _normalised("softmax", SOFTMAX, x, given)


@explained
def log_softmax(
    x: Any,
    *,
    axis: int | Sequence[int] = -1,
    where: Any = None,
    logit_scale: Any = 1.0,
    causal: bool = False,
    offset: Any = 0,
    window: int | None = None,
    out_dtype: Any = None,
    axis_name: Any = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """The logarithm of `softmax`, as `jax.nn.log_softmax`.

        y = x * logit_scale - log(sum(exp(x * logit_scale), axis))

        >>> y = log_softmax(jnp.ones((2, 8)), where=jnp.arange(8) < 5)

    It computes, rounds and transforms as `softmax` does. A gradient keeps x and two float32 a row.

    Args:
      x: floating-point array of rank 1 or more. What is not named here is as for `softmax`.
      where: None, or an array of booleans that broadcasts to x's shape: y is -inf, without gradient, where it is false.

    Returns:
      An array of x's shape.

    Raises:
      ValueError, TypeError, RuntimeError: as `softmax` does.

    Source: that of `softmax`.
    """
    given = _Given(axis, where, logit_scale, Causal(causal, offset, window), out_dtype, axis_name, implementation)
    return _normalised("log_softmax", LOG_SOFTMAX, x, given)


class _Given(NamedTuple):
    axis: int | Sequence[int]
    where: Any
    logit_scale: Any
    causal: Causal
    out_dtype: Any
    axis_name: Any
    implementation: Any


def _normalised(name: str, family: Family[Softmax, Operands, OnlyY], x: Any, given: _Given) -> jax.Array:
    choice = checks.check_implementation(name, given.implementation)
    x = checks.check_x(name, x)
    axes = checks.check_axes(name, given.axis, x.ndim)
    out_dtype = checks.check_out_dtype(name, given.out_dtype, x.dtype)
    scale: Any = check_logit_scale(name, given.logit_scale)
    wide = dims.wide_dtype([x.dtype, out_dtype])
    is_traced = isinstance(scale, jax.Array)
    mask = check_mask(name, given.where, given.causal, x, axes)
    spec = Softmax(
        axes=axes,
        scale=1.0 if is_traced else scale,
        is_widened=is_traced and x.dtype != wide,
        with_top=family is LOG_SOFTMAX,
        window=mask.window,
        compute_dtype=wide,
        out_dtype=out_dtype,
        **choice.asks(name),
        shards=checks.check_axis_name(name, given.axis_name),
    )
    operands = Operands(x, mask.where, mask.lengths)
    operands = times(spec, operands, scale) if is_traced else operands
    return family(spec, operands, choice.implementation).y
