"""Residuals that cannot be added, and those that no kernel adds."""

import jax.numpy as jnp
import pytest
from cases import ADDS, KINDS

kinds = pytest.mark.parametrize("kind", KINDS)

X, HALF, BRAIN = jnp.ones((3, 4, 8)), jnp.ones((3, 8), "float16"), jnp.ones((3, 8), "bfloat16")
# The second operand, the exception and what the message must hold in this order.
BAD_RESIDUALS = {
    "of another shape": (X[:2], ValueError, ("residual", r"\(2, 4, 8\)", r"\(3, 4, 8\)", "broadcast_to")),
    "that would broadcast": (X[0], ValueError, ("residual", r"\(4, 8\)", r"\(3, 4, 8\)")),
    "of integers": (jnp.ones((3, 4, 8), "int32"), TypeError, ("residual", "floating", "int32", "astype")),
    "of 8 bits": (X.astype("float8_e4m3fn"), TypeError, ("residual", "floating", "float8_e4m3fn")),
    "of None": (None, TypeError, ("residual", "array", "NoneType")),
}


@pytest.mark.parametrize("name", BAD_RESIDUALS)
@kinds
def test_a_residual(kind, name):
    residual, error, parts = BAD_RESIDUALS[name]
    with pytest.raises(error, match=rf"(?s)^add_{kind}_norm: " + ".*".join(parts)):
        ADDS[kind](X, residual)


# x and the residual, the result's dtype, and the reason; by default the formula serves them.
WITHOUT_KERNEL = {
    "half types mixed": (HALF, BRAIN, "float16", "x is float16 and residual bfloat16"),
    "half types mixed in sum and y": (
        X,
        X.astype("bfloat16"),
        "float16",
        "residual is bfloat16 and the result float16",
    ),
}


@pytest.mark.parametrize("name", WITHOUT_KERNEL)
@kinds
def test_native_by_name_where_there_is_no_kernel(kind, name):
    x, residual, out_dtype, reason = WITHOUT_KERNEL[name]
    with pytest.raises(RuntimeError, match=rf"^add_{kind}_norm: .*{reason}.*one of them float32"):
        ADDS[kind](x, residual, out_dtype=out_dtype, implementation="native")


@pytest.mark.parametrize("name", WITHOUT_KERNEL)
@kinds
def test_by_default_the_formula_where_there_is_no_kernel(kind, name):
    x, residual, out_dtype, _ = WITHOUT_KERNEL[name]
    y, total = ADDS[kind](x, residual, out_dtype=out_dtype)
    assert (y.dtype, total.dtype) == (out_dtype, residual.dtype)
