"""The primitive of a quantised norm with its abstract evaluation, lowering and batching; and around it its derivative.

Rounding has the derivative zero nearly everywhere, which no one wants. So `quantized` has another by convention, or
none: the *straight-through* one takes what was quantised for its values times scales. 8 bits are too few for a
cotangent, and integers have none, so it flows through a result of zeros besides, the carrier, of which the tangent is
that of the unquantised norm. `linear` and `backward` of `jaxnorm.primitives` compute it: one native call each way.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad

from jaxnorm import compat, layouts, primitives, reference, signatures
from jaxnorm.quantization import Quantization
from jaxnorm.reference import Norm
from jaxnorm.rules import all_none, at_front, batch_jnp, bind, fold, named, register, register_native, tangents_jnp

unflatten = jax.tree.unflatten
quantized_p = Primitive("jaxnorm_quantized")


@dataclasses.dataclass(frozen=True)
class Call:
    """What is static about one quantised norm; without a kernel it is jnp on every platform."""

    norm: Norm
    quantization: Quantization
    straight_through: bool
    has_kernel: bool
    with_stats: bool = False


class Operands(NamedTuple):
    x: Any
    residual: Any
    scale: Any
    bias: Any
    smooth: Any
    given: Any


class Results(NamedTuple):
    values: Any
    scales: Any  # None where the scale is given
    carrier: Any  # None without a derivative
    sums: tuple[Any, ...]  # one or none
    stats: tuple[Any, ...]


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def quantized(call: Call, operands: Operands) -> Results:
    if call.has_kernel:
        flat = bind(quantized_p, operands, norm=call.norm, quantization=call.quantization, with_stats=call.with_stats)
    else:
        y, *sum_or_none = reference.apply(call.norm, *operands[:4])
        flat = [*_quantize(call.quantization, call.norm, y, operands), *sum_or_none]
    values, *rest = flat
    scales = rest.pop(0) if operands.given is None else None
    sums = 0 if operands.residual is None else 1
    # Made of the values, so that under vmap and over a mesh it varies as what it stands for does.
    carrier = jnp.where(False, values.astype(operands.x.dtype), 0) if call.straight_through else None
    return Results(values, scales, carrier, sums=tuple(rest[:sums]), stats=tuple(rest[sums:]))


@partial(quantized.defjvp, symbolic_zeros=True)
def _quantized_jvp(call: Call, primals: Any, tangents: Any) -> tuple[Results, Results]:
    ((operands,), (dots,)) = primals, tangents
    if not call.straight_through:
        raise ValueError(
            f"{call.norm.kind}_norm_quantized: rounded values have no derivative, and one is taken; pass "
            f"straight_through=True for that of the norm before it is quantised, and of new_residual the true one; or "
            f"apply jax.lax.stop_gradient to x, residual, scale and bias, not to the result."
        )
    results = quantized(dataclasses.replace(call, with_stats=call.has_kernel), operands)
    results = _named(results)
    zeros = jax.tree.map(lambda result: SymbolicZero(jax.typeof(result).to_tangent_aval()), results)
    results_dot = zeros
    moving = [None if isinstance(dot, SymbolicZero) else dot for dot in dots[:4]]
    if not all_none(moving):
        results_dot = zeros._replace(**_tangents(call, operands, results, moving))
    if not call.with_stats:
        results, results_dot = results._replace(stats=()), results_dot._replace(stats=())
    return results, results_dot


def _named(results: Results) -> Results:
    """The results, known to `jax.checkpoint`'s policies."""
    # As integers: `jax.checkpoint` rounds what it keeps to its dtype, and takes a float8 to have infinities.
    (integers,) = named("result", [lax.bitcast_convert_type(results.values, jnp.int8)])
    values = lax.bitcast_convert_type(integers, results.values.dtype)
    return Results(
        values,
        None if results.scales is None else named("result", [results.scales])[0],
        None if results.carrier is None else named("result", [results.carrier])[0],
        sums=tuple(named("sum", results.sums)),
        stats=tuple(named("statistics", results.stats)),
    )


