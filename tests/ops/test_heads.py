"""What is particular to weights for each head: how they broadcast, ensembles, and where no kernel finds them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import ADDS, KINDS, NORMS, bits, draw, draw_bias, draw_residual, draw_scale, draw_x
from coverage import cover, over
from hlo import compiled_text, count_native_calls
from internals import weights
from op import Size
from table import NORMS as PLAIN
from tolerances import DSCALE, DX, forward_errors, gradient_error

import jaxnorm


# Each operand alone, of a dtype of its own; and the two with other leads, which are broadcast to the same.
@cover(
    kind=KINDS, dims=[((4, 64), None), (None, (4, 64)), ((4, 64), (64,)), ((1, 64), (3, 4, 64)), ((3, 1, 64), (4, 64))]
)
def test_scale_and_bias_of_different_shapes(kind, dims):
    scale_dims, bias_dims = dims
    x, dy = draw_x((2, 3, 4, 64), "bfloat16"), draw("dy", (2, 3, 4, 64), "bfloat16")
    scale = None if scale_dims is None else draw_scale(scale_dims, "bfloat16")
    bias = None if bias_dims is None else draw_bias(bias_dims, "float16")

    @jax.jit
    def y_and_gradients(dy, *args):
        y, pullback = jax.vjp(NORMS[kind], *args)
        return y, *pullback(dy)

    y, dx, *of_weights = y_and_gradients(dy, x, scale, bias)
    assert forward_errors(y, oracle.forward(kind, x, scale, bias, out_dtype=x.dtype)) == []
    assert gradient_error(dx, oracle.gradients(kind, x, dy, scale).dx, DX) <= 1
    for which, weight, gradient in zip(("dscale", "dbias"), (scale, bias), of_weights, strict=True):
        if weight is not None:
            assert (gradient.shape, gradient.dtype) == (weight.shape, weight.dtype)
            exact = oracle.gradients(kind, x, dy, scale, lead=weight.shape[:-1])
            assert gradient_error(gradient, getattr(exact, which), DSCALE) <= 1


# So many rows that blocks of a GPU take several turns: by vectors, by elements, with rows left over.
@pytest.mark.on_emulator
@cover(
    kind=KINDS, dtype=["bfloat16", "float32"], adds=[False, True], dims=[(9, 250, 1152), (4, 300, 64), (3, 200, 521)]
)
@pytest.mark.kernels
def test_weights_for_each_of_several_examples(kind, dtype, adds, dims):
    examples, _, cols = dims
    x, dy = draw_x(dims, dtype), draw("dy", dims, dtype)
    dsum = draw_residual(dims, dtype)
    scale, bias = draw_scale((examples, 1, cols), dtype), draw_bias((examples, 1, cols), dtype)

    @jax.jit
    def gradients(x, dy, dsum, scale, bias):
        add, alone = (partial(norms[kind], implementation="native") for norms in (ADDS, NORMS))
        if adds:
            return jax.vjp(lambda x, *args: add(jnp.zeros_like(x), x, *args), x, scale, bias)[1]((dy, dsum))
        return jax.vjp(alone, x, scale, bias)[1](dy)

    dx, dscale, dbias = gradients(x, dy, dsum, scale, bias)
    for i in range(examples):
        alone = gradients(x[i], dy[i], dsum[i], scale[i, 0], bias[i, 0])
        assert bits(dx[i]) == bits(alone[0])
    exact = oracle.gradients(kind, x, dy, scale, lead=scale.shape[:-1])
    assert gradient_error(dscale, exact.dscale, DSCALE) <= 1
    assert gradient_error(dbias, exact.dbias, DSCALE) <= 1


@pytest.mark.parametrize("kind", KINDS)
def test_several_normalised_axes(kind):
    x, scale = draw_x((3, 4, 5, 8)), draw_scale((4, 5, 8))
    y = jax.jit(lambda x, scale: NORMS[kind](x, scale, axis=(-2, -1)))(x, scale)
    assert forward_errors(y, oracle.forward(kind, x, scale, axes=2, out_dtype=x.dtype)) == []


def mean_loss(function):
    return lambda *args: jnp.sin(function(*args)[0]).mean()


def assert_close(actual, expected):
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-6), actual, expected)


# Models side by side, each with its weights; the gradients of each example, by weights that all share or of its own.
# Which of scale and bias have an axis of models, and what is done.
ENSEMBLES = {
    "grad of an ensemble": ((True, True), lambda f: jax.grad(lambda *args: jax.vmap(f)(*args).sum(), (0, 1, 2))),
    "grads of an ensemble": ((True, True), lambda f: jax.vmap(jax.grad(f, (0, 1, 2)))),
    "grads of every example": ((False, False), lambda f: jax.vmap(jax.grad(f, (0, 1, 2)), (0, None, None))),
    "grads of every example, in another axis": (
        (False, False),
        lambda f: lambda x, s, b: jax.vmap(jax.grad(f, (1, 2)), (1, None, None))(jnp.swapaxes(x, 0, 1), s, b),
    ),
    "scales alone": ((True, False), lambda f: jax.vmap(jax.grad(f, (0, 1)), (0, 0, None))),
    "biases alone": ((False, True), lambda f: jax.vmap(jax.grad(f, (0, 2)), (0, None, 0))),
}


@over(PLAIN, ensemble=lambda op: ENSEMBLES)
def test_an_ensemble_is_one_call_each_way(op, ensemble):
    has_own, transform = ensemble
    dims = [(3, 40) if own else (40,) for own in has_own]
    args = draw_x((3, 8, 40)), draw_scale(dims[0]), draw_bias(dims[1])
    actual = jax.jit(transform(mean_loss(op.function)))
    assert count_native_calls(compiled_text(actual, *args)) == op.calls(fwd=1, bwd=1)
    assert_close(actual(*args), jax.jit(transform(mean_loss(op.formula)))(*args))


# Where no kernel has the heads of a batch, the formula runs for what is of each example.
NO_SUCH_HEADS = {
    "heads inside an ensemble": (Size((3, 5, 4, 40), (4, 40)), (0, None, None)),
    "heads inside an ensemble of weights": (Size((3, 5, 4, 40), (3, 4, 40)), (0, 0, 0)),
    "examples of one row": (Size((6, 40), (40,)), (0, None, None)),
    "long rows": (Size((2, 3, 8200), (2, 8200)), (0, 0, 0)),
}


@over(PLAIN, batch=lambda op: NO_SUCH_HEADS)
def test_a_batch_of_heads_without_a_kernel(op, batch):
    size, in_axes = batch
    args = op.draw(size)
    actual, expected = (
        jax.jit(jax.vmap(jax.grad(mean_loss(function), (0, 1, 2)), in_axes))(*args)
        for function in (op.function, op.formula)
    )
    assert_close(actual, expected)


@over(PLAIN, size=lambda op: [Size((3, 4, 5, 8), (3, 1, 5, 8)), Size((2, 8200), (2, 8200))])
def test_the_formula_where_there_is_no_kernel(op, size):
    x, scale, bias = op.draw(size)
    y, pullback = jax.vjp(lambda *args: op.function(*args)[0], x, scale, bias)
    dscale = pullback(x)[1]
    assert forward_errors(y, op.exact(x, scale, bias)) == []
    exact = oracle.gradients(op.kind, x, x, scale, lead=size.weights[:-1])
    assert gradient_error(dscale, exact.dscale, DSCALE) <= 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_norm(kind):
    norm = {"rms": jaxnorm.rms_norm_quantized, "layer": jaxnorm.layer_norm_quantized}[kind]
    x, scale, bias = draw_x((3, 4, 64)), draw_scale((4, 64)), draw_bias((4, 64))
    to = jaxnorm.Quantization(jnp.int8)
    q = norm(x, scale, bias=bias, quantization=to)
    for head in range(4):
        of_head = norm(x[:, head], scale[head], bias=bias[head], quantization=to, implementation="jnp")
        np.testing.assert_allclose(q.scales[:, head], of_head.scales, rtol=1e-5)
        np.testing.assert_allclose(q.values[:, head].astype("int32"), of_head.values.astype("int32"), atol=1)
    assert bits(norm(x, scale[:1], quantization=to)) == bits(norm(x, scale[0], quantization=to))


# (count, inner): rows r of x with the weights r // inner % count.
@pytest.mark.parametrize(
    ("shape", "axes", "lead", "expected"),
    [
        ((2, 3, 5, 8), 1, (), (1, 1)),
        ((2, 3, 5, 8), 1, (5,), (5, 1)),
        ((2, 3, 5, 8), 1, (3, 1), (3, 5)),
        ((2, 3, 5, 8), 1, (2, 1, 1), (2, 15)),
        ((2, 3, 5, 8), 1, (2, 3, 5), (30, 1)),
        ((2, 3, 5, 8), 2, (2, 1), (2, 3)),
        ((2, 3, 0, 8), 1, (3, 1), (3, 1)),
    ],
)
def test_heads_of_a_shape(shape, axes, lead, expected):
    assert weights.unsupported(shape, axes, lead) is None
    assert weights.heads_of(shape, axes, lead) == expected
