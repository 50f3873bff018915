"""The public function of the gated norm."""

from typing import Any, TypeVar

import jax

from jaxnorm.ops.activation import Synonym
from jaxnorm.ops.misuse import explained
from jaxnorm.ops.norm.checks import Gating, check_gated
from jaxnorm.ops.norm.gated_formula import Activation, Operands
from jaxnorm.ops.norm.op import GATED_NORM
from jaxnorm.ops.options import Implementation, NormOptions

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
      epsilon: as for `rms_norm`.
      scale_offset: as for `rms_norm`.
      out_dtype: as for `rms_norm`.
      axis_name: None, or the axes of a mesh over which rows are split, as for `rms_norm`; not with group_size.
      implementation: None, "native" or "xla", as for `rms_norm`. Under vmap over scale XLA's code runs, and for rows
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
    gating = Gating(gate_first, activation, group_size)
    norm, operands, size, chosen = check_gated("gated_rms_norm", options, gating, Operands(x, gate, scale))
    return GATED_NORM(norm, in_groups(operands, size), chosen).y.reshape(operands.x.shape)


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
