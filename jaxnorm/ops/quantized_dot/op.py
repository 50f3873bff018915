"""The primitive of a product with quantised operands, and the kernels behind it.

Its derivative is a convention, as that of the quantised norms: values and scales stand still, tangents flow through
plain arrays and carriers. So it has a rule of its own, which no transformation may lose. It is no `Op` of a `Family`:
these have rows of x, and weights that rows share; a product has the rows of a second matrix as its columns.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, mlir

from jaxnorm.native import ffi
from jaxnorm.ops.quantized_dot import formula
from jaxnorm.ops.quantized_dot.formula import Operands, QuantizedDot
from jaxnorm.primitive import fallback, reasons, registry, rules
from jaxnorm.primitive.decide import Call, Program
from jaxnorm.primitive.registry import Described, Function, Request
from jaxnorm.primitive.rules import Rules
from jaxnorm.quantization import Quantized
from jaxnorm.sharding.dims import CallMaps

TARGET = "jaxnorm_quantized_dot"
FLOAT8 = frozenset(map(jnp.dtype, ("float8_e4m3fn", "float8_e5m2")))
# What cuBLASLt wants lengths to be multiples of; the one GPU for which it scales by row and column.
MULTIPLE, CAPABILITY = 16, "9.0"
# Results of fewer elements XLA's code is faster for: it writes them as float32 first and reads them again, which takes
# little time as long as they stay in the cache; measured on an H200 (docs/benchmarks/products.md). The least holds of
# products none of whose lengths is short.
FEW, LEAST, SHORT = 2**24, 2**21, 2**10


def bind(spec: QuantizedDot, operands: Operands) -> jax.Array:
    (y,) = rules.bind(PRODUCT.primitive, tuple(operands), spec=spec)
    return y


@dataclasses.dataclass(frozen=True)
class ProductCall(Call):
    """A product, by the types of its operands."""

    spec: QuantizedDot
    operands: Operands
    platforms = ("cuda",)

    @property
    def native_for(self) -> str | None:  # type: ignore[override]
        return self.spec.native_for

    def nowhere(self) -> str | None:
        spec, x, weights, bias = self.spec, self.operands.x, self.operands.weights, self.operands.bias
        lengths = weights.shape[-2:]
        if not {x.dtype, weights.dtype} <= FLOAT8:
            return f"x is {x.dtype} and the kernel {weights.dtype}, and cuBLASLt is taken for float8"
        if spec.wants_all_digits:
            return "jax.default_matmul_precision asks for all digits of float32, and cuBLASLt keeps fewer"
        if x.dtype == weights.dtype == jnp.float8_e5m2:
            return "x and the kernel are float8_e5m2, and cuBLASLt wants one of them to be float8_e4m3fn"
        if not all(isinstance(length, int) and length and length % MULTIPLE == 0 for length in lengths):
            return f"outputs and inputs of the kernel are {lengths}, and cuBLASLt wants multiples of {MULTIPLE}"
        if spec.out_dtype not in ffi.DTYPES:
            return f"the result is {spec.out_dtype}, kernels give {', '.join(sorted(d.name for d in ffi.DTYPES))}"
        if bias is not None and (bias.dtype != spec.out_dtype or spec.out_dtype == np.float32):
            return f"bias is {bias.dtype} and the result {spec.out_dtype}, and cuBLASLt wants both of the same 16 bits"
        return "cuBLASLt takes no examples of kernels, as jax.vmap makes them" if spec.batch else None

    def unfit(self, program: Program) -> str | None:
        only = f"cuBLASLt scales by row and column on GPUs of compute capability {CAPABILITY}"
        if program.is_exported:
            return f"{only}, and an exported program may run on others"
        if (capabilities := ffi.capabilities()) != {CAPABILITY}:
            return f"{only}, and here is {', '.join(sorted(capabilities)) or 'none'}"
        return ffi.why_no_cublaslt()

    def unserved(self, platform: str) -> str | None:
        x = self.operands.x
        if math.prod(n for n in x.shape[:-1] if isinstance(n, int)) <= reasons.MOST_ROWS:
            return None
        return f"x has shape {x.shape}, and a CUDA kernel takes at most {reasons.MOST_ROWS} rows"

    def left_out(self, platform: str) -> str | None:
        if self.spec.implementation == "xla":
            return f"{fallback.ASKED_FOR}{self.spec.how}"
        lengths = [*self.operands.x.shape[:-1], self.operands.weights.shape[0]]
        rows, columns = (math.prod(n for n in part if isinstance(n, int)) for part in (lengths[:-1], lengths[-1:]))
        few = FEW if min(rows, columns, self.operands.x.shape[-1]) < SHORT else LEAST
        is_slower = rows * columns < few and not self.native_for
        return f"XLA's code is faster for results of less than {few} elements" if is_slower else None


def _operands(tree: Any, leaves: Any) -> Operands:
    return Operands(*jax.tree.unflatten(tree, leaves))


class _Product(Rules):
    def formula(self, *leaves: Any, tree: Any, spec: QuantizedDot) -> list[jax.Array]:
        return [formula.forward(spec, _operands(tree, leaves))]

    def call(self, *types: Any, tree: Any, spec: QuantizedDot) -> ProductCall:
        return ProductCall(spec, _matrices(spec, _operands(tree, types)))

    def described(self, *types: Any, tree: Any, spec: QuantizedDot) -> Described:
        operands = _operands(tree, types)
        return Described("quantized_dot", operands, "forward", ProductCall(spec, operands))

    def native(self, platform: str, ctx: Any, *leaves: Any, tree: Any, spec: QuantizedDot) -> Sequence[Any]:
        if spec.summed > 1:
            flat: Sequence[Any] = mlir.lower_fun(functools.partial(_of_matrices, tree=tree, spec=spec))(ctx, *leaves)
            return flat
        operands, types = _operands(tree, leaves), _operands(tree, ctx.avals_in)
        values, avals = (
            [of.x, of.x_scales, of.weights, of.weight_scales, *([] if of.bias is None else [of.bias])]
            for of in (operands, types)
        )
        return ffi.call(
            platform,
            TARGET,
            ctx.replace(avals_in=avals),
            values,
            workspace=ffi.workspace(platform, TARGET, spec.out_dtype, types.x.shape[0], types.weights.shape[1]),
            attributes={"has_bias": operands.bias is not None, "fast_accumulation": spec.accumulates_fast()},
        )

    def of_shard(self, *leaves: Any, tree: Any, spec: QuantizedDot) -> list[jax.Array]:
        """Of a device's part of what is summed: the results are added up, as XLA adds up those of its own products."""
        operands = _operands(tree, leaves)
        assert spec.shards is not None
        part = bind(dataclasses.replace(spec, shards=None), operands._replace(bias=None))
        y = spec.shards.sum(part)
        return [y if operands.bias is None else formula.with_bias(y, operands.bias).astype(spec.out_dtype)]

    def dim_maps(self, types: Any, *, spec: QuantizedDot) -> CallMaps:
        """The axes of a product are those of x's rows, the one that is summed, and the outputs."""
        operands = Operands(*types)
        *axes, columns = range(operands.x.ndim + 1)
        rows, summed = axes[: -spec.summed], axes[-spec.summed :]
        maps = Operands(
            x=(*rows, *summed),
            weights=(columns, *summed),
            weight_scales=(columns, None),
            x_scales=(*rows, None),
            bias=(columns,),
            x_carrier=(*rows, *summed),
            weight_carrier=(columns, *summed),
        )
        given = [dim_map for array, dim_map in zip(operands, maps, strict=True) if array is not None]
        return CallMaps(columns + 1, given, [(*rows, columns)], [()], [None])

    def jvp(self, primals: Any, dots: Any, *, tree: Any, spec: QuantizedDot) -> tuple[Any, Any]:
        operands = _operands(tree, primals)
        moving = _operands(tree, [None if type(dot) is ad.Zero else dot for dot in dots])
        y = bind(spec, operands)
        x_moves = moving.x is not None and operands.x_scales is None
        if x_moves or any(dot is not None for dot in (moving.bias, moving.x_carrier, moving.weight_carrier)):
            return [y], [formula.tangent(spec, operands, moving)]
        return [y], [ad.Zero(jax.typeof(y).to_tangent_aval())]

    def batch(self, leaves: Any, axes: Any, *, tree: Any, spec: QuantizedDot) -> tuple[Any, Any]:
        operands, batch = _operands(tree, leaves), _operands(tree, axes)
        front = _operands(tree, rules.examples_first(leaves, axes))
        of_rows = "x", "x_scales", "x_carrier"
        if not spec.batch and rules.all_none(axis for name, axis in batch._asdict().items() if name not in of_rows):
            # Examples of rows are rows.
            size = rules.batch_size(leaves, axes)
            rows = {
                name: jnp.broadcast_to(array, (size, *array.shape[1:]))
                for name, array in front._asdict().items()
                if name in of_rows and array is not None
            }
            return [bind(spec, operands._replace(**rows))], [0]
        return [bind(dataclasses.replace(spec, batch=spec.batch + 1), front)], [0]