def _tangents(call: Call, operands: Operands, results: Results, dots: Any) -> dict[str, Any]:
    """The tangents of the carrier, the sum and the statistics; dots are those of (x, residual, scale, bias)."""
    dtype, smooth = operands.x.dtype, operands.smooth
    norm = dataclasses.replace(call.norm, out_dtype=dtype if smooth is None else call.norm.compute_dtype)
    stats_dot: Any = results.stats
    if call.has_kernel:
        y_dot, sums_dot, of_stats = primitives.tangents(norm, operands[:4], results.sums, results.stats, dots)
        stats_dot = of_stats() if call.with_stats else stats_dot
    else:
        y_dot, *sums_dot = tangents_jnp(partial(reference.apply, norm), operands[:4], dots)
    if smooth is not None:
        y_dot = (y_dot * lax.stop_gradient(reference.broadcastable(norm, operands.x, smooth))).astype(dtype)
    sums_dot = [SymbolicZero(dot.aval) if type(dot) is ad.Zero else dot for dot in sums_dot]
    return {"carrier": y_dot, "sums": tuple(sums_dot), "stats": tuple(stats_dot)}


def _quantize(quantization: Quantization, norm: Norm, y: jax.Array, operands: Operands) -> list[jax.Array]:
    values, scales = reference.quantize(quantization, norm, y, operands.smooth, operands.given)
    return [values] if scales is None else [values, scales]


# quantized: (x, residual, scale, bias, smooth, given) -> [values], scales if none is given, with a residual the sum;
# with_stats the statistics follow


def _forward(operands: Any, tree: Any) -> tuple[Operands, list[Any], Any]:
    """All operands by name, and those of `forward` as its rules take them."""
    named = Operands(*unflatten(tree, operands))
    return named, *jax.tree.flatten(tuple(named[:4]))


def _abstract(*operands: Any, tree: Any, norm: Norm, quantization: Quantization, with_stats: bool) -> list[Any]:
    named, forward, forward_tree = _forward(operands, tree)
    y, *rest = primitives.forward_abstract(*forward, tree=forward_tree, norm=norm, with_stats=with_stats)
    values = y.update(dtype=quantization.dtype)
    if named.given is not None:
        return [values, *rest]
    _, (_, layout, *_) = signatures.of_quantized(named, norm=norm, quantization=quantization, with_stats=with_stats)
    if quantization.group_size is not None:
        shape = (*y.shape[:-1], y.shape[-1] // quantization.group_size)
    else:
        shape = (*y.shape[: -len(norm.axes)], *(1 for _ in norm.axes))
    scales = layouts.result_like(named.x, layout, shape, np.float32)
    if norm.split is not None and quantization.group_size is None:
        scales = compat.same_along(scales, norm.split.names)
    return [values, scales, *rest]


def _jnp(*operands: Any, tree: Any, norm: Norm, quantization: Quantization, with_stats: bool) -> list[Any]:
    named, forward, forward_tree = _forward(operands, tree)
    y, *rest = primitives.forward_jnp(*forward, tree=forward_tree, norm=norm, with_stats=with_stats)
    return [*_quantize(quantization, norm, y, named), *rest]


def _native(
    platform: str, ctx: Any, *operands: Any, tree: Any, norm: Norm, quantization: Quantization, with_stats: bool
) -> Any:
    has = Operands(*(operand is not None for operand in unflatten(tree, operands)))
    # As in a forward that is not quantised, the sum goes where the residual was.
    aliases = {1: 1 if has.given else 2} if has.residual and not with_stats else {}
    unbounded = quantization.max_scale is None
    return jax.ffi.ffi_lowering(f"jaxnorm_{norm.kind}_norm_quantized_fwd", operand_output_aliases=aliases)(
        ctx,
        *operands,
        axes=np.int64(len(norm.axes)),
        group=np.int64(quantization.group_size or 0),
        epsilon=np.float32(norm.epsilon),
        scale_offset=np.float32(norm.scale_offset),
        max_scale=np.float32(np.inf if unbounded else quantization.max_scale),
        power_of_two=quantization.power_of_two,
        has_residual=has.residual,
        has_scale=has.scale,
        has_bias=has.bias,
        has_smooth=has.smooth,
        has_given=has.given,
    )


def _batch(operands: Any, dims: Any, *, tree: Any, **params: Any) -> tuple[Any, Any]:
    named, axes = Operands(*unflatten(tree, operands)), Operands(*unflatten(tree, dims))
    if not all_none(axes[2:]):
        return batch_jnp(partial(_jnp, tree=tree, **params), operands, dims)
    x, residual = fold((named.x, named.residual), (axes.x, axes.residual))
    return at_front(bind(quantized_p, named._replace(x=x, residual=residual), **params))


register(quantized_p, _abstract, _jnp, _batch)
register_native(quantized_p, _jnp, _native, signatures.of_quantized)
