"""Bad input of each op: arguments, keywords, the exception, and what its message must hold in this order."""

import jax
import jax.numpy as jnp
import numpy as np

X, SCALE = jnp.ones((3, 4, 8)), jnp.ones(8)


class Integers:
    """No array, but jax.numpy makes one of it."""

    def __jax_array__(self):
        return jnp.ones(8, "int32")


NORM = {
    "x of integers": ((jnp.ones((3, 8), "int32"),), {}, TypeError, ("x", "floating", "int32", "astype")),
    "x of booleans": ((jnp.ones((3, 8), "bool"),), {}, TypeError, ("x", "floating", "bool")),
    "complex x": ((jnp.ones((3, 8), "complex64"),), {}, TypeError, ("x", "floating", "complex64")),
    "x of 8 bits": ((X.astype("float8_e4m3fn"),), {}, TypeError, ("x", "floating", "float8_e4m3fn", "astype")),
    "x of text": (("rows",), {}, TypeError, ("x", "array", "str")),
    "x of lists": (([1.0, 2.0],), {}, TypeError, ("x", "array", "list", "asarray")),
    "no x": ((None,), {}, TypeError, ("x", "array", "NoneType")),
    "scalar x": ((jnp.ones(()),), {}, ValueError, ("x", "at least one axis")),
    "short scale": ((X, jnp.ones(7)), {}, ValueError, ("scale", r"\(7,\)", r"expected \(8,\)", r"\(3, 4, 8\)")),
    "scalar scale": ((X, jnp.ones(())), {}, ValueError, ("scale", r"\(\)", r"\(8,\)")),
    "scale of length 1": ((X, jnp.ones(1)), {}, ValueError, ("scale", r"\(1,\)", r"\(8,\)")),
    "scale of a column": ((X, jnp.ones((8, 1))), {}, ValueError, ("scale", r"\(8, 1\)", r"\(8,\)")),
    "scale for other heads": ((X, jnp.ones((3, 8))), {}, ValueError, ("scale", r"\(3, 8\)", r"\(8,\)", r"\(3, 4\)")),
    "scale with more axes than x": (
        (X, jnp.ones((1, 1, 1, 8))),
        {},
        ValueError,
        ("scale", r"\(1, 1, 1, 8\)", r"\(8,\)"),
    ),
    "scale for the heads of another axis": (
        (X, jnp.ones((4, 3))),
        {"axis": 0},
        ValueError,
        ("scale", r"\(4, 3\)", r"expected \(3,\)", "Reshape"),
    ),
    "bias for other heads": ((X, SCALE, jnp.ones((2, 1, 8))), {}, ValueError, ("bias", r"\(2, 1, 8\)", r"\(3, 4\)")),
    "scale of integers": ((X, jnp.ones(8, "int8")), {}, TypeError, ("scale", "floating", "int8")),
    "complex scale": ((X, jnp.ones(8, "complex64")), {}, TypeError, ("scale", "floating", "complex64")),
    "scale of lists": ((X, [1.0] * 8), {}, TypeError, ("scale", "array", "list")),
    "scale of what becomes integers": ((X, Integers()), {}, TypeError, ("scale", "floating", "int32")),
    "epsilon without its name": ((X, SCALE, 1e-6), {}, TypeError, ("bias", "array", "float", "epsilon")),
    "scale for two axes": ((X, SCALE), {"axis": (-2, -1)}, ValueError, ("scale", r"\(8,\)", r"\(4, 8\)")),
    "long bias": ((X, SCALE, jnp.ones(9)), {}, ValueError, ("bias", r"\(9,\)", r"\(8,\)")),
    "bias of integers": ((X, SCALE, jnp.ones(8, "int32")), {}, TypeError, ("bias", "floating", "int32")),
    "axis above": ((X,), {"axis": 3}, ValueError, ("axis", "3", "out of range", "-3 <= axis < 3")),
    "axis below": ((X,), {"axis": -4}, ValueError, ("axis", "-4", "out of range")),
    "axis repeated": ((X,), {"axis": (-1, -1)}, ValueError, ("axis", r"\(-1, -1\)", "twice")),
    "axis repeated by another name": ((X,), {"axis": (2, -1)}, ValueError, ("axis", r"\(2, -1\)", "twice")),
    "no axis": ((X,), {"axis": ()}, ValueError, ("axis", "empty", "at least one")),
    "axis of a float": ((X,), {"axis": 1.5}, TypeError, ("axis", "int", "1.5")),
    "axis of a bool": ((X,), {"axis": True}, TypeError, ("axis", "int", "True")),
    "axis of None": ((X,), {"axis": None}, TypeError, ("axis", "int", "None")),
    "axis of text": ((X,), {"axis": "last"}, TypeError, ("axis", "int", "last")),
    "negative epsilon": ((X,), {"epsilon": -1e-6}, ValueError, ("epsilon", "negative", "-1e-06")),
    "epsilon of a huge int": ((X,), {"epsilon": 10**400}, ValueError, ("epsilon", "finite", "inf")),
    "NaN epsilon": ((X,), {"epsilon": float("nan")}, ValueError, ("epsilon", "finite", "nan")),
    "infinite epsilon": ((X,), {"epsilon": float("inf")}, ValueError, ("epsilon", "finite", "inf")),
    "epsilon of text": ((X,), {"epsilon": "small"}, TypeError, ("epsilon", "number", "small")),
    "epsilon of digits": ((X,), {"epsilon": "1e-6"}, TypeError, ("epsilon", "number", "1e-6")),
    "epsilon of a bool": ((X,), {"epsilon": True}, TypeError, ("epsilon", "number", "True")),
    "epsilon beyond float32": ((X,), {"epsilon": 1e39}, ValueError, ("epsilon", "finite", "1e\\+39")),
    "epsilon of None": ((X,), {"epsilon": None}, TypeError, ("epsilon", "number", "None")),
    "epsilon of an array": ((X,), {"epsilon": np.ones(2)}, TypeError, ("epsilon", "number")),
    "NaN offset": ((X, SCALE), {"scale_offset": float("nan")}, ValueError, ("scale_offset", "finite", "nan")),
    "offset of None": ((X, SCALE), {"scale_offset": None}, TypeError, ("scale_offset", "number", "None")),
    "order of None": ((X, SCALE), {"multiply_before_cast": None}, TypeError, ("multiply_before_cast", "bool", "None")),
    "order of text": ((X, SCALE), {"multiply_before_cast": "no"}, TypeError, ("multiply_before_cast", "bool", "'no'")),
    "axis_name of a list in a list": ((X,), {"axis_name": [["a"]]}, TypeError, ("axis_name", "name of an axis")),
    "unknown implementation": (
        (X,),
        {"implementation": "cuda"},
        ValueError,
        ("implementation", "cuda", "native", "jnp"),
    ),
    "implementation of a list": ((X,), {"implementation": ["jnp"]}, ValueError, ("implementation", "native")),
    "integer out_dtype": ((X,), {"out_dtype": "int8"}, TypeError, ("out_dtype", "floating", "int8")),
    "8-bit out_dtype": ((X,), {"out_dtype": "float8_e5m2"}, TypeError, ("out_dtype", "floating", "float8_e5m2")),
    "unknown out_dtype": ((X,), {"out_dtype": "float99"}, TypeError, ("out_dtype", "float99")),
    "float64 result without x64": ((X,), {"out_dtype": "float64"}, TypeError, ("out_dtype", "float64", "x64")),
}

