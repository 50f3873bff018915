"""How models of `flax.linen` get the layers of `jaxnorm.linen`: within contexts."""

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import partial
from typing import Any

import jax

from jaxnorm.inspect import turns
from jaxnorm.inspect.compare import Loss, compared
from jaxnorm.integrations import replacing
from jaxnorm.integrations.flax import known_norms
from jaxnorm.integrations.flax.linen_layers import Embed, GroupNorm, InstanceNorm, LayerNorm, RMSNorm
from jaxnorm.integrations.flax.served import linen
from jaxnorm.primitive.fallback import Around
from jaxnorm.reports import Comparison, Path, Report

# Flax's layers, and what computes a call of each.
OURS: dict[type, type] = {
    linen.Embed: Embed,
    linen.RMSNorm: RMSNorm,
    linen.LayerNorm: LayerNorm,
    linen.GroupNorm: GroupNorm,
    linen.InstanceNorm: InstanceNorm,
}
# Norms of Flax that this package has no kernels for.
OTHERS = (linen.BatchNorm, linen.SpectralNorm, linen.WeightNorm)


# Why a module is left, and what gives its result in place of its own code; None for one that is no concern.
Chosen = tuple[str | None, Callable[[], Any] | None] | None
# What the contexts around here change: a part of the key by which JAX caches what it has traced, local to a thread.
_changes = jax.make_user_context(())


