"""The ops of softmax and log-softmax."""

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxnorm.ops import speed
from jaxnorm.ops.logits import several_axes, widened
from jaxnorm.ops.softmax import formula
from jaxnorm.ops.softmax.formula import Operands, SavedOfLog, SavedOfSoftmax, Softmax
from jaxnorm.primitive.family import Family
from jaxnorm.primitive.op import BROADCAST, LIKE_X, CallRows, Derivative, Native, OnlyX, OnlyY, Op, statistics_of
from jaxnorm.primitive.registry import Function, Request
from jaxnorm.sharding import dims

ROLES = {"x": LIKE_X, "where": BROADCAST, "lengths": BROADCAST, "starts": BROADCAST, "y": LIKE_X}


def _types(spec: Softmax, operands: Operands) -> OnlyY:
    return OnlyY(dims.like(operands.x, spec.out_dtype))


def _attributes(spec: Softmax, _: Any) -> dict[str, Any]:
    return {"scale": np.float32(spec.scale)} | ({"window": np.int64(spec.window)} if spec.window is not None else {})


def _slower(_: Softmax, rows: CallRows) -> str | None:
    """Of the result; the gradient's loops go by words of memory."""
    first = 1025 if rows.dtype.itemsize == 2 else 513
    loses = rows.way == "forward" and first <= rows.cols <= 2**14
    return speed.why(rows, f"rows of {first} to {2**14} columns") if loses and not speed.vectors_divide(rows) else None


def _requested(request: Request) -> tuple[Softmax, Operands]:
    spec = Softmax(
        scale=1.0,
        axes=tuple(range(-request.axes, 0)),
        compute_dtype=dims.wide_dtype((request.dtype, request.out_dtype)),
        out_dtype=request.out_dtype,
    )
    return spec, Operands(request.array(request.shape))


def _family(target: str, attributes: Callable[..., dict[str, Any]], **others: Any) -> Family[Softmax, Operands, OnlyY]:
    name = target.removeprefix("jaxnorm_")
    op = Op(
        name=name,
        spec=Softmax,
        operands=Operands,
        results=OnlyY,
        roles=ROLES,
        types=_types,
        native=Native((target,), forward=attributes, backward=attributes, slower=_slower),
        reasons=(several_axes, widened),
        later=("starts",),
        can_shard=lambda *_: True,
        functions=(Function(name, _requested),),
        **others,
    )
    return Family(op)


SOFTMAX = _family(
    "jaxnorm_softmax",
    _attributes,
    forward=formula.softmax,
    plain=formula.plain,
    statistics=lambda *_: [],
    derivative=Derivative(saved=SavedOfSoftmax, variables=OnlyX, linear=formula.linear, backward=formula.backward),
)
LOG_SOFTMAX = _family(
    "jaxnorm_log_softmax",
    lambda spec, arrays: _attributes(spec, arrays) | {"with_top": spec.with_top},
    forward=formula.log_softmax,
    statistics=lambda spec, operands: statistics_of(spec, operands.x, 1 + spec.with_top),
    derivative=Derivative(saved=SavedOfLog, variables=OnlyX, linear=formula.log_linear, backward=formula.log_backward),
)
