"""How a norm of `flax.nnx` calls the functions of this package, and becomes one of `jaxnorm.nnx`."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxnorm import _flax, _replacement
from jaxnorm._flax import linen, nnx
from jaxnorm.quantization import Quantized


def value(parameter: Any) -> jax.Array | None:
    return None if parameter is None else parameter[...]


class HeadScales(nnx.Module):
    """The parameters of a `QKNormRotary`."""

    def __init__(
        self,
        head_dim: int,
        *,
        heads: tuple[int, int] | None = None,
        use_scale: bool = True,
        scale_init: Any = nnx.initializers.ones,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        shapes = [(head_dim,)] * 2 if heads is None else [(count, head_dim) for count in heads]
        self.q_scale, self.k_scale = (
            nnx.Param(scale_init(rngs.params(), shape, param_dtype)) if use_scale else None for shape in shapes
        )
        self.head_dim, self.heads, self.use_scale = head_dim, heads, use_scale
        self.dtype, self.param_dtype = dtype, param_dtype


def parameters_of(module: Any) -> tuple[jax.Array | None, jax.Array | None]:
    """scale and bias, which an RMSNorm has not."""
    return value(module.scale), value(getattr(module, "bias", None))


def fused(norm: Callable[..., Any], module: Any, mask: jax.Array | None, rows: tuple[jax.Array, ...]) -> Any:
    """`norm` of x, or of x and an addend, called as `module` says, or None where Flax's own code computes it."""
    *_, normalised = rows  # with an addend the sum, which is like it
    parameters = parameters_of(module)
    dtype = nnx.nn.dtypes.canonicalize_dtype(normalised, *parameters, dtype=module.dtype)
    dtypes = (dtype, *(a.dtype for a in (*rows, *parameters) if a is not None))
    why = _flax.why_flax(module, normalised, mask, parameters, dtypes)
    axes = _flax.called_axes(module, normalised, mask, why)
    if axes is None:
        return None
    axis, features = axes
    rows, (scale, bias) = operands(rows, parameters, dtype, features)
    options = {"epsilon": module.epsilon, "axis_name": module.axis_name, **_flax.options(module)}
    return norm(*rows, scale, bias=bias, axis=axis, out_dtype=dtype, **options)


def quantized(
    module: Any, mask: object, x: jax.Array, addend: dict[str, jax.Array], scales: dict[str, Any]
) -> Quantized | tuple[Quantized, jax.Array]:
    """The quantised norm of x, or of x and an addend, see `_flax.with_addend`, called as `module` says."""
    rows = (x, *addend.values())
    axis = _flax.function_axes(module, rows[-1], mask, "a quantised norm")
    parameters = parameters_of(module)
    dtype = nnx.nn.dtypes.canonicalize_dtype(rows[-1], *parameters, dtype=module.dtype)
    (x, *_), (scale, bias) = operands(rows, parameters, dtype, axis)
    result: Quantized | tuple[Quantized, jax.Array] = module._functions.quantized(
        x,
        scale,
        bias=bias,
        quantization=module.quantization,
        **addend,
        straight_through=module.straight_through,
        epsilon=module.epsilon,
        axis=axis,
        axis_name=module.axis_name,
        **scales,
        **_flax.rounded_once(module, "a quantised norm"),
    )
    return result


def operands(
    rows: tuple[jax.Array, ...],
    parameters: tuple[jax.Array | None, jax.Array | None],
    dtype: Any,
    axes: tuple[int, ...],
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array | None, jax.Array | None]]:
    """x, or x and an addend, and parameters: rounded to `dtype` as Flax rounds them, parameters with `axes`' shape."""
    features = tuple(rows[-1].shape[axis] for axis in axes)
    for parameter in parameters:
        if parameter is not None and parameter.size != math.prod(features):
            raise ValueError(
                f"the norm's parameters are of {parameter.size} features, expected {math.prod(features)}: x has shape "
                f"{rows[-1].shape}, of which the axes {axes} are features. Construct it with that many."
            )
    scale, bias = (None if p is None else promote(p, dtype).reshape(features) for p in parameters)
    return (tuple(promote(x, dtype) for x in rows) if len(rows) == 1 else rows), (scale, bias)


