"""The sum of the losses of x @ kernel + bias, and its gradients, without ever having all logits.

    total = sum(weight * loss(scale * (x @ kernel + bias)))

over the rows of x, each with its weight. Rows go in chunks, each through one product with the kernel; with gradients
through two more, while its logits are there: they become their gradients in place. What is added up over chunks is
float32. It is an op so that over a mesh each device takes chunks of the rows that it has, and the gradient of the
kernel is summed over devices once.

Without a bias or a scale the logits are rounded to x's dtype as the product is made. With one of them it is float32
(float64 of x of float64) until both are there, and rounded once then.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec

from jaxnorm.native import compat
from jaxnorm.ops import checks
from jaxnorm.ops.cross_entropy import formula
from jaxnorm.ops.cross_entropy.formula import IGNORED, CrossEntropy, log_sum_exp, loss, without
from jaxnorm.ops.cross_entropy.op import CROSS_ENTROPY, count_of
from jaxnorm.ops.mask import only
from jaxnorm.ops.products import wide_dot
from jaxnorm.primitive import broadcast
from jaxnorm.primitive.family import Family
from jaxnorm.primitive.op import LIKE_X, SCALAR, STATISTIC, Op, Role, RowSpec, Statistics
from jaxnorm.sharding import dims

ALL = 2**32  # bytes of logits that are one chunk: a twentieth of an 80 GB GPU's memory
# What a derivative is taken by, and the results that are its gradients.
GRADIENTS = {"x": "dx", "kernel": "dkernel", "bias": "dbias", "scale": "dscale", "weights": "losses"}
Pair = tuple[jax.Array, jax.Array]  # a result and its tangent


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearCrossEntropy(RowSpec):
    scale: float
    soft_cap: float
    label_smoothing: float
    z_loss: float
    rows_per_chunk: int
    implementation: Literal["native", "xla"] | None
    wanted: tuple[str, ...] = ()  # of GRADIENTS


class Operands(NamedTuple):
    x: jax.Array
    kernel: jax.Array  # (columns of x, classes)
    labels: jax.Array  # int32, of x's rank, as are weights
    weights: jax.Array  # of the compute dtype, as are bias and scale
    bias: jax.Array | None = None
    where: jax.Array | None = None  # (classes,), or of the logits' shape
    scale: jax.Array | None = None

    @property
    def of_rows(self) -> dict[str, jax.Array]:
        """Those that have rows, by their names."""
        names = ["x", "labels", "weights", *["where"] * (self.where is not None and self.where.ndim > 1)]
        return {name: getattr(self, name) for name in names}


class Results(NamedTuple):
    total: jax.Array
    dx: jax.Array | None = None  # of x's dtype
    dkernel: jax.Array | None = None  # as dbias of the compute dtype: it is still to be summed over devices
    dbias: jax.Array | None = None
    dscale: jax.Array | None = None
    losses: jax.Array | None = None  # of rows, without their weights; 0 where that is 0


def product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jnp.einsum("...d,dv->...v", x, kernel)


@jax.custom_jvp
def wide_product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """The product as it is added up. The products of its derivatives are of x's dtype, as are those of `product`."""
    return jnp.einsum("...d,dv->...v", x, kernel, preferred_element_type=dims.wide_dtype([x.dtype]))


def _wide_product_jvp(primals: Sequence[jax.Array], dots: Sequence[jax.Array | SymbolicZero]) -> Pair:
    (x, kernel), (x_dot, kernel_dot) = primals, dots
    wide = wide_product(x, kernel)
    terms = [] if isinstance(x_dot, SymbolicZero) else [product(x_dot, kernel)]
    terms += [] if isinstance(kernel_dot, SymbolicZero) else [product(x, kernel_dot)]
    return wide, sum(terms[1:], start=terms[0]).astype(wide.dtype) if terms else jnp.zeros_like(wide)


wide_product.defjvp(_wide_product_jvp, symbolic_zeros=True)


def _unscaled(x: jax.Array, kernel: jax.Array, bias: jax.Array | None, scale: jax.Array | None) -> jax.Array:
    """The logits before they are scaled, still to be rounded if there is a bias or a scale."""
    if bias is None and scale is None:
        return product(x, kernel)
    wide = wide_product(x, kernel)
    return wide if bias is None else wide + broadcast.with_rank_of(wide, bias)


def _scaled(logits: jax.Array, scale: jax.Array | None, dtype: np.dtype) -> jax.Array:
    return (logits if scale is None else logits * scale).astype(dtype)


def _are_read(where: jax.Array, labels: jax.Array) -> jax.Array:
    """Of which classes anything is read, for each row: those that count and the label's; labels have an axis of 1."""
    where, numbers = (broadcast.with_rank_of(labels, array) for array in (where, jnp.arange(where.shape[-1])))
    return (labels != IGNORED) & (where | (labels == numbers))


