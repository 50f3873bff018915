"""What `bench.programs` has, of the gated norm: what to time, and the check that comes first.

A kind is "gated_rms", of which the gate comes first, or that and after a comma what differs.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxnorm
from bench.programs import EPSILON, TOLERANCE, draw, each_direction, jitted, partial_sums, relative_error, sampled_rows

CHECKED = "step"
GROUP = 1024
ELEMENTS = {"forward": 3, "backward": 5, "step": 8}  # arrays of x's size that are read or written once


class Variant(NamedTuple):
    gate_first: bool = True
    group_size: int | None = None


PLAIN, LAST, GROUPED = (f"gated_rms{name}" for name in ("", ", gate last", f", groups of {GROUP}"))
VARIANTS = {PLAIN: Variant(), LAST: Variant(gate_first=False), GROUPED: Variant(group_size=GROUP)}


def moved(kind, dtype, rows, cols):
    """How many bytes each program reads or writes once, by direction."""
    nbytes = rows * cols * jnp.dtype(dtype).itemsize
    return {direction: arrays * nbytes for direction, arrays in ELEMENTS.items()}


def operands(kind, dtype, rows, cols, seed=0):
    """(x, gate), the scale alone in a tuple, and dy."""
    (x, gate, dy), weights = draw(seed, jnp.dtype(dtype).name, rows, cols, 3)
    return (x, gate), weights[:1], dy


def norm_of(kind, implementation):
    """The op as a function of x, the gate and the scale."""
    return functools.partial(jaxnorm.gated_rms_norm, **VARIANTS[kind]._asdict(), implementation=implementation)


@functools.cache
def functions(kind, implementation):
    """Each program as one jitted function, as `bench.programs.functions` has them."""
    norm = norm_of(kind, implementation)
    return jitted(lambda pair, scale: norm(*pair, scale))


def programs(kind, implementation, x, weights, dy):
    """The `Program` of each direction, as `bench.programs` has them; x is (x, gate)."""
    return each_direction(functions(kind, implementation), implementation, x, weights, dy)


def check(kind, x, weights, dy, step=None):
    """The largest error of sampled rows of y, dx and dgate and columns of dscale, relative to their tolerance.

    `step` is the program to check; jaxnorm's own if it is not given.
    """
    y, (cotangents, dweights) = (step or functions(kind, "native")["step"])(x, weights, dy)
    arrays = dict(zip(("x", "gate", "dy", "y", "dx", "dgate"), (*x, dy, y, *cotangents), strict=True))
    rows, sums, scale, dscale = jax.device_get(_samples(kind, arrays, weights, dweights))
    tolerance = TOLERANCE[y.dtype.name]
    exact = _reference(kind, *(np.float64(array) for array in (rows["x"], rows["gate"], rows["dy"], scale)))
    errors = [relative_error(rows[name], expected) / tolerance for name, expected in exact.items()]
    return max(*errors, relative_error(dscale, np.float64(sums).sum(0)) / max(tolerance, 5e-6))


def _reference(kind, x, gate, dy, scale):
    """y, dx and dgate of whole rows in float64."""
    is_first, sigmoid = VARIANTS[kind].gate_first, 1 / (1 + np.exp(-gate))
    a, slope = gate * sigmoid, sigmoid * (1 + gate * (1 - sigmoid))
    h_hat, rstd = _normalised(np, kind, x * a if is_first else x)
    g = _grouped(kind, (dy if is_first else dy * a) * scale)
    groups = _grouped(kind, h_hat)
    dh = (rstd * (g - groups * (g * groups).mean(-1, keepdims=True))).reshape(x.shape)
    if is_first:
        return {"y": h_hat * scale, "dx": dh * a, "dgate": dh * x * slope}
    return {"y": h_hat * scale * a, "dx": dh, "dgate": dy * h_hat * scale * slope}


def _grouped(kind, v):
    return v.reshape(len(v), -1, VARIANTS[kind].group_size or v.shape[1])


def _normalised(numpy, kind, h):
    """h_hat, and rstd of each group, by NumPy or jax.numpy."""
    groups = _grouped(kind, h)
    rstd = 1 / numpy.sqrt((groups**2).mean(-1, keepdims=True) + EPSILON)
    return (groups * rstd).reshape(h.shape), rstd


@functools.partial(jax.jit, static_argnums=0)
def _samples(kind, arrays, weights, dweights):
    """Eight rows of each array, and of 32 columns dscale with what it should be, as partial sums."""
    x, gate, dy = (arrays[name].astype(jnp.float32) for name in ("x", "gate", "dy"))
    cols = np.linspace(0, x.shape[1] - 1, 32).astype(int)
    a, is_first = jax.nn.silu(gate), VARIANTS[kind].gate_first
    h_hat, _ = _normalised(jnp, kind, x * a if is_first else x)
    terms = (dy if is_first else dy * a)[:, cols] * h_hat[:, cols]
    return sampled_rows(arrays), partial_sums(terms), weights[0], dweights[0][cols]
