"""`float8_linears`: the layers of a model of `flax.nnx` compute `float8_linear`, with the parameters that they had."""

import copy
import pickle
from functools import partial

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import bits, draw, draw_x
from checkpoints import through_checkpoint
from flax_apis import assert_close, assert_gradients_close, scanned
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from linears import CHANGED, DIMS, FEATURES, LEFT, NamedLinear, mixed, stacked

import jaxnorm
from jaxnorm import Float8Recipe, Quantization, float8_linear, quantize
from jaxnorm.nnx import Float8Linear

pytestmark = pytest.mark.jax_version

COLUMNS = 32
E4M3 = Quantization(jnp.float8_e4m3fn)
RECIPES = {
    "default": Float8Recipe(),
    "tensor": Float8Recipe(scaling="tensor"),
    "other": Float8Recipe(weight_gradient="compute", power_of_two=True, save="inputs"),
}
each_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def in_float8(*recipe, **options):
    model = mixed()
    jaxnorm.float8_linears(model, *recipe, **options)
    return model


def linear(cls=flax.nnx.Linear, **options):
    init = {"bias_init": lambda key, shape, dtype: draw("bias", shape).astype(dtype)}
    return cls(FEATURES, COLUMNS, **init, **options, rngs=flax.nnx.Rngs(0))


def value_and_gradients(layer, x, dy):
    """y and the gradients of the kernel, the bias and x, of one program."""
    definition, state = flax.nnx.split(layer)

    def run(state, x):
        return flax.nnx.merge(definition, state)(x)

    @jax.jit
    def both(state, x, dy):
        y, pull_back = jax.vjp(run, state, x)
        of_state, dx = pull_back(dy.astype(y.dtype))
        return y, of_state["kernel"][...], of_state["bias"][...], dx

    return both(state, x, dy)


def of_function(recipe, x, kernel, bias, dy, out_dtype):
    @jax.jit
    def both(x, kernel, bias, dy):
        function = partial(float8_linear, recipe=recipe, out_dtype=out_dtype)
        y, pull_back = jax.vjp(lambda kernel, bias, x: function(x, kernel, bias=bias), kernel, bias, x)
        return y, *pull_back(dy.astype(y.dtype))

    return both(x, kernel, bias, dy)


def test_it_says_what_it_changed_and_left():
    report = jaxnorm.float8_linears(mixed())
    assert dict(report.replaced) == CHANGED
    why = "only flax.nnx.Linear is computed in float8: give this one dot_general=recipe.dot_general"
    general = {("general",): (flax.nnx.LinearGeneral, why)}
    assert {path: (cls, why) for path, cls, why in report.left} == LEFT | general
    assert "replaced  listed.1: NamedLinear\n" in str(report)


@each_recipe
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_layer_is_the_function_of_its_parameters(recipe, dtype):
    layer, x, dy = linear(dtype=dtype), draw_x(DIMS), draw("dy", (*DIMS[:-1], COLUMNS))
    jaxnorm.float8_linears(layer, recipe)
    actual = value_and_gradients(layer, x.astype(dtype), dy)
    expected = of_function(recipe, x.astype(dtype), layer.kernel[...], layer.bias[...], dy, dtype)
    assert [a.dtype for a in actual] == [dtype, jnp.float32, jnp.float32, dtype]
    assert bits(actual) == bits(expected)


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
    assert bits(y) == bits(of_function(recipe, x, kernel, bias, dy, "bfloat16")[0])
    plain = jax.jit(lambda x, kernel, bias: float8_linear(x, kernel) + bias)
    assert bits(their_y) == bits(plain(x, rounded, bias.astype(jnp.bfloat16)))
    assert bits(their_dx) == bits(of_function(recipe, x, rounded, bias, dy, "bfloat16")[3])
    assert (is_bfloat16(dw), is_bfloat16(their_dw)) == (False, True)
    assert (is_bfloat16(db), is_bfloat16(their_db)) == (False, True)
    np.testing.assert_allclose(db, np.float64(dy).sum(0), rtol=0, atol=2e-5)


def test_a_layer_stays_close_to_flaxs():
    layer, x, dy = linear(), draw_x(DIMS), draw("dy", (*DIMS[:-1], COLUMNS))
    expected = value_and_gradients(layer, x, dy)
    jaxnorm.float8_linears(layer)
    for ours, theirs in zip(value_and_gradients(layer, x, dy), expected, strict=True):
        # Each operand is off by 2⁻⁴ at most, and by some hundredths of that in the root mean square: two of them.
        assert jnp.linalg.norm(ours - theirs) < 0.05 * jnp.linalg.norm(theirs)


