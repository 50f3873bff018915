"""The public functions, of logits and of the rows that logits are made of."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, get_args, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm.native import compat
from jaxnorm.ops import checks
from jaxnorm.ops.cross_entropy import checks as own_checks, linear
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
    """What a loss is made of."""

    label_smoothing: float
    z_loss: float
    logit_scale: float | jax.Array
    soft_cap: float  # 0: there is none
    ignore_index: int | None

    @classmethod
    def of(
        cls, function: str, label_smoothing: object, z_loss: object, scale: object, soft_cap: object, ignored: object
    ) -> "LossOptions":
        return cls(
            own_checks.check_share(function, "label_smoothing", label_smoothing),
            checks.check_not_negative(function, "z_loss", z_loss, "0 is without it"),
            check_logit_scale(function, scale),
            own_checks.check_soft_cap(function, soft_cap),
            None if ignored is None else checks.check_int(function, "ignore_index", ignored, "None ignores no label"),
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
    name = "softmax_cross_entropy_with_integer_labels"
    choice = checks.check_implementation(name, implementation)
    checks.check_order(name, "labels", labels, logits=logits)
    logits = checks.check_x(name, logits, "logits")
    options = LossOptions.of(name, label_smoothing, z_loss, logit_scale, soft_cap, ignore_index)
    axes = own_checks.check_axes(name, axis, logits)
    labels = own_checks.check_labels(name, labels, logits, axes, options.ignore_index)
    where = own_checks.check_where(name, where, logits, axes)
    at = axes[0]
    if len(axes) > 1:
        at, shape = -1, logits.shape
        logits, where = (a if a is None else own_checks.in_one_axis(a, axes, shape) for a in (logits, where))
    labels = jax.tree.map(lambda array: jnp.expand_dims(array, at), labels)
    where = where if where is None else fitted(name, where, logits, (at,))
    shards = checks.check_axis_name(name, axis_name)
    losses = _losses_of(name, logits, labels, where, at, shards, options, choice)
    return lax.squeeze(losses, (logits.ndim + at,))


def _losses_of(
    function: str,
    logits: jax.Array,
    labels: own_checks.Labels,
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
    spec = CrossEntropy(
        axes=(axis,),
        scale=1.0 if isinstance(scale, jax.Array) else scale,
        soft_cap=options.soft_cap,
        with_total=options.label_smoothing > 0,
        with_top=True,
        is_part=shards is not None,
        is_widened=isinstance(scale, jax.Array) and logits.dtype != wide,
        compute_dtype=wide,
        out_dtype=wide,
        **choice.asks(function),
    )
    operands = Operands(logits, here, where)
    operands = times(spec, operands, scale, shards) if isinstance(scale, jax.Array) else operands
    results = CROSS_ENTROPY(spec, operands, choice.implementation)
    counts: int | jax.Array = classes
    if where is not None and spec.with_total:
        counts = count_of(spec, operands)
        counts = jnp.maximum(1, counts if shards is None else shards.sum(counts))
    if shards is not None:
        results = exchanged(spec, shards, operands, results)
    left_out = _either(ignored, None if where is None else jnp.equal(results.top, -jnp.inf))
    losses = loss(spec, without(left_out, results), counts, options.label_smoothing, options.z_loss)
    return losses + nan_where(wrong if left_out is None else wrong & ~left_out, 0).astype(losses.dtype)


def _either(a: jax.Array | None, b: jax.Array | None) -> jax.Array | None:
    return a if b is None else b if a is None else a | b


Reduction = Literal["mean", "sum", "none"]


class _Options(TypedDict, total=False):
    """For type checkers: the keywords that do not decide what is returned."""

    bias: Any
    where: Any
    row_weights: Any
    reduction: Reduction
    rows_per_chunk: int | None
    label_smoothing: float
    z_loss: float
    logit_scale: Any
    soft_cap: float | None
    ignore_index: int | None
    implementation: Implementation | None


@overload
def linear_cross_entropy(
    x: Any, kernel: Any, labels: Any, *, return_logsumexp: Literal[False] = False, **_: Unpack[_Options]
) -> jax.Array: ...


@overload
def linear_cross_entropy(
    x: Any, kernel: Any, labels: Any, *, return_logsumexp: Literal[True], **_: Unpack[_Options]
) -> tuple[jax.Array, jax.Array]: ...


@explained
def linear_cross_entropy(
    x: Any,
    kernel: Any,
    labels: Any,
    *,
    bias: Any = None,
    where: Any = None,
    row_weights: Any = None,
    reduction: Reduction = "mean",
    rows_per_chunk: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_scale: Any = 1.0,
    soft_cap: float | None = None,
    ignore_index: int | None = None,
    return_logsumexp: bool = False,
    implementation: Implementation | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """The cross-entropy of the logits x @ kernel + bias, of which no more than a chunk of rows is ever there.

        losses = softmax_cross_entropy_with_integer_labels(x @ kernel + bias, labels, ...)

        >>> loss = linear_cross_entropy(jnp.ones((4, 16), "bfloat16"), jnp.ones((16, 100)), jnp.arange(4))

    The logits have x's dtype, are added up in float32, and rounded once, with the bias. With a gradient, one pass over
    the chunks makes three products of each, which XLA makes, and keeps the gradients alone.

    Args:
      x: floating-point array (..., D), the last hidden states.
      kernel: floating-point array (D, classes); an embedding table is its transpose.
      labels: integers of x's shape without the last axis. What is not named here is as for the losses above.
      bias: None, or a floating-point array (classes,).
      row_weights: None, or a floating-point array of labels' shape. A row of weight 0 is as an ignored one.
      reduction: "mean", sum(row_weights * losses) / sum(row_weights) over rows that count; "sum"; or "none", no sum.

    Returns:
      Losses of float32, or float64 of x of float64. With return_logsumexp a pair of it and an array of labels' shape.

    Raises:
      ValueError, TypeError, RuntimeError: arrays do not fit, or reduction is unknown; or as the losses above.

    Source: Cut Cross-Entropy, https://arxiv.org/abs/2411.09009; Liger Kernel, https://arxiv.org/abs/2410.10989.
    """
    name = "linear_cross_entropy"
    with_log = checks.check_flag(name, "return_logsumexp", return_logsumexp)
    choice = checks.check_implementation(name, implementation)
    checks.check_order(name, "labels", labels, x=x, kernel=kernel)
    x = checks.check_x(name, x)
    kernel = own_checks.check_kernel(name, kernel, x)
    options = LossOptions.of(name, label_smoothing, z_loss, logit_scale, soft_cap, ignore_index)
    labels = own_checks.check_labels(name, labels, x, (-1,), options.ignore_index, "x")
    bias = own_checks.check_bias(name, bias, kernel)
    where = own_checks.check_where(name, where, jax.ShapeDtypeStruct((*x.shape[:-1], kernel.shape[1]), x.dtype), (-1,))
    weights = own_checks.check_row_weights(name, row_weights, x, kernel)
    if reduction not in get_args(Reduction):
        raise ValueError(f"{name}: unknown reduction {reduction!r}; expected 'mean', 'sum' or 'none'.")
    scale = options.logit_scale
    spec = linear.LinearCrossEntropy(
        scale=1.0 if isinstance(scale, jax.Array) else scale,
        soft_cap=options.soft_cap,
        label_smoothing=options.label_smoothing,
        z_loss=options.z_loss,
        rows_per_chunk=_rows_per_chunk(name, rows_per_chunk, x, kernel),
        implementation=choice.implementation,
        compute_dtype=dims.wide_dtype([x.dtype]),
        out_dtype=x.dtype,
        **choice.asks(name),
    )
    bias, weights, factor = (
        a.astype(spec.compute_dtype) if isinstance(a, jax.Array) else None for a in (bias, weights, scale)
    )
    rows = _Rows.of(name, spec, x, labels, kernel.shape[1], weights, where)
    if rows.where is not None:
        kernel, bias = linear.only_what_is_read(name, kernel, bias, rows.where, rows.labels)
    operands = linear.Operands(rows.x, kernel, rows.labels, rows.weights, bias, rows.where, factor)
    return _results(spec, rows, operands, reduction, with_log=with_log)


class _Rows(NamedTuple):
    """The rows of a call, over an Explicit mesh all split as x's are; labels and weights have x's rank.

    Rows that do not count, which are ignored, have weight 0 or no class, are zeros of weight 0 and the label IGNORED.
    """

    x: jax.Array
    labels: jax.Array  # as kernels take them
    weights: jax.Array
    where: jax.Array | None  # of classes
    is_wrong: jax.Array
    total: jax.Array  # of the weights

    @classmethod
    def of(
        cls,
        function: str,
        spec: linear.LinearCrossEntropy,
        x: jax.Array,
        labels: own_checks.Labels,
        classes: int,
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
        if where is not None:
            where = alike("where", where if any(n != 1 for n in where.shape[:-1]) else dims.unsharded(where, -1))
            is_out, has_none = broadcast.alike(x, is_out, ~jnp.any(where, axis=-1, keepdims=True))
            is_out, where = is_out | has_none, _of_classes(x, where, classes)
        weights, is_wrong = jnp.where(is_out, 0, weights), is_wrong & ~is_out
        total = jnp.sum(weights)
        # Or the sums for the gradient of kernel would have 0 times what is there, which may be no number.
        x, is_out = compat.match_varying_axes(x, is_out)
        x, weights = (jnp.where(is_out, 0, array) for array in (x, weights))
        return cls(x, jnp.where(is_out, IGNORED, here), weights, where, is_wrong, total)


def _of_classes(x: jax.Array, where: jax.Array, classes: int) -> jax.Array | None:
    """A mask of x's rank as `Operands` have it; None of one that says which rows count."""
    if where.shape[-1] != classes:
        return None
    if all(n == 1 for n in where.shape[:-1]):
        return jnp.squeeze(where, tuple(range(where.ndim - 1)))
    return dims.broadcast(where, (*x.shape[:-1], classes), jax.typeof(x), dims.per_row(x.ndim, (-1,)))


