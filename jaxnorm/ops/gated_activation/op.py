"""The op of gated activations."""

from collections.abc import Sequence
from typing import Any

from jaxnorm.ops.gated_activation.formula import (
    GatedActivation,
    Operands,
    Results,
    Saved,
    Variables,
    backward,
    forward,
    linear,
)
from jaxnorm.primitive.family import Family
from jaxnorm.primitive.op import LIKE_X, CallRows, Derivative, Native, Op, Role
from jaxnorm.primitive.registry import Function, Request
from jaxnorm.sharding import dims
from jaxnorm.sharding.dims import DimMap


def result_map(spec: GatedActivation, ndim: int, _: Sequence[Any]) -> DimMap:
    """Without the axis of x that has the gate and `up`."""
    return (*range(ndim - spec.row_ndim), ndim - 1)


def _types(spec: GatedActivation, operands: Operands) -> Results:
    x: Any = operands.x
    shape = (*x.shape[: -spec.row_ndim], x.shape[-1])
    return Results(dims.result_like(x, result_map(spec, x.ndim, shape), shape, spec.out_dtype))


# The most columns of a packed row that XLA's code for CPUs is faster for; measured on 2 cores of an AMD EPYC with
# AVX-512, 100000 rows: XLA takes 0.2 to 0.8 of the time.
SHORT = {"forward": 8, "backward": 4}


def _slower(spec: GatedActivation, rows: CallRows) -> str | None:
    """On a GPU XLA's code for the result is one loop at the copy rate, which it can join with what is around it. Of the
    gradient it makes several loops between products, see docs/benchmarks/gpu.md.
    """
    packed = spec.row_ndim == 2
    if rows.platform == "cpu":
        short = packed and rows.shape[-1] <= SHORT[rows.way]
        return f"XLA's code is faster for rows of at most {SHORT[rows.way]} columns" if short else None
    is_loop = rows.way == "forward"
    return "XLA's code for it is one loop, which it may join with what is around it" if is_loop else None


def unlike_dtypes(_: GatedActivation, operands: Any) -> str | None:
    gate, up = operands.x.dtype, operands.x.dtype if operands.up is None else operands.up.dtype
    return None if gate == up else f"gate is {gate} and up {up}; kernels of gates want them equal"


def attributes(spec: GatedActivation, _: Any) -> dict[str, Any]:
    return {"activation": spec.activation}


def requested(request: Request) -> tuple[GatedActivation, Operands]:
    """A packed x of this shape."""
    *others, both = request.shape
    spec = GatedActivation(axes=(-2, -1), compute_dtype=dims.wide_dtype((request.dtype,)), out_dtype=request.out_dtype)
    return spec, Operands(request.array((*others, 2, both // 2)))


ROLES = {"x": LIKE_X, "up": LIKE_X, "y": Role(result_map)}
GATED_ACTIVATION = Family(
    Op(
        name="gated_activation",
        spec=GatedActivation,
        operands=Operands,
        results=Results,
        roles=ROLES,
        types=_types,
        forward=forward,
        statistics=lambda *_: [],
        derivative=Derivative(saved=Saved, variables=Variables, linear=linear, backward=backward),
        native=Native(
            names=("jaxnorm_gated_activation",),
            name=lambda _: "jaxnorm_gated_activation",
            forward=attributes,
            backward=attributes,
            slower=_slower,
        ),
        reasons=(unlike_dtypes,),
        linear_in=lambda spec: ("up",) if spec.row_ndim == 1 else (),
        functions=(
            Function(
                "gated_activation",
                requested,
                last_axis_only=True,
                shape=(8192, 2 * 14336),
                over=lambda shape: f", a gate of {shape[-1] // 2} columns and as many that it gates",
            ),
        ),
    )
)
