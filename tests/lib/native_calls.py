"""Calls of the handlers themselves: those of a program as they stand in it, and the same with one thing wrong."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.mlir import ir
from native import are_cuda_kernels

F32, F16, BF16 = jnp.float32, jnp.float16, jnp.bfloat16
_SOURCES = Path(__file__).parents[2] / "src"
# What MLIR calls dtypes where NumPy does not.
_DTYPES = {
    "f16": "float16",
    "bf16": "bfloat16",
    "f32": "float32",
    "f64": "float64",
    "i1": "bool",
    "i8": "int8",
    "i32": "int32",
    "i64": "int64",
    "f8E4M3FN": "float8_e4m3fn",
    "f8E5M2": "float8_e5m2",
}
# Dtypes that no operand or result has: of those with elements of one byte, and of others.
_OF_BYTES, _OF_OTHERS = (BF16, jnp.uint8, jnp.float8_e4m3b11fnuz), (jnp.int8,)
# Of an axis that none has.
_NO_EXTENT = 7
_BEYOND = np.int64(1 << 62)
# By the name of an attribute: values that it cannot have, in any call; of others every value will do.
WRONG_VALUES: Mapping[str, tuple[Any, ...]] = {
    "activation": ("", "tanh"),
    "axes": (*map(np.int64, (-1, 0, 16)), _BEYOND),
    "group": tuple(map(np.int64, (-64, 16, 64))),  # of 64 columns that are divided otherwise, or not at all
    "grouped": (True, False),
    "heads": (*map(np.int64, (-6, 5)), _BEYOND),
    "heads_axis": tuple(map(np.int64, (-1, -5, 0))),
    "kv_heads": (*map(np.int64, (-6, 5)), _BEYOND),
    "max_scale": (np.float32(0), np.float32(np.nan)),
    "norm": ("batch", "none"),  # with scales
    "rotary_dim": (*map(np.int64, (-2, 0, 7)), _BEYOND),
    "segments": (*map(np.int64, (-1, 7, 1 << 31)), _BEYOND),
    "window": (*map(np.int64, (-1, 0, 1 << 31)), _BEYOND),
}
ANY_VALUE = ("epsilon", "scale", "scale_offset", "soft_cap")

Buffer = jax.ShapeDtypeStruct
Buffers = tuple[Buffer, ...]


def struct(*shape: int, dtype: Any = F32) -> Buffer:
    return Buffer(shape, dtype)


# What a backward call has behind its results, of any size that suffices.
WORKSPACE = (struct(1 << 16),) if are_cuda_kernels() else ()


class Call(NamedTuple):
    target: str
    operands: Buffers
    results: Buffers
    attributes: Mapping[str, Any]
    aliases: Mapping[int, int] = {}  # by results the operands whose places they may take

    def run(self) -> list[jax.Array]:
        """The results of operands that are all 1."""
        return call(self.target, self.results, self.operands, self.attributes)

    def but(
        self,
        operands: Mapping[int, Buffer | None] = {},
        results: Mapping[int, Buffer | None] = {},
        extents: Mapping[int, int] = {},
        **attributes: Any,
    ) -> "Call":
        """This with other buffers, by their index, of which None is none; with other extents; with other attributes."""
        sides = (
            [side[i] if i in side else own[i] for i in range(max(len(own), *(i + 1 for i in side), 0))]
            for side, own in ((operands, self.operands), (results, self.results))
        )
        sides = (tuple(_resized(buffer, extents) for buffer in side if buffer is not None) for side in sides)
        given = {name: value for name, value in {**self.attributes, **attributes}.items() if value is not None}
        return Call(self.target, *sides, given, self.aliases)


def _resized(buffer: Buffer, extents: Mapping[int, int]) -> Buffer:
    return Buffer(tuple(extents.get(extent, extent) for extent in buffer.shape), buffer.dtype)


def call(name, results, inputs, attributes):
    # A side effect, or XLA would drop a call without results. A new function each time, since JAX's cache takes
    # np.int32(1) and True for one.
    handler = jax.ffi.ffi_call(name, list(results), has_side_effect=True)
    arguments = [np.ones(i.shape, i.dtype) for i in inputs]
    return jax.block_until_ready(jax.jit(lambda *args: handler(*args, **attributes))(*arguments))


def errors_of(calls: Sequence[Call]) -> list[str | None]:
    """What is said of each of these calls, None of one that runs.

    On a CPU all stand in one program, which is compiled once; there attributes of two of them must differ by more than
    the type, since JAX takes np.int32(1) and True for one.
    """
    run_each = [each.run for each in calls] if jax.default_backend() == "gpu" else _branches(calls)
    errors: list[str | None] = []
    for run in run_each:
        try:
            jax.block_until_ready(run())
            errors.append(None)
        except jax.errors.JaxRuntimeError as error:
            errors.append(str(error))
    return errors


def _branches(calls: Sequence[Call]) -> list[Callable]:
    buffers = list({repr(buffer): buffer for each in calls for buffer in each.operands}.values())
    index = {repr(buffer): i for i, buffer in enumerate(buffers)}

    def branch(each: Call) -> Callable:
        handler = jax.ffi.ffi_call(each.target, list(each.results), has_side_effect=True)

        def run(*arrays):
            handler(*(arrays[index[repr(buffer)]] for buffer in each.operands), **each.attributes)
            return 0

        return run

    branches = [branch(each) for each in calls]
    program = jax.jit(lambda i, *arrays: jax.lax.switch(i, branches, *arrays))
    arrays = [np.ones(buffer.shape, buffer.dtype) for buffer in buffers]
    return [partial(program, i, *arrays) for i in range(len(calls))]


def is_refused(name: str, message: str):
    """The call within is an error of this target that says so."""
    return pytest.raises(jax.errors.JaxRuntimeError, match=f"{name}.*({message})")


def native_calls_of(function: Callable, *args, platforms: tuple[str, ...] | None = None) -> list[Call]:
    """Those of a program for JAX's default platform, or for these."""
    found = []

    def visit(operation):
        if operation.name == "stablehlo.custom_call":
            target = operation.attributes["call_target_name"].value
            if target.startswith("jaxnorm_"):
                buffers = (tuple(map(_buffer, side)) for side in (operation.operands, operation.results))
                given = operation.attributes["mhlo.backend_config"]
                attributes = {named.name: _attribute(named.attr) for named in given}
                aliases = re.findall(r"tuple_indices = \[(\d*)\], operand_index = (\d+)", str(operation.attributes))
                found.append(Call(target, *buffers, attributes, {int(i or 0): int(j) for i, j in aliases}))
        return ir.WalkResult.ADVANCE

    lowered = jax.jit(function).trace(*args).lower(lowering_platforms=platforms)
    lowered.compiler_ir("stablehlo").operation.walk(visit)
    return found


