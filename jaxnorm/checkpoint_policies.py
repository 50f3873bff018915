"""Policies for `jax.checkpoint` that tell norms from the rest of a model, beside those of `jax.checkpoint_policies`.

    block = jax.checkpoint(block, policy=jaxnorm.checkpoint_policies.save_norms)

Where a derivative follows, each result of a norm and each of its statistics has one of `NAMES`, so that
`jax.checkpoint_policies.save_only_these_names(*NAMES)` and its like work as well. Name all of them: one native call
gives them together, and it runs again if one is missing. What the package's other functions give has these names too.
"""

from typing import Any

from jaxnorm.primitive import registry
from jaxnorm.primitive.rules import NAMES, is_named

__all__ = ["NAMES", "recompute_norms", "save_norms"]


def save_norms(prim: Any, *_: Any, **params: Any) -> bool:
    """Keeps what norms give for the backward pass, and recomputes everything else.

    One native call each way, for the memory of the norms' results.
    `jax.checkpoint_policies.save_from_both_policies(save_norms, dots_saveable)` keeps matrix products too.
    """
    return is_named(prim, params)


def recompute_norms(prim: Any, *_: Any, **params: Any) -> bool:
    """Keeps everything but what norms give, which a second forward call computes again: norms are cheap to repeat.

    The statistics are among it: the call that gives the result gives them too.
    """
    # What is quantised stands in a function with a derivative of its own.
    inner = [eqn.primitive for eqn in params["call_jaxpr"].eqns] if "call_jaxpr" in params else []
    return not any(registry.known(of).is_forward for of in (prim, *inner)) and not is_named(prim, params)
