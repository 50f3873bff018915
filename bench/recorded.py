"""What other packages reached on one H200, as recorded in peers_h200.json: for runs without those packages."""

import functools
import json
from pathlib import Path

from bench import ops, report


@functools.cache
def table():
    return json.loads(Path(__file__).with_name("peers_h200.json").read_text())


def seconds(op, dtype, rows, cols):
    """The kernel time of each package, XLA included; {} where nothing is recorded.

    Of large arrays the rate is recorded, of small ones the time.
    """
    shape = f"{rows}x{cols}"
    rates, microseconds = (table()[unit].get(op, {}).get(dtype, {}).get(shape, {}) for unit in ("GB/s", "us"))
    kind, direction = report.op_parts(op)
    moved = ops.module_of(kind).moved(kind, dtype, rows, cols)[direction]
    times = {name: moved / (rate * 1e9) for name, rate in rates.items()}
    return times | {name: us * 1e-6 for name, us in microseconds.items()}


def best(gpu, op, dtype, rows, cols):
    """The fastest package other than XLA and its seconds; None where nothing is recorded, or on another GPU."""
    if table()["gpu"] not in gpu:
        return None
    times = {name: time for name, time in seconds(op, dtype, rows, cols).items() if name != "XLA"}
    return min(times.items(), key=lambda item: item[1], default=None)
