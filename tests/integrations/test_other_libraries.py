"""The norms of `jaxnorm.equinox` and `jaxnorm.keras` are the libraries' own, by kernels."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from cases import DTYPES, bits, draw, draw_bias, draw_scale, draw_x
from coverage import cover
from flax_apis import assert_calls, assert_close, assert_gradients_close, assert_same, each
from library_models import ignore_keras_own
from native import native_calls

import jaxnorm

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
