"""The gated RMSNorm as an op: what its kernels take, and its record."""

from typing import Any

import jax
import numpy as np

from jaxnorm.ops import speed
from jaxnorm.ops.gated_norm.formula import (
    Dtype,
    GatedNorm,
    Operands,
    Results,
    Saved,
    Variables,
    backward,
    forward,
    linear,
    plain,
)
from jaxnorm.primitive.described import Function, Request
from jaxnorm.primitive.family import Family
from jaxnorm.primitive.op import LIKE_X, WEIGHT, Derivative, Native, Op
from jaxnorm.sharding import dims

# The longest row that kernels gate.
LONGEST = 1 << 14


def _types(norm: GatedNorm, operands: Operands) -> Results:
    return Results(dims.like(operands.x, norm.out_dtype))


def row_too_long(_: GatedNorm, operands: Any) -> str | None:
    cols = operands.x.shape[-1]
    if isinstance(cols, int) and cols > LONGEST:
        return f"rows of {cols} elements are normalised, kernels with a gate take at most {LONGEST}"
    return None


def gate_of_another_dtype(_: GatedNorm, operands: Any) -> str | None:
    return _unlike_x(operands.x, "gate", operands.gate.dtype)


def _result_of_another_dtype(norm: GatedNorm, operands: Operands) -> str | None:
    return _unlike_x(operands.x, "the result", norm.out_dtype)


def _unlike_x(x: jax.Array, name: str, dtype: Dtype) -> str | None:
    return None if dtype == x.dtype else f"x is {x.dtype} and {name} {dtype}; kernels with a gate want them equal"


def _attributes(norm: GatedNorm, operands: Operands | Saved) -> dict[str, Any]:
    return {
        "scale_offset": np.float32(norm.scale_offset),
        "activation": norm.activation,
        "gate_first": norm.gate_first,
        "grouped": operands.scale is not None and operands.scale.ndim == 2,
    }


def _requested(request: Request) -> tuple[GatedNorm, Operands]:
    norm = GatedNorm(
        epsilon=1e-6,
        scale_offset=-0.0,
        activation="silu",
        gate_first=True,
        compute_dtype=dims.wide_dtype((request.dtype, request.out_dtype)),
        out_dtype=request.out_dtype,
    )
    x = request.array(request.shape)
    return norm, Operands(x, x, request.array(request.scale_shape))


GATED_NORM = Family(
    Op(
        name="gated_norm",
        spec=GatedNorm,
        operands=Operands,
        results=Results,
        roles={"x": LIKE_X, "gate": LIKE_X, "scale": WEIGHT, "y": LIKE_X},
        types=_types,
        forward=forward,
        plain=plain,
        derivative=Derivative(
            saved=Saved,
            variables=Variables,
            linear=linear,
            backward=backward,
        ),
        native=Native(
            names=("jaxnorm_gated_rms_norm",),
            name=lambda _: "jaxnorm_gated_rms_norm",
            forward=lambda norm, operands: {**_attributes(norm, operands), "epsilon": np.float32(norm.epsilon)},
            backward=_attributes,
            plan=lambda norm, _: {"kind": "rms", "gated": "first" if norm.gate_first else "last"},
            slower=speed.any_kernel,
        ),
        reasons=(row_too_long, gate_of_another_dtype, _result_of_another_dtype),
        can_shard=lambda *_: True,
        functions=(Function("gated_rms_norm", _requested, last_axis_only=True),),
    )
)
