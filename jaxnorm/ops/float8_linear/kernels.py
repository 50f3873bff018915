"""The primitives that round the operands of a linear layer to float8: by rows, by columns, or by both.

On CUDA each is a kernel. Where XLA splits a program it is the formula, as a scale is of a whole row or column, and a
kernel would make that of its own part; but what is rounded by columns is transposed by a kernel.
"""

import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.sharding import AxisType

from jaxnorm.native import compat, ffi
from jaxnorm.ops.float8_linear import formula
from jaxnorm.ops.float8_linear.formula import FLOAT8, Float8Linear, Rounded
from jaxnorm.ops.quantize.checks import SMALLEST_SCALE
from jaxnorm.ops.quantize.op import BY_COLUMNS, ByColumns, Operands as Given
from jaxnorm.ops.quantized_dot import op as quantized_dot
from jaxnorm.primitive import fallback, lowering, reasons
from jaxnorm.primitive.convention import Still
from jaxnorm.primitive.decide import Call, Program
from jaxnorm.primitive.lowering import Context, Value, Values
from jaxnorm.primitive.registry import Described
from jaxnorm.primitive.rules import Axes, Batched, Leaves, Types, all_none, at_front, examples_first
from jaxnorm.quantization import Quantization

# Targets that only CUDA has.
ROWS, COLUMNS, GRADIENT = (f"jaxnorm_round_{name}" for name in ("rows", "columns", "gradient"))


@dataclasses.dataclass(frozen=True)
class RoundCall(Call):
    """An array that is rounded, by its type, in a direction of a layer."""

    spec: Float8Linear
    array: ShapedArray
    direction: str
    platforms = ("cuda",)
    splits_itself = True

    def unfit(self, program: Program) -> str | None:
        if program.is_exported:
            return "an exported program may run on GPUs whose products of float8 are XLA's"
        return quantized_dot.unfit(program) if program.is_split else None

    def unserved(self, platform: str) -> str | None:
        is_known = all(isinstance(length, int) and length > 0 for length in self.array.shape)
        if is_known and math.prod(self.array.shape[:-1]) <= reasons.MOST_ROWS:
            return None
        return f"no kernel rounds {self.array.shape}"

    def left_out(self, platform: str) -> str | None:
        how = self.spec.formula_in(self.direction)
        return None if how is None else f"{fallback.ASKED_FOR}{how}"


class _Round(Still):
    """Of each, `by_columns` says which result has the columns as its first axis, from the end."""

    target: str
    by_columns: int | None = None
    kernel: Callable[..., Values]  # the results of the kernel on one device

    def abstract(self, *operands: ShapedArray, spec: Float8Linear, **how: Hashable) -> list[ShapedArray]:
        """The formula's, which takes milliseconds to trace; directly where no axes of a mesh are a part of types."""
        x, place = operands[0], self.by_columns
        if not {*x.sharding.mesh.axis_types} <= {AxisType.Auto}:
            return super().abstract(*operands, spec=spec, **how)
        (*rows, columns), ones = x.shape, (1,) * (x.ndim - 1)
        by_rows = [x.shape, (*rows, 1)] if how.get("rows", place is None) else []
        shapes = by_rows if place is None else [*by_rows, (columns, *rows), (*ones, columns)]
        dtypes = (FLOAT8, np.dtype(np.float32)) * 2
        return [x.update(shape=n, dtype=dtype, weak_type=False) for n, dtype in zip(shapes, dtypes, strict=False)]

    def native(self, platform: str, ctx: Context, *operands: Value, spec: Float8Linear, **how: Hashable) -> Values:
        if not compat.is_split_by_xla(ctx):
            return self.kernel(ctx, operands, spec, **how)
        place, types = self.by_columns, list(ctx.avals_out)

        def lying(*operands: jax.Array) -> list[jax.Array]:
            results = self.formula(*operands, spec=spec, **how)
            if place is not None:
                results[place] = jnp.moveaxis(results[place], 0, -1)
            return results

        ctx, results = lowering.replaced(lying, ctx, operands)
        values = list(results)
        if place is not None:
            lies = ctx.avals_in[place]
            values[place] = quantized_dot.TRANSPOSED.lower_split(ctx, values[place], lies, types[place])
        return values

    def call(self, *types: ShapedArray, spec: Float8Linear, direction: str, **_: Hashable) -> RoundCall:
        return RoundCall(spec, types[0], direction)

    def lowered(self, ctx: Context, operands: Values, attributes: Mapping[str, Hashable], types: Types) -> Values:
        """The results of the kernel, which gives them of these types."""
        *rows, cols = ctx.avals_in[0].shape
        workspace = ffi.workspace("cuda", self.target, ctx.avals_in[0].dtype, math.prod(rows), cols)
        values = ffi.call(
            "cuda", self.target, ctx.replace(avals_out=types), operands, workspace=workspace, attributes=attributes
        )
        if [of.shape for of in types] == [of.shape for of in ctx.avals_out]:
            return values

        def shaped(*values: jax.Array) -> list[jax.Array]:
            return [value.reshape(of.shape) for value, of in zip(values, ctx.avals_out, strict=True)]

        return lowering.replaced(shaped, ctx.replace(avals_in=types), values)[1]


