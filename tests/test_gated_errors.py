"""Bad input of the gated norm is a clear error while tracing; bad calls of its handlers are errors too."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import bits, draw
from gating import BWD, FWD, MAMBA, draw_operands, gated
from test_malformed_calls import BF16, F32, call, struct

import jaxnorm
from jaxnorm.native import compat, ffi

X, SCALE = jnp.ones((3, 4, 8)), jnp.ones(8)
FIRST = {"gate_first": True}
# The arguments, the keywords, the exception and what the message must hold in this order.
BAD_INPUT = {
    "no gate": ((X, None), FIRST, TypeError, ("gate", "array", "NoneType")),
    "gate of another shape": ((X, X[:2]), FIRST, ValueError, ("gate", r"\(2, 4, 8\)", r"\(3, 4, 8\)", "broadcast_to")),
    "gate that would broadcast": ((X, X[0]), FIRST, ValueError, ("gate", r"\(4, 8\)", r"\(3, 4, 8\)")),
    "gate of integers": ((X, X.astype("int32")), FIRST, TypeError, ("gate", "floating", "int32", "astype")),
    "gate of 8 bits": ((X, X.astype("float8_e4m3fn")), FIRST, TypeError, ("gate", "floating", "float8_e4m3fn")),
    "x without axes": ((jnp.ones(()), jnp.ones(())), FIRST, ValueError, ("x", "at least one axis")),
    "scale of a group": ((X, X, SCALE[:4]), FIRST | {"group_size": 4}, ValueError, ("scale", r"\(4,\)", r"\(8,\)")),
    "scale of groups": (
        (X, X, SCALE.reshape(2, 4)),
        FIRST | {"group_size": 4},
        ValueError,
        ("scale", r"\(2, 4\)", r"\(8,\)", "group_size"),
    ),
    "group that does not divide": ((X, X), FIRST | {"group_size": 3}, ValueError, ("group_size 3", r"\(3, 4, 8\)")),
    "group longer than a row": ((X, X), FIRST | {"group_size": 16}, ValueError, ("group_size 16", "divisor")),
    "group of nothing": ((X, X), FIRST | {"group_size": 0}, ValueError, ("group_size 0", "positive")),
    "negative group": ((X, X), FIRST | {"group_size": -4}, ValueError, ("group_size -4", "positive")),
    "group of a float": ((X, X), FIRST | {"group_size": 4.0}, TypeError, ("group_size", "int", "4.0")),
    "group of a bool": ((X, X), FIRST | {"group_size": True}, TypeError, ("group_size", "int", "True")),
    "unknown activation": (
        (X, X),
        FIRST | {"activation": "gelu"},
        ValueError,
        ("activation", "'gelu'", "'silu' or 'sigmoid'"),
    ),
    "activation of a function": ((X, X), FIRST | {"activation": jax.nn.silu}, ValueError, ("activation", "'silu'")),
    "order of a number": ((X, X), {"gate_first": 1}, TypeError, ("gate_first", "bool", "1", "Mamba2")),
    "order of None": ((X, X), {"gate_first": None}, TypeError, ("gate_first", "bool", "None")),
    "negative epsilon": ((X, X), FIRST | {"epsilon": -1.0}, ValueError, ("epsilon", "negative")),
    "NaN offset": ((X, X), FIRST | {"scale_offset": float("nan")}, ValueError, ("scale_offset", "finite")),
    "integer out_dtype": ((X, X), FIRST | {"out_dtype": "int8"}, TypeError, ("out_dtype", "floating", "int8")),
    "unknown implementation": ((X, X), FIRST | {"implementation": "cuda"}, ValueError, ("implementation", "cuda")),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input(name):
    arguments, options, error, parts = BAD_INPUT[name]
    with pytest.raises(error, match="(?s)^gated_rms_norm: .*" + ".*".join(parts)):
        jaxnorm.gated_rms_norm(*arguments, **options)


def test_the_order_has_no_default():
    with pytest.raises(TypeError, match="gate_first"):
        jaxnorm.gated_rms_norm(X, X)


def test_bad_input_is_found_while_tracing():
    with pytest.raises(ValueError, match=r"^gated_rms_norm: gate has shape"):
        jax.eval_shape(gated(MAMBA), X, X[0])


LONG, BRAIN = jnp.ones((2, 16_385)), X.astype("bfloat16")
WITHOUT_KERNEL = {
    "long rows": ((LONG, LONG), {}, "rows of 16385 elements are normalised, .* at most 16384"),
    "a gate of another dtype": ((X, BRAIN), {}, "x is float32 and gate bfloat16; .* equal"),
    "a result of another dtype": ((BRAIN, BRAIN), {"out_dtype": "float32"}, "x is bfloat16 and the result float32"),
}


@pytest.mark.parametrize("name", WITHOUT_KERNEL)
def test_native_by_name_where_there_is_no_kernel(name):
    arguments, options, reason = WITHOUT_KERNEL[name]
    with pytest.raises(RuntimeError, match=f"^gated_rms_norm: .*native.*{reason}.*implementation=None"):
        gated(MAMBA, **options)(*arguments, implementation="native")


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


def workspace(scale=WEIGHT, cols=COLS):
    needs = {"weights": 1, "count": math.prod(scale.shape) // cols, "with_dx": True}
    shapes = ffi.workspace(compat.default_platform(), BWD, jnp.dtype(F32), ROWS, cols, **needs)
    return [struct(*shape) for shape in shapes]


def forward(operands=(ROW, ROW, WEIGHT), results=(ROW, RSTD), **changes):
    return call(FWD, list(results), operands, FORWARD | changes)


def backward(operands=(ROW, ROW, ROW, RSTD, WEIGHT), results=(ROW, ROW, WEIGHT), extra=None, **changes):
    return call(BWD, [*results, *(workspace() if extra is None else extra)], operands, BACKWARD | changes)


@pytest.mark.kernels
def test_calls_as_they_should_be():
    of_groups = (GROUPED, GROUPED, GROUPED, struct(ROWS, COUNT, 1), GROUPS)
    assert len(forward()) == 2
    assert len(forward(results=[ROW])) == 1
    assert len(forward((ROW, ROW), has_scale=False)) == 2
    assert len(forward((GROUPED, GROUPED, GROUPS), [GROUPED], grouped=True)) == 1
    assert len(backward()) == 3 + len(workspace())
    assert len(backward(of_groups, (GROUPED, GROUPED, GROUPS), workspace(GROUPS), grouped=True)) == 3 + len(workspace())
    assert len(backward(results=[ROW], extra=[], with_dx=False, with_dscale=False)) == 1


MALFORMED_FORWARD = {
    "no operands": ({"operands": ()}, "operand"),
    "no gate": ({"operands": (ROW,)}, "gate"),
    "no scale": ({"operands": (ROW, ROW)}, "scale is missing"),
    "scale denied": ({"has_scale": False}, "operands"),
    "gate without a row": ({"operands": (ROW, struct(ROWS - 1, COLS), WEIGHT)}, "gate"),
    "gate of another dtype": ({"operands": (ROW, struct(ROWS, COLS, dtype=BF16), WEIGHT)}, "gate is BF16.*F32"),
    "integer x": ({"operands": (struct(ROWS, COLS, dtype=jnp.int32), ROW, WEIGHT)}, "x is S32"),
    "quantised x": ({"operands": (struct(ROWS, COLS, dtype=jnp.int8), ROW, WEIGHT)}, "x is S8"),
    "short scale": ({"operands": (ROW, ROW, struct(COLS - 1))}, "scale"),
    "scale of groups": ({"operands": (GROUPED, GROUPED, GROUPS), "results": [GROUPED]}, "scale"),
    "scale of a row": (
        {"operands": (GROUPED, GROUPED, WEIGHT), "results": [GROUPED], "grouped": True},
        "scale",
    ),
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
    "flat y": ({"results": [struct(ROWS * COLS)]}, "y"),
    "flat statistics": ({"results": [ROW, struct(ROWS)]}, "rstd"),
    "results more": ({"results": [ROW, RSTD, RSTD]}, "results"),
    "long rows": (
        {"operands": (struct(2, 16_385), struct(2, 16_385), struct(16_385)), "results": [struct(2, 16_385)]},
        "longer than 16384",
    ),
    "empty rows": ({"operands": (struct(ROWS, 0), struct(ROWS, 0), struct(0)), "results": [struct(ROWS, 0)]}, "row"),
    "scalar x": ({"operands": (struct(), struct(), struct()), "results": [struct()]}, "axes"),
}
MALFORMED_BACKWARD = {
    "no gate": ({"operands": (ROW, ROW)}, "gate"),
    "no rstd": ({"operands": (ROW, ROW, ROW, WEIGHT)}, "rstd"),
    "half rstd": ({"operands": (ROW, ROW, ROW, struct(ROWS, 1, dtype=BF16), WEIGHT)}, "rstd"),
    "gate without a row": ({"operands": (ROW, ROW, struct(ROWS - 1, COLS), RSTD, WEIGHT)}, "gate"),
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
    "no dgate": ({"results": [ROW], "extra": [], "with_dscale": False}, "dgate"),
    "dgate of another dtype": ({"results": [ROW, struct(ROWS, COLS, dtype=BF16), WEIGHT]}, "dgate is BF16"),
    "dscale of another dtype": ({"results": [ROW, ROW, struct(COLS, dtype=BF16)]}, "dscale"),
    "dscale of groups": ({"results": [ROW, ROW, GROUPS]}, "dscale"),
    "results more": ({"extra": [*workspace(), WEIGHT]}, "results"),
    "unknown activation": ({"activation": ""}, "activation"),
}


@pytest.mark.kernels
@pytest.mark.parametrize("name", MALFORMED_FORWARD)
def test_a_malformed_forward(name):
    changes, message = MALFORMED_FORWARD[name]
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"{FWD}.*({message})"):
        forward(**changes)


@pytest.mark.kernels
@pytest.mark.parametrize("name", MALFORMED_BACKWARD)
def test_a_malformed_backward(name):
    changes, message = MALFORMED_BACKWARD[name]
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"{BWD}.*({message})"):
        backward(**changes)


@pytest.mark.kernels
@pytest.mark.parametrize("missing", FORWARD)
def test_a_forward_without_an_attribute(missing):
    attributes = {name: value for name, value in FORWARD.items() if name != missing}
    with pytest.raises(jax.errors.JaxRuntimeError, match="attributes"):
        call(FWD, [ROW], (ROW, ROW, WEIGHT), attributes)


@pytest.mark.kernels
@pytest.mark.parametrize("missing", BACKWARD)
def test_a_backward_without_an_attribute(missing):
    attributes = {name: value for name, value in BACKWARD.items() if name != missing}
    with pytest.raises(jax.errors.JaxRuntimeError, match="attributes"):
        call(BWD, [ROW, ROW, WEIGHT, *workspace()], (ROW, ROW, ROW, RSTD, WEIGHT), attributes)


# Arrays whose data begins where XLA put a slice, at any element.
@pytest.mark.kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_slices_of_arrays(dtype):
    args = draw_operands((5, 1000), dtype)
    dy = draw("dy", (5, 1000), dtype)

    def results(x, gate, scale, dy):
        y, pullback = jax.vjp(gated(MAMBA), x, gate, scale)
        return y, pullback(dy)

    shifted = jax.jit(lambda *flat: results(*(a[3:].reshape(s) for a, s in zip(flat, SHAPES, strict=True))))
    flat = [jnp.concatenate([jnp.zeros(3, a.dtype), a.ravel()]) for a in (*args, dy)]
    assert bits(shifted(*flat)) == bits(jax.jit(results)(*args, dy))


SHAPES = ((5, 1000), (5, 1000), (1000,), (5, 1000))
