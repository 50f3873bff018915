"""The native calls of a program as they stand in it, and the same calls with one thing wrong."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.mlir import ir

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
# A dtype that no operand or result has.
_OTHER = jnp.int16
# Of an axis that none has.
_NO_EXTENT = 7

Buffer = jax.ShapeDtypeStruct
Buffers = tuple[Buffer, ...]


class Call(NamedTuple):
    target: str
    operands: Buffers
    results: Buffers
    attributes: Mapping[str, Any]


def native_calls_of(function: Callable, *args) -> list[Call]:
    found = []

    def visit(operation):
        if operation.name == "stablehlo.custom_call":
            target = operation.attributes["call_target_name"].value
            if target.startswith("jaxnorm_"):
                buffers = (tuple(map(_buffer, side)) for side in (operation.operands, operation.results))
                given = operation.attributes["mhlo.backend_config"]
                found.append(Call(target, *buffers, {named.name: _attribute(named.attr) for named in given}))
        return ir.WalkResult.ADVANCE

    jax.jit(function).lower(*args).compiler_ir("stablehlo").operation.walk(visit)
    return found


def _buffer(value) -> Buffer:
    return Buffer(tuple(value.type.shape), _DTYPES[str(value.type.element_type)])


def _attribute(attribute):
    """As `jax.ffi.ffi_call` takes it."""
    if isinstance(attribute, ir.StringAttr):
        return attribute.value
    if isinstance(attribute, ir.BoolAttr):
        return bool(attribute.value)
    return np.dtype(_DTYPES[str(attribute.type)]).type(attribute.value)


def malformed(call: Call) -> Iterator[tuple[str, Call]]:
    """Each thing that can be wrong with the buffers and the attributes' types, and the call that has it wrong."""
    for field in ("operands", "results"):
        others = call.results if field == "operands" else call.operands
        for what, changed in _changes(field.removesuffix("s"), getattr(call, field), others):
            yield what, call._replace(**{field: changed})
    for name, value in call.attributes.items():
        others = {key: other for key, other in call.attributes.items() if key != name}
        if name not in _later_flags():
            yield f"no {name}", call._replace(attributes=others)
            if name.startswith(("has_", "with_")):
                yield f"{name} denied", call._replace(attributes=others | {name: not value})
        yield f"{name} of another type", call._replace(attributes=others | {name: _retyped(value)})
    yield "an attribute more", call._replace(attributes={**call.attributes, "more": True})


def _changes(what: str, buffers: Buffers, others: Buffers) -> Iterator[tuple[str, Buffers]]:
    for i, buffer in enumerate(buffers):
        before, after = buffers[:i], buffers[i + 1 :]
        yield f"no {what} {i}", (*before, *after)
        yield f"{what} {i} of another dtype", (*before, Buffer(buffer.shape, _OTHER), *after)
        for change, shape in _other_shapes(buffer.shape, [b.shape for b in (*before, *after, *others)]):
            yield f"{what} {i} {change}", (*before, Buffer(shape, buffer.dtype), *after)
    yield f"one {what} more", (*buffers, Buffer((3, 5), _OTHER))


def _other_shapes(shape: tuple[int, ...], others: Sequence[tuple[int, ...]]) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "with an axis more", (_NO_EXTENT, *shape)
    if math.prod(shape[:-1]) > 1:
        yield "flat", (math.prod(shape),)
    # What no other array has is this one's to say.
    if any(shape[-1:] == other[-1:] for other in others):
        yield "with one column", (*shape[:-1], int(shape[-1] > 1))
    # An array of one row goes with any number of rows.
    if len(shape) > 1 and shape[0] > 2:
        yield "with a row less", (shape[0] - 1, *shape[1:])


def _retyped(value):
    if isinstance(value, str):
        return np.int64(len(value))
    return {bool: np.int32, np.int64: np.int32, np.int32: np.int64, np.float32: np.float64}[type(value)](value)


@cache
def _later_flags() -> frozenset[str]:
    """The flags that programs of before do not have: where one is missing it is not set."""
    texts = (file.read_text() for file in _SOURCES.rglob("*.h"))
    return frozenset(name for text in texts for name in re.findall(r'later_flag\("(\w+)"\)', text))
