"""Which products of a linear layer in float8 are kernels', and why not, as `explain` and `info` tell of it."""

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxnorm.ops.float8_linear import op, products
from jaxnorm.ops.float8_linear.formula import Operands, Saved, Variables
from jaxnorm.ops.float8_linear.products import Float8Linear
from jaxnorm.primitive import registry
from jaxnorm.primitive.decide import Call, Formula, Program
from jaxnorm.primitive.registry import Described, Function, Request


class Read(NamedTuple):
    """What a derivative reads, as far as a call has it."""

    dy: Any = None
    x: Any = None
    kernel: Any = None
    bias: Any = None


@dataclasses.dataclass(frozen=True)
class Products(Call):
    """The products of a direction, each of which decides for itself; a reason is that of the first that has one."""

    calls: tuple[Call, ...]
    native_for: str | None = None

    def _first(self, reasons: Iterable[str | None]) -> str | None:
        return next(filter(None, reasons), None)

    def nowhere(self) -> str | None:
        return self._first(call.nowhere() for call in self.calls)

    def unfit(self, program: Program) -> str | None:
        return self._first(call.unfit(program) for call in self.calls)

    def unserved(self, platform: str) -> str | None:
        return self._first(call.unserved(platform) for call in self.calls)

    def left_out(self, platform: str) -> str | None:
        return self._first(call.left_out(platform) for call in self.calls)


def call_of(spec: Float8Linear, operands: Operands) -> Call:
    """The product of operands of these types."""
    return products.call_of(spec, "y", operands.x.shape, operands.kernel.shape[::-1], spec.out_dtype, operands.bias)


def _forward(*types: Any, tree: Any, spec: Float8Linear, with_saved: bool) -> Described:
    operands: Operands = jax.tree.unflatten(tree, types)
    return Described(op.NAME, operands, "forward", call_of(spec, operands))


def _linear(*types: Any, tree: Any, spec: Float8Linear) -> Described:
    _, dots = jax.tree.unflatten(tree, types)
    return Described(op.NAME, dots, "linear", Formula("tangents have no kernel"))


def _backward(*types: Any, tree: Any, spec: Float8Linear, wanted: Variables) -> Described:
    dy, saved = jax.tree.unflatten(tree, types)
    x, kernel = _factors(saved)
    calls: list[Call] = []
    if wanted.x is not None:
        calls.append(products.call_of(spec, "dx", dy.shape, kernel.shape, wanted.x.dtype))
    if wanted.kernel is not None and spec.weight_gradient != "float8":
        calls.append(Formula("the recipe has the kernel's gradient by a wide product"))
    elif wanted.kernel is not None:
        rows = products.as_rows(x.shape), products.as_rows(dy.shape)
        calls.append(products.call_of(spec, "dw", *rows, wanted.kernel.dtype))
    return Described(op.NAME, Read(dy, x, kernel), "backward", Products(tuple(calls), spec.native_in("backward")))


def _factors(saved: Saved) -> tuple[Any, Any]:
    """Of x and the kernel what is read: rounded, or to be rounded."""
    x, kernel = saved.rounded_x.values, saved.rounded_kernel.values
    return saved.x if x is None else x, saved.kernel if kernel is None else kernel


def _of_request(request: Request) -> Call:
    operands = Operands(request.array(request.shape), request.matrix)
    return call_of(Float8Linear(out_dtype=request.out_dtype), operands)


registry.entry(op.FORWARD).describe = _forward
registry.entry(op.LINEAR).describe = _linear
registry.entry(op.BACKWARD).describe = _backward
registry.add_functions(
    Function(
        op.NAME,
        call=_of_request,
        arguments=lambda request: {"kernel": request.matrix},
        dtypes=tuple(map(jnp.dtype, ("bfloat16", "float16", "float32"))),
        out_dtypes=tuple(map(jnp.dtype, ("bfloat16", "float16", "float32"))),
        last_axis_only=True,
        matrix="kernel",
        columns="outputs",
        over=lambda _: "",
    )
)
