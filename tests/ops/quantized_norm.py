"""Norms with a quantised result, plain, of a sum, and gated: their rows.

And what is particular to the gated ones: every granularity, over groups too, and their gradient.
"""

from dataclasses import replace
from functools import cache, partial

import bad_calls
import formulas
import jax
import jax.numpy as jnp
import numpy as np
import quantizing
from cases import ALIKE, DTYPES, KINDS, PAIRS, draw, draw_gate, draw_scale, draw_smooth, draw_x
from coverage import cover
from hlo import compiled_text, count_native_calls
from native import are_cuda_kernels
from op import Size, rows
from quantizing import GRANULARITIES, IMPLEMENTATIONS, TO, assert_same, by_numpy, call, functions_of, static_scale_of

import jaxnorm
from jaxnorm import Quantization
from ops.gated_norm import MAMBA, QWEN, VARIANTS, gate, gated
from ops.norm import norm, norm_of_sum

# No whole vector, several rows at once, with and without a rest, long; any number of rows, beyond every cache.
SIZES = (
    *(rows(7, cols) for cols in (1, 3, 24, 31, 128, 257, 1021, 4096, 4097, 40_000)),
    *(rows(n, 24) for n in (1, 2, 3, 5, 4099)),
    rows(2048, 4096),
    Size((5, 6, 40), (6, 40), {"axis": (-2, -1)}),
)
LENGTHS_OF_GROUPS = (64, 128, 192, 1024, 4096, 16_384, 40_000, 40_960, 262_144)


def quantized(kind, granularity, to):
    """Of (x, scale, bias, smooth); what is differentiated is the dequantised result."""
    quantization = Quantization(to, **GRANULARITIES[granularity])

    def unfused(x, scale, bias, smooth, *, axis=-1):
        y = quantizing.plain(kind, None, axis=axis)(x, scale, bias)
        return by_numpy(y, quantization, smooth, static_scale_of(quantization), np.size(axis))

    dequantized = formulas.dequantized(formulas.norm(kind), quantization, static_scale_of(quantization))
    group = quantization.group_size
    of_groups = tuple(rows(5, cols) for cols in LENGTHS_OF_GROUPS if group and cols % group == 0)
    return replace(
        norm(kind),
        name=f"{kind} to {granularity}, {to}",
        public=f"{kind}_norm_quantized",
        operands=("x", "scale", "bias", "smooth"),
        **functions_of(partial(call, kind, quantization)),
        formula=lambda *args: (dequantized(*args),),
        unfused=unfused,
        small=rows(6, 2 * group if group else 10),
        sizes=of_groups or SIZES,
        options=(),
        lengths=tuple(rows(41, n) for n in ((128, 1024, 40_960) if group else (1, 31, 128, 1021, 4096, 40_000))),
        # On a GPU more rows than have a block at once have a kernel with fewer registers.
        many=() if group else (rows(2500, 4096), rows(40_000, 128), rows(9000, 1024)),
        forward=f"jaxnorm_{kind}_norm_quantized_fwd",
        gradients=("dx", "dscale", "dbias", ""),
        has_row_scale=granularity == "token",
        bad_calls=bad_calls.QUANTIZED,
        without_kernel=bad_calls.QUANTIZED_WITHOUT_KERNEL,
    )


def quantized_sum(kind, granularity, to):
    """Of (x, residual, scale, bias, smooth): the norm of the sum is quantised."""
    quantization = Quantization(to, **GRANULARITIES[granularity])
    alone = quantized(kind, granularity, to)

    def function(x, residual, *weights, **options):
        q, total = call(kind, quantization, x, *weights, residual=residual, **options)
        return q.values, q.scales, total

    def derived(x, residual, *weights, **options):
        q, total = call(kind, quantization, x, *weights, residual=residual, straight_through=True, **options)
        return q.dequantize(), total

    def unfused(x, residual, *weights, **options):
        total = quantizing.sum_of(x, residual)
        return *alone.unfused(total, *weights, **options), total

    def formula(x, residual, *weights):
        total = x + residual
        return *alone.formula(total, *weights), total

    return replace(
        alone,
        name=f"add {alone.name}",
        operands=("x", "residual", "scale", "bias", "smooth"),
        arrays=2,
        dtypes=PAIRS,
        function=function,
        derived=derived,
        formula=formula,
        as_norm=norm_of_sum,
        unfused=unfused,
        # Rows of x and of the residual that take a whole block's shared memory, beside what the CUDA kernels declare.
        sizes=(rows(7, 384), rows(3, 229_376)),
        lengths=(rows(9, 128), rows(9, 1280)),
        many=(),
        gradients=("dx", "dx", "dscale", "dbias", ""),
        kept=("residual", "scale"),
    )


