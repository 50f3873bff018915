"""A program with several choices of `jaxnorm.implementation`, timed in turns, and how far a search is."""

import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import Any, Self

import jax

from jaxnorm.inspect.explain import of_arrays
from jaxnorm.ops.options import Choices, implementation
from jaxnorm.reports import Times

# A turn is a queue of calls, as many as take so long, and one at least. The first turn of several warms up.
TURNS, SECONDS, MOST_CALLS = 9, 0.02, 100
# What copies of donated arguments take at most, if there are several.
MOST_BYTES = 2**28


def check_values(function: str, args: Any, kwargs: Any) -> None:
    """An error where an array among the arguments of `function` has no values to run with."""
    for path, leaf in jax.tree_util.tree_leaves_with_path((args, kwargs)):
        if isinstance(leaf, (jax.ShapeDtypeStruct, jax.core.Tracer)):
            what = "traced" if isinstance(leaf, jax.core.Tracer) else "a jax.ShapeDtypeStruct"
            where = f"{'args' if path[0].idx == 0 else 'kwargs'}{jax.tree_util.keystr(path[1:])}"
            remedy = (
                f"call {function} outside of jax.jit"
                if what == "traced"
                else "pass an array, as jax.numpy.zeros gives it"
            )
            raise TypeError(f"{function}: {where} is {what}, and the program is run to be timed; {remedy}.")


class Program:
    """A function under `jax.jit` with its arguments, which are never consumed."""

    def __init__(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        if isinstance(function, type(jax.jit(function))):
            self.function: Any = function
        else:
            arrays, traceable = of_arrays(_arrays_of(function), args, kwargs)
            self.function, args, kwargs = jax.jit(traceable), (arrays,), {}
        self.leaves, self._tree = jax.tree.flatten((args, kwargs))

    def lowered(self, choices: Choices) -> Any:
        args, kwargs = jax.tree.unflatten(self._tree, self.leaves)
        with implementation(choices):
            return self.function.lower(*args, **kwargs)

    def donated(self, lowered: Any) -> list[int]:
        """The leaves that a call may consume: those that are donated, or all where static arguments hide which are."""
        infos = jax.tree.leaves(lowered.args_info)
        arrays = [place for place, leaf in enumerate(self.leaves) if isinstance(leaf, jax.Array)]
        if len(infos) == len(self.leaves):
            return [place for place in arrays if infos[place].donated]
        return arrays if any(info.donated for info in infos) else []

    def arguments(self, copied: Iterable[int]) -> tuple[Any, Any]:
        copies = {place: jax.device_put(self.leaves[place], may_alias=False) for place in copied}
        leaves = [copies.get(place, leaf) for place, leaf in enumerate(self.leaves)]
        given: tuple[Any, Any] = jax.tree.unflatten(self._tree, leaves)
        return given


def _arrays_of(function: Callable[..., Any]) -> Callable[..., list[Any]]:
    """The arrays that a function makes: what it returns, and what it changes in its arguments, as in NNX's modules."""

    def made(*args: Any, **kwargs: Any) -> list[Any]:
        given = {id(leaf) for leaf in jax.tree.leaves((args, kwargs))}
        results = jax.tree.leaves((function(*args, **kwargs), args, kwargs))
        return [leaf for leaf in results if isinstance(leaf, jax.Array) and id(leaf) not in given]

    return made


class Run:
    """A program with one choice. It is compiled when it is first called, which is here."""

    def __init__(self, program: Program, choices: Choices, donated: Sequence[int]) -> None:
        self.program, self.choices = program, choices
        given = program.arguments(donated)
        with implementation(choices):
            jax.block_until_ready(program.function(*given[0], **given[1]))
        leaves = jax.tree.leaves(given)
        self.consumed = [place for place in donated if leaves[place].is_deleted()]

    @property
    def most_calls(self) -> int:
        """How many calls a turn may have, each with its copies."""
        copied = sum(self.program.leaves[place].nbytes for place in self.consumed)
        return max(1, min(MOST_CALLS, MOST_BYTES // copied)) if copied else MOST_CALLS

    def seconds(self, calls: int) -> float:
        """How long a call takes in a queue of so many."""
        arguments = [self.program.arguments(self.consumed) for _ in range(calls)]
        jax.block_until_ready(arguments)
        result = None
        with implementation(self.choices):
            start = time.perf_counter()
            for args, kwargs in arguments:
                result = self.program.function(*args, **kwargs)
            jax.block_until_ready(result)
            return (time.perf_counter() - start) / calls


def in_turns(runs: Sequence[Run]) -> list[Times]:
    """How long a call of each takes. Every other turn is in reverse order, so that none always follows the same one."""
    longest = max(min(run.seconds(1) for _ in range(2)) for run in runs)
    calls = min(math.ceil(SECONDS / longest), *(run.most_calls for run in runs))
    seconds: list[list[float]] = [[] for _ in runs]
    for turn in range(1 + TURNS):
        for run, taken in list(zip(runs, seconds, strict=True))[:: -1 if turn % 2 else 1]:
            taken.append(run.seconds(calls))
    return [Times.of(taken[1:]) for taken in seconds]


EVERY = 10.0  # seconds between lines, where they are not written over
WIDTH = 79  # of a terminal: a line that wraps cannot be written over
SHORT = 180.0  # seconds that are said as such


class Progress:
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
