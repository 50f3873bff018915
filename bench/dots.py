"""Device time of products with quantised operands on one NVIDIA GPU, beside that of bfloat16, in one run.

    python -m bench dots --out bench/results/h200_dots

Kernel time comes from CUPTI and is the median of many calls. As many sets of operands take turns as are beyond the
cache in bfloat16; of fewer bytes, small weights may stay in it. Results are bfloat16. "us" is what `quantized_dot`
takes by default, "kernels" how many that are, "XLA us" with implementation="jnp", "bf16 us" the same product of
bfloat16. Behind a norm both sides begin with `rms_norm`, quantised or not, of the same x.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import jaxnorm
from bench import report
from bench.timing import device_time, sets_needed
from jaxnorm import Quantization

# Inputs and outputs of the products of Llama 3, the projections of one input as one; and two of FlyDSL.
MATRICES = {
    "8B, q, k and v": (4096, 6144),
    "8B, gate and up": (4096, 28672),
    "8B, down": (14336, 4096),
    "70B, q, k and v": (8192, 10240),
    "70B, down": (28672, 8192),
}
TOKENS = (1, 16, 256, 8192)
SHAPES = {
    "8B, gate": (8192, 4096, 14336),
    "FlyDSL 5120": (5120, 8320, 5120),
    "FlyDSL 9728": (9728, 8320, 8192),
    **{f"{name}, {tokens} tokens": (tokens, *matrix) for name, matrix in MATRICES.items() for tokens in TOKENS},
}


class Form(NamedTuple):
    """How the operands of a product are quantised; x is an array where it has no dtype."""

    weights: str
    x: str | None = None
    has_norm: bool = False


FORMS = {
    "float8": Form("float8_e4m3fn", "float8_e4m3fn"),
    "float8 behind a norm": Form("float8_e4m3fn", "float8_e4m3fn", has_norm=True),
    "int8": Form("int8", "int8"),
    "int8 by int4": Form("int4", "int8"),
    "float8 weights": Form("float8_e4m3fn"),
    "int8 weights": Form("int8"),
    "int4 weights": Form("int4"),
}


def add_arguments(parser):
    report.add_arguments(parser)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), metavar="NAME")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS), metavar="NAME")
    parser.add_argument("--iterations", type=int, default=10, help="calls of each program")


def operands(shape, seed):
    """x and weights of bfloat16."""
    tokens, depth, outputs = shape
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), 2)
    x = jax.random.normal(keys[0], (tokens, depth), jnp.bfloat16)
    return x, jax.random.normal(keys[1], (outputs, depth), jnp.bfloat16) * depth**-0.5


def quantized(form, x, weights):
    """The operands of a product of this form; x is quantised by the norm where there is one."""
    if form.x and not form.has_norm:
        x = jaxnorm.quantize(x, Quantization(jnp.dtype(form.x)))
    return x, jaxnorm.quantize(weights, Quantization(jnp.dtype(form.weights)))


def program(form, implementation=None) -> Callable[..., Any]:
    """The product of operands of this form, behind a norm if it has one."""

    def of_both(x, weights):
        if form.has_norm:
            x = jaxnorm.rms_norm_quantized(x, quantization=Quantization(jnp.dtype(form.x)))
        return jaxnorm.quantized_dot(x, weights, out_dtype=jnp.bfloat16, implementation=implementation)

    return of_both


def in_bfloat16(form, x, weights):
    """The same with nothing quantised."""
    x = jaxnorm.rms_norm(x) if form.has_norm else x
    return lax.dot_general(x, weights, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)


def times(shape, names, iterations):
    """By form, None for bfloat16 without a norm: the time by default and by XLA."""
    tokens, depth, outputs = shape
    size = depth * (tokens + outputs)
    sets = [operands(shape, seed) for seed in range(sets_needed(2 * size, 2 * size))]

    def time(function, of_sets):
        return device_time(jax.jit(function), of_sets, iterations)

    plain = dict.fromkeys({FORMS[name].has_norm for name in names})
    for has_norm in plain:
        form = Form("", has_norm=has_norm)
        plain[has_norm] = time(lambda x, weights, form=form: in_bfloat16(form, x, weights), sets)
    for name in names:
        form = FORMS[name]
        of_form = [jax.jit(lambda x, w, form=form: quantized(form, x, w))(*arrays) for arrays in sets]
        by_default, by_xla = (time(program(form, how), of_form) for how in (None, "jnp"))
        yield name, by_default, by_xla, plain[form.has_norm]


def main(args):
    header, rows = report.device(args.commit), []
    for shape in args.shapes:
        for name, ours, xla, bf16 in times(SHAPES[shape], args.forms, args.iterations):
            tokens, depth, outputs = SHAPES[shape]
            rows.append(
                {
                    "op": f"quantized_dot, {name}",
                    "shape": f"{shape}, {tokens}x{depth} by {outputs}",
                    "us": 1e6 * ours.seconds,
                    "kernels": len(ours.kernels),
                    "XLA us": 1e6 * xla.seconds,
                    "bf16 us": 1e6 * bf16.seconds,
                    "x bf16": bf16.seconds / ours.seconds,
                }
            )
            report.write(header, rows, args.out)
