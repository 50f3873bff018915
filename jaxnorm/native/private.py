"""Whether jaxnorm knows this JAX: its version, and the private names in use. If not, all works but the kernels.

And what `jax.experimental.jet` has to know of primitives, which a JAX may be without.
"""

import importlib
import operator
import os
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Primitive, jaxpr_as_fun

# The versions that jaxnorm is tested with, which are those that it depends on.
OLDEST, NEWEST = (0, 10), (0, 12)

# By the modules in which they stand; of names with "|" between them one is enough. `jaxnorm.native.compat` uses them.
NAMES: dict[str, tuple[str, ...]] = {
    "jax._src.checkify": ("error_checks", "nan_error_check"),
    "jax._src.core": ("ShapedArray.mat", "auto_insert_reshard|standard_insert_pvary", "extend_axis_env_nd"),
    "jax._src.custom_partitioning_sharding_rule": ("sdy_sharding_rule_to_mlir",),
    "jax._src.dispatch": ("apply_primitive",),
    "jax._src.interpreters.mlir": ("build_mlir_module_helper", "module_to_bytecode"),
    "jax._src.lib": (
        "xla_client.HloSharding.from_proto",
        "xla_client.HloSharding.replicate",
        "xla_client.HloSharding.tuple_sharding",
        "xla_client.OpSharding.Type",
        "xla_client.register_custom_call_partitioner",
    ),
    "jax._src.sharding_impls": ("SPMDAxisContext", "ShardingContext"),
    "jax._src.xla_bridge": ("canonicalize_platform", "register_plugin_callbacks"),
    "jax.experimental.custom_partitioning": ("ArrayMapping", "SdyShardingRule"),
}


def module(name: str) -> Any:
    """A module of JAX, None where it is gone."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _is_there(owner: Any, name: str) -> bool:
    try:
        operator.attrgetter(name)(owner)
    except AttributeError:
        return False
    return True


def missing() -> str | None:
    """The first of NAMES that this JAX does not have."""
    for where, names in NAMES.items():
        owner = module(where)
        if owner is None:
            return where
        for name in names:
            if not any(_is_there(owner, choice) for choice in name.split("|")):
                return f"{where}.{name.replace('|', ' and no ')}"
    return None


def untested() -> str | None:
    """What jaxnorm was tested with instead, where it was not with this version. An older one has another FFI."""
    version = jax.__version_info__[:2]
    tested = f"it was tested with {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    if version < OLDEST:
        return tested
    if version > NEWEST and os.environ.get("JAXNORM_UNTESTED_JAX") != "1":
        return f"{tested}, and JAXNORM_UNTESTED_JAX=1 lets kernels run on a newer one"
    return None


def why_unknown() -> str | None:
    """Why no kernel can be called from this JAX, and the remedy; with a warning. None: it is known."""
    if (why := untested()) is None:
        if (name := missing()) is None:
            return None
        why = f"it has no {name}"
    reason = (
        f"this JAX, {jax.__version__}, is not known to this jaxnorm ({why}); install a newer jaxnorm, or the JAX that "
        "this one asks for"
    )
    warnings.warn(f"jaxnorm has no kernels, and every call runs XLA's code: {reason}.", stacklevel=2)
    return reason


# `jax.experimental.jet`, which a JAX may be without: then there is nothing to register.
jet = module("jax.experimental.jet")
if not all(hasattr(jet, name) for name in ("JetTracer", "jet_rules", "linear_prop", "zero_series")):
    jet = None
ad_checkpoint = module("jax._src.ad_checkpoint")
if jet is not None:
    # JAX has no rule for names, which the derivative of an op gives to values, nor for the rounding of a formula.
    for linear in filter(None, (getattr(ad_checkpoint, "name_p", None), lax.reduce_precision_p)):
        jet.jet_rules.setdefault(linear, partial(jet.linear_prop, linear))
    # Nor for `jax.checkpoint`, within which it differentiates.
    if (remat := getattr(ad_checkpoint, "remat_p", None)) is not None:
        jet.jet_rules.setdefault(remat, lambda *both, jaxpr, **_: jet_of_formula(_evaluated(jaxpr), *both))


def register_jet(primitive: Primitive, rule: Callable[..., Any]) -> None:
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


def jet_of_formula(formula: Callable[..., Any], primals: Any, series: Any) -> Any:
    """What the rule of a primitive that computes formula gives."""
    return jet.jet(formula, primals, series, factorial_scaled=False)


def _evaluated(jaxpr: Jaxpr) -> Callable[..., Any]:
    evaluated: Callable[..., Any] = jaxpr_as_fun(ClosedJaxpr(jaxpr, ()))
    return evaluated


def has_jet_terms(array: jax.Array) -> bool:
    """Whether `jax.experimental.jet` differentiates along this array."""
    return jet is not None and isinstance(array, jet.JetTracer) and array.terms is not jet.zero_series
