"""The benchmarks of single ops but for the clock and the hardware."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import cpu, gpu, norms, ops, others, programs, report, shapes, timing
from bench.__main__ import parse

# Shapes of few rows, of kinds that do not take any.
FEW = {norms.HEADS: (2, shapes.HEADS, 32), norms.GROUPED: (40, 2 * norms.GROUP), norms.PADDED: (40, 200)}
FEW |= dict.fromkeys(("qk_norm_rotary", "qkv_norm_rotary"), (2, 5, 12, 16)) | {"group_norm": (2, 3, 4, 64)}


def any_shape(*dims):
    return shapes.Shape("any", dims)


def cells(command, *options):
    return {"gpu": gpu, "cpu": cpu}[command].cells(parse([command, *options]))


def check(kind, dtype, spoil=lambda i, leaf: leaf):
    """`spoil` changes the result of that number."""

    def spoilt(results):
        leaves, tree = jax.tree.flatten(results)
        return tree.unflatten(map(spoil, range(len(leaves)), leaves))

    return programs.check(ops.KINDS[kind], any_shape(*FEW.get(kind, (40, 256))), dtype, "native", spoilt)


@pytest.mark.needs("kernels")
@pytest.mark.parametrize("kind", ops.KINDS)
def test_the_check_passes_what_is_right(kind):
    assert check(kind, "bfloat16") < 1


def slightly_wrong(leaf):
    """Eight bits: the value before each, in magnitude if it is a float8."""
    if leaf.dtype.itemsize > 1:
        return leaf * (1.01 if leaf.dtype == jnp.bfloat16 else 1.00001)
    return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(leaf, jnp.int8) - 1, leaf.dtype)


@pytest.mark.parametrize("kind", ops.KINDS)
def test_the_check_sees_what_is_wrong(kind):
    seen = []
    assert check(kind, "float32", lambda i, leaf: seen.append(i) or leaf) < 1
    for wrong in seen:
        assert not check(kind, "float32", lambda i, a, wrong=wrong: slightly_wrong(a) if i == wrong else a) <= 1


def two_away(i, leaf):
    if leaf.dtype.itemsize > 1:
        return leaf
    codes = jax.lax.bitcast_convert_type(leaf, jnp.int8)
    return jax.lax.bitcast_convert_type(codes.at[3, 5].add(jnp.where(codes[3, 5] > 0, -2, 2)), leaf.dtype)


# What is no zero behind a row, and one value of eight bits that is no neighbour.
@pytest.mark.parametrize(
    ("kind", "spoil"),
    [
        (norms.PADDED, lambda i, y: y if i else y.at[30, -1].add(0.001)),
        ("rms_quantized", two_away),
        ("rms_quantized, int8", two_away),
    ],
)
def test_the_check_sees_one_value(kind, spoil):
    assert check(kind, "float32", spoil) > 1


def test_what_cancels_in_float32_may_be_no_neighbour():
    expected = jnp.array([57344.0, 0.0117, 1.0], jnp.float8_e5m2)
    codes = jax.lax.bitcast_convert_type(expected, jnp.int8)
    for steps, apart in (((0, 13, 0), 0), ((0, 0, 13), 13), ((2, 0, 0), 2)):
        moved = jax.lax.bitcast_convert_type(codes - jnp.array(steps, jnp.int8), jnp.float8_e5m2)
        assert programs.steps_apart(moved, expected) == apart
    for dtype in (jnp.int8, jnp.float8_e4m3fn):  # and no other zero
        assert programs.steps_apart(jnp.array([100, 2], dtype), jnp.array([100, 0], dtype)) >= 2


def test_the_commands_select_cells():
    found = cells("gpu", "--suites", "grid", "small", "--dtypes=bfloat16", "--ops=rms", "--cols", "256", "4096")
    expected = [("grid", 524_288, 256), ("grid", 32_768, 4096), ("small", 1, 4096), ("small", 32, 4096)]
    assert [(cell.suite, cell.shape.rows, cell.shape.cols) for cell in found] == expected
    found = cells("cpu", "--dtypes=float32", "--ops", "softmax", "log_softmax", "--cols", "4096", "256")
    softmax, log_softmax = ([(kind, 256), (kind, 4096)] for kind in ("softmax", "log_softmax"))
    assert [(kind, shape.cols) for kind, _, shape in found] == [*softmax, (others.CAUSAL, 4096), *log_softmax]
    # Of a grid one length runs in a chain.
    assert [len(cpu.manners(ops.KINDS[kind], shape)) for kind, _, shape in found] == [1, 2, 2, 1, 2]
    found = cells("cpu", "--dtypes=float32", "--ops", "segment_sum")
    assert [kind for kind, *_ in found] == ["segment_sum, sorted", "segment_sum, unsorted"]


@pytest.mark.parametrize("op", ops.OPS)
def test_every_op_has_cells_of_its_own(op):
    found = cells("gpu", "--ops", op, "--dtypes", "bfloat16")
    assert found
    assert len({cell[1:] for cell in found}) == len(found)
    assert {cell.kind for cell in found} <= set(ops.KINDS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_cell_is_cold_or_small(dtype):
    for cell in cells("gpu", "--ops", "rms", "--dtypes", dtype):
        between = (cell.sets - 1) * 2 * cell.nbytes  # what other sets read and write between two uses of one
        assert (cell.sets == 1) if cell.suite == "small" else max(between, cell.nbytes) >= timing.COLD_BYTES
    sizes = [(256 << 20, 512 << 20), (128_000_000, 256_000_000), (64_000_000, 128_000_000), (1000, 2000)]
    assert [timing.sets_needed(*pair) for pair in sizes] == [1, 1, 2, 64_001]


def test_a_program_takes_its_arguments_in_turn():
    calls = timing.InTurn(lambda x, y: (x, y), [(1, 2), (3, 4)])
    assert isinstance(calls, jax.stages.Wrapped)  # else JAX's helper would jit it
    assert [calls() for _ in range(3)] == [(1, 2), (3, 4), (1, 2)]
    # One that carries takes what its last call on that set gave.
    calls = timing.InTurn(lambda total, x: (total + x, x), [(0, 1), (0, 10)], carries=True)
    assert ([calls() for _ in range(5)], calls.sets) == ([1, 10, 1, 10, 1], [(3, 1), (20, 10)])


def test_jax_times_the_calls_in_turn(monkeypatch):
    """With JAX's own helper, and a record of two kernels for each of its calls but the first."""
    calls = []
    record = SimpleNamespace(
        _cupti_init=calls.clear,
        _cupti_get_timings=lambda finalize: [(name, ms) for x in calls for name, ms in (("a", 10.0 * x), ("b", 1.0))],
    )
    monkeypatch.setattr(timing.profiler, "mosaic_gpu_lib", SimpleNamespace(_mosaic_gpu_ext=record))
    time = timing.device_time(calls.append, [(1,), (2,), (3,)], iterations=5)
    assert calls == [2, 3, 1, 2, 3]
    assert time == (21e-3, ["a", "b"], (20e-3, 1e-3))  # the median of sums of kernels