def native_calls_of_op(op, dtype: str = "float32") -> list[Call]:
    """Of a row of the table: of the results alone, of which no gradient keeps the statistics, and with gradients."""
    args, gradients = op.draw(op.small, [dtype] * op.arrays), jax.value_and_grad(op.loss(), op.all)
    found = [*native_calls_of(op.run(op.function), *args), *native_calls_of(gradients, *args)]
    return list({repr(native): native for native in found}.values())


def _buffer(value) -> Buffer:
    return Buffer(tuple(value.type.shape), _DTYPES[str(value.type.element_type)])


def _attribute(attribute):
    """As `jax.ffi.ffi_call` takes it."""
    if isinstance(attribute, ir.StringAttr):
        return attribute.value
    if isinstance(attribute, ir.BoolAttr):
        return bool(attribute.value)
    return np.dtype(_DTYPES[str(attribute.type)]).type(attribute.value)


Changes = Iterator[tuple[str, Call]]


def malformed_results(call: Call) -> Changes:
    """Each thing that can be wrong with the results, and the call that has it wrong."""
    yield from _malformed_buffers(call, "results")


def malformed_operands(call: Call) -> Changes:
    """The like of operands and attributes."""
    yield from _malformed_buffers(call, "operands")
    for name, value in call.attributes.items():
        if name not in _later():
            yield f"no {name}", call.but(**{name: None})
            if name.startswith(("has_", "with_")):
                yield f"{name} denied", call.but(**{name: not value})
        of = name.removeprefix("has_")
        if value and of != name and call.attributes.get(f"with_d{of}"):
            for i in range(len(call.operands)):
                yield f"{name} denied, without operand {i}", call.but({i: None}, **{name: False})
        yield f"{name} of another type", call.but(**{name: _retyped(value)})
        for wrong in _wrong_values(name, value):
            yield f"{name} of {wrong!r}", call.but(**{name: wrong})
    yield "an attribute more", call.but(more=True)
    if call.target not in ("jaxnorm_transpose_bytes", "jaxnorm_segment_sum"):  # whose matrix may be empty
        shapes = (buffer.shape for buffer in call.operands)
        yield "rows of nothing", call.but(extents={max(shapes, key=lambda shape: (len(shape), shape[-1:]))[-1]: 0})
    scalars = (tuple(Buffer((), buffer.dtype) for buffer in side) for side in (call.operands, call.results))
    yield "scalars", Call(call.target, *scalars, call.attributes)


def _wrong_values(name: str, value: Any) -> Iterator[Any]:
    is_flag = isinstance(value, (bool, np.bool))
    assert is_flag or name in WRONG_VALUES or name in ANY_VALUE, f"{name} has values that are wrong, or has it not?"
    return (wrong for wrong in WRONG_VALUES.get(name, ()) if wrong != value)


def _malformed_buffers(call: Call, side: str) -> Changes:
    what, buffers = side.removesuffix("s"), getattr(call, side)
    changed = partial(_with_buffer, call, side)
    for i, buffer in enumerate(buffers):
        yield f"no {what} {i}", changed(i, None)
        for other in _OF_BYTES if buffer.dtype.itemsize == 1 else _OF_OTHERS:
            yield f"{what} {i} of {jnp.dtype(other)}", changed(i, Buffer(buffer.shape, other))
        others = [b.shape for b in (*call.operands, *call.results) if b is not buffer]
        for change, shape in _other_shapes(buffer.shape, others):
            yield f"{what} {i} {change}", changed(i, Buffer(shape, buffer.dtype))
    yield f"one {what} more", changed(len(buffers), struct(3, 5, dtype=jnp.int8))


