"""The handlers of the sandwich norm, handed inconsistent buffers, say so; they never read or write past one."""

import numpy as np
import pytest
from calls import BF16, F16, WORKSPACE, call, each_is_refused, struct
from table import SANDWICH

pytestmark = pytest.mark.kernels

(OP,) = SANDWICH
FWD, BWD = OP.forward, OP.backward
ROWS, COLS = 6, 40
ROW, WEIGHT, RSTD = struct(ROWS, COLS), struct(COLS), struct(ROWS, 1)
BRAIN, HALF = struct(ROWS, COLS, dtype=BF16), struct(ROWS, COLS, dtype=F16)
FORWARD = {
    "epsilon": np.float32(1e-6),
    "scale_offset": np.float32(0),
    "multiply_before_cast": True,
    "has_post_scale": True,
    "has_scale": True,
}
BACKWARD = {
    "scale_offset": np.float32(0),
    "has_post_scale": True,
    "has_scale": True,
    "has_dnew_residual": True,
    "with_dx": True,
    "with_dresidual": True,
    "with_dpost_scale": True,
    "with_dscale": True,
}
OPERANDS = (ROW, ROW, ROW, RSTD, RSTD, WEIGHT, WEIGHT, ROW)
GRADIENTS = (ROW, ROW, WEIGHT, WEIGHT)


def forward(operands=(ROW, ROW, WEIGHT, WEIGHT), results=(ROW, ROW, RSTD, RSTD), **changes):
    return call(FWD, list(results), operands, FORWARD | changes)


def backward(operands=OPERANDS, results=GRADIENTS, extra=None, **changes):
    return call(BWD, [*results, *(WORKSPACE if extra is None else extra)], operands, BACKWARD | changes)


def replaced(index, by, of=OPERANDS):
    return (*of[:index], by, *of[index + 1 :])


def test_calls_as_they_should_be():
    no_scales = {"has_post_scale": False, "has_scale": False}
    assert len(forward()) == 4
    assert len(forward(results=[ROW, ROW])) == 2
    assert len(forward((ROW, ROW), **no_scales)) == 4
    assert len(forward((BRAIN, ROW, WEIGHT, WEIGHT), [BRAIN, ROW])) == 2
    assert len(backward()) == 4 + len(WORKSPACE)
    assert len(backward(OPERANDS[:-1], has_dnew_residual=False)) == 4 + len(WORKSPACE)
    of_scales = {"with_dpost_scale": False, "with_dscale": False}
    assert len(backward(results=[ROW], with_dresidual=False, **of_scales)) == 1 + len(WORKSPACE)
    assert len(backward(results=[ROW], with_dx=False, **of_scales)) == 1 + len(WORKSPACE)
    wide = (BRAIN, BRAIN, ROW, RSTD, RSTD, WEIGHT, WEIGHT, ROW)
    assert len(backward(wide, (BRAIN, *GRADIENTS[1:]))) == 4 + len(WORKSPACE)


def test_a_gradient_of_the_scale_alone_reads_nothing_of_x():
    call_of_scale = {"with_dx": False, "with_dresidual": False, "with_dpost_scale": False}
    assert len(backward(results=[WEIGHT], **call_of_scale)) == 1 + len(WORKSPACE)


MALFORMED_FORWARD = {
    "half types mixed": (
        {"operands": (BRAIN, HALF, WEIGHT, WEIGHT), "results": [BRAIN, HALF]},
        "x and the residual have different dtypes",
    ),
    "scale of rows": ({"operands": (ROW, ROW, WEIGHT, ROW)}, "scale"),
    "y of another dtype": ({"results": [BRAIN, ROW]}, "y is BF16"),
    "sum of another dtype": ({"results": [ROW, BRAIN]}, "new_residual is BF16"),
    "empty rows": ({"operands": (*[struct(ROWS, 0)] * 2, *[struct(0)] * 2), "results": [struct(ROWS, 0)] * 2}, "row"),
    "scalar x": ({"operands": (struct(),) * 4, "results": [struct()] * 2}, "axes"),
}
MALFORMED_BACKWARD = {
    "half rstd": ({"operands": replaced(3, struct(ROWS, 1, dtype=BF16))}, "rstd"),
    "x of another dtype": ({"operands": replaced(1, BRAIN)}, "x is BF16"),
    "half types mixed": ({"operands": (BRAIN, BRAIN, HALF, *OPERANDS[3:])}, "different dtypes"),
    "dsum of another dtype": ({"operands": replaced(7, BRAIN)}, "dnew_residual is BF16"),
    "dscale without a scale": ({"operands": (*OPERANDS[:6], ROW), "has_scale": False}, "there is no scale"),
    "dpost_scale without one": ({"operands": (*OPERANDS[:6], ROW), "has_post_scale": False}, "there is no post_scale"),
    "dx of another dtype": ({"results": replaced(0, BRAIN, GRADIENTS)}, "dx is BF16"),
    "dresidual of another dtype": ({"results": replaced(1, BRAIN, GRADIENTS)}, "dresidual is BF16"),
    "dpost_scale of another dtype": ({"results": replaced(2, struct(COLS, dtype=BF16), GRADIENTS)}, "dpost_scale"),
    "long dscale": ({"results": replaced(3, struct(COLS + 1), GRADIENTS)}, "dscale"),
}


test_a_malformed_forward = each_is_refused(FWD, forward, MALFORMED_FORWARD)
test_a_malformed_backward = each_is_refused(BWD, backward, MALFORMED_BACKWARD)
