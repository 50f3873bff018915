"""Quantised norms with a derivative.

Rounding has the derivative zero nearly everywhere, which no one wants. So quantised norms have another by convention,
or none: the *straight-through* one takes what was quantised for its values times scales. 8 bits are too few for a
cotangent, and integers have none, so it flows through a result of zeros besides, the carrier, whose tangent is that of
the unquantised norm.

Both primitives here have this rule: that of the op, for which `linear` and `backward` of the norm's op compute it, one
native call each way; and one within the formula, between what is quantised and its rounding, for JAX to differentiate
what is around. A `custom_jvp` would not do: JAX drops its rule where it linearises the body of a loop.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from jaxnorm.native import compat, jet
from jaxnorm.ops.norm import formula
from jaxnorm.ops.norm.op import NORM
from jaxnorm.primitive import lowering
from jaxnorm.primitive.op import Statistics

if TYPE_CHECKING:
    from jaxnorm.ops.quantized_norm.formula import Operands, QuantizedNorm, Results


def tangents(
    norm: "QuantizedNorm", operands: "Operands", results: "Results", stats: Statistics, dots: "Operands"
) -> tuple["Results", Callable[[], Sequence[Any]]]:
    """The tangents of the carrier and the sum; others are None. And as a function those of the statistics."""
    _check(norm)
    dtype, smooth = operands.x.dtype, operands.smooth
    unquantized = norm.unquantized(dtype if smooth is None else norm.compute_dtype)
    of_norm = formula.Results(results.carrier, results.sum)  # type: ignore[arg-type]
    y_dot: Any
    (y_dot, sum_dot), of_stats = NORM.tangents(unquantized, operands.of_norm(), of_norm, stats, dots.of_norm())
    if smooth is not None and type(y_dot) is not ad.Zero:
        y_dot = (y_dot * lax.stop_gradient(formula.broadcastable(norm, operands.x, smooth))).astype(dtype)
    of_results: Any = {"values": None, "scales": None, "carrier": y_dot, "sum": sum_dot}
    return results._replace(**of_results), of_stats


def straight_through(
    norm: "QuantizedNorm", v: jax.Array, given: jax.Array | None, dtype: np.dtype[Any]
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """v and the given scale, which do not move from here on, and a carrier of this dtype that moves as v does."""
    values = _primitive.bind(*(v,) if given is None else (v, given), norm=norm, dtype=dtype)
    carrier = values.pop() if norm.straight_through else None
    return values[0], None if given is None else values[1], carrier


def no_derivative(norm: "QuantizedNorm") -> ValueError:
    return ValueError(
        f"{norm.kind}_norm_quantized: rounded values have no derivative, and one is taken; pass straight_through=True "
        f"for that of the norm before it is quantised, and of new_residual the true one; or apply "
        f"jax.lax.stop_gradient to x, residual, scale and bias, not to the result."
    )


def _check(norm: "QuantizedNorm") -> None:
    if not norm.straight_through:
        raise no_derivative(norm)


def _abstract(*operands: Any, norm: "QuantizedNorm", dtype: np.dtype[Any]) -> list[Any]:
    types = [operand.update(weak_type=False) for operand in operands]
    return [*types, types[0].update(dtype=dtype)] if norm.straight_through else types


def _formula(*operands: jax.Array, norm: "QuantizedNorm", dtype: np.dtype[Any]) -> list[jax.Array]:
    # Made of v, so that under vmap and over a mesh it varies as v does.
    carrier = [jnp.where(False, operands[0].astype(dtype), 0)] if norm.straight_through else []
    return [*operands, *carrier]


def _batch(operands: Any, axes: Any, *, norm: "QuantizedNorm", dtype: np.dtype[Any]) -> tuple[Any, Any]:
    return _primitive.bind(*operands, norm=norm, dtype=dtype), [*axes, axes[0]][: len(axes) + norm.straight_through]


def _jvp(primals: Any, dots: Any, *, norm: "QuantizedNorm", dtype: np.dtype[Any]) -> tuple[Any, Any]:
    _check(norm)
    results = _primitive.bind(*primals, norm=norm, dtype=dtype)
    *zeros, of_carrier = (ad.Zero(jax.typeof(result).to_tangent_aval()) for result in results)
    moving = type(dots[0]) is not ad.Zero
    return results, [*zeros, lax.convert_element_type(dots[0], dtype) if moving else of_carrier]


def _jet(primals: Any, series: Any, *, norm: "QuantizedNorm", dtype: np.dtype[Any]) -> tuple[Any, Any]:
    _check(norm)
    results = _primitive.bind(*primals, norm=norm, dtype=dtype)
    return results, [*(None for _ in primals), [term.astype(dtype) for term in series[0]]]


_primitive = Primitive("jaxnorm_straight_through")
_primitive.multiple_results = True
_primitive.def_abstract_eval(_abstract)
compat.run_eagerly(_primitive)
jet.register(_primitive, _jet)
lowering.register_formula(_primitive, _formula)
batching.primitive_batchers[_primitive] = _batch
ad.primitive_jvps[_primitive] = _jvp
