"""What each function that changes a model of `flax.nnx` in place keeps of it, and `restore_layers` gives back."""

import copy
import pickle
from functools import partial

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import library_models
import norm_models
import pytest
from cases import bits, draw_x
from flax_apis import assert_calls, assert_close, assert_gradients_close, assert_same, scanned, stacked
from library_models import INT8, NamedLinear, nnx_linear
from native import native_calls
from norm_models import CUSTOM, DIMS, FEATURES, REPLACED, GemmaNorm, NamedNorm

import jaxnorm
from jaxnorm.nnx import Float8Linear, QuantizedLinear, QuantizedParam, RMSNorm

pytestmark = pytest.mark.jax_version

IN_PLACE = {
    "replace_layers": lambda model: jaxnorm.replace_layers(model, CUSTOM),
    "quantize_linears": lambda model: jaxnorm.quantize_linears(model, INT8, INT8),
    "float8_linears": jaxnorm.float8_linears,
}
OURS = {"replace_layers": RMSNorm, "quantize_linears": QuantizedLinear, "float8_linears": Float8Linear}
each_change = pytest.mark.parametrize("name", IN_PLACE)


def mixed(name):
    return norm_models.mixed() if name == "replace_layers" else library_models.Mixed(flax.nnx.Rngs(0))


def variables_of(model):
    """Those that the model has, or had before it was quantised, by path."""
    found = {path: of for path, of in flax.nnx.iter_graph(model) if isinstance(of, flax.nnx.Variable)}
    return {path: (id(of), bits(of[...])) for path, of in found.items() if not isinstance(of, QuantizedParam)}


@each_change
def test_modules_and_other_variables_stay_the_same(name):
    model, alike = mixed(name), mixed(name)
    modules, variables = dict(flax.nnx.iter_modules(model)), variables_of(model)
    classes = [type(layer) for layer in model.listed]
    model, report = IN_PLACE[name](model)
    assert all(module is modules[path] for path, module in flax.nnx.iter_modules(model))
    kernels = {(*path, "kernel") for path, _ in report.replaced if name == "quantize_linears"}
    assert variables_of(model) == {path: of for path, of in variables.items() if path not in kernels}
    assert len(jax.tree.leaves(flax.nnx.state(model, QuantizedParam))) == 2 * len(kernels)
    assert model.shared is model.listed[0]
    for layer, cls in zip(model.listed, classes, strict=True):
        assert isinstance(layer, cls)
        assert isinstance(layer, OURS[name])
    IN_PLACE[name](alike)
    assert flax.nnx.graphdef(alike) == flax.nnx.graphdef(model)  # they share what is compiled


@each_change
def test_copies_and_pickles(name):
    rngs = flax.nnx.Rngs(0)
    norms, linears = [NamedNorm(rngs), GemmaNorm(rngs)], [nnx_linear(dtype=jnp.bfloat16).module, NamedLinear(rngs)]
    layers = flax.nnx.List(norms if name == "replace_layers" else linears)
    IN_PLACE[name](layers)
    expected, definition = [layer(draw_x(DIMS)) for layer in layers], flax.nnx.graphdef(layers)
    for other in (copy.deepcopy(layers), pickle.loads(pickle.dumps(layers)), flax.nnx.merge(*flax.nnx.split(layers))):
        assert flax.nnx.graphdef(other) == definition
        assert [type(layer) for layer in other] == [type(layer) for layer in layers]
        assert bits([layer(draw_x(DIMS)) for layer in other]) == bits(expected)


@pytest.mark.parametrize("remat", [lambda function: function, flax.nnx.remat], ids=["kept", "remat"])
@each_change
def test_stacked_layers_are_what_each_becomes(name, remat):
    cls = flax.nnx.RMSNorm if name == "replace_layers" else partial(flax.nnx.Linear, FEATURES)
    layers, x = stacked(lambda rngs: cls(FEATURES, rngs=rngs)), draw_x(DIMS)
    definition, state = flax.nnx.split(layers)
    states = [jax.tree.map(lambda leaf, i=i: leaf[i], state) for i in range(3)]
    singles = flax.nnx.List([flax.nnx.merge(definition, of) for of in states])
    for model in (layers, singles):
        IN_PLACE[name](model)

    def branch(x, layer):
        return jnp.sin(layer(x)) + x

    def by_scan(layers):
        return scanned(x, layers, remat(branch))

    def one_by_one(singles):
        y = x
        for layer in singles:
            y = branch(y, layer)
        return y

    def stack(states):
        return jax.tree.leaves(jax.tree.map(lambda *leaves: jnp.stack(leaves), *states))

    assert_same(jax.tree.leaves(flax.nnx.state(layers)), stack([flax.nnx.state(layer) for layer in singles]))
    assert_close(flax.nnx.jit(by_scan)(layers), one_by_one(singles))
    if name != "quantize_linears":  # whose inputs are rounded without a derivative
        of_layers, of_singles = (
            flax.nnx.jit(flax.nnx.grad(lambda model, run=run: run(model).sum()))(model)
            for run, model in ((by_scan, layers), (one_by_one, singles))
        )
        assert_gradients_close(jax.tree.leaves(of_layers), stack([of_singles[i] for i in range(3)]))
    if name == "replace_layers":
        definition, state = flax.nnx.split(layers)
        assert_calls(lambda state: by_scan(flax.nnx.merge(definition, state)), (state,), native_calls("rms", fwd=1))


# What Flax's transformations do with a model that they are given: they write it back, with the class that it had.
TRANSFORMATIONS = {
    "jit": flax.nnx.jit,
    "grad": flax.nnx.grad,
    "remat": flax.nnx.remat,
    "vmap": lambda function: flax.nnx.vmap(function, in_axes=None, axis_size=2),
    "jit of grad": lambda function: flax.nnx.jit(flax.nnx.grad(function)),
    "cond": lambda function: lambda model: flax.nnx.cond(jnp.bool_(1), function, function, model),
}


