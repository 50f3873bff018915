"""The choice of `jaxnorm.tune` for a program: a mapping for `jaxnorm.implementation`, a table and a file."""

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import reprlib
import textwrap
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Self

import jax

from jaxnorm.inspect.explain import explain
from jaxnorm.native import ffi
from jaxnorm.ops import options
from jaxnorm.primitive.fallback import Around

PACKAGES = ("jax", "jaxlib", "jaxnorm")
NAME, FORMAT = "jaxnorm.tune", 1  # of the file
MOST_CALLS, MOST_CHARACTERS = 2, 400  # of a file, in a message


@dataclasses.dataclass(frozen=True)
class Trial:
    """One implementation that was tried for one direction of a function.

    `outcome` is "chosen", "not faster", "the same program", or why it was left out. `before` and `after` are the
    seconds of a call without and with it, where it was timed.
    """

    function: str
    direction: str
    implementation: str
    outcome: str
    before: float | None = None
    after: float | None = None


@dataclasses.dataclass(frozen=True)
class Where:
    """The kind and number of devices of a program, and the versions of what compiles it."""

    device: str
    devices: int
    versions: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, leaves: Iterable[Any] = ()) -> "Where":
        """Where a program with these arguments runs; without arrays, on JAX's default device."""
        devices = devices_of(leaves)
        kind = devices[0].device_kind
        if devices[0].platform == "cpu" and ffi.available("cpu"):
            kind = f"{kind}, {ffi.module('cpu').isa()}"
        return cls(kind, len(devices), tuple((package, installed(package) or "unknown") for package in PACKAGES))

    def __str__(self) -> str:
        count = f"{self.devices} x " if self.devices > 1 else ""
        return ", ".join([f"{count}{self.device}", *map(" ".join, self.versions)])


def devices_of(leaves: Iterable[Any]) -> list[Any]:
    """The devices that the arrays lie on, or the default one."""
    shardings = [sharding for leaf in leaves if (sharding := getattr(leaf, "sharding", None)) is not None]
    found = {device for sharding in shardings or [jax.device_put(0).sharding] for device in sharding.device_set}
    return sorted(found, key=lambda device: device.id)


def installed(package: str) -> str | None:
    """Its version; None of what is not installed, as a source tree that never was."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# The contexts of Tuned. One of a Tuned itself would be part of its value.
_entered = Around()


@dataclasses.dataclass(frozen=True, repr=False)
class Tuned(Mapping[str, Any]):
    """The choice of `jaxnorm.tune` for a program: a context, and a mapping, empty where the default is fastest.

        with jaxnorm.Tuned.load("step.json", step, params, batch):
            params = step(params, batch)

    The context is that of `jaxnorm.implementation`, which takes the mapping too. It prints as a table of what was
    tried. Two are equal, with one hash, if they choose the same for the same calls, device and versions, whatever was
    measured.

    Attributes:
      choices: (function, direction, implementation), one for each that differs from the default.
      program: the name of the function that was tuned.
      calls: its calls of jaxnorm, with direction and operands, in alphabetical order.
      arguments: the types of its arrays, with their shardings over several devices.
      where: the kind and number of devices, and the versions of JAX, jaxlib and jaxnorm.
      note: why nothing was tried, or nothing was chosen, if so.
      trials: what was tried, in order; see `Trial`.
      compilations: how many programs were compiled; at_most is how many it might have been.
      default_seconds, seconds: a call by default and with these choices, if timed.
    """

    choices: tuple[tuple[str, str, str], ...]
    program: str
    calls: tuple[str, ...]
    arguments: tuple[str, ...]
    where: Where
    note: str = dataclasses.field(default="", compare=False)
    trials: tuple[Trial, ...] = dataclasses.field(default=(), compare=False)
    compilations: int = dataclasses.field(default=0, compare=False)
    at_most: int = dataclasses.field(default=0, compare=False)
    default_seconds: float | None = dataclasses.field(default=None, compare=False)
    seconds: float | None = dataclasses.field(default=None, compare=False)

    def __getitem__(self, function: str) -> dict[str, str]:
        of_function: dict[str, str] = as_mapping(self.choices)[function]
        return of_function

    def __iter__(self) -> Iterator[str]:
        return iter(as_mapping(self.choices))

    def __len__(self) -> int:
        return len(as_mapping(self.choices))

    def __enter__(self) -> Self:
        context = options.implementation(self)
        context.__enter__()
        _entered.entries.append(context)
        return self

    def __exit__(self, *error: Any) -> None:
        _entered.entries.pop().__exit__(*error)

    def __repr__(self) -> str:
        rows = [("function", "direction", "tried", "before", "after", "outcome")]
        notes: list[str] = [""]
        for trial in self.trials:
            short, _, note = trial.outcome.partition(": ")
            times = _milliseconds(trial.before), _milliseconds(trial.after)
            rows.append((trial.function, trial.direction, trial.implementation, *times, short))
            notes.append(note)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [f"{self.program} on {self.where}"]
        for row, note in zip(rows if self.trials else [], notes, strict=False):
            lines.append("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
            lines += [textwrap.indent(line, "    ") for line in textwrap.wrap(note, 110)]
        return "\n".join([*lines, *self._summary()])

    __str__ = __repr__

    def _check_names(self) -> None:
        """An error where it names a function, direction or implementation that this jaxnorm does not have."""
        options.checked(self)
        named = {trial.function for trial in self.trials} | {call.partition(" ")[0] for call in self.calls}
        options.checked(dict.fromkeys(sorted(named)))

    def _summary(self) -> Iterator[str]:
        if self.note:
            yield self.note
        chosen = " ".join(f"{name} {way} {which}," for name, way, which in self.choices).rstrip(",")
        yield f"chosen: {chosen or 'the default'}; {self.compilations} programs compiled, of {self.at_most} at most"
        if self.seconds is not None:
            by_default = f", by default {_milliseconds(self.default_seconds)}" if self.choices else ""
            yield f"a call takes {_milliseconds(self.seconds)}{by_default}"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a JSON file, which `load` reads."""
        content = {NAME: FORMAT, **dataclasses.asdict(self)}
        Path(path).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], function: Callable[..., Any] | None = None, /, *args: Any, **kwargs: Any
    ) -> "Tuned":
        """Reads a file that `save` wrote for this kind of device and these versions.

        Args:
          path: the file.
          function: None, or the program, as for `jaxnorm.explain`: it is traced, and its calls must be those of the
            file.
          *args: its arguments, which may be `jax.ShapeDtypeStruct`s.
          **kwargs: likewise, by name.

        Raises:
          ValueError: `save` did not write the file; the message tells what is wrong. Or it is for another kind or
            number of devices, other versions of JAX, jaxlib or jaxnorm, or other calls; the message has both.
        """
        tuned = _read(path)
        leaves = jax.tree.leaves((args, kwargs))
        here = Where.of(leaves)
        if not any(getattr(leaf, "sharding", None) for leaf in leaves):  # which say how many devices there will be
            here = dataclasses.replace(here, devices=tuned.where.devices)
        if tuned.where != here:
            there = textwrap.shorten(str(tuned.where), MOST_CHARACTERS)
            raise ValueError(f"Tuned.load: {path} is for {there}, and here is {here}; call jaxnorm.tune here.")
        with _malformed(path):
            tuned._check_names()
        if function is not None and (calls := calls_of(explain(function, *args, **kwargs))) != tuned.calls:
            both = (("file", set(tuned.calls) - set(calls)), ("program", set(calls) - set(tuned.calls)))
            other = "; ".join(f"only the {one} has {_some(these)}" for one, these in both if these)
            raise ValueError(f"Tuned.load: {path} is for other calls: {other}. Call jaxnorm.tune with this program.")
        return tuned


