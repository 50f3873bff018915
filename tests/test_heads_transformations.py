"""Law 7 for weights for each head: transformed, exported, on meshes."""

from functools import cache

import jax
import numpy as np
import pytest
from cases import KINDS, NORMS, draw_bias, draw_scale, draw_x, formula, operands
from hlo import count_native_calls
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from native import is_built, native_calls, target
from test_sharding import mesh_of
from test_transformations import assert_close
from transformations import TRANSFORMATIONS, loss_of

kinds = pytest.mark.parametrize("kind", KINDS)

# What treats weights or leading axes in a way of its own; tests of the plain norms have all.
NAMES = (
    "grad of the weights",
    "vjp",
    "linearize",
    "linear_transpose in the weights",
    "linear_transpose of vjp",
    "hessian",
    "vmap over scale",
    "vmap over x and scale",
    "vmap over everything",
    "vmap of grad",
    "vmap of every grad",
    "vmap of every grad of everything",
    "grad of vmap over scale",
    "grad of scan",
    "grad of scan of checkpoint",
    "map over rows",
)


def of_heads(norm):
    """Rows of ten elements are two heads of five."""

    def function(x, scale=None, bias=None):
        weights = [None if weight is None else weight.reshape(2, 5) for weight in (scale, bias)]
        return norm(x.reshape(*x.shape[:-1], 2, 5), *weights).reshape(x.shape)

    return function


@cache
def compiled(kind, name):
    return jax.jit(TRANSFORMATIONS[name].transform(of_heads(NORMS[kind]))).lower(*operands((6, 10))).compile()


@pytest.mark.parametrize("name", NAMES)
@kinds
def test_transformed(kind, name):
    expected = jax.jit(TRANSFORMATIONS[name].transform(of_heads(formula(kind))))(*operands((6, 10)))
    assert_close(compiled(kind, name)(*operands((6, 10))), expected)


@pytest.mark.parametrize("name", [name for name in NAMES if TRANSFORMATIONS[name].bwd is not None])
@kinds
def test_native_calls_in_the_compiled_program(kind, name):
    calls = count_native_calls(compiled(kind, name).as_text())
    _, fwd, bwd = TRANSFORMATIONS[name]
    if fwd is None:
        fwd = calls.get(target(kind, "fwd"), 0)
    assert calls == native_calls(kind, fwd, bwd)


def gradients(norm):
    return jax.jit(jax.grad(loss_of(norm), (0, 1, 2)))


# Any number of examples: before the heads, and within an example before and after them.
@pytest.mark.parametrize(
    ("before", "after", "weight_dims", "has_calls"),
    [("b", (4, 64), (4, 64), True), ("b", (4, 7, 64), (4, 1, 64), True), ("4, b", (64,), (4, 1, 64), False)],
)
@kinds
def test_exported(kind, before, after, weight_dims, has_calls):
    dims = export.symbolic_shape(before) + after
    structs = [jax.ShapeDtypeStruct(shape, "float32") for shape in (dims, weight_dims, weight_dims)]
    program = export.export(gradients(NORMS[kind]), platforms=("cpu", "cuda", "tpu"))(*structs)
    each = (is_built("cpu") + is_built("gpu")) * has_calls
    calls = {target(kind, "fwd"): each, target(kind, "bwd"): each} if each else {}
    assert count_native_calls(program.mlir_module()) == calls
    args = (
        draw_x(tuple(length if isinstance(length, int) else 3 for length in dims)),
        draw_scale(weight_dims),
        draw_bias(weight_dims),
    )
    assert_close(export.deserialize(program.serialize()).call(*args), gradients(formula(kind))(*args))


DIMS, WEIGHT = (8, 6, 4, 16), (4, 16)
# The batch, the sequence or the heads are sharded, and of the weights nothing or the heads.
SPECS = [(P("a"), P()), (P(None, "b"), P()), (P(None, None, "b"), P()), (P("a", None, "b"), P("b"))]
specs = pytest.mark.parametrize(("spec", "weight_spec"), SPECS, ids=str)


@cache
def expected(kind):
    return gradients(formula(kind))(draw_x(DIMS), draw_scale(WEIGHT), draw_bias(WEIGHT))


def place(mesh, spec, weight_spec):
    args = draw_x(DIMS), draw_scale(WEIGHT), draw_bias(WEIGHT)
    placed = zip(args, (spec, weight_spec, weight_spec), strict=True)
    return [jax.device_put(a, NamedSharding(mesh, of_a)) for a, of_a in placed]


@specs
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@kinds
def test_on_a_mesh(devices, kind, axis_type, spec, weight_spec):
    mesh = mesh_of(devices, axis_type)
    with jax.set_mesh(mesh):
        args = place(mesh, spec, weight_spec)
        actual = gradients(NORMS[kind])(*args)
    assert_close(jax.device_get(actual), expected(kind))
    if axis_type is AxisType.Explicit:
        assert [jax.typeof(g).sharding for g in actual] == [jax.typeof(a).sharding for a in args]


# Sharded weights go with their heads; others are the same everywhere and their gradients are summed.
@specs
@kinds
def test_shard_map_of_grad(devices, kind, spec, weight_spec):
    if spec == P(None, None, "b"):
        weight_spec = P("b")
    mesh = mesh_of(devices, AxisType.Auto)
    of_args = (spec, weight_spec, weight_spec)
    mapped = jax.shard_map(gradients(NORMS[kind]), mesh=mesh, in_specs=of_args, out_specs=of_args, check_vma=True)
    assert_close(jax.jit(mapped)(*place(mesh, *of_args[:2])), expected(kind))


# The models of an ensemble on several devices.
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@kinds
def test_an_ensemble_on_a_mesh(devices, kind, axis_type):
    mesh = mesh_of(devices, axis_type)
    args = draw_x((4, 6, 16)), draw_scale((4, 16)), draw_bias((4, 16))

    def ensemble(norm):
        return jax.jit(jax.vmap(jax.grad(loss_of(norm), (0, 1, 2))))

    with jax.set_mesh(mesh):
        placed = [jax.device_put(a, NamedSharding(mesh, P("a"))) for a in args]
        actual = ensemble(NORMS[kind])(*placed)
    jax.tree.map(np.testing.assert_array_equal, [a.shape for a in actual], [a.shape for a in args])
    assert_close(jax.device_get(actual), jax.device_get(ensemble(formula(kind))(*args)))
