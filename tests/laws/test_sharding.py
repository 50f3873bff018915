"""Law 7 on meshes: the same values and gradients wherever the rows live."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import KINDS, NORMS, formula, operands
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from transformations import loss_of

DIMS = (8, 4, 16)
# Rows over one mesh axis, over two, on the batch or the sequence axis; all rows everywhere.
ROW_SPECS = [P("a"), P(("a", "b")), P("a", "b"), P(None, "b"), P()]

kinds = pytest.mark.parametrize("kind", KINDS)
row_specs = pytest.mark.parametrize("spec", ROW_SPECS, ids=str)


def mesh_of(devices, axis_type):
    """Two axes; of one device, an axis of one is an axis all the same."""
    shape = (len(devices) // 2, 2) if len(devices) > 1 else (1, 1)
    return Mesh(np.reshape(devices, shape), ("a", "b"), axis_types=(axis_type, axis_type))


def mesh_of_three(devices, names="acb"):
    """Three axes, c of two devices, in the order of names."""
    b = min(2, len(devices) // 2)
    sizes = {"a": len(devices) // (2 * b), "b": b, "c": 2}
    return Mesh(np.reshape(devices, [sizes[name] for name in names]), tuple(names))


def place(mesh, spec):
    x, scale, bias = operands(DIMS)
    weights = [jax.device_put(weight, NamedSharding(mesh, P())) for weight in (scale, bias)]
    return jax.device_put(x, NamedSharding(mesh, spec)), *weights


def loss_and_gradients(norm):
    return jax.value_and_grad(loss_of(norm), (0, 1, 2))


@cache
def expected(kind):
    return jax.jit(loss_and_gradients(formula(kind)))(*operands(DIMS))


def assert_close(actual, expected):
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-4, atol=2e-5), actual, expected)


@row_specs
@kinds
def test_auto_mesh(devices, kind, spec):
    args = place(mesh_of(devices, AxisType.Auto), spec)
    assert_close(jax.jit(loss_and_gradients(NORMS[kind]))(*args), expected(kind))


@row_specs
@kinds
def test_explicit_mesh(devices, kind, spec):
    mesh = mesh_of(devices, AxisType.Explicit)
    with jax.set_mesh(mesh):
        assert_close(jax.jit(loss_and_gradients(NORMS[kind]))(*place(mesh, spec)), expected(kind))


@row_specs
@kinds
def test_an_explicit_mesh_is_in_the_results_type(devices, kind, spec):
    mesh = mesh_of(devices, AxisType.Explicit)
    with jax.set_mesh(mesh):
        args = place(mesh, spec)
        types = [jax.typeof(g).sharding for g in jax.jit(loss_and_gradients(NORMS[kind]))(*args)[1]]
    assert types == [jax.typeof(a).sharding for a in args]


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@kinds
def test_a_sharded_feature_axis(devices, kind, axis_type):
    mesh = mesh_of(devices, axis_type)
    with jax.set_mesh(mesh):
        args = place(mesh, P("a", None, "b"))
        assert_close(jax.jit(loss_and_gradients(NORMS[kind]))(*args), expected(kind))


@row_specs
@kinds
def test_grad_of_shard_map(devices, kind, spec):
    mesh = mesh_of(devices, AxisType.Auto)
    norm = jax.shard_map(NORMS[kind], mesh=mesh, in_specs=(spec, P(), P()), out_specs=spec, check_vma=True)
    assert_close(jax.jit(loss_and_gradients(norm))(*place(mesh, spec)), expected(kind))


# A replicated weight meets rows that differ over the mesh: its gradient is the sum over the mesh.
@row_specs
@kinds
def test_shard_map_of_grad(devices, kind, spec):
    mesh = mesh_of(devices, AxisType.Auto)
    gradients = jax.shard_map(
        jax.grad(loss_of(NORMS[kind]), (0, 1, 2)),
        mesh=mesh,
        in_specs=(spec, P(), P()),
        out_specs=(spec, P(), P()),
        check_vma=True,
    )
    assert_close(jax.jit(gradients)(*place(mesh, spec)), expected(kind)[1])


@kinds
def test_shard_map_without_a_bias(devices, kind):
    mesh = mesh_of(devices, AxisType.Auto)
    gradients = jax.shard_map(
        jax.grad(loss_of(NORMS[kind]), (0, 1)), mesh=mesh, in_specs=(P("a"), P()), out_specs=(P("a"), P())
    )
    exact = jax.grad(loss_of(formula(kind)), (0, 1))(*operands(DIMS)[:2])
    assert_close(jax.jit(gradients)(*place(mesh, P("a"))[:2]), exact)


@kinds
def test_second_derivative_in_shard_map(devices, kind):
    def second(norm):
        return jax.grad(lambda *args: jnp.sin(jax.grad(loss_of(norm))(*args)).sum(), (0, 1, 2))

    mesh = mesh_of(devices, AxisType.Auto)
    gradients = jax.shard_map(
        second(NORMS[kind]), mesh=mesh, in_specs=(P("a"), P(), P()), out_specs=(P("a"), P(), P()), check_vma=True
    )
    assert_close(jax.jit(gradients)(*place(mesh, P("a"))), second(formula(kind))(*operands(DIMS)))


@kinds
def test_vmap_in_shard_map(devices, kind):
    mesh = mesh_of(devices, AxisType.Auto)
    norm = jax.shard_map(
        jax.vmap(NORMS[kind], (1, None, None), 1), mesh=mesh, in_specs=(P("a"), P(), P()), out_specs=P("a")
    )
    assert_close(jax.jit(loss_and_gradients(norm))(*place(mesh, P("a"))), expected(kind))


@kinds
def test_scan_in_shard_map(devices, kind):
    def layers(norm):
        return lambda *args: jax.lax.scan(lambda y, _: (y + norm(y, *args[1:]), None), args[0], length=3)[0]

    mesh = mesh_of(devices, AxisType.Auto)
    norm = jax.shard_map(layers(NORMS[kind]), mesh=mesh, in_specs=(P("a"), P(), P()), out_specs=P("a"), check_vma=True)
    exact = jax.jit(loss_and_gradients(layers(formula(kind))))(*operands(DIMS))
    assert_close(jax.jit(loss_and_gradients(norm))(*place(mesh, P("a"))), exact)


# vmap makes x vary over one mesh axis more after the norm was traced: the weights have to follow.
@kinds
def test_vmap_of_shard_map_over_a_mesh_axis(devices, kind):
    mesh = mesh_of(devices, AxisType.Auto)
    x, scale, bias = operands(DIMS)

    def mapped(norm):
        sharded = jax.shard_map(norm, mesh=mesh, in_specs=(P("b"), P(), P()), out_specs=P("b"))
        return jax.vmap(sharded, (0, None, None), spmd_axis_name="a")

    actual = jax.jit(loss_and_gradients(mapped(NORMS[kind])))(x, scale, bias)
    assert_close(actual, jax.jit(loss_and_gradients(formula(kind)))(x, scale, bias))
