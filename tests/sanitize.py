"""The CUDA kernels under compute-sanitizer, whose tools but memcheck do not get along with a whole JAX process.

Here JAX is on the CPU: it lowers each row of the table for CUDA, at its own sizes and at each length at which one
kernel gives way to another, and what has no row. The native calls of that are made here, by the handlers themselves.
Each array has an allocation of its own, so that a tool sees what lies beside it.

    for tool in memcheck racecheck synccheck initcheck; do compute-sanitizer --tool $tool python tests/sanitize.py; done
    compute-sanitizer --tool racecheck python tests/sanitize.py softmax bfloat16    # what is named by these words
"""

import ctypes
import importlib
import itertools
import os
import sys
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"], here = "cpu", Path(__file__).parent
    sys.path[:0] = map(str, (here.parent, here, here / "lib"))
    import bench  # noqa: F401  # it lets the installed jaxnorm come before the clone's

import jax.numpy as jnp
import numpy as np
from cases import both_ways
from internals import run_every_kernel
from laws.test_lengths import CASES
from laws.test_malformed_calls import OF_OPTIONS
from native_calls import OF_CUDA, native_calls_of, struct as array
from table import OPS

import jaxnorm
from jaxnorm import Quantization

# Of dtypes, of attributes and of a stage, as XLA's FFI numbers them.
DTYPES = {"bool": 1, "int8": 2, "int32": 4, "int64": 5, "float16": 10, "float32": 11, "bfloat16": 16}
DTYPES |= {"float8_e5m2": 19, "float8_e4m3fn": 20, "float8_e8m0fnu": 33}
SCALAR, STRING, EXECUTE = 3, 4, 3
WORD = 16  # bytes that kernels read whole, others than an array's own too
# Of bytes of floats: 0.0115 as float32 and bfloat16, 1.06 as float16; and zeros, by elements behind whole words.
CONTENTS = ((b"\x3c", 0), (b"\0", 1))


class Device:
    """A GPU's memory, by CUDA's driver."""

    def __init__(self):
        self.cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.call("cuCtxSetCurrent", context)

    def call(self, name, *args):
        if error := getattr(self.cuda, name)(*args):
            raise RuntimeError(f"{name}: error {error}")

    def allocate(self, size):
        at = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(size))
        return at.value

    def write(self, at, data):
        if data:
            self.call("cuMemcpyHtoD_v2", ctypes.c_uint64(at), data, ctypes.c_size_t(len(data)))

    def finish(self, arrays):
        """Waits for what runs, and frees these."""
        self.call("cuCtxSynchronize")
        for at in arrays:
            self.call("cuMemFree_v2", ctypes.c_uint64(at))


def struct(*fields, has_head=True):
    """One of the FFI's, of which most begin with their size and what extends them."""
    fields = [*[ctypes.c_size_t(), ctypes.c_void_p()] * has_head, *fields]
    types = [(f"field{i}", type(field)) for i, field in enumerate(fields)]
    made = type("Struct", (ctypes.Structure,), {"_fields_": types})(*fields)
    if has_head:
        made.field0 = ctypes.sizeof(made)
    return made


class Runtime:
    """Calls handlers as XLA does."""

    def __init__(self, device):
        words, function = ctypes.POINTER(ctypes.c_void_p), ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)

        def create_error(args):
            self.error = ctypes.cast(ctypes.cast(args, words)[2], ctypes.c_char_p).value.decode()
            return 1

        def get_stream(args):
            ctypes.cast(args, words)[3] = None  # the default one

        self.device, self.functions = device, [function(create_error), function(get_stream)]
        create, get = (ctypes.cast(f, ctypes.c_void_p) for f in self.functions)
        none = ctypes.c_void_p()
        version = struct(ctypes.c_int(0), ctypes.c_int(1))
        self.api = struct(version, none, create, *[none] * 3, get, *[none] * 13)
        pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
        pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        handlers = importlib.import_module("jaxnorm._cuda").handlers()
        self.handlers = {target: function(pointer_of(capsule, None)) for target, capsule in handlers.items()}

    def run(self, call, byte, offset):
        """Makes a call, whose floats have these bytes and whose arrays begin so many elements behind a word."""
        kept, allocated = [], []

        def at(thing):
            kept.append(thing)
            return ctypes.c_void_p(ctypes.addressof(thing))

        def numbers(kind, values):
            return at((kind * len(values))(*values))

        def text(string):
            raw = string.encode()
            return struct(numbers(ctypes.c_char, raw), ctypes.c_size_t(len(raw)), has_head=False)

        def attribute(value):
            if isinstance(value, str):
                return STRING, text(value)
            value = np.asarray(value)
            data = numbers(ctypes.c_char, value.tobytes())
            return SCALAR, struct(ctypes.c_int(DTYPES[value.dtype.name]), data, has_head=False)

        def placed(buffer, is_operand):
            width, count = np.dtype(buffer.dtype).itemsize, int(np.prod(buffer.shape))
            data, before = byte * (width * count), byte * (width * offset)
            if buffer.dtype in (jnp.int32, jnp.bool):  # numbers of rows in their order, or whether something counts
                data = (np.arange(count) % (3 if buffer.dtype == jnp.bool else 1 << 30)).astype(buffer.dtype).tobytes()
            behind = byte * (-len(before + data) % WORD)
            begin = self.device.allocate(len(before + data + behind) or 1)
            allocated.append(begin)
            self.device.write(begin, before + data * is_operand)
            self.device.write(begin + len(before + data), behind)
            given = ctypes.c_int(DTYPES[np.dtype(buffer.dtype).name]), ctypes.c_void_p(begin + len(before))
            return struct(*given, ctypes.c_int64(len(buffer.shape)), numbers(ctypes.c_int64, buffer.shape))

        def listed(kinds, *lists):
            addresses = [numbers(ctypes.c_void_p, [at(thing).value for thing in things]) for things in lists]
            return struct(ctypes.c_int64(len(kinds)), numbers(ctypes.c_int, kinds), *addresses)

        operands = [placed(buffer, is_operand=True) for buffer in call.operands]
        results = [
            operands[call.aliases[i]] if i in call.aliases else placed(buffer, is_operand=False)
            for i, buffer in enumerate(call.results)
        ]
        attributes = [(*attribute(value), text(name)) for name, value in sorted(call.attributes.items())]
        kinds, values, names = zip(*attributes, strict=True) if attributes else ((), (), ())
        parts = *(listed([1] * len(side), side) for side in (operands, results)), listed(kinds, names, values)
        frame = struct(at(self.api), ctypes.c_void_p(), ctypes.c_int(EXECUTE), *parts)
        failed = self.handlers[call.target](ctypes.addressof(frame))
        self.device.finish(allocated)
        if failed:
            raise RuntimeError(self.error)


