"""How `quantized_dot` and `float8_linear` are called: recipes, the place of `lax.dot_general`, errors, explanations."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import draw
from flax import linen, nnx
from op import call, named
from quantizing import to

import jaxnorm
from jaxnorm import Float8Recipe, float8_dot_general, float8_linear, quantize, quantize_kernel, quantized_dot
from ops.products import E4M3, by_formula

X, KERNEL, BIAS = draw("x", (2, 3, 64)), draw("kernel", (64, 48)), draw("bias", (48,))
Q8, TO_INT8 = by_formula(X, E4M3), to("int8")
W, KERNEL_8, AXES_OF_DOT = KERNEL.T, quantize_kernel(KERNEL, TO_INT8), (((2,), (0,)), ((), ()))
NATIVE = {"implementation": "native"}
# Each error begins with the function's name; they are raised in laws/test_errors.py.
BAD_CALLS = {
    "float8_dot_general": named(
        call(X, draw("k", (2, 64, 48)), (((2,), (1,)), ((0,), (0,)))).raises(ValueError, "batch axes", "jax.vmap"),
        call(X, KERNEL, (((2,), (1,)), ((), ()))).raises(ValueError, r"axes \(2,\) and \(1,\) are summed"),
        call(X.astype("int8"), KERNEL, AXES_OF_DOT).raises(TypeError, "x must have a floating-point dtype"),
        call(Q8, KERNEL, AXES_OF_DOT).raises(TypeError, "use jaxnorm.float8_linear"),
    ),
    "Float8Recipe": named(
        call(weight_gradient="bfloat16").raises(ValueError, "unknown weight_gradient 'bfloat16'"),
        call(save=None).raises(ValueError, "unknown save None; expected 'quantized' or 'inputs'"),
        call(power_of_two=1).raises(TypeError, "power_of_two must be a bool"),
        call(fast_accumulation="y").raises(TypeError, "fast_accumulation must be a tuple of names, got 'y'"),
        call(fast_accumulation=True).raises(TypeError, "fast_accumulation must be a tuple of names, got True"),
        call(fast_accumulation=("z",)).raises(ValueError, "no product 'z'; expected some of 'y', 'dx', 'dw'"),
    ),
}


def test_a_group_of_a_whole_row():
    assert quantized_dot(X, quantize_kernel(KERNEL, to("int8", "groups of 64"))).shape == (2, 3, 48)


@pytest.mark.parametrize("argument", ["x", "kernel", "bias", "out_dtype"])
def test_float64_is_refused(argument):
    with jax.enable_x64(True):
        given = {"x": X, "kernel": KERNEL, "bias": BIAS, "out_dtype": None}
        given[argument] = "float64" if argument == "out_dtype" else given[argument].astype("float64")
        with pytest.raises(TypeError, match=f"^float8_linear: {argument} is float64, expected 16 or 32 bits"):
            float8_linear(**given)


def test_a_recipe_is_its_values():
    recipe = Float8Recipe("compute", fast_accumulation=("dx", "y", "y"))
    assert recipe == Float8Recipe("compute", fast_accumulation=("y", "dx"))
    assert recipe != Float8Recipe("compute")
    assert hash(recipe) == hash(dataclasses.replace(recipe))
    assert jax.tree.leaves((recipe, recipe.dot_general)) == []
    assert recipe.dot_general == dataclasses.replace(recipe).dot_general
    assert Float8Recipe().dot_general == float8_dot_general
    assert hash(Float8Recipe().dot_general) == hash(float8_dot_general)


def test_a_recipe_by_torchaos_name():
    assert Float8Recipe.named("rowwise") == Float8Recipe(power_of_two=True)
    assert Float8Recipe.named("rowwise_with_gw_hp") == Float8Recipe(weight_gradient="compute")
    with pytest.raises(ValueError, match=r"^Float8Recipe.named: unknown recipe 'tensorwise'; expected 'rowwise'"):
        Float8Recipe.named("tensorwise")


def test_the_dtype_of_the_result():
    assert float8_linear(X.astype("bfloat16"), KERNEL).dtype == jnp.bfloat16
    assert float8_linear(X, KERNEL.astype("bfloat16")).dtype == jnp.float32
    assert float8_linear(X.astype("float16"), KERNEL, out_dtype="float32").dtype == jnp.float32
    assert float8_linear(quantize(X, to("float8_e4m3fn")), KERNEL).dtype == jnp.bfloat16


# By the axes of both that are summed.
CONTRACTIONS = {
    "a matrix": ((2, 3, 64), (64, 48), ((2,), (0,))),
    "several outputs": ((2, 3, 64), (64, 4, 12), ((2,), (0,))),
    "several inputs": ((2, 3, 4, 16), (4, 16, 48), ((2, 3), (0, 1))),
    "in another order": ((2, 3, 4, 16), (4, 16, 48), ((3, 2), (1, 0))),
    "a transposed kernel": ((2, 3, 64), (48, 64), ((2,), (1,))),
    "inputs in front": ((64, 3), (64, 48), ((0,), (0,))),
    "one output": ((3, 64), (64,), ((1,), (0,))),
    "one row": ((64,), (64, 48), ((0,), (0,))),
}


@pytest.mark.parametrize("name", CONTRACTIONS)
def test_a_product_as_of_dot_general(name):
    x_dims, kernel_dims, contracted = CONTRACTIONS[name]
    x, kernel = draw("x", x_dims), draw("kernel", kernel_dims)
    given = contracted, ((), ())
    y, pull_back = jax.vjp(lambda *args: float8_dot_general(*args, given), x, kernel)
    exact, pull_back_exact = jax.vjp(lambda *args: jax.lax.dot_general(*args, given), x, kernel)
    dy = draw("dy", y.shape)
    for actual, e in zip((y, *pull_back(dy)), (exact, *pull_back_exact(dy)), strict=True):
        assert actual.shape == e.shape
        assert np.linalg.norm(actual - e) <= 0.06 * np.linalg.norm(e)
    # It is the product of what is rounded: of a plain one this would be of one rounding.
    assert np.linalg.norm(y - exact) >= 1e-3 * np.linalg.norm(exact)


def test_the_dtype_of_a_product_as_of_dot_general():
    y = float8_dot_general(X, KERNEL, AXES_OF_DOT, preferred_element_type=jnp.bfloat16)
    np.testing.assert_array_equal(y, float8_linear(X, KERNEL, out_dtype="bfloat16"))


@pytest.mark.parametrize("precision", ["highest", jax.lax.Precision.HIGHEST, (jax.lax.Precision.HIGHEST,) * 2], ids=str)
def test_a_precision_of_all_digits(precision):
    with jax.default_matmul_precision("highest"):
        expected = str(jax.make_jaxpr(float8_linear)(X, KERNEL))
    assert str(jax.make_jaxpr(lambda *args: float8_dot_general(*args, AXES_OF_DOT, precision))(X, KERNEL)) == expected


OF_LAYERS = {"use_bias": False, "dot_general": float8_dot_general}
BY_AXES = {"params": {"kernel": KERNEL.reshape(64, 4, 12)}}
PLACES = {
    "a call": lambda: float8_dot_general(X, KERNEL, AXES_OF_DOT),
    "einsum": lambda: jnp.einsum("abk,kn->abn", X, KERNEL, _dot_general=float8_dot_general),
    "nnx": lambda: nnx.Linear(64, 48, kernel_init=lambda *_: KERNEL, rngs=nnx.Rngs(0), **OF_LAYERS)(X),
    "linen": lambda: linen.Dense(48, **OF_LAYERS).apply({"params": {"kernel": KERNEL}}, X),
    "several axes": lambda: linen.DenseGeneral((4, 12), **OF_LAYERS).apply(BY_AXES, X).reshape(2, 3, 48),
}


@pytest.mark.parametrize("name", PLACES)
def test_where_a_library_takes_dot_general(name):
    np.testing.assert_array_equal(PLACES[name](), float8_linear(X, KERNEL))


def explained(function, *args):
    """Why XLA makes the products of each call on a GPU, whether there is one or not."""
    return [call.on("cuda").why or "" for call in jaxnorm.explain(function, *args)]


def loss(x, kernel, bias=None, **options):
    return float8_linear(x, kernel, bias=bias, **options).astype("float32").sum()


def test_an_explanation_on_a_cpu_names_the_platform():
    calls = jaxnorm.explain(jax.grad(loss, (0, 1)), X, KERNEL)
    assert [call.on("cpu").why for call in calls] == ["there is a kernel for cuda, none for cpu"] * 2


# The contraction of dw goes over the tokens, 6 here.
def test_an_explanation_names_lengths_that_no_kernel_takes():
    forward, backward = explained(jax.grad(loss, (0, 1)), X, jnp.ones((64, 50)))
    (*_, only_dw) = explained(jax.grad(lambda kernel: loss(X, kernel)), jnp.ones((64, 50)))
    for why, dims in ((forward, "(50, 64)"), (backward, "(64, 50)"), (only_dw, "(50, 16)")):
        assert f"{dims}, and cuBLASLt wants multiples of 16" in why


@pytest.mark.parametrize(("bias", "result"), [("float32", "bfloat16"), ("float16", "bfloat16"), ("float32", "float32")])
def test_an_explanation_names_a_bias_that_cublaslt_does_not_add(bias, result):
    gradient = jax.grad(partial(loss, out_dtype=result), (0, 1))
    x, kernel = jnp.ones((32, 64), "bfloat16"), jnp.ones((64, 48))
    forward, backward = explained(gradient, x, kernel, jnp.ones(48, bias))
    assert f"bias is {bias} and the result {result}, and cuBLASLt wants both of the same 16 bits" in forward
    assert "bias" not in backward
    assert ("bias" in explained(gradient, x, kernel, jnp.ones(48, "bfloat16"))[0]) == (result == "float32")