# One of each kind of operands and directions; the checks of all kinds have tests of their own.
EACH = ("layer", "add_rms", norms.PADDED, norms.GROUPED, norms.HEADS, "rms_quantized", "rms_quantized, with a residual")
EACH += ("rms_quantized, static scale", others.CACHED, "cross_entropy", "qkv_norm_rotary", "float8_linear, kernel")
EACH += ("embedding, one id", "segment_sum, unsorted")


def measure_cell(kind, monkeypatch, kernels=("jaxnorm",), default=False):
    """Rows, failures and how many sets each program had: all but CUPTI, on this platform."""
    used, failed = [], []

    def run(program, sets, iterations, carries=False):
        used.append(len(sets))
        calls = timing.InTurn(program, sets, carries)
        jax.block_until_ready([calls() for _ in range(2 * len(sets))])
        return timing.Time(1e-3 * len(used), list(kernels), tuple(1e-6 * (1 + i) for i in range(len(kernels))))

    monkeypatch.setattr(gpu, "device_time", run)
    monkeypatch.setattr(timing, "COLD_BYTES", 20_000)
    cell = gpu.Cell("models", kind, "bfloat16", any_shape(*FEW.get(kind, (9, 384))))
    return gpu.measure_cell(cell, SimpleNamespace(iterations=2, default=default, cudnn=False), failed), failed, used


