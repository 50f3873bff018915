"""`jaxnorm.tune` finds the fastest implementation of each function and direction for a program on its device."""

import dataclasses
import hashlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jaxnorm.inspect import turns
from jaxnorm.inspect.explain import explain
from jaxnorm.inspect.tuned import Trial, Tuned, Where, as_mapping, calls_of, devices_of
from jaxnorm.native import compat
from jaxnorm.ops import options
from jaxnorm.primitive import registry
from jaxnorm.primitive.decide import Platform
from jaxnorm.reports import Call, Explanation

NO_CALL = "no function of jaxnorm is in this program"
ALL_CHOSEN = (
    "every call has its implementation already: by its argument, a context around or the environment, or as the call "
    "that it is a derivative of was traced before"
)
Choices = tuple[tuple[str, str, str], ...]  # of a function, a direction and an implementation each
Free = dict[tuple[str, str], None]  # the functions, each with a direction, for which nothing is chosen


class Key(NamedTuple):
    program: str  # a digest of its text, which has shapes, dtypes, shardings and what is donated
    arguments: tuple[str, ...]
    calls: tuple[str, ...]
    where: Where  # the device and the versions
    ids: tuple[int, ...]  # of the devices
    context: options.Context


_cache: dict[Key, Tuned] = {}
# One program is tuned at a time: two would slow each other down.
_lock = threading.RLock()


