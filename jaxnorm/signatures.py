"""Along which axes of x the operands and results of each primitive go, and the types of row statistics."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxnorm.gated_reference import Gate
from jaxnorm.layouts import Layout, result_like, rows, weight, whole
from jaxnorm.quantization import Quantization
from jaxnorm.reference import Norm

# (operands by their place or None, params) -> the layouts of the operands that are there, and of the results
Layouts = Callable[..., tuple[list[Layout], list[Layout]]]
_STATISTICS = {"rms": 1, "layer": 2}


def of_forward(operands: Any, *, norm: Norm, with_stats: bool) -> tuple[list[Layout], list[Layout]]:
    x, residual, *weights = operands
    axes = len(norm.axes)
    sums = [] if residual is None else [whole(x.ndim)]
    of_weights = [weight(x.ndim, axes, w.shape[: w.ndim - axes]) for w in weights if w is not None]
    stats = [rows(x.ndim, axes)] * _STATISTICS[norm.kind] if with_stats else []
    return [whole(x.ndim), *sums, *of_weights], [result(norm, x), *sums, *stats]


def of_backward(operands: Any, *, norm: Norm, dtypes: Any, lead: Sequence[int]) -> tuple[list[Layout], list[Layout]]:
    _, x, stats, scale, dsum = operands
    like_x, of_weight = whole(x.ndim), weight(x.ndim, len(norm.axes), lead)
    of_scale, of_dsum = [] if scale is None else [of_weight], [] if dsum is None else [like_x]
    of_stats = [rows(x.ndim, len(norm.axes)) for _ in stats]
    return [result(norm, x), like_x, *of_stats, *of_scale, *of_dsum], _wanted((like_x, of_weight, of_weight), dtypes)


def of_gated_forward(operands: Any, *, norm: Norm, kind: Gate, with_stats: bool) -> tuple[list[Layout], list[Layout]]:
    x, _, scale = operands
    like_x = whole(x.ndim)
    of_scale = [] if scale is None else [like_x[-scale.ndim :]]
    return [like_x, like_x, *of_scale], [like_x, *([rows(x.ndim, 1)] if with_stats else [])]


def of_gated_backward(operands: Any, *, norm: Norm, kind: Gate, dtypes: Any) -> tuple[list[Layout], list[Layout]]:
    _, x, _, _, scale = operands
    like_x = whole(x.ndim)
    of_scale = [] if scale is None else [like_x[-scale.ndim :]]
    takes = [like_x, like_x, like_x, rows(x.ndim, 1), *of_scale]
    return takes, _wanted((like_x, like_x, *(of_scale or [like_x])), dtypes)


def of_quantized(
    operands: Any, *, norm: Norm, quantization: Quantization, with_stats: bool
) -> tuple[list[Layout], list[Layout]]:
    x, *_, smooth, given = operands
    takes, (values, *rest) = of_forward(operands[:4], norm=norm, with_stats=with_stats)
    if smooth is not None:
        takes.append(weight(x.ndim, len(norm.axes), ()))
    if given is not None:
        return [*takes, ()], [values, *rest]
    # The scales of groups stand along the last axis, fewer than it is long.
    scales = rows(x.ndim, len(norm.axes)) if quantization.group_size is None else values
    return takes, [values, scales, *rest]


def result(norm: Norm, x: Any) -> Layout:
    """y's: one that is padded has a last axis of its own."""
    return whole(x.ndim) if norm.pad_to == 1 else (*range(x.ndim - 1), None)


def statistics(norm: Norm, x: Any) -> list[Any]:
    """The types of the statistics of x's rows."""
    axes = len(norm.axes)
    shape = (*x.shape[:-axes], *(1 for _ in norm.axes))
    return [result_like(x, rows(x.ndim, axes), shape, norm.compute_dtype)] * _STATISTICS[norm.kind]


def _wanted(layouts: Sequence[Layout], dtypes: Sequence[Any]) -> list[Layout]:
    """Those of the cotangents whose dtype is given."""
    return [layout for layout, dtype in zip(layouts, dtypes, strict=True) if dtype is not None]
