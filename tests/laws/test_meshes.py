"""Laws 7 and 10 on meshes: several devices give what one gives, wherever the rows live, and exchange what they must.

Ops are split by XLA, by types or by a `shard_map`: nothing is gathered, and what is exchanged is counted. Half types
change gradients by the order of sums only, which are float32 until they are whole.
"""

import itertools
import re
from functools import cache, partial

import fuzz
import jax
import jax.numpy as jnp
import meshes
import numpy as np
import pytest
import table
from cases import DTYPES, assert_close, assert_near, bits, draw
from coverage import cover, over
from hlo import collectives, count_native_calls
from jax.sharding import AxisType, PartitionSpec as P
from meshes import gradients, results

import jaxnorm

pytestmark = pytest.mark.jax_version

# A padded result has other features.
SPLIT = [op for op in (*table.EACH, table.QUANTIZED[2], table.QUANTIZED_SUMS[2]) if op not in table.PADDED]
# Of batch, sequence and features, or where there are some heads in the sequence's place.
ROWS_OVER = [P("a"), P(("b", "a")), P("a", "b"), P(None, "b")]
ROW_MODES = [
    *itertools.product(["auto", "explicit", meshes.MANUAL, meshes.PARTLY_MANUAL], ROWS_OVER),
    *((meshes.UNCHECKED, spec) for spec in ROWS_OVER[1:3]),
]


def part_specs(op):
    """Those that split rows, and those that split channels, of which GroupNorm's rows have some each."""
    specs = [P(None, None, "b"), P("a", None, "b")]
    return [*specs, P(None, "b"), P("a", "b")] if op.has_positions else specs


# Those that split no row.
by_row = over(SPLIT, how=lambda op: [how for how in ROW_MODES if not (op.has_positions and how[1][1:])])


def run(of, devices, op, mode, spec):
    """What `of`, results or gradients, is on a mesh, on one device; what is exchanged, what should be; native calls."""
    mesh, args = meshes.mesh_for(mode, devices), op.draw(meshes.size_of(op))
    function = of(op, meshes.split_by(mode, op, mesh, spec))
    actual, text = meshes.on_mesh(mesh, function, args, meshes.specs_of(op, spec))
    expected = meshes.exchanged(op, mesh, spec, with_gradients=of is gradients, mode=mode)
    calls = list(count_native_calls(text).values())
    return (actual, jax.jit(of(op))(*args)), (collectives(text), expected), calls


@by_row
def test_rows_are_computed_where_they_are(devices, op, how):
    (actual, expected), (exchanged, _), calls = run(results, devices, op, *how)
    assert (bits(actual), exchanged, calls) == (bits(expected), {}, [1])


@by_row
def test_gradients_of_rows_add_up_weights(devices, op, how):
    both, (exchanged, expected), calls = run(gradients, devices, op, *how)
    meshes.assert_parts_close(*both)
    assert (exchanged, calls) == (expected, [1] * (2 - op.keeps_operands_alone))


@over(SPLIT)
def test_gradients_of_the_formula(devices, op):
    """On an Explicit mesh, where the types of what it computes have shardings."""
    with jaxnorm.implementation("xla"):
        both, *_ = run(gradients, devices, op, "explicit", P("a") if op.has_positions else P("a", "b"))
    meshes.assert_parts_close(*both)


@pytest.mark.parametrize("of", [results, gradients])
@over(
    # What is rotated is of one device, and what has both side by side is in ops/gated_activation.py.
    [
        op
        for op in SPLIT
        if op not in table.ROTARY
        and not (op in (*table.GATED_ACTIVATIONS, *table.QUANTIZED_ACTIVATIONS) and op.arrays == 1)
    ],
    mode=lambda op: ["auto", "explicit", meshes.PARTLY_MANUAL],
    spec=part_specs,
)
def test_parts_of_rows_exchange_their_statistics(devices, of, op, mode, spec):
    both, (exchanged, expected), _ = run(of, devices, op, mode, spec)
    meshes.assert_parts_close(*both)
    assert exchanged == expected


