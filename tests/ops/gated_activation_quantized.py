"""Gated activations with a quantised result: their rows, derivative, forms, meshes that split columns."""

from dataclasses import replace
from functools import cache, partial

import bad_calls
import formulas
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import DTYPES, bits, draw, draw_gate, draw_up
from coverage import cover
from hlo import collectives
from jax.sharding import AxisType, PartitionSpec as P
from meshes import assert_parts_close, mesh_of, on_mesh
from op import call, named, rows
from quantizing import GRANULARITIES, STATIC_SCALE, TO, assert_same, by_numpy, functions_of, static_scale_of

import jaxnorm
from jaxnorm import Quantization
from ops.gated_activation import ACTIVATIONS, gated_activation, halves, packed_activation

GROUPS = Quantization("int8", "group"), Quantization("int8", "group", 64)  # whose columns are half as many


def of_pairs(calls):
    """Calls of quantised norms that say the same of an activation."""
    others = {"residual", "axis", "smooth_scale", "epsilon", "scale_offset", "with_unquantized", "return_statistics"}
    return {
        name: c
        for name, c in calls.items()
        if len(c.args) == 1 and not others & c.keywords.keys() and c.keywords.get("quantization") not in GROUPS
    }


BAD_CALLS = {
    **bad_calls.GATED_ACTIVATION,
    **of_pairs(bad_calls.QUANTIZED),
    **named(
        call(bad_calls.ROWS, quantization=GROUPS[0]).raises(
            ValueError, "group_size 128 does not divide the 96 columns", "granularity='token'"
        ),
        call(bad_calls.ROWS[..., :128], quantization=GROUPS[1], static_scale=1.0).raises(
            ValueError, "static_scale", "'group'", "leave"
        ),
    ),
}


@cache
def plain(activation, implementation=None):
    """A compiled function of gate and up: what is quantised, of float32 whatever their dtype."""

    def function(*pair):
        wide = tuple(array.astype("float32") for array in pair)
        return jaxnorm.gated_activation(wide, activation=activation, implementation=implementation)

    return jax.jit(function)


def quantized_activation(activation, granularity, to, *, packed=False):
    """What is differentiated is the dequantised result."""
    quantization = Quantization(to, **GRANULARITIES[granularity])
    op, run = (packed_activation if packed else gated_activation)(activation), quantization.group_size
    pair = halves if packed else lambda *args: args

    def quantized(*args, **options):
        given = {"static_scale": static_scale_of(quantization), "quantization": quantization}
        x = args[0] if packed else args
        return jaxnorm.gated_activation_quantized(x, activation=activation, **given, **options)

    def formula(*args):
        return (formulas.rounded(formulas.activated(activation, *pair(*args)), quantization),)

    def unfused(*args, **options):
        return by_numpy(plain(activation, **options)(*pair(*args)), quantization)

    lengths = (128, 4096, 14_336) if run else (1, 31, 128, 1021, 4096, 14_336)
    return replace(
        op,
        name=f"{op.name} to {granularity}, {to}",
        public="gated_activation_quantized",
        **functions_of(quantized),
        formula=formula,
        unfused=unfused,
        small=rows(6, 2 * run if run else 10),
        sizes=tuple(rows(7, cols) for cols in (*lengths, 20_480)),
        lengths=tuple(rows(41, cols) for cols in lengths[:-1]),
        forward="jaxnorm_gated_activation_quantized_fwd",
        has_row_scale=granularity == "token",
        bad_calls=BAD_CALLS,
        without_kernel=bad_calls.ACTIVATION_WITHOUT_KERNEL,
    )


QUANTIZED_ACTIVATIONS = (
    quantized_activation("silu", "token", "int8", packed=True),
    quantized_activation("gelu_exact", "groups of 64", "float8_e4m3fn"),
)


TOKEN, DIMS = Quantization("int8"), (8, 4, 256)


def stacked(dtype="float32"):
    return jnp.stack([draw_gate(DIMS, dtype), draw_up(DIMS, dtype)], -2)


@pytest.mark.on_emulator
@cover(dtype=DTYPES, to=TO, granularity=GRANULARITIES, activation=ACTIVATIONS)
@pytest.mark.needs("kernels")
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


@pytest.mark.parametrize("name", ["gate", "up"])
def test_float64(name):
    with jax.enable_x64(True):
        arrays = {"gate": jnp.ones((3, 8), "float32"), "up": jnp.ones((3, 8), "float32")}
        arrays[name] = arrays[name].astype("float64")
        with pytest.raises(TypeError, match=f"^gated_activation_quantized: {name} is float64"):
            jaxnorm.gated_activation_quantized(tuple(arrays.values()), quantization=TOKEN)


# A device has columns of both halves. Of a row that shares a scale 4 bytes are exchanged; groups stay whole.
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(("granularity", "exchanged"), [("token", {"all-reduce": 4}), ("groups of 64", {})])
def test_split_columns(devices, axis_type, granularity, exchanged):
    x, mesh = stacked(), mesh_of(devices, axis_type)
    quantization = Quantization("float8_e4m3fn", **GRANULARITIES[granularity])
    function = jax.jit(partial(jaxnorm.gated_activation_quantized, quantization=quantization, axis=-2))
    actual, text = on_mesh(mesh, function, [x], [P("a", None, None, "b")])
    assert_parts_close(*((q.values, q.scales) for q in (actual, function(x))))
    count = DIMS[0] * DIMS[1] // mesh.shape["a"]
    assert collectives(text) == {kind: size * count for kind, size in exchanged.items()}
