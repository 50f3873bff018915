"""The norms of `jaxnorm.equinox` and `jaxnorm.keras` are the libraries' own, by kernels; models of Equinox."""

import pickle
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from cases import DTYPES, bits, draw, draw_bias, draw_scale, draw_x
from coverage import cover
from flax_apis import SUMS, assert_calls, assert_close, assert_gradients_close, assert_same, each, integers, sums
from library_models import FEATURES, ignore_keras_own
from native import native_calls
from norm_models import EquinoxMixed

import jaxnorm
from jaxnorm.equinox import Embedding, QuantizedLinear, RMSNorm, quantize_linears, replace_layers

ignore_rms_scaling = pytest.mark.filterwarnings("ignore:You passed `rms_scaling=True`")
pytestmark = [pytest.mark.jax_version, ignore_keras_own, ignore_rms_scaling]

DRAWS = {"weight": draw_scale, "gamma": draw_scale, "scale": draw_scale, "bias": draw_bias, "beta": draw_bias}
POLICIES = {"float32": "mixed_bfloat16", "bfloat16": "bfloat16", "float16": "mixed_float16"}


class Equinox(NamedTuple):
    """A norm of Equinox: its arguments, the shape of an example, and the kernel that serves it."""

    name: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    dims: tuple[int, ...]
    kernel: str | None = None

    def both(self, dtype="float32"):
        """The library's and ours, with weights of this dtype that are not its first ones."""
        return tuple(self._made(module, dtype) for module in (eqx.nn, jaxnorm.equinox))

    def _made(self, module, dtype):
        norm = getattr(module, self.name)(*self.arguments, **self.options)
        for name in ("weight", "bias"):
            if (weight := getattr(norm, name)) is not None:
                drawn = DRAWS[name](weight.shape, dtype)
                norm = eqx.tree_at(lambda norm, name=name: getattr(norm, name), norm, drawn)
        return norm

    @staticmethod
    def apart(norm):
        """A function of weights and x, which is mapped over two axes before those of an example, and the weights."""
        arrays, static = eqx.partition(norm, eqx.is_array)
        return lambda arrays, x: jax.vmap(jax.vmap(eqx.combine(arrays, static)))(x), arrays

    def draw(self, dtype="float32"):
        return draw_x((2, 3, *self.dims), dtype)


class Keras(NamedTuple):
    """A layer of Keras: its options, the shape of x, and the kernel that serves it."""

    name: str
    options: dict[str, Any]
    kernel: str | None = None
    dims: tuple[int, ...] = (3, 5, 4, 12)

    def both(self, dtype=None):
        policy = {} if dtype is None else {"dtype": POLICIES[dtype]}
        layers = tuple(getattr(of, self.name)(**self.options, **policy) for of in (keras.layers, jaxnorm.keras))
        for layer in layers:
            layer.build(self.dims)
            for variable in layer.variables:
                variable.assign(DRAWS[variable.name](tuple(variable.shape)))
        return layers

    @staticmethod
    def apart(layer):
        values = [variable.value for variable in layer.trainable_variables]
        return lambda values, x: layer.stateless_call(values, [], x)[0], values

    def draw(self, dtype="float32"):
        return draw_x(self.dims, dtype)


