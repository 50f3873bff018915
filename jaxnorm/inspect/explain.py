"""The calls of a program and what runs for each: `jaxnorm.explain`, and `--explain` of `python -m jaxnorm.info`."""

import importlib
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxnorm.native import compat, ffi
from jaxnorm.ops import misuse
from jaxnorm.ops.options import around
from jaxnorm.primitive import decide, fallback, registry
from jaxnorm.primitive.registry import DIRECTIONS, Described
from jaxnorm.primitive.rules import leaves_of
from jaxnorm.reports import Call, Explanation, Runs

# A part of the key by which JAX caches what it has traced: a new value has all of a program traced anew.
_run = jax.make_user_context(None)


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Traces function(*args, **kwargs) and tells for each call of jaxnorm in it whether a kernel or XLA's code runs.

        >>> print(explain(jax.grad(lambda x: rms_norm(x).sum()), jnp.ones((2, 8))))  # doctest: +ELLIPSIS
        line...

    Nothing is computed, so arguments may be `jax.ShapeDtypeStruct`s. Backward calls appear only if function takes a
    gradient. Equal calls on one line appear once.

    Platforms are those with kernels of jaxnorm, and JAX's default one. Where XLA splits a program over devices,
    compilation may add reasons, which `JAXNORM_WARN_FALLBACK=1` prints.

    Args:
      function: any function that JAX can trace, under `jax.jit` or not.
      *args: its arguments. Without `jax.jit` arrays among them are traced, and all else is static, as num_groups=32.
      **kwargs: likewise, by name.

    Returns:
      A tuple of `jaxnorm.reports.Call`s, which prints as a table.

    Raises:
      TypeError: function cannot be called.
    """
    if not callable(function):
        raise TypeError(f"explain: the first argument must be a function, got {_in_words(function)}")
    found: list[tuple[fallback.Line | None, Call]] = []
    caller = fallback.line_of_user()

    def hear(formula: fallback.Formula) -> None:
        reason = f"{formula.reason}{_context(formula)}" if formula.reason == fallback.ASKED_FOR else formula.reason
        call = Described(formula.name, formula.operands, formula.direction, decide.Formula(reason))
        line = formula.line or caller
        found.append((line, _call(line, call)))

    with _run(object()), fallback.listening(hear):
        if isinstance(function, type(jax.jit(function))):
            traced = function.trace(*args, **kwargs)
        else:
            arrays, traceable = of_arrays(function, args, kwargs)
            traced = jax.jit(traceable).trace(arrays)
    found += [(line, _call(line, call)) for line, call in calls_in(traced.jaxpr, caller)]
    found.sort(key=lambda both: both[0] or ("",))
    return Explanation(dict.fromkeys(call for _, call in found))


def of_arrays(function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[list[Any], Callable[..., Any]]:
    """The arrays among the arguments, and the function of these alone."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    places = [place for place, leaf in enumerate(leaves) if hasattr(leaf, "dtype") and hasattr(leaf, "shape")]

    def traceable(arrays: Sequence[Any]) -> Any:
        given = dict(enumerate(leaves)) | dict(zip(places, arrays, strict=True))
        all_args, keywords = jax.tree.unflatten(tree, given.values())
        return function(*all_args, **keywords)

    return [leaves[place] for place in places], traceable


def _in_words(value: Any) -> str:
    """What came in place of a function, and the remedy."""
    remedy = "pass the function and its arguments apart, as explain(jaxnorm.rms_norm, x)"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"an array {value.dtype}{list(value.shape)}; {remedy}, and not its result."
    if isinstance(value, str):
        return f"{value!r}; {remedy}, or {value!r} to python -m jaxnorm.info --explain."
    return f"{type(value).__name__}; {remedy}."


def calls_in(jaxpr: Any, outer: fallback.Line | None = None) -> Iterator[tuple[fallback.Line | None, Described]]:
    """The calls that are primitives, at any depth. Those without a line of the user get the outer one."""
    for equation in jaxpr.eqns:
        line = fallback.line_of_user(equation.source_info.traceback) or outer
        if describe := registry.known(equation.primitive).describe:
            yield line, describe(*(var.aval for var in equation.invars), **equation.params)
        for inner in _jaxprs(equation.params.values()):
            yield from calls_in(inner, line)


def _jaxprs(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (Jaxpr, ClosedJaxpr)):
            yield value.jaxpr if isinstance(value, ClosedJaxpr) else value
        elif isinstance(value, (tuple, list)):
            yield from _jaxprs(value)


def _call(line: fallback.Line | None, call: Described) -> Call:
    where = "unknown" if line is None else f"{os.path.relpath(line.file)}:{line.number} ({line.function})"
    platforms = dict.fromkeys((*ffi.PLATFORMS, compat.default_platform()))
    given = tuple(f"{name}: {_type(array)}" for name, array in leaves_of(call.operands) if name != "stats")
    runs = tuple(_runs(platform, call.call) for platform in platforms)
    return Call(where, call.name, DIRECTIONS[call.direction], given + call.note, runs)


def _type(array: Any) -> str:
    of_array: Any = array if isinstance(array, jax.core.AbstractValue) else jax.typeof(array)
    return str(of_array.str_short())


def _context(formula: fallback.Formula) -> str:
    """Which context or variable asks for the formula, if one does."""
    asked = around(formula.name).of(formula.direction)
    return asked.how if asked.implementation == "xla" else ""


def _runs(platform: str, call: decide.Call) -> Runs:
    decision = decide.decide(decide.Platform.here(platform), call)
    if decision.why is not None:
        return Runs(platform, "xla", decision.why)
    asked = f" and is asked for by {call.native_for}" if call.native_for else ""
    return Runs(platform, "native", f"jaxnorm._{platform} has a kernel{asked}")


class NoFunction(ValueError):
    """A name names none that can be explained."""


def of_name(name: str) -> Explanation:
    """The calls of a function without arguments, by the name "module:function"."""
    module, _, path = name.partition(":")
    if not module or not path or os.sep in module:
        raise NoFunction(f"{name!r} names no function; write module:function")
    try:
        function: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        remedy = f"did you mean {module[:-3]}:{path}" if module.endswith(".py") else "is it in this directory"
        raise NoFunction(f"there is no module {module!r}; {remedy}?") from None
    for part in path.split("."):
        if not hasattr(function, part):
            raise NoFunction(f"{module} has no {path!r}; {misuse.did_you_mean(part, vars(function))}")
        function = getattr(function, part)
    if not callable(function):
        raise NoFunction(f"{name} is {_in_words(function).partition(';')[0]}, expected a function")
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise NoFunction(f"{name} takes arguments ({error}); name a function without any that calls it") from None
    return explain(function)
