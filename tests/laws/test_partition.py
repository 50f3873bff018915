"""Ops that are split over devices, by XLA or a `shard_map`: nothing is gathered, and what is exchanged is counted."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import bits
from coverage import over
from hlo import collectives, count_native_calls
from jax.sharding import PartitionSpec as P
from meshes import (
    MANUAL,
    PARTLY_MANUAL,
    UNCHECKED,
    assert_parts_close,
    exchanged,
    gradients,
    mesh_for,
    place,
    size_of,
    split_by,
)
from table import EACH, GATED_ACTIVATIONS, OPS, PADDED, QUANTIZED, QUANTIZED_ACTIVATIONS, QUANTIZED_SUMS, ROTARY

import jaxnorm

pytestmark = [pytest.mark.several, pytest.mark.jax_version]

SPLIT = [op for op in OPS if op not in PADDED]  # a padded result has other features
ROWS_OVER = [P("a"), P(("b", "a")), P("a", "b"), P(None, "b")]
ROW_MODES = [
    *itertools.product(["auto", "explicit", MANUAL, PARTLY_MANUAL], ROWS_OVER),
    *((UNCHECKED, spec) for spec in ROWS_OVER[1:3]),
]
DEFAULT = (*EACH, QUANTIZED[2], QUANTIZED_SUMS[2])


def row_modes(op):
    """Those that split no row."""
    return [(mode, spec) for mode, spec in ROW_MODES if not (op.has_positions and spec[1:])]


def part_specs(op):
    """Those that split rows, and those that split channels, of which GroupNorm's rows have some each."""
    specs = [P(None, None, "b"), P("a", None, "b")]
    return [*specs, P(None, "b"), P("a", "b")] if op.has_positions else specs


by_row = over(SPLIT, default=DEFAULT, how=row_modes)
by_feature = over(
    # What is rotated is of one device, and what has both side by side is in ops/gated_activation.py.
    [
        op
        for op in SPLIT
        if op not in ROTARY and not (op in (*GATED_ACTIVATIONS, *QUANTIZED_ACTIVATIONS) and op.arrays == 1)
    ],
    default=DEFAULT,
    mode=lambda op: ["auto", "explicit", PARTLY_MANUAL],
    spec=part_specs,
)


def results(op):
    # Not dequantised in the same program: XLA on a GPU may leave the rounding out then.
    return lambda *args: [r for r in op.function(*args, **size_of(op).options) if r.ndim][:2]


def run(function, on_one_device, args, mesh):
    """What function gives on the mesh, what the other gives on one device, and the program on the mesh."""
    with jax.set_mesh(mesh):
        compiled = jax.jit(function).lower(*args).compile()
        actual = compiled(*args)
    return actual, jax.jit(on_one_device)(*(jnp.asarray(np.asarray(arg)) for arg in args)), compiled.as_text()


@by_row
def test_rows_are_computed_where_they_are(devices, op, how):
    mode, spec = how
    mesh = mesh_for(mode, devices)
    function = split_by(mode, op, mesh, spec)(results(op))
    actual, expected, text = run(function, results(op), place(op, mesh, spec), mesh)
    assert bits(actual) == bits(expected)
    assert collectives(text) == {}
    assert list(count_native_calls(text).values()) == [1]


@by_row
def test_gradients_of_rows_add_up_weights(devices, op, how):
    mode, spec = how
    mesh = mesh_for(mode, devices)
    function = gradients(op, split_by(mode, op, mesh, spec))
    actual, expected, text = run(function, gradients(op), place(op, mesh, spec), mesh)
    assert_parts_close(actual, expected)
    assert collectives(text) == exchanged(op, mesh, spec, with_gradients=True, mode=mode)
    assert list(count_native_calls(text).values()) == [1] * (2 - op.keeps_operands_alone)


@over(SPLIT, default=DEFAULT)
def test_gradients_of_the_formula(devices, op):
    """On an Explicit mesh, where the types of what it computes have shardings."""
    mesh = mesh_for("explicit", devices)
    args = place(op, mesh, P("a") if op.has_positions else P("a", "b"))
    with jaxnorm.implementation("jnp"):
        actual, expected, _ = run(gradients(op), gradients(op), args, mesh)
    assert_parts_close(actual, expected)


@by_feature
def test_parts_of_rows_exchange_their_statistics(devices, op, mode, spec):
    mesh = mesh_for(mode, devices)
    function = split_by(mode, op, mesh, spec)(results(op))
    actual, expected, text = run(function, results(op), place(op, mesh, spec), mesh)
    assert_parts_close(actual, expected)
    assert collectives(text) == exchanged(op, mesh, spec, with_gradients=False)


@by_feature
def test_gradients_of_parts_of_rows(devices, op, mode, spec):
    mesh = mesh_for(mode, devices)
    function = gradients(op, split_by(mode, op, mesh, spec))
    actual, expected, text = run(function, gradients(op), place(op, mesh, spec), mesh)
    assert_parts_close(actual, expected)
    assert collectives(text) == exchanged(op, mesh, spec, with_gradients=True, mode=mode)
