"""How the models of `flax.linen` get the norms and the Embed of `jaxnorm.linen`."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from jaxnorm.flax import known, replacement
from jaxnorm.flax.calls import linen
from jaxnorm.flax.formula import Own
from jaxnorm.flax.linen_layers import Nested, intercepted
from jaxnorm.flax.linen_norms import LayerNorm, RMSNorm
from jaxnorm.flax.linen_others import Embed, GroupNorm, InstanceNorm
from jaxnorm.reports import Report

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
_nested = Nested()


def using_layers(custom: replacement.Custom | None = None) -> contextlib._GeneratorContextManager[Report]:
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
    return _replacing(replacement.check_custom("using_layers", custom, linen.Module))


@contextlib.contextmanager
def _replacing(custom: Any) -> Iterator[Report]:
    report, classes = Report(where=replacement.TRACED), set[type]()
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
        if function := replacement.find(cls, custom):
            why = None
            # A function may only read parameters, so the model's own code makes them.
            if not initialises:
                compute = partial(function, module, *args, **kwargs)
        elif ours := replacement.find(cls, OURS):
            arguments = ours._arguments(*args, **kwargs)
            why = ours._why_flax(module, *arguments)
            if not why:
                compute = partial(ours._fused, module, *arguments)
            why = why and f"no kernel serves {why}"
        elif own := _own(module):
            why = own if isinstance(own, str) else None
            if isinstance(own, Own) and not initialises and not (why := own.why_not(module, args, kwargs)):
                compute = partial(own.compute, module, args, kwargs)
            why = f"its own code computes {why}" if why and isinstance(own, Own) else why
        elif (why := replacement.why_class(cls, tuple(OURS.values()), OURS, OTHERS, partial(_line, module))) is None:
            return call(*args, **kwargs)
        path = () if module.scope is None else module.path
        report.add(path, cls, why)
        if compute is None:
            return call(*args, **kwargs)
        _nested.tell(report, path, cls, replacement.OURS_ALREADY)
        return compute()

    return intercept


def _own(module: Any) -> Own | str | None:
    """What a published class computes, or why it is left; None if it is not known."""
    cls = type(module)
    return None if issubclass(cls, (*OURS.values(), *OTHERS)) else known.own(cls, module)


def _line(module: Any) -> str:
    """A line of a mapping for a module. Where `setup` has not made it, `norm.scale` does not exist."""
    parameters = {} if module.scope is None else module.variables.get("params", {})
    names = [name for name, value in parameters.items() if not isinstance(value, Mapping)]
    return replacement.line_of(type(module), names or ["scale"], 'norm.get_variable("params", "{}")')
