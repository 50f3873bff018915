"""What a plan launches: blocks, threads, registers, shared memory, bytes on their way, and bytes moved.

A test holds blocks, threads and shared memory to what the kernels launch.
"""

import math
from typing import Any

from jaxnorm.inspect.plan_page.tiling import COLUMN_THREADS, SEGMENT, SEGMENT_THREADS, VECTOR_BYTES, WARP, Case, held

KIB = 1 << 10
# An H100's or H200's, for which numbers of blocks are chosen; what a block may have, and what its kernel declares.
MULTIPROCESSORS, SHARED_BYTES, OWN_BYTES = 132, 227 * KIB, 4 * KIB
REGISTERS, THREADS, BLOCKS = 64 * KIB, 2048, 32  # of a multiprocessor
IN_FLIGHT = 64 * KIB  # that pipelines ask for
NEEDED = (32 * KIB, 64 * KIB)  # bytes on their way that a multiprocessor needs: docs/findings.md
MAX_STAGES = 64  # of all pipelines of a block
LONG_PLACES = 13  # vectors of x and of dy that a thread of long rows has room for
RESULT_SUMS = 16 * 4  # bytes of a thread, for the sums that thread groups of a block add up
SMALL_BATCH = (512, 1 << 21)  # the most rows, and elements, of the backward's kernel for few


