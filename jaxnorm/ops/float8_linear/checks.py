"""Checks of a recipe and of the operands of a linear layer, as `jaxnorm.ops.checks`."""

from collections.abc import Iterable, Sequence

import jax
import numpy as np
from jax.typing import DTypeLike

from jaxnorm.ops import checks
from jaxnorm.ops.float8_linear.formula import FLOAT8
from jaxnorm.ops.quantize.checks import check_float32
from jaxnorm.ops.quantized_dot import checks as quantized_dot
from jaxnorm.quantization import Quantized

PRODUCTS = ("y", "dx", "dw")


def check_fast_accumulation(products: object) -> tuple[str, ...]:
    """The products, each once, in the order of PRODUCTS."""
    expected = f"expected some of {', '.join(map(repr, PRODUCTS))} as a tuple, as ('y',), or () for none"
    if isinstance(products, str) or not isinstance(products, Iterable):
        raise TypeError(f"Float8Recipe: fast_accumulation must be a tuple of names, got {products!r}; {expected}.")
    given = tuple(products)
    for name in given:
        if name not in PRODUCTS:
            raise ValueError(f"Float8Recipe: fast_accumulation has no product {name!r}; {expected}.")
    return tuple(name for name in PRODUCTS if name in given)


def check_x(function: str, x: object) -> jax.Array | Quantized:
    """x as an array, or a `Quantized` of float8 whose scales can be taken out of the product's sum."""
    if not isinstance(x, Quantized):
        array = checks.check_array(function, "x", x)
        check_float32(function, {"x": array})
        if array.ndim == 0:
            raise ValueError(f"{function}: x is a scalar, expected (..., K): its last axis is summed.")
        return array
    if x.values.dtype != FLOAT8:
        raise TypeError(
            f"{function}: x has values of {x.values.dtype}, expected {FLOAT8}; quantize it with "
            f"jaxnorm.Quantization(jax.numpy.float8_e4m3fn), or use jaxnorm.quantized_dot."
        )
    quantized_dot.check_scales(function, "x", x)
    return x


def check_kernel(
    function: str, kernel: object, shape: Sequence[int]
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """The kernel as a matrix that goes with an x of this shape; of a quantised one its scales and carrier, too."""
    if isinstance(kernel, Quantized):
        dims = kernel.values.shape[:: -1 if kernel.transposed else 1]
    else:
        kernel = checks.check_array(function, "kernel", kernel)
        check_float32(function, {"kernel": kernel})
        dims = kernel.shape
    if len(dims) != 2:
        raise ValueError(
            f"{function}: kernel has shape {dims}, expected two axes (K, N): inputs, and outputs; reshape it, or for "
            f"several matrices use jax.vmap."
        )
    depth, outputs = dims
    if depth != shape[-1]:
        is_transposed = outputs == shape[-1]
        remedy = "pass kernel.T, so that K is its first axis" if is_transposed else "K must be the same"
        raise ValueError(
            f"{function}: x has shape {tuple(shape)} and kernel {dims}, expected (..., K) and (K, N); {remedy}."
        )
    if not isinstance(kernel, Quantized):
        return kernel, None, None
    remedy = "round it by jaxnorm.quantize_kernel(kernel, jaxnorm.Quantization(jax.numpy.float8_e4m3fn))"
    if kernel.values.dtype != FLOAT8:
        raise TypeError(
            f"{function}: kernel has values of {kernel.values.dtype}, expected {FLOAT8}; {remedy}, or use "
            f"jaxnorm.quantized_dot."
        )
    if not kernel.transposed:
        raise ValueError(f"{function}: kernel lies as (inputs, outputs), expected it transposed; {remedy}.")
    expected = (kernel.values.shape[0], 1)
    if kernel.scales.shape != expected:
        raise ValueError(
            f"{function}: kernel has scales of shape {kernel.scales.shape}, expected {expected}, one for each output; "
            f"{remedy}."
        )
    return kernel.values, kernel.scales, kernel.carrier


def check_bias(function: str, bias: object, kernel: tuple[int, ...]) -> jax.Array | None:
    if bias is None:
        return None
    array = checks.check_array(function, "bias", bias)
    check_float32(function, {"bias": array})
    if array.shape != kernel[1:]:
        raise ValueError(
            f"{function}: bias has shape {array.shape}, expected {kernel[1:]}: a number for each column of "
            f"kernel, which has shape {kernel}."
        )
    return array


def check_out_dtype(function: str, out_dtype: DTypeLike | None, x: jax.Array | Quantized) -> np.dtype:
    dtype = quantized_dot.check_out_dtype(function, out_dtype, x)
    if dtype == np.float64:
        raise TypeError(f"{function}: out_dtype is float64, expected 16 or 32 bits: sums are float32; convert it.")
    return dtype
