"""The handlers of softmax and log-softmax, handed inconsistent masks, say so; they never read or write past one."""

import jax.numpy as jnp
import numpy as np
import pytest
from calls import WORKSPACE, call, is_refused, struct

pytestmark = [pytest.mark.kernels, pytest.mark.parametrize("log", [False, True])]

X, WHERE, STATISTIC = struct(2, 3, 8), struct(2, 1, 8, dtype=bool), struct(2, 3, 1)
LENGTHS = STARTS = struct(1, 3, 1, dtype=jnp.int32)
MASK = {"has_where": True, "has_lengths": True, "has_starts": True}


def attributes_of(log, **more):
    """Those of a masked call; None takes one away."""
    attributes = {"scale": np.float32(1), **({"with_top": True} if log else {}), **MASK, **more}
    return {name: value for name, value in attributes.items() if value is not None}


def forward(log, mask, **changes):
    attributes = attributes_of(log, **changes)
    name, results = ("log_softmax", [X, STATISTIC, STATISTIC]) if log else ("softmax", [X])
    return call(f"jaxnorm_{name}_fwd", [*results, *WORKSPACE], [X, *mask], attributes)[0]


def backward(log, mask, **changes):
    attributes = attributes_of(log, with_dx=True, **changes)
    if not log and attributes["has_lengths"]:
        mask = [mask[1], mask[0], *mask[2:]]  # here `where` came later than lengths
    name, saved = ("log_softmax", [STATISTIC, STATISTIC]) if log else ("softmax", [])
    return call(f"jaxnorm_{name}_bwd", [X], [X, X, *saved, *mask], attributes)[0]


ways = pytest.mark.parametrize("way", [forward, backward])


# Lengths and starts are all 1 here, so that no column counts.
@ways
def test_a_call_as_it_should_be(log, way):
    nothing = -np.inf if log and way is forward else 0
    np.testing.assert_array_equal(way(log, (WHERE, LENGTHS, STARTS)), np.full(X.shape, nothing, np.float32))


# Programs of before have no attribute that says so.
@ways
def test_a_call_without_starts(log, way):
    share = np.exp(-1) if log else 1  # of the only column that counts, as its statistics have it
    expected = {forward: 0 if log else 1, backward: 1 - share}[way]
    np.testing.assert_allclose(way(log, (WHERE, LENGTHS), has_starts=None)[..., 0], np.full((2, 3), expected), 1e-6)


MALFORMED = {
    "starts denied": ((WHERE, LENGTHS, STARTS), {"has_starts": False}, "number of operands"),
    "starts without lengths": ((WHERE, STARTS), {"has_lengths": False}, "there are starts, but no lengths"),
    "starts of other rows": ((WHERE, LENGTHS, struct(1, 2, 1, dtype=jnp.int32)), {}, "starts is S32"),
    "starts of columns": ((WHERE, LENGTHS, struct(1, 3, 8, dtype=jnp.int32)), {}, "starts is S32"),
    "starts of floats": ((WHERE, LENGTHS, struct(1, 3, 1)), {}, "starts is F32"),
    "lengths of other rows": ((WHERE, struct(1, 2, 1, dtype=jnp.int32), STARTS), {}, "lengths is S32"),
}


@ways
@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_mask(log, way, name):
    mask, changes, message = MALFORMED[name]
    with is_refused("softmax", message):
        way(log, mask, **changes)
