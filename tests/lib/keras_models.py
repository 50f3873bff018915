"""Keras' layers and ours, for tests of `jaxnorm.keras`."""

import keras
import pytest
from cases import draw, draw_bias, draw_scale

import jaxnorm.keras

NAMES = ("LayerNormalization", "RMSNormalization", "GroupNormalization")
# Keras converts its variables by `__array__` without `copy`, which NumPy 2 warns of.
ignore_keras_own = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy")


def both(name, dims, **options):
    """Keras' layer and ours, built for inputs of these dims, with the same weights."""
    layers = tuple(getattr(module, name)(**options) for module in (keras.layers, jaxnorm.keras))
    for layer in layers:
        layer.build(dims)
        for variable in layer.variables:
            draw_weight = draw_bias if variable.name == "beta" else draw_scale
            variable.assign(draw_weight(tuple(variable.shape)))
    return layers


def functional(layers, **options):
    """A model with all three norms of `layers`, with an axis that kernels serve and one that they do not."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8, 16))
    x = layers.LayerNormalization(**options)(inputs)
    x = keras.layers.Dense(16, activation="gelu", **options)(x)
    x = layers.GroupNormalization(groups=4, **options)(x)
    x = layers.LayerNormalization(axis=1, **options)(x)
    return keras.Model(inputs, layers.RMSNormalization(**options)(x))


class Block(keras.layers.Layer):
    def __init__(self, layers, **options):
        super().__init__(**options)
        self.norms = [layers.LayerNormalization(), layers.RMSNormalization()]

    def call(self, x):
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
    """Inputs and targets."""
    return draw("inputs", (examples, 8, 16)), draw("targets", (examples, 8, 16))


def trained(model, *, epochs=2, batch_size=8, **options):
    """The losses of a model that is compiled and trained."""
    model.compile("adam", "mse", **options)
    return model.fit(*data(), epochs=epochs, batch_size=batch_size, verbose=0, shuffle=False).history["loss"]
