"""Products with quantised operands: what is static about one, its formula in plain jnp, and that of its derivative."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jaxnorm.ops import products
from jaxnorm.ops.products import Contracted
from jaxnorm.primitive.broadcast import with_rank_of
from jaxnorm.primitive.convention import P, ProductSpec
from jaxnorm.primitive.op import Record

T_co = TypeVar("T_co", covariant=True)
Result = TypeVar("Result")  # an array, or a tuple of arrays
ALIGNMENT = 128  # in columns, of the parts of a long sum: libraries' products of 8 bits want one


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedDot(ProductSpec):
    implementation: str | None = None
    how: str = ""  # it was chosen, if not by the argument
    summed: int = 1  # how many axes are: the last ones, of both operands
    x_first: bool = False  # whether it is the first ones of x
    weights_first: bool = False  # and of the weights
    fast_accumulation: bool | None = None  # whether sums of float8 may have fewer digits; None: where y is of 16 bits

    @property
    def joint_axes(self) -> tuple[int, ...]:
        """What is summed, of the axes of a product: those of rows, these, and outputs."""
        return tuple(range(-1 - self.summed, -1))

    def accumulates_fast(self) -> bool:
        return self.out_dtype != np.float32 if self.fast_accumulation is None else self.fast_accumulation


class Operands(NamedTuple, Generic[T_co]):
    """Arrays, or what there is of each. Carriers are zeros and change no result; tangents flow through them."""

    x: T_co  # (..., K), quantised where it has scales
    weights: T_co  # (N, K)
    weight_scales: T_co  # (N, 1), or (1, 1)
    x_scales: T_co | None = None  # (..., 1), or of as many axes of length 1
    bias: T_co | None = None  # (N,)
    x_carrier: T_co | None = None
    weight_carrier: T_co | None = None  # (K, N)


Arrays = Operands[jax.Array]


def forward(spec: QuantizedDot, operands: Arrays) -> jax.Array:
    """`x @ weights.T`, of integers without rounding, then both scales and the bias in float32, then one rounding."""
    if spec.batch:
        return of_batch(spec, forward, operands)
    y: jax.Array = _product(spec, operands).astype(wide_dtype(operands.x.dtype))
    of_columns = with_rank_of(y, operands.weight_scales[:, 0])
    y = y * of_columns if operands.x_scales is None else products.times_scales(y, operands.x_scales, of_columns)
    return (y if operands.bias is None else with_bias(y, operands.bias)).astype(spec.out_dtype)


def with_bias(y: jax.Array, bias: jax.Array) -> jax.Array:
    """y with the bias, added up as wide as products are."""
    wide = y.astype(wide_dtype(y.dtype))
    return wide + with_rank_of(wide, bias.astype(wide.dtype))


def tangent(spec: QuantizedDot, operands: Arrays, dots: Operands[jax.Array | None]) -> jax.Array:
    """The derivative by convention: values times scales are what was quantised, and carriers have its tangents.

    In dots None is zero, and not all of x, bias and the carriers are. Values and scales do not move.
    """
    if spec.batch:
        return of_batch(spec, tangent, operands, dots)
    wide = wide_dtype(operands.x.dtype)
    x_dot = dots.x if operands.x_scales is None else dots.x_carrier
    terms = []
    if x_dot is not None:
        weights = dequantized(operands.weights, operands.weight_scales, x_dot.dtype)
        terms.append(_dot(x_dot, weights, wide))
    if dots.weight_carrier is not None:
        x = dequantized(operands.x, operands.x_scales, dots.weight_carrier.dtype)
        terms.append(products.wide_dot(x, dots.weight_carrier, ((x.ndim - 1,), (0,)), wide))
    if dots.bias is not None:
        rows = operands.x.shape[:-1]
        terms.append(jnp.broadcast_to(dots.bias.astype(wide), (*rows, *dots.bias.shape)))
    return functools.reduce(jnp.add, terms).astype(spec.out_dtype)


def wide_dtype(dtype: DTypeLike) -> np.dtype:
    """What products are added up in and scaled, for an x of this dtype."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def dequantized(values: jax.Array, scales: jax.Array | None, dtype: DTypeLike) -> jax.Array:
    """Values times scales, which stand still."""
    if scales is not None:
        values = values.astype(scales.dtype) * scales
    return lax.stop_gradient(values.astype(dtype))


