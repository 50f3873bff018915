"""What blocks of models are made of, for modules of both Flax APIs: a norm with its neighbours in one call."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxnorm.flax import calls, known, linen_calls, linen_norms, linen_others, nnx_calls, nnx_norms, nnx_others
from jaxnorm.flax.calls import linen, nnx
from jaxnorm.flax.formula import Own, parameters_of
from jaxnorm.flax.nnx_replace import class_before
from jaxnorm.flax.replacement import find
from jaxnorm.ops.gated_activation.api import gated_activation
from jaxnorm.ops.norm.api import add_rms_norm

# Norms of rows, and the functions that compute them.
FUNCTIONS: dict[type, calls.Functions] = {
    **dict.fromkeys((nnx.RMSNorm, nnx_norms.RMSNorm, linen.RMSNorm, linen_norms.RMSNorm), calls.RMS),
    **dict.fromkeys((nnx.LayerNorm, nnx_norms.LayerNorm, linen.LayerNorm, linen_norms.LayerNorm), calls.LAYER),
}
GROUPED = dict.fromkeys((nnx.GroupNorm, nnx_others.GroupNorm, linen.GroupNorm, linen_others.GroupNorm), True)


def added(norm: Any, x: jax.Array, residual: jax.Array, branch_scale: jax.Array | None = None) -> Any:
    """`norm(h), h` of `h = branch_scale * x + residual`, of a norm of Flax, of this package or of a known model."""
    factors = () if branch_scale is None else (branch_scale,)
    residual = residual.astype(jnp.result_type(x, residual, *factors))  # the dtype of the sum
    functions = find(type(norm), FUNCTIONS)
    if functions is not None:
        add = partial(functions.add, branch_scale=branch_scale)
        rows = (x, residual)
        if isinstance(norm, nnx.Module):
            results = nnx_calls.fused(add, norm, None, rows)
        else:
            results = linen_calls.fused(add, norm, rows, None, linen_calls.there)
        if results is not None:
            return results
    elif (results := _added_of_known(norm, x, residual, branch_scale)) is not None:
        return results
    return calls.add_first(lambda total, mask: norm(total), (x, residual), None, branch_scale)


def _added_of_known(norm: Any, x: jax.Array, residual: jax.Array, branch_scale: jax.Array | None) -> Any:
    """`added` of an RMSNorm of a known model, whose sum has the residual's dtype; None of others."""
    cls = type(norm)
    own = known.own(class_before(cls) or cls, norm)
    formula = own.plain if isinstance(own, Own) else None
    if formula is None or formula.function != "rms_norm":
        return None
    parameters = parameters_of(formula, norm)
    if formula.why_not(residual, parameters) is not None:
        return None
    scale, keywords = formula.arguments(residual.dtype, parameters)
    return add_rms_norm(x, residual, scale, branch_scale=branch_scale, **keywords)


def silu_of_norm(norm: Any, x: jax.Array) -> jax.Array:
    """`silu(norm(x))` of a GroupNorm, in one call; of another norm in two."""
    y = None
    if find(type(norm), GROUPED):
        if isinstance(norm, nnx.Module):
            y = nnx_others.grouped(norm, None, x, activation="silu")
        else:
            y = linen_others.grouped(norm, x, None, linen_calls.there, activation="silu")
    return jax.nn.silu(norm(x)) if y is None else y


def gated(block: Any, x: jax.Array, activation: Any, **split: Any) -> Any:
    """`down_proj(activation(gate_proj(x)) * up_proj(x))`, whose products say how they are `split` over a mesh."""
    y = gated_activation((block.gate_proj(x, **split), block.up_proj(x, **split)), activation=activation)
    return block.down_proj(y, **split)


def own_call(block: Any, *args: Any, **kwargs: Any) -> Any:
    """The block as its own code computes it."""
    cls: Any = type(block)
    return (class_before(cls) or cls).__call__(block, *args, **kwargs)
