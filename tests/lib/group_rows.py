"""Rows of the table for GroupNorm, alone and with each activation."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import bad_group_calls as bad_calls
import formulas
import numpy as np
from norm_rows import ALONE
from op import Op, rows
from oracle import EPSILON, Forward, f64, gelu, round_to, silu

import jaxnorm


def _plain(z):
    return z, np.ones_like(z)


def _relu(z):
    return np.maximum(z, 0), np.float64(z > 0)


# The value and the derivative of each.
ACTIVATIONS: dict[str | None, Callable] = {
    None: _plain,
    "silu": lambda z: silu(z)[:2],
    "relu": _relu,
    "gelu": lambda z: gelu(z)[:2],
}


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
    y, slope = ACTIVATIONS[activation](of_norm.z)
    # What comes in is off by its terms, the activation's own arithmetic by its result.
    terms = np.abs(slope) * of_norm.terms + (0 if activation is None else np.abs(y))
    return Forward(y, round_to(y, out_dtype or x.dtype), terms, np.zeros(()))


def exact_gradients(activation, cotangents, x, scale=None, bias=None, *, out_dtype=None, group_size=None, **options):
    of_norm = affine(x, scale, bias, group_size=group_size, **options)
    dz = _by_group(f64(cotangents[0]) * ACTIVATIONS[activation](of_norm.z)[1], group_size)
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
        as_norm=lambda f: lambda *args: f(*args)[0],
        exact=partial(exact, activation),
        exact_gradients=partial(exact_gradients, activation),
        small=rows(6, 10, group_size=5),
        # Without positions and with some, one and many groups, no whole vector in a group, a channel each; weights for
        # each example; layers of SDXL.
        sizes=(
            *(rows(7, 4, 6, 24, group_size=size) for size in (1, 3, 6, 24)),
            *(rows(7, cols, group_size=size) for cols, size in ((24, 6), (1000, 100), (4096, 1024), (4096, None))),
            rows(5, 9, 60, group_size=20),
            rows(3, 5, 3, group_size=3),
            rows(2, 4099, 96, group_size=3),
            rows(7, 6, 24, group_size=6)._replace(weights=(7, 24)),
            rows(2, 32, 32, 320, group_size=10),
            rows(2, 16, 16, 1280, group_size=40),
            rows(2, 64, 64, 64, group_size=2),
        ),
        options=({"scale_offset": 1.0}, {"epsilon": 1.0}, {"out_dtype": np.dtype("float32")}),
        # Many examples, and many positions of one.
        backward_sizes=(
            rows(600, 5, 40, group_size=10),
            rows(4099, 24, group_size=6),
            rows(1, 20_000, 64, group_size=2),
            rows(65, 7, 64, group_size=16)._replace(weights=(65, 64)),
        ),
        lengths=(
            rows(9, 5, 128, group_size=32),
            rows(9, 5, 100, group_size=20),
            rows(9, 640, group_size=128),
            rows(9, 3, 4, 64, group_size=2),
            rows(9, 33, 33, 32, group_size=1),
        ),
        many=(rows(600, 5, 128, group_size=32), rows(600, 640, group_size=20)),
        forward="jaxnorm_group_norm_fwd",
        backward="jaxnorm_group_norm_bwd",
        gradients=("dx", "dscale", "dbias"),
        kept=("x", "scale", "bias"),
        statistics=2,
        numbers=("epsilon", "scale_offset", "num_groups", "channel_axis"),
        required={"num_groups": 2},
        bad_calls=bad_calls.GROUP | bad_calls.MISUSE,
        without_kernel=bad_calls.WITHOUT_KERNEL,
    )