def tune(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Tuned:
    """Times a program with different implementations of its calls of jaxnorm, in turns, and returns the fastest choice.

        >>> tuned = tune(jax.jit(lambda x: rms_norm(x)), jnp.ones((2, 8)))
        >>> with tuned:
        ...     y = rms_norm(jnp.ones((2, 8)))

    A choice is "native" or "xla" for one direction of one function, as in `jaxnorm.implementation`, and changes results
    no more than that does. The search is greedy and starts from the default rules. It compiles at most 2 + 2 * (calls
    of jaxnorm in the program) programs. A process runs one search at a time, and keeps its result.

    Args:
      function: the program, under `jax.jit` or not: a whole training step, or a forward pass. It is called many times.
      *args: its arguments, with arrays of their final shapes and on their final devices; donated ones are copied.
        Without `jax.jit` arrays are traced, and all else is static.
      **kwargs: likewise, by name.

    Returns:
      A `jaxnorm.Tuned`, empty where the default is fastest.

    Raises:
      TypeError, RuntimeError: function cannot be called, or an argument has no values; or there are several processes.

    Source: after tokamax.autotune, https://github.com/openxla/tokamax.
    """
    _check(function, args, kwargs)
    with _lock:
        with options.hearing() as free:
            calls = explain(function, *args, **kwargs)
        return _tuned(function, turns.Program(function, args, kwargs), calls, free)


def _tuned(function: Any, program: turns.Program, calls: Explanation, free: Free) -> Tuned:
    """The result for a program with these calls, kept or new."""
    name = getattr(function, "__name__", type(function).__name__)
    devices = devices_of(program.leaves)
    platform = compat.default_platform(devices[0].platform)
    arguments = tuple(_described(leaf) for leaf in program.leaves if hasattr(leaf, "dtype"))
    empty = Tuned((), name, calls_of(calls), arguments, Where.of(program.leaves))
    if note := _why_nothing(calls, free, platform):
        return dataclasses.replace(empty, note=note)
    lowered = program.lowered({})
    text = lowered.as_text()
    digest = hashlib.sha256(text.encode()).hexdigest()
    ids = tuple(device.id for device in devices)
    key = Key(digest, arguments, empty.calls, empty.where, ids, options.context())
    if key not in _cache:
        forward = sum(call.direction == "forward" for call in calls)
        search = _Search(program, text, program.donated(lowered), 2 + 2 * forward)
        attempts = [(*one, chosen) for one in free for chosen in _others(calls, one, free, platform)]
        with turns.Progress(f"tune: {name}", len(attempts) + 1) as line:
            for attempt in attempts:
                line.step()
                search.attempt(*attempt)
            line.step()
            _cache[key] = search.result(empty)
    kept = _cache[key]
    return kept if kept.program == name else dataclasses.replace(kept, program=name)


def _check(function: Any, args: Any, kwargs: Any) -> None:
    if not callable(function):
        raise TypeError(
            f"tune: the first argument must be a function, got {type(function).__name__}; pass the function and its "
            "arguments apart, as tune(step, params, batch)."
        )
    if jax.process_count() > 1:
        raise RuntimeError(
            f"tune: there are {jax.process_count()} processes, each of which would choose by its own clock, and they "
            "must run the same program. Tune in one process, save what it gives, and load that file in all."
        )
    turns.check_values("tune", args, kwargs)


def _described(leaf: Any) -> str:
    """The type of an array among the arguments, with its sharding over several devices."""
    text = f"{leaf.dtype}{list(leaf.shape)}"
    is_split = isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1
    return f"{text} {leaf.sharding}" if is_split else text


def _why_nothing(calls: Explanation, free: Free, platform: str) -> str:
    """Why there is nothing to choose, and nothing to compile; empty where there is."""
    if not calls:
        return NO_CALL
    if reason := Platform.here(platform).lacks:
        return f"XLA's code runs whatever is chosen: {reason}"
    if not free:
        return ALL_CHOSEN
    return ""


def _others(calls: Sequence[Call], one: tuple[str, str], free: Free, platform: str) -> list[options.Implementation]:
    """What the default rules do not choose for all of the calls that a function makes in a direction."""
    function, direction = one
    of_function = registry.OPS.get(function)
    rows = [call for call in calls if (call.name, call.direction) == one]
    if not rows and of_function is not None and of_function.calls_others:  # each way, within its forward
        rows = [call for call in calls if call.name == function]
    if not rows:  # those of another name that this one makes
        rows = [call for call in calls if call.direction == direction and (call.name, direction) not in free]
    run = {runs.implementation for call in rows for runs in call.runs if runs.platform == platform}
    names: tuple[tuple[str, options.Implementation], ...] = (("native", "xla"), ("xla", "native"))
    return [other for runs, other in names if runs in run]


@dataclasses.dataclass
class _Search:
    """A greedy search, from the default on."""

    program: turns.Program
    text: str  # of the best program
    donated: list[int]
    at_most: int
    choices: Choices = ()
    default: turns.Run | None = None
    best: turns.Run | None = None
    trials: list[Trial] = dataclasses.field(default_factory=list)
    seconds: float | None = None
    compilations: int = 0

    def attempt(self, function: str, direction: str, chosen: str) -> None:
        """Tries one choice beside the best, which it becomes where it is faster."""
        others = tuple(choice for choice in self.choices if choice[:2] != (function, direction))
        outcome, *seconds = self._tried((*others, (function, direction, chosen)))
        self.trials.append(Trial(function, direction, chosen, outcome, *seconds))

    def _tried(self, choices: Choices) -> tuple[Any, ...]:
        """The outcome and, where it was timed, the seconds without it and with it."""
        try:
            text = self.program.lowered(as_mapping(choices)).as_text()
        except Exception as error:
            return (_left_out(error),)
        if text == self.text:
            return ("the same program",)
        if self.best is None:
            self.default = self.best = self._compiled(())
        if self.compilations == self.at_most:
            return (f"left out: {self.at_most} programs are compiled, the most for these calls",)
        try:
            run = self._compiled(choices)
            before, after = turns.in_turns([self.best, run])
        except Exception as error:
            return (_left_out(error),)
        self.seconds = before.median
        if not after.beats(before):
            return "not faster", before.median, after.median
        self.choices, self.best, self.text, self.seconds = choices, run, text, after.median
        return "chosen", before.median, after.median

    def _compiled(self, choices: Choices) -> turns.Run:
        self.compilations += 1
        return turns.Run(self.program, as_mapping(choices), self.donated)

    def result(self, empty: Tuned) -> Tuned:
        """What is chosen, if it is faster than the default once more."""
        tuned = dataclasses.replace(
            empty,
            trials=tuple(self.trials),
            compilations=self.compilations,
            at_most=self.at_most,
            seconds=self.seconds,
            default_seconds=self.seconds,
        )
        if not self.choices or self.default is None or self.best is None:
            return tuned
        by_default, best = turns.in_turns([self.default, self.best])
        tuned = dataclasses.replace(tuned, default_seconds=by_default.median, seconds=best.median)
        if best.beats(by_default):
            return dataclasses.replace(tuned, choices=tuple(sorted(self.choices)))
        note = f"what was chosen takes {best.median * 1e3:.4g} ms beside the default, and is dropped"
        return dataclasses.replace(tuned, seconds=by_default.median, note=note)


def _left_out(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return f"left out: {type(error).__name__}: {lines[0]}"
