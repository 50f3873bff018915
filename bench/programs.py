"""What the benchmarks time, for jaxnorm and for XLA's fusion of the jnp formula, and the check that comes first."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxnorm

NORMS = {"rms": jaxnorm.rms_norm, "layer": jaxnorm.layer_norm}
# Arrays of x's size that each program reads or writes once.
ELEMENTS = {"forward": 2, "backward": 3, "step": 5}
TOLERANCE = {"float32": 2e-6, "bfloat16": 4e-3, "float16": 5e-4}  # of y and dx, relative L2
EPSILON = 1e-6


def operands(kind, dtype, rows, cols, seed=0):
    """x, the weights and dy: RMSNorm with a scale, LayerNorm with scale and bias.

    Nothing overflows in float16: x and dy are normal numbers, so the sums of a million of them are near a thousand.
    """
    x, weights, dy = _draw(seed, jnp.dtype(dtype).name, rows, cols)
    return x, weights if kind == "layer" else weights[:1], dy


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _draw(seed, dtype, rows, cols):
    # JAX's default generator takes longer to compile than everything that is timed.
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), 4)
    x, dy = (jax.random.normal(key, (rows, cols)).astype(dtype) for key in keys[:2])
    scale, bias = ((1 + 0.1 * jax.random.normal(key, (cols,))).astype(dtype) for key in keys[2:])
    return x, (scale, bias), dy


@functools.cache
def functions(kind, implementation):
    """Each program as one jitted function, so that it is compiled once for all operands of a shape."""
    norm = functools.partial(NORMS[kind], implementation=implementation)

    def forward(x, weights):
        return norm(x, *weights)

    def residuals(x, weights):
        return jax.vjp(forward, x, weights)[1]

    def backward(vjp, dy):
        return vjp(dy)

    def step(x, weights, dy):
        y, vjp = jax.vjp(forward, x, weights)
        return y, vjp(dy)

    def whole_vjp(x, weights, dy):
        return step(x, weights, dy)[1]

    return {f.__name__: jax.jit(f) for f in (forward, residuals, backward, step, whole_vjp)}


def programs(kind, implementation, x, weights, dy):
    """What to time, by direction: a function and its arguments.

    The backward is timed from its residuals (x, the statistics), as training runs it; XLA's is its whole vjp, the
    fastest of its choices, which computes the statistics again. "step" is y and all gradients in one program for both.
    """
    f = functions(kind, implementation)
    if implementation == "jnp":
        backward = f["whole_vjp"], (x, weights, dy)
    else:
        backward = f["backward"], (f["residuals"](x, weights), dy)
    return {"forward": (f["forward"], (x, weights)), "backward": backward, "step": (f["step"], (x, weights, dy))}


def check(kind, x, weights, dy, step=None):
    """The largest error of sampled rows of y and dx and columns of dscale and dbias, relative to their tolerance.

    `step` is the program to check; jaxnorm's own if it is not given. Only samples come from the device to the host.
    """
    y, (dx, dweights) = (step or functions(kind, "native")["step"])(x, weights, dy)
    rows, sums, weight_cols, actual_sums = jax.device_get(_samples(kind, x, dy, y, dx, weights, dweights))
    tolerance = TOLERANCE[x.dtype.name]
    expected_y, expected_dx = _reference(kind, rows["x"], rows["dy"], *(np.asarray(w, np.float64) for w in weight_cols))
    errors = [
        _relative_error(rows["y"], expected_y) / tolerance,
        _relative_error(rows["dx"], expected_dx) / tolerance,
    ]
    for actual, partial in zip(actual_sums, sums, strict=False):
        errors.append(_relative_error(actual, np.float64(partial).sum(0)) / max(tolerance, 5e-6))
    return max(errors)


def _reference(kind, x, dy, scale, bias=0):
    """y and dx of whole rows in float64."""
    x, dy = np.float64(x), np.float64(dy)
    centred = x - x.mean(1, keepdims=True) if kind == "layer" else x
    rstd = 1 / np.sqrt((centred**2).mean(1, keepdims=True) + EPSILON)
    x_hat, g = centred * rstd, dy * scale
    mean_g = g.mean(1, keepdims=True) if kind == "layer" else 0
    return x_hat * scale + bias, rstd * (g - x_hat * (g * x_hat).mean(1, keepdims=True) - mean_g)


@functools.partial(jax.jit, static_argnums=0)
def _samples(kind, x, dy, y, dx, weights, dweights):
    """Eight rows of each array, and of 32 columns dscale and dbias, with what each should be, as many partial sums."""
    rows, cols = np.linspace(0, len(x) - 1, 8).astype(int), np.linspace(0, x.shape[1] - 1, 32).astype(int)
    x32 = x.astype(jnp.float32)
    centred = x32 - x32.mean(1, keepdims=True) if kind == "layer" else x32
    rstd = jax.lax.rsqrt((centred**2).mean(1, keepdims=True) + EPSILON)
    dy_cols = dy[:, cols].astype(jnp.float32)
    sums = [_partial_sums(terms) for terms in (centred[:, cols] * rstd * dy_cols, dy_cols)]
    arrays = {"x": x, "dy": dy, "y": y, "dx": dx}
    return {name: a[rows] for name, a in arrays.items()}, sums, weights, [dw[cols] for dw in dweights]


def _partial_sums(terms, of=256):
    """Sums of so few rows that float32 does for them; float64 adds them up on the host."""
    return jnp.pad(terms, ((0, -len(terms) % of), (0, 0))).reshape(-1, of, terms.shape[1]).sum(1)


def _relative_error(actual, expected):
    return float(np.linalg.norm(np.float64(actual) - expected) / np.linalg.norm(expected))
