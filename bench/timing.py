"""Device time of a compiled program, from CUPTI through JAX's own helper; and wall time of several, in turns."""

import itertools
import math
import statistics
import time
from typing import NamedTuple

import jax
from jax.experimental.mosaic.gpu import profiler

# What passes through the cache between two uses of one input: several times the largest cache of today's GPUs.
COLD_BYTES = 128_000_000


class Time(NamedTuple):
    seconds: float  # of all kernels of one call, the median over the calls
    kernels: list[str]  # of one call
    each: tuple[float, ...] = ()  # the seconds of each of them, the median over the calls


class InTurn:
    """A compiled program that takes the next of several sets of arguments with each call.

    One that carries something consumes the first of its arguments, which is donated, and gives the next one as the
    first of two results.

    It has the methods of a jitted function: the helper would jit anything else, and so fix the arguments.
    """

    def __init__(self, program, sets, carries=False):
        self.program = program
        self.sets = list(sets)
        self.turns = itertools.cycle(range(len(self.sets)))
        self.carries = carries

    def __call__(self):
        turn = next(self.turns)
        if not self.carries:
            return self.program(*self.sets[turn])
        following, result = self.program(*self.sets[turn])
        self.sets[turn] = (following, *self.sets[turn][1:])
        return result

    def trace(self):
        raise NotImplementedError

    lower = trace


def sets_needed(input_bytes, call_bytes):
    """How many sets of inputs take turns so that each is read from memory: inputs, and all bytes of a call."""
    return 1 if input_bytes >= COLD_BYTES else 1 + math.ceil(COLD_BYTES / call_bytes)


def device_time(program, sets, iterations, carries=False):
    """How long one call takes the GPU. `carries` is what it is for `InTurn`.

    The helper calls once to warm up, then `iterations` times, keeps all results (so that none overwrites another), and
    splits the record of kernels into equal parts, whose names it compares: kernels of two calls are never mixed. Of
    kernels that overlap each counts in full.
    """
    calls = InTurn(program, sets, carries)
    if not isinstance(calls, jax.stages.Wrapped):
        raise TypeError("this JAX's jitted functions have methods that bench.timing.InTurn lacks")
    _, records = profiler.measure(calls, aggregate=False, iterations=iterations)()
    if records is None:
        raise RuntimeError("CUPTI saw no kernel")
    return median_call([records] if iterations == 1 else records)


def median_call(records):
    """From the (name, milliseconds) of each kernel of each call: the median of the calls' sums."""
    milliseconds = statistics.median(sum(time for _, time in call) for call in records)
    each = tuple(statistics.median(time for _, time in kernel) / 1e3 for kernel in zip(*records, strict=True))
    return Time(milliseconds / 1e3, [name for name, _ in records[0]], each)


def in_turns(programs, state, inputs, turns, calls):
    """The seconds that a call takes in each turn, by program, and the last state, which all share.

    A program is a function of (state, *inputs) that gives the next state, or None for the same one again, and a result.
    Calls of a turn are in a queue, and every other turn is in reverse order. A first turn warms up: kernels are loaded
    and command buffers recorded when they first run.
    """
    times = {name: [] for name in programs}
    for number in range(1 + turns):
        for name, program in list(programs.items())[:: -1 if number % 2 else 1]:
            jax.block_until_ready(state)
            start = time.perf_counter()
            for _ in range(calls):
                following, result = program(state, *inputs)
                state = state if following is None else following
            jax.block_until_ready((state, result))
            times[name].append((time.perf_counter() - start) / calls)
    return {name: taken[1:] for name, taken in times.items()}, state


def columns(taken):
    """What a table says of the seconds in each turn: the median, and half the range of its middle half."""
    lower, middle, upper = statistics.quantiles(taken, n=4)
    return {"ms": 1e3 * middle, "± us": 1e6 * (upper - lower) / 2}
