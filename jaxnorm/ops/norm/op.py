"""The norms without a gate as an op: what its kernels take, what is native of rows with sharded axes, and its record.

Of a shard of each row `moments` are the statistics, and `apply` is the norm by statistics that are given: before and
after an exchange. Both are kernels on CUDA, where XLA reads x twice for LayerNorm's moments, and never from its end, so
that the result would find its beginning in the cache; they are the formula elsewhere. They have no rules but their
lowering, as they are bound while the norm's own primitives are lowered.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxnorm.native import compat, ffi
from jaxnorm.ops import speed
from jaxnorm.ops.norm import formula
from jaxnorm.ops.norm.formula import KINDS, STATISTICS, Kind, Norm, Operands, Results, Saved, Variables
from jaxnorm.ops.quantize import rounding
from jaxnorm.primitive import op, registry, weights
from jaxnorm.primitive.family import Family
from jaxnorm.primitive.registry import Function, Request
from jaxnorm.primitive.rules import Inner
from jaxnorm.sharding import dims

ADDEND = "residual"  # the field of operands that is added to x
BRANCH_SCALE = "branch_scale"  # and the one by which x is multiplied before
# Targets that only CUDA has.
TARGETS = tuple(f"jaxnorm_{kind}_norm_{what}" for kind in KINDS for what in ("statistics", "apply"))
# By `python -m bench gpu --suites odd` on an H200, whose table of 2026-11-24 is in docs/benchmarks/gpu.md: the most
# columns of rows that vectors do not divide in a cluster's shared memory with pipelines.
LONGEST = 2**18
# By `python -m bench model`, docs/benchmarks/models.md: a kernel of its own has neighbours that XLA would have fused
# with the formula. Where no gradient is taken that costs more than the kernel wins, in rows of so many columns (longer
# ones take XLA twice as long): a norm that adds nothing by itself (forward passes in percent of the whole, bfloat16 and
# rows of 1024 to 2048, H200, 2026-11-30: post-norm and adaLN with LayerNorm 1.4 and 0.8 slower, pre-norm 1.0 faster,
# RMSNorm 1.6 slower, each about its scatter); one that adds, where its weights are those of examples and no
# `branch_scale` keeps XLA from writing what is added (adaLN: 4.7 slower), or there is little to read, as where
# tokens are decoded. So many elements of RMSNorm; of LayerNorm as in a few hundred tokens: XLA's code is 2 to 6 %
# faster with 512 x 1024, with 4 x 512 x 1024 no more.
NARROW, FEW, FEW_CENTRED = 2**13, 2**18, 2**20
# y, where it is padded, has a last axis of its own.
PADDED = op.Role(lambda norm, ndim, _: dims.like_x(ndim) if norm.pad_to == 1 else (*range(ndim - 1), None))
ROLES = dict.fromkeys(("x", ADDEND, "gate", "sum"), op.LIKE_X) | dict.fromkeys(
    ("scale", "bias", BRANCH_SCALE), op.WEIGHT
)
ROLES["y"] = PADDED


def _types(norm: Norm, operands: Operands) -> Results:
    x: Any
    addend: Any
    x, addend, *_ = operands
    shape = norm.padded(x.shape)
    y = dims.result_like(x, PADDED.dim_map(norm, x.ndim, shape), shape, norm.out_dtype)
    return Results(y, None if addend is None else dims.like(addend, addend.dtype))


def may_omit(norm: Norm, operands: Operands) -> tuple[str, ...]:
    """The sum, if it fits y's place: kernels that do not have a whole row at hand leave it there meanwhile."""
    addend = operands.residual
    fits = addend is not None and norm.pad_to == 1 and addend.dtype == norm.out_dtype and norm.x_hat_dtype is None
    return ("sum",) if fits else ()


def statistics_types(norm: Norm, operands: Any) -> list[Any]:
    return op.statistics_of(norm, operands.x, STATISTICS[norm.kind])


def _per_head_weights(norm: Norm, operands: Operands) -> str | None:
    """Why no kernel takes the weights' batch dims."""
    of_all = (operands.scale, operands.bias, getattr(operands, BRANCH_SCALE, None))
    batch_dims = weights.batch_dims_of(norm.row_ndim, of_all)
    return weights.unsupported(operands.x.shape, norm.row_ndim, batch_dims)


def target(norm: Norm) -> str:
    return f"jaxnorm_{norm.name}"


def attributes(norm: Norm, arrays: Any) -> dict[str, Any]:
    """What every native call is told, each way, by the operands or what is saved of them."""
    scale_offset = np.float32(norm.scale_offset)
    if norm.activation is None:
        return {"axes": np.int64(norm.row_ndim), "scale_offset": scale_offset}
    grouped = norm.grouped or (arrays.scale is not None and arrays.scale.ndim == 2)
    own = {"activation": norm.activation, "gate_first": norm.gate_first, "grouped": grouped}
    return {"scale_offset": scale_offset, **own}


