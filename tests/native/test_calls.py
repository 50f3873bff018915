"""Calls of the handlers that the package does not make: what is wrong with one that no law derives, and old programs'.

`laws/test_malformed_calls.py` derives the others. All that is in the operands is 1.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import table
from cases import KINDS, bits, draw_bias, draw_scale, draw_smooth, draw_x, operands
from native import target
from native_calls import (
    BF16,
    COLS,
    DOT,
    E4M3,
    F16,
    F32,
    OF_CUDA,
    ROWS,
    WORKSPACE,
    call,
    is_refused,
    native_calls_of,
    native_calls_of_op,
    struct,
)
from quantizing import quantize

import jaxnorm
from jaxnorm import Quantization

E5M2, W = jnp.float8_e5m2, struct(6, 10)
kernels, cuda, gpu = pytest.mark.needs("kernels"), pytest.mark.needs("cuda"), pytest.mark.needs("gpu")
kinds = pytest.mark.parametrize("norm", table.NORMS, ids=str)


@cache
def of(op, way="forward"):
    """The call of a row of the table: its last, which has statistics."""
    return [native for native in native_calls_of_op(op) if native.target == getattr(op, way)][-1]


def of_heads(norm, x, weight):
    """A call for weights whose row for a row of x no kernel finds."""
    return of(norm).but({0: struct(*x), 1: struct(*weight), 2: struct(*weight)})


MALFORMED = {
    "smooth factors of a gate": (
        lambda: of(table.QUANTIZED_ACTIVATIONS[0]).but({1: struct(10)}, has_smooth=True),
        "no kernel of gates takes",
    ),
    "no groups": (lambda: of(table.GROUPED[0]).but(extents={2: 0}), "there are no groups"),
    "no groups backward": (lambda: of(table.GROUPED[0], "backward").but(extents={2: 0}), "there are no groups"),
    "long rows": (lambda: of(table.GATED[0]).but(extents={10: 16_385}), "rows are of 16385.*at most 16384"),
    "long quantised rows": (lambda: of(table.GATED_QUANTIZED[0]).but(extents={10: 16_385}), "of 16385.*at most 16384"),
    "long heads": (lambda: of(table.ROTARY[0]).but(extents={10: 520}), "at most 512"),
    "long packed heads": (lambda: of(table.QKV_ROTARY[0]).but(extents={10: 520}), "at most 512"),
    "groups that do not divide": (
        lambda: of(table.QUANTIZED[0]).but(extents={10: 96}, group=np.int64(64)),
        "group does not divide it",
    ),
    "starts without lengths": (lambda: masked("softmax_bwd", X, X, WHERE, STARTS, has_lengths=False), "but no lengths"),
    "a window without lengths": (
        lambda: masked("softmax_bwd", X, X, WHERE, has_lengths=False, has_starts=None, window=np.int64(3)),
        "but no lengths",
    ),
    "a window beside starts": (
        lambda: masked("softmax_bwd", X, X, STARTS, WHERE, STARTS, window=np.int64(3)),
        "starts beside a window",
    ),
    **{
        f"{norm} of {what}": (partial(of_heads, norm, *shapes), "scale is")
        for norm in table.PER_HEAD
        for what, shapes in {
            "heads that are not neighbours": ((2, 3, 5, 8), (2, 1, 5, 8)),
            "heads with long rows": ((2, 3, 8193), (3, 8193)),
            "no head": ((2, 0, 8), (0, 8)),
        }.items()
    },
    **{
        f"{norm} of two axes, padded": (
            partial(lambda norm: of(norm).but({1: W, 2: W}, {0: struct(6, 18)}, axes=np.int64(2)), norm),
            "y is",
        )
        for norm in table.NORMS
    },
}


@kernels
@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_call(name):
    make, message = MALFORMED[name]
    with is_refused("jaxnorm_", message):
        make().run()


def of_product(rows=ROWS, cols=32, depth=COLS, x_dtype=E4M3, dtype=E4M3, to=BF16, bias=True):
    y, x = {0: struct(rows, cols, dtype=to)}, {0: struct(rows, depth, dtype=x_dtype), 1: struct(rows, 1)}
    weights = {2: struct(cols, depth, dtype=dtype), 3: struct(cols, 1)}
    return DOT.but(x | weights | {4: struct(cols, dtype=to) if bias else None}, y, has_bias=bias)


OF_SHARDS = {f"{kind} norm": OF_CUDA[f"{kind}_norm_apply"] for kind in KINDS}
MALFORMED_OF_CUDA = {
    "no rows": (OF_CUDA["round_gradient"].but(extents={ROWS: 0}), "dy is empty"),
    **{
        f"half types mixed by {kind}": (
            native.but({0: struct(ROWS, COLS, dtype=F16)}, {0: struct(ROWS, COLS, dtype=BF16)}),
            "different dtypes",
        )
        for kind, native in OF_SHARDS.items()
    },
    **{
        f"no weights of {kind}": (
            native.but(dict.fromkeys((len(native.operands) - 2, len(native.operands) - 1), None)),
            "scale is missing",
        )
        for kind, native in OF_SHARDS.items()
    },
}


@cuda
@pytest.mark.parametrize("name", MALFORMED_OF_CUDA)
def test_a_malformed_call_of_cuda(name):
    native, message = MALFORMED_OF_CUDA[name]
    with is_refused(native.target, message):
        native.run()


@cuda
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(({"depth": COLS + 8}, "depth is 72, expected a multiple of 16"), ({"depth": 0}, "depth")),
        ({"cols": 40}, "columns of y is 40, expected a multiple of 16"),
        *(({"x_dtype": E5M2, "dtype": E5M2}, "both F8E5M2"), ({"to": F32}, "bias and y is F32")),
    ],
)
def test_a_malformed_product(changes, message):
    with is_refused(DOT.target, message):
        of_product(**changes).run()


# A program that another version of jaxnorm exported may have another workspace, or none.
@gpu
@pytest.mark.parametrize("floats", [None, 0, 1, 100, 1 << 20])
def test_a_product_with_a_workspace_of_any_size(floats):
    y, *_ = of_product(bias=False).but(results={1: None if floats is None else struct(floats)}).run()
    np.testing.assert_array_equal(y.astype(F32), np.full((ROWS, 32), COLS))


@gpu
def test_products_of_several_axes_and_of_nothing():
    x, y = {0: struct(2, 3, COLS, dtype=E4M3), 1: struct(2, 3, 1)}, {0: struct(2, 3, 32, dtype=BF16)}
    np.testing.assert_array_equal(DOT.but(x, y).run()[0].astype(F32), np.full((2, 3, 32), COLS + 1))
    assert (of_product(rows=0).run()[0].shape, of_product(cols=0).run()[0].shape) == ((0, 32), (ROWS, 0))


# What 1 is rounded to, and its scale, whatever the workspace, of which these rows need none.
@cuda
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("floats", [0, 1, 1 << 20])
def test_what_is_rounded(dtype, floats):
    x, workspace = {0: struct(ROWS, COLS, dtype=dtype)}, struct(floats)
    rows, columns, gradient, turned = (
        OF_CUDA[name] for name in ("round_rows", "round_columns", "round_gradient", "transpose_bytes")
    )
    found = [*rows.but(x).run(), *columns.but(x, {3: workspace}).run()[:3]]
    found += gradient.but(x, {4: workspace} if floats > 1 else {}).run()[:4]
    for array in found:
        expected = np.float32(1) / 448 if array.dtype == F32 else 448
        np.testing.assert_array_equal(array.astype(F32), np.full(array.shape, expected, np.float32))
    np.testing.assert_array_equal(turned.run()[0].astype(F32), np.ones((COLS, ROWS)))


@cuda
def test_a_workspace_of_rounding_that_is_too_small():
    rows, short = 1 << 17, struct(COLS - 1)  # more than a cluster holds
    long = OF_CUDA["round_columns"].but(results={3: short}, extents={ROWS: rows})
    for native in (long, OF_CUDA["round_gradient"].but(results={4: short})):
        with is_refused(native.target, "the program's workspace holds 63 floats"):
            native.run()


X, WHERE, STARTS = struct(2, 3, 8), struct(2, 1, 8, dtype=bool), struct(1, 3, 1, dtype=jnp.int32)


def masked(way, *operands, **changes):
    """A call for such a mask, without an attribute that is None."""
    top = {"with_top": True} if "log" in way else {}
    attributes = {"scale": np.float32(1), "has_where": True, "has_lengths": True, "has_starts": True, **top}
    if "bwd" in way:
        attributes["with_dx"] = True
    statistics = [struct(2, 3, 1)] * 2 if way == "log_softmax_fwd" else []
    given = {name: value for name, value in (attributes | changes).items() if value is not None}
    return call(f"jaxnorm_{way}", [X, *statistics, *WORKSPACE * way.endswith("fwd")], operands, given)[0]


# Programs of before have no attribute that says whether there are starts.
@kernels
@pytest.mark.parametrize(
    ("way", "arrays", "nothing", "first"),
    [
        ("softmax_fwd", (X, WHERE, STARTS), 0, 1),
        ("softmax_bwd", (X, X, STARTS, WHERE), 0, 0),  # here `where` came later than lengths
        ("log_softmax_fwd", (X, WHERE, STARTS), -np.inf, 0),
        # Of the only column that counts, as its statistics have it.
        ("log_softmax_bwd", (X, X, *[struct(2, 3, 1)] * 2, WHERE, STARTS), 0, 1 - np.exp(-1)),
    ],
)
def test_a_mask_without_starts(way, arrays, nothing, first):
    np.testing.assert_allclose(masked(way, *arrays, has_starts=None)[..., 0], np.full((2, 3), first), 1e-6)
    # With starts, which are 1 as lengths are, no column counts.
    np.testing.assert_array_equal(masked(way, *arrays, STARTS), np.full(X.shape, nothing, np.float32))


@kernels
def test_without_examples_the_gradients_of_weights_are_zeros():
    native = of(table.GROUP_NORMS[1], "backward").but(extents={6: 0})
    dx, dscale, dbias, *_ = native.run()
    assert dx.size == 0
    assert not dscale.any()
    assert not dbias.any()


# Of which nothing of x is read where it is of the last scale.
@kernels
@pytest.mark.parametrize("op", [table.SANDWICH[0], table.ROTARY[0], table.QKV_ROTARY[0]], ids=str)
def test_a_gradient_of_one_scale_alone(op):
    native = of(op, "backward")
    wanted = [name for name in native.attributes if name.startswith("with_d")]
    last, others = {"with_dscale", "with_dk_scale"}, dict.fromkeys(range(len(wanted) - 1), None)
    alone = native.but(results=others, **{name: name in last for name in wanted})
    assert len(alone.run()) == 1 + len(WORKSPACE)


def with_zero(attributes):
    return dict(attributes) | {"scale_offset": np.float32(0)}


# What Python never asks for is harmless too: the same bits as through the package.
@kernels
@pytest.mark.parametrize("kind", KINDS)
def test_the_package_makes_no_other_call(kind):
    x, scale, bias = operands((6, 40))
    norm = {"rms": jaxnorm.rms_norm, "layer": jaxnorm.layer_norm}[kind]
    (native,) = native_calls_of(partial(norm, bias=bias), x, scale)
    y = jax.ffi.ffi_call(target(kind, "fwd"), native.results[0])(x, scale, bias, **with_zero(native.attributes))
    assert bits(y) == bits(norm(x, scale, bias=bias))


@kernels
@pytest.mark.parametrize("kind", KINDS)
def test_the_package_makes_no_other_quantised_call(kind):
    args = draw_x((6, 128)), draw_scale((128,)), draw_bias((128,)), draw_smooth((128,))
    function = quantize(kind, Quantization("int8"))
    (native,) = native_calls_of(function, *args)
    found = jax.ffi.ffi_call(native.target, native.results)(*args, **with_zero(native.attributes))
    expected = function(*args)
    assert bits(found) == bits((expected.values, expected.scales))


# Of a few rows there would be nothing to keep.
@cuda
@kinds
@pytest.mark.parametrize("workspace", [None, struct(0), struct(1)], ids=str)
def test_a_workspace_that_is_too_small(norm, workspace):
    native = of(norm, "backward").but(results={3: workspace}, extents={6: 1000})
    with is_refused(native.target, "the program's workspace holds . floats.*export it again"):
        native.run()


@cuda
@kinds
def test_a_workspace_of_a_forward_call(norm):
    y, *statistics = of(norm).results
    expected = of(norm)._replace(results=(y,)).run()[0]
    for more in ((struct(8),), (*statistics, struct(8))):
        assert bits(of(norm)._replace(results=(y, *more)).run()[0]) == bits(expected)
