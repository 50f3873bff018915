"""The public functions `gated_activation` and `gated_activation_quantized`."""

import dataclasses
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm.native import compat
from jaxnorm.ops import checks, misuse
from jaxnorm.ops.activation import Synonym, check_activation
from jaxnorm.ops.gated_activation.formula import Activation, GatedActivation, Operands
from jaxnorm.ops.gated_activation.op import GATED_ACTIVATION, GATED_ACTIVATION_QUANTIZED, QuantizedOperands
from jaxnorm.ops.misuse import explained
from jaxnorm.ops.options import Implementation
from jaxnorm.ops.quantize import checks as quantize_checks
from jaxnorm.quantization import LARGEST, Quantization, Quantized, quantized
from jaxnorm.sharding import dims


@explained
def gated_activation(
    x: Any, *, activation: Activation | Synonym = "silu", axis: int = -1, implementation: Implementation | None = None
) -> jax.Array:
    """Computes `activation(gate) * up`, the elementwise step of a gated MLP.

        y = activation(gate) * up

        silu(v) = v * sigmoid(v)                                        SwiGLU
        gelu(v) = v * sigmoid(sqrt(8 / pi) * (v + 0.044715 * v³))       GeGLU, its approximation by tanh
        gelu_exact(v) = v * (1 + erf(v / sqrt(2))) / 2                  GeGLU
        relu2(v) = max(v, 0)²,  sigmoid(v) = 1 / (1 + exp(-v))          Primer, GLU
        >>> y = gated_activation((jnp.ones((2, 8)), jnp.ones((2, 8))), activation="gelu")

    It computes, rounds and transforms as `rms_norm` does. A gradient keeps x alone, and one native call writes it.

    Args:
      x: floating-point array with both, the gate first: (..., 2 * columns), or (..., 2, columns) with axis=-2. Or a
        tuple (gate, up) of two arrays of one shape; kernels want one dtype, the formula takes any.
      axis: -1, or -2 where x has gate and up along its last axis but one. With a tuple leave it out.

    Returns:
      An array (..., columns) of x's dtype; jax.numpy promotes two dtypes.

    Raises:
      ValueError, TypeError, RuntimeError: x is no such array or tuple, activation is unknown; or as `rms_norm`.

    Source: Shazeer, 2020, https://arxiv.org/abs/2002.05202; relu2: So et al., 2021, https://arxiv.org/abs/2109.08668.
    """
    spec, operands, chosen = _check_call("gated_activation", x, axis, activation, implementation)
    return GATED_ACTIVATION(spec, operands, chosen).y


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
    """Computes `activation(gate) * up`, the elementwise step of a gated MLP, and quantises it to 8 bits.

        v = gated_activation(x.astype(float32), ...)

        >>> q = gated_activation_quantized(jnp.ones((2, 16)), quantization=Quantization("int8"))

    and quantises v as `rms_norm_quantized` does, with its dtypes, bits, derivative and errors: a scale for each row of
    the result, or for each group of its columns. With straight_through=True the gradient of x is that of
    `gated_activation`, in one native call.

    Args:
      x: array of float32, bfloat16 or float16, or a tuple of two. This and the options are those of `gated_activation`;
        quantization, static_scale and straight_through are those of `rms_norm_quantized`.

    Returns:
      A `Quantized`: values (..., columns), scales, a carrier.

    Raises:
      ValueError, TypeError, RuntimeError: as `gated_activation` and `rms_norm_quantized` do.

    Source: those of `gated_activation` and `rms_norm_quantized`.
    """
    name = "gated_activation_quantized"
    spec, of_gates, chosen = _check_call(name, x, axis, activation, implementation)
    named = {"x": of_gates.x} if of_gates.up is None else {"gate": of_gates.x, "up": of_gates.up}
    _check_groups(name, quantization, of_gates.x.shape[-1])
    quantize_checks.check_quantization(name, quantization, Quantization, of_gates.x, (-1,))
    quantize_checks.check_activations(name, quantization, LARGEST)
    given = quantize_checks.check_static_scale(name, static_scale, quantization.granularity)
    quantize_checks.check_float32(name, named)
    spec = dataclasses.replace(
        spec,
        out_dtype=np.dtype(np.float32),
        quantization=quantization,
        straight_through=checks.check_flag(name, "straight_through", straight_through),
    )
    results = GATED_ACTIVATION_QUANTIZED(spec, QuantizedOperands(*of_gates, given), chosen)
    scales: Any = results.scales if given is None else given
    return quantized(quantization, results.values, scales, results.carrier)


