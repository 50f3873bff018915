"""The handlers of what rounds and transposes around products of float8, handed inconsistent buffers, say so."""

import jax.numpy as jnp
import numpy as np
import pytest
from calls import BF16, F16, call, each_is_refused, is_refused, struct

pytestmark = pytest.mark.cuda

ROWS, COLS = 48, 64
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
X, VALUES, TRANSPOSED = struct(ROWS, COLS, dtype=BF16), struct(ROWS, COLS, dtype=E4M3), struct(COLS, ROWS, dtype=E4M3)
OF_ROWS, OF_COLUMNS, WORKSPACE = struct(ROWS, 1), struct(1, COLS), struct(COLS)


def round_rows(x=X, more=(), results=(VALUES, OF_ROWS), **changes):
    attributes = {"has_factors": False, "power_of_two": False}
    return call("jaxnorm_round_rows", list(results), [x, *more], attributes | changes)


def round_columns(x=X, results=(VALUES, TRANSPOSED, OF_COLUMNS, WORKSPACE), **changes):
    attributes = {"power_of_two": False, "with_values": True}
    return call("jaxnorm_round_columns", list(results), [x], attributes | changes)


def round_gradient(dy=X, more=(), results=(VALUES, OF_ROWS, TRANSPOSED, OF_COLUMNS, WORKSPACE), **changes):
    flags = {"has_factors_of_columns": False, "has_factors_of_rows": False, "power_of_two": False, "with_values": True}
    return call("jaxnorm_round_gradient", list(results), [dy, *more], flags | changes)


def transpose_bytes(x=VALUES, results=(TRANSPOSED,)):
    return call("jaxnorm_transpose_bytes", list(results), [x], {})


def assert_ones(values, scales):
    """What 1 is rounded to."""
    np.testing.assert_array_equal(values.astype(jnp.float32), np.full(values.shape, 448))
    np.testing.assert_array_equal(scales, np.full(scales.shape, np.float32(1) / 448))


# The calls below are these with one thing wrong. All that is in them is 1.
@pytest.mark.parametrize("dtype", [BF16, F16, jnp.float32])
def test_calls_as_they_should_be(dtype):
    x = struct(ROWS, COLS, dtype=dtype)
    assert_ones(*round_rows(x))
    values, transposed, scales, _ = round_columns(x)
    assert_ones(values, scales)
    assert_ones(transposed, scales)
    values, row_scales, transposed, scales, _ = round_gradient(x)
    assert_ones(values, row_scales)
    assert_ones(transposed, scales)
    (y,) = transpose_bytes()
    np.testing.assert_array_equal(y.astype(jnp.float32), np.ones((COLS, ROWS)))


# A program that another version of jaxnorm exported may have another workspace. Here none is needed.
@pytest.mark.parametrize("floats", [0, 1, 1 << 20])
def test_a_workspace_of_any_size(floats):
    assert_ones(*round_columns(results=[VALUES, TRANSPOSED, OF_COLUMNS, struct(floats)])[1:3])


def test_a_workspace_that_is_too_small():
    rows = 1 << 17  # are more than a cluster holds
    results = [struct(*shape, dtype=E4M3) for shape in ((rows, COLS), (COLS, rows))]
    with is_refused("jaxnorm_round_columns", "the program's workspace holds 63 floats"):
        round_columns(struct(rows, COLS, dtype=BF16), results=[*results, OF_COLUMNS, struct(COLS - 1)])
    with is_refused("jaxnorm_round_gradient", "the program's workspace holds 63 floats"):
        round_gradient(results=[VALUES, OF_ROWS, TRANSPOSED, OF_COLUMNS, struct(COLS - 1)])


test_malformed_rows = each_is_refused(
    "jaxnorm_round_rows",
    round_rows,
    {
        "x of int8": ({"x": struct(ROWS, COLS, dtype=jnp.int8)}, "x is"),
        "no factors": ({"has_factors": True}, "factors"),
        "factors denied": ({"more": [struct(COLS)]}, "operands"),
        "factors of rows": ({"has_factors": True, "more": [struct(ROWS)]}, "factors"),
        "factors of 16 bits": ({"has_factors": True, "more": [struct(COLS, dtype=BF16)]}, "factors"),
        "values of e5m2": ({"results": [struct(ROWS, COLS, dtype=E5M2), OF_ROWS]}, "values"),
        "scales of columns": ({"results": [VALUES, OF_COLUMNS]}, "scales"),
        "no scales": ({"results": [VALUES]}, "results|scales"),
    },
)

test_malformed_columns = each_is_refused(
    "jaxnorm_round_columns",
    round_columns,
    {
        "no matrix": ({"x": struct(2, ROWS // 2, COLS, dtype=BF16)}, "x is no matrix"),
        "nothing in it": ({"x": struct(0, COLS, dtype=BF16)}, "x is empty"),
        "values denied": ({"with_values": False}, "results|transposed"),
        "values that are not transposed": ({"results": [VALUES, VALUES, OF_COLUMNS, WORKSPACE]}, "transposed"),
        "scales of rows": ({"results": [VALUES, TRANSPOSED, OF_ROWS, WORKSPACE]}, "scales"),
    },
)

test_malformed_gradients = each_is_refused(
    "jaxnorm_round_gradient",
    round_gradient,
    {
        "nothing in it": ({"dy": struct(0, COLS, dtype=BF16)}, "dy is empty"),
        "no factors of rows": ({"has_factors_of_rows": True}, "factors_of_rows"),
        "factors of rows for columns": ({"has_factors_of_columns": True, "more": [struct(ROWS)]}, "factors_of_columns"),
        "factors of columns for rows": ({"has_factors_of_rows": True, "more": [struct(COLS)]}, "factors_of_rows"),
        "rows denied": ({"with_values": False}, "results|transposed"),
        "scales of columns for rows": ({"results": [VALUES, OF_COLUMNS, TRANSPOSED, OF_COLUMNS, WORKSPACE]}, "scales"),
        "values that are not transposed": ({"results": [VALUES, OF_ROWS, VALUES, OF_COLUMNS, WORKSPACE]}, "transposed"),
    },
)

test_malformed_bytes = each_is_refused(
    "jaxnorm_transpose_bytes",
    transpose_bytes,
    {
        "x of 16 bits": ({"x": X}, "x is"),
        "no matrix": ({"x": struct(ROWS * COLS, dtype=E4M3)}, "x is no matrix"),
        "not transposed": ({"results": [VALUES]}, "y is"),
    },
)
