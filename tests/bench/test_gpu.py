"""What `bench gpu` measures, but for the clock, which needs the hardware: its cells, programs and timing."""

from types import SimpleNamespace

import jax
import pytest

from bench import gpu, norms, ops, others, programs, report, shapes, timing
from bench.__main__ import parse


def test_the_gpu_command_selects_cells():
    args = parse(["gpu", "--suites", "grid", "small", "--dtypes=bfloat16", "--ops=rms", "--cols", "256", "4096"])
    assert [(cell.suite, cell.kind, cell.dtype, cell.shape.rows, cell.shape.cols) for cell in gpu.cells(args)] == [
        ("grid", "rms", "bfloat16", 524_288, 256),
        ("grid", "rms", "bfloat16", 32_768, 4096),
        ("small", "rms", "bfloat16", 1, 4096),
        ("small", "rms", "bfloat16", 32, 4096),
    ]


def test_norms_with_a_residual_have_shapes_of_residual_streams():
    args = parse(["gpu", "--suites", "models", "--dtypes=float32", "--ops", "add_rms"])
    names = {cell.shape.name for cell in gpu.cells(args)}
    assert {"llama3 8B", "ViT-L/16"} <= names <= {shape.name for shape in shapes.MODELS if "qk" not in shape.name}


def test_variants_of_quantised_norms_have_a_suite_of_their_own():
    args = parse(["gpu", "--ops", "rms_quantized", "--dtypes", "float32", "bfloat16"])
    found = [(cell.suite, cell.kind, cell.dtype) for cell in gpu.cells(args)]
    per_dtype = len(shapes.GRID_COLS) + len(shapes.DECODE) + len(shapes.LARGE_ODD)
    assert found.count(("grid", "rms_quantized", "float32")) == len(shapes.GRID_COLS)
    assert found.count(("variants", "rms_quantized, int8", "bfloat16")) == 2
    assert len(found) == 2 * per_dtype + 2 * len(norms.QUANTIZATIONS)


def test_the_gated_norm_has_shapes_of_its_models():
    args = parse(["gpu", "--ops", "gated", "--dtypes", "bfloat16", "--suites", "grid", "models"])
    found = [(cell.kind, cell.shape.rows, cell.shape.cols) for cell in gpu.cells(args)]
    assert {(norms.GATED, 4096, 5120), (norms.GROUPED, 4096, 8192), (norms.GATE_LAST, 262_144, 128)} <= set(found)
    assert max(cols for *_, cols in found) == 16_384  # the longest row of a kernel


def test_norms_with_a_scale_a_head_have_a_million_rows():
    found = gpu.cells(parse(["gpu", "--ops", "heads", "--dtypes", "bfloat16"]))
    assert (found[0].kind, found[0].shape.rows, found[0].shape.cols) == (norms.HEADS, 2**20, 128)
    assert all(cell.shape.rows % shapes.HEADS == 0 for cell in found)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_cell_of_every_suite_is_cold_or_small(dtype):
    for suite, table in shapes.suites(4).items():
        for shape in table:
            cell = gpu.Cell(suite, "rms", dtype, shape)
            between = (cell.sets - 1) * 2 * cell.nbytes  # what other sets read and write between two uses of one
            assert (cell.sets == 1) if suite == "small" else max(between, cell.nbytes) >= timing.COLD_BYTES


@pytest.mark.parametrize(
    ("inputs", "call", "sets"),
    [(256 << 20, 512 << 20, 1), (128_000_000, 256_000_000, 1), (64_000_000, 128_000_000, 2), (1000, 2000, 64_001)],
)
def test_sets_that_take_turns(inputs, call, sets):
    assert timing.sets_needed(inputs, call) == sets


def test_a_program_takes_its_arguments_in_turn():
    calls = timing.InTurn(lambda x, y: (x, y), [(1, 2), (3, 4)])
    assert isinstance(calls, jax.stages.Wrapped)  # else JAX's helper would jit it
    assert [calls() for _ in range(3)] == [(1, 2), (3, 4), (1, 2)]


def test_a_program_that_carries_takes_what_its_last_call_on_that_set_gave():
    calls = timing.InTurn(lambda total, x: (total + x, x), [(0, 1), (0, 10)], carries=True)
    assert [calls() for _ in range(5)] == [1, 10, 1, 10, 1]
    assert calls.sets == [(3, 1), (20, 10)]


def test_a_call_is_the_sum_of_its_kernels():
    records = [[("first", 1.0), ("second", 0.5)], [("first", 9.0), ("second", 9.0)], [("first", 2.0), ("second", 0.5)]]
    assert timing.median_call(records) == (2.5e-3, ["first", "second"])


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
    assert time == (21e-3, ["a", "b"])


def measure_cell(kind, monkeypatch, kernels=("jaxnorm",), dtype="float16", dims=(9, 300), default=False):
    """Rows, failures and how many sets each program had: all but CUPTI, on this platform."""
    used, failed = [], []

    def run(program, sets, iterations, carries=False):
        used.append(len(sets))
        calls = timing.InTurn(program, sets, carries)
        jax.block_until_ready([calls() for _ in range(2 * len(sets))])
        return timing.Time(1e-3 * len(used), list(kernels))

    monkeypatch.setattr(gpu, "device_time", run)
    monkeypatch.setattr(timing, "COLD_BYTES", 20_000)
    cell = gpu.Cell("models", kind, dtype, shapes.Shape("any", dims))
    rows = gpu.measure_cell(cell, SimpleNamespace(iterations=2, default=default, kernels=False), failed)
    return rows, failed, used


