"""Quantised norms with a derivative.

Rounding has the derivative zero nearly everywhere, which no one wants. So `quantized` has another by convention, or
none: the *straight-through* one takes what was quantised for its values times scales. 8 bits are too few for a
cotangent, and integers have none, so it flows through a result of zeros besides, the carrier, whose tangent is that of
the unquantised norm. `linear` and `backward` of the norm's op compute it: one native call each way.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad

from jaxnorm.ops.norm import formula
from jaxnorm.ops.norm.op import NORM
from jaxnorm.ops.quantized_norm.formula import QUANTIZED_NORM, Operands, QuantizedNorm, no_derivative, plain
from jaxnorm.primitive.op import Statistics
from jaxnorm.primitive.rules import all_none, named, tangents_jnp


@dataclasses.dataclass(frozen=True)
class Static:
    """What is static about one call; one that is no primitive is jnp on every platform."""

    norm: QuantizedNorm
    straight_through: bool
    is_primitive: bool
    with_stats: bool = False


class Results(NamedTuple):
    values: Any
    scales: Any  # None where the scale is given
    carrier: Any  # None without a derivative
    sum: Any  # None where nothing is added
    stats: Statistics


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def quantized(static: Static, operands: Operands) -> Results:
    norm = static.norm
    if static.is_primitive:
        results, stats = QUANTIZED_NORM.bind(norm, operands, with_stats=static.with_stats)
    else:
        results, stats = plain(norm, operands), ()
    # Made of the values, so that under vmap and over a mesh it varies as what it stands for does.
    values = results.values
    carrier = jnp.where(False, values.astype(operands.x.dtype), 0) if static.straight_through else None
    return Results(values, results.scales, carrier, results.sum, stats)


@partial(quantized.defjvp, symbolic_zeros=True)
def _quantized_jvp(static: Static, primals: Any, tangents: Any) -> tuple[Results, Results]:
    ((operands,), (dots,)) = primals, tangents
    if not static.straight_through:
        raise no_derivative(static.norm)
    results = _named(quantized(dataclasses.replace(static, with_stats=static.is_primitive), operands))
    results_dot = jax.tree.map(lambda result: SymbolicZero(jax.typeof(result).to_tangent_aval()), results)
    moving: Any = [None if isinstance(dot, SymbolicZero) else dot for dot in dots.of_norm()]
    if not all_none(moving):
        results_dot = results_dot._replace(**_tangents(static, operands, results, formula.Operands(*moving)))
    if not static.with_stats:
        results, results_dot = results._replace(stats=()), results_dot._replace(stats=())
    return results, results_dot


def _named(results: Results) -> Results:
    """The results, known to `jax.checkpoint`'s policies."""
    # As integers: `jax.checkpoint` rounds what it keeps to its dtype, and takes a float8 to have infinities.
    (integers,) = named("result", [lax.bitcast_convert_type(results.values, jnp.int8)])
    return Results(
        lax.bitcast_convert_type(integers, results.values.dtype),
        None if results.scales is None else named("result", [results.scales])[0],
        None if results.carrier is None else named("result", [results.carrier])[0],
        None if results.sum is None else named("sum", [results.sum])[0],
        tuple(named("statistics", results.stats)),
    )


def _tangents(static: Static, operands: Operands, results: Results, dots: formula.Operands) -> dict[str, Any]:
    """The tangents of the carrier, the sum and the statistics."""
    dtype, smooth, of_norm = operands.x.dtype, operands.smooth, operands.of_norm()
    norm = static.norm.unquantized(dtype if smooth is None else static.norm.compute_dtype)
    sum_dot: Any
    stats_dot: Any = results.stats
    if static.is_primitive:
        of_forward = formula.Results(results.values, results.sum)
        (y_dot, sum_dot), of_stats = NORM.tangents(norm, of_norm, of_forward, results.stats, dots)
        stats_dot = of_stats() if static.with_stats else stats_dot
    else:

        def of_plain(*arrays: Any) -> formula.Results:
            return formula.plain(norm, formula.Operands(*arrays))

        y_dot, sum_dot = tangents_jnp(of_plain, of_norm, dots)
    if smooth is not None:
        y_dot = (y_dot * lax.stop_gradient(formula.broadcastable(norm, operands.x, smooth))).astype(dtype)
    if type(sum_dot) is ad.Zero:
        sum_dot = SymbolicZero(sum_dot.aval)
    return {"carrier": y_dot, "sum": sum_dot, "stats": tuple(stats_dot)}
