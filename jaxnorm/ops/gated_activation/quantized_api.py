"""The public function `gated_activation_quantized`."""

import dataclasses
from typing import Any

import numpy as np

from jaxnorm.ops import checks
from jaxnorm.ops.activation import Synonym
from jaxnorm.ops.gated_activation.api import check_call
from jaxnorm.ops.gated_activation.formula import Activation
from jaxnorm.ops.gated_activation.quantized_op import GATED_ACTIVATION_QUANTIZED, NAME, Operands
from jaxnorm.ops.misuse import explained
from jaxnorm.ops.options import Implementation
from jaxnorm.ops.quantize import checks as quantize_checks
from jaxnorm.quantization import LARGEST, Quantization, Quantized, quantized


@explained
def gated_activation_quantized(
    x: Any,
    *,
    quantization: Quantization,
    activation: Activation | Synonym = "silu",
    static_scale: Any = None,
    axis: int = -1,
    straight_through: bool = False,
    implementation: Implementation | None = None,
) -> Quantized:
    """Multiplies what a gate lets through by an activation of the gate and quantises the result to 8 bits.

        v = gated_activation(x.astype(float32), ...)

        >>> q = gated_activation_quantized(jnp.ones((2, 16)), quantization=Quantization("int8"))

    and from there as `rms_norm_quantized`, whose dtypes, bits, derivative and errors these are: scales are of each row
    of the result, or of groups of its columns. With straight_through=True the gradient of x is that of
    `gated_activation`, in one native call.

    Args:
      x: array of float32, bfloat16 or float16, or a tuple of two, as for `gated_activation`, as are all options but
        those of `rms_norm_quantized`: quantization, static_scale and straight_through.

    Returns:
      A `Quantized`: values (..., columns), scales, a carrier.

    Raises:
      ValueError, TypeError, RuntimeError: as `gated_activation` and `rms_norm_quantized` do.

    Source: those of `gated_activation` and `rms_norm_quantized`.
    """
    spec, of_gates, chosen = check_call(NAME, x, axis, activation, implementation)
    named = {"x": of_gates.x} if of_gates.up is None else {"gate": of_gates.x, "up": of_gates.up}
    _check_groups(quantization, of_gates.x.shape[-1])
    quantize_checks.check_quantization(NAME, quantization, Quantization, of_gates.x, (-1,))
    quantize_checks.check_activations(NAME, quantization, LARGEST)
    given = quantize_checks.check_static_scale(NAME, static_scale, quantization.granularity)
    quantize_checks.check_float32(NAME, named)
    spec = dataclasses.replace(
        spec,
        out_dtype=np.dtype(np.float32),
        quantization=quantization,
        straight_through=checks.check_flag(NAME, "straight_through", straight_through),
    )
    results = GATED_ACTIVATION_QUANTIZED(spec, Operands(*of_gates, given), chosen)
    scales: Any = results.scales if given is None else given
    return quantized(quantization, results.values, scales, results.carrier)


def _check_groups(quantization: Any, cols: Any) -> None:
    group_size = getattr(quantization, "group_size", None)
    if group_size is not None and not (isinstance(cols, int) and cols % group_size == 0):
        raise ValueError(
            f"{NAME}: group_size {group_size} does not divide the {cols} columns of the result; take another "
            f"group_size or granularity='token'."
        )
