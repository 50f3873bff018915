"""Rows of the table for gated norms with a quantised result, of whole rows and of groups."""

from dataclasses import replace
from functools import cache, partial

import bad_calls
import bad_quantized_calls
import formulas
import jax
import jax.numpy as jnp
from gated_rows import ALIKE, gate
from gating import gated
from native import are_cuda_kernels
from op import rows
from quantizing import GRANULARITIES, by_numpy, functions_of, static_scale_of

import jaxnorm
from jaxnorm import Quantization


def call(variant, quantization, x, gate, scale=None, smooth=None, **options):
    """The function under test with its operands in one order, and a static scale where it wants one."""
    given = {"static_scale": static_scale_of(quantization), "smooth_scale": smooth, "quantization": quantization}
    return jaxnorm.gated_rms_norm_quantized(x, gate, scale, **variant._asdict(), **given, **options)


@cache
def quantize(variant, quantization, implementation=None, **options):
    """A compiled function of (x, gate, scale, smooth)."""
    return jax.jit(lambda *args: call(variant, quantization, *args, implementation=implementation, **options))


@cache
def plain(variant, implementation=None, **options):
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
        y = plain(variant, **options)(x, gate, scale)
        return by_numpy(y, quantization, smooth, static_scale_of(quantization))

    lengths = (128, 1024, 4096, 16_384) if run else (1, 31, 128, 1021, 4096, 16_384)
    return replace(
        op,
        name=f"gated {variant} to {granularity}, {to}",
        public="gated_rms_norm_quantized",
        operands=("x", "gate", "scale", "smooth"),
        has_out_dtype=False,
        **functions_of(partial(call, variant, quantization)),
        formula=lambda *args, **options: (formulas.gated_dequantized(variant, quantization)(*args, **options),),
        exact=None,
        exact_gradients=None,
        unfused=unfused,
        unfused_dtypes=ALIKE[:1] if are_cuda_kernels() else ALIKE,
        small=rows(6, 2 * run if run else 10),
        sizes=tuple(rows(7, cols) for cols in (*lengths, 192, 640, 5120) if not run or cols % run == 0),
        options=({"scale_offset": 1.0}, {"epsilon": 1.0}),
        backward_sizes=(),
        lengths=tuple(rows(41, cols) for cols in lengths),
        many=() if run else (rows(600, 128), rows(600, 4096)),
        forward="jaxnorm_gated_rms_norm_quantized_fwd",
        gradients=("dx", "dgate", "dscale", ""),
        has_row_scale=granularity == "token",
        bad_calls=BAD_CALLS | bad_calls.MISUSE["gated_rms_norm_quantized"],
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


X = jnp.ones((3, 4, 256))
FIRST = {"gate_first": True}


def with_gate(calls):
    """Calls of quantised norms that a gate goes with."""
    return {
        name: c._replace(args=(*c.args, *c.args), keywords=c.keywords | FIRST)
        for name, c in calls.items()
        if not {"residual", "axis"} & c.keywords.keys()
    }


BAD_CALLS = {
    **{name: c for name, c in bad_calls.GATED.items() if "out_dtype" not in c.keywords},
    **with_gate(bad_quantized_calls.QUANTIZED),
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