def _wrong(spec: linear.LinearCrossEntropy, rows: _Rows) -> jax.Array:
    """What is added to the loss of a row whose label is no class."""
    return nan_where(rows.is_wrong, 0).astype(spec.compute_dtype)


def _results(
    spec: linear.LinearCrossEntropy, rows: _Rows, operands: linear.Operands, reduction: Reduction, *, with_log: bool
) -> jax.Array | tuple[jax.Array, jax.Array]:
    if not with_log and reduction != "none":
        return _reduced(spec, rows, operands, reduction)
    of_rows = linear.each(spec, operands)
    single = (of_rows.losses + _wrong(spec, rows))[..., 0]
    losses = single if reduction == "none" else _reduced(spec, rows, operands, reduction)
    return (losses, of_rows.log_sum_exp[..., 0]) if with_log else losses


def _reduced(spec: linear.LinearCrossEntropy, rows: _Rows, operands: linear.Operands, reduction: str) -> jax.Array:
    weights, divisor = operands.weights, jnp.ones((), spec.compute_dtype)
    if reduction == "mean":
        is_nothing = rows.total == 0
        weights, divisor = jnp.where(is_nothing, 0, weights), jnp.where(is_nothing, 1, rows.total)
    # So a gradient is rounded once. Of float16 the logits' gradients would be too small for their dtype.
    divides_last = operands.x.dtype == np.float16
    weights = weights if divides_last else weights / divisor
    total = linear.total(spec, operands._replace(weights=weights))
    return (total / divisor if divides_last else total) + jnp.sum(_wrong(spec, rows))


def _rows_per_chunk(function: str, value: object, x: jax.Array, kernel: jax.Array) -> int:
    if value is None:
        return linear.default_rows_per_chunk(x, kernel)
    return checks.check_int(function, "rows_per_chunk", value, "None chooses it", positive=True)
