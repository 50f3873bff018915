"""The JAX primitives of the gated norm, with the rules and the roles of those of `jaxnorm.primitives`.

- `forward` gives y and, where a derivative follows, rstd. Its JVP binds
- `linear`, the tangent of y, which is linear in the tangents of x, gate and scale. Its transpose binds
- `backward`, the wanted ones of the cotangents of x, gate and scale, in one call.

The last axis is normalised. A scale has its shape or, where that axis is a group of a longer one, that of the last two.
Between the passes x, gate and rstd are kept.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad

from jaxnorm import ffi, gated_reference, layouts, signatures
from jaxnorm.gated_reference import Gate
from jaxnorm.reference import Norm
from jaxnorm.rules import all_none, at_front, batch_jnp, bind, fold, named, register, register_native, tangents_jnp

unflatten = jax.tree.unflatten
forward_p = Primitive("jaxnorm_gated_forward")
linear_p = Primitive("jaxnorm_gated_linear")
backward_p = Primitive("jaxnorm_gated_backward")


def apply(norm: Norm, kind: Gate, x: jax.Array, gate: jax.Array, scale: jax.Array | None) -> jax.Array:
    """The gated norm of x over its last axis, native on the platforms that have a kernel."""
    y: jax.Array
    (y,) = bind(forward_p, (x, gate, scale), norm=norm, kind=kind, with_stats=False)
    return y


# forward: (x, gate, scale) -> [y]; with_stats [y, rstd]


def _forward_abstract(*operands: Any, tree: Any, norm: Norm, kind: Gate, with_stats: bool) -> list[Any]:
    x, *_ = unflatten(tree, operands)
    y = x.update(dtype=norm.out_dtype, weak_type=False)
    return [y, *signatures.statistics(norm, x)] if with_stats else [y]


def _forward_jnp(*operands: Any, tree: Any, norm: Norm, kind: Gate, with_stats: bool) -> list[Any]:
    x, gate, scale = unflatten(tree, operands)
    rstd = gated_reference.statistics(norm, kind, x, gate)
    y = gated_reference.forward(norm, kind, x, gate, rstd, scale)
    return [y, rstd] if with_stats else [y]


def _forward_native(
    platform: str, ctx: Any, *operands: Any, tree: Any, norm: Norm, kind: Gate, with_stats: bool
) -> Sequence[Any]:
    *_, scale = unflatten(tree, ctx.avals_in)
    return jax.ffi.ffi_lowering("jaxnorm_gated_rms_norm_fwd")(
        ctx,
        *operands,
        epsilon=np.float32(norm.epsilon),
        scale_offset=np.float32(norm.scale_offset),
        **_attributes(kind, scale),
    )


def _attributes(kind: Gate, scale: Any) -> dict[str, Any]:
    return {
        "activation": kind.activation,
        "gate_first": kind.first,
        "has_scale": scale is not None,
        "grouped": scale is not None and scale.ndim == 2,
    }


def _forward_batch(operands: Any, dims: Any, *, tree: Any, **params: Any) -> tuple[Any, Any]:
    *rows, scale = unflatten(tree, operands)
    *rows_dims, scale_dim = unflatten(tree, dims)
    if scale_dim is not None:
        return batch_jnp(partial(_forward_jnp, tree=tree, **params), operands, dims)
    return at_front(bind(forward_p, (*fold(tuple(rows), tuple(rows_dims)), scale), **params))


def _forward_jvp(primals: Any, dots: Any, *, tree: Any, norm: Norm, kind: Gate, with_stats: bool) -> tuple[Any, Any]:
    x, gate, scale = unflatten(tree, primals)
    dots = unflatten(tree, [None if type(dot) is ad.Zero else dot for dot in dots])
    y, rstd = forward_p.bind(*primals, tree=tree, norm=norm, kind=kind, with_stats=True)
    (y,), (rstd,) = named("result", [y]), named("statistics", [rstd])
    y_dot = bind(linear_p, (x, gate, rstd, scale, dots), norm=norm, kind=kind)
    if not with_stats:
        return [y], y_dot
    # Only a second derivative comes here.
    moving = dots[:2] if kind.first else (dots[0], None)
    rstd_dot = ad.Zero(jax.typeof(rstd).to_tangent_aval())
    if not all_none(moving):
        rstd_dot = tangents_jnp(partial(gated_reference.statistics, norm, kind), [x, gate], moving)
    return [y, rstd], [*y_dot, rstd_dot]


def _forward_transpose(
    cotangents: Any, *operands: Any, tree: Any, norm: Norm, kind: Gate, with_stats: bool
) -> list[Any]:
    """y is linear in scale alone; x and gate are known."""
    x, gate, scale = unflatten(tree, operands)
    if ad.is_undefined_primal(x) or ad.is_undefined_primal(gate) or with_stats:
        raise NotImplementedError("a gated norm is not linear in x and gate")
    rstd = gated_reference.statistics(norm, kind, x, gate)
    dy, dtypes = ad.instantiate_zeros(cotangents[0]), (None, None, scale.aval.dtype)
    return [None, None, *gated_reference.backward(norm, kind, dy, x, gate, rstd, scale.aval, dtypes)]


# linear: (x, gate, rstd, scale, (x_dot, gate_dot, scale_dot)) -> [y_dot]


def _linear_abstract(x: Any, *_: Any, tree: Any, norm: Norm, kind: Gate) -> list[Any]:
    return [x.update(dtype=norm.out_dtype, weak_type=False)]


def _linear_jnp(*operands: Any, tree: Any, norm: Norm, kind: Gate) -> list[Any]:
    return [gated_reference.linear(norm, kind, *unflatten(tree, operands))]


def _linear_batch(operands: Any, dims: Any, *, tree: Any, **params: Any) -> tuple[Any, Any]:
    x, gate, rstd, scale, (x_dot, gate_dot, scale_dot) = unflatten(tree, operands)
    x_dim, gate_dim, rstd_dim, scale_dim, (x_dot_dim, gate_dot_dim, scale_dot_dim) = unflatten(tree, dims)
    if not all_none([scale_dim, scale_dot_dim]):
        return batch_jnp(partial(_linear_jnp, tree=tree, **params), operands, dims)
    x, gate, rstd, x_dot, gate_dot = fold(
        (x, gate, rstd, x_dot, gate_dot), (x_dim, gate_dim, rstd_dim, x_dot_dim, gate_dot_dim)
    )
    return at_front(bind(linear_p, (x, gate, rstd, scale, (x_dot, gate_dot, scale_dot)), **params))


def _linear_jvp(primals: Any, tangents: Any, **params: Any) -> tuple[Any, Any]:
    return linear_p.bind(*primals, **params), tangents_jnp(partial(_linear_jnp, **params), primals, tangents)


def _linear_transpose(cotangents: Any, *operands: Any, tree: Any, norm: Norm, kind: Gate) -> list[Any]:
    x, gate, rstd, scale, dots = unflatten(tree, operands)
    dtypes = tuple(dot.aval.dtype if ad.is_undefined_primal(dot) else None for dot in dots)
    dy = ad.instantiate_zeros(cotangents[0])
    wanted = iter(bind(backward_p, (dy, x, gate, rstd, scale), norm=norm, kind=kind, dtypes=dtypes))
    return [next(wanted) if ad.is_undefined_primal(operand) else None for operand in operands]


# backward: (dy, x, gate, rstd, scale) -> those cotangents of (x, gate, scale) whose dtype is given


def _backward_abstract(*operands: Any, tree: Any, norm: Norm, kind: Gate, dtypes: Any) -> list[Any]:
    named = unflatten(tree, operands)
    _, x, _, _, scale = named
    _, of_results = signatures.of_gated_backward(named, norm=norm, kind=kind, dtypes=dtypes)
    weight = x.shape if scale is None else scale.shape
    results = [result for result in zip((x.shape, x.shape, weight), dtypes, strict=True) if result[1] is not None]
    return [layouts.result_like(x, layout, *result) for layout, result in zip(of_results, results, strict=True)]


def _backward_jnp(*operands: Any, tree: Any, norm: Norm, kind: Gate, dtypes: Any) -> list[Any]:
    dy, x, gate, rstd, scale = unflatten(tree, operands)
    return gated_reference.backward(norm, kind, dy, x, gate, rstd, scale, dtypes)


def _backward_native(
    platform: str, ctx: Any, *operands: Any, tree: Any, norm: Norm, kind: Gate, dtypes: Any
) -> Sequence[Any]:
    _, x, _, _, scale = unflatten(tree, ctx.avals_in)
    with_dx, with_dgate, with_dscale = (dtype is not None for dtype in dtypes)
    cols = x.shape[-1]
    groups = scale.size // cols if with_dscale else 1
    return ffi.call(
        "jaxnorm_gated_rms_norm_bwd",
        ctx,
        operands,
        workspaces=ffi.weight_sums(platform, int(with_dscale), x.dtype, cols, groups),
        scale_offset=np.float32(norm.scale_offset),
        **_attributes(kind, scale),
        with_dx=with_dx,
        with_dgate=with_dgate,
        with_dscale=with_dscale,
    )


def _backward_batch(operands: Any, dims: Any, *, tree: Any, norm: Norm, kind: Gate, dtypes: Any) -> tuple[Any, Any]:
    *rows, scale = unflatten(tree, operands)
    *rows_dims, scale_dim = unflatten(tree, dims)
    if scale_dim is not None:
        return batch_jnp(partial(_backward_jnp, tree=tree, norm=norm, kind=kind, dtypes=dtypes), operands, dims)
    rows = fold(tuple(rows), tuple(rows_dims))
    *rows_dtypes, dscale_dtype = dtypes
    cotangents = []
    if not all_none(rows_dtypes):
        cotangents += bind(backward_p, (*rows, scale), norm=norm, kind=kind, dtypes=(*rows_dtypes, None))
    if dscale_dtype is not None:
        # A kernel would sum over the examples too.
        sums = partial(gated_reference.backward, norm, kind, scale=scale, dtypes=(None, None, dscale_dtype))
        cotangents += jax.vmap(sums)(*rows)
    return at_front(cotangents)


def _backward_jvp(primals: Any, tangents: Any, **params: Any) -> tuple[Any, Any]:
    return backward_p.bind(*primals, **params), tangents_jnp(partial(_backward_jnp, **params), primals, tangents)


def _backward_transpose(cotangents: Any, *operands: Any, tree: Any, norm: Norm, kind: Gate, dtypes: Any) -> list[Any]:
    """The cotangents are linear in dy; `linear` is the transpose of that."""
    _, x, gate, rstd, scale = unflatten(tree, operands)
    given = iter(cotangents)
    results = (None if dtype is None else next(given) for dtype in dtypes)
    dots = tuple(None if type(dot) is ad.Zero else dot for dot in results)
    dy_bar = bind(linear_p, (x, gate, rstd, scale, dots), norm=norm, kind=kind)
    return [*dy_bar, *(None for _ in operands[1:])]


register(forward_p, _forward_abstract, _forward_jnp, _forward_batch, _forward_jvp, _forward_transpose)
register(linear_p, _linear_abstract, _linear_jnp, _linear_batch, _linear_jvp, _linear_transpose)
register(backward_p, _backward_abstract, _backward_jnp, _backward_batch, _backward_jvp, _backward_transpose)
register_native(forward_p, _forward_jnp, _forward_native, signatures.of_gated_forward)
register_native(backward_p, _backward_jnp, _backward_native, signatures.of_gated_backward)
