"""Wall time of both norms on the CPU, forward and backward, beside XLA's own code for the jnp formula, in one run.

    python bench/cpu.py --out bench/results/cpu

Times are medians over the calls of several turns; both take turns, so that a busy moment of the machine meets both. A
turn's first call is left out: XLA frees a program's temporary memory after its results are ready, which slows whatever
runs next, and that should be the same program. Results are new arrays in every call, as JAX makes them, and the time to
map their memory is in all numbers. Rates count each input read once and each output written once: forward 2·M·N
elements, backward 3·M·N, step 5·M·N. "In a chain" is the time of one of several norms in a row within one program,
whose memory is mapped once.

Every cell is checked first: sampled rows of y and dx, and sampled columns of dscale and dbias, against float64.
"""

import argparse
import itertools
import os
import re
import statistics
import time
from pathlib import Path

import jax
import report
import shapes
from programs import ELEMENTS, LINKS, NORMS, chains, check, operands, programs
from tqdm import tqdm

import jaxnorm.ffi

# Short rows, rows of common widths, the 4096 x 4096 of llama3 8B, and a call so small that its overhead counts.
SHAPES = [
    shape
    for shape in (*shapes.MODELS, *shapes.DECODE)
    if shape.name in ("llama3 8B", "qwen3 8B qk-norm", "gpt-oss 20B", "BERT base", "decode 32")
]


def turn(program, calls):
    """The seconds that each of several calls in a row takes, but for the first."""
    function, args = program
    times = []
    for _ in range(1 + calls):
        start = time.perf_counter()
        result = jax.block_until_ready(function(*args))
        times.append(time.perf_counter() - start)
        del result  # after the clock has stopped: its memory goes back to the system
    return times[1:]


def compare(native, xla, turns):
    """The median seconds of both programs, in turns."""
    pair = [(jax.jit(function), args) for function, args in (native, xla)]
    taken = zip(*([turn(program, calls=5) for program in pair] for _ in range(turns)), strict=True)
    return [statistics.median(itertools.chain(*times)) for times in taken]


def measure_cell(kind, dtype, shape, turns):
    x, weights, dy = operands(kind, dtype, shape.rows, shape.cols)
    error = check(kind, x, weights, dy)
    for make, name, links in ((programs, "", 1), (chains, f", {LINKS} in a chain", LINKS)):
        native, xla = (make(kind, implementation, x, weights, dy) for implementation in ("native", "jnp"))
        for direction in native:
            ours, theirs = (seconds / links for seconds in compare(native[direction], xla[direction], turns))
            yield {
                "op": f"{kind}_norm {direction}{name}",
                "dtype": dtype,
                "shape": shape.name,
                "M": shape.rows,
                "N": shape.cols,
                "ms": 1e3 * ours,
                "GB/s": ELEMENTS[direction] * x.nbytes / ours / 1e9,
                "XLA ms": 1e3 * theirs,
                "x XLA": theirs / ours,
                "error / tolerance": error,
            }


def hardware():
    model = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return {
        "cpu": model[1] if model else "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "instruction set": jaxnorm.ffi.module("cpu").isa(),
        "jax": jax.__version__,
        "commit": report.commit(),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--norms", nargs="+", default=list(NORMS), choices=NORMS)
    parser.add_argument("--turns", type=int, default=3, help="of each, with 5 calls that count")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")

    cells = [(kind, dtype, shape) for kind in args.norms for dtype in args.dtypes for shape in SHAPES]
    rows = [row for cell in tqdm(cells) for row in measure_cell(*cell, args.turns)]
    rows.sort(key=lambda row: (row["op"], row["dtype"]))
    report.write(hardware(), rows, args.out)


if __name__ == "__main__":
    main()