OPTIONS = [
    {},
    {"dtype": jnp.float16},
    {"param_dtype": jnp.bfloat16},
    {"use_bias": False},
    {"dtype": jnp.bfloat16, "preferred_element_type": jnp.float32},
    {"dtype": jnp.bfloat16, "preferred_element_type": jnp.float32, "use_bias": False},
    {"dtype": jnp.float32, "preferred_element_type": jnp.bfloat16},
    {"dtype": jnp.float32, "preferred_element_type": jnp.bfloat16, "use_bias": False},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("x_dtype", [jnp.float32, jnp.bfloat16, jnp.int32])
def test_the_results_dtype_is_flaxs(options, x_dtype):
    layer, x = linear(**options), draw_x(DIMS).astype(x_dtype)
    expected = layer(x)
    jaxnorm.float8_linears(layer)
    assert (layer(x).dtype, layer(x).shape) == (expected.dtype, expected.shape)


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


@pytest.mark.parametrize("dtype", [None, jnp.float32, jnp.bfloat16])
def test_the_dtype_of_a_quantised_inputs_result(dtype):
    layer, x = linear(Float8Linear, dtype=dtype), quantize(draw_x(DIMS), E4M3)
    y = layer(x)
    assert y.dtype == (dtype or jnp.bfloat16)
    assert bits(y) == bits(float8_linear(x, layer.kernel[...], bias=layer.bias[...], out_dtype=dtype))


def test_modules_and_state_stay_the_same():
    model = mixed()
    modules, state = dict(flax.nnx.iter_modules(model)), flax.nnx.state(model)
    variables = {path: id(v) for path, v in flax.nnx.iter_graph(model) if isinstance(v, flax.nnx.Variable)}
    jaxnorm.float8_linears(model)
    assert all(module is modules[path] for path, module in flax.nnx.iter_modules(model))
    assert {p: id(v) for p, v in flax.nnx.iter_graph(model) if isinstance(v, flax.nnx.Variable)} == variables
    assert jax.tree.structure(flax.nnx.state(model)) == jax.tree.structure(state)
    assert bits(flax.nnx.state(model)) == bits(state)
    assert model.shared is model.listed[0]
    assert isinstance(model.listed[0], Float8Linear)
    assert isinstance(model.listed[1], NamedLinear)
    assert isinstance(model.listed[1], Float8Linear)


def test_an_optimisers_state_goes_on():
    model = flax.nnx.Sequential(linear(), jnp.sin)
    optimizer = flax.nnx.Optimizer(model, optax.adam(1e-2), wrt=flax.nnx.Param)
    gradient = flax.nnx.grad(lambda model, x: (model(x) ** 2).sum())
    optimizer.update(model, gradient(model, draw_x(DIMS)))
    state, before = flax.nnx.state(optimizer), model.layers[0].kernel[...]
    jaxnorm.float8_linears(model)
    assert bits(flax.nnx.state(optimizer)) == bits(state)
    optimizer.update(model, gradient(model, draw_x(DIMS)))
    assert int(optimizer.step[...]) == 2
    assert jnp.isfinite(model.layers[0].kernel[...]).all()
    assert (model.layers[0].kernel[...] != before).any()


def test_layers_that_share_a_kernel():
    layers = flax.nnx.List([linear(), linear()])
    layers[1].kernel = layers[0].kernel
    jaxnorm.float8_linears(layers)
    x, dy = draw_x(DIMS), draw("dy", (*DIMS[:-1], COLUMNS))
    assert layers[1].kernel is layers[0].kernel

    def loss(layers, x):
        return ((layers[0](x) + layers[1](2 * x)) * dy).sum()

    both = flax.nnx.grad(loss)(layers, x)[0]["kernel"][...]
    first, second = (value_and_gradients(layers[0], factor * x, dy)[1] for factor in (1, 2))
    assert_gradients_close(both, first + second)


def test_a_checkpoint_goes_both_ways(tmp_path):
    model, target = in_float8(), flax.nnx.eval_shape(mixed)
    jaxnorm.float8_linears(target)
    flax.nnx.update(target, through_checkpoint(tmp_path, flax.nnx.state(mixed()), flax.nnx.state(target)))
    assert bits(target(draw_x(DIMS))) == bits(model(draw_x(DIMS)))
    plain = mixed()
    flax.nnx.update(plain, flax.nnx.state(model))
    assert bits(plain(draw_x(DIMS))) == bits(mixed()(draw_x(DIMS)))


@each_recipe
def test_split_merge_jit_and_copies(recipe):
    model = in_float8(recipe)
    run = flax.nnx.jit(lambda model, x: model(x))
    expected = run(model, draw_x(DIMS))
    definition, state = flax.nnx.split(model)
    assert bits(jax.jit(lambda state, x: flax.nnx.merge(definition, state)(x))(state, draw_x(DIMS))) == bits(expected)
    assert bits(run(copy.deepcopy(model), draw_x(DIMS))) == bits(expected)


def test_pickle():
    layers = flax.nnx.List([linear(dtype=jnp.bfloat16)])
    jaxnorm.float8_linears(layers, Float8Recipe(power_of_two=True))
    loaded = pickle.loads(pickle.dumps(layers))
    assert flax.nnx.graphdef(loaded) == flax.nnx.graphdef(layers)
    assert bits(loaded[0](draw_x(DIMS))) == bits(layers[0](draw_x(DIMS)))


def test_two_models_share_what_is_compiled():
    assert flax.nnx.graphdef(in_float8()) == flax.nnx.graphdef(in_float8(Float8Recipe()))
    assert flax.nnx.graphdef(in_float8()) != flax.nnx.graphdef(in_float8(Float8Recipe("tensor")))


def test_a_model_and_its_gradients():
    def gradients(model, x):
        return flax.nnx.grad(lambda model, x: (model(x) * draw("dy", DIMS)).sum())(model, x)

    ours, theirs = (flax.nnx.jit(gradients)(model, draw_x(DIMS)) for model in (in_float8(), mixed()))
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype
        # Four layers, of 0.05 each.
        assert jnp.linalg.norm(a - b) <= 0.2 * jnp.linalg.norm(b)


def one_by_one(kernels, biases, x):
    for kernel, bias in zip(kernels, biases, strict=True):
        x = jnp.sin(float8_linear(x, kernel, bias=bias)) + x
    return x


@pytest.mark.parametrize("remat", [lambda function: function, flax.nnx.remat], ids=["kept", "remat"])
def test_stacked_layers_and_remat(remat):
    layers, x = stacked(flax.nnx.Rngs(0)), draw_x(DIMS)
    jaxnorm.float8_linears(layers)
    parameters = layers.kernel[...], layers.bias[...]
    assert isinstance(layers, Float8Linear)
    run = partial(scanned, call=remat(lambda x, layer: jnp.sin(layer(x)) + x))
    assert_close(flax.nnx.jit(run)(x, layers), one_by_one(*parameters, x))
    gradient = flax.nnx.jit(flax.nnx.grad(lambda layers, x: run(x, layers).sum()))(layers, x)
    expected = jax.jit(jax.grad(lambda parameters: one_by_one(*parameters, x).sum()))(parameters)
    assert_gradients_close((gradient["kernel"][...], gradient["bias"][...]), expected)


def test_vmap_over_layers():
    layers, x = stacked(flax.nnx.Rngs(0)), draw_x(DIMS)
    jaxnorm.float8_linears(layers)
    y = flax.nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(layers, x)
    parameters = zip(layers.kernel[...], layers.bias[...], strict=True)
    assert_close(y, jnp.stack([float8_linear(x, kernel, bias=bias) for kernel, bias in parameters]))


@pytest.mark.parametrize("as_spec", [tuple, lambda names: PartitionSpec(*names)])
def test_names_of_mesh_axes_stay(as_spec):
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("a", "b"))
    layer = linear(kernel_metadata={"out_sharding": as_spec(("a", "b")), "mesh": mesh})
    expected = flax.nnx.get_partition_spec(flax.nnx.state(layer))
    jaxnorm.float8_linears(layer)
    assert layer.kernel.get_metadata("out_sharding") == as_spec(("a", "b"))
    assert flax.nnx.get_partition_spec(flax.nnx.state(layer)) == expected


