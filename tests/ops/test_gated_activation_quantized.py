"""`gated_activation_quantized`, besides the laws of all ops: its derivative, forms, meshes that split columns."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import DTYPES, bits, draw, draw_gate, draw_up
from coverage import cover
from hlo import collectives, compiled_text, count_native_calls
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from meshes import assert_parts_close, mesh_of, placed
from quantizing import GRANULARITIES, STATIC_SCALE, TO, assert_same, by_numpy, static_scale_of
from table import GATED_ACTIVATIONS, QUANTIZED_ACTIVATIONS

import jaxnorm
from jaxnorm import Quantization

DIMS = (8, 4, 256)
PLAIN, OP = GATED_ACTIVATIONS[0], QUANTIZED_ACTIVATIONS[0]
TOKEN = Quantization("int8")


def stacked(dtype="float32"):
    return jnp.stack([draw_gate(DIMS, dtype), draw_up(DIMS, dtype)], -2)


@pytest.mark.on_emulator
@cover(dtype=DTYPES, to=TO, granularity=GRANULARITIES, activation=["silu", "gelu", "gelu_exact", "relu2", "sigmoid"])
@pytest.mark.kernels
def test_it_is_the_float32_result_quantised(dtype, to, granularity, activation):
    quantization, x = Quantization(to, **granularity), stacked(dtype)
    options, scale = {"activation": activation, "axis": -2, "implementation": "native"}, static_scale_of(quantization)
    y = jax.jit(partial(jaxnorm.gated_activation, **options))(x.astype("float32"))
    function = partial(jaxnorm.gated_activation_quantized, quantization=quantization, static_scale=scale, **options)
    actual, (values, scales) = jax.jit(function)(x), by_numpy(y, quantization, static_scale=scale)
    assert_same([actual.values], [values])
    assert_same([actual.scales], [np.float32(STATIC_SCALE) if scale else scales])


# Straight through: the cotangent of what was quantised is rounded to x's dtype, and from there all is as it was.
@cover(dtype=DTYPES, granularity=GRANULARITIES)
def test_the_gradient_is_that_of_the_activation(dtype, granularity):
    quantization, x = Quantization("float8_e4m3fn", **granularity), stacked(dtype)
    dy = draw("dy", DIMS, dtype)
    options = {"quantization": quantization, "static_scale": static_scale_of(quantization), "axis": -2}

    def dequantized(x):
        q = jaxnorm.gated_activation_quantized(x, straight_through=True, **options)
        return q.dequantize().astype(dtype)

    def gradient(function):
        return jax.jit(lambda x, dy: jax.vjp(function, x)[1](dy)[0])(x, dy)

    assert bits(gradient(dequantized)) == bits(gradient(partial(jaxnorm.gated_activation, axis=-2)))


def test_a_derivative_wants_to_be_asked_for():
    with pytest.raises(ValueError, match=r"^gated_activation_quantized: rounded values .*straight_through=True"):
        jax.grad(lambda x: jaxnorm.gated_activation_quantized(x, quantization=TOKEN).dequantize().sum())(jnp.ones(8))


def test_a_gradient_is_one_call_each_way():
    def loss(x):
        q = jaxnorm.gated_activation_quantized(x, quantization=TOKEN, straight_through=True)
        return jnp.sin(q.dequantize()).sum()

    calls = count_native_calls(compiled_text(jax.grad(loss), jnp.concatenate(jnp.split(stacked(), 2, -2), -1)))
    assert calls == {**OP.calls(fwd=1), **PLAIN.calls(bwd=1)}


@pytest.mark.parametrize("name", ["gate", "up"])
def test_float64(name):
    with jax.enable_x64(True):
        arrays = {"gate": jnp.ones((3, 8), "float32"), "up": jnp.ones((3, 8), "float32")}
        arrays[name] = arrays[name].astype("float64")
        with pytest.raises(TypeError, match=f"^gated_activation_quantized: {name} is float64"):
            jaxnorm.gated_activation_quantized(tuple(arrays.values()), quantization=TOKEN)


# A device has columns of both halves. Of a row that shares a scale 4 bytes are exchanged; groups stay whole.
@pytest.mark.several
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(("granularity", "exchanged"), [("token", {"all-reduce": 4}), ("groups of 64", {})])
def test_split_columns(devices, axis_type, granularity, exchanged):
    x, mesh = stacked(), mesh_of(devices, axis_type)
    quantization = Quantization("float8_e4m3fn", **GRANULARITIES[granularity])
    function = jax.jit(partial(jaxnorm.gated_activation_quantized, quantization=quantization, axis=-2))
    with jax.set_mesh(mesh):
        (x_there,) = placed(mesh, [x], [P("a", None, None, "b")])
        compiled = function.lower(x_there).compile()
        actual = compiled(x_there)
    assert_parts_close(*((q.values, q.scales) for q in (actual, function(x))))
    rows = DIMS[0] * DIMS[1] // mesh.shape["a"]
    assert collectives(compiled.as_text()) == {kind: size * rows for kind, size in exchanged.items()}
