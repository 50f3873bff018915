"""The tables and the picture of what `examples/train_gemma.py` measures."""

import pytest

from bench import report, tables, trainers
from bench.__main__ import parse

HEADER = {"device": "NVIDIA H200", "jax": "0.0", "commit": "abc", "model": "2 layers", "batch": "1 x 8 tokens a device"}
HEADER |= {"dtype": "bfloat16", "attention": "xla"}


def way(name, devices, **changes):
    row = {"devices": devices, "way": name, "tokens/s": 1000.0 * devices, "ms": 8.0, "± ms": 0.1, "state GiB": 2.0}
    row |= {"temp GiB": 6.0, "peak GiB": None, "trace s": 1.0, "compile s": 5.0, "last loss": 2.0}
    return row | {"losses": [3.0, 2.0]} | changes


@pytest.fixture
def results(tmp_path):
    """The results of one device and of two, as the example writes them."""
    faster = {"tokens/s": 1100.0, "temp GiB": 2.0, "losses": [3.0, 1.75]}
    slower = {"tokens/s": 1900.0, "losses": [3.5, 2.0]}
    for name, devices, change in (("h200_gemma", 1, faster), ("h200_x2_gemma", 2, slower)):
        header = HEADER | {"device": "2 x NVIDIA H200"} if devices > 1 else HEADER
        rows = [way("Flax and Optax", devices), way("jaxnorm, the norms alone", devices)]
        report.save(header, [*rows, way("jaxnorm", devices, **change)], tmp_path / name)
    return tmp_path


def test_the_headline(results):
    _, picture, one, two, _ = tables.render("<!-- table: gemma-headline -->\n<!-- end -->\n", results).splitlines()
    assert picture.endswith("](docs/benchmarks/h200-gemma.png)")
    changes = "4 GiB of memory a device in place of 8, losses 2.5e-01 apart at most (step 2 of 2)."
    assert one == f"- NVIDIA H200: 10.0 % more tokens a second (scatter ±1.2), {changes}"
    changes = "8 GiB of memory a device in place of 8, losses 5.0e-01 apart at most (step 1 of 2)."
    assert two == f"- 2 x NVIDIA H200: 5.0 % fewer tokens a second (scatter ±1.2), {changes}"


def test_the_table(results):
    lines = tables.render("<!-- table: gemma -->\n<!-- end -->\n", results).splitlines()
    assert lines[1].endswith("2 layers; 1 x 8 tokens a device, activations of bfloat16, attention by xla.")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    assert [row[:3] + row[-2:] for row in rows[2:]] == [
        ["1", "Flax and Optax", "1000", "-", "-"],
        ["1", "jaxnorm, the norms alone", "1000", "0.0", "0.0e+00"],
        ["1", "jaxnorm", "1100", "10.0", "2.5e-01"],
        ["2", "Flax and Optax", "2000", "-", "-"],
        ["2", "jaxnorm, the norms alone", "2000", "0.0", "0.0e+00"],
        ["2", "jaxnorm", "1900", "-5.0", "5.0e-01"],
    ]


def test_the_picture(results):
    files = [str(results / name) for name in ("h200_gemma.json", "h200_x2_gemma.json")]
    args = parse(["trainers", *files, "--out", str(results / "picture.png")])
    args.main(args)
    assert (results / "picture.png").read_bytes().startswith(b"\x89PNG")
    figure = trainers.draw([report.load(path) for path in args.results])
    curves, others = (panels.axes for panels in figure.subfigs)
    assert [[line.get_ydata().tolist() for line in panel.lines] for panel in curves] == [
        [[3.0, 2.0], [3.0, 2.0], [3.0, 1.75]],
        [[3.0, 2.0], [3.0, 2.0], [3.5, 2.0]],
    ]
    speed, memory, compilation = ([text.get_text() for text in panel.texts] for panel in others)
    assert speed == ["1.0k", "1.0k", "1.1k", "2.0k", "2.0k", "1.9k"]
    assert memory == ["8", "8", "4", "8", "8", "8"]
    assert compilation == ["5"] * 6
