"""What models of Equinox have besides, where `jaxnorm.equinox` changes them: leaves, ties, and what has no arrays."""

import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import DTYPES, bits, draw, draw_x
from coverage import cover
from flax_apis import assert_calls, assert_close, assert_gradients_close, assert_same, integers, sums
from library_models import FEATURES
from native import is_platform_with_kernels, native_calls
from norm_models import EquinoxMixed

from jaxnorm.equinox import Embedding, QuantizedLinear, RMSNorm, quantize_linears, replace_layers

pytestmark = pytest.mark.jax_version


def mapped(model, x):
    return jax.vmap(jax.vmap(model))(x)


def test_parameters_and_paths_stay():
    model = EquinoxMixed(jax.random.key(0))
    new, _ = replace_layers(model)
    assert (type(model.norm), type(new.norm)) == (eqx.nn.RMSNorm, RMSNorm)
    old, changed = (jax.tree.leaves_with_path(eqx.filter(m, eqx.is_array)) for m in (model, new))
    assert [path for path, _ in changed] == [path for path, _ in old]
    assert all(a is b for (_, a), (_, b) in zip(changed, old, strict=True))


def test_stacked_norms_are_one_native_call():
    norms = eqx.filter_vmap(lambda _: eqx.nn.RMSNorm(FEATURES))(jnp.arange(3))
    norms, report = replace_layers(norms)
    assert report.replaced == [((), eqx.nn.RMSNorm)]
    arrays, static = eqx.partition(norms, eqx.is_array)

    def scanned(arrays, x):
        return jax.lax.scan(lambda x, layer: (mapped(eqx.combine(layer, static), x), None), x, arrays)[0]

    x = draw_x((2, 3, FEATURES))
    assert_calls(scanned, (arrays, x), native_calls("rms", fwd=1))
    expected = x
    for _ in range(3):
        expected = mapped(eqx.nn.RMSNorm(FEATURES), expected)
    assert_close(scanned(arrays, x), expected)


def test_a_pytree_of_models():
    new, report = replace_layers({"models": (eqx.nn.RMSNorm(FEATURES), 3, None)})
    assert (report.replaced, new["models"][1:]) == ([(("models", 0), eqx.nn.RMSNorm)], (3, None))


def test_pickle():
    norm, x = eqx.nn.RMSNorm(FEATURES), draw_x((FEATURES,))
    new = pickle.loads(pickle.dumps(replace_layers(norm)[0]))
    assert type(new) is RMSNorm
    assert_close(new(x), norm(x))


@pytest.mark.parametrize("change", [replace_layers, lambda model: quantize_linears(model, jnp.int8)])
@pytest.mark.parametrize("other", [3, None, jnp.ones(3), eqx.nn.Linear], ids=["int", "None", "array", "class"])
def test_what_is_no_model(change, other):
    with pytest.raises(TypeError, match="model must be a module of equinox, or a list, dict or other pytree of"):
        change(other)


def tied_layers():
    linears = [eqx.nn.Linear(FEATURES, FEATURES, key=key) for key in jax.random.split(jax.random.key(0), 3)]
    norms = (eqx.nn.LayerNorm, eqx.nn.RMSNorm, lambda channels: eqx.nn.GroupNorm(4, channels))
    return [*linears, *(norm(FEATURES) for norm in norms * 2)]


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
    new, report = replace_layers(model)
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
    _, report = replace_layers(spec)
    # Norms may be without weights.
    assert len(report.replaced) == (0 if leaf is not None else 6)
    expected = {f"its weight is no array but a {name}"} if leaf is not None else set()
    assert {why for *_, why in report.left} == expected


# Of seven rows, with some from the end and some out of range, for which Equinox has the first or the last row.
ROWS = 7
INDICES = jnp.asarray([0, 3, 3, 6, -1, -7, 7, 100, -8, -100])


def embeddings(dtype="float32"):
    weight = draw("weight", (ROWS, FEATURES), dtype)
    return [cls(weight=weight) for cls in (eqx.nn.Embedding, Embedding)]


