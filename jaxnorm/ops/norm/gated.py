"""RMSNorm with a gate: its formulas in plain jnp, its record, the checks of its arguments, its public function.

The formulas are the norm's, multiplied by an activation of the gate. The last axis is normalised. scale has its shape
or, if that axis is a group of a longer one, the shape of the last two. A derivative keeps x, gate and rstd.
"""

import dataclasses
from typing import Any, Generic, Literal, NamedTuple, TypeVar, get_args

import jax
import numpy as np

from jaxnorm.ops import checks, speed
from jaxnorm.ops.activation import FORMULAS, Synonym, check_activation
from jaxnorm.ops.misuse import GATE_FIRST, explained
from jaxnorm.ops.norm import formula, op as norms
from jaxnorm.ops.norm.checks import of_every_norm
from jaxnorm.ops.norm.formula import Norm, normalised, product, summed
from jaxnorm.ops.options import Implementation, NormOptions
from jaxnorm.primitive.family import Family
from jaxnorm.primitive.op import BatchDims, Derivative, Dtype, Native, OnlyY, Op, Statistics, T
from jaxnorm.primitive.registry import Function, Request
from jaxnorm.sharding import dims
from jaxnorm.sharding.shards import Shards

Activation = Literal["silu", "sigmoid"]
A = TypeVar("A", bound=tuple[Any, ...])
LONGEST = 1 << 14  # the longest row that kernels gate


class Operands(NamedTuple):
    x: jax.Array
    gate: jax.Array
    scale: jax.Array | None = None


class Saved(NamedTuple):
    x: jax.Array
    gate: jax.Array
    stats: Statistics  # (rstd,) of what is normalised, with x's shape but for a last axis of length 1
    scale: jax.Array | None = None


class Variables(NamedTuple, Generic[T]):
    x: T | None = None
    gate: T | None = None
    scale: T | None = None


def forward(norm: Norm, operands: Operands) -> tuple[OnlyY, Statistics]:
    """The norm of x * a, or the norm of x times a; and rstd."""
    # Cast once, so that the cotangents of their uses are added before they are rounded to their dtypes.
    x, gate = (array.astype(norm.compute_dtype) for array in operands[:2])
    activate = FORMULAS[norm.activation].of

    def h() -> jax.Array:  # anew for each use, whose cotangents JAX then adds as those of x and of the gate
        return x * activate(gate) if norm.gate_first else x

    stats = formula.statistics(norm, h())
    y = formula.affine(norm.wide, h(), stats, operands.scale, None)
    return OnlyY((y if norm.gate_first else y * activate(gate)).astype(norm.out_dtype)), stats


def linear(norm: Norm, saved: Saved, dots: Variables[jax.Array]) -> OnlyY:
    x, gate = saved.x.astype(norm.compute_dtype), saved.gate.astype(norm.compute_dtype)
    x_dot, gate_dot, scale_dot = (None if dot is None else dot.astype(norm.compute_dtype) for dot in dots)
    activation = FORMULAS[norm.activation]
    a = activation.of(gate)
    a_dot = None if gate_dot is None else activation.sloped(gate_dot, gate)
    h, h_dot = x, x_dot
    if norm.gate_first:
        h = x * a
        by_both = [x_dot if x_dot is None else x_dot * a, a_dot if a_dot is None else x * a_dot]
        moving = [dot for dot in by_both if dot is not None]
        h_dot = summed(moving) if moving else None
    of_norm = formula.Saved(h, saved.stats, saved.scale)
    terms = formula.tangents(norm, of_norm, formula.Variables(h_dot, scale_dot))
    if not norm.gate_first:
        terms = [term * a for term in terms]
        if a_dot is not None:
            terms.append(product(norm, normalised(norm, h, saved.stats), saved.scale) * a_dot)
    return OnlyY(summed(terms).astype(norm.out_dtype))


def backward(
    norm: Norm, cotangents: OnlyY, saved: Saved, wanted: Variables[Dtype], batch_dims: BatchDims
) -> Variables[jax.Array]:
    dy, x, gate = (array.astype(norm.compute_dtype) for array in (cotangents.y, saved.x, saved.gate))
    activation = FORMULAS[norm.activation]
    a = activation.of(gate)
    h, u = (x * a, dy) if norm.gate_first else (x, dy * a)
    moves_h = wanted.x is not None or (wanted.gate is not None and norm.gate_first)
    of_norm = formula.Saved(h, saved.stats, saved.scale)
    of_h = formula.Variables(norm.compute_dtype if moves_h else None, wanted.scale)
    gradients = formula.backward(norm, formula.Results(u), of_norm, of_h, batch_dims)
    dh: Any = gradients.x
    dx = dgate = None
    if wanted.x is not None:
        dx = (dh * a if norm.gate_first else dh).astype(wanted.x)
    if wanted.gate is not None:
        da = dh * x if norm.gate_first else dy * product(norm, normalised(norm, h, saved.stats), saved.scale)
        dgate = activation.sloped(da, gate).astype(wanted.gate)
    return Variables(dx, dgate, gradients.scale)