def few(size):
    """Of rows that a cluster of 16 blocks has no more than synccheck takes, see docs/findings.md."""
    return size._replace(dims=(min(7, size.dims[0]), *size.dims[1:])) if size.dims[-1] > 65_536 else size


def of_table():
    """By name: an op, options, and operands."""
    for op in OPS:
        for dtypes, size in itertools.product(op.dtypes, map(few, (*op.sizes, *op.backward_sizes, *op.many))):
            kinds = *dtypes, *["float32"] * len(op.weights)
            types = [array(*shape, dtype=kind) for shape, kind in zip(op.shapes_at(size), kinds, strict=True)]
            yield f"{op} {' '.join(dtypes)} {size}", op, size.options, types
    for case in CASES:
        for size in map(few, (*case.sizes("forward"), *case.sizes("backward"))):
            yield f"{case} {size}", case.op, case.options | size.options, case.draw(size)


def of_no_row():
    """By name: functions and operands."""
    draws = [OF_OPTIONS[name][0] for name in ("a draw", "a draw by rows' own filters")]
    groups = Quantization("int8"), Quantization("int8", "group")
    for dtype in ("float32", "bfloat16"):
        for rows, cols in itertools.product((1, 37), (1, 24, 257, 4096, 50_257, 151_936, 300_000)):
            x, own = array(rows, cols, dtype=dtype), array(rows, dtype="int32")
            yield f"sample {dtype} {rows}x{cols}", draws[0], [x]
            yield f"sample with filters {dtype} {rows}x{cols}", draws[1], [x, own]
        for cols, segments in [*itertools.product((1, 24, 100, 768), (1, 40, 4000, 60_000)), (8, 7)]:
            count = 1_000_000 if cols == 8 else 5000
            data, ids = array(count, cols, dtype=dtype), array(count, dtype="int32")
            for is_sorted in (False, True):
                sums = partial(jaxnorm.segment_sum, num_segments=segments, indices_are_sorted=is_sorted)
                yield f"segment_sum {dtype} {count}x{cols} to {segments}", sums, [data, ids]
            tied = partial(jaxnorm.embedding, return_table=True, implementation="native")
            yield f"embedding {dtype} {count}x{cols} of {segments}", both_ways(tied), [array(segments, cols), ids]
        for cols, to in itertools.product((1, 24, 100, 768, 1024, 10_001, 14_336), groups):
            if to.group_size is None or cols % to.group_size == 0:
                function = partial(jaxnorm.quantize, quantization=to)
                yield f"quantize {dtype} 70x{cols}", function, [array(70, cols, dtype=dtype)]
    yield from ((name, function, args) for name, (function, *args) in OF_OPTIONS.items())


def calls_of(words):
    """The native calls of what is named by these words, once each."""
    for name, op, options, args in of_table():
        if all(word in name for word in words):
            for of in (partial(op.function, **options), both_ways(partial(op.differentiable, **options))):
                yield from native_calls_of(of, *args, platforms=("cuda",))
    for name, function, args in of_no_row():
        if all(word in name for word in words):
            yield from native_calls_of(function, *args, platforms=("cuda",))
    yield from (call for name, call in OF_CUDA.items() if all(word in name for word in words))


def make_calls(runtime, words):
    made = set()
    for call in calls_of(words):
        if repr(call) not in made:
            made.add(repr(call))
            for byte, offset in CONTENTS:
                try:
                    runtime.run(call, byte, offset)
                except RuntimeError as error:
                    error.add_note(repr(call))
                    raise
    print(f"made {len(made)} calls")


if __name__ == "__main__":
    run_every_kernel()
    make_calls(Runtime(Device()), sys.argv[1:])
