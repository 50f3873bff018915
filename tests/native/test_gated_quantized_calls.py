"""The handler of the gated norm with a quantised result, as in `test_gated_calls`: handed bad buffers, it says so."""

import jax.numpy as jnp
import numpy as np
import pytest
from calls import BF16, call, each_is_refused, struct
from table import GATED_QUANTIZED

pytestmark = pytest.mark.kernels

FWD = GATED_QUANTIZED[0].forward
ROWS, COUNT, COLS = 6, 4, 128
ROW, GROUPED, WEIGHT, GROUPS = struct(ROWS, COLS), struct(ROWS, COUNT, COLS), struct(COLS), struct(COUNT, COLS)
RSTD, SCALES = struct(ROWS, 1), struct(ROWS, 2)
VALUES, GROUPED_VALUES = struct(ROWS, COLS, dtype=jnp.int8), struct(ROWS, COUNT, COLS, dtype=jnp.int8)
ATTRIBUTES = {
    "epsilon": np.float32(1e-6),
    "scale_offset": np.float32(0),
    "activation": "silu",
    "gate_first": True,
    "grouped": False,
    "group": np.int64(0),
    "max_scale": np.float32(np.inf),
    "power_of_two": False,
    "has_scale": True,
    "has_smooth": True,
    "has_given": False,
}
OF_GROUPS = {"operands": (GROUPED, GROUPED, GROUPS, GROUPS), "grouped": True, "group": np.int64(64)}


def forward(operands=(ROW, ROW, WEIGHT, WEIGHT), results=(VALUES, RSTD), **changes):
    return call(FWD, list(results), operands, ATTRIBUTES | changes)


def test_calls_as_they_should_be():
    given = {"operands": (ROW, ROW, WEIGHT, WEIGHT, struct()), "has_given": True}
    assert len(forward()) == 2
    assert len(forward(results=[VALUES, RSTD, RSTD])) == 3
    assert len(forward(results=[VALUES, SCALES], group=np.int64(64))) == 2
    assert len(forward(results=[VALUES], **given)) == 1
    assert len(forward((ROW, ROW), has_scale=False, has_smooth=False)) == 2
    assert len(forward(results=[GROUPED_VALUES, struct(ROWS, COUNT, 2)], **OF_GROUPS)) == 2


MALFORMED = {
    "gate of another dtype": ({"operands": (ROW, struct(ROWS, COLS, dtype=BF16), WEIGHT, WEIGHT)}, "gate is BF16.*F32"),
    "unknown activation": ({"activation": "gelu"}, "activation"),
    "smooth factors of one group": (
        OF_GROUPS
        | {"operands": (GROUPED, GROUPED, GROUPS, WEIGHT), "results": [GROUPED_VALUES, struct(ROWS, COUNT, 2)]},
        "smooth_scale",
    ),
    "no static scale": ({"results": [VALUES], "has_given": True}, "static_scale"),
    "values of float32": ({"results": [ROW, RSTD]}, "values is F32"),
    "values of one group": (OF_GROUPS | {"results": [VALUES, struct(ROWS, COUNT, 2)]}, "values"),
    "scales of a row for groups": ({"results": [VALUES, RSTD], "group": np.int64(64)}, "scales"),
    "scales of all groups": (OF_GROUPS | {"results": [GROUPED_VALUES, struct(ROWS, 8)]}, "scales"),
    "an unknown group": ({"results": [VALUES, struct(ROWS, 8)], "group": np.int64(16)}, "group is 16"),
    "long rows": (
        {
            "operands": (struct(2, 16_385), struct(2, 16_385), struct(16_385), struct(16_385)),
            "results": [struct(2, 16_385, dtype=jnp.int8), struct(2, 1)],
        },
        "rows are of 16385.*at most 16384",
    ),
}
test_a_malformed_call = each_is_refused(FWD, forward, MALFORMED)
