"""`compare_layers`: a model with its own norms beside the same model with those that replaced them."""

from functools import partial

import equinox
import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from cases import bits, draw_x
from library_models import ignore_keras_own
from norm_models import CUSTOM, DIMS, FEATURES, GemmaNorm, LinenGemmaNorm, gemma_norm, linen_function, loss, mixed

import jaxnorm
from jaxnorm.inspect import turns

pytestmark = pytest.mark.jax_version


@pytest.fixture(autouse=True)
def few_turns(monkeypatch):
    monkeypatch.setattr(turns, "TURNS", 2)
    monkeypatch.setattr(turns, "SECONDS", 1e-4)


class Doubled(flax.nnx.Module):
    """A norm among others, by which results can be told apart."""

    def __init__(self, rngs):
        self.first, self.norm = flax.nnx.Linear(FEATURES, FEATURES, rngs=rngs), GemmaNorm(rngs)

    def __call__(self, x):
        return self.norm(self.first(x))


def doubled(custom=CUSTOM):
    model = Doubled(flax.nnx.Rngs(0))
    jaxnorm.replace_layers(model, custom)
    return model


def test_a_model_whose_norms_are_right():
    model = mixed()
    jaxnorm.replace_layers(model, CUSTOM)
    comparison = jaxnorm.compare_layers(model, draw_x(DIMS))
    assert 0 < comparison.outputs < 1e-4
    assert 0 < comparison.gradients < 1e-4
    for own, replaced in (comparison.forward, comparison.backward):
        assert own.low <= own.median <= own.high
        assert replaced.low <= replaced.median <= replaced.high


def test_a_model_whose_norm_is_wrong():
    x, own = draw_x(DIMS), Doubled(flax.nnx.Rngs(0))
    model = doubled({GemmaNorm: lambda norm, x: 1.5 * gemma_norm(norm, x)})
    comparison, by_loss = jaxnorm.compare_layers(model, x), jaxnorm.compare_layers(model, x, loss=loss)
    assert comparison.outputs == pytest.approx(0.5, rel=1e-5)
    assert comparison.gradients == pytest.approx(1.25, rel=1e-3)  # of squares
    assert comparison.parameter in ("first.kernel", "first.bias", "norm.scale")

    def largest(function):
        a, b = (np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(function(of))]) for of in (own, model))
        return np.abs(b - a).max() / np.abs(a).max()

    assert by_loss.outputs == pytest.approx(largest(lambda model: model(x)), rel=1e-3)
    assert by_loss.gradients == pytest.approx(largest(lambda model: flax.nnx.grad(loss)(model, x)), rel=1e-3)


@pytest.mark.parametrize("given", [1.0, np.nan])
def test_a_model_that_gives_zeros(given):
    model = flax.nnx.RMSNorm(FEATURES, scale_init=flax.nnx.initializers.zeros, rngs=flax.nnx.Rngs(0))
    jaxnorm.replace_layers(model, {flax.nnx.RMSNorm: lambda norm, x: given + 0 * x * norm.scale[...]})
    comparison = jaxnorm.compare_layers(model, draw_x(DIMS))
    assert comparison.outputs == pytest.approx(np.inf if given == 1 else np.nan, nan_ok=True)


class Stateful(flax.nnx.Module):
    """Draws random numbers, counts its calls, and writes a cache that it is given."""

    def __init__(self, rngs):
        self.norm = flax.nnx.LayerNorm(FEATURES, use_fast_variance=False, rngs=rngs)
        self.dropout = flax.nnx.Dropout(0.5, rngs=rngs)
        self.calls = flax.nnx.BatchStat(jnp.zeros((), jnp.int32))

    def __call__(self, x, cache, *, scaled):
        self.calls.set_value(self.calls[...] + 1)
        cache["last"].set_value(x)
        return {"y": self.dropout(self.norm(x)) * (2 if scaled else 1), "calls": self.calls[...]}


def test_neither_model_nor_arguments_are_changed_and_random_numbers_are_the_same():
    model, cache = Stateful(flax.nnx.Rngs(0)), flax.nnx.Dict(last=flax.nnx.Cache(jnp.zeros(DIMS)))
    jaxnorm.replace_layers(model)
    modules = [(path, type(module)) for path, module in flax.nnx.iter_modules(model)]
    before = bits(flax.nnx.state((model, cache), flax.nnx.Not(flax.nnx.RngKey)))
    comparison = jaxnorm.compare_layers(model, draw_x(DIMS), cache, scaled=True)
    assert comparison.outputs < 1e-5
    assert comparison.gradients < 1e-5
    assert bits(flax.nnx.state((model, cache), flax.nnx.Not(flax.nnx.RngKey))) == before
    assert [(path, type(module)) for path, module in flax.nnx.iter_modules(model)] == modules


def test_a_model_without_parameters():
    model = flax.nnx.RMSNorm(FEATURES, use_scale=False, rngs=flax.nnx.Rngs(0))
    jaxnorm.replace_layers(model)
    comparison = jaxnorm.compare_layers(model, draw_x(DIMS))
    assert (comparison.gradients, comparison.parameter) == (0, None)


def test_nan_is_a_difference():
    model = doubled({GemmaNorm: lambda norm, x: gemma_norm(norm, x) + jnp.nan})
    assert np.isnan(jaxnorm.compare_layers(model, draw_x(DIMS)).outputs)


