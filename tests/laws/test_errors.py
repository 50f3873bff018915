"""Bad input: each a clear error while tracing, which names the argument, what came, what was expected."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import KINDS, NORMS

X = jnp.ones((3, 4, 8))
SCALE = jnp.ones(8)


class Integers:
    """No array, but jax.numpy makes one of it."""

    def __jax_array__(self):
        return jnp.ones(8, "int32")


# (arguments, keywords, exception, what the message must hold in this order)
BAD_CALLS = {
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


# NumPy arrays of which JAX makes no array at all.
@pytest.mark.parametrize("dtype", [np.longdouble, object])
@pytest.mark.parametrize("kind", KINDS)
def test_numpy_dtypes_that_jax_does_not_have(kind, dtype):
    with pytest.raises(TypeError, match=in_order(kind, ("x", "floating", np.dtype(dtype).name))):
        NORMS[kind](np.ones(8, dtype))


# Calls that have no kernel anywhere: native by name is an error, by default they run.
WITHOUT_KERNEL = {
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

kinds = pytest.mark.parametrize("kind", KINDS)


def in_order(op, parts) -> str:
    return rf"(?s)^{op}_norm: " + ".*".join(("", *parts))


@pytest.mark.parametrize("name", BAD_CALLS)
@kinds
def test_bad_input(kind, name):
    args, keywords, error, parts = BAD_CALLS[name]
    with pytest.raises(error, match=in_order(kind, parts)):
        NORMS[kind](*args, **keywords)


@pytest.mark.parametrize("name", [name for name, (args, *_) in BAD_CALLS.items() if hasattr(args[0], "dtype")])
@kinds
def test_bad_input_is_found_while_tracing(kind, name):
    args, keywords, error, parts = BAD_CALLS[name]
    with pytest.raises(error, match=in_order(kind, parts)):
        jax.eval_shape(lambda x: NORMS[kind](x, *args[1:], **keywords), args[0])


@pytest.mark.parametrize("argument", ["epsilon", "scale_offset"])
@kinds
def test_a_traced_number(kind, argument):
    with pytest.raises(TypeError, match=in_order(kind, (argument, "known while tracing", "static"))):
        jax.jit(lambda value: NORMS[kind](X, SCALE, **{argument: value}))(1e-6)


@kinds
def test_an_unknown_keyword(kind):
    with pytest.raises(TypeError, match="eps"):
        NORMS[kind](X, eps=1e-6)


@pytest.mark.parametrize("name", WITHOUT_KERNEL)
@kinds
def test_native_by_name_where_there_is_no_kernel(kind, name):
    args, keywords, reason = WITHOUT_KERNEL[name]
    with pytest.raises(RuntimeError, match=rf"(?s)^{kind}_norm: .*native.*{reason}.*implementation=None"):
        jax.eval_shape(lambda *args: NORMS[kind](*args, implementation="native", **keywords), *args)


@pytest.mark.parametrize("name", WITHOUT_KERNEL)
@kinds
def test_by_default_the_formula_where_there_is_no_kernel(kind, name):
    args, keywords, _ = WITHOUT_KERNEL[name]
    assert NORMS[kind](*args, **keywords).shape == args[0].shape


# What looks like bad input and is not.
@pytest.mark.parametrize("number", [1, np.float32(1), np.float64(1), jnp.float32(1)], ids=lambda n: type(n).__name__)
@kinds
def test_epsilon_of_any_number_type(kind, number):
    np.testing.assert_array_equal(NORMS[kind](X, epsilon=number), NORMS[kind](X, epsilon=1.0))


@pytest.mark.parametrize("axis", [2, (2,), [-1], np.int64(2)], ids=repr)
@kinds
def test_the_last_axis_by_any_name(kind, axis):
    np.testing.assert_array_equal(NORMS[kind](X, SCALE, axis=axis), NORMS[kind](X, SCALE))
