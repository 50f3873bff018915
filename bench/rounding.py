"""Device time of rounding to float8 around the products of `float8_linear`, beside XLA's code and a copy.

    python -m bench rounding --out bench/results/h200_rounding

As `bench.beside_xla` says: "rows" is x by rows; "kernel" is a kernel by columns, as it lies and transposed, both
written; "gradient" is dy by rows and by columns, with the scales of the other factors, which reads it twice; "bytes" is
the transpose of the same bytes as values of float8, several times as many columns.
"""

import jax
import jax.numpy as jnp
import numpy as np

from bench import beside_xla
from bench.beside_xla import add_arguments as add_arguments
from jaxnorm.ops.float8_linear.formula import BY_XLA, Float8Linear
from jaxnorm.ops.float8_linear.kernels import BY_KERNELS, transposed

SHAPES = {
    "Llama 3 8B, x": (8192, 4096),
    "Llama 3 8B, of gate and up": (8192, 28672),
    "Llama 3 8B, of down": (8192, 14336),
    "Llama 3 8B, kernel of gate": (4096, 14336),
    "Llama 3 8B, kernel of down": (14336, 4096),
    "a width of 2048": (8192, 2048),
}
SPEC = Float8Linear(out_dtype=np.dtype(np.float32))


def operands(shape, dtype, seed):
    """An array, a factor for each of its columns and one for each of its rows."""
    rows, cols = shape
    of_array, of_columns, of_rows = jax.random.split(jax.random.key(seed, impl="rbg"), 3)
    factors = jnp.exp(jax.random.normal(of_columns, (cols,))), jnp.exp(jax.random.normal(of_rows, (rows, 1)))
    return jax.random.normal(of_array, shape, dtype), *factors


def programs(implementation):
    by, transpose = (BY_XLA, jnp.transpose) if implementation == "jnp" else (BY_KERNELS, transposed)

    def with_transposed(rounded):
        values, scales, columns = rounded
        return values, scales, values.T if columns is None else columns

    def gradient(dy, of_columns, of_rows):
        rows, columns = by.gradient(SPEC, dy, of_columns, of_rows, wants=(True, True))
        return rows[:2], columns.scales, columns.values.T if columns.transposed is None else columns.transposed

    return {
        "rows": lambda x, *_: by.rounded(SPEC, x, (-1,))[:2],
        "kernel": lambda kernel, *_: with_transposed(by.rounded(SPEC, kernel, (0,))),
        "gradient": gradient,
        "bytes": lambda array, *_: transpose(as_float8(array)),
    }


def as_float8(array):
    return jax.lax.bitcast_convert_type(array, jnp.float8_e4m3fn).reshape(len(array), -1)


def _arrays(itemsize, _):
    return {"rows": 1 + 1 / itemsize, "kernel": 1 + 2 / itemsize, "gradient": 2 + 2 / itemsize, "bytes": 2}


SUBJECT = beside_xla.Subject(
    "float8_linear",
    SHAPES,
    operands,
    programs,
    lambda shape: shape[0] * shape[1],
    lambda shape: "x".join(map(str, shape)),
    arrays=_arrays,
)


def main(args):
    beside_xla.measure((SUBJECT,), args)
