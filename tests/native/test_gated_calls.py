"""The handlers of the gated norm, handed inconsistent buffers, say so; they never read or write past one."""

import jax.numpy as jnp
import numpy as np
import pytest
from calls import BF16, WORKSPACE, call, each_is_refused, struct
from table import GATED

pytestmark = pytest.mark.kernels

OP = GATED[0]
FWD, BWD = OP.forward, OP.backward
ROWS, COUNT, COLS = 6, 4, 40
EMPTY = struct(ROWS, 0, COLS)
ROW, GROUPED, WEIGHT, GROUPS = struct(ROWS, COLS), struct(ROWS, COUNT, COLS), struct(COLS), struct(COUNT, COLS)
RSTD = struct(ROWS, 1)
FORWARD = {
    "epsilon": np.float32(1e-6),
    "scale_offset": np.float32(0),
    "activation": "silu",
    "gate_first": True,
    "has_scale": True,
    "grouped": False,
}
BACKWARD = {
    "scale_offset": np.float32(0),
    "activation": "sigmoid",
    "gate_first": False,
    "has_scale": True,
    "grouped": False,
    "with_dx": True,
    "with_dgate": True,
    "with_dscale": True,
}


def forward(operands=(ROW, ROW, WEIGHT), results=(ROW, RSTD), **changes):
    return call(FWD, list(results), operands, FORWARD | changes)


def backward(operands=(ROW, ROW, ROW, RSTD, WEIGHT), results=(ROW, ROW, WEIGHT), extra=None, **changes):
    return call(BWD, [*results, *(WORKSPACE if extra is None else extra)], operands, BACKWARD | changes)


def test_calls_as_they_should_be():
    of_groups = (GROUPED, GROUPED, GROUPED, struct(ROWS, COUNT, 1), GROUPS)
    assert len(forward()) == 2
    assert len(forward(results=[ROW])) == 1
    assert len(forward((ROW, ROW), has_scale=False)) == 2
    assert len(forward((GROUPED, GROUPED, GROUPS), [GROUPED], grouped=True)) == 1
    assert len(backward()) == 3 + len(WORKSPACE)
    assert len(backward(of_groups, (GROUPED, GROUPED, GROUPS), WORKSPACE, grouped=True)) == 3 + len(WORKSPACE)
    assert len(backward(results=[ROW], extra=[], with_dx=False, with_dscale=False)) == 1


MALFORMED_FORWARD = {
    "gate of another dtype": ({"operands": (ROW, struct(ROWS, COLS, dtype=BF16), WEIGHT)}, "gate is BF16.*F32"),
    "quantised x": ({"operands": (struct(ROWS, COLS, dtype=jnp.int8), ROW, WEIGHT)}, "x is S8"),
    "scale of groups": ({"operands": (GROUPED, GROUPED, GROUPS), "results": [GROUPED]}, "scale"),
    "scale of a row": ({"operands": (GROUPED, GROUPED, WEIGHT), "results": [GROUPED], "grouped": True}, "scale"),
    "groups without an axis": (
        {"operands": (WEIGHT, WEIGHT, WEIGHT), "results": [WEIGHT], "grouped": True},
        "no axis for them",
    ),
    "no groups": (
        {
            "operands": (struct(ROWS, 0, COLS), struct(ROWS, 0, COLS), struct(0, COLS)),
            "results": [struct(ROWS, 0, COLS)],
            "grouped": True,
        },
        "no groups",
    ),
    "unknown activation": ({"activation": "gelu"}, "activation"),
    "y of another dtype": ({"results": [struct(ROWS, COLS, dtype=BF16)]}, "y is BF16"),
    "long rows": (
        {"operands": (struct(2, 16_385), struct(2, 16_385), struct(16_385)), "results": [struct(2, 16_385)]},
        "rows are of 16385.*at most 16384",
    ),
    "empty rows": ({"operands": (struct(ROWS, 0), struct(ROWS, 0), struct(0)), "results": [struct(ROWS, 0)]}, "row"),
    "scalar x": ({"operands": (struct(), struct(), struct()), "results": [struct()]}, "axes"),
}
MALFORMED_BACKWARD = {
    "half rstd": ({"operands": (ROW, ROW, ROW, struct(ROWS, 1, dtype=BF16), WEIGHT)}, "rstd"),
    "x of another dtype": ({"operands": (ROW, struct(ROWS, COLS, dtype=BF16), ROW, RSTD, WEIGHT)}, "x is BF16"),
    "quantised dy": ({"operands": (struct(ROWS, COLS, dtype=jnp.float8_e5m2), ROW, ROW, RSTD, WEIGHT)}, "dy is F8E5M2"),
    "no groups": (
        {
            "operands": (EMPTY, EMPTY, EMPTY, struct(ROWS, 0, 1), struct(0, COLS)),
            "results": [EMPTY, EMPTY, struct(0, COLS)],
            "grouped": True,
        },
        "no groups",
    ),
    "dscale without a scale": ({"operands": (ROW, ROW, ROW, RSTD), "has_scale": False}, "there is no scale"),
    "dgate of another dtype": ({"results": [ROW, struct(ROWS, COLS, dtype=BF16), WEIGHT]}, "dgate is BF16"),
    "dscale of another dtype": ({"results": [ROW, ROW, struct(COLS, dtype=BF16)]}, "dscale"),
    "dscale of groups": ({"results": [ROW, ROW, GROUPS]}, "dscale"),
    "unknown activation": ({"activation": ""}, "activation"),
}


test_a_malformed_forward = each_is_refused(FWD, forward, MALFORMED_FORWARD)
test_a_malformed_backward = each_is_refused(BWD, backward, MALFORMED_BACKWARD)
