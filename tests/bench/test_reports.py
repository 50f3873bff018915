"""The benchmarks' own arithmetic, their files and their command line; what they measure needs the hardware."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import bench
from bench import plot, recorded, report, shapes, show, tables, targets
from bench.__main__ import COMMANDS, parse
from tools import doc_results

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench/results"
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/benchmarks/*.md"))]
HEADER = {"gpu": "NVIDIA H200", "jax": "0.0", "commit": "abc", "date": "2000-01-01", "command": "python -m bench gpu"}
INT8 = "rms_norm_quantized forward, int8"


def result(op="rms_norm forward", dtype="float32", shape="grid 256", rows=4, cols=256, **changes):
    """One row as `python -m bench gpu` writes it, which misses nothing."""
    row = {"op": op, "dtype": dtype, "shape": shape, "M": rows, "N": cols, "us": 2.0, "GB/s": 4200.0}
    row |= {"% of copy": 98.0, "copy GB/s": 4250.0, "XLA us": 4.0, "x XLA": 2.0}
    return row | {"best peer": "quack (recorded)", "x best peer": 1.01, "error / tolerance": 0.1} | changes


def shape(rows, cols):
    return shapes.Shape("any", (rows, cols))


@pytest.fixture
def results(tmp_path):
    """A results folder with a small run of two lengths, both directions, and a small shape."""
    grid = [
        result(op, dtype, f"grid {cols}", cols=cols, **{"GB/s": 4000.0 + cols})
        for op in ("rms_norm forward", "layer_norm backward")
        for dtype in ("float32", "float16")
        for cols in (1024, 256)
    ]
    small = result(shape="decode 1", rows=1, cols=4096, **{"% of copy": None, "copy GB/s": None, "x best peer": 0.5})
    report.save(HEADER, [*grid, small], tmp_path / "h200", failed=["one"])
    return tmp_path


def test_the_clone_lies_behind_what_is_installed():
    places = [Path(entry).resolve() == bench.ROOT for entry in sys.path]
    assert places == sorted(places)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as exit_:
        parse([command, "--help"])
    assert exit_.value.code == 0
    assert f"python -m bench {command}" in capsys.readouterr().out


def test_help_imports_no_command():
    code = "import sys, bench.__main__ as main; sys.argv[1:] = ['--help']; main.main()"
    run = subprocess.run([sys.executable, "-X", "importtime", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0
    assert " jax\n" not in run.stderr
    assert all(command in run.stdout for command in COMMANDS)


def test_recorded_packages_are_compared_by_time():
    name, seconds = recorded.best("NVIDIA H200", "rms_norm backward", "float32", shape(8192, 8192))
    assert (name, seconds) == ("quack", pytest.approx(3 * 2**26 * 4 / 4038e9))
    assert recorded.best("NVIDIA H200", "rms_norm forward", "bfloat16", shape(1, 4096)) == (
        "Liger",
        pytest.approx(1.7e-6),
    )
    name, seconds = recorded.best("NVIDIA H200", "add_rms_norm forward", "bfloat16", shape(16_384, 8192))
    assert (name, seconds) == ("quack", pytest.approx(4 * 2**27 * 2 / 4047e9))
    # Only XLA is recorded, which every run measures.
    assert recorded.best("NVIDIA H200", "rms_norm_quantized forward", "bfloat16", shape(16_384, 8192)) is None
    assert recorded.seconds("rms_norm_quantized forward", "bfloat16", shape(16_384, 8192)) == {
        "XLA": pytest.approx(3 * 2**27 / 1583e9)
    }
    # Of two packages the faster one, whatever XLA does.
    assert recorded.best("NVIDIA H200", "rms_norm forward", "bfloat16", shape(16_384, 8192))[0] == "torch.compile"


@pytest.mark.parametrize(
    ("device", "op", "dtype", "cols"),
    [
        ("NVIDIA B200", "rms_norm forward", "float32", 8192),
        ("NVIDIA H200", "rms_norm step", "float32", 8192),
        ("NVIDIA H200", "layer_norm backward", "float32", 8192),
        ("NVIDIA H200", "rms_norm forward", "float16", 8192),
        ("NVIDIA H200", "rms_norm forward", "float32", 8191),
    ],
)
def test_nothing_is_compared_that_was_not_recorded(device, op, dtype, cols):
    assert recorded.best(device, op, dtype, shape(8192, cols)) is None


def test_recorded_shapes_are_those_of_the_table():
    cells = {
        (dtype, f"{shape.rows}x{shape.cols}")
        for dtype, size in (("float32", 4), ("bfloat16", 2))
        for suite in shapes.suites(size).values()
        for shape in suite
    }
    kept = [by_dtype for unit in ("GB/s", "us") for by_dtype in recorded.table()[unit].values()]
    assert {(dtype, shape) for by_dtype in kept for dtype, table in by_dtype.items() for shape in table} <= cells


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, []),
        ({"% of copy": 96.9}, ["96.9 % of copy, wants 97"]),
        ({"op": "rms_norm backward", "% of copy": 95.1}, []),
        ({"op": "rms_norm step", "% of copy": 10.0}, []),
        ({"op": "add_rms_norm backward", "% of copy": 94.9}, ["94.9 % of copy, wants 95"]),
        ({"op": "rms_norm_quantized forward", "% of copy": 95.1}, []),
        ({"op": "rms_norm_quantized forward", "% of copy": 94.9}, ["94.9 % of copy, wants 95"]),
        ({"op": "rms_norm_quantized forward, int8", "% of copy": 94.9}, ["94.9 % of copy, wants 95"]),
        ({"op": "layer_norm_quantized forward", "x XLA": 1.99}, ["1.99 x XLA"]),
        ({"op": "layer_norm_quantized forward, int8", "x XLA": 1.0}, []),
        ({"op": "layer_norm_quantized forward", "x XLA": 1.0, "shape": "decode 1"}, []),
        ({"x XLA": 0.96}, []),
        ({"x XLA": 0.94}, ["0.94 x XLA"]),
        ({"x best peer": 0.99}, ["0.99 x quack (recorded)"]),
        ({"error / tolerance": float("nan")}, ["WRONG, nan times the tolerance"]),
        (dict.fromkeys(("% of copy", "x XLA", "best peer", "x best peer")), []),
    ],
)
def test_what_a_row_misses(changes, words):
    assert targets.shortfalls(result(**changes)) == words


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("rms", "rms_norm forward"),
        ("add_layer", "add_layer_norm forward"),
        ("rms_quantized", "rms_norm_quantized forward"),
        ("layer_quantized, groups of 128", "layer_norm_quantized forward, groups of 128"),
        ("log_softmax", "log_softmax forward"),
        ("softmax, causal", "softmax forward, causal"),
        ("cross_entropy", "cross_entropy forward"),
    ],
)
def test_ops_are_called_as_the_functions_are(kind, name):
    assert report.op_name(kind, "forward") == name
    assert report.op_parts(name) == (kind, "forward")


def test_missing_rows_are_named():
    assert targets.missing([result(), result(**{"x XLA": 0.5})]) == [
        "rms_norm forward, float32, grid 256 (4x256): 0.50 x XLA"
    ]


def test_a_results_file_is_read_back(results, capsys):
    data = report.load(results / "h200.json")
    assert len(data["rows"]) == 9
    assert data["failed"] == ["one"]
    show.main(parse(["show", str(results / "h200.json")]))
    printed = capsys.readouterr().out
    assert "| decode 1 | 1 | 4096 | 2.00 |" in printed
    assert "Missing: 1\n- rms_norm forward, float32, decode 1 (1x4096): 0.50 x quack (recorded)\n" in printed
    assert "Failed: 1\n- one\n" in printed


def test_what_is_slower_than_xla_stands_below_a_run_on_a_cpu():
    assert targets.below({"cpu": "one"}, [result(), result(**{"x XLA": 0.5})]) == {
        "slower": ["rms_norm forward float32 grid 256: 0.50 x XLA"]
    }


def test_plot_draws_each_direction(results):
    plot.main(parse(["plot", str(results / "h200.json")]))
    pictures = {path.name: path.read_bytes() for path in results.glob("*.png")}
    assert set(pictures) == {"h200-forward.png", "h200-backward.png"}
    assert all(picture.startswith(b"\x89PNG") and len(picture) < 150_000 for picture in pictures.values())


def test_lines_of_a_plot(results):
    panels = plot.panels_of(report.load(results / "h200.json")["rows"])
    cells = panels["forward"]["rms_norm", "float32"]
    lines = plot.lines_of(cells)
    assert [row["N"] for row in cells] == [256, 1024]
    assert lines["jaxnorm"] == [4256, 5024]
    assert lines["XLA"] == [2128, 2512]
    assert set(lines) == {"jaxnorm", "XLA", plot.RECORDED, "copy"}


def test_a_plot_has_no_variants():
    assert plot.panels_of([result(INT8)]) == {}


def test_tables_of_a_run(results):
    marked = "\n".join(f"<!-- table: {name} -->\nold\n<!-- end -->\n" for name in tables.TABLES)
    text = tables.render(f"before\n{marked}after\n", results)
    assert "| `rms_norm` forward, float32 | 4256 (2.00) | 5024 (2.00) |" in text
    assert "| `rms_norm` forward, float32 | 2.0 / 4.0 / 1.0 |" in text
    elsewhere = [file for file, _ in tables.TABLES.values() if file != "h200.json"]
    assert text.count("Not measured yet") == len(elsewhere)
    assert "old" not in text
    assert tables.render(text, results) == text


def test_the_table_of_models(tmp_path):
    rows = [result("gated_rms_norm forward", "bfloat16", shape, 4, 5120) for shape in ("Mamba2", "grid 5120")]
    report.save(HEADER, rows, tmp_path / "h200_gated")
    *_, heading, _, line, _ = tables.render("<!-- table: h200-gated-models -->\n<!-- end -->\n", tmp_path).splitlines()
    assert heading == "| shape | Mamba2, 4x5120 |"
    assert line.startswith("| `gated_rms_norm` forward, bfloat16 |")


def test_the_table_of_quantised_results(tmp_path):
    plain, variant = (result(op, "bfloat16", "grid 4096", 4, 4096) for op in ("rms_norm_quantized forward", INT8))
    report.save(HEADER, [variant | {"x XLA": 1.5}, plain | {"x XLA": 1.5}], tmp_path / "h200_quantized")
    lines = tables.render("<!-- table: h200-quantized-grid -->\n<!-- end -->\n", tmp_path).splitlines()
    assert "95 % of the copy, 2 times XLA's speed" in lines[1]
    assert lines[-3:-1] == [
        "| `rms_norm_quantized` forward, bfloat16 | 4200 (1.50)† |",
        "| `rms_norm_quantized` forward, int8, bfloat16 | 4200 (1.50) |",
    ]


def test_the_headline_is_of_all_steps_and_names_the_slowest(tmp_path):
    steps = [
        result("rms_norm step", shape=shape, **{"x XLA": ratio}) for shape, ratio in (("grid 256", 8.0), ("odd", 0.5))
    ]
    report.save(HEADER, [*steps, result()], tmp_path / "h200")
    _, line, _ = tables.render("<!-- table: h200-headline -->\n<!-- end -->\n", tmp_path).splitlines()
    assert "2 programs" in line
    assert (
        "2.00 times as fast as XLA's code in geometric mean, from 0.50 (`rms_norm` step, float32, 4x256) to 8.00"
        in line
    )


def test_tables_are_written_and_checked(results, capsys):
    readme = results / "README.md"
    readme.write_text("<!-- table: h200-grid -->\n<!-- end -->\n")
    args = parse(["tables", "--pages", str(readme), "--results", str(results)])
    check = parse(["tables", "--check", "--pages", str(readme), "--results", str(results)])
    assert tables.main(check) == 1
    assert "+| row length | 256 | 1024 |" in capsys.readouterr().out
    assert tables.main(args) == 0
    assert tables.main(check) == 0


def test_an_unknown_table_is_an_error(tmp_path):
    with pytest.raises(SystemExit, match="no table is called other; there are h200-grid"):
        tables.render("<!-- table: other -->\n<!-- end -->\n", tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_have_what_the_results_say(page):
    assert tables.render(page.read_text(), RESULTS) == page.read_text()


def test_mkdocs_draws_a_table(results, monkeypatch):
    monkeypatch.setattr(doc_results, "RESULTS", results)
    page = doc_results.on_page_markdown(
        "Small:\n\n<!-- drawn: h200-small -->\n\nbelow", page=None, config=None, files=None
    )
    assert page.startswith("Small:\n\nNVIDIA H200")
    assert page.endswith("| `rms_norm` forward, float32 | 2.0 / 4.0 / 1.0 |\n\nbelow")


def test_pages_show_every_table():
    shown = re.findall(r"<!-- (?:table|drawn): (.+?) -->", "".join(page.read_text() for page in PAGES))
    assert set(shown) == set(tables.TABLES)


def test_every_table_has_been_measured():
    assert [name for name in tables.TABLES if "Not measured yet" in tables.table(name, RESULTS)] == []


def test_a_step_is_compared_as_a_whole(tmp_path):
    times = {"jnp": (10.0, 1000.0), "jaxnorm-default-norm": (9.5, 500.0), "jaxnorm-default": (10.3, 1200.0)}
    rows = [
        {"model": "Toy", "program": "train step", "norms": norms, "ms": ms, "± us": 100.0, "norms us": us}
        for norms, (ms, us) in times.items()
    ]
    for name in ("h200_model_default", "h200_model_separate"):
        report.save(HEADER, rows, tmp_path / name)
    *_, line, _ = tables.render("<!-- table: steps -->\n<!-- end -->\n", tmp_path).splitlines()
    assert line == "| Toy, train step | 10.00 | 10.0 | 5.0 % faster | **2.0 % slower** | ±1.0 |"


def test_every_results_file_says_what_ran():
    for path in RESULTS.glob("*.json"):
        data = json.loads(path.read_text())
        assert data["rows"], path.name
        assert {"date", "command", "jax"} <= set(data["header"]), path.name
