"""Device time of the ops on one NVIDIA GPU, beside XLA's code for the formula and a copy, in one run.

    python -m bench gpu --ops rms layer --out bench/results/h200/norms
    python -m bench gpu --ops softmax log_softmax cross_entropy --out bench/results/h200/rows
    python -m bench gpu --ops embedding segment_sum --dtypes float32 --out bench/results/h200/embedding
    python -m bench gpu --suites grid --dtypes bfloat16 --cols 4096 8192

Kernel time comes from CUPTI and is the median of many calls. Arrays beyond the caches are used again and again; smaller
ones take turns, so that each is read from memory; those of the suite "small" stay in the cache, as in decoding. Rates
count each array that must be read and written once: of a norm 2 of x's size forward, 3 backward, 5 in a step, which is
the result and all gradients in one program; with a residual 4, 4 and 8; with a gate 3, 5 and 8. "copy" is XLA's `x + 1`
on as many 32-bit words as x has bytes. "x XLA" says how many times as fast jaxnorm is. "temp MiB" is what a program
takes beside its operands and results.

A residual is donated to jaxnorm's forward, which writes the sum over it, and the sum is the next call's residual. In no
program of jaxnorm's norms XLA may run a kernel of its own, or copy an array of x's size: that is an error. With
--default the programs are those of `implementation=None`, in which it may. With --cudnn, `rms_norm` and `layer_norm`
are timed beside cuDNN's norms, too.

Of an embedding there is the gradient only, of bfloat16 rows for a float32 table. "order us" is what kernels take in
jaxnorm's program that are not its own: those that sort ids. "fill us" is what a gradient takes that is filled alone.

Of a quantised result a byte an element is counted, and no scales. There is a forward only. The suite "variants" of
quantised norms has other dtypes than float8_e4m3fn, other scales than one a token, and a residual.

Every cell is checked first: few rows of its length, against the formula in float64. What fails is listed, and so is
what is wrong or slower than XLA's code. Results are written after every cell.
"""

import functools
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
from tqdm import tqdm

from bench import norms, ops, programs, report, shapes
from bench.timing import device_time, sets_needed
from jaxnorm.native import ffi


class Cell(NamedTuple):
    suite: str
    kind: str
    dtype: str
    shape: shapes.Shape

    def __str__(self):
        return f"{report.op_name(self.kind)} {self.dtype} {self.shape.name} ({self.shape.rows}x{self.shape.cols})"

    @property
    def nbytes(self):
        return self.shape.rows * self.shape.cols * jnp.dtype(self.dtype).itemsize

    @property
    def op(self):
        return ops.KINDS[self.kind]

    @property
    def moved(self):
        """How many bytes each direction reads or writes once."""
        return self.op.moved(self.shape, jnp.dtype(self.dtype).itemsize)

    @property
    def sets(self):
        """How many sets of operands take turns: the forward reads x and writes as much, or less if it is quantised."""
        first = next(iter(self.moved.values()))
        return 1 if self.suite == "small" else sets_needed(self.nbytes, min(2 * self.nbytes, first))


def add_arguments(parser):
    report.add_arguments(parser)
    suites = " ".join(ops.SUITES)
    parser.add_argument("--suites", nargs="+", default=ops.SUITES, choices=ops.SUITES, metavar="SUITE", help=suites)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", "float16"])
    parser.add_argument("--ops", nargs="+", default=ops.OPS, choices=ops.OPS)
    parser.add_argument("--cols", nargs="+", type=int, help="these row lengths only")
    parser.add_argument("--iterations", type=int, default=20, help="calls of each program; five times as many if small")
    parser.add_argument("--cudnn", action="store_true", help="beside cuDNN's norms, too")
    parser.add_argument("--default", action="store_true", help='jaxnorm with implementation=None, not "native"')


def cells(args):
    """Whole suites after one another, so that a run that is cut short has the first of them complete."""
    return [
        Cell(suite, kind, dtype, shape)
        for suite in args.suites
        for op in args.ops
        for dtype in args.dtypes
        for kind, shape in ops.suites_of(op, dtype).get(suite, ())
        if not args.cols or shape.cols in args.cols
    ]


@functools.partial(jax.jit, static_argnums=1)
def _words(seed, count):
    return jax.random.bits(jax.random.key(seed, impl="rbg"), (count,), jnp.uint32).astype(jnp.int32)


@jax.jit
def _copy(words):
    return words + 1


