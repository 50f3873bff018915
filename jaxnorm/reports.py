"""What became of a model: the results of the functions that change its layers, and of those that compare them."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxnorm.inspect.turns import Times

__all__ = ["Comparison", "Left", "Replaced", "Report", "Within"]

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
    """Which norms, or linear layers, of a model were replaced, and which were left, and why.

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
    return str(getattr(function, "__module__", "")).startswith("jaxnorm.flax.block")


def _named(path: Path) -> str:
    return ".".join(map(str, path)) or "(the model itself)"


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
