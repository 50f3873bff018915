"""What the benchmarks time, for jaxnorm and for XLA's fusion of the jnp formula, and the check that comes first."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxnorm

NORMS = {"rms": jaxnorm.rms_norm, "layer": jaxnorm.layer_norm}
# Arrays of x's size that each program reads or writes once.
ELEMENTS = {"forward": 2, "backward": 3, "step": 5}
LINKS = 6  # norms in a chain
TOLERANCE = {"float32": 2e-6, "bfloat16": 4e-3, "float16": 5e-4}  # of y and dx, relative L2


def operands(kind, dtype, rows, cols):
    """x, the weights and dy: RMSNorm with a scale, LayerNorm with scale and bias."""
    keys = jax.random.split(jax.random.key(0), 4)
    x, dy = (jax.random.normal(key, (rows, cols), dtype) for key in keys[:2])
    weights = tuple(1 + 0.1 * jax.random.normal(key, (cols,), dtype) for key in keys[2:])
    return x, weights if kind == "layer" else weights[:1], dy


def programs(kind, implementation, x, weights, dy):
    """What to time, by direction: a function and its arguments.

    The backward is timed from its residuals (x, the statistics), as training runs it; XLA's is its whole vjp, the
    fastest of its choices, which computes the statistics again. "step" is y and all gradients in one program for both.
    """
    norm = functools.partial(NORMS[kind], implementation=implementation)

    def step(x, weights, dy):
        y, vjp = jax.vjp(lambda x, weights: norm(x, *weights), x, weights)
        return y, vjp(dy)

    def whole_vjp(x, weights, dy):
        return step(x, weights, dy)[1]

    forward = (lambda x, weights: norm(x, *weights), (x, weights))
    if implementation == "jnp":
        return {"forward": forward, "backward": (whole_vjp, (x, weights, dy)), "step": (step, (x, weights, dy))}
    vjp = jax.jit(lambda x, weights: jax.vjp(lambda x, weights: norm(x, *weights), x, weights)[1])(x, weights)
    return {"forward": forward, "backward": (lambda vjp, dy: vjp(dy), (vjp, dy)), "step": (step, (x, weights, dy))}


def chains(kind, implementation, x, weights, dy):
    """The same, of several norms in a row within one program: their memory is mapped once and soon reused."""
    norm = functools.partial(NORMS[kind], implementation=implementation)

    def forward(x, weights):
        for _ in range(LINKS):
            x = norm(x, *weights)
        return x

    def backward(x, weights, dy):
        _, vjp = jax.vjp(lambda x, weights: norm(x, *weights), x, weights)
        sums = jax.tree.map(jnp.zeros_like, weights)
        for _ in range(LINKS):
            dy, dweights = vjp(dy)
            sums = jax.tree.map(jnp.add, sums, dweights)
        return dy, sums

    return {"forward": (forward, (x, weights)), "backward": (backward, (x, weights, dy))}


def check(kind, x, weights, dy):
    """The largest error of sampled rows of y and dx and columns of dscale and dbias, relative to their tolerance."""
    y, (dx, dweights) = jax.jit(programs(kind, "native", x, weights, dy)["step"][0])(x, weights, dy)
    rows, cols = np.linspace(0, len(x) - 1, 8).astype(int), np.linspace(0, x.shape[1] - 1, 32).astype(int)
    x64, dy64, scale64 = (np.asarray(a, np.float64) for a in (x[rows], dy[rows], weights[0]))
    centred = x64 - x64.mean(1, keepdims=True) if kind == "layer" else x64
    rstd = 1 / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-6)
    x_hat, g = centred * rstd, dy64 * scale64
    bias = np.asarray(weights[1], np.float64) if kind == "layer" else 0
    expected_dx = g - x_hat * (g * x_hat).mean(1, keepdims=True) - (g.mean(1, keepdims=True) if kind == "layer" else 0)
    tolerance = TOLERANCE[x.dtype.name]
    errors = [
        _relative_error(y[rows], x_hat * scale64 + bias) / tolerance,
        _relative_error(dx[rows], rstd * expected_dx) / tolerance,
    ]

    x32 = jnp.float32(x)
    mean = x32.mean(1, keepdims=True) if kind == "layer" else 0
    x_hat = (x32 - mean) * jax.lax.rsqrt(((x32 - mean) ** 2).mean(1, keepdims=True) + 1e-6)
    dy_cols = np.asarray(dy[:, cols], np.float64)
    sums = [(np.asarray(x_hat[:, cols], np.float64) * dy_cols).sum(0), dy_cols.sum(0)]
    for actual, expected in zip(dweights, sums, strict=False):
        errors.append(_relative_error(actual[cols], expected) / max(tolerance, 5e-6))
    return max(errors)


def _relative_error(actual, expected):
    return float(np.linalg.norm(np.float64(actual) - expected) / np.linalg.norm(expected))
