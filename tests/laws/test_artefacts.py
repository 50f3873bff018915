"""An exported program outlives the build that wrote it: those in `tests/artefacts` run in every later one."""

import jax
import pytest
from cases import assert_close
from coverage import over
from exporting import WAYS, artefacts, function_of
from hlo import count_native_calls
from jax import export
from ops import OPS

pytestmark = pytest.mark.jax_version


def read(op, way):
    return [export.deserialize(program) for program in artefacts(op, way)]


@over(OPS, way=lambda op: WAYS, count=lambda op: [1, 37])
def test_a_program_of_an_older_build_gives_what_this_build_computes(op, way, count):
    args = op.draw(op.small._replace(dims=(count, *op.small.dims[1:])))
    expected = jax.jit(function_of(op, way))(*args)
    for program in read(op, way):
        actual = jax.jit(program.call)(*args)
        assert_close(*(jax.tree.map(lambda a: a.astype("float32"), tuple(results)) for results in (actual, expected)))


@over(OPS, way=lambda op: WAYS)
def test_it_holds_native_calls(op, way):
    kinds = 1 if way == "forward" else 2
    for program in read(op, way):
        assert len(count_native_calls(program.mlir_module())) == kinds
