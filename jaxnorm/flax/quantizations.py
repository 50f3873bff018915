"""How a quantised linear layer of any library is told what it is quantised to."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxnorm.ops.quantized_dot.checks import dtypes_beside
from jaxnorm.quantization import Quantization


def pair(function: str, kernels: Any, inputs: Any) -> tuple[Quantization, Quantization | None]:
    """Both, quantised with a scale for each row, to dtypes of which there is a product."""
    kernels = of_rows(function, "kernels", kernels)
    if inputs is None:
        return kernels, None
    inputs = of_rows(function, "inputs", inputs)
    theirs, ours = (jnp.dtype(quantization.dtype) for quantization in (kernels, inputs))
    if ours.name not in (expected := dtypes_beside(theirs)):
        raise TypeError(
            f"{function}: inputs are quantised to {ours}, expected {' or '.join(expected)} for kernels of "
            f"{theirs}; leave inputs out to quantise the kernels only."
        )
    return kernels, inputs


def of_rows(function: str, name: str, given: Any) -> Quantization:
    """What is given for "kernels" or "inputs", or what a dtype stands for, with a scale for each row."""
    quantization = _quantization(function, name, given)
    if quantization.granularity != "token":
        why = "an output" if name == "kernels" else "a row of the input"
        raise ValueError(
            f"{function}: {name} has granularity={quantization.granularity!r}, expected 'token', a scale for {why}."
        )
    return quantization


def _quantization(function: str, name: str, given: Any) -> Quantization:
    """What is given, or what a dtype stands for."""
    if isinstance(given, Quantization):
        return given
    try:
        # Of an array numpy would take its dtype.
        return Quantization(jnp.dtype(given) if isinstance(given, (str, type, np.dtype)) else None)
    except TypeError as error:
        example = f"{name}=jaxnorm.Quantization(jax.numpy.int8)"
        raise TypeError(
            f"{function}: {name} must be a jaxnorm.Quantization, as {example}, or a dtype that it takes, got {given!r}."
        ) from error
