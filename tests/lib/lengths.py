"""The lengths at which one CUDA kernel gives way to another, and sizes of ops that have them."""

import importlib
import itertools
from functools import cache

import jax.numpy as jnp
import numpy as np
from cases import draw
from internals import LONGEST_GATED, LONGEST_PER_HEAD
from op import Size, rows

# Numbers of vectors, among them each that some plan has room for: these are multiples of 32 from 256 on, and powers of
# two behind the longest row of one block.
ONE_BLOCK = 4096
VECTORS = [*range(1, 257), *range(288, ONE_BLOCK + 1, 32), *(2**power + 32 for power in range(12, 18))]
# What plans depend on: whose statistics a row has, and whether it has a gate, before them or behind.
KINDS_OF_ROWS = (("rms", ""), ("layer", ""), ("rms", "first"), ("rms", "last"))
CLUSTER = 16  # the largest that a device has
# Rows that are too many for one block to add up their gradients of a weight, and the columns of the longest.
MANY, COLS_OF_MANY = 520, 1300


@cache
def lengths(way, dtype):
    """Of each stretch of lengths with the same kernels the longest of one block, else the shortest; and one less."""
    cuda, vector = importlib.import_module("jaxnorm._cuda"), 16 // jnp.dtype(dtype).itemsize

    def kernels(vectors):
        cols = vectors * vector
        known = [(kind, gate) for kind, gate in KINDS_OF_ROWS if not gate or cols <= LONGEST_GATED]
        plans = [cuda.plan(way, kind, dtype, cols, CLUSTER, gate) for kind, gate in known]
        return [(p["regime"], p["elements_per_thread"], min(p["threads_per_row"], 33), p["registers"]) for p in plans]

    stretches = [list(stretch) for _, stretch in itertools.groupby(VECTORS, kernels)]
    found = [stretch[-1] if stretch[-1] <= ONE_BLOCK else stretch[0] for stretch in stretches]
    return [vectors * vector - rest for vectors in found for rest in (0, 1)]


def where(dims):
    """Of each row something else, and the columns that are labels."""
    return (np.asarray(draw("where", dims)) > -0.3) | (np.arange(dims[-1]) < 4)


# None, and what the kernels of masks and those of windows look at.
MASKS = {
    "": lambda *dims: {},
    "where": lambda *dims: {"where": where(dims)},
    "where, causal": lambda *dims: {"where": where(dims), "causal": True, "offset": dims[-1] // 2},
    "where, window": lambda *dims: {
        **MASKS["where, causal"](*dims),
        "offset": dims[-1] - 3,
        "window": dims[-1] // 3 + 1,
    },
}
ROTARY = (2, 16, 24, 64, 80, 96, 100, 101, 128, 192, 256, 320, 511, 512)  # from the least vector to the longest head
# One channel a group, one group, groups that vectors cross, channels that they do not divide; by positions.
GROUPS = ((5, 3), (24, 1), (1, 40), (32, 4), (4, 20), (9, 32))
POSITIONS = (1, 7, 130)


def shapes(op, dtypes, way, mask):
    """Few rows each; of results without a mask as many as law 1 wants, which is of hundreds of elements."""
    dtype = dtypes[op.arrays - 1 if op.has_sum else 0]  # of a sum, which is normalised
    if op.public.endswith("rotary"):
        heads = 4 + 4 * op.public.startswith("qkv")
        return [Size((2, 5, heads, cols), (cols,)) for cols in ROTARY if cols % 2 == 0 or "in part" in op.name]
    if op.public == "group_norm":
        return [rows(3, n, count * size, group_size=size) for n in POSITIONS for count, size in GROUPS if n * size > 1]
    found = lengths(way, dtype)
    if "per head" in op.name:
        return [Size((2, 3, 2, n), (*heads, n)) for n in found if n <= LONGEST_PER_HEAD for heads in ((2,), (3, 1))]
    if "gated" in op.public:
        found = [n for n in found if n <= LONGEST_GATED]
    if "groups of" in op.name:
        found = [n for n in found if n % 32 == 0]
    if "grouped" in op.name:
        return [rows(3, 2 * n, group_size=n) for n in found]
    # Some rows, or one if it is long; of a norm's result a single row may have a kernel of its own.
    is_plain = way == "forward" and op.public in ("rms_norm", "layer_norm")
    some = {n: max(3, 1024 // n) if way == "forward" and not mask else 3 for n in found}
    counts = {n: [1] * (n > 17_000 or (is_plain and n > 1000)) + [some[n]] * (n < 17_000 or mask != "") for n in found}
    # Padding that is no number of vectors' columns.
    more = {"pad_to": 112} if "padded" in op.name else {}
    return [rows(count, n, **more, **MASKS[mask](count, n)) for n in found for count in counts[n]]


def shapes_of_many(op, dtypes):
    """The like with many rows, of whole vectors: the others have the kernels of few."""
    aligned = [n for n in lengths("backward", dtypes[-1]) if n <= COLS_OF_MANY and n % 8 == 0]
    if "per head" not in op.name:
        return [rows(MANY, n) for n in aligned]
    heads = ((MANY // 2, 2), (2,)), ((2, 2, MANY // 4), (2, 1))
    return [Size((*dims, n), (*of, n)) for n in aligned for dims, of in heads]
