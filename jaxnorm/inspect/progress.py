"""How far a search is, and how long it will still take: a line on stderr."""

import sys
from time import monotonic
from typing import Self

EVERY = 10.0  # seconds between lines, where they are not written over
WIDTH = 79  # of a terminal: a line that wraps cannot be written over
SHORT = 180.0  # seconds that are said as such


class Line:
    """A context in which each `step` begins one of so many steps.

    On a terminal it is one line, which is written over and ends with the context.
    """

    def __init__(self, title: str, steps: int) -> None:
        self._title, self._steps, self._done, self._length = title, steps, -1, 0
        self._began = self._told = monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._length:
            print(file=sys.stderr, flush=True)

    def step(self) -> None:
        self._done += 1
        now = monotonic()
        line = f"{self._title}: {self._done} of {self._steps} done{self._left(now)}"
        if sys.stderr is None:  # as without a console
            return
        if sys.stderr.isatty():
            line = line[:WIDTH]
            print(f"\r{line.ljust(self._length)}", end="", file=sys.stderr, flush=True)
            self._length = len(line)
        elif now - self._told >= EVERY:
            print(line, file=sys.stderr, flush=True)
            self._told = now

    def _left(self, now: float) -> str:
        """How long the other steps take, if they take as long as those that are done."""
        if not self._done:
            return ""
        seconds = (now - self._began) / self._done * (self._steps - self._done)
        return f", about {f'{seconds:.0f} s' if seconds <= SHORT else f'{seconds / 60:.0f} min'} left"
