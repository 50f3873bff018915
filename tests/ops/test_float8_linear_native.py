"""The products of `float8_linear` that kernels make: all three of a step, and why not, in programs for a GPU."""

import re

import jax
import jax.numpy as jnp
import pytest
from deviceless import compiled, types
from hlo import count_native_calls
from internals import compat, cublaslt, ffi

from jaxnorm import Float8Recipe, float8_linear

TOKENS, DEPTH, OUTPUTS = 8192, 4096, 4096


# Programs are lowered as for a GPU of compute capability 9.0, whether there is one or not, and do not run.
@pytest.fixture
def on_hopper(monkeypatch):
    monkeypatch.setattr(ffi, "capabilities", lambda: {"9.0"})
    for module, why in ((cublaslt, "why_not"), (ffi, "why_unfit")):
        monkeypatch.setattr(module, why, lambda *_: None)


def both_ways(recipe):
    def function(x, kernel, dy):
        y, pull_back = jax.vjp(lambda *args: float8_linear(*args, recipe=recipe), x, kernel)
        return y, pull_back(dy)

    return function


def lowered(function, rows=(2, TOKENS // 2)):
    shapes = (*rows, DEPTH), (DEPTH, OUTPUTS), (*rows, OUTPUTS)
    types = [jax.ShapeDtypeStruct(dims, dtype) for dims, dtype in zip(shapes, DTYPES, strict=True)]
    return jax.jit(function).trace(*types).lower(lowering_platforms=("cuda",)).as_text()


DTYPES = (jnp.bfloat16, jnp.float32, jnp.bfloat16)
# How many products of a step are kernels', and XLA's.
PRODUCTS = {
    "default": (Float8Recipe(), 3, 0),
    "inputs": (Float8Recipe(save="inputs"), 3, 0),
    "wide weight gradient": (Float8Recipe(weight_gradient="compute"), 2, 1),
    "tensor": (Float8Recipe("tensor"), 0, 3),
}


@pytest.mark.plans
@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("name", PRODUCTS)
def test_the_products_of_a_step(name):
    recipe, of_kernels, of_xla = PRODUCTS[name]
    text = lowered(both_ways(recipe))
    assert count_native_calls(text).get("jaxnorm_quantized_dot", 0) == of_kernels
    assert text.count("stablehlo.dot_general") == of_xla


@pytest.mark.deviceless
@pytest.mark.usefixtures("on_hopper")
def test_a_compiled_step_has_three_products_and_no_wide_one():
    shapes = (TOKENS, DEPTH), (DEPTH, OUTPUTS), (TOKENS, OUTPUTS)
    arrays = [types(jax.ShapeDtypeStruct(dims, dtype)) for dims, dtype in zip(shapes, DTYPES, strict=True)]
    program = compiled(both_ways(Float8Recipe()), *arrays)
    assert count_native_calls(program.as_text()) == {"jaxnorm_quantized_dot": 3}
    assert not re.search(r"__cublas|__triton_gemm| dot\(", program.as_text())


# Tokens that are no multiple of 16 are summed in dw alone.
@pytest.mark.plans
@pytest.mark.usefixtures("on_hopper")
def test_a_number_of_tokens_that_no_kernel_takes():
    text = lowered(both_ways(Float8Recipe()), rows=(TOKENS + 8,))
    assert count_native_calls(text) == {"jaxnorm_quantized_dot": 2}
    assert text.count("stablehlo.dot_general") == 1


@pytest.mark.plans
@pytest.mark.usefixtures("on_hopper")
def test_a_gradient_that_must_be_native():
    def gradient(x, kernel, _):
        layer = lambda *args: float8_linear(*args, implementation="native").astype(jnp.float32)  # noqa: E731
        return jax.grad(lambda *args: layer(*args).sum(), (0, 1))(x, kernel)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compat, "default_platform", lambda: "cuda")
        assert count_native_calls(lowered(gradient)) == {"jaxnorm_quantized_dot": 3}
        with pytest.raises(RuntimeError, match="float8_linear: implementation='native' cannot be compiled for cuda"):
            lowered(gradient, rows=(TOKENS + 8,))
