"""The handlers of gated activations, handed inconsistent buffers, say so; they never read or write past one."""

import jax
import jax.numpy as jnp
import pytest
from calls import BF16, call, each_is_refused, struct
from table import GATED_ACTIVATIONS

pytestmark = pytest.mark.kernels

OP = GATED_ACTIVATIONS[0]
FWD, BWD = OP.forward, OP.backward
ROWS, COLS = 6, 40
ROW, BOTH, SHORT = struct(ROWS, COLS), struct(ROWS, 2, COLS), struct(ROWS, COLS - 1)
HALF = struct(ROWS, COLS, dtype=BF16)
FORWARD = {"activation": "silu", "has_up": True}
BACKWARD = {"activation": "gelu_exact", "has_up": True, "with_dx": True, "with_dup": True}
PACKED = {"has_up": False, "with_dup": False}


def forward(operands=(ROW, ROW), results=(ROW,), **changes):
    return call(FWD, list(results), operands, FORWARD | changes)


def backward(operands=(ROW, ROW, ROW), results=(ROW, ROW), **changes):
    return call(BWD, list(results), operands, BACKWARD | changes)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_exact", "relu2", "sigmoid"])
def test_calls_as_they_should_be(activation):
    assert len(forward(activation=activation)) == 1
    assert len(forward((BOTH,), has_up=False, activation=activation)) == 1
    assert len(backward(activation=activation)) == 2
    assert len(backward((ROW, BOTH), (BOTH,), **PACKED, activation=activation)) == 1


def test_calls_of_some_gradients():
    assert len(backward(results=[ROW], with_dx=False)) == 1
    assert len(backward(results=[ROW], with_dup=False)) == 1


def test_calls_of_nothing():
    none, of_both = struct(0, COLS), struct(0, 2, COLS)
    assert len(forward((none, none), [none])) == 1
    assert len(backward((none, of_both), [of_both], **PACKED)) == 1


MALFORMED_FORWARD = {
    "up denied": ({"has_up": False}, "last axis but one of x is not 2 long"),
    "up of another dtype": ({"operands": (ROW, HALF)}, "up is BF16.*F32"),
    "quantised x": ({"operands": (struct(ROWS, COLS, dtype=jnp.int8), ROW)}, "x is S8"),
    "a flat x of both": ({"operands": (struct(2 * COLS),), "results": [struct(COLS)], "has_up": False}, "axes"),
    "three in one": ({"operands": (struct(ROWS, 3, COLS),), "has_up": False}, "not 2 long"),
    "a scalar": ({"operands": (struct(), struct()), "results": [struct()]}, "axes"),
    "rows of nothing": ({"operands": (struct(ROWS, 0),) * 2, "results": [struct(ROWS, 0)]}, "row"),
    "y of another dtype": ({"results": [HALF]}, "y is BF16"),
    "y as x of both": ({"operands": (BOTH,), "results": [BOTH], "has_up": False}, "y is"),
    "unknown activation": ({"activation": "relu"}, "activation is none of silu, sigmoid, relu2, gelu, gelu_exact"),
}
MALFORMED_BACKWARD = {
    "x of another dtype": ({"operands": (ROW, HALF, ROW)}, "x is BF16.*F32"),
    "dy as x of both": ({"operands": (BOTH, BOTH), "results": [BOTH], **PACKED}, "dy is"),
    "dup of both": (
        {"operands": (ROW, BOTH), "results": [BOTH, BOTH], "has_up": False},
        "dup is wanted and x has both",
    ),
    "dx without room": ({"operands": (ROW, BOTH), "results": [ROW], **PACKED}, "dx is"),
    "dup of another dtype": ({"results": [ROW, HALF]}, "dup is BF16"),
    "unknown activation": ({"activation": "none"}, "activation is none of"),
}
if jax.default_backend() == "cpu":  # on a GPU there is nothing to wait for, and the error comes too late
    nothing = {"results": [], "with_dx": False, "with_dup": False}
    MALFORMED_BACKWARD["nothing wanted"] = (nothing, "no gradient is wanted")


test_a_malformed_forward = each_is_refused(FWD, forward, MALFORMED_FORWARD)
test_a_malformed_backward = each_is_refused(BWD, backward, MALFORMED_BACKWARD)
