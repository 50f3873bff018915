"""`quantize_linears` and `float8_linears`: what models of Flax and Equinox with linear layers become."""

from functools import partial

import equinox as eqx
import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import library_models as models
import numpy as np
import pytest
from cases import bits, draw, draw_x
from coverage import cover
from flax_apis import assert_close, assert_same, through_checkpoint
from jax.sharding import Mesh, PartitionSpec
from library_models import APIS, CHANGED_BY, CHANGES, COLUMNS, DIMS, E4M3, E5M2, FEATURES, INT4, INT8, OTHER, NnxModel

import jaxnorm
from jaxnorm import Float8Recipe, Quantization, Quantized, float8_linear, quantize, quantize_kernel, quantized_dot
from jaxnorm.nnx import Float8Linear, QuantizedLinear

pytestmark = pytest.mark.jax_version

# Each dtype of kernels with inputs as they are, and with those of the kind that its product takes.
PAIRS = {
    f"{kernels.dtype}-{inputs.dtype if inputs else 'plain'}": (kernels, inputs)
    for kernels, kind in ((INT8, INT8), (INT4, INT8), (E4M3, E4M3), (E5M2, E4M3))
    for inputs in (None, kind)
}
each_pair = pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
each_api = pytest.mark.parametrize("api", APIS)
each_change = pytest.mark.parametrize(("api", "done"), CHANGED_BY.values(), ids=CHANGED_BY)
OF_FLAX, GENERAL = [of for of in CHANGED_BY.values() if of[0] != "equinox"], flax.linen.DenseGeneral
of_flax = pytest.mark.parametrize(("api", "done"), OF_FLAX)
of_nnx = pytest.mark.parametrize("done", CHANGES)
# How far a layer may be from the library's, against the largest result: an int4 has 15 values, an e5m2 two bits of
# mantissa.
ERRORS = {"int8": 0.02, "int4": 0.2, "float8_e4m3fn": 0.1, "float8_e5m2": 0.2}


def weights_of(model):
    if isinstance(model, models.EquinoxModel):
        return model.module.weight.T, model.module.bias
    return tuple(jnp.asarray(model.parameters[name]) for name in ("kernel", "bias"))


def quantized_of(model):
    if isinstance(model, models.EquinoxModel):
        return model.module.quantized
    return Quantized(*(jnp.asarray(model.parameters[name]) for name in ("values", "scales")), transposed=True)


@each_change
def test_it_says_what_it_changed_and_left(api, done):
    model = APIS[api].mixed()
    _, report = CHANGES[done](model)
    changed, left = models.expected_report(api, done)
    assert (dict(report.replaced), {path: (cls, why) for path, cls, why in report.left}) == (changed, left)
    assert len(report.replaced) + len(report.left) == len(changed | left)
    path, cls = next(iter(changed.items()))
    assert f"replaced  {'.'.join(map(str, path))}: {cls.__name__}\n" in str(report)


@each_change
def test_only_chooses_layers_and_what_they_become(api, done):
    model, first = APIS[api].mixed(), "mlp" if api == "equinox" else "listed"
    changed, asked = models.expected_report(api, done)[0], {}

    def only(path, layer):
        asked[path] = type(layer)
        return str(path[0]).startswith(first)

    model, report = CHANGES[done](model, OTHER[done], only=only)
    chosen = {path for path in changed if str(path[0]).startswith(first)}
    assert asked == changed or api == "equinox"  # which asks about all
    assert asked.items() >= changed.items()
    assert {path for path, _ in report.replaced} == chosen
    assert {path for path, _, why in report.left if why == "only is false of it"} == changed.keys() - chosen
    model, report = CHANGES[done](model)
    assert {path for path, _ in report.replaced} == changed.keys() - chosen
    assert {path for path, _, why in report.left if why == f"it is {done} already"} == chosen
    if done != "quantised":
        assert api == "linen" or model.module.listed[0].recipe == OTHER[done]
    else:
        dtypes = {leaf.dtype for leaf in jax.tree.leaves(model.parameters)}
        assert {jnp.dtype("int4"), jnp.dtype("int8")} <= dtypes