def _of_matrices(*leaves: Any, tree: Any, spec: QuantizedDot) -> list[jax.Array]:
    operands = _operands(tree, leaves)
    types = _matrices(spec, operands)
    x, weights = operands.x.reshape(types.x.shape), operands.weights.reshape(types.weights.shape)
    return [bind(dataclasses.replace(spec, summed=1), operands._replace(x=x, weights=weights))]


def _matrices(spec: QuantizedDot, operands: Operands) -> Operands:
    """The types of operands with what is summed as one axis."""

    def matrix(array: Any) -> Any:
        lengths = array.shape[: -spec.summed], array.shape[-spec.summed :]
        return jax.core.ShapedArray((*lengths[0], math.prod(lengths[1])), array.dtype)

    return operands._replace(x=matrix(operands.x), weights=matrix(operands.weights))


PRODUCT = _Product("jaxnorm_quantized_dot")
registry.add_types(QuantizedDot)


def _of_request(request: Request) -> ProductCall:
    return ProductCall(QuantizedDot(out_dtype=request.out_dtype), _requested(request))


def _requested(request: Request) -> Operands:
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
        call=_of_request,
        arguments=_arguments,
        dtypes=tuple(map(jnp.dtype, ("float8_e4m3fn", "float8_e5m2", "int8", "bfloat16", "float16", "float32"))),
        out_dtypes=tuple(map(jnp.dtype, ("bfloat16", "float16", "float32"))),
        last_axis_only=True,
        matrix="kernel",
        columns="outputs",
        over=lambda _: "",
    )
)
