"""What type checkers make of calls whose result depends on their arguments: mypy reads this, and pytest runs it."""

from typing import assert_type

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxnorm
from jaxnorm import Quantization, Quantized

pytestmark = pytest.mark.jax_version

INT8 = Quantization(jnp.int8)


def test_what_tune_gives_is_a_choice_of_implementation() -> None:
    x = jnp.ones((2, 8))
    tuned = assert_type(jaxnorm.tune(jaxnorm.rms_norm, x), jaxnorm.Tuned)
    with (
        tuned as entered,
        jaxnorm.implementation(tuned),
        jaxnorm.implementation({"rms_norm": {"backward": "xla"}, "softmax": None}),
    ):
        assert jaxnorm.rms_norm(x).shape == x.shape
    assert assert_type(entered, jaxnorm.Tuned) is tuned


def test_so_does_a_module() -> None:
    x, rngs = jnp.ones((2, 8)), nnx.Rngs(0)
    for module in (jaxnorm.nnx.QuantizedRMSNorm, jaxnorm.nnx.QuantizedLayerNorm):
        norm = module(8, quantization=INT8, rngs=rngs)
        assert assert_type(norm(x), Quantized).values.shape == x.shape
        _, total = assert_type(norm(x, x, smooth_scale=None), tuple[Quantized, jax.Array])
        assert total.shape == x.shape


def a_module_of_linen(norm: jaxnorm.linen.QuantizedRMSNorm, x: jax.Array) -> tuple[Quantized, jax.Array]:
    assert_type(norm(x), Quantized)
    return assert_type(norm(x, x, static_scale=1.0), tuple[Quantized, jax.Array])
