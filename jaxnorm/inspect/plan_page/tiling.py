"""Which thread reads which elements of a row in which pass: what the page draws, and a test holds to the kernels."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np

WARP = 32
VECTOR_BYTES = 16
SEGMENT, SEGMENT_THREADS, COLUMN_THREADS = 4096, 128, 512  # kSegment, kSegmentThreads and kColumnThreads of plan.h


@dataclasses.dataclass(frozen=True)
class Case:
    """One direction of a call of a norm, with the plan that `_cuda.plan` gives for it."""

    way: Literal["forward", "backward"]
    kind: Literal["rms", "layer"]
    dtype: np.dtype[Any]
    rows: int
    cols: int
    plan: dict[str, Any]
    max_cluster: int = 16
    adds: bool = False

    @property
    def vector(self) -> int:
        """Elements of 16 bytes."""
        return VECTOR_BYTES // self.dtype.itemsize

    @property
    def is_divided(self) -> bool:
        """Whether vectors divide a row."""
        return self.cols % self.vector == 0

    @property
    def block_threads(self) -> int:
        """Threads of a block that share a row."""
        return int(self.plan["threads_per_row"]) // int(self.plan["blocks_per_row"])

    @property
    def groups(self) -> int:
        """Thread groups of a block."""
        return int(self.plan["rows_per_block"]) // int(self.plan["rows_per_team"])

    @property
    def is_streamed(self) -> bool:
        """Whether a row is read again in each pass."""
        return int(self.plan["elements_per_thread"]) == 0

    @property
    def has_pipeline(self) -> bool:
        """Whether rows come by way of shared memory."""
        return bool(self.plan["ring"]) and self.max_cluster > 1

    @property
    def is_long(self) -> bool:
        """Whether a cluster has a row of the backward of which its shared memory holds one and a part of the next."""
        return bool(self.plan["segments"]) and not self.is_streamed


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Who has which columns of a row.

    Block b has `span` columns from b * span on. In it each warp has neighbouring vectors of `vector` elements, of
    which lane i has the i-th, and each `lanes`-th after it: `vectors` of them.
    """

    cols: int
    vector: int
    lanes: int
    threads: int
    vectors: int
    blocks: int
    span: int

    def first(self, block: Any, thread: Any, vec: Any) -> Any:
        """The first column of a vector of a thread; it may be past the block's columns. Numbers or arrays of them."""
        warp, lane = thread // self.lanes, thread % self.lanes
        return block * self.span + (warp * self.vectors * self.lanes + vec * self.lanes + lane) * self.vector

    def count(self, block: Any, first: Any) -> Any:
        """How many elements of the row that vector has."""
        return np.clip(np.minimum(self.cols, (block + 1) * self.span) - first, 0, self.vector)

    def vectors_of_blocks(self) -> Iterator[tuple[Any, ...]]:
        """For each block: block, thread, vector of the thread, first column and number of elements, as arrays."""
        thread, vec = (each.ravel() for each in np.mgrid[: self.threads, : self.vectors])
        for block in range(self.blocks):
            first = self.first(block, thread, vec)
            count = self.count(block, first)
            there = count > 0
            yield np.full(int(there.sum()), block), thread[there], vec[there], first[there], count[there]

    def digest(self) -> int:
        """A number that follows from the whole map; the page works out the same."""
        total = 0
        for block, thread, vec, first, count in self.vectors_of_blocks():
            total += int(((block * 7 + thread * 31 + vec * 101 + count) * (first % 8191 + 1)).sum())
        return total % 2**32


Step = Literal["load", "apply", "store"]
Via = Literal["memory", "shared memory", "registers"]


class Pass(NamedTuple):
    """A pass over the elements of a row. `words`: they come in 16-byte words, each of which two threads may read."""

    kernel: str
    step: Step
    arrays: tuple[str, ...]
    via: Via
    tiling: Tiling
    text: str
    words: bool = False


