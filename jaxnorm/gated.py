"""The public function of the norm that is gated."""

from typing import Any, get_args

import jax

from jaxnorm import ffi, gated_primitive, gated_reference, gated_validation, layouts, norms, validation
from jaxnorm.gated_reference import Activation, Gate
from jaxnorm.norms import Implementation
from jaxnorm.reference import Norm

_OP = "gated_rms_norm"


def gated_rms_norm(
    x: Any,
    gate: Any,
    scale: Any = None,
    *,
    gate_first: bool,
    activation: Activation = "silu",
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
    be transformed in every way that the formula may be, differentiated any number of times included. In a gradient one
    native call each way serves x, gate and scale, and x, gate and a float32 a row are kept for it.

    Args:
      x: floating-point array of rank 1 or more.
      gate: array of x's shape. The kernels want x, gate and the result of one dtype; the formula takes any.
      scale: factor with the shape of x's last axis; None is a factor of 1.
      gate_first: whether x is multiplied by a before it is normalised, or after. Models differ, and a default would be
        wrong for half of them without a sign of it.
      activation: "silu" or "sigmoid".
      group_size: None, or a divisor of the last axis' length: each `group_size` neighbouring columns are normalised by
        their own root mean square, as Mamba2 with n_groups > 1 and Nemotron-H do. scale is of the whole axis.
      epsilon: non-negative Python number added to the mean square.
      scale_offset: Python number added to scale; 1.0 is Gemma's convention. Ignored without scale.
      out_dtype: dtype of the result; None is x's.
      axis_name: None, or the axes of a mesh over which rows are split, as for `rms_norm`; not with group_size.
      implementation: None, "native" or "jnp", as for `rms_norm`. Under vmap over scale the formula runs, and for rows
        or groups of more than 16384 columns.

    Returns:
      An array of x's shape.

    Raises:
      ValueError: gate has another shape than x, or scale than x's last axis; group_size is not positive or does not
        divide the last axis; activation is unknown; otherwise as `rms_norm` does.
      TypeError: gate_first is no bool, group_size no int; otherwise as `rms_norm` does.
      RuntimeError: implementation="native" and there is no kernel for this call; the message says why.

    Source: the gated norm of Dao and Gu, Transformers are SSMs, 2024, https://arxiv.org/abs/2405.21060 (RMSNormGated in
    https://github.com/state-spaces/mamba, norm_before_gate=not gate_first); after the norm: Yang et al., Gated Linear
    Attention Transformers, 2023, https://arxiv.org/abs/2312.06635.
    """
    validation.check_implementation(_OP, implementation)
    x = validation.check_x(_OP, x)
    gate = gated_validation.check_gate(_OP, gate, x)
    scale = gated_validation.check_scale(_OP, scale, x)
    group_size = gated_validation.check_group_size(_OP, group_size, x)
    out_dtype = validation.check_out_dtype(_OP, out_dtype, x)
    dtypes = [out_dtype, *(operand.dtype for operand in (x, gate, scale) if operand is not None)]
    norm = Norm(
        kind="rms",
        axes=(-1,),
        epsilon=validation.check_epsilon(_OP, epsilon),
        scale_offset=validation.check_number(_OP, "scale_offset", scale_offset) or -0.0,  # see norms.prepare
        multiply_before_cast=True,
        compute_dtype=layouts.wide_dtype(dtypes),
        out_dtype=out_dtype,
        native_for=_OP if implementation == "native" else None,
        split=gated_validation.check_axis_name(_OP, axis_name, group_size),
    )
    kind = Gate(
        activation=gated_validation.check_activation(_OP, activation, get_args(Activation)),
        first=gated_validation.check_gate_first(_OP, gate_first),
    )
    has_kernel = implementation != "jnp" and _has_kernel(norm, x, gate, scale, group_size)
    shape = x.shape
    if group_size is not None:
        groups = (shape[-1] // group_size, group_size)
        x, gate = x.reshape(*shape[:-1], *groups), gate.reshape(*shape[:-1], *groups)
        scale = None if scale is None else scale.reshape(groups)
    apply = gated_primitive.apply if has_kernel else gated_reference.apply
    y: jax.Array = apply(norm, kind, x, gate, scale)
    return y.reshape(shape)


def _has_kernel(norm: Norm, x: jax.Array, gate: jax.Array, scale: jax.Array | None, group_size: int | None) -> bool:
    """Whether some platform has a kernel for this norm; if it must be native, an error where none is at hand."""
    if norm.split is not None:
        return norms.has_primitive(_OP, norm, x)
    cols = x.shape[-1] if group_size is None else group_size
    reason = ffi.unsupported_gate(cols, x.dtype, gate.dtype, norm.out_dtype)
    if jax.typeof(gate).sharding.spec != jax.typeof(x).sharding.spec:
        reason = "x and gate are sharded differently over an Explicit mesh"
    if reason is not None and norm.native_for:
        raise norms.no_kernel(_OP, reason)
    return norms.has_kernel(_OP, norm, x, None, (scale,)) and reason is None
