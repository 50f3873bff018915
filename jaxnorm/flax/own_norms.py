"""The norms of known models that are classes of their own: where their weights are, and what they say."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxnorm.ops.norm.added_api import add_rms_norm
from jaxnorm.ops.norm.api import rms_norm


class Said(NamedTuple):
    """A norm's scale, and the keywords with which the functions compute it."""

    scale: jax.Array
    keywords: dict[str, Any]


def gemma3_norm(norm: Any) -> Said:
    return Said(norm.scale[...], {"epsilon": norm.eps, "scale_offset": 1.0})


def _weight(norm: Any) -> Said:
    return Said(norm.weight[...], {"epsilon": norm.eps})


def _hub_llama(norm: Any) -> Said:
    keywords = {"multiply_before_cast": False, "out_dtype": jnp.result_type(norm.weight, norm.dtype)}
    return Said(norm.weight, {"epsilon": norm.epsilon, **keywords})


NORMS: dict[str, Callable[[Any], Said]] = {
    "bonsai.models.gemma3.modeling.Gemma3RMSNorm": gemma3_norm,
    "bonsai.models.qwen3_vl.modeling.RMSNorm": _weight,
    "transformers.models.llama.modeling_flax_llama.FlaxLlamaRMSNorm": _hub_llama,
}


def name_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def said(norm: Any) -> Said | None:
    """What a norm of a known model says; None of others."""
    read = NORMS.get(name_of(type(norm)))
    return read and read(norm)


def own_norm(norm: Any, x: jax.Array) -> jax.Array:
    """A norm of a known model."""
    scale, keywords = NORMS[name_of(type(norm))](norm)
    return rms_norm(x, scale, **keywords)


def add_of_own(norm: Any, x: jax.Array, residual: jax.Array, branch_scale: jax.Array | None) -> Any:
    """`norm(h), h` of `h = branch_scale * x + residual` of a norm of a known model; None of others."""
    if (own := said(norm)) is None:
        return None
    keywords = {"out_dtype": residual.dtype, **own.keywords}
    return add_rms_norm(x, residual, own.scale, branch_scale=branch_scale, **keywords)
