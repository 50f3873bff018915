"""The public function of the rows that logits are made of."""

from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm.native import compat
from jaxnorm.ops import checks
from jaxnorm.ops.cross_entropy import chunks, linear
from jaxnorm.ops.cross_entropy.api import LossOptions
from jaxnorm.ops.cross_entropy.checks import Labels, check_labels, check_order
from jaxnorm.ops.cross_entropy.formula import IGNORED
from jaxnorm.ops.cross_entropy.linear import LinearCrossEntropy, Operands
from jaxnorm.ops.cross_entropy.linear_checks import check_bias, check_classes, check_kernel, check_row_weights
from jaxnorm.ops.cross_entropy.product import only_what_is_read
from jaxnorm.ops.misuse import explained
from jaxnorm.ops.options import Implementation
from jaxnorm.primitive import broadcast
from jaxnorm.sharding import dims

Reduction = Literal["mean", "sum", "none"]


@explained
def linear_cross_entropy(
    x: Any,
    kernel: Any,
    labels: Any,
    *,
    bias: Any = None,
    where: Any = None,
    weights: Any = None,
    reduction: Reduction = "mean",
    rows_per_chunk: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_scale: Any = 1.0,
    soft_cap: float | None = None,
    ignore_index: int | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """The cross-entropy of the logits x @ kernel + bias, of which no more than a chunk of rows is ever there.

        losses = softmax_cross_entropy_with_integer_labels(x @ kernel + bias, labels, ...)

    The logits have x's dtype, in which kernel is read. They are added up in float32, and rounded once, with the bias.
    With a gradient, one pass over the chunks makes three products of each: its logits, and of their gradients, which
    take the logits' buffer, those of x and of kernel, the latter added up in float32. Nothing is computed twice, and
    only the gradients are kept. Of the losses themselves (reduction="none") the gradient computes the logits again.
    Higher derivatives keep the logits of all chunks. A bias, or an array as logit_scale, costs a chunk two or three
    arrays of float32 logits more.

    Over a mesh each device takes chunks of the rows that it has, with all of kernel, and the gradient of kernel is
    summed over devices once. With where all labels may be gathered, 4 bytes a row.

    Args:
      x: floating-point array (..., D), the last hidden states.
      kernel: floating-point array (D, classes); an embedding table is its transpose.
      labels: array of integers of x's shape without the last axis, as for `softmax_cross_entropy_with_integer_labels`.
      bias: None, or a floating-point array (classes,).
      where: None, or an array of booleans (classes,) or of the logits' shape, which classes there are; a label may be
        another. What kernel and bias hold for classes of which no row reads anything reaches no result or gradient.
      weights: None, or a floating-point array of labels' shape. A row of weight 0 is as an ignored one: what it holds
        reaches nothing, and the gradient of its weight is 0. That of other weights is of the divisor of a mean too.
      reduction: "mean", sum(weights * losses) / sum(weights) over the rows that are not ignored, 0 where the divisor
        is; "sum", without the divisor; or "none", an array of weights * losses, of labels' shape.
      rows_per_chunk: about how many rows a chunk has, on each device. None: 256 at least, and as many as have 512 MiB
        of logits or, of half of the rows, as many bytes of logits as the kernel's gradient has in float32.
      label_smoothing, z_loss, logit_scale, soft_cap, ignore_index, implementation: as for the losses above; an array
        as logit_scale multiplies the float32 sum of product and bias. The matrix products are XLA's.

    Returns:
      A number of float32, or float64 of x of float64; with reduction="none" an array.

    Raises:
      ValueError: an array has the wrong shape, rows_per_chunk is not positive, or reduction is unknown.
      ValueError, TypeError, RuntimeError: as `softmax_cross_entropy_with_integer_labels` does.

    Source: Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models, 2024, https://arxiv.org/abs/2411.09009;
    by chunks of rows: Liger Kernel, 2024, https://arxiv.org/abs/2410.10989.
    """
    options = LossOptions(label_smoothing, z_loss, logit_scale, soft_cap, ignore_index)
    arrays = {"bias": bias, "where": where, "weights": weights}
    return _linear_cross_entropy(x, kernel, labels, arrays, reduction, rows_per_chunk, options, implementation)


def _linear_cross_entropy(
    x: Any,
    kernel: Any,
    labels: Any,
    arrays: dict[str, Any],
    reduction: Any,
    rows_per_chunk: Any,
    options: LossOptions,
    implementation: Any,
) -> jax.Array:
    name = "linear_cross_entropy"
    choice = checks.check_implementation(name, implementation)
    check_order(name, labels, x=x, kernel=kernel)
    x = checks.check_x(name, x)
    kernel = check_kernel(name, kernel, x)
    options = options.checked(name)
    labels = check_labels(name, labels, x, (-1,), options.ignore_index, "x")
    bias = check_bias(name, arrays["bias"], kernel)
    where = check_classes(name, arrays["where"], x, kernel)
    weights = check_row_weights(name, arrays["weights"], x, kernel)
    if reduction not in get_args(Reduction):
        raise ValueError(f"{name}: unknown reduction {reduction!r}; expected 'mean', 'sum' or 'none'.")
    scale = options.logit_scale
    is_static = not isinstance(scale, jax.Array)
    spec = LinearCrossEntropy(
        scale=scale if is_static else 1.0,
        soft_cap=options.soft_cap,
        label_smoothing=options.label_smoothing,
        z_loss=options.z_loss,
        rows_per_chunk=_rows_per_chunk(name, rows_per_chunk, x, kernel),
        implementation=choice.implementation,
        compute_dtype=dims.wide_dtype([x.dtype]),
        out_dtype=x.dtype,
        **choice.asks(name),
    )
    bias, weights, scale = (
        a if a is None else a.astype(spec.compute_dtype) for a in (bias, weights, None if is_static else scale)
    )
    rows = _Rows.of(name, spec, x, labels, kernel.shape[1], weights, where)
    if rows.where is not None:
        kernel, bias = only_what_is_read(name, kernel, bias, rows.where, rows.labels)
    return _reduced(spec, rows, Operands(rows.x, kernel, rows.labels, rows.weights, bias, rows.where, scale), reduction)


class _Rows(NamedTuple):
    """The rows of a call, over an Explicit mesh all split as x's are; labels and weights have x's rank.

    Rows that are ignored, have weight 0 or no class are zeros with weight 0 and the label IGNORED.
    """

    x: jax.Array
    labels: jax.Array  # as kernels take them
    weights: jax.Array
    where: jax.Array | None
    is_wrong: jax.Array
    total: jax.Array  # of the weights

    @classmethod
    def of(
        cls,
        function: str,
        spec: LinearCrossEntropy,
        x: jax.Array,
        labels: Labels,
        classes: Any,
        weights: jax.Array | None,
        where: jax.Array | None,
    ) -> "_Rows":
        def alike(name: str, array: jax.Array) -> jax.Array:
            return checks.sharded_along(function, name, array, "x", x, dims.per_row(x.ndim, (-1,)))

        here, is_wrong = (alike("labels", array[..., None]) for array in labels.among(classes))
        all_count = labels.ignored is None and weights is None and where is None
        weights = jnp.ones_like(here, spec.compute_dtype) if weights is None else alike("weights", weights[..., None])
        if all_count:
            return cls(x, here, weights, where, is_wrong, jnp.sum(weights))
        is_out = weights == 0
        if labels.ignored is not None:
            is_out |= alike("labels", labels.ignored[..., None])
        weights, is_wrong = jnp.where(is_out, 0, weights), is_wrong & ~is_out
        total = jnp.sum(weights)
        if where is not None:
            where = dims.unsharded(where, -1) if where.ndim == 1 else alike("where", where)
            is_out |= broadcast.with_rank_of(is_out, ~jnp.any(where, axis=-1, keepdims=True))
        # Or the sums for the gradient of kernel would have 0 times what is there, which may be no number.
        x, is_out = compat.match_varying_axes(x, is_out)
        x, weights = (jnp.where(is_out, 0, array) for array in (x, weights))
        return cls(x, jnp.where(is_out, IGNORED, here), weights, where, is_wrong, total)


def _reduced(spec: LinearCrossEntropy, rows: _Rows, operands: Operands, reduction: str) -> jax.Array:
    wrong = jnp.where(rows.is_wrong, jnp.nan, 0).astype(spec.compute_dtype)
    if reduction == "none":
        return (linear.each(spec, operands) + wrong)[..., 0]
    weights, divisor = operands.weights, jnp.ones((), spec.compute_dtype)
    if reduction == "mean":
        is_nothing = rows.total == 0
        weights, divisor = jnp.where(is_nothing, 0, weights), jnp.where(is_nothing, 1, rows.total)
    # So a gradient is rounded once. Of float16 the logits' gradients would be too small for their dtype.
    divides_last = operands.x.dtype == np.float16
    weights = weights if divides_last else weights / divisor
    total = linear.total(spec, operands._replace(weights=weights))
    return (total / divisor if divides_last else total) + jnp.sum(wrong)


def _rows_per_chunk(function: str, value: object, x: jax.Array, kernel: jax.Array) -> int:
    if value is None:
        return chunks.default_rows_per_chunk(x, kernel)
    rows = checks.check_int(function, "rows_per_chunk", value, "None chooses it")
    if rows < 1:
        raise ValueError(f"{function}: rows_per_chunk must be positive, got {rows}; None chooses it.")
    return rows
