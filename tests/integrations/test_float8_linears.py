"""What layers in float8 of either Flax API have besides, `dot_general` of float8, and models with `Float8Linear`."""

import re
from functools import partial

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import library_models
import numpy as np
import pytest
from cases import bits, draw, draw_scale, draw_x
from flax_apis import assert_gradients_close
from hlo import compiled_text
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from library_models import APIS, COLUMNS, DIMS, E4M3, FEATURES, NnxModel, nnx_linear

import jaxnorm
from jaxnorm import Float8Recipe, float8_dot_general, float8_linear, quantize
from jaxnorm.linen import using_float8
from jaxnorm.nnx import Float8Linear, QuantizedRMSNorm

pytestmark = pytest.mark.jax_version


def linear(cls=flax.nnx.Linear, **options):
    return nnx_linear(cls=cls, **options).module


def value_and_gradients(layer, x, dy):
    """y and the gradients of the kernel, the bias and x."""
    y, of_state, dx = NnxModel(layer).value_and_gradients(x, dy)
    return y, of_state["kernel"][...], of_state["bias"][...], dx


def is_bfloat16(array):
    return bool((array == array.astype(jnp.bfloat16).astype(array.dtype)).all())


# What the replacement is for: `dot_general` gets a kernel that Flax has rounded, and no bias.
@pytest.mark.long
def test_float32_weights_are_rounded_once_and_their_gradients_are_float32():
    recipe, x, dy = Float8Recipe(), draw_x((512, FEATURES), "bfloat16"), draw("dy", (512, COLUMNS), "bfloat16")
    by_product = linear(dtype=jnp.bfloat16, dot_general=recipe.dot_general)
    layer = linear(Float8Linear, dtype=jnp.bfloat16)
    kernel, bias = layer.kernel[...], layer.bias[...]
    y, dw, db, _ = value_and_gradients(layer, x, dy)
    their_y, their_dw, their_db, their_dx = value_and_gradients(by_product, x, dy)

    rounded = kernel.astype(jnp.bfloat16)
    once, twice = (quantize(array.T, E4M3).dequantize() for array in (kernel, rounded))
    assert (once != twice).any()
    assert bits(y) == bits(jax.jit(partial(float8_linear, out_dtype="bfloat16"))(x, kernel, bias=bias))
    plain = jax.jit(lambda x, kernel, bias: float8_linear(x, kernel) + bias)
    assert bits(their_y) == bits(plain(x, rounded, bias.astype(jnp.bfloat16)))
    assert bits(their_dx) == bits(jax.jit(lambda x: jax.vjp(lambda x: float8_linear(x, rounded), x)[1](dy)[0])(x))
    assert (is_bfloat16(dw), is_bfloat16(their_dw)) == (False, True)
    assert (is_bfloat16(db), is_bfloat16(their_db)) == (False, True)
    np.testing.assert_allclose(db, np.float64(dy).sum(0), rtol=0, atol=2e-5)


def test_an_input_is_rounded_as_flax_does_and_not_widened():
    x, narrow, wide = draw_x(DIMS), linear(Float8Linear, dtype=jnp.bfloat16), linear(Float8Linear)
    half = x.astype(jnp.bfloat16)
    assert bits(narrow(x)) == bits(narrow(half))
    assert bits(wide(half)) == bits(float8_linear(half, wide.kernel[...], bias=wide.bias[...], out_dtype="float32"))
    assert "f32[3,4,16]" not in str(jax.make_jaxpr(lambda x: wide(x))(half))


def test_a_precision_of_all_digits_is_the_products():
    layer, x = linear(Float8Linear, precision="highest"), draw_x(DIMS)
    with jax.default_matmul_precision("highest"):
        expected = float8_linear(x, layer.kernel[...], bias=layer.bias[...])
    assert bits(layer(x)) == bits(expected)
    program = str(jax.make_jaxpr(lambda x: layer(x))(x))
    assert "wants_all_digits=True" in program


