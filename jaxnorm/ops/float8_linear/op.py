"""A linear layer in float8, made of primitives that round and multiply, and the conventions of its derivatives.

    forward  y, of both factors as they are rounded; its tangent is
    linear   (saved, dots) -> the tangent of y, linear in dots: wide products of the rounded factors
    backward (dy, saved) -> the wanted gradients, by products of float8

The transpose of `linear` is `backward`, which rounds dy: that is no transpose but a convention. Derivatives of `linear`
and `backward` are those of their wide formulas.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.interpreters import ad
from jax.sharding import AxisType, PartitionSpec
from jax.tree_util import PyTreeDef

from jaxnorm.native import compat
from jaxnorm.ops.float8_linear import formula, kernels
from jaxnorm.ops.float8_linear.formula import FLOAT8, Float8Linear, Operands, Rounded, Saved, Variables, Wanted
from jaxnorm.ops.quantized_dot.formula import Arrays, Operands as Matrices, QuantizedDot, of_batch
from jaxnorm.ops.quantized_dot.op import Product, ProductCall
from jaxnorm.primitive import registry, rules
from jaxnorm.primitive.convention import Convention, with_examples
from jaxnorm.primitive.decide import Call, Formula, Program
from jaxnorm.primitive.registry import Described, Function
from jaxnorm.primitive.rules import Axes, Batched, Dots, Leaves, Rules, all_none, named, primitive_name, tangents_jnp

NAME = "float8_linear"


def linear(spec: Float8Linear, operands: Operands[jax.Array]) -> jax.Array:
    """y of operands that were checked; outside of every transformation one program, so that bits are those of jit."""
    is_traced = any(isinstance(array, jax.core.Tracer) for array in jax.tree.leaves(operands))
    y: jax.Array = (_linear if is_traced else _program)(spec, operands)
    return y


def _linear(spec: Float8Linear, operands: Operands[jax.Array]) -> jax.Array:
    leaves, tree = jax.tree.flatten(operands)
    x, kernel, bias, x_scales, x_carrier, scales, carrier = jax.tree.unflatten(tree, compat.match_varying_axes(*leaves))
    of_x = kernels.by_rows(spec, x, "forward") if x_scales is None else Rounded(x, formula.live(x, x_scales))
    of_kernel = kernels.by_columns(spec, kernel, "forward") if scales is None else Rounded(kernel, scales.T)
    asked = spec.of_product("y", spec.out_dtype, spec.out_spec)
    y = PRODUCT.bind(asked, _factors(*of_x, *of_kernel, bias))
    # What was given as it is rounded cannot be rounded again.
    again = spec.save == "inputs"
    saved = Saved(
        x if x_scales is None else x_carrier,
        None if again and x_scales is None else of_x,
        kernel if scales is None else carrier,
        None if again and scales is None else of_kernel,
        bias,
    )
    (y,) = FORWARD(spec, [y], saved)
    return y


_program = jax.jit(_linear, static_argnums=0)


def _factors(
    x: jax.Array, x_scales: jax.Array | None, kernel: jax.Array, scales: jax.Array | None, bias: jax.Array | None = None
) -> Arrays:
    """The operands of a product; the scales of what is rounded by columns go with the outputs."""
    scales = jnp.ones((1, 1), np.float32) if scales is None else scales.reshape(-1, 1)
    return Matrices(x, kernel, scales, x_scales, bias)


class _Forward(Convention):
    rows = ("x", "rounded_x")

    def tangents(self, spec: Float8Linear, results: Leaves, operands: Saved, dots: Saved) -> list[jax.Array | None]:
        variables = Variables(dots.x, dots.kernel, dots.bias)
        if all_none(variables):
            return [None]
        if not all_none(variables[:2]):
            x, kernel = _named(operands.rounded_x), _named(operands.rounded_kernel)
            operands = operands._replace(rounded_x=x, rounded_kernel=kernel)
        return [_tangent(spec, results[0], operands._replace(bias=None), variables)]

    def described(self, *types: ShapedArray, tree: PyTreeDef, spec: Float8Linear) -> Described:
        _, saved = jax.tree.unflatten(tree, types)
        x = saved.rounded_x.values if saved.x is None else saved.x
        asked = Operands(x, _swapped(saved.rounded_kernel.values) if saved.kernel is None else saved.kernel, saved.bias)
        return Described(NAME, asked, "forward", call_of(spec, asked))


def _named(of: Rounded | None) -> Rounded | None:
    return of and Rounded(*named("result", [of.values]), *named("statistics", [of.scales]))


def _tangent(spec: Float8Linear, y: jax.Array, saved: Saved, dots: Variables[jax.Array]) -> jax.Array:
    """The tangent of y; dots, not all of which are None, may be 1 long where y has examples."""
    if dots.bias is not None and all_none(dots[:2]):
        # No product: what is left is a sum in float32 in the transpose.
        wide = jnp.zeros_like(y, np.float32)
        lengths = (*dots.bias.shape[: spec.batch], *(1,) * (y.ndim - dots.bias.ndim), dots.bias.shape[-1])
        total: jax.Array = (wide + dots.bias.astype(np.float32).reshape(lengths)).astype(y.dtype)
        return total
    examples = y.shape[: spec.batch]
    dots = jax.tree.map(lambda dot: jnp.broadcast_to(dot, (*examples, *dot.shape[spec.batch :])), dots)
    return LINEAR.bind(spec, saved, dots)


class _Linear(Rules):
    def bind(self, spec: Float8Linear, saved: Saved, dots: Variables[jax.Array]) -> jax.Array:
        if dots.kernel is None:
            saved = saved._replace(x=None, rounded_x=None)
        if dots.x is None:
            saved = saved._replace(kernel=None, rounded_kernel=None)
        (y,) = rules.bind(self.primitive, (saved, dots), spec=spec)
        return y

    def formula(self, *leaves: jax.Array, tree: PyTreeDef, spec: Float8Linear) -> list[jax.Array]:
        return [formula.linear(spec, *jax.tree.unflatten(tree, leaves))]

    def jvp(self, primals: Leaves, dots: Dots, *, tree: PyTreeDef, spec: Float8Linear) -> tuple[Leaves, Leaves]:
        def wide(*leaves: jax.Array) -> list[jax.Array]:
            return [formula.wide_linear(spec, *jax.tree.unflatten(tree, leaves))]

        return self.primitive.bind(*primals, tree=tree, spec=spec), tangents_jnp(wide, primals, dots)

    def transpose(self, cotangents: Dots, *leaves: Any, tree: PyTreeDef, spec: Float8Linear) -> list[jax.Array | None]:
        saved, dots = jax.tree.unflatten(tree, leaves)
        given = [dot for dot in dots if dot is not None]
        nothing = [None] * (len(leaves) - len(given))
        (dy,) = cotangents
        if isinstance(dy, ad.Zero):
            return [*nothing, *(None for _ in given)]
        wanted = Variables(*(_wanted(spec, dot.aval) if ad.is_undefined_primal(dot) else None for dot in dots))
        gradients = backward(spec, dy, saved, wanted)
        return [*nothing, *(bar for bar, dot in zip(gradients, dots, strict=True) if dot is not None)]

    def batch(self, leaves: Leaves, axes: Axes, *, tree: PyTreeDef, spec: Float8Linear) -> Batched:
        size = rules.batch_size(leaves, axes)
        saved, dots = jax.tree.unflatten(tree, rules.examples_first(leaves, axes))
        # Each example has its own tangent, so that the transpose gives it its own gradient.
        dots = jax.tree.map(lambda dot: jnp.broadcast_to(dot, (size, *dot.shape[1:])), dots)
        return [self.bind(with_examples(spec), saved, dots)], [0]

    def described(self, *types: ShapedArray, tree: PyTreeDef, spec: Float8Linear) -> Described:
        _, dots = jax.tree.unflatten(tree, types)
        return Described(NAME, dots, "linear", Formula("tangents have no kernel"))


def _wanted(spec: Float8Linear, aval: ShapedArray) -> Wanted:
    of_example = PartitionSpec(*tuple(aval.sharding.spec)[spec.batch :])
    return Wanted(np.dtype(aval.dtype), of_example if AxisType.Explicit in aval.sharding.mesh.axis_types else None)


def backward(spec: Float8Linear, dy: jax.Array, saved: Saved, wanted: Variables[Wanted]) -> Variables[jax.Array]:
    """The wanted gradients, dy rounded once for each product."""
    if spec.batch:
        return of_batch(spec, lambda inner, dy, saved: backward(inner, dy, saved, wanted), dy, saved)
    of_kernel = wanted.kernel is not None and spec.weight_gradient == "float8"
    by_rows, by_columns = (functools.partial(of, direction="backward") for of in (kernels.by_rows, kernels.by_columns))
    x = None if wanted.kernel is None else formula.saved_x(spec, saved, by_rows)
    kernel = None if wanted.x is None else formula.saved_kernel(spec, saved, by_columns)
    u, v = _rounded(spec, dy, x if of_kernel else None, kernel)
    gradients = {}
    if u is not None and kernel is not None and wanted.x is not None:
        asked = spec.of_product("dx", *wanted.x)
        gradients["x"] = PRODUCT_OF_GRADIENT.bind(asked, _factors(*u, kernel.values, None))
    if wanted.kernel is not None and x is not None:
        if v is None:
            gradients["kernel"] = formula.wide_of_kernel(spec, dy, x, saved, wanted.kernel)
        else:
            asked = spec.of_product("dw", *wanted.kernel, rows=dy.ndim - 1)
            gradients["kernel"] = PRODUCT_OF_GRADIENT.bind(asked, _factors(x.values, _single(x), *v))
    if wanted.bias is not None:
        gradients["bias"] = dy.astype(np.float32).sum(tuple(range(dy.ndim - 1))).astype(wanted.bias.dtype)
    given = Variables(**gradients)
    values = iter(BACKWARD(spec, jax.tree.leaves(given), Read(dy, saved), wanted=wanted))
    return Variables(*(None if how is None else next(values) for how in wanted))


def _rounded(
    spec: Float8Linear, dy: jax.Array, x: Rounded | None, kernel: Rounded | None
) -> tuple[Rounded | None, Rounded | None]:
    """dy times the scales of the kernel's columns, rounded by rows, and times those of x's rows, rounded by columns.

    Without the other factor there is none of it. A single scale of x goes to the result.
    """
    if x is None and kernel is None:
        return None, None
    of_columns = None if kernel is None else kernel.scales[0]
    of_rows = None if x is None or x.scales.size == 1 else x.scales
    return kernels.gradient(spec, dy, of_columns, of_rows, (kernel is not None, x is not None))


def _single(other: Rounded) -> jax.Array | None:
    """The scale of an x that has one for all, and so did not go into dy."""
    return other.scales.reshape(1, 1) if other.scales.size == 1 else None


class Read(NamedTuple):
    dy: jax.Array
    saved: Saved


class _Backward(Convention):
    def tangents(self, spec: Float8Linear, _: Leaves, operands: Read, dots: Read, wanted: Variables[Wanted]) -> Leaves:
        def wide(*leaves: jax.Array) -> list[jax.Array]:
            dy, saved = jax.tree.unflatten(tree, leaves)
            return jax.tree.leaves(formula.wide_backward(spec, dy, saved, wanted))

        tree: Any  # it has no types
        leaves, tree = jax.tree.flatten(operands)
        return tangents_jnp(wide, leaves, tree.flatten_up_to(dots))

    def described(
        self, *types: ShapedArray, tree: PyTreeDef, spec: Float8Linear, wanted: Variables[Wanted]
    ) -> Described:
        _, (dy, saved) = jax.tree.unflatten(tree, types)
        x, kernel = (
            given if of is None else of.values
            for given, of in ((saved.x, saved.rounded_x), (saved.kernel, saved.rounded_kernel))
        )
        calls: list[Call] = []
        *rows, columns = dy.shape
        if wanted.x is not None:
            if saved.rounded_kernel is not None:
                kernel = _swapped(kernel)
            calls.append(_call(spec.of_product("dx", wanted.x.dtype), dy.shape, _swapped(kernel).shape))
        if wanted.kernel is not None and spec.weight_gradient != "float8":
            calls.append(Formula("the recipe has the kernel's gradient by a wide product"))
        elif wanted.kernel is not None:
            batch, rows = rows[: spec.batch], rows[spec.batch :]
            asked = spec.of_product("dw", wanted.kernel.dtype, rows=len(rows))
            calls.append(_call(asked, x.shape, (*batch, columns, *rows)))
        return Described(NAME, Factors(dy, x, kernel), "backward", Products(tuple(calls), spec.native_in("backward")))


class Factors(NamedTuple):
    """What a gradient is computed of, as far as a call has it."""

    dy: ShapedArray
    x: ShapedArray | None
    kernel: ShapedArray | None


@dataclasses.dataclass(frozen=True)
class Products(Call):
    """The products of a direction, each of which decides for itself; a reason is that of the first that has one."""

    calls: tuple[Call, ...]
    native_for: str | None = None
    platforms = ("cuda",)

    def nowhere(self) -> str | None:
        return next(filter(None, (call.nowhere() for call in self.calls)), None)

    def unfit(self, program: Program) -> str | None:
        return next(filter(None, (call.unfit(program) for call in self.calls)), None)

    def unserved(self, platform: str) -> str | None:
        return next(filter(None, (call.unserved(platform) for call in self.calls)), None)

    def left_out(self, platform: str) -> str | None:
        return next(filter(None, (call.left_out(platform) for call in self.calls)), None)


PRODUCT, PRODUCT_OF_GRADIENT = (Product(primitive_name(NAME, way)) for way in ("forward", "backward"))
LINEAR = _Linear(primitive_name(NAME, "linear"))
FORWARD, BACKWARD = _Forward(f"jaxnorm_{NAME}_derivative"), _Backward(f"jaxnorm_{NAME}_second_derivative")


def call_of(spec: Float8Linear, operands: Operands[ShapedArray]) -> Call:
    """The product of operands of these types."""
    weights = _swapped(operands.kernel) if operands.kernel_scales is None else operands.kernel
    return _call(spec.of_product("y", spec.out_dtype), operands.x.shape, weights.shape, operands.bias)


def _swapped(matrix: ShapedArray) -> ShapedArray:
    swapped: ShapedArray = matrix.update(shape=(*matrix.shape[:-2], *matrix.shape[:-3:-1]))
    return swapped


def _call(asked: QuantizedDot, x: Sequence[int], weights: Sequence[int], bias: ShapedArray | None = None) -> Call:
    of_x, of_weights = (ShapedArray(shape, FLOAT8) for shape in (x, weights))
    return ProductCall(asked, Matrices(of_x, of_weights, ShapedArray((1, 1), np.float32), None, bias))


registry.add_functions(
    Function(
        NAME,
        call=lambda request: call_of(
            Float8Linear(out_dtype=request.out_dtype), Operands(request.array(request.shape), request.matrix)
        ),
        arguments=lambda request: {"kernel": request.matrix},
        dtypes=tuple(map(jnp.dtype, ("bfloat16", "float16", "float32"))),
        out_dtypes=tuple(map(jnp.dtype, ("bfloat16", "float16", "float32"))),
        last_axis_only=True,
        matrix="kernel",
        columns="outputs",
        over=lambda _: "",
    )
)
