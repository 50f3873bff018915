"""Named tuples: the results of functions that return several. An exported program may return them too."""

from typing import NamedTuple

import jax
from jax import export

from jaxnorm.quantization import Quantized


class AddedNorm(NamedTuple):
    """The norm of a sum, `y`, and the sum, which is the next `residual`."""

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
    """The statistics of each row of a norm, in float32, with normalised axes of length 1.

    Attributes:
      rstd: 1 / root mean square, for LayerNorm 1 / standard deviation, with epsilon in it.
      mean: LayerNorm's mean, else None.
    """

    rstd: jax.Array
    mean: jax.Array | None = None


class QuantizedNorm(NamedTuple):
    """The results of a norm that quantises.

    Attributes:
      quantized: the 8-bit result.
      residual: the sum of x and residual; None if there is no residual.
      y: the result before it is quantised, in x's dtype; None unless with_unquantized=True.
      statistics: of each row, without a gradient.
    """

    quantized: Quantized
    residual: jax.Array | None
    y: jax.Array | None
    statistics: RowStatistics


for _results in (AddedNorm, QK, QKV, RowStatistics, QuantizedNorm):
    export.register_namedtuple_serialization(_results, serialized_name=f"jaxnorm.{_results.__name__}")