@pytest.mark.needs("several")
def test_layers_over_devices():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(-1, 2), ("a", "b"))
    layer, x, dy = linear(Float8Linear), draw_x(DIMS), draw("dy", (*DIMS[:-1], COLUMNS))
    expected, split = value_and_gradients(layer, x, dy), {"kernel": (None, "b"), "bias": ("b",)}
    for name, spec in split.items():
        variable = getattr(layer, name)
        variable[...] = jax.device_put(variable[...], NamedSharding(mesh, PartitionSpec(*spec)))
    x, dy = (jax.device_put(array, NamedSharding(mesh, PartitionSpec(None, "a"))) for array in (x, dy))
    actual = value_and_gradients(layer, x, dy)
    if jax.default_backend() == "cpu":
        assert bits(actual[0]) == bits(expected[0])
        assert_gradients_close(actual, expected)
    else:  # over devices XLA rounds, and divides less exactly than kernels
        for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, e, rtol=0, atol=2.0**-5 * np.abs(e).max())


def test_a_call_takes_a_sharding():
    mesh = jax.make_mesh((1,), ("a",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:1])
    layer = linear(Float8Linear)
    with jax.set_mesh(mesh):
        y = jax.jit(lambda x: layer(x, out_sharding=PartitionSpec("a")))(draw_x(DIMS))
    assert (jax.typeof(y).sharding.spec, bits(y)) == (PartitionSpec("a", None, None), bits(layer(draw_x(DIMS))))


def test_boxed_parameters_stay_boxed():
    init = flax.linen.with_partitioning(flax.linen.initializers.lecun_normal(), ("a", None))
    layer = flax.linen.Dense(COLUMNS, kernel_init=init)
    expected = layer.init(jax.random.key(0), draw_x(DIMS))
    with using_float8():
        within = layer.init(jax.random.key(0), draw_x(DIMS))
        y = layer.apply(within, draw_x(DIMS))
    assert jax.tree.structure(within) == jax.tree.structure(expected)
    kernel, bias = expected["params"]["kernel"].unbox(), expected["params"]["bias"]
    assert bits(y) == bits(float8_linear(draw_x(DIMS), kernel, bias=bias))


def test_it_holds_within_only():
    model = APIS["linen"].mixed()
    within, report = model.in_float8()

    def calls(model):
        program = str(jax.make_jaxpr(model.apply)(model.parameters, draw_x(DIMS)))
        return program.count("jaxnorm_float8_linear_fwd[")

    assert [calls(of) for of in (model, within, model)] == [0, len(report.replaced), 0]


def test_a_quantised_norm_in_front():
    norm = jaxnorm.linen.QuantizedRMSNorm(quantization=E4M3, straight_through=True)
    block, x = flax.linen.Sequential([norm, flax.linen.Dense(COLUMNS)]), draw_x(DIMS)
    with using_float8():
        variables = block.init(jax.random.key(0), x)
        y = block.apply(variables, x)
    kernel, bias = (variables["params"]["layers_1"][name] for name in ("kernel", "bias"))
    quantized = jaxnorm.rms_norm_quantized(x, jnp.ones(FEATURES), quantization=E4M3).quantized
    assert (kernel.shape, y.dtype) == ((FEATURES, COLUMNS), jnp.bfloat16)
    assert bits(y) == bits(float8_linear(quantized, kernel, bias=bias))


def test_a_dot_general_of_attention_trains():
    attention = flax.linen.MultiHeadDotProductAttention(
        4, qkv_dot_general=float8_dot_general, out_dot_general=float8_dot_general
    )
    plain, x = flax.linen.MultiHeadDotProductAttention(4), draw("x", (2, 8, FEATURES))
    variables = plain.init(jax.random.key(0), x)
    ours, theirs = (jax.jit(jax.grad(lambda v, m=m: (m.apply(v, x) ** 2).sum()))(variables) for m in (attention, plain))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        # Two layers each way, of 0.05 each. The gradient of the keys' bias is zero, whatever the layers are.
        assert jnp.linalg.norm(a - b) <= 0.2 * jnp.linalg.norm(b) + 1e-5


