"""Device time of softmax and cross-entropy on one NVIDIA GPU, beside XLA's code for the formula and a copy, in one run.

    python -m bench rows --out bench/results/h200_rows

Kernel time comes from CUPTI and is the median of many calls, of arrays that are read from memory. "GB/s" counts each
array that must be read and written once: softmax 2 forward and 3 backward; cross-entropy 1 forward and 2 backward; of a
causal softmax what a query does not see is not read. "% of copy" is that of XLA's `x + 1` on as many bytes. "temp
MiB" is what the program takes beside its operands and results. A forward that is followed by its gradient in one
program is a "step". With --default the programs are those of `implementation=None`, else of "native".
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from tqdm import tqdm

import jaxnorm
from bench import report
from bench.timing import device_time, sets_needed

COLS = (256, 1024, 4096, 8192, 16_384, 32_768, 65_536, 131_072, 262_144)
ODD = (1001, 4097, 50_257)  # which 16-byte vectors do not divide
VOCABULARIES = ((8192, 32_000), (8192, 50_257), (8192, 128_256), (4096, 262_144))
SCORES = (2, 16, 2048, 2048)  # of queries and keys
CACHED = (32, 2048, 8192)  # the same behind a cache
BYTES = 2**28  # an array far beyond any cache
CAUSAL = "softmax, causal"
LOSS = "cross_entropy"
# Of scores behind a cache: how many keys a query has at most.
WINDOWS = {f"{CAUSAL}, cache": None, "softmax, window 1024": 1024, "softmax, window 4096": 4096}


class Cell(NamedTuple):
    op: str
    dtype: str
    dims: tuple[int, ...]

    @property
    def nbytes(self):
        return jnp.dtype(self.dtype).itemsize * math.prod(self.dims)


def add_arguments(parser):
    report.add_arguments(parser)
    parser.add_argument("--ops", nargs="+", default=list(FUNCTIONS), choices=FUNCTIONS)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--cols", nargs="+", type=int, help="these row lengths only")
    parser.add_argument("--iterations", type=int, default=20, help="calls of each program")
    parser.add_argument("--default", action="store_true", help="what runs by default")


def draw(cell, key):
    return (3 * jax.random.normal(jax.random.key(key, impl="rbg"), cell.dims)).astype(cell.dtype)


def operands(cell, i):
    """x, the labels of a loss, and the cotangent; each i gives others."""
    if cell.op != LOSS:
        return draw(cell, i), draw(cell, i + 100)
    *rows, vocabulary = cell.dims
    labels = jax.random.randint(jax.random.key(i), rows, 0, vocabulary)
    return draw(cell, i), labels, jnp.full(rows, 1 / rows[0], jnp.float32)


def moved(cell):
    """How many bytes each program must move, by direction."""
    read = 0.5 if cell.op == CAUSAL else 1  # what counts of an array that is read
    if cell.op in WINDOWS:
        queries, keys = cell.dims[-2:]
        read = float(seen(queries, keys, keys - queries, WINDOWS[cell.op]).mean())
    results = 0 if cell.op == LOSS else 1  # arrays of x's size: y, and in the backward dy
    forward, backward = read + results, read * (1 + results) + 1
    return {
        "forward": forward * cell.nbytes,
        "backward": backward * cell.nbytes,
        "step": (forward + backward) * cell.nbytes,
    }


def seen(queries, keys, offset, window):
    """Which keys each query of causal rows sees."""
    last = jnp.arange(queries)[:, None] + offset
    before = jnp.arange(keys) <= last
    return before if window is None else before & (jnp.arange(keys) > last - window)


def _softmax(implementation, *, log=False, causal=False, cached=False, window=None):
    """The function of x that is measured; of "jnp" it is JAX's own, which is XLA's code.

    Of scores behind a cache the last query has the last key.
    """

    def offset_of(x):
        return x.shape[-1] - x.shape[-2] if cached else 0

    module = jax.nn if implementation == "jnp" else jaxnorm
    function = module.log_softmax if log else module.softmax
    if implementation == "jnp":
        if not causal:
            return function
        return lambda x: function(jnp.where(seen(*x.shape[-2:], offset_of(x), window), x, -jnp.inf))

    def ours(x):
        mask = {"causal": True, "offset": offset_of(x), "window": window} if causal else {}
        return function(x, implementation=implementation, **mask)

    return ours


def _losses(implementation):
    """The losses of logits: those of Optax's formula for XLA, which is faster there than log_softmax."""
    if implementation != "jnp":
        return functools.partial(jaxnorm.softmax_cross_entropy_with_integer_labels, implementation=implementation)

    def losses(logits, labels):
        logits = logits.astype(jnp.float32)
        label_logits = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
        return jax.nn.logsumexp(logits, axis=-1) - label_logits

    return losses


