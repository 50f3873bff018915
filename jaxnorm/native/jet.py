"""What `jax.experimental.jet` has to know of primitives. A JAX may be without it: then there is nothing to register."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Primitive, jaxpr_as_fun

from jaxnorm.native import private

jet = private.module("jax.experimental.jet")
if not all(hasattr(jet, name) for name in ("JetTracer", "jet_rules", "linear_prop", "zero_series")):
    jet = None
ad_checkpoint = private.module("jax._src.ad_checkpoint")
if jet is not None:
    # JAX has no rule for names, which the derivative of an op gives to values, nor for the rounding of a formula.
    for linear in filter(None, (getattr(ad_checkpoint, "name_p", None), lax.reduce_precision_p)):
        jet.jet_rules.setdefault(linear, partial(jet.linear_prop, linear))
    # Nor for `jax.checkpoint`, within which it differentiates.
    if (remat := getattr(ad_checkpoint, "remat_p", None)) is not None:
        jet.jet_rules.setdefault(remat, lambda *both, jaxpr, **_: of_formula(_evaluated(jaxpr), *both))


def register(primitive: Primitive, rule: Callable[..., Any]) -> None:
    """Let `jax.experimental.jet` differentiate primitive: rule gives results and their terms, None for zero ones.

    The terms are not multiplied by factorials.
    """
    if jet is None:
        return

    def with_zeros(primals: Any, series: Any, **params: Any) -> Any:
        results, terms = rule(primals, series, **params)
        return results, [jet.zero_series if of_result is None else of_result for of_result in terms]

    rules: dict[Primitive, Callable[..., Any]] = jet.jet_rules
    rules[primitive] = with_zeros


def of_formula(formula: Callable[..., Any], primals: Any, series: Any) -> Any:
    """What the rule of a primitive that computes formula gives."""
    return jet.jet(formula, primals, series, factorial_scaled=False)


def _evaluated(jaxpr: Jaxpr) -> Callable[..., Any]:
    evaluated: Callable[..., Any] = jaxpr_as_fun(ClosedJaxpr(jaxpr, ()))
    return evaluated


def has_terms(array: jax.Array) -> bool:
    """Whether `jax.experimental.jet` differentiates along this array."""
    return jet is not None and isinstance(array, jet.JetTracer) and array.terms is not jet.zero_series
