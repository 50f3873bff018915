"""Norms of rows that are split over devices: what of them is native, around the exchange of statistics.

`moments` are the statistics of a device's part of each row, `apply` is the norm by statistics that are given. Both are
kernels on CUDA, where XLA reads x twice for LayerNorm's moments, and never from its end, so that the result would find
its beginning in the cache; they are the jnp formula elsewhere. They have no rules but their lowering, as they are bound
where a program is lowered: see `forward_p` and `backward_p` for all others.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jaxnorm import ffi, heads, reference, signatures
from jaxnorm.heads import Lead
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
    why_not = unsupported(norm, normalised, [weight.dtype for weight in weights])
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


def unsupported(norm: Norm, part: jax.Array, weight_dtypes: Iterable[np.dtype[Any]], lead: Lead = ()) -> str | None:
    """What of the norm no kernel serves for a part of each row, as a sentence; None if the kernels serve all of it."""
    if norm.compute_dtype != np.float32:
        return f"it is computed in {norm.compute_dtype}"
    why_not = ffi.unsupported(norm.axes, part.shape, part.dtype, norm.out_dtype, weight_dtypes)
    return why_not or heads.unsupported(part.shape, len(norm.axes), lead)


def _moments_abstract(x: Any, *, norm: Norm) -> list[Any]:
    return signatures.statistics(norm, x)


def _moments_jnp(x: Any, *, norm: Norm) -> list[Any]:
    return list(reference.moments(norm, x))


def _moments_native(ctx: Any, x: Any, *, norm: Norm) -> Any:
    return jax.ffi.ffi_lowering(f"jaxnorm_{norm.kind}_norm_statistics")(ctx, x, axes=np.int64(len(norm.axes)))


def _apply_abstract(x: Any, *_: Any, tree: Any, norm: Norm) -> list[Any]:
    return [x.update(dtype=norm.out_dtype, weak_type=False)]


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


def _register(
    primitive: Primitive, abstract: Callable[..., Any], formula: Callable[..., Any], native: Callable[..., Any]
) -> None:
    primitive.multiple_results = True
    primitive.def_abstract_eval(abstract)
    mlir.register_lowering(primitive, mlir.lower_fun(formula))
    if ffi.available("cuda"):
        mlir.register_lowering(primitive, native, platform="cuda")


_register(moments_p, _moments_abstract, _moments_jnp, _moments_native)
_register(apply_p, _apply_abstract, _apply_jnp, _apply_native)
