"""The CUDA kernels' own parts on the host, compiled as C++ against `emulator/`: what no law reaches, without a GPU.

All else is the laws': see tests/laws/test_lengths.py, and for workspaces of other sizes tests/laws/test_bits.py.
"""

import ctypes
import subprocess
from itertools import product

import emulated
import ml_dtypes
import numpy as np
import pytest
from cases import draw

# One worker compiles the kernels for all of these tests, and the group that has the most tests comes first.
pytestmark = [pytest.mark.needs("emulated"), pytest.mark.xdist_group("emulated")]

WORD = 16  # bytes, to which cuBLASLt wants arrays aligned, and vectors are
E4M3, E5M2, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.bfloat16
ENUM = {np.dtype(dtype): i for i, dtype in enumerate((np.float32, np.float16, BF16, E4M3, E5M2))}


# Whether every plan has a kernel; and what is known of the device, of which the emulator has one of its own.
@pytest.mark.parametrize("program", ["run_plans", "run_device"])
def test_no_failures(program):
    done = subprocess.run([emulated.program(program)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 failures\n", "")


@pytest.fixture(scope="module")
def library():
    loaded = ctypes.CDLL(str(emulated.program("libalone.so")))
    loaded.copied_dot.restype = ctypes.c_bool
    return loaded


class Array(ctypes.Structure):
    """An `Input` or an `Output`."""

    _fields_ = (("data", ctypes.c_void_p), ("dtype", ctypes.c_uint8))

    def values(self, *shape):
        (dtype,) = (dtype for dtype, number in ENUM.items() if number == self.dtype)
        return values_at(self.data, dtype, shape)


def values_at(address, dtype, shape):
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(address), dtype).reshape(shape)


def struct(fields):
    """One of C++ with these fields, arrays as `Input` or `Output`."""
    kinds = {int: ctypes.c_int64, float: ctypes.c_float}
    values = [Array(a.ctypes.data, ENUM[a.dtype]) if isinstance(a, np.ndarray) else a for a in fields.values()]
    types = [(name, kinds.get(type(value), type(value))) for name, value in zip(fields, values, strict=True)]
    return type("Struct", (ctypes.Structure,), {"_fields_": types})(*values)


def pointer(array):
    return ctypes.c_void_p(array.ctypes.data)


def behind_word(dtype, shape, offset=0, values=None):
    """An array that begins so many elements behind a word."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    room = np.full(size + 2 * WORD + offset * dtype.itemsize, 0xFF, np.uint8)
    first = -room.ctypes.data % WORD + offset * dtype.itemsize
    array = room[first : first + size].view(dtype).reshape(shape)
    array[...] = 0 if values is None else values
    return array


def normal(name, dtype, shape, offset):
    return behind_word(dtype, shape, offset, np.asarray(draw(name, shape)).astype(dtype))


def error(actual, exact):
    """The relative L2 error."""
    return np.linalg.norm(np.float64(actual) - exact) / np.linalg.norm(exact)


# How many blocks there are in a room of so many bytes: shares of 2048 have 16 columns of 80, and 24 rows of them.
@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize(
    ("dtype", "rows", "cols", "depth", "has_bias", "room", "blocks"),
    [
        (np.float32, 1, 16, 16, False, 1 << 16, 1),
        (BF16, 33, 48, 80, True, 1 << 16, 1),
        (BF16, 33, 48, 80, True, 3 * 2048, 6),
        (np.float32, 33, 48, 80, False, 3 * 2048, 6),
        (np.float32, 33, 48, 80, False, 3 * 1024, 0),
    ],
)
def test_products_of_arrays_that_begin_between_words(library, dtype, rows, cols, depth, has_bias, room, blocks, offset):
    x, weights = normal("x", E4M3, (rows, depth), offset), normal("weights", E5M2, (cols, depth), offset)
    x_scales, weight_scales = (normal("scales", np.float32, (n,), offset) for n in (rows, cols))
    bias, y = normal("bias", dtype, (cols,), offset), behind_word(dtype, (rows, cols), offset)
    copies, found = behind_word(np.uint8, (room,)), []
    call = struct(
        {"rows": rows, "cols": cols, "depth": depth, "x": x, "weights": weights}
        | {"x_scales": pointer(x_scales), "weight_scales": pointer(weight_scales)}
        | {"bias": bias if has_bias else Array(), "y": y, "fast_accumulation": ctypes.c_bool()}
        | {"workspace": ctypes.c_void_p(), "floats": 0}
    )

    @ctypes.CFUNCTYPE(None, ctypes.POINTER(type(call)))
    def multiply(block):
        p = block.contents
        found.append([p.y.data, p.x.data, p.x_scales, p.weights.data, p.weight_scales, p.bias.data or p.y.data])
        scales = values_at(p.x_scales, "float32", (p.rows, 1)), values_at(p.weight_scales, "float32", p.cols)
        of_x, of_weights = p.x.values(p.rows, p.depth), p.weights.values(p.cols, p.depth)
        of_bias = np.float32(p.bias.values(p.cols)) if has_bias else 0
        p.y.values(p.rows, p.cols)[...] = product_of(of_x, of_weights, *scales) + of_bias

    def product_of(x, weights, x_scales, weight_scales):
        return np.float64(x) @ np.float64(weights).T * np.float64(x_scales) * weight_scales

    assert library.copied_dot(ctypes.byref(call), pointer(copies), ctypes.c_int64(room), multiply) == bool(blocks)
    assert len(found) == blocks
    begin = copies.ctypes.data
    assert all(at % WORD == 0 and begin <= at < begin + room for block in found for at in block)
    exact = product_of(x, weights, x_scales[:, None], weight_scales) + (np.float64(bias) if has_bias else 0)
    assert not blocks or error(y, exact) < (1e-6 if dtype is np.float32 else 4e-3)


# An op out of the package's tree is a file, and nothing of the package's own ops: every regime, whole vectors and not.
@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("cols", [1, 24, 64, 100, 257, 1024, 4096, 12_288, 40_000, 40_001, 300_000])
def test_an_op_out_of_tree(library, cols, dtype):
    allowed = 1e-6 if dtype is np.float32 else 4e-3
    for rows, offset in product([n for n in (1, 37, 300) if n == 1 or n * cols < 500_000], (0, 1)):
        x, dy = (normal(name, dtype, (rows, cols), offset) for name in ("x", "dy"))
        y, dx = (behind_word(dtype, (rows, cols), offset) for _ in range(2))
        rstd, shape = behind_word(np.float32, (rows, 1)), {"rows": rows, "cols": cols}
        forward = struct(shape | {"x": x, "y": y, "rstd": pointer(rstd), "epsilon": 1e-6})
        assert library.l2_norm_fwd(ctypes.byref(forward)) == 0
        of_row = 1 / np.sqrt((np.float64(x) ** 2).sum(-1, keepdims=True) + 1e-6)
        x_hat = x * of_row
        assert error(y, x_hat) < allowed
        assert error(rstd, of_row) < 1e-6
        backward = struct(shape | {"dy": dy, "x": x, "rstd": pointer(rstd), "dx": dx})
        # Of what is longer than a cluster has room for there is no gradient.
        assert (library.l2_norm_bwd(ctypes.byref(backward)) == 0) == (cols < 300_000)
        if 1 < cols < 300_000:
            exact = of_row * (dy - x_hat * (dy * x_hat).sum(-1, keepdims=True))
            assert error(dx, exact) < allowed
