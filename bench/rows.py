"""Device time of softmax and cross-entropy on one NVIDIA GPU, beside XLA's code for the formula and a copy, in one run.

    python -m bench rows --out bench/results/h200_rows

Kernel time comes from CUPTI and is the median of many calls, of arrays that are read from memory. "GB/s" counts each
array that must be read and written once: softmax 2 forward and 3 backward; cross-entropy 1 forward and 2 backward; of a
causal softmax what lies above the diagonal is not read. "% of copy" is that of XLA's `x + 1` on as many bytes. "temp
MiB" is what the program takes beside its operands and results. A forward that is followed by its gradient in one
program is a "step". With --default the programs are those of `implementation=None`, else of "native".
"""

import functools
import math
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jaxlib
from tqdm import tqdm

import jaxnorm
from bench import report
from bench.timing import device_time, sets_needed

COLS = (256, 1024, 4096, 8192, 16_384, 32_768, 65_536, 131_072, 262_144)
ODD = (1001, 4097, 50_257)  # which 16-byte vectors do not divide
VOCABULARIES = ((8192, 32_000), (8192, 50_257), (8192, 128_256), (4096, 262_144))
CAUSAL = (2, 16, 2048, 2048)
BYTES = 2**28  # an array far beyond any cache


class Cell(NamedTuple):
    op: str
    dtype: str
    dims: tuple[int, ...]

    @property
    def nbytes(self):
        return jnp.dtype(self.dtype).itemsize * math.prod(self.dims)


def add_arguments(parser):
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    parser.add_argument("--ops", nargs="+", default=list(PROGRAMS), choices=PROGRAMS)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--cols", nargs="+", type=int, help="these row lengths only")
    parser.add_argument("--iterations", type=int, default=20, help="calls of each program")
    parser.add_argument("--default", action="store_true", help="what runs by default")
    parser.add_argument("--commit", help="what is measured, where there is no git (default: the checkout's)")


def draw(cell, key):
    return (3 * jax.random.normal(jax.random.key(key, impl="rbg"), cell.dims)).astype(cell.dtype)


def _softmax(cell, implementation, log=False, causal=False):
    """The function of x that is measured, and XLA's."""
    if implementation != "xla":
        function = jaxnorm.log_softmax if log else jaxnorm.softmax
        return functools.partial(function, causal=causal, implementation=implementation)
    function = jax.nn.log_softmax if log else jax.nn.softmax
    if not causal:
        return function
    where = jnp.tril(jnp.ones(cell.dims[-2:], bool))
    return lambda x: function(jnp.where(where, x, -jnp.inf))


def _losses(cell, implementation):
    """The losses of logits: those of Optax's formula for XLA, which is faster there than log_softmax."""
    if implementation != "xla":
        return functools.partial(jaxnorm.softmax_cross_entropy_with_integer_labels, implementation=implementation)

    def losses(logits, labels):
        logits = logits.astype(jnp.float32)
        label_logits = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
        return jax.nn.logsumexp(logits, axis=-1) - label_logits

    return losses


def directions(function, operands, gradient_bytes, forward_bytes):
    """By direction: a program, the operands of a set by its number, and how many bytes the program must move.

    The backward is a program of its own, which takes what the forward keeps for it.
    """

    @jax.jit
    def pulled(*args):
        return jax.vjp(lambda x: function(x, *args[1:-1]), args[0])[1]

    def kept(i):
        *args, cotangent = operands(i)
        return pulled(*args, cotangent), cotangent

    def step(x, *others):
        y, pull = jax.vjp(lambda x: function(x, *others[:-1]), x)
        return y, pull(others[-1])[0]

    return {
        "forward": (function, lambda i: operands(i)[:-1], forward_bytes),
        "backward": (lambda pull, cotangent: pull(cotangent)[0], kept, gradient_bytes),
        "step": (step, operands, forward_bytes + gradient_bytes),
    }


def softmax_programs(cell, implementation, **options):
    part = 0.5 if options.get("causal") else 1  # of the operands' elements that are read
    return directions(
        _softmax(cell, implementation, **options),
        lambda i: (draw(cell, i), draw(cell, i + 100)),
        (1 + 2 * part) * cell.nbytes,
        (1 + part) * cell.nbytes,
    )


def loss_programs(cell, implementation):
    *rows, vocabulary = cell.dims

    def operands(i):
        labels = jax.random.randint(jax.random.key(i), rows, 0, vocabulary)
        return draw(cell, i), labels, jnp.full(rows, 1 / rows[0], jnp.float32)

    return directions(_losses(cell, implementation), operands, 2 * cell.nbytes, cell.nbytes)


PROGRAMS = {
    "softmax": softmax_programs,
    "log_softmax": functools.partial(softmax_programs, log=True),
    "softmax, causal": functools.partial(softmax_programs, causal=True),
    "cross_entropy": loss_programs,
}


def cells_of(args):
    for op in args.ops:
        for dtype in args.dtypes:
            itemsize = jnp.dtype(dtype).itemsize
            dims = {
                "softmax, causal": [CAUSAL],
                "cross_entropy": VOCABULARIES,
            }.get(op, [(BYTES // itemsize // cols, cols) for cols in (*COLS, *ODD)])
            yield from (Cell(op, dtype, of) for of in dims if not args.cols or of[-1] in args.cols)


def measured(cell, implementation, iterations):
    """By direction: seconds, and the temporary bytes of the program."""
    times = {}
    for way, (function, operands, moved) in PROGRAMS[cell.op](cell, implementation).items():
        sets = [operands(i) for i in range(sets_needed(cell.nbytes, moved))]
        program = jax.jit(function)
        temporary = program.lower(*sets[0]).compile().memory_analysis().temp_size_in_bytes
        times[way] = device_time(program, sets, iterations).seconds, temporary, moved
    return times


def copy_rate(nbytes, iterations):
    x = jnp.zeros(-(-int(nbytes) // 2**21) * 2**18, jnp.uint32)  # whole MiB: XLA copies odd lengths slowly
    return 8 * x.size / device_time(jax.jit(lambda x: x + 1), [(x,)], iterations).seconds


def rows_of(cell, implementation, iterations):
    name, *variant = cell.op.split(", ")
    ours, xla = (measured(cell, how, iterations) for how in (implementation, "xla"))
    for way, (seconds, temporary, moved) in ours.items():
        xla_seconds, xla_temporary, _ = xla[way]
        yield {
            "op": ", ".join([f"{name} {way}", *variant]),
            "dtype": cell.dtype,
            "M": math.prod(cell.dims[:-1]),
            "N": cell.dims[-1],
            "us": 1e6 * seconds,
            "GB/s": moved / seconds / 1e9,
            "% of copy": 100 * moved / seconds / copy_rate(moved, iterations),
            "XLA us": 1e6 * xla_seconds,
            "x XLA": xla_seconds / seconds,
            "temp MiB": temporary / 2**20,
            "XLA temp MiB": xla_temporary / 2**20,
        }


def main(args):
    header = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "commit": args.commit or report.commit(),
    }
    rows = []
    for cell in tqdm(list(cells_of(args))):
        rows += rows_of(cell, None if args.default else "native", args.iterations)
        if args.out:
            report.save(header, rows, args.out)
    report.write(header, rows, args.out)
