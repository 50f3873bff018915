"""Rows of the table for gated activations with a quantised result."""

from dataclasses import replace
from functools import cache

import bad_activation_calls as bad_calls
import bad_quantized_calls
import formulas
import jax
from gated_activation_rows import gated_activation, halves, packed_activation
from op import rows
from quantizing import GRANULARITIES, by_numpy, functions_of, static_scale_of
from statements import call

import jaxnorm
from jaxnorm import Quantization


@cache
def plain(activation, implementation=None):
    """A compiled function of gate and up: what is quantised, of float32 whatever their dtype."""

    def function(*pair):
        wide = tuple(array.astype("float32") for array in pair)
        return jaxnorm.gated_activation(wide, activation=activation, implementation=implementation)

    return jax.jit(function)


def quantized_activation(activation, granularity, to, *, packed=False):
    """What is differentiated is the dequantised result."""
    quantization = Quantization(to, **GRANULARITIES[granularity])
    op, run = (packed_activation if packed else gated_activation)(activation), quantization.group_size
    pair = halves if packed else lambda *args: args

    def quantized(*args, **options):
        given = {"static_scale": static_scale_of(quantization), "quantization": quantization}
        x = args[0] if packed else args
        return jaxnorm.gated_activation_quantized(x, activation=activation, **given, **options)

    def formula(*args):
        return (formulas.rounded(formulas.activated(activation, *pair(*args)), quantization),)

    def unfused(*args, **options):
        return by_numpy(plain(activation, **options)(*pair(*args)), quantization)

    lengths = (128, 4096, 14_336) if run else (1, 31, 128, 1021, 4096, 14_336)
    return replace(
        op,
        name=f"{op.name} to {granularity}, {to}",
        public="gated_activation_quantized",
        **functions_of(quantized),
        formula=formula,
        exact=None,
        exact_gradients=None,
        unfused=unfused,
        small=rows(6, 2 * run if run else 10),
        sizes=tuple(rows(7, cols) for cols in (*lengths, 20_480)),
        backward_sizes=(),
        lengths=tuple(rows(41, cols) for cols in lengths[:-1]),
        forward="jaxnorm_gated_activation_quantized_fwd",
        has_row_scale=granularity == "token",
        bad_calls=BAD_CALLS | bad_calls.MISUSE,
        without_kernel=bad_calls.WITHOUT_KERNEL,
    )


def of_pairs(calls):
    """Calls of quantised norms that say the same of an activation."""
    others = {"residual", "axis", "smooth_scale", "epsilon", "scale_offset", "with_unquantized", "return_statistics"}
    return {name: c for name, c in calls.items() if len(c.args) == 1 and not others & c.keywords.keys()}


BAD_CALLS = {
    **bad_calls.GATED_ACTIVATION,
    **of_pairs(bad_quantized_calls.QUANTIZED),
    "groups that do not divide": call(bad_quantized_calls.ROWS, quantization=Quantization("int8", "group")).raises(
        ValueError, "group_size 128 does not divide the 96 columns", "granularity='token'"
    ),
    "a static scale of groups": call(
        bad_quantized_calls.ROWS[..., :128], quantization=Quantization("int8", "group", 64), static_scale=1.0
    ).raises(ValueError, "static_scale", "'group'", "leave"),
}
