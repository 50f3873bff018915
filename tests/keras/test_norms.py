"""The norms of `jaxnorm.keras` are Keras', by kernels."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from cases import bits, draw, draw_x
from coverage import cover
from flax_apis import assert_close, assert_gradients_close
from hlo import compiled_text, count_native_calls
from keras_models import NAMES, both, ignore_keras_own
from native import native_calls

import jaxnorm.keras

pytestmark = [pytest.mark.jax_version, ignore_keras_own]

DIMS = (3, 5, 4, 12)
LAYER, RMS, GROUP = NAMES
# The name of a layer, its options, and the kernel that serves it.
SERVED_BY_KERNELS = {
    "layer": (LAYER, {}, "layer"),
    "layer without weights": (LAYER, {"scale": False, "center": False}, "layer"),
    "layer of the last axis from the front": (LAYER, {"axis": 3, "center": False}, "layer"),
    "layer of two axes": (LAYER, {"axis": [3, 2], "epsilon": 0.1}, "layer"),
    "rms": (RMS, {}, "rms"),
    "rms of two axes": (RMS, {"axis": (-2, -1), "epsilon": 0.1}, "rms"),
    "group": (GROUP, {"groups": 4}, "group"),
    "group without weights": (GROUP, {"groups": 3, "scale": False, "center": False}, "group"),
    "a group a channel": (GROUP, {"groups": -1, "axis": 3, "epsilon": 0.1}, "group"),
    "group of channels first": (GROUP, {"groups": 5, "axis": 1}, "layer"),
    "one group of channels first": (GROUP, {"groups": 1, "axis": -3, "scale": False}, "layer"),
}
SERVED_BY_KERAS = {
    "layer of another axis": (LAYER, {"axis": 1}),
    "layer of axes that do not neighbour": (LAYER, {"axis": [1, 3]}),
    "layer of axes in another order": (LAYER, {"axis": [-1, 2], "center": False}),
    "rms of another axis": (RMS, {"axis": [0, 1, 2, -1][:1]}),
    "group of an axis between": (GROUP, {"groups": 2, "axis": 2}),
}
POLICIES = ["float32", "mixed_bfloat16", "mixed_float16", "bfloat16"]


def applied(layer, x):
    """A function of the trainable variables and x, and the variables."""
    values = [variable.value for variable in layer.trainable_variables]
    return (lambda values, x: layer.stateless_call(values, [], x)[0]), values


@cover(case=SERVED_BY_KERNELS, policy=POLICIES)
def test_result(case, policy):
    name, options, _ = case
    kerass, ours = both(name, DIMS, dtype=policy, **options)
    x = draw_x(DIMS)
    assert_close(ours(x), kerass(x))


@cover(case=SERVED_BY_KERNELS, policy=POLICIES, dtype=["float32", "bfloat16", "float16"])
def test_the_dtype_is_kerass(case, policy, dtype):
    name, options, _ = case
    kerass, ours = both(name, DIMS, dtype=policy, **options)
    x = draw_x(DIMS, dtype)
    expected = kerass(x)
    assert ours(x).dtype == expected.dtype
    # Keras rounds to x's dtype first, and then to that of the computation.
    rounding = max(float(jnp.finfo(of).eps) for of in (dtype, expected.dtype))
    np.testing.assert_allclose(np.float32(ours(x)), np.float32(expected), rtol=rounding, atol=3e-6)


@cover(case=SERVED_BY_KERNELS, policy=["float32", "mixed_bfloat16"])
def test_gradients(case, policy):
    name, options, _ = case
    x, dy = draw_x(DIMS), draw("dy", DIMS)

    def gradients(layer):
        apply, values = applied(layer, x)
        return jax.jit(jax.grad(lambda v, x: (apply(v, x) * dy).sum(), argnums=(0, 1)))(values, x)

    kerass, ours = (gradients(layer) for layer in both(name, DIMS, dtype=policy, **options))
    assert_gradients_close(ours, kerass, through="bfloat16" if policy != "float32" else None)


@cover(case=SERVED_BY_KERNELS)
def test_a_kernel_serves(case):
    name, options, kernel = case
    x = draw_x(DIMS)
    apply, values = applied(both(name, DIMS, **options)[1], x)
    gradient = jax.grad(lambda values, x: jnp.sin(apply(values, x)).sum(), argnums=(0, 1))
    assert count_native_calls(compiled_text(gradient, values, x)) == native_calls(kernel, fwd=1, bwd=1)


@cover(case=SERVED_BY_KERAS)
def test_other_axes_are_kerass_result(case):
    name, options = case
    # Keras' RMSNormalization multiplies by a scale that is not broadcast along its axis.
    dims = (12, 5, 4, 12) if name == RMS else DIMS
    kerass, ours = both(name, dims, **options)
    assert bits(ours(draw_x(dims))) == bits(kerass(draw_x(dims)))


@cover(name=[LAYER, GROUP])
def test_integers_are_kerass_result(name):
    options = {"groups": 4} if name == GROUP else {}
    kerass, ours = both(name, DIMS, **options)
    x = jnp.round(draw_x(DIMS)).astype(jnp.int32)
    assert bits(ours(x)) == bits(kerass(x))


@pytest.mark.filterwarnings("ignore:You passed `rms_scaling=True`")
def test_rms_scaling_is_kerass_result():
    kerass, ours = both(LAYER, DIMS, rms_scaling=True)
    assert bits(ours(draw_x(DIMS))) == bits(kerass(draw_x(DIMS)))


@cover(name=[LAYER, GROUP])
def test_rows_far_from_zero_keep_their_digits(name):
    x = draw("x", (2, 64), mean=1e4)
    rows = np.float64(x) - np.float64(x).mean(axis=1, keepdims=True)
    expected = rows / np.sqrt(np.square(rows).mean(axis=1, keepdims=True) + 1e-3)
    options = {"groups": 1} if name == GROUP else {}
    np.testing.assert_allclose(getattr(jaxnorm.keras, name)(**options)(x), expected, rtol=1e-3, atol=2e-3)


@cover(case=SERVED_BY_KERNELS | {name: (*case, None) for name, case in SERVED_BY_KERAS.items()})
def test_config_and_weights_are_kerass(case):
    name, options, _ = case
    dims = (12, 5, 4, 12) if name == RMS else DIMS
    kerass, ours = both(name, dims, **options)
    assert ours.get_config() | {"name": kerass.name} == kerass.get_config()
    weights = [[(w.name, w.shape, w.dtype, w.trainable) for w in layer.weights] for layer in (kerass, ours)]
    assert weights[0] == weights[1]
    again = type(ours).from_config(ours.get_config())
    again.build(dims)
    assert [w.shape for w in again.weights] == [w.shape for w in ours.weights]


def test_a_mask_goes_on():
    x = np.array([[1, 2, 0, 0], [3, 4, 5, 0]])

    def result(layers):
        keras.utils.set_random_seed(0)
        embedding = keras.layers.Embedding(10, 16, mask_zero=True)
        norms = [layers.LayerNormalization(), layers.GroupNormalization(groups=4)]
        return keras.Sequential([embedding, *norms, keras.layers.LSTM(4)])(x)

    assert_close(result(jaxnorm.keras), result(keras.layers))


@cover(name=NAMES)
def test_epsilon_that_no_kernel_takes(name):
    options = {"groups": 4} if name == GROUP else {}
    kerass, ours = both(name, DIMS, epsilon=-1e-6, **options)
    assert bits(ours(draw_x(DIMS))) == bits(kerass(draw_x(DIMS)))
