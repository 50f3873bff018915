"""The sandwich norm, RMSNorm after a block and RMSNorm before the next: its formulas in plain jnp.

Each formula is that of RMSNorm, twice. For a derivative x, the sum and two rstd a row are kept.
"""

import dataclasses
from typing import Generic, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm.native import compat
from jaxnorm.ops.norm import formula as one
from jaxnorm.primitive.addend import rounded
from jaxnorm.primitive.op import BatchDims, Dtype, RowSpec, Statistics, T
from jaxnorm.primitive.rules import all_none


@dataclasses.dataclass(frozen=True, kw_only=True)
class SandwichNorm(RowSpec):
    epsilon: float
    scale_offset: float
    multiply_before_cast: bool
    residual_dtype: Dtype

    @property
    def second(self) -> one.Norm:
        return self.norm(self.residual_dtype, self.out_dtype)

    def norm(self, x: Dtype, out_dtype: Dtype | None = None) -> one.Norm:
        """Either norm, by the dtype of what is normalised and that of the result, if it is another."""
        out_dtype = x if out_dtype is None else out_dtype
        multiplies = self.multiply_before_cast
        return one.Norm(
            kind="rms",
            axes=self.axes,
            epsilon=self.epsilon,
            scale_offset=self.scale_offset,
            multiply_before_cast=multiplies,
            x_hat_dtype=one.x_hat_dtype(np.dtype(x), np.dtype(out_dtype), multiply_before_cast=multiplies),
            compute_dtype=self.compute_dtype,
            out_dtype=np.dtype(out_dtype),
            **self.asks(),
            shards=self.shards,
        )


class Operands(NamedTuple):
    x: jax.Array
    residual: jax.Array
    post_scale: jax.Array | None = None
    scale: jax.Array | None = None


class Results(NamedTuple):
    y: jax.Array
    new_residual: jax.Array | None = None  # None only as a cotangent that is zero


class Saved(NamedTuple):
    x: jax.Array
    new_residual: jax.Array
    stats: Statistics  # rstd of x and of new_residual
    post_scale: jax.Array | None = None
    scale: jax.Array | None = None


class Variables(NamedTuple, Generic[T]):
    x: T | None = None
    residual: T | None = None
    post_scale: T | None = None
    scale: T | None = None


def forward(norm: SandwichNorm, operands: Operands) -> tuple[Results, Statistics]:
    """The norm of x, its sum with the addend, the norm of that; and the statistics of both norms."""
    x, addend, post_scale, scale = operands
    normed, of_x = one.forward(norm.norm(x.dtype), one.Operands(x, None, post_scale))
    results, of_sum = one.forward(norm.second, one.Operands(rounded(normed.y), addend, scale))
    return Results(results.y, results.sum), (*of_x, *of_sum)


def plain(norm: SandwichNorm, operands: Operands) -> Results:
    x, addend, post_scale, scale = operands
    normed = rounded(one.plain(norm.norm(x.dtype), one.Operands(x, None, post_scale)).y)
    return Results(*one.plain(norm.second, one.Operands(normed, addend, scale)))


def linear(norm: SandwichNorm, saved: Saved, dots: Variables[jax.Array]) -> Results:
    x, total, (of_x, of_sum), post_scale, scale = saved
    of_post = one.Variables(dots.x, dots.post_scale)
    terms = [] if dots.residual is None else [dots.residual.astype(norm.compute_dtype)]
    if not all_none(of_post):
        normed_dot = one.linear(norm.norm(x.dtype), one.Saved(x, (of_x,), post_scale), of_post).y
        terms.append(normed_dot.astype(norm.compute_dtype))
    sum_dot = sum(terms[1:], start=terms[0]).astype(total.dtype) if terms else None
    saved_sum = one.Saved(total, (of_sum,), scale)
    y_dot = one.linear(norm.second, saved_sum, one.Variables(sum_dot, dots.scale)).y
    if sum_dot is None:
        sum_dot, _ = compat.match_varying_axes(jnp.zeros_like(total), total)
    return Results(y_dot, sum_dot)


def backward(
    norm: SandwichNorm, cotangents: Results, saved: Saved, wanted: Variables[Dtype], batch_dims: BatchDims
) -> Variables[jax.Array]:
    """The wanted gradients: the transpose of `linear`. The addend's, rounded to its dtype, is the cotangent of what
    the first norm gives: so do the kernels, which store it."""
    x, total, (of_x, of_sum), post_scale, scale = saved
    moves_sum = not all_none(wanted._replace(scale=None))
    of_second = one.backward(
        norm.second,
        one.Results(cotangents.y, cotangents.new_residual),
        one.Saved(total, (of_sum,), scale),
        one.Variables(total.dtype if moves_sum else None, wanted.scale),
        batch_dims,
    )
    of_first: one.Variables[jax.Array] = one.Variables()
    if of_second.x is not None:
        of_first = one.backward(
            norm.norm(x.dtype),
            one.Results(of_second.x),
            one.Saved(x, (of_x,), post_scale),
            one.Variables(wanted.x, wanted.post_scale),
            batch_dims,
        )
    daddend = None if of_second.x is None or wanted.residual is None else of_second.x.astype(wanted.residual)
    return Variables(of_first.x, daddend, of_first.scale, of_second.scale)