class _Rows(_Round):
    target = ROWS

    def formula(self, *operands: jax.Array, spec: Float8Linear, direction: str) -> list[jax.Array]:
        return list(formula.by_rows(spec, *operands))

    def kernel(self, ctx: Context, operands: Values, spec: Float8Linear, **how: Hashable) -> Values:
        attributes = {"has_factors": len(operands) > 1, "power_of_two": spec.power_of_two}
        return ffi.call("cuda", ROWS, ctx, operands, attributes=attributes)

    def batch(self, operands: Leaves, axes: Axes, *, spec: Float8Linear, direction: str) -> Batched:
        if not all_none(axes[1:]):
            return super().batch(operands, axes, spec=spec, direction=direction)
        front = examples_first(operands[:1], axes[:1])
        return at_front(self.primitive.bind(*front, *operands[1:], spec=spec, direction=direction))


class _Columns(_Round):
    target, by_columns = COLUMNS, -2

    def formula(self, *operands: jax.Array, spec: Float8Linear, direction: str) -> list[jax.Array]:
        return list(formula.by_columns(spec, *operands))

    def kernel(self, ctx: Context, operands: Values, spec: Float8Linear, **how: Hashable) -> Values:
        attributes = {"power_of_two": spec.power_of_two, "with_values": False}
        return self.lowered(ctx, operands, attributes, ctx.avals_out)


class _Kernel(_Columns):
    """A matrix of `quantize_kernel`."""

    def described(self, *types: ShapedArray, spec: Float8Linear, direction: str) -> Described:
        given: Any = types[0]
        return Described("quantize_kernel", Given(given), direction, RoundCall(spec, types[0], direction))


class _Gradient(_Round):
    """dy times a factor for each column, by rows; and times one for each row, by columns."""

    target, by_columns = GRADIENT, -2

    def formula(
        self, *operands: jax.Array, spec: Float8Linear, direction: str, has_columns: bool, has_rows: bool, rows: bool
    ) -> list[jax.Array]:
        dy, *factors = operands
        of_columns, of_rows = factors[0] if has_columns else None, factors[-1] if has_rows else None
        by_rows = formula.by_rows(spec, dy, of_columns) if rows else ()
        return [*by_rows, *formula.by_columns(spec, dy, of_rows)]

    def kernel(self, ctx: Context, operands: Values, spec: Float8Linear, **how: Hashable) -> Values:
        attributes = {
            "has_factors_of_columns": how["has_columns"],
            "has_factors_of_rows": how["has_rows"],
            "power_of_two": spec.power_of_two,
            "with_values": how["rows"],
        }
        *_, transposed, scales = ctx.avals_out
        columns = transposed.shape[0]
        types = [transposed.update(shape=(columns, transposed.size // columns)), scales.update(shape=(1, columns))]
        if how["has_rows"]:
            given = ctx.avals_out
            ctx, operands = lowering.replaced(lambda *of: [*of[:-1], of[-1].ravel()], ctx, operands)
            ctx = ctx.replace(avals_out=given)
        return self.lowered(ctx, operands, attributes, [*ctx.avals_out[:-2], *types])


_ROWS, _COLUMNS, _GRADIENT = _Rows(ROWS), _Columns(COLUMNS), _Gradient(GRADIENT)
_KERNEL, _PLAIN = _Kernel("jaxnorm_quantize_kernel"), Float8Linear(out_dtype=FLOAT8)


def _quantized(quantization: Quantization, kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
    spec = dataclasses.replace(_PLAIN, power_of_two=quantization.power_of_two)
    values, scales = _KERNEL.primitive.bind(kernel, spec=spec, direction="forward")
    return values, jnp.maximum(scales, SMALLEST_SCALE).T


BY_COLUMNS[FLOAT8] = ByColumns(_quantized, lambda kernel: RoundCall(_PLAIN, kernel, "forward"))


def by_rows(spec: Float8Linear, array: jax.Array, direction: str) -> Rounded:
    return Rounded(*_ROWS.primitive.bind(array, spec=spec, direction=direction))


def by_columns(spec: Float8Linear, array: jax.Array, direction: str) -> Rounded:
    """A matrix, whose columns are the first axis of the values."""
    return Rounded(*_COLUMNS.primitive.bind(array, spec=spec, direction=direction))


def gradient(
    spec: Float8Linear, dy: jax.Array, of_columns: jax.Array | None, of_rows: jax.Array | None, wants: tuple[bool, bool]
) -> tuple[Rounded | None, Rounded | None]:
    """dy times a factor for each column, by rows, and times one for each row, by columns, as far as it wants them."""
    columns, rows = ([] if of is None else [of] for of in (of_columns, of_rows))
    by_rows, by_columns = wants
    if not by_columns:
        return Rounded(*_ROWS.primitive.bind(dy, *columns, spec=spec, direction="backward")), None
    columns = columns if by_rows else []
    how = {"has_columns": bool(columns), "has_rows": bool(rows), "rows": by_rows}
    values = _GRADIENT.primitive.bind(dy, *columns, *rows, spec=spec, direction="backward", **how)
    return Rounded(*values[:2]) if by_rows else None, Rounded(*values[-2:])
