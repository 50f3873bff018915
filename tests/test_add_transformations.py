"""Law 7 for the norms of x + residual: what works on the formula works on them and gives the same."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ADDS, KINDS, draw, draw_bias, draw_residual, draw_scale, draw_x, formula, operands
from hlo import count_native_calls
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from native import is_built, native_calls, target
from test_sharding import mesh_of
from test_transformations import assert_close
from transformations import POLICIES, TRANSFORMATIONS, loss_of

DIMS = (6, 10)

kinds = pytest.mark.parametrize("kind", KINDS)
# A primitive that gives y and the sum is transposed in a weight for y only, so that has a test of its own below.
IN_WEIGHTS = "linear_transpose in the weights"
transformations = pytest.mark.parametrize("name", [name for name in TRANSFORMATIONS if name != IN_WEIGHTS])


def add_formula(kind):
    return lambda x, residual, scale=None, bias=None: (formula(kind)(x + residual, scale, bias), x + residual)


def of_x(add):
    """A function of (x, scale, bias) that depends on both results and is linear in each weight, as a norm is."""

    def function(x, scale=None, bias=None):
        y, total = add(x, jnp.cos(x), scale, bias)
        return y * jnp.sin(total)

    return function


@cache
def compiled(kind, name):
    return jax.jit(TRANSFORMATIONS[name].transform(of_x(ADDS[kind]))).lower(*operands(DIMS)).compile()


@cache
def expected(kind, name):
    return jax.jit(TRANSFORMATIONS[name].transform(of_x(add_formula(kind))))(*operands(DIMS))


@transformations
@kinds
def test_transformed_and_compiled(kind, name):
    assert_close(compiled(kind, name)(*operands(DIMS)), expected(kind, name))


@transformations
@kinds
def test_transformed_outside_jit(kind, name):
    assert_close(TRANSFORMATIONS[name].transform(of_x(ADDS[kind]))(*operands(DIMS)), expected(kind, name))


@transformations
@kinds
def test_native_calls_in_the_compiled_program(kind, name):
    _, fwd, bwd = TRANSFORMATIONS[name]
    calls = count_native_calls(compiled(kind, name).as_text())
    counted = {target(kind, way) for way, count in (("fwd", fwd), ("bwd", bwd)) if count is not None}
    assert {name: count for name, count in calls.items() if name in counted} == native_calls(kind, fwd or 0, bwd or 0)


@kinds
def test_linear_transpose_in_the_weights(kind):
    def of_y(add):
        return TRANSFORMATIONS[IN_WEIGHTS].transform(lambda x, *weights: add(x, jnp.cos(x), *weights)[0])

    assert_close(of_y(ADDS[kind])(*operands(DIMS)), of_y(add_formula(kind))(*operands(DIMS)))


@pytest.mark.parametrize("name", POLICIES)
@kinds
def test_gradient_under_a_checkpoint_policy(kind, name):
    def gradient(add):
        layer = jax.checkpoint(of_x(add), policy=POLICIES[name].policy)
        return jax.jit(jax.grad(loss_of(layer), (0, 1, 2)))

    assert_close(gradient(ADDS[kind])(*operands(DIMS)), gradient(add_formula(kind))(*operands(DIMS)))


def draw_operands(dims):
    return draw_x(dims), draw_residual(dims), draw_scale(dims[-1:]), draw_bias(dims[-1:])


def loss(add):
    def function(*args):
        y, total = add(*args)
        return (jnp.sin(y) * jnp.cos(total)).sum()

    return function


ALL = (0, 1, 2, 3)
OF_EVERY_OPERAND = {
    "both results": lambda add: add,
    "grad": lambda add: jax.grad(loss(add), ALL),
    "hessian": lambda add: jax.hessian(loss(add), ALL),
    "grad of grad": lambda add: jax.grad(
        lambda *args: sum(jnp.sin(g).sum() for g in jax.grad(loss(add), ALL)(*args)), ALL
    ),
    "jvp of grad": lambda add: lambda *args: jax.jvp(jax.grad(loss(add), ALL), args, tuple(map(jnp.cos, args))),
    "jvp of the residual": lambda add: (
        lambda x, r, s, b: jax.jvp(lambda r: add(x, r, s, b), (r,), (jnp.cos(r),))  # the others stand still
    ),
    "jvp of the scale": lambda add: lambda x, r, s, b: jax.jvp(lambda s: add(x, r, s, b), (s,), (jnp.cos(s),)),
    "grad of the scale twice": lambda add: jax.grad(lambda *args: jnp.sin(jax.grad(loss(add), 2)(*args)).sum(), ALL),
    "transpose of vjp": lambda add: (
        lambda *args: jax.linear_transpose(jax.vjp(add, *args)[1], add(*args))(tuple(map(jnp.cos, args)))
    ),
}


@pytest.mark.parametrize("name", OF_EVERY_OPERAND)
@kinds
def test_of_every_operand(kind, name):
    args = draw_operands(DIMS)
    transform = OF_EVERY_OPERAND[name]
    assert_close(jax.jit(transform(ADDS[kind]))(*args), jax.jit(transform(add_formula(kind)))(*args))


# Over three examples of one operand, and of every one; of both results, and of the gradients.
@pytest.mark.parametrize("what", ["both results", "grad"])
@pytest.mark.parametrize("moved", [(0,), (1,), (2,), (3,), (0, 1), ALL], ids=str)
@kinds
def test_vmap(kind, moved, what):
    args = draw_operands(DIMS)
    axes = [0 if i in moved else None for i in ALL]
    examples = [jnp.stack([a, 2 * a, jnp.sin(a)]) if i in moved else a for i, a in enumerate(args)]
    transform = OF_EVERY_OPERAND[what]
    assert_close(
        jax.jit(jax.vmap(transform(ADDS[kind]), axes))(*examples),
        jax.jit(jax.vmap(transform(add_formula(kind)), axes))(*examples),
    )


@pytest.mark.parametrize("moved", [(0,), (1,), (0, 1)], ids=str)
@kinds
def test_rows_by_vmap_are_one_call_each_way(kind, moved):
    x, residual, scale, _ = draw_operands(DIMS)
    axes = [0 if i in moved else None for i in (0, 1)]
    examples = [jnp.stack([a] * 3) if i in moved else a for i, a in enumerate((x, residual))]
    gradients = jax.vmap(jax.grad(loss(lambda x, r: ADDS[kind](x, r, scale)), (0, 1)), axes)
    text = jax.jit(gradients).lower(*examples).compile().as_text()
    assert count_native_calls(text) == native_calls(kind, fwd=1, bwd=1)


# A stack of layers as a scan over the residual stream.
@kinds
def test_grad_of_scan(kind):
    def gradient(add):
        def stack(x, residual, scale, bias):
            def layer(stream, scale):
                y, residual = add(*stream, scale, bias)
                return (jnp.tanh(y), residual), None

            y, residual = jax.lax.scan(layer, (x, residual), jnp.stack([scale, 2 * scale, scale + 1]))[0]
            return (y * jnp.sin(residual)).sum()

        return jax.jit(jax.grad(stack, ALL))

    args = draw_operands(DIMS)
    assert_close(gradient(ADDS[kind])(*args), gradient(add_formula(kind))(*args))
    text = gradient(ADDS[kind]).lower(*args).compile().as_text()
    assert count_native_calls(text) == native_calls(kind, fwd=1, bwd=1)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@kinds
def test_rows_on_a_mesh(devices, kind, axis_type):
    mesh = mesh_of(devices, axis_type)
    args = draw_operands((8, 16))
    with jax.set_mesh(mesh):
        specs = (P("a"), P("a"), P(), P())
        placed = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(args, specs, strict=True)]
        assert_close(jax.jit(jax.grad(loss(ADDS[kind]), ALL))(*placed), jax.grad(loss(add_formula(kind)), ALL)(*args))


# The weights are replicated: their gradients are summed over the mesh, also where the residual is the same everywhere.
@pytest.mark.parametrize("residual_spec", [P("a"), P()], ids=str)
@kinds
def test_shard_map_of_grad(devices, kind, residual_spec):
    mesh = mesh_of(devices, AxisType.Auto)
    x, residual, scale, bias = draw_operands((8, 16))
    residual = residual if residual_spec else jnp.tile(residual[:1], (8 // mesh.shape["a"], 1))
    specs = (P("a"), residual_spec, P(), P())
    gradients = jax.shard_map(
        jax.grad(loss(ADDS[kind]), ALL), mesh=mesh, in_specs=specs, out_specs=specs, check_vma=True
    )
    whole = residual if residual_spec else jnp.tile(residual[:1], (8, 1))
    exact = jax.grad(loss(add_formula(kind)), ALL)(x, whole, scale, bias)
    if not residual_spec:
        folded = exact[1].reshape(mesh.shape["a"], -1, 16).sum(0)
        exact = (exact[0], folded, *exact[2:])
    assert_close(jax.jit(gradients)(x, residual, scale, bias), exact)


@kinds
def test_exported_for_every_platform_and_any_number_of_rows(kind):
    (rows,) = export.symbolic_shape("rows")
    x, features = jax.ShapeDtypeStruct((rows, 64), jnp.float32), jax.ShapeDtypeStruct((64,), jnp.float32)
    gradient = jax.jit(jax.grad(loss(ADDS[kind]), ALL))
    program = export.export(gradient, platforms=("cpu", "cuda", "tpu"))(x, x, features, features)
    each = is_built("cpu") + is_built("gpu")
    calls = {target(kind, "fwd"): each, target(kind, "bwd"): each} if each else {}
    assert count_native_calls(program.mlir_module()) == calls
    args = draw_operands((5, 64))
    reloaded = export.deserialize(program.serialize())
    assert_close(reloaded.call(*args), jax.grad(loss(add_formula(kind)), ALL)(*args))


# A row that meets another dtype on its way: the tangents are cast as the values are.
@kinds
def test_jvp_of_a_bfloat16_x_on_a_float32_stream(kind):
    x, residual = draw("x", DIMS, "bfloat16"), draw_residual(DIMS)
    tangents = draw("x dot", DIMS, "bfloat16"), draw("residual dot", DIMS)
    (y, total), (y_dot, total_dot) = jax.jvp(ADDS[kind], (x, residual), tangents)
    assert [a.dtype for a in (y, total, y_dot, total_dot)] == ["bfloat16", "float32", "bfloat16", "float32"]
    np.testing.assert_array_equal(total_dot, tangents[0].astype("float32") + tangents[1])


@kinds
def test_strict_promotion(kind):
    with jax.numpy_dtype_promotion("strict"):
        x, residual = draw_x(DIMS, "bfloat16"), draw_residual(DIMS)
        y, total = jax.vmap(ADDS[kind])(x, residual)
        assert (y.dtype, total.dtype) == (jnp.bfloat16, jnp.float32)
        assert jax.grad(lambda x: ADDS[kind](x, residual)[1].sum())(x).dtype == jnp.bfloat16
