"""An L2 norm: all that an op out of the package's tree has to say.

Its structs are in `l2_norm.h`, its kernels in `l2_norm.cc` and `l2_norm.cu`. The tests build those for the CPU, and
run those of CUDA on the host: so elsewhere than on a CPU it has none here.
"""

import dataclasses
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm.ops import checks
from jaxnorm.primitive.family import Family
from jaxnorm.primitive.op import LIKE_X, BatchDims, Derivative, Native, Op, RowSpec, Statistics
from jaxnorm.sharding import dims

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class L2Norm(RowSpec):
    """What is static about one L2 norm."""

    epsilon: float


class Operands(NamedTuple):
    x: jax.Array


class Results(NamedTuple):
    y: jax.Array


class Saved(NamedTuple):
    x: jax.Array
    stats: Statistics


class Variables(NamedTuple, Generic[T]):
    x: T | None = None


def forward(norm: L2Norm, operands: Operands) -> tuple[Results, Statistics]:
    x = operands.x.astype(norm.compute_dtype)
    rlen = lax.rsqrt(jnp.sum(x * x, axis=norm.axes, keepdims=True) + norm.epsilon)
    return Results((x * rlen).astype(norm.out_dtype)), (rlen,)


def linear(norm: L2Norm, saved: Saved, dots: Variables[jax.Array]) -> Results:
    return Results(_derivative(norm, saved, dots.x).astype(norm.out_dtype))


def backward(
    norm: L2Norm, cotangents: Results, saved: Saved, wanted: Variables[np.dtype[Any]], batch_dims: BatchDims
) -> Variables[jax.Array]:
    return Variables(_derivative(norm, saved, cotangents.y).astype(wanted.x))


def _derivative(norm: L2Norm, saved: Saved, v: Any) -> jax.Array:
    """The derivative of y by x applied to v; it is symmetric, so it serves both directions."""
    (rlen,) = saved.stats
    v, y = v.astype(norm.compute_dtype), saved.x.astype(norm.compute_dtype) * rlen
    derivative: jax.Array = (v - y * jnp.sum(v * y, axis=norm.axes, keepdims=True)) * rlen
    return derivative


NATIVE: Native[L2Norm, Operands] = Native(
    names=("toy_l2_norm",),
    forward=lambda norm, operands: {"epsilon": np.float32(norm.epsilon)},
    backward=lambda norm, saved: {},
)
L2_NORM = Family(
    Op(
        name="l2_norm",
        spec=L2Norm,
        operands=Operands,
        results=Results,
        roles={"x": LIKE_X, "y": LIKE_X},
        types=lambda norm, operands: Results(dims.like(operands.x, norm.out_dtype)),
        forward=forward,
        derivative=Derivative(saved=Saved, variables=Variables, linear=linear, backward=backward),
        native=NATIVE if jax.default_backend() == "cpu" else None,
    )
)


def l2_norm(x: Any, *, epsilon: float = 1e-6, implementation: Any = None) -> jax.Array:
    """`y = x * rsqrt(sum(x², -1) + epsilon)`."""
    choice = checks.check_implementation("l2_norm", implementation)
    x = checks.check_x("l2_norm", x)
    norm = L2Norm(
        epsilon=checks.check_epsilon("l2_norm", epsilon),
        compute_dtype=dims.wide_dtype([x.dtype]),
        out_dtype=np.dtype(x.dtype),
        **choice.asks("l2_norm"),
    )
    return L2_NORM(norm, Operands(x), choice.implementation).y
