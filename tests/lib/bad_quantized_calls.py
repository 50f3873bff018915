"""Bad input of quantised norms."""

import jax.numpy as jnp
import numpy as np

from jaxnorm import Quantization

# Arguments of Quantization, the exception, and what the message must hold in this order.
QUANTIZATION = {
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

ROWS = jnp.ones((3, 4, 192))
TOKEN, TENSOR, GROUP = (Quantization("int8", granularity) for granularity in ("token", "tensor", "group"))
QUANTIZED = {
    "no quantization": ((ROWS,), {"quantization": None}, TypeError, ("quantization", "Quantization", "None")),
    "a dtype for a quantization": (
        (ROWS,),
        {"quantization": "int8"},
        TypeError,
        ("quantization", "Quantization", "'int8'"),
    ),
    "groups that do not divide": (
        (ROWS,),
        {"quantization": GROUP},
        ValueError,
        ("group_size 128", "divide", r"\(3, 4, 192\)"),
    ),
    "groups of several axes": (
        (ROWS,),
        {"quantization": GROUP, "axis": (-2, -1)},
        ValueError,
        ("granularity='group'", "axis=-1", r"\(-2, -1\)", "reshape"),
    ),
    "groups of another axis": (
        (ROWS,),
        {"quantization": GROUP, "axis": 0},
        ValueError,
        ("granularity='group'", r"\(-3,\)"),
    ),
    "no static scale": ((ROWS,), {"quantization": TENSOR}, ValueError, ("'tensor'", "static_scale", "None")),
    "a static scale of tokens": ((ROWS,), {"static_scale": 1.0}, ValueError, ("static_scale", "'token'", "leave")),
    "a static scale of groups": (
        (ROWS,),
        {"quantization": Quantization("int8", "group", 64), "static_scale": 1.0},
        ValueError,
        ("static_scale", "'group'", "leave"),
    ),
    "a static scale of a row": (
        (ROWS,),
        {"quantization": TENSOR, "static_scale": jnp.ones(192)},
        ValueError,
        ("static_scale", "scalar", r"\(192,\)", "'token'"),
    ),
    "a static scale of integers": (
        (ROWS,),
        {"quantization": TENSOR, "static_scale": jnp.int32(1)},
        TypeError,
        ("static_scale", "floating", "int32"),
    ),
    "a static scale of zero": (
        (ROWS,),
        {"quantization": TENSOR, "static_scale": 0},
        ValueError,
        ("static_scale", "at least"),
    ),
    "a static scale that float32 flushes": (
        (ROWS,),
        {"quantization": TENSOR, "static_scale": 1e-45},
        ValueError,
        ("static_scale", "at least", "1e-45"),
    ),
    "a static scale of NaN": (
        (ROWS,),
        {"quantization": TENSOR, "static_scale": float("nan")},
        ValueError,
        ("static_scale", "finite", "nan"),
    ),
    "a static scale of text": (
        (ROWS,),
        {"quantization": TENSOR, "static_scale": "1"},
        TypeError,
        ("static_scale", "number", "'1'"),
    ),
    "smooth factors of another shape": (
        (ROWS,),
        {"smooth_scale": jnp.ones(191)},
        ValueError,
        ("smooth_scale", r"\(191,\)", r"\(192,\)"),
    ),
    "smooth factors of integers": (
        (ROWS,),
        {"smooth_scale": jnp.ones(192, "int8")},
        TypeError,
        ("smooth_scale", "floating"),
    ),
    "a residual of another shape": (
        (ROWS,),
        {"residual": ROWS[0]},
        ValueError,
        ("residual", r"\(4, 192\)", r"\(3, 4, 192\)"),
    ),
    "a residual of integers": (
        (ROWS,),
        {"residual": ROWS.astype("int32")},
        TypeError,
        ("residual", "floating", "int32"),
    ),
    "an unknown implementation": (
        (ROWS,),
        {"implementation": "cuda"},
        ValueError,
        ("implementation", "cuda", "native"),
    ),
    "a negative epsilon": ((ROWS,), {"epsilon": -1e-6}, ValueError, ("epsilon", "negative")),
}

# Arguments, the reason that an error gives where native is asked for by name; by default the formula runs.
X = jnp.ones((3, 4, 8))
QUANTIZED_WITHOUT_KERNEL = {
    "a leading axis": ((X,), {"axis": 0}, "trailing"),
    "half types mixed": ((X.astype("float16"),), {"residual": X.astype("bfloat16")}, "float16.*bfloat16"),
    "rows of no elements": ((jnp.ones((3, 0)),), {}, "length 0"),
    "scale for each head": ((X, jnp.ones((4, 8))), {}, "quantises.*leading axes"),
}
