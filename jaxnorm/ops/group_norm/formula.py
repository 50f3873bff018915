"""GroupNorm with an activation: what is static about it, and its formulas in plain jnp.

x has its channels as two axes, of groups and of the channels of each. A group of an example is a row, whose axes are
all but those of examples and of groups. Weights have x's rank: they are 1 long along the axes along which they do not
differ. What is normalised is as LayerNorm does it, and so are its formulas.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxnorm.ops.activation import FORMULAS
from jaxnorm.ops.norm import formula as layer
from jaxnorm.ops.norm.formula import Kind, Norm, Variables
from jaxnorm.primitive.op import BatchDims, Dtype, OnlyY, Statistics

Activation = Literal["silu", "relu", "gelu"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupNorm(Norm):
    kind: Kind = "layer"
    activation: Activation | None = None


class Operands(NamedTuple):
    x: jax.Array
    scale: jax.Array | None = None
    bias: jax.Array | None = None


class Saved(NamedTuple):
    x: jax.Array
    stats: Statistics  # (mean, rstd)
    scale: jax.Array | None = None
    bias: jax.Array | None = None


def forward(norm: GroupNorm, operands: Operands) -> tuple[OnlyY, Statistics]:
    x, scale, bias = operands
    stats = layer.statistics(norm, x)
    z = layer.affine(norm.wide, x, stats, scale, bias)
    return OnlyY(FORMULAS[norm.activation].of(z).astype(norm.out_dtype)), stats


def plain(norm: GroupNorm, operands: Operands) -> OnlyY:
    # Cast once, so that the cotangents of its uses are added before they are rounded to its dtype.
    return forward(norm, operands._replace(x=operands.x.astype(norm.compute_dtype)))[0]


def _sloped(norm: GroupNorm, v: jax.Array, saved: Saved) -> jax.Array:
    """v times the derivative of the activation."""
    if norm.activation is None:
        return v
    z = layer.affine(norm.wide, saved.x, saved.stats, saved.scale, saved.bias)
    return FORMULAS[norm.activation].sloped(v, z)


def linear(norm: GroupNorm, saved: Saved, dots: Variables[jax.Array]) -> OnlyY:
    of_norm = layer.Saved(saved.x, saved.stats, saved.scale)
    z_dot = layer.linear(norm.wide, of_norm, layer.Variables(*dots)).y
    return OnlyY(_sloped(norm, z_dot, saved).astype(norm.out_dtype))


def backward(
    norm: GroupNorm,
    cotangents: OnlyY,
    saved: Saved,
    wanted: Variables[Dtype],
    _: BatchDims,
    of_x: Callable[..., jax.Array] = layer.gradient_of_x,
) -> Variables[jax.Array]:
    """The wanted gradients: the transpose of `linear`. `of_x` of LayerNorm's arguments is that by x."""
    x, stats, scale, bias = saved
    dz = _sloped(norm, cotangents.y.astype(norm.compute_dtype), saved)
    dx = dscale = dbias = None
    if wanted.x is not None:
        dx = of_x(norm, layer.product(norm, dz, scale), x, stats, wanted.x)
    if wanted.scale is not None and scale is not None:
        dscale = _sum_to(scale, dz * layer.normalised(norm, x, stats)).astype(wanted.scale)
    if wanted.bias is not None and bias is not None:
        dbias = _sum_to(bias, dz).astype(wanted.bias)
    return Variables(dx, dscale, dbias)


def _sum_to(weight: jax.Array, v: jax.Array) -> jax.Array:
    """The sums over the axes along which the weight does not differ."""
    return jnp.sum(v, axis=[axis for axis, n in enumerate(weight.shape) if n != v.shape[axis]], keepdims=True)