HALF = DTYPES[1:]


def dtypes(op):
    """Of the arrays and of the weights: both half, or one of them."""
    kinds = [kinds for kinds in op.dtypes if kinds[0] in HALF]
    return [*itertools.product(kinds, HALF), (kinds[0], "float32"), (op.dtypes[0], HALF[0])]


@over(
    [op for op in SPLIT if op in table.EACH],
    mode=lambda op: ["auto", "explicit", meshes.MANUAL, meshes.PARTLY_MANUAL],
    spec=lambda op: [spec for spec in ROWS_OVER if not (op.has_positions and spec[1:])],
    dtypes=dtypes,
)
def test_gradients_of_half_types(devices, op, mode, spec, dtypes):
    mesh, args = meshes.mesh_for(mode, devices), op.draw(meshes.size_of(op), *dtypes)
    step = jax.jit(gradients(op, meshes.split_by(mode, op, mesh, spec)))
    expected = jax.jit(gradients(op))(*args)
    with jax.set_mesh(mesh):
        meshes.assert_one_device_gives(step(*meshes.placed(mesh, args, meshes.specs_of(op, spec))), expected)


SUMMED = re.compile(r"stablehlo\.all_reduce.*?\^bb0\(%\w+: tensor<(\w+)>", re.DOTALL)


# XLA for CPUs ends the process at a sum of a half type in a shard_map over some axes of a mesh.
@cover(
    mode=[meshes.MANUAL, meshes.PARTLY_MANUAL],
    reduction=["mean", "sum", "none"],
    dtypes=[*itertools.product(HALF, HALF), (HALF[0], "float32")],
    rows_per_chunk=[None, 8],
    everywhere=["kernel", "x", "x and kernel"],
    implementation=[None, "xla"],
    where={"all": None, "some": np.arange(24) < 20},
)
def test_gradients_of_a_product(devices, mode, reduction, dtypes, rows_per_chunk, everywhere, implementation, where):
    mesh, axis = meshes.mesh_for(mode, devices), "c" if mode == meshes.PARTLY_MANUAL else "a"
    count = mesh.shape[axis]
    labels = jnp.asarray(np.random.default_rng(7).integers(-1, 24, (count, 16)), "int32")
    split = [*(None if name in everywhere.split() else 0 for name in ("x", "kernel")), 0]
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
        axis_names={axis} if mode == meshes.PARTLY_MANUAL else {*mesh.axis_names},
    )
    def sharded(*parts):
        return of_part(*(part if along is None else part[0] for part, along in zip(parts, split, strict=True)))[None]

    def gradients_of(of):
        return jax.grad(lambda *args: sum(value.astype("float32").sum() for value in of(*args)), (0, 1))

    one, several = (gradients_of(lambda *a, of=of: [of(*a, labels)]) for of in (jax.vmap(of_part, split), sharded))
    lowered = jax.jit(several).lower(*args)
    for program in (lowered, jax.jit(gradients_of(several)).lower(*args)):
        assert {*SUMMED.findall(program.as_text())} == {"f32"}
    with jax.enable_x64(True):
        exact = jax.jit(one)(*(array.astype("float64") for array in args))
    for actual, other, wide in zip(lowered.compile()(*args), jax.jit(one)(*args), exact, strict=True):
        assert (actual.shape, actual.dtype) == (other.shape, other.dtype)
        assert fuzz.error(*map(np.asarray, (actual, other, wide)), fuzz.law_of(*dtypes)) <= 1


# Of a batch of sequences of the rows of an op's small size, over one mesh axis, over two, on the batch or the sequence
# axis; all rows everywhere. Weights are whole, or go with their heads.
ROW_SPECS = [P("a"), P(("a", "b")), P("a", "b"), P(None, "b"), P()]
WITH_HEADS = (*table.EACH, table.PER_HEAD[0])
PART_OF_HEADS = P("a", None, "b"), P("b")
axis_types = pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)


