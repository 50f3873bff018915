"""Rows of the table for norms with a quantised result."""

from dataclasses import replace
from functools import partial

import bad_calls
import bad_quantized_calls
import formulas
import numpy as np
from cases import PAIRS
from native import target
from norm_rows import STATISTICS, norm, norm_of_sum
from op import Size, rows
from quantizing import GRANULARITIES, by_numpy, call, functions_of, plain, static_scale_of, sum_of

from jaxnorm import Quantization

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
        y = plain(kind, None, axis=axis)(x, scale, bias)
        return by_numpy(y, quantization, smooth, static_scale_of(quantization), np.size(axis))

    group = quantization.group_size
    of_groups = tuple(rows(5, cols) for cols in LENGTHS_OF_GROUPS if group and cols % group == 0)
    return replace(
        norm(kind),
        name=f"{kind} to {granularity}, {to}",
        public=f"{kind}_norm_quantized",
        operands=("x", "scale", "bias", "smooth"),
        **functions_of(partial(call, kind, quantization)),
        formula=lambda *args: (formulas.dequantized(kind, quantization, static_scale_of(quantization))(*args),),
        exact=None,
        exact_gradients=None,
        unfused=unfused,
        small=rows(6, 2 * group if group else 10),
        sizes=of_groups or SIZES,
        options=(),
        backward_sizes=(),
        lengths=tuple(rows(41, n) for n in ((128, 1024, 40_960) if group else (1, 31, 128, 1021, 4096, 40_000))),
        # On a GPU more rows than have a block at once have a kernel with fewer registers.
        many=() if group else (rows(2500, 4096), rows(40_000, 128), rows(9000, 1024)),
        forward=target(kind, "quantized_fwd"),
        gradients=("dx", "dscale", "dbias", ""),
        statistics=STATISTICS[kind],
        has_row_scale=granularity == "token",
        bad_calls=bad_quantized_calls.QUANTIZED | bad_calls.MISUSE[f"{kind}_norm_quantized"],
        without_kernel=bad_quantized_calls.QUANTIZED_WITHOUT_KERNEL,
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
        total = sum_of(x, residual)
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
