"""Policies for `jax.checkpoint` that tell norms from the rest of a model, beside those of `jax.checkpoint_policies`.

    block = jax.checkpoint(block, policy=jaxnorm.checkpoint_policies.save_norms)

Under a derivative each result and each statistic of a norm has one of `NAMES`, so
`jax.checkpoint_policies.save_only_these_names(*NAMES)` and its like work as well. Name all of them: one native call
computes them together, and runs again if one is missing. Results of the package's other functions have these names too.
"""

from typing import Any

from jaxnorm.primitive import registry
from jaxnorm.primitive.rules import NAMES, is_named

__all__ = ["NAMES", "recompute_norms", "save_norms"]


def save_norms(prim: Any, *_: Any, **params: Any) -> bool:
    """Saves results and statistics of norms for the backward pass, and recomputes everything else.

    Each norm is then one native call each way, and its results stay in memory.
    `jax.checkpoint_policies.save_from_both_policies(save_norms, dots_saveable)` saves matrix products too.
    """
    return is_named(prim, params)


def recompute_norms(prim: Any, *_: Any, **params: Any) -> bool:
    """Saves everything but results and statistics of norms, which a second forward call recomputes: norms are cheap."""
    # What is quantised stands in a function with a derivative of its own.
    inner = [eqn.primitive for eqn in params["call_jaxpr"].eqns] if "call_jaxpr" in params else []
    return not any(registry.known(of).is_forward for of in (prim, *inner)) and not is_named(prim, params)
