"""The handlers of GroupNorm, handed inconsistent buffers, say so; they never read or write past one."""

import jax.numpy as jnp
import numpy as np
import pytest
from calls import BF16, WORKSPACE, call, each_is_refused, struct

pytestmark = pytest.mark.kernels

FWD, BWD = "jaxnorm_group_norm_fwd", "jaxnorm_group_norm_bwd"
EXAMPLES, POSITIONS, GROUPS, SIZE = 3, 5, 4, 6
X, HALF = struct(EXAMPLES, POSITIONS, GROUPS, SIZE), struct(EXAMPLES, POSITIONS, GROUPS, SIZE, dtype=BF16)
STATISTICS, WEIGHT = struct(EXAMPLES, 1, GROUPS, 1), struct(1, 1, GROUPS, SIZE)
OF_EXAMPLES = struct(EXAMPLES, 1, GROUPS, SIZE)
NONE, ONE = struct(0, POSITIONS, GROUPS, SIZE), struct(EXAMPLES, GROUPS, SIZE)
FORWARD = {
    "axes": np.int64(2),
    "epsilon": np.float32(1e-6),
    "scale_offset": np.float32(0),
    "activation": "silu",
    "has_scale": True,
    "has_bias": True,
}
BACKWARD = {
    "axes": np.int64(2),
    "scale_offset": np.float32(0),
    "activation": "gelu",
    "has_scale": True,
    "has_bias": True,
    "with_dx": True,
    "with_dscale": True,
    "with_dbias": True,
}


def forward(operands=(X, WEIGHT, WEIGHT), results=(X, STATISTICS, STATISTICS), **changes):
    return call(FWD, [*results, *WORKSPACE], operands, FORWARD | changes)


def backward(
    operands=(X, X, STATISTICS, STATISTICS, WEIGHT, WEIGHT), results=(X, WEIGHT, WEIGHT), extra=None, **changes
):
    return call(BWD, [*results, *(WORKSPACE if extra is None else extra)], operands, BACKWARD | changes)


def test_calls_as_they_should_be():
    more = len(WORKSPACE)
    of_one = struct(EXAMPLES, GROUPS, 1), struct(EXAMPLES, GROUPS, SIZE)
    assert len(forward()) == 3 + more
    assert len(forward(results=[X])) == 1 + more
    assert len(forward((X,), has_scale=False, has_bias=False)) == 3 + more
    assert len(forward((X, OF_EXAMPLES, WEIGHT), [HALF])) == 1 + more
    assert len(forward((ONE, of_one[1], of_one[1]), [ONE, of_one[0], of_one[0]], axes=np.int64(1))) == 3 + more
    assert len(forward((NONE, WEIGHT, WEIGHT), [NONE])) == 1 + more
    assert len(backward()) == 3 + more
    only_dx = {"with_dscale": False, "with_dbias": False}
    assert len(backward(results=[X], **only_dx)) == 1 + more
    per_example = (X, X, STATISTICS, STATISTICS, OF_EXAMPLES, WEIGHT)
    assert len(backward(per_example, (X, OF_EXAMPLES, WEIGHT))) == 3 + more


def test_without_examples_the_gradients_of_weights_are_zeros():
    none = struct(0, 1, GROUPS, 1)
    dx, dscale, dbias, *_ = backward((NONE, NONE, none, none, WEIGHT, WEIGHT), (NONE, WEIGHT, WEIGHT))
    assert dx.size == 0
    assert not dscale.any()
    assert not dbias.any()
    of_none = struct(0, 1, GROUPS, SIZE)
    dx, dscale, dbias, *_ = backward((NONE, NONE, none, none, of_none, WEIGHT), (NONE, of_none, WEIGHT))
    assert dscale.size == 0
    assert not dbias.any()


MALFORMED_FORWARD = {
    "quantised x": ({"operands": (struct(*X.shape, dtype=jnp.int8), WEIGHT, WEIGHT)}, "x is S8"),
    "scale of positions": ({"operands": (X, struct(1, POSITIONS, GROUPS, SIZE), WEIGHT)}, "scale"),
    "bias of other examples": ({"operands": (X, WEIGHT, struct(EXAMPLES - 1, 1, GROUPS, SIZE))}, "bias"),
    "no axes": ({"axes": np.int64(0)}, "axes is 0"),
    "axes of all": ({"axes": np.int64(4)}, "axes is 4"),
    "no positions": ({"operands": (struct(EXAMPLES, 0, GROUPS, SIZE), WEIGHT, WEIGHT)}, "no group can be normalised"),
    "no groups": ({"operands": (struct(EXAMPLES, POSITIONS, 0, SIZE), WEIGHT, WEIGHT)}, "no group can be normalised"),
    "unknown activation": ({"activation": "tanh"}, "activation is none of"),
    "halves of two kinds": (
        {"operands": (HALF, WEIGHT, WEIGHT), "results": [struct(*X.shape, dtype=jnp.float16)]},
        "y",
    ),
}
MALFORMED_BACKWARD = {
    "half mean": ({"operands": (X, X, struct(*STATISTICS.shape, dtype=BF16), STATISTICS, WEIGHT, WEIGHT)}, "mean"),
    "halves of two kinds": (
        {"operands": (HALF, struct(*X.shape, dtype=jnp.float16), STATISTICS, STATISTICS, WEIGHT, WEIGHT)},
        "x and dy have different dtypes",
    ),
    "dscale without a scale": (
        {"operands": (X, X, STATISTICS, STATISTICS, WEIGHT), "has_scale": False},
        "weight is wanted that is not there",
    ),
    "dx of another dtype": ({"results": [HALF, WEIGHT, WEIGHT]}, "dx is BF16"),
    "dscale of examples": ({"results": [X, OF_EXAMPLES, WEIGHT]}, "dscale"),
    "unknown activation": ({"activation": ""}, "activation is none of"),
}


test_a_malformed_forward = each_is_refused(FWD, forward, MALFORMED_FORWARD)
test_a_malformed_backward = each_is_refused(BWD, backward, MALFORMED_BACKWARD)
