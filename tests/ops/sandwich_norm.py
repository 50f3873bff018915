"""The sandwich norm: its row, and what lies between its two norms. `added_norm.py` has what it shares with one norm."""

from functools import partial

import formulas
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from bad_calls import BRAIN, HALF, SCALE, X
from cases import PAIRS, bits
from coverage import cover
from op import Op, call, rows
from oracle import f64, round_to, spacing
from quantizing import sum_of
from tolerances import FLOAT32, forward_errors

import jaxnorm
from ops.norm import norm_of_sum


def _between(x, residual, post_scale, **options):
    """What the first norm gives and the sum, each rounded to its dtype, and the size of their errors."""
    normed = oracle.forward("rms", x, post_scale, out_dtype=x.dtype, **options)
    total = round_to(f64(normed.rounded) + f64(residual), residual.dtype)
    # A half type's number may be the neighbour of the right one, as law 1 says.
    unit = FLOAT32 * np.abs(normed.exact) if x.dtype == np.float32 else spacing(normed.exact, x.dtype)
    return total, unit + normed.slack + spacing(f64(total), residual.dtype)


def exact(x, residual, post_scale=None, scale=None, *, out_dtype=None, **options):
    total, error = _between(x, residual, post_scale, **options)
    y = oracle.forward("rms", total, scale, out_dtype=np.dtype(out_dtype or x.dtype), **options)
    factor = 1.0 if scale is None else np.abs(f64(scale) + options.get("scale_offset", 0.0))
    rstd = 1 / np.sqrt(np.square(f64(total)).mean(-1, keepdims=True) + options.get("epsilon", oracle.EPSILON))
    return y._replace(slack=y.slack + error * rstd * factor)


def unfused(x, residual, post_scale=None, scale=None, *, out_dtype=None, **options):
    normed = jax.jit(partial(jaxnorm.rms_norm, **options))(x, post_scale)
    total = sum_of(normed, residual)
    return jax.jit(partial(jaxnorm.rms_norm, out_dtype=out_dtype or x.dtype, **options))(total, scale), total


def unfused_by_two_calls(x, residual, post_scale=None, scale=None, **options):
    """The like as a function that has derivatives."""
    return jaxnorm.add_rms_norm(jaxnorm.rms_norm(x, post_scale, **options), residual, scale, **options)


def exact_gradients(cotangents, x, residual, post_scale=None, scale=None, **options):
    dy, dsum = cotangents
    normed = jaxnorm.rms_norm(x, post_scale, **options)
    total = sum_of(normed, residual)
    # Of the first norm exact for the cotangent that it gets, which is a result and so has been rounded.
    _, pullback = jax.vjp(lambda residual: jaxnorm.add_rms_norm(normed, residual, scale, **options), residual)
    (received,) = jax.jit(pullback)(jaxnorm.AddedNorm(dy, dsum))
    options = {name: value for name, value in options.items() if name in ("epsilon", "scale_offset")}
    second = oracle.gradients("rms", total, dy, scale, **options)
    first = oracle.gradients("rms", x, received, post_scale, **options)
    return {
        "x": (first.dx, first.dx_terms),
        "residual": (second.dx + f64(dsum), None),
        "post_scale": (first.dscale, None),
        "scale": (second.dscale, None),
    }


WITHOUT_KERNEL = {
    "half types mixed": call(HALF, BRAIN).has_no_kernel("x is float16 and residual bfloat16.*one of them float32"),
    "a result of another dtype": call(BRAIN, BRAIN, out_dtype="float32").has_no_kernel(
        "x is bfloat16 and the result float32; .* equal"
    ),
    "scales of heads": call(X, X, jnp.ones((4, 8)), SCALE).has_no_kernel(r"leading axes, \(4,\)"),
}


def sandwich():
    return Op(
        name="sandwich",
        public="rms_norm_add_rms_norm",
        kind="rms",
        operands=("x", "residual", "post_scale", "scale"),
        arrays=2,
        dtypes=PAIRS,
        function=jaxnorm.rms_norm_add_rms_norm,
        formula=formulas.sandwich,
        as_norm=lambda f: norm_of_sum(lambda x, residual, scale, bias: f(x, residual, bias, scale)),
        exact=exact,
        exact_gradients=exact_gradients,
        unfused=unfused,
        unfused_with_gradients=unfused_by_two_calls,
        # Where x is narrower than the residual, two calls round once more in between.
        gradient_dtypes=(*PAIRS[:3], PAIRS[5]),
        small=rows(6, 10),
        # No whole vector, several rows at once, with and without a rest, each of the regimes; more rows than a thread
        # or a task takes; beyond every cache, where results may go past it.
        sizes=(
            *(rows(7, cols) for cols in (1, 24, 128, 257, 1024, 4096, 4097, 10_240, 16_384, 40_000)),
            *(rows(n, 24) for n in (1, 2, 3, 4, 5, 4099)),
            rows(3, 5, 64),
            rows(2048, 4096),
        ),
        options=({"scale_offset": 1.0}, {"epsilon": 1.0}, {"multiply_before_cast": False}),
        backward_sizes=(rows(600, 1000), rows(9, 100_000)),
        lengths=tuple(rows(9, cols) for cols in (1, 31, 128, 1021, 4096, 40_000)),
        many=tuple(rows(600, cols) for cols in (128, 384, 2048, 4096, 8192)),
        statistics=2,
        without_kernel=WITHOUT_KERNEL,
    )


SANDWICH = (sandwich(),)
(OP,) = SANDWICH


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
    assert (total.dtype, forward_errors(y, OP.exact(*args, out_dtype=out))) == (args[1].dtype, [])


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
    x, residual, post_scale, scale = OP.draw(rows(12, 80))
    y, *_ = OP.function(x, residual, post_scale, scale)
    (dscale,) = jax.linear_transpose(lambda scale: OP.function(x, residual, post_scale, scale)[0], scale)(y)
    _, pullback = jax.vjp(lambda scale: OP.function(x, residual, post_scale, scale)[0], scale)
    np.testing.assert_allclose(dscale, pullback(y)[0], rtol=1e-5)
    with pytest.raises(NotImplementedError, match="linear in its scale alone"):
        jax.linear_transpose(lambda s: OP.function(x, residual, s, scale)[0], post_scale)(y)
