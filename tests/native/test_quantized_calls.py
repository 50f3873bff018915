"""The handlers of the quantised norms, handed inconsistent buffers, say so; they never read or write past one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import BF16, F16, call, each_kind_is_refused, struct
from cases import KINDS, bits, draw_bias, draw_scale, draw_smooth, draw_x
from native import target
from quantizing import quantize

from jaxnorm import Quantization

pytestmark = [pytest.mark.kernels, pytest.mark.parametrize("kind", KINDS)]

ROWS, COLS = 6, 128
X, WEIGHT, STATISTIC, GROUPS = struct(ROWS, COLS), struct(COLS), struct(ROWS, 1), struct(ROWS, 2)
X_F16, X_BF16 = (struct(ROWS, COLS, dtype=dtype) for dtype in (F16, BF16))
VALUES = struct(ROWS, COLS, dtype=jnp.int8)
QUANTIZED = {
    "axes": np.int64(1),
    "group": np.int64(0),
    "epsilon": np.float32(1e-6),
    "scale_offset": np.float32(0),
    "max_scale": np.float32(np.inf),
    "power_of_two": False,
    "has_residual": False,
    "has_scale": True,
    "has_bias": True,
    "has_smooth": True,
    "has_given": False,
}


def quantized(kind, operands=(X, WEIGHT, WEIGHT, WEIGHT), results=(VALUES, STATISTIC), **changes):
    return call(target(kind, "quantized_fwd"), list(results), operands, QUANTIZED | changes)


def test_calls_as_they_should_be(kind):
    statistics = [STATISTIC] * {"rms": 1, "layer": 2}[kind]
    given = {"operands": (X, WEIGHT, WEIGHT, WEIGHT, struct()), "has_given": True}
    residual = {"operands": (X, X, WEIGHT, WEIGHT, WEIGHT), "has_residual": True}
    assert len(quantized(kind, results=[VALUES, STATISTIC, *statistics])) == 2 + len(statistics)
    assert len(quantized(kind, results=[VALUES], **given)) == 1
    assert len(quantized(kind, results=[VALUES, GROUPS], group=np.int64(64))) == 2
    assert len(quantized(kind, results=[VALUES, STATISTIC, X, *statistics], **residual)) == 3 + len(statistics)


GIVEN = (X, WEIGHT, WEIGHT, WEIGHT, struct())
# What is changed, and what the message names.
MALFORMED = {
    "smooth factors of float8": (
        {"operands": (X, WEIGHT, WEIGHT, struct(COLS, dtype=jnp.float8_e5m2))},
        "smooth_scale is F8E5M2",
    ),
    "x of 8 bits": ({"operands": (VALUES, WEIGHT, WEIGHT, WEIGHT)}, "x is S8"),
    "no static scale": ({"results": [VALUES], "has_given": True}, "static_scale"),
    "a static scale of a row": (
        {"operands": (X, WEIGHT, WEIGHT, WEIGHT, WEIGHT), "results": [VALUES], "has_given": True},
        "static_scale",
    ),
    "a static scale of one": (
        {"operands": (X, WEIGHT, WEIGHT, WEIGHT, struct(1)), "results": [VALUES], "has_given": True},
        "static_scale",
    ),
    "a half static scale": (
        {"operands": (X, WEIGHT, WEIGHT, WEIGHT, struct(dtype=BF16)), "results": [VALUES], "has_given": True},
        "static_scale",
    ),
    "scales beside a static one": ({"operands": GIVEN, "has_given": True, "results": [VALUES, X]}, "results|rstd|mean"),
    "groups of a static scale": (
        {"operands": GIVEN, "has_given": True, "results": [VALUES], "group": np.int64(64)},
        "group",
    ),
    "values of float32": ({"results": [X, STATISTIC]}, "values is F32.*expected F8E4M3FN, F8E5M2 or S8"),
    "values of another float8": ({"results": [struct(ROWS, COLS, dtype=jnp.float8_e4m3b11fnuz), STATISTIC]}, "values"),
    "unsigned values": ({"results": [struct(ROWS, COLS, dtype=jnp.uint8), STATISTIC]}, "values"),
    "half scales": ({"results": [VALUES, struct(ROWS, 1, dtype=BF16)]}, "scales"),
    "scales of groups without groups": ({"results": [VALUES, GROUPS]}, "scales"),
    "scales of rows with groups": ({"group": np.int64(64)}, "scales"),
    "scales of other groups": ({"results": [VALUES, GROUPS], "group": np.int64(128)}, "scales"),
    "groups of another size": ({"results": [VALUES, struct(ROWS, 8)], "group": np.int64(16)}, "group"),
    "negative groups": ({"group": np.int64(-64)}, "group"),
    "groups that do not divide": (
        {
            "operands": (struct(ROWS, 96), *[struct(96)] * 3),
            "results": [struct(ROWS, 96, dtype=jnp.int8), struct(ROWS, 1)],
            "group": np.int64(64),
        },
        "group",
    ),
    "groups of two axes": (
        {"operands": (X, X, X, X), "results": [VALUES, struct(1, 2)], "group": np.int64(64), "axes": np.int64(2)},
        "group",
    ),
    "groups and no axes": ({"group": np.int64(64), "axes": np.int64(0)}, "group|axes"),
    "groups and scalar x": (
        {"operands": (struct(),), "group": np.int64(64), "results": [struct(dtype=jnp.int8)]},
        "group|axes",
    ),
    "a bound of zero": ({"max_scale": np.float32(0)}, "max_scale"),
    "a NaN bound": ({"max_scale": np.float32(np.nan)}, "max_scale"),
    "no axes": ({"axes": np.int64(0)}, "axes"),
    "more axes than x has": ({"axes": np.int64(3)}, "axes"),
    "empty rows": (
        {"operands": (struct(ROWS, 0), *[struct(0)] * 3), "results": [struct(ROWS, 0, dtype=jnp.int8), STATISTIC]},
        "row",
    ),
    "a sum of another dtype": (
        {"operands": (X, X, WEIGHT, WEIGHT, WEIGHT), "results": [VALUES, STATISTIC, X_BF16], "has_residual": True},
        "sum",
    ),
    "half types mixed": (
        {
            "operands": (X_F16, X_BF16, WEIGHT, WEIGHT, WEIGHT),
            "results": [VALUES, STATISTIC, X_BF16],
            "has_residual": True,
        },
        "dtype",
    ),
}
test_a_malformed_call = each_kind_is_refused("quantized_fwd", quantized, MALFORMED)


# What Python never asks for is harmless too: the same bits as through the package.
def test_the_package_makes_no_other_call(kind):
    args = draw_x((ROWS, COLS)), draw_scale((COLS,)), draw_bias((COLS,)), draw_smooth((COLS,))
    results = jax.ffi.ffi_call(target(kind, "quantized_fwd"), [VALUES, STATISTIC])(*args, **QUANTIZED)
    expected = quantize(kind, Quantization("int8"))(*args)
    assert bits(results) == bits((expected.values, expected.scales))
