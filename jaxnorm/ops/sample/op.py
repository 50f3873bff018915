"""The op of `sample`."""

from typing import Any

import numpy as np

from jaxnorm.native import compat
from jaxnorm.ops.sample.formula import Operands, Results, Sample, forward
from jaxnorm.primitive.family import Family
from jaxnorm.primitive.op import BROADCAST, LIKE_X, STATISTIC, CallRows, Native, Op, statistics_of
from jaxnorm.primitive.registry import Function, Request
from jaxnorm.sharding import dims


def _types(spec: Sample, operands: Operands) -> Results:
    ids, log_probs = statistics_of(spec, operands.logits, 2)
    return Results(dims.like(ids, np.dtype(np.int32)), log_probs)


def _split_columns(_: Sample, operands: Operands) -> str | None:
    """Of rows that an Explicit mesh splits; of others it is not known here."""
    if compat.shard_count(operands.logits, -1) == 1:
        return None
    return "the last axis of logits is split over devices, and a kernel draws from whole rows"


def _slower(spec: Sample, rows: CallRows) -> str | None:
    is_greedy = spec.is_greedy and rows.platform == "cuda"  # 14 us for 64 rows of 151936 columns, and the kernel 18
    return "XLA's code is faster for temperature 0" if is_greedy else None


def _requested(request: Request) -> tuple[Sample, Operands]:
    wide = dims.wide_dtype((request.dtype,))
    of_row = request.array((*request.shape[:-1], 1), wide)
    return Sample(compute_dtype=wide, out_dtype=wide), Operands(request.array(request.shape), of_row, of_row)


def _arguments(request: Request) -> dict[str, Any]:
    uniform = request.array(request.shape[:-1], dims.wide_dtype((request.dtype,)))
    return {"logits": request.array(request.shape), "uniform": uniform}


SAMPLE = Family(
    Op(
        name="sample",
        spec=Sample,
        operands=Operands,
        results=Results,
        roles={
            "logits": LIKE_X,
            **dict.fromkeys(("uniform", "temperature", "top_k", "top_p", "min_p"), STATISTIC),
            "where": BROADCAST,
            **dict.fromkeys(Results._fields, STATISTIC),
        },
        types=_types,
        forward=forward,
        statistics=lambda *_: [],
        native=Native(("jaxnorm_sample",), slower=_slower),
        reasons=(_split_columns,),
        functions=(
            Function("sample", _requested, arguments=_arguments, out_dtypes=(np.dtype(np.int32),), last_axis_only=True),
        ),
    )
)
