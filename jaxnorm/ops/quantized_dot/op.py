"""Products with quantised operands: the primitive of one, the kernels behind it, and the convention of its derivative.

A product has the rows of a second matrix as its columns, so that it is no `Op` of a `Family`, whose weights the rows
share. It stands still (`jaxnorm.primitive.convention`): values and scales do, and tangents flow through plain arrays
and carriers.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.tree_util import PyTreeDef

from jaxnorm.native import ffi
from jaxnorm.ops.quantized_dot import formula
from jaxnorm.ops.quantized_dot.formula import Arrays, Operands, QuantizedDot, T_co
from jaxnorm.primitive import fallback, lowering, reasons, registry, rules
from jaxnorm.primitive.convention import Convention, Still, with_examples, with_rows
from jaxnorm.primitive.decide import Call, Program
from jaxnorm.primitive.lowering import Context, Value, Values
from jaxnorm.primitive.op import Record, Spec
from jaxnorm.primitive.registry import Described, Function, Request
from jaxnorm.primitive.rules import Axes, Batched, Inner, Leaves
from jaxnorm.quantization import Quantized
from jaxnorm.sharding import partition
from jaxnorm.sharding.dims import CallMaps, DimMap

TARGET, TRANSPOSE = "jaxnorm_quantized_dot", "jaxnorm_transpose_bytes"
FLOAT8 = frozenset(map(jnp.dtype, ("float8_e4m3fn", "float8_e5m2")))
# What cuBLASLt wants lengths to be multiples of; the one GPU for which it scales by row and column.
MULTIPLE, CAPABILITY = 16, "9.0"
# Results of fewer elements XLA's code is faster for: it writes them as float32 first and reads them again, which takes
# little time as long as they stay in the cache; measured on an H200 (docs/benchmarks/products.md). The least holds of
# products none of whose lengths is short.
FEW, LEAST, SHORT = 2**24, 2**21, 2**10


def product(spec: QuantizedDot, operands: Arrays) -> jax.Array:
    """The product of checked operands, with its derivative."""
    y = QUANTIZED_DOT.bind(spec, operands._replace(x_carrier=None, weight_carrier=None))
    (y,) = CONVENTION(spec, [y], operands)
    return y


@dataclasses.dataclass(frozen=True)
class ProductCall(Call):
    """A product, by the types of its operands."""

    spec: QuantizedDot
    operands: Operands[ShapedArray]
    platforms = ("cuda",)

    @property
    def native_for(self) -> str | None:  # type: ignore[override]
        return self.spec.native_for

    @property
    def lengths(self) -> tuple[tuple[int, ...], int, int]:
        """Those of the rows of the result, the number of its columns, and that of products in a sum."""
        spec, batch = self.spec, self.spec.batch
        x, weights = self.operands.x.shape[batch:], self.operands.weights.shape[batch:]
        rows = x[spec.summed :] if spec.x_first else x[: len(x) - spec.summed]
        columns, summed = (weights[-1], weights[:-1]) if spec.weights_first else (weights[0], weights[1:])
        depth = summed[0] if len(summed) == 1 else math.prod(summed)
        # Rows that are summed are made more by rows of zeros, which add nothing.
        pads = spec.x_first and isinstance(depth, int)
        return rows, columns, depth + -depth % MULTIPLE if pads else depth

    def nowhere(self) -> str | None:
        spec, x, weights, bias = self.spec, self.operands.x, self.operands.weights, self.operands.bias
        _, *lengths = self.lengths
        if not {x.dtype, weights.dtype} <= FLOAT8:
            return f"x is {x.dtype} and the kernel {weights.dtype}, and cuBLASLt is taken for float8"
        if spec.wants_all_digits:
            return "jax.default_matmul_precision asks for all digits of float32, and cuBLASLt keeps fewer"
        if x.dtype == weights.dtype == jnp.float8_e5m2:
            return "x and the kernel are float8_e5m2, and cuBLASLt wants one of them to be float8_e4m3fn"
        if not all(isinstance(length, int) and length and length % MULTIPLE == 0 for length in lengths):
            return f"outputs and inputs of the kernel are {(*lengths,)}, and cuBLASLt wants multiples of {MULTIPLE}"
        if spec.out_dtype not in ffi.DTYPES:
            return f"the result is {spec.out_dtype}, kernels give {', '.join(sorted(d.name for d in ffi.DTYPES))}"
        if bias is not None and (bias.dtype != spec.out_dtype or spec.out_dtype == np.float32):
            return f"bias is {bias.dtype} and the result {spec.out_dtype}, and cuBLASLt wants both of the same 16 bits"
        return "cuBLASLt takes no examples of kernels, as jax.vmap makes them" if spec.batch else None

    def unfit(self, program: Program) -> str | None:
        return unfit(program)

    def unserved(self, platform: str) -> str | None:
        if math.prod(n for n in self.lengths[0] if isinstance(n, int)) <= reasons.MOST_ROWS:
            return None
        return f"x has shape {self.operands.x.shape}, and a CUDA kernel takes at most {reasons.MOST_ROWS} rows"

    def left_out(self, platform: str) -> str | None:
        if self.spec.implementation == "xla":
            return f"{fallback.ASKED_FOR}{self.spec.how}"
        lengths, columns, depth = self.lengths
        rows = math.prod(n for n in lengths if isinstance(n, int))
        few = FEW if min(rows, columns, depth) < SHORT else LEAST
        is_slower = rows * columns < few and not self.native_for
        return f"XLA's code is faster for results of less than {few} elements" if is_slower else None


def unfit(program: Program) -> str | None:
    """Why the GPUs of a program have no product."""
    only = f"cuBLASLt scales by row and column on GPUs of compute capability {CAPABILITY}"
    if program.is_exported:
        return f"{only}, and an exported program may run on others"
    if (capabilities := ffi.capabilities()) != {CAPABILITY}:
        return f"{only}, and here is {', '.join(sorted(capabilities)) or 'none'}"
    return ffi.why_no_cublaslt()


def _operands(tree: PyTreeDef, leaves: Sequence[T_co]) -> Operands[T_co]:
    return Operands(*jax.tree.unflatten(tree, leaves))


class Product(Still):
    """A product by cuBLASLt, which takes both matrices with what is summed as the last axis."""

    is_product = True

    def bind(self, spec: QuantizedDot, operands: Arrays) -> jax.Array:
        (y,) = rules.bind(self.primitive, tuple(operands), spec=spec)
        return y

    def formula(self, *leaves: jax.Array, tree: PyTreeDef, spec: QuantizedDot) -> list[jax.Array]:
        return [formula.forward(spec, _operands(tree, leaves))]

    def call(self, *types: ShapedArray, tree: PyTreeDef, spec: QuantizedDot) -> ProductCall:
        return ProductCall(spec, _operands(tree, types))

    def native(self, platform: str, ctx: Context, *leaves: Value, tree: PyTreeDef, spec: QuantizedDot) -> Values:
        ctx, values = lowering.replaced(functools.partial(_matrices, spec, tree), ctx, leaves)
        types, taken = list(ctx.avals_in), list(values)
        for place, is_first in ((0, spec.x_first), (2, spec.weights_first)):
            if is_first:
                lies, types[place] = types[place], types[place].update(shape=types[place].shape[::-1])
                of_bytes = ctx.replace(avals_in=[lies], avals_out=[types[place]])
                (taken[place],) = ffi.call(platform, TRANSPOSE, of_bytes, [taken[place]], attributes={})
        depth, columns = types[0].shape[-1], types[2].shape[0]
        return ffi.call(
            platform,
            TARGET,
            ctx.replace(avals_in=types),
            taken,
            workspace=ffi.workspace(platform, TARGET, spec.out_dtype, columns, depth),
            attributes={"has_bias": len(taken) > 4, "fast_accumulation": spec.accumulates_fast()},
        )

    def of_shard(self, *leaves: jax.Array, tree: PyTreeDef, spec: QuantizedDot) -> list[jax.Array]:
        """Of a device's part of what is summed: the results are added up, as XLA adds up those of its own products."""
        operands = _operands(tree, leaves)
        assert spec.shards is not None
        part = self.bind(dataclasses.replace(spec, shards=None), operands._replace(bias=None))
        y = spec.shards.sum(part)
        return [y if operands.bias is None else formula.with_bias(y, operands.bias).astype(spec.out_dtype)]

    def dim_maps(self, types: Record, *, spec: QuantizedDot) -> CallMaps:
        """The axes of a product are those of x's rows, those that are summed, and the outputs."""
        operands: Operands[ShapedArray] = Operands(*types)
        *axes, columns = range(operands.x.ndim + 1)
        rows, summed = tuple(axes[: len(axes) - spec.summed]), tuple(axes[len(axes) - spec.summed :])
        x: DimMap = (*summed, *rows) if spec.x_first else (*rows, *summed)
        weights: DimMap = (*summed, columns) if spec.weights_first else (columns, *summed)

        def of(array: ShapedArray, dim_map: DimMap) -> DimMap:  # of what is the same for all rows or outputs, too
            return tuple(None if n == 1 else axis for n, axis in zip(array.shape, dim_map, strict=True))

        given = [x, weights, of(operands.weight_scales, (columns, None))]
        given += [] if operands.x_scales is None else [of(operands.x_scales, (*rows, None))]
        given += [] if operands.bias is None else [(columns,)]
        return CallMaps(columns + 1, given, [(*rows, columns)], [()], [None])

    def batch(self, leaves: Leaves, axes: Axes, *, tree: PyTreeDef, spec: QuantizedDot) -> Batched:
        operands, batch = _operands(tree, leaves), _operands(tree, axes)
        front = _operands(tree, rules.examples_first(leaves, axes))
        is_of_rows = rules.all_none((batch.weights, batch.weight_scales, batch.bias))
        if spec.batch or spec.x_first or not is_of_rows:
            return [self.bind(with_examples(spec), front)], [0]
        # Examples of rows are rows.
        size = rules.batch_size(leaves, axes)
        rows = (size, *front.x.shape[1 : front.x.ndim - spec.summed])
        x = jnp.broadcast_to(front.x, (size, *front.x.shape[1:]))
        scales = front.x_scales if front.x_scales is None else jnp.broadcast_to(front.x_scales, (*rows, 1))
        return [self.bind(with_rows(spec), operands._replace(x=x, x_scales=scales))], [0]


