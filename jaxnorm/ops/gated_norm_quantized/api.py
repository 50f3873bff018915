"""The public function of the gated norm with a quantised result."""

import math
from typing import Any

import numpy as np

from jaxnorm.ops import checks as shared_checks
from jaxnorm.ops.gated_norm.api import Gating, in_groups, prepare
from jaxnorm.ops.gated_norm.formula import Activation
from jaxnorm.ops.gated_norm.formula import Operands as NormOperands
from jaxnorm.ops.gated_norm_quantized.formula import GATED_NORM_QUANTIZED, GatedNormQuantized, Operands
from jaxnorm.ops.misuse import explained
from jaxnorm.ops.options import Implementation, NormOptions
from jaxnorm.ops.quantize import checks
from jaxnorm.ops.quantize.rounding import SMALLEST_SCALE
from jaxnorm.quantization import LARGEST, Quantization, Quantized


@explained
def gated_rms_norm_quantized(
    x: Any,
    gate: Any,
    scale: Any = None,
    *,
    gate_first: bool,
    quantization: Quantization,
    activation: Activation = "silu",
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
        scales = max|v| / largest       over each row or group, 1 where that is 0; at least 2**-126, at most max_scale
        values = v * (1 / scales)       clipped to ±largest, rounded to nearest, ties to even

    and from there as `rms_norm_quantized`, whose dtypes, bits, derivative and errors these are: in a gradient with
    straight_through=True one native call serves x, gate and scale; those of smooth_scale and static_scale are zero.

    Two arguments speak of groups. group_size says which columns are normalised together, and `quantization` which share
    a scale, whatever was normalised together: with granularity "token" all of x's last axis, with "group"
    `quantization.group_size` neighbouring columns of it, with "tensor" everything. A kernel works on one group that is
    normalised. So the formula runs where several of these share a scale that is computed: with group_size and "token",
    unless group_size is the whole axis, and with "group" where quantization.group_size does not divide group_size.

    Args:
      x: array of float32, bfloat16 or float16 of rank 1 or more.
      gate: array of x's shape. The kernels want x and gate of one dtype; the formula takes any.
      scale, gate_first, activation, group_size: as for `gated_rms_norm`.
      quantization: dtype, what shares a scale, and how a scale is made.
      static_scale: the scale with granularity "tensor", a scalar; None with others, which compute it.
      smooth_scale: factor with the shape of x's last axis that makes v easier to quantise; None is 1.
      epsilon, scale_offset: as for `rms_norm`.
      straight_through: whether the result has a derivative, and with it a carrier of x's shape and dtype.
      axis_name: None, or the axes of a mesh over which rows are split, where the formula runs; not with group_size.
      implementation: None, "native" or "jnp", as for `rms_norm`; the formula runs where it does for `gated_rms_norm`.

    Returns:
      A `Quantized`: values of x's shape, float32 scales, a carrier.

    Raises:
      ValueError, TypeError, RuntimeError: as `gated_rms_norm` and `rms_norm_quantized` do.

    Source: those of `gated_rms_norm` and `rms_norm_quantized`.
    """
    name = "gated_rms_norm_quantized"
    options = NormOptions(
        epsilon=epsilon,
        scale_offset=scale_offset,
        out_dtype=np.float32,
        axis_name=axis_name,
        implementation=implementation,
    )
    call = prepare(name, options, Gating(gate_first, activation, group_size), NormOperands(x, gate, scale))
    x, shape = call.operands.x, call.operands.x.shape
    checks.check_quantization(name, quantization, Quantization, x, (-1,))
    checks.check_activations(name, quantization, LARGEST)
    given = checks.check_static_scale(name, static_scale, quantization.granularity, SMALLEST_SCALE)
    smooth = shared_checks.check_weight(name, "smooth_scale", smooth_scale, x, (-1,), with_batch_dims=False)
    operands = Operands(*call.operands, smooth, given)
    checks.check_float32(name, {"x": x, "gate": operands.gate, "scale": operands.scale, "smooth_scale": smooth})
    spec = GatedNormQuantized(
        **vars(call.norm),
        quantization=quantization,
        straight_through=shared_checks.check_flag(name, "straight_through", straight_through),
        grouped=call.group_size not in (None, shape[-1]),
    )
    divided = in_groups(operands, call.group_size) if spec.grouped else operands
    values, scales, carrier = GATED_NORM_QUANTIZED(spec, divided, call.chosen)
    if spec.grouped and scales is not None:
        scales = scales.reshape(*shape[:-1], math.prod(scales.shape[-2:]))
    return Quantized(
        values.reshape(shape),
        given if scales is None else scales,  # type: ignore[arg-type]
        None if carrier is None else carrier.reshape(shape),
    )