def forward_attributes(norm: Norm, operands: Any) -> dict[str, Any]:
    return attributes(norm, operands) | {"epsilon": np.float32(norm.epsilon)}


def plan(norm: Norm, operands: Any) -> dict[str, Any]:
    """What a launch plan of the CUDA kernels depends on, beside the dtype and the length of a row."""
    if norm.activation is None:
        return {"kind": norm.kind, "adds": operands[1] is not None}
    return {"kind": norm.kind, "gated": "first" if norm.gate_first else "last"}


def _fused(norm: Norm, rows: op.CallRows) -> str | None:
    """Why XLA's code is faster in a forward pass, if it is, which fuses it with what is around it."""
    if rows.platform != "cuda" or rows.way != "forward" or rows.differentiated or rows.cols > NARROW:
        return None
    name, few = ("RMSNorm", FEW) if norm.kind == "rms" else ("LayerNorm", FEW_CENTRED)
    which = f"of at most {NARROW} columns"
    if rows.adds and not rows.conditioned:
        if rows.rows is None or rows.rows * rows.cols > few:
            return None
        which = f"of a sum of at most {few} elements"
    elif rows.adds:
        which = f"of a sum of at most {NARROW} columns by weights of examples, without branch_scale,"
    return f"XLA's code is faster for {name} {which} where no gradient is taken, as it fuses it with its neighbours"


def _slower(norm: Norm, rows: op.CallRows) -> str | None:
    if norm.x_hat_dtype is not None and rows.way == "forward" and rows.platform == "cuda":
        return f"XLA's code rounds x_hat to {norm.x_hat_dtype} and multiplies it in one pass, a kernel and XLA in two"
    if (fused := _fused(norm, rows)) is not None or speed.vectors_divide(rows):
        return fused
    if rows.way == "backward":
        # Of a sum XLA's code loses for what clusters of eight blocks of RMSNorm hold, and for half types in the shorter
        # rows of LayerNorm.
        last = LONGEST if norm.kind == "rms" else 2**14
        wins = 2**15 < rows.cols <= 2**16 or (norm.kind == "layer" and rows.dtype.itemsize == 2 and rows.cols < 2**12)
        loses = rows.cols <= last and not wins if rows.adds else rows.cols > LONGEST
        which = "the gradient of a sum" if rows.adds else f"rows of more than {LONGEST} columns"
        return speed.why(rows, which) if loses else None
    if rows.cols > LONGEST and not rows.adds:
        return speed.why(rows, f"rows of more than {LONGEST} columns")
    first = 1 if rows.adds else 1025
    if rows.dtype.itemsize == 2 and first <= rows.cols < 4096:
        return speed.why(rows, f"half types in rows of {first} to 4095 columns")
    return None


def can_shard(norm: Norm, cols: int) -> bool:
    """A shard holds whole groups that are quantised together, and y's zeros stand after all of a row."""
    return norm.pad_to == 1 and rounding.can_shard(norm, cols)


def _has_kernels(norm: Norm, x: jax.Array) -> bool:
    """Whether there are kernels for a shard of each row, whatever the weights are."""
    return norm.compute_dtype == np.float32 and NORM.why_not(norm.whole(), Operands(jax.typeof(x))) is None


def _forward_of_shard(norm: Norm, operands: Operands) -> tuple[Results, op.Statistics]:
    """y, the sum where there is an addend, and the statistics of whole rows, of which x is a shard."""
    x, addend, scale, bias, _ = operands
    has_kernels = _has_kernels(norm, x if addend is None else addend)
    normalised = formula.summed_operands(norm, operands)
    # XLA adds an addend, and computes the moments of the sum, in one pass. Of float32 alone its loop over the result
    # is at the copy rate.
    is_native = has_kernels and addend is None
    of_shard = MOMENTS.primitive.bind(x, norm=norm) if is_native else formula.moments(norm, normalised)
    stats = formula.merged(norm, of_shard)
    all_wide = normalised.dtype == norm.out_dtype == np.float32
    one_loop = all_wide or norm.x_hat_dtype is not None
    if one_loop or not has_kernels or weights.batch_dims_of(norm.row_ndim, (scale, bias)):
        y = formula.affine(norm, normalised, stats, scale, bias)
    else:
        leaves, tree = jax.tree.flatten((normalised, stats, scale, bias))
        (y,) = APPLY.primitive.bind(*leaves, tree=tree, norm=norm)
    return Results(y, None if addend is None else normalised), stats


class _Moments(Inner):
    def abstract(self, *types: Any, norm: Norm) -> list[Any]:
        return op.statistics_of(norm, types[0], STATISTICS[norm.kind])

    def formula(self, *operands: jax.Array, norm: Norm) -> list[jax.Array]:
        return list(formula.moments(norm, *operands))

    def native(self, platform: str, ctx: Any, *operands: Any, norm: Norm) -> Any:
        target = f"jaxnorm_{norm.kind}_norm_statistics"
        return ffi.call(platform, target, ctx, operands, attributes={"axes": np.int64(norm.row_ndim)})


