"""The public functions `softmax` and `log_softmax`."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jaxnorm.ops import checks
from jaxnorm.ops.logits import check_logit_scale
from jaxnorm.ops.misuse import explained
from jaxnorm.ops.options import Implementation
from jaxnorm.ops.softmax.checks import Causal, check_mask
from jaxnorm.ops.softmax.formula import Operands, Results, Softmax, times
from jaxnorm.ops.softmax.op import LOG_SOFTMAX, SOFTMAX
from jaxnorm.primitive.family import Family
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

    All of it is computed in float32 (in float64 where x or the result is float64), from differences to the row's
    largest number, and rounded once, at the end. It may be transformed and differentiated as the formula may be; for a
    gradient y is kept and nothing else, and one native call reads it: so it is the gradient of y as it was rounded.

    Args:
      x: floating-point array of rank 1 or more.
      axis: the axis, or the set of axes, that is summed over. Kernels serve the last one, the formula any.
      where: None, or an array of booleans that broadcasts to x's shape: y is 0 where it is false, and what x is there
        does not matter. A row in which nothing is true is 0 everywhere, where `jax.nn.softmax` gives NaN.
      logit_scale: finite Python number that multiplies x first, as 1 / sqrt(head_dim) in attention. Or a scalar array,
        with a gradient: the product is made before the kernel, in float32; of an x of half types XLA's code runs.
      causal: for x of shape (..., queries, keys): query t has the keys 0 to t, as `jax.nn.dot_product_attention` with
        is_causal=True. As where=jnp.tril(jnp.ones((queries, keys), bool)), but no such array is made, and kernels read
        no key beyond. It goes with `where` and with axis=-1 only.
      offset: of causal rows: query t has the keys 0 to t + offset. An int, or an array of integers, traced or not, by
        x's leading axes, as (batch,) for x of shape (batch, heads, queries, keys): how many keys there were before the
        first query, as in a cache; at most 2³⁰, as which larger ones count. A query without any key is a row in which
        nothing is true.
      window: of causal rows: None, or how many keys a query has at most, those after t + offset - window. Kernels read
        no others.
      out_dtype: dtype of the result; None is x's.
      axis_name: None, or the axes of a surrounding `jax.shard_map` or `jax.vmap` over which rows are split evenly, a
        name or a tuple: maximum and sum are of whole rows, 8 bytes a row are exchanged. XLA's code runs.
      implementation: "native" is the CPU or CUDA kernel, "xla" XLA's code for the formula, None what
        `jaxnorm.implementation` says, or else the kernel where it exists.

    Returns:
      An array of x's shape. Rows with NaN or +inf, and those whose counted elements are all -inf, are NaN.

    Raises:
      ValueError: an axis is out of range or repeated, where does not broadcast to x's shape, offset has other axes than
        x's leading ones, window is not positive, causal goes with another axis, offset or window goes without causal, a
        name in axis_name is unbound or repeated, logit_scale is not finite, or implementation is unknown.
      TypeError: x or out_dtype is not floating-point of 16, 32 or 64 bits, where not boolean, offset not of integers,
        or another option traced.
      RuntimeError: implementation="native" and there is no kernel for this call; the message says why.

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

    It is computed, rounded and transformed as `softmax` says. For a gradient x and two float32 a row are kept.

    Args:
      x: floating-point array of rank 1 or more.
      where: None, or an array of booleans that broadcasts to x's shape: y is -inf where it is false, everywhere in a
        row in which nothing is true. No gradient comes from there.
      axis: as for `softmax`.
      logit_scale: as for `softmax`.
      causal: as for `softmax`.
      offset: as for `softmax`.
      window: as for `softmax`.
      out_dtype: as for `softmax`.
      axis_name: as for `softmax`.
      implementation: as for `softmax`.

    Returns:
      An array of x's shape.

    Raises:
      ValueError, TypeError, RuntimeError: as `softmax` does.

    Source: as of `softmax`.
    """
    given = _Given(axis, where, logit_scale, Causal(causal, offset, window), out_dtype, axis_name, implementation)
    return _normalised("log_softmax", LOG_SOFTMAX, x, given)


class _Given(NamedTuple):
    """The keywords as a caller gave them."""

    axis: int | Sequence[int]
    where: Any
    logit_scale: Any
    causal: Causal
    out_dtype: Any
    axis_name: Any
    implementation: Any


def _normalised(name: str, family: Family[Softmax, Operands, Results], x: Any, given: _Given) -> jax.Array:
    choice = checks.check_implementation(name, given.implementation)
    x = checks.check_x(name, x)
    axes = checks.check_axes(name, given.axis, x.ndim)
    out_dtype = checks.check_out_dtype(name, given.out_dtype, x)
    scale: Any = check_logit_scale(name, given.logit_scale)
    wide = dims.wide_dtype([x.dtype, out_dtype])
    is_traced = isinstance(scale, jax.Array)
    spec = Softmax(
        axes=axes,
        scale=1.0 if is_traced else scale,
        is_widened=is_traced and x.dtype != wide,
        with_top=family is LOG_SOFTMAX,
        compute_dtype=wide,
        out_dtype=out_dtype,
        **choice.asks(name),
        shards=checks.check_axis_name(name, given.axis_name),
    )
    operands = Operands(x, *check_mask(name, given.where, given.causal, x, axes))
    operands = times(spec, operands, scale) if is_traced else operands
    return family(spec, operands, choice.implementation).y
