"""The handler of the product of quantised matrices, handed inconsistent buffers, says so."""

import jax.numpy as jnp
import numpy as np
import pytest
from calls import BF16, F16, call, each_is_refused, is_refused, struct, without

pytestmark = pytest.mark.gpu

TARGET = "jaxnorm_quantized_dot"
ROWS, COLS, DEPTH = 5, 48, 64
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
X, X_SCALES = struct(ROWS, DEPTH, dtype=E4M3), struct(ROWS, 1)
WEIGHTS, WEIGHT_SCALES = struct(COLS, DEPTH, dtype=E4M3), struct(COLS, 1)
Y, BIAS = struct(ROWS, COLS, dtype=BF16), struct(COLS, dtype=BF16)
WORKSPACE = struct(8 << 20)
ATTRIBUTES = {"has_bias": False, "fast_accumulation": True}


def dot(
    x=X, x_scales=X_SCALES, weights=WEIGHTS, weight_scales=WEIGHT_SCALES, more=(), results=(Y, WORKSPACE), **changes
):
    operands = [x, x_scales, weights, weight_scales, *more]
    return call(TARGET, list(results), operands, ATTRIBUTES | changes)


# The calls below are these with one thing wrong. All that is in them is 1.
@pytest.mark.parametrize("dtype", [BF16, F16, jnp.float32])
@pytest.mark.parametrize("pair", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)])
def test_y_as_it_should_be(dtype, pair):
    x, weights = (struct(*like.shape, dtype=of) for like, of in zip((X, WEIGHTS), pair, strict=True))
    y, _ = dot(x=x, weights=weights, results=[struct(ROWS, COLS, dtype=dtype), WORKSPACE])
    np.testing.assert_array_equal(y.astype(jnp.float32), np.full((ROWS, COLS), DEPTH))


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_y_with_a_bias(dtype):
    results = [struct(ROWS, COLS, dtype=dtype), WORKSPACE]
    y, _ = dot(more=[struct(COLS, dtype=dtype)], results=results, has_bias=True)
    np.testing.assert_array_equal(y.astype(jnp.float32), np.full((ROWS, COLS), DEPTH + 1))


# A program that another version of jaxnorm exported may have another workspace, or none.
@pytest.mark.parametrize("floats", [None, 0, 1, 100, 1 << 20])
def test_a_workspace_of_any_size(floats):
    y, *_ = dot(results=[Y] if floats is None else [Y, struct(floats)])
    np.testing.assert_array_equal(y.astype(jnp.float32), np.full((ROWS, COLS), DEPTH))


def test_rows_of_several_axes():
    y, _ = dot(
        x=struct(2, 3, DEPTH, dtype=E4M3), x_scales=struct(2, 3, 1), results=[struct(2, 3, COLS, dtype=BF16), WORKSPACE]
    )
    np.testing.assert_array_equal(y.astype(jnp.float32), np.full((2, 3, COLS), DEPTH))


def test_nothing_to_compute():
    no_rows = dot(x=struct(0, DEPTH, dtype=E4M3), x_scales=struct(0, 1), results=[struct(0, COLS, dtype=BF16)])
    no_cols = dot(
        weights=struct(0, DEPTH, dtype=E4M3), weight_scales=struct(0, 1), results=[struct(ROWS, 0, dtype=BF16)]
    )
    assert (no_rows[0].shape, no_cols[0].shape) == ((0, COLS), (ROWS, 0))


def of_shape(cols=COLS, depth=DEPTH):
    """What is changed of a call for matrices of another shape."""
    return {
        "x": struct(ROWS, depth, dtype=E4M3),
        "weights": struct(cols, depth, dtype=E4M3),
        "weight_scales": struct(cols, 1),
        "results": [struct(ROWS, cols, dtype=BF16)],
    }


# What is changed, and what the message names.
MALFORMED = {
    "x of bfloat16": ({"x": struct(ROWS, DEPTH, dtype=BF16)}, "x is BF16.*expected F8E4M3FN or F8E5M2"),
    "x of int8": ({"x": struct(ROWS, DEPTH, dtype=jnp.int8)}, "x is S8.*expected F8E4M3FN or F8E5M2"),
    "scalar x": ({"x": struct(dtype=E4M3)}, "axes"),
    "no depth": (of_shape(depth=0), "depth"),
    "an odd depth": (of_shape(depth=DEPTH + 8), "depth is 72, expected a multiple of 16"),
    "an odd number of columns": (of_shape(cols=COLS + 8), "columns of y is 56, expected a multiple of 16"),
    "flat scales of x": ({"x_scales": struct(ROWS)}, "x_scales"),
    "one scale of x": ({"x_scales": struct(1, 1)}, "x_scales"),
    "half scales of x": ({"x_scales": struct(ROWS, 1, dtype=BF16)}, "x_scales"),
    "weights of int8": ({"weights": struct(COLS, DEPTH, dtype=jnp.int8)}, "weights is S8"),
    "weights of another depth": ({"weights": struct(COLS, DEPTH + 16, dtype=E4M3)}, "weights"),
    "flat weights": ({"weights": struct(COLS * DEPTH, dtype=E4M3)}, "weights"),
    "a batch of weights": ({"weights": struct(1, COLS, DEPTH, dtype=E4M3)}, "weights"),
    "flat scales of weights": ({"weight_scales": struct(COLS)}, "weight_scales"),
    "one scale of weights": ({"weight_scales": struct(1, 1)}, "weight_scales"),
    "both of float8_e5m2": (
        {"x": struct(ROWS, DEPTH, dtype=E5M2), "weights": struct(COLS, DEPTH, dtype=E5M2)},
        "both F8E5M2",
    ),
    "a bias denied": ({"more": [BIAS]}, "operands"),
    "no bias": ({"has_bias": True}, "bias"),
    "a short bias": ({"more": [struct(COLS - 1, dtype=BF16)], "has_bias": True}, "bias"),
    "a bias for each row": ({"more": [Y], "has_bias": True}, "bias"),
    "a bias of another dtype": ({"more": [struct(COLS, dtype=F16)], "has_bias": True}, "bias"),
    "a bias and y of float32": (
        {"more": [struct(COLS)], "results": [struct(ROWS, COLS)], "has_bias": True},
        "bias and y is F32",
    ),
    "y without a row": ({"results": [struct(ROWS - 1, COLS, dtype=BF16)]}, "y is"),
    "padded y": ({"results": [struct(ROWS, COLS + 16, dtype=BF16)]}, "y is"),
    "y of float8": ({"results": [struct(ROWS, COLS, dtype=E4M3)]}, "y is F8E4M3FN"),
    "a result more": ({"results": [Y, Y]}, "results"),
    "a result more than a workspace": ({"results": [Y, WORKSPACE, WORKSPACE]}, "results"),
}

test_a_malformed_call = each_is_refused(TARGET, dot, MALFORMED)


def test_a_call_without_an_attribute():
    with is_refused(TARGET, "attributes"):
        call(TARGET, [Y, WORKSPACE], [X, X_SCALES, WEIGHTS, WEIGHT_SCALES], without(ATTRIBUTES, "has_bias"))


def test_a_call_without_operands():
    with is_refused(TARGET, "x is missing"):
        call(TARGET, [Y, WORKSPACE], [], ATTRIBUTES)
