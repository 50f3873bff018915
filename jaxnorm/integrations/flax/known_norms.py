"""Norms of published models: what each class computes in words of this package's functions, and of which calls.

Classes go by their paths, so that no library is imported.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm.integrations import replacing
from jaxnorm.integrations.flax import served
from jaxnorm.integrations.flax.served import linen
from jaxnorm.ops.norm.api import rms_norm
from jaxnorm.ops.norm.gated import gated_rms_norm

Function = Literal["rms_norm", "gated_rms_norm"]
FUNCTIONS: dict[str, Callable[..., jax.Array]] = {f.__name__: f for f in (rms_norm, gated_rms_norm)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Formula:
    """A call of one function. `scale` is the name of the module's parameter."""

    function: Function
    scale: str | None = None
    epsilon: float
    scale_offset: float = 0.0
    multiply_before_cast: bool = True
    gate_first: bool | None = None
    scale_dtype: Any = None  # that the scale is rounded to before it is used
    rounds_sum: bool = False  # scale + scale_offset is rounded to the scale's dtype
    out_dtype: Any = None  # None is x's
    with_scale: bool = False  # the result has that dtype, promoted by the scale's
    dtypes: tuple[Any, ...] | None = None  # that x must have; None is any

    def why_not(self, x: jax.Array, parameters: Mapping[str, jax.Array]) -> str | None:
        """Why x is left to the module's own code; None if the formula is the same."""
        if self.dtypes is not None and x.dtype not in self.dtypes:
            return f"x of {x.dtype}"
        for name, value in parameters.items():
            if value.ndim != 1 or value.shape != x.shape[-1:]:
                return f"{name} of shape {value.shape}"
        if served.is_split_otherwise(x, parameters.values()):
            return served.SPLIT_OTHERWISE
        return replacing.why_dtypes(x.dtype, *(value.dtype for value in parameters.values()))

    def arguments(self, dtype: Any, parameters: Mapping[str, jax.Array]) -> tuple[jax.Array | None, dict[str, Any]]:
        """The scale and all keywords of the function for x of this dtype."""
        own = "gate_first" if self.function == "gated_rms_norm" else "multiply_before_cast"
        keywords = {name: getattr(self, name) for name in ("epsilon", "scale_offset", own)}
        keywords["out_dtype"] = jnp.dtype(self.out_dtype or dtype)
        if self.scale is None:
            return None, keywords
        scale = parameters[self.scale]
        if self.scale_dtype is not None:
            scale = scale.astype(self.scale_dtype)
        if self.rounds_sum:
            scale, keywords["scale_offset"] = scale + self.scale_offset, 0.0
        if self.with_scale:  # as it is used
            keywords["out_dtype"] = jnp.promote_types(keywords["out_dtype"], scale.dtype)
        return scale, keywords

    def compute(self, arrays: Sequence[jax.Array], parameters: Mapping[str, jax.Array], **options: Any) -> jax.Array:
        scale, keywords = self.arguments(arrays[0].dtype, parameters)
        return FUNCTIONS[self.function](*arrays, scale, **keywords | options)


