"""The gated activation with a quantised result: formula, derivative by convention, record, and public function."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxnorm.ops import checks
from jaxnorm.ops.activation import Synonym
from jaxnorm.ops.gated_activation import formula
from jaxnorm.ops.gated_activation.api import check_call
from jaxnorm.ops.gated_activation.formula import Activation, GatedActivation
from jaxnorm.ops.gated_activation.op import GATED_ACTIVATION, ROLES, attributes, requested, result_map, unlike_dtypes
from jaxnorm.ops.misuse import explained
from jaxnorm.ops.options import Implementation
from jaxnorm.ops.quantize import checks as quantize_checks, rounding
from jaxnorm.primitive.family import Family
from jaxnorm.primitive.op import SCALAR, CallRows, Convention, Native, Op, Role, Statistics
from jaxnorm.primitive.registry import Request
from jaxnorm.quantization import LARGEST, Quantization, Quantized, quantized
from jaxnorm.sharding import dims
from jaxnorm.sharding.dims import DimMap

NAME = "gated_activation_quantized"


class Operands(NamedTuple):
    x: jax.Array
    up: jax.Array | None = None
    given: jax.Array | None = None  # the scale of everything

    def of_gates(self) -> formula.Operands:
        return formula.Operands(self.x, self.up)


class Results(NamedTuple):
    values: jax.Array
    scales: jax.Array | None = None  # None where the scale is given
    carrier: jax.Array | None = None  # zeros that straight_through asks for


def _scales_map(spec: GatedActivation, ndim: int, shape: Sequence[Any]) -> DimMap:
    of_result = result_map(spec, ndim, shape)
    assert spec.quantization is not None
    return of_result if spec.quantization.group_size else (*of_result[:-1], None)


def _types(spec: GatedActivation, operands: Operands) -> Results:
    x: Any = operands.x
    assert spec.quantization is not None
    shape = (*x.shape[: -spec.row_ndim], x.shape[-1])
    group = spec.quantization.group_size
    of_scales = (*shape[:-1], shape[-1] // group if group else 1)

    def like_result(dtype: Any) -> Any:
        return dims.result_like(x, result_map(spec, x.ndim, shape), shape, dtype)

    return Results(
        values=like_result(spec.quantization.dtype),
        scales=None
        if operands.given is not None
        else dims.result_like(x, _scales_map(spec, x.ndim, of_scales), of_scales, np.float32),
        carrier=like_result(_carrier_dtype(operands)) if spec.straight_through else None,
    )


def _carrier_dtype(operands: Operands) -> Any:
    up: Any = operands.x if operands.up is None else operands.up
    return jax.numpy.result_type(operands.x.dtype, up.dtype)


def _derivative(spec: GatedActivation) -> rounding.Derivative:
    return rounding.Derivative(
        spec.straight_through,
        f"{NAME}: rounded values have no derivative, and one is taken; pass straight_through=True for that of the "
        f"result before it is quantised; or apply jax.lax.stop_gradient to the operands, not to the result.",
    )


def _forward(spec: GatedActivation, operands: Operands) -> tuple[Results, Statistics]:
    assert spec.quantization is not None
    (y,), _ = formula.forward(spec, operands.of_gates())
    given = operands.given
    if spec.straight_through and given is not None:
        given = jax.lax.stop_gradient(given)
    v, given, carrier = rounding.straight_through(_derivative(spec), y, given, _carrier_dtype(operands))
    values, scales = rounding.rounded(spec.quantization, v, (-1,), given, spec.shards)
    return Results(values, scales if given is None else None, carrier), ()


def _tangents(
    spec: GatedActivation, operands: Operands, results: Results, stats: Statistics, dots: Operands
) -> tuple[Results, Callable[[], Sequence[Any]]]:
    """That of the carrier, as of the result before it is quantised."""
    rounding.check(_derivative(spec))
    unquantized = spec.unquantized(np.dtype(_carrier_dtype(operands)))
    of_gates = formula.Results(results.carrier)  # type: ignore[arg-type]
    (y_dot,), of_stats = GATED_ACTIVATION.tangents(unquantized, operands.of_gates(), of_gates, stats, dots.of_gates())
    return Results(None, carrier=y_dot), of_stats  # type: ignore[arg-type]


def _attributes(spec: GatedActivation, operands: Operands) -> dict[str, Any]:
    assert spec.quantization is not None
    max_scale = spec.quantization.max_scale
    return attributes(spec, operands) | {
        "group": np.int64(spec.quantization.group_size or 0),
        "max_scale": np.float32(np.inf if max_scale is None else max_scale),
        "power_of_two": spec.quantization.power_of_two,
        "has_smooth": False,
    }


def _can_shard(spec: GatedActivation, cols: int) -> bool:
    """A shard holds whole groups that share a scale."""
    group = None if spec.quantization is None else spec.quantization.group_size
    return group is None or cols % group == 0


# The most columns of a row with a scale of its own that XLA's code for CPUs may be faster for; measured on 2 cores of
# an AMD EPYC with AVX-512, 100000 rows: 0.5 to 1.7 times as fast up to 48 columns.
SHORT = 64


def _slower(spec: GatedActivation, rows: CallRows) -> str | None:
    cols = rows.shape[-1]
    if rows.platform == "cpu":
        short = spec.joint_axes and spec.quantization is not None and not spec.quantization.group_size and cols <= SHORT
        return f"XLA's code may be faster for rows of at most {SHORT} columns" if short else None
    divides = cols * rows.dtype.itemsize % 16 == 0
    return None if divides else f"16-byte vectors do not divide a row of {cols} columns, and kernels go by elements"


def _requested(request: Request) -> tuple[GatedActivation, Operands]:
    # What is quantised is float32.
    spec, operands = requested(request._replace(out_dtype=np.dtype(np.float32)))
    return dataclasses.replace(spec, quantization=Quantization(request.out_dtype)), Operands(*operands)


GATED_ACTIVATION_QUANTIZED = Family(
    Op(
        name=NAME,
        spec=GatedActivation,
        operands=Operands,
        results=Results,
        roles=ROLES | {"given": SCALAR, "values": ROLES["y"], "scales": Role(_scales_map), "carrier": ROLES["y"]},
        types=_types,
        forward=_forward,
        statistics=lambda *_: [],
        convention=Convention(carrier="carrier", tangents=_tangents),
        native=Native(
            names=(f"jaxnorm_{NAME}",), name=lambda _: f"jaxnorm_{NAME}", forward=_attributes, slower=_slower
        ),
        reasons=(unlike_dtypes,),
        can_shard=_can_shard,
        static_types=(Quantization,),
        functions=(
            dataclasses.replace(
                GATED_ACTIVATION.op.functions[0], name=NAME, request=_requested, out_dtypes=tuple(LARGEST)
            ),
        ),
    )
)


@explained
def gated_activation_quantized(
    x: Any,
    *,
    quantization: Quantization,
    activation: Activation | Synonym = "silu",
    static_scale: Any = None,
    axis: int = -1,
    straight_through: bool = False,
    implementation: Implementation | None = None,
) -> Quantized:
    """Multiplies what a gate lets through by an activation of the gate and quantises the result to 8 bits.

        v = gated_activation(x.astype(float32), ...)

        >>> q = gated_activation_quantized(jnp.ones((2, 16)), quantization=Quantization("int8"))

    and from there as `rms_norm_quantized`, whose dtypes, bits, derivative and errors these are: scales are of each row
    of the result, or of groups of its columns. With straight_through=True the gradient of x is that of
    `gated_activation`, in one native call.

    Args:
      x: array of float32, bfloat16 or float16, or a tuple of two, as for `gated_activation`, as are all options but
        those of `rms_norm_quantized`: quantization, static_scale and straight_through.

    Returns:
      A `Quantized`: values (..., columns), scales, a carrier.

    Raises:
      ValueError, TypeError, RuntimeError: as `gated_activation` and `rms_norm_quantized` do.

    Source: those of `gated_activation` and `rms_norm_quantized`.
    """
    spec, of_gates, chosen = check_call(NAME, x, axis, activation, implementation)
    named = {"x": of_gates.x} if of_gates.up is None else {"gate": of_gates.x, "up": of_gates.up}
    _check_groups(quantization, of_gates.x.shape[-1])
    quantize_checks.check_quantization(NAME, quantization, Quantization, of_gates.x, (-1,))
    quantize_checks.check_activations(NAME, quantization, LARGEST)
    given = quantize_checks.check_static_scale(NAME, static_scale, quantization.granularity)
    quantize_checks.check_float32(NAME, named)
    spec = dataclasses.replace(
        spec,
        out_dtype=np.dtype(np.float32),
        quantization=quantization,
        straight_through=checks.check_flag(NAME, "straight_through", straight_through),
    )
    results = GATED_ACTIVATION_QUANTIZED(spec, Operands(*of_gates, given), chosen)
    scales: Any = results.scales if given is None else given
    return quantized(quantization, results.values, scales, results.carrier)


def _check_groups(quantization: Any, cols: Any) -> None:
    group_size = getattr(quantization, "group_size", None)
    if group_size is not None and not (isinstance(cols, int) and cols % group_size == 0):
        raise ValueError(
            f"{NAME}: group_size {group_size} does not divide the {cols} columns of the result; take another "
            f"group_size or granularity='token'."
        )
