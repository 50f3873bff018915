"""`restore_layers`: a model of `flax.nnx` has its own classes again."""

import copy
import pickle

import flax.linen
import flax.nnx
import pytest
from cases import bits, draw_x
from norm_models import CUSTOM, DIMS, FEATURES, REPLACED, GemmaNorm, mixed

import jaxnorm

pytestmark = pytest.mark.jax_version


def test_all_is_as_before():
    model = mixed()
    modules, definition, y = dict(flax.nnx.iter_modules(model)), flax.nnx.graphdef(model), bits(model(draw_x(DIMS)))
    state = bits(flax.nnx.state(model))
    jaxnorm.replace_layers(model, CUSTOM)
    assert flax.nnx.graphdef(model) != definition
    model, report = jaxnorm.restore_layers(model)
    assert dict(report.replaced) == REPLACED
    assert not report.left
    assert flax.nnx.graphdef(model) == definition
    assert hash(flax.nnx.graphdef(model)) == hash(definition)
    assert all(module is modules[path] for path, module in flax.nnx.iter_modules(model))
    assert bits(flax.nnx.state(model)) == state
    assert bits(model(draw_x(DIMS))) == y
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
    model = mixed()
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
