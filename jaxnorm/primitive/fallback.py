"""Where XLA's code runs instead of a kernel: who is told of it, `jaxnorm.explain` and the user who wants to know.

With the environment variable `JAXNORM_WARN_FALLBACK=1` there is a warning, once for each line of the user's code where
a kernel was to be expected. Where kernels that were built do not load or cannot run, or the wheel has none, there is
one always.
"""

import contextlib
import functools
import importlib.util
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from jaxnorm.native import compat, ffi, private
from jaxnorm.primitive.op import public_name

VARIABLE = "JAXNORM_WARN_FALLBACK"
ASKED_FOR = "XLA's code is asked for"


# Private, and done without where it is gone: a line is unknown then.
source_info = private.module("jax._src.source_info_util")


class Line(NamedTuple):
    file: str
    number: int
    function: str


def line_of_user(traceback: Any = None) -> Line | None:
    """The innermost line that is not of JAX or jaxnorm, and if there is such a one not of Flax, of what is traced now.

    Or of an equation. A transformed one has the traceback of the one that was there before; it ends where `jax.jit` is
    called.
    """
    if traceback is None:
        current: Any = getattr(source_info, "current", None)
        traceback = None if current is None else current().traceback
    frames = getattr(traceback, "frames", ())
    internals, flax = _not_users()
    lines = [Line(frame.file_name, frame.line_num, frame.function_name) for frame in frames]
    outside = [line for line in lines if not line.file.startswith(internals)]
    return next((line for line in outside if not line.file.startswith(flax)), outside[0] if outside else None)


@functools.cache
def _not_users() -> tuple[tuple[str, ...], str]:
    """What no user wrote: where the files of JAX, jaxnorm and what calls modules begin, and where those of Flax do."""

    def directory(package: str) -> str:
        spec = importlib.util.find_spec(package)
        return os.path.join(os.path.dirname(str(spec.origin)), "") if spec else f"no {package}"

    flax = directory("flax")
    packages = map(directory, ("jax", "jaxlib", "jaxnorm", "keras", "equinox"))
    return (*packages, contextlib.__file__, f"{flax}linen/module.py"), flax


class Formula(NamedTuple):
    """A call that the formula serves on every platform, as it is traced."""

    name: str
    operands: Any  # a NamedTuple of arrays or their types
    direction: str
    reason: str
    line: Line | None


class Around(threading.local):
    """What a thread is within, from the outermost."""

    def __init__(self) -> None:
        self.entries: list[Any] = []

    @contextlib.contextmanager
    def within(self, entry: Any) -> Iterator[None]:
        self.entries.append(entry)
        try:
            yield
        finally:
            self.entries.pop()


_listeners = Around()
_warns = os.environ.get(VARIABLE, "") not in ("", "0")
_told: set[Any] = set()


def listening(listener: Callable[[Formula], None]) -> contextlib.AbstractContextManager[None]:
    """Within, the listener hears of every call that this thread traces and the formula serves."""
    return _listeners.within(listener)


def traced(op: Any, spec: Any, operands: Any, direction: str, why: Callable[[], str]) -> None:
    """Tells of a call whose formula is traced, and no primitive; `operands` are its arrays or their types."""
    if not _warns and not _listeners.entries:
        return
    name, reason = public_name(op, spec, operands), why()
    tell(name, operands, direction, reason)
    expects_kernel = op.native is not None and spec.shards is None and reason != ASKED_FOR
    if expects_kernel and compat.default_platform() in ffi.PLATFORMS:
        _warn(name, direction, reason, line_of_user())


def tell(name: str, operands: Any, direction: str, reason: str) -> None:
    """Tells the listeners of a call of a public function."""
    if _listeners.entries:
        formula = Formula(name, operands, direction, reason, line_of_user())
        for listener in _listeners.entries:
            listener(formula)


def lowered(primitive: str, platform: str, reason: str, traceback: Any) -> None:
    """Tells of a primitive that is lowered to its formula, though its op has kernels."""
    if reason == ffi.why_unfit(platform):
        if reason not in _told:
            _told.add(reason)
            warnings.warn(f"jaxnorm runs XLA's code on {platform}: {reason}.", stacklevel=2)
    elif platform in ffi.PLATFORMS:
        _warn(primitive.removeprefix("jaxnorm_"), f"on {platform}", reason, line_of_user(traceback))


def _warn(op: str, which: str, reason: str, line: Line | None) -> None:
    if not _warns or (line or reason) in _told:
        return
    _told.add(line or reason)
    message = f"{op}, {which}: jaxnorm runs XLA's code and no kernel, because {reason}."
    if line is None:
        warnings.warn(message, stacklevel=3)
    else:
        warnings.warn_explicit(message, UserWarning, line.file, line.number)
