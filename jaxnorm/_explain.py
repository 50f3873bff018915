"""Every norm of a program, and what runs for it: `jaxnorm.explain`, and `--explain` of `python -m jaxnorm.info`."""

import dataclasses
import importlib
import os
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxnorm.native import compat, ffi, source
from jaxnorm.primitive import fallback, reasons
from jaxnorm.primitive.op import AnyOp, Record, RowSpec, Way, functions
from jaxnorm.primitive.rules import RULES, Rules, leaves_of

_Why = Callable[[str], str | None]  # why the formula runs on a platform, as far as that is not a reason for all
_Key = tuple[source.Line | None, AnyOp, RowSpec, Record, str]  # a line, an op, its spec, its operands, a direction
DIRECTIONS = {"forward": "forward", "linear": "tangent", "backward": "backward"}
# A part of the key by which JAX caches what it has traced: a new value has all of a program traced anew.
_run = jax.make_user_context(None)


@dataclasses.dataclass(frozen=True)
class Runs:
    """What runs for a norm on a platform: "native" or "formula", and why."""

    platform: str
    implementation: str
    why: str


@dataclasses.dataclass(frozen=True)
class Norm:
    """A norm of a program, in one direction.

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


class Explanation(tuple[Norm, ...]):
    """The norms of a program; printed, a table."""

    __slots__ = ()

    def __repr__(self) -> str:
        if not self:
            return "no norm of jaxnorm is in this program"
        platforms = [runs.platform for runs in self[0].runs]
        rows = [["line", "norm", "direction", *platforms]]
        notes: list[Sequence[str]] = [()]
        for norm in self:
            rows.append([norm.line, norm.name, norm.direction, *(runs.implementation for runs in norm.runs)])
            notes.append([", ".join(norm.operands), *_whys(norm)])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines: list[str] = []
        for row, note in zip(rows, notes, strict=True):
            lines.append("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
            lines += [textwrap.indent(line, "    ") for text in note for line in textwrap.wrap(text, 110)]
        return "\n".join(lines)

    __str__ = __repr__


def _whys(norm: Norm) -> list[str]:
    """Why the formula runs, each reason once, with its platforms."""
    by_reason: dict[str, list[str]] = {}
    for runs in norm.runs:
        if runs.implementation != "native":
            by_reason.setdefault(runs.why, []).append(runs.platform)
    return [f"formula on {', '.join(platforms)}: {why}" for why, platforms in by_reason.items()]


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Traces function(*args, **kwargs) and says of every norm in it whether a kernel or the formula runs, and why.

        print(jaxnorm.explain(jax.grad(loss), params, batch))

    Nothing is computed: arguments may be `jax.ShapeDtypeStruct`s. A function that takes a gradient has norms in both
    directions. Of one that takes none, each norm is listed with the backward that a gradient would add. The same norm
    of the same line stands there once, however often it is called.

    The platforms are those that jaxnorm has kernels for and JAX's default one. For a program that XLA splits over
    devices there are further reasons, of its compilation, which are not among these: `JAXNORM_WARN_FALLBACK=1` tells of
    them.

    Args:
      function: any function that JAX can trace, under `jax.jit` or not.
      args, kwargs: its arguments.

    Returns:
      A tuple of frozen dataclasses with `line`, `name`, `direction`, `operands` and `runs`, which prints as a table.
    """
    found: list[tuple[_Key, _Why]] = []

    def hear(formula: fallback.Formula) -> None:
        key = (formula.line, formula.op, formula.spec, _types(formula.operands), formula.direction)
        found.append((key, lambda _: formula.reason))

    with _run(object()), fallback.listening(hear):
        traced = function if isinstance(function, type(jax.jit(function))) else jax.jit(function)
        jaxpr = traced.trace(*args, **kwargs).jaxpr
    bound = list(_bound(jaxpr))
    if all(direction == "forward" for (*_, direction), _ in (*found, *bound)):
        found += [((*key[:-1], "backward"), why) for key, why in found if key[1].derivative]
        bound += [((*key[:-1], "backward"), _slower(key, "backward")) for key, _ in bound if key[1].derivative]
    found += bound
    found.sort(key=lambda both: both[0][0] or ("",))
    return Explanation(dict.fromkeys(_norm(key, why) for key, why in found))


def _slower(forward: _Key, way: Way) -> _Why:
    """Why the formula is faster one way, for a forward that is a primitive."""
    _, op, spec, operands, _ = forward
    call = reasons.Call(op, spec, operands)
    return lambda platform: reasons.not_here(op, spec, call.rows(platform, way))


def _bound(jaxpr: Any) -> Iterator[tuple[_Key, _Why]]:
    """The norms that are primitives, at any depth."""
    for equation in jaxpr.eqns:
        rule: Rules | None = RULES.get(equation.primitive)
        if rule is not None:
            types = [var.aval for var in equation.invars]
            operands = _types(rule.named_operands(equation.params["tree"], types))
            line = source.line_of_user(equation.source_info.traceback)
            yield (line, rule.op, equation.params["spec"], operands, rule.direction), _why(rule, types, equation.params)
        for inner in _jaxprs(equation.params.values()):
            yield from _bound(inner)


def _why(rule: Rules, types: Sequence[Any], params: dict[str, Any]) -> _Why:
    return lambda platform: rule.slower(platform, *types, **params)


def _jaxprs(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (Jaxpr, ClosedJaxpr)):
            yield value.jaxpr if isinstance(value, ClosedJaxpr) else value
        elif isinstance(value, (tuple, list)):
            yield from _jaxprs(value)


def _types(operands: Record) -> Record:
    return jax.tree.map(
        lambda array: array if isinstance(array, jax.core.AbstractValue) else jax.typeof(array), operands
    )


def _norm(key: _Key, why: _Why) -> Norm:
    """The row of a norm."""
    line, op, spec, operands, direction = key
    where = "unknown" if line is None else f"{os.path.relpath(line.file)}:{line.number} ({line.function})"
    platforms = dict.fromkeys((*ffi.PLATFORMS, compat.default_platform()))
    given = tuple(f"{name}: {array.str_short()}" for name, array in leaves_of(operands) if name != "stats")
    runs = tuple(_runs(op, spec, direction, platform, why(platform)) for platform in platforms)
    return Norm(where, _name(op, spec, operands), DIRECTIONS[direction], given, runs)


def _runs(op: AnyOp, spec: RowSpec, direction: str, platform: str, reason: str | None) -> Runs:
    if reason is None and direction == "linear":
        reason = "tangents have no kernel"
    if reason is None and spec.shards is not None:
        reason = "axis_name is given: jax.numpy exchanges the statistics, and calls kernels for what lies between"
    reason = reason or reasons.why_not(place=reasons.Place(platform, op.has_kernels))
    return (
        Runs(platform, "formula", reason) if reason else Runs(platform, "native", f"jaxnorm._{platform} has a kernel")
    )


def _name(op: AnyOp, spec: RowSpec, operands: Record) -> str:
    """That of the public function, if the op tells it."""
    if op.native is None:
        return op.name
    name = op.native.name(spec).removeprefix("jaxnorm_")
    adds = op.addend is not None and getattr(operands, op.addend, None) is not None
    return f"add_{name}" if adds and f"add_{name}" in functions() else name


def of_name(name: str) -> Explanation:
    """The norms of a function without arguments, by the name "module:function"."""
    module, _, path = name.partition(":")
    if not path:
        raise ValueError(f"{name!r} names no function; write module:function")
    function: Any = importlib.import_module(module)
    for part in path.split("."):
        function = getattr(function, part)
    return explain(function)
