"""What is told of a program or a model: what `explain` says of calls, what became of layers, how two models compare."""

import dataclasses
import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxnorm.native import ffi

__all__ = ["Call", "Comparison", "Explanation", "Left", "Replaced", "Report", "Runs", "Within"]

Path = tuple[Any, ...]  # of attributes and indices
ALREADY = " already"  # so ends why a module is left that was changed before


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
    """Which norms and embeddings, or linear layers, of a model were replaced, and which were left, and why.

    `within` are those within a module that a mapping names. Its function may compute them itself or call them, and then
    they run as replaced or, with a reason in `why`, as their own code. The paths are those of the parameters, the
    classes those of the model. `unused` are classes of the mapping of which the model has no module. Printed, it is a
    line for each.
    """

    replaced: list[Replaced] = dataclasses.field(default_factory=list)
    left: list[Left] = dataclasses.field(default_factory=list)
    within: list[Within] = dataclasses.field(default_factory=list)
    done: str = "replaced"  # what was done to them, in eight letters
    where: str = ""  # what an empty report is about
    unused: list[type] = dataclasses.field(default_factory=list)

    def add(self, path: Path, cls: type, why: str | None) -> None:
        """A norm that is replaced, or left if there is a reason. Of calls that are alike the first one counts."""
        if why is None and Replaced(path, cls) not in self.replaced:
            self.replaced.append(Replaced(path, cls))
        if why is not None and Left(path, cls, why) not in self.left:
            self.left.append(Left(path, cls, why))

    def name_unused(self, custom: Mapping[type, Any], classes: Iterable[type]) -> None:
        """Has the classes of a mapping in `unused` that are none of a model's, but for those of `blocks.find`."""
        unused = (cls for cls in custom if not any(issubclass(of_model, cls) for of_model in classes))
        self.unused = [cls for cls in unused if not _is_of_blocks(custom[cls])]

    def put_within(self, blocks: Sequence[Path]) -> None:
        """Has what lies within modules at these paths in `within`, each by the module that is next around it."""

        def around(path: Path) -> Path | None:
            return max((block for block in blocks if block == path[: len(block)] != path), key=len, default=None)

        for path, cls, why in (*((*norm, None) for norm in self.replaced), *self.left):
            if (block := around(path)) is not None:
                self.within.append(Within(path, cls, block, why))
        self.replaced = [norm for norm in self.replaced if around(norm.path) is None]
        self.left = [norm for norm in self.left if around(norm.path) is None]

    def check_found(self, function: str, what: str, model: object, remedy: str = ".") -> None:
        """An error where no module of the model was replaced, by this call or by one before."""
        if not self.replaced and not any(why.endswith(ALREADY) for *_, why in self.left):
            left = f":\n{self}" if self.left else remedy
            raise ValueError(f"{function}: there is no {what} in {type(model).__name__}{left}")

    def __str__(self) -> str:
        replaced = [f"{self.done}  {_named(path)}: {cls.__name__}" for path, cls in self.replaced]
        within = [
            f"within    {_named(path)}: {cls.__name__}: {'left' if why else self.done}, where the function of "
            f"{_named(block)} calls it{(why and f': {why}') or ''}"
            for path, cls, block, why in self.within
        ]
        left = [f"left      {_named(path)}: {cls.__name__}: {why}" for path, cls, why in self.left]
        unused = [
            f"unused    custom: {cls.__name__}: there is no module of this class{self.where}" for cls in self.unused
        ]
        return (
            "\n".join([*replaced, *within, *left, *unused]) or f"nothing to {self.done.removesuffix('d')}{self.where}"
        )