X, FIRST = jnp.ones((3, 4, 256)), {"gate_first": True}


def with_gate(calls):
    """Calls of quantised norms that a gate goes with."""
    return {
        name: c._replace(args=(*c.args, *c.args), keywords=c.keywords | FIRST)
        for name, c in calls.items()
        if not {"residual", "axis"} & c.keywords.keys()
    }


BAD_CALLS = {
    **{name: c for name, c in bad_calls.GATED.items() if "out_dtype" not in c.keywords},
    **with_gate(bad_calls.QUANTIZED),
}
WITHOUT_KERNEL = {
    **{name: c for name, c in bad_calls.GATED_WITHOUT_KERNEL.items() if "out_dtype" not in c.keywords},
    "a token's scale over groups": bad_calls.call(X, X, **FIRST, group_size=64).has_no_kernel(
        "groups of 64 columns are normalised and a token has one scale; .* one group at a time"
    ),
    "a scale of columns of several groups": bad_calls.call(
        X, X, **FIRST, group_size=32, quantization=Quantization("int8", "group", 64)
    ).has_no_kernel("groups of 32 columns are normalised and 64 columns share a scale"),
}


def call_gated(variant, quantization, x, gate, scale=None, smooth=None, **options):
    """The function under test with its operands in one order, and a static scale where it wants one."""
    given = {"static_scale": static_scale_of(quantization), "smooth_scale": smooth, "quantization": quantization}
    return jaxnorm.gated_rms_norm_quantized(x, gate, scale, **variant._asdict(), **given, **options)


@cache
def quantize_gated(variant, quantization, implementation=None, **options):
    """A compiled function of (x, gate, scale, smooth)."""
    return jax.jit(lambda *args: call_gated(variant, quantization, *args, implementation=implementation, **options))


@cache
def plain_gated(variant, implementation=None, **options):
    """A compiled function of (x, gate, scale): what is quantised.

    No kernel gives float32 of half types. On a CPU that of float32 operands adds up their squares in the same order.
    """
    function = gated(variant, implementation=implementation, **options)
    return jax.jit(lambda x, gate, scale: function(x.astype("float32"), gate.astype("float32"), scale))


def gated_quantized(variant, granularity, to):
    """Of (x, gate, scale, smooth); what is differentiated is the dequantised result."""
    quantization = Quantization(to, **GRANULARITIES[granularity])
    op, run = gate(variant), quantization.group_size

    def unfused(x, gate, scale, smooth, **options):
        y = plain_gated(variant, **options)(x, gate, scale)
        return by_numpy(y, quantization, smooth, static_scale_of(quantization))

    dequantized = formulas.dequantized(formulas.gated(variant), quantization)
    lengths = (128, 1024, 4096, 16_384) if run else (1, 31, 128, 1021, 4096, 16_384)
    return replace(
        op,
        name=f"gated {variant} to {granularity}, {to}",
        public="gated_rms_norm_quantized",
        operands=("x", "gate", "scale", "smooth"),
        has_out_dtype=False,
        **functions_of(partial(call_gated, variant, quantization)),
        formula=lambda *args, **options: (dequantized(*args, **options),),
        unfused=unfused,
        unfused_dtypes=ALIKE[:1] if are_cuda_kernels() else ALIKE,
        small=rows(6, 2 * run if run else 10),
        sizes=tuple(rows(7, cols) for cols in (*lengths, 192, 640, 5120) if not run or cols % run == 0),
        options=({"scale_offset": 1.0}, {"epsilon": 1.0}),
        lengths=tuple(rows(41, cols) for cols in lengths),
        many=() if run else (rows(600, 128), rows(600, 4096)),
        forward="jaxnorm_gated_rms_norm_quantized_fwd",
        gradients=("dx", "dgate", "dscale", ""),
        has_row_scale=granularity == "token",
        bad_calls=BAD_CALLS,
        without_kernel=WITHOUT_KERNEL,
    )


