"""Rows of the table for norms, plain, with weights for each head, of a sum, and padded."""

from dataclasses import replace
from functools import partial

import bad_calls
import formulas
import jax
import jax.numpy as jnp
import numpy as np
import oracle
from cases import ADDS, DTYPES, NORMS, PAIRS, axis_of
from native import target
from op import Op, Size, rows
from quantizing import sum_of

from bench import shapes

ALONE = tuple((dtype,) for dtype in DTYPES)
# As the model hubs' Llama is with weights of float32: x_hat is rounded to x's dtype and the product is not.
HUB = {"multiply_before_cast": False, "out_dtype": np.dtype("float32")}
STATISTICS = {"rms": 1, "layer": 2}


def size_of(shape):
    dims = shapes.few_rows(shape).dims
    options = {} if shape.axes == 1 else {"axis": axis_of(shape.axes)}
    return Size(dims, dims[len(dims) - shape.axes :], options)


def norm(kind):
    def function(*args, **options):
        return (NORMS[kind](*args, **options),)

    def exact(x, scale=None, bias=None, *, axis=-1, out_dtype=None, **options):
        return oracle.forward(
            kind, x, scale, bias, axes=np.size(axis), out_dtype=np.dtype(out_dtype or x.dtype), **options
        )

    def exact_gradients(dy, x, scale=None, bias=None, *, axis=-1, **options):
        axes = np.size(axis)
        weight = scale if scale is not None else bias
        lead = () if weight is None else weight.shape[: weight.ndim - axes]
        options = {name: value for name, value in options.items() if name in ("epsilon", "scale_offset")}
        found = oracle.gradients(kind, x, dy[0], scale, axes=axes, lead=lead, **options)
        return {"x": (found.dx, found.dx_terms), "scale": (found.dscale, None), "bias": (found.dbias, None)}

    return Op(
        name=kind,
        public=f"{kind}_norm",
        kind=kind,
        operands=("x", "scale", "bias"),
        arrays=1,
        dtypes=ALONE,
        function=function,
        formula=lambda *args, **options: (formulas.norm(kind)(*args, **options),),
        as_norm=lambda f: lambda *args: f(*args)[0],
        exact=exact,
        exact_gradients=exact_gradients,
        small=rows(6, 10),
        sizes=tuple(
            map(size_of, (*shapes.MODELS, *shapes.DECODE, *shapes.ODD, *shapes.RANKS, *shapes.grid(itemsize=4)))
        ),
        # 0 is a legal epsilon; 1e-12 is BERT's, 1e-5 Llama's, 1 is seen in the output's first digit.
        options=(
            *({"epsilon": epsilon} for epsilon in (0.0, 1e-12, 1e-5, 1.0)),
            {"scale_offset": 1.0},
            {"multiply_before_cast": False},
            HUB,
        ),
        # Rows beyond the number of partial sums that dscale is made of, and a number of rows that it does not divide.
        # And long rows, more of them than the kernel by columns has blocks.
        backward_sizes=(rows(4099, 8), rows(2000, 129), rows(70_001, 3), rows(9, 200_000)),
        lengths=tuple(
            rows(max(5, min(65, 2**18 // cols)), cols)
            for cols in (1, 31, 128, 1021, 4096, 16_384, 65_536, 100_003, 262_144)
        ),
        many=tuple(rows(600, cols) for cols in (128, 384, 768, 1021, 2048, 2880, 5120, 5376, 8192, 16_384)),
        forward=target(kind, "fwd"),
        backward=target(kind, "bwd"),
        gradients=("dx", "dscale", "dbias"),
        kept=("x", "scale"),
        statistics=STATISTICS[kind],
        bad_calls=bad_calls.NORM | bad_calls.MISUSE[f"{kind}_norm"],
        without_kernel=bad_calls.NORM_WITHOUT_KERNEL,
    )


def by_head(function):
    """The op by a call for each head, whose axis is the weights' first."""

    def unfused(*args, **options):
        *arrays, scale, bias = args
        compiled = jax.jit(partial(function, **options))
        axis = arrays[0].ndim - scale.ndim
        calls = [
            compiled(*(jnp.take(a, i, axis) for a in arrays), scale[i].reshape(-1), bias[i].reshape(-1))
            for i in range(scale.shape[0])
        ]
        return tuple(jnp.stack(results, axis) for results in zip(*calls, strict=True))

    return unfused


# Weights for each head. Heads whose rows alternate, come in stretches, are one for each head; few rows and so many that
# there are several partial sums; no whole vector, and several.
HEADS = (
    Size((2, 9, 4, 64), (4, 64)),
    Size((2, 9, 4, 64), (1, 1, 1, 64)),
    Size((2, 4, 9, 128), (4, 1, 128)),
    Size((2, 4, 9, 128), (1, 4, 1, 128)),
    Size((3, 40, 100), (3, 1, 100)),
    Size((3, 5, 7, 256), (3, 5, 1, 256)),
    Size((3, 1, 5, 2, 1000), (3, 1, 5, 1, 1000)),
    Size((40, 100), (40, 100)),
    Size((3, 700, 256), (700, 256)),  # more heads than a task has
    Size((1100, 7, 64), (7, 64)),
    Size((2, 3, 700, 128), (3, 1, 128)),
    Size((2, 2500, 100), (2, 1, 100)),
)


def per_head(kind):
    op = norm(kind)

    def as_norm(f):
        def function(x, scale=None, bias=None):
            weights = [None if weight is None else weight.reshape(2, 5) for weight in (scale, bias)]
            return f(x.reshape(*x.shape[:-1], 2, 5), *weights)[0].reshape(x.shape)

        return function

    return replace(
        op,
        name=f"{kind} per head",
        as_norm=as_norm,
        unfused=by_head(op.function),
        has_unfused_gradients=True,
        small=Size((6, 2, 5), (2, 5)),
        sizes=HEADS,
        unfused_sizes=tuple(HEADS[i] for i in (0, 2, 4, 9, 10, 11)),
        options=({"multiply_before_cast": False, "scale_offset": 1.0}, HUB),
        backward_sizes=(),
        lengths=(Size((9, 7, 3, 64), (3, 64)), Size((9, 3, 7, 100), (3, 1, 100)), HEADS[8], HEADS[10]),
        many=(),
    )


def norm_of_sum(f):
    """A norm of x alone of one that adds first."""

    def function(x, scale=None, bias=None):
        y, total = f(x, jnp.cos(x), scale, bias)
        return y * jnp.sin(total)

    return function


# Norms of x + residual. No whole vector, several rows at once, with and without a rest, long.


def added(kind):
    def unfused(x, residual, *weights, out_dtype=None, **options):
        total = sum_of(x, residual)
        return jax.jit(partial(NORMS[kind], out_dtype=out_dtype or x.dtype, **options))(total, *weights), total

    def exact(x, residual, *weights, out_dtype=None, **options):
        total = sum_of(x, residual)
        return norm(kind).exact(total, *weights, out_dtype=out_dtype or x.dtype, **options)

    def exact_gradients(cotangents, x, residual, *weights, **options):
        dy, dsum = cotangents
        found = norm(kind).exact_gradients((dy,), sum_of(x, residual), *weights, **options)
        # The gradient of x is that of the residual in x's dtype.
        return {"residual": (found.pop("x")[0] + oracle.f64(dsum), None), **found}

    return replace(
        norm(kind),
        name=f"add {kind}",
        public=f"add_{kind}_norm",
        operands=("x", "residual", "scale", "bias"),
        arrays=2,
        dtypes=PAIRS,
        function=ADDS[kind],
        formula=formulas.added(kind),
        as_norm=norm_of_sum,
        exact=exact,
        exact_gradients=exact_gradients,
        unfused=unfused,
        sizes=(
            *(rows(7, cols) for cols in (1, 24, 128, 257, 1024, 4096, 4097, 40_000)),
            *(rows(n, 24) for n in (1, 2, 3, 4, 5, 4099)),  # what a thread takes at once, and more than a task has
            rows(2048, 4096),  # beyond every cache: results may go past it
            Size((5, 6, 40), (6, 40), {"axis": (-2, -1)}),
            Size((3, 4, 4, 64), (4, 64)),
            Size((3, 4, 4, 64), (4, 1, 64)),
        ),
        options=(
            {"scale_offset": 1.0},
            {"epsilon": 1.0},
            {"multiply_before_cast": False},
            {"out_dtype": np.dtype("float32")},
            HUB,
        ),
        backward_sizes=(),
        lengths=tuple(rows(9, cols) for cols in (1, 31, 128, 1021, 4096, 40_000)),
        many=(),
        gradients=("dx", "dx", "dscale", "dbias"),
        kept=("residual", "scale"),
        bad_calls=bad_calls.RESIDUAL | bad_calls.PADDING | bad_calls.MISUSE[f"add_{kind}_norm"],
        without_kernel=bad_calls.RESIDUAL_WITHOUT_KERNEL,
    )


# Norms of branch_scale * x + residual: one row of branch_scale for all, one for each example, one for each row.


def scaled(kind):
    def function(x, residual, scale=None, bias=None, branch_scale=None, **options):
        return ADDS[kind](x, residual, scale, bias, branch_scale=branch_scale, **options)

    def unfused(x, residual, scale, bias, branch_scale, **options):
        total = sum_of(x, residual, branch_scale)
        return added(kind).unfused(jnp.zeros_like(x), total, scale, bias, **options)

    def formula(x, residual, scale=None, bias=None, branch_scale=None):
        branch = x if branch_scale is None else branch_scale * x
        return formulas.added(kind)(branch, residual, scale, bias)

    def as_norm(f):
        return norm_of_sum(lambda x, *others: f(x, *others, jnp.sin(jnp.arange(1.0, 1 + x.shape[-1]))))

    return replace(
        added(kind),
        name=f"scaled {kind}",
        operands=("x", "residual", "scale", "bias", "branch_scale"),
        function=function,
        formula=formula,
        as_norm=as_norm,
        exact=None,
        exact_gradients=None,
        unfused=unfused,
        sizes=(
            *(rows(7, cols) for cols in (1, 24, 128, 257, 1024, 4096, 4097, 40_000)),
            rows(2048, 4096),
            Size((3, 4, 64), (3, 1, 64)),
            Size((3, 5, 1152), (3, 1, 1152)),
            Size((3, 4, 64), (3, 4, 64)),
            Size((2, 3, 4, 64), (2, 3, 1, 64)),
        ),
        options=({"scale_offset": 1.0}, {"multiply_before_cast": False}, {"out_dtype": np.dtype("float32")}),
        gradients=("dx", "dx", "dscale", "dbias", "dx"),
        kept=("x", "residual", "scale", "branch_scale"),
        bad_calls={},
    )


# With y padded by zeros: no padding, less and more than a vector, longer than the row; short and long rows.


def padded(kind):
    def unfused(*args, pad_to):
        y, total = jax.jit(ADDS[kind])(*args)
        return formulas.padded(y, pad_to), total

    def as_norm(f):
        def function(x, scale=None, bias=None):
            y, total = f(x, jnp.cos(x), scale, bias)
            return jnp.roll(y, 3, -1)[..., : x.shape[-1]] * jnp.sin(total)

        return function

    sizes = ((64, 64), (100, 128), (100, 101), (3, 256), (1000, 256), (4097, 128), (40_000, 4096))
    return replace(
        added(kind),
        name=f"padded {kind}",
        dtypes=PAIRS[:4],
        as_norm=as_norm,
        unfused=unfused,
        has_unfused_gradients=True,
        small=rows(6, 10, pad_to=16),
        sizes=tuple(rows(7, cols, pad_to=pad_to) for cols, pad_to in sizes),
        options=(),
        lengths=(rows(9, 100, pad_to=64), rows(9, 1021, pad_to=128)),
        exact=None,
        exact_gradients=None,
    )
