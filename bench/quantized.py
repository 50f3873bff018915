"""What `bench.programs` has, of the norms with a quantised result: what to time, and the check that comes first.

A kind is the name of an op, and after a comma that of a variant: "rms_quantized" is to float8_e4m3fn with a scale a
token, "rms_quantized, int8" the same to int8. They have a forward only.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxnorm
from bench.programs import TOLERANCE, Program, draw, is_layer, relative_error, sampled_rows, standardised
from jaxnorm import Quantization

NORMS = {"rms_quantized": jaxnorm.rms_norm_quantized, "layer_quantized": jaxnorm.layer_norm_quantized}
CHECKED = "forward"
CODE_TOLERANCE = 2e-6  # of what is quantised and of the scales, which are computed in float32 whatever x is
STATIC_LARGEST = 4.0  # what a static scale is made for: less than most rows reach, so that some values are clipped


class Variant(NamedTuple):
    quantization: Quantization
    has_residual: bool = False


PLAIN = Variant(Quantization("float8_e4m3fn"))
# Each differs from the plain one in what its name says.
VARIANTS = {
    "int8": Variant(Quantization("int8")),
    "float8_e5m2": Variant(Quantization("float8_e5m2")),
    "groups of 32": Variant(Quantization("float8_e4m3fn", "group", 32)),
    "groups of 128": Variant(Quantization("float8_e4m3fn", "group", 128)),
    "static scale": Variant(Quantization("float8_e4m3fn", "tensor")),
    "with a residual": Variant(PLAIN.quantization, has_residual=True),
}


def variant_of(kind):
    _, comma, name = kind.partition(", ")
    return VARIANTS[name] if comma else PLAIN


def moved(kind, dtype, rows, cols):
    """How many bytes the program reads or writes once, by direction: x and a byte an element, the residual and the sum.

    Scales are not counted: with one for 128 elements they are another 3 % of the bytes that are written.
    """
    arrays = 3 if variant_of(kind).has_residual else 1
    return {"forward": rows * cols * (arrays * jnp.dtype(dtype).itemsize + 1)}


def operands(kind, dtype, rows, cols, seed=0):
    """x, or (x, residual); the weights; and the static scale, or None."""
    variant = variant_of(kind)
    arrays, weights = draw(seed, jnp.dtype(dtype).name, rows, cols, 2 if variant.has_residual else 1)
    is_static = variant.quantization.granularity == "tensor"
    static_scale = jnp.float32(STATIC_LARGEST / variant.quantization.largest) if is_static else None
    x = arrays if variant.has_residual else arrays[0]
    return x, weights if is_layer(kind) else weights[:1], static_scale


@functools.cache
def functions(kind, implementation):
    """Each program as one jitted function, as `bench.programs.functions` has them."""
    op, quantization = kind.partition(", ")[0], variant_of(kind).quantization
    norm = functools.partial(NORMS[op], quantization=quantization, implementation=implementation)

    def arrays(result, static_scale):
        # A static scale is no result here: XLA would copy it.
        return (result.values, result.scales) if static_scale is None else (result.values,)

    def forward(x, weights, static_scale):
        return arrays(norm(x, *weights, static_scale=static_scale), static_scale)

    def add(residual, x, weights, static_scale):
        result, total = norm(x, *weights, residual=residual, static_scale=static_scale)
        return total, arrays(result, static_scale)

    return {"forward": jax.jit(forward), "add": jax.jit(add), "carry": jax.jit(add, donate_argnums=0)}


def programs(kind, implementation, x, weights, static_scale):
    """The `Program` of the forward; jaxnorm's writes the sum over the residual, as in `bench.programs`."""
    f = functions(kind, implementation)
    if not variant_of(kind).has_residual:
        return {"forward": Program(f["forward"], (x, weights, static_scale))}
    x, residual = x
    if implementation == "jnp":
        return {"forward": Program(f["add"], (residual, x, weights, static_scale))}
    return {"forward": Program(f["carry"], (jnp.copy(residual), x, weights, static_scale), carries=True)}


def check(kind, x, weights, static_scale, forward=None):
    """The largest error of sampled rows of values, scales and sum, relative to its tolerance.

    Of values it is by how much they are farther than half a step from what they should be: a value is right if it is
    the nearest to what differs from the exact one by no more than the tolerance. `forward` is the program to check.
    """
    variant = variant_of(kind)
    function, arguments, _ = programs(kind, "native", x, weights, static_scale)["forward"]
    results = (forward or function)(*arguments)
    arrays = {"x": x}
    if variant.has_residual:
        total, results = results
        arrays = {"x": x[0], "residual": x[1], "sum": total}
    arrays |= zip(("values", "scales"), results, strict=False)
    rows, weights = jax.device_get((_samples(arrays), weights))
    x_hat, _ = standardised(kind, rows.get("sum", rows["x"]))
    scale, *bias = (np.float64(weight) for weight in weights)
    errors = _errors(variant.quantization, x_hat * scale + sum(bias), rows["values"], rows.get("scales", static_scale))
    if "sum" in rows:
        expected = np.float64(rows["x"]) + np.float64(rows["residual"])
        errors.append(relative_error(rows["sum"], expected) / TOLERANCE[rows["sum"].dtype.name])
    return float(np.max(errors))  # NaN if one is


_samples = jax.jit(sampled_rows)


def _errors(quantization, y, values, scales):
    """Of rows, relative to the tolerance: the errors of the values, and of the scales if they were computed."""
    group, largest = quantization.group_size or y.shape[1], quantization.largest
    y, values = (np.float64(array).reshape(len(y), -1, group) for array in (y, values))
    scales = np.broadcast_to(np.float64(scales), y.shape[:2])[..., None]
    amax = np.abs(y).max(-1, keepdims=True)
    exact = np.clip(y / scales, -largest, largest)
    beyond = np.maximum(np.abs(values - exact) - _step(quantization.dtype, exact) / 2, 0)
    errors = [np.max(beyond * scales / amax) / CODE_TOLERANCE]
    if quantization.granularity != "tensor":
        errors.append(np.max(np.abs(scales * largest / amax - 1)) / CODE_TOLERANCE)
    return errors


def _step(dtype, exact):
    """The distance of the two neighbouring values of dtype between which a number lies."""
    if dtype == jnp.int8:
        return 1.0
    info = jnp.finfo(dtype)
    exponent = np.floor(np.log2(np.maximum(np.abs(exact), 2.0**info.minexp)))
    return 2.0 ** (exponent - info.nmant)
