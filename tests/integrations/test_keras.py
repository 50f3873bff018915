"""Models of Keras with the layers of `jaxnorm.keras`: trained, saved, spread over devices, and `replace_layers`."""

import subprocess

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from cases import draw
from coverage import cover
from flax_apis import SUMS, assert_calls, assert_same, integers, sums
from library_models import ignore_keras_own
from processes import STRICT

import jaxnorm
from jaxnorm.keras import replace_layers

pytestmark = [pytest.mark.jax_version, ignore_keras_own]

NAMES = ("LayerNormalization", "RMSNormalization", "GroupNormalization", "Embedding")


def functional(layers, **options):
    """A model with all layers of `layers`, with an axis that kernels serve and one that they do not."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8, 16))
    ids = keras.ops.clip(keras.ops.abs(keras.ops.sum(inputs, -1)), 0, 9)  # which the layer truncates
    x = layers.LayerNormalization(**options)(inputs + layers.Embedding(10, 16)(ids))
    x = keras.layers.Dense(16, activation="gelu", **options)(x)
    x = layers.GroupNormalization(groups=4, **options)(x)
    x = layers.LayerNormalization(axis=1, **options)(x)
    return keras.Model(inputs, layers.RMSNormalization(**options)(x))


class Block(keras.layers.Layer):
    def __init__(self, layers, **options):
        super().__init__(**options)
        self.norms = [layers.LayerNormalization(), layers.RMSNormalization()]
        self.positions = layers.Embedding(8, 16)

    def call(self, x):
        x = x + self.positions(keras.ops.arange(8))
        for norm in self.norms:
            x = x + norm(x)
        return x


class Subclassed(keras.Model):
    def __init__(self, layers):
        super().__init__()
        self.block = Block(layers)
        self.shared = self.block.norms[0]
        self.by_step = keras.layers.TimeDistributed(layers.RMSNormalization())

    def call(self, x):
        return self.by_step(self.shared(self.block(x)))


def subclassed(layers):
    keras.utils.set_random_seed(0)
    model = Subclassed(layers)
    model(data()[0])
    return model


def sequential(layers):
    keras.utils.set_random_seed(0)
    rows = [layers.LayerNormalization(), keras.layers.Dense(16), layers.RMSNormalization()]
    return keras.Sequential([keras.Input((8, 16)), *rows])


MODELS = {"functional": functional, "subclassed": subclassed, "sequential": sequential}


def data(examples=16):
    return draw("inputs", (examples, 8, 16)), draw("targets", (examples, 8, 16))


def history(model, epochs=1):
    return model.fit(*data(), epochs=epochs, batch_size=8, verbose=0, shuffle=False).history["loss"]


def trained(model):
    model.compile("adam", "mse")
    return history(model, epochs=2)


def norms(model):
    """The classes of a model's norms and of its Embedding, in the order of its layers."""
    return [type(layer) for layer in model._flatten_layers() if type(layer).__name__ in NAMES]


def assert_alike(actual, expected):
    np.testing.assert_allclose(np.float32(actual), np.float32(expected), rtol=1e-4, atol=2e-5)


@cover(policy=["mixed_bfloat16", "mixed_float16"])
def test_training_in_mixed_precision(policy):
    kerass, ours = functional(keras.layers, dtype=policy), functional(jaxnorm.keras, dtype=policy)
    np.testing.assert_allclose(trained(ours), trained(kerass), rtol=1e-2)
    assert ours(data()[0]).dtype == kerass(data()[0]).dtype
    assert {variable.dtype for variable in ours.trainable_variables} == {"float32"}


def test_data_parallel(devices):
    expected, names = trained(functional(keras.layers)), keras.distribution.list_devices()[: len(devices)]
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=names))
    try:
        model = functional(jaxnorm.keras)
        assert_alike(trained(model), expected)
        assert len(model.layers[-1].scale.value.sharding.device_set) == len(devices)
    finally:
        keras.distribution.set_distribution(None)


@cover(layers={"kerass": keras.layers, "ours": jaxnorm.keras})
def test_a_saved_model_loads_as_one_of_ours(layers, tmp_path):
    model = functional(layers)
    trained(model)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert norms(loaded) == norms(model)
    optimizer = loaded.optimizer
    replace_layers(loaded)
    assert (norms(loaded), loaded.optimizer) == (norms(functional(jaxnorm.keras)), optimizer)
    assert_alike(loaded.predict(data()[0], verbose=0), model.predict(data()[0], verbose=0))
    assert_alike(history(loaded), history(model))  # the optimiser's state too


