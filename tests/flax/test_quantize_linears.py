"""`quantize_linears`: the layers of a model of `flax.nnx`, quantised in place, compute `quantized_dot`."""

import copy
from functools import partial

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import bits, draw, draw_x
from checkpoints import through_checkpoint
from flax_apis import assert_close, scanned
from jax.sharding import Mesh, PartitionSpec
from linears import CHANGED, DIMS, FEATURES, LEFT, NamedLinear, mixed, stacked
from quantized_linears import E4M3, ERRORS, INT4, INT8, assert_is_product, assert_is_quantized, each_pair

import jaxnorm
from jaxnorm import Quantization, Quantized
from jaxnorm.nnx import QuantizedLinear, QuantizedParam, QuantizedRMSNorm

pytestmark = pytest.mark.jax_version


def quantised(*pair, **options):
    model = mixed()
    jaxnorm.quantize_linears(model, *(pair or (INT8, INT8)), **options)
    return model


def linear(features=32, **options):
    bias = partial(draw, "bias")
    init = {"bias_init": lambda key, shape, dtype: bias(shape).astype(dtype)}
    return flax.nnx.Linear(FEATURES, features, **init, **options, rngs=flax.nnx.Rngs(0))


def test_it_says_what_it_quantised_and_left():
    report = jaxnorm.quantize_linears(mixed(), INT8)
    assert dict(report.replaced) == CHANGED
    general = {("general",): (flax.nnx.LinearGeneral, "only flax.nnx.Linear is quantised")}
    assert {path: (cls, why) for path, cls, why in report.left} == LEFT | general


@each_pair
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_layer_is_the_product_of_the_same_arrays(pair, dtype):
    layer, x = linear(dtype=dtype), draw_x(DIMS)
    kernel, bias = layer.kernel[...], layer.bias[...]
    jaxnorm.quantize_linears(layer, *pair)

    assert_is_quantized(layer.values[...], layer.scales[...], kernel, pair[0])
    y = flax.nnx.jit(lambda layer, x: layer(x))(layer, x)
    assert_is_product(y, x, kernel, bias, pair, dtype)


@each_pair
def test_a_model_stays_close_to_what_it_was(pair):
    expected = mixed()(draw_x(DIMS))
    error = jnp.abs(quantised(*pair)(draw_x(DIMS)) - expected).max() / jnp.abs(expected).max()
    assert error < ERRORS[pair[0].dtype.name]


@pytest.mark.parametrize("options", [{}, {"dtype": jnp.float16}, {"param_dtype": jnp.bfloat16}, {"use_bias": False}])
@pytest.mark.parametrize("x_dtype", [jnp.float32, jnp.bfloat16])
def test_the_results_dtype_is_flaxs(options, x_dtype):
    layer, x = linear(**options), draw_x(DIMS).astype(x_dtype)
    expected = layer(x)
    jaxnorm.quantize_linears(layer, INT8, INT8)
    assert (layer(x).dtype, layer(x).shape) == (expected.dtype, expected.shape)


def test_preferred_element_type_is_the_results_dtype():
    layer = linear(dtype=jnp.bfloat16, use_bias=False, preferred_element_type=jnp.float32)
    expected = layer(draw_x(DIMS))
    jaxnorm.quantize_linears(layer, INT8)
    assert layer(draw_x(DIMS)).dtype == expected.dtype == jnp.float32


def test_a_quantised_input_is_taken_as_it_is():
    norm = QuantizedRMSNorm(FEATURES, quantization=INT8, rngs=flax.nnx.Rngs(0))
    layer = linear()
    jaxnorm.quantize_linears(layer, INT8, INT8)
    x = norm(draw_x(DIMS))
    y = layer(x)
    assert y.dtype == jnp.bfloat16
    assert bits(y) == bits(jaxnorm.quantized_dot(x, layer.quantized, bias=layer.bias[...]))


@pytest.mark.parametrize("form", [lambda dtype: dtype, str, lambda dtype: getattr(jnp, dtype.name)])
@each_pair
def test_a_dtype_stands_for_its_quantisation(pair, form):
    models = [quantised(*dtypes) for dtypes in (pair, [of and form(of.dtype) for of in pair])]
    assert flax.nnx.graphdef(models[0]) == flax.nnx.graphdef(models[1])
    layer = QuantizedLinear(4, 4, weights=form(pair[0].dtype), rngs=flax.nnx.Rngs(0))
    assert layer.weights == pair[0]


def test_modules_stay_the_same_objects():
    model = mixed()
    modules = dict(flax.nnx.iter_modules(model))
    jaxnorm.quantize_linears(model, INT8)
    assert all(module is modules[path] for path, module in flax.nnx.iter_modules(model))
    assert model.shared is model.listed[0]
    assert isinstance(model.listed[0], QuantizedLinear)
    assert isinstance(model.listed[1], NamedLinear)
    assert isinstance(model.listed[1], QuantizedLinear)
    assert not hasattr(model.listed[0], "kernel")


