"""Reports on programs and models: the calls that `explain` finds, layers that were replaced, two models compared."""

import dataclasses
import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxnorm.native import ffi

__all__ = ["Call", "Comparison", "Explanation", "Left", "Replaced", "Report", "Runs", "Within"]

Path = tuple[Any, ...]  # of attributes and indices
ALREADY = " already"  # ends the reason why a module that was changed before is left


class Replaced(NamedTuple):
    """A layer that was replaced."""

    path: Path
    cls: type


class Left(NamedTuple):
    """A layer that was left, and why."""

    path: Path
    cls: type
    why: str


class Within(NamedTuple):
    """A layer inside a module that a function of a mapping computes."""

    path: Path
    cls: type
    block: Path  # of the module around it that a function of a mapping computes
    why: str | None  # it was left; None if it was replaced


@dataclasses.dataclass
class Report:
    """Which layers of a model were replaced, which were left, and why. It prints one line for each.

    `within` has layers inside a module that a mapping names. Its function may compute them, or call them: then they run
    as replaced or, with a reason in `why`, as their own code. Paths are those of the parameters, classes those of the
    model. `unused` has classes of the mapping that no module of the model has.
    """

    replaced: list[Replaced] = dataclasses.field(default_factory=list)
    left: list[Left] = dataclasses.field(default_factory=list)
    within: list[Within] = dataclasses.field(default_factory=list)
    done: str = "replaced"  # what was done to them, in eight letters
    where: str = ""  # what an empty report is about
    unused: list[type] = dataclasses.field(default_factory=list)

    def add(self, path: Path, cls: type, why: str | None) -> None:
        """Notes a layer as left if there is a reason, else as replaced; equal calls count once."""
        if why is None and Replaced(path, cls) not in self.replaced:
            self.replaced.append(Replaced(path, cls))
        if why is not None and Left(path, cls, why) not in self.left:
            self.left.append(Left(path, cls, why))

    def name_unused(self, custom: Mapping[type, Any], classes: Iterable[type]) -> None:
        """Puts classes of a mapping that no module of the model has in `unused`, but for those of `blocks.find`."""
        unused = (cls for cls in custom if not any(issubclass(of_model, cls) for of_model in classes))
        of_blocks = "jaxnorm.integrations.flax.blocks"
        self.unused = [cls for cls in unused if getattr(custom[cls], "__module__", "") != of_blocks]

    def put_within(self, blocks: Sequence[Path]) -> None:
        """Moves what lies within modules at these paths to `within`, each with its innermost such module."""

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


def _named(path: Path) -> str:
    return ".".join(map(str, path)) or "(the model itself)"


@dataclasses.dataclass(frozen=True)
class Runs:
    """Whether "native" or "xla" runs for a call on a platform, and why."""

    platform: str
    implementation: str
    why: str


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a function of jaxnorm in a program, in one direction.

    `line` is where it was called, as "file:line (function)". `operands` are the arrays read, as "x: bfloat16[8,128]".
    `direction` is "forward", "backward", or "tangent" for the extra work of forward mode.
    """

    line: str
    name: str
    direction: str
    operands: tuple[str, ...]
    runs: tuple[Runs, ...]

    def on(self, platform: str) -> Runs:
        """What runs on this platform."""
        return {runs.platform: runs for runs in self.runs}[platform]


class Explanation(tuple[Call, ...]):
    """The calls of a program; it prints as a table."""

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
    """Whether the reason holds for all calls on the platform, and so is printed once."""
    return runs.why == ffi.why_nowhere(runs.platform)


def _whys(all_runs: Iterable[Runs]) -> list[str]:
    """Why XLA's code runs, each reason once, with its platforms."""
    by_reason: dict[str, list[str]] = {}
    for runs in all_runs:
        if runs.implementation != "native":
            by_reason.setdefault(runs.why, []).append(runs.platform)
    return [f"xla on {', '.join(platforms)}: {why}" for why, platforms in by_reason.items()]


class Times(NamedTuple):
    """Seconds of a call: median and quartiles over the turns."""

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
    """The times of a call with the model's own norms, and as it is."""

    own: Times
    replaced: Times


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A model compared with a copy that has its own norms; it prints as a small table.

    `outputs` and `gradients` are the largest differences of outputs and of parameters' gradients, each relative to the
    largest magnitude with the model's own norms. `parameter` names where that of gradients is, None for a model without
    parameters. `forward` and `backward` have the seconds of a call, `own` and `replaced`, each with `median` and the
    quartiles `low` and `high`; backward includes the forward pass.
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
