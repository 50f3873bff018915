"""Wall time of the ops on the CPU beside XLA's own code for the formula and a copy, in one run.

    python -m bench cpu --out bench/results/cpu/norms
    python -m bench cpu --ops add_rms add_layer gated heads --out bench/results/cpu/neighbours
    python -m bench cpu --ops softmax log_softmax cross_entropy --default --turns 3 --out bench/results/cpu/rows
    python -m bench cpu --ops embedding segment_sum --dtypes float32 --out bench/results/cpu/embedding

Each cell is measured alone, one op a program, and in a chain of several in one program. Alone, results are new arrays
in every call, and mapping their memory is in all numbers; in a chain that memory is used again, as in a model. A
residual is dead in a model that runs forward only, so alone it is donated, to jaxnorm and to XLA. A quantised result is
no norm's input, a loss no logits, a gated activation half as long and a sum of rows shorter, so there is no chain of
those. With --default the programs of jaxnorm are those of `implementation=None`, else of "native".

Times are medians over the calls of several turns, in a chain divided by its length; the programs take turns, so that a
busy moment of the machine meets all. A turn's first call is left out: XLA frees a program's temporary memory after its
results are ready, which slows whatever runs next. Rates count each input read once and each output written once. "copy
ms" is the time that `x + 1` takes for as many bytes; in a chain XLA writes it over its input, faster than any copy.

Every cell is checked first: few rows of its length, against the formula in float64.
"""

import itertools
import os
import re
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from tqdm import tqdm

from bench import norms, ops, others, report, shapes
from bench.programs import Program, check, each_direction, functions, jitted, programs
from jaxnorm.native import ffi

LINKS = 12  # ops in a chain: few of them are the first to write to their memory
HEADS, LLAMA = "qwen3 8B qk-norm", "llama3 8B"
# Short rows, rows of common widths, the 4096 x 4096 of llama3 8B, and a call so small that its overhead counts.
SHAPES = {
    shape.name: shape
    for shape in (*shapes.MODELS, *shapes.DECODE)
    if shape.name in (LLAMA, HEADS, "gpt-oss 20B", "BERT base", "decode 32")
}
# Of softmax and the losses, each shape with as many elements as llama3 8B's; one of the grid is in a chain too, which
# takes a dozen times as long.
GRID = shapes.grid(1, 2**24)
CHAINED = "grid 4096"
# What is between the products of an MLP: of a llama3 8B, of an expert, and of tokens that are decoded.
MLPS = tuple(
    shapes.Shape(name, dims)
    for name, dims in {"llama3 8B": (1024, 14336), "an expert": (8192, 768), "decode 32": (32, 14336)}.items()
)
# A table of which 8192 rows are looked up, and what is summed by segments.
SUMMED = {"embedding": shapes.Shape("GPT-2", (50_257, 768)), "segment_sum": shapes.Shape("131072 rows", (2**17, 128))}


def add_arguments(parser):
    report.add_arguments(parser)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--ops", nargs="+", default=list(norms.NORMS), choices=ops.CPU_OPS)
    parser.add_argument("--cols", nargs="+", type=int, help="these row lengths only")
    parser.add_argument("--turns", type=int, default=5, help="of each program, with 3 calls that count or more")
    parser.add_argument("--default", action="store_true", help='jaxnorm with implementation=None, not "native"')


def main(args):
    jax.config.update("jax_platforms", "cpu")
    header, rows, todo = hardware(args.commit), [], cells(args)
    for done, cell in enumerate(tqdm(todo), 1):
        rows += measure_cell(*cell, args.turns, None if args.default else "native")
        rows.sort(key=lambda row: (row["op"], row["dtype"]))
        header["cells"] = f"{done} of {len(todo)}"
        if args.out:
            report.save(header, rows, args.out)
    report.write(header, rows, args.out, {"remarks": report.remarks(rows)})


def cells(args):
    """(kind, dtype, shape) of each."""
    return [
        (kind, dtype, shape)
        for op in args.ops
        for dtype in args.dtypes
        for kind, shape in shapes_of(op)
        if not args.cols or shape.cols in args.cols
    ]


def shapes_of(op):
    """(kind, shape) of each cell of an op; variants of quantised results have one shape."""
    if op in (*ops.LOGITS, "cross_entropy"):
        causal = [(others.CAUSAL, shapes.SCORES)] if op == "softmax" else []
        return [*((op, shape) for shape in GRID), *causal]
    if op == "gated_activation":
        return [(op, shape) for shape in MLPS]
    if op in SUMMED:
        return [(kind, SUMMED[op]) for kind in ops.kinds_of(op)]
    if op == "heads":
        return [(norms.HEADS, SHAPES[HEADS])]
    if op == "gated":
        either = [(kind, shape) for kind in (norms.GATED, norms.GATE_LAST) for shape in SHAPES.values()]
        # The next, of 8192 columns in float32, takes more than 24 GiB in a chain.
        return [*either, (norms.GROUPED, shapes.MAMBA2[0])]
    variants = norms.QUANTIZATIONS if op in norms.QUANTIZED else ()
    return [*((op, shape) for shape in SHAPES.values()), *((f"{op}, {name}", SHAPES[LLAMA]) for name in variants)]


