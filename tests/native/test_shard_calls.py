"""Handlers for rows that are split over devices that are handed inconsistent buffers say so."""

import jax.numpy as jnp
import numpy as np
import pytest
from calls import BF16, F16, call, each_kind_is_refused, statistics, struct
from cases import KINDS
from native import target

pytestmark = [pytest.mark.cuda, pytest.mark.parametrize("kind", KINDS)]

ROWS, COLS = 6, 40
X, WEIGHT, STATISTIC = struct(ROWS, COLS), struct(COLS), struct(ROWS, 1)
AXES = {"axes": np.int64(1)}
APPLY = AXES | {"scale_offset": np.float32(0), "multiply_before_cast": True, "has_scale": True, "has_bias": True}
X_INT = struct(ROWS, COLS, dtype=jnp.int32)


def take_statistics(kind, operands=(X,), results=None, **changes):
    results = statistics(kind, STATISTIC) if results is None else results
    return call(target(kind, "statistics"), results, operands, AXES | changes)


def apply(kind, x=X, like=STATISTIC, weights=(WEIGHT, WEIGHT), results=(X,), **changes):
    return call(target(kind, "apply"), list(results), [x, *statistics(kind, like), *weights], APPLY | changes)


# The calls below are these with one thing wrong. All that is in them is 1.
def test_statistics_as_they_should_be(kind):
    *mean, variance = take_statistics(kind)
    np.testing.assert_array_equal(variance, np.full((ROWS, 1), 1 if kind == "rms" else 0))
    assert all(np.all(value == 1) for value in mean)


def test_y_as_it_should_be(kind):
    (y,) = apply(kind)
    np.testing.assert_array_equal(y, np.full((ROWS, COLS), 2 if kind == "rms" else 1))


# What is changed, and what the message names.
MALFORMED_STATISTICS = {
    "no operands": ({"operands": ()}, "operand"),
    "one operand more": ({"operands": (X, X)}, "operands"),
    "integer x": ({"operands": (X_INT,)}, "x is"),
    "empty rows": ({"operands": (struct(ROWS, 0),)}, "row"),
    "no axes": ({"axes": np.int64(0)}, "axes"),
    "more axes than x has": ({"axes": np.int64(3)}, "axes"),
    "one result more": ({"results": [STATISTIC] * 3}, "results"),
    "flat statistics": ({"results": [struct(ROWS)] * 2}, "mean|mean_square"),
    "half statistics": ({"results": [struct(ROWS, 1, dtype=BF16)] * 2}, "mean|mean_square"),
    "statistics without a row": ({"results": [struct(ROWS - 1, 1)] * 2}, "mean|mean_square"),
}
MALFORMED_APPLY = {
    "no weights": ({"weights": ()}, "scale"),
    "one operand more": ({"weights": [WEIGHT] * 3}, "operands"),
    "integer x": ({"x": X_INT}, "x is"),
    "a short scale": ({"weights": (struct(COLS - 1), WEIGHT)}, "scale"),
    "a scale for each row": ({"weights": (X, WEIGHT)}, "scale"),
    "a short bias": ({"weights": (WEIGHT, struct(COLS // 2))}, "bias"),
    "integer bias": ({"weights": (WEIGHT, struct(COLS, dtype=jnp.int16))}, "bias"),
    "scale denied": ({"has_scale": False}, "operands|bias"),
    "bias denied": ({"has_bias": False}, "operands"),
    "flat statistics": ({"like": struct(ROWS)}, "mean|rstd"),
    "half statistics": ({"like": struct(ROWS, 1, dtype=F16)}, "mean|rstd"),
    "statistics without a row": ({"like": struct(ROWS - 1, 1)}, "mean|rstd"),
    "no axes": ({"axes": np.int64(0)}, "axes"),
    "axes beyond the statistics'": ({"axes": np.int64(2)}, "mean|rstd"),
    "y without a row": ({"results": [struct(ROWS - 1, COLS)]}, "y "),
    "padded y": ({"results": [struct(ROWS, COLS + 8)]}, "y "),
    "integer y": ({"results": [X_INT]}, "y "),
    "one result more": ({"results": [X, X]}, "results"),
    "half types mixed": ({"x": struct(ROWS, COLS, dtype=F16), "results": [struct(ROWS, COLS, dtype=BF16)]}, "dtype"),
}
test_malformed_statistics = each_kind_is_refused("statistics", take_statistics, MALFORMED_STATISTICS)
test_a_malformed_application = each_kind_is_refused("apply", apply, MALFORMED_APPLY)
