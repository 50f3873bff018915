"""Which products of a linear layer in float8 are kernels', and why not, as `explain` and `info` tell of it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxnorm.ops.float8_linear import op, products
from jaxnorm.ops.float8_linear.formula import Operands, Saved, Variables
from jaxnorm.ops.float8_linear.products import Float8Linear
from jaxnorm.primitive.described import DESCRIBERS, WITHOUT_OP, Described, Function, Request


class Read(NamedTuple):
    """What a derivative reads, as far as a call has it."""

    dy: Any = None
    x: Any = None
    kernel: Any = None
    bias: Any = None


def why_formula(platform: str, spec: Float8Linear, operands: Operands) -> str | None:
    """Why XLA makes the product of operands of these types on a platform."""
    return products.why_xla(
        platform, spec, "y", operands.x.shape, operands.kernel.shape[::-1], spec.out_dtype, operands.bias
    )


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
            reasons.append(products.why_xla(platform, spec, "dx", dy.shape, kernel.shape, wanted.x.dtype))
        if wanted.kernel is not None and spec.weight_gradient != "float8":
            reasons.append("the recipe has the kernel's gradient by a wide product")
        elif wanted.kernel is not None:
            x_shape, dy_shape = products.as_rows(x.shape), products.as_rows(dy.shape)
            reasons.append(products.why_xla(platform, spec, "dw", x_shape, dy_shape, wanted.kernel.dtype))
        return next(filter(None, reasons), None)

    return Described(op.NAME, Read(dy, x, kernel), "backward", why, spec.native_in("backward"))


def _factors(saved: Saved) -> tuple[Any, Any]:
    """Of x and the kernel what is read: rounded, or to be rounded."""
    x, kernel = saved.rounded_x.values, saved.rounded_kernel.values
    return saved.x if x is None else x, saved.kernel if kernel is None else kernel


def _of_request(platform: str, request: Request) -> str | None:
    operands = Operands(request.array(request.shape), request.matrix)
    return why_formula(platform, Float8Linear(out_dtype=request.out_dtype), operands)


DESCRIBERS[op.FORWARD] = _forward
DESCRIBERS[op.LINEAR] = _linear
DESCRIBERS[op.BACKWARD] = _backward
WITHOUT_OP.append(
    Function(
        op.NAME,
        why_formula=_of_request,
        arguments=lambda request: {"kernel": request.matrix},
        dtypes=tuple(map(jnp.dtype, ("bfloat16", "float16", "float32"))),
        out_dtypes=tuple(map(jnp.dtype, ("bfloat16", "float16", "float32"))),
        last_axis_only=True,
        matrix="kernel",
        columns="outputs",
        over=lambda _: "",
    )
)