def _matrices(spec: QuantizedDot, tree: PyTreeDef, *leaves: jax.Array) -> list[jax.Array]:
    """What a kernel takes: x and its scales, the weights and theirs, and the bias; what is summed is one axis, in its
    place, of which zeros are no part."""
    x, weights, weight_scales, x_scales, bias, *_ = _operands(tree, leaves)
    rows, columns, depth = ProductCall(spec, _operands(tree, list(map(jax.typeof, leaves)))).lengths
    count = math.prod(rows)

    def matrix(array: jax.Array, others: tuple[int, ...], *, is_first: bool) -> jax.Array:
        length = math.prod(array.shape[: spec.summed] if is_first else array.shape[array.ndim - spec.summed :])
        array = array.reshape((length, *others) if is_first else (*others, length)) if spec.summed != 1 else array
        missing = depth - array.shape[0 if is_first else -1]
        widths = [(0, missing), (0, 0)] if is_first else [*[(0, 0)] * (array.ndim - 1), (0, missing)]
        return jnp.pad(array, widths) if missing else array

    lengths = (count,) if spec.x_first else rows
    x = matrix(x, lengths, is_first=spec.x_first)
    weights = matrix(weights, (columns,), is_first=spec.weights_first)
    ones = jnp.ones((), np.float32)
    x_scales = jnp.broadcast_to(ones if x_scales is None else x_scales, (*lengths, 1))
    weight_scales = jnp.broadcast_to(weight_scales, (columns, 1))
    return [x, x_scales, weights, weight_scales, *([] if bias is None else [bias])]