@each_pair
@each_api
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_layer_is_the_product_of_the_same_arrays(api, pair, dtype):
    kernels, inputs = pair
    layer, x = APIS[api].linear(dtype=dtype), draw_x(DIMS)
    x = x.astype(dtype) if api == "equinox" else x
    kernel, bias = weights_of(layer)
    new, _ = layer.quantised(*pair)
    expected = jax.jit(lambda kernel: quantize_kernel(kernel, kernels))(kernel)
    assert_same(quantized_of(new), expected)

    def product(x, quantized, bias):
        x = x.astype(dtype)
        x = quantize(x, inputs) if inputs else x
        return quantized_dot(x, quantized, out_dtype=dtype, bias=bias)

    assert_same(new(x), jax.jit(product)(x, expected, bias))


RECIPES = {
    "default": Float8Recipe(),
    "other": Float8Recipe("compute", power_of_two=True, save="inputs"),
}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_a_layer_in_float8_is_the_function_of_its_parameters(api, recipe, dtype):
    layer, x, dy = APIS[api].linear(dtype=dtype), draw_x(DIMS, dtype), draw("dy", (*DIMS[:-1], COLUMNS))

    def function(kernel, bias, x):
        return float8_linear(x, kernel, bias=bias, recipe=recipe)

    y, gradients, dx = layer.in_float8(recipe)[0].value_and_gradients(x, dy)
    dkernel, dbias = (jnp.asarray(gradients[name]) for name in ("kernel", "bias"))
    assert [a.dtype for a in (y, dkernel, dbias, dx)] == [dtype, jnp.float32, jnp.float32, dtype]
    assert_same((y, dkernel, dbias, dx), models.value_and_gradients(function, dy, *weights_of(layer), x))


@pytest.mark.parametrize("options", [{}, {"dtype": jnp.float16}, {"param_dtype": jnp.bfloat16}, {"use_bias": False}])
@pytest.mark.parametrize("x_dtype", [jnp.float32, jnp.bfloat16, jnp.int32])
@pytest.mark.parametrize(("api", "done", "cls"), [*((*of, None) for of in OF_FLAX), ("linen", "quantised", GENERAL)])
def test_the_results_dtype_is_flaxs(api, done, cls, options, x_dtype):
    layer, x = APIS[api].linear(**options, **({"cls": cls} if cls else {})), draw_x(DIMS).astype(x_dtype)
    y, expected = CHANGES[done](layer, *[INT8, INT8] if cls else [])[0](x), layer(x)
    assert (y.dtype, y.shape) == (expected.dtype, expected.shape)


@of_flax
def test_a_dtype_by_its_name(api, done):
    x, spelt = draw_x(DIMS, "bfloat16"), ("float32", jnp.float32, jnp.dtype("float32"))
    layers = [CHANGES[done](APIS[api].linear(dtype=dtype))[0] for dtype in spelt]
    assert len({str(jax.make_jaxpr(layer)(x)) for layer in layers}) == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("weight", ["float32", "bfloat16"])
def test_the_results_dtype_is_equinoxs(dtype, weight):
    layer, x = APIS["equinox"].linear(dtype=weight), draw_x(DIMS, dtype)
    assert layer.quantised()[0](x).dtype == layer(x).dtype


@cover(
    done=["quantised", "computed in float8"],
    dtypes=[("bfloat16", "float32"), ("float32", "bfloat16"), ("bfloat16", "float16")],
    use_bias=[False, True],
)
def test_preferred_element_type_is_the_results_dtype(done, dtypes, use_bias):
    layer, x = models.nnx_linear(dtype=dtypes[0], preferred_element_type=dtypes[1], use_bias=use_bias), draw_x(DIMS)
    changed, _ = CHANGES[done](layer)
    eight = quantize(x, INT8 if done == "quantised" else E4M3)
    assert {changed(x).dtype, changed(eight).dtype} == {layer(x).dtype}