def whole_row_specs(op):
    """Those that split no row: in a `shard_map` a part of one would be taken for a row."""
    return [(spec, P()) for spec in ROW_SPECS if not (op.has_positions and spec[1:])]


def sequences_of(op):
    return op.draw(op.small._replace(dims=(8, 4, *op.small.dims[1:])))


def each(op, of_arrays, of_weights):
    return (*[of_arrays] * op.arrays, *[of_weights] * len(op.weights))


def of_gradients(op, specs):
    return tuple(specs[i] for i in op.all)


def assert_same(op, actual, expected):
    """With a gate or a factor that depends on the sum, large numbers cancel to small ones."""
    close = assert_near if op in (*table.NORMS, *table.PER_HEAD) else assert_close
    close(jax.device_get(actual), jax.device_get(expected))


def assert_alike(op, actual, expected):
    """What two functions give of the operands."""
    assert_same(op, *(jax.jit(function)(*sequences_of(op)) for function in (actual, expected)))


def loss_and_gradients(op, function=None):
    return jax.value_and_grad(op.loss(function), op.all)


@cache
def expected(op):
    """On one device."""
    return jax.device_get(jax.jit(loss_and_gradients(op))(*sequences_of(op)))


def assert_mesh_gives(mesh, op, specs):
    """What one device gives, of operands that are split so; split in types as they are."""
    with jax.set_mesh(mesh):
        args = meshes.placed(mesh, sequences_of(op), specs)
        actual = jax.jit(loss_and_gradients(op))(*args)
        assert_same(op, actual, expected(op))
        if AxisType.Explicit in mesh.axis_types:
            assert [jax.typeof(g).sharding for g in actual[1]] == [jax.typeof(args[i]).sharding for i in op.all]


@axis_types
@over(
    WITH_HEADS,
    specs=lambda op: [
        *((spec, P()) for spec in ROW_SPECS),
        *([(P(None, None, "b"), P()), PART_OF_HEADS] if op in table.PER_HEAD else []),
    ],
)
def test_rows_on_a_mesh(any_devices, axis_type, op, specs):
    assert_mesh_gives(meshes.mesh_of(any_devices, axis_type), op, each(op, *specs))


@over([op for op in table.EACH if op.arrays == 2], axis_type=lambda op: [AxisType.Auto, AxisType.Explicit])
def test_one_array_is_everywhere(any_devices, op, axis_type):
    assert_mesh_gives(meshes.mesh_of(any_devices, axis_type), op, (P("a"), P(), *[P()] * len(op.weights)))


# Groups have to stay whole, and a padded result is in ops/added_norm.py.
FEATURES = [op for op in table.EACH if not {"group_size", "pad_to"} & {*op.small.options} and len(op.small.dims) == 2]


# Weights are whole on each device and x is not: they are split by themselves, and their gradients are whole again.
@axis_types
@over([*FEATURES, table.GROUPED[0], table.GROUP_NORMS[1]])
def test_a_sharded_feature_axis(any_devices, axis_type, op):
    mesh, specs = meshes.mesh_of(any_devices, axis_type), each(op, P("a", None, "b"), P())
    if not op.derived:
        return assert_mesh_gives(mesh, op, specs)
    # Not dequantised: of parts of rows some values are neighbours of those of whole ones, and are to be seen as such.
    actual, _ = meshes.on_mesh(mesh, op.function, sequences_of(op), specs)
    meshes.assert_parts_close(*jax.device_get((actual, jax.jit(op.function)(*sequences_of(op)))))


@pytest.mark.parametrize("op", [table.NORMS[1], table.GATED[0], table.GROUPED[0], table.GROUP_NORMS[1]], ids=str)
def test_the_type_of_a_result_of_parts_of_rows(any_devices, op):
    mesh, spec = meshes.mesh_of(any_devices, AxisType.Explicit), P("a", None, "b")
    with jax.set_mesh(mesh):
        y, *_ = jax.jit(op.run())(*meshes.placed(mesh, sequences_of(op), each(op, spec, P())))
    assert jax.typeof(y).sharding.spec == spec


