"""`jaxnorm.equinox.replace_norms` and `quantize_linears`: another model, and the given one stays as it was."""

import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import bits, draw_x
from flax_apis import assert_close, assert_gradients_close
from hlo import compiled_text, count_native_calls
from native import native_calls

from jaxnorm import Quantization, quantize, quantized_dot
from jaxnorm.equinox import QuantizedLinear, RMSNorm, quantize_linears, replace_norms

pytestmark = pytest.mark.jax_version

FEATURES = 16


class OwnNorm(eqx.Module):
    def __call__(self, x):
        return x


class SubNorm(eqx.nn.RMSNorm):
    pass


class SubLinear(eqx.nn.Linear):
    pass


class NormedBlock(eqx.Module):
    """A module with norms, called one."""

    inner: eqx.nn.LayerNorm


class Mixed(eqx.Module):
    """Layers in every place where a model may have them."""

    norm: eqx.nn.RMSNorm
    group: eqx.nn.GroupNorm
    listed: list
    named: dict
    block: NormedBlock
    own: OwnNorm
    sub: SubNorm
    batch: eqx.nn.BatchNorm
    integers: eqx.nn.RMSNorm
    mlp: eqx.nn.MLP
    linear: eqx.nn.Linear
    scalar: eqx.nn.Linear
    sub_linear: SubLinear
    conv: eqx.nn.Conv1d
    embedding: eqx.nn.Embedding

    def __init__(self, key):
        self.norm, self.group = eqx.nn.RMSNorm(FEATURES), eqx.nn.GroupNorm(4, FEATURES)
        self.listed, self.named = [eqx.nn.LayerNorm(FEATURES), jnp.tanh], {"a": eqx.nn.RMSNorm(FEATURES)}
        self.block, self.own, self.sub = NormedBlock(eqx.nn.LayerNorm(FEATURES)), OwnNorm(), SubNorm(FEATURES)
        self.batch = eqx.nn.BatchNorm(FEATURES, "batch", mode="batch")
        self.integers = eqx.nn.RMSNorm(FEATURES, dtype=jnp.int32)
        self.mlp = eqx.nn.MLP(FEATURES, FEATURES, 2 * FEATURES, 1, key=key)
        self.linear = eqx.nn.Linear(FEATURES, 32, use_bias=False, key=key)
        self.scalar, self.sub_linear = eqx.nn.Linear(FEATURES, "scalar", key=key), SubLinear(FEATURES, 4, key=key)
        self.conv, self.embedding = eqx.nn.Conv1d(1, 1, 1, key=key), eqx.nn.Embedding(4, FEATURES, key=key)

    def __call__(self, x):
        x = x + self.mlp(self.group(self.listed[0](self.norm(x))))
        return self.linear(self.block.inner(self.named["a"](x)))


@pytest.fixture(scope="module")
def model():
    return Mixed(jax.random.key(0))


def mapped(model, x):
    return jax.vmap(jax.vmap(model))(x)


def test_it_says_what_it_replaced_and_left(model):
    _, report = replace_norms(model)
    assert dict(report.replaced) == {
        ("norm",): eqx.nn.RMSNorm,
        ("group",): eqx.nn.GroupNorm,
        ("listed", 0): eqx.nn.LayerNorm,
        ("named", "a"): eqx.nn.RMSNorm,
        ("block", "inner"): eqx.nn.LayerNorm,
    }
    own = "it is a class of the model's own"
    assert {path: why for path, _, why in report.left} == {
        ("block",): own,
        ("own",): own,
        ("sub",): f"{own}: derive SubNorm from jaxnorm.equinox.RMSNorm",
        ("batch",): "jaxnorm has no such norm",
        ("integers",): "no kernel serves int32",
    }
    again, second = replace_norms(replace_norms(model)[0])
    assert not second.replaced
    assert (("norm",), RMSNorm, "it is jaxnorm's already") in second.left
    assert type(again.norm) is RMSNorm