def _with_buffer(call: Call, side: str, i: int, buffer: Buffer | None) -> Call:
    return call.but(**{side: {i: buffer}})


def _other_shapes(shape: tuple[int, ...], others: list[tuple[int, ...]]) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "with an axis more", (_NO_EXTENT, *shape)
    if math.prod(shape[:-1]) > 1:
        yield "flat", (math.prod(shape),)
    # What no other array has is this one's to say.
    if any(shape[-1:] == other[-1:] for other in others):
        yield "with one column", (*shape[:-1], int(shape[-1] > 1))
    for axis, extent in enumerate(shape[:-1]):
        if any(extent in other for other in others):
            yield f"of another extent along axis {axis}", (*shape[:axis], _NO_EXTENT, *shape[axis + 1 :])


def doubtful(call: Call) -> Changes:
    """Changes that some readers take: for results as of the call itself, all operands being 1."""
    for name in _later().intersection(call.attributes):
        if call.attributes[name]:
            yield f"no {name}", call.but(**{name: None})
            yield f"{name} denied", call.but(**{name: False})
    for i, operand in enumerate(call.operands):
        others = [b.shape for b in (*call.operands, *call.results) if b is not operand]
        for axis, extent in enumerate(operand.shape):
            if extent > 1 and any(extent in other for other in others):
                shape = (*operand.shape[:axis], 1, *operand.shape[axis + 1 :])
                yield f"operand {i} of extent 1 along axis {axis}", call.but({i: Buffer(shape, operand.dtype)})
    for side in ("operands", "results"):
        for i, buffer in enumerate(getattr(call, side)):
            if buffer.dtype in (F32, F16):
                yield f"{side} {i} of bfloat16", _with_buffer(call, side, i, Buffer(buffer.shape, BF16))


def _retyped(value):
    if isinstance(value, str):
        return np.int64(len(value))
    other = {bool: np.int32, np.int64: np.int32, np.int32: np.int64, np.float32: np.float64}[type(value)]
    return other(2) if value == 1 else other(1)


@cache
def _later() -> frozenset[str]:
    """The attributes that programs of before do not have: where a flag is missing it is not set."""
    texts = (file.read_text() for file in _SOURCES.rglob("*.h"))
    return frozenset(name for text in texts for name in re.findall(r'(?:later_flag|has_attribute)\("(\w+)"\)', text))


ROWS, COLS = 48, 64
E4M3 = jnp.float8_e4m3fn
ROW, HALF, WEIGHT, STATISTIC = struct(ROWS, COLS), struct(ROWS, COLS, dtype=BF16), struct(COLS), struct(ROWS, 1)
OF_COLUMNS = struct(1, COLS)
VALUES, TRANSPOSED = struct(ROWS, COLS, dtype=E4M3), struct(COLS, ROWS, dtype=E4M3)
_APPLY = {"scale_offset": np.float32(0), "multiply_before_cast": True, "has_scale": True, "has_bias": True}
_COLUMNS = {"power_of_two": False, "with_values": True}
_FACTORS = {"has_factors_of_columns": True, "has_factors_of_rows": True}


def _of_shards(kind: str, *statistics: Buffer) -> Iterator[Call]:
    axes = {"axes": np.int64(1)}
    yield Call(f"jaxnorm_{kind}_norm_statistics", (ROW,), statistics, axes)
    yield Call(f"jaxnorm_{kind}_norm_apply", (ROW, *statistics, WEIGHT, WEIGHT), (ROW,), axes | _APPLY)


# Calls of targets that only CUDA has, by their names; no row of the table makes them.
OF_CUDA = {
    native.target.removeprefix("jaxnorm_"): native
    for native in (
        *_of_shards("rms", STATISTIC),
        *_of_shards("layer", STATISTIC, STATISTIC),
        Call("jaxnorm_round_rows", (HALF, WEIGHT), (VALUES, STATISTIC), {"has_factors": True, "power_of_two": False}),
        Call("jaxnorm_round_columns", (HALF,), (VALUES, TRANSPOSED, OF_COLUMNS, *WORKSPACE), _COLUMNS),
        Call(
            "jaxnorm_round_gradient",
            (HALF, WEIGHT, struct(ROWS)),
            (VALUES, STATISTIC, TRANSPOSED, OF_COLUMNS, *WORKSPACE),
            _COLUMNS | _FACTORS,
        ),
        Call("jaxnorm_transpose_bytes", (VALUES,), (TRANSPOSED,), {}),
    )
}
# The product of x and weights of 32 columns, with scales and a bias.
DOT = Call(
    "jaxnorm_quantized_dot",
    (VALUES, STATISTIC, struct(32, COLS, dtype=E4M3), struct(32, 1), struct(32, dtype=BF16)),
    (struct(ROWS, 32, dtype=BF16), *WORKSPACE),
    {"has_bias": True, "fast_accumulation": True},
)
