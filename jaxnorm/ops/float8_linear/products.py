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

from jaxnorm.ops.quantized_dot import op as quantized_dot
from jaxnorm.ops.quantized_dot.formula import Operands, QuantizedDot, float8_dot
from jaxnorm.primitive.op import Spec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8Linear(Spec):
    """What is static about one linear layer: the fields of a `Float8Recipe`, and of the call."""

    out_dtype: np.dtype[Any]
    scaling: str = "row"
    weight_gradient: str = "float8"
    power_of_two: bool = False
    save: str = "quantized"
    out_spec: PartitionSpec | None = None  # of y over an Explicit mesh, where x and the kernel do not say it
    implementation: str | None = None
    how: str = ""  # it was chosen, if not by the argument
    wants_all_digits: bool = False  # of a sum, by `jax.default_matmul_precision`
    batch: int = 0  # how many leading axes every operand has that vmap made, 1 long where it has no batch

    def of_product(self, out_dtype: Any) -> QuantizedDot:
        """What is static about one of its products."""
        return QuantizedDot(
            out_dtype=np.dtype(out_dtype),
            implementation=self.implementation,
            how=self.how,
            wants_all_digits=self.wants_all_digits,
            native_for=self.native_for,
        )


class Product(NamedTuple):
    """`sum(a * b)` along the contracted axes, times the scales in their order, plus bias, all in float32; then rounded.

    The result has the other axes of a, and then the one of b. Scales and bias broadcast against it.
    """

    a: Any
    b: Any
    contracted: tuple[tuple[int, ...], tuple[int, ...]]
    of_rows: Any  # (..., 1), or None
    of_columns: Any  # (..., N), or None
    out_dtype: Any
    bias: Any = None  # (N,)
    out_sharding: Any = None


Multiply = Callable[[Float8Linear, Product], jax.Array]


def by_xla(spec: Float8Linear, product: Product) -> jax.Array:
    a, b, contracted = product.a, product.b, product.contracted
    if spec.wants_all_digits:
        y = wide_dot(spec, a.astype(np.float32), b.astype(np.float32), contracted, product.out_sharding)
    else:
        y = float8_dot(a, b, contracted, out_sharding=product.out_sharding)
    for scales in (product.of_rows, product.of_columns):
        y = y if scales is None else y * of_rank(y.ndim, scales)
    y = y if product.bias is None else y + of_rank(y.ndim, product.bias.astype(y.dtype))
    return y.astype(product.out_dtype)


def by_kernels(spec: Float8Linear, product: Product) -> jax.Array:
    """The product as `quantized_dot` takes it, which decides whether a kernel makes it."""
    if spec.scaling == "tensor" or spec.wants_all_digits:
        return by_xla(spec, product)
    a, b = (_depth_last(of, axes) for of, axes in zip(product[:2], product.contracted, strict=True))
    one = jnp.ones((), np.float32)
    of_rows, of_columns = (one if of is None else of for of in (product.of_rows, product.of_columns))
    operands = Operands(
        a,
        b,
        jnp.broadcast_to(of_columns.reshape(-1, 1), (b.shape[0], 1)),
        jnp.broadcast_to(of_rows, (*a.shape[:-1], 1)),
        product.bias,
    )
    return quantized_dot.bind(spec.of_product(product.out_dtype), operands)


def _depth_last(array: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """The array with the contracted axes as its last one."""
    if axes == (array.ndim - 1,):
        return array
    others = [axis for axis in range(array.ndim) if axis not in axes]
    lengths = [array.shape[axis] for axis in others]
    return array.transpose(*others, *axes).reshape(*lengths, math.prod(array.shape[axis] for axis in axes))


def wide_dot(spec: Float8Linear, a: jax.Array, b: jax.Array, contracted: Any, out_sharding: Any = None) -> jax.Array:
    """The product of wide arrays, summed up in float32."""
    y: jax.Array = lax.dot_general(
        a,
        b,
        (contracted, ((), ())),
        precision=lax.Precision.HIGHEST if spec.wants_all_digits else None,
        preferred_element_type=np.float32,
        out_sharding=out_sharding,
    )
    return y


def sharding_of(array: jax.Array, spec: PartitionSpec | None) -> Any:
    """The sharding over the array's Explicit mesh by a spec, None of None."""
    sharding: Any = jax.typeof(array).sharding
    return None if spec is None else sharding.update(spec=spec)


def of_rank(ndim: int, array: jax.Array) -> jax.Array:
    """The array with axes of length 1 in front, up to this rank."""
    return lax.expand_dims(array, range(ndim - array.ndim))