@pytest.mark.needs("kernels")
@pytest.mark.parametrize("kind", EACH)
def test_a_cell_is_measured_with_every_set(kind, monkeypatch):
    rows, failed, used = measure_cell(kind, monkeypatch)
    ways, is_filled = list(ops.KINDS[kind].moved(any_shape(8, 8, 8), 2)), kind.startswith("embedding")
    assert [row["op"] for row in rows] == [report.op_name(kind, way) for way in ways]
    assert len(used) == 1 + 2 * len(ways) + is_filled  # the copy, each package's directions, and a fill
    assert len(set(used)) == 1
    assert all(row["error / tolerance"] < 1 and row["x XLA"] > 1 for row in rows)
    assert failed == []


@pytest.mark.needs("kernels")
def test_no_kernel_of_xlas_is_counted_as_jaxnorms_but_by_default(monkeypatch):
    kernels = ("jaxnorm", "wrapped_copy")
    rows, failed, _ = measure_cell("add_rms", monkeypatch, kernels)
    assert (rows, len(failed)) == ([], 3)
    assert "jaxnorm forward: RuntimeError: XLA runs kernels of its own: wrapped_copy" in failed
    rows, failed, _ = measure_cell("rms", monkeypatch, kernels, default=True)
    assert (len(rows), failed) == (3, [])


@pytest.mark.needs("kernels")
def test_what_orders_rows_is_told_apart(monkeypatch):
    ((row,), _, _) = measure_cell("embedding, uniform ids", monkeypatch, ("sort", "jaxnorm", "input_scatter"))
    assert (row["order us"], row["fill us"]) == pytest.approx((1 + 3, 4e3))
    ((row,), _, _) = measure_cell("segment_sum, sorted", monkeypatch)
    assert (row["order us"], row["fill us"]) == (0, None)


@pytest.mark.parametrize(
    ("kind", "dims", "moved"),
    [
        ("rms_quantized", (9, 300), {"forward": 2 + 1}),
        ("layer_quantized, with a residual", (9, 300), {"forward": 3 * 2 + 1}),
        (norms.PADDED, (9, 200), {"forward": 8 + 2 * 56 / 200, "backward": 8, "step": 16 + 2 * 56 / 200}),
        (others.CAUSAL, (8, 8), {"forward": 3, "backward": 4, "step": 7}),
        (others.CACHED, (2, 4), {"forward": 2 * (1 + 7 / 8), "backward": 2 * (1 + 14 / 8), "step": 2 * (2 + 21 / 8)}),
        ("softmax, window 1024", (2, 4), {"forward": 3.75, "backward": 5.5, "step": 9.25}),
        ("cross_entropy", (9, 300), {"forward": 2, "backward": 4, "step": 6}),
        # By queries and keys, with values beside: twice as much is half as much again, and dv is read once.
        ("qkv_norm_rotary", (1, 1, 16, 4), {"forward": 6, "backward": 8, "step": 14}),
        ("gated_activation", (9, 300), {"forward": 6, "backward": 10, "step": 16}),
        ("gated_activation_quantized", (9, 300), {"forward": 5}),
        ("quantize, groups of 128", (9, 384), {"forward": 3}),
        ("float8_linear, rows", (9, 300), {"forward": 3}),
        ("float8_linear, kernel", (9, 300), {"forward": 3}),
        ("float8_linear, gradient", (9, 300), {"forward": 6}),
        ("embedding, one id", (4096, 300), {"backward": 2 + 2 * 2}),  # two rows for each of the table's
        ("segment_sum, sorted", (64, 300), {"forward": 2 + 2 / 16}),
    ],
)
def test_the_bytes_of_an_element(kind, dims, moved):
    shape = any_shape(*dims)
    found = ops.KINDS[kind].moved(shape, 2)
    assert {way: nbytes / (shape.rows * shape.cols) for way, nbytes in found.items()} == pytest.approx(moved)


