"""Device time of gated_activation with silu on one NVIDIA GPU, beside XLA's code for the formula and a copy.

    python -m bench activations --out bench/results/h100_activations

As `bench.beside_xla` says: x, which has both halves of each row, is read and y, half as large, written, and with the
gradient ("step") x read again, dy read and dx written. "quantised" is gated_activation_quantized to float8 with a scale
for each row: of y a byte an element is written. What `bench cpu` wants of `bench.programs` is here, too.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxnorm
from bench import beside_xla
from bench.beside_xla import add_arguments as add_arguments
from bench.programs import TOLERANCE, each_direction, jitted, relative_error, sampled_rows

KIND, CHECKED = "gated_activation", "step"
# (tokens, columns of the result)
SHAPES = {
    "Llama 3 8B": (8192, 14336),
    "Llama 3 70B": (4096, 28672),
    "Gemma 2 2B": (8192, 9216),
    "an expert of Qwen3 30B-A3B": (65536, 768),
    "odd columns": (8192, 10001),
    "a token of 32": (32, 14336),
}
# How many arrays of y's size a direction moves.
ARRAYS = {KIND: {"forward": 3, "backward": 5, "step": 8}}


def moved(kind, dtype, rows, cols):
    """How many bytes each program reads or writes once, by direction."""
    return {way: arrays * rows * cols * jnp.dtype(dtype).itemsize for way, arrays in ARRAYS[kind].items()}


def operands(kind, dtype, rows, cols, seed=0):
    """x, which has gate and what it gates; no weights; and dy."""
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), 2)
    x, dy = (jax.random.normal(key, (rows, n), dtype) for key, n in zip(keys, (2 * cols, cols), strict=True))
    return x, (), dy


@functools.cache
def functions(kind, implementation):
    return jitted(functools.partial(jaxnorm.gated_activation, implementation=implementation), lambda dx: dx)


def programs(kind, implementation, x, weights, dy):
    """The `Program` of each direction."""
    return each_direction(functions(kind, implementation), implementation, x, weights, dy)


def check(kind, x, weights, dy, step=None):
    """The largest error of sampled rows of y and dx, relative to its tolerance.

    `step` is the program to check; jaxnorm's own if it is not given.
    """
    y, (dx, _) = (step or functions(kind, "native")["step"])(x, weights, dy)
    rows = jax.device_get(jax.jit(sampled_rows)({"x": x, "dy": dy, "y": y, "dx": dx}))
    exact = _reference(KIND, *(np.float64(rows[name]) for name in ("x", "dy")))
    return max(relative_error(rows[name], value) / TOLERANCE[x.dtype.name] for name, value in exact.items())


def _reference(kind, x, dy):
    """y and dx of whole rows in float64."""
    gate, up = np.split(x, 2, 1)
    sigmoid = 1 / (1 + np.exp(-gate))
    slope = sigmoid * (1 + gate * (1 - sigmoid))
    return {"y": gate * sigmoid * up, "dx": np.concatenate([dy * up * slope, dy * gate * sigmoid], 1)}


def _of_subject(implementation):
    """By name: a function of x and dy."""
    f = functions(KIND, implementation)
    to_float8 = functools.partial(
        jaxnorm.gated_activation_quantized,
        quantization=jaxnorm.Quantization(jnp.float8_e4m3fn),
        implementation=implementation,
    )
    return {
        "forward": lambda x, _: f["forward"](x, ()),
        "step": lambda x, dy: f["step"](x, (), dy),
        "quantised": lambda x, _: to_float8(x),
    }


def _arrays(itemsize, _):
    """In arrays of x's size, which is twice y's."""
    ways = {**ARRAYS[KIND], "quantised": 2 + 1 / itemsize}
    return {way: arrays / 2 for way, arrays in ways.items()}


SUBJECT = beside_xla.Subject(
    KIND,
    SHAPES,
    lambda shape, dtype, seed: operands(KIND, dtype, *shape, seed)[::2],
    _of_subject,
    lambda shape: 2 * shape[0] * shape[1],
    lambda shape: "x".join(map(str, shape)),
    arrays=_arrays,
)


def main(args):
    beside_xla.measure((SUBJECT,), args)