# Of a norm of x + residual, beside these.
RESIDUAL = {
    "residual of another shape": (
        (X, X[:2]),
        {},
        ValueError,
        ("residual", r"\(2, 4, 8\)", r"\(3, 4, 8\)", "broadcast_to"),
    ),
    "residual that would broadcast": ((X, X[0]), {}, ValueError, ("residual", r"\(4, 8\)", r"\(3, 4, 8\)")),
    "residual of integers": ((X, X.astype("int32")), {}, TypeError, ("residual", "floating", "int32", "astype")),
    "residual of 8 bits": ((X, X.astype("float8_e4m3fn")), {}, TypeError, ("residual", "floating", "float8_e4m3fn")),
    "no residual": ((X, None), {}, TypeError, ("residual", "array", "NoneType")),
}
PADDING = {
    "padding to zero": ((X, X), {"pad_to": 0}, ValueError, ("pad_to", "positive", "0")),
    "padding to less": ((X, X), {"pad_to": -8}, ValueError, ("pad_to", "positive", "-8")),
    "padding to a float": ((X, X), {"pad_to": 8.0}, TypeError, ("pad_to", "int", "8.0")),
    "padding to a bool": ((X, X), {"pad_to": True}, TypeError, ("pad_to", "int", "True")),
    "padding to text": ((X, X), {"pad_to": "8"}, TypeError, ("pad_to", "int", "8")),
    "padding of several axes": (
        (X, X),
        {"pad_to": 8, "axis": (-2, -1)},
        ValueError,
        ("pad_to", "axis=-1", r"\(-2, -1\)", "leave pad_to out"),
    ),
    "padding of another axis": ((X, X), {"pad_to": 8, "axis": 0}, ValueError, ("pad_to", "axis=-1", r"\(-3,\)")),
}

FIRST = {"gate_first": True}
GATED = {
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


# What no kernel serves anywhere: arguments, keywords, and the reason that an error gives where native is asked for by
# name. By default it runs.
NORM_WITHOUT_KERNEL = {
    "a leading axis": ((X,), {"axis": 0}, "trailing"),
    "axes with a gap": ((X,), {"axis": (0, 2)}, "trailing"),
    "half types mixed": ((X.astype("float16"),), {"out_dtype": "bfloat16"}, "float16.*bfloat16"),
    "rows of no elements": ((jnp.ones((3, 0)),), {}, "length 0"),
    "heads that are not neighbours": ((jnp.ones((3, 4, 5, 8)), jnp.ones((3, 1, 5, 8))), {}, "not neighbours"),
    "scale and bias of heads that are not neighbours": (
        (jnp.ones((3, 4, 5, 8)), jnp.ones((3, 1, 1, 8)), jnp.ones((5, 8))),
        {},
        "not neighbours",
    ),
    "heads with long rows": ((jnp.ones((2, 8193)), jnp.ones((2, 8193))), {}, "8193 elements, more than 8192"),
    "no heads": ((jnp.ones((2, 0, 8)), jnp.ones((0, 8))), {}, "no element"),
}
HALF, BRAIN = X.astype("float16"), X.astype("bfloat16")
RESIDUAL_WITHOUT_KERNEL = {
    "half types mixed": (
        (HALF, BRAIN),
        {"out_dtype": "float16"},
        "x is float16 and residual bfloat16.*one of them float32",
    ),
    "half types mixed in sum and y": (
        (X, BRAIN),
        {"out_dtype": "float16"},
        "residual is bfloat16 and the result float16.*one of them float32",
    ),
}
LONG = jnp.ones((2, 16_385))
GATED_WITHOUT_KERNEL = {
    "long rows": ((LONG, LONG), FIRST, "rows of 16385 elements are normalised, .* at most 16384"),
    "a gate of another dtype": ((X, BRAIN), FIRST, "x is float32 and gate bfloat16; .* equal"),
    "a result of another dtype": (
        (BRAIN, BRAIN),
        FIRST | {"out_dtype": "float32"},
        "x is bfloat16 and the result float32",
    ),
}
