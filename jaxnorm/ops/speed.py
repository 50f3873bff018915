"""Where XLA's code for the formula is faster than CUDA kernels, as far as ops have it in common.

Rows that 16-byte vectors do not divide begin anywhere in a word of memory. Kernels that go by vectors have to put those
together from words, and the others go by elements. Each op says in its folder for which rows it loses.
"""

from jaxnorm.primitive.op import CallRows, RowSpec


def vectors_divide(rows: CallRows) -> bool:
    """Whether vectors divide the rows, or kernels are those of a CPU, which have no such rows to fear."""
    return rows.platform != "cuda" or rows.cols * rows.dtype.itemsize % 16 == 0


def by_elements(rows: CallRows) -> str | None:
    """For ops whose kernels go by elements where vectors do not divide a row."""
    if vectors_divide(rows):
        return None
    return f"16-byte vectors do not divide a row of {rows.cols} columns, and kernels go by elements"


def why(rows: CallRows, which: str) -> str:
    return f"XLA's code is faster for {which} where 16-byte vectors do not divide a row, as one of {rows.cols} columns"


def any_kernel(_: RowSpec, rows: CallRows) -> str | None:
    """For ops whose kernels lose for all rows that vectors do not divide."""
    return None if vectors_divide(rows) else why(rows, "rows")
