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

        a = gate * sigmoid(gate), or sigmoid(gate) with activation="sigmoid"
        y = rms_norm(x * a) * (scale + scale_offset)        gate_first=True: Mamba2
        y = rms_norm(x) * (scale + scale_offset) * a        gate_first=False: Qwen3-Next, gated linear attention

        >>> y = gated_rms_norm(jnp.ones((2, 8)), jnp.ones((2, 8)), jnp.ones(8), gate_first=True, group_size=4)

    All of it is computed, rounded and transformed as `rms_norm` says, by one native call each way for x, gate and
    scale.

    Args:
      x: floating-point array of rank 1 or more. What is not named here is as for `rms_norm`.
      gate: array of x's shape. The kernels want x, gate and the result of one dtype; the formula takes any.
      scale: factor with the shape of x's last axis, not of a group; None is a factor of 1.
      group_size: None, or a divisor of the last axis' length; not with axis_name.

    Raises:
      ValueError, TypeError, RuntimeError: an array, group_size, activation or gate_first does not fit; or as
        `rms_norm`.

    Source: RMSNormGated in https://github.com/state-spaces/mamba (norm_before_gate=not gate_first), of Dao and Gu,
    2024, https://arxiv.org/abs/2405.21060; after the norm: Yang et al., 2023, https://arxiv.org/abs/2312.06635.
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