def _product(spec: QuantizedDot, operands: Arrays) -> jax.Array:
    x, weights = operands.x, operands.weights
    if jnp.issubdtype(x.dtype, jnp.integer):
        return _integer_product(x, weights)
    if x.dtype.itemsize > 1:
        wide = weights.astype(x.dtype)
        if weights.dtype == jnp.int4 and x.dtype.itemsize > 2:
            # XLA for GPUs (JAX 0.11) gets the product of float32 wrong if it converts int4 within.
            wide = lax.optimization_barrier(wide)
        return _dot(x, wide, wide_dtype(x.dtype))
    if weights.dtype == jnp.float4_e2m1fn:
        weights = weights.astype(x.dtype)
    contracted = _contracted_axes(spec, x, weights)
    if spec.wants_all_digits:
        return wide_product(x, weights, contracted, spec, spec.out_spec)
    # What XLA reads of the precision for products of float8 on GPUs.
    precision = None if spec.fast_accumulation is not False else lax.Precision.HIGHEST
    out_sharding = _sharding_of(x, spec.out_spec)
    return products.wide_dot(x, weights, contracted, np.float32, precision=precision, out_sharding=out_sharding)


def _contracted_axes(spec: QuantizedDot, x: jax.Array, weights: jax.Array) -> Contracted:
    """The axes that are summed, of both."""

    def axes(array: jax.Array, is_first: bool) -> tuple[int, ...]:
        first = 0 if is_first else array.ndim - spec.summed
        return tuple(range(first, first + spec.summed))

    return axes(x, spec.x_first), axes(weights, spec.weights_first)


def wide_product(
    x: jax.Array,
    weights: jax.Array,
    contracted: Contracted,
    spec: ProductSpec,
    out_spec: PartitionSpec | None,
    dtype: DTypeLike = np.float32,
) -> jax.Array:
    """The product of arrays in a wide dtype, summed up in float32, with all digits where the spec wants them."""
    precision, out_sharding = lax.Precision.HIGHEST if spec.wants_all_digits else None, _sharding_of(x, out_spec)
    x, weights = x.astype(dtype), weights.astype(dtype)
    return products.wide_dot(x, weights, contracted, np.float32, precision=precision, out_sharding=out_sharding)


def _sharding_of(array: jax.Array, spec: PartitionSpec | None) -> NamedSharding | None:
    """The sharding over the array's Explicit mesh by a spec, None of None."""
    return None if spec is None else jax.typeof(array).sharding.update(spec=spec)


def _integer_product(x: jax.Array, weights: jax.Array) -> jax.Array:
    rows = x.shape[:-1]
    # XLA for GPUs (JAX 0.11) cannot compile the product of a single row with weights that it converts from int4.
    pads = weights.dtype != x.dtype and all(n == 1 for n in rows)
    if pads:
        x = jnp.pad(x if rows else x[None], [(0, 1), *[(0, 0)] * max(1, len(rows))])
    y = _sum_of_parts(x, weights.astype(x.dtype), _safe_columns(x.dtype, weights.dtype))
    return y[:1].reshape(*rows, -1) if pads else y


def _safe_columns(*dtypes: np.dtype) -> int:
    """Of how many columns an int32 holds the sum of products, each dtype's least value included."""
    iinfo: Any = jnp.iinfo  # it has no types
    largest = math.prod(abs(int(iinfo(dtype).min)) for dtype in dtypes)
    return (2**31 - 1) // largest


def _sum_of_parts(x: jax.Array, weights: jax.Array, columns: int) -> jax.Array:
    """The product in int32, or where int32 does not hold it in float32, as the exact sum rounded once.

    A number of columns that is not known while tracing is taken for one that int32 holds.
    """
    depth = weights.shape[1]
    if not isinstance(depth, int) or depth <= columns:
        return _dot(x, weights, np.int32)
    size = columns // ALIGNMENT * ALIGNMENT
    cuts = [(start, min(start + size, depth)) for start in range(0, depth, size)]
    slices = functools.partial(lax.slice_in_dim, axis=-1)
    parts = [_dot(slices(x, *cut), slices(weights, *cut), np.int32) for cut in cuts]
    # Either half of all parts together is a whole number that float32 holds.
    high, low = (functools.reduce(jnp.add, half) for half in ([p >> 16 for p in parts], [p & 0xFFFF for p in parts]))
    return high.astype(np.float32) * 2**16 + low.astype(np.float32)


def _dot(x: jax.Array, weights: jax.Array, dtype: DTypeLike) -> jax.Array:
    return products.wide_dot(x, weights, ((x.ndim - 1,), (1,)), dtype)


def of_batch(spec: P, function: Callable[..., Result], *records: Record) -> Result:
    """A function of examples, of whose axes the spec says how many there are. An operand that is 1 long is the same for
    all of them."""
    arrays, tree = jax.tree.flatten(records)
    axes = [0 if array.shape[0] != 1 else None for array in arrays]
    inner = functools.partial(function, dataclasses.replace(spec, batch=spec.batch - 1))

    def of_example(*values: jax.Array) -> Result:
        return inner(*jax.tree.unflatten(tree, values))

    shared = [array if axis == 0 else array[0] for array, axis in zip(arrays, axes, strict=True)]
    if not any(axis == 0 for axis in axes):
        one: Result = jax.tree.map(lambda result: result[None], of_example(*shared))
        return one
    examples: Result = jax.vmap(of_example, in_axes=tuple(axes))(*shared)
    return examples
