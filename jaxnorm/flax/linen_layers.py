"""Which linear layers of models of `flax.linen` are computed in another way, and why others are left to Flax."""

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxnorm.flax import calls, replacement
from jaxnorm.flax.calls import linen
from jaxnorm.quantization import Quantized
from jaxnorm.reports import ALREADY, Path, Report

# Layers of Flax with weights.
ALL = (linen.Dense, linen.DenseGeneral, linen.Einsum, linen.Conv, linen.ConvLocal, linen.ConvTranspose, linen.Embed)
FLAXS_OWN = {"dot_general": None, "dot_general_cls": None, "promote_dtype": linen.dtypes.promote_dtype}


class Change(NamedTuple):
    """Another way to compute linear layers: it is `done`, as "computed in float8"."""

    done: str
    classes: tuple[type, ...]  # of Flax, whose calls are computed so
    compute: Callable[[Any, Any], jax.Array]  # of a module and what it is called with
    why_left: Callable[[Any, Any], str | None]  # why a call of a module is left to Flax; None if it is not
    remedy: str = ""  # for a DenseGeneral that is left


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


@contextlib.contextmanager
def changed(change: Change, only: replacement.Only | None, key: Hashable) -> Iterator[Report]:
    """Computes the layers of all models that are called within so, and has them in a report.

    What is traced may serve where `done`, `only` and the key are the same.
    """
    report = Report(where=replacement.TRACED)
    with intercepted(_interceptor(report, change, only), (change.done, only, key)), _nested(report):
        yield report


def _interceptor(report: Report, change: Change, only: replacement.Only | None) -> Callable[..., Any]:
    """What `linen.intercept_methods` calls for each method of a module."""

    def intercept(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        module, cls = context.module, type(context.module)
        if context.method_name != "__call__":
            return call(*args, **kwargs)
        path = () if module.scope is None else module.path
        if replacement.find(cls, dict.fromkeys(change.classes, True)):
            x = _inputs(*args, **kwargs)
            why = change.why_left(module, x) or ("only is false of it" if only and not only(path, module) else None)
            if why is None:
                call, args, kwargs = change.compute, (module, x), {}
                _nested.tell(report, path, cls, f"it is {change.done}{ALREADY}")
        elif (why := _why_class(cls, change)) is None:
            return call(*args, **kwargs)
        report.add(path, cls, why)
        return call(*args, **kwargs)

    return intercept


def _inputs(inputs: Any) -> Any:
    """The argument of a `Dense`."""
    return inputs if isinstance(inputs, Quantized) else jnp.asarray(inputs)


def _why_class(cls: type, change: Change) -> str | None:
    """Why a module of a class is left. None if it is no linear layer."""
    if issubclass(cls, change.classes):
        return "its __call__ is not Flax's"
    names = " and ".join(f"{'' if place else 'flax.linen.'}{of.__name__}" for place, of in enumerate(change.classes))
    remedy = change.remedy if issubclass(cls, linen.DenseGeneral) else ""
    verb = "are" if len(change.classes) > 1 else "is"
    return f"only {names} {verb} {change.done}{remedy}" if issubclass(cls, ALL) else None


def is_quantised(layer: Any) -> bool:
    return layer.scope is not None and layer.has_variable("params", "values")


def why_left(module: Any, x: Any) -> str | None:
    """Why any other way is not what Flax's code says. None if it may be."""
    if is_quantised(module):
        return "it is quantised already"
    why = calls.why_dtypes(module.param_dtype, *([] if (dtype := dtype_of(module, x)) is None else [dtype]))
    return replacement.why_own(module, FLAXS_OWN) or (why and f"it is of {why}")


def dtype_of(module: Any, x: Any, bias: jax.Array | None = None) -> Any:
    """The dtype to which Flax promotes x, kernel and bias. Of a `Quantized` the module's, which may be None."""
    if isinstance(x, Quantized):
        return module.dtype
    return linen.dtypes.canonicalize_dtype(x, jnp.zeros((), module.param_dtype), bias, dtype=module.dtype)
