"""The public function of the rows that logits are made of."""

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm.native import compat
from jaxnorm.ops import checks
from jaxnorm.ops.cross_entropy import linear
from jaxnorm.ops.cross_entropy.api import LossOptions
from jaxnorm.ops.cross_entropy.checks import Labels, check_kernel, check_labels, check_order
from jaxnorm.ops.cross_entropy.linear import LinearCrossEntropy
from jaxnorm.ops.misuse import explained
from jaxnorm.ops.options import Implementation
from jaxnorm.sharding import dims

Reduction = Literal["mean", "sum", "none"]


@explained
def linear_cross_entropy(
    x: Any,
    kernel: Any,
    labels: Any,
    *,
    reduction: Reduction = "mean",
    rows_per_chunk: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
    soft_cap: float | None = None,
    ignore_index: int | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """The cross-entropy of the logits x @ kernel, of which no more than a chunk of rows is ever there.

        losses = softmax_cross_entropy_with_integer_labels(x @ kernel, labels, ...)

    and their mean over the rows that are not ignored, or their sum. The logits have x's dtype, in which kernel is read,
    and are added up in float32. With a gradient, one pass over the chunks makes three products of each: its logits,
    and of their gradients, which take the logits' buffer, those of x and of kernel, the latter added up in float32.
    Nothing is computed twice, and only the gradients are kept. Of the losses themselves (reduction="none") the gradient
    computes the logits again. Higher derivatives keep the logits of all chunks.

    Over a mesh each device takes chunks of the rows that it has, with all of kernel, and the gradient of kernel is
    summed over devices once.

    Args:
      x: floating-point array (..., D), the last hidden states.
      kernel: floating-point array (D, classes); an embedding table is its transpose.
      labels: array of integers of x's shape without the last axis, as for `softmax_cross_entropy_with_integer_labels`.
      reduction: "mean" over the rows that are not ignored, 0 if all are; "sum"; or "none", an array of labels' shape.
      rows_per_chunk: None, or how many rows a chunk has about, on each device. None takes as many as have logits of
        512 MiB, and 256 at least.
      label_smoothing, z_loss, logit_scale, soft_cap, ignore_index, implementation: as for
        `softmax_cross_entropy_with_integer_labels`. The matrix products are XLA's.

    Returns:
      A number of float32, or float64 of x of float64; with reduction="none" an array.

    Raises:
      ValueError: kernel or labels have the wrong shape, rows_per_chunk is not positive, or reduction is unknown;
        otherwise as `softmax_cross_entropy_with_integer_labels` does.
      TypeError, RuntimeError: as `softmax_cross_entropy_with_integer_labels` does.

    Source: Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models, 2024,
    https://arxiv.org/abs/2411.09009; by chunks of rows: Liger Kernel, 2024, https://arxiv.org/abs/2410.10989.
    """
    options = LossOptions(label_smoothing, z_loss, logit_scale, soft_cap, ignore_index)
    return _linear_cross_entropy(x, kernel, labels, reduction, rows_per_chunk, options, implementation)


def _linear_cross_entropy(
    x: Any, kernel: Any, labels: Any, reduction: Any, rows_per_chunk: Any, options: LossOptions, implementation: Any
) -> jax.Array:
    name = "linear_cross_entropy"
    choice = checks.check_implementation(name, implementation)
    check_order(name, labels, x=x, kernel=kernel)
    x = checks.check_x(name, x)
    kernel = check_kernel(name, kernel, x)
    options = options.checked(name)
    labels = check_labels(name, labels, x, (-1,), options.ignore_index, "x")
    if reduction not in get_args(Reduction):
        raise ValueError(f"{name}: unknown reduction {reduction!r}; expected 'mean', 'sum' or 'none'.")
    spec = LinearCrossEntropy(
        scale=options.logit_scale,
        soft_cap=options.soft_cap,
        label_smoothing=options.label_smoothing,
        z_loss=options.z_loss,
        rows_per_chunk=_rows_per_chunk(name, rows_per_chunk, kernel.shape[1], x.dtype),
        implementation=choice.implementation,
        compute_dtype=dims.wide_dtype([x.dtype]),
        out_dtype=x.dtype,
        **choice.asks(name),
    )
    return _reduced(spec, x, kernel, labels, reduction)


def _reduced(spec: LinearCrossEntropy, x: jax.Array, kernel: jax.Array, labels: Labels, reduction: str) -> jax.Array:
    here, is_wrong = labels.among(kernel.shape[1])
    weights = jnp.ones_like(here, spec.compute_dtype)
    if labels.ignored is not None:
        ignored = labels.ignored
        weights = jnp.where(ignored, 0, weights)
        # Or the sums for the gradient of kernel would have 0 times what is there, which may be no number.
        x, ignored = compat.match_varying_axes(x, ignored)
        x = jnp.where(ignored[..., None], 0, x)
    divisor = jnp.maximum(1, jnp.sum(weights)) if reduction == "mean" else 1
    # So a gradient is rounded once. Of float16 the logits' gradients would be too small for their dtype.
    divides_last = x.dtype == np.float16
    weights = weights if divides_last else weights / divisor
    here, weights = (
        checks.sharded_along("linear_cross_entropy", "labels", array[..., None], "x", x, dims.per_row(x.ndim, (-1,)))
        for array in (here, weights)
    )
    wrong = jnp.where(is_wrong, jnp.nan, 0).astype(spec.compute_dtype)
    if reduction == "none":
        losses = linear.each(spec, x, kernel, here)
        return jnp.where(weights == 0, 0, losses)[..., 0] + wrong
    total = linear.total(spec, x, kernel, here, weights)
    return (total / divisor if divides_last else total) + jnp.sum(wrong)


def _rows_per_chunk(function: str, value: object, classes: Any, dtype: np.dtype[Any]) -> int:
    if value is None:
        return linear.default_rows_per_chunk(classes, dtype)
    rows = checks.check_int(function, "rows_per_chunk", value, "None chooses it")
    if rows < 1:
        raise ValueError(f"{function}: rows_per_chunk must be positive, got {rows}; None chooses it.")
    return rows