DIMS = {norms.GROUPED: (9, 2 * norms.GROUP), norms.HEADS: (shapes.HEADS, 64), "group_norm": (2, 3, 4, 64)}
DIMS |= dict.fromkeys(("qk_norm_rotary", "qkv_norm_rotary"), (2, 3, 12, 16))
DIMS |= {kind: (9, 384) for kind in ops.KINDS if "quantized" in kind}


# One of each kind of operands and directions; the checks of all kinds have tests of their own.
EACH = ("layer", "add_rms", norms.PADDED, norms.GROUPED, norms.HEADS, "rms_quantized", "rms_quantized, with a residual")
EACH += ("rms_quantized, static scale", others.CACHED, "cross_entropy", "qkv_norm_rotary", "float8_linear, kernel")


@pytest.mark.kernels
@pytest.mark.parametrize("kind", EACH)
def test_a_cell_is_measured_with_every_set(kind, monkeypatch):
    rows, failed, used = measure_cell(kind, monkeypatch, dims=DIMS.get(kind, (9, 300)), dtype="bfloat16")
    ways = ["forward"] if ops.KINDS[kind].is_rounded else ["forward", "backward", "step"]
    assert [row["op"] for row in rows] == [report.op_name(kind, way) for way in ways]
    assert len(used) == 1 + 2 * len(ways)  # the copy, and each package's directions
    assert len(set(used)) == 1
    assert all(row["error / tolerance"] < 1 and row["x XLA"] > 1 for row in rows)
    assert failed == []


@pytest.mark.parametrize("op", ops.OPS)
def test_every_op_has_cells_of_its_own(op):
    found = gpu.cells(parse(["gpu", "--ops", op, "--dtypes", "bfloat16"]))
    assert found
    assert len({cell[1:] for cell in found}) == len(found)
    assert {cell.kind for cell in found} <= set(ops.KINDS)


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
        ("float8_linear, rows", (9, 300), {"forward": 3}),
        ("float8_linear, kernel", (9, 300), {"forward": 4}),
        ("float8_linear, gradient", (9, 300), {"forward": 6}),
        ("float8_linear, bytes", (9, 300), {"forward": 4}),
    ],
)
def test_the_bytes_of_an_element(kind, dims, moved):
    shape = shapes.Shape("any", dims)
    found = ops.KINDS[kind].moved(shape, 2)
    assert {way: nbytes / (shape.rows * shape.cols) for way, nbytes in found.items()} == pytest.approx(moved)


def test_rates_count_every_array_once(monkeypatch):
    monkeypatch.setattr(gpu.jax, "devices", lambda: [SimpleNamespace(device_kind="NVIDIA H200")])
    cell = gpu.Cell("grid", "add_rms", "bfloat16", shapes.Shape("grid 1024", (131_072, 1024)))
    times = {("jaxnorm", way): timing.Time(1e-3, []) for way in ("forward", "backward", "step")}
    rates = {way: gpu.row(cell, way, times, dict.fromkeys(times, 0), 1e12, 0.1)["GB/s"] for _, way in times}
    assert rates == pytest.approx({way: n * 2**28 / 1e6 for way, n in {"forward": 4, "backward": 4, "step": 8}.items()})


@pytest.mark.kernels
def test_no_kernel_of_xlas_is_counted_as_jaxnorms(monkeypatch):
    rows, failed, _ = measure_cell("add_rms", monkeypatch, kernels=("jaxnorm", "wrapped_copy"))
    assert rows == []
    assert len(failed) == 3
    assert "jaxnorm forward: RuntimeError: XLA runs kernels of its own: wrapped_copy" in failed


@pytest.mark.kernels
def test_by_default_kernels_of_xlas_are_counted(monkeypatch):
    rows, failed, _ = measure_cell("rms", monkeypatch, kernels=("jaxnorm", "wrapped_copy"), default=True)
    assert (len(rows), failed) == (3, [])


PURE = [kind for kind, op in ops.KINDS.items() if op.is_pure and (op.carries or kind.startswith("gated"))]


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", PURE)
def test_no_program_of_jaxnorm_copies_an_array(kind, dtype):
    op, shape = ops.KINDS[kind], shapes.Shape("any", DIMS.get(kind, (9, 300)))
    for program in programs.programs(op, "native", *op.operands(shape, dtype, 0)).values():
        text = program.function.lower(*program.arguments).compile().as_text()
        assert gpu.copies(text, shape) == []


@pytest.mark.kernels
@pytest.mark.parametrize("kind", norms.ADDED)
def test_a_residual_that_is_not_donated_is_copied(kind):
    op, shape = ops.KINDS[kind], shapes.Shape("any", (9, 300))
    x, weights, _ = op.operands(shape, "float32", 0)
    text = programs.functions(op, "native")["forward"].lower(x, weights).compile().as_text()
    assert gpu.copies(text, shape) != []


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("  %copy.1 = bf16[9,300]{1,0} copy(%p.1), metadata={}", 1),
        ("  ROOT %c = (f32[9,300]{1,0}, f32[9,300]{1,0}, u32[]) copy-start(f32[9,300]{1,0} %p)", 1),
        ("  %copy.2 = f32[300]{0} copy(%p.2)", 0),
        ("  %add.1 = f32[9,300]{1,0} add(%copy.2, %p.3)", 0),
    ],
)
def test_copies_in_a_programs_text(line, count):
    assert len(gpu.copies(f"HloModule m\n{line}\n", shapes.Shape("any", (9, 300)))) == count