class Twice(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x):
        for _ in range(2):
            x = x + jnp.sin(flax.linen.Dense(FEATURES)(x))
        return x


@each_pair
@each_api
def test_a_quantised_model_stays_close_to_what_it_was(pair, api):
    model, x = models.linen_model(Twice()) if api == "linen" else APIS[api].mixed(), draw_x(DIMS)
    expected, y = model(x), model.quantised(*pair)[0](x)
    limit = ERRORS[pair[0].dtype.name]
    if api == "equinox":
        limit = 0.06 if pair[0] == E4M3 else limit
        assert jnp.linalg.norm(y - expected) < limit * jnp.linalg.norm(expected)
    else:
        assert jnp.abs(y - expected).max() < limit * jnp.abs(expected).max()


@of_flax
@pytest.mark.parametrize("dtype", [None, jnp.float32, jnp.bfloat16])
def test_a_quantised_input_is_taken_as_it_is(api, done, dtype):
    layer, to = APIS[api].linear(dtype=dtype), INT8 if done == "quantised" else E4M3
    x = jaxnorm.rms_norm_quantized(draw_x(DIMS), jnp.ones(FEATURES), quantization=to).quantized
    kernel, bias = weights_of(layer)
    if done == "quantised":
        new, _ = layer.quantised(INT8, INT8)
        expected = quantized_dot(x, quantized_of(new), bias=bias, out_dtype=dtype or jnp.bfloat16)
    else:
        new, expected = layer.in_float8()[0], float8_linear(x, kernel, bias=bias, out_dtype=dtype)
    y = new.apply(new.parameters, x)
    assert y.dtype == (dtype or jnp.bfloat16)
    assert_same(y, expected)


@each_api
@pytest.mark.usefixtures("exact_products")
def test_no_gradient_goes_to_what_is_quantised(api):
    new, _ = APIS[api].linear().quantised(E4M3)
    x, quantized = draw_x(DIMS), quantized_of(new)
    trained, others = eqx.partition(new.parameters, lambda leaf: leaf.dtype == jnp.float32)

    def loss(trained, x):
        return new.apply(eqx.combine(trained, others), x).sum()

    of_trained, of_x = jax.grad(loss, (0, 1))(trained, x)
    of_bias, *of_scales = sorted(jax.tree.leaves(of_trained), key=lambda leaf: leaf.ndim)
    assert_close(of_bias, jnp.full(COLUMNS, 12.0))
    assert all(not leaf.any() for leaf in of_scales)
    assert_close(of_x, jnp.broadcast_to(quantized.dequantize().sum(1), DIMS))


def test_what_is_quantised_on_the_way_has_no_derivative():
    plain, both = (APIS["equinox"].linear().quantised(INT8, inputs)[0] for inputs in (None, INT8))
    x = draw_x(DIMS)
    assert jax.grad(lambda x: jnp.sin(plain(x)).sum())(x).any()
    with pytest.raises(ValueError, match="rounded values have no derivative"):
        jax.grad(lambda x: jnp.sin(both(x)).sum())(x)


def abstract(api):
    """The mixed model without values."""
    if api == "nnx":
        return NnxModel(flax.nnx.eval_shape(lambda: models.Mixed(flax.nnx.Rngs(0))))
    model = APIS[api].mixed()
    shapes = jax.eval_shape(lambda: model.parameters)
    if api == "equinox":
        return models.EquinoxModel(eqx.combine(shapes, model.static))
    model.parameters = shapes
    return model


@cover(pair=PAIRS, api=["nnx", "linen"])
def test_a_checkpoint_is_loaded_into_a_model_without_values(pair, api, tmp_path):
    model, target = (of.quantised(*pair)[0] for of in (APIS[api].mixed(), abstract(api)))
    loaded = through_checkpoint(tmp_path, model.parameters, target.parameters)
    assert_same(loaded, model.parameters)
    assert bits(target.apply(loaded, draw_x(DIMS))) == bits(model.apply(model.parameters, draw_x(DIMS)))


