"""Device time of both norms on one NVIDIA GPU, forward and backward, beside XLA's fusion of the jnp formula.

    python bench/gpu.py --out bench/results/h200

Kernel time comes from CUPTI and is the median of many runs over arrays of 256 MiB, far beyond any cache. Rates count
each input read once and each output written once: forward 2·M·N elements, backward 3·M·N, step 5·M·N. "copy" is XLA's
`x + 1` on as many 32-bit words in the same run.

Every cell is checked first: sampled rows of y and dx, and sampled columns of dscale and dbias, against float64.
"""

import argparse
import statistics
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import report
import shapes
from jax.experimental.mosaic.gpu import profiler
from programs import ELEMENTS, NORMS, check, operands, programs
from tqdm import tqdm


def device_time(function, *args, iterations):
    """The median of the time that all kernels of one call take, in seconds."""
    _, milliseconds = profiler.measure(jax.jit(function), iterations=iterations)(*args)
    return statistics.median(np.atleast_1d(milliseconds)) / 1e3


def measure_cell(kind, dtype, rows, cols, iterations):
    x, weights, dy = operands(kind, dtype, rows, cols)
    error = check(kind, x, weights, dy)
    nbytes = x.nbytes
    words = jax.lax.bitcast_convert_type(x.reshape(-1, 4 // x.itemsize), jnp.int32).reshape(-1)
    copy = 2 * nbytes / device_time(lambda x: x + 1, words, iterations=iterations)
    times = {
        implementation: {
            direction: device_time(function, *args, iterations=iterations)
            for direction, (function, args) in programs(kind, implementation, x, weights, dy).items()
        }
        for implementation in ("native", "jnp")
    }
    for direction, elements in ELEMENTS.items():
        native, xla = times["native"][direction], times["jnp"][direction]
        yield {
            "op": f"{kind}_norm {direction}",
            "dtype": dtype,
            "M": rows,
            "N": cols,
            "us": native * 1e6,
            "GB/s": elements * nbytes / native / 1e9,
            "% of copy": 100 * elements * nbytes / native / copy,
            "copy GB/s": copy / 1e9,
            "XLA GB/s": elements * nbytes / xla / 1e9,
            "x XLA": xla / native,
            "error / tolerance": error,
        }


def hardware():
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    name, driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")[0].split(", ")
    return {"gpu": name, "driver": driver, "jax": jax.__version__, "commit": report.commit()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--norms", nargs="+", default=list(NORMS), choices=NORMS)
    parser.add_argument("--cols", nargs="+", type=int, default=shapes.GRID_COLS)
    parser.add_argument("--iterations", type=int, default=20)
    args = parser.parse_args()

    cells = [
        (kind, dtype, shape.rows, shape.cols)
        for kind in args.norms
        for dtype in args.dtypes
        for shape in shapes.grid(jnp.dtype(dtype).itemsize)
        if shape.cols in args.cols
    ]
    rows = [row for cell in tqdm(cells) for row in measure_cell(*cell, args.iterations)]
    rows.sort(key=lambda row: (row["op"], row["dtype"]))
    report.write(hardware(), rows, args.out)


if __name__ == "__main__":
    main()