def pipeline(case: Case) -> tuple[int, int, int]:
    """Stages, bytes of a stage, and rows that are held, of the pipelines of a block. `RowsLaunch::with_pipelines`."""
    size, threads = case.dtype.itemsize, case.block_threads
    arrays = 1 if case.way == "forward" else 2
    rows = max(1, WARP // threads)
    pipelines = case.groups // rows
    span = held(case, case.vector).span
    of_array = ((rows - 1) * case.cols + min(case.cols, span)) * size + (0 if case.cols * size % 16 == 0 else 32)
    stage = arrays * pipelines * math.ceil(of_array / 128) * 128
    kept = _rows_held(case)
    wanted = max(3 if case.plan["blocks_per_row"] > 2 else 2, kept + math.ceil(IN_FLIGHT / stage))
    return min(wanted, (SHARED_BYTES - OWN_BYTES) // stage, MAX_STAGES // pipelines), stage, kept


def _rows_held(case: Case) -> int:
    """Rows that a pipeline has beside those that come: where dx waits for the next row's sums, two."""
    if case.way == "forward":
        return 2
    one_sum_of_vectors = case.block_threads > WARP and case.kind == "rms" and case.is_divided
    return 2 if case.dtype.itemsize == 2 and (case.plan["blocks_per_row"] > 1 or one_sum_of_vectors) else 1


def kernels(case: Case, partial_rows: int) -> list[dict[str, Any]]:
    """The launches of a call, in their order, but for the sum of partial rows.

    `partial_rows`: how many of them the backward has room for.
    """
    blocks, threads = int(case.plan["blocks_per_row"]), case.block_threads * case.groups
    shared, registers = 0, int(case.plan["registers"])
    if case.way == "forward":
        grid = math.ceil(case.rows / case.plan["rows_per_block"]) * blocks
        if blocks > 1 and not case.is_streamed:
            stages, stage, _ = pipeline(case)
            grid = min(case.rows, MULTIPROCESSORS // blocks) * blocks
            return [_kernel("row_kernel", grid, threads, blocks, registers, stages * stage, is_most=True)]
        if case.kind == "layer" and case.is_divided and not case.is_streamed and threads > WARP and case.groups == 1:
            vectors = int(case.plan["elements_per_thread"]) // case.vector
            # The scale waits there, and a bias, for which there is room in any case.
            shared = 2 * threads * vectors * VECTOR_BYTES if vectors == 4 else 0
        return [_kernel("row_kernel", grid, threads, blocks, registers, shared)]
    if case.is_streamed:
        return _segment_kernels(case, min(partial_rows, case.rows))
    grid = min(partial_rows, math.ceil(case.rows / case.groups)) * blocks
    if case.is_long:
        return [_kernel("long_rows_kernel", grid, threads, blocks, registers, threads * LONG_PLACES * 2 * VECTOR_BYTES)]
    if case.has_pipeline:
        stages, stage, _ = pipeline(case)
        shared = stages * stage
    sums = threads * RESULT_SUMS if case.groups > 1 else 0
    return [_kernel("grad_kernel", grid, threads, blocks, registers, max(shared, sums))]


def _segment_kernels(case: Case, partial_rows: int) -> list[dict[str, Any]]:
    if case.is_divided:  # so many run at once
        most = 2 * MULTIPROCESSORS * COLUMN_THREADS * case.vector // case.cols
        partial_rows = min(partial_rows, max(4, min(64, most)))
    segments, strips = math.ceil(case.cols / SEGMENT), math.ceil(case.cols / (COLUMN_THREADS * case.vector))
    registers = int(case.plan["registers"])
    return [
        _kernel("segment_sums_kernel", case.rows * segments, SEGMENT_THREADS, 1, None, 0),
        _kernel("columns_kernel", strips * partial_rows, COLUMN_THREADS, 1, registers, 0),
    ]


def _kernel(
    name: str, grid: int, threads: int, cluster: int, registers: int | None, shared: int, *, is_most: bool = False
) -> dict[str, Any]:
    """`grid`: blocks; with `is_most` at most, as many as the GPU runs at once."""
    return {
        "name": name,
        "blocks": grid,
        "is_most": is_most,
        "threads": threads,
        "cluster": cluster,
        "registers": registers,
        "shared": shared,
    }


def in_flight(case: Case, kernel: dict[str, Any]) -> int | None:
    """Bytes on their way to a multiprocessor at once; None where that is the compiler's choice."""
    registers, threads = kernel["registers"] or 255, kernel["threads"]
    blocks = min(BLOCKS, THREADS // threads, REGISTERS // (registers * threads))
    if kernel["shared"]:
        blocks = max(1, min(blocks, (SHARED_BYTES + KIB) // (kernel["shared"] + KIB)))
    if case.is_streamed or case.is_long:
        return None
    if case.has_pipeline:
        stages, stage, kept = pipeline(case)
        return int(blocks * max(1, stages - kept) * stage)
    rows = int(case.plan["rows_per_block"])
    arrays = 1 if case.way == "forward" else 2
    return int(blocks * rows * case.cols * case.dtype.itemsize * arrays)


def traffic(case: Case, partial_rows: int) -> list[dict[str, Any]]:
    """What is read and written of each array: bytes, and how many times."""
    size, rows = case.dtype.itemsize, case.rows
    whole, weight, statistic = rows * case.cols * size, case.cols * size, rows * 4 * (1 + (case.kind == "layer"))
    again = "no thread has the row at hand"
    if case.way == "forward":
        reads = (3 if case.kind == "layer" else 2) if case.is_streamed else 1
        return [
            _moved("x", "read", whole, reads, again if reads > 1 else ""),
            _moved("scale", "read", weight),
            _moved("y", "written", whole),
            _moved("statistics", "written", statistic),
        ]
    reads = 2 if case.is_streamed else 1
    again = "by the second kernel again; of the rows that came last the cache still has some"
    used = kernels(case, partial_rows)[-1]["blocks"]
    per_row = int(case.plan["blocks_per_row"])
    used //= math.ceil(case.cols / (COLUMN_THREADS * case.vector)) if case.is_streamed else per_row
    weights = 1 + (case.kind == "layer")
    sums = used * weights * case.cols * 4
    return [
        _moved("x", "read", whole, reads, again if reads > 1 else ""),
        _moved("dy", "read", whole, reads, again if reads > 1 else ""),
        _moved("statistics", "read", statistic),
        _moved("scale", "read", weight),
        _moved("dx", "written", whole),
        _moved("partial rows", "written and read", 2 * sums, 1, "one of each block or cluster, summed in order", 0),
        _moved("dscale" + (" and dbias" if weights > 1 else ""), "written", weights * weight),
    ]


def _moved(array: str, how: str, size: int, times: int = 1, why: str = "", ideal: int = 1) -> dict[str, Any]:
    return {"array": array, "how": how, "bytes": size * times, "ideal": size * ideal, "times": times, "why": why}


def small_batch(case: Case) -> str | None:
    """What is said of few rows, which have a kernel of their own."""
    elements = case.rows * case.cols
    if case.way == "backward" and case.plan["blocks_per_row"] == 1 and not case.plan["segments"] and case.is_divided:
        rows, most = SMALL_BATCH
        if 0 < case.rows <= rows and elements <= most:
            return (
                f"With {case.rows} rows this is a small batch (up to {rows} rows and {most} elements): one kernel, "
                "whose blocks compute either dx of rows or dscale of columns. Its thread groups are those shown here, "
                "of the kernel for more rows, so a row keeps its bits."
            )
    vectors = int(case.plan["elements_per_thread"]) // case.vector
    is_block = case.plan["regime"] == "block per row" and case.is_divided
    if case.way == "forward" and is_block and 0 < case.rows * vectors <= MULTIPROCESSORS:
        return (
            f"With {case.rows} rows this is a small batch: there is a multiprocessor for each of the {vectors} vectors "
            "of a thread. A block sums up the whole row and finishes one vector of each thread. Its thread groups are "
            "those shown here, of the kernel for more rows, so a row keeps its bits."
        )
    return None