def _is_of_blocks(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith("jaxnorm.integrations.flax.blocks")


def _named(path: Path) -> str:
    return ".".join(map(str, path)) or "(the model itself)"


@dataclasses.dataclass(frozen=True)
class Runs:
    """What runs for a call on a platform: "native" or "xla", and why."""

    platform: str
    implementation: str
    why: str


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a function of jaxnorm in a program, in one direction.

    `line` is that of the caller, as "file:line (function)". `operands` are what is read, as "x: bfloat16[8,128]".
    `direction` is "forward", "backward", or "tangent" for what forward mode adds.
    """

    line: str
    name: str
    direction: str
    operands: tuple[str, ...]
    runs: tuple[Runs, ...]

    def on(self, platform: str) -> Runs:
        """What runs on one of the platforms."""
        return {runs.platform: runs for runs in self.runs}[platform]


class Explanation(tuple[Call, ...]):
    """The calls of a program; printed, a table."""

    __slots__ = ()

    def __repr__(self) -> str:
        if not self:
            return "no function of jaxnorm is in this program"
        platforms = [runs.platform for runs in self[0].runs]
        rows = [["line", "function", "direction", *platforms]]
        notes: list[Sequence[str]] = [()]
        for call in self:
            rows.append([call.line, call.name, call.direction, *(runs.implementation for runs in call.runs)])
            notes.append([", ".join(call.operands), *_whys(runs for runs in call.runs if not _is_of_all(runs))])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines: list[str] = []
        for row, note in zip(rows, notes, strict=True):
            lines.append("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
            lines += [textwrap.indent(line, "    ") for text in note for line in textwrap.wrap(text, 110)]
        of_all = _whys(dict.fromkeys(runs for call in self for runs in call.runs if _is_of_all(runs)))
        return "\n".join([*lines, *(line for text in of_all for line in textwrap.wrap(text, 114))])

    __str__ = __repr__


def _is_of_all(runs: Runs) -> bool:
    """Whether the reason is that of all calls on the platform, and so is told once."""
    return runs.why == ffi.why_nowhere(runs.platform)


def _whys(all_runs: Iterable[Runs]) -> list[str]:
    """Why XLA's code runs, each reason once, with its platforms."""
    by_reason: dict[str, list[str]] = {}
    for runs in all_runs:
        if runs.implementation != "native":
            by_reason.setdefault(runs.why, []).append(runs.platform)
    return [f"xla on {', '.join(platforms)}: {why}" for why, platforms in by_reason.items()]


class Times(NamedTuple):
    """Seconds of a call: the median over the turns, and the quartiles."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Times":
        return cls(*statistics.quantiles(seconds, n=4, method="inclusive"))

    def beats(self, other: "Times") -> bool:
        """Whether three quarters of its turns are faster than three quarters of the other's."""
        return self.high < other.low


class Pair(NamedTuple):
    """What a call takes with the model's own norms and as it is."""

    own: Times
    replaced: Times


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A model beside a copy with its own norms. Printed, it is a small table.

    `outputs` is the largest difference of the two models' outputs, relative to the largest magnitude of an output with
    the model's own norms, and `gradients` that of the gradients by the parameters, likewise; `parameter` is where it
    is, None for a model without parameters. `forward` and `backward` have the seconds of a call, `own` and `replaced`,
    each with its `median` and quartiles, `low` and `high`; backward is all that gradients take, the forward pass too.
    """

    outputs: float
    gradients: float
    parameter: str | None
    forward: Pair
    backward: Pair

    def __str__(self) -> str:
        lines = [f"{'':9}{'own norms':>12}{'replaced':>12}{'change':>9}{'largest difference':>20}"]
        rows = (("forward", self.forward, self.outputs), ("gradient", self.backward, self.gradients))
        for name, (own, replaced), difference in rows:
            times = "".join(f"{1e3 * of.median:9.4g} ms" for of in (own, replaced))
            change = f"{100 * (replaced.median / own.median - 1):+.0f} %"
            lines.append(f"{name:9}{times}{change:>9}{difference:20.2g}")
        return "\n".join(lines) + (f", of {self.parameter}" if self.parameter else "")
