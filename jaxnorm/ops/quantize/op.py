"""The op of an array that is quantised by rows, or by groups of their columns; its derivative is by convention."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm.ops import speed
from jaxnorm.ops.quantize import rounding
from jaxnorm.primitive.decide import Call
from jaxnorm.primitive.family import Family
from jaxnorm.primitive.op import LIKE_X, CallRows, Convention, Native, Op, Role, RowSpec, Statistics
from jaxnorm.primitive.registry import Function, Request
from jaxnorm.quantization import LARGEST, LARGEST_OF_WEIGHTS, Quantization
from jaxnorm.sharding import dims
from jaxnorm.sharding.dims import DimMap

DTYPES = tuple(map(np.dtype, (np.float32, jax.numpy.bfloat16, np.float16)))
OUT_DTYPES = (*LARGEST, *LARGEST_OF_WEIGHTS)
_NO_DERIVATIVE = (
    "{function}: rounded values have no derivative, and one is taken; pass straight_through=True for that of {name} "
    "itself, or apply jax.lax.stop_gradient to {name}, not to the result."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantize(RowSpec):
    """What is static about one call, whose axes share a scale, or groups of the last one."""

    quantization: Quantization
    straight_through: bool = False
    function: tuple[str, str] = ("quantize", "x")  # of whose argument errors speak

    @property
    def derivative(self) -> rounding.Derivative:
        function, name = self.function
        return rounding.Derivative(self.straight_through, _NO_DERIVATIVE.format(function=function, name=name))


class Operands(NamedTuple):
    x: jax.Array


class ByColumns(NamedTuple):
    """What rounds a matrix of DTYPES by columns, with a kernel."""

    bind: Callable[[Quantization, jax.Array], tuple[jax.Array, jax.Array]]  # to (columns, rows) and (columns, 1)
    call: Callable[[Any], Call]  # by the type of the matrix


BY_COLUMNS: dict[np.dtype, ByColumns] = {}  # by the dtype that is rounded to; an op that has one adds it


class Results(NamedTuple):
    values: jax.Array
    scales: jax.Array
    carrier: jax.Array | None = None  # zeros that straight_through asks for


def _scales_map(spec: Quantize, ndim: int, _: Sequence[Any]) -> DimMap:
    return dims.like_x(ndim) if spec.quantization.group_size else dims.per_row(ndim, spec.axes)


def _types(spec: Quantize, operands: Operands) -> Results:
    x: Any = operands.x
    group = spec.quantization.group_size
    lengths = [1 if axis - x.ndim in spec.axes else length for axis, length in enumerate(x.shape)]
    of_scales = (*x.shape[:-1], x.shape[-1] // group) if group else tuple(lengths)
    like_x = dims.like_x(x.ndim)
    return Results(
        values=dims.result_like(x, like_x, x.shape, spec.quantization.dtype),
        scales=dims.result_like(x, _scales_map(spec, x.ndim, of_scales), of_scales, np.float32),
        carrier=dims.result_like(x, like_x, x.shape, x.dtype) if spec.straight_through else None,
    )


def forward(spec: Quantize, operands: Operands) -> tuple[Results, Statistics]:
    x = operands.x
    v, _, carrier = rounding.straight_through(spec.derivative, x.astype(np.float32), None, x.dtype)
    return Results(*rounding.rounded(spec.quantization, v, spec.axes, None, spec.shards), carrier), ()


def of_kernel(spec: Quantize, kernel: jax.Array) -> Results:
    """The kernel of a linear layer, with its last two axes swapped but for the carrier."""
    v, _, carrier = rounding.straight_through(spec.derivative, kernel, None, kernel.dtype)
    by_columns = by_columns_of(spec.quantization, kernel)
    if by_columns is not None:
        bind = functools.partial(by_columns.bind, spec.quantization)
        for _ in kernel.shape[2:]:
            bind = jax.vmap(bind)
        return Results(*bind(v), carrier)
    wide = jnp.swapaxes(v, -1, -2).astype(np.float32)
    return Results(*rounding.rounded(spec.quantization, wide, spec.axes), carrier)


def by_columns_of(quantization: Quantization, kernel: Any) -> ByColumns | None:
    """That of BY_COLUMNS which rounds a kernel, or one of this type."""
    is_plain = quantization.granularity == "token" and quantization.max_scale is None
    return BY_COLUMNS.get(quantization.dtype) if is_plain and kernel.dtype in DTYPES else None


def _tangents(
    spec: Quantize, operands: Operands, results: Results, stats: Statistics, dots: Operands
) -> tuple[Results, Callable[[], Sequence[Any]]]:
    """That of the carrier, which is x's."""
    rounding.check(spec.derivative)
    return Results(None, None, carrier=dots.x), lambda: ()  # type: ignore[arg-type]


def _unserved(spec: Quantize, _: Operands) -> str | None:
    if spec.quantization.granularity == "tensor":
        return "all of x shares a scale, which no kernel finds"
    dtype = spec.quantization.dtype
    return None if dtype in LARGEST else f"the result is {dtype}, kernels give {', '.join(d.name for d in LARGEST)}"


def _attributes(spec: Quantize, _: Operands) -> dict[str, Any]:
    no_more = {"has_given": False, "has_smooth": False}
    return {"axes": np.int64(spec.row_ndim)} | rounding.attributes(spec.quantization) | no_more


# The most columns of a row that XLA's code for CPUs is faster for; measured on 2 cores of an AMD EPYC with AVX-512,
# 4 million elements: of 4 columns it takes 0.6 to 0.9 of the time, of 16 it takes 1.4 to 6.7 times as long.
SHORT = 8


def _slower(spec: Quantize, rows: CallRows) -> str | None:
    if rows.platform == "cpu":
        is_short = rows.cols <= SHORT
        return f"XLA's code is faster for rows of at most {SHORT} columns" if is_short else None
    return speed.by_elements(rows)


def _requested(request: Request) -> tuple[Quantize, Operands]:
    spec = Quantize(axes=tuple(range(-request.axes, 0)), quantization=Quantization(request.out_dtype))
    return spec, Operands(request.array(request.shape))


QUANTIZE = Family(
    Op(
        name="quantize",
        spec=Quantize,
        operands=Operands,
        results=Results,
        roles={"x": LIKE_X, "values": LIKE_X, "scales": Role(_scales_map), "carrier": LIKE_X},
        types=_types,
        forward=forward,
        statistics=lambda *_: [],
        convention=Convention(carrier="carrier", tangents=_tangents),
        native=Native(names=("jaxnorm_quantize",), forward=_attributes, slower=_slower),
        reasons=(_unserved,),
        can_shard=rounding.can_shard,
        static_types=(Quantization,),
        functions=(Function("quantize", _requested, dtypes=DTYPES, out_dtypes=OUT_DTYPES),),
    )
)