def grouped_quantized(variant, granularity, to):
    """With shorter groups that share a scale than are normalised."""
    op = gated_quantized(variant, granularity, to)
    sizes = ((4096, 1024), (512, 256), (1280, 640))
    return replace(
        op,
        name=f"grouped {variant} to {granularity}, {to}",
        small=rows(6, 256, group_size=128),
        sizes=(*(rows(7, cols, group_size=group) for cols, group in sizes), rows(37, 640, group_size=128)),
        options=(),
        lengths=(rows(9, 640, group_size=128),),
        many=(rows(600, 640, group_size=128),),
    )


QUANTIZED = (
    *(quantized(kind, "token", "int8") for kind in KINDS),
    *(quantized(kind, "groups of 64", "float8_e4m3fn") for kind in KINDS),
)
QUANTIZED_SUMS = (
    *(quantized_sum(kind, "token", "float8_e4m3fn") for kind in KINDS),
    *(quantized_sum(kind, "tensor", "float8_e4m3fn") for kind in KINDS),
    *(quantized_sum(kind, "groups of 128", "float8_e5m2") for kind in KINDS),
)
GATED_QUANTIZED = (
    gated_quantized(QWEN, "token", "int8"),
    gated_quantized(MAMBA, "groups of 64", "float8_e4m3fn"),
    grouped_quantized(MAMBA, "groups of 128", "float8_e5m2"),
)


ROWS, COLS = 5, 512


def draw_operands(dtype="float32"):
    weights = draw_scale((COLS,), dtype), draw_smooth((COLS,))
    return draw_x((ROWS, COLS), dtype), draw_gate((ROWS, COLS), dtype), *weights


def formula_only(quantization, group_size):
    """Whether groups that are normalised share a scale."""
    is_whole = quantization.group_size is not None and group_size % quantization.group_size == 0
    return group_size != COLS and quantization.granularity != "tensor" and not is_whole


# Of whole rows, with whole runs of columns in a group, and with several groups in a run: the formula, whose bits are
# XLA's to choose on a GPU.
@cover(
    variant=VARIANTS,
    to=TO,
    granularity=GRANULARITIES.keys(),
    group_size=[COLS, 256, 32] if jax.default_backend() == "cpu" else [COLS],
    implementation=IMPLEMENTATIONS,
)
def test_it_is_the_norm_quantised(variant, to, granularity, group_size, implementation):
    quantization = Quantization(to, **GRANULARITIES[granularity])
    x, gate, scale, smooth = draw_operands()
    q = quantize_gated(variant, quantization, implementation, group_size=group_size)(x, gate, scale, smooth)
    same = "xla" if formula_only(quantization, group_size) else implementation
    y = plain_gated(variant, same, group_size=group_size)(x, gate, scale)
    values, scales = by_numpy(y, quantization, smooth, static_scale_of(quantization))
    assert_same([q.values, q.scales], [values, scales])


# With smooth factors, too, in one native call: they go into the scale of the unquantised norm. What the formula alone
# serves has the derivative as well.
@cover(variant=VARIANTS, dtype=DTYPES, group_size=[None, 128, 64], scale_offset=[0.0, 1.0], given=["scale", "nothing"])
def test_the_gradient_is_that_of_the_norm_times_smooth_factors(variant, dtype, group_size, scale_offset, given):
    x, gate, scale, smooth = draw_operands(dtype)
    to, options = Quantization("int8", "group"), {"group_size": group_size, "scale_offset": scale_offset}
    args = (x, gate, scale) if given == "scale" else (x, gate)
    dy = draw("dy", (ROWS, COLS))

    def quantized(x, gate, scale=None):
        return call_gated(variant, to, x, gate, scale, smooth, straight_through=True, **options).dequantize()

    def norm(*args):
        return gated(variant, implementation="xla", **options)(*(a.astype("float32") for a in args)) * smooth

    def pull_back(function):
        return lambda args: jax.vjp(function, *args)[1](dy)

    for a, e in zip(*(jax.jit(pull_back(function))(args) for function in (quantized, norm)), strict=True):
        error = np.linalg.norm(np.float32(a) - np.float32(e)) / np.linalg.norm(np.float32(e))
        assert error < max(float(jnp.finfo(dtype).eps), 1e-6)
    if group_size != 64:
        calls = count_native_calls(compiled_text(pull_back(quantized), args))
        assert calls == GATED_QUANTIZED[0].calls(fwd=1, bwd=1)
