"""Wall time of both norms on the CPU beside XLA's own code for the jnp formula and a copy, in one run.

    python -m bench cpu --out bench/results/cpu

Each cell is measured alone, one norm a program, and in a chain of several in one program. Alone, results are new arrays
in every call, as JAX makes them, and mapping their memory is in all numbers. In a chain that memory is used again, as
in a model; see `chain` for what keeps XLA from making one operation of it.

Times are medians over the calls of several turns, in a chain divided by its length; the programs take turns, so that a
busy moment of the machine meets all. A turn's first call is left out: XLA frees a program's temporary memory after its
results are ready, which slows whatever runs next, and that should be the same program. Rates count each input read once
and each output written once: forward 2·M·N elements, backward 3·M·N, step 5·M·N. "copy ms" is the time that `x + 1`,
alone or in a chain, takes for as many bytes; in a chain XLA writes it over its input, which is faster than any copy.

Every cell is checked first: sampled rows of y and dx, and sampled columns of dscale and dbias, against float64.
"""

import itertools
import os
import re
import statistics
import time
from pathlib import Path

import jax
from tqdm import tqdm

from bench import report, shapes
from bench.programs import NORMS, check, elements, operands, programs
from jaxnorm import ffi

LINKS = 12  # norms in a chain: few of them are the first to write to their memory
# Short rows, rows of common widths, the 4096 x 4096 of llama3 8B, and a call so small that its overhead counts.
SHAPES = [
    shape
    for shape in (*shapes.MODELS, *shapes.DECODE)
    if shape.name in ("llama3 8B", "qwen3 8B qk-norm", "gpt-oss 20B", "BERT base", "decode 32")
]


def add_arguments(parser):
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--ops", nargs="+", default=list(NORMS), choices=NORMS)
    parser.add_argument("--turns", type=int, default=5, help="of each program, with 3 calls that count or more")


def main(args):
    jax.config.update("jax_platforms", "cpu")
    cells = [(kind, dtype, shape) for kind in args.ops for dtype in args.dtypes for shape in SHAPES]
    rows = [row for cell in tqdm(cells) for row in measure_cell(*cell, args.turns)]
    rows.sort(key=lambda row: (row["op"], row["dtype"]))
    slower = [
        f"{row['op']} {row['dtype']} {row['shape']}: {row['x XLA']:.2f} times as fast as XLA"
        for row in rows
        if row["x XLA"] < 1
    ]
    mean = statistics.geometric_mean(row["x XLA"] for row in rows)
    report.write({**hardware(), "geometric mean of x XLA": round(mean, 2)}, rows, args.out, slower=slower)


def hardware():
    model = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return {
        "cpu": model[1] if model else "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "instruction set": ffi.module("cpu").isa(),
        "jax": jax.__version__,
        "commit": report.commit(),
    }


def measure_cell(kind, dtype, shape, turns):
    x, weights, dy = operands(kind, dtype, shape.rows, shape.cols)
    error = check(kind, x, weights, dy)
    for manner, links, make, copy in (("", 1, programs, copy_once), (", in a chain", LINKS, chain, copy_chain)):
        native, xla = (make(kind, implementation, x, weights, dy) for implementation in ("native", "jnp"))
        for direction, arrays in elements(kind).items():
            taken = compare([native[direction][:2], xla[direction][:2], (copy, (x,))], turns)
            ours, theirs, copied = (seconds / links for seconds in taken)
            copied *= arrays / 2  # a copy reads one array and writes one
            yield {
                "op": f"{kind}_norm {direction}{manner}",
                "dtype": dtype,
                "shape": shape.name,
                "M": shape.rows,
                "N": shape.cols,
                "ms": 1e3 * ours,
                "GB/s": arrays * x.nbytes / ours / 1e9,
                "XLA ms": 1e3 * theirs,
                "x XLA": theirs / ours,
                "copy ms": 1e3 * copied,
                "% of copy": 100 * copied / ours,
                "error / tolerance": error,
            }


def chain(kind, implementation, x, weights, dy):
    """What `programs` has, of several norms one after the other: a function and its arguments, by direction.

    A chain of bare norms is none to XLA: it makes one operation of all, which reads x, scales each row by every rstd in
    turn while the row is in the cache, and writes the last result only. No model has that, as between two norms there
    is a matmul or a sum at least. So each result passes an optimization barrier: it has to be there in memory, and that
    is all the barrier does. (The other loop of models, `scan`, copies its state after every norm, ours and XLA's.)
    Norms have weights of their own, as layers do; of shared ones XLA makes an array of x's size for all norms.

    XLA may write a result over its input, which is dead, and does for small float32 arrays; a native call cannot.

    The backward starts from what the forward keeps: x and the statistics, or what jax.vjp keeps of XLA's formula, 2 to
    6 arrays of x's size. Computing those again is slower.
    """
    norm = NORMS[kind]
    layers = [tuple(weight + link / 64 for weight in weights) for link in range(LINKS)]

    def forward(x, layers):
        for layer in layers:
            x = jax.lax.optimization_barrier(norm(x, *layer, implementation=implementation))
        return x

    def residuals(x, layers):
        return jax.vjp(forward, x, layers)[1]

    def step(x, layers, dy):
        y, vjp = jax.vjp(forward, x, layers)
        return y, vjp(dy)

    return {
        "forward": (forward, (x, layers)),
        "backward": (lambda vjp, dy: vjp(dy), (jax.jit(residuals)(x, layers), dy)),
        "step": (step, (x, layers, dy)),
    }


def copy_once(x):
    return x + 1


def copy_chain(x):
    for _ in range(LINKS):
        x = jax.lax.optimization_barrier(x + 1)
    return x


def compare(pairs, turns):
    """The median seconds of programs (function, arguments), in turns."""
    pairs = [(jax.jit(function), args) for function, args in pairs]
    # A short call is as long as an interruption of it, so it takes more of them to find the median.
    calls = 3 if max(turn(program, 1)[0] for program in pairs) > 1e-2 else 30
    taken = zip(*([turn(program, calls) for program in pairs] for _ in range(turns)), strict=True)
    return [statistics.median(itertools.chain(*times)) for times in taken]


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
