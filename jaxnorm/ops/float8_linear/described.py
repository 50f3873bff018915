"""Which products of a linear layer in float8 are kernels', and why not, as `explain` and `info` tell of it."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm.ops.float8_linear import op
from jaxnorm.ops.float8_linear.formula import FLOAT8, Operands, Saved, Variables
from jaxnorm.ops.float8_linear.products import Float8Linear
from jaxnorm.ops.quantized_dot import formula as dot
from jaxnorm.ops.quantized_dot import op as quantized_dot
from jaxnorm.primitive.described import DESCRIBERS, WITHOUT_OP, Described, Function, Request


class Read(NamedTuple):
    """What a derivative reads, as far as a call has it."""

    dy: Any = None
    x: Any = None
    kernel: Any = None
    bias: Any = None


def why_formula(platform: str, spec: Float8Linear, operands: Operands) -> str | None:
    """Why XLA makes the product of operands of these types on a platform."""
    return _why_not(platform, spec, "y", operands.x.shape, operands.kernel.shape[::-1], spec.out_dtype, operands.bias)


def _why_not(
    platform: str, spec: Float8Linear, product: str, x: Any, weights: Any, out_dtype: Any, bias: Any = None
) -> str | None:
    """The same of arrays of these shapes, whose last axes are summed."""
    if spec.scaling == "tensor":
        return "the recipe has one scale for each tensor, with which XLA makes the products"
    if spec.batch:
        return "no kernel takes examples of kernels, as jax.vmap makes them"
    of_x, of_weights = (jax.core.ShapedArray(shape, FLOAT8) for shape in (x, weights))
    scales, x_scales = (jax.core.ShapedArray((*of[:-1], 1), np.dtype(np.float32)) for of in (weights, x))
    operands = dot.Operands(of_x, of_weights, scales, x_scales, bias)
    return quantized_dot.why_formula(platform, spec.of_product(product, out_dtype), operands)


def _forward(*types: Any, tree: Any, spec: Float8Linear, with_saved: bool) -> Described:
    operands: Operands = jax.tree.unflatten(tree, types)
    native_for = spec.native_in("forward")
    return Described(op.NAME, operands, "forward", lambda on: why_formula(on, spec, operands), native_for)


def _linear(*types: Any, tree: Any, spec: Float8Linear) -> Described:
    _, dots = jax.tree.unflatten(tree, types)
    return Described(op.NAME, dots, "linear", lambda _: "tangents have no kernel")


def _backward(*types: Any, tree: Any, spec: Float8Linear, wanted: Variables) -> Described:
    dy, saved = jax.tree.unflatten(tree, types)
    x, kernel = _factors(saved)

    def why(platform: str) -> str | None:
        reasons = []
        if wanted.x is not None:
            reasons.append(_why_not(platform, spec, "dx", dy.shape, kernel.shape, wanted.x.dtype))
        if wanted.kernel is not None and spec.weight_gradient != "float8":
            reasons.append("the recipe has the kernel's gradient by a wide product")
        elif wanted.kernel is not None:
            x_shape, dy_shape = _columns(x.shape), _columns(dy.shape)
            reasons.append(_why_not(platform, spec, "dw", x_shape, dy_shape, wanted.kernel.dtype))
        return next(filter(None, reasons), None)

    return Described(op.NAME, Read(dy, x, kernel), "backward", why, spec.native_in("backward"))


def _factors(saved: Saved) -> tuple[Any, Any]:
    """Of x and the kernel what is read: rounded, or to be rounded."""
    x, kernel = saved.rounded_x.values, saved.rounded_kernel.values
    return saved.x if x is None else x, saved.kernel if kernel is None else kernel


def _columns(shape: Any) -> Any:
    """The shape of rows that are summed, as the columns of a matrix, of which kernels pad the number."""
    *rows, columns = shape
    depth = math.prod(rows)
    return columns, depth + -depth % quantized_dot.MULTIPLE


def _of_request(platform: str, request: Request) -> str | None:
    x, kernel = request.array(request.shape), request.array((request.shape[-1], request.columns))
    return why_formula(platform, Float8Linear(out_dtype=request.out_dtype), Operands(x, kernel))


DESCRIBERS[op.FORWARD] = _forward
DESCRIBERS[op.LINEAR] = _linear
DESCRIBERS[op.BACKWARD] = _backward
WITHOUT_OP.append(
    Function(
        op.NAME,
        why_formula=_of_request,
        dtypes=tuple(map(jnp.dtype, ("bfloat16", "float16", "float32"))),
        out_dtypes=tuple(map(jnp.dtype, ("bfloat16", "float16", "float32"))),
        last_axis_only=True,
        matrix="kernel",
        columns="outputs",
        over=lambda _: "",
    )
)