def test_leaves_of_equinox_are_loaded_into_a_model_without_values(tmp_path):
    model, target = (of.quantised()[0].module.linear for of in (APIS["equinox"].mixed(), abstract("equinox")))
    eqx.tree_serialise_leaves(tmp_path / "leaves", model)
    assert_same(eqx.tree_deserialise_leaves(tmp_path / "leaves", target).quantized, model.quantized)


@pytest.mark.parametrize("form", [lambda dtype: dtype, str, lambda dtype: getattr(jnp, dtype.name)])
@each_pair
def test_a_dtype_stands_for_its_quantisation(pair, form):
    named = [of and form(of.dtype) for of in pair]
    first, second = (models.nnx_linear().quantised(*of)[0].definition for of in (pair, named))
    assert first == second
    layer = QuantizedLinear(4, 4, kernels=form(pair[0].dtype), rngs=flax.nnx.Rngs(0))
    assert layer.kernels == pair[0]


IN_PLACE = {
    "quantised": lambda model, **options: jaxnorm.quantize_linears(model, INT8, **options),
    "computed in float8": jaxnorm.float8_linears,
}


@of_nnx
def test_two_models_of_nnx_share_what_is_compiled(done):
    first, second, other = (CHANGES[done](APIS["nnx"].mixed(), *to)[0] for to in ((), (), (OTHER[done],)))
    assert first.definition == second.definition != other.definition


@pytest.mark.parametrize(
    ("done", "cls", "options"),
    [
        ("quantised", QuantizedLinear, {"kernels": INT8, "inputs": INT8}),
        ("computed in float8", Float8Linear, {"recipe": RECIPES["other"]}),
    ],
)
def test_a_layer_made_by_its_constructor(done, cls, options):
    layer, flaxs = (of(FEATURES, 32, rngs=flax.nnx.Rngs(0)) for of in (partial(cls, **options), flax.nnx.Linear))
    model, _ = CHANGES[done](NnxModel(flaxs), *options.values())
    assert flax.nnx.graphdef(layer) == model.definition
    assert_same(flax.nnx.state(layer), model.parameters)


@pytest.mark.parametrize("as_spec", [tuple, lambda names: PartitionSpec(*names)])
@of_nnx
def test_names_of_mesh_axes_go_with_their_axes(done, as_spec):
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("a", "b"))
    layer = models.nnx_linear(kernel_metadata={"out_sharding": as_spec(("a", "b")), "mesh": mesh}).module
    IN_PLACE[done](layer)
    if done == "quantised":
        assert tuple(layer.values.get_metadata("out_sharding")) == ("b", "a")
        assert tuple(layer.scales.get_metadata("out_sharding")) == ("b", None)
    else:
        assert layer.kernel.get_metadata("out_sharding") == as_spec(("a", "b"))
    specs = flax.nnx.get_partition_spec(flax.nnx.state(layer))
    assert jax.tree.leaves(specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))


@of_nnx
def test_modules_of_linen_in_a_model_of_nnx(done):
    dense = flax.nnx.bridge.ToNNX(flax.linen.Dense(4), rngs=flax.nnx.Rngs(0)).lazy_init(draw_x(DIMS))
    _, report = IN_PLACE[done](flax.nnx.List([models.nnx_linear().module, dense]))
    remedy = ": call it within jaxnorm.linen.using_float8()" if done != "quantised" else ""
    assert report.left == [((1,), flax.nnx.bridge.ToNNX, f"its modules are of flax.linen{remedy}")]
    if remedy:
        with jaxnorm.linen.using_float8() as report:
            y = dense(draw_x(DIMS))
        assert [cls for _, cls in report.replaced] == [flax.linen.Dense]
        assert_close(y, float8_linear(draw_x(DIMS), dense.kernel[...], bias=dense.bias[...]))


@of_nnx
def test_layers_that_share_a_kernel_share_what_comes_of_it(done):
    layers = flax.nnx.List([models.nnx_linear().module, models.nnx_linear().module])
    kernel = layers[1].kernel = layers[0].kernel
    IN_PLACE[done](layers)
    names = ("values", "scales") if done == "quantised" else ("kernel",)
    assert all(getattr(layers[1], name) is getattr(layers[0], name) for name in names)
    assert done == "quantised" or layers[0].kernel is kernel


