"""Where XLA's code for the formula is faster than the CUDA kernels, which `implementation=None` leaves out there.

Rows that 16-byte vectors do not
divide begin anywhere in a word of memory. Kernels that go by vectors have to put those together from words, and the
others go by elements. Measured on an H200 with `python -m bench gpu --suites odd`, see docs/benchmarks/gpu.md.
A kernel of its own has neighbours that XLA would have fused with the formula. Where there is little to read, as where
tokens are decoded, that is most of the time; measured with `python -m bench model`, see docs/benchmarks/models.md.
"""

import math
from typing import Any

from jaxnorm.ops.norm.formula import Norm
from jaxnorm.primitive.op import CallRows, RowSpec

# The most columns of rows that vectors do not divide in a cluster's shared memory with pipelines.
LONGEST = 2**18
# The most columns of rows of which one kernel writes y beside its quantised values. Of longer ones two read x, which of
# float32 takes longer than XLA's code: 2048 x 20480 in 205 to 187 µs on an H200, of bfloat16 in 114 to 132.
LONGEST_WITH_Y = 2**14
# What tokens that are decoded have at most: elements in all, in rows of so many columns.
FEW, NARROW = 2**18, 2**13
# The same of the forward pass of a few hundred tokens with LayerNorm. In one of 512 x 1024, before the sum or after it,
# or of 256 x 1152 with adaLN, XLA's code is 2 to 6 % of the program faster on an H100; of 4 x 512 x 1024 it is no more.
FEW_CENTRED = 2**20
# The most tokens whose queries and keys are decoded together. A loop over a Llama-like model is 0.7 to 0.8 % slower
# with the kernel for 8 and 32 tokens on an H200; where they are parts of one product it is as fast either way (H100).
# Of one token the kernel is 2 to 5 % faster.
FEW_TOKENS = 64


def vectors_divide(rows: CallRows) -> bool:
    """Whether vectors divide the rows, or kernels are those of a CPU, which have no such rows to fear."""
    return rows.platform != "cuda" or rows.cols * rows.dtype.itemsize % 16 == 0


def is_one_loop(rows: CallRows) -> bool:
    """Whether XLA's code for what has no sum over a row is one loop at the copy rate: of float32 on a GPU."""
    return rows.platform == "cuda" and rows.dtype.itemsize == 4


def is_decoded(rows: CallRows, few: int = FEW) -> bool:
    """Whether there is as little to read as where tokens are decoded: less than a launch takes, on a GPU."""
    little = rows.rows is not None and rows.rows * rows.cols <= few and rows.cols <= NARROW
    return little and rows.platform == "cuda" and rows.way == "forward" and not rows.differentiated


def why(rows: CallRows, which: str) -> str:
    return f"XLA's code is faster for {which} where 16-byte vectors do not divide a row, as one of {rows.cols} columns"


def any_kernel(_: RowSpec, rows: CallRows) -> str | None:
    """For ops whose kernels lose for all rows that vectors do not divide."""
    return None if vectors_divide(rows) else why(rows, "rows")


def quantized_norm(spec: Any, rows: CallRows) -> str | None:
    is_apart = spec.with_unquantized and rows.cols > LONGEST_WITH_Y and rows.way == "forward"
    if is_apart and rows.platform == "cuda" and rows.dtype.itemsize == 4:
        return f"XLA's code is faster for y beside quantised float32 rows of more than {LONGEST_WITH_Y} columns"
    return any_kernel(spec, rows)


def rotary(spec: Any, rows: CallRows) -> str | None:
    """Of queries and keys, or of these and values in one array."""
    if rows.platform != "cuda" or rows.way != "forward" or rows.differentiated or rows.rows is None:
        return None
    lengths = [*rows.shape[:-1]]
    del lengths[spec.heads_axis + 1]
    if not 1 < math.prod(lengths) <= FEW_TOKENS:
        return None
    return f"XLA's code is faster for 2 to {FEW_TOKENS} tokens, which it fuses with what is around them"


def norm(norm: Norm, rows: CallRows) -> str | None:
    if norm.x_hat_dtype is not None and rows.way == "forward" and rows.platform == "cuda":
        return f"XLA's code rounds x_hat to {norm.x_hat_dtype} and multiplies it in one pass, a kernel and XLA in two"
    name, few = ("RMSNorm", FEW) if norm.kind == "rms" else ("LayerNorm", FEW_CENTRED)
    if is_decoded(rows, few):
        return f"XLA's code is faster for {name} of at most {few} elements, which it fuses with what is around it"
    if vectors_divide(rows):
        return None
    if rows.way == "backward":
        # Of a sum XLA's code loses for what clusters of eight blocks of RMSNorm hold, and for half types in the shorter
        # rows of LayerNorm.
        last = LONGEST if norm.kind == "rms" else 2**14
        wins = 2**15 < rows.cols <= 2**16 or (norm.kind == "layer" and rows.dtype.itemsize == 2 and rows.cols < 2**12)
        loses = rows.cols <= last and not wins if rows.adds else rows.cols > LONGEST
        which = "the gradient of a sum" if rows.adds else f"rows of more than {LONGEST} columns"
        return why(rows, which) if loses else None
    if rows.cols > LONGEST and not rows.adds:
        return why(rows, f"rows of more than {LONGEST} columns")
    first = 1 if rows.adds else 1025
    if rows.dtype.itemsize == 2 and first <= rows.cols < 4096:
        return why(rows, f"half types in rows of {first} to 4095 columns")
    return None