def held(case: Case, vector: int) -> Tiling:
    """The tiling of rows that their threads hold."""
    threads, elements = case.block_threads, int(case.plan["elements_per_thread"])
    blocks = int(case.plan["blocks_per_row"])
    return Tiling(case.cols, vector, min(WARP, threads), threads, elements // vector, blocks, threads * elements)


def streamed(case: Case, vector: int) -> Tiling:
    """The tiling of rows that are read in each pass: vectors go round all threads of a block."""
    blocks, threads = int(case.plan["blocks_per_row"]), case.block_threads
    span = math.ceil(math.ceil(case.cols / case.vector) / blocks) * case.vector
    return Tiling(case.cols, vector, threads, threads, math.ceil(span / (threads * vector)), blocks, span)


def passes(case: Case) -> list[Pass]:
    """Those of a norm whose weights have x's dtype and whose arrays begin at 16 bytes, in the order of the kernel."""
    return _forward(case) if case.way == "forward" else _backward(case)


def _forward(case: Case) -> list[Pass]:
    if case.is_streamed:
        return _looped(case)
    if case.plan["blocks_per_row"] > 1:
        return _by_pipeline(case, held(case, case.vector if case.is_divided else 1), ("x",), "y")
    words = not case.is_divided and case.dtype.itemsize == 2
    tiling = held(case, case.vector if case.is_divided or words else 1)
    how = (
        "in vectors of 16 bytes"
        if case.is_divided
        else "in the 16-byte words in which its vectors lie, and puts the vectors together"
        if words
        else "element by element, as vectors do not divide the row"
    )
    return [
        Pass("row_kernel", "load", ("x",), "memory", tiling, f"Each thread reads its part of the row {how}.", words),
        Pass("row_kernel", "apply", ("x",), "registers", tiling, "The elements are still in the thread's registers."),
        Pass("row_kernel", "store", ("y",), "memory", tiling, "Each thread writes what it read, normalised.", words),
    ]


def _looped(case: Case) -> list[Pass]:
    sums, last = streamed(case, case.vector), streamed(case, case.vector if case.is_divided else 1)
    reads = ["to sum it up", "to sum up squares about the mean"] if case.kind == "layer" else ["to sum up squares"]
    loads = [Pass("row_kernel", "load", ("x",), "memory", sums, f"The row is read {why}.") for why in reads]
    return [
        *loads,
        Pass("row_kernel", "apply", ("x",), "memory", last, "Nobody has kept the row, so it is read once more."),
        Pass("row_kernel", "store", ("y",), "memory", last, "Each thread writes what it read last, normalised."),
    ]


def _by_pipeline(case: Case, tiling: Tiling, reads: tuple[str, ...], result: str) -> list[Pass]:
    kernel = "row_kernel" if case.way == "forward" else "grad_kernel"
    copied = (
        "A bulk copy by one thread brings the row to shared memory ahead of time; each thread reads its part there."
    )
    return [
        Pass(kernel, "load", reads, "shared memory", tiling, copied),
        Pass(kernel, "apply", reads, "shared memory", tiling, "The row is still in shared memory, or in registers."),
        Pass(kernel, "store", (result,), "memory", tiling, "Each thread writes its part, and the copy's room is free."),
    ]


def _backward(case: Case) -> list[Pass]:
    if case.is_streamed:
        return _segments(case)
    tiling = held(case, case.vector if case.is_divided or case.is_long else 1)
    if case.has_pipeline and not case.is_long:
        return _by_pipeline(case, tiling, ("x", "dy"), "dx")
    kernel, via = ("long_rows_kernel", "shared memory") if case.is_long else ("grad_kernel", "registers")
    where: Via = "shared memory" if case.is_long else "registers"
    load = (
        "Each thread copies its vectors to places of its own in shared memory, ahead of time."
        if case.is_long
        else "Each thread reads its part of the rows."
    )
    return [
        Pass(kernel, "load", ("x", "dy"), "memory", tiling, load),
        Pass(kernel, "apply", ("x", "dy"), where, tiling, f"The elements are still in {via}."),
        Pass(kernel, "store", ("dx",), "memory", tiling, "Each thread writes dx of its part."),
    ]


def _segments(case: Case) -> list[Pass]:
    vector, segments, strip = case.vector, math.ceil(case.cols / SEGMENT), COLUMN_THREADS * case.vector
    sums = Tiling(
        case.cols, vector, SEGMENT_THREADS, SEGMENT_THREADS, SEGMENT // SEGMENT_THREADS // vector, segments, SEGMENT
    )
    columns = Tiling(case.cols, vector, COLUMN_THREADS, COLUMN_THREADS, 1, math.ceil(case.cols / strip), strip)
    first = "A block sums up one segment of a row. Another kernel finishes, once all segments are summed up."
    last = "A second kernel reads both again, each thread one vector of every row that is its block's."
    return [
        Pass("segment_sums_kernel", "load", ("x", "dy"), "memory", sums, first),
        Pass("columns_kernel", "apply", ("x", "dy"), "memory", columns, last),
        Pass("columns_kernel", "store", ("dx",), "memory", columns, "Each thread writes dx of its columns."),
    ]