def test_stacked_layers_of_equinox():
    layers = eqx.filter_vmap(lambda key: eqx.nn.Linear(FEATURES, 8, key=key))(jax.random.split(jax.random.key(1), 3))
    quantised, _ = jaxnorm.equinox.quantize_linears(layers, INT8)
    assert quantised.values.shape == (3, 8, FEATURES)
    x = draw_x((FEATURES,))
    expected = eqx.filter_vmap(lambda layer: layer(x))(layers)
    np.testing.assert_allclose(eqx.filter_vmap(lambda layer: layer(x))(quantised), expected, atol=0.05)


EMPTY, DENSE, NORM = flax.nnx.Dict(), flax.linen.Dense(4), flax.linen.LayerNorm(use_bias=False, use_scale=False)
GROUPS, TENSOR = Quantization(jnp.int8, "group", group_size=64), Quantization(jnp.int8, "tensor")
NOTHING, NO_MODEL, EMBED = {"params": {}}, {"kernel": jnp.ones((2, 2))}, flax.nnx.Embed(2, 2, rngs=flax.nnx.Rngs(0))
OF_BOTH = {
    "no model": ((NO_MODEL,), TypeError("model must be a flax.nnx module, .* got dict")),
    "no linear layer": ((EMPTY,), ValueError("there is no flax.nnx.Linear to .* in Dict")),
    "none that can be": ((EMBED,), ValueError(r"in Embed:\nleft .*only")),
}
WRONG = {
    jaxnorm.quantize_linears: {name: ((*args, INT8), error) for name, (args, error) in OF_BOTH.items()}
    | {
        "a linen model": ((DENSE, INT8), TypeError("a module of flax.linen, Dense: .*jaxnorm.linen.quan")),
        "another dtype": ((EMPTY, jnp.int16), TypeError("kernels must be a jaxnorm.Quantization, as .*int16")),
        "no dtype": ((EMPTY, INT8, 8), TypeError("inputs must be a jaxnorm.Quantization, as .*, got 8")),
        "an array": ((EMPTY, np.zeros(3, np.int8)), TypeError("kernels must be .* or a dtype that it takes")),
        "no kernels": ((EMPTY, None, INT8), TypeError("kernels must be a jaxnorm.Quantization, as .* got None")),
        "groups": ((EMPTY, GROUPS), ValueError("kernels has granularity='group', expected 'token', a scale for an")),
        "one": ((EMPTY, INT8, TENSOR), ValueError("inputs .*='tensor', expected 'token', a scale for a row")),
        "float8 of int8": ((EMPTY, INT8, E4M3), TypeError("to float8_e4m3fn, expected int8 for kernels")),
        "int8 of float8": ((EMPTY, E4M3, INT8), TypeError("to int8, expected float8_e4m3fn or float8_e5m2")),
        "int4 of int4": ((EMPTY, INT4, INT4), TypeError("to int4, expected int8 for kernels of int4")),
    },
    jaxnorm.float8_linears: OF_BOTH
    | {
        "a linen model": ((DENSE,), TypeError(r"Dense: .* Call it within jaxnorm.linen.using_float8\(\)")),
        "a dtype": ((EMPTY, E4M3), TypeError(r"recipe must be a jaxnorm.Float8Recipe, got Quantization")),
        "a class": ((EMPTY, Float8Recipe), TypeError(r"pass jaxnorm.Float8Recipe\(\), or leave it out")),
    },
    jaxnorm.equinox.quantize_linears: {
        "no linear layer": ((eqx.nn.Identity(), INT8), ValueError(r"no equinox\.nn\.Linear to quantise in Identity")),
        "none that can be": ((eqx.nn.Embedding(2, 2, key=jax.random.key(0)), INT8), ValueError(r"in Embedding:\nleft")),
        "a granularity": (([eqx.nn.Identity()], TENSOR), ValueError("granularity='tensor', expected 'token'")),
    },
    jaxnorm.linen.quantize_linears: {
        "an nnx model": ((EMPTY, {}), TypeError("module must be of flax.linen, got Dict; .* go to")),
        "none": ((NORM, NOTHING, jnp.ones(4)), ValueError("there is no linear layer .* in LayerNorm; pass what it")),
        "no variables": ((DENSE, {"w": 1}), TypeError(r"a mapping with 'params', as .*, got \['w'\]")),
    },
    jaxnorm.linen.using_float8: {"dense": ((DENSE,), TypeError("recipe must be a jaxnorm.Float8Recipe, got Dense"))},
    jaxnorm.linen.using_quantized: {"one": ((TENSOR,), ValueError("inputs .*='tensor', expected 'token'"))},
}


