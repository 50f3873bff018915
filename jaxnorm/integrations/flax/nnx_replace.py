"""How a model of `flax.nnx` gets the layers of `jaxnorm.nnx`, gets its own back, and how the two compare."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxnorm.inspect import turns
from jaxnorm.inspect.compare import Loss, compared
from jaxnorm.integrations import replacing
from jaxnorm.integrations.flax import known_norms
from jaxnorm.integrations.flax.nnx_layers import Embed, GroupNorm, InstanceNorm, LayerNorm, RMSNorm
from jaxnorm.integrations.flax.served import linen, nnx
from jaxnorm.reports import Comparison, Path, Report

# Flax's layers, and what each of them becomes.
OURS: dict[type, type] = {
    nnx.Embed: Embed,
    nnx.RMSNorm: RMSNorm,
    nnx.LayerNorm: LayerNorm,
    nnx.GroupNorm: GroupNorm,
    nnx.InstanceNorm: InstanceNorm,
}
FLAXS = {ours: flaxs for flaxs, ours in OURS.items()}
# Options that the constructors of ours set, and Flax's do not.
OF_CONSTRUCTOR = {"scale_offset", "implementation"}
# Norms of Flax that this package has no kernels for.
OTHERS = (nnx.BatchNorm, nnx.SpectralNorm, nnx.WeightNorm)


class _Custom:
    """Marks what `replace_layers` made of a class of a model's own."""


def replace_layers(model: Any, custom: replacing.Custom | None = None) -> tuple[Any, Report]:
    """Replaces the norms and embeddings of a model with jaxnorm's, in place and at any depth.

        model, report = replace_layers(model, {GemmaNorm: lambda norm, x: rms_norm(x, norm.scale[...])})

    Each `flax.nnx.RMSNorm`, `LayerNorm`, `GroupNorm`, `InstanceNorm` and `Embed`, in stacked layers too, becomes one of
    `jaxnorm.nnx`. Modules stay the same objects with the same parameters; results agree within rounding.

    Other norms, classes with their own `__call__`, and layers whose options or dtypes no kernel serves stay as they
    are. Modules outside the model's graph, as in a closure, are not found.

    Args:
      model: a module, or a list, dict or other pytree of modules.
      custom: maps classes of the model's own to functions of a module and its arguments, which compute it. A subclass
        goes with its base unless it has its own `__call__`.

    Returns:
      The same model and a `jaxnorm.reports.Report`: `replaced` has (path, class) of each layer that was replaced,
      `left` (path, class, why) of each that was not, `within` both, inside modules that functions of custom compute.

    Raises:
      TypeError: model is of `flax.linen` or has no module of flax.nnx, or custom does not map classes to functions.
      ValueError: model is an argument of a running transformation of flax.nnx, as `nnx.jit`.
    """
    functions = replacing.check_custom("replace_layers", custom, nnx.Module)
    linen_remedy = "a linen module has no norms until it is called. Call it within jaxnorm.linen.using_layers()"
    report, computed = Report(), []
    modules = modules_of("replace_layers", model, linen_remedy)
    report.name_unused(functions, {type(module) for _, module in modules})
    for path, module in modules:
        cls: type = type(module)
        if function := replacing.find(cls, functions):
            new, why = _with_call(cls, function), None
            computed.append(path)
        elif ours := replacing.find(cls, OURS):
            new, why = OURS.get(cls) or with_base(cls, ours), _why_left(module, ours)
        elif own := _own(module):
            new, why = (cls, own) if isinstance(own, str) else (_with_call(cls, own), None)
        elif why := _why_class(module):
            new = cls
        else:
            continue
        if why is None:
            object.__setattr__(module, "__class__", new)
        report.add(path, cls, why)
    report.put_within(computed)
    return model, report


def restore_layers(model: Any) -> tuple[Any, Report]:
    """Undoes `replace_layers` on a model, in place and at any depth.

        model, report = restore_layers(model)

    Each module gets back its class, be it Flax's or one of a mapping, and with it results bit for bit, its graph
    definition, and compiled programs. Modules and parameters stay the same objects. Copies of a changed model, and what
    pickle or `nnx.merge` makes of it, are restored alike.

    Layers that the model's author made from `jaxnorm.nnx` stay, and so does a layer of Flax that was given a
    `scale_offset` or an `implementation` since.

    Args:
      model: a module, or a list, dict or other pytree of modules.

    Returns:
      The same model and a `jaxnorm.reports.Report`: `replaced` has (path, class) of each module that has its own class
      again, `left` has (path, class, why) of each that is still jaxnorm's.

    Raises:
      TypeError: model has no module of flax.nnx, or is of `flax.linen`, whose norms are replaced only within a context.
      ValueError: model is an argument of a running transformation of flax.nnx, as `nnx.jit`.
    """
    remedy = "its norms are replaced within jaxnorm.linen.using_layers() alone. Call it outside"
    report = Report(done="restored")
    for path, module in modules_of("restore_layers", model, remedy):
        own = _own_class(module)
        if own is not type(module):
            object.__setattr__(module, "__class__", own)
            report.add(path, own, None)
        elif issubclass(own, tuple(FLAXS)):
            report.add(path, own, "the model's author made it from jaxnorm.nnx")
    return model, report


