"""What other packages reached on one H200, as recorded in peers_h200.json."""

import functools
import json
from pathlib import Path

import jax.numpy as jnp

from bench import ops, report


@functools.cache
def table():
    return json.loads(Path(__file__).with_name("peers_h200.json").read_text())


def seconds(op, dtype, shape):
    """The kernel time of each package, XLA included; {} where nothing is recorded.

    Of large arrays the rate is recorded, of small ones the time.
    """
    size = f"{shape.rows}x{shape.cols}"
    rates, microseconds = (table()[unit].get(op, {}).get(dtype, {}).get(size, {}) for unit in ("GB/s", "us"))
    times = {name: us * 1e-6 for name, us in microseconds.items()}
    if rates:
        kind, direction = report.op_parts(op)
        moved = ops.KINDS[kind].moved(shape, jnp.dtype(dtype).itemsize)[direction]
        times |= {name: moved / (rate * 1e9) for name, rate in rates.items()}
    return times


def best(gpu, op, dtype, shape):
    """The fastest package other than XLA and its seconds; None where nothing is recorded, or on another GPU."""
    if table()["gpu"] not in gpu:
        return None
    times = {name: time for name, time in seconds(op, dtype, shape).items() if name != "XLA"}
    return min(times.items(), key=lambda item: item[1], default=None)