def _losses(
    spec: LinearCrossEntropy, logits: jax.Array, labels: jax.Array, where: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """The losses of rows, and the logarithms of their sums of exponentials."""
    of_logits = CrossEntropy(
        scale=spec.scale,
        soft_cap=spec.soft_cap,
        with_total=spec.label_smoothing > 0,
        with_top=True,
        compute_dtype=spec.compute_dtype,
        out_dtype=spec.compute_dtype,
        **spec.asks(),
    )
    where = where if where is None else broadcast.with_rank_of(logits, where)
    operands = formula.Operands(logits, labels, where)
    results = CROSS_ENTROPY(of_logits, operands, spec.implementation)
    left_out: jax.Array | None = None
    counts: int | jax.Array = logits.shape[-1]
    if where is not None:
        left_out = jnp.equal(results.top, -jnp.inf)
        counts = jnp.maximum(1, count_of(of_logits, operands)) if of_logits.with_total else counts
    results = without(left_out, results)
    losses = loss(of_logits, results, counts, spec.label_smoothing, spec.z_loss)
    return losses, log_sum_exp(of_logits, results)


def _weighted(weights: jax.Array, losses: jax.Array) -> jax.Array:
    """Of rows that do not count whatever is there."""
    return jnp.where(weights == 0, 0, weights * losses)


def _of_chunk(spec: LinearCrossEntropy, operands: Operands) -> Results:
    """The results of these rows, with the gradients of kernel, bias and scale of them alone."""
    x, kernel, labels, weights, bias, where, scale = operands

    def total(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        losses, _ = _losses(spec, logits, labels, where)
        return jnp.sum(_weighted(weights, losses)), losses

    before = _unscaled(x, kernel, bias, scale)
    logits = _scaled(before, scale, x.dtype)
    if {*spec.wanted} <= {"weights"}:
        value, losses = total(logits)
    else:
        value, pullback, losses = jax.vjp(total, logits, has_aux=True)
        (dlogits,) = pullback(jnp.ones_like(value))
    dx = dkernel = dbias = dscale = None
    if "x" in spec.wanted:
        dtype = x.dtype if scale is None else spec.compute_dtype
        dx = _scaled(jnp.einsum("...v,dv->...d", dlogits, kernel, preferred_element_type=dtype), scale, x.dtype)
    if "kernel" in spec.wanted:
        is_sharded = any(jax.typeof(x).sharding.spec)
        rows = tuple(range(x.ndim - 1))
        out_sharding = PartitionSpec(None, None) if is_sharded else None
        dkernel = wide_dot(x, dlogits, (rows, rows), spec.compute_dtype, out_sharding=out_sharding)
    if "bias" in spec.wanted:
        dbias = jnp.sum(dlogits.astype(spec.compute_dtype), axis=tuple(range(x.ndim - 1)))
    if "scale" in spec.wanted:
        is_read = weights != 0 if where is None else (weights != 0) & _are_read(where, labels)
        dscale = jnp.sum(only(is_read, before) * dlogits.astype(spec.compute_dtype))
    of_rows = jnp.where(weights == 0, 0, losses) if "weights" in spec.wanted else None
    return Results(value, dx, dkernel, dbias, dscale, of_rows)


def default_rows_per_chunk(x: jax.Array, kernel: jax.Array) -> int:
    """All rows where their logits take at most `ALL`; else those whose logits take 512 MiB, no fewer than products
    want, or more, for longer rows of x.

    For each chunk the sum of the kernel's gradient is read and written, 2.8 % of a step (docs/benchmarks/models.md).
    Where a chunk's logits take as many bytes as that, the three products compute for so long that it matters less.
    """
    cols, classes = kernel.shape
    if not isinstance(classes, int):
        return 1024
    size, rows = max(1, classes * x.dtype.itemsize), math.prod(x.shape[:-1])
    if isinstance(rows, int) and rows * size <= ALL:
        return max(1, rows)
    as_gradient = 4 * cols * classes // size if isinstance(cols, int) else 0
    most = min(as_gradient, -(-rows // 2)) if isinstance(rows, int) else as_gradient
    return max(256, 2**29 // size, most)


def _chunk_count(rows_per_chunk: int, x: Any) -> int:
    """In how many chunks the rows of x go; those that an Explicit mesh splits, or whose number is not known, in one."""
    rows = math.prod(x.shape[:-1])
    if not isinstance(rows, int) or any(x.sharding.spec):
        return 1
    least = -(-rows // rows_per_chunk) or 1
    return next((n for n in range(least, 2 * least) if rows % n == 0), least)


def _in_chunks(chunks: int, array: jax.Array) -> jax.Array:
    """An array of rows, with an axis of chunks in front, of which each has rows from all parts of a mesh.

    Rows of zeros are added where they do not divide.
    """
    rows = lax.collapse(array, 0, -1)
    rows = jnp.pad(rows, [(0, -rows.shape[0] % chunks), (0, 0)])
    return jnp.moveaxis(rows.reshape(len(rows) // chunks, chunks, rows.shape[-1]), 1, 0)


def _joined(chunks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """An array of rows of this shape from its chunks."""
    rows = lax.collapse(jnp.moveaxis(chunks, 0, 1), 0, 2)
    return rows[: math.prod(shape[:-1])].reshape(shape)


def _prepared(operands: Operands) -> Operands:
    """The operands as products may take them, over a mesh."""
    # A product would let x or the kernel vary over a mesh in x's dtype, in which a gradient of it were summed then.
    arrays, tree = jax.tree.flatten(operands)
    operands = jax.tree.unflatten(tree, compat.match_varying_axes(*arrays))
    x, kernel, _, _, bias, where, _ = operands
    # Of an Explicit mesh: columns and classes are whole on each device.
    bias, where = (a if a is None else dims.unsharded(a, -1) for a in (bias, where))
    kernel = dims.unsharded(dims.unsharded(kernel, 0), 1)
    return operands._replace(x=dims.unsharded(x, -1), kernel=kernel, bias=bias, where=where)


def forward(spec: LinearCrossEntropy, operands: Operands) -> tuple[Results, Statistics]:
    operands = _prepared(operands)
    scale = operands.scale
    results = _of_chunks(spec, operands._replace(kernel=operands.kernel.astype(operands.x.dtype)))
    of_unscaled = results.dkernel, results.dbias
    dkernel, dbias = (a if a is None or scale is None else a * scale for a in of_unscaled)
    return results._replace(dkernel=dkernel, dbias=dbias), ()


def _of_chunks(spec: LinearCrossEntropy, operands: Operands) -> Results:
    x = operands.x
    if (count := _chunk_count(spec.rows_per_chunk, jax.typeof(x))) == 1:
        return _of_chunk(spec, operands)

    def step(sums: Results, chunk: dict[str, jax.Array]) -> tuple[Results, tuple[jax.Array | None, jax.Array | None]]:
        results = _of_chunk(spec, operands._replace(**chunk))
        added = jax.tree.map(jnp.add, sums, results._replace(dx=None, losses=None))
        return added, (results.dx, results.losses)

    # They vary over the axes of a mesh as what is added to them does.
    zeros = {
        name: compat.match_varying_axes(jnp.zeros(shape, spec.compute_dtype), x)[0]
        for name, shape in _sums(spec, operands).items()
    }
    split = {name: _in_chunks(count, array) for name, array in operands.of_rows.items()}
    sums, (dx, losses) = lax.scan(step, Results(**zeros), split)
    return sums._replace(
        dx=None if dx is None else _joined(dx, x.shape),
        losses=None if losses is None else _joined(losses, operands.labels.shape),
    )


def _sums(spec: LinearCrossEntropy, operands: Operands) -> dict[str, tuple[int, ...]]:
    """The results that are sums over rows, with their shapes."""
    shape = operands.kernel.shape
    gradients = {"dkernel": shape, "dbias": shape[1:], "dscale": ()}
    return {"total": ()} | {GRADIENTS[n]: gradients[GRADIENTS[n]] for n in spec.wanted if GRADIENTS[n] in gradients}


def _types(spec: LinearCrossEntropy, operands: Operands) -> Results:
    x, wide = operands.x, spec.compute_dtype
    sums = {n: dims.result_like(x, (None,) * len(shape), shape, wide) for n, shape in _sums(spec, operands).items()}
    losses = dims.result_like(x, dims.per_row(x.ndim, spec.axes), operands.labels.shape, wide)
    return Results(
        **sums,
        dx=dims.like(x, x.dtype) if "x" in spec.wanted else None,
        losses=losses if "weights" in spec.wanted else None,
    )


KERNEL = Role(lambda *_: (None, None), "formula")
BIAS = Role(lambda *_: (None,), "formula")
LINEAR_CROSS_ENTROPY = Family(
    Op(
        name="linear_cross_entropy",
        spec=LinearCrossEntropy,
        operands=Operands,
        results=Results,
        roles={
            "x": LIKE_X,
            "kernel": KERNEL,
            "labels": STATISTIC,
            "weights": STATISTIC,
            "bias": BIAS,
            "where": Role(lambda _, ndim, shape: (None,) if len(shape) == 1 else dims.per_row(ndim, (-1,)), "formula"),
            "scale": SCALAR,
            "total": SCALAR,
            "dx": LIKE_X,
            "dkernel": KERNEL,
            "dbias": BIAS,
            "dscale": SCALAR,
            "losses": STATISTIC,
        },
        types=_types,
        forward=forward,
        statistics=lambda *_: [],
        calls_others=True,
        note=lambda spec, operands: (f"chunks of rows: {_chunk_count(spec.rows_per_chunk, operands.x)}",),
    )
)


class OfRows(NamedTuple):
    losses: jax.Array  # weighted
    log_sum_exp: jax.Array  # of rows that do not count 0


def each(spec: LinearCrossEntropy, operands: Operands) -> OfRows:
    """Of all rows, with x's rank; a derivative makes the logits of each chunk again."""
    operands = _prepared(operands)
    of_rows: Callable[..., OfRows] = jax.checkpoint(functools.partial(_each_of_chunk, spec))
    if (count := _chunk_count(spec.rows_per_chunk, jax.typeof(operands.x))) == 1:
        return of_rows(operands)

    def step(_: None, chunk: dict[str, jax.Array]) -> tuple[None, OfRows]:
        return None, of_rows(operands._replace(**chunk))

    split = {name: _in_chunks(count, array) for name, array in operands.of_rows.items()}
    return OfRows(*(_joined(array, operands.labels.shape) for array in lax.scan(step, None, split)[1]))


def _each_of_chunk(spec: LinearCrossEntropy, operands: Operands) -> OfRows:
    x, kernel, labels, weights, bias, where, scale = operands
    logits = _scaled(_unscaled(x, kernel.astype(x.dtype), bias, scale), scale, x.dtype)
    losses, log_sums = _losses(spec, logits, labels, where)
    return OfRows(_weighted(weights, losses), jnp.where(weights == 0, 0, log_sums))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def total(spec: LinearCrossEntropy, operands: Operands) -> jax.Array:
    """The sum of weighted losses. Where it is differentiated, one pass gives it and the gradients that are wanted."""
    return LINEAR_CROSS_ENTROPY(spec, operands, spec.implementation).total


def _total_jvp(spec: LinearCrossEntropy, primals: tuple[Operands], dots: tuple[Operands]) -> Pair:
    (operands,), (operands_dot,) = primals, dots
    all_dots = {name: getattr(operands_dot, name) for name in GRADIENTS}
    moving = {name: dot for name, dot in all_dots.items() if dot is not None and not isinstance(dot, SymbolicZero)}
    spec = dataclasses.replace(spec, wanted=tuple(moving))
    results = LINEAR_CROSS_ENTROPY(spec, operands, spec.implementation)
    wide, gradients = spec.compute_dtype, {name: getattr(results, GRADIENTS[name]) for name in moving}
    terms = [
        jnp.sum(gradient.astype(_dtype_of(spec, operands, name)).astype(wide) * moving[name].astype(wide))
        for name, gradient in gradients.items()
    ]
    return results.total, sum(terms[1:], start=terms[0]) if terms else jnp.zeros_like(results.total)


def _dtype_of(spec: LinearCrossEntropy, operands: Operands, name: str) -> np.dtype:
    """That in which a gradient is kept, its argument's; but a sum over rows may be too large for float16."""
    dtype: np.dtype = getattr(operands, name).dtype
    return spec.compute_dtype if name == "kernel" and dtype == np.float16 else dtype


total.defjvp(_total_jvp, symbolic_zeros=True)


def _are_labels(labels: jax.Array, classes: int) -> jax.Array:
    """Which classes are labels; by a scatter, for booleans of all logits would be written out."""
    for axis in range(labels.ndim):
        labels = dims.unsharded(labels, axis)
    none, named = compat.match_varying_axes(jnp.zeros(classes, jnp.int32), jnp.where(labels < 0, classes, labels))
    return none.at[named.ravel()].add(1, mode="drop") > 0


def only_what_is_read(
    function: str, kernel: jax.Array, bias: jax.Array | None, where: jax.Array, labels: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """kernel and bias with zeros for the classes of which no row reads anything: what is there may be no number."""
    by_any = _are_labels(labels, kernel.shape[1])
    if where.ndim == 1:
        by_any |= where & jnp.any(labels != IGNORED)
    else:
        by_any |= jnp.any((labels != IGNORED) & where, axis=tuple(range(where.ndim - 1)))

    def of(name: str, array: jax.Array) -> jax.Array:
        # As the op does with its operands, but before a selection lets array vary in a dtype of its own.
        array, is_read = compat.match_varying_axes(array, by_any)
        is_read = checks.sharded_along(function, "where", is_read, name, array, (array.ndim - 1,))
        return only(broadcast.with_rank_of(array, is_read), array)

    return of("kernel", kernel), None if bias is None else of("bias", bias)
