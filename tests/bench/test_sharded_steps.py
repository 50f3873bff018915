"""`bench sharding --trainer`: what its programs exchange, that every mesh trains the same model, and its table."""

import jax
import numpy as np
import pytest
from bench.collectives import collectives
from jax.sharding import Mesh

from bench import report, sharded_steps, tables
from bench.__main__ import parse

pytestmark = pytest.mark.any_code

DATA, TENSOR, STEPS = 4, 2, 12
ARGUMENTS = ["sharding", "--trainer", "8b", "--small", "--losses", str(STEPS), "--turns", "2"]
SPEC = sharded_steps.specs_of(parse(ARGUMENTS))[0]
ROWS = SPEC.batch // DATA * SPEC.tokens  # of a device
KERNEL = 4 * SPEC.dim * SPEC.classes  # of the last product
# What docs/sharding.md lists: bytes that XLA's program need not exchange. CPUs have no bfloat16 there.
LISTED = {
    "jnp": {},
    "jaxnorm": {"all-reduce": 20 * ROWS},
    "linear loss": {"all-gather": KERNEL + 4 * ROWS * SPEC.dim, "all-reduce": KERNEL},
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The rows of a toy's results by mesh and way."""
    if jax.device_count() < DATA * TENSOR:
        pytest.skip(f"needs {DATA * TENSOR} devices")
    out = tmp_path_factory.mktemp("results") / "toy"
    args = parse([*ARGUMENTS, "--meshes", "1x1", f"{DATA}x{TENSOR}", "--ways", *LISTED, "--out", str(out)])
    args.main(args)
    return {(row["mesh"], row["way"]): row for row in report.load(f"{out}.json")["rows"]}


@pytest.mark.long
@pytest.mark.parametrize("way", LISTED)
def test_devices_exchange_what_xla_has_them_exchange_or_what_is_listed(measured, way):
    actual, of_xla = (measured[f"{DATA}x{TENSOR}", name]["collectives"] for name in (way, "jnp"))
    assert of_xla.keys() == {"all-gather", "all-reduce"}
    for kind, size in actual.items():
        assert size <= of_xla[kind] + LISTED[way].get(kind, 0)


@pytest.mark.long
@pytest.mark.parametrize("way", LISTED)
def test_a_mesh_trains_the_same_model(measured, way):
    alone, together = (measured[mesh, way] for mesh in ("1x1", f"{DATA}x{TENSOR}"))
    assert len(alone["losses"]) == STEPS
    assert alone["losses"][sharded_steps.BATCHES] < alone["losses"][0]  # of the same batch
    np.testing.assert_allclose(together["losses"], alone["losses"], rtol=2.0**-8)
    assert alone["collectives"] == {}
    assert alone["scaling"] == 1
    assert together["scaling"] == pytest.approx(together["ktokens/s"] / 8 / alone["ktokens/s"], rel=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("way", ["jnp", "jaxnorm"])
def test_explicit_axes_give_the_same_program(measured, way):
    devices = np.reshape(jax.devices()[: DATA * TENSOR], (DATA, TENSOR))
    mesh = Mesh(devices, ("data", "tensor"), axis_types=(sharded_steps.AXES["explicit"],) * 2)
    program = sharded_steps.Trainer(SPEC, mesh, way).compiled(quickly=True)
    assert collectives(program.as_text()) == measured[f"{DATA}x{TENSOR}", way]["collectives"]


def test_a_mesh_has_as_many_devices_as_there_are():
    args = parse([*ARGUMENTS, "--devices", "4", "--meshes", "4x2"])
    with pytest.raises(SystemExit, match="--meshes 4x2: there are 4 devices"):
        args.main(args)


def test_meshes_by_default():
    assert sharded_steps.meshes_of(parse(["sharding", "--devices", "8"])) == [(1, 1), (8, 1), (4, 2), (2, 4)]
    assert sharded_steps.meshes_of(parse(["sharding", "--devices", "2"])) == [(1, 1), (2, 1), (1, 2)]


HEADER = {"jax": "0.0", "commit": "abc", "date": "2000-01-01", "command": "python"}
HEADER |= {"model": "2 layers", "batch": "1 x 8 tokens a device", "attention": "xla"}


def row(mesh, devices, way, speed, exchanged, losses):
    row = {"model": "8B width", "axes": "auto", "mesh": mesh, "devices": devices, "way": way, "ms": 8.0}
    return row | {"ktokens/s": speed, "collectives": exchanged, "losses": losses}


def test_the_table_is_of_all_runs(tmp_path):
    gathered = {"all-gather": 2**21}
    alone = [row("1x1", 1, "jnp", 10.0, {}, [4.0, 2.0]), row("1x1", 1, "jaxnorm", 20.0, {}, [4.0, 2.0])]
    together = [
        row("2x1", 2, "jnp", 15.0, gathered, [4.0, 2.5]),
        row("2x1", 2, "jaxnorm", 40.0, gathered | {"all-reduce": 2**20}, [4.0, 2.0]),
    ]
    for devices, rows in ((1, alone), (2, together)):
        report.save(HEADER | {"device": "NVIDIA H100"}, rows, tmp_path / f"h100_x{devices}_steps_8b")
    lines = tables.render("<!-- table: sharded-steps -->\n<!-- end -->\n", tmp_path).splitlines()
    header, _, *found = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| "))
    assert sum("2 layers; 1 x 8 tokens a device, attention by xla." in line for line in lines) == 2
    columns = ["mesh", "way", "scaling", "losses apart", "MiB exchanged", "more than jnp"]
    assert [[line[header.index(column)] for column in columns] for line in found] == [
        ["1x1", "jnp", "1.00", "0.0e+00", "nothing", "nothing"],
        ["1x1", "jaxnorm", "1.00", "0.0e+00", "nothing", "nothing"],
        ["2x1", "jnp", "0.75", "2.5e-01", "all-gather 2", "nothing"],
        ["2x1", "jaxnorm", "1.00", "0.0e+00", "all-gather 2, all-reduce 1", "all-reduce +1"],
    ]