def shard(devices, function, in_specs, out_specs):
    return jax.shard_map(function, mesh=meshes.mesh_of(devices, AxisType.Auto), in_specs=in_specs, out_specs=out_specs)


# A replicated weight meets rows that differ over the mesh: its gradient is the sum over the mesh.
@over(WITH_HEADS, specs=lambda op: [*whole_row_specs(op), *([PART_OF_HEADS] if op in table.PER_HEAD else [])])
def test_shard_map_of_grad(any_devices, op, specs):
    specs = each(op, *specs)
    gradients = shard(any_devices, op.gradient(), specs, of_gradients(op, specs))
    assert_same(op, jax.jit(gradients)(*sequences_of(op)), expected(op)[1])


# Of two arrays the first or the second varies over the mesh: the other's gradient is summed, too.
@over([op for op in table.EACH if op.arrays == 2], varying=lambda op: [0, 1], outside=lambda op: [True, False])
def test_shard_map_where_one_array_varies(any_devices, op, varying, outside):
    args, parts = list(sequences_of(op)), meshes.mesh_of(any_devices, AxisType.Auto).shape["a"]
    args[1 - varying] = args[1 - varying][: 8 // parts]
    specs = tuple(P("a") if i == varying else P() for i in range(len(args)))
    if outside:
        gradients = op.gradient(shard(any_devices, op.run(), specs, P("a")))
    else:
        gradients = shard(any_devices, op.gradient(), specs, of_gradients(op, specs))

    def repeated(*args):
        tiled = [jnp.tile(a, (parts, *[1] * (a.ndim - 1))) if i == 1 - varying else a for i, a in enumerate(args)]
        return op.run()(*tiled)

    assert_same(op, jax.jit(gradients)(*args), jax.jit(op.gradient(repeated))(*args))


@pytest.mark.parametrize("op", [*table.NORMS, table.GATED[0]], ids=str)
def test_shard_map_without_a_weight(any_devices, op):
    args, specs = sequences_of(op)[:-1], each(op, P("a"), P())[:-1]
    gradient = op.gradient(argnums=tuple(range(len(args))))
    assert_same(op, jax.jit(shard(any_devices, gradient, specs, specs))(*args), gradient(*args))


@pytest.mark.parametrize("op", [op for op in table.EACH if not op.derived], ids=str)
def test_second_derivative_in_shard_map(any_devices, op):
    second, specs = jax.grad(lambda *args: jnp.sin(op.gradient(argnums=0)(*args)).sum(), op.all), each(op, P("a"), P())
    assert_alike(op, shard(any_devices, second, specs, of_gradients(op, specs)), second)


@pytest.mark.parametrize("op", table.EACH, ids=str)
def test_vmap_in_shard_map(any_devices, op):
    whole = jax.vmap(op.run(), each(op, 1, None), 1)
    function = shard(any_devices, whole, each(op, P("a"), P()), P("a"))
    assert_alike(op, loss_and_gradients(op, function), loss_and_gradients(op, whole))


# vmap makes x vary over one mesh axis more after the op was traced: the weights have to follow.
@pytest.mark.parametrize("op", table.EACH, ids=str)
def test_vmap_of_shard_map_over_a_mesh_axis(any_devices, op):
    axes, sharded = each(op, 0, None), shard(any_devices, op.run(), each(op, P("b"), P()), P("b"))
    function, whole = jax.vmap(sharded, axes, spmd_axis_name="a"), jax.vmap(op.run(), axes)
    assert_alike(op, loss_and_gradients(op, function), loss_and_gradients(op, whole))


@pytest.mark.parametrize("op", table.NORMS, ids=str)
def test_scan_in_shard_map(any_devices, op):
    def layers(*args):
        return jax.lax.scan(lambda y, _: (y + op.norm()(y, *args[1:]), None), args[0], length=3)[0]

    def results(function):
        return jax.value_and_grad(lambda *args: jnp.sin(function(*args)).sum(), (0, 1, 2))

    assert_alike(op, results(shard(any_devices, layers, each(op, P("a"), P()), P("a"))), results(layers))
