"""The op of the norms."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxnorm.ops import speed
from jaxnorm.ops.norm import shard
from jaxnorm.ops.norm.formula import (
    ADDEND,
    KINDS,
    PADDED,
    ROLES,
    STATISTICS,
    Dtype,
    Kind,
    Norm,
    Operands,
    Results,
    Saved,
    Variables,
    backward,
    forward,
    linear,
    plain,
    weighted,
)
from jaxnorm.primitive import weights
from jaxnorm.primitive.described import Function, Request
from jaxnorm.primitive.family import Family
from jaxnorm.primitive.op import BatchDims, Derivative, Native, Op, Statistics, statistics_of
from jaxnorm.sharding import dims


def types(norm: Norm, operands: Operands) -> Results:
    x: Any
    addend: Any
    x, addend, *_ = operands
    shape = norm.padded(x.shape)
    y = dims.result_like(x, PADDED.dim_map(norm, x.ndim, shape), shape, norm.out_dtype)
    return Results(y, None if addend is None else dims.like(addend, addend.dtype))


def statistics_types(norm: Norm, operands: Operands) -> list[Any]:
    return statistics_of(norm, operands.x, STATISTICS[norm.kind])


def per_head_weights(norm: Norm, operands: Operands) -> str | None:
    """Why no kernel takes the weights' batch dims."""
    batch_dims = weights.batch_dims_of(norm.row_ndim, (operands.scale, operands.bias))
    return weights.unsupported(operands.x.shape, norm.row_ndim, batch_dims)


def _name(norm: Norm) -> str:
    return f"jaxnorm_{norm.kind}_norm"


def _forward_attributes(norm: Norm, _: Operands) -> dict[str, Any]:
    return {
        "axes": np.int64(norm.row_ndim),
        "epsilon": np.float32(norm.epsilon),
        "scale_offset": np.float32(norm.scale_offset),
        "multiply_before_cast": norm.multiply_before_cast,
    }


def _backward_attributes(norm: Norm, _: Saved) -> dict[str, Any]:
    return {"axes": np.int64(norm.row_ndim), "scale_offset": np.float32(norm.scale_offset)}


def plan(norm: Norm, operands: Any) -> dict[str, Any]:
    """What a launch plan of the CUDA kernels depends on, beside the dtype and the length of a row."""
    return {"kind": norm.kind, "adds": operands[1] is not None}


def _has_kernels(norm: Norm, x: jax.Array) -> bool:
    """Whether there are kernels for a shard of each row, whatever the weights are."""
    return norm.compute_dtype == np.float32 and NORM.why_not(norm.whole(), Operands(x)) is None


def _forward_of_shard(norm: Norm, operands: Operands) -> tuple[Results, Statistics]:
    x, addend, *_ = operands
    return shard.forward(norm, operands, has_kernels=_has_kernels(norm, x if addend is None else addend))


def _backward_of_shard(
    norm: Norm, cotangents: Results, saved: Saved, wanted: Variables[Dtype], batch_dims: BatchDims
) -> Variables[jax.Array]:
    """The formula for dx, which needs an exchange, and the kernel for the others, which need none."""
    of_weights = wanted._replace(x=None)
    dx = backward(norm, cotangents, saved, Variables(wanted.x), batch_dims).x
    x = saved.x
    native = _has_kernels(norm, x) and not weights.unsupported(x.shape, norm.row_ndim, batch_dims)
    if native and of_weights != Variables():
        sums = NORM.gradients(norm.whole(), cotangents._replace(sum=None), saved, of_weights, batch_dims)
    else:
        sums = backward(norm, cotangents, saved, of_weights, batch_dims)
    return Variables(dx, sums.scale, sums.bias)


def _in_parts(norm: Norm) -> Callable[..., tuple[Results, Statistics]] | None:
    """The norm where x_hat is rounded to another dtype than y: a kernel gives that, and XLA multiplies."""
    rounded_to = norm.x_hat_dtype
    if rounded_to is None:
        return None
    spec = dataclasses.replace(norm, out_dtype=rounded_to, x_hat_dtype=None, multiply_before_cast=True, pad_to=1)

    def forward(_: Norm, operands: Operands, *, with_stats: bool) -> tuple[Results, Statistics]:
        x, addend, scale, bias = operands
        results, stats = NORM.bind(spec, Operands(x, addend), with_stats=with_stats)
        return results._replace(y=weighted(norm, results.y, scale, bias)), stats

    return forward


def requested(kind: Kind, *, adds: bool = False) -> Any:
    def of_request(request: Request) -> tuple[Norm, Operands]:
        addend_dtype = request.addend_dtype or (request.dtype if adds else None)
        norm = Norm(
            kind=kind,
            axes=tuple(range(-request.axes, 0)),
            epsilon=1e-6,
            scale_offset=-0.0,
            compute_dtype=dims.wide_dtype((request.dtype, addend_dtype or request.dtype, request.out_dtype)),
            out_dtype=request.out_dtype,
        )
        addend = None if addend_dtype is None else request.array(request.shape, addend_dtype)
        return norm, Operands(request.array(request.shape), addend, request.array(request.scale_shape))

    return of_request


NORM = Family(
    Op(
        name="norm",
        spec=Norm,
        operands=Operands,
        results=Results,
        roles=ROLES,
        types=types,
        forward=forward,
        plain=plain,
        derivative=Derivative(
            saved=Saved,
            variables=Variables,
            linear=linear,
            backward=backward,
            backward_of_shard=_backward_of_shard,
        ),
        statistics=statistics_types,
        native=Native(
            names=tuple(f"jaxnorm_{kind}_norm" for kind in KINDS),
            name=_name,
            forward=_forward_attributes,
            backward=_backward_attributes,
            plan=plan,
            slower=speed.norm,
        ),
        reasons=(per_head_weights,),
        weights_batch=True,
        addend=ADDEND,
        in_place={ADDEND: "sum"},
        can_shard=lambda norm, _: norm.pad_to == 1,
        forward_of_shard=_forward_of_shard,
        in_parts=_in_parts,
        functions=(
            Function("rms_norm", requested("rms")),
            Function("layer_norm", requested("layer")),
            Function("add_rms_norm", requested("rms", adds=True)),
            Function("add_layer_norm", requested("layer", adds=True)),
        ),
    )
)