# Where jaxnorm.keras is imported, Keras finds its classes before those that a program names.
def test_a_file_of_ours_loads_without_jaxnorm(tmp_path):
    model = sequential(jaxnorm.keras)
    model.save(tmp_path / "model.keras")
    np.save(tmp_path / "x.npy", data()[0])
    np.save(tmp_path / "y.npy", model.predict(data()[0], verbose=0))
    code = f"""
import sys, keras, numpy
theirs = {{"jaxnorm>" + name: getattr(keras.layers, name) for name in {NAMES}}}
model = keras.models.load_model("model.keras", custom_objects=theirs)
assert "jaxnorm" not in sys.modules
numpy.testing.assert_allclose(model.predict(numpy.load("x.npy"), verbose=0), numpy.load("y.npy"), atol=2e-5)
"""
    ignored = ["-W", "ignore:__array__ implementation doesn't accept a copy"]
    run = subprocess.run([*STRICT, *ignored, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@cover(model=MODELS)
def test_weights_load_either_way(model, tmp_path):
    kerass, ours = model(keras.layers), model(jaxnorm.keras)
    for source, target in ((kerass, ours), (ours, kerass)):
        for variable in source.variables:
            variable.assign(draw(variable.path, tuple(variable.shape)))
        source.save_weights(tmp_path / "of.weights.h5")
        target.load_weights(tmp_path / "of.weights.h5")
        assert_alike(target(data()[0]), source(data()[0]))


@cover(model=MODELS)
def test_replacement_and_training_are_kerass(model):
    changed, kerass = model(keras.layers), model(keras.layers)
    variables = changed.variables
    same, report = replace_layers(changed)
    assert same is changed
    assert norms(changed) == norms(model(jaxnorm.keras))
    assert sorted(cls.__name__ for _, cls in report.replaced) == sorted(cls.__name__ for cls in norms(kerass))
    assert report.left == []
    assert all(a is b for a, b in zip(changed.variables, variables, strict=True))
    assert_alike(changed(data()[0]), kerass(data()[0]))
    assert_alike(trained(changed), trained(kerass))
    assert_alike(changed.evaluate(*data(), verbose=0), kerass.evaluate(*data(), verbose=0))
    assert_alike(changed.predict(data()[0], verbose=0), kerass.predict(data()[0], verbose=0))


def test_paths_are_those_of_the_parameters():
    model = MODELS["subclassed"](keras.layers)
    _, report = replace_layers(model)
    paths = {"/".join(path) for path, _ in report.replaced}
    assert paths == {variable.path.rpartition("/")[0] for variable in model.variables}


@pytest.fixture
def calls_of_ours(monkeypatch):
    """How often a step that was traced since has called a function of ours."""
    called = []

    def counted(function):
        return lambda *args, **options: (called.append(function.__name__), function(*args, **options))[1]

    for function in (jaxnorm.embedding, jaxnorm.layer_norm, jaxnorm.rms_norm, jaxnorm.group_norm):
        monkeypatch.setattr(jaxnorm.keras, function.__name__, counted(function))
    return called


@cover(step=["fit", "evaluate", "predict"])
def test_a_step_that_was_compiled_before_is_traced_again(step, calls_of_ours):
    model, x = functional(keras.layers), data()[0]
    model.compile("adam", "mse")
    run = {"fit": lambda: model.fit(*data(), verbose=0), "predict": lambda: model.predict(x, verbose=0)}
    run["evaluate"] = lambda: model.evaluate(*data(), verbose=0)
    run[step]()
    assert not calls_of_ours
    replace_layers(model)
    run[step]()
    assert sorted(calls_of_ours) == ["embedding", "group_norm", "layer_norm", "rms_norm"]


def test_a_model_that_is_not_built():
    model = keras.Sequential([keras.layers.LayerNormalization(), keras.layers.RMSNormalization(axis=1)])
    _, report = replace_layers(model)
    assert len(report.replaced) == 2
    assert norms(model) == [jaxnorm.keras.LayerNormalization, jaxnorm.keras.RMSNormalization]
    assert model(draw("x", (3, 4))).shape == (3, 4)


class OwnNormalization(keras.layers.Layer):
    def call(self, x):
        return x


class SubNormalization(keras.layers.LayerNormalization):
    pass


class SubEmbedding(keras.layers.Embedding):
    pass


@pytest.mark.filterwarnings("ignore:You passed `rms_scaling=True`")
def test_what_is_left():
    own = "it is a class of the model's own"
    left = {
        keras.layers.BatchNormalization(name="a"): "jaxnorm has no such norm",
        keras.layers.UnitNormalization(name="b"): "jaxnorm has no such norm",
        keras.layers.Normalization(name="i"): "jaxnorm has no such norm",
        keras.layers.LayerNormalization(name="c", rms_scaling=True): "no kernel serves rms_scaling",
        keras.layers.LayerNormalization(name="d", epsilon=-1): "no kernel serves epsilon=-1",
        keras.layers.RMSNormalization(name="e", dtype="float64"): "no kernel serves float64",
        OwnNormalization(name="f"): own,
        SubNormalization(name="g"): f"{own}: derive SubNormalization from jaxnorm.keras.LayerNormalization",
        jaxnorm.keras.LayerNormalization(name="h"): "it is jaxnorm's already",
        keras.layers.Embedding(4, 3, lora_rank=2, name="j"): "it has LoRA",
        keras.layers.Embedding(4, 3, dtype="int8_from_float32", name="k"): "its table is quantised to int8",
        keras.layers.Embedding(4, 3, dtype="float64", name="l"): "no kernel serves float64",
        keras.layers.ReversibleEmbedding(4, 3, name="m"): "jaxnorm has no such layer",
        SubEmbedding(4, 3, name="n"): f"{own}: derive SubEmbedding from jaxnorm.keras.Embedding",
        jaxnorm.keras.Embedding(4, 3, name="o"): "it is jaxnorm's already",
    }
    _, report = replace_layers(keras.Sequential(list(left)))
    assert report.replaced == []
    assert {path[-1]: why for path, _, why in report.left} == {layer.name: why for layer, why in left.items()}


def test_a_layer_alone():
    layer = keras.layers.LayerNormalization()
    assert [cls for _, cls in replace_layers(layer)[1].replaced] == [keras.layers.LayerNormalization]
    assert type(layer) is jaxnorm.keras.LayerNormalization


@pytest.mark.parametrize("other", [3, None, keras.Model, [keras.layers.LayerNormalization()]])
def test_what_is_no_model(other):
    with pytest.raises(TypeError, match=r"model must be a keras\.Model or another layer, got"):
        replace_layers(other)


# Of seven rows, with some from the end and some out of range.
ROWS = 7
INDICES = np.array([[0, 3, 3, 6, -1], [-7, 7, 100, -8, -100]])


def embeddings(**options):
    layers = [of.Embedding(ROWS, 4, **options) for of in (keras.layers, jaxnorm.keras)]
    for layer in layers:
        layer.build()
        layer.embeddings.assign(draw("table", (ROWS, 4)))
    return layers


@cover(
    policy=[None, "bfloat16", "float16", "mixed_bfloat16", "mixed_float16", "float64"],
    of_x=["int32", "int64", "int8", "uint8", "uint32", "float32"],
)
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")
def test_rows_of_an_embedding_have_kerass_bits(policy, of_x):
    theirs, ours = embeddings(dtype=policy)
    x = (INDICES + 0.9 if of_x == "float32" else INDICES).astype(of_x)
    assert_same(ours(x), theirs(x))


@cover(policy=["float32", "bfloat16", "mixed_bfloat16"])
def test_the_gradient_of_an_embedding_is_summed_in_float32(policy):
    layer = embeddings(dtype=policy)[1]
    x, values = np.tile(INDICES[0], 64), [layer.embeddings.value]
    dy = integers((*x.shape, 4))

    def rows(values):
        return layer.stateless_call(values, [], x)[0]

    ((gradient,),) = jax.vjp(rows, values)[1](dy.astype(layer.compute_dtype))
    assert_same(gradient, sums(x % ROWS, dy, ROWS, layer.variable_dtype))
    assert_calls(jax.grad(lambda values: jnp.sin(rows(values)).sum().astype("float32")), (values,), SUMS)


@cover(mask_zero=[True, False])
def test_config_weights_and_mask_of_an_embedding_are_kerass(mask_zero):
    theirs, ours = embeddings(mask_zero=mask_zero, embeddings_constraint="non_neg", name="tokens")
    assert ours.get_config() == theirs.get_config()
    masks = [layer.compute_mask(INDICES) for layer in (theirs, ours)]
    assert np.array_equal(*masks) if mask_zero else masks == [None, None]
    weights = [[(w.path, w.shape, w.dtype, w.trainable) for w in layer.weights] for layer in (theirs, ours)]
    assert weights[0] == weights[1]


# What an Embedding may become after it was replaced.
AFTER = {"LoRA": lambda layer: layer.enable_lora(2), "int8": lambda layer: layer.quantize("int8")}
AFTER |= {"int4": lambda layer: layer.quantize("int4")}
AFTER |= {"a policy": lambda layer: setattr(layer, "dtype_policy", "int8_from_float32")}


@cover(after=AFTER)
def test_an_embedding_that_is_changed_afterwards_is_kerass(after):
    theirs, ours = embeddings()
    for layer in (theirs, ours):
        after(layer)
        for weight in layer.trainable_weights:
            weight.assign(draw(weight.name, tuple(weight.shape)))
    within = np.clip(INDICES, 0, ROWS - 1)
    assert_same(ours(within), theirs(within))
    assert ours.quantization_mode == theirs.quantization_mode
    assert [w.dtype for w in ours.weights] == [w.dtype for w in theirs.weights]


@pytest.mark.filterwarnings("ignore:Layer InputLayer does not have a `quantize` method")
def test_a_quantised_model_has_its_embedding_quantised():
    model = keras.Sequential([keras.layers.Embedding(ROWS, 4)])
    model(INDICES)
    assert replace_layers(model)[1].replaced
    model.quantize("int8")
    assert model.layers[0].quantization_mode == "int8"
