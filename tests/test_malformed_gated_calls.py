"""The handlers of the gated norm, handed inconsistent buffers, say so; they never read or write past one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gating import BWD, FWD
from test_malformed_calls import BF16, COLS, ROWS, STATISTIC, WEIGHT, WORKSPACE, X, call, struct

pytestmark = pytest.mark.kernels

GATED = {
    "scale_offset": np.float32(0),
    "activation": "silu",
    "gate_first": True,
    "has_scale": True,
    "grouped": False,
}
FORWARD = GATED | {"epsilon": np.float32(1e-6)}
BACKWARD = GATED | {"with_dx": True, "with_dgate": True, "with_dscale": True}
X_BF16, X_INT = (struct(ROWS, COLS, dtype=dtype) for dtype in (BF16, jnp.int32))
LONG = struct(2, 16385)


def forward(operands=(X, X, WEIGHT), results=(X, STATISTIC), **changes):
    return call(FWD, list(results), operands, FORWARD | changes)


def backward(operands=(X, X, X, STATISTIC, WEIGHT), results=(X, X, WEIGHT, *WORKSPACE), **changes):
    return call(BWD, list(results), operands, BACKWARD | changes)


# The calls below are these with one thing wrong.
def test_calls_as_they_should_be():
    assert [result.shape for result in forward()] == [(ROWS, COLS), (ROWS, 1)]
    assert [result.shape for result in backward()[:3]] == [(ROWS, COLS), (ROWS, COLS), (COLS,)]


# What is changed, and what the message names.
MALFORMED_FORWARD = {
    "no operands": ({"operands": ()}, "x is missing"),
    "x alone": ({"operands": (X,)}, "gate is missing"),
    "no scale": ({"operands": (X, X)}, "scale is missing"),
    "an operand more": ({"operands": (X, X, WEIGHT, WEIGHT)}, "operands"),
    "a gate of another dtype": ({"operands": (X, X_BF16, WEIGHT)}, "gate is"),
    "a gate of one row": ({"operands": (X, WEIGHT, WEIGHT)}, "gate is"),
    "integer x": ({"operands": (X_INT, X_INT, WEIGHT)}, "x is"),
    "scalar x": ({"operands": (struct(), struct(), WEIGHT)}, "axes"),
    "long rows": ({"operands": (LONG, LONG, struct(16385)), "results": (LONG,)}, "rows are of 16385.*at most 16384"),
    "a scale for each row": ({"operands": (X, X, X)}, "scale is"),
    "one scale for groups": ({"grouped": True}, "scale is"),
    "groups and no axis for them": (
        {"operands": (WEIGHT, WEIGHT, WEIGHT), "results": (WEIGHT,), "grouped": True},
        "no axis",
    ),
    "y of another dtype": ({"results": (X_BF16,)}, "y is"),
    "flat statistics": ({"results": (X, struct(ROWS))}, "rstd is"),
    "a result more": ({"results": (X, STATISTIC, STATISTIC)}, "results"),
    "another activation": ({"activation": "gelu"}, "activation"),
    "an attribute more": ({"axes": np.int64(1)}, "attributes"),
}
MALFORMED_BACKWARD = {
    "dy of another dtype": ({"operands": (X_BF16, X, X, STATISTIC, WEIGHT)}, "x is"),
    "no statistics": ({"operands": (X, X, X, WEIGHT)}, "rstd is"),
    "scale denied": ({"has_scale": False}, "operands|dscale"),
    "dx denied": ({"with_dx": False}, "results|dscale is"),
    "dscale denied": ({"with_dscale": False}, "results"),
    "no dgate": ({"results": (X, WEIGHT, *WORKSPACE)}, "dgate is"),
    "dscale of another dtype": ({"results": (X, X, struct(COLS, dtype=BF16))}, "dscale is"),
    "a result more": ({"results": (X, X, WEIGHT, *WORKSPACE, X)}, "results"),
}


@pytest.mark.parametrize("name", MALFORMED_FORWARD)
def test_a_malformed_forward_call(name):
    changes, message = MALFORMED_FORWARD[name]
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"{FWD}.*({message})"):
        forward(**changes)


@pytest.mark.parametrize("name", MALFORMED_BACKWARD)
def test_a_malformed_backward_call(name):
    changes, message = MALFORMED_BACKWARD[name]
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"{BWD}.*({message})"):
        backward(**changes)