class _Transpose(Inner):
    """A matrix of float8 with its axes swapped, in a program that XLA splits. XLA's own code moves less than a third of
    what a copy does within a step."""

    def formula(self, *operands: jax.Array, tree: PyTreeDef, spec: Spec) -> list[jax.Array]:
        (array,) = operands
        return [jnp.moveaxis(array, -1, 0)]

    def native(self, platform: str, ctx: Context, *operands: Value, tree: PyTreeDef, spec: Spec) -> Values:
        *rows, columns = ctx.avals_in[0].shape
        ctx, operands = lowering.replaced(lambda array: [array.reshape(math.prod(rows), columns)], ctx, operands)
        (matrix,) = ctx.avals_in
        swapped = matrix.update(shape=matrix.shape[::-1])
        values = ffi.call(platform, TRANSPOSE, ctx.replace(avals_out=[swapped]), operands, attributes={})
        ctx = ctx.replace(avals_in=[swapped])
        return lowering.replaced(lambda array: [array.reshape(columns, *rows)], ctx, values)[1]

    def dim_maps(self, types: Sequence[ShapedArray], *, spec: Spec) -> CallMaps:
        *rows, columns = range(types[0].ndim)
        return CallMaps(columns + 1, [(*rows, columns)], [(columns, *rows)], [()], [None])

    def lower_split(self, ctx: Context, value: Value, lies: ShapedArray, result: ShapedArray) -> Value:
        """The array of the type `result` of one that lies as of this type."""
        ctx, tree = ctx.replace(avals_in=[lies], avals_out=[result]), jax.tree.structure((0,))
        (swapped,) = partition.lower("cuda", self.primitive, ctx, value, tree=tree, in_place=False, spec=Spec())
        return swapped