def _check_call(
    function: str, x: Any, axis: Any, activation: Any, implementation: Any
) -> tuple[GatedActivation, Operands, Implementation | None]:
    choice = checks.check_implementation(function, implementation)
    operands = _check_operands(function, x, axis)
    dtypes = [array.dtype for array in operands if array is not None]
    spec = GatedActivation(
        axes=(-2, -1) if operands.up is None else (-1,),
        compute_dtype=dims.wide_dtype(dtypes),
        out_dtype=np.dtype(jnp.result_type(*dtypes)),
        activation=check_activation(function, activation, get_args(Activation)),
        **choice.asks(function),
    )
    return spec, operands, choice.implementation


def _check_operands(function: str, x: Any, axis: Any) -> Operands:
    """Gate and up by themselves, or along the last axis but one."""
    number = checks.check_int(function, "axis", axis, "pass -1 or -2")
    if isinstance(x, tuple):
        return _check_pair(function, x, number)
    if isinstance(x, list) and len(x) == 2 and all(map(checks.is_array, x)):
        raise TypeError(f"{function}: x must be an array or a tuple, got list; {misuse.pair(function)}")
    array = checks.check_x(function, x)
    along = number - array.ndim if number >= 0 else number
    if along not in (-1, -2) or array.ndim < -along:
        raise ValueError(
            f"{function}: axis={number} of x, which has shape {array.shape}, expected -1, of (..., 2 * columns), or "
            f"-2, of (..., 2, columns)."
        )
    if along == -2:
        if array.shape[-2] != 2:
            raise ValueError(
                f"{function}: x has shape {array.shape}, expected (..., 2, columns) with axis={number}, the gate and "
                f"what it gates. Leave axis out if they lie side by side along the last axis."
            )
        return Operands(dims.unsharded(array, -2))
    return _in_halves(function, array)


def _check_pair(function: str, pair: tuple[Any, ...], axis: int) -> Operands:
    if len(pair) != 2:
        raise ValueError(f"{function}: x is a tuple of {len(pair)}, expected (gate, up), or an array that has both.")
    if axis != -1:
        raise ValueError(
            f"{function}: axis={axis} of a tuple (gate, up), whose arrays have nothing along an axis to tell apart; "
            f"leave axis out."
        )
    gate = checks.check_x(function, pair[0], "gate")
    up = checks.check_array(function, "up", pair[1])
    if up.shape != gate.shape:
        raise ValueError(
            f"{function}: up has shape {up.shape}, expected gate's shape {gate.shape}: they are multiplied element by "
            f"element. Reshape or broadcast one of them, as with jax.numpy.broadcast_to(up, gate.shape)."
        )
    return Operands(gate, up)


def _in_halves(function: str, x: jax.Array) -> Operands:
    """The halves of the last axis along one of their own, which moves nothing in memory."""
    length: Any = x.shape[-1]
    half = length // 2
    if 2 * half != length:  # or a symbolic length is not known to be even
        raise ValueError(
            f"{function}: x has shape {x.shape}, expected a last axis of even length, of which the first half is the "
            f"gate. Pass a tuple (gate, up) if these are two arrays, or axis=-2 if they lie along another axis."
        )
    shards = compat.shard_count(x, -1)
    if shards == 1:
        return Operands(x.reshape(*x.shape[:-1], 2, half))
    if half % shards:
        raise ValueError(
            f"{function}: the last axis of x, which has shape {x.shape}, is split over {shards} devices of an Explicit "
            f"mesh, which do not divide a half of {half} columns; reshard x, or stack gate and up along axis=-2."
        )
    return Operands(x[..., :half], x[..., half:])


def _check_groups(function: str, quantization: Any, cols: Any) -> None:
    group_size = getattr(quantization, "group_size", None)
    if group_size is not None and not (isinstance(cols, int) and cols % group_size == 0):
        raise ValueError(
            f"{function}: group_size {group_size} does not divide the {cols} columns of the result; take another "
            f"group_size or granularity='token'."
        )