def as_mapping(choices: Iterable[tuple[str, str, str]]) -> dict[str, Any]:
    """(function, direction, implementation) as `jaxnorm.implementation` takes them."""
    mapping: dict[str, Any] = {}
    for function, direction, chosen in choices:
        mapping.setdefault(function, {})[direction] = chosen
    return mapping


def calls_of(explained: Sequence[Any]) -> tuple[str, ...]:
    """The calls of a program, without the lines that they stand on."""
    return tuple(sorted({f"{call.name} {call.direction} ({', '.join(call.operands)})" for call in explained}))


def _read(path: str | os.PathLike[str]) -> Tuned:
    with _malformed(path):
        try:
            content = json.loads(Path(path).read_bytes())
        except (RecursionError, ValueError) as error:
            raise ValueError(f"it is no JSON: {error}") from None
        if isinstance(content, dict) and from_json(int, content.pop(NAME, None), NAME) != FORMAT:
            raise ValueError("another format")
        tuned: Tuned = from_json(Tuned, content, "it")
    return tuned


@contextlib.contextmanager
def _malformed(path: str | os.PathLike[str]) -> Iterator[None]:
    """An error within as one about the file."""
    try:
        yield
    except ValueError as error:
        what = textwrap.shorten(str(error).removesuffix("."), MOST_CHARACTERS)
        raise ValueError(f"Tuned.load: {path} is no file that jaxnorm.tune's save wrote ({what}).") from None


def _some(calls: Iterable[str]) -> str:
    """The first calls, and how many there are beside these."""
    first, rest = (found := sorted(calls))[:MOST_CALLS], len(found) - MOST_CALLS
    shown = [textwrap.shorten(call, MOST_CHARACTERS // 4, placeholder="...") for call in first]
    return ", ".join(shown) + (f" and {rest} more" if rest > 0 else "")


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.4g} ms"


IN_JSON = {str: "a string", int: "an integer", float: "a number", type(None): "null"}


def from_json(kind: Any, value: Any, name: str) -> Any:
    """The value of JSON as `kind`, which is a dataclass, a tuple of types, or a union of those of IN_JSON.

    Raises:
      ValueError: it is none; the message names the part that is not.
    """
    if dataclasses.is_dataclass(kind):
        return _record(kind, value, name)
    of_parts = typing.get_args(kind)
    if typing.get_origin(kind) is tuple:
        any_number = of_parts[-1] is ...
        if not isinstance(value, list) or not (any_number or len(value) == len(of_parts)):
            _refuse(value, name, "a list" if any_number else f"a list of {len(of_parts)}")
        kinds = of_parts[:1] * len(value) if any_number else of_parts
        return tuple(from_json(part, value[place], f"{name}[{place}]") for place, part in enumerate(kinds))
    kinds = of_parts or (kind,)
    if type(value) not in kinds and not (type(value) is int and float in kinds):
        _refuse(value, name, " or ".join(IN_JSON[part] for part in kinds))
    return value


def _record(kind: Any, value: Any, name: str) -> Any:
    kinds = {field.name: field.type for field in dataclasses.fields(kind)}
    if not isinstance(value, dict):
        _refuse(value, name, "an object")
    if missing := [field for field in kinds if field not in value]:
        raise ValueError(f"{name} has no {missing[0]}")
    if surplus := [field for field in value if field not in kinds]:
        raise ValueError(f"{name} has {reprlib.repr(surplus[0])}, which is no field of it")
    prefix = "" if name == "it" else f"{name}."
    return kind(**{field: from_json(of_field, value[field], prefix + field) for field, of_field in kinds.items()})


def _refuse(value: Any, name: str, expected: str) -> NoReturn:
    raise ValueError(f"{name} is {reprlib.repr(value)}, expected {expected}")
