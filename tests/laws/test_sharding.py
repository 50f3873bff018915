"""Law 7 on meshes: the same values and gradients wherever the rows live."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import pytest
from cases import assert_close, assert_near
from coverage import over
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import assert_parts_close, mesh_of, placed
from table import EACH, GATED, GROUP_NORMS, GROUPED, NORMS, OPS, PER_HEAD

pytestmark = pytest.mark.jax_version

# Rows over one mesh axis, over two, on the batch or the sequence axis; all rows everywhere.
ROW_SPECS = [P("a"), P(("a", "b")), P("a", "b"), P(None, "b"), P()]
AXIS_TYPES = [AxisType.Auto, AxisType.Explicit]


def row_specs(op):
    return ROW_SPECS


def whole_row_specs(op):
    """Those that split no row: in a `shard_map` a part of one would be taken for a row."""
    return [spec for spec in ROW_SPECS if not (op.has_positions and spec[1:])]


def size_of(op):
    """A batch of sequences of its rows."""
    return op.small._replace(dims=(8, 4, *op.small.dims[1:]))


WHOLE = P()


def specs_of(op, spec, weight_spec=WHOLE):
    return (*[spec] * op.arrays, *[weight_spec] * len(op.weights))


def place(op, mesh, spec, weight_spec=WHOLE):
    return placed(mesh, op.draw(size_of(op)), specs_of(op, spec, weight_spec))


def assert_same(op, actual, expected):
    """With a gate or a factor that depends on the sum, large numbers cancel to small ones."""
    (assert_near if op in (*NORMS, *PER_HEAD) else assert_close)(actual, expected)


def loss_and_gradients(op, function=None):
    return jax.value_and_grad(op.loss(function), op.all)


@cache
def expected(op):
    """On one device."""
    return jax.device_get(jax.jit(loss_and_gradients(op))(*op.draw(size_of(op))))


@over(OPS, default=EACH, axis_type=lambda op: AXIS_TYPES, spec=row_specs)
def test_rows_on_a_mesh(devices, op, axis_type, spec):
    mesh = mesh_of(devices, axis_type)
    with jax.set_mesh(mesh):
        assert_same(op, jax.device_get(jax.jit(loss_and_gradients(op))(*place(op, mesh, spec))), expected(op))


@over(OPS, default=EACH, spec=row_specs)
def test_an_explicit_mesh_is_in_the_results_type(devices, op, spec):
    mesh = mesh_of(devices, AxisType.Explicit)
    with jax.set_mesh(mesh):
        args = place(op, mesh, spec)
        gradients = jax.jit(op.gradient())(*args)
    assert [jax.typeof(g).sharding for g in gradients] == [jax.typeof(args[i]).sharding for i in op.all]


# An op of two arrays, of which one is the same everywhere.
@over([op for op in OPS if op.arrays == 2], default=EACH, axis_type=lambda op: AXIS_TYPES)
def test_one_array_is_everywhere(devices, op, axis_type):
    mesh = mesh_of(devices, axis_type)
    with jax.set_mesh(mesh):
        args = place(op, mesh, P("a"))
        args[1] = jax.device_put(args[1], NamedSharding(mesh, P()))
        assert_same(op, jax.device_get(jax.jit(loss_and_gradients(op))(*args)), expected(op))


# Groups have to stay whole, and a padded result is in ops/added_norm.py.
WITH_FEATURES = [op for op in OPS if not {"group_size", "pad_to"} & {*op.small.options} and len(op.small.dims) == 2]


@over([op for op in WITH_FEATURES if not op.derived], default=EACH, axis_type=lambda op: AXIS_TYPES)
def test_a_sharded_feature_axis(devices, op, axis_type):
    mesh = mesh_of(devices, axis_type)
    with jax.set_mesh(mesh):
        actual = jax.device_get(jax.jit(loss_and_gradients(op))(*place(op, mesh, P("a", None, "b"))))
    assert_same(op, actual, expected(op))


# Not dequantised: of parts of rows some values are neighbours of those of whole ones, and are to be seen as such.
@over([op for op in WITH_FEATURES if op.derived], default=EACH, axis_type=lambda op: AXIS_TYPES)
def test_a_sharded_feature_axis_of_a_quantised_result(devices, op, axis_type):
    mesh, results = mesh_of(devices, axis_type), jax.jit(op.function)
    with jax.set_mesh(mesh):
        actual = jax.device_get(results(*place(op, mesh, P("a", None, "b"))))
    assert_parts_close(actual, jax.device_get(results(*op.draw(size_of(op)))))


# Scale is whole on each device and x is not: it is split by itself, and its gradient is whole again.
@pytest.mark.parametrize("op", [NORMS[1], GATED[0], GROUPED[0], GROUP_NORMS[1]], ids=str)
def test_features_with_whole_weights_on_an_explicit_mesh(devices, op):
    mesh = mesh_of(devices, AxisType.Explicit)
    with jax.set_mesh(mesh):
        args = place(op, mesh, P("a", None, "b"))
        actual = jax.jit(op.gradient())(*args)
        assert jax.typeof(jax.jit(op.run())(*args)[0]).sharding.spec == P("a", None, "b")
        assert [jax.typeof(g).sharding for g in actual] == [jax.typeof(args[i]).sharding for i in op.all]
    assert_same(op, jax.device_get(actual), expected(op)[1])


# The batch, the sequence or the heads are sharded, and of the weights nothing or the heads.
@over(
    PER_HEAD,
    axis_type=lambda op: AXIS_TYPES,
    specs=lambda op: [(P("a"), P()), (P(None, "b"), P()), (P(None, None, "b"), P()), (P("a", None, "b"), P("b"))],
)
def test_heads_on_a_mesh(devices, op, axis_type, specs):
    mesh = mesh_of(devices, axis_type)
    with jax.set_mesh(mesh):
        args = place(op, mesh, *specs)
        actual = jax.jit(op.gradient())(*args)
    assert_same(op, jax.device_get(actual), expected(op)[1])
    if axis_type is AxisType.Explicit:
        assert [jax.typeof(g).sharding for g in actual] == [jax.typeof(a).sharding for a in args]


@over(OPS, default=EACH, spec=whole_row_specs)
def test_grad_of_shard_map(devices, op, spec):
    mesh = mesh_of(devices, AxisType.Auto)
    function = jax.shard_map(op.run(), mesh=mesh, in_specs=specs_of(op, spec), out_specs=spec, check_vma=True)
    assert_same(op, jax.jit(loss_and_gradients(op, function))(*place(op, mesh, spec)), expected(op))


# A replicated weight meets rows that differ over the mesh: its gradient is the sum over the mesh.
@over(OPS, default=EACH, spec=whole_row_specs)
def test_shard_map_of_grad(devices, op, spec):
    mesh = mesh_of(devices, AxisType.Auto)
    specs = specs_of(op, spec)
    gradients = jax.shard_map(
        op.gradient(), mesh=mesh, in_specs=specs, out_specs=tuple(specs[i] for i in op.all), check_vma=True
    )
    assert_same(op, jax.jit(gradients)(*place(op, mesh, spec)), expected(op)[1])


# Sharded weights go with their heads.
@pytest.mark.parametrize("op", PER_HEAD, ids=str)
def test_shard_map_of_grad_of_heads(devices, op):
    mesh = mesh_of(devices, AxisType.Auto)
    specs = specs_of(op, P("a", None, "b"), P("b"))
    gradients = jax.shard_map(op.gradient(), mesh=mesh, in_specs=specs, out_specs=specs, check_vma=True)
    assert_same(op, jax.jit(gradients)(*placed(mesh, op.draw(size_of(op)), specs)), expected(op)[1])


# Of two arrays the first or the second varies over the mesh: the other's gradient is summed, too.
@over([op for op in OPS if op.arrays == 2], default=EACH, varying=lambda op: [0, 1], outside=lambda op: [True, False])
def test_shard_map_where_one_array_varies(devices, op, varying, outside):
    mesh = mesh_of(devices, AxisType.Auto)
    args = list(op.draw(size_of(op)))
    parts = mesh.shape["a"]
    args[1 - varying] = args[1 - varying][: 8 // parts]
    specs = [P("a") if i == varying else P() for i in range(len(args))]
    shard = partial(jax.shard_map, mesh=mesh, in_specs=tuple(specs), check_vma=True)
    if outside:
        gradients = op.gradient(shard(op.run(), out_specs=P("a")))
    else:
        gradients = shard(op.gradient(), out_specs=tuple(specs[i] for i in op.all))

    def repeated(*args):
        tiled = [jnp.tile(a, (parts, *[1] * (a.ndim - 1))) if i == 1 - varying else a for i, a in enumerate(args)]
        return op.run()(*tiled)

    assert_same(op, jax.jit(gradients)(*args), jax.jit(op.gradient(repeated))(*args))


@pytest.mark.parametrize("op", [*NORMS, GATED[0]], ids=str)
def test_shard_map_without_a_weight(devices, op):
    mesh = mesh_of(devices, AxisType.Auto)
    args = op.draw(size_of(op))[:-1]
    specs = specs_of(op, P("a"))[:-1]
    argnums = tuple(range(len(args)))
    gradients = jax.shard_map(op.gradient(argnums=argnums), mesh=mesh, in_specs=specs, out_specs=specs)
    assert_same(op, jax.jit(gradients)(*placed(mesh, args, specs)), op.gradient(argnums=argnums)(*args))


@pytest.mark.parametrize("op", [op for op in EACH if not op.derived], ids=str)
def test_second_derivative_in_shard_map(devices, op):
    second = jax.grad(lambda *args: jnp.sin(op.gradient(argnums=0)(*args)).sum(), op.all)
    mesh = mesh_of(devices, AxisType.Auto)
    specs = specs_of(op, P("a"))
    out_specs = tuple(specs[i] for i in op.all)
    gradients = jax.shard_map(second, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=True)
    assert_same(op, jax.jit(gradients)(*place(op, mesh, P("a"))), jax.jit(second)(*op.draw(size_of(op))))


@pytest.mark.parametrize("op", EACH, ids=str)
def test_vmap_in_shard_map(devices, op):
    mesh = mesh_of(devices, AxisType.Auto)
    specs = specs_of(op, P("a"))
    axes = (*[1] * op.arrays, *[None] * len(op.weights))
    whole = jax.vmap(op.run(), axes, 1)
    function = jax.shard_map(whole, mesh=mesh, in_specs=specs, out_specs=P("a"))
    actual, args = jax.jit(loss_and_gradients(op, function))(*place(op, mesh, P("a"))), op.draw(size_of(op))
    assert_same(op, actual, jax.jit(loss_and_gradients(op, whole))(*args))


# vmap makes x vary over one mesh axis more after the op was traced: the weights have to follow.
@pytest.mark.parametrize("op", EACH, ids=str)
def test_vmap_of_shard_map_over_a_mesh_axis(devices, op):
    mesh = mesh_of(devices, AxisType.Auto)
    axes = (*[0] * op.arrays, *[None] * len(op.weights))
    sharded = jax.shard_map(op.run(), mesh=mesh, in_specs=specs_of(op, P("b")), out_specs=P("b"))
    function, args = jax.vmap(sharded, axes, spmd_axis_name="a"), op.draw(size_of(op))
    whole = jax.vmap(op.run(), axes)
    assert_same(op, jax.jit(loss_and_gradients(op, function))(*args), jax.jit(loss_and_gradients(op, whole))(*args))


@pytest.mark.parametrize("op", NORMS, ids=str)
def test_scan_in_shard_map(devices, op):
    def layers(*args):
        return jax.lax.scan(lambda y, _: (y + op.norm()(y, *args[1:]), None), args[0], length=3)[0]

    def results(function):
        return jax.jit(jax.value_and_grad(lambda *args: jnp.sin(function(*args)).sum(), (0, 1, 2)))

    mesh = mesh_of(devices, AxisType.Auto)
    sharded = jax.shard_map(layers, mesh=mesh, in_specs=specs_of(op, P("a")), out_specs=P("a"), check_vma=True)
    args = op.draw(size_of(op))
    assert_same(op, results(sharded)(*place(op, mesh, P("a"))), results(layers)(*args))
