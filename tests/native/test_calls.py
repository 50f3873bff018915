"""Handlers that are handed inconsistent buffers say so; they never read or write past one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import BF16, F16, WORKSPACE, call, each_kind_is_refused, is_refused, statistics, struct
from cases import KINDS, bits, operands
from native import target

import jaxnorm

pytestmark = [pytest.mark.kernels, pytest.mark.parametrize("kind", KINDS)]

ROWS, COLS = 6, 40
X, WEIGHT, STATISTIC = struct(ROWS, COLS), struct(COLS), struct(ROWS, 1)
FORWARD = {
    "axes": np.int64(1),
    "epsilon": np.float32(1e-6),
    "scale_offset": np.float32(0),
    "multiply_before_cast": True,
    "has_residual": False,
    "has_scale": True,
    "has_bias": True,
}
BACKWARD = {
    "axes": np.int64(1),
    "scale_offset": np.float32(0),
    "has_scale": True,
    "has_dsum": False,
    "with_dx": True,
    "with_dscale": True,
    "with_dbias": True,
}


def forward(kind, operands=(X, WEIGHT, WEIGHT), results=None, **changes):
    results = [X, *statistics(kind, STATISTIC)] if results is None else results
    return call(target(kind, "fwd"), results, operands, FORWARD | changes)


def backward(kind, operands=None, results=None, **changes):
    operands = [X, X, *statistics(kind, STATISTIC), WEIGHT] if operands is None else operands
    results = [X, WEIGHT, WEIGHT, *WORKSPACE] if results is None else results
    return call(target(kind, "bwd"), results, operands, BACKWARD | changes)


def forward_of_sum(kind, operands=(X, X, WEIGHT, WEIGHT), results=None, **changes):
    results = [X, X, *statistics(kind, STATISTIC)] if results is None else results
    return forward(kind, operands, results, **{"has_residual": True} | changes)


def backward_with_dsum(kind, dsum=X, **changes):
    return backward(kind, [X, X, *statistics(kind, STATISTIC), WEIGHT, dsum], **{"has_dsum": True} | changes)


# The calls below are these with one thing wrong.
def test_a_forward_call_as_it_should_be(kind):
    y, *_ = forward(kind)
    assert y.shape == (ROWS, COLS)


def test_a_backward_call_as_it_should_be(kind):
    dx, *_ = backward(kind)
    assert dx.shape == (ROWS, COLS)


def test_calls_of_a_sum_as_they_should_be(kind):
    _, total, *_ = forward_of_sum(kind)
    dx, *_ = backward_with_dsum(kind)
    assert (total[0, 0], dx.shape) == (2, (ROWS, COLS))


X_INT, X_F16, X_BF16 = (struct(ROWS, COLS, dtype=dtype) for dtype in (jnp.int32, F16, BF16))
# What is changed, and what the message names.
MALFORMED_FORWARD = {
    "a long scale": ({"operands": (X, struct(COLS + 1), WEIGHT)}, "scale"),
    "a scalar scale": ({"operands": (X, struct(), WEIGHT)}, "scale"),
    "a scale for each row and one bias": ({"operands": (X, X, WEIGHT)}, "bias"),
    "a bias for each row and one scale": ({"operands": (X, WEIGHT, X)}, "bias"),
    "a scale for other rows": ({"operands": (X, struct(ROWS // 2, COLS), WEIGHT)}, "scale"),
    "a scale with more axes than x": ({"operands": (X, struct(1, ROWS, COLS), WEIGHT)}, "scale"),
    "scalar x": ({"operands": (struct(), WEIGHT, WEIGHT)}, "axes"),
    "empty rows": ({"operands": (struct(ROWS, 0), struct(0), struct(0)), "results": [struct(ROWS, 0)]}, "row"),
    "no axes": ({"axes": np.int64(0)}, "axes"),
    "negative axes": ({"axes": np.int64(-1)}, "axes"),
    "more axes than x has": ({"axes": np.int64(3)}, "axes"),
    "axes beyond any": ({"axes": np.int64(2**62)}, "axes"),
    "axes beyond scale's": ({"axes": np.int64(2)}, "scale"),
    "y padded by rows": ({"results": [struct(ROWS + 1, COLS)]}, "y "),
    "statistics in bfloat16": ({"results": [X, *[struct(ROWS, 1, dtype=BF16)] * 2]}, "mean|rstd"),
    "half types mixed": ({"operands": (X_F16, WEIGHT, WEIGHT), "results": [X_BF16]}, "dtype"),
}
if jax.default_backend() == "cpu":
    # XLA's GPU runtime does not report the error of a call without results.
    MALFORMED_FORWARD["no y"] = ({"results": []}, "y ")
# Operands are dy, x, the statistics and scale; results dx, dscale, dbias, and a workspace where there is one.
MALFORMED_BACKWARD = {
    "x transposed": (lambda o, r: ([o[0], struct(COLS, ROWS), *o[2:]], r), "dy is"),
    "half statistics": (lambda o, r: ([*o[:2], *[struct(ROWS, 1, dtype=F16)] * len(o[2:-1]), o[-1]], r), "mean|rstd"),
    "a scale for each row and one dscale": (lambda o, r: ([*o[:-1], X], r), "dscale"),
    "a scale and dscale for each row and one dbias": (lambda o, r: ([*o[:-1], X], [r[0], X, *r[2:]]), "dbias"),
    "half types mixed": (lambda o, r: ([X_F16, X_BF16, *o[2:]], r), "dtype"),
    "dx of another dtype": (lambda o, r: (o, [X_BF16, *r[1:]]), "dx"),
    "dscale of another dtype": (lambda o, r: (o, [r[0], struct(COLS, dtype=BF16), *r[2:]]), "dscale"),
}
MALFORMED_SUM = {
    "a sum of another dtype": ({"results": [X, X_BF16]}, "sum"),
    "half types mixed": ({"operands": (X_F16, X_BF16, WEIGHT, WEIGHT), "results": [X, X_BF16]}, "dtype"),
    "half types mixed in sum and y": ({"operands": (X, X_BF16, WEIGHT, WEIGHT), "results": [X_F16, X_BF16]}, "dtype"),
}
MALFORMED_DSUM = {"dsum of another dtype": ({"dsum": X_BF16}, "dsum"), "dsum without dx": ({"with_dx": False}, "dsum")}
MALFORMED_BACKWARD_ATTRIBUTES = {
    "no axes": ({"axes": np.int64(0)}, "axes"),
    "more axes than x has": ({"axes": np.int64(3)}, "axes"),
}
test_a_malformed_forward_call = each_kind_is_refused("fwd", forward, MALFORMED_FORWARD)
test_a_malformed_forward_call_of_a_sum = each_kind_is_refused("fwd", forward_of_sum, MALFORMED_SUM)
test_a_malformed_backward_call_with_dsum = each_kind_is_refused("bwd", backward_with_dsum, MALFORMED_DSUM)
test_malformed_attributes_of_a_backward_call = each_kind_is_refused("bwd", backward, MALFORMED_BACKWARD_ATTRIBUTES)


@pytest.mark.parametrize("name", MALFORMED_BACKWARD)
def test_malformed_buffers_of_a_backward_call(kind, name):
    change, message = MALFORMED_BACKWARD[name]
    buffers = change([X, X, *statistics(kind, STATISTIC), WEIGHT], [X, WEIGHT, WEIGHT, *WORKSPACE])
    with is_refused(target(kind, "bwd"), message):
        backward(kind, *buffers)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"axes": np.int32(1)}, "expected S64 but got S32"),
        ({"epsilon": np.float64(1e-6)}, "expected F32 but got F64"),
        ({"has_scale": np.int32(1)}, "expected PRED but got S32"),
        ({"more": True}, "attributes"),
    ],
    ids=str,
)
def test_an_attribute_of_another_type(kind, change, message):
    with is_refused(target(kind, "fwd"), message):
        forward(kind, **change)


# A program may have been exported where kernels wanted another workspace.
@pytest.mark.cuda
@pytest.mark.parametrize("floats", [1 << 12, 1 << 20])
def test_a_workspace_of_another_size(kind, floats):
    expected = backward(kind)[:3]
    assert bits(backward(kind, results=[X, WEIGHT, WEIGHT, struct(floats)])[:3]) == bits(expected)


# Of a few rows there would be nothing to keep.
@pytest.mark.cuda
@pytest.mark.parametrize("workspace", [[], [struct(0)], [struct(1)]], ids=str)
def test_a_workspace_that_is_too_small(kind, workspace):
    x, of_rows = struct(1000, COLS), struct(1000, 1)
    operands = [x, x, *statistics(kind, of_rows), WEIGHT]
    with is_refused(target(kind, "bwd"), "the program's workspace holds . floats.*export it again"):
        backward(kind, operands, [x, WEIGHT, WEIGHT, *workspace])


@pytest.mark.cuda
@pytest.mark.parametrize("workspace", [struct(1, 1 << 16), struct(1 << 16, dtype=BF16)], ids=str)
def test_what_is_not_a_workspace(kind, workspace):
    with is_refused(target(kind, "bwd"), "number of results"):
        backward(kind, results=[X, WEIGHT, WEIGHT, workspace])


# A workspace may come with the statistics or without.
@pytest.mark.cuda
def test_a_workspace_of_a_forward_call(kind):
    y, *_ = forward(kind, results=[X])
    for results in ([X, struct(8)], [X, *statistics(kind, STATISTIC), struct(8)]):
        assert bits(forward(kind, results=results)[0]) == bits(y)


HEADS, SEQUENCE = 3, 5
OF_HEADS = struct(2, HEADS, SEQUENCE, COLS)
# Weights whose row for a row of x no kernel finds: between their axes x has another, or rows are too long.
HEADS_WITHOUT_KERNEL = {
    "axes that are not neighbours": (OF_HEADS, struct(2, 1, SEQUENCE, COLS)),
    "long rows": (struct(2, HEADS, 8193), struct(HEADS, 8193)),
    "no head": (struct(2, 0, COLS), struct(0, COLS)),
}


@pytest.mark.parametrize("weight", [struct(HEADS, 1, COLS), struct(1, HEADS, 1, COLS), struct(2, HEADS, 1, COLS)])
def test_a_call_of_heads_as_it_should_be(kind, weight):
    y, *_ = call(target(kind, "fwd"), [OF_HEADS], (OF_HEADS, weight, weight), FORWARD)
    assert y.shape == OF_HEADS.shape


@pytest.mark.parametrize("name", HEADS_WITHOUT_KERNEL)
def test_a_call_of_heads_that_have_no_kernel(kind, name):
    x, weight = HEADS_WITHOUT_KERNEL[name]
    with is_refused(target(kind, "fwd"), "scale is"):
        call(target(kind, "fwd"), [x], (x, weight, weight), FORWARD)


def test_columns_after_the_rows_where_several_axes_are_normalised(kind):
    weight = struct(ROWS, COLS)
    with is_refused(target(kind, "fwd"), "y is"):
        call(target(kind, "fwd"), [struct(ROWS, COLS + 8)], (X, weight, weight), FORWARD | {"axes": np.int64(2)})


# What Python never asks for is harmless too: the same bits as through the package.
def test_the_package_makes_no_other_call(kind):
    x, scale, bias = operands((ROWS, COLS))
    y = jax.ffi.ffi_call(target(kind, "fwd"), X)(x, scale, bias, **FORWARD)
    norm = {"rms": jaxnorm.rms_norm, "layer": jaxnorm.layer_norm}[kind]
    assert bits(y) == bits(norm(x, scale, bias=bias))
