"""The op of rotary embedding with the norms of queries and keys."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxnorm.native import ffi
from jaxnorm.ops.qk_norm_rotary import formula
from jaxnorm.ops.qk_norm_rotary.formula import STATISTICS, Operands, QKNormRotary, Results, Saved, Variables
from jaxnorm.primitive.family import Family
from jaxnorm.primitive.op import LIKE_X, CallRows, Derivative, Native, Op, Role, statistics_of
from jaxnorm.primitive.registry import Function, Request
from jaxnorm.sharding import dims
from jaxnorm.sharding.dims import DimMap

# The longest head that kernels rotate.
LONGEST = 512
# The most tokens whose queries and keys are decoded together. A loop over a Llama-like model is 0.7 to 0.8 % slower
# with the kernel for 8 and 32 tokens on an H200 (docs/benchmarks/models.md); where they are parts of one product it is
# as fast either way (H100). Of one token the kernel is 2 to 5 % faster.
FEW_TOKENS = 64


def _heads_map(norm: QKNormRotary, ndim: int, shape: Sequence[Any]) -> DimMap:
    """A single key for all queries is on each device that has some of these."""
    heads = ndim + norm.heads_axis
    return tuple(None if axis == heads and shape[axis] == 1 else axis for axis in range(ndim))


def _statistics_map(norm: QKNormRotary, ndim: int, shape: Sequence[Any]) -> DimMap:
    return (*_heads_map(norm, ndim, shape)[:-1], None)


def _positions_map(norm: QKNormRotary, ndim: int, shape: Sequence[Any]) -> DimMap:
    axes = (axis for axis in range(ndim - 1) if axis != ndim + norm.heads_axis)
    return tuple(None if length == 1 else axis for axis, length in zip(axes, shape, strict=True))


def _table_map(norm: QKNormRotary, ndim: int, shape: Sequence[Any]) -> DimMap:
    return (*_positions_map(norm, ndim, shape[:-1]), None)


def _scale_map(norm: QKNormRotary, ndim: int, shape: Sequence[Any]) -> DimMap:
    return (*(None if length == 1 else ndim + norm.heads_axis for length in shape[:-1]), ndim - 1)


HEADS = Role(_heads_map)
TABLE = Role(_table_map)
ROLES = {
    "q": LIKE_X,
    "k": HEADS,
    "q_scale": Role(_scale_map, "formula"),
    "k_scale": Role(_scale_map, "formula", rows_of="k"),
    "positions": Role(_positions_map),
    "frequencies": Role(lambda *_: (None,), "formula"),
    "cos": TABLE,
    "sin": TABLE,
    "q_out": LIKE_X,
    "k_out": HEADS,
    "stats": Role(_statistics_map),
}


def types(_: QKNormRotary, operands: Operands) -> Results:
    return Results(dims.like(operands.q, operands.q.dtype), dims.like(operands.k, operands.k.dtype))


def statistics_types(norm: QKNormRotary, operands: Operands) -> list[Any]:
    return [type_ for x in (operands.q, operands.k) for type_ in statistics_of(norm, x, STATISTICS[norm.norm])]


def _unsaved(norm: QKNormRotary) -> dict[str, str]:
    return {"q": "q_out", "k": "k_out"} if norm.norm == "none" else {}


def head_too_long(_: QKNormRotary, operands: Any) -> str | None:
    cols = operands[0].shape[-1]
    if isinstance(cols, int) and cols > LONGEST:
        return f"heads of {cols} elements are rotated, kernels take at most {LONGEST}"
    return None


def _unequal_dtypes(_: QKNormRotary, operands: Operands) -> str | None:
    q, k = operands.q.dtype, operands.k.dtype
    return None if q == k else f"q is {q} and k {k}; kernels that rotate want them equal"


def other_dtypes(norm: QKNormRotary, operands: Any) -> str | None:
    x, x_name = operands[0].dtype, operands._fields[0]
    if norm.compute_dtype != np.float32:
        name = next((n for n, a in operands._asdict().items() if a is not None and a.dtype not in ffi.DTYPES), x_name)
        return f"{name} is {norm.compute_dtype}, kernels take {', '.join(sorted(d.name for d in ffi.DTYPES))}"
    if norm.out_dtype != x:
        return f"{x_name} is {x} and the result {norm.out_dtype}; kernels that rotate want them equal"
    return None


def attributes(norm: QKNormRotary, _: Any) -> dict[str, Any]:
    return {
        "norm": norm.norm,
        "heads_axis": np.int64(norm.heads_axis),
        "rotary_dim": np.int64(norm.rotary_dim),
        "interleaved": norm.interleaved,
        "scale_offset": np.float32(norm.scale_offset),
    }


def workspace(saved: Any, wanted: Any) -> dict[str, int]:
    """How many gradients of scales are wanted, and for how many heads at most."""
    scales = [(saved.q_scale, wanted.q_scale), (saved.k_scale, wanted.k_scale)]
    heads = [scale.shape[0] for scale, dtype in scales if scale is not None and dtype is not None and scale.ndim > 1]
    return {"weights": sum(dtype is not None for _, dtype in scales), "count": max([1, *heads])}


def slower(spec: Any, rows: CallRows) -> str | None:
    """Of queries and keys, or of these and values in one array."""
    if rows.platform != "cuda" or rows.way != "forward" or rows.differentiated or rows.rows is None:
        return None
    lengths = [*rows.shape[:-1]]
    del lengths[spec.heads_axis + 1]
    if not 1 < math.prod(lengths) <= FEW_TOKENS:
        return None
    return f"XLA's code is faster for 2 to {FEW_TOKENS} tokens, which it fuses with what is around them"


def requested(request: Request) -> tuple[QKNormRotary, Operands]:
    """q and k of this shape, whose last axes are heads and their elements, with RMSNorm."""
    shape = request.shape if len(request.shape) > 1 else (1, *request.shape)
    norm = QKNormRotary(
        norm="rms",
        heads_axis=-2,
        rotary_dim=shape[-1],
        interleaved=False,
        epsilon=1e-6,
        scale_offset=-0.0,
        compute_dtype=dims.wide_dtype((request.dtype,)),
        out_dtype=request.out_dtype,
    )
    q, scale = request.array(shape), request.array(request.scale_shape)
    positions = request.array(shape[:-2], norm.compute_dtype)
    frequencies = request.array((shape[-1] // 2,), norm.compute_dtype)
    return norm, Operands(q, q, scale, scale, positions, frequencies)


def weights_of(request: Request) -> dict[str, Any]:
    """The arguments of such a call beside q and k."""
    scale = request.array(request.scale_shape)
    return {"q_scale": scale, "k_scale": scale, "positions": request.array(request.shape[:-2], np.dtype(np.int32))}


QK_NORM_ROTARY = Family(
    Op(
        name="qk_norm_rotary",
        spec=QKNormRotary,
        operands=Operands,
        results=Results,
        roles=ROLES,
        types=types,
        forward=formula.forward,
        plain=formula.plain,
        statistics=statistics_types,
        derivative=Derivative(
            saved=Saved, variables=Variables, linear=formula.linear, backward=formula.backward, unsaved=_unsaved
        ),
        native=Native(
            names=("jaxnorm_qk_norm_rotary",),
            forward=lambda norm, operands: {**attributes(norm, operands), "epsilon": np.float32(norm.epsilon)},
            backward=attributes,
            workspace=workspace,
            slower=slower,
        ),
        reasons=(head_too_long, _unequal_dtypes, other_dtypes),
        linear_in=lambda _: ("q_scale", "k_scale"),
        functions=(
            Function(
                "qk_norm_rotary",
                requested,
                arguments=lambda request: {name: request.array(request.shape) for name in "qk"} | weights_of(request),
                last_axis_only=True,
                shape=(8, 2048, 32, 128),
            ),
        ),
    )
)
