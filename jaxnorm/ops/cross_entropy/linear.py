"""The sum of the losses of x @ kernel, and its gradients, without ever having all logits.

    total = sum(weight * loss(x @ kernel))

over the rows of x, each with its weight. Rows go in chunks, each through one product with the kernel; with gradients
through two more, while its logits are there: they become their gradients in place. What is added up over chunks is
float32. It is an op so that over a mesh each device takes chunks of the rows that it has, and the gradient of the
kernel is summed over devices once.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec

from jaxnorm.native import compat
from jaxnorm.ops.cross_entropy import formula
from jaxnorm.ops.cross_entropy.formula import CrossEntropy, loss
from jaxnorm.ops.cross_entropy.op import CROSS_ENTROPY
from jaxnorm.primitive.family import Family
from jaxnorm.primitive.op import LIKE_X, SCALAR, STATISTIC, Op, Role, RowSpec, Statistics
from jaxnorm.sharding import dims


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearCrossEntropy(RowSpec):
    """What is static about one call."""

    scale: float
    soft_cap: float
    label_smoothing: float
    z_loss: float
    rows_per_chunk: int
    implementation: Literal["native", "jnp"] | None
    with_dx: bool = False
    with_dkernel: bool = False


class Operands(NamedTuple):
    x: jax.Array
    kernel: jax.Array  # (columns of x, classes)
    labels: jax.Array  # int32, of x's rank, as are weights
    weights: jax.Array


class Results(NamedTuple):
    total: jax.Array
    dx: jax.Array | None = None  # of x's dtype
    dkernel: jax.Array | None = None  # of the compute dtype: it is still to be summed over devices


def _product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jnp.einsum("...d,dv->...v", x, kernel)


def _losses(spec: LinearCrossEntropy, logits: jax.Array, labels: jax.Array) -> jax.Array:
    of_logits = CrossEntropy(
        scale=spec.scale,
        soft_cap=spec.soft_cap,
        with_total=spec.label_smoothing > 0,
        with_top=True,
        compute_dtype=spec.compute_dtype,
        out_dtype=spec.compute_dtype,
        **spec.asks(),
    )
    results = CROSS_ENTROPY(of_logits, formula.Operands(logits, labels), spec.implementation)
    return loss(of_logits, results, logits.shape[-1], spec.label_smoothing, spec.z_loss)


def _of_chunk(spec: LinearCrossEntropy, kernel: jax.Array, x: jax.Array, labels: Any, weights: Any) -> Results:
    """The results of these rows, with dkernel of them alone."""

    def total(logits: jax.Array) -> jax.Array:
        # Of rows that do not count whatever is there.
        return jnp.sum(jnp.where(weights == 0, 0, weights * _losses(spec, logits, labels)))

    logits = _product(x, kernel)
    if not (spec.with_dx or spec.with_dkernel):
        return Results(total(logits))
    value, pullback = jax.vjp(total, logits)
    (dlogits,) = pullback(jnp.ones_like(value))
    dx = dkernel = None
    if spec.with_dx:
        dx = jnp.einsum("...v,dv->...d", dlogits, kernel)
    if spec.with_dkernel:
        is_sharded = any(jax.typeof(x).sharding.spec)
        # Over one axis: XLA for CPUs has no transpose of a product of bfloat16 over two.
        rows = [x, dlogits] if is_sharded else [array.reshape(-1, array.shape[-1]) for array in (x, dlogits)]
        dkernel = jnp.einsum(
            "...d,...v->dv",
            *rows,
            preferred_element_type=spec.compute_dtype,
            out_sharding=PartitionSpec(None, None) if is_sharded else None,
        )
    return Results(value, dx, dkernel)


def chunks_of(spec: LinearCrossEntropy, x: jax.Array) -> int:
    """In how many chunks the rows of x go; those that an Explicit mesh splits, or whose number is not known, in one."""
    rows = math.prod(x.shape[:-1])
    if not isinstance(rows, int) or any(jax.typeof(x).sharding.spec):
        return 1
    least = -(-rows // spec.rows_per_chunk) or 1
    return next((n for n in range(least, 2 * least) if rows % n == 0), least)


def chunked(chunks: int, *arrays: jax.Array) -> list[jax.Array]:
    """Arrays of rows, with an axis of chunks in front, of which each has rows from all parts of a mesh.

    Rows of zeros are added where they do not divide.
    """
    split = []
    for array in arrays:
        rows = array.reshape(-1, array.shape[-1])
        rows = jnp.pad(rows, [(0, -rows.shape[0] % chunks), (0, 0)])
        split.append(jnp.moveaxis(rows.reshape(-1, chunks, rows.shape[-1]), 1, 0))
    return split


def joined(chunks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """An array of rows of this shape from its chunks."""
    rows = jnp.moveaxis(chunks, 0, 1).reshape(-1, chunks.shape[-1])
    return rows[: math.prod(shape[:-1])].reshape(shape)


def forward(spec: LinearCrossEntropy, operands: Operands) -> tuple[Results, Statistics]:
    # A product would let x or the kernel vary over a mesh in x's dtype, in which a gradient of it were summed then.
    x, kernel, labels, weights = compat.match_varying_axes(*operands)
    kernel = kernel.astype(x.dtype)
    if (chunks := chunks_of(spec, x)) == 1:
        return _of_chunk(spec, kernel, x, labels, weights), ()

    def step(sums: Results, chunk: Any) -> tuple[Results, jax.Array | None]:
        total, dx, dkernel = _of_chunk(spec, kernel, *chunk)
        if sums.dkernel is not None and dkernel is not None:
            dkernel = sums.dkernel + dkernel
        return Results(sums.total + total, None, dkernel), dx

    split = chunked(chunks, x, labels, weights)
    zeros = [jnp.zeros((), spec.compute_dtype), *([jnp.zeros(kernel.shape, spec.compute_dtype)] * spec.with_dkernel)]
    # They vary over the axes of a mesh as what is added to them does.
    total, *dkernel = (compat.match_varying_axes(zero, x)[0] for zero in zeros)
    sums, dx = lax.scan(step, Results(total, None, *dkernel), split)
    return sums._replace(dx=None if dx is None else joined(dx, x.shape)), ()


def _types(spec: LinearCrossEntropy, operands: Operands) -> Results:
    x: Any = operands.x
    wide = spec.compute_dtype
    return Results(
        dims.result_like(x, (), (), wide),
        dims.like(x, x.dtype) if spec.with_dx else None,
        dims.result_like(x, (None, None), operands.kernel.shape, wide) if spec.with_dkernel else None,
    )


KERNEL = Role(lambda *_: (None, None), "formula")
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
            "total": SCALAR,
            "dx": LIKE_X,
            "dkernel": KERNEL,
        },
        types=_types,
        forward=forward,
        statistics=lambda *_: [],
        calls_others=True,
    )
)


def each(spec: LinearCrossEntropy, x: jax.Array, kernel: jax.Array, labels: jax.Array) -> jax.Array:
    """The losses of all rows, with x's rank; a derivative makes the logits of each chunk again."""
    # As in `forward`.
    x, kernel, labels = compat.match_varying_axes(x, kernel, labels)
    of_rows: Callable[..., jax.Array] = jax.checkpoint(functools.partial(_each_of_chunk, spec))
    if (chunks := chunks_of(spec, x)) == 1:
        return of_rows(x, kernel, labels)

    def step(_: None, chunk: Any) -> tuple[None, jax.Array]:
        x, labels = chunk
        return None, of_rows(x, kernel, labels)

    _, losses = lax.scan(step, None, chunked(chunks, x, labels))
    return joined(losses, labels.shape)


