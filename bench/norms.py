"""The norms that `bench gpu` and `bench cpu` measure, by kind: an op's name, or that and after a comma what differs.

RMSNorm has a scale, LayerNorm scale and bias. A gate is the first of the weights.
"""

from functools import partial

import jax.numpy as jnp

import jaxnorm
from bench import shapes
from bench.programs import Op, draw, nbytes
from jaxnorm import Quantization

NORMS = {"rms": jaxnorm.rms_norm, "layer": jaxnorm.layer_norm}
ADDED = {"add_rms": jaxnorm.add_rms_norm, "add_layer": jaxnorm.add_layer_norm}
QUANTIZED = {"rms_quantized": jaxnorm.rms_norm_quantized, "layer_quantized": jaxnorm.layer_norm_quantized}
PAD_TO, GROUP = 256, 1024
PADDED, HEADS = f"add_rms, padded to {PAD_TO}", "rms, a scale a head"
GATED, GATE_LAST, GROUPED = (f"gated_rms{name}" for name in ("", ", gate last", f", groups of {GROUP}"))
STATIC_LARGEST = 4.0  # what a static scale is made for: less than most rows reach, so that some values are clipped
TO_FLOAT8 = Quantization("float8_e4m3fn")
# Each differs in what its name says from the plain one, which is to float8_e4m3fn with a scale a token.
QUANTIZATIONS = {
    "int8": Quantization("int8"),
    "float8_e5m2": Quantization("float8_e5m2"),
    "groups of 32": Quantization("float8_e4m3fn", "group", 32),
    "groups of 128": Quantization("float8_e4m3fn", "group", 128),
    "static scale": Quantization("float8_e4m3fn", "tensor"),
    "with a residual": TO_FLOAT8,
}


def weights_of(kind, shape, dtype, seed):
    return draw(seed, dtype, *[(shape.cols,)] * (2 if kind.startswith(("layer", "add_layer")) else 1), kind="weights")


def arrays_of(shape, dtype, seed, count):
    return draw(seed, dtype, *[(shape.rows, shape.cols)] * count)


def plain(kind):
    def operands(shape, dtype, seed):
        x, dy = arrays_of(shape, dtype, seed, 2)
        return x, weights_of(kind, shape, dtype, seed), dy

    return Op(lambda how: partial(NORMS[kind], implementation=how), operands, partial(nbytes, forward=2, backward=3))


def added(kind, pad_to=1):
    """x, residual, y and the sum are moved forward; the sum, dy, dsum and dx backward. Zeros are written, not read."""

    def operands(shape, dtype, seed):
        *x, dy, dsum = arrays_of(shape, dtype, seed, 4)
        dy = jnp.pad(dy, ((0, 0), (0, -shape.cols % pad_to)), constant_values=1)
        return tuple(x), weights_of(kind, shape, dtype, seed), (dy, dsum)

    def moved(shape, itemsize):
        zeros = shape.rows * itemsize * (-shape.cols % pad_to)
        arrays = nbytes(shape, itemsize, 4, 4)
        return {way: moved + (0 if way == "backward" else zeros) for way, moved in arrays.items()}

    options = {} if pad_to == 1 else {"pad_to": pad_to}

    def function(how):
        return lambda pair, *weights: ADDED[kind](*pair, *weights, **options, implementation=how)

    return Op(function, operands, moved, carries=True)


def gated(gate_first=True, group_size=None):
    def operands(shape, dtype, seed):
        x, gate, dy = arrays_of(shape, dtype, seed, 3)
        return x, (gate, *weights_of("rms", shape, dtype, seed)), dy

    options = {"gate_first": gate_first, "group_size": group_size}
    function = jaxnorm.gated_rms_norm
    return Op(
        lambda how: partial(function, **options, implementation=how), operands, partial(nbytes, forward=3, backward=5)
    )


def per_head():
    """Rows are those of all heads of the first token, of the second, and so on; the norm sees an axis of heads."""

    def operands(shape, dtype, seed):
        if shape.rows % shapes.HEADS:
            raise ValueError(f"{shape.rows} rows are not those of {shapes.HEADS} heads")
        x, dy = arrays_of(shape, dtype, seed, 2)
        return x, draw(seed, dtype, (shapes.HEADS, shape.cols), kind="weights"), dy

    def function(how):
        def norm(x, scale):
            return jaxnorm.rms_norm(x.reshape(-1, *scale.shape), scale, implementation=how).reshape(x.shape)

        return norm

    return Op(function, operands, partial(nbytes, forward=2, backward=3), fixed=2)


def quantized(kind, quantization=TO_FLOAT8, has_residual=False):
    """Of the result a byte an element is counted, and no scales: one for 128 elements would be another 3 %."""
    is_static = quantization.granularity == "tensor"

    def operands(shape, dtype, seed):
        x = arrays_of(shape, dtype, seed, 1 + has_residual)
        static_scale = [jnp.float32(STATIC_LARGEST / quantization.largest)] if is_static else []
        return x if has_residual else x[0], (*weights_of(kind, shape, dtype, seed), *static_scale), None

    def function(how):
        norm = partial(QUANTIZED[kind], quantization=quantization, implementation=how)

        def of_arrays(x, *weights):
            if is_static:  # whose scale is no result here: XLA would copy it
                return norm(x, *weights[:-1], static_scale=weights[-1]).quantized.values
            x, residual = x if has_residual else (x, None)
            result, total, *_ = norm(x, *weights, residual=residual)
            arrays = result.values, result.scales
            return (arrays, total) if has_residual else arrays

        return of_arrays

    def moved(shape, itemsize):
        return nbytes(shape, 1, (3 if has_residual else 1) * itemsize + 1)

    return Op(function, operands, moved, carries=has_residual, is_last=True, is_rounded=True)


OPS = {
    **{kind: plain(kind) for kind in NORMS},
    **{kind: added(kind) for kind in ADDED},
    PADDED: added("add_rms", PAD_TO),
    **{kind: quantized(kind) for kind in QUANTIZED},
    **{
        f"{kind}, {name}": quantized(kind, quantization, name == "with a residual")
        for kind in QUANTIZED
        for name, quantization in QUANTIZATIONS.items()
    },
    GATED: gated(),
    GATE_LAST: gated(gate_first=False),
    GROUPED: gated(group_size=GROUP),
    HEADS: per_head(),
}
