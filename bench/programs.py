"""What the benchmarks time, for jaxnorm and for XLA's fusion of the jnp formula, and the check that comes first."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxnorm


def _of_pair(norm):
    return lambda pair, *weights, **options: norm(*pair, *weights, **options)


NORMS = {"rms": jaxnorm.rms_norm, "layer": jaxnorm.layer_norm}
# Of (x, residual): they give (y, the sum), and dy is (dy, dsum), the cotangents of both.
ADDED_NORMS = {"add_rms": _of_pair(jaxnorm.add_rms_norm), "add_layer": _of_pair(jaxnorm.add_layer_norm)}
# A kind is the name of an op, or that and after a comma what differs.
PAD_TO = 256
PADDED = f"add_rms, padded to {PAD_TO}"
ADDED_NORMS[PADDED] = functools.partial(ADDED_NORMS["add_rms"], pad_to=PAD_TO)
OPS = NORMS | ADDED_NORMS
CHECKED = "step"
TOLERANCE = {"float32": 2e-6, "bfloat16": 4e-3, "float16": 5e-4}  # of y and dx, relative L2
EPSILON = 1e-6


def elements(kind):
    """How many arrays of x's size each program reads or writes once, by direction.

    With a residual: x, residual, y and the sum forward; the sum, dy, dsum and dx backward.
    """
    forward, backward = (4, 4) if kind in ADDED_NORMS else (2, 3)
    return {"forward": forward, "backward": backward, "step": forward + backward}


def padding(kind, cols):
    """The columns of zeros after a row of y."""
    return -cols % PAD_TO if kind == PADDED else 0


def moved(kind, dtype, rows, cols):
    """How many bytes each program reads or writes once, by direction. Zeros are written, and never read."""
    size = rows * jnp.dtype(dtype).itemsize
    zeros = {"forward": size * padding(kind, cols), "backward": 0, "step": size * padding(kind, cols)}
    return {direction: arrays * cols * size + zeros[direction] for direction, arrays in elements(kind).items()}


def is_layer(kind):
    return "layer" in kind


def operands(kind, dtype, rows, cols, seed=0):
    """x, the weights and dy: RMSNorm with a scale, LayerNorm with scale and bias.

    Nothing overflows in float16: x and dy are normal numbers, so the sums of a million of them are near a thousand.
    """
    added = kind in ADDED_NORMS
    arrays, weights = draw(seed, jnp.dtype(dtype).name, rows, cols, 4 if added else 2)
    x, dy = (arrays[:2], arrays[2:]) if added else arrays
    if zeros := padding(kind, cols):
        dy = jnp.pad(dy[0], ((0, 0), (0, zeros)), constant_values=1), dy[1]
    return x, weights if is_layer(kind) else weights[:1], dy


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def draw(seed, dtype, rows, cols, count):
    # JAX's default generator takes longer to compile than everything that is timed.
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), 2 + count)
    arrays = tuple(jax.random.normal(key, (rows, cols)).astype(dtype) for key in keys[2:])
    return arrays, tuple((1 + 0.1 * jax.random.normal(key, (cols,))).astype(dtype) for key in keys[:2])


class Program(NamedTuple):
    """What to time. `carries`: the first of its arguments is donated, and the first of its two results is the next."""

    function: Any
    arguments: tuple[Any, ...]
    carries: bool = False


def norm_of(kind, implementation):
    """The op as a function of x and the weights."""
    return functools.partial(OPS[kind], implementation=implementation)


@functools.cache
def functions(kind, implementation):
    """Each program as one jitted function, so that it is compiled once for all operands of a shape."""
    norm = norm_of(kind, implementation)

    def carry(residual, x, weights):
        y, total = norm((x, residual), *weights)
        return total, y  # in this order: JAX gives a donated buffer to the first result that is like it

    # The gradients of x and of a residual are one array, which XLA would copy to give it twice.
    return jitted(norm, lambda dx: jax.tree.leaves(dx)[0]) | {"carry": jax.jit(carry, donate_argnums=0)}


def jitted(norm, wanted_of=lambda dx: dx):
    """The functions of x and weights that make up the programs; wanted_of(dx) is what the backward gives of dx."""

    def forward(x, weights):
        return norm(x, *weights)

    def residuals(x, weights):
        return jax.vjp(forward, x, weights)[1]

    def backward(vjp, dy):
        dx, dweights = vjp(dy)
        return wanted_of(dx), dweights

    def step(x, weights, dy):
        y, vjp = jax.vjp(forward, x, weights)
        return y, backward(vjp, dy)

    def whole_vjp(x, weights, dy):
        return step(x, weights, dy)[1]

    return {f.__name__: jax.jit(f) for f in (forward, residuals, backward, step, whole_vjp)}


def programs(kind, implementation, x, weights, dy):
    """The `Program` of each direction.

    jaxnorm's forward writes the sum over the residual, so the residual is donated, as it is dead in a model that runs
    forward only; of one that lives on XLA would make a copy first. XLA's own code writes the sum wherever it is asked
    to, and is not tied to the residual's buffer.

    The backward is timed from its residuals (x, the statistics), as training runs it; XLA's is its whole vjp, the
    fastest of its choices, which computes the statistics again. "step" is y and all gradients in one program for both.
    """
    f = functions(kind, implementation)
    by_direction = each_direction(f, implementation, x, weights, dy)
    if implementation != "jnp" and kind in ADDED_NORMS:
        by_direction["forward"] = Program(f["carry"], (jnp.copy(x[1]), x[0], weights), carries=True)
    return by_direction


def each_direction(f, implementation, x, weights, dy):
    """The `Program` of each direction, of what `jitted` gives."""
    if implementation == "jnp":
        backward = Program(f["whole_vjp"], (x, weights, dy))
    else:
        backward = Program(f["backward"], (f["residuals"](x, weights), dy))
    forward, step = Program(f["forward"], (x, weights)), Program(f["step"], (x, weights, dy))
    return {"forward": forward, "backward": backward, "step": step}


def check(kind, x, weights, dy, step=None):
    """The largest error of sampled rows of y, sum and dx and columns of dscale and dbias, relative to their tolerance.

    `step` is the program to check; jaxnorm's own if it is not given. Only samples come from the device to the host.
    """
    y, (dx, dweights) = (step or functions(kind, "native")["step"])(x, weights, dy)
    arrays = {"x": x, "dy": dy, "y": y, "dx": dx}
    if kind in ADDED_NORMS:
        pairs = {("x", "residual"): x, ("dy", "dsum"): dy, ("y", "sum"): y}
        arrays |= {name: array for names, pair in pairs.items() for name, array in zip(names, pair, strict=True)}
    rows, sums, weight_cols, actual_sums = jax.device_get(_samples(kind, arrays, weights, dweights))
    tolerance, cols = TOLERANCE[dx.dtype.name], dx.shape[1]
    if rows["y"][:, cols:].any():
        return np.inf  # what is not zero there is wrong
    rows |= {name: rows[name][:, :cols] for name in ("y", "dy")}
    normalised, weight_cols = rows.get("sum", rows["x"]), (np.asarray(w, np.float64) for w in weight_cols)
    expected_y, expected_dx = _reference(kind, normalised, rows["dy"], *weight_cols)
    expected = {"y": expected_y, "dx": expected_dx + np.float64(rows.get("dsum", 0))}
    if "sum" in rows:
        expected["sum"] = np.float64(rows["x"]) + np.float64(rows["residual"])
    errors = [relative_error(rows[name], exact) / tolerance for name, exact in expected.items()]
    for actual, partial in zip(actual_sums, sums, strict=False):
        errors.append(relative_error(actual, np.float64(partial).sum(0)) / max(tolerance, 5e-6))
    return max(errors)


def standardised(kind, x):
    """x_hat and rstd of whole rows in float64."""
    x = np.float64(x)
    centred = x - x.mean(1, keepdims=True) if is_layer(kind) else x
    rstd = 1 / np.sqrt((centred**2).mean(1, keepdims=True) + EPSILON)
    return centred * rstd, rstd


def _reference(kind, x, dy, scale, bias=0):
    """y and dx of whole rows in float64."""
    x_hat, rstd = standardised(kind, x)
    g = np.float64(dy) * scale
    mean_g = g.mean(1, keepdims=True) if is_layer(kind) else 0
    return x_hat * scale + bias, rstd * (g - x_hat * (g * x_hat).mean(1, keepdims=True) - mean_g)


@functools.partial(jax.jit, static_argnums=0)
def _samples(kind, arrays, weights, dweights):
    """Eight rows of each array, and of 32 columns dscale and dbias, with what each should be, as many partial sums."""
    x = arrays.get("sum", arrays["x"])
    dy = arrays["dy"][:, : x.shape[1]]
    cols = np.linspace(0, x.shape[1] - 1, 32).astype(int)
    x32 = x.astype(jnp.float32)
    centred = x32 - x32.mean(1, keepdims=True) if is_layer(kind) else x32
    rstd = jax.lax.rsqrt((centred**2).mean(1, keepdims=True) + EPSILON)
    dy_cols = dy[:, cols].astype(jnp.float32)
    sums = [partial_sums(terms) for terms in (centred[:, cols] * rstd * dy_cols, dy_cols)]
    return sampled_rows(arrays), sums, weights, [dw[cols] for dw in dweights]


def sampled_rows(arrays):
    """Eight rows of each array by name."""
    rows = np.linspace(0, len(next(iter(arrays.values()))) - 1, 8).astype(int)
    return {name: array[rows] for name, array in arrays.items()}


def partial_sums(terms, of=256):
    """Sums of so few rows that float32 does for them; float64 adds them up on the host."""
    return jnp.pad(terms, ((0, -len(terms) % of), (0, 0))).reshape(-1, of, terms.shape[1]).sum(1)


def relative_error(actual, expected):
    return float(np.linalg.norm(np.float64(actual) - expected) / np.linalg.norm(expected))