@pytest.mark.needs("several")
def test_layers_over_devices():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(-1, 2), ("a", "b"))
    layer, x, dy = linear(Float8Linear), draw_x(DIMS), draw("dy", (*DIMS[:-1], COLUMNS))
    expected = value_and_gradients(layer, x, dy)
    split = {"kernel": (None, "b"), "bias": ("b",)}
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
    assert jax.typeof(y).sharding.spec == PartitionSpec("a", None, None)
    assert bits(y) == bits(layer(draw_x(DIMS)))


def test_modules_of_linen_in_a_model():
    dense = flax.nnx.bridge.ToNNX(flax.linen.Dense(4), rngs=flax.nnx.Rngs(0)).lazy_init(draw_x(DIMS))
    report = jaxnorm.float8_linears(flax.nnx.List([linear(), dense]))
    why = "its modules are of flax.linen: call it within jaxnorm.linen.float8_linears()"
    assert report.left == [((1,), flax.nnx.bridge.ToNNX, why)]
    with jaxnorm.linen.float8_linears() as report:
        y = dense(draw_x(DIMS))
    assert [cls for _, cls in report.replaced] == [flax.linen.Dense]
    assert_close(y, float8_linear(draw_x(DIMS), dense.kernel[...], bias=dense.bias[...]))