@dataclasses.dataclass(frozen=True)
class Own:
    """The function of a published class: a formula for calls with x alone, and one for those with a gate."""

    cls: type  # whose `__call__` computes what the formulas do not
    plain: Formula | None
    gated: Formula | None = None

    def __call__(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        if self.why_not(module, args, kwargs) is not None:
            return self.cls.__call__(module, *args, **kwargs)
        return self.compute(module, args, kwargs)

    def compute(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> jax.Array:
        """What the module's own code computes, within rounding, of a call without a `why_not`."""
        formula, arrays = self._formula(args, kwargs)
        assert formula is not None
        return formula.compute(arrays, parameters_of(formula, module))

    def why_not(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Why a call is left to the module's own code; None if a formula is the same."""
        formula, arrays = self._formula(args, kwargs)
        if formula is None:
            return "these arguments"
        x, *gates = arrays
        for gate in gates:
            if gate.shape == x.shape and (formula.dtypes is None or gate.dtype == x.dtype):
                continue
            return f"a gate of {gate.dtype}{list(gate.shape)} for x of {x.dtype}{list(x.shape)}"
        return formula.why_not(x, parameters_of(formula, module))

    def _formula(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Formula | None, list[jax.Array]]:
        """The formula of a call, None where there is none, with x and maybe a gate."""
        signature = inspect.signature(self.cls.__call__)
        given = list(signature.bind(None, *args, **kwargs).arguments.items())[1:]
        said = {name: value for name, value in given if value is not signature.parameters[name].default}
        names = [name for name in arguments(self.cls) if isinstance(said.get(name), jax.Array | np.ndarray)]
        arrays = [jnp.asarray(said.pop(name)) for name in names]
        formula = (self.plain, self.gated)[len(arrays) - 1] if arrays and not said else None
        return formula, arrays


def arguments(cls: type) -> tuple[str, ...]:
    """The names of the first two arguments of a class' `__call__` after the module, or of the one."""
    parameters = list(inspect.signature(cls.__call__).parameters.values())[1:3]
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(parameter.name for parameter in parameters if parameter.kind in positional)


def parameters_of(formula: Formula, module: Any) -> dict[str, jax.Array]:
    """The parameters that a formula names, by their names."""
    names = [] if formula.scale is None else [formula.scale]
    if isinstance(module, linen.Module):
        return {name: linen.unbox(module.get_variable("params", name)) for name in names}
    return {name: getattr(module, name)[...] for name in names}


# The formulas of a module: of x alone, and with a gate.
Formulas = tuple[Formula | None, Formula | None]
HALVES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


def _rms(norm: Any, scale: str, offset: float = 0.0) -> Formulas:
    """All in float32, and rounded to x's dtype at the end."""
    return Formula(function="rms_norm", scale=scale, epsilon=norm.eps, scale_offset=offset), None


def _hub(norm: Any, offset: float = 0.0) -> Formulas:
    """x_hat is rounded to the module's dtype, and the product has that one, promoted by the weight's."""
    dtype = jnp.dtype(norm.dtype)
    rounded: dict[str, Any] = {"multiply_before_cast": False, "dtypes": (dtype,)} if dtype in HALVES else {}
    epsilon = norm.config.rms_norm_eps
    options: dict[str, Any] = {"scale_offset": offset, "rounds_sum": True, "out_dtype": dtype, "with_scale": True}
    return Formula(function="rms_norm", scale="weight", epsilon=epsilon, **options, **rounded), None


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
    return plain, dataclasses.replace(plain, function="gated_rms_norm", gate_first=True) if norm.gate_residual else None


KNOWN: dict[str, Callable[[Any], Formulas | str]] = {
    "transformers.models.llama.modeling_flax_llama.FlaxLlamaRMSNorm": _hub,
    "transformers.models.mistral.modeling_flax_mistral.FlaxMistralRMSNorm": _hub,
    "transformers.models.gemma.modeling_flax_gemma.FlaxGemmaRMSNorm": partial(_hub, offset=1.0),
    "transformers.models.t5.modeling_flax_t5.FlaxT5LayerNorm": _t5,
    "transformers.models.longt5.modeling_flax_longt5.FlaxLongT5LayerNorm": _t5,
    "gemma.gm.nn._layers.RMSNorm": _gemma,
    "maxtext.layers.normalizations.RMSNorm": _maxtext,
    "bonsai.models.gemma3.modeling.Gemma3RMSNorm": partial(_rms, scale="scale", offset=1.0),
    "bonsai.models.mamba2.modeling.RMSNorm": _mamba2,
    "bonsai.models.qwen3_vl.modeling.RMSNorm": partial(_rms, scale="weight"),
}


def own(cls: type, module: Any) -> Own | str | None:
    """The formulas of a module whose class is known, or why they do not hold for it; None if it is not known."""
    entry = replacing.find(cls, KNOWN, lambda base: f"{base.__module__}.{base.__qualname__}")
    if entry is None:
        return None
    found = entry(module)
    return found if isinstance(found, str) else Own(cls, *found)
