"""Law 10 for half types: a mesh changes gradients by the order of sums only, which are float32 until they are whole."""

import itertools

import jax
import pytest
from cases import DTYPES
from coverage import over
from jax.sharding import PartitionSpec as P
from meshes import (
    MANUAL,
    PARTLY_MANUAL,
    assert_one_device_gives,
    gradients,
    mesh_for,
    placed,
    size_of,
    specs_of,
    split_by,
)
from ops import EACH, OPS, PADDED

pytestmark = [pytest.mark.several, pytest.mark.jax_version]

HALF = DTYPES[1:]
# Of batch, sequence and features, or where there are some heads in the sequence's place.
ROWS_OVER = [P("a"), P(("b", "a")), P("a", "b"), P(None, "b")]


def dtypes(op):
    """Of the arrays and of the weights: both half, or one of them."""
    kinds = [kinds for kinds in op.dtypes if kinds[0] in HALF]
    return [*itertools.product(kinds, HALF), (kinds[0], "float32"), (op.dtypes[0], HALF[0])]


def row_specs(op):
    return [spec for spec in ROWS_OVER if not (op.has_positions and spec[1:])]


@over(
    [op for op in OPS if op not in PADDED],
    default=EACH,
    mode=lambda op: ["auto", "explicit", MANUAL, PARTLY_MANUAL],
    spec=row_specs,
    dtypes=dtypes,
)
def test_gradients(devices, op, mode, spec, dtypes):
    mesh = mesh_for(mode, devices)
    args = op.draw(size_of(op), *dtypes)
    step = jax.jit(gradients(op, split_by(mode, op, mesh, spec)))
    expected = jax.jit(gradients(op))(*args)
    with jax.set_mesh(mesh):
        assert_one_device_gives(step(*placed(mesh, args, specs_of(op, spec))), expected)
