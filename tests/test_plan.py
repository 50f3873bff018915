"""Launch plans of the CUDA kernels: pure functions of row length and dtype, tested without a GPU."""

import functools
import importlib
from itertools import product

import jax.numpy as jnp
import pytest
from cases import DTYPES, KINDS

from bench import shapes

pytestmark = pytest.mark.needs("plans")

REGIMES = ("rows per block", "block per row", "cluster per row", "segments", "looped")
OPS = ("forward", "backward")
# The largest cluster: of a GPU before sm_90, of any that has clusters, of a data centre's.
CLUSTERS = (1, 8, 16)
# Every length to beyond the first few boundaries, then those of models, and each power of two with its neighbours.
LENGTHS = sorted(
    {*range(1, 2100), *(shape.cols for shape in (*shapes.MODELS, *shapes.ODD, *shapes.grid(4)))}
    | {2**power + offset for power in range(11, 32) for offset in (-1, 0, 1)}
)


@pytest.fixture(scope="module")
def cuda():
    return importlib.import_module("jaxnorm._cuda")


@functools.cache
def plans(op, kind, dtype, max_cluster, *gate):
    """By row length."""
    cuda = importlib.import_module("jaxnorm._cuda")
    return {cols: cuda.plan(op, kind, dtype, cols, max_cluster, *gate) for cols in LENGTHS if not gate or cols <= 16384}


def is_covered(cols, plan):
    return plan["threads_per_row"] * plan["elements_per_thread"] >= cols


def is_what_its_name_says(plan, max_cluster):
    return {
        "rows per block": plan["rows_per_block"] > 1 and plan["blocks_per_row"] == 1,
        "block per row": plan["rows_per_block"] == plan["blocks_per_row"] == 1,
        "cluster per row": plan["rows_per_block"] == 1 < plan["blocks_per_row"] <= max_cluster,
        "segments": plan["elements_per_thread"] == 0 < plan["segments"],
        "looped": plan["elements_per_thread"] == plan["segments"] == 0,
    }[plan["regime"]]


@pytest.mark.parametrize(("op", "kind", "dtype", "max_cluster"), list(product(OPS, KINDS, DTYPES, CLUSTERS)))
def test_every_plan(op, kind, dtype, max_cluster):
    by_length = plans(op, kind, dtype, max_cluster)
    in_registers = {cols: plan for cols, plan in by_length.items() if plan["elements_per_thread"]}
    assert [cols for cols, plan in in_registers.items() if not is_covered(cols, plan)] == []
    assert [plan for plan in by_length.values() if not is_what_its_name_says(plan, max_cluster)] == []
    for plan in by_length.values():
        threads = plan["threads_per_row"] * plan["rows_per_block"] // plan["rows_per_team"] // plan["blocks_per_row"]
        assert threads in range(32, 1025, 32)  # a block of whole warps
    # Regimes come in the order of length; where vectors divide them, more rows of half types may share a block of the
    # backward.
    for divided in (True, False):
        lengths = [cols for cols in LENGTHS if (cols * jnp.dtype(dtype).itemsize % 16 == 0) == divided]
        regimes = [REGIMES.index(by_length[cols]["regime"]) for cols in lengths]
        assert regimes == sorted(regimes)
    # Of the comparison with other packages no length may fall into the slow regime on a recent GPU.
    assert max_cluster < 16 or "looped" not in {by_length[cols]["regime"] for cols in shapes.GRID_COLS}


def weight_floats(cuda, dtype, cols, *, count=1, inner=1):
    """How many rows of partial sums of each row of a weight the backward wants room for."""
    target = "jaxnorm_rms_norm_bwd"
    return cuda.workspace(target, dtype, cols, weights=1, count=count, inner=inner)[1] // (count * cols)


@pytest.mark.parametrize("dtype", DTYPES)
def test_there_are_partial_sums(cuda, dtype):
    assert all(0 < weight_floats(cuda, dtype, cols) <= 4096 for cols in LENGTHS)


# Numbers of weights that divide the rows of a block, that do not, and that exceed them and the blocks that run at once.
@pytest.mark.parametrize(("count", "inner"), list(product((2, 3, 7, 32, 40, 64, 100, 131, 1000), (1, 5))))
@pytest.mark.parametrize("dtype", DTYPES)
def test_per_head_weights_leave_no_more_partial_rows(cuda, dtype, count, inner):
    rows = {
        cols: (weight_floats(cuda, dtype, cols, count=count, inner=inner), weight_floats(cuda, dtype, cols))
        for cols in LENGTHS
        if cols <= 8192
    }
    assert [cols for cols, (per_head, plain) in rows.items() if not 0 < per_head <= plain] == []


# The shape of a workspace may not depend on the device, so it has to suit the plan of every device.
@pytest.mark.parametrize(("kind", "dtype", "max_cluster"), list(product(KINDS, DTYPES, CLUSTERS)))
def test_there_is_room_for_the_sums_of_all_segments(cuda, kind, dtype, max_cluster):
    segments = {cols: plan["segments"] for cols, plan in plans("backward", kind, dtype, max_cluster).items()}
    room = {cols: cuda.workspace(f"jaxnorm_{kind}_norm_bwd", dtype, cols, with_dx=True)[0] for cols in LENGTHS}
    assert [cols for cols in LENGTHS if segments[cols] > 0 and 2 * segments[cols] != room[cols]] == []


# Nor may the count of tickets, for rows that vectors divide and clusters draw.
@pytest.mark.parametrize(("kind", "dtype", "max_cluster"), list(product(KINDS, DTYPES, CLUSTERS)))
def test_there_is_room_to_count_tickets(cuda, kind, dtype, max_cluster):
    def is_dynamic(cols):
        vectors = cols * jnp.dtype(dtype).itemsize % 16 == 0 and (kind == "rms" or dtype == "float32")
        return vectors and plans("forward", kind, dtype, max_cluster)[cols]["regime"] == "cluster per row"

    dynamic = {cols for cols in LENGTHS if is_dynamic(cols)}

    def counted(target):
        return {cols for cols in LENGTHS if cuda.workspace(f"jaxnorm_{target}_fwd", dtype, cols) != (0, 0)}

    for target in (f"{kind}_norm", *(("softmax", "log_softmax") if kind == "rms" else ())):
        assert dynamic == counted(target) if max_cluster == 16 else dynamic <= counted(target)


# Kernels with gates have no other way.
@pytest.mark.parametrize(("dtype", "max_cluster", "op", "gate"), [*product(DTYPES, CLUSTERS, OPS, ("first", "last"))])
def test_rows_with_gates_have_a_block_or_a_cluster(dtype, max_cluster, op, gate):
    by_length = plans(op, "rms", dtype, max_cluster, gate)
    assert [cols for cols, plan in by_length.items() if not is_covered(cols, plan)] == []
    assert not any(plan["segments"] for plan in by_length.values())
    assert op == "backward" or all(plan["blocks_per_row"] == 1 for plan in by_length.values())


NO_PLAN = (
    *(("sideways", "rms", "float32", 8), ("forward", "group", "float32", 8), ("forward", "rms", "float64", 8)),
    *(("forward", "layer", "float32", 8, 16, "first"), ("forward", "rms", "float32", 8, 16, "middle")),
    ("backward", "rms", "float32", 20_000, 16, "last"),
)


@pytest.mark.parametrize("arguments", NO_PLAN)
def test_a_plan_for_what_has_no_kernel(cuda, arguments):
    with pytest.raises(ValueError, match=r"expected|neither|no kernel"):
        cuda.plan(*arguments)
