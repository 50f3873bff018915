"""Which line of the user's program is traced, or made an equation."""

import contextlib
import functools
import importlib.util
import os
from typing import Any, NamedTuple

from jaxnorm.native import private

# Private, and done without where it is gone: a line is unknown then.
source_info = private.module("jax._src.source_info_util")


class Line(NamedTuple):
    """A line of a program."""

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
