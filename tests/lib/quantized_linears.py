"""How the linear layers of models of either Flax API are quantised in tests, and what comes of it."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from cases import bits

from jaxnorm import Quantization, quantize, quantized_dot

INT8, INT4, E4M3, E5M2 = (Quantization(dtype) for dtype in (jnp.int8, jnp.int4, jnp.float8_e4m3fn, jnp.float8_e5m2))
# Each dtype of weights with inputs as they are, and with those of the kind that its product takes.
PAIRS = {
    f"{weights.dtype}-{activations.dtype if activations else 'plain'}": (weights, activations)
    for weights, kind in ((INT8, INT8), (INT4, INT8), (E4M3, E4M3), (E5M2, E4M3))
    for activations in (None, kind)
}
each_pair = pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)

# How far a layer may be from Flax's, against the largest result: an int4 has 15 values, an e5m2 two bits of mantissa.
ERRORS = {"int8": 0.02, "int4": 0.2, "float8_e4m3fn": 0.1, "float8_e5m2": 0.2}


def quantized_kernel(kernel, weights):
    return jax.jit(partial(quantize, quantization=weights))(kernel.T)


def assert_is_quantized(values, scales, kernel, weights):
    expected = quantized_kernel(kernel, weights)
    assert (values.shape, scales.shape, values.dtype) == (kernel.T.shape, (kernel.shape[1], 1), weights.dtype)
    assert bits([values, scales]) == bits([expected.values, expected.scales])


def assert_is_product(y, x, kernel, bias, pair, dtype):
    weights, activations = pair

    def product(x, kernel, bias):
        x = x.astype(dtype)
        x = quantize(x, activations) if activations else x
        return quantized_dot(x, kernel, out_dtype=dtype, bias=bias)

    assert y.dtype == dtype
    assert bits(y) == bits(jax.jit(product)(x, quantized_kernel(kernel, weights), bias))
