"""GroupNorm, alone and with each activation: its rows, and what becomes of an example and of a group beside others."""

from functools import partial
from typing import NamedTuple

import bad_calls
import formulas
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ALONE, bits, draw, draw_bias, draw_scale
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
            *(rows(2, 16, 16, 1280, group_size=40), rows(2, 64, 64, 64, group_size=2), rows(3, 7, 512, group_size=16)),
            # Instances of three channels, and odd ones; a group of all; examples of a thread each, and a long one.
            *(rows(2, 9, 9, 3, group_size=1), rows(2, 33, 33, 255, group_size=17), rows(2, 3, 4097, group_size=241)),
            *(
                rows(2, 64, 64, 20, group_size=20),
                rows(20, 16, 16, 128, group_size=4),
                rows(2, 10, 10, 640, group_size=20),
            ),
            *(rows(300, 4, 32, group_size=8), rows(300, 64, group_size=16), rows(1, 4096, 520, group_size=20)),
            *(rows(2, 9, 9, 40, group_size=10), rows(5, 9, 512, group_size=64)._replace(weights=(5, 512))),
        ),
        options=(
            *({"scale_offset": 1.0}, {"epsilon": 1.0}),
            *({"out_dtype": np.dtype("float32")}, {"out_dtype": np.dtype(jnp.bfloat16)}),
        ),
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


def program(shape, of_examples=False):
    """A function of operands and cotangents, with four groups and weights of all examples or of each, and these."""
    op, size = GROUP_NORMS[-1], rows(*shape, group_size=shape[-1] // 4)
    size = size._replace(weights=(shape[0], shape[-1])) if of_examples else size
    args = op.draw(size)
    return jax.jit(op.everything(size)), args, op.cotangents(args, **size.options)


@pytest.mark.parametrize("shape", [(40, 72), (40, 4, 32), (20, 16, 16, 128), (5, 64, 64, 96)])
def test_an_example_has_the_same_bits_alone(shape):
    run, *given = program(shape, of_examples=True)
    together = run(*given)
    for example in (slice(0, 1), slice(3, 4)):
        alone, expected = (jax.tree.map(lambda a: a[example], tree) for tree in (given, together))  # noqa: B023
        assert bits(run(*alone)) == bits(expected)


@pytest.mark.parametrize("shape", [(300, 4, 32), (40, 16, 16, 96), (3, 64, 64, 96)])
def test_gradients_have_the_same_bits_again(shape):
    run, *given = program(shape)
    first = bits(run(*given))
    assert all(bits(run(*given)) == first for _ in range(5))


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("op", GROUP_NORMS, ids=str)
def test_what_is_not_finite_stays_in_its_group(op, value):
    size = rows(2, 30, 24, group_size=8)
    x, *weights = op.draw(size)
    args = x.at[1, 7, 9].set(value), *weights
    (y,), (dx, *_) = jax.jit(op.everything(size))(args, op.cotangents(args, **size.options))
    is_nan = np.zeros(size.dims, bool)
    is_nan[1, :, 8:16] = True
    np.testing.assert_array_equal(np.isnan(y), is_nan)
    np.testing.assert_array_equal(np.isnan(dx), is_nan)


# What a mean of float32 is off far from 0 is not small beside the deviations; the CPU's kernels keep the rest of it.
def test_a_mean_far_from_zero():
    x, scale, bias = draw("x", (2, 40, 40, 64), mean=1e4), draw_scale((64,)), draw_bias((64,))
    y = jaxnorm.group_norm(x, scale, bias, num_groups=8, implementation="native")
    z = affine(x, scale, bias, group_size=8).z
    assert np.linalg.norm(f64(y) - z) <= (1e-3 if are_cuda_kernels() else 3e-7) * np.linalg.norm(z)


def test_a_group_that_does_not_vary_is_not_a_number_without_epsilon():
    x = jnp.ones((2, 5, 8)).at[0, 2, 3].set(2)
    y = jaxnorm.group_norm(x, num_groups=2, epsilon=0, implementation="native")
    assert np.array_equal(np.isnan(y).all(axis=(1,)), np.isnan(y).any(axis=1))
    assert np.array_equal(np.isnan(y[:, 0]), [[False] * 4 + [True] * 4, [True] * 8])
