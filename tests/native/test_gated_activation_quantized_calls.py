"""The handler of gated activations with a quantised result, handed inconsistent buffers, says so."""

import jax.numpy as jnp
import numpy as np
import pytest
from calls import BF16, call, each_is_refused, struct
from table import QUANTIZED_ACTIVATIONS

pytestmark = pytest.mark.kernels

FWD = QUANTIZED_ACTIVATIONS[0].forward
ROWS, COLS = 6, 64
ROW, BOTH, VALUES = struct(ROWS, COLS), struct(ROWS, 2, COLS), struct(ROWS, COLS, dtype=jnp.int8)
SCALES, OF_GROUPS = struct(ROWS, 1), struct(ROWS, COLS // 32)
FORWARD = {
    "activation": "silu",
    "has_up": True,
    "has_given": False,
    "has_smooth": False,
    "group": np.int64(0),
    "max_scale": np.float32(np.inf),
    "power_of_two": False,
}


def forward(operands=(ROW, ROW), results=(VALUES, SCALES), **changes):
    return call(FWD, list(results), operands, FORWARD | changes)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_calls_as_they_should_be(dtype):
    values = struct(ROWS, COLS, dtype=dtype)
    assert len(forward(results=[values, SCALES])) == 2
    assert len(forward((BOTH,), [values, OF_GROUPS], has_up=False, group=np.int64(32))) == 2
    assert len(forward((ROW, ROW, struct()), [values], has_given=True)) == 1


def test_calls_of_nothing():
    none, of_both = struct(0, COLS), struct(0, 2, COLS)
    results = [struct(0, COLS, dtype=jnp.int8), struct(0, 1)]
    assert len(forward((none, none), results)) == 2
    assert len(forward((of_both,), results, has_up=False)) == 2


MALFORMED = {
    "up of another dtype": ({"operands": (ROW, struct(ROWS, COLS, dtype=BF16))}, "up is BF16.*F32"),
    "values of half a float": ({"results": [struct(ROWS, COLS, dtype=BF16), SCALES]}, "values is BF16"),
    "values as x of both": ({"operands": (BOTH,), "results": [BOTH, SCALES], "has_up": False}, "values is"),
    "scales of groups": ({"results": [VALUES, OF_GROUPS]}, "scales is"),
    "scales of a row": ({"group": np.int64(32)}, "scales is"),
    "half scales": ({"results": [VALUES, struct(ROWS, 1, dtype=BF16)]}, "scales is BF16"),
    "an unknown group": ({"group": np.int64(16)}, "group is 16"),
    "a group that does not divide": (
        {"operands": (struct(6, 48),) * 2, "results": [struct(6, 48, dtype=jnp.int8), SCALES], "group": np.int64(32)},
        "does not divide",
    ),
    "groups and a scale": ({"operands": (ROW, ROW, struct()), "has_given": True, "group": np.int64(32)}, "given"),
    "given scales": ({"operands": (ROW, ROW, SCALES), "has_given": True, "results": [VALUES]}, "static_scale"),
    "smooth factors": ({"operands": (ROW, ROW, struct(COLS)), "has_smooth": True}, "no kernel of gates takes"),
    "a small bound": ({"max_scale": np.float32(0)}, "max_scale"),
    "unknown activation": ({"activation": "relu"}, "activation is none of"),
}


test_a_malformed_forward = each_is_refused(FWD, forward, MALFORMED)
