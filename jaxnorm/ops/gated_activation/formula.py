"""The gated activation in plain jnp: what is static about it, and its formulas.

x has the gate and what it gates, `up`, along its last axis but one, or is the gate alone and `up` an array like it. For
a derivative these operands are kept and nothing else.
"""

import dataclasses
from typing import Any, Generic, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxnorm.ops.activation import FORMULAS, Formula
from jaxnorm.primitive.op import BatchDims, Dtype, OnlyY, RowSpec, Statistics, T

Activation = Literal["silu", "gelu", "gelu_exact", "relu2", "sigmoid"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedActivation(RowSpec):
    """What is static about one gated activation, whose rows are those of x's last axis, or last two."""

    activation: Activation = "silu"
    quantization: Any = None  # of the result a `Quantization`, and what follows belongs to it
    straight_through: bool = False

    @property
    def joint_axes(self) -> tuple[int, ...]:
        """A column depends on no other, but for the scale that it shares with others."""
        has_scales = self.quantization is not None and self.quantization.granularity != "tensor"
        return (-1,) if has_scales else ()

    @property
    def whole_axes(self) -> tuple[int, ...]:
        """A column of the gate goes with that of `up`."""
        return self.axes[:-1]

    def unquantized(self, out_dtype: Dtype) -> "GatedActivation":
        return dataclasses.replace(self, out_dtype=out_dtype, quantization=None, straight_through=False)

    @property
    def formula(self) -> Formula:
        return FORMULAS[self.activation]


class Operands(NamedTuple):
    x: jax.Array
    up: jax.Array | None = None


class Saved(NamedTuple):
    x: jax.Array
    up: jax.Array | None = None


class Variables(NamedTuple, Generic[T]):
    x: T | None = None
    up: T | None = None


class _Parts(NamedTuple):
    """Arrays like the gate and `up`, wide; one that is zero or not wanted is None."""

    gate: Any
    up: Any


def _parts(spec: GatedActivation, arrays: Any) -> _Parts:
    x, up = (None if array is None else array.astype(spec.compute_dtype) for array in arrays)
    if spec.row_ndim == 1 or x is None:
        return _Parts(x, up)
    return _Parts(x[..., 0, :], x[..., 1, :])


def forward(spec: GatedActivation, operands: Operands) -> tuple[OnlyY, Statistics]:
    """`activation(gate) * up`."""
    gate, up = _parts(spec, operands)
    return OnlyY((spec.formula.of(gate) * up).astype(spec.out_dtype)), ()


def linear(spec: GatedActivation, saved: Saved, dots: Variables[jax.Array]) -> OnlyY:
    (gate, up), (gate_dot, up_dot) = _parts(spec, saved), _parts(spec, dots)
    terms = [] if gate_dot is None else [spec.formula.sloped(gate_dot * up, gate)]
    terms += [] if up_dot is None else [spec.formula.of(gate) * up_dot]
    return OnlyY(sum(terms[1:], terms[0]).astype(spec.out_dtype))


def backward(
    spec: GatedActivation, cotangents: OnlyY, saved: Saved, wanted: Variables[Dtype], _: BatchDims
) -> Variables[jax.Array]:
    gate, up = _parts(spec, saved)
    dy = cotangents.y.astype(spec.compute_dtype)
    dgate, dup = spec.formula.sloped(dy * up, gate), dy * spec.formula.of(gate)
    if spec.row_ndim == 2:
        return Variables(jnp.stack([dgate.astype(wanted.x), dup.astype(wanted.x)], -2))
    of_each = zip((dgate, dup), wanted, strict=True)
    return Variables(*(None if dtype is None else gradient.astype(dtype) for gradient, dtype in of_each))