class Contexts(Around):
    """The contexts of one kind, by the reports of those that are around here."""

    @contextlib.contextmanager
    def __call__(self, choose: Callable[..., Chosen], done: str, key: Hashable) -> Iterator[Report]:
        """Within, modules are computed as `choose` says of each that is called, with its arguments, and keywords.

        Contexts of the kind within this one are not asked: they are told why what it computes is left, as it is `done`.
        `jax.jit` takes no program that was traced where no such key was in force.
        """
        report = Report(where=replacing.TRACED)

        def intercept(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
            chosen = choose(context.module, args, kwargs) if context.method_name == "__call__" else None
            if chosen is None:
                return call(*args, **kwargs)
            (why, compute), path, cls = chosen, path_of(context.module), type(context.module)
            report.add(path, cls, why)
            if compute is None:
                return call(*args, **kwargs)
            place = next(place for place, around in enumerate(self.entries) if around is report)
            for inner in self.entries[place + 1 :]:
                inner.add(path, cls, done)
            return compute()

        with self.within(report), linen.intercept_methods(intercept), _changes((*_changes.value, key)):
            yield report


_contexts = Contexts()


def path_of(module: Any) -> Path:
    return () if module.scope is None else module.path


def using_layers(custom: replacing.Custom | None = None) -> contextlib._GeneratorContextManager[Report]:
    """A context in which jaxnorm computes norms and embeddings of all `flax.linen` models that are called or traced.

        with jaxnorm.linen.using_layers({GemmaNorm: lambda norm, x: rms_norm(x, norm.scale)}) as report:
            logits = model.apply(variables, tokens)

    Each `flax.linen.RMSNorm`, `LayerNorm`, `GroupNorm`, `InstanceNorm` and `Embed` is computed as in `jaxnorm.linen`.
    Modules and checkpoints stay the same, as do parameters and their names, also by `init` within; results agree within
    rounding. Other norms, classes with their own `__call__`, and calls that no kernel serves, as with a mask, run their
    own code. The context acts at trace time.

    Args:
      custom: maps classes of the model's own to functions of a module and its arguments, which compute it. They may
        read `norm.scale` if `setup` made it, make it with `norm.param`, or read it with `norm.get_variable`. The
        model's own code initialises parameters. A subclass goes with its base unless it has its own `__call__`.

    Yields:
      A `jaxnorm.reports.Report` that fills while calls are traced: `replaced` has (path, class) of each layer that was
      replaced, `left` (path, class, why) of each that was not. Equal calls count once, those traced before not at all.

    Raises:
      TypeError: custom does not map classes to functions.

    Source: `flax.linen.intercept_methods`.
    """
    return _replacing(replacing.check_custom("using_layers", custom, linen.Module))


@contextlib.contextmanager
def _replacing(custom: Any) -> Iterator[Report]:
    classes = set[type]()
    key = "replaced", frozenset(custom.items())
    with _contexts(partial(_chosen, custom, classes), replacing.OURS_ALREADY, key) as report:
        yield report
    if classes:
        report.name_unused(custom, classes | {cls for _, cls, _ in report.left})  # one around computes these


def _chosen(custom: Any, classes: set[type], module: Any, args: Any, kwargs: Any) -> Chosen:
    """What computes a module in place of its own code, or why nothing does; `classes` gets those that are called."""
    cls = type(module)
    classes.add(cls)
    # A function may only read parameters, so the model's own code makes them.
    initialises = module.scope is not None and module.is_initializing()
    if function := replacing.find(cls, custom):
        return None, None if initialises else partial(function, module, *args, **kwargs)
    if ours := replacing.find(cls, OURS):
        arguments = ours._arguments(*args, **kwargs)
        why = ours._why_flax(module, *arguments)
        return (f"no kernel serves {why}", None) if why else (None, partial(ours._fused, module, *arguments))
    own = None if issubclass(cls, (*OURS.values(), *OTHERS)) else known_norms.own(cls, module)
    if isinstance(own, known_norms.Own):
        if not initialises and (why := own.why_not(module, args, kwargs)):
            return f"its own code computes {why}", None
        return None, None if initialises else partial(own.compute, module, args, kwargs)
    why = own or replacing.why_class(cls, tuple(OURS.values()), OURS, OTHERS, partial(_line, module))
    return None if why is None else (why, None)


def _line(module: Any) -> str:
    """A line of a mapping for a module. Where `setup` has not made it, `norm.scale` does not exist."""
    parameters = {} if module.scope is None else module.variables.get("params", {})
    names = [name for name, value in parameters.items() if not isinstance(value, Mapping)]
    return replacing.line_of(type(module), names or ["scale"], 'norm.get_variable("params", "{}")')


def compare_layers(
    module: Any,
    variables: Any,
    *args: Any,
    custom: replacing.Custom | None = None,
    loss: Loss | None = None,
    **kwargs: Any,
) -> Comparison:
    """Compares results and times of a `flax.linen` model as it is and within `jaxnorm.linen.using_layers(custom)`.

        print(jaxnorm.linen.compare_layers(module, variables, x, custom={GemmaNorm: gemma_norm}))

    It compares what `jaxnorm.compare_layers` compares for flax.nnx.

    Args:
      module: the model.
      variables: what its `apply` takes. Gradients are by "params".
      *args: of `module.apply(variables, *args, **kwargs)`.
      **kwargs: likewise.
      custom: as for `jaxnorm.linen.using_layers`.
      loss: a function of `model`, args and kwargs, where `model(x)` is `module.apply(variables, x)`.

    Returns:
      A `jaxnorm.reports.Comparison`.

    Raises:
      TypeError: module is not of flax.linen, variables lack "params", an argument has no values, or loss is no
        function.
      ValueError: no layer of the model is replaced.
    """
    replacing.check_compared(module, loss)
    if not isinstance(module, linen.Module):
        raise TypeError(
            f"compare_layers: expected a module of flax.linen, got {type(module).__name__}; see jaxnorm.compare_layers."
        )
    check_variables("compare_layers", variables)
    turns.check_values("compare_layers", (module, variables, *args), kwargs)
    others = {name: collection for name, collection in variables.items() if name != "params"}
    reports = []

    def own(params: Any, others: Any) -> Callable[..., Any]:
        return partial(module.apply, {"params": params, **others})

    def replaced(params: Any, others: Any) -> Callable[..., Any]:
        def apply(*args: Any, **kwargs: Any) -> Any:
            with using_layers(custom) as report:
                reports.append(report)
                return own(params, others)(*args, **kwargs)

        return apply

    jax.eval_shape(lambda params: replaced(params, others)(*args, **kwargs), variables["params"])
    if not reports[0].replaced:
        raise ValueError(
            f"compare_layers: no layer of {type(module).__name__} is replaced; give custom={{Class: function}} for "
            f"norms of its own:\n{reports[0]}"
        )
    return compared(own, replaced, (variables["params"], others, args, kwargs), loss)


def check_variables(function: str, variables: object) -> None:
    if not isinstance(variables, Mapping) or "params" not in variables:
        got = list(variables) if isinstance(variables, Mapping) else type(variables).__name__
        raise TypeError(f"{function}: variables must be a mapping with 'params', as init gives it, got {got}.")