def test_rates_count_every_array_once():
    cell = gpu.Cell("grid", "add_rms", "bfloat16", any_shape(131_072, 1024))
    for way, arrays in (("forward", 4), ("backward", 4), ("step", 8)):
        row = gpu.row(cell, way, {("jaxnorm", way): timing.Time(1e-3, [])}, {("jaxnorm", way): 0}, 1e12, 0.1)
        assert (row["GB/s"], row["% of copy"]) == pytest.approx((arrays * 2**28 / 1e6, arrays * 2**28 / 1e7))


PURE = [kind for kind, op in ops.KINDS.items() if op.is_pure and (op.carries or kind.startswith("gated"))]


@pytest.mark.needs("kernels")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", PURE)
def test_no_program_of_jaxnorm_copies_an_array(kind, dtype):
    op, shape = ops.KINDS[kind], any_shape(*FEW.get(kind, (9, 384)))
    operands = op.operands(shape, dtype, 0)
    for program in programs.programs(op, "native", *operands).values():
        assert gpu.copies(program.function.lower(*program.arguments).compile().as_text(), shape) == []
    if kind in norms.ADDED:  # a residual that is not donated is copied
        undonated = programs.functions(op, "native")["forward"].lower(*operands[:2])
        assert gpu.copies(undonated.compile().as_text(), shape) != []


def result_of(program):
    """What a program gives; the arguments live on."""
    return program.function(*jax.tree.map(jnp.copy, program.arguments))


# Of each kind: the directions alone, and in a chain.
KINDS = {"layer": (3, 3), "add_rms": (3, 3), norms.GATE_LAST: (3, 3), norms.HEADS: (3, 3), "rms_quantized": (1, 0)}
KINDS |= {"layer_quantized, with a residual": (1, 0), others.CAUSAL: (3, 3), "cross_entropy": (3, 0)}
KINDS |= {"segment_sum, unsorted": (1, 0)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_cell_has_each_direction_alone_and_in_a_chain(kind, monkeypatch):
    compared = []

    def compare(programs, turns):
        compared.append(programs)
        return [1.0, 3.0, 2.0]

    monkeypatch.setattr(cpu, "compare", compare)
    monkeypatch.setattr(cpu, "LINKS", 2)
    few = shapes.Shape("few", (2 * shapes.HEADS, 128))
    rows = list(cpu.measure_cell(kind, "float32", few, 1, None))
    alone, linked = ([row for row in rows if row["op"].endswith("in a chain") == chained] for chained in (False, True))
    assert (len(alone), len(linked)) == KINDS[kind]
    moved = ops.KINDS[kind].moved(few, 4)["forward"]
    assert (alone[0]["x XLA"], alone[0]["GB/s"]) == (3, pytest.approx(moved / 1e9))
    assert all(row["error / tolerance"] < 1 for row in rows)
    # jaxnorm and XLA compute the same from the same.
    for ours, theirs, _ in compared:
        assert ours.carries == theirs.carries
        for a, b in zip(*(jax.tree.leaves(result_of(program)) for program in (ours, theirs)), strict=True):
            a, b = np.float64(a), np.float64(b)
            assert np.linalg.norm(a - b) < 1e-3 * np.linalg.norm(b)
