"""Law 6 of the gated norm: one kernel each way, and next to nothing kept in between."""

import jax
import jax.numpy as jnp
import pytest
from cases import DTYPES, bits
from gating import BWD, FWD, MAMBA, QWEN, draw_operands, gated, gated_calls
from hlo import compiled_text, count_native_calls
from native import is_platform_with_kernels
from test_residuals import lowered_calls, wanted

dtypes = pytest.mark.parametrize("dtype", DTYPES)
orders = pytest.mark.parametrize("variant", [MAMBA, QWEN], ids=str)


def loss(norm):
    return lambda *args: jnp.sin(norm(*args).astype(jnp.float32)).sum()


@pytest.mark.parametrize("group_size", [None, 20])
@dtypes
@orders
def test_a_gradient_is_one_call_each_way(variant, dtype, group_size):
    gradient = jax.grad(loss(gated(variant, group_size=group_size)), (0, 1, 2))
    assert count_native_calls(compiled_text(gradient, *draw_operands((12, 80), dtype))) == gated_calls(fwd=1, bwd=1)


@pytest.mark.parametrize(
    ("argnums", "expected"),
    [
        ((0,), {"dx": True, "dgate": False, "dscale": False}),
        ((1,), {"dx": False, "dgate": True, "dscale": False}),
        ((2,), {"dx": False, "dgate": False, "dscale": True}),
        ((0, 1), {"dx": True, "dgate": True, "dscale": False}),
        ((0, 1, 2), {"dx": True, "dgate": True, "dscale": True}),
    ],
)
@orders
def test_the_backward_computes_what_is_asked_for(variant, argnums, expected):
    args = draw_operands((12, 80))
    gradient = jax.grad(loss(gated(variant)), argnums)
    assert [wanted(call) for call in lowered_calls(gradient, BWD, *args)] == [expected] * is_platform_with_kernels()
    every = jax.jit(jax.grad(loss(gated(variant)), (0, 1, 2)))(*args)
    assert bits(jax.jit(gradient)(*args)) == bits([every[i] for i in argnums])


def test_inference_writes_no_statistics():
    calls = lowered_calls(gated(MAMBA), FWD, *draw_operands((12, 80)))
    assert [call.rpartition("->")[2].strip() for call in calls] == ["tensor<12x80xf32>"] * is_platform_with_kernels()


@dtypes
@orders
def test_between_forward_and_backward_only_the_operands_and_rstd_live(variant, dtype):
    args = draw_operands((12, 80), dtype)
    pullback = jax.eval_shape(lambda *args: jax.vjp(gated(variant, group_size=20), *args)[1], *args)
    kept = sorted((leaf.size, leaf.dtype.name) for leaf in jax.tree.leaves(pullback) if leaf.size > 1)
    assert kept == sorted([(12 * 80, dtype), (12 * 80, dtype), (80, "float32"), (12 * 4, "float32")])
