"""Which modules of a model become jaxnorm's, what is said of those, and of what is no model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp

from jaxnorm.native import ffi

Path = tuple[Any, ...]  # of attributes and indices
# From classes of norms to the functions of a module and its arguments that compute them; or "match", to find them.
Custom = Mapping[type, Callable[..., Any]] | Literal["match"]
Only = Callable[[Path, Any], bool]  # of the path of a module and the module


class Replaced(NamedTuple):
    path: Path
    cls: type


class Left(NamedTuple):
    path: Path
    cls: type
    why: str


class Within(NamedTuple):
    path: Path
    cls: type
    block: Path  # of the module around it that a function of a mapping computes
    why: str | None  # it was left; None if it was replaced


@dataclasses.dataclass
class Report:
    """Which norms, or linear layers, of a model were replaced, and which were left, and why.

    `within` are those within a module that a mapping names. Its function may compute them itself or call them, and then
    they run as replaced or, with a reason in `why`, as their own code. The paths are those of the parameters, the
    classes those of the model. Printed, it is a line for each norm, and the `mapping` last.
    """

    replaced: list[Replaced] = dataclasses.field(default_factory=list)
    left: list[Left] = dataclasses.field(default_factory=list)
    within: list[Within] = dataclasses.field(default_factory=list)
    done: str = "replaced"  # what was done to them, in eight letters
    # Lines of the mapping, of the classes whose functions were found.
    found: list[str] = dataclasses.field(default_factory=list)

    def add(self, path: Path, cls: type, why: str | None) -> None:
        """A norm that is replaced, or left if there is a reason. Of calls that are alike the first one counts."""
        if why is None and Replaced(path, cls) not in self.replaced:
            self.replaced.append(Replaced(path, cls))
        if why is not None and Left(path, cls, why) not in self.left:
            self.left.append(Left(path, cls, why))

    def put_within(self, blocks: Sequence[Path]) -> None:
        """Has what lies within modules at these paths in `within`, each by the module that is next around it."""

        def around(path: Path) -> Path | None:
            return max((block for block in blocks if block == path[: len(block)] != path), key=len, default=None)

        for path, cls, why in (*((*norm, None) for norm in self.replaced), *self.left):
            if (block := around(path)) is not None:
                self.within.append(Within(path, cls, block, why))
        self.replaced = [norm for norm in self.replaced if around(norm.path) is None]
        self.left = [norm for norm in self.left if around(norm.path) is None]

    def __str__(self) -> str:
        replaced = [f"{self.done}  {_named(path)}: {cls.__name__}" for path, cls in self.replaced]
        within = [
            f"within    {_named(path)}: {cls.__name__}: {'left' if why else self.done}, where the function of "
            f"{_named(block)} calls it{(why and f': {why}') or ''}"
            for path, cls, block, why in self.within
        ]
        left = [f"left      {_named(path)}: {cls.__name__}: {why}" for path, cls, why in self.left]
        lines = [*replaced, *within, *left, *([self.mapping] if self.found else [])]
        return "\n".join(lines) or f"nothing to {self.done.removesuffix('d')}"

    @property
    def mapping(self) -> str:
        """What `custom="match"` found, as the mapping to write in its place; "" if it found none.

        Where norms of one class compute different things, the first is in the mapping, the others are comments.
        """
        if len(self.found) < 2:
            return f"custom={{{self.found[0]}}}" if self.found else ""
        classes = [line.partition(":")[0] for line in self.found]
        marks = ["" if cls not in classes[:index] else "# others are " for index, cls in enumerate(classes)]
        lines = [f"    {mark}{line},\n" for mark, line in zip(marks, self.found, strict=True)]
        return f"custom={{\n{''.join(lines)}}}"


def _named(path: Path) -> str:
    return ".".join(map(str, path)) or "(the model itself)"


def no_model(model: object, states: tuple[type, ...]) -> tuple[str, str]:
    """What came in place of a model, and the remedy; `states` are classes of what a model was split into."""
    if isinstance(model, type):
        return f"the class {model.__name__}", "make one, and pass that"
    if isinstance(model, states):
        return type(model).__name__, "make a model of it with nnx.merge(graphdef, state)"
    if model is None:
        return "None", "pass the model"
    libraries = [cls.__module__.partition(".")[0] for cls in type(model).__mro__]
    with_page = (library for library in ("equinox", "keras", "haiku") if library in libraries)
    name = next(with_page, None)
    library, page = (name.capitalize(), f"{name}.md") if name else ("other libraries", "porting.md")
    of = "" if libraries[0] == "builtins" else f" of {libraries[0]}"
    return f"{type(model).__name__}{of}", f"how to port models of {library} is in docs/{page}"


def check_custom(custom: object, module: type) -> Mapping[type, Callable[..., Any]]:
    """custom as a mapping from subclasses of `module` to functions, which has none for "match"."""
    if custom is None or (isinstance(custom, str) and custom == "match"):
        return {}
    if isinstance(custom, str):
        raise ValueError(
            f'replace_norms: custom must be a mapping {{Class: function(module, x)}} or "match", got {custom!r}. Give '
            f'"match" to have the functions found.'
        )
    if not isinstance(custom, Mapping):
        raise TypeError(
            f"replace_norms: custom must be a mapping {{Class: function(module, x)}}, got {custom!r}. A model of "
            f"flax.linen is called within it, as with jaxnorm.linen.replace_norms(): model.apply(...)."
        )
    for cls, function in custom.items():
        if not (isinstance(cls, type) and issubclass(cls, module)):
            raise TypeError(
                f"replace_norms: custom must map subclasses of {module.__module__}.{module.__name__}, got {cls!r}."
            )
        if isinstance(function, type) or not callable(function):
            raise TypeError(
                f"replace_norms: custom must map {cls.__name__} to a function of a module and its arguments, as "
                f"lambda norm, x: jaxnorm.rms_norm(x, norm.scale), got {function!r}."
            )
    return custom


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


def why_class(cls: type, ours: type | tuple[type, ...], norms: Iterable[type], others: tuple[type, ...]) -> str | None:
    """Why a module of a class that no table has is left. None if it is no norm.

    `ours` are norms of this package, `norms` are Flax's that it replaces, `others` those of which it has no kernel.
    """
    if issubclass(cls, ours):
        return "it is jaxnorm's already"
    if issubclass(cls, others):
        return "jaxnorm has no such norm"
    if issubclass(cls, tuple(norms)) or "norm" in cls.__name__.lower():
        return f"its __call__ is not Flax's: give custom={{{cls.__name__}: function}} if it is a norm"
    return None


def why_subclass(cls: type, ours: Mapping[type, type], others: tuple[type, ...]) -> str | None:
    """Why a layer stays of its class, where only the classes that `ours` maps are replaced. None if it is no norm.

    `others` are the library's norms of which there is no kernel.
    """
    if issubclass(cls, tuple(ours.values())):
        return "it is jaxnorm's already"
    if issubclass(cls, others):
        return "jaxnorm has no such norm"
    if norm := next((norm for base, norm in ours.items() if issubclass(cls, base)), None):
        library = ".".join(norm.__module__.split(".")[:2])
        return f"it is a class of the model's own: derive {cls.__name__} from {library}.{norm.__name__}"
    return "it is a class of the model's own" if "norm" in cls.__name__.lower() else None


def why_epsilon(epsilon: object) -> str | None:
    """Why no kernel takes an epsilon; None if one does."""
    served = isinstance(epsilon, Real) and 0 <= float(epsilon) < math.inf
    return None if served else f"epsilon={epsilon}"


def why_dtypes(*dtypes: Any) -> str | None:
    """The first of `dtypes` that kernels do not read and write: integers, float64, complex: the library's."""
    unknown = (dtype for dtype in map(jnp.dtype, dtypes) if dtype not in ffi.DTYPES)
    return next(map(str, unknown), None)
