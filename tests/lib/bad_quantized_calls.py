"""Bad input of quantised norms."""

import jax.numpy as jnp
import numpy as np
from statements import call

from jaxnorm import Quantization

# Arguments of Quantization.
QUANTIZATION = {
    "no dtype": call(None).raises(TypeError, "dtype", "None", "float8_e4m3fn, float8_e5m2, int8"),
    "an unknown dtype": call("float99").raises(TypeError, "dtype", "float99", "expected float8_e4m3fn"),
    "a dtype of 16 bits": call(jnp.bfloat16).raises(TypeError, "bfloat16", "expected float8_e4m3fn"),
    "another float8": call("float8_e4m3b11fnuz").raises(TypeError, "float8_e4m3b11fnuz", "expected"),
    "an unsigned dtype": call("uint8").raises(TypeError, "uint8", "expected"),
    "an unknown granularity": call("int8", "channel").raises(
        ValueError, "granularity", "'channel'", "'token'", "'group'"
    ),
    "no granularity": call("int8", None).raises(ValueError, "granularity", "None"),
    "an unknown group size": call("int8", "group", 16).raises(ValueError, "group_size", "32 or 64 or 128", "16"),
    "a group size of a float": call("int8", "group", 64.5).raises(ValueError, "group_size", "64.5"),
    "a group size of a bool": call("int8", "group", True).raises(ValueError, "group_size", "True"),
    "a group size without groups": call("int8", "token", 64).raises(ValueError, "group_size=64", "'group'", "'token'"),
    "powers of two of int8": call("int8", "token", None, True).raises(
        ValueError, "power_of_two", "floats", "int8", "leave"
    ),
    "powers of two of a given scale": call("float8_e5m2", "tensor", None, True).raises(
        ValueError, "power_of_two", "'tensor'", "leave"
    ),
    "a bound of a given scale": call("int8", "tensor", None, False, 1.0).raises(
        ValueError, "max_scale", "'tensor'", "leave"
    ),
    "a bound of zero": call("int8", "token", None, False, 0.0).raises(ValueError, "max_scale", r"2\*\*-126", "0.0"),
    "a negative bound": call("int8", "token", None, False, -1).raises(ValueError, "max_scale", r"2\*\*-126", "-1"),
    "a subnormal bound": call("int8", "token", None, False, 1e-39).raises(ValueError, "max_scale", r"2\*\*-126"),
    "an infinite bound": call("int8", "token", None, False, np.inf).raises(ValueError, "max_scale", "finite", "inf"),
    "a NaN bound": call("int8", "token", None, False, np.nan).raises(ValueError, "max_scale", "finite", "nan"),
    "exponents of a token's scales": call("float8_e4m3fn", scales_dtype="float8_e8m0fnu").raises(
        ValueError, "scales_dtype=float8_e8m0fnu", "groups", "'token'", "'group'"
    ),
    "exponents of int8": call("int8", "group", scales_dtype="float8_e8m0fnu").raises(
        ValueError, "scales_dtype", "floats", "int8", "leave"
    ),
    "exponents under another bound": call(
        "float8_e4m3fn", "group", max_scale=3.0, scales_dtype="float8_e8m0fnu"
    ).raises(ValueError, "max_scale", "power of two", "3.0"),
    "scales of half a float": call("float8_e4m3fn", "group", scales_dtype="float16").raises(
        TypeError, "scales_dtype", "float16", "float32, float8_e8m0fnu"
    ),
    "no dtype of scales": call("int8", scales_dtype="fp4").raises(TypeError, "scales_dtype", "'fp4'", "float32"),
    "an unknown layout": call("int8", "group", scales_layout="F").raises(
        ValueError, "scales_layout", "'F'", "'row'", "'column'"
    ),
    "columns of a token's scales": call("int8", scales_layout="column").raises(
        ValueError, "scales_layout=column", "groups", "'token'", "'group'"
    ),
    "a bound of text": call("int8", "token", None, False, "1").raises(TypeError, "max_scale", "number", "'1'"),
}

ROWS = jnp.ones((3, 4, 192))
TOKEN, TENSOR, GROUP = (Quantization("int8", granularity) for granularity in ("token", "tensor", "group"))
QUANTIZED = {
    "groups that do not divide": call(ROWS, quantization=GROUP).raises(
        ValueError, "group_size 128", "divide", r"\(3, 4, 192\)"
    ),
    "groups of several axes": call(ROWS, quantization=GROUP, axis=(-2, -1)).raises(
        ValueError, "granularity='group'", "axis=-1", r"\(-2, -1\)", "reshape"
    ),
    "groups of another axis": call(ROWS, quantization=GROUP, axis=0).raises(
        ValueError, "granularity='group'", r"\(-3,\)"
    ),
    "no static scale": call(ROWS, quantization=TENSOR).raises(ValueError, "'tensor'", "static_scale", "None"),
    "a static scale of tokens": call(ROWS, static_scale=1.0).raises(ValueError, "static_scale", "'token'", "leave"),
    "a static scale of groups": call(ROWS, quantization=Quantization("int8", "group", 64), static_scale=1.0).raises(
        ValueError, "static_scale", "'group'", "leave"
    ),
    "a static scale of a row": call(ROWS, quantization=TENSOR, static_scale=jnp.ones(192)).raises(
        ValueError, "static_scale", "scalar", r"\(192,\)", "'token'"
    ),
    "a static scale of integers": call(ROWS, quantization=TENSOR, static_scale=jnp.int32(1)).raises(
        TypeError, "static_scale", "floating", "int32"
    ),
    "a static scale of zero": call(ROWS, quantization=TENSOR, static_scale=0).raises(
        ValueError, "static_scale", "at least"
    ),
    "a static scale that float32 flushes": call(ROWS, quantization=TENSOR, static_scale=1e-45).raises(
        ValueError, "static_scale", "at least", "1e-45"
    ),
    "a static scale of NaN": call(ROWS, quantization=TENSOR, static_scale=float("nan")).raises(
        ValueError, "static_scale", "finite", "nan"
    ),
    "a static scale of text": call(ROWS, quantization=TENSOR, static_scale="1").raises(
        TypeError, "static_scale", "number", "'1'"
    ),
    "smooth factors of another shape": call(ROWS, smooth_scale=jnp.ones(191)).raises(
        ValueError, "smooth_scale", r"\(191,\)", r"\(192,\)"
    ),
    "a residual of another shape": call(ROWS, residual=ROWS[0]).raises(
        ValueError, "residual", r"\(4, 192\)", r"\(3, 4, 192\)"
    ),
}

X = jnp.ones((3, 4, 8))
QUANTIZED_WITHOUT_KERNEL = {
    "a leading axis": call(X, axis=0).has_no_kernel("trailing"),
    "half types mixed": call(X.astype("float16"), residual=X.astype("bfloat16")).has_no_kernel("float16.*bfloat16"),
    "rows of no elements": call(jnp.ones((3, 0))).has_no_kernel("length 0"),
    "scale for each head": call(X, jnp.ones((4, 8))).has_no_kernel("quantises.*leading axes"),
}
