"""Norms of published models: what each class computes. Classes go by their paths, so that no library is imported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from jaxnorm.flax import replacement
from jaxnorm.flax.formula import Formula, Own

# The formulas of a module: of x alone, and with a gate.
Formulas = tuple[Formula | None, Formula | None]
HALVES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


def own(cls: type, module: Any) -> Own | str | None:
    """The formulas of a module whose class is known, or why they do not hold for it; None if it is not known."""
    entry = replacement.find(cls, KNOWN, lambda base: f"{base.__module__}.{base.__qualname__}")
    if entry is None:
        return None
    found = entry(module)
    return found if isinstance(found, str) else Own(cls, *found)


def _rms(scale: str, epsilon: Any, offset: float = 0.0) -> Callable[[Any], Formulas]:
    """All in float32, and rounded to x's dtype at the end. `epsilon` is a number, or the name of an attribute."""

    def formulas(norm: Any) -> Formulas:
        value = getattr(norm, epsilon) if isinstance(epsilon, str) else epsilon
        return Formula(function="rms_norm", scale=scale, epsilon=value, scale_offset=offset), None

    return formulas


def _hub(offset: float) -> Callable[[Any], Formulas]:
    """x_hat is rounded to the module's dtype, and the product has that one, promoted by the weight's."""

    def formulas(norm: Any) -> Formulas:
        dtype = jnp.dtype(norm.dtype)
        rounded: dict[str, Any] = {"multiply_before_cast": False, "dtypes": (dtype,)} if dtype in HALVES else {}
        epsilon = norm.config.rms_norm_eps
        options: dict[str, Any] = {"scale_offset": offset, "rounds_sum": True, "out_dtype": dtype, "with_scale": True}
        return Formula(function="rms_norm", scale="weight", epsilon=epsilon, **options, **rounded), None

    return formulas


def _t5(norm: Any) -> Formulas:
    """Nothing is rounded: the result is float32."""
    return Formula(function="rms_norm", scale="weight", epsilon=norm.eps, out_dtype=jnp.dtype(jnp.float32)), None


def _gemma(norm: Any) -> Formulas | str:
    """In x's dtype, promoted by the scale's. In a half type the statistics are rounded too; here they are not."""
    scale = "scale" if getattr(norm, "with_scale", True) else None
    if getattr(norm, "guard_against_excess_precision", False):
        return "it rounds x with guard_against_excess_precision"
    options: dict[str, Any] = {"scale_offset": 1.0, "rounds_sum": True, "with_scale": True}
    return Formula(function="rms_norm", scale=scale, epsilon=1e-6, **options), None


def _maxtext(norm: Any) -> Formulas | str:
    """x_hat and the scale are rounded to the module's dtype, and so is their product."""
    if getattr(norm.shard_mode, "name", "AUTO") != "AUTO":
        return "it states how an Explicit mesh splits its result"
    if norm.parameter_memory_host_offload:
        return "its scale lies in the host's memory"
    dtype = jnp.dtype(norm.dtype)
    scale = {"scale": "scale", "scale_dtype": dtype, "scale_offset": norm.scale_offset, "rounds_sum": True}
    options: dict[str, Any] = {"multiply_before_cast": dtype not in HALVES, "out_dtype": dtype}
    options |= scale if norm.with_scale else {}
    return Formula(function="rms_norm", epsilon=norm.epsilon, **options), None


def _mamba2(norm: Any) -> Formulas:
    """With a gate only where the module has `gate_residual`; without that it ignores one."""
    plain = Formula(function="rms_norm", scale="weight", epsilon=norm.eps)
    return plain, replace(plain, function="gated_rms_norm", gate_first=True) if norm.gate_residual else None


KNOWN: dict[str, Callable[[Any], Formulas | str]] = {
    "transformers.models.llama.modeling_flax_llama.FlaxLlamaRMSNorm": _hub(0.0),
    "transformers.models.mistral.modeling_flax_mistral.FlaxMistralRMSNorm": _hub(0.0),
    "transformers.models.gemma.modeling_flax_gemma.FlaxGemmaRMSNorm": _hub(1.0),
    "transformers.models.t5.modeling_flax_t5.FlaxT5LayerNorm": _t5,
    "transformers.models.longt5.modeling_flax_longt5.FlaxLongT5LayerNorm": _t5,
    "gemma.gm.nn._layers.RMSNorm": _gemma,
    "maxtext.layers.normalizations.RMSNorm": _maxtext,
    "bonsai.models.gemma3.modeling.Gemma3RMSNorm": _rms("scale", "eps", 1.0),
    "bonsai.models.mamba2.modeling.RMSNorm": _mamba2,
    "bonsai.models.qwen3_vl.modeling.RMSNorm": _rms("weight", "eps"),
}
