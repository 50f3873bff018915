"""The formulas in float64 NumPy, with one final rounding: what every implementation is measured against."""

from math import erfc
from typing import NamedTuple

import ml_dtypes
import numpy as np

EPSILON = 1e-6


class Forward(NamedTuple):
    exact: np.ndarray  # y in float64
    rounded: np.ndarray  # y in the output's dtype
    terms: np.ndarray  # the size of what is summed to y: by it an error of arithmetic is measured
    slack: np.ndarray  # what y may be moved by in a rounding before: of x_hat, where that is asked for, or an exponent


class Gradients(NamedTuple):
    dx: np.ndarray
    dscale: np.ndarray
    dbias: np.ndarray
    dx_terms: np.ndarray  # rstd * g: the size of what is summed to dx


def f64(array) -> np.ndarray:
    return np.asarray(array).astype(np.float64)


def spacing(values: np.ndarray, dtype) -> np.ndarray:
    """The distance of neighbouring numbers of ``dtype`` at each value."""
    info, exponent = ml_dtypes.finfo(dtype), np.frexp(np.where(np.isfinite(values), values, 0))[1] - 1
    return np.ldexp(1.0, np.maximum(exponent, info.minexp) - info.nmant)


def round_to(values: np.ndarray, dtype) -> np.ndarray:
    """To the nearest, ties to even, once: ml_dtypes' own conversion from float64 rounds twice, by way of float32."""
    unit = spacing(values, dtype)
    rounded = np.rint(values / unit) * unit
    with np.errstate(over="ignore"):
        return rounded.astype(dtype)


def _statistics(kind, x, axes, epsilon):
    mean = x.mean(axes, keepdims=True) if kind == "layer" else 0.0
    centred = x - mean
    rstd = 1 / np.sqrt(np.square(centred).mean(axes, keepdims=True) + epsilon)
    return centred * rstd, rstd


def forward(
    kind, x, scale=None, bias=None, *, axes=1, epsilon=EPSILON, scale_offset=0.0, multiply_before_cast=True, out_dtype
) -> Forward:
    over = tuple(range(-axes, 0))
    x_hat, _ = _statistics(kind, f64(x), over, epsilon)
    factor = np.ones(()) if scale is None else f64(scale) + scale_offset
    addend = np.zeros(()) if bias is None else f64(bias)
    # LayerNorm subtracts the mean, so that a small x_hat carries the error of the row's largest.
    size = np.abs(x_hat) if kind == "rms" else np.abs(x_hat).max(over, keepdims=True, initial=0)
    slack = np.zeros(())
    if not multiply_before_cast:
        narrower = x.dtype if x.dtype.itemsize < out_dtype.itemsize else out_dtype
        x_hat = f64(round_to(x_hat, narrower))
        slack = spacing(x_hat, narrower) * np.abs(factor)
    exact = x_hat * factor + addend
    return Forward(exact, round_to(exact, out_dtype), size * np.abs(factor) + np.abs(addend), slack)


def gradients(kind, x, dy, scale=None, *, axes=1, lead=(), epsilon=EPSILON, scale_offset=0.0) -> Gradients:
    """``lead``: the axes that scale and bias have before the normalised ones."""
    x, dy = f64(x), f64(dy)
    over = tuple(range(-axes, 0))
    x_hat, rstd = _statistics(kind, x, over, epsilon)
    g = dy if scale is None else dy * (f64(scale) + scale_offset)
    along = g - x_hat * (g * x_hat).mean(over, keepdims=True)
    dx = rstd * (along if kind == "rms" else along - g.mean(over, keepdims=True))
    weight = (*lead, *x.shape[x.ndim - axes :])
    return Gradients(dx, _sum_to(weight, dy * x_hat), _sum_to(weight, dy), rstd * g)


def _sum_to(dims, values):
    """The sums over the axes that a broadcast from ``dims`` repeats."""
    sums = values.sum(tuple(range(values.ndim - len(dims))))
    return sums.sum(tuple(axis for axis, length in enumerate(dims) if length == 1), keepdims=True)


def logistic(w):
    """Of w and of -w: 1 less a number near 1 would lose its digits."""
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-w)), 1 / (1 + np.exp(w))


def _silu(v):
    sigmoid, rest = logistic(v)
    return v * sigmoid, sigmoid * (1 + v * rest), 0


def _sigmoid(v):
    sigmoid, rest = logistic(v)
    return sigmoid, sigmoid * rest, 0


def _gelu(v):
    root = np.sqrt(8 / np.pi)
    w = root * (v + 0.044715 * v**3)
    sigmoid, rest = logistic(w)
    return v * sigmoid, sigmoid * (1 + v * rest * root * (1 + 3 * 0.044715 * v**2)), w


def _gelu_exact(v):
    normal = np.vectorize(erfc, otypes=[float])(-v / np.sqrt(2)) / 2
    return v * normal, normal + v * np.exp(-(v**2) / 2) / np.sqrt(2 * np.pi), v**2 / 2


# The value and the derivative of each, and the exponent by which it falls.
ACTIVATIONS = {
    None: lambda v: (v, np.ones_like(v), 0),
    "silu": _silu,
    "gelu": _gelu,
    "gelu_exact": _gelu_exact,
    "relu": lambda v: (np.maximum(v, 0), np.float64(v > 0), 0),
    "relu2": lambda v: (np.square(np.maximum(v, 0)), 2 * np.maximum(v, 0), 0),
    "sigmoid": _sigmoid,
}
