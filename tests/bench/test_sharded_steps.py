"""`bench sharding --trainer`: what its programs exchange, and that every mesh trains the same model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import compiled_text
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh_of

from bench import report, sharded_tables, tables
from bench.__main__ import parse
from bench.collectives import collectives

pytestmark = pytest.mark.any_code

STEPS, MESH = 4, "4x2"


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The rows of a toy's results by mesh, axes and way."""
    if jax.device_count() < 8:
        pytest.skip("needs 8 devices")
    out = tmp_path_factory.mktemp("results") / "h100_x8_steps_8b"
    meshes = ["--meshes", "1x1", MESH, "--axes", "auto", "explicit", "--ways", "jnp", "jaxnorm"]
    lengths = ["--losses", str(STEPS), "--turns", "2", "--out", str(out)]
    args = parse(["sharding", "--trainer", "8b", "--small", *meshes, *lengths])
    args.main(args)
    return {(row["mesh"], row["axes"], row["way"]): row for row in report.load(f"{out}.json")["rows"]}