ROWS, INPUTS, OUTPUTS = 48, 64, 96


class Block(flax.nnx.Module):
    """What ends in float8, `front`, and the layer that takes it."""

    def __init__(self, dtype):
        self.layer = Float8Linear(INPUTS, OUTPUTS, dtype=dtype, rngs=flax.nnx.Rngs(0))

    def __call__(self, x):
        return self.layer(self.front(x))

    def unfused(self, x, out_dtype=jnp.float32):
        h = self.wide(x, out_dtype)
        return float8_linear(h, self.layer.kernel[...], bias=self.layer.bias[...], out_dtype=self.layer.dtype)


class Normed(Block):
    inputs = INPUTS

    def __init__(self, dtype):
        super().__init__(dtype)
        options = {"straight_through": True, "scale_init": lambda key, shape, dtype: draw_scale(shape, dtype)}
        self.front = QuantizedRMSNorm(INPUTS, quantization=E4M3, **options, rngs=flax.nnx.Rngs(0))

    def wide(self, x, out_dtype):
        return jaxnorm.rms_norm(x, self.front.scale[...], out_dtype=out_dtype)


class Gated(Block):
    inputs = 2 * INPUTS  # the gate, and what it gates

    def front(self, x):
        return jaxnorm.gated_activation_quantized(x, quantization=E4M3, straight_through=True)

    def wide(self, x, out_dtype):
        return jaxnorm.gated_activation(x.astype(jnp.float32)).astype(out_dtype)


BLOCKS = {"norm": Normed, "gated activation": Gated}
each_block = pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)


def of_block(model, call, x, dy):
    definition, state = flax.nnx.split(model)
    return library_models.value_and_gradients(lambda s, x: call(flax.nnx.merge(definition, s), x), dy, state, x)


# What is quantised is the float32 result of the norm or activation, so the unfused path quantises that too.
@each_block
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_values_and_gradients_are_those_of_the_unfused_path(block, dtype):
    model, x, dy = block(dtype), draw("x", (ROWS, block.inputs), dtype), draw("dy", (ROWS, OUTPUTS), dtype)
    y, *gradients = of_block(model, block.__call__, x, dy)
    expected, *expected_gradients = of_block(model, block.unfused, x, dy)
    assert (y.dtype, bits(y)) == (dtype, bits(expected))
    # The carrier has x's dtype, and so has what flows through it.
    assert_gradients_close(gradients, expected_gradients, through=dtype)
    assert all(jnp.linalg.norm(leaf) > 0 for leaf in jax.tree.leaves(gradients))


def arrays_between(call, x, *dtypes):
    """The instructions that make an array as the layer takes it, of one of these dtypes."""
    with jaxnorm.implementation({"gated_activation_quantized": "native", "gated_activation": "native"}):
        text = compiled_text(call, x)
    entry = text.split("ENTRY", 1)[1]
    made = rf"= (?:{'|'.join(dtypes)})\[{ROWS},{INPUTS}\]\S* (?!parameter)\w"
    lines = re.findall(rf"^.*{made}.*$", entry, re.MULTILINE)
    # XLA's code for CPUs multiplies float8 as float32, and may write out the one operand that it makes so.
    widened = [line for line in lines if "= f32" in line and "branch_0_fun/convert_element_type" in line]
    assert len(widened) <= (jax.default_backend() == "cpu")
    return [line for line in lines if line not in widened]


@each_block
@pytest.mark.needs("kernels")
def test_no_wide_array_lies_between(block):
    model, x = block("float16"), draw("x", (ROWS, block.inputs), "float16")
    assert arrays_between(model, x, "f16", "f32") == []
    assert arrays_between(partial(block.unfused, model, out_dtype=jnp.float16), x, "f16", "f32") != []
