"""The primitives of a linear layer in float8.

    forward  (operands) -> y, and if wanted both factors as they were rounded
    linear   (saved, dots) -> the tangent of y, linear in dots: wide products of the rounded factors
    backward (dy, saved) -> the wanted gradients, by products of float8

The transpose of `linear` binds `backward`, which rounds dy: that is no transpose but a convention, and so these have
rules of their own. Derivatives of `linear` and `backward` are those of their wide formulas.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, mlir
from jax.sharding import AxisType, PartitionSpec

from jaxnorm.native import compat
from jaxnorm.ops.float8_linear import formula, products
from jaxnorm.ops.float8_linear.formula import Operands, Rounded, Saved, Variables, Wanted
from jaxnorm.ops.float8_linear.kernels import BY_KERNELS, PRODUCTS_BY_KERNELS
from jaxnorm.ops.float8_linear.products import Float8Linear
from jaxnorm.primitive import fallback, registry
from jaxnorm.primitive.decide import Call, Formula, Program
from jaxnorm.primitive.registry import Described, Function, Request
from jaxnorm.primitive.rules import (
    Rules,
    all_none,
    at_front,
    batch_size,
    bind,
    examples_first,
    named,
    primitive_name,
    tangents_jnp,
)

NAME = "float8_linear"


def linear(spec: Float8Linear, operands: Operands) -> jax.Array:
    """y of operands that were checked."""
    y, *_ = FORWARD.bind(spec, operands, with_saved=False)
    return y


@dataclasses.dataclass(frozen=True)
class Layer(Call):
    """One direction of a layer. Its products decide each for itself whether a kernel makes it, and say so."""

    how: str | None  # XLA's code is asked for, if it is
    platforms = ("cuda",)
    splits_itself = True

    def unfit(self, program: Program) -> str | None:
        return "an exported program may run on GPUs whose products of float8 are XLA's" if program.is_exported else None

    def left_out(self, platform: str) -> str | None:
        return None if self.how is None else f"{fallback.ASKED_FOR}{self.how}"


class _Native(Rules):
    """A direction that makes calls of kernels, each of which is decided by itself."""

    def __init__(self, direction: str) -> None:
        self.direction = direction
        super().__init__(primitive_name(NAME, direction))

    def call(self, *_: Any, spec: Float8Linear, **params: Any) -> Call:
        return Layer(spec.formula_in(self.direction))

    def native(self, platform: str, ctx: Any, *leaves: Any, **params: Any) -> Sequence[Any]:
        by = PRODUCTS_BY_KERNELS if compat.is_split_by_xla(ctx) else BY_KERNELS
        values: Sequence[Any] = mlir.lower_fun(lambda *arrays: self.formula(*arrays, **params, by=by))(ctx, *leaves)
        return values


class _Forward(_Native):
    def bind(self, spec: Float8Linear, operands: Operands, *, with_saved: bool) -> list[jax.Array]:
        return bind(self.primitive, operands, spec=spec, with_saved=with_saved)

    def formula(
        self, *leaves: Any, tree: Any, spec: Float8Linear, with_saved: bool, by: Any = formula.BY_XLA
    ) -> list[Any]:
        y, *factors = formula.forward(spec, jax.tree.unflatten(tree, leaves), by, keeps=with_saved)
        return [y, *jax.tree.leaves(factors)] if with_saved else [y]

    def jvp(self, primals: Any, dots: Any, *, tree: Any, spec: Float8Linear, with_saved: bool) -> tuple[Any, Any]:
        operands: Operands = jax.tree.unflatten(tree, primals)
        moving: Operands = jax.tree.unflatten(tree, [None if type(dot) is ad.Zero else dot for dot in dots])
        x, x_dot = (of.x if operands.x_scales is None else of.x_carrier for of in (operands, moving))
        variables = Variables(x_dot, moving.kernel, moving.bias)
        # What was given as it is rounded cannot be rounded again.
        saves_x = spec.save == "quantized" or operands.x_scales is not None
        saves = saves_x and not all_none(variables[:2])
        y, *factors = self.bind(spec, operands, with_saved=with_saved or saves)
        saved = Saved(x, operands.kernel)
        if saves:
            factors = [*named("result", factors[::2]), *named("statistics", factors[1::2])]
            rounded_x, rounded_kernel = map(Rounded, factors[:2], factors[2:])
            saved = saved._replace(rounded_x=rounded_x)
            if spec.save == "quantized":
                saved = saved._replace(rounded_kernel=rounded_kernel)
            factors = [*rounded_x[:2], *rounded_kernel[:2]]
        results = [y, *factors] if with_saved else [y]
        zeros = [ad.Zero(jax.typeof(result).to_tangent_aval()) for result in results]
        return results, zeros if all_none(variables) else [_tangent(spec, y, saved, variables), *zeros[1:]]

    def batch(self, leaves: Any, axes: Any, *, tree: Any, spec: Float8Linear, with_saved: bool) -> tuple[Any, Any]:
        batch: Operands = jax.tree.unflatten(tree, axes)
        front: Operands = jax.tree.unflatten(tree, examples_first(leaves, axes))
        if not spec.batch and not with_saved and spec.scaling == "row" and batch.kernel is None and batch.bias is None:
            # Examples of rows are rows.
            rows = (batch_size(leaves, axes), *front.x.shape[1:-1])
            of_rows = {
                name: jnp.broadcast_to(array, (*rows, array.shape[-1]))
                for name, array in front._asdict().items()
                if name not in ("kernel", "bias") and array is not None
            }
            given: Operands = jax.tree.unflatten(tree, leaves)
            if spec.out_spec is not None:
                spec = dataclasses.replace(spec, out_spec=PartitionSpec(None, *spec.out_spec))
            return self.bind(spec, given._replace(**of_rows), with_saved=False), [0]
        return at_front(self.bind(_another(spec), front, with_saved=with_saved))

    def described(self, *types: Any, tree: Any, spec: Float8Linear, with_saved: bool) -> Described:
        operands: Operands = jax.tree.unflatten(tree, types)
        return Described(NAME, operands, "forward", call_of(spec, operands))


def _another(spec: Float8Linear) -> Float8Linear:
    return dataclasses.replace(spec, batch=spec.batch + 1)


def _tangent(spec: Float8Linear, y: jax.Array, saved: Saved, dots: Variables) -> jax.Array:
    """The tangent of y; dots, not all of which are None, may be 1 long where y has examples."""
    if all_none(dots[:2]):
        # No product: what is left is a sum in float32 in the transpose.
        wide = jnp.zeros_like(y, np.float32)
        lengths = (*dots.bias.shape[: spec.batch], *(1,) * (y.ndim - dots.bias.ndim), dots.bias.shape[-1])
        total: jax.Array = (wide + dots.bias.astype(np.float32).reshape(lengths)).astype(y.dtype)
        return total
    examples = y.shape[: spec.batch]
    dots = jax.tree.map(lambda dot: jnp.broadcast_to(dot, (*examples, *dot.shape[spec.batch :])), dots)
    return LINEAR.bind(spec, saved, dots)


class _Linear(Rules):
    def bind(self, spec: Float8Linear, saved: Saved, dots: Variables) -> jax.Array:
        (y,) = bind(self.primitive, (_read(saved, dots), dots), spec=spec)
        return y

    def formula(self, *leaves: Any, tree: Any, spec: Float8Linear, **_: Any) -> list[Any]:
        return [formula.linear(spec, *jax.tree.unflatten(tree, leaves))]

    def jvp(self, primals: Any, dots: Any, *, tree: Any, spec: Float8Linear) -> tuple[Any, Any]:
        def wide(*leaves: Any) -> list[jax.Array]:
            return [formula.wide_linear(spec, *jax.tree.unflatten(tree, leaves))]

        return self.primitive.bind(*primals, tree=tree, spec=spec), tangents_jnp(wide, primals, dots)

    def transpose(self, cotangents: Any, *leaves: Any, tree: Any, spec: Float8Linear) -> list[Any]:
        saved, dots = jax.tree.unflatten(tree, leaves)
        given = [dot for dot in dots if dot is not None]
        nothing = [None] * (len(leaves) - len(given))
        (dy,) = cotangents
        if type(dy) is ad.Zero:
            return [*nothing, *(None for _ in given)]
        wanted = Variables(*(_wanted(spec, dot.aval) if ad.is_undefined_primal(dot) else None for dot in dots))
        gradients = BACKWARD.bind(spec, dy, saved, wanted)
        return [*nothing, *(bar for bar, dot in zip(gradients, dots, strict=True) if dot is not None)]

    def batch(self, leaves: Any, axes: Any, *, tree: Any, spec: Float8Linear) -> tuple[Any, Any]:
        size = batch_size(leaves, axes)
        saved, dots = jax.tree.unflatten(tree, examples_first(leaves, axes))
        # Each example has its own tangent, so that the transpose gives it its own gradient.
        dots = jax.tree.map(lambda dot: jnp.broadcast_to(dot, (size, *dot.shape[1:])), dots)
        return [self.bind(_another(spec), saved, dots)], [0]

    def described(self, *types: Any, tree: Any, spec: Float8Linear) -> Described:
        _, dots = jax.tree.unflatten(tree, types)
        return Described(NAME, dots, "linear", Formula("tangents have no kernel"))


def _read(saved: Saved, variables: Variables) -> Saved:
    """What of it is read for these tangents or gradients."""
    if variables.kernel is None:
        saved = saved._replace(x=None, rounded_x=Rounded())
    if variables.x is None:
        saved = saved._replace(kernel=None, rounded_kernel=Rounded())
    return saved


def _wanted(spec: Float8Linear, aval: Any) -> Wanted:
    of_example = PartitionSpec(*tuple(aval.sharding.spec)[spec.batch :])
    return Wanted(np.dtype(aval.dtype), of_example if AxisType.Explicit in aval.sharding.mesh.axis_types else None)


class _Backward(_Native):
    def bind(self, spec: Float8Linear, dy: jax.Array, saved: Saved, wanted: Variables) -> Variables:
        values = iter(bind(self.primitive, (dy, _read(saved, wanted)), spec=spec, wanted=wanted))
        return Variables(*(None if how is None else next(values) for how in wanted))

    def formula(
        self, *leaves: Any, tree: Any, spec: Float8Linear, wanted: Variables, by: Any = formula.BY_XLA
    ) -> list[Any]:
        dy, saved = jax.tree.unflatten(tree, leaves)
        return jax.tree.leaves(formula.backward(spec, dy, saved, wanted, by))

    def jvp(self, primals: Any, dots: Any, *, tree: Any, spec: Float8Linear, wanted: Variables) -> tuple[Any, Any]:
        def wide(*leaves: Any) -> list[jax.Array]:
            dy, saved = jax.tree.unflatten(tree, leaves)
            return jax.tree.leaves(formula.wide_backward(spec, dy, saved, wanted))

        results = self.primitive.bind(*primals, tree=tree, spec=spec, wanted=wanted)
        return results, tangents_jnp(wide, primals, dots)

    def batch(self, leaves: Any, axes: Any, *, tree: Any, spec: Float8Linear, wanted: Variables) -> tuple[Any, Any]:
        dy, saved = jax.tree.unflatten(tree, examples_first(leaves, axes))
        return at_front(self.bind(_another(spec), dy, saved, wanted))

    def described(self, *types: Any, tree: Any, spec: Float8Linear, wanted: Variables) -> Described:
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
        return Described(NAME, Read(dy, x, kernel), "backward", Products(tuple(calls), spec.native_in("backward")))


FORWARD, LINEAR, BACKWARD = _Forward("forward"), _Linear(primitive_name(NAME, "linear")), _Backward("backward")


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


def _factors(saved: Saved) -> tuple[Any, Any]:
    """Of x and the kernel what is read: rounded, or to be rounded."""
    x, kernel = saved.rounded_x.values, saved.rounded_kernel.values
    return saved.x if x is None else x, saved.kernel if kernel is None else kernel


def _of_request(request: Request) -> Call:
    operands = Operands(request.array(request.shape), request.matrix)
    return call_of(Float8Linear(out_dtype=request.out_dtype), operands)


registry.add_functions(
    Function(
        NAME,
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