@pytest.mark.parametrize(
    ("function", "name"), [pytest.param(of, name, id=f"{of.__module__} {name}") for of in WRONG for name in WRONG[of]]
)
def test_errors(function, name):
    args, error = WRONG[function][name]
    kernels = {"kernels": INT8} if function is jaxnorm.linen.quantize_linears else {}
    with pytest.raises(type(error), match=f"^{function.__name__}: .*{error}"):
        function(*args, **kernels)


@each_change
def test_only_must_be_a_function(api, done):
    names = {"quantised": "quantize_linears", "computed in float8": "float8_linears"}
    name = "using_float8" if (api, done) == ("linen", "computed in float8") else names[done]
    with pytest.raises(TypeError, match=rf"^{name}: only must be a function of .*, got 'head'\.$"):
        CHANGES[done](APIS[api].mixed(), only="head")


@of_nnx
def test_an_error_leaves_the_model_of_nnx_as_it_was(done):
    model = models.Mixed(flax.nnx.Rngs(0))
    definition = flax.nnx.graphdef(model)
    with pytest.raises(ValueError, match="only is false of it"):
        IN_PLACE[done](model, only=lambda path, layer: False)
    assert flax.nnx.graphdef(model) == definition


def test_errors_of_a_layer():
    rngs = flax.nnx.Rngs(0)
    with pytest.raises(TypeError, match=f"^QuantizedLinear: cannot be quantised: {models.own('dot_general')}"):
        QuantizedLinear(4, 4, kernels=INT8, dot_general=len, rngs=rngs)
    with pytest.raises(ValueError, match=r"^QuantizedLinear: got out_sharding=.* reshard the result instead"):
        models.nnx_linear().quantised()[0].module(draw_x(DIMS), out_sharding=PartitionSpec())
    with pytest.raises(TypeError, match=f"^Float8Linear: cannot be computed in float8: {models.own('dot_general')}"):
        models.nnx_linear(cls=Float8Linear, dot_general=len)
    with pytest.raises(TypeError, match=r"^Float8Linear: recipe must be a jaxnorm.Float8Recipe, got 'row'"):
        models.nnx_linear(cls=Float8Linear, recipe="row")
    with pytest.raises(ValueError, match=r"^Float8Linear: x has shape \(2, 3\) and kernel \(16, 32\)"):
        models.nnx_linear(cls=Float8Linear)(jnp.ones((2, 3)))
    with pytest.raises(TypeError, match=r"^Float8Linear: x has values of int8, expected float8_e4m3fn"):
        models.nnx_linear(cls=Float8Linear).module(quantize(draw_x(DIMS), INT8))
    model = APIS["equinox"].mixed().module
    with pytest.raises(ValueError, match=r"x has shape \(3, 16\), expected \(16,\).*jax\.vmap"):
        jaxnorm.equinox.QuantizedLinear(model.linear, INT8)(draw_x((3, FEATURES)))
    with pytest.raises(TypeError, match="got a SubLinear that cannot be quantised: only equinox"):
        jaxnorm.equinox.QuantizedLinear(model.sub_linear, INT8)
    for change in ("in_float8", "quantised"):
        new, _ = getattr(models.linen_linear(), change)()
        with pytest.raises(flax.errors.ScopeParamShapeError):
            new(np.ones((2, 3), np.float32))