def _own_class(module: Any) -> type:
    """The class of a module before any call of `replace_layers`."""
    cls: type = type(module)
    while (before := class_before(cls)) is not None:
        cls = before
    return FLAXS.get(cls, cls) if OF_CONSTRUCTOR.isdisjoint(vars(module)) else cls


def compare_layers(model: Any, args: Any, loss: Loss | None, kwargs: Any) -> Comparison:
    replacing.check_compared(model, loss)
    if isinstance(model, linen.Module):
        raise TypeError(
            f"compare_layers: got a module of flax.linen, {type(model).__name__}: call "
            f"jaxnorm.linen.compare_layers(module, variables, x)."
        )
    if not (isinstance(model, nnx.Module) and callable(model)):
        raise TypeError(
            f"compare_layers: model must be a flax.nnx module that can be called, got {type(model).__name__}; "
            f"call it on the module whose results are to be compared."
        )
    turns.check_values("compare_layers", (model, *args), kwargs)
    own = nnx.merge(*nnx.split(model))
    _, restored = restore_layers(own)
    if not restored.replaced:
        raise ValueError(
            f"compare_layers: no layer of {type(model).__name__} was replaced: call jaxnorm.replace_layers(model) "
            f"first."
        )
    definition, *variables = nnx.split(
        model, lambda _, of: isinstance(of, nnx.Param) and jnp.issubdtype(of.dtype, jnp.inexact), ...
    )
    of_own, of_model = (functools.partial(nnx.merge, graph) for graph in (nnx.graphdef(own), definition))
    return compared(of_own, of_model, (*variables, args, kwargs), loss)


def modules_of(function: str, model: Any, linen_remedy: str) -> list[tuple[Path, Any]]:
    """The modules of a model whose classes `function` changes, with their paths, or an error where it cannot."""
    if isinstance(model, linen.Module):
        raise TypeError(f"{function}: got a module of flax.linen, {type(model).__name__}: {linen_remedy}.")
    modules = list(nnx.iter_modules(model, graph=True))
    if not modules:
        got, remedy = replacing.no_model(model, (nnx.State, nnx.GraphDef), nnx.Optimizer)
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


def _own(module: Any) -> known_norms.Own | str | None:
    """What a published class computes, or why it is left; None if it is not known."""
    cls = type(module)
    return (
        None if issubclass(cls, (_Custom, *OURS.values(), *OTHERS, nnx.bridge.ToNNX)) else known_norms.own(cls, module)
    )


def _why_class(module: Any) -> str | None:
    cls = type(module)
    if issubclass(cls, nnx.bridge.ToNNX):
        return "its modules are of flax.linen: call it within jaxnorm.linen.using_layers()"

    def line() -> str:
        names = [name for name, value in vars(module).items() if isinstance(value, nnx.Param)]
        return replacing.line_of(cls, names, "norm.{}[...]")

    return replacing.why_class(cls, (_Custom, *OURS.values()), OURS, OTHERS, line)


def _why_left(module: Any, ours: Any) -> str | None:
    """Why a layer of Flax stays one; None if kernels serve some calls of it."""
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(nnx.state(module))]
    why = ours._why_never(module) or replacing.why_dtypes(*dtypes, module.dtype)
    return why and f"no kernel serves {why}"


@functools.cache
def _with_call(cls: type, function: Callable[..., Any]) -> type:
    """`cls` that a function computes: one class for both, so that what is compiled for one model serves another."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    return _subclass(cls, (cls, _Custom), {"__call__": call}, _with_call, function)


@functools.cache
def with_base(cls: type, ours: type) -> type:
    """`cls`, a subclass of Flax's layer with its `__call__`, with that of ours."""
    return _subclass(cls, (cls, ours), {}, with_base, ours)


def _subclass(
    cls: type, bases: tuple[type, ...], members: dict[str, Any], maker: Callable[[type, Any], type], by: Any
) -> type:
    """A class that goes by the name of `cls`, under which pickle would not find it: `maker(cls, by)` gives it."""

    def __reduce_ex__(self: Any, protocol: Any) -> tuple[Any, ...]:
        _, (_, *args), *rest = super(made, self).__reduce_ex__(protocol)  # type: ignore[arg-type]
        return _new, (maker, cls, by, *args), *rest

    names = {name: getattr(cls, name) for name in ("__doc__", "__module__", "__qualname__")}
    made = type(cls.__name__, bases, names | members | {"__reduce_ex__": __reduce_ex__, "_made_of": cls})
    return made


def class_before(cls: type) -> type | None:
    """The class for which `replace_layers` made this one; None if it made no such."""
    made_of: type | None = vars(cls).get("_made_of")
    return made_of if issubclass(cls, (_Custom, *OURS.values())) else None


def _new(maker: Callable[[type, Any], type], cls: type, by: Any, *args: Any) -> Any:
    made: Any = maker(cls, by)
    return made.__new__(made, *args)
