"""The JAX primitives of a norm, each with its abstract evaluation, lowering, batching, JVP and transpose.

- `forward` gives y and, where a derivative follows, the row statistics. With a residual it normalises the sum of that
  and x, and gives the sum too. Its JVP binds
- `linear`, the tangent of y, which is linear in the tangents of x, scale and bias. Its transpose binds
- `backward`, the wanted ones of the cotangents of x, scale and bias, in one call.

So a gradient is one native call each way; forward mode and higher derivatives go through the jnp formula. `linear` and
`backward` know no residual: their x is the sum. `linear` hands the tangent of the sum on as a second result, so that
its transpose sees the cotangents of y and of the sum together and `backward` adds the latter, dsum, to dx.

The operands of a primitive are the leaves of a tuple, in which an absent one is None; the tuple's structure is the
parameter `tree`. Operands keep x's rank, so that a result's sharding and varying mesh axes follow from x's type. All
weights of one primitive, tangents included, have one lead, see `jaxnorm.heads`; of a vmapped weight the batch is in it.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad

from jaxnorm import ffi, heads, layouts, parts, reference, signatures
from jaxnorm.heads import Lead
from jaxnorm.reference import Norm
from jaxnorm.rules import all_none, at_front, batch_jnp, bind, fold, named, register, register_native, tangents_jnp

unflatten = jax.tree.unflatten
forward_p = Primitive("jaxnorm_forward")
linear_p = Primitive("jaxnorm_linear")
backward_p = Primitive("jaxnorm_backward")


def apply(
    norm: Norm, x: jax.Array, residual: jax.Array | None, scale: jax.Array | None, bias: jax.Array | None
) -> tuple[jax.Array, ...]:
    """The norm of x over trailing axes, native on the platforms that have a kernel; with a residual, of their sum,
    and the sum."""
    weights = heads.aligned(jax.typeof(x), len(norm.axes), (scale, bias))
    return tuple(bind(forward_p, (x, residual, *weights), norm=norm, with_stats=False))


# forward: (x, residual, scale, bias) -> [y], with a residual [y, sum]; with_stats the statistics follow


def forward_abstract(*operands: Any, tree: Any, norm: Norm, with_stats: bool) -> list[Any]:
    x, residual, *_ = unflatten(tree, operands)
    y = layouts.result_like(x, signatures.result(norm, x), norm.padded(x.shape), norm.out_dtype)
    sums = [] if residual is None else [residual.update(weak_type=False)]
    return [y, *sums, *(signatures.statistics(norm, x) if with_stats else [])]


def forward_jnp(*operands: Any, tree: Any, norm: Norm, with_stats: bool) -> list[Any]:
    x, residual, scale, bias = unflatten(tree, operands)
    sums = [] if residual is None else [reference.add(x, residual)]
    (normalised,) = sums or [x]
    stats = reference.statistics(norm, normalised)
    y = reference.forward(norm, normalised, stats, scale, bias)
    return [y, *sums, *stats] if with_stats else [y, *sums]


def _forward_of_parts(*operands: Any, tree: Any, norm: Norm, with_stats: bool) -> list[Any]:
    y, sums, stats = parts.forward(norm, *unflatten(tree, operands))
    return [y, *sums, *stats] if with_stats else [y, *sums]


def _forward_native(platform: str, ctx: Any, *operands: Any, tree: Any, norm: Norm, with_stats: bool) -> Sequence[Any]:
    x, residual, scale, bias = unflatten(tree, ctx.avals_in)
    # The sum goes where the residual was, so that a dead or donated one needs no second buffer. XLA copies one that
    # lives on: where a derivative follows it does, as the sum that the backward of the norm before this one wants.
    aliases = {1: 1} if residual is not None and not with_stats else {}
    normalised = x if residual is None else residual
    cols = math.prod(x.shape[-len(norm.axes) :])
    return ffi.call(
        f"jaxnorm_{norm.kind}_norm_fwd",
        ctx,
        operands,
        workspaces=ffi.drawn_rows(platform, norm.kind, normalised.dtype, cols),
        aliases=aliases,
        axes=np.int64(len(norm.axes)),
        epsilon=np.float32(norm.epsilon),
        scale_offset=np.float32(norm.scale_offset),
        multiply_before_cast=norm.multiply_before_cast,
        has_residual=residual is not None,
        has_scale=scale is not None,
        has_bias=bias is not None,
    )


def _forward_batch(operands: Any, dims: Any, *, tree: Any, norm: Norm, with_stats: bool) -> tuple[Any, Any]:
    x, residual, *weights = unflatten(tree, operands)
    x_dim, residual_dim, *weights_dims = unflatten(tree, dims)
    params: dict[str, Any] = {"norm": norm, "with_stats": with_stats}
    whole = heads.batch(x, x_dim, len(norm.axes), weights, weights_dims)
    # Statistics that all examples share are computed once by the formula.
    if whole is None or all_none([x_dim, residual_dim]):
        return batch_jnp(partial(forward_jnp, tree=tree, **params), operands, dims)
    return at_front(bind(forward_p, (*fold((x, residual), (x_dim, residual_dim)), *whole), **params))


def _forward_jvp(primals: Any, dots: Any, *, tree: Any, norm: Norm, with_stats: bool) -> tuple[Any, Any]:
    operands = unflatten(tree, primals)
    dots = unflatten(tree, [None if type(dot) is ad.Zero else dot for dot in dots])
    y, *rest = forward_p.bind(*primals, tree=tree, norm=norm, with_stats=True)
    split = 0 if operands[1] is None else 1
    (y,), sums, stats = named("result", [y]), named("sum", rest[:split]), named("statistics", rest[split:])
    y_dot, sums_dot, stats_dot = tangents(norm, operands, sums, stats, dots)
    if not with_stats:
        return [y, *sums], [y_dot, *sums_dot]
    # Only a second derivative comes here.
    return [y, *sums, *stats], [y_dot, *sums_dot, *stats_dot()]


def tangents(
    norm: Norm, operands: Any, sums: Sequence[Any], stats: Sequence[Any], dots: Any
) -> tuple[Any, Sequence[Any], Callable[[], Sequence[Any]]]:
    """The tangents of y, of the sum where there is one, and as a function those of the statistics.

    operands are (x, residual, scale, bias) and dots their tangents, of which None is zero and not all are.
    """
    x, residual, scale, _ = operands
    x_dot, residual_dot, *weights_dot = dots
    if residual is None:
        normalised, dot = x, x_dot
    else:
        normalised, dot = sums[0], None
        if not all_none([x_dot, residual_dot]):
            dot = tangents_jnp(reference.add, [x, residual], [x_dot, residual_dot])
    with_sum = residual is not None and dot is not None
    y_dot, *sums_dot = bind(linear_p, (normalised, stats, scale, (dot, *weights_dot)), norm=norm, with_sum=with_sum)
    if len(sums_dot) < len(sums):
        sums_dot = [ad.Zero(jax.typeof(normalised).to_tangent_aval())]
    return y_dot, sums_dot, partial(tangents_jnp, partial(reference.statistics, norm), [normalised], [dot])


def _forward_transpose(cotangents: Any, *operands: Any, tree: Any, norm: Norm, with_stats: bool) -> list[Any]:
    """y is linear in scale and bias, each alone; x and the residual are known."""
    x, residual, scale, bias = unflatten(tree, operands)
    if ad.is_undefined_primal(x) or ad.is_undefined_primal(residual) or with_stats:
        raise NotImplementedError("a norm is not linear in x")
    if residual is not None:
        x = reference.add(x, residual)
    stats = reference.statistics(norm, x)
    dy = ad.instantiate_zeros(cotangents[0])
    dscale_dtype, dbias_dtype = (w.aval.dtype if ad.is_undefined_primal(w) else None for w in (scale, bias))
    (lead, *_) = (heads.lead_of(len(norm.axes), [w.aval]) for w in (scale, bias) if ad.is_undefined_primal(w))
    wanted = iter(reference.backward(norm, dy, x, stats, None, (None, dscale_dtype, dbias_dtype), lead=lead))
    return [next(wanted) if ad.is_undefined_primal(operand) else None for operand in operands]


# linear: (x, statistics, scale, (x_dot, scale_dot, bias_dot)) -> [y_dot], with_sum [y_dot, x_dot]


def _linear_abstract(x: Any, *_: Any, tree: Any, norm: Norm, with_sum: bool) -> list[Any]:
    y_dot = layouts.result_like(x, signatures.result(norm, x), norm.padded(x.shape), norm.out_dtype)
    return [y_dot, x.update(weak_type=False)] if with_sum else [y_dot]


def _linear_jnp(*operands: Any, tree: Any, norm: Norm, with_sum: bool) -> list[Any]:
    x, stats, scale, dots = unflatten(tree, operands)
    y_dot = reference.linear(norm, x, stats, scale, dots)
    return [y_dot, dots[0]] if with_sum else [y_dot]


def _linear_batch(operands: Any, dims: Any, *, tree: Any, norm: Norm, with_sum: bool) -> tuple[Any, Any]:
    params: dict[str, Any] = {"norm": norm, "with_sum": with_sum}
    x, stats, scale, (x_dot, *weights_dot) = unflatten(tree, operands)
    x_dim, stats_dims, scale_dim, (x_dot_dim, *weights_dot_dims) = unflatten(tree, dims)
    weights = heads.batch(x, x_dim, len(norm.axes), (scale, *weights_dot), (scale_dim, *weights_dot_dims))
    if x_dim is None or weights is None:
        return batch_jnp(partial(_linear_jnp, tree=tree, **params), operands, dims)
    scale, *weights_dot = weights
    x, stats, x_dot = fold((x, stats, x_dot), (x_dim, stats_dims, x_dot_dim))
    return at_front(bind(linear_p, (x, stats, scale, (x_dot, *weights_dot)), **params))


def _linear_jvp(primals: Any, tangents: Any, **params: Any) -> tuple[Any, Any]:
    return linear_p.bind(*primals, **params), tangents_jnp(partial(_linear_jnp, **params), primals, tangents)


def _linear_transpose(cotangents: Any, *operands: Any, tree: Any, norm: Norm, with_sum: bool) -> list[Any]:
    x, stats, scale, dots = unflatten(tree, operands)
    dtypes = tuple(dot.aval.dtype if ad.is_undefined_primal(dot) else None for dot in dots)
    dy, dsum = cotangents if with_sum else (*cotangents, None)
    if type(dsum) is ad.Zero or dtypes[0] is None:
        dsum = None
    if dsum is not None and type(dy) is ad.Zero:
        return [dsum if operand is dots[0] else None for operand in operands]
    dy = ad.instantiate_zeros(dy)
    weights = [scale, *(dot.aval for dot in dots[1:] if ad.is_undefined_primal(dot))]
    lead = heads.lead_of(len(norm.axes), weights)
    wanted = iter(bind(backward_p, (dy, x, stats, scale, dsum), norm=norm, dtypes=dtypes, lead=lead))
    return [next(wanted) if ad.is_undefined_primal(operand) else None for operand in operands]


# backward: (dy, x, statistics, scale, dsum) -> those cotangents of (x, scale, bias) whose dtype is given


def _backward_abstract(*operands: Any, tree: Any, norm: Norm, dtypes: Any, lead: Lead) -> list[Any]:
    dy, x, *others = unflatten(tree, operands)
    _, of_results = signatures.of_backward((dy, x, *others), norm=norm, dtypes=dtypes, lead=lead)
    weight = (*lead, *x.shape[-len(norm.axes) :])
    results = [result for result in zip((x.shape, weight, weight), dtypes, strict=True) if result[1] is not None]
    return [layouts.result_like(x, layout, *result) for layout, result in zip(of_results, results, strict=True)]


def _backward_jnp(*operands: Any, tree: Any, norm: Norm, dtypes: Any, lead: Lead) -> list[Any]:
    dy, x, stats, scale, dsum = unflatten(tree, operands)
    return reference.backward(norm, dy, x, stats, scale, dtypes, dsum, lead)


def _backward_of_parts(*operands: Any, tree: Any, norm: Norm, dtypes: Any, lead: Lead) -> list[Any]:
    """The formula for dx, which needs an exchange, and the kernel for the others, which need none."""
    dx_dtype, *weight_dtypes = dtypes
    dy, x, stats, scale, dsum = unflatten(tree, operands)
    cotangents = reference.backward(norm, dy, x, stats, scale, (dx_dtype, None, None), dsum, lead)
    of_weights = [dtype for dtype in (*weight_dtypes, getattr(scale, "dtype", None)) if dtype is not None]
    if not (all_none(weight_dtypes) or parts.unsupported(norm, x, of_weights, lead)):
        params: dict[str, Any] = {"dtypes": (None, *weight_dtypes), "lead": lead}
        return [*cotangents, *bind(backward_p, (dy, x, stats, scale, None), norm=norm.whole(), **params)]
    return cotangents + reference.backward(norm, dy, x, stats, scale, (None, *weight_dtypes), None, lead)


def _backward_native(
    platform: str, ctx: Any, *operands: Any, tree: Any, norm: Norm, dtypes: Any, lead: Lead
) -> Sequence[Any]:
    _, x, _, scale, dsum = unflatten(tree, ctx.avals_in)
    with_dx, with_dscale, with_dbias = (dtype is not None for dtype in dtypes)
    axes = len(norm.axes)
    cols = math.prod(x.shape[-axes:])
    sums = ffi.row_sums(platform, x.shape[:-axes], x.dtype, cols) if with_dx else []
    sums += ffi.weight_sums(platform, with_dscale + with_dbias, x.dtype, cols, *heads.heads_of(x.shape, axes, lead))
    return ffi.call(
        f"jaxnorm_{norm.kind}_norm_bwd",
        ctx,
        operands,
        workspaces=sums,
        axes=np.int64(axes),
        scale_offset=np.float32(norm.scale_offset),
        has_scale=scale is not None,
        has_dsum=dsum is not None,
        with_dx=with_dx,
        with_dscale=with_dscale,
        with_dbias=with_dbias,
    )


def _backward_batch(operands: Any, dims: Any, *, tree: Any, norm: Norm, dtypes: Any, lead: Lead) -> tuple[Any, Any]:
    dy, x, stats, scale, dsum = unflatten(tree, operands)
    dy_dim, x_dim, stats_dims, scale_dim, dsum_dim = unflatten(tree, dims)
    axes, (dx_dtype, *weight_dtypes) = len(norm.axes), dtypes
    whole = None if x_dim is None else heads.batch_lead(x, x_dim, axes, lead)
    if x_dim is None or (scale_dim is not None and whole is None):
        return batch_jnp(partial(_backward_jnp, tree=tree, norm=norm, dtypes=dtypes, lead=lead), operands, dims)
    *rows, dsum = fold((dy, x, stats, dsum), (dy_dim, x_dim, stats_dims, dsum_dim))
    # The sums over the rows of each example, not of all, are those for each head. Of one row there is none to be made.
    one_row = whole is not None and math.prod(rows[1].shape[:-axes]) == math.prod(whole)
    native_sums = whole is not None and not one_row and not all_none(weight_dtypes)
    native_dtypes = dtypes if native_sums else (dx_dtype, None, None)
    native_lead = whole if whole is not None and (native_sums or scale_dim is not None) else lead
    cotangents: list[Any] = []
    if not all_none(native_dtypes):
        scale = heads.with_lead(jax.typeof(rows[1]), native_lead, axes, heads.in_front(scale, scale_dim, x.ndim))
        params: dict[str, Any] = {"norm": norm, "dtypes": native_dtypes, "lead": native_lead}
        cotangents += bind(backward_p, (*rows, scale, dsum), **params)
    if native_sums:
        of_example = (*lead, *rows[1].shape[-axes:])
        split = 0 if dx_dtype is None else 1
        cotangents[split:] = (sums.reshape(-1, *of_example) for sums in cotangents[split:])
    elif not all_none(weight_dtypes):
        sums = partial(reference.backward, norm, scale=None, dtypes=(None, *weight_dtypes), lead=lead)
        cotangents += jax.vmap(sums)(*rows)
    return at_front(cotangents)


def _backward_jvp(primals: Any, tangents: Any, *, tree: Any, norm: Norm, dtypes: Any, lead: Lead) -> tuple[Any, Any]:
    params: dict[str, Any] = {"tree": tree, "norm": norm, "dtypes": dtypes, "lead": lead}
    return backward_p.bind(*primals, **params), tangents_jnp(partial(_backward_jnp, **params), primals, tangents)


def _backward_transpose(cotangents: Any, *operands: Any, tree: Any, norm: Norm, dtypes: Any, lead: Lead) -> list[Any]:
    """The cotangents are linear in dy and dsum; `linear` is the transpose of that in dy."""
    _, x, stats, scale, dsum = unflatten(tree, operands)
    given = iter(cotangents)
    results = (None if dtype is None else next(given) for dtype in dtypes)
    dots = tuple(None if type(dot) is ad.Zero else dot for dot in results)
    (dy_bar,) = bind(linear_p, (x, stats, scale, dots), norm=norm, with_sum=False)
    dsum_bar = [] if dsum is None else [dots[0]]
    return [dy_bar, *(None for _ in operands[1 + len(dsum_bar) :]), *dsum_bar]


register(forward_p, forward_abstract, forward_jnp, _forward_batch, _forward_jvp, _forward_transpose)
register(linear_p, _linear_abstract, _linear_jnp, _linear_batch, _linear_jvp, _linear_transpose)
register(backward_p, _backward_abstract, _backward_jnp, _backward_batch, _backward_jvp, _backward_transpose)
register_native(forward_p, forward_jnp, _forward_native, signatures.of_forward, _forward_of_parts)
register_native(backward_p, _backward_jnp, _backward_native, signatures.of_backward, _backward_of_parts)
