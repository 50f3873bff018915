"""The public function of logits."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm.ops import checks
from jaxnorm.ops.cross_entropy.checks import (
    Labels,
    check_axes,
    check_ignore_index,
    check_labels,
    check_share,
    check_soft_cap,
    check_where,
    in_one_axis,
)
from jaxnorm.ops.cross_entropy.formula import IGNORED, CrossEntropy, Operands, loss, without
from jaxnorm.ops.cross_entropy.op import CROSS_ENTROPY, count_of, exchanged, labels_of_shard, times
from jaxnorm.ops.logits import check_logit_scale
from jaxnorm.ops.mask import fitted, nan_where
from jaxnorm.ops.misuse import explained
from jaxnorm.ops.options import Choice, Implementation
from jaxnorm.primitive import broadcast
from jaxnorm.sharding import dims
from jaxnorm.sharding.shards import Shards


class LossOptions(NamedTuple):
    """What a loss is made of, as a caller gave it or `checked`."""

    label_smoothing: Any
    z_loss: Any
    logit_scale: Any
    soft_cap: Any
    ignore_index: Any

    def checked(self, function: str) -> "LossOptions":
        return LossOptions(
            check_share(function, "label_smoothing", self.label_smoothing),
            checks.check_not_negative(function, "z_loss", self.z_loss, "0 is without it"),
            check_logit_scale(function, self.logit_scale),
            check_soft_cap(function, self.soft_cap),
            check_ignore_index(function, self.ignore_index),
        )


@explained
def softmax_cross_entropy_with_integer_labels(
    logits: Any,
    labels: Any,
    axis: int | Sequence[int] = -1,
    where: Any = None,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_scale: Any = 1.0,
    soft_cap: float | None = None,
    ignore_index: int | None = None,
    axis_name: Any = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """The negative logarithm of the probability that the softmax of logits gives to each label, as Optax's function.

        z = logits * logit_scale                             or soft_cap * tanh(logits * logit_scale / soft_cap)
        lse = log(sum(exp(z), axis))
        loss = lse - (1 - label_smoothing) * z[label] - label_smoothing * mean(z, axis) + z_loss * lse²

        >>> losses = softmax_cross_entropy_with_integer_labels(jnp.ones((4, 8)), jnp.arange(4), where=jnp.arange(8) < 6)

    All of it is computed in float32 (in float64 of logits of float64), with no float32 copy of the logits. A gradient
    overwrites logits that the program computed, where they are dead; 12 bytes a row are kept for it.

    Args:
      logits: floating-point array of rank 1 or more. What is not named here is said for all functions in `jaxnorm`.
      labels: integers of logits' shape without `axis`: numbers of columns. One that names none has the loss NaN.
      axis: the axis of the classes, or several, in whose order labels are flat indices; the last one, for kernels.
      logit_scale: multiplies logits first. Or a scalar array, with a gradient: for half types by XLA's code.

    Returns:
      An array of labels' shape of float32, or float64 of logits of float64; 0 for a row that does not count.

    Raises:
      ValueError, TypeError, RuntimeError: labels or where does not fit, or where fits both readings; or as `rms_norm`.

    Source: https://optax.readthedocs.io/en/latest/api/losses.html; z_loss: PaLM, https://arxiv.org/abs/2204.02311.
    """
    options = LossOptions(label_smoothing, z_loss, logit_scale, soft_cap, ignore_index)
    return _cross_entropy(logits, labels, axis, where, options, axis_name, implementation)


def _cross_entropy(
    logits: Any, labels: Any, axis: Any, where: Any, options: LossOptions, axis_name: Any, implementation: Any
) -> jax.Array:
    name = "softmax_cross_entropy_with_integer_labels"
    choice = checks.check_implementation(name, implementation)
    checks.check_order(name, "labels", labels, logits=logits)
    logits = checks.check_x(name, logits, "logits")
    options = options.checked(name)
    axes = check_axes(name, axis, logits)
    labels = check_labels(name, labels, logits, axes, options.ignore_index)
    where = check_where(name, where, logits, axes)
    at = axes[0]
    if len(axes) > 1:
        at, shape = -1, logits.shape
        logits, where = (a if a is None else in_one_axis(a, axes, shape) for a in (logits, where))
    labels = jax.tree.map(lambda array: jnp.expand_dims(array, at), labels)
    where = where if where is None else fitted(name, where, logits, (at,))
    shards = checks.check_axis_name(name, axis_name)
    losses = losses_of(name, logits, labels, where, at, shards, options, choice)
    return lax.squeeze(losses, (logits.ndim + at,))


def losses_of(
    function: str,
    logits: jax.Array,
    labels: Labels,
    where: jax.Array | None,
    axis: int,
    shards: Shards | None,
    options: LossOptions,
    choice: Choice,
) -> jax.Array:
    """The losses of checked arguments, with logits' rank; labels have that rank too."""
    cols = logits.shape[axis]
    classes = cols if shards is None else cols * jax.lax.axis_size(shards.names)
    here, wrong = labels.among(classes)
    here = here if shards is None else labels_of_shard(shards, here, cols)
    here = checks.sharded_along(function, "labels", here, "logits", logits, dims.per_row(logits.ndim, (axis,)))
    wide = dims.wide_dtype([logits.dtype])
    ignored = labels.ignored
    if where is not None and where.shape[axis] != cols:
        if shards is None:  # of rows, which is no mask of all logits then
            is_row, _ = broadcast.alike(logits, where, here)
            here, wrong, ignored = jnp.where(is_row, here, IGNORED), wrong & is_row, _either(ignored, ~is_row)
            where = None
        else:  # of a device's part of rows
            where, _ = broadcast.alike(logits, where, jnp.arange(cols).reshape(-1, *(1,) * (-1 - axis)))
    scale = options.logit_scale
    is_traced = isinstance(scale, jax.Array)
    spec = CrossEntropy(
        axes=(axis,),
        scale=1.0 if is_traced else scale,
        soft_cap=options.soft_cap,
        with_total=options.label_smoothing > 0,
        with_top=True,
        is_part=shards is not None,
        is_widened=is_traced and logits.dtype != wide,
        compute_dtype=wide,
        out_dtype=wide,
        **choice.asks(function),
    )
    operands = Operands(logits, here, where)
    operands = times(spec, operands, scale, shards) if is_traced else operands
    results = CROSS_ENTROPY(spec, operands, choice.implementation)
    counts: Any = classes
    if where is not None and spec.with_total:
        counts = count_of(spec, operands)
        counts = jnp.maximum(1, counts if shards is None else shards.sum(counts))
    if shards is not None:
        results = exchanged(spec, shards, operands, results)
    top: Any = results.top
    left_out = _either(ignored, None if where is None else top == -jnp.inf)
    losses = loss(spec, without(left_out, results), counts, options.label_smoothing, options.z_loss)
    return losses + nan_where(wrong if left_out is None else wrong & ~left_out, 0).astype(losses.dtype)


def _either(a: jax.Array | None, b: jax.Array | None) -> jax.Array | None:
    return a if b is None else b if a is None else a | b