def test_only_chooses_layers_and_recipes():
    model, other = mixed(), Float8Recipe(power_of_two=True)
    first = jaxnorm.float8_linears(model, other, only=lambda path, layer: path[0] == "listed")
    assert {path for path, _ in first.replaced} == {("listed", 0), ("listed", 1)}
    second = jaxnorm.float8_linears(model)
    already = {path for path, _, why in second.left if why == "it is computed in float8 already"}
    assert already == {("listed", 0), ("listed", 1)}
    assert [layer.recipe for layer in (model.listed[0], model.by_name.inner)] == [other, Float8Recipe()]


def test_quantised_layers_are_left_and_leave_these():
    layers = flax.nnx.List([linear(), linear(), linear()])
    jaxnorm.quantize_linears(layers, jnp.int8, only=lambda path, layer: path == (0,))
    report = jaxnorm.float8_linears(layers, only=lambda path, layer: path == (1,))
    assert [why for *_, why in report.left] == ["it is quantised already", "only is false of it"]
    report = jaxnorm.quantize_linears(layers, jnp.int8)
    assert [why for *_, why in report.left] == ["it is quantised already", "it is computed in float8 already"]


def test_a_layer_made_by_its_constructor():
    recipe = Float8Recipe(save="inputs")
    layer, of_a_model = linear(Float8Linear, recipe=recipe), linear()
    jaxnorm.float8_linears(of_a_model, recipe)
    assert flax.nnx.graphdef(layer) == flax.nnx.graphdef(of_a_model)
    assert bits(flax.nnx.state(layer)) == bits(flax.nnx.state(of_a_model))


@pytest.mark.parametrize("general", [flax.nnx.Linear, flax.nnx.LinearGeneral])
def test_a_dot_general_of_float8(general):
    layer, x = linear(general, dot_general=Float8Recipe().dot_general), draw_x(DIMS)
    assert_close(layer(x), float8_linear(x, layer.kernel[...]) + layer.bias[...])
    other = linear(general, dot_general=Float8Recipe().dot_general)
    assert flax.nnx.graphdef(layer) == flax.nnx.graphdef(other)


def test_a_dot_general_of_attention():
    attention = flax.nnx.LinearGeneral(
        (4, 8), FEATURES, axis=(-2, -1), dot_general=jaxnorm.float8_dot_general, rngs=flax.nnx.Rngs(0)
    )
    x = draw_x((2, 3, 4, 8))
    kernel = attention.kernel[...].reshape(32, FEATURES)
    assert_close(attention(x), float8_linear(x.reshape(2, 3, 32), kernel))


WRONG = {
    "a linen model": ((flax.linen.Dense(4),), TypeError, r"Dense: .* Call it within jaxnorm.linen.float8_linears\(\)"),
    "no model": (({"kernel": jnp.ones((2, 2))},), TypeError, "model must be a flax.nnx module, .* got dict"),
    "no linear layer": ((flax.nnx.Dict(),), ValueError, "there is no flax.nnx.Linear to compute in float8 in Dict"),
    "none that can be": ((flax.nnx.Embed(2, 2, rngs=flax.nnx.Rngs(0)),), ValueError, r"in Embed:\nleft .*only"),
    "a dtype": ((flax.nnx.Dict(), E4M3), TypeError, r"recipe must be a jaxnorm.Float8Recipe, got Quantization"),
    "a class": ((flax.nnx.Dict(), Float8Recipe), TypeError, r"pass jaxnorm.Float8Recipe\(\), or leave it out"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors(name):
    args, error, message = WRONG[name]
    with pytest.raises(error, match=f"^float8_linears: .*{message}"):
        jaxnorm.float8_linears(*args)


def test_a_filter_must_be_a_function():
    with pytest.raises(TypeError, match=r"^float8_linears: only must be a function of .*, got 'head'\.$"):
        jaxnorm.float8_linears(mixed(), only="head")


def test_an_error_leaves_the_model_as_it_was():
    model = mixed()
    definition = flax.nnx.graphdef(model)
    with pytest.raises(ValueError, match="only is false of it"):
        jaxnorm.float8_linears(model, only=lambda path, layer: False)
    assert flax.nnx.graphdef(model) == definition


def test_errors_of_a_layer():
    with pytest.raises(TypeError, match=r"^Float8Linear: cannot be computed in float8: it has a dot_general of its"):
        linear(Float8Linear, dot_general=len)
    with pytest.raises(TypeError, match=r"^Float8Linear: recipe must be a jaxnorm.Float8Recipe, got 'row'"):
        linear(Float8Linear, recipe="row")
    with pytest.raises(ValueError, match=r"^Float8Linear: x has shape \(2, 3\) and kernel \(16, 32\)"):
        linear(Float8Linear)(jnp.ones((2, 3)))
    with pytest.raises(TypeError, match=r"^Float8Linear: x has values of int8, expected float8_e4m3fn"):
        linear(Float8Linear)(quantize(draw_x(DIMS), Quantization(jnp.int8)))
