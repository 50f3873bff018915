"""Norms of rows that are split over devices: what of them is native, around the exchange of statistics.

`moments` are the statistics of a device's part of each row, `apply` is the norm by statistics that are given. Both are
kernels on CUDA, where XLA reads x twice for LayerNorm's moments, and never from its end, so that the result would find
its beginning in the cache; they are the jnp formula elsewhere. They have no rules but their lowering, as they are bound
where a program is lowered: see `forward_p` and `backward_p` for all others.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jaxnorm import ffi, heads, reference
from jaxnorm.reference import Norm

unflatten = jax.tree.unflatten
moments_p = Primitive("jaxnorm_moments")
apply_p = Primitive("jaxnorm_apply")


def forward(
    norm: Norm, x: jax.Array, residual: jax.Array | None, scale: jax.Array | None, bias: jax.Array | None
) -> tuple[jax.Array, Sequence[jax.Array], Sequence[jax.Array]]:
    """y, the sum where there is a residual, and the statistics of whole rows, of which x is a part."""
    sums = [] if residual is None else [reference.add(x, residual)]
    (normalised,) = sums or [x]
    weights = [weight for weight in (scale, bias) if weight is not None]
    weight_dtypes = (weight.dtype for weight in weights)
    why_not = ffi.unsupported(norm.axes, x.shape, normalised.dtype, norm.out_dtype, weight_dtypes)
    # XLA adds a residual, and computes the moments of the sum, in one pass. Of float32 alone its loop over the result
    # is at the copy rate.
    of_part = reference.moments(norm, normalised) if why_not or sums else moments_p.bind(x, norm=norm)
    stats = reference.merged(norm, of_part)
    all_wide = normalised.dtype == norm.out_dtype == np.float32
    if why_not or all_wide or heads.lead_of(len(norm.axes), weights):
        return reference.forward(norm, normalised, stats, scale, bias), sums, stats
    leaves, tree = jax.tree.flatten((normalised, tuple(stats), scale, bias))
    (y,) = apply_p.bind(*leaves, tree=tree, norm=norm)
    return y, sums, stats


def _moments_jnp(x: Any, *, norm: Norm) -> list[Any]:
    return list(reference.moments(norm, x))


def _moments_native(ctx: Any, x: Any, *, norm: Norm) -> Any:
    return jax.ffi.ffi_lowering(f"jaxnorm_{norm.kind}_norm_statistics")(ctx, x, axes=np.int64(len(norm.axes)))


def _apply_jnp(*operands: Any, tree: Any, norm: Norm) -> list[Any]:
    return [reference.forward(norm, *unflatten(tree, operands))]


def _apply_native(ctx: Any, *operands: Any, tree: Any, norm: Norm) -> Any:
    *_, scale, bias = unflatten(tree, operands)
    return jax.ffi.ffi_lowering(f"jaxnorm_{norm.kind}_norm_apply")(
        ctx,
        *operands,
        axes=np.int64(len(norm.axes)),
        scale_offset=np.float32(norm.scale_offset),
        multiply_before_cast=norm.multiply_before_cast,
        has_scale=scale is not None,
        has_bias=bias is not None,
    )


def _register(primitive: Primitive, formula: Callable[..., Any], native: Callable[..., Any]) -> None:
    def abstract(*avals: Any, **params: Any) -> list[Any]:
        return [jax.typeof(result) for result in jax.eval_shape(partial(formula, **params), *avals)]

    primitive.multiple_results = True
    primitive.def_abstract_eval(abstract)
    mlir.register_lowering(primitive, mlir.lower_fun(formula))
    if ffi.available("cuda"):
        mlir.register_lowering(primitive, native, platform="cuda")


_register(moments_p, _moments_jnp, _moments_native)
_register(apply_p, _apply_jnp, _apply_native)
