"""Device time of a compiled program, from CUPTI through JAX's own helper."""

import itertools
import math
import statistics
from typing import NamedTuple

import jax
from jax.experimental.mosaic.gpu import profiler

# What passes through the cache between two uses of one input: several times the largest cache of today's GPUs.
COLD_BYTES = 128_000_000


class Time(NamedTuple):
    seconds: float  # of all kernels of one call, the median over the calls
    kernels: list[str]  # of one call


class InTurn:
    """A compiled program that takes the next of several sets of arguments with each call.

    It has the methods of a jitted function: the helper would jit anything else, and so fix the arguments.
    """

    def __init__(self, program, sets):
        self.program = program
        self.sets = itertools.cycle(sets)

    def __call__(self):
        return self.program(*next(self.sets))

    def trace(self):
        raise NotImplementedError

    lower = trace


def sets_needed(input_bytes, call_bytes):
    """How many sets of inputs take turns so that each is read from memory: inputs, and all bytes of a call."""
    return 1 if input_bytes >= COLD_BYTES else 1 + math.ceil(COLD_BYTES / call_bytes)


def device_time(program, sets, iterations):
    """How long one call takes the GPU.

    The helper calls once to warm up, then `iterations` times, keeps all results (so that none overwrites another), and
    splits the record of kernels into equal parts, whose names it compares: kernels of two calls are never mixed. Of
    kernels that overlap each counts in full.
    """
    calls = InTurn(program, sets)
    if not isinstance(calls, jax.stages.Wrapped):
        raise TypeError("this JAX's jitted functions have methods that bench.timing.InTurn lacks")
    _, records = profiler.measure(calls, aggregate=False, iterations=iterations)()
    if records is None:
        raise RuntimeError("CUPTI saw no kernel")
    return median_call([records] if iterations == 1 else records)


def median_call(records):
    """From the (name, milliseconds) of each kernel of each call: the median of the calls' sums."""
    milliseconds = statistics.median(sum(time for _, time in call) for call in records)
    return Time(milliseconds / 1e3, [name for name, _ in records[0]])
