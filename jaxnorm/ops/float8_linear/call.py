"""A call of a linear layer in float8, from unchecked arguments to the primitive."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jaxnorm.native import compat
from jaxnorm.ops.checks import check_array, check_implementation
from jaxnorm.ops.float8_linear import checks, described, op
from jaxnorm.ops.float8_linear.formula import Operands
from jaxnorm.ops.float8_linear.products import Float8Linear
from jaxnorm.ops.options import DIRECTIONS
from jaxnorm.primitive import decide
from jaxnorm.quantization import Quantized

ALL_DIGITS = ("highest", "float32", lax.Precision.HIGHEST)


def linear(
    function: str,
    x: Any,
    kernel: Any,
    bias: Any,
    out_dtype: Any,
    recipe: Any,
    implementation: Any = None,
    precision: Any = None,
    out_sharding: Any = None,
) -> jax.Array:
    """y, of a recipe that was checked."""
    choice = check_implementation(op.NAME, implementation)
    x = checks.check_x(function, x)
    values, scales, carrier = (x.values, x.scales, x.carrier) if isinstance(x, Quantized) else (x, None, None)
    kernel = checks.check_kernel(function, kernel, values.shape)
    spec = Float8Linear(
        out_dtype=checks.check_out_dtype(function, out_dtype, x),
        scaling=recipe.scaling,
        weight_gradient=recipe.weight_gradient,
        fast_accumulation=recipe.fast_accumulation,
        power_of_two=recipe.power_of_two,
        save=recipe.save,
        out_spec=_out_spec(values, kernel, out_sharding),
        wants_all_digits=_wants_all_digits(precision),
        **choice.asks(function),
    )
    if scales is not None:
        scales = scales if scales.ndim else scales.reshape((1,) * values.ndim)
    operands = _summed_wide(Operands(values, kernel, checks.check_bias(function, bias, kernel), scales, carrier))
    if spec.native_for:
        # One that must be native backward alone is held to the same.
        asked = dataclasses.replace(spec, native_ways=DIRECTIONS, formula_for=())
        decide.check_native(described.call_of(asked, jax.tree.map(jax.typeof, operands)))
    return op.linear(spec, operands)


def _summed_wide(operands: Operands) -> Operands:
    """The operands, in float32 where a `shard_map` adds up gradients over devices: they are rounded after that."""
    leaves, tree = jax.tree.flatten(operands)
    summed = zip(leaves, compat.are_summed(*leaves), strict=True)
    wide: Operands = jax.tree.unflatten(tree, [a.astype(np.float32) if is_summed else a for a, is_summed in summed])
    return wide


def _out_spec(x: jax.Array, kernel: jax.Array, out_sharding: Any) -> PartitionSpec | None:
    """How y is split over an Explicit mesh, where that is given or what is summed is split: as its rows and columns."""
    if out_sharding is not None:
        given: PartitionSpec = getattr(out_sharding, "spec", out_sharding)
        return given
    (*rows, of_x), (of_kernel, columns) = (tuple(jax.typeof(array).sharding.spec) for array in (x, kernel))
    names = jax.tree.leaves((rows, columns))
    # What is split twice by one name is no sharding, and JAX's product says so.
    is_known = (of_x is None and of_kernel is None) or len(set(names)) < len(names)
    return None if is_known else PartitionSpec(*rows, columns)


def _wants_all_digits(precision: Any) -> bool:
    """Whether a product is to have all digits of float32, by its own precision or by JAX's default."""
    config: Any = jax.config
    given = precision if isinstance(precision, tuple) else (precision,)
    return any((config.jax_default_matmul_precision if one is None else one) in ALL_DIGITS for one in given)


def dot_general(
    function: str,
    x: Any,
    kernel: Any,
    dimension_numbers: Any,
    precision: Any,
    dtype: Any,
    recipe: Any,
    out_sharding: Any,
) -> jax.Array:
    """The product as `lax.dot_general` gives it, of operands without batch axes."""
    (of_x, of_kernel), batch = dimension_numbers
    if any(map(len, batch)):
        raise ValueError(
            f"{function}: dimension_numbers have batch axes {tuple(map(tuple, batch))}, expected none: a kernel is one "
            f"matrix. For several use jax.vmap, or jax.lax.dot_general for a product without a kernel."
        )
    x, kernel = checks.check_x(function, x), check_array(function, "kernel", kernel)
    if isinstance(x, Quantized):
        raise TypeError(f"{function}: x is a jaxnorm.Quantized, expected an array; use jaxnorm.float8_linear.")
    lengths = [x.shape[axis] for axis in of_x]
    if lengths != [kernel.shape[axis] for axis in of_kernel]:
        raise ValueError(
            f"{function}: x has shape {x.shape} and kernel {kernel.shape}, whose axes {tuple(of_x)} and "
            f"{tuple(of_kernel)} are summed together, expected the same lengths there."
        )
    # In the kernel's order, which is moved less.
    pairs = sorted(zip(of_kernel, of_x, strict=True))
    kernel, outputs = _summed(kernel, [axis for axis, _ in pairs], last=False)
    x, rows = _summed(x, [axis for _, axis in pairs], last=True)
    dtype = jnp.promote_types(x.dtype, kernel.dtype) if dtype is None else dtype
    is_matrix = len(outputs) == 1
    y = linear(function, x, kernel, None, dtype, recipe, None, precision, out_sharding if is_matrix else None)
    if is_matrix:
        return y
    return lax.reshape(y, (*rows, *outputs), out_sharding=out_sharding)


def _summed(array: jax.Array, axes: list[int], *, last: bool) -> tuple[jax.Array, list[Any]]:
    """The array with these axes as one, its last or first; of a kernel the others are one too. And their lengths."""
    others = [axis for axis in range(array.ndim) if axis not in axes]
    lengths = [array.shape[axis] for axis in others]
    order = [*others, *axes] if last else [*axes, *others]
    if order != list(range(array.ndim)):
        array = array.transpose(order)
    depth = math.prod(array.shape[order.index(axis)] for axis in axes)
    shape = (*lengths, depth) if last else (depth, math.prod(lengths))
    return array if array.shape == shape else array.reshape(shape), lengths
