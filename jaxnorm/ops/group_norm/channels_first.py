"""GroupNorm of an x whose channels stand before the positions.

A group lies in one piece then, so it is a row of LayerNorm's kernels. XLA makes all else, weights and the activation,
in one pass over what they give, which takes less time than to transpose x and the result.
"""

import jax

from jaxnorm.ops.activation import FORMULAS
from jaxnorm.ops.group_norm import formula
from jaxnorm.ops.group_norm.formula import Dtype, GroupNorm, Operands, Results, Saved, Variables
from jaxnorm.ops.norm import formula as layer
from jaxnorm.ops.norm.formula import Norm
from jaxnorm.ops.norm.op import NORM
from jaxnorm.primitive.op import BatchDims, CallRows, Statistics
from jaxnorm.primitive.reasons import is_trailing

# What a CPU's kernels are slower for: few elements in all, and short groups; measured on 2 cores with AVX2, x of
# (1, 64, 8, 8) and of (256, 32, 2, 2) in 32 groups: 0.8 of XLA's speed.
LITTLE, SHORT = 2**13, 16


def is_channels_first(norm: GroupNorm) -> bool:
    """Whether all positions, of which there are some, come after the channels."""
    return norm.row_ndim > 1 and is_trailing(norm.axes)


def slower(rows: CallRows) -> str | None:
    """Why kernels are slower than XLA's code.

    The kernel writes x_hat in float32 and XLA reads it again, so that with x and y 16 bytes move for an element of
    float32, and 12 of half types. The formula reads x once more, or twice, for the statistics: 12 to 16 bytes, and 6 to
    8; and so it is backward. Kernels took 0.90 to 1.14 times the formula's time forward in float32 and 0.97 to 1.26
    backward, in bfloat16 1.10 to 1.38 and 1.07 to 2.11 (four images of a U-Net, 32 groups and silu; H100, JAX 0.11.2).
    """
    if rows.platform == "cpu":
        is_little = rows.cols <= SHORT or (rows.rows is not None and rows.rows * rows.cols < LITTLE)
        which = f"less than {LITTLE} elements, or {SHORT} of a group, with channels before positions"
        return f"XLA's code is faster for {which}" if is_little else None
    return "XLA's code is faster for channels before positions, whose kernels leave what XLA multiplies in float32"


def _of_rows(norm: GroupNorm) -> Norm:
    """The LayerNorm of groups. By a kernel: it is this op's lowering rule that chooses."""
    return Norm(
        kind="layer",
        axes=norm.axes,
        epsilon=norm.epsilon,
        scale_offset=-0.0,
        compute_dtype=norm.compute_dtype,
        out_dtype=norm.compute_dtype,
        native_for="group_norm",
    )


def forward(norm: GroupNorm, operands: Operands, *, with_stats: bool) -> tuple[Results, Statistics]:
    """As the formula's, of which a kernel computes x_hat."""
    x, scale, bias = operands
    of_rows, stats = NORM.bind(_of_rows(norm), layer.Operands(x), with_stats=with_stats)
    z = layer.weighted(norm.wide, of_rows.y, scale, bias)
    return Results(FORMULAS[norm.activation].of(z).astype(norm.out_dtype)), stats


def backward(
    norm: GroupNorm, cotangents: Results, saved: Saved, wanted: Variables[Dtype], batch_dims: BatchDims
) -> Variables[jax.Array]:
    """As the formula's, of which a kernel computes the gradient by x."""
    return formula.backward(norm, cotangents, saved, wanted, batch_dims, _gradient_of_x)


def _gradient_of_x(norm: GroupNorm, dx_hat: jax.Array, x: jax.Array, stats: Statistics, wanted: Dtype) -> jax.Array:
    of_rows: layer.Variables[Dtype] = layer.Variables(wanted)
    cotangents, saved = layer.Results(dx_hat), layer.Saved(x, stats)
    dx: jax.Array = NORM.gradients(_of_rows(norm), cotangents, saved, of_rows, ()).x
    return dx
