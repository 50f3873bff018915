"""What is particular to the sandwich norm: what lies between its two norms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import bits
from coverage import cover
from hlo import compiled_text, count_native_calls, lowered_calls
from native import is_platform_with_kernels
from op import rows
from table import SANDWICH
from tolerances import forward_errors

import jaxnorm

(OP,) = SANDWICH
SIZE = rows(12, 80)


def gradient_of_y(*args):
    return jax.grad(lambda *args: jnp.sin(OP.function(*args)[0]).sum(), OP.all)(*args)


# A cotangent that is zero costs no pass over memory.
@cover(which=["y", "both"])
def test_the_backward_reads_the_cotangent_of_the_sum_where_there_is_one(which):
    gradient = gradient_of_y if which == "y" else OP.gradient()
    calls = lowered_calls(gradient, OP.backward, *OP.draw(SIZE))
    has = {"y": "false", "both": "true"}[which]
    assert [f"has_dnew_residual = {has}" in call for call in calls] == [True] * is_platform_with_kernels()


def test_a_donated_residual_is_the_sums_buffer():
    text = compiled_text(OP.function, *OP.draw(SIZE, ("bfloat16", "float32")), donate_argnums=1)
    assert "input_output_alias={ {1}: (1" in text


def test_a_residual_that_lives_on_keeps_its_values():
    args = OP.draw(SIZE)
    before = bits(args[1])
    *_, after = jax.jit(lambda *args: (*OP.function(*args), args[1]))(*args)
    assert (bits(after), bits(args[1])) == (before, before)


# A layer's sum is the next one's residual and is wanted again by its own backward: it must not be copied.
def test_no_layer_of_a_stack_copies_its_residual():
    def stack(x, residual, post_scale, scale):
        for _ in range(4):
            y, residual = OP.function(x, residual, post_scale, scale)
            x = jnp.sin(y)
        return (x * residual).sum()

    text = compiled_text(jax.grad(stack, (2, 3)), *OP.draw(SIZE))
    assert "f32[12,80]{1,0} copy(" not in text
    assert count_native_calls(text) == OP.calls(fwd=4, bwd=4)


# x and post_scale are found by way of the residual's gradient, whether or not that is asked for.
@cover(dtypes=OP.dtypes, argnums=[(0,), (2,), (0, 2), (3,)])
def test_gradients_without_the_residuals(dtypes, argnums):
    args = OP.draw(rows(33, 1021), dtypes)
    every = jax.jit(OP.gradient(OP.function))(*args)
    assert bits(jax.jit(OP.gradient(OP.function, argnums))(*args)) == bits([every[i] for i in argnums])


# dx is that of the residual's gradient as it is stored.
@cover(dtypes=OP.dtypes)
def test_the_gradient_of_x_is_that_of_the_first_norm_for_the_residuals(dtypes):
    x, residual, post_scale, scale = OP.draw(rows(33, 1024), dtypes)
    cotangents = OP.cotangents((x, residual, post_scale, scale))
    dx, dresidual, dpost_scale, _ = jax.jit(lambda c, *args: jax.vjp(OP.function, *args)[1](c))(
        cotangents, x, residual, post_scale, scale
    )
    norm = lambda *args: jaxnorm.rms_norm(*args, out_dtype=residual.dtype)  # noqa: E731
    expected = jax.jit(lambda dy, *args: jax.vjp(norm, *args)[1](dy))(dresidual, x, post_scale)
    assert bits((dx, dpost_scale)) == bits(expected)


# Without a kernel, the formula.
@cover(dtypes=[("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "float16")], out=["float32", "float16"])
def test_a_result_of_another_dtype(dtypes, out):
    args = OP.draw(rows(7, 100), dtypes)
    y, total = jax.jit(lambda *args: OP.function(*args, out_dtype=out))(*args)
    assert total.dtype == args[1].dtype
    assert forward_errors(y, OP.exact(*args, out_dtype=out)) == []


def test_scales_of_heads():
    x, residual, *_ = OP.draw(rows(3, 4, 8))
    post_scale, scale = 1 + jnp.sin(jnp.arange(32.0)).reshape(4, 8) / 2, 1 + jnp.cos(jnp.arange(24.0)).reshape(3, 1, 8)
    heads = jax.jit(OP.function)(x, residual, post_scale, scale)
    for i in range(3):
        for j in range(4):
            alone = OP.function(x[i, j], residual[i, j], post_scale[j], scale[i, 0])
            np.testing.assert_allclose(heads[0][i, j], alone[0], rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(heads[1][i, j], alone[1], rtol=1e-5, atol=1e-5)


def test_it_is_linear_in_its_last_scale_alone():
    x, residual, post_scale, scale = OP.draw(SIZE)
    y, *_ = OP.function(x, residual, post_scale, scale)
    (dscale,) = jax.linear_transpose(lambda scale: OP.function(x, residual, post_scale, scale)[0], scale)(y)
    _, pullback = jax.vjp(lambda scale: OP.function(x, residual, post_scale, scale)[0], scale)
    np.testing.assert_allclose(dscale, pullback(y)[0], rtol=1e-5)
    with pytest.raises(NotImplementedError, match="linear in its scale alone"):
        jax.linear_transpose(lambda s: OP.function(x, residual, s, scale)[0], post_scale)(y)
