"""The gated norm in float64 NumPy, in each of its variants."""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import oracle
import pytest
from oracle import f64, round_to

import jaxnorm


class Variant(NamedTuple):
    gate_first: bool
    activation: str

    def __str__(self):
        return f"{self.activation} {'first' if self.gate_first else 'last'}"


MAMBA, QWEN = Variant(True, "silu"), Variant(False, "silu")
VARIANTS = (MAMBA, QWEN, Variant(True, "sigmoid"), Variant(False, "sigmoid"))
variants = pytest.mark.parametrize("variant", VARIANTS, ids=str)


class Gradients(NamedTuple):
    dx: np.ndarray
    dgate: np.ndarray
    dscale: np.ndarray


def gated(variant: Variant, **options: Any):
    return partial(jaxnorm.gated_rms_norm, **variant._asdict(), **options)


def exact_forward(variant, x, gate, scale=None, *, group_size=None, epsilon=1e-6, scale_offset=0.0, out_dtype=None):
    a, _ = _activation(variant, f64(gate))
    h_hat, _ = _normalised(variant, f64(x), a, group_size, epsilon)
    exact = h_hat if scale is None else h_hat * (f64(scale) + scale_offset)
    exact = exact if variant.gate_first else exact * a
    return oracle.Forward(exact, round_to(exact, out_dtype or x.dtype), np.abs(exact), np.zeros(()))


def exact_gradients(variant, x, gate, scale, dy, *, group_size=None, epsilon=1e-6, scale_offset=0.0) -> Gradients:
    x, dy, scale = f64(x), f64(dy), np.float64(1) if scale is None else f64(scale) + scale_offset
    a, slope = _activation(variant, f64(gate))
    h_hat, rstd = _normalised(variant, x, a, group_size, epsilon)
    u = dy if variant.gate_first else dy * a
    g = _grouped(u * scale, group_size)
    groups = _grouped(h_hat, group_size)
    dh = (rstd * (g - groups * (g * groups).mean(-1, keepdims=True))).reshape(x.shape)
    dscale = (u * h_hat).reshape(-1, x.shape[-1]).sum(0)
    if variant.gate_first:
        return Gradients(dh * a, dh * x * slope, dscale)
    return Gradients(dh, dy * scale * h_hat * slope, dscale)


def _grouped(v, group_size):
    return v.reshape(*v.shape[:-1], -1, group_size or v.shape[-1])


def _activation(variant, gate):
    """Its value and derivative."""
    with np.errstate(over="ignore"):
        sigmoid, rest = 1 / (1 + np.exp(-gate)), 1 / (1 + np.exp(gate))
    if variant.activation == "sigmoid":
        return sigmoid, sigmoid * rest
    return gate * sigmoid, sigmoid * (1 + gate * rest)


def _normalised(variant, x, a, group_size, epsilon):
    """h_hat, and rstd of each group."""
    h = _grouped(x * a if variant.gate_first else x, group_size)
    rstd = 1 / np.sqrt(np.square(h).mean(-1, keepdims=True) + epsilon)
    return (h * rstd).reshape(x.shape), rstd