def test_outputs_and_gradients_stay(model):
    x = draw_x((2, 3, FEATURES))
    new, _ = replace_norms(model)
    assert type(model.norm) is eqx.nn.RMSNorm
    assert_close(mapped(new, x), mapped(model, x))
    old_gradient, new_gradient = (
        jax.tree.leaves(eqx.filter_grad(lambda model: jnp.sin(mapped(model, x)).sum())(m)) for m in (model, new)
    )
    assert_gradients_close([g for g in new_gradient if g.any()], [g for g in old_gradient if g.any()])


def test_parameters_and_paths_stay(model):
    new, _ = replace_norms(model)
    old, changed = (jax.tree.leaves_with_path(eqx.filter(m, eqx.is_array)) for m in (model, new))
    assert [path for path, _ in changed] == [path for path, _ in old]
    assert all(a is b for (_, a), (_, b) in zip(changed, old, strict=True))


def test_saved_leaves_load(model, tmp_path):
    eqx.tree_serialise_leaves(tmp_path / "leaves", model.norm)
    loaded = eqx.tree_deserialise_leaves(tmp_path / "leaves", replace_norms(eqx.nn.RMSNorm(FEATURES))[0])
    assert type(loaded) is RMSNorm
    assert bits(loaded.weight) == bits(model.norm.weight)


def test_stacked_norms_are_one_native_call():
    norms = eqx.filter_vmap(lambda _: eqx.nn.RMSNorm(FEATURES))(jnp.arange(3))
    norms, report = replace_norms(norms)
    assert report.replaced == [((), eqx.nn.RMSNorm)]
    arrays, static = eqx.partition(norms, eqx.is_array)

    def scanned(arrays, x):
        return jax.lax.scan(lambda x, layer: (mapped(eqx.combine(layer, static), x), None), x, arrays)[0]

    x = draw_x((2, 3, FEATURES))
    assert count_native_calls(compiled_text(scanned, arrays, x)) == native_calls("rms", fwd=1)
    expected = x
    for _ in range(3):
        expected = mapped(eqx.nn.RMSNorm(FEATURES), expected)
    assert_close(scanned(arrays, x), expected)


def test_a_pytree_of_models(model):
    new, report = replace_norms({"models": (model.norm, 3, None)})
    assert report.replaced == [(("models", 0), eqx.nn.RMSNorm)]
    assert new["models"][1:] == (3, None)


def test_pickle(model):
    new = pickle.loads(pickle.dumps(replace_norms(model.norm)[0]))
    assert type(new) is RMSNorm
    assert_close(new(draw_x((FEATURES,))), model.norm(draw_x((FEATURES,))))


@pytest.mark.parametrize("change", [replace_norms, lambda model: quantize_linears(model, jnp.int8)])
@pytest.mark.parametrize("other", [3, None, jnp.ones(3), eqx.nn.Linear], ids=["int", "None", "array", "class"])
def test_what_is_no_model(change, other):
    with pytest.raises(TypeError, match="model must be a module of equinox, or a list, dict or other pytree of"):
        change(other)


INT8, INT4, E4M3 = (Quantization(dtype) for dtype in (jnp.int8, jnp.int4, jnp.float8_e4m3fn))
PAIRS = {
    "int8": (INT8, None),
    "int8 both": (INT8, INT8),
    "int4": (INT4, None),
    "int4 and int8": (INT4, INT8),
    "float8": (E4M3, None),
    "float8 both": (E4M3, E4M3),
    "a dtype": (jnp.int8, None),
}
each_pair = pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)


