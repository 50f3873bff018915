"""GroupNorm, alone and with each activation: its rows, and its kernels against NumPy in float64."""

from functools import partial
from typing import Any, NamedTuple

import bad_calls
import formulas
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ALONE
from native import are_cuda_kernels
from op import Op, rows
from oracle import ACTIVATIONS as FORMULAS, EPSILON, Forward, f64, round_to

import jaxnorm

pytestmark = [pytest.mark.needs("kernels"), pytest.mark.on_emulator]

ACTIVATIONS = (None, "silu", "relu", "gelu")


class Affine(NamedTuple):
    """What an activation is applied to, and what it is made of; all but z by group."""

    z: np.ndarray
    terms: np.ndarray  # as `oracle.Forward`
    x_hat: np.ndarray
    rstd: np.ndarray
    factor: np.ndarray


OVER = (1, 3)  # the positions and the channels of a group


def _by_group(v, group_size):
    """(examples, positions, groups, channels of one)"""
    return v.reshape(len(v), -1, v.shape[-1] // (group_size or v.shape[-1]), group_size or v.shape[-1])


def _factors(weight, group_size, offset=0.0):
    """A weight by group: the same for all examples, or for each its own."""
    weight = f64(weight) + offset
    return _by_group(weight[None] if weight.ndim == 1 else weight, group_size)


def affine(x, scale=None, bias=None, *, group_size=None, epsilon=EPSILON, scale_offset=0.0) -> Affine:
    groups = _by_group(f64(x), group_size)
    centred = groups - groups.mean(OVER, keepdims=True)
    rstd = 1 / np.sqrt(np.square(centred).mean(OVER, keepdims=True) + epsilon)
    x_hat = centred * rstd
    factor = np.ones(()) if scale is None else _factors(scale, group_size, scale_offset)
    addend = np.zeros(()) if bias is None else _factors(bias, group_size)
    # As of LayerNorm: a small x_hat carries the error of its group's largest.
    terms = np.abs(x_hat).max(OVER, keepdims=True) * np.abs(factor) + np.abs(addend)
    z = x_hat * factor + addend
    terms = np.broadcast_to(terms, z.shape).reshape(x.shape)
    return Affine(z.reshape(x.shape), terms, x_hat, rstd, factor)


def exact(activation, x, *weights, out_dtype=None, **options):
    of_norm = affine(x, *weights, **options)
    y, slope, _ = FORMULAS[activation](of_norm.z)
    # What comes in is off by its terms, the activation's own arithmetic by its result.
    terms = np.abs(slope) * of_norm.terms + (0 if activation is None else np.abs(y))
    return Forward(y, round_to(y, out_dtype or x.dtype), terms, np.zeros(()))


def exact_gradients(activation, cotangents, x, scale=None, bias=None, *, out_dtype=None, group_size=None, **options):
    of_norm = affine(x, scale, bias, group_size=group_size, **options)
    dz = _by_group(f64(cotangents[0]) * FORMULAS[activation](of_norm.z)[1], group_size)
    g, x_hat = dz * of_norm.factor, of_norm.x_hat
    dx = of_norm.rstd * (g - g.mean(OVER, keepdims=True) - x_hat * (g * x_hat).mean(OVER, keepdims=True))
    sums = {"scale": (scale, dz * x_hat), "bias": (bias, dz)}
    of_weights = {
        name: (None if weight is None else each.sum((0, 1) if weight.ndim == 1 else 1).reshape(weight.shape), None)
        for name, (weight, each) in sums.items()
    }
    return {"x": (dx.reshape(x.shape), None), **of_weights}


def group_norm(activation=None):
    def function(x, scale=None, bias=None, *, group_size=None, **options):
        """One group, where no size is given. An example alone makes a batch of one."""
        groups = {"num_groups": 1} if group_size is None else {"group_size": group_size}
        batch = x if x.ndim > 1 else x[None]
        return (jaxnorm.group_norm(batch, scale, bias, activation=activation, **groups, **options).reshape(x.shape),)

    return Op(
        name=f"group with {activation}" if activation else "group",
        public="group_norm",
        kind="layer",
        keeps_parts=True,
        operands=("x", "scale", "bias"),
        arrays=1,
        dtypes=ALONE,
        has_positions=True,
        function=function,
        formula=lambda *args, **options: (formulas.group_norm(activation)(*args, **options),),
        exact=partial(exact, activation),
        exact_gradients=partial(exact_gradients, activation),
        small=rows(6, 10, group_size=5),
        # Without positions and with some, one and many groups, no whole vector in a group, a channel each; weights for
        # each example; layers of SDXL.
        sizes=(
            *(rows(7, 4, 6, 24, group_size=size) for size in (1, 3, 6, 24)),
            *(rows(7, cols, group_size=size) for cols, size in ((24, 6), (1000, 100), (4096, 1024), (4096, None))),
            *(rows(5, 9, 60, group_size=20), rows(3, 5, 3, group_size=3), rows(2, 4099, 96, group_size=3)),
            *(rows(7, 6, 24, group_size=6)._replace(weights=(7, 24)), rows(2, 32, 32, 320, group_size=10)),
            *(rows(2, 16, 16, 1280, group_size=40), rows(2, 64, 64, 64, group_size=2)),
        ),
        options=({"scale_offset": 1.0}, {"epsilon": 1.0}, {"out_dtype": np.dtype("float32")}),
        # Many examples, and many positions of one.
        backward_sizes=(
            *(rows(600, 5, 40, group_size=10), rows(4099, 24, group_size=6), rows(1, 20_000, 64, group_size=2)),
            rows(65, 7, 64, group_size=16)._replace(weights=(65, 64)),
        ),
        lengths=(
            *(rows(9, 5, 128, group_size=32), rows(9, 5, 100, group_size=20), rows(9, 640, group_size=128)),
            *(rows(9, 3, 4, 64, group_size=2), rows(9, 33, 33, 32, group_size=1)),
        ),
        many=(rows(600, 5, 128, group_size=32), rows(600, 640, group_size=20)),
        statistics=2,
        numbers=("epsilon", "scale_offset", "num_groups", "channel_axis"),
        bad_calls=bad_calls.GROUP,
        without_kernel=bad_calls.GROUP_WITHOUT_KERNEL,
    )


GROUP_NORMS = tuple(group_norm(activation) for activation in ACTIVATIONS)


F32, F16, BF16 = jnp.float32, jnp.float16, jnp.bfloat16


class Case(NamedTuple):
    shape: tuple[int, ...]
    groups: int
    activation: Any = "silu"
    x: Any = F32
    y: Any = F32
    weight: Any = F32
    per_example: bool = False
    absent: str = ""
    mean: float = 1


CASES = {"whole vectors": Case((3, 7, 512), 32), "no activation": Case((3, 7, 512), 32, None)}
CASES |= {"relu": Case((3, 7, 512), 32, "relu"), "gelu": Case((3, 7, 512), 32, "gelu")}
CASES |= {"20 channels a group, several tiles": Case((2, 10, 10, 640), 32)}
CASES |= {"instances, 3 channels": Case((2, 9, 9, 3), 3, "gelu")}
CASES |= {"one group of 3 channels": Case((2, 9, 9, 3), 1, "relu"), "one group of all": Case((2, 64, 64, 20), 1)}
CASES |= {"odd channels": Case((2, 33, 33, 255), 15, None), "odd and many channels": Case((2, 3, 4097), 17)}
CASES |= {"no positions": Case((300, 64), 4), "many examples of few positions": Case((300, 4, 32), 4, "gelu")}
CASES |= {"examples of a thread each": Case((20, 16, 16, 128), 32), "long": Case((1, 4096, 520), 26)}
CASES |= {"bf16": Case((2, 9, 9, 40), 4, x=BF16, y=BF16, weight=BF16), "f16": Case((2, 9, 9, 40), 4, "gelu", F16, F16)}
CASES |= {"f16 to f32": Case((2, 9, 9, 40), 4, "relu", F16, F32, F16)}
CASES |= {"f32 to bf16": Case((2, 9, 9, 40), 4, None, F32, BF16, BF16)}
CASES |= {"weights of examples": Case((5, 9, 24), 3, per_example=True)}
CASES |= {"weights of examples, not folded": Case((5, 9, 512), 8, per_example=True)}
CASES |= {"no scale": Case((3, 9, 24), 3, absent="scale"), "no bias": Case((3, 9, 24), 3, absent="bias")}
CASES |= {"neither": Case((3, 9, 24), 3, absent="scale, bias")}
CASES |= {"a mean far from 0": Case((2, 40, 40, 64), 8, None, mean=1e4)}
# Relative L2 error. dscale and dbias are rounded to the dtype of the weight.
MOST = {F32: {"y": 3e-7, "dx": 1e-6, "w": 5e-6}, F16: {"y": 3e-4, "dx": 3e-4, "w": 3e-4}}
# What a mean of float32 is off far from 0 is not small beside the deviations; the CPU's kernels keep the rest of it.
FAR = 1e-3 if are_cuda_kernels() else 3e-7
MOST[BF16] = {key: 8 * value for key, value in MOST[F16].items()} | {"dx": 2.1e-3}


def operands_of(case):
    rng, channels = np.random.default_rng(0), case.shape[-1]
    x = (rng.normal(size=case.shape) + case.mean).astype(case.x)
    shape = (case.shape[0], channels) if case.per_example else (channels,)
    scale, bias = (None if w in case.absent else rng.normal(size=shape).astype(case.weight) for w in ("scale", "bias"))
    return x, scale, bias, rng.normal(size=case.shape).astype(case.y)


def native(case, x, scale, bias):
    given = {"num_groups": case.groups, "activation": case.activation, "scale_offset": 0.5, "out_dtype": case.y}
    return jaxnorm.group_norm(x, scale, bias, **given, implementation="native")


@jax.jit
def _gradients(vjp, dy):
    return vjp(dy)


def native_gradients(case, x, scale, bias, dy):
    y, vjp = jax.vjp(lambda *args: native(case, *args), x, scale, bias)
    return y, *_gradients(vjp, jnp.asarray(dy))


def expected(case, x, scale, bias, dy):
    options = {"group_size": case.shape[-1] // case.groups, "scale_offset": 0.5}
    gradients = exact_gradients(case.activation, (dy,), x, scale, bias, **options)
    return exact(case.activation, x, scale, bias, **options).exact, *(gradients[n][0] for n in ("x", "scale", "bias"))


def error(came, want):
    return np.linalg.norm(np.asarray(came, np.float64) - want) / np.linalg.norm(want)


@pytest.mark.parametrize("name", CASES)
def test_accuracy(name):
    case = CASES[name]
    args = operands_of(case)
    y, dx, dscale, dbias = native_gradients(case, *args)
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
    args = operands_of(case)
    together, one = native_gradients(case, *args), case._replace(shape=(1, *shape[1:]))
    for example in (0, 3):
        alone = native_gradients(one, *(a[example : example + 1] for a in args))
        for a, b in zip(alone, together, strict=True):
            assert np.array_equal(a[0], b[example])


@pytest.mark.parametrize("shape", [(300, 4, 32), (40, 16, 16, 96), (3, 64, 64, 96)])
def test_gradients_have_the_same_bits_again(shape):
    case = Case(shape, 4)
    args = operands_of(case)
    first = native_gradients(case, *args)
    for _ in range(5):
        for a, b in zip(first, native_gradients(case, *args), strict=True):
            assert np.array_equal(a, b)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_is_not_finite_stays_in_its_group(value, activation):
    case = Case((2, 30, 24), 3, activation)
    x, scale, bias, dy = operands_of(case)
    x[1, 7, 9] = value
    y, dx, *_ = native_gradients(case, x, scale, bias, dy)
    is_nan = np.zeros(case.shape, bool)
    is_nan[1, :, 8:16] = True
    assert np.array_equal(np.isnan(y), is_nan)
    assert np.array_equal(np.isnan(dx), is_nan)


def test_a_group_that_does_not_vary_is_not_a_number_without_epsilon():
    x = jnp.ones((2, 5, 8)).at[0, 2, 3].set(2)
    y = jaxnorm.group_norm(x, num_groups=2, epsilon=0, implementation="native")
    assert np.array_equal(np.isnan(y).all(axis=(1,)), np.isnan(y).any(axis=1))
    assert np.array_equal(np.isnan(y[:, 0]), [[False] * 4 + [True] * 4, [True] * 8])
