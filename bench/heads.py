"""What `bench.programs` has, of `rms_norm` with a scale for each head: what to time, and the check that comes first.

Arrays have two axes as everywhere here, of which the rows are those of all heads of the first token, of the second, and
so on; the norm sees them with an axis of heads.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxnorm
from bench import programs as plain
from bench.programs import TOLERANCE, each_direction, jitted, partial_sums, relative_error, sampled_rows
from bench.shapes import HEADS

CHECKED = "step"
KIND = "rms, a scale a head"


def moved(kind, dtype, rows, cols):
    """How many bytes each program reads or writes once, by direction; scales are not counted."""
    return plain.moved("rms", dtype, rows, cols)


def operands(kind, dtype, rows, cols, seed=0):
    """x, the scales of all heads alone in a tuple, and dy."""
    if rows % HEADS:
        raise ValueError(f"{rows} rows are not those of {HEADS} heads")
    (x, dy), _ = plain.draw(seed, jnp.dtype(dtype).name, rows, cols, 2)
    _, (scale, _) = plain.draw(seed, jnp.dtype(dtype).name, 1, HEADS * cols, 1)
    return x, (scale.reshape(HEADS, cols),), dy


def norm_of(kind, implementation):
    """The op as a function of x and the scales."""

    def norm(x, scale):
        heads = x.reshape(-1, *scale.shape)
        return jaxnorm.rms_norm(heads, scale, implementation=implementation).reshape(x.shape)

    return norm


@functools.cache
def functions(kind, implementation):
    """Each program as one jitted function, as `bench.programs.functions` has them."""
    return jitted(norm_of(kind, implementation))


def programs(kind, implementation, x, weights, dy):
    return each_direction(functions(kind, implementation), implementation, x, weights, dy)


def check(kind, x, weights, dy, step=None):
    """The largest error of sampled rows of y and dx and columns of dscale, relative to their tolerance."""
    y, (dx, (dscale,)) = (step or functions(kind, "native")["step"])(x, weights, dy)
    arrays = {"x": x, "dy": dy, "y": y, "dx": dx}
    rows, sums, scale, dscale = jax.device_get(_samples(arrays, weights[0], dscale))
    tolerance = TOLERANCE[y.dtype.name]
    x_hat, rstd = plain.standardised("rms", rows["x"])
    g = np.float64(rows["dy"]) * scale
    exact = {"y": x_hat * scale, "dx": rstd * (g - x_hat * (g * x_hat).mean(1, keepdims=True))}
    errors = [relative_error(rows[name], expected) / tolerance for name, expected in exact.items()]
    return max(*errors, relative_error(dscale, np.float64(sums).sum(0)) / max(tolerance, 5e-6))


@jax.jit
def _samples(arrays, scale, dscale):
    """Eight rows of each array and their scales; and dscale, with what it should be as partial sums."""
    x, dy = (arrays[name].astype(jnp.float32) for name in ("x", "dy"))
    terms = dy * x * jax.lax.rsqrt((x**2).mean(1, keepdims=True) + plain.EPSILON)
    heads = sampled_rows({"head": jnp.arange(len(x)) % HEADS})["head"]
    sums = partial_sums(terms.reshape(-1, scale.size))
    return sampled_rows(arrays), sums, scale[heads].astype(jnp.float32), dscale.ravel()
