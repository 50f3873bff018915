"""What `bench gpu` measures, but for the clock, which needs the hardware: its cells, programs and timing."""

from types import SimpleNamespace

import jax
import pytest

from bench import gated, gpu, heads, ops, peers, programs, quantized, report, shapes, timing
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
    assert len(found) == 2 * per_dtype + 2 * len(quantized.VARIANTS)


def test_the_gated_norm_has_shapes_of_its_models():
    args = parse(["gpu", "--ops", "gated", "--dtypes", "bfloat16", "--suites", "grid", "models"])
    found = [(cell.kind, cell.shape.rows, cell.shape.cols) for cell in gpu.cells(args)]
    assert {(gated.PLAIN, 4096, 5120), (gated.GROUPED, 4096, 8192), (gated.LAST, 262_144, 128)} <= set(found)
    assert max(cols for *_, cols in found) == 16_384  # the longest row of a kernel


def test_norms_with_a_scale_a_head_have_a_million_rows():
    found = gpu.cells(parse(["gpu", "--ops", "heads", "--dtypes", "bfloat16"]))
    assert (found[0].kind, found[0].shape.rows, found[0].shape.cols) == (heads.KIND, 2**20, 128)
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


def measure_cell(kind, monkeypatch, kernels=("jaxnorm",), dtype="float16", cols=300, default=False):
    """Rows, failures and how many sets each program had: all but CUPTI, on this platform, and no peer works."""
    used, failed = [], []

    def run(program, sets, iterations, carries=False):
        used.append(len(sets))
        calls = timing.InTurn(program, sets, carries)
        jax.block_until_ready([calls() for _ in range(2 * len(sets))])
        return timing.Time(1e-3 * len(used), list(kernels))

    def fail(*args):
        raise RuntimeError("no such kernel\nand more")

    monkeypatch.setattr(gpu, "device_time", run)
    monkeypatch.setattr(peers, "calls", fail)
    monkeypatch.setattr(timing, "COLD_BYTES", 20_000)
    cell = gpu.Cell("models", kind, dtype, shapes.Shape("any", (9, cols)))
    args = SimpleNamespace(iterations=2, peers=["Liger"], default=default, kernels=False)
    rows = gpu.measure_cell(cell, args, failed)
    return rows, failed, used


@pytest.mark.kernels
@pytest.mark.parametrize("kind", programs.OPS)
def test_a_cell_is_measured_with_every_set(kind, monkeypatch):
    rows, failed, used = measure_cell(kind, monkeypatch)
    assert [row["op"] for row in rows] == [report.op_name(kind, way) for way in ("forward", "backward", "step")]
    assert used == [3] * 7  # the copy, and each package's three directions
    assert all(row["error / tolerance"] < 1 and row["x XLA"] > 1 for row in rows)
    # No peer adds a residual; one that fails is absent.
    assert failed == [] if kind in programs.ADDED_NORMS else ["Liger: RuntimeError: no such kernel"]


@pytest.mark.kernels
@pytest.mark.parametrize("variant", ["", *quantized.VARIANTS])
@pytest.mark.parametrize("op", quantized.NORMS)
def test_a_cell_of_quantised_norms_is_measured(op, variant, monkeypatch):
    kind, has_residual = f"{op}, {variant}".removesuffix(", "), "residual" in variant
    cols = 384 if "groups" in variant else 300
    rows, failed, used = measure_cell(kind, monkeypatch, cols=cols)
    name = op.replace("_", "_norm_") + f" forward, {variant}".removesuffix(", ")
    assert [row["op"] for row in rows] == [name]
    assert len(used) == 3  # the copy, and each package's forward
    assert rows[0]["error / tolerance"] < 1
    assert rows[0]["GB/s"] == pytest.approx(9 * cols * ((3 if has_residual else 1) * 2 + 1) / 2e-3 / 1e9)
    assert failed == []


@pytest.mark.kernels
@pytest.mark.parametrize("kind", gated.VARIANTS)
def test_a_cell_of_the_gated_norm_is_measured(kind, monkeypatch):
    cols = 2 * gated.GROUP if kind == gated.GROUPED else 300
    rows, failed, used = measure_cell(kind, monkeypatch, cols=cols)
    variant = kind.removeprefix("gated_rms")
    assert [row["op"] for row in rows] == [f"gated_rms_norm {way}{variant}" for way in gated.ELEMENTS]
    assert len(used) == 7  # the copy, and each package's three directions
    assert all(row["error / tolerance"] < 1 for row in rows)
    assert failed == []


def test_rates_count_every_array_once(monkeypatch):
    monkeypatch.setattr(gpu.jax, "devices", lambda: [SimpleNamespace(device_kind="NVIDIA H200")])
    cell = gpu.Cell("grid", "add_rms", "bfloat16", shapes.Shape("grid 1024", (131_072, 1024)))
    times = {("jaxnorm", way): timing.Time(1e-3, []) for way in ("forward", "backward", "step")}
    rates = {way: gpu.row(cell, way, times, 1e12, 0.1)["GB/s"] for _, way in times}
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
    assert (len(rows), failed) == (3, ["Liger: RuntimeError: no such kernel"])


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [*programs.ADDED_NORMS, *(f"{op}, with a residual" for op in quantized.NORMS)])
def test_no_program_of_jaxnorm_copies_an_array(kind, dtype):
    work, shape = ops.module_of(kind), shapes.Shape("any", (9, 300))
    for program in work.programs(kind, "native", *work.operands(kind, dtype, 9, 300)).values():
        text = program.function.lower(*program.arguments).compile().as_text()
        assert gpu.copies(text, shape) == []


@pytest.mark.kernels
@pytest.mark.parametrize("kind", gated.VARIANTS)
def test_no_program_of_the_gated_norm_copies_an_array(kind):
    shape = shapes.Shape("any", (9, 2 * gated.GROUP))
    for program in gated.programs(kind, "native", *gated.operands(kind, "bfloat16", *shape.dims)).values():
        text = program.function.lower(*program.arguments).compile().as_text()
        assert gpu.copies(text, shape) == []


@pytest.mark.kernels
@pytest.mark.parametrize("kind", programs.ADDED_NORMS)
def test_a_residual_that_is_not_donated_is_copied(kind):
    x, weights, _ = programs.operands(kind, "float32", 9, 300)
    text = programs.functions(kind, "native")["forward"].lower(x, weights).compile().as_text()
    assert gpu.copies(text, shapes.Shape("any", (9, 300))) != []


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
