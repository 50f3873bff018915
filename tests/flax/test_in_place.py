"""What each function that changes a model of `flax.nnx` in place keeps of it."""

import copy
import pickle
from functools import partial

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
from norm_models import CUSTOM, DIMS, FEATURES, GemmaNorm, NamedNorm

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