def copy_rate(cell, iterations):
    """Bytes per second, read and written; from arrays of x's size that take turns as x does."""
    words = [(_words(seed, -(-cell.nbytes // 4)),) for seed in range(cell.sets)]
    return 2 * cell.nbytes / device_time(_copy, words, iterations).seconds


@functools.partial(jax.jit, static_argnums=1)
def _fill(value, dims):
    return jnp.full(dims, value)


def fill_time(cell, iterations):
    """Seconds for an array that is like x. Of a constant XLA makes no kernel."""
    value = jnp.zeros((), cell.dtype)
    return device_time(_fill, [(value, cell.shape.dims)] * cell.sets, iterations).seconds


def compiled(tasks, failed):
    """The executables of programs by name. Compiling takes longer than measuring: all at once."""

    def compile_one(task):
        return task[0].function.lower(*task[0].arguments).compile()

    with ThreadPoolExecutor() as pool:
        futures = {name: pool.submit(compile_one, task) for name, task in tasks.items()}
    return attempts(((name, future.result) for name, future in futures.items()), failed)


def attempts(thunks, failed):
    """The results of (name, function) by name; what raises is left out, and noted."""
    results = {}
    for name, function in thunks:
        try:
            results[name] = function()
        except Exception as error:
            failed.append(f"{' '.join(name)}: {why(error)}")
    return results


def why(error):
    """The first line of an error, which is all of it that fits a table."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def measure_cell(cell, args, failed):
    """The rows of one cell, by direction."""
    iterations = args.iterations * (5 if cell.suite == "small" else 1)
    implementation = None if args.default else "native"
    error = programs.check(cell.op, cell.shape, cell.dtype, implementation)
    sets = [cell.op.operands(cell.shape, cell.dtype, seed) for seed in range(cell.sets)]
    tasks = {}  # a program by (package, direction), once for each set of operands
    for how, name in ((implementation, "jaxnorm"), ("xla", "XLA")):
        by_set = [programs.programs(cell.op, how, *arrays) for arrays in sets]
        for direction in cell.moved:
            tasks[name, direction] = [by_direction[direction] for by_direction in by_set]
    executables = compiled(tasks, failed)
    copy = None if cell.suite == "small" else copy_rate(cell, iterations)
    is_pure = cell.op.is_pure and not args.default
    timings = {
        name: functools.partial(package_time, name[0], cell, executable, tasks[name], iterations, is_pure=is_pure)
        for name, executable in executables.items()
    }
    times = attempts(timings.items(), failed)
    if args.cudnn and cell.kind in norms.NORMS:
        from bench import cudnn  # which few have

        times |= {("cuDNN", direction): time for direction, time in cudnn.times(cell, sets, iterations).items()}
    temporary = {name: of.memory_analysis().temp_size_in_bytes for name, of in executables.items()}
    measured = [direction for direction in cell.moved if ("jaxnorm", direction) in times]
    rows = [row(cell, direction, times, temporary, copy, error) for direction in measured]
    if cell.op.orders:
        fill = fill_time(cell, iterations) if "backward" in cell.moved else None
        rows = [row | aside(times["jaxnorm", way], fill) for row, way in zip(rows, measured, strict=True)]
    return rows


def aside(time, fill):
    """Columns of what orders rows."""
    others = (seconds for name, seconds in zip(time.kernels, time.each, strict=True) if "jaxnorm" not in name)
    return {"order us": 1e6 * sum(others), "fill us": fill and 1e6 * fill}


def package_time(package, cell, executable, by_set, iterations, *, is_pure=True):
    """What a program of jaxnorm or XLA takes; an error if XLA does work of its own in a pure one of jaxnorm's."""
    is_pure = is_pure and package == "jaxnorm"
    if is_pure and (found := copies(executable.as_text(), cell.shape)):
        raise RuntimeError(f"XLA copies an array of x's size: {found[0]}")
    time = device_time(executable, [program.arguments for program in by_set], iterations, by_set[0].carries)
    if is_pure and (found := [kernel for kernel in time.kernels if "jaxnorm" not in kernel]):
        raise RuntimeError(f"XLA runs kernels of its own: {', '.join(found)}")
    return time


def copies(text, shape):
    """The copies of whole arrays in a compiled program's text.

    XLA may run them as copies of memory, which no record of kernels shows.
    """
    instruction = re.compile(rf"\S+ = [^\n]*\[{shape.rows},{shape.cols}\][^\n]* copy(?:-start)?\(")
    return instruction.findall(text)


def row(cell, direction, times, temporary, copy, error):
    """One line of the table. Times and temporary bytes are those of jaxnorm and XLA, by (package, direction)."""
    op, rows, cols = report.op_name(cell.kind, direction), cell.shape.rows, cell.shape.cols
    ours, xla = times["jaxnorm", direction], times.get(("XLA", direction))
    rate = cell.moved[direction] / ours.seconds
    peer = times.get(("cuDNN", direction))
    peers = {"cuDNN us": peer.seconds * 1e6, "x cuDNN": peer.seconds / ours.seconds} if peer else {}
    return peers | {
        "op": op,
        "dtype": cell.dtype,
        "shape": cell.shape.name,
        "M": rows,
        "N": cols,
        "us": ours.seconds * 1e6,
        "kernels": len(ours.kernels),
        "GB/s": rate / 1e9,
        "% of copy": copy and 100 * rate / copy,
        "copy GB/s": copy and copy / 1e9,
        "XLA us": xla and xla.seconds * 1e6,
        "x XLA": xla and xla.seconds / ours.seconds,
        "temp MiB": temporary["jaxnorm", direction] / 2**20,
        "XLA temp MiB": xla and temporary["XLA", direction] / 2**20,
        "error / tolerance": error,
    }


def hardware(measured):
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return {
        "gpu": jax.devices()[0].device_kind,
        "driver": subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")[0],
        "CUDA of the kernels": ffi.module("cuda").toolkit(),
        **report.versions(measured),
    }


def main(args):
    if not ffi.available("cuda"):
        raise SystemExit(ffi.why_not("cuda"))
    if jax.default_backend() != "gpu":
        raise SystemExit(f"JAX finds no GPU here, its devices are {jax.devices()}")
    header, rows, failed = hardware(args.commit), [], []
    todo = cells(args)
    with tqdm(todo) as bar:
        for done, cell in enumerate(bar, 1):
            bar.set_postfix_str(str(cell))
            remarks = []
            try:
                rows += measure_cell(cell, args, remarks)
            except Exception as error:
                remarks.append(why(error))
            failed += [f"{cell}, {remark}" for remark in remarks]
            rows.sort(key=lambda row: (row["op"], row["dtype"]))
            header["cells"] = f"{done} of {len(todo)}"
            if args.out:
                report.save(header, rows, args.out, failed=failed)
    report.write(header, rows, args.out, {"remarks": report.remarks(rows)}, failed=failed)
    return 1 if failed else 0
