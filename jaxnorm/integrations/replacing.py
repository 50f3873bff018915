"""What layers of all libraries share: which modules of a model become jaxnorm's, and why others do not.

Also what is said of what is no model or does not fit a layer, and what a linear layer may be quantised to.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm.native import ffi
from jaxnorm.ops import misuse
from jaxnorm.ops.quantized_dot.checks import dtypes_beside
from jaxnorm.quantization import Quantization, Quantized
from jaxnorm.reports import ALREADY, Path

C = TypeVar("C", bound=type)
OURS_ALREADY = f"it is jaxnorm's{ALREADY}"
TRACED = " in what was traced within"  # of contexts: what was compiled in one like it is not
# From classes of norms to the functions of a module and its arguments that compute them.
Custom = Mapping[type, Callable[..., Any]]
Only = Callable[[Path, Any], bool]  # of the path of a module and the module

# Lines that compare what models of other libraries give.
BY_HAND = {
    "equinox": "new, report = jaxnorm.equinox.replace_layers(model)\nprint(abs(new(x) - model(x)).max())",
    "keras": "own = model(x)\nmodel, report = jaxnorm.keras.replace_layers(model)\nprint(abs(model(x) - own).max())",
}


def no_model(model: object, states: tuple[type, ...] = (), optimizer: type | tuple[()] = ()) -> tuple[str, str]:
    """What came in place of a model, and the remedy; `states` are classes of what a model was split into."""
    if isinstance(model, type):
        return f"the class {model.__name__}", "make one, and pass that"
    if isinstance(model, states):
        return type(model).__name__, "make a model of it with nnx.merge(graphdef, state)"
    if isinstance(model, (tuple, list)) and any(isinstance(part, states) for part in model):
        return f"what nnx.split gives, a {type(model).__name__}", "make a model of it with model = nnx.merge(*parts)"
    if isinstance(model, optimizer):
        return f"an {type(model).__name__}", "pass the model that it trains, whose parameters stay as they are"
    if model is None:
        return "None", "pass the model"
    name, defining = library_of(model), type(model).__module__.partition(".")[0]
    library = name.capitalize() if name else "other libraries"
    of = "" if defining == "builtins" else f" of {defining}"
    return f"{type(model).__name__}{of}", f"how to port models of {library} is in docs/porting.md"


def library_of(model: object) -> str | None:
    """The library of a model for which docs/porting.md has a section of its own; None if it is of none of these."""
    libraries = [cls.__module__.partition(".")[0] for cls in type(model).__mro__]
    return next((library for library in ("equinox", "keras", "haiku") if library in libraries), None)


def check_custom(function: str, custom: object, module: type) -> Custom:
    if custom is None:
        return {}
    if isinstance(custom, str):
        raise TypeError(
            f"{function}: custom must be a mapping, got {custom!r}: what a class computes is not guessed. Give the "
            f"line of each, custom={{Norm: lambda norm, x: jaxnorm.rms_norm(x, norm.scale[...])}} in flax.nnx, "
            f"norm.get_variable('params', 'scale') in flax.linen, and check it by jaxnorm.compare_layers or "
            f"jaxnorm.linen.compare_layers. {function} without custom reports the line for each class that it leaves."
        )
    if not isinstance(custom, Mapping):
        remedy = "A model of flax.linen is called within it, as with jaxnorm.linen.using_layers(): model.apply(...)"
        if isinstance(custom, (list, tuple, set, frozenset)):
            is_pairs = all(isinstance(pair, tuple) and len(pair) == 2 for pair in custom)
            remedy = "Give dict(custom)" if is_pairs else "Give each class its function"
        raise TypeError(
            f"{function}: custom must be a mapping {{Class: function(module, x)}}, got {custom!r}. {remedy}."
        )
    for cls, computed in custom.items():
        if not (isinstance(cls, type) and issubclass(cls, module)):
            raise TypeError(
                f"{function}: custom must map subclasses of {module.__module__}.{module.__name__}, got {cls!r}."
            )
        if isinstance(computed, type) or not callable(computed):
            raise TypeError(
                f"{function}: custom must map {cls.__name__} to a function of a module and its arguments, as "
                f"lambda norm, x: jaxnorm.rms_norm(x, norm.scale), got {computed!r}."
            )
    return custom


def check_compared(model: object, loss: object) -> None:
    library = library_of(model)
    if library in BY_HAND:
        raise TypeError(
            f"compare_layers: got {type(model).__name__}, a model of {library}, expected one of Flax. Before the norms "
            f"of {library} are replaced, compare by hand:\n{BY_HAND[library]}"
        )
    if loss is not None and not callable(loss):
        raise TypeError(f"compare_layers: loss must be a function of a model and its arguments, got {loss!r}.")


def check_only(function: str, only: object) -> None:
    if only is not None and not callable(only):
        raise TypeError(f"{function}: only must be a function of a path and a module, got {only!r}.")


def why_own(module: Any, flaxs: Mapping[str, Any]) -> str | None:
    """Why a layer is left that has another function than Flax's of one of these names. None if it has not."""
    names = (name for name, function in flaxs.items() if getattr(module, name, function) is not function)
    return next((f"it has a {name} of its own" for name in names), None)


def find(cls: type, table: Mapping[Any, Any], key: Callable[[type], Any] = lambda base: base) -> Any | None:
    """What a table by classes says of one that is there or has its `__call__` from there; None for others."""
    bases = (base for base in cls.__mro__ if key(base) in table)
    return next((table[key(base)] for base in bases if _defines_call(cls) is _defines_call(base) is not None), None)


