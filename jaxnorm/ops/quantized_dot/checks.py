"""Checks of the operands of a product, as `jaxnorm.ops.checks`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxnorm.ops import checks
from jaxnorm.quantization import Quantized

_QUANTIZE = "jaxnorm.quantize_kernel(kernel, jaxnorm.Quantization(jax.numpy.int8))"


def check_kernel(function: str, kernel: object, x: object) -> Quantized:
    """kernel as it lies for a product, transposed."""
    if not isinstance(kernel, Quantized):
        swapped = " Are x and kernel in each other's place?" if isinstance(x, Quantized) else ""
        raise TypeError(
            f"{function}: kernel must be a jaxnorm.Quantized, as of {_QUANTIZE}, got {type(kernel).__name__}; "
            f"of a kernel that is not quantised use jax.numpy.matmul.{swapped}"
        )
    shape = kernel.values.shape
    if len(shape) != 2:
        raise ValueError(
            f"{function}: kernel has values of shape {shape}, expected two axes, of inputs and outputs; for several "
            f"kernels use jax.vmap."
        )
    if kernel.groups_axis != -1:
        scales = jnp.moveaxis(kernel.scales, kernel.groups_axis, -1)
        kernel = dataclasses.replace(kernel, scales=scales, groups_axis=-1)
    if kernel.transposed:
        return kernel
    return dataclasses.replace(kernel, values=kernel.values.T, scales=kernel.scales.T, transposed=True)


def check_x(function: str, x: object, kernel: Quantized) -> jax.Array | Quantized:
    """x as an array or a `Quantized`, which goes with the kernel as it lies for a product."""
    if isinstance(x, Quantized):
        check_scales(function, "x", x)
        values = x.values
        if values.dtype.name not in (expected := dtypes_beside(kernel.values.dtype)):
            raise TypeError(
                f"{function}: x has values of {values.dtype} and the kernel of {kernel.values.dtype}, expected "
                f"{' or '.join(expected)} for x; quantize it to that, or the kernel to a dtype like it. Only kernels "
                f"have 4 bits."
            )
    else:
        x = values = checks.check_array(function, "x", x)
    outputs, inputs = kernel.values.shape
    if values.ndim == 0 or values.shape[-1] != inputs:
        transposed = values.ndim and outputs == values.shape[-1]
        remedy = "quantize its transpose, whose inputs come first" if transposed else "K must be the same"
        raise ValueError(
            f"{function}: x has shape {values.shape} and kernel {(inputs, outputs)}, expected (..., K) and (K, N); "
            f"{remedy}."
        )
    return x


def check_scales(function: str, name: str, quantized: Quantized) -> None:
    """That a product can have the scales of x, or of a kernel as it lies for it."""
    shape, scales = quantized.values.shape, quantized.scales.shape
    if name == "x" and quantized.transposed:
        raise ValueError(
            f"{function}: x lies transposed, as a kernel of shape {(*shape[:-2], *shape[:-3:-1])}; are x and kernel in "
            f"each other's place? quantize x by jaxnorm.quantize."
        )
    expected = (*shape[:-1], 1)
    if scales in ((), expected):
        return
    groups = scales[:-1] == shape[:-1]
    why = "a product has no scales of groups, since they cannot be taken out of its sum" if groups else ""
    remedy = "take granularity='token' or 'tensor'" if groups else "quantize along the last axis"
    if name == "kernel":
        shape, scales, expected = shape[::-1], scales[::-1], expected[::-1]
        remedy = remedy if groups else "quantize along the inputs, as jaxnorm.quantize_kernel does"
    raise ValueError(
        f"{function}: {name} with values of shape {shape} has scales of shape {scales}, expected {expected} or (); "
        f"{f'{why}: ' if why else ''}{remedy}."
    )


def dtypes_beside(kernel: DTypeLike) -> tuple[str, ...]:
    """The dtypes of a quantised x that there is a product of with a kernel of this dtype."""
    return ("float8_e4m3fn", "float8_e5m2") if jnp.issubdtype(kernel, jnp.floating) else ("int8",)


def check_bias(function: str, bias: object, outputs: int) -> jax.Array | None:
    if bias is None:
        return None
    array = checks.check_array(function, "bias", bias)
    if array.shape != (outputs,):
        raise ValueError(f"{function}: bias has shape {array.shape}, expected {(outputs,)}: a number for each output.")
    return array


def check_out_dtype(function: str, out_dtype: DTypeLike | None, x: jax.Array | Quantized) -> np.dtype:
    """The dtype of y: by default that of x, and bfloat16 where x is quantised."""
    if isinstance(x, Quantized):
        return checks.check_out_dtype(function, jnp.bfloat16 if out_dtype is None else out_dtype, x.values.dtype)
    return checks.check_out_dtype(function, out_dtype, x.dtype)
