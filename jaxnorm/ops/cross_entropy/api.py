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
    check_order,
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

    All of it is computed in float32 (in float64 of logits of float64), of differences to the largest z, with no float32
    copy of the logits. A gradient reads them once more and writes theirs, in the logits' own buffer where the program
    computed these and they are dead; between the two ways 12 bytes a row are kept, beside logits and labels.

    Args:
      logits: floating-point array of rank 1 or more.
      labels: array of integers of logits' shape without `axis`: the numbers of columns. A label that names none, as a
        negative one, has the loss NaN. (Optax counts a negative label from the end.)
      axis: the axis of the classes, or several, in whose order labels are flat indices. Kernels serve all but a single
        one that is not the last.
      where: None, or an array of booleans that broadcasts to logits' shape: which classes there are for each row. Sum
        and mean are over these, and a label may be another. A row without any has loss 0. Or to labels': which rows.
      label_smoothing: share from 0 to 1 of the label's probability that all classes divide among them.
      z_loss: non-negative factor of the square of lse, which keeps it near 0 (PaLM has 1e-4).
      logit_scale: finite Python number that multiplies logits first, as 1 / temperature. Or a scalar array, with a
        gradient: the product is made before the kernel, in float32; of logits of half types XLA's code runs.
      soft_cap: None, or a positive number that no |z| exceeds, as Gemma 2's 30.
      ignore_index: None, or a label whose rows have the loss 0 and no gradient, whatever their logits are, as -100 of
        the model hubs.
      axis_name: None, or the axes of a surrounding `jax.shard_map` or `jax.vmap` over which the classes are split
        evenly, a name or a tuple; labels are numbers of the whole. Of several axes of classes the first is split. Each
        device reads its part of the logits by the kernel, and 16 or 20 bytes a row are exchanged.
      implementation: "native" is the CPU or CUDA kernel, "xla" XLA's code for the formula, None what
        `jaxnorm.implementation` says, or else the kernel where it exists.

    Returns:
      The losses, an array of labels' shape of float32, or float64 of logits of float64. Their mean or sum is the
      caller's. A row with NaN or +inf, or whose classes all have -inf, has the loss NaN.

    Raises:
      ValueError: labels or where have the wrong shape, or where fits both readings; an axis, a number or a name in
        axis_name is out of range, not finite, unbound or repeated, or implementation is unknown.
      TypeError: logits are no floats of 16, 32 or 64 bits, labels no integers, where not boolean, or an option traced.
      RuntimeError: implementation="native" and there is no kernel for this call; the message says why.

    Source: https://optax.readthedocs.io/en/latest/api/losses.html; smoothing: Szegedy et al., 2015,
    https://arxiv.org/abs/1512.00567; z_loss: Chowdhery et al., PaLM, 2022, https://arxiv.org/abs/2204.02311.
    """
    options = LossOptions(label_smoothing, z_loss, logit_scale, soft_cap, ignore_index)
    return _cross_entropy(logits, labels, axis, where, options, axis_name, implementation)


def _cross_entropy(
    logits: Any, labels: Any, axis: Any, where: Any, options: LossOptions, axis_name: Any, implementation: Any
) -> jax.Array:
    name = "softmax_cross_entropy_with_integer_labels"
    choice = checks.check_implementation(name, implementation)
    check_order(name, labels, logits=logits)
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
