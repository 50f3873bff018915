"""Which code computes a call: one decision, from facts alone.

Lowering rules ask it of a call in its program, `jaxnorm.explain`, `jaxnorm.info` and `jaxnorm.tune` of one by itself,
and public functions before they bind a primitive that must be native. A reason is a part of a sentence.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from jaxnorm.native import compat, ffi

Stage = Literal["call", "platform", "program", "operands", "chosen", "kernel"]


class Decision(NamedTuple):
    """The code that computes a call.

    "native": its kernel; "split": XLA splits the call over devices, and each device decides for its part; "xla": the
    formula; "error": it must be native, and cannot be. `why` no kernel runs is known at a `stage`: "call" where no
    platform has one, "chosen" where one would serve the call and XLA's code is asked for or faster, "kernel" where it
    runs.
    """

    how: Literal["native", "split", "xla", "error"]
    why: str | None = None
    stage: Stage = "kernel"


class Platform(NamedTuple):
    """A platform by JAX's name for it in lowering rules, and why no kernel at all runs there, if none does."""

    name: str
    lacks: str | None = None

    @classmethod
    def here(cls, name: str) -> "Platform":
        """As it is in this installation, on the GPUs that are here."""
        return cls(name, ffi.why_nowhere(name))


class Program(NamedTuple):
    is_split: bool = False  # over devices, by XLA
    has_partitioner: bool = True  # XLA's, which asks how to split a call
    has_lengths: bool = True  # all lengths of the call's operands are known
    is_partly_manual: bool = False  # in a `shard_map` over some axes of a mesh
    platforms: int = 1  # how many it is for
    is_exported: bool = False  # so that it may run on other GPUs than those here

    @classmethod
    def of(cls, ctx: Any) -> "Program":
        """By the context of a lowering rule."""
        if not compat.is_split_by_xla(ctx):
            return cls(is_exported=compat.is_exported(ctx))
        return cls(
            is_split=True,
            has_partitioner=compat.has_partitioner(),
            has_lengths=all(isinstance(n, int) for aval in ctx.avals_in for n in aval.shape),
            is_partly_manual=compat.partly_manual(ctx) is not None,
            platforms=len(ctx.module_context.platforms),
            is_exported=compat.is_exported(ctx),
        )


ALONE = Program()  # a call that is told of by itself


class Call:
    """One direction of a call, as its op knows it; each op has a class of its own."""

    native_for: str | None = None  # the function that was asked for a kernel and nothing else
    platforms: tuple[str, ...] | None = None  # those that have its kernel; None: all that have any
    is_partitionable: bool = True  # whether XLA can be told how to split it
    splits_itself: bool = False  # whether its native rule makes calls of others, each of which is split

    def nowhere(self) -> str | None:
        """Why no platform has a kernel for it."""
        return None

    def unfit(self, program: Program) -> str | None:
        """Why the GPUs here, or those that an exported program may run on, have no kernel for it."""
        return None

    def unserved(self, platform: str) -> str | None:
        """Why the platform's kernels do not take its operands."""
        return None

    def left_out(self, platform: str) -> str | None:
        """Why XLA's code runs though a kernel would serve: it is asked for, or faster. None if it must be native."""
        return None


class Formula(Call):
    """A call that XLA's code computes everywhere, and why."""

    def __init__(self, why: str, native_for: str | None = None) -> None:
        self.why, self.native_for = why, native_for

    def nowhere(self) -> str:
        return self.why


def decide(platform: Platform, call: Call, program: Program = ALONE) -> Decision:
    """The code for a call on a platform, in this program; by the first reason against a kernel, if there is one."""
    in_parts = program.is_split and not call.splits_itself
    reasons: tuple[tuple[Stage, Callable[[], str | None]], ...] = (
        ("platform", lambda: _why_not_on(platform, call)),
        ("call", call.nowhere),
        ("platform", lambda: platform.lacks or call.unfit(program)),
        ("program", lambda: _why_not_in(program, call)),
        # Of what must be native a device's part may have a kernel where the whole has none.
        ("operands", lambda: None if call.native_for and in_parts else call.unserved(platform.name)),
        ("chosen", lambda: call.left_out(platform.name)),
    )
    for stage, reason in reasons:
        if (why := reason()) is not None:
            return Decision("error" if call.native_for else "xla", why, stage)
    return Decision("split" if in_parts else "native")


def _why_not_on(platform: Platform, call: Call) -> str | None:
    """Why no call like it has a kernel on a platform."""
    if call.platforms is not None and platform.name not in call.platforms:
        return f"there is a kernel for {' and '.join(call.platforms)}, none for {platform.name}"
    return None


def _why_not_in(program: Program, call: Call) -> str | None:
    """Why no kernel runs in a program that XLA splits over devices."""
    if not program.is_split:
        return None
    if not (call.is_partitionable or call.splits_itself):
        return "it has no rule for a program that XLA splits over devices"
    if not program.has_partitioner:
        return "XLA splits kernels over devices with its partitioner Shardy only, which is switched off"
    if not program.has_lengths:
        return "a program for several devices has arrays of unknown shape"
    if program.is_partly_manual and program.platforms > 1:
        # It has branches for platforms then, and XLA does not remove those in which devices exchange something.
        return "a program for several platforms has a shard_map over some axes of a mesh"
    return None


def check_native(call: Call) -> None:
    """An error where a call must be native, and no kernel serves it on JAX's default platform, or on any."""
    if call.native_for:
        why = call.nowhere() or decide(Platform.here(compat.default_platform()), call).why
        if why is not None:
            raise not_native(call.native_for, "cannot serve this call", why)


def not_native(function: str, what: str, reason: str) -> RuntimeError:
    return RuntimeError(
        f"{function}: implementation='native' {what}: {reason}. With implementation=None XLA's code runs."
    )
