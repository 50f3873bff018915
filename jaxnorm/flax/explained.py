"""Errors of a layer that name it where arguments do not fit, whichever of its bases takes them."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, get_args

from jaxnorm.ops import misuse

C = TypeVar("C", bound=type)


def explained(cls: C) -> C:
    """The class, whose errors say what was meant where a call, or that of the constructor, does not fit."""
    for method in ("__init__", "__call__"):
        setattr(cls, method, _explained(cls, method))
    return cls


def _explained(cls: type, method: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(cls, method)

    @functools.wraps(function)
    def called(self: Any, *args: Any, **keywords: Any) -> Any:
        try:
            return function(self, *args, **keywords)
        except TypeError:
            why = misuse.unbound(cls.__name__, _parameters(cls, method), args, keywords)
            if why is None:
                raise
        raise TypeError(f"{cls.__name__}: {why}")

    return called


def _parameters(cls: type, method: str) -> misuse.Parameters:
    """Those of a method, and those of the bases' to which it passes on what it does not name."""
    found: dict[str, inspect.Parameter] = {}
    takes = [inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD]
    for base in (base for base in cls.__mro__ if method in vars(base)):
        _, *own = inspect.signature(vars(base)[method]).parameters.values()
        kinds = {p.kind: p for p in own}
        found |= {p.name: p for p in own if p.kind in takes and p.name not in found}
        if (others := kinds.get(inspect.Parameter.VAR_KEYWORD)) is None:
            break
        if typed := get_args(others.annotation):  # an Unpack of a TypedDict, which has them all
            found |= {name: others.replace(name=name, kind=takes[0], default=None) for name in typed[0].__annotations__}
            break
        if inspect.Parameter.VAR_POSITIONAL not in kinds:
            takes = takes[:1]
    return found
