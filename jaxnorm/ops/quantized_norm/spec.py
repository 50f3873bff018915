"""What is static about a quantised norm, and its operands and results."""

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxnorm.ops.norm import formula
from jaxnorm.ops.norm.formula import Norm
from jaxnorm.quantization import Quantization


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedNorm(Norm):
    """What is static about one quantised norm."""

    quantization: Quantization
    straight_through: bool = False
    with_unquantized: bool = False

    def unquantized(self, out_dtype: np.dtype[Any]) -> Norm:
        """The norm whose result is quantised."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(Norm)}
        return Norm(**fields | {"out_dtype": out_dtype})


class Operands(NamedTuple):
    x: jax.Array
    residual: jax.Array | None = None
    scale: jax.Array | None = None
    bias: jax.Array | None = None
    smooth: jax.Array | None = None
    given: jax.Array | None = None  # the scale of everything

    def of_norm(self) -> formula.Operands:
        return formula.Operands(self.x, self.residual, self.scale, self.bias)


class Results(NamedTuple):
    values: jax.Array
    scales: jax.Array | None = None  # None where the scale is given
    y: jax.Array | None = None  # of x's dtype, where it is wanted
    sum: jax.Array | None = None
    carrier: jax.Array | None = None  # zeros that straight_through asks for