OF_EQUINOX = {
    "rms": Equinox("RMSNorm", (16,), {}, (16,), "rms"),
    "rms without weights": Equinox("RMSNorm", (16,), {"use_weight": False, "use_bias": False}, (16,), "rms"),
    "rms of two axes": Equinox("RMSNorm", ((4, 16),), {"eps": 0.1}, (4, 16), "rms"),
    "layer": Equinox("LayerNorm", (16,), {}, (16,), "layer"),
    "layer without bias": Equinox("LayerNorm", (16,), {"use_bias": False}, (16,), "layer"),
    "layer of two axes": Equinox("LayerNorm", ((4, 16),), {"eps": 0.1}, (4, 16), "layer"),
    "group": Equinox("GroupNorm", (4, 12), {}, (12, 5, 6), "layer"),
    "group without weights": Equinox("GroupNorm", (4, 12), {"channelwise_affine": False}, (12, 5, 6), "layer"),
    "group of channels alone": Equinox("GroupNorm", (3, 12), {"eps": 0.1}, (12,), "group"),
    "one group": Equinox("GroupNorm", (1, 12), {}, (12, 7), "layer"),
    "a group a channel": Equinox("GroupNorm", (12, 12), {}, (12, 3, 3, 3), "layer"),
}
NAMES = LAYER, RMS, GROUP = ("LayerNormalization", "RMSNormalization", "GroupNormalization")
OF_KERAS = {
    "keras layer": Keras(LAYER, {}, "layer"),
    "keras layer without weights": Keras(LAYER, {"scale": False, "center": False}, "layer"),
    "keras layer of the last axis from the front": Keras(LAYER, {"axis": 3, "center": False}, "layer"),
    "keras layer of two axes": Keras(LAYER, {"axis": [3, 2], "epsilon": 0.1}, "layer"),
    "keras rms": Keras(RMS, {}, "rms"),
    "keras rms of two axes": Keras(RMS, {"axis": (-2, -1), "epsilon": 0.1}, "rms"),
    "keras group": Keras(GROUP, {"groups": 4}, "group"),
    "keras group without weights": Keras(GROUP, {"groups": 3, "scale": False, "center": False}, "group"),
    "keras group a channel": Keras(GROUP, {"groups": -1, "axis": 3, "epsilon": 0.1}, "group"),
    "keras group of channels first": Keras(GROUP, {"groups": 5, "axis": 1}, "layer"),
    "keras one group of channels first": Keras(GROUP, {"groups": 1, "axis": -3, "scale": False}, "layer"),
}
LEFT_TO_KERAS = {
    "layer of another axis": Keras(LAYER, {"axis": 1}),
    "layer of axes that do not neighbour": Keras(LAYER, {"axis": [1, 3]}),
    "layer of axes in another order": Keras(LAYER, {"axis": [-1, 2], "center": False}),
    "layer as rms": Keras(LAYER, {"rms_scaling": True}),
    # Keras' RMSNormalization multiplies by a scale that is not broadcast along its axis.
    "rms of another axis": Keras(RMS, {"axis": [0]}, None, (12, 5, 4, 12)),
    "group of an axis between": Keras(GROUP, {"groups": 2, "axis": 2}),
    **{f"{name} of a negative epsilon": Keras(name, {"epsilon": -1e-6}) for name in (LAYER, RMS)},
    "group of a negative epsilon": Keras(GROUP, {"groups": 4, "epsilon": -1e-6}),
}
SERVED = OF_EQUINOX | OF_KERAS


# `weights` is the dtype of Equinox' weights; Keras' policy follows it.
@cover(case=SERVED, dtype=DTYPES, weights=[None, *DTYPES])
def test_result(case, dtype, weights):
    theirs, ours = case.both(*[weights] * (weights is not None))
    x = case.draw(dtype)
    expected, actual = (jax.jit(apply)(arrays, x) for apply, arrays in map(case.apart, (theirs, ours)))
    if isinstance(case, Equinox) or dtype == "float32":
        assert_close(actual, expected)
        return
    # Keras rounds to x's dtype first, and then to that of the computation.
    assert actual.dtype == expected.dtype
    rounding = max(float(jnp.finfo(of).eps) for of in (dtype, expected.dtype))
    np.testing.assert_allclose(np.float32(actual), np.float32(expected), rtol=rounding, atol=3e-6)


@cover(case=SERVED, dtype=DTYPES)
def test_gradients(case, dtype):
    is_keras = isinstance(case, Keras)
    x = case.draw("float32" if is_keras else dtype)
    weights = draw("dy", x.shape)

    def gradients(layer):
        apply, arrays = case.apart(layer)
        return jax.jit(jax.grad(lambda a, x: (apply(a, x).astype(jnp.float32) * weights).sum(), (0, 1)))(arrays, x)

    mixed = {"float16": "float32"}.get(dtype)  # the policy mixed_bfloat16, or none
    theirs, ours = map(gradients, case.both(*[mixed] * (is_keras and mixed is not None)))
    theirs, ours = (jax.tree.leaves(of) for of in (theirs, ours))
    assert_gradients_close(ours, theirs, through="bfloat16" if is_keras and mixed else None)


