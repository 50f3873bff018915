"""What kernels do around the products of a linear layer in float8: they round by rows, by columns, or by both.

These primitives have no rules but their lowering, and under `jax.vmap` the formula's, as they are bound while the
layer's own primitives are lowered.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import mlir

from jaxnorm.native import ffi
from jaxnorm.ops.float8_linear.formula import Rounded, Wants, rounded_along, rounded_gradient
from jaxnorm.ops.float8_linear.products import Arithmetic, Float8Linear, by_kernels, by_kernels_of_parts
from jaxnorm.primitive import reasons, registry
from jaxnorm.primitive.op import Spec
from jaxnorm.primitive.rules import Inner
from jaxnorm.sharding.dims import CallMaps

# Targets that only CUDA has.
ROWS, COLUMNS, GRADIENT = (f"jaxnorm_round_{name}" for name in ("rows", "columns", "gradient"))
BYTES = "jaxnorm_transpose_bytes"


def rounded(spec: Float8Linear, array: jax.Array, axes: tuple[int, ...], *, keeps: bool = True) -> Rounded:
    """As `rounded_along`; of columns with what products sum up as the last axis, and without the values where none
    `keeps` them."""
    if not _is_served(spec, array):
        return rounded_along(spec, array, axes)
    if axes == (-1,):
        return Rounded(*_round_rows.primitive.bind(array, spec=spec))
    *values, transposed, scales = _round_columns.primitive.bind(array, spec=spec, keeps=keeps)
    return Rounded(values[0] if keeps else None, scales, transposed)


def gradient(
    spec: Float8Linear, dy: jax.Array, of_columns: jax.Array | None, of_rows: jax.Array | None, *, wants: Wants
) -> tuple[Any, Any]:
    """As `rounded_gradient`; what is rounded by columns has rows as its last axis only."""
    if not _is_served(spec, dy):
        return rounded_gradient(spec, dy, of_columns, of_rows, wants=wants)
    columns = [] if of_columns is None else [of_columns.reshape(-1)]
    if not wants[1]:
        return Rounded(*_round_rows.primitive.bind(dy, *columns, spec=spec)), None
    rows = [] if of_rows is None else [of_rows.reshape(-1)]
    columns = columns if wants[0] else []
    *by_rows, transposed, scales = _round_gradient.primitive.bind(
        dy, *columns, *rows, spec=spec, has_columns=bool(columns), has_rows=bool(rows), with_values=wants[0]
    )
    by_columns = Rounded(None, scales.reshape((1,) * (dy.ndim - 1) + (-1,)), transposed)
    return Rounded(*by_rows) if wants[0] else None, by_columns


def transposed(array: jax.Array) -> jax.Array:
    """An array of float8 with its last axis as the first one. XLA's own code for that moves less than a third of what a
    copy does within a step."""
    if 0 in array.shape:
        return jnp.moveaxis(array, -1, 0)
    result: jax.Array
    (result,) = _transpose.primitive.bind(array, tree=jax.tree.structure((array,)), spec=Spec())
    return result


def _is_served(spec: Float8Linear, array: jax.Array) -> bool:
    lengths = array.shape
    is_known = all(isinstance(length, int) and length > 0 for length in lengths)
    return spec.scaling == "row" and is_known and math.prod(lengths[:-1]) <= reasons.MOST_ROWS


class _RoundRows(Inner):
    def formula(self, *operands: jax.Array, spec: Float8Linear) -> list[jax.Array]:
        array, *of_columns = operands
        by_rows, _ = rounded_gradient(spec, array, next(iter(of_columns), None), None, wants=(True, False))
        return [by_rows.values, by_rows.scales]

    def native(self, platform: str, ctx: Any, *operands: Any, spec: Float8Linear) -> Any:
        attributes = {"has_factors": len(operands) > 1, "power_of_two": spec.power_of_two}
        return ffi.call(platform, ROWS, ctx, operands, attributes=attributes)


class _RoundColumns(Inner):
    def formula(self, *operands: jax.Array, spec: Float8Linear, keeps: bool) -> list[jax.Array]:
        (matrix,) = operands
        values, scales, _ = rounded_along(spec, matrix, (0,))
        return [*([values] if keeps else []), values.T, scales]

    def native(self, platform: str, ctx: Any, *operands: Any, spec: Float8Linear, keeps: bool) -> Any:
        attributes = {"power_of_two": spec.power_of_two, "with_values": keeps}
        workspace = _workspace(platform, COLUMNS, ctx)
        return ffi.call(platform, COLUMNS, ctx, operands, workspace=workspace, attributes=attributes)


class _RoundGradient(Inner):
    def formula(
        self, *operands: jax.Array, spec: Float8Linear, has_columns: bool, has_rows: bool, with_values: bool
    ) -> list[jax.Array]:
        dy, *factors = operands
        of_columns = factors[0] if has_columns else None
        of_rows = factors[-1].reshape(*dy.shape[:-1], 1) if has_rows else None
        by_rows, by_columns = rounded_gradient(spec, dy, of_columns, of_rows, wants=(with_values, True))
        cols = dy.shape[-1]
        transposed, scales = by_columns.values.reshape(-1, cols).T, by_columns.scales.reshape(1, cols)
        return [*(by_rows[:2] if with_values else []), transposed, scales]

    def native(
        self,
        platform: str,
        ctx: Any,
        *operands: Any,
        spec: Float8Linear,
        has_columns: bool,
        has_rows: bool,
        with_values: bool,
    ) -> Any:
        attributes = {
            "has_factors_of_columns": has_columns,
            "has_factors_of_rows": has_rows,
            "power_of_two": spec.power_of_two,
            "with_values": with_values,
        }
        workspace = _workspace(platform, GRADIENT, ctx)
        return ffi.call(platform, GRADIENT, ctx, operands, workspace=workspace, attributes=attributes)


def _workspace(platform: str, target: str, ctx: Any) -> Any:
    *rows, cols = ctx.avals_in[0].shape
    return ffi.workspace(platform, target, ctx.avals_in[0].dtype, math.prod(rows), cols)


class _Transpose(Inner):
    def formula(self, *operands: jax.Array, tree: Any, spec: Spec) -> list[jax.Array]:
        (array,) = operands
        return [jnp.moveaxis(array, -1, 0)]

    def native(self, platform: str, ctx: Any, *operands: Any, tree: Any, spec: Spec) -> Any:
        def of_matrix(array: jax.Array) -> list[jax.Array]:
            *rows, cols = array.shape
            return [transposed(array.reshape(-1, cols)).reshape(cols, *rows)]

        if ctx.avals_in[0].ndim > 2:
            return mlir.lower_fun(of_matrix)(ctx, *operands)
        return ffi.call(platform, BYTES, ctx, operands, attributes={})

    def dim_maps(self, types: Any, *, spec: Spec) -> CallMaps:
        *rows, cols = range(types[0].ndim)
        return CallMaps(cols + 1, [(*rows, cols)], [(cols, *rows)], [()], [None])


_round_rows, _round_columns, _round_gradient = _RoundRows(ROWS), _RoundColumns(COLUMNS), _RoundGradient(GRADIENT)
_transpose = _Transpose(BYTES)
registry.add_types(Spec)

BY_KERNELS = Arithmetic(rounded, gradient, functools.partial(by_kernels, transposed))
# Of what XLA splits: scales are those of whole rows and columns, and a kernel that rounds makes those of its own part.
PRODUCTS_BY_KERNELS = Arithmetic(rounded_along, rounded_gradient, functools.partial(by_kernels_of_parts, transposed))