def test_it_prints_a_table():
    times = turns.Times(0.001, 0.002, 0.003), turns.Times(0.0005, 0.001, 0.002)
    comparison = jaxnorm.reports.Comparison(1.234e-7, 0.5, "first.kernel", times, times)
    assert (
        str(comparison)
        == """\
            own norms    replaced   change  largest difference
forward          2 ms        1 ms    -50 %             1.2e-07
gradient         2 ms        1 ms    -50 %                 0.5, of first.kernel"""
    )


RESHAPED, INTEGERS = {GemmaNorm: lambda norm, x: x[0]}, {Doubled: lambda model, x: jnp.zeros(DIMS, int)}
SHAPES = r".*arrays of shapes \[\(4, 16\)\], and with its own norms \[\(3, 4, 16\)\]"
UNCHANGED = r".*no layer of Doubled was replaced: call jaxnorm\.replace_layers\(model\) first"
NO_FLOATS = ".*the model gives no floating array: pass loss"
NO_VALUES = r"args\[1\] is a jax.ShapeDtypeStruct, and .*; pass an array"
TRACED = r"args\[1\] is traced, .*call compare_layers outside of jax.jit"
OF_NNX = "expected a module of flax.linen, got Dict; see jaxnorm.compare_layers"
NO_VARIABLES = r"variables must be a mapping with 'params', .*, got \['scale'\]"
NOTHING = "no layer of Dense is replaced; give custom="
LAYER, DENSE = flax.linen.LayerNorm(), flax.linen.Dense(2)
compare, linen_compare = jaxnorm.compare_layers, jaxnorm.linen.compare_layers
# What raises which error, of an x.
ERRORS = {
    "nothing replaced": (lambda x: compare(Doubled(flax.nnx.Rngs(0)), x), ValueError(UNCHANGED)),
    "of linen": (lambda x: compare(LAYER, x), TypeError(r".*a module of flax.linen, LayerNorm: call jaxnorm\.linen")),
    "not called": (lambda x: compare([], x), TypeError(".*a flax.nnx module that can be called, got list")),
    "other shapes": (lambda x: compare(doubled(RESHAPED), x), ValueError(SHAPES)),
    "integers": (lambda x: compare(doubled(INTEGERS), x), ValueError(NO_FLOATS)),
    "loss": (lambda x: compare(doubled(), x, loss=1), TypeError("loss must be a function of a model .*, got 1")),
    "no values": (lambda x: compare(doubled(), jax.eval_shape(lambda: x)), TypeError(NO_VALUES)),
    "traced": (lambda x: jax.jit(partial(compare, doubled()))(x), TypeError(TRACED)),
    "linen of nnx": (lambda x: linen_compare(flax.nnx.Dict(), {}, x), TypeError(OF_NNX)),
    "no variables": (lambda x: linen_compare(LAYER, {"scale": x}, x), TypeError(NO_VARIABLES)),
    "nothing": (lambda x: linen_compare(DENSE, DENSE.init(jax.random.key(0), x), x), ValueError(NOTHING)),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    call, error = ERRORS[name]
    with pytest.raises(type(error), match=f"^compare_layers: {error}"):
        call(draw_x(DIMS))


OTHERS = {
    "Equinox": lambda: equinox.nn.Sequential([equinox.nn.LayerNorm(DIMS)]),
    "Keras": lambda: keras.Sequential([keras.Input(DIMS[1:]), keras.layers.LayerNormalization()]),
}


@ignore_keras_own
@pytest.mark.parametrize("compare", [compare, lambda model, x: linen_compare(model, {}, x)])
@pytest.mark.parametrize("library", OTHERS)
def test_models_of_other_libraries_are_compared_by_the_lines_of_the_error(library, compare, capsys):
    model, x = OTHERS[library](), draw_x(DIMS)
    with pytest.raises(
        TypeError, match=f"^compare_layers: got Sequential, a model of {library.lower()}, .* by hand:"
    ) as error:
        compare(model, x)
    lines, names = str(error.value).partition(":\n")[2], {"jaxnorm": jaxnorm, "model": model, "x": x}
    exec(lines, names)
    assert names["report"].replaced
    assert float(capsys.readouterr().out) < 1e-5


class LinenModel(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x, *, deterministic=True):
        x = flax.linen.Dense(FEATURES)(flax.linen.RMSNorm()(x))
        return LinenGemmaNorm()(flax.linen.Dropout(0.5)(x, deterministic))


def test_linen():
    module, x = LinenModel(), draw_x(DIMS)
    variables = module.init(jax.random.key(0), x)
    keywords = {"deterministic": False, "rngs": {"dropout": jax.random.key(1)}}
    comparison = jaxnorm.linen.compare_layers(module, variables, x, **keywords)
    assert comparison.outputs < 1e-5
    assert comparison.gradients < 1e-5
    wrong = {LinenGemmaNorm: lambda norm, x: 1.5 * linen_function(norm, x)}
    comparison = jaxnorm.linen.compare_layers(module, variables, x, custom=wrong)
    assert comparison.outputs == pytest.approx(0.5, rel=1e-5)
    assert comparison.parameter.split(".")[0] in ("Dense_0", "LinenGemmaNorm_0", "RMSNorm_0")
    comparison = jaxnorm.linen.compare_layers(module, variables, x, custom=wrong, loss=lambda model, x: model(x).sum())
    assert comparison.gradients == pytest.approx(0.5, rel=1e-3)
