"""Law 6: one kernel each way, and next to nothing kept in between."""

import re

import jax
import jax.numpy as jnp
import pytest
from cases import DTYPES, KINDS, NORMS, draw_bias, draw_scale, draw_x, operands
from hlo import compiled_text, count_native_calls
from native import is_platform_with_kernels, native_calls, target
from transformations import loss_of

ROWS, COLS = 12, 80
STATISTICS = {"rms": 1, "layer": 2}

kinds = pytest.mark.parametrize("kind", KINDS)


def lowered_calls(function, name, *args) -> list[str]:
    """The text of each call of one target, attributes and result types included."""
    return [line for line in jax.jit(function).lower(*args).as_text().splitlines() if f"@{name}(" in line]


def wanted(call: str) -> dict[str, bool]:
    return {name: value == "true" for name, value in re.findall(r"with_(\w+) = (true|false)", call)}


@pytest.mark.parametrize("dtype", DTYPES)
@kinds
def test_a_gradient_is_one_call_each_way(kind, dtype):
    gradient = jax.grad(loss_of(NORMS[kind]), (0, 1, 2))
    calls = count_native_calls(compiled_text(gradient, *operands((ROWS, COLS), dtype)))
    assert calls == native_calls(kind, fwd=1, bwd=1)


@kinds
def test_every_norm_of_a_model_is_one_call_each_way(kind):
    def model(x, scale, bias):
        for layer in range(3):
            x = x + jnp.tanh(NORMS[kind](x, scale * (layer + 1), bias))
        return x.sum()

    calls = count_native_calls(compiled_text(jax.grad(model, (0, 1, 2)), *operands((ROWS, COLS))))
    assert calls == native_calls(kind, fwd=3, bwd=3)


# Which operands are differentiated, and what the backward call then computes.
@pytest.mark.parametrize(
    ("argnums", "expected"),
    [
        ((0,), {"dx": True, "dscale": False, "dbias": False}),
        ((1,), {"dx": False, "dscale": True, "dbias": False}),
        ((2,), {"dx": False, "dscale": False, "dbias": True}),
        ((0, 1), {"dx": True, "dscale": True, "dbias": False}),
        ((0, 1, 2), {"dx": True, "dscale": True, "dbias": True}),
    ],
)
@kinds
def test_the_backward_computes_what_is_asked_for(kind, argnums, expected):
    gradient = jax.grad(loss_of(NORMS[kind]), argnums)
    calls = lowered_calls(gradient, target(kind, "bwd"), *operands((ROWS, COLS)))
    assert [wanted(call) for call in calls] == [expected] * is_platform_with_kernels()


@kinds
def test_inference_writes_no_statistics(kind):
    calls = lowered_calls(NORMS[kind], target(kind, "fwd"), *operands((ROWS, COLS)))
    results = [call.rpartition("->")[2].strip() for call in calls]
    assert results == [f"tensor<{ROWS}x{COLS}xf32>"] * is_platform_with_kernels()


@pytest.mark.parametrize("dtype", DTYPES)
@kinds
def test_between_forward_and_backward_only_x_the_weights_and_statistics_live(kind, dtype):
    args = draw_x((ROWS, COLS), dtype), draw_scale((COLS,), dtype), draw_bias((COLS,), dtype)
    pullback = jax.eval_shape(lambda *args: jax.vjp(NORMS[kind], *args)[1], *args)
    kept = sorted((leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(pullback) if leaf.size > 1)
    statistics = [((ROWS, 1), "float32")] * STATISTICS[kind]
    assert kept == sorted([((ROWS, COLS), dtype), ((COLS,), dtype), *statistics])


@kinds
def test_a_gradient_of_the_bias_alone_needs_no_x(kind):
    x, scale, bias = operands((ROWS, COLS))
    gradient = jax.grad(lambda bias: NORMS[kind](x, scale, bias).sum())
    assert gradient(bias).tolist() == [ROWS] * COLS
