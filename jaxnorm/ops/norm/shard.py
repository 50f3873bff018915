"""Norms of rows with sharded axes: what is native of a shard, around the exchange of statistics.

`moments` are the statistics of a device's shard of each row, `apply` is the norm by statistics that are given. Both are
kernels on CUDA, where XLA reads x twice for LayerNorm's moments, and never from its end, so that the result would find
its beginning in the cache; they are the formula elsewhere. They have no rules but their lowering, as they are bound
while the norm's own primitives are lowered.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive

from jaxnorm.native import ffi
from jaxnorm.ops.norm.formula import (
    KINDS,
    STATISTICS,
    Norm,
    Operands,
    Results,
    affine,
    merged,
    moments,
    summed_operands,
)
from jaxnorm.primitive import lowering, weights
from jaxnorm.primitive.op import Statistics, statistics_of

# Targets that only CUDA has.
TARGETS = tuple(f"jaxnorm_{kind}_norm_{what}" for kind in KINDS for what in ("statistics", "apply"))

unflatten = jax.tree.unflatten
moments_p = Primitive("jaxnorm_moments")
apply_p = Primitive("jaxnorm_apply")


def forward(norm: Norm, operands: Operands, *, has_kernels: bool) -> tuple[Results, Statistics]:
    """y, the sum where there is an addend, and the statistics of whole rows, of which x is a shard."""
    x, addend, scale, bias, _ = operands
    normalised = summed_operands(norm, operands)
    # XLA adds an addend, and computes the moments of the sum, in one pass. Of float32 alone its loop over the result
    # is at the copy rate.
    is_native = has_kernels and addend is None
    of_shard: Sequence[jax.Array] = moments_p.bind(x, norm=norm) if is_native else moments(norm, normalised)
    stats = merged(norm, of_shard)
    all_wide = normalised.dtype == norm.out_dtype == np.float32
    one_loop = all_wide or norm.x_hat_dtype is not None
    if one_loop or not has_kernels or weights.batch_dims_of(norm.row_ndim, (scale, bias)):
        y = affine(norm, normalised, stats, scale, bias)
    else:
        leaves, tree = jax.tree.flatten((normalised, stats, scale, bias))
        (y,) = apply_p.bind(*leaves, tree=tree, norm=norm)
    return Results(y, None if addend is None else normalised), stats


def _moments_abstract(x: Any, *, norm: Norm) -> list[Any]:
    return statistics_of(norm, x, STATISTICS[norm.kind])


def _moments_jnp(x: jax.Array, *, norm: Norm) -> list[jax.Array]:
    return list(moments(norm, x))


def _moments_native(ctx: Any, x: Any, *, norm: Norm) -> Any:
    target = f"jaxnorm_{norm.kind}_norm_statistics"
    return ffi.call("cuda", target, ctx, [x], attributes={"axes": np.int64(norm.row_ndim)})


def _apply_abstract(x: Any, *_: Any, tree: Any, norm: Norm) -> list[Any]:
    return [x.update(dtype=norm.out_dtype, weak_type=False)]


def _apply_jnp(*operands: Any, tree: Any, norm: Norm) -> list[jax.Array]:
    return [affine(norm, *unflatten(tree, operands))]


def _apply_native(ctx: Any, *operands: Any, tree: Any, norm: Norm) -> Any:
    *_, scale, bias = unflatten(tree, operands)
    return ffi.call(
        "cuda",
        f"jaxnorm_{norm.kind}_norm_apply",
        ctx,
        operands,
        attributes={
            "axes": np.int64(norm.row_ndim),
            "scale_offset": np.float32(norm.scale_offset),
            "multiply_before_cast": norm.multiply_before_cast,
            "has_scale": scale is not None,
            "has_bias": bias is not None,
        },
    )


for primitive, abstract, formula, native in (
    (moments_p, _moments_abstract, _moments_jnp, _moments_native),
    (apply_p, _apply_abstract, _apply_jnp, _apply_native),
):
    primitive.multiple_results = True
    primitive.def_abstract_eval(abstract)
    lowering.register_inner(primitive, formula, native, ("cuda",))
ffi.allow_export(TARGETS)
