"""Law 7 for the quantised norms: what works on the formula works on them and gives the same."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ADDS, KINDS, bits, draw_bias, draw_residual, draw_scale, draw_x, formula, operands
from hlo import compiled_text, count_native_calls
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from native import is_built, native_calls, target
from quantizing import GRANULARITIES, draw_smooth, quantize
from test_sharding import mesh_of
from test_transformations import assert_close
from transformations import POLICIES, TRANSFORMATIONS, loss_of

from jaxnorm import Quantization, Quantized

DIMS = (6, 10)
INT8 = Quantization("int8")

kinds = pytest.mark.parametrize("kind", KINDS)
# In its weights the quantised norm is not linear.
transformations = pytest.mark.parametrize("name", sorted({*TRANSFORMATIONS} - {"linear_transpose in the weights"}))


def dequantized(kind, quantization=INT8):
    return lambda *args: quantize(kind, quantization, None, straight_through=True)(*args).dequantize()


def convention(kind):
    """The straight-through gradient as anyone would write it in jnp."""

    def function(*args):
        y = formula(kind)(*args)
        scales = jnp.abs(y).max(-1, keepdims=True) / 127
        return y + jax.lax.stop_gradient(scales * jnp.round(y / scales) - y)

    return function


@cache
def compiled(name):
    """Of LayerNorm, which has all statistics and weights."""
    return jax.jit(TRANSFORMATIONS[name].transform(dequantized("layer"))).lower(*operands(DIMS)).compile()


@transformations
def test_transformed(name):
    assert_close(
        compiled(name)(*operands(DIMS)), jax.jit(TRANSFORMATIONS[name].transform(convention("layer")))(*operands(DIMS))
    )


@transformations
def test_native_calls_in_the_compiled_program(name):
    _, fwd, bwd = TRANSFORMATIONS[name]
    calls = count_native_calls(compiled(name).as_text())
    ways = (("quantized_fwd", fwd), ("bwd", bwd))
    counted = {target("layer", way) for way, count in ways if count is not None}
    counts = {name: count for name, count in calls.items() if name in counted}
    assert counts == native_calls("layer", quantized=fwd or 0, bwd=bwd or 0)


@pytest.mark.parametrize("name", ["call", "grad", "hessian", "vmap over x", "vmap over scale", "scan"])
@kinds
def test_transformed_outside_jit(kind, name):
    transform = TRANSFORMATIONS[name].transform
    assert_close(transform(dequantized(kind))(*operands(DIMS)), transform(convention(kind))(*operands(DIMS)))


@pytest.mark.parametrize("name", POLICIES)
def test_gradient_under_a_checkpoint_policy(name):
    layer = jax.checkpoint(dequantized("rms"), policy=POLICIES[name].policy)
    gradient = jax.jit(jax.grad(loss_of(layer), (0, 1, 2)))
    assert_close(gradient(*operands(DIMS)), jax.grad(loss_of(convention("rms")), (0, 1, 2))(*operands(DIMS)))
    calls = count_native_calls(gradient.lower(*operands(DIMS)).as_text())
    assert calls == native_calls("rms", quantized=POLICIES[name].fwd, bwd=1)


def draw_operands(dims):
    """All that a quantised norm may have: (x, scale, bias, smooth, residual)."""
    features = dims[-1:]
    return draw_x(dims), draw_scale(features), draw_bias(features), draw_smooth(features), draw_residual(dims)


# Over three examples of one operand, and of every one: the same bits as one by one.
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("moved", [(0,), (4,), (0, 4)], ids=str)
@kinds
def test_vmap_over_rows(kind, moved, granularity):
    function = quantize(kind, Quantization("float8_e5m2", **GRANULARITIES[granularity]))
    args = draw_operands((6, 128))
    axes = [0 if i in moved else None for i in range(5)]
    examples = [jnp.stack([a, 2 * a, jnp.sin(a)]) if i in moved else a for i, a in enumerate(args)]
    batched = jax.jit(jax.vmap(function, axes)).lower(*examples).compile()
    assert count_native_calls(batched.as_text()) == native_calls(kind, quantized=1)
    one_by_one = [function(*(a[i] if j in moved else a for j, a in enumerate(examples))) for i in range(3)]
    assert bits(batched(*examples)) == bits(jax.tree.map(lambda *leaves: jnp.stack(leaves), *one_by_one))


# These are the formula: it adds in another order than the kernel, so that a number on a tie may go either way.
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("moved", [(1,), (2,), (3,), (0, 1, 2, 3, 4)], ids=str)
@kinds
def test_vmap_over_weights(kind, moved, granularity):
    function = quantize(kind, Quantization("int8", **GRANULARITIES[granularity]))
    args = draw_operands((6, 128))
    axes = [0 if i in moved else None for i in range(5)]
    examples = [jnp.stack([a, 2 * a, jnp.sin(a)]) if i in moved else a for i, a in enumerate(args)]
    batched, total = jax.jit(jax.vmap(function, axes))(*examples)
    for i in range(3):
        one, one_total = function(*(a[i] if j in moved else a for j, a in enumerate(examples)))
        assert_close((batched.scales[i], total[i]), (one.scales, one_total))
        differences = np.abs(np.int32(batched.values[i]) - np.int32(one.values))
        assert (differences.max() <= 1, differences.mean() < 0.01) == (True, True)


@kinds
def test_a_donated_residual_becomes_the_sum(kind):
    x, residual = draw_x(DIMS, "bfloat16"), draw_residual(DIMS)
    for granularity in ("token", "tensor"):
        quantization = Quantization("int8", **GRANULARITIES[granularity])

        def function(x, residual, quantization=quantization):
            return quantize(kind, quantization)(x, None, None, None, residual)

        expected = bits(function(x, residual))
        compiled = jax.jit(function, donate_argnums=1).lower(x, residual).compile()
        assert f"f32[{DIMS[0]},{DIMS[1]}]{{1,0}} copy(" not in compiled.as_text()
        assert bits(compiled(x, jnp.array(residual))) == expected


def with_residual(kind, granularity):
    """What is dequantised, and the sum."""
    quantization = Quantization("float8_e4m3fn", **GRANULARITIES[granularity])

    def function(*args):
        quantized, total = quantize(kind, quantization, None, straight_through=True)(*args)
        return quantized.dequantize(), total

    return function


def loss(function):
    def of_both(*args):
        y, total = function(*args)
        return (y * jnp.cos(total)).sum()

    return of_both


def gradients(function):
    return jax.grad(loss(function), (0, 1, 2, 4))


SHARDED = pytest.mark.parametrize("granularity", ["token", "tensor", "groups of 64"])


@SHARDED
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@kinds
def test_rows_on_a_mesh(devices, kind, axis_type, granularity):
    mesh = mesh_of(devices, axis_type)
    function, args = with_residual(kind, granularity), draw_operands((8, 128))
    expected = jax.jit(lambda *args: (function(*args), gradients(function)(*args)))(*args)
    with jax.set_mesh(mesh):
        specs = (P("a"), P(), P(), P(), P("a"))
        placed = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(args, specs, strict=True)]
        assert_close(jax.jit(lambda *args: (function(*args), gradients(function)(*args)))(*placed), expected)


@SHARDED
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@kinds
def test_a_sharded_feature_axis(devices, kind, axis_type, granularity):
    mesh, args = mesh_of(devices, axis_type), draw_operands((8, 128))
    function = jax.jit(quantize(kind, Quantization("float8_e4m3fn", **GRANULARITIES[granularity]), None))

    def dequantized(quantized, total):
        # Not in the formula's program, where XLA may leave the values unrounded.
        return quantized.dequantize(), total

    expected = dequantized(*function(*args))
    with jax.set_mesh(mesh):
        specs = (P(None, "b"), P(), P(), P(), P(None, "b"))
        placed = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(args, specs, strict=True)]
        assert_close(dequantized(*function(*placed)), expected)


# The weights are replicated: their gradients are summed over the mesh.
@SHARDED
@kinds
def test_shard_map_of_grad(devices, kind, granularity):
    mesh = mesh_of(devices, AxisType.Auto)
    function, args = with_residual(kind, granularity), draw_operands((8, 128))
    specs = (P("a"), P(), P(), P(), P("a"))
    out_specs = (P("a"), P(), P(), P("a"))
    sharded = jax.shard_map(gradients(function), mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=True)
    assert_close(jax.jit(sharded)(*args), jax.jit(gradients(function))(*args))


@kinds
def test_grad_of_shard_map_where_only_the_residual_varies(devices, kind):
    mesh = mesh_of(devices, AxisType.Auto)
    function = with_residual(kind, "token")
    x, *weights, residual = draw_operands((8, 128))
    rows = 8 // mesh.shape["a"]
    sharded = jax.shard_map(
        function, mesh=mesh, in_specs=(P(), P(), P(), P(), P("a")), out_specs=(P("a"), P("a")), check_vma=True
    )

    def repeated(x, *args):
        return function(jnp.tile(x, (mesh.shape["a"], 1)), *args)

    args = (x[:rows], *weights, residual)
    assert_close(jax.jit(gradients(sharded))(*args), jax.jit(gradients(repeated))(*args))


@pytest.mark.parametrize("granularity", GRANULARITIES)
@kinds
def test_exported_for_every_platform_and_any_number_of_rows(kind, granularity):
    (rows,) = export.symbolic_shape("rows")
    x, features = jax.ShapeDtypeStruct((rows, 128), jnp.float32), jax.ShapeDtypeStruct((128,), jnp.float32)
    function = with_residual(kind, granularity)
    program = export.export(jax.jit(gradients(function)), platforms=("cpu", "cuda", "tpu"))(
        x, features, features, features, x
    )
    each = is_built("cpu") + is_built("gpu")
    calls = {target(kind, "quantized_fwd"): each, target(kind, "bwd"): each} if each else {}
    assert count_native_calls(program.mlir_module()) == calls
    args = draw_operands((5, 128))
    assert_close(export.deserialize(program.serialize()).call(*args), jax.jit(gradients(function))(*args))


# The result itself, as a program of inference has it.
@pytest.mark.parametrize("to", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_an_exported_result(to):
    function = quantize("rms", Quantization(to))
    program = export.deserialize(export.export(function, platforms=("cpu", "cuda", "tpu"))(draw_x(DIMS)).serialize())
    assert isinstance(program.call(draw_x(DIMS)), Quantized)
    assert bits(program.call(draw_x(DIMS))) == bits(function(draw_x(DIMS)))


# A stack of layers as a scan over the residual stream.
@kinds
def test_grad_of_scan(kind):
    def gradient(add):
        def stack(x, residual, scale):
            def layer(stream, scale):
                y, residual = add(*stream, scale)
                return (jnp.tanh(y), residual), None

            y, residual = jax.lax.scan(layer, (x, residual), jnp.stack([scale, 2 * scale, scale + 1]))[0]
            return (y * jnp.sin(residual)).sum()

        return jax.jit(jax.grad(stack, (0, 1, 2)))

    def quantized(x, residual, scale):
        result, total = quantize(kind, INT8, None, straight_through=True)(x, scale, None, None, residual)
        return result.dequantize(), total

    def by_convention(x, residual, scale):
        total = x + residual
        return convention(kind)(total, scale), total

    args = draw_x(DIMS), draw_residual(DIMS), draw_scale(DIMS[-1:])
    assert_close(gradient(quantized)(*args), gradient(by_convention)(*args))
    assert count_native_calls(compiled_text(gradient(quantized), *args)) == native_calls(kind, quantized=1, bwd=1)


@kinds
def test_evaluated_for_its_shape_only(kind):
    x = jax.ShapeDtypeStruct((2**40, 128), "bfloat16")
    result = jax.eval_shape(quantize(kind, Quantization("float8_e4m3fn", "group", 64)), x)
    assert (result.values.shape, result.values.dtype) == ((2**40, 128), jnp.float8_e4m3fn)
    assert (result.scales.shape, result.scales.dtype) == ((2**40, 2), jnp.float32)


def test_no_native_call_for_a_tpu():
    traced = jax.jit(gradients(with_residual("layer", "token"))).trace(*draw_operands((5, 128)))
    assert "custom_call" not in traced.lower(lowering_platforms=("tpu",)).as_text()


# The norm of the sum and its quantisation are one call where the kernels of both exist.
def test_with_a_residual_the_sum_is_that_of_the_plain_norm():
    x, scale, _, _, residual = draw_operands(DIMS)
    _, total = quantize("rms", INT8)(x, scale, None, None, residual)
    np.testing.assert_array_equal(total, ADDS["rms"](x, residual, scale)[1])