def test_layers_that_share_a_kernel_share_what_comes_of_it():
    layers = flax.nnx.List([linear(), linear()])
    layers[1].kernel = layers[0].kernel
    jaxnorm.quantize_linears(layers, INT8)
    assert layers[1].values is layers[0].values
    assert layers[1].scales is layers[0].scales


def test_state_has_what_a_parameter_was():
    model, plain = quantised(), mixed()
    of_layers = flax.nnx.state(model, QuantizedParam)
    assert len(jax.tree.leaves(of_layers)) == 2 * len(CHANGED)
    kernels = {(*path, "kernel") for path in CHANGED}
    expected = {path for path, _ in flax.nnx.to_flat_state(flax.nnx.state(plain, flax.nnx.Param))} - kernels
    assert {path for path, _ in flax.nnx.to_flat_state(flax.nnx.state(model, flax.nnx.Param))} == expected


@each_pair
def test_bytes_of_the_weights(pair):
    weights, _ = pair
    layer = linear()
    jaxnorm.quantize_linears(layer, *pair)
    values, scales = layer.values[...], layer.scales[...]
    number = jnp.iinfo(jnp.int4).bits / 8 if weights == INT4 else 1
    # A device may keep an int4 in a byte.
    assert number * 32 * FEATURES <= values.on_device_size_in_bytes() <= 32 * FEATURES
    assert scales.nbytes == 32 * 4


@each_pair
def test_split_merge_and_jit(pair):
    model = quantised(*pair)
    expected = flax.nnx.jit(lambda model, x: model(x))(model, draw_x(DIMS))
    definition, state = flax.nnx.split(model)
    run = jax.jit(lambda state, x: flax.nnx.merge(definition, state)(x))
    assert bits(run(state, draw_x(DIMS))) == bits(expected)
    assert bits(run(flax.nnx.state(copy.deepcopy(model)), draw_x(DIMS))) == bits(expected)


def test_two_models_share_what_is_compiled():
    assert flax.nnx.graphdef(quantised()) == flax.nnx.graphdef(quantised())


@each_pair
def test_a_checkpoint_is_loaded_into_a_model_without_values(pair, tmp_path):
    model, target = quantised(*pair), flax.nnx.eval_shape(mixed)
    jaxnorm.quantize_linears(target, *pair)
    flax.nnx.update(target, through_checkpoint(tmp_path, flax.nnx.state(model), flax.nnx.state(target)))
    assert bits(flax.nnx.state(target)) == bits(flax.nnx.state(model))
    assert bits(target(draw_x(DIMS))) == bits(model(draw_x(DIMS)))


def test_weights_are_not_trained():
    layer = linear()
    jaxnorm.quantize_linears(layer, INT8)
    assert set(flax.nnx.state(layer, flax.nnx.Param)) == {"bias"}
    gradient = flax.nnx.grad(lambda layer, x: layer(x).sum())(layer, draw_x(DIMS))
    assert_close(gradient["bias"][...], jnp.full(32, 12.0))


def test_stacked_layers():
    layers = stacked(flax.nnx.Rngs(0))
    kernels, biases = layers.kernel[...], layers.bias[...]
    jaxnorm.quantize_linears(layers, INT8, INT8)
    assert (layers.values.shape, layers.scales.shape) == ((3, FEATURES, FEATURES), (3, FEATURES, 1))
    expected = draw_x(DIMS)
    for kernel, bias in zip(kernels, biases, strict=True):
        layer = linear(FEATURES)
        layer.kernel[...], layer.bias[...] = kernel, bias
        jaxnorm.quantize_linears(layer, INT8, INT8)
        expected = layer(expected) + expected
    assert_close(flax.nnx.jit(scanned)(draw_x(DIMS), layers), expected)


def test_modules_of_linen_in_a_model_are_left():
    dense = flax.nnx.bridge.ToNNX(flax.linen.Dense(4), rngs=flax.nnx.Rngs(0)).lazy_init(draw_x(DIMS))
    report = jaxnorm.quantize_linears(flax.nnx.List([linear(), dense]), INT8)
    assert report.left == [((1,), flax.nnx.bridge.ToNNX, "its modules are of flax.linen")]


def test_only_chooses_layers_and_types_of_weights():
    model = mixed()
    first = jaxnorm.quantize_linears(model, INT4, only=lambda path, layer: path[0] == "listed")
    assert {path for path, _ in first.replaced} == {("listed", 0), ("listed", 1)}
    assert {path for path, _, why in first.left if why == "only is false of it"} == {
        ("by_name", "inner"),
        ("sequence", "layers", 0),
    }
    second = jaxnorm.quantize_linears(model, INT8, INT8)
    assert {path for path, _, why in second.left if why == "it is quantised already"} == {("listed", 0), ("listed", 1)}
    assert [layer.values.dtype for layer in (model.listed[0], model.by_name.inner)] == [jnp.int4, jnp.int8]