class _Apply(Inner):
    def abstract(self, *types: Any, tree: Any, norm: Norm) -> list[Any]:
        return [types[0].update(dtype=norm.out_dtype, weak_type=False)]

    def formula(self, *operands: Any, tree: Any, norm: Norm) -> list[jax.Array]:
        return [formula.affine(norm, *jax.tree.unflatten(tree, operands))]

    def native(self, platform: str, ctx: Any, *operands: Any, tree: Any, norm: Norm) -> Any:
        *_, scale, bias = jax.tree.unflatten(tree, operands)
        attributes = {
            "axes": np.int64(norm.row_ndim),
            "scale_offset": np.float32(norm.scale_offset),
            "multiply_before_cast": norm.multiply_before_cast,
            "has_scale": scale is not None,
            "has_bias": bias is not None,
        }
        return ffi.call(platform, f"jaxnorm_{norm.kind}_norm_apply", ctx, operands, attributes=attributes)


MOMENTS, APPLY = _Moments("jaxnorm_moments"), _Apply("jaxnorm_apply")
compat.allow_export(TARGETS)


def _backward_of_shard(
    norm: Norm, cotangents: Results, saved: Saved, wanted: Variables[op.Dtype], batch_dims: op.BatchDims
) -> Variables[jax.Array]:
    """The formula for dx, which needs an exchange, and the kernel for the others, which need none."""
    of_weights = wanted._replace(x=None)
    dx = formula.backward(norm, cotangents, saved, Variables(wanted.x), batch_dims).x
    x = saved.x
    native = _has_kernels(norm, x) and not weights.unsupported(x.shape, norm.row_ndim, batch_dims)
    if native and of_weights != Variables():
        sums = NORM.gradients(norm.whole(), cotangents._replace(sum=None), saved, of_weights, batch_dims)
    else:
        sums = formula.backward(norm, cotangents, saved, of_weights, batch_dims)
    return Variables(dx, sums.scale, sums.bias)


def _in_parts(norm: Norm) -> Callable[..., tuple[Results, op.Statistics]] | None:
    """The norm where x_hat is rounded to another dtype than y: a kernel gives that, and XLA multiplies."""
    rounded_to = norm.x_hat_dtype
    if rounded_to is None:
        return None
    spec = dataclasses.replace(norm, out_dtype=rounded_to, x_hat_dtype=None, multiply_before_cast=True, pad_to=1)

    def forward(_: Norm, operands: Operands, *, with_stats: bool) -> tuple[Results, op.Statistics]:
        results, stats = NORM.bind(spec, operands._replace(scale=None, bias=None), with_stats=with_stats)
        return results._replace(y=formula.weighted(norm, results.y, operands.scale, operands.bias)), stats

    return forward


def requested(kind: Kind, *, adds: bool = False) -> Callable[[Request], tuple[Norm, Any]]:
    def of_request(request: Request) -> tuple[Norm, Any]:
        addend_dtype = request.addend_dtype or (request.dtype if adds else None)
        norm = Norm(
            kind=kind,
            axes=tuple(range(-request.axes, 0)),
            epsilon=1e-6,
            scale_offset=-0.0,
            compute_dtype=dims.wide_dtype((request.dtype, addend_dtype or request.dtype, request.out_dtype)),
            out_dtype=request.out_dtype,
        )
        x, scale = request.array(request.shape), request.array(request.scale_shape)
        return norm, Operands(x, None if addend_dtype is None else request.array(request.shape, addend_dtype), scale)

    return of_request


# The names of the spec in programs of older builds.
registry.add_types(GatedNorm=Norm, QuantizedNorm=Norm)

NORM = Family(
    op.Op(
        name="norm",
        spec=Norm,
        operands=Operands,
        results=Results,
        roles=ROLES,
        types=_types,
        forward=formula.forward,
        plain=formula.plain,
        derivative=op.Derivative(
            saved=Saved,
            variables=Variables,
            linear=formula.linear,
            backward=formula.backward,
            backward_of_shard=_backward_of_shard,
        ),
        statistics=statistics_types,
        native=op.Native(
            names=tuple(f"jaxnorm_{kind}_norm" for kind in KINDS),
            which=target,
            forward=lambda norm, operands: {
                **forward_attributes(norm, operands),
                "multiply_before_cast": norm.multiply_before_cast,
                **dict.fromkeys((f"without_{name}" for name in norm.omitted), True),
            },
            backward=attributes,
            plan=plan,
            slower=_slower,
        ),
        reasons=(_per_head_weights,),
        weights_batch=True,
        addend=ADDEND,
        factor=BRANCH_SCALE,
        linear_in=lambda _: ("scale", "bias"),
        may_omit=may_omit,
        in_place={ADDEND: "sum"},
        can_shard=can_shard,
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