@pytest.mark.parametrize("transform", TRANSFORMATIONS.values(), ids=TRANSFORMATIONS)
@each_change
def test_an_argument_of_a_transformation_keeps_its_classes(name, transform):
    def run(model):
        IN_PLACE[name](model.inner)
        return norm_models.loss(model.inner, draw_x(DIMS))

    with pytest.raises(ValueError, match=f"^{name}: the model is an argument of .*, as nnx.jit.*Call {name} before"):
        transform(run)(flax.nnx.Dict(inner=norm_models.mixed()))


def test_all_is_as_before():
    model = norm_models.mixed()
    modules, definition, y = dict(flax.nnx.iter_modules(model)), flax.nnx.graphdef(model), bits(model(draw_x(DIMS)))
    state = bits(flax.nnx.state(model))
    jaxnorm.replace_layers(model, CUSTOM)
    assert flax.nnx.graphdef(model) != definition
    model, report = jaxnorm.restore_layers(model)
    assert dict(report.replaced) == REPLACED
    assert not report.left
    assert (flax.nnx.graphdef(model), hash(flax.nnx.graphdef(model))) == (definition, hash(definition))
    assert all(module is modules[path] for path, module in flax.nnx.iter_modules(model))
    assert (bits(flax.nnx.state(model)), bits(model(draw_x(DIMS)))) == (state, y)
    assert str(jaxnorm.restore_layers(model)[1]) == "nothing to restore"


# What is made of a model whose norms were replaced.
COPIES = {
    "deepcopy": copy.deepcopy,
    "clone": flax.nnx.clone,
    "merge": lambda model: flax.nnx.merge(*flax.nnx.split(model)),
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "eval_shape": lambda model: flax.nnx.eval_shape(lambda: model),
}


def classes_of(model):
    return {path: type(module) for path, module in flax.nnx.iter_modules(model)}


@pytest.mark.parametrize("name", COPIES)
def test_a_copy(name):
    model = norm_models.mixed()
    model = flax.nnx.List([model.listed, model.by_name, model.groups])  # what pickle takes
    classes = classes_of(model)
    jaxnorm.replace_layers(model, CUSTOM)
    other = COPIES[name](model)
    jaxnorm.restore_layers(other)
    assert classes_of(other) == classes
    assert classes_of(model) != classes


def test_norms_of_the_authors_own_stay():
    rngs = flax.nnx.Rngs(0)
    norms = {
        "rms": jaxnorm.nnx.RMSNorm(FEATURES, rngs=rngs),
        "groups": jaxnorm.nnx.GroupNorm(FEATURES, num_groups=2, rngs=rngs),
        "added": jaxnorm.nnx.AddRMSNorm(FEATURES, rngs=rngs),
        "embed": jaxnorm.nnx.Embed(FEATURES, FEATURES, rngs=rngs),
        "flax": flax.nnx.LayerNorm(FEATURES, rngs=rngs),
        "own": GemmaNorm(rngs),
    }
    classes = {name: type(norm) for name, norm in norms.items()}
    jaxnorm.replace_layers(norms, CUSTOM)
    _, report = jaxnorm.restore_layers(norms)
    assert {name: type(norm) for name, norm in norms.items()} == classes
    assert dict(report.replaced) == {("flax",): flax.nnx.LayerNorm, ("own",): GemmaNorm}
    own = {path for path, _, why in report.left if why == "the model's author made it from jaxnorm.nnx"}
    assert own == {("rms",), ("groups",), ("added",), ("embed",)}
    assert "restored  flax: LayerNorm\n" in str(report)


OPTIONS = {"scale_offset": 1.0, "implementation": "xla"}


@pytest.mark.parametrize(("name", "option"), [("RMSNorm", of) for of in OPTIONS] + [("Embed", "implementation")])
def test_a_layer_with_an_option_that_flax_has_not_stays(name, option):
    features = (FEATURES,) * (1 + (name == "Embed"))
    layer = getattr(flax.nnx, name)(*features, rngs=flax.nnx.Rngs(0))
    jaxnorm.replace_layers(layer)
    setattr(layer, option, OPTIONS[option])
    assert jaxnorm.restore_layers(layer)[1].left
    assert type(layer) is getattr(jaxnorm.nnx, name)


def test_a_norm_that_was_replaced_twice():
    norm = flax.nnx.RMSNorm(FEATURES, rngs=flax.nnx.Rngs(0))
    jaxnorm.replace_layers(norm)
    jaxnorm.replace_layers(norm, {jaxnorm.nnx.RMSNorm: lambda norm, x: x})
    jaxnorm.restore_layers(norm)
    assert type(norm) is flax.nnx.RMSNorm


def test_linear_layers_stay_what_they_became():
    rngs = flax.nnx.Rngs(0)
    linear, norm = flax.nnx.Linear(FEATURES, 2, rngs=rngs), flax.nnx.RMSNorm(FEATURES, rngs=rngs)
    model = flax.nnx.Dict(linear=linear, norm=norm)
    jaxnorm.float8_linears(model)
    jaxnorm.replace_layers(model)
    assert [path for path, _ in jaxnorm.restore_layers(model)[1].replaced] == [("norm",)]
    assert type(model.linear) is jaxnorm.nnx.Float8Linear


def test_errors():
    message = r"^restore_layers: got a module of flax.linen, LayerNorm: .* Call it outside\.$"
    with pytest.raises(TypeError, match=message):
        jaxnorm.restore_layers(flax.linen.LayerNorm())
