"""What functions with several results return: tuples with names, which a program that is exported may return too."""

from typing import NamedTuple

import jax
from jax import export

from jaxnorm.quantization import Quantized


class AddedNorm(NamedTuple):
    """What a norm of a sum gives: `y` and the sum, which is the next `residual`."""

    y: jax.Array
    residual: jax.Array


class QK(NamedTuple):
    """Queries and keys, normalised and rotated."""

    q: jax.Array
    k: jax.Array


class QKV(NamedTuple):
    """Queries and keys, normalised and rotated, and the values."""

    q: jax.Array
    k: jax.Array
    v: jax.Array


class RowStatistics(NamedTuple):
    """What a norm computed of each row, in float32, with normalised axes of length 1.

    Attributes:
      rstd: the reciprocal of the root mean square, or of LayerNorm the standard deviation, with epsilon in it.
      mean: LayerNorm's, else None.
    """

    rstd: jax.Array
    mean: jax.Array | None = None


class QuantizedNorm(NamedTuple):
    """What a norm with an 8-bit result gives.

    Attributes:
      quantized: the result.
      residual: the sum of x and the residual, None where none was given.
      y: the result before it is quantised, in x's dtype, None where with_unquantized does not ask for it.
      statistics: of each row, without a gradient.
    """

    quantized: Quantized
    residual: jax.Array | None
    y: jax.Array | None
    statistics: RowStatistics


for _results in (AddedNorm, QK, QKV, RowStatistics, QuantizedNorm):
    export.register_namedtuple_serialization(_results, serialized_name=f"jaxnorm.{_results.__name__}")