def _defines_call(cls: type) -> type | None:
    return next((base for base in cls.__mro__ if "__call__" in vars(base)), None)


def why_class(
    cls: type, ours: tuple[type, ...], flaxs: Iterable[type], others: tuple[type, ...], line: Callable[[], str]
) -> str | None:
    """Why a module of a class that no table has is left. None if it is neither a norm nor an Embed.

    `ours` are layers of this package, `flaxs` are Flax's that it replaces, `others` norms of which it has no kernel;
    `line` gives the `line_of` the module.
    """
    if issubclass(cls, ours):
        return OURS_ALREADY
    if issubclass(cls, others):
        return "jaxnorm has no such norm"
    bases = [base for base in flaxs if issubclass(cls, base)]
    if any("norm" in of.__name__.lower() for of in (cls, *bases)):
        return (
            f"its __call__ is not Flax's: if it is a norm, say what it computes, as by custom={{{line()}}}, and check "
            f"that by compare_layers"
        )
    return "its __call__ is not Flax's" if bases else None


def line_of(cls: type, parameters: Sequence[str], read: str) -> str:
    """A line to begin a mapping with; `read` is how a parameter is read, with {} for its name.

    The function goes by names alone, so it is the author's to check.
    """
    biases = [name for name in parameters if any(word in name.lower() for word in ("bias", "beta", "shift"))]
    scales = [name for name in parameters if name not in biases]
    name, options = cls.__name__.lower(), []
    function = "layer_norm" if biases or "layer" in name else "rms_norm"
    if "group" in name:
        function, options = "group_norm", ["num_groups=norm.num_groups"]
    scale = [read.format(scales[0])] if scales else []
    bias = [f"bias={read.format(biases[0])}"] if biases else []
    return f"{cls.__name__}: lambda norm, x: jaxnorm.{function}({', '.join(['x', *scale, *bias, *options])})"


def why_subclass(cls: type, ours: Mapping[type, type], others: tuple[type, ...]) -> str | None:
    """Why a layer stays of its class, where only the classes that `ours` maps are replaced. None if it is none.

    `others` are the library's layers that have no like in this package.
    """
    if issubclass(cls, tuple(ours.values())):
        return OURS_ALREADY
    if other := next((other for other in others if issubclass(cls, other)), None):
        return f"jaxnorm has no such {'norm' if 'norm' in other.__name__.lower() else 'layer'}"
    if norm := next((norm for base, norm in ours.items() if issubclass(cls, base)), None):
        library = ".".join(norm.__module__.split(".")[:2])
        return f"it is a class of the model's own: derive {cls.__name__} from {library}.{norm.__name__}"
    return "it is a class of the model's own" if "norm" in cls.__name__.lower() else None


def why_not_served(*dtypes: Any, epsilon: object = 0.0) -> str | None:
    """Why a layer with these dtypes and this epsilon is left; None if kernels serve it."""
    is_served = isinstance(epsilon, Real) and 0 <= float(epsilon) < math.inf
    why = why_dtypes(*dtypes) if is_served else f"epsilon={epsilon}"
    return why and f"no kernel serves {why}"


def why_dtypes(*dtypes: Any) -> str | None:
    """The first of `dtypes`, without None, that kernels do not read and write: integers, float64, complex."""
    unknown = (dtype for dtype in dtypes if dtype is not None and jnp.dtype(dtype) not in ffi.DTYPES)
    return next((str(jnp.dtype(dtype)) for dtype in unknown), None)


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


def pair(function: str, kernels: Any, inputs: Any) -> tuple[Quantization, Quantization | None]:
    """Both, quantised with a scale for each row, to dtypes of which there is a product."""
    kernels = of_rows(function, "kernels", kernels)
    if inputs is None:
        return kernels, None
    inputs = of_rows(function, "inputs", inputs)
    theirs, ours = (jnp.dtype(quantization.dtype) for quantization in (kernels, inputs))
    if ours.name not in (expected := dtypes_beside(theirs)):
        raise TypeError(
            f"{function}: inputs are quantised to {ours}, expected {' or '.join(expected)} for kernels of "
            f"{theirs}; leave inputs out to quantise the kernels only."
        )
    return kernels, inputs


def quantised(quantise: Callable[[Any], Quantized], kernel: Any) -> Quantized:
    """What it makes of a kernel; of a model without values there is only what shapes and dtypes come of it."""
    result: Quantized = (
        jax.eval_shape(quantise, kernel) if isinstance(kernel, jax.ShapeDtypeStruct) else quantise(kernel)
    )
    return result


def of_rows(function: str, name: str, given: Any) -> Quantization:
    """What is given for "kernels" or "inputs", or what a dtype stands for, with a scale for each row."""
    quantization: Quantization = given
    if not isinstance(given, Quantization):
        try:
            # Of an array numpy would take its dtype.
            quantization = Quantization(jnp.dtype(given) if isinstance(given, (str, type, np.dtype)) else None)
        except TypeError as error:
            raise TypeError(
                f"{function}: {name} must be a jaxnorm.Quantization, as {name}=jaxnorm.Quantization(jax.numpy.int8), "
                f"or a dtype that it takes, got {given!r}."
            ) from error
    if quantization.granularity != "token":
        why = "an output" if name == "kernels" else "a row of the input"
        raise ValueError(
            f"{function}: {name} has granularity={quantization.granularity!r}, expected 'token', a scale for {why}."
        )
    return quantization
