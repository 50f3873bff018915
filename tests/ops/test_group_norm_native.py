"""The kernels of GroupNorm against NumPy in float64."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from native import are_cuda_kernels

import jaxnorm

pytestmark = [pytest.mark.kernels, pytest.mark.on_emulator]

F32, F16, BF16 = jnp.float32, jnp.float16, jnp.bfloat16


@dataclasses.dataclass(frozen=True)
class Case:
    shape: tuple[int, ...]
    groups: int
    activation: Any = "silu"
    x: Any = F32
    y: Any = F32
    weight: Any = F32
    per_example: bool = False
    absent: str = ""
    mean: float = 1


CASES = {
    "whole vectors": Case((3, 7, 512), 32),
    "no activation": Case((3, 7, 512), 32, None),
    "relu": Case((3, 7, 512), 32, "relu"),
    "gelu": Case((3, 7, 512), 32, "gelu"),
    "20 channels a group, several tiles": Case((2, 10, 10, 640), 32),
    "instances, 3 channels": Case((2, 9, 9, 3), 3, "gelu"),
    "one group of 3 channels": Case((2, 9, 9, 3), 1, "relu"),
    "one group of all": Case((2, 64, 64, 20), 1),
    "odd channels": Case((2, 33, 33, 255), 15, None),
    "odd and many channels": Case((2, 3, 4097), 17),
    "no positions": Case((300, 64), 4),
    "many examples of few positions": Case((300, 4, 32), 4, "gelu"),
    "examples of a thread each": Case((20, 16, 16, 128), 32),
    "long": Case((1, 4096, 520), 26),
    "bf16": Case((2, 9, 9, 40), 4, x=BF16, y=BF16, weight=BF16),
    "f16": Case((2, 9, 9, 40), 4, "gelu", F16, F16),
    "f16 to f32": Case((2, 9, 9, 40), 4, "relu", F16, F32, F16),
    "f32 to bf16": Case((2, 9, 9, 40), 4, None, F32, BF16, BF16),
    "weights of examples": Case((5, 9, 24), 3, per_example=True),
    "weights of examples, not folded": Case((5, 9, 512), 8, per_example=True),
    "no scale": Case((3, 9, 24), 3, absent="scale"),
    "no bias": Case((3, 9, 24), 3, absent="bias"),
    "neither": Case((3, 9, 24), 3, absent="scale, bias"),
    "a mean far from 0": Case((2, 40, 40, 64), 8, None, mean=1e4),
}
# Relative L2 error. dscale and dbias are rounded to the dtype of the weight.
MOST = {F32: {"y": 3e-7, "dx": 1e-6, "w": 5e-6}, F16: {"y": 3e-4, "dx": 3e-4, "w": 3e-4}}
# What a mean of float32 is off far from 0 is not small beside the deviations; the CPU's kernels keep the rest of it.
FAR = 1e-3 if are_cuda_kernels() else 3e-7
MOST[BF16] = {key: 8 * value for key, value in MOST[F16].items()} | {"dx": 2.1e-3}


def operands(case):
    rng = np.random.default_rng(0)
    channels = case.shape[-1]
    x = (rng.normal(size=case.shape) + case.mean).astype(case.x)
    shape = (case.shape[0], channels) if case.per_example else (channels,)
    scale, bias = (None if w in case.absent else rng.normal(size=shape).astype(case.weight) for w in ("scale", "bias"))
    return x, scale, bias, rng.normal(size=case.shape).astype(case.y)


def native(case, x, scale, bias):
    return jaxnorm.group_norm(
        x,
        scale,
        bias,
        num_groups=case.groups,
        activation=case.activation,
        scale_offset=0.5,
        out_dtype=case.y,
        implementation="native",
    )


@jax.jit
def _gradients(vjp, dy):
    return vjp(dy)


def value_and_gradients(case, x, scale, bias, dy):
    y, vjp = jax.vjp(lambda *args: native(case, *args), x, scale, bias)
    return y, *_gradients(vjp, jnp.asarray(dy))


def activated(activation, z):
    """The value and the slope."""
    if activation is None:
        return z, np.ones_like(z)
    if activation == "relu":
        return np.maximum(z, 0), (z > 0).astype(z.dtype)
    root = np.sqrt(8 / np.pi)
    w, w_slope = (z, 1) if activation == "silu" else (root * (z + 0.044715 * z**3), root * (1 + 3 * 0.044715 * z**2))
    sigmoid = 1 / (1 + np.exp(-w))
    return z * sigmoid, sigmoid + z * w_slope * sigmoid * (1 - sigmoid)


def expected(case, x, scale, bias, dy):
    grouped = (case.shape[0], -1, case.groups, case.shape[-1] // case.groups)
    x, dy = (np.asarray(a, np.float64).reshape(grouped) for a in (x, dy))

    def weight(w, absent):
        return absent if w is None else np.asarray(w, np.float64).reshape(-1, 1, *grouped[2:])

    def mean(a):
        return a.mean(axis=(1, 3), keepdims=True)

    def summed(w, a):
        return None if w is None else (a.sum(axis=1) if w.ndim == 2 else a.sum(axis=(0, 1))).reshape(w.shape)

    rstd = 1 / np.sqrt(mean((x - mean(x)) ** 2) + 1e-6)
    x_hat = (x - mean(x)) * rstd
    factor = weight(scale, 0.5) + 0.5
    y, slope = activated(case.activation, x_hat * factor + weight(bias, 0))
    dz = dy * slope
    g = dz * factor
    dx = rstd * (g - mean(g) - x_hat * mean(g * x_hat))
    return y.reshape(case.shape), dx.reshape(case.shape), summed(scale, dz * x_hat), summed(bias, dz)


def error(came, want):
    return np.linalg.norm(np.asarray(came, np.float64) - want) / np.linalg.norm(want)


@pytest.mark.parametrize("name", CASES)
def test_accuracy(name):
    case = CASES[name]
    args = operands(case)
    y, dx, dscale, dbias = value_and_gradients(case, *args)
    want_y, want_dx, want_dscale, want_dbias = expected(case, *args)
    assert error(y, want_y) <= (FAR if case.mean == 1e4 else MOST[case.y]["y"])
    for came, want in ((dscale, want_dscale), (dbias, want_dbias)):
        assert (came is None) == (want is None)
    if case.mean == 1e4:
        return  # f32 does not hold the mean that the backward reads, no more than that of LayerNorm
    assert error(dx, want_dx) <= MOST[case.x]["dx"]
    for came, want in ((dscale, want_dscale), (dbias, want_dbias)):
        assert want is None or error(came, want) <= MOST[case.weight]["w"]


@pytest.mark.parametrize("shape", [(40, 72), (40, 4, 32), (20, 16, 16, 128), (5, 64, 64, 96)])
def test_an_example_has_the_same_bits_alone(shape):
    case = Case(shape, 4, "gelu", per_example=True)
    args = operands(case)
    together = value_and_gradients(case, *args)
    one = dataclasses.replace(case, shape=(1, *shape[1:]))
    for example in (0, 3):
        alone = value_and_gradients(one, *(a[example : example + 1] for a in args))
        for a, b in zip(alone, together, strict=True):
            assert np.array_equal(a[0], b[example])


@pytest.mark.parametrize("shape", [(300, 4, 32), (40, 16, 16, 96), (3, 64, 64, 96)])
def test_gradients_have_the_same_bits_again(shape):
    case = Case(shape, 4)
    args = operands(case)
    first = value_and_gradients(case, *args)
    for _ in range(5):
        for a, b in zip(first, value_and_gradients(case, *args), strict=True):
            assert np.array_equal(a, b)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("activation", [None, "silu", "relu", "gelu"])
def test_what_is_not_finite_stays_in_its_group(value, activation):
    case = Case((2, 30, 24), 3, activation)
    x, scale, bias, dy = operands(case)
    x[1, 7, 9] = value
    y, dx, *_ = value_and_gradients(case, x, scale, bias, dy)
    is_nan = np.zeros(case.shape, bool)
    is_nan[1, :, 8:16] = True
    assert np.array_equal(np.isnan(y), is_nan)
    assert np.array_equal(np.isnan(dx), is_nan)


@pytest.mark.parametrize("activation", [None, "silu", "relu", "gelu"])
def test_infinite_weights(activation):
    case = Case((2, 9, 8), 2, activation)
    x, scale, bias, _ = operands(case)
    scale[3], bias[5] = np.inf, -np.inf
    want = jaxnorm.group_norm(
        x, scale, bias, num_groups=2, activation=activation, scale_offset=0.5, implementation="jnp"
    )
    np.testing.assert_allclose(native(case, x, scale, bias), want, rtol=1e-5, atol=1e-6)


def test_a_group_that_does_not_vary_is_not_a_number_without_epsilon():
    x = jnp.ones((2, 5, 8)).at[0, 2, 3].set(2)
    y = jaxnorm.group_norm(x, num_groups=2, epsilon=0, implementation="native")
    assert np.array_equal(np.isnan(y).all(axis=(1,)), np.isnan(y).any(axis=1))
    assert np.array_equal(np.isnan(y[:, 0]), [[False] * 4 + [True] * 4, [True] * 8])