@cover(case=SERVED)
def test_a_kernel_serves(case):
    apply, arrays = case.apart(case.both()[1])
    gradient = jax.grad(lambda arrays, x: jnp.sin(apply(arrays, x)).sum(), argnums=(0, 1))
    assert_calls(gradient, (arrays, case.draw()), native_calls(case.kernel, fwd=1, bwd=1))


@cover(case=OF_EQUINOX)
def test_fields_are_equinoxs(case):
    theirs, ours = case.both()
    assert isinstance(ours, type(theirs))
    assert vars(ours).keys() == vars(theirs).keys()
    paths = [[str(path) for path, _ in jax.tree.leaves_with_path(norm)] for norm in (ours, theirs)]
    assert paths[0] == paths[1]


@cover(case=OF_KERAS | LEFT_TO_KERAS)
def test_config_and_weights_are_kerass(case):
    theirs, ours = case.both()
    assert ours.get_config() | {"name": theirs.name} == theirs.get_config()
    weights = [[(w.name, w.shape, w.dtype, w.trainable) for w in layer.weights] for layer in (theirs, ours)]
    assert weights[0] == weights[1]
    again = type(ours).from_config(ours.get_config())
    again.build(case.dims)
    assert [w.shape for w in again.weights] == [w.shape for w in ours.weights]


@each([(LEFT_TO_KERAS, ["float32"]), ({name: SERVED[name] for name in ("keras layer", "keras group")}, ["int32"])])
def test_what_no_kernel_serves_is_kerass_result(layer, case):
    x = layer.draw() if case == "float32" else jnp.round(layer.draw()).astype(case)
    theirs, ours = layer.both()
    assert_same(ours(x), theirs(x))


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype float64")
@cover(case=OF_EQUINOX, x=[np.arange(1, 5), np.float64(2.5) * np.arange(1, 5)])
def test_integers_and_numpys_arrays_are_equinoxs_result(case, x):
    theirs, ours = case.both()
    x = np.broadcast_to(np.resize(x, case.dims[-1]), case.dims)
    x = jnp.asarray(x) if x.dtype.kind == "i" else x
    assert_same(ours(x), theirs(x))


@cover(case=OF_EQUINOX)
def test_state_passes_through_a_norm_of_equinox(case):
    norm, x, state = case.both()[1], draw_x(case.dims), object()
    y, passed = norm(x, state, key=None)
    assert passed is state
    assert bits(norm(x, state=state)[0]) == bits(y) == bits(norm(x))


def test_other_shapes_are_equinoxs_errors():
    for name in ("LayerNorm", "RMSNorm"):
        with pytest.raises(ValueError, match=r"must satisfy the invariant `shape == x\.shape`"):
            getattr(jaxnorm.equinox, name)(16)(draw_x((3, 16)))
    with pytest.raises(TypeError, match="cannot reshape"):
        jaxnorm.equinox.GroupNorm(4, channelwise_affine=False)(draw_x((10, 3)))


@cover(shape=[(0, 12, 5), (2, 12, 0)])
def test_nothing_at_all(shape):
    assert jax.vmap(jaxnorm.equinox.GroupNorm(4, 12))(jnp.zeros(shape)).shape == shape


def test_a_mask_of_keras_goes_on():
    x = np.array([[1, 2, 0, 0], [3, 4, 5, 0]])

    def result(layers):
        keras.utils.set_random_seed(0)
        embedding = layers.Embedding(10, 16, mask_zero=True)
        norms = [layers.LayerNormalization(), layers.GroupNormalization(groups=4)]
        return keras.Sequential([embedding, *norms, keras.layers.LSTM(4)])(x)

    assert_close(result(jaxnorm.keras), result(keras.layers))


# What models of Equinox have besides, where it changes them: leaves, ties, and what has no arrays.
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
    assert_calls(jax.grad(lambda of: jnp.sin(mapped(of, x)).sum().astype("float32")), (ours,), SUMS)


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
