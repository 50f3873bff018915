"""How the models of `flax.linen` get the norms and the Embed of `jaxnorm.linen`: within contexts."""

import contextlib
import threading
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


class Nested(threading.local):
    """The reports of the contexts of one kind that are around here, from the outermost."""

    def __init__(self) -> None:
        self.reports: list[Report] = []

    @contextlib.contextmanager
    def __call__(self, report: Report) -> Iterator[None]:
        self.reports.append(report)
        try:
            yield
        finally:
            self.reports.pop()

    def tell(self, report: Report, path: Path, cls: type, why: str) -> None:
        """Says why a module is left to the contexts within that of `report`, which are not asked about it."""
        place = next(place for place, around in enumerate(self.reports) if around is report)
        for within in self.reports[place + 1 :]:
            within.add(path, cls, why)


_nested = Nested()
# What the contexts around here change: a part of the key by which JAX caches what it has traced, local to a thread.
_changes = jax.make_user_context(())


@contextlib.contextmanager
def intercepted(interceptor: Callable[..., Any], key: Hashable) -> Iterator[None]:
    """`linen.intercept_methods`; within, `jax.jit` takes no program that was traced where no such key was in force."""
    with linen.intercept_methods(interceptor), _changes((*_changes.value, key)):
        yield


def using_layers(custom: replacing.Custom | None = None) -> contextlib._GeneratorContextManager[Report]:
    """Computes the norms and embeddings of all models that are called, or traced, within.

        with jaxnorm.linen.using_layers({GemmaNorm: lambda norm, x: rms_norm(x, norm.scale)}) as report:
            logits = model.apply(variables, tokens)

    Each `flax.linen.RMSNorm`, `LayerNorm`, `GroupNorm`, `InstanceNorm` and `Embed` is computed as one of
    `jaxnorm.linen` is. Modules, parameters, their names and checkpoints stay the same, `init` within makes the same
    parameters, and results agree within rounding. Left to their own code are norms of other kinds, classes with a
    `__call__` of their own, and calls that no kernel serves, as with a mask. What counts is where a program is traced.

    Args:
      custom: classes of the model's own, and for each the function of a module and its arguments that computes it. It
        may do what the module's `__call__` may, as read `norm.scale` that `setup` made, make it with `norm.param`, or
        read it with `norm.get_variable`. While parameters are initialised the model's own code runs, and makes them. A
        subclass goes with its base unless it has a `__call__` of its own.

    Yields:
      A `jaxnorm.reports.Report` that fills while calls are traced: `replaced` has (path, class) of each layer that was
      replaced, `left` (path, class, why) of each that was not; of alike calls one, and none that was traced before.

    Raises:
      TypeError: custom maps something else than classes to functions.

    Source: `flax.linen.intercept_methods`.
    """
    return _replacing(replacing.check_custom("using_layers", custom, linen.Module))


@contextlib.contextmanager
def _replacing(custom: Any) -> Iterator[Report]:
    report, classes = Report(where=replacing.TRACED), set[type]()
    with intercepted(_interceptor(report, custom, classes), ("replaced", frozenset(custom.items()))), _nested(report):
        yield report
    if classes:
        report.name_unused(custom, classes | {cls for _, cls, _ in report.left})  # one around computes these


def _interceptor(report: Report, custom: Any, classes: set[type]) -> Callable[..., Any]:
    """What `linen.intercept_methods` calls for each method of a module; `classes` gets those that are called."""

    def intercept(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        module, cls = context.module, type(context.module)
        initialises = module.scope is not None and module.is_initializing()
        if context.method_name != "__call__":
            return call(*args, **kwargs)
        classes.add(cls)
        compute = None  # what gives the result in place of the module's own code
        if function := replacing.find(cls, custom):
            why = None
            # A function may only read parameters, so the model's own code makes them.
            if not initialises:
                compute = partial(function, module, *args, **kwargs)
        elif ours := replacing.find(cls, OURS):
            arguments = ours._arguments(*args, **kwargs)
            why = ours._why_flax(module, *arguments)
            if not why:
                compute = partial(ours._fused, module, *arguments)
            why = why and f"no kernel serves {why}"
        elif own := _own(module):
            why = own if isinstance(own, str) else None
            if isinstance(own, known_norms.Own) and not initialises and not (why := own.why_not(module, args, kwargs)):
                compute = partial(own.compute, module, args, kwargs)
            why = f"its own code computes {why}" if why and isinstance(own, known_norms.Own) else why
        elif (why := replacing.why_class(cls, tuple(OURS.values()), OURS, OTHERS, partial(_line, module))) is None:
            return call(*args, **kwargs)
        path = () if module.scope is None else module.path
        report.add(path, cls, why)
        if compute is None:
            return call(*args, **kwargs)
        _nested.tell(report, path, cls, replacing.OURS_ALREADY)
        return compute()

    return intercept


def _own(module: Any) -> known_norms.Own | str | None:
    """What a published class computes, or why it is left; None if it is not known."""
    cls = type(module)
    return None if issubclass(cls, (*OURS.values(), *OTHERS)) else known_norms.own(cls, module)


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
    """Runs a model of `flax.linen` as it is and within `jaxnorm.linen.using_layers(custom)`, and compares the two.

        print(jaxnorm.linen.compare_layers(module, variables, x, custom={GemmaNorm: gemma_norm}))

    What is compared and timed is what `jaxnorm.compare_layers` says of models of flax.nnx.

    Args:
      module: the model.
      variables: what its `apply` takes. Gradients are taken by those of "params".
      *args: of `module.apply(variables, *args, **kwargs)`.
      **kwargs: likewise.
      custom: that of `jaxnorm.linen.using_layers`.
      loss: a function of `model` and args and kwargs, where `model(x)` is `module.apply(variables, x)`.

    Returns:
      A `jaxnorm.reports.Comparison`.

    Raises:
      TypeError: module is no module of flax.linen, variables have no "params", an argument has no values, or loss is
        no function.
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