FUNCTIONS = {
    "softmax": _softmax,
    "log_softmax": functools.partial(_softmax, log=True),
    CAUSAL: functools.partial(_softmax, causal=True),
    **{op: functools.partial(_softmax, causal=True, cached=True, window=window) for op, window in WINDOWS.items()},
    LOSS: _losses,
}


def programs(cell, implementation):
    """By direction: a program, and the operands of a set by its number.

    The backward is a program of its own, which takes what the forward keeps for it.
    """
    function, operands_of = FUNCTIONS[cell.op](implementation), functools.partial(operands, cell)

    @jax.jit
    def pulled(*args):
        return jax.vjp(lambda x: function(x, *args[1:-1]), args[0])[1]

    def kept(i):
        *args, cotangent = operands_of(i)
        return pulled(*args, cotangent), cotangent

    def step(x, *others):
        y, pull = jax.vjp(lambda x: function(x, *others[:-1]), x)
        return y, pull(others[-1])[0]

    return {
        "forward": (function, lambda i: operands_of(i)[:-1]),
        "backward": (lambda pull, cotangent: pull(cotangent)[0], kept),
        "step": (step, operands_of),
    }


def cells_of(args):
    for op in args.ops:
        for dtype in args.dtypes:
            itemsize = jnp.dtype(dtype).itemsize
            dims = {
                CAUSAL: [SCORES],
                **{op: [CACHED] for op in WINDOWS},
                LOSS: VOCABULARIES,
            }.get(op, [(BYTES // itemsize // cols, cols) for cols in (*COLS, *ODD)])
            yield from (Cell(op, dtype, of) for of in dims if not args.cols or of[-1] in args.cols)


def measured(cell, implementation, iterations):
    """By direction: seconds, and the temporary bytes of the program."""
    times, nbytes = {}, moved(cell)
    for way, (function, operands_of) in programs(cell, implementation).items():
        sets = [operands_of(i) for i in range(sets_needed(cell.nbytes, nbytes[way]))]
        program = jax.jit(function)
        temporary = program.lower(*sets[0]).compile().memory_analysis().temp_size_in_bytes
        times[way] = device_time(program, sets, iterations).seconds, temporary
    return times


def copy_rate(nbytes, iterations):
    x = jnp.zeros(-(-int(nbytes) // 2**21) * 2**18, jnp.uint32)  # whole MiB: XLA copies odd lengths slowly
    return 8 * x.size / device_time(jax.jit(lambda x: x + 1), [(x,)], iterations).seconds


def rows_of(cell, implementation, iterations):
    ours, xla = (measured(cell, how, iterations) for how in (implementation, "jnp"))
    for way, nbytes in moved(cell).items():
        (seconds, temporary), (xla_seconds, xla_temporary) = ours[way], xla[way]
        yield {
            "op": report.op_name(cell.op, way),
            "dtype": cell.dtype,
            "M": math.prod(cell.dims[:-1]),
            "N": cell.dims[-1],
            "us": 1e6 * seconds,
            "GB/s": nbytes / seconds / 1e9,
            "% of copy": 100 * nbytes / seconds / copy_rate(nbytes, iterations),
            "XLA us": 1e6 * xla_seconds,
            "x XLA": xla_seconds / seconds,
            "temp MiB": temporary / 2**20,
            "XLA temp MiB": xla_temporary / 2**20,
        }


def main(args):
    header, rows = report.device(args.commit), []
    for cell in tqdm(list(cells_of(args))):
        rows += rows_of(cell, None if args.default else "native", args.iterations)
        if args.out:
            report.save(header, rows, args.out)
    report.write(header, rows, args.out)