def promote(array: jax.Array, dtype: Any) -> jax.Array:
    """`array` as Flax's promotion to `dtype` rounds it. Mere widening is left to the kernel: fewer bytes to read."""
    return array if dtype in (array.dtype, jnp.float32) else array.astype(dtype)


# Norms of Flax that this package has no kernels for.
OTHERS = (nnx.BatchNorm, nnx.SpectralNorm, nnx.WeightNorm)


class _Custom:
    """Marks what `replace_norms` made of a class of a model's own."""


def replace(model: Any, custom: Any, ours: dict[type, type]) -> _replacement.Report:
    """`jaxnorm.nnx.replace_norms`, with Flax's norms and `ours` for each."""
    custom = _replacement.check_custom(custom, nnx.Module)
    linen_remedy = "a linen module has no norms until it is called. Call it within jaxnorm.linen.replace_norms()"
    report = _replacement.Report()
    for path, module in modules_of("replace_norms", model, linen_remedy):
        cls: type = type(module)
        if function := _replacement.find(cls, custom):
            new, why = _with_call(cls, function), None
        elif norm := _replacement.find(cls, ours):
            new, why = ours.get(cls) or with_base(cls, norm), _why_left(module, norm)
        elif why := _why_class(cls, ours):
            new = cls
        else:
            continue
        if why is None:
            object.__setattr__(module, "__class__", new)
        report.add(path, cls, why)
    return report


def modules_of(function: str, model: Any, linen_remedy: str) -> list[tuple[_replacement.Path, Any]]:
    """The modules of a model whose classes `function` changes, with their paths, or an error where it cannot."""
    if isinstance(model, linen.Module):
        raise TypeError(f"{function}: got a module of flax.linen, {type(model).__name__}: {linen_remedy}.")
    modules = list(nnx.iter_modules(model, graph=True))
    if not modules:
        got, remedy = _replacement.no_model(model, (nnx.State, nnx.GraphDef))
        raise TypeError(
            f"{function}: model must be a flax.nnx module, or a list, dict or other pytree of such, got {got}: "
            f"{remedy}."
        )
    # At its end the transformation writes its arguments back to modules of their former classes, which fails.
    stacks = getattr(getattr(nnx.graph, "GRAPH_CONTEXT", None), "update_context_stacks", {})
    arguments = [context.inner_ref_outer_index or () for stack in stacks.values() for context in stack]
    if any(module in refs for _, module in modules for refs in arguments):
        raise ValueError(
            f"{function}: the model is an argument of a transformation of flax.nnx, as nnx.jit or nnx.grad, which does "
            f"not give new classes back. Call {function} before, on the model that is passed."
        )
    return modules


def _why_class(cls: type, ours: dict[type, type]) -> str | None:
    if issubclass(cls, nnx.bridge.ToNNX):
        return "its modules are of flax.linen: call it within jaxnorm.linen.replace_norms()"
    return _replacement.why_class(cls, (_Custom, *ours.values()), ours, OTHERS)


def _why_left(module: Any, norm: Any) -> str | None:
    """Why a norm of Flax stays one; None if kernels serve some calls of it."""
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(nnx.state(module))]
    why = norm._why_never(module) or _flax.why_dtypes(*dtypes, *([module.dtype] if module.dtype else []))
    return why and f"no kernel serves {why}"


@functools.cache
def _with_call(cls: type, function: Callable[..., Any]) -> type:
    """`cls` that a function computes: one class for both, so that what is compiled for one model serves another."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    return _subclass(cls, (cls, _Custom), {"__call__": call})


@functools.cache
def with_base(cls: type, norm: type) -> type:
    """`cls`, a subclass of Flax's norm with its `__call__`, with that of ours."""
    return _subclass(cls, (cls, norm), {})


def _subclass(cls: type, bases: tuple[type, ...], members: dict[str, Any]) -> type:
    """A class that goes by the name of `cls`."""
    names = {name: getattr(cls, name) for name in ("__doc__", "__module__", "__qualname__")}
    return type(cls.__name__, bases, names | members)
