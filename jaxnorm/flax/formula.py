"""Norms of published models' classes in words of this package's functions: what they compute, and of which calls."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm.flax import calls
from jaxnorm.flax.calls import linen
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
        if calls.is_split_otherwise(x, parameters.values()):
            return calls.SPLIT_OTHERWISE
        return calls.why_dtypes(x.dtype, *(value.dtype for value in parameters.values()))

    def keywords(self) -> dict[str, Any]:
        """The options of the function, but for the dtype of its result."""
        names = ["epsilon", "scale_offset", *(["gate_first"] if self.is_gated else [])]
        given = {name: getattr(self, name) for name in names}
        return given if self.is_gated else given | {"multiply_before_cast": self.multiply_before_cast}

    def result_dtype(self, x: Any, scale: Any) -> Any:
        """That of the result for those of x and the scale."""
        out = jnp.dtype(self.out_dtype or x)
        return jnp.promote_types(out, scale) if self.with_scale and scale is not None else out

    @property
    def is_gated(self) -> bool:
        return self.function == "gated_rms_norm"

    def arguments(self, dtype: Any, parameters: Mapping[str, jax.Array]) -> tuple[jax.Array | None, dict[str, Any]]:
        """The scale and all keywords of the function for x of this dtype."""
        scale, keywords = None if self.scale is None else parameters[self.scale], self.keywords()
        # The result's dtype is that of the scale as it is used.
        scale = scale if scale is None or self.scale_dtype is None else scale.astype(self.scale_dtype)
        if scale is not None and self.rounds_sum:
            scale, keywords = scale + self.scale_offset, keywords | {"scale_offset": 0.0}
        return scale, keywords | {"out_dtype": self.result_dtype(dtype, None if scale is None else scale.dtype)}

    def compute(self, arrays: Sequence[jax.Array], parameters: Mapping[str, jax.Array], **options: Any) -> jax.Array:
        """The function of x, or of x and a gate."""
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
