"""The ops of gated activations, without and with a quantised result, whose derivative is by convention."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxnorm.ops import speed
from jaxnorm.ops.gated_activation import formula
from jaxnorm.ops.gated_activation.formula import GatedActivation, Operands, Saved, Variables
from jaxnorm.ops.quantize import rounding
from jaxnorm.primitive.family import Family
from jaxnorm.primitive.op import LIKE_X, SCALAR, CallRows, Convention, Derivative, Native, OnlyY, Op, Role, Statistics
from jaxnorm.primitive.registry import Function, Request
from jaxnorm.quantization import LARGEST, Quantization
from jaxnorm.sharding import dims
from jaxnorm.sharding.dims import DimMap


def _result_map(spec: GatedActivation, ndim: int, _: Sequence[Any]) -> DimMap:
    """Without the axis of x that has the gate and `up`."""
    return (*range(ndim - spec.row_ndim), ndim - 1)


def _types(spec: GatedActivation, operands: Operands) -> OnlyY:
    x: Any = operands.x
    shape = (*x.shape[: -spec.row_ndim], x.shape[-1])
    return OnlyY(dims.result_like(x, _result_map(spec, x.ndim, shape), shape, spec.out_dtype))


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


def _unlike_dtypes(_: GatedActivation, operands: Any) -> str | None:
    gate, up = operands.x.dtype, operands.x.dtype if operands.up is None else operands.up.dtype
    return None if gate == up else f"gate is {gate} and up {up}; kernels of gates want them equal"


def _attributes(spec: GatedActivation, _: Any) -> dict[str, Any]:
    return {"activation": spec.activation}


def _requested(request: Request) -> tuple[GatedActivation, Operands]:
    """A packed x of this shape."""
    *others, both = request.shape
    spec = GatedActivation(axes=(-2, -1), compute_dtype=dims.wide_dtype((request.dtype,)), out_dtype=request.out_dtype)
    return spec, Operands(request.array((*others, 2, both // 2)))


QUANTIZED = "gated_activation_quantized"
ROLES = {"x": LIKE_X, "up": LIKE_X, "y": Role(_result_map)}
GATED_ACTIVATION = Family(
    Op(
        name="gated_activation",
        spec=GatedActivation,
        operands=Operands,
        results=OnlyY,
        roles=ROLES,
        types=_types,
        forward=formula.forward,
        statistics=lambda *_: [],
        derivative=Derivative(saved=Saved, variables=Variables, linear=formula.linear, backward=formula.backward),
        native=Native(
            names=("jaxnorm_gated_activation",),
            forward=_attributes,
            backward=_attributes,
            slower=_slower,
        ),
        reasons=(_unlike_dtypes,),
        linear_in=lambda spec: ("up",) if spec.row_ndim == 1 else (),
        functions=(
            Function(
                "gated_activation",
                _requested,
                last_axis_only=True,
                shape=(8192, 2 * 14336),
                over=lambda shape: f", a gate of {shape[-1] // 2} columns and as many that it gates",
            ),
        ),
    )
)


class QuantizedOperands(NamedTuple):
    x: jax.Array
    up: jax.Array | None = None
    given: jax.Array | None = None  # the scale of everything

    def of_gates(self) -> Operands:
        return Operands(self.x, self.up)


class QuantizedResults(NamedTuple):
    values: jax.Array
    scales: jax.Array | None = None  # None where the scale is given
    carrier: jax.Array | None = None  # zeros that straight_through asks for


def _scales_map(spec: GatedActivation, ndim: int, shape: Sequence[Any]) -> DimMap:
    of_result = _result_map(spec, ndim, shape)
    return of_result if spec.quantization.group_size else (*of_result[:-1], None)


def _quantized_types(spec: GatedActivation, operands: QuantizedOperands) -> QuantizedResults:
    x: Any = operands.x
    shape = (*x.shape[: -spec.row_ndim], x.shape[-1])
    group = spec.quantization.group_size
    of_scales = (*shape[:-1], shape[-1] // group if group else 1)

    def like_result(dtype: Any) -> Any:
        return dims.result_like(x, _result_map(spec, x.ndim, shape), shape, dtype)

    return QuantizedResults(
        values=like_result(spec.quantization.dtype),
        scales=None
        if operands.given is not None
        else dims.result_like(x, _scales_map(spec, x.ndim, of_scales), of_scales, np.float32),
        carrier=like_result(_carrier_dtype(operands)) if spec.straight_through else None,
    )


def _carrier_dtype(operands: QuantizedOperands) -> Any:
    up: Any = operands.x if operands.up is None else operands.up
    return jax.numpy.result_type(operands.x.dtype, up.dtype)


def _derivative(spec: GatedActivation) -> rounding.Derivative:
    return rounding.Derivative(
        spec.straight_through,
        f"{QUANTIZED}: rounded values have no derivative, and one is taken; pass straight_through=True for that of the "
        f"result before it is quantised; or apply jax.lax.stop_gradient to the operands, not to the result.",
    )


def _quantized_forward(spec: GatedActivation, operands: QuantizedOperands) -> tuple[QuantizedResults, Statistics]:
    (y,), _ = formula.forward(spec, operands.of_gates())
    given = operands.given
    if spec.straight_through and given is not None:
        given = jax.lax.stop_gradient(given)
    v, given, carrier = rounding.straight_through(_derivative(spec), y, given, _carrier_dtype(operands))
    values, scales = rounding.rounded(spec.quantization, v, (-1,), given, spec.shards)
    return QuantizedResults(values, scales if given is None else None, carrier), ()


def _tangents(
    spec: GatedActivation,
    operands: QuantizedOperands,
    results: QuantizedResults,
    stats: Statistics,
    dots: QuantizedOperands,
) -> tuple[QuantizedResults, Callable[[], Sequence[Any]]]:
    """That of the carrier, as of the result before it is quantised."""
    rounding.check(_derivative(spec))
    unquantized = spec.unquantized(np.dtype(_carrier_dtype(operands)))
    of_gates = OnlyY(results.carrier)  # type: ignore[arg-type]
    (y_dot,), of_stats = GATED_ACTIVATION.tangents(unquantized, operands.of_gates(), of_gates, stats, dots.of_gates())
    return QuantizedResults(None, carrier=y_dot), of_stats  # type: ignore[arg-type]


def _quantized_attributes(spec: GatedActivation, operands: QuantizedOperands) -> dict[str, Any]:
    return _attributes(spec, operands) | rounding.attributes(spec.quantization) | {"has_smooth": False}


# The most columns of a row with a scale of its own that XLA's code for CPUs may be faster for; measured on 2 cores of
# an AMD EPYC with AVX-512, 100000 rows: 0.5 to 1.7 times as fast up to 48 columns.
SHORT_ROW = 64


def _slower_quantized(spec: GatedActivation, rows: CallRows) -> str | None:
    cols = rows.shape[-1]
    if rows.platform == "cpu":
        short = spec.joint_axes and not spec.quantization.group_size and cols <= SHORT_ROW
        return f"XLA's code may be faster for rows of at most {SHORT_ROW} columns" if short else None
    return speed.by_elements(rows._replace(cols=cols))


GATED_ACTIVATION_QUANTIZED = Family(
    Op(
        name=QUANTIZED,
        spec=GatedActivation,
        operands=QuantizedOperands,
        results=QuantizedResults,
        roles=ROLES | {"given": SCALAR, "values": ROLES["y"], "scales": Role(_scales_map), "carrier": ROLES["y"]},
        types=_quantized_types,
        forward=_quantized_forward,
        statistics=lambda *_: [],
        convention=Convention(carrier="carrier", tangents=_tangents),
        native=Native(
            names=(f"jaxnorm_{QUANTIZED}",),
            forward=_quantized_attributes,
            slower=_slower_quantized,
        ),
        reasons=(_unlike_dtypes,),
        can_shard=rounding.can_shard,
        static_types=(Quantization,),
        functions=(
            dataclasses.replace(
                GATED_ACTIVATION.op.functions[0],
                name=QUANTIZED,
                request=rounding.requested(_requested, QuantizedOperands),
                out_dtypes=tuple(LARGEST),
            ),
        ),
    )
)