def hardware(measured):
    model = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return {
        "cpu": model[1] if model else "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "instruction set": ffi.module("cpu").isa(),
        **report.versions(measured),
    }


def measure_cell(kind, dtype, shape, turns, implementation):
    op = ops.KINDS[kind]
    error = check(op, shape, dtype, implementation)
    operands = op.operands(shape, dtype, 0)
    x = jax.tree.leaves(operands)[0]
    for manner, links, make, copy in manners(op, shape):
        native, xla = make(op, implementation, operands)
        for direction, moved in op.moved(shape, jnp.dtype(dtype).itemsize).items():
            taken = compare([native[direction], xla[direction], Program(jax.jit(copy), (x,))], turns)
            ours, theirs, copied = (seconds / links for seconds in taken)
            copied *= moved / (2 * x.nbytes)  # a copy reads one array and writes one
            yield {
                "op": ", ".join([report.op_name(kind, direction), *manner]),
                "dtype": dtype,
                "shape": shape.name,
                "M": shape.rows,
                "N": shape.cols,
                "ms": 1e3 * ours,
                "GB/s": moved / ours / 1e9,
                "XLA ms": 1e3 * theirs,
                "x XLA": theirs / ours,
                "copy ms": 1e3 * copied,
                "% of copy": 100 * copied / ours,
                "error / tolerance": error,
            }


def alone(op, implementation, operands):
    """The `Program` of each direction, jaxnorm's and XLA's; what is donated to jaxnorm is donated to XLA."""
    native, xla = (programs(op, how, *operands) for how in (implementation, "xla"))
    if native["forward"].carries:
        xla["forward"] = native["forward"]._replace(function=functions(op, "xla")["carry"])
    return native, xla


def chain(op, implementation, operands):
    """The same, of several ops one after the other.

    A chain of bare norms is none to XLA: it makes one operation of all, which writes the last result only. No model has
    that, as between two norms there is a product or a sum. So each result passes an optimization barrier: it has to be
    there in memory. Before JAX 0.11.1 XLA fuses over barriers: there a chain says nothing. Norms have weights of their
    own, as layers do, and gates; of shared ones XLA makes an array of x's size for all.

    XLA may write a result over its input, which is dead, and does for small float32 arrays; a native call cannot.

    The backward starts from what the forward keeps: x and the statistics, or what jax.vjp keeps of XLA's formula, 2 to
    6 arrays of x's size. Computing those again is slower.
    """
    x, weights, dy = operands
    layers = [tuple(weight + link / 64 for weight in weights) for link in range(LINKS)]

    def chained(how):
        norm = op.function(how)

        def forward(x, *layers):
            for layer in layers:
                x = jax.lax.optimization_barrier(norm(x, *layer))
            return x

        return each_direction(jitted(forward, lambda dx: jax.tree.leaves(dx)[0]), False, x, layers, dy)

    return chained(implementation), chained("xla")


def copy_once(x):
    return x + 1


def copy_chain(x):
    for _ in range(LINKS):
        x = jax.lax.optimization_barrier(x + 1)
    return x


def manners(op, shape):
    """(what a row says of it after the op, ops in a program, the programs, a copy) of each way to run them."""
    is_one_of_many = shape.name.startswith("grid ") and shape.name != CHAINED
    chains = [] if op.is_last or is_one_of_many else [([report.CHAINED], LINKS, chain, copy_chain)]
    return [([], 1, alone, copy_once), *chains]


def compare(of_cell, turns):
    """The median seconds of each `Program`, in turns."""
    # A short call is as long as an interruption of it, so it takes more of them to find the median.
    calls = 3 if max(turn(program, 1)[0] for program in of_cell) > 1e-2 else 30
    taken = zip(*([turn(program, calls) for program in of_cell] for _ in range(turns)), strict=True)
    return [statistics.median(itertools.chain(*times)) for times in taken]


def turn(program, calls):
    """The seconds that each of several calls in a row takes, but for the first."""
    (first, *rest), times = program.arguments, []
    if program.carries:
        first = jnp.copy(first)  # which the next turn and XLA's program want as well
    for _ in range(1 + calls):
        start = time.perf_counter()
        result = jax.block_until_ready(program.function(first, *rest))
        times.append(time.perf_counter() - start)
        if program.carries:
            first = result[0]
        del result  # after the clock has stopped: its memory goes back to the system
    return times[1:]
