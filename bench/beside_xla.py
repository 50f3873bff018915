"""Device time of one op of named shapes, beside XLA's code for its formula and a copy, in one run.

Kernel time comes from CUPTI and is the median of many calls, of arrays that are read from memory unless a call's fit
the cache anyway. "copy us" is what XLA's `x + 1` takes for as many bytes. With --default the programs are those of
`implementation=None`, else of "native".
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bench import report
from bench.rows import copy_rate
from bench.timing import device_time, sets_needed


class Subject(NamedTuple):
    """What is measured."""

    op: str
    shapes: dict[str, tuple[int, ...]]
    operands: Callable[..., tuple[Any, ...]]  # of (shape, dtype, seed)
    programs: Callable[..., dict[str, Callable]]  # of the implementation, by direction
    elements: Callable[..., int]  # of a shape: of all arrays of x's shape that are read forward
    text: Callable[..., str]  # what a table calls a shape
    is_cached: Callable[..., bool] = lambda _: False  # whether its arrays are in the cache in earnest, too
    # How many arrays of so many elements a direction moves, by the bytes of one and the shape: the step reads x twice
    # and dy, and writes y and dx.
    arrays: Callable[..., dict[str, float]] = lambda *_: {"forward": 2, "step": 5}


def add_arguments(parser):
    report.add_arguments(parser)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--iterations", type=int, default=20, help="calls of each program")
    parser.add_argument("--default", action="store_true", help="what runs by default")


def nbytes(subject, shape, dtype):
    return subject.elements(shape) * jnp.dtype(dtype).itemsize


def measured(subject, shape, dtype, implementation, iterations):
    """The device time of each program."""
    array = nbytes(subject, shape, dtype)
    count = 1 if subject.is_cached(shape) else sets_needed(2 * array, 2 * array)
    sets = [subject.operands(shape, dtype, seed) for seed in range(count)]
    programs = subject.programs(implementation)
    return {name: device_time(jax.jit(program), sets, iterations) for name, program in programs.items()}


def rows_of(subject, name, dtype, implementation, iterations):
    shape = subject.shapes[name]
    time_of = functools.partial(measured, subject, shape, dtype, iterations=iterations)
    ours, xla = time_of(implementation=implementation), time_of(implementation="jnp")
    for way, time in ours.items():
        moved = subject.arrays(jnp.dtype(dtype).itemsize, shape)[way] * nbytes(subject, shape, dtype)
        yield {
            "op": f"{subject.op} {way}",
            "dtype": dtype,
            "shape": f"{name}, {subject.text(shape)}",
            "us": 1e6 * time.seconds,
            "kernels": len(time.kernels),
            "copy us": None if subject.is_cached(shape) else 1e6 * moved / copy_rate(moved, iterations),
            "XLA us": 1e6 * xla[way].seconds,
            "XLA kernels": len(xla[way].kernels),
            "x XLA": xla[way].seconds / time.seconds,
        }


def measure(subjects, args):
    header, rows = report.device(args.commit), []
    for subject in subjects:
        for name in subject.shapes:
            for dtype in args.dtypes:
                rows += rows_of(subject, name, dtype, None if args.default else "native", args.iterations)
                report.write(header, rows, args.out)  # after each: a run that is cut off keeps the others
