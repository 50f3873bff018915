"""Bad input of the quantised norms: each a clear error while tracing, which names the argument and the remedy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import KINDS
from quantizing import QUANTIZED

from jaxnorm import Quantization

X = jnp.ones((3, 4, 192))
TOKEN, TENSOR, GROUP = (Quantization("int8", granularity) for granularity in ("token", "tensor", "group"))

# Arguments of Quantization, the exception, and what the message must hold in this order.
BAD_QUANTIZATIONS = {
    "no dtype": ((None,), TypeError, ("dtype", "None", "float8_e4m3fn, float8_e5m2, int8")),
    "an unknown dtype": (("float99",), TypeError, ("dtype", "float99", "expected float8_e4m3fn")),
    "a dtype of 16 bits": ((jnp.bfloat16,), TypeError, ("bfloat16", "expected float8_e4m3fn")),
    "another float8": (("float8_e4m3b11fnuz",), TypeError, ("float8_e4m3b11fnuz", "expected")),
    "an unsigned dtype": (("uint8",), TypeError, ("uint8", "expected")),
    "an unknown granularity": (("int8", "channel"), ValueError, ("granularity", "'channel'", "'token'", "'group'")),
    "no granularity": (("int8", None), ValueError, ("granularity", "None")),
    "an unknown group size": (("int8", "group", 32), ValueError, ("group_size", "64 or 128", "32")),
    "a group size of a float": (("int8", "group", 64.5), ValueError, ("group_size", "64.5")),
    "a group size of a bool": (("int8", "group", True), ValueError, ("group_size", "True")),
    "a group size without groups": (("int8", "token", 64), ValueError, ("group_size=64", "'group'", "'token'")),
    "powers of two of int8": (("int8", "token", None, True), ValueError, ("power_of_two", "float8", "int8", "leave")),
    "powers of two of a given scale": (
        ("float8_e5m2", "tensor", None, True),
        ValueError,
        ("power_of_two", "'tensor'", "leave"),
    ),
    "a bound of a given scale": (
        ("int8", "tensor", None, False, 1.0),
        ValueError,
        ("max_scale", "'tensor'", "leave"),
    ),
    "a bound of zero": (("int8", "token", None, False, 0.0), ValueError, ("max_scale", r"2\*\*-126", "0.0")),
    "a negative bound": (("int8", "token", None, False, -1), ValueError, ("max_scale", r"2\*\*-126", "-1")),
    "a subnormal bound": (("int8", "token", None, False, 1e-39), ValueError, ("max_scale", r"2\*\*-126")),
    "an infinite bound": (("int8", "token", None, False, np.inf), ValueError, ("max_scale", "finite", "inf")),
    "a NaN bound": (("int8", "token", None, False, np.nan), ValueError, ("max_scale", "finite", "nan")),
    "a bound of text": (("int8", "token", None, False, "1"), TypeError, ("max_scale", "number", "'1'")),
}

# Keywords, the exception, and what the message must hold in this order.
BAD_CALLS = {
    "no quantization": ({"quantization": None}, TypeError, ("quantization", "Quantization", "None")),
    "a dtype for a quantization": ({"quantization": "int8"}, TypeError, ("quantization", "Quantization", "'int8'")),
    "groups that do not divide": ({"quantization": GROUP}, ValueError, ("group_size 128", "divide", r"\(3, 4, 192\)")),
    "groups of several axes": (
        {"quantization": GROUP, "axis": (-2, -1)},
        ValueError,
        ("granularity='group'", "axis=-1", r"\(-2, -1\)", "reshape"),
    ),
    "groups of another axis": ({"quantization": GROUP, "axis": 0}, ValueError, ("granularity='group'", r"\(-3,\)")),
    "no static scale": ({"quantization": TENSOR}, ValueError, ("'tensor'", "static_scale", "None")),
    "a static scale of tokens": ({"static_scale": 1.0}, ValueError, ("static_scale", "'token'", "leave")),
    "a static scale of groups": (
        {"quantization": Quantization("int8", "group", 64), "static_scale": 1.0},
        ValueError,
        ("static_scale", "'group'", "leave"),
    ),
    "a static scale of a row": (
        {"quantization": TENSOR, "static_scale": jnp.ones(192)},
        ValueError,
        ("static_scale", "scalar", r"\(192,\)", "'token'"),
    ),
    "a static scale of integers": (
        {"quantization": TENSOR, "static_scale": jnp.int32(1)},
        TypeError,
        ("static_scale", "floating", "int32"),
    ),
    "a static scale of zero": ({"quantization": TENSOR, "static_scale": 0}, ValueError, ("static_scale", "at least")),
    "a static scale that float32 flushes": (
        {"quantization": TENSOR, "static_scale": 1e-45},
        ValueError,
        ("static_scale", "at least", "1e-45"),
    ),
    "a static scale of NaN": (
        {"quantization": TENSOR, "static_scale": float("nan")},
        ValueError,
        ("static_scale", "finite", "nan"),
    ),
    "a static scale of text": (
        {"quantization": TENSOR, "static_scale": "1"},
        TypeError,
        ("static_scale", "number", "'1'"),
    ),
    "smooth factors of another shape": (
        {"smooth_scale": jnp.ones(191)},
        ValueError,
        ("smooth_scale", r"\(191,\)", r"\(192,\)"),
    ),
    "smooth factors of integers": ({"smooth_scale": jnp.ones(192, "int8")}, TypeError, ("smooth_scale", "floating")),
    "a residual of another shape": ({"residual": X[0]}, ValueError, ("residual", r"\(4, 192\)", r"\(3, 4, 192\)")),
    "a residual of integers": ({"residual": X.astype("int32")}, TypeError, ("residual", "floating", "int32")),
    "an unknown implementation": ({"implementation": "cuda"}, ValueError, ("implementation", "cuda", "native")),
    "a negative epsilon": ({"epsilon": -1e-6}, ValueError, ("epsilon", "negative")),
}

kinds = pytest.mark.parametrize("kind", KINDS)


def in_order(name, parts) -> str:
    return rf"(?s)^{name}: " + ".*".join(("", *parts))


@pytest.mark.parametrize("name", BAD_QUANTIZATIONS)
def test_a_bad_quantization(name):
    args, error, parts = BAD_QUANTIZATIONS[name]
    with pytest.raises(error, match=in_order("Quantization", parts)):
        Quantization(*args)


@pytest.mark.parametrize("name", BAD_CALLS)
@kinds
def test_a_bad_call_is_found_while_tracing(kind, name):
    keywords, error, parts = BAD_CALLS[name]
    with pytest.raises(error, match=in_order(f"{kind}_norm_quantized", parts)):
        jax.eval_shape(lambda x: QUANTIZED[kind](x, **{"quantization": TOKEN} | keywords), X)


@pytest.mark.parametrize("name", ["x", "scale", "bias", "residual", "smooth_scale"])
@kinds
def test_float64(kind, name):
    with jax.enable_x64(True):
        wide = jnp.ones(8 if name in ("scale", "bias", "smooth_scale") else (3, 8), "float64")
        operands = {"x": jnp.ones((3, 8), "float32")} | {name: wide}
        with pytest.raises(TypeError, match=f"^{kind}_norm_quantized: {name} is float64.*float32.*{name}.astype"):
            QUANTIZED[kind](**operands, quantization=TOKEN)


@kinds
def test_a_traced_flag(kind):
    with pytest.raises(TypeError, match="straight_through must be known while tracing"):
        jax.jit(lambda flag: QUANTIZED[kind](X, quantization=TOKEN, straight_through=flag).values)(True)


def test_a_keyword_that_the_unquantised_norms_have():
    with pytest.raises(TypeError, match="multiply_before_cast"):
        QUANTIZED["rms"](X, quantization=TOKEN, multiply_before_cast=True)


# Calls that have no kernel anywhere: native by name is an error, by default the formula runs.
WITHOUT_KERNEL = {
    "a leading axis": ((X,), {"axis": 0}, "trailing"),
    "half types mixed": ((X.astype("float16"),), {"residual": X.astype("bfloat16")}, "float16.*bfloat16"),
    "rows of no elements": ((jnp.ones((3, 0)),), {}, "length 0"),
}


@pytest.mark.parametrize("name", WITHOUT_KERNEL)
@kinds
def test_native_by_name_where_there_is_no_kernel(kind, name):
    args, keywords, reason = WITHOUT_KERNEL[name]
    with pytest.raises(RuntimeError, match=rf"(?s)^{kind}_norm_quantized: .*native.*{reason}.*implementation=None"):
        QUANTIZED[kind](*args, quantization=TOKEN, implementation="native", **keywords)


@pytest.mark.parametrize("name", WITHOUT_KERNEL)
@kinds
def test_by_default_the_formula_where_there_is_no_kernel(kind, name):
    args, keywords, _ = WITHOUT_KERNEL[name]

    def loss(x):
        result = QUANTIZED[kind](x, quantization=TOKEN, straight_through=True, **keywords)
        return jax.tree.leaves(result)[2].astype("float32").sum()

    assert jax.grad(loss)(*args).shape == args[0].shape