@cover(dtype=DTYPES, of_x=["int32", "int8", "int16", "uint8", "uint32"])
def test_rows_of_an_embedding_have_equinoxs_bits(dtype, of_x):
    theirs, ours = embeddings(dtype)
    x = INDICES.astype(of_x)
    assert_same(jax.vmap(ours)(x), jax.vmap(theirs)(x))
    assert_same([ours(i) for i in x], [theirs(i) for i in x])


@cover(dtype=DTYPES, of_x=["int32", "int8"])
def test_the_gradient_of_an_embedding_is_summed_in_float32(dtype, of_x):
    _, ours = embeddings(dtype)
    x = jnp.tile(INDICES, 64).astype(of_x).reshape(4, -1)
    dy = integers((*x.shape, FEATURES))
    (gradient,) = jax.vjp(lambda of: mapped(of, x), ours)[1](dy.astype(dtype))
    rows = np.where(x < 0, np.int32(x) + ROWS, x)
    assert_same(gradient.weight, sums(np.clip(rows, 0, ROWS - 1), dy, ROWS, dtype))
    kernel = {"jaxnorm_segment_sum": 1} if is_platform_with_kernels() else {}
    assert_calls(jax.grad(lambda of: jnp.sin(mapped(of, x)).sum().astype("float32")), (ours,), kernel)


@pytest.mark.parametrize("x", [3, True, np.int64(-2), np.int32(9), jnp.bool_(True)], ids=str)
def test_other_scalars_are_equinoxs_result(x):
    theirs, ours = embeddings()
    assert_same(ours(x), theirs(x))


@pytest.mark.parametrize(("x", "error"), [(INDICES, "with a scalar index"), (jnp.float32(1), "must have integer")])
def test_what_is_no_index_is_equinoxs_error(x, error):
    with pytest.raises((ValueError, TypeError), match=error):
        embeddings()[1](x)


def test_stacked_embeddings():
    keys = jax.random.split(jax.random.key(0), 3)
    stack = eqx.filter_vmap(lambda key: eqx.nn.Embedding(ROWS, FEATURES, key=key))(keys)
    new, report = replace_layers(stack)
    assert report.replaced == [((), eqx.nn.Embedding)]

    def each(stack, x):
        return eqx.filter_vmap(lambda layer: jax.vmap(layer)(x))(stack)

    assert_same(each(new, INDICES), each(stack, INDICES))
    gradients = [jax.grad(lambda of: each(of, INDICES).sum())(of) for of in (new, stack)]
    assert_same(*(of.weight for of in gradients))
    scanned = [jax.lax.scan(lambda _, layer: (0, jax.vmap(layer)(INDICES)), 0, of)[1] for of in (new, stack)]
    assert_same(*scanned)


def test_an_embedding_whose_weight_a_linear_layer_has_too():
    linear = eqx.nn.Linear(FEATURES, ROWS, use_bias=False, key=jax.random.key(0))
    model = eqx.nn.Shared([embeddings()[0], linear], lambda of: of[1].weight, lambda of: of[0].weight)
    new, report = replace_layers(model)
    assert [cls for _, cls in report.replaced] == [eqx.nn.Embedding]

    def loss(model):
        embedding, linear = model()
        return jax.nn.logsumexp(jax.vmap(lambda i: linear(jnp.tanh(embedding(i))))(INDICES), axis=-1).sum()

    (y, gradient), (expected, theirs) = (eqx.filter_value_and_grad(loss)(of) for of in (new, model))
    assert_close(y, expected)
    assert_gradients_close(*(jax.tree.leaves(of) for of in (gradient, theirs)))


def test_embeddings_that_are_left():
    integers = eqx.nn.Embedding(weight=jnp.ones((2, 3), "int32"))
    tied = eqx.nn.Shared(embeddings()[:1] * 2, lambda of: of[1].weight, lambda of: of[0].weight)
    _, report = replace_layers([integers, Embedding(weight=jnp.ones((2, 3))), tied])
    assert [(path[0], why) for path, _, why in report.left] == [
        (0, "no kernel serves int32"),
        (1, "it is jaxnorm's already"),
        (2, "its weight is no array but a SharedNode"),
    ]
    assert len(report.replaced) == 1