def _each_of_chunk(spec: LinearCrossEntropy, x: jax.Array, kernel: jax.Array, labels: jax.Array) -> jax.Array:
    return _losses(spec, _product(x, kernel.astype(x.dtype)), labels)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def total(spec: LinearCrossEntropy, x: Any, kernel: Any, labels: Any, weights: Any) -> jax.Array:
    """The sum of weighted losses. Where it is differentiated, one pass gives it and the gradients that are wanted."""
    return LINEAR_CROSS_ENTROPY(spec, Operands(x, kernel, labels, weights), spec.implementation).total


def _total_jvp(spec: LinearCrossEntropy, operands: Any, dots: Any) -> tuple[jax.Array, jax.Array]:
    x, kernel, *_ = operands
    x_dot, kernel_dot = (None if isinstance(dot, SymbolicZero) else dot for dot in dots[:2])
    spec = dataclasses.replace(spec, with_dx=x_dot is not None, with_dkernel=kernel_dot is not None)
    results = LINEAR_CROSS_ENTROPY(spec, Operands(*operands), spec.implementation)
    # A gradient has its argument's dtype, and is not kept in another; but a sum over rows may be too large for float16.
    dkernel_dtype = spec.compute_dtype if kernel.dtype == np.float16 else kernel.dtype
    pairs: Any = ((results.dx, x.dtype, x_dot), (results.dkernel, dkernel_dtype, kernel_dot))
    terms = [_along(spec, gradient.astype(dtype), dot) for gradient, dtype, dot in pairs if gradient is not None]
    return results.total, sum(terms[1:], start=terms[0]) if terms else jnp.zeros_like(results.total)


def _along(spec: LinearCrossEntropy, gradient: jax.Array, dot: jax.Array) -> jax.Array:
    return jnp.sum(gradient.astype(spec.compute_dtype) * dot.astype(spec.compute_dtype))


total.defjvp(_total_jvp, symbolic_zeros=True)


def default_rows_per_chunk(classes: Any, dtype: np.dtype[Any]) -> int:
    """So many that their logits take 512 MiB, but no fewer than matrix products want."""
    return max(256, 2**29 // max(1, classes * dtype.itemsize)) if isinstance(classes, int) else 1024
