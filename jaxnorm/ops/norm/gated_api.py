"""The public functions of the gated norm, and the checks of its own arguments."""

import math
from typing import Any, NamedTuple, TypeVar, get_args

import jax
import numpy as np

from jaxnorm.ops import checks
from jaxnorm.ops.activation import Synonym, check_activation
from jaxnorm.ops.gated_norm_quantized.formula import GATED_NORM_QUANTIZED, GatedNormQuantized
from jaxnorm.ops.misuse import GATE_FIRST, explained
from jaxnorm.ops.norm.formula import Norm
from jaxnorm.ops.norm.gated_formula import Activation, Operands, QuantizedOperands
from jaxnorm.ops.norm.op import GATED_NORM
from jaxnorm.ops.options import Implementation, NormOptions
from jaxnorm.ops.quantize import checks as quantize_checks
from jaxnorm.quantization import LARGEST, Quantization, Quantized, quantized
from jaxnorm.sharding import dims
from jaxnorm.sharding.shards import Shards

A = TypeVar("A", bound=tuple[Any, ...])


@explained
def gated_rms_norm(
    x: Any,
    gate: Any,
    scale: Any = None,
    *,
    gate_first: bool,
    activation: Activation | Synonym = "silu",
    group_size: int | None = None,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    out_dtype: Any = None,
    axis_name: Any = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Divides x by its root mean square over the last axis and multiplies it by an activation of a gate.

        a = gate * sigmoid(gate)                            with activation="silu"
        a = sigmoid(gate)                                   with activation="sigmoid"
        y = rms_norm(x * a) * (scale + scale_offset)        gate_first=True: Mamba2
        y = rms_norm(x) * (scale + scale_offset) * a        gate_first=False: Qwen3-Next, gated linear attention

    with `rms_norm(h) = h * rsqrt(mean(h², -1) + epsilon)`. All of it is computed in float32 (in float64 where an
    operand or the result is float64) and rounded once, at the end; kernels take a sigmoid below 2**-126 for 0. It may
    be transformed and differentiated as `rms_norm`. In a gradient one native call each way serves x, gate and scale,
    and x, gate and a float32 a row are kept for it.

    Args:
      x: floating-point array of rank 1 or more.
      gate: array of x's shape. The kernels want x, gate and the result of one dtype; the formula takes any.
      scale: factor with the shape of x's last axis; None is a factor of 1.
      gate_first: whether a multiplies x before it is normalised. Models differ, and no default would suit both.
      activation: "silu" or "sigmoid", or one of these functions of jax.nn.
      group_size: None, or a divisor of the last axis' length: each `group_size` neighbouring columns are normalised by
        their own root mean square, as in Mamba2 with n_groups > 1 and Nemotron-H. scale is of the whole axis.
      epsilon, scale_offset, out_dtype: as for `rms_norm`.
      axis_name: None, or the axes of a mesh over which rows are split, as for `rms_norm`; not with group_size.
      implementation: None, "native" or "jnp", as for `rms_norm`. Under vmap over scale the formula runs, and for rows
        or groups of more than 16384 columns.

    Returns:
      An array of x's shape.

    Raises:
      ValueError, TypeError, RuntimeError: gate has another shape than x, or scale than x's last axis; group_size does
        not divide the last axis; activation is unknown; gate_first is no bool; otherwise as `rms_norm` does.

    Source: the gated norm of Dao and Gu, Transformers are SSMs, 2024, https://arxiv.org/abs/2405.21060 (RMSNormGated in
    https://github.com/state-spaces/mamba, norm_before_gate=not gate_first); after the norm: Yang et al., Gated Linear
    Attention Transformers, 2023, https://arxiv.org/abs/2312.06635.
    """
    options = NormOptions(
        epsilon=epsilon,
        scale_offset=scale_offset,
        out_dtype=out_dtype,
        axis_name=axis_name,
        implementation=implementation,
    )
    call = prepare("gated_rms_norm", options, Gating(gate_first, activation, group_size), Operands(x, gate, scale))
    y = GATED_NORM(call.norm, in_groups(call.operands, call.group_size), call.chosen).y
    return y.reshape(call.operands.x.shape)


@explained
def gated_rms_norm_quantized(
    x: Any,
    gate: Any,
    scale: Any = None,
    *,
    gate_first: bool,
    quantization: Quantization,
    activation: Activation | Synonym = "silu",
    group_size: int | None = None,
    static_scale: Any = None,
    smooth_scale: Any = None,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    straight_through: bool = False,
    axis_name: Any = None,
    implementation: Implementation | None = None,
) -> Quantized:
    """Normalises x beside a gate as `gated_rms_norm` does and quantises the result to 8 bits.

        v = gated_rms_norm(x, gate, scale, gate_first=gate_first, ...) * smooth_scale           in float32

    and from there as `rms_norm_quantized`, whose dtypes, bits, derivative and errors these are.

    group_size says which columns are normalised together, and `quantization` which share a scale: with granularity
    "token" all of x's last axis, with "group" `quantization.group_size` neighbouring columns of it. A kernel works on
    one group that is normalised, so the formula runs where several share a scale that is computed: with group_size and
    "token", unless group_size is the whole axis, and with "group" where quantization.group_size does not divide it.

    Args:
      x: array of float32, bfloat16 or float16 of rank 1 or more.
      gate: array of x's shape. The kernels want x and gate of one dtype; the formula takes any.
      scale, gate_first, activation, group_size: as for `gated_rms_norm`.
      quantization, static_scale, smooth_scale, straight_through: as for `rms_norm_quantized`.
      epsilon, scale_offset, implementation: as for `rms_norm`.
      axis_name: None, or the axes of a mesh over which rows are split, where the formula runs; not with group_size.

    Returns:
      A `Quantized`: values of x's shape, scales, a carrier.

    Raises:
      ValueError, TypeError, RuntimeError: as `gated_rms_norm` and `rms_norm_quantized` do.

    Source: those of `gated_rms_norm` and `rms_norm_quantized`.
    """
    options = NormOptions(
        epsilon=epsilon,
        scale_offset=scale_offset,
        out_dtype=np.float32,
        axis_name=axis_name,
        implementation=implementation,
    )
    gating = Gating(gate_first, activation, group_size)
    call = prepare("gated_rms_norm_quantized", options, gating, Operands(x, gate, scale))
    return _quantized(call, quantization, static_scale, smooth_scale, straight_through)


def _quantized(
    call: "Call", quantization: Any, static_scale: Any, smooth_scale: Any, straight_through: Any
) -> Quantized:
    name, norm_operands = "gated_rms_norm_quantized", call.operands
    x, shape = norm_operands.x, norm_operands.x.shape
    quantize_checks.check_quantization(name, quantization, Quantization, x, (-1,))
    quantize_checks.check_activations(name, quantization, LARGEST)
    given = quantize_checks.check_static_scale(name, static_scale, quantization.granularity)
    smooth = checks.check_weight(name, "smooth_scale", smooth_scale, x, (-1,), with_batch_dims=False)
    quantize_checks.check_float32(name, {**norm_operands._asdict(), "smooth_scale": smooth})
    spec = GatedNormQuantized(
        **vars(call.norm),
        quantization=quantization,
        straight_through=checks.check_flag(name, "straight_through", straight_through),
        grouped=call.group_size not in (None, shape[-1]),
    )
    operands = QuantizedOperands(*norm_operands, smooth, given)
    divided = in_groups(operands, call.group_size) if spec.grouped else operands
    values, scales, carrier = GATED_NORM_QUANTIZED(spec, divided, call.chosen)
    if spec.grouped and scales is not None:
        scales = scales.reshape(*shape[:-1], math.prod(scales.shape[-2:]))
    return quantized(
        quantization,
        values.reshape(shape),
        given if scales is None else scales,  # type: ignore[arg-type]
        None if carrier is None else carrier.reshape(shape),
    )


class Gating(NamedTuple):
    """The keywords that only gated norms have, as a caller gave them."""

    gate_first: Any
    activation: Any
    group_size: Any


class Call(NamedTuple):
    """A checked call, whose operands are not divided into groups yet."""

    norm: Norm
    operands: Operands
    group_size: int | None
    chosen: Implementation | None


def prepare(name: str, options: NormOptions, gating: Gating, arrays: Operands) -> Call:
    """Checks the arguments of the public function of this name."""
    choice = checks.check_implementation(name, options.implementation)
    x = checks.check_x(name, arrays.x)
    gate = check_gate(name, arrays.gate, x)
    scale = _check_scale(name, arrays.scale, x)
    group_size = _check_group_size(name, gating.group_size, x)
    out_dtype = checks.check_out_dtype(name, options.out_dtype, x)
    norm = Norm(
        epsilon=checks.check_epsilon(name, options.epsilon),
        scale_offset=checks.check_scale_offset(name, options.scale_offset),
        compute_dtype=dims.wide_dtype([out_dtype, *(a.dtype for a in (x, gate, scale) if a is not None)]),
        out_dtype=out_dtype,
        native_for=choice.native_for(name),
        shards=_check_axis_name(name, options.axis_name, group_size),
        activation=check_activation(name, gating.activation, get_args(Activation)),
        gate_first=checks.check_flag(name, "gate_first", gating.gate_first, GATE_FIRST),
    )
    return Call(norm, Operands(x, gate, scale), group_size, choice.implementation)


def in_groups(arrays: A, group_size: int | None) -> A:
    """The arrays of a NamedTuple, x first, with an axis of groups before that of a group's columns.

    So are those that have x's last axis; others stay as they are.
    """
    if group_size is None:
        return arrays
    cols = arrays[0].shape[-1]
    groups = (cols // group_size, group_size)
    divided = (
        array if array is None or array.ndim == 0 else array.reshape(*array.shape[:-1], *groups) for array in arrays
    )
    return type(arrays)(*divided)


def check_gate(function: str, value: object, x: jax.Array) -> jax.Array:
    return checks.check_like_x(function, "gate", value, x, "multiplied")


def _check_scale(function: str, value: object, x: jax.Array) -> jax.Array | None:
    if value is None:
        return None
    scale = checks.check_array(function, "scale", value)
    if scale.shape != x.shape[-1:]:
        raise ValueError(
            f"{function}: scale has shape {scale.shape}, expected {x.shape[-1:]}: the last axis of x, which has shape "
            f"{x.shape}, whatever group_size is. Reshape scale."
        )
    return checks.sharded_like(function, "scale", scale, x, (-1,))


def _check_axis_name(function: str, axis_name: object, group_size: int | None) -> Shards | None:
    if axis_name is not None and group_size is not None:
        raise ValueError(
            f"{function}: axis_name={axis_name!r} with group_size={group_size}: a group is normalised by itself, on "
            f"the device that has it. Leave axis_name out."
        )
    return checks.check_axis_name(function, axis_name)


def _check_group_size(function: str, group_size: Any, x: jax.Array) -> int | None:
    """group_size as a divisor of the last axis; None for None."""
    if group_size is None:
        return None
    if isinstance(group_size, (bool, np.bool)) or not isinstance(group_size, (int, np.integer)):
        raise TypeError(
            f"{function}: group_size must be a positive int, got {group_size!r}; None normalises the whole axis."
        )
    cols = x.shape[-1]
    if group_size < 1 or not isinstance(cols, int) or cols % group_size:
        raise ValueError(
            f"{function}: group_size {group_size} is not a positive divisor of the last axis of x, which has shape "
            f"{x.shape}; it is the number of columns of a group, not that of groups."
        )
    checks.check_whole_groups(function, int(group_size), x)
    return int(group_size)
