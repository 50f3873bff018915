"""Law 10 for half types: a mesh changes gradients by the order of sums only, which are float32 until they are whole."""

import itertools
import re
from functools import partial

import fuzz
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import DTYPES, draw
from coverage import cover, over
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
from table import EACH, OPS, PADDED

import jaxnorm

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


SUMMED = re.compile(r"stablehlo\.all_reduce.*?\^bb0\(%\w+: tensor<(\w+)>", re.DOTALL)


# XLA for CPUs ends the process at a sum of a half type in a shard_map over some axes of a mesh.
@cover(
    mode=[MANUAL, PARTLY_MANUAL],
    reduction=["mean", "sum", "none"],
    dtypes=[*itertools.product(HALF, HALF), (HALF[0], "float32")],
    rows_per_chunk=[None, 8],
    same_everywhere=["kernel", "x", "x and kernel"],
    implementation=[None, "jnp"],
    where={"all": None, "some": np.arange(24) < 20},
)
def test_gradients_of_a_product(
    devices, mode, reduction, dtypes, rows_per_chunk, same_everywhere, implementation, where
):
    mesh, axis = mesh_for(mode, devices), "c" if mode == PARTLY_MANUAL else "a"
    count = mesh.shape[axis]
    labels = jnp.asarray(np.random.default_rng(7).integers(-1, 24, (count, 16)), "int32")
    split = [*(None if name in same_everywhere.split() else 0 for name in ("x", "kernel")), 0]
    args = [
        draw(name, dims if along is None else (count, *dims), dtype)
        for name, dims, dtype, along in zip(("x", "kernel"), [(16, 8), (8, 24)], dtypes, split[:2], strict=True)
    ]

    def of_part(x, kernel, labels):
        options = {"rows_per_chunk": rows_per_chunk, "ignore_index": -1, "implementation": implementation}
        return jaxnorm.linear_cross_entropy(x, kernel, labels, where=where, reduction=reduction, **options).sum()

    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=tuple(P() if along is None else P(axis) for along in split),
        out_specs=P(axis),
        axis_names={axis} if mode == PARTLY_MANUAL else {*mesh.axis_names},
    )
    def sharded(*parts):
        return of_part(*(part if along is None else part[0] for part, along in zip(parts, split, strict=True)))[None]

    def gradients(of):
        return jax.grad(lambda *args: sum(value.astype("float32").sum() for value in of(*args)), (0, 1))

    one, several = (gradients(lambda *args, of=of: [of(*args, labels)]) for of in (jax.vmap(of_part, split), sharded))
    lowered = jax.jit(several).lower(*args)
    for program in (lowered, jax.jit(gradients(several)).lower(*args)):
        assert {*SUMMED.findall(program.as_text())} == {"f32"}
    with jax.enable_x64(True):
        exact = jax.jit(one)(*(array.astype("float64") for array in args))
    for actual, other, wide in zip(lowered.compile()(*args), jax.jit(one)(*args), exact, strict=True):
        assert (actual.shape, actual.dtype) == (other.shape, other.dtype)
        assert fuzz.error(*map(np.asarray, (actual, other, wide)), fuzz.law_of(*dtypes)) <= 1