def test_it_says_what_it_quantised_and_left(model):
    _, report = quantize_linears(model, INT8)
    layers = {("mlp", "layers", 0), ("mlp", "layers", 1), ("linear",)}
    assert dict(report.replaced) == dict.fromkeys(layers, eqx.nn.Linear)
    assert {path: why for path, _, why in report.left} == {
        ("scalar",): "it has scalar features",
        ("sub_linear",): "only equinox.nn.Linear itself is quantised",
        ("conv",): "only equinox.nn.Linear is quantised",
        ("embedding",): "only equinox.nn.Linear is quantised",
    }
    assert type(model.linear) is eqx.nn.Linear
    with pytest.raises(ValueError, match=r"no equinox\.nn\.Linear to quantise in Conv1d:\nleft .*only equinox"):
        quantize_linears(model.conv, INT8)


@each_pair
def test_a_layer_is_quantized_dot(model, pair):
    layer, x = model.mlp.layers[0], draw_x((3, FEATURES))
    weights, activations = (p if p is None or isinstance(p, Quantization) else Quantization(p) for p in pair)
    quantised, _ = quantize_linears(layer, *pair)
    operand = x if activations is None else quantize(x, activations)
    expected = quantized_dot(operand, quantize(layer.weight, weights), out_dtype=x.dtype, bias=layer.bias)
    assert bits(jax.vmap(quantised)(x)) == bits(expected)
    assert quantised.values.shape == (32, FEATURES)
    assert quantised.scales.shape == (32, 1)
    assert bits(quantised.bias) == bits(layer.bias)


@each_pair
def test_outputs_of_a_quantised_model(model, pair):
    x = draw_x((2, 3, FEATURES))
    expected, actual = mapped(model, x), mapped(quantize_linears(model, *pair)[0], x)
    error = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
    assert error < (0.2 if "int4" in str(pair) else 0.06 if "float8" in str(pair) else 0.02)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("weight", ["float32", "bfloat16"])
def test_the_dtype_is_equinoxs(dtype, weight):
    layer, x = eqx.nn.Linear(FEATURES, 8, dtype=weight, key=jax.random.key(0)), draw_x((FEATURES,), dtype)
    assert QuantizedLinear(layer, INT8)(x).dtype == layer(x).dtype


@each_pair
def test_no_gradient_goes_to_what_is_quantised(model, pair):
    x = draw_x((3, FEATURES))

    @eqx.filter_grad
    def gradient(layer):
        return jnp.sin(jax.vmap(layer)(x)).sum()

    of = gradient(QuantizedLinear(model.mlp.layers[0], *pair))
    assert of.bias.any()
    assert all(leaf is None or not np.float32(leaf).any() for leaf in (of.values, of.scales))


def test_what_is_quantised_on_the_way_has_no_derivative(model):
    plain, both = (QuantizedLinear(model.mlp.layers[0], INT8, activations) for activations in (None, INT8))
    x = draw_x((FEATURES,))
    assert jax.grad(lambda x: jnp.sin(plain(x)).sum())(x).any()
    with pytest.raises(ValueError, match="rounded values have no derivative"):
        jax.grad(lambda x: jnp.sin(both(x)).sum())(x)


def test_only_some(model):
    new, report = quantize_linears(model, INT8, only=lambda path, layer: path[0] == "mlp")
    assert type(new.linear) is eqx.nn.Linear
    assert (("linear",), eqx.nn.Linear, "only is false of it") in report.left
    assert {path[0] for path, _ in report.replaced} == {"mlp"}


def test_a_model_without_values(model, tmp_path):
    quantised, _ = quantize_linears(model, INT8)
    abstract, _ = quantize_linears(eqx.filter_eval_shape(Mixed, jax.random.key(0)), INT8)
    assert jax.tree.map(jnp.shape, abstract.linear.values) == quantised.linear.values.shape
    eqx.tree_serialise_leaves(tmp_path / "leaves", quantised.linear)
    loaded = eqx.tree_deserialise_leaves(tmp_path / "leaves", abstract.linear)
    assert bits(loaded.quantized.dequantize()) == bits(quantised.linear.quantized.dequantize())