def test_only_is_asked_about_layers_that_can_be_quantised():
    asked = []
    quantised(INT8, None, only=lambda path, layer: asked.append((path, type(layer))) or True)
    assert dict(asked) == CHANGED


def test_a_layer_made_by_its_constructor():
    layer = QuantizedLinear(FEATURES, 32, weights=INT8, activations=INT8, rngs=flax.nnx.Rngs(0))
    of_a_model = flax.nnx.Linear(FEATURES, 32, rngs=flax.nnx.Rngs(0))
    jaxnorm.quantize_linears(of_a_model, INT8, INT8)
    assert flax.nnx.graphdef(layer) == flax.nnx.graphdef(of_a_model)
    assert bits(flax.nnx.state(layer)) == bits(flax.nnx.state(of_a_model))
    assert isinstance(layer.quantized, Quantized)


@pytest.mark.parametrize("as_spec", [tuple, lambda names: PartitionSpec(*names)])
def test_names_of_mesh_axes_go_with_their_axes(as_spec):
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("a", "b"))
    layer = linear(kernel_metadata={"out_sharding": as_spec(("a", "b")), "mesh": mesh})
    jaxnorm.quantize_linears(layer, INT8)
    assert tuple(layer.values.get_metadata("out_sharding")) == ("b", "a")
    assert tuple(layer.scales.get_metadata("out_sharding")) == ("b", None)
    specs = flax.nnx.get_partition_spec(flax.nnx.state(layer, QuantizedParam))
    assert jax.tree.leaves(specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))


GROUPS = Quantization(jnp.int8, "group", group_size=64)
WRONG = {
    "a linen model": ((flax.linen.Dense(4), INT8), TypeError, "a module of flax.linen, Dense: .*jaxnorm.linen.quan"),
    "no model": (({"kernel": jnp.ones((2, 2))}, INT8), TypeError, "model must be a flax.nnx module, .* got dict"),
    "no linear layer": ((flax.nnx.Dict(), INT8), ValueError, "there is no flax.nnx.Linear to quantise in Dict"),
    "none that can be": ((flax.nnx.Embed(2, 2, rngs=flax.nnx.Rngs(0)), INT8), ValueError, r"in Embed:\nleft .*only"),
    "another dtype": ((flax.nnx.Dict(), jnp.int16), TypeError, "weights must be a jaxnorm.Quantization, as .*int16"),
    "no dtype": ((flax.nnx.Dict(), INT8, 8), TypeError, "activations must be a jaxnorm.Quantization, as .*, got 8"),
    "an array": ((flax.nnx.Dict(), np.zeros(3, np.int8)), TypeError, "weights must be .* or a dtype that it takes"),
    "no weights": ((flax.nnx.Dict(), None, INT8), TypeError, "weights must be a jaxnorm.Quantization, as .* got None"),
    "groups": ((flax.nnx.Dict(), GROUPS), ValueError, "weights has granularity='group', expected 'token', a scale for"),
    "one scale": (
        (flax.nnx.Dict(), INT8, Quantization(jnp.int8, "tensor")),
        ValueError,
        "activations has granularity='tensor', expected 'token', a scale for a row",
    ),
    "float8 of int8": ((flax.nnx.Dict(), INT8, E4M3), TypeError, "to float8_e4m3fn, expected int8 for weights"),
    "int8 of float8": ((flax.nnx.Dict(), E4M3, INT8), TypeError, "to int8, expected float8_e4m3fn or float8_e5m2"),
    "int4 of int4": ((flax.nnx.Dict(), INT4, INT4), TypeError, "to int4, expected int8 for weights of int4"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors(name):
    args, error, message = WRONG[name]
    with pytest.raises(error, match=f"^quantize_linears: .*{message}"):
        jaxnorm.quantize_linears(*args)


def test_a_filter_must_be_a_function():
    with pytest.raises(TypeError, match=r"^quantize_linears: only must be a function of .*, got 'head'\.$"):
        jaxnorm.quantize_linears(mixed(), INT8, only="head")


def test_an_error_leaves_the_model_as_it_was():
    model = mixed()
    definition = flax.nnx.graphdef(model)
    with pytest.raises(ValueError, match="only is false of it"):
        jaxnorm.quantize_linears(model, INT8, only=lambda path, layer: False)
    assert flax.nnx.graphdef(model) == definition


def test_a_layer_of_ours_has_no_dot_of_its_own():
    with pytest.raises(TypeError, match=r"^QuantizedLinear: cannot be quantised: it has a dot_general of its own"):
        QuantizedLinear(4, 4, weights=INT8, dot_general=len, rngs=flax.nnx.Rngs(0))


def test_a_call_takes_no_sharding():
    layer = linear()
    jaxnorm.quantize_linears(layer, INT8)
    with pytest.raises(ValueError, match=r"^QuantizedLinear: got out_sharding=.* reshard the result instead"):
        layer(draw_x(DIMS), out_sharding=PartitionSpec())