class _QuantizedDot(Product):
    def described(self, *types: ShapedArray, tree: PyTreeDef, spec: QuantizedDot) -> Described:
        operands = _operands(tree, types)
        return Described("quantized_dot", operands, "forward", ProductCall(spec, operands))


class _Convention(Convention):
    rows = ("x", "x_scales", "x_carrier")

    def tangents(
        self, spec: QuantizedDot, results: Leaves, operands: Arrays, dots: Operands[jax.Array | None]
    ) -> list[jax.Array | None]:
        x_moves = dots.x is not None and operands.x_scales is None
        moves = x_moves or not rules.all_none((dots.bias, dots.x_carrier, dots.weight_carrier))
        return [formula.tangent(spec, operands, dots) if moves else None]


TRANSPOSED = _Transpose(TRANSPOSE)
QUANTIZED_DOT = _QuantizedDot("jaxnorm_quantized_dot")
CONVENTION = _Convention("jaxnorm_quantized_dot_derivative")
registry.add_types(QuantizedDot, Spec)


def _requested(request: Request) -> Operands[Any]:
    """x by weights of its dtype, or of int8 where x is an array."""
    (*rows, depth), columns = request.shape, request.columns
    is_quantized = request.dtype.itemsize == 1
    weights = request.array((columns, depth), None if is_quantized else np.int8)
    scales, x_scales = (request.array((*shape, 1), np.float32) for shape in ((columns,), rows))
    return Operands(request.array(request.shape), weights, scales, x_scales if is_quantized else None)


def _arguments(request: Request) -> dict[str, Any]:
    x, weights, scales, x_scales, *_ = _requested(request)
    return {
        "x": x if x_scales is None else Quantized(x, x_scales),
        "kernel": Quantized(weights, scales, transposed=True),
    }


registry.add_functions(
    Function(
        "quantized_dot",
        call=lambda request: ProductCall(QuantizedDot(out_dtype=request.out_dtype), _requested(request)),
        arguments=_arguments,
        dtypes=tuple(map(jnp.dtype, ("float8_e4m3fn", "float8_e5m2", "int8", "bfloat16", "float16", "float32"))),
        out_dtypes=tuple(map(jnp.dtype, ("bfloat16", "float16", "float32"))),
        last_axis_only=True,
        matrix="kernel",
        columns="outputs",
        over=lambda _: "",
    )
)