def test_stacked_layers(model):
    layers = eqx.filter_vmap(lambda key: eqx.nn.Linear(FEATURES, 8, key=key))(jax.random.split(jax.random.key(1), 3))
    quantised, _ = quantize_linears(layers, INT8)
    assert quantised.values.shape == (3, 8, FEATURES)
    x = draw_x((FEATURES,))
    expected = eqx.filter_vmap(lambda layer: layer(x))(layers)
    np.testing.assert_allclose(eqx.filter_vmap(lambda layer: layer(x))(quantised), expected, atol=0.05)


def test_errors(model):
    with pytest.raises(ValueError, match=r"x has shape \(3, 16\), expected \(16,\).*jax\.vmap"):
        QuantizedLinear(model.linear, INT8)(draw_x((3, FEATURES)))
    with pytest.raises(TypeError, match="got a SubLinear that cannot be quantised: only equinox"):
        QuantizedLinear(model.sub_linear, INT8)
    with pytest.raises(TypeError, match="only must be a function"):
        quantize_linears(model, INT8, only=3)
    with pytest.raises(TypeError, match="activations are quantised to int8, expected float8"):
        quantize_linears(model, E4M3, INT8)
    with pytest.raises(ValueError, match="granularity='tensor', expected 'token'"):
        quantize_linears(model, Quantization(jnp.int8, "tensor"))
    with pytest.raises(TypeError, match=r"weights must be a jaxnorm\.Quantization"):
        quantize_linears(model, 3)


def tied_layers():
    linears = [eqx.nn.Linear(FEATURES, FEATURES, key=key) for key in jax.random.split(jax.random.key(0), 3)]
    norms = [eqx.nn.LayerNorm(FEATURES), eqx.nn.RMSNorm(FEATURES), eqx.nn.GroupNorm(4, FEATURES)]
    return [*linears, *norms, *(type(norm)(**of_norm(norm)) for norm in norms)]


def of_norm(norm):
    return {"groups": 4, "channels": FEATURES} if isinstance(norm, eqx.nn.GroupNorm) else {"shape": (FEATURES,)}


def shared(layers):
    """A model whose second linear layer has the weight of the first, and three norms those of three others."""
    ties = [(1, 0), (6, 3), (7, 4), (8, 5)]

    def weights(side):
        return lambda layers: [layers[tie[side]].weight for tie in ties]

    return eqx.nn.Shared(layers, weights(0), weights(1))


@pytest.mark.parametrize("only", [None, lambda path, layer: path[-1] == 2])
def test_what_shares_a_weight_is_left(only):
    model = shared(tied_layers())
    new, report = quantize_linears(model, jnp.int8, only=only)
    assert [path[-1] for path, _ in report.replaced] == [2]
    reasons = {path[-1]: why for path, _, why in report.left}
    assert reasons[1] == "its weight is no array but a SharedNode"
    assert reasons[0] == ("its weight is that of other layers too" if only is None else "only is false of it")
    x = draw_x((FEATURES,))
    assert_close(new()[2](x), QuantizedLinear(tied_layers()[2], jnp.int8)(x))
    new, report = replace_norms(model)
    assert [path[-1] for path, _ in report.replaced] == [3, 4, 5]
    assert {path[-1]: why for path, _, why in report.left} == dict.fromkeys(
        (6, 7, 8), "its weight is no array but a SharedNode"
    )
    assert bits(new()[6](x)) == bits(model()[6](x))


@pytest.mark.parametrize(("leaf", "name"), [(True, "bool"), (None, "NoneType"), ("frozen", "str")])
def test_what_has_no_arrays_is_left(leaf, name):
    layers = tied_layers()
    spec = jax.tree.map(lambda _: leaf, layers)
    with pytest.raises(ValueError, match=f"its weight is no array but a {name}"):
        quantize_linears(spec, jnp.int8)
    _, report = replace_norms(spec)
    # Norms may be without weights.
    assert len(report.replaced) == (0 if leaf is not None else 6)
    if leaf is None:
        return
    assert {why for *_, why in report.left} == {f"its weight is no array but a {name}"}
