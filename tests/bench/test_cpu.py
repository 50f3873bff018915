"""What `bench cpu` measures, but for the clock: its cells, its programs, and what of them is compared."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import cpu, norms, ops, others, programs, report, shapes
from bench.__main__ import parse

LOSS = "cross_entropy"
LOGITS = (*ops.LOGITS, LOSS)
FEW = shapes.Shape("few", (2 * shapes.HEADS, 128))
# Of each kind: the directions alone, and in a chain.
KINDS = {
    "layer": (3, 3),
    "add_rms": (3, 3),
    norms.GATE_LAST: (3, 3),
    norms.HEADS: (3, 3),
    "rms_quantized": (1, 0),
    "layer_quantized, with a residual": (1, 0),
    "softmax": (3, 3),
    "log_softmax": (3, 3),
    others.CAUSAL: (3, 3),
    LOSS: (3, 0),
}


@pytest.fixture(autouse=True)
def short_chains(monkeypatch):
    monkeypatch.setattr(cpu, "LINKS", 2)


def test_each_op_has_its_kinds():
    def kinds(op):
        return {kind for kind, *_ in cpu.cells(parse(["cpu", "--dtypes", "bfloat16", "--ops", op]))}

    assert kinds("add_layer") == {"add_layer"}
    assert kinds("gated") == {norms.GATED, norms.GATE_LAST, norms.GROUPED}
    assert kinds("heads") == {norms.HEADS}
    assert kinds("rms_quantized") == {"rms_quantized", *(f"rms_quantized, {name}" for name in norms.QUANTIZATIONS)}
    assert kinds("softmax") == {"softmax", others.CAUSAL}
    assert kinds(LOSS) == {LOSS}


def test_without_a_choice_it_is_of_the_plain_norms():
    cells = cpu.cells(parse(["cpu"]))
    assert len(cells) == len(norms.NORMS) * 2 * len(cpu.SHAPES)
    assert {kind for kind, *_ in cells} == set(norms.NORMS)


@pytest.mark.parametrize("op", LOGITS)
def test_softmax_and_losses_have_every_length_of_the_grid(op):
    cells = [shape for kind, _, shape in cpu.cells(parse(["cpu", "--dtypes=float32", "--ops", op])) if kind == op]
    assert [shape.cols for shape in cells] == list(shapes.GRID_COLS)
    assert {shape.rows * shape.cols for shape in cells} == {2**24}


def test_the_cpu_command_selects_lengths():
    cells = cpu.cells(parse(["cpu", "--dtypes=float32", "--ops", "softmax", LOSS, "--cols", "4096", "256"]))
    assert [(kind, shape.cols) for kind, _, shape in cells] == [
        ("softmax", 256),
        ("softmax", 4096),
        (others.CAUSAL, 4096),
        (LOSS, 256),
        (LOSS, 4096),
    ]


def test_of_a_grid_one_length_runs_in_a_chain():
    chained = [
        (kind, shape.name)
        for kind, _, shape in cpu.cells(parse(["cpu", "--dtypes", "float32", "--ops", *LOGITS]))
        if len(cpu.manners(ops.KINDS[kind], shape)) == 2
    ]
    assert chained == [("softmax", cpu.CHAINED), (others.CAUSAL, "scores"), ("log_softmax", cpu.CHAINED)]


def result_of(program):
    """What a program gives; the arguments live on."""
    return program.function(*jax.tree.map(jnp.copy, program.arguments))


@pytest.mark.parametrize("kind", KINDS)
def test_a_cell_has_each_direction_alone_and_in_a_chain(kind, monkeypatch):
    compared = []

    def compare(programs, turns):
        compared.append(programs)
        return [1.0, 3.0, 2.0]

    monkeypatch.setattr(cpu, "compare", compare)
    rows = list(cpu.measure_cell(kind, "float32", FEW, 1, None))
    alone, linked = ([row for row in rows if row["op"].endswith("in a chain") == chained] for chained in (False, True))
    assert (len(alone), len(linked)) == KINDS[kind]
    moved = ops.KINDS[kind].moved(FEW, 4)["forward"]
    assert (alone[0]["x XLA"], alone[0]["GB/s"]) == (3, pytest.approx(moved / 1e9))
    assert all(row["error / tolerance"] < 1 for row in rows)
    # jaxnorm and XLA compute the same from the same.
    for ours, theirs, _ in compared:
        assert ours.carries == theirs.carries
        for a, b in zip(*(jax.tree.leaves(result_of(program)) for program in (ours, theirs)), strict=True):
            a, b = np.float64(a), np.float64(b)
            assert np.linalg.norm(a - b) < 1e-3 * np.linalg.norm(b)


def test_what_carries_goes_on_with_its_sum():
    seen = []

    def add(total, x):
        seen.append(float(total))
        return total + x, x

    program = programs.Program(add, (jnp.float32(1), jnp.float32(2)), carries=True)
    for _ in range(2):
        assert len(cpu.turn(program, 2)) == 2
    assert seen == [1, 3, 5, 1, 3, 5]


def test_a_run_that_is_cut_off_leaves_what_it_measured(monkeypatch, tmp_path):
    def measure_cell(kind, dtype, shape, *_):
        if shape.name == cells[1][2].name:
            raise MemoryError
        yield {"op": "rms_norm forward", "dtype": dtype, "shape": shape.name, "x XLA": 0.5}

    args = parse(["cpu", "--ops", "rms", "--out", str(tmp_path / "cpu")])
    cells = cpu.cells(args)
    monkeypatch.setattr(cpu, "measure_cell", measure_cell)
    with pytest.raises(MemoryError):
        cpu.main(args)
    saved = report.load(tmp_path / "cpu.json")
    assert saved["header"]["cells"] == f"1 of {len(cells)}"
    assert [row["shape"] for row in saved["rows"]] == [cells[0][2].name]
