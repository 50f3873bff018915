"""Products of float8 with scales for rows and columns: by XLA along any axes, or as `quantized_dot` has kernels."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jaxnorm.ops import products
from jaxnorm.ops.quantized_dot import op as quantized_dot
from jaxnorm.ops.quantized_dot.formula import Operands, QuantizedDot, float8_dot
from jaxnorm.primitive.decide import Call, Formula, Platform, decide
from jaxnorm.primitive.op import Spec

FLOAT8 = jnp.dtype("float8_e4m3fn")
Transposed = Callable[[jax.Array], jax.Array]  # the array with its last axis as the first one


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8Linear(Spec):
    """What is static about one linear layer: the fields of a `Float8Recipe`, and of the call."""

    out_dtype: np.dtype[Any]
    scaling: str = "row"
    weight_gradient: str = "float8"
    fast_accumulation: tuple[str, ...] = ()
    power_of_two: bool = False
    save: str = "quantized"
    out_spec: PartitionSpec | None = None  # of y over an Explicit mesh, where x and the kernel do not say it
    wants_all_digits: bool = False  # of a sum, by `jax.default_matmul_precision`
    batch: int = 0  # how many leading axes every operand has that vmap made, 1 long where it has no batch

    def of_product(self, name: str, out_dtype: Any) -> QuantizedDot:
        """What is static about one of its products: "y", "dx" or "dw"."""
        direction = "forward" if name == "y" else "backward"
        how = self.formula_in(direction)
        return QuantizedDot(
            out_dtype=np.dtype(out_dtype),
            implementation=None if how is None else "xla",
            how=how or "",
            wants_all_digits=self.wants_all_digits,
            native_for=self.native_in(direction),
            fast_accumulation=name in self.fast_accumulation,
        )


class Product(NamedTuple):
    """`sum(a * b)` along the contracted axes, times the scales, plus bias, all in float32; then rounded.

    The result has the other axes of a, and then the one of b. Scales and bias broadcast against it.
    """

    name: str  # "y", "dx" or "dw"
    a: Any
    b: Any
    contracted: tuple[tuple[int, ...], tuple[int, ...]]
    of_rows: Any  # (..., 1), or None
    of_columns: Any  # (..., N), or None
    out_dtype: Any
    bias: Any = None  # (N,)
    out_sharding: Any = None
    b_depth_last: Any = None  # b with the contracted axes as its last one, where that is there


class Arithmetic(NamedTuple):
    """How a layer's operands are rounded, and by what they are multiplied."""

    rounded: Callable[..., Any]
    gradient: Callable[..., Any]
    multiply: Callable[[Float8Linear, Product], jax.Array]


def by_xla(spec: Float8Linear, product: Product) -> jax.Array:
    a, b, contracted = product.a, product.b, product.contracted
    if spec.wants_all_digits:
        y = wide_dot(spec, a.astype(np.float32), b.astype(np.float32), contracted, product.out_sharding)
    else:
        is_fast = product.name in spec.fast_accumulation
        y = float8_dot(a, b, contracted, is_fast=is_fast, out_sharding=product.out_sharding)
    scales = [of_rank(y.ndim, of) for of in (product.of_rows, product.of_columns) if of is not None]
    y = products.times_scales(y, *scales) if len(scales) == 2 else y * scales[0]
    y = y if product.bias is None else y + of_rank(y.ndim, product.bias.astype(y.dtype))
    return y.astype(product.out_dtype)


def by_kernels(transposed: Transposed, spec: Float8Linear, product: Product) -> jax.Array:
    """The product as `quantized_dot` takes it, which decides whether a kernel makes it."""
    is_empty = 0 in product.a.shape or 0 in (product.b if product.b_depth_last is None else product.b_depth_last).shape
    if spec.scaling == "tensor" or spec.wants_all_digits or is_empty:
        if product.b is None:
            lengths = [product.a.shape[axis] for axis in product.contracted[0]]
            product = product._replace(b=product.b_depth_last.T.reshape(*lengths, -1))
        return by_xla(spec, product)
    a, b = product.a, product.b_depth_last
    if product.contracted[0] != (a.ndim - 1,):  # but its first ones, which are one axis where b has them as one
        a = transposed(a if b is None else a.reshape(-1, a.shape[-1]))
    if b is None:
        b = product.b if product.contracted[1] == (product.b.ndim - 1,) else transposed(product.b)
    if missing := product.name == "dw" and -math.prod(b.shape[1:]) % quantized_dot.MULTIPLE:
        # Tokens of zeros, which add nothing.
        a, b = (jnp.pad(of.reshape(of.shape[0], -1), [(0, 0), (0, missing)]) for of in (a, b))
    summed = b.ndim - 1
    one = jnp.ones((), np.float32)
    of_rows, of_columns = (one if of is None else of for of in (product.of_rows, product.of_columns))
    operands = Operands(
        a,
        b,
        jnp.broadcast_to(of_columns.reshape(-1, 1), (b.shape[0], 1)),
        jnp.broadcast_to(of_rows, (*a.shape[:-summed], 1)),
        product.bias,
    )
    out_spec = None if product.out_sharding is None else product.out_sharding.spec
    of_product = spec.of_product(product.name, product.out_dtype)
    return quantized_dot.bind(dataclasses.replace(of_product, summed=summed, out_spec=out_spec), operands)


def by_kernels_of_parts(transposed: Transposed, spec: Float8Linear, product: Product) -> jax.Array:
    """As `by_kernels`, of operands that XLA splits: what it multiplies itself it takes as it lies."""
    x, weights = (
        of.shape if axes == (of.ndim - 1,) else as_rows(of.shape)
        for of, axes in zip((product.a, product.b), product.contracted, strict=True)
    )
    call = call_of(spec, product.name, x, weights, product.out_dtype, product.bias)
    if decide(Platform.here("cuda"), call).how != "native":
        return by_xla(spec, product)
    return by_kernels(transposed, spec, product)


def call_of(spec: Float8Linear, product: str, x: Any, weights: Any, out_dtype: Any, bias: Any = None) -> Call:
    """The product of arrays of these shapes, whose last axes are summed."""
    asked = spec.of_product(product, out_dtype)
    if spec.scaling == "tensor":
        return Formula("the recipe has one scale for each tensor, with which XLA makes the products", asked.native_for)
    if spec.batch:
        return Formula("no kernel takes examples of kernels, as jax.vmap makes them", asked.native_for)
    of_x, of_weights = (jax.core.ShapedArray(shape, FLOAT8) for shape in (x, weights))
    scales, x_scales = (jax.core.ShapedArray((*of[:-1], 1), np.dtype(np.float32)) for of in (weights, x))
    operands = Operands(of_x, of_weights, scales, x_scales, bias)
    return quantized_dot.ProductCall(asked, operands)


def as_rows(shape: Any) -> Any:
    """The shape of rows that are summed, as the columns of a matrix, of which kernels pad the number."""
    *rows, columns = shape
    depth = math.prod(rows)
    return columns, depth + -depth % quantized_dot.MULTIPLE


def wide_dot(spec: Float8Linear, a: jax.Array, b: jax.Array, contracted: Any, out_sharding: Any = None) -> jax.Array:
    """The product of wide arrays, summed up in float32."""
    precision = lax.Precision.HIGHEST if spec.wants_all_digits else None
    return products.wide_dot(a, b, contracted, np.float32, precision=precision, out_sharding=out_sharding)


def of_rank(ndim: int, array: jax.Array) -> jax.Array:
    """The array with axes of length 1 in front, up to this rank."""
    return lax.expand_dims(array, range(ndim - array.ndim))