def unfit_gate(norm: Norm, operands: Any) -> str | None:
    """Why no kernel takes this gate."""
    x, cols = operands.x, operands.x.shape[-1]
    if isinstance(cols, int) and cols > LONGEST:
        return f"rows of {cols} elements are normalised, kernels with a gate take at most {LONGEST}"
    others = [("gate", operands.gate.dtype), ("the result", norm.out_dtype)]
    unlike = (f"{name} {dtype}" for name, dtype in others if dtype != x.dtype)
    return next((f"x is {x.dtype} and {other}; kernels with a gate want them equal" for other in unlike), None)


def requested(request: Request) -> tuple[Norm, Operands]:
    norm, (x, _, scale, *_) = norms.requested("rms")(request)
    return dataclasses.replace(norm, activation="silu", gate_first=True), Operands(x, x, scale)


def with_gate(request: Request) -> dict[str, Any]:
    """The arguments of a call with a gate, beside x and scale."""
    return {"gate": request.array(request.shape), "gate_first": True}


GATED_NORM = Family(
    Op(
        name="gated_norm",
        spec=Norm,
        operands=Operands,
        results=OnlyY,
        roles=norms.ROLES,
        types=lambda norm, operands: OnlyY(dims.like(operands.x, norm.out_dtype)),
        forward=forward,
        derivative=Derivative(saved=Saved, variables=Variables, linear=linear, backward=backward),
        native=Native(
            names=("jaxnorm_gated_rms_norm",),
            which=norms.target,
            forward=norms.forward_attributes,
            backward=norms.attributes,
            plan=norms.plan,
            slower=speed.any_kernel,
        ),
        reasons=(unfit_gate,),
        can_shard=norms.can_shard,
        functions=(Function("gated_rms_norm", requested, arguments=with_gate, last_axis_only=True),),
    )
)


def check_gated(
    function: str,
    options: NormOptions,
    x: Any,
    gate: Any,
    scale: Any,
    gate_first: Any,
    activation: Any,
    group_size: Any,
) -> tuple[Norm, Operands, int | None, Implementation | None]:
    """What is static about a call, its operands, not divided into groups yet, group_size, and the implementation."""
    choice = checks.check_implementation(function, options.implementation)
    x = checks.check_x(function, x)
    gate = checks.check_like_x(function, "gate", gate, x, "multiplied")
    scale = _check_scale(function, scale, x)
    group_size = _check_group_size(function, group_size, x)
    out_dtype = checks.check_out_dtype(function, options.out_dtype, x.dtype)
    norm = Norm(
        **of_every_norm(function, choice, options.epsilon, options.scale_offset, out_dtype, (x, gate, scale)),
        shards=_check_axis_name(function, options.axis_name, group_size),
        activation=check_activation(function, activation, get_args(Activation)),
        gate_first=checks.check_flag(function, "gate_first", gate_first, GATE_FIRST),
    )
    return norm, Operands(x, gate, scale), group_size, choice.implementation


def _check_scale(function: str, value: object, x: jax.Array) -> jax.Array | None:
    if value is None:
        return None
    scale = checks.check_array(function, "scale", value)
    if scale.shape != x.shape[-1:]:
        raise ValueError(
            f"{function}: scale has shape {scale.shape}, expected {x.shape[-1:]}: the last axis of x, which has shape "
            f"{x.shape}, whatever group_size is. Reshape scale."
        )
    return checks.sharded_along(function, "scale", scale, "x", x, (-1,))


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
    """Divides x by its root mean square over the last axis, and multiplies by an activation of a gate before or after.

        a = gate * sigmoid(gate), or sigmoid(gate) with activation="sigmoid"
        y = rms_norm(x * a) * (scale + scale_offset)        gate_first=True: Mamba2
        y = rms_norm(x) * (scale + scale_offset) * a        gate_first=False: Qwen3-Next, gated linear attention

        >>> y = gated_rms_norm(jnp.ones((2, 8)), jnp.ones((2, 8)), jnp.ones(8), gate_first=True, group_size=4)

    It computes, rounds and transforms as `rms_norm` does, with one native call each way for x, gate and scale.

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
        epsilon, scale_offset, out_dtype=out_dtype, axis_name=axis_name, implementation=implementation
    )
    norm, operands, size, chosen = check_gated(
        "gated_rms_norm", options, x, gate, scale, gate_first, activation, group_size
    )
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
