"""Weights for each head: scale and bias with leading axes. Laws 1 and 3 to 6."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import ADDS, DTYPES, KINDS, NORMS, bits, draw, draw_bias, draw_scale, draw_x, formula
from hlo import compiled_text, count_native_calls
from native import native_calls
from tolerances import DSCALE, DX, forward_errors, gradient_error
from transformations import loss_of

import jaxnorm
from jaxnorm import heads

# x's shape and the weights'. Heads whose rows alternate, come in stretches, are one for each head; few rows and so many
# that there are several partial sums; no whole vector, and several.
SHAPES = {
    "qk-norm": ((2, 9, 4, 64), (4, 64)),
    "the same for all heads": ((2, 9, 4, 64), (64,)),
    "axes of one": ((2, 9, 4, 64), (1, 1, 1, 64)),
    "heads before the sequence": ((2, 4, 9, 128), (4, 1, 128)),
    "with an axis for the batch": ((2, 4, 9, 128), (1, 4, 1, 128)),
    "an ensemble": ((3, 40, 100), (3, 1, 100)),
    "an ensemble with heads": ((3, 5, 7, 256), (3, 5, 1, 256)),
    "an axis of one between": ((3, 1, 5, 2, 1000), (3, 1, 5, 1, 1000)),
    "a head for each row": ((40, 100), (40, 100)),
    "more heads than a task has": ((3, 700, 256), (700, 256)),
    "many rows that alternate": ((1100, 7, 64), (7, 64)),
    "many rows in stretches": ((2, 3, 700, 128), (3, 1, 128)),
    "many rows of one model": ((2, 2500, 100), (2, 1, 100)),
}

kinds = pytest.mark.parametrize("kind", KINDS)
dtypes = pytest.mark.parametrize("dtype", DTYPES)
shapes = pytest.mark.parametrize("name", SHAPES)


def draw_operands(dims, weight_dims, dtype="float32"):
    return draw_x(dims, dtype), draw_scale(weight_dims), draw_bias(weight_dims)


@cache
def y_and_gradients(kind, **options):
    """(dy, x, scale, bias) -> (y, dx, dscale, dbias)"""

    def function(dy, *args):
        y, pullback = jax.vjp(lambda *args: NORMS[kind](*args, **options), *args)
        return y, *pullback(dy)

    return jax.jit(function)


@shapes
@dtypes
@kinds
def test_against_float64(kind, dtype, name):
    dims, weight_dims = SHAPES[name]
    x, scale, bias = draw_operands(dims, weight_dims, dtype)
    dy = draw("dy", dims, dtype)
    y, dx, dscale, dbias = y_and_gradients(kind)(dy, x, scale, bias)
    exact = oracle.gradients(kind, x, dy, scale, lead=weight_dims[:-1])
    errors = {
        "dx": gradient_error(dx, exact.dx, DX),
        "dscale": gradient_error(dscale, exact.dscale, DSCALE),
        "dbias": gradient_error(dbias, exact.dbias, DSCALE),
    }
    assert all(error <= 1 for error in errors.values()), errors
    assert forward_errors(y, oracle.forward(kind, x, scale, bias, out_dtype=x.dtype)) == []


# Each operand alone, of a dtype of its own; and the two with other leads, which are broadcast to the same.
@pytest.mark.parametrize(
    ("scale_dims", "bias_dims"),
    [((4, 64), None), (None, (4, 64)), ((4, 64), (64,)), ((1, 64), (3, 4, 64)), ((3, 1, 64), (4, 64))],
)
@kinds
def test_scale_and_bias_of_different_shapes(kind, scale_dims, bias_dims):
    x, dy = draw_x((2, 3, 4, 64), "bfloat16"), draw("dy", (2, 3, 4, 64), "bfloat16")
    scale = None if scale_dims is None else draw_scale(scale_dims, "bfloat16")
    bias = None if bias_dims is None else draw_bias(bias_dims, "float16")
    y, dx, *of_weights = y_and_gradients(kind)(dy, x, scale, bias)
    assert forward_errors(y, oracle.forward(kind, x, scale, bias, out_dtype=x.dtype)) == []
    assert gradient_error(dx, oracle.gradients(kind, x, dy, scale).dx, DX) <= 1
    for which, weight, gradient in zip(("dscale", "dbias"), (scale, bias), of_weights, strict=True):
        if weight is not None:
            assert (gradient.shape, gradient.dtype) == (weight.shape, weight.dtype)
            exact = oracle.gradients(kind, x, dy, scale, lead=weight.shape[:-1])
            assert gradient_error(gradient, getattr(exact, which), DSCALE) <= 1


@kinds
def test_several_normalised_axes(kind):
    x, scale = draw_x((3, 4, 5, 8)), draw_scale((4, 5, 8))
    y = jax.jit(lambda x, scale: NORMS[kind](x, scale, axis=(-2, -1)))(x, scale)
    assert forward_errors(y, oracle.forward(kind, x, scale, axes=2, out_dtype=x.dtype)) == []


# What is between the heads' rows in x must not show: y and dx are those of a call for each head.
@pytest.mark.parametrize("options", [{}, {"multiply_before_cast": False, "scale_offset": 1.0}], ids=str)
@pytest.mark.parametrize(("dims", "axis"), [((5, 9, 4, 64), 2), ((5, 4, 9, 100), 1), ((3, 700, 128), 0)], ids=str)
@dtypes
@kinds
def test_heads_are_bit_for_bit_calls_of_their_own(kind, dtype, dims, axis, options):
    weight_dims = (dims[axis], *(1 for _ in dims[axis + 1 : -1]), dims[-1])
    x, scale, bias = draw_operands(dims, weight_dims, dtype)
    dy = draw("dy", dims, dtype)
    y, dx, *_ = y_and_gradients(kind, **options)(dy, x, scale, bias)
    for head in range(dims[axis]):
        of_head = [jnp.take(a, head, axis) for a in (dy, x)] + [w[head].reshape(-1) for w in (scale, bias)]
        expected = y_and_gradients(kind, **options)(*of_head)[:2]
        assert bits([jnp.take(a, head, axis) for a in (y, dx)]) == bits(expected)


@pytest.mark.parametrize("weight_dims", [(4, 64), (4, 1, 64)])
@dtypes
@kinds
def test_the_norm_of_a_sum_is_bit_for_bit_the_norm(kind, dtype, weight_dims):
    x, scale, bias = draw_operands((3, 4, 4, 64), weight_dims, dtype)
    y, total = jax.jit(ADDS[kind])(x, jnp.sin(x), scale, bias)
    assert bits(y) == bits(jax.jit(NORMS[kind])(total, scale, bias))


@pytest.mark.parametrize(("dims", "weight_dims"), [((9, 7, 3, 64), (3, 64)), ((9, 3, 7, 100), (3, 1, 100))], ids=str)
@dtypes
@kinds
def test_rows_alone(kind, dtype, dims, weight_dims):
    x, scale, bias = draw_operands(dims, weight_dims, dtype)
    dy = draw("dy", dims, dtype)
    y, dx, *_ = y_and_gradients(kind)(dy, x, scale, bias)
    assert bits(y_and_gradients(kind)(dy[2:3], x[2:3], scale, bias)[:2]) == bits((y[2:3], dx[2:3]))


@pytest.mark.parametrize("name", ["more heads than a task has", "many rows in stretches"])
@kinds
def test_runs_repeat_themselves(kind, name):
    dims, weight_dims = SHAPES[name]
    args = draw("dy", dims), *draw_operands(dims, weight_dims)
    first = bits(y_and_gradients(kind)(*args))
    assert all(bits(y_and_gradients(kind)(*args)) == first for _ in range(2))


@pytest.mark.parametrize(("dims", "weight_dims"), [((0, 3, 64), (3, 64)), ((3, 0, 64), (3, 1, 64))], ids=str)
@kinds
def test_no_rows(kind, dims, weight_dims):
    x, scale, bias = draw_operands(dims, weight_dims)
    y, dx, dscale, dbias = y_and_gradients(kind)(x, x, scale, bias)
    assert (y.shape, dx.shape) == (dims, dims)
    np.testing.assert_array_equal((dscale, dbias), np.zeros((2, *weight_dims)))


@shapes
@kinds
def test_a_gradient_is_one_call_each_way(kind, name):
    gradient = jax.grad(loss_of(NORMS[kind]), (0, 1, 2))
    structs = [jax.ShapeDtypeStruct(dims, "float32") for dims in (SHAPES[name][0], *SHAPES[name][1:] * 2)]
    text = jax.jit(gradient).lower(*structs).as_text()
    assert count_native_calls(text) == native_calls(kind, fwd=1, bwd=1)


def mean_loss(norm):
    return lambda *args: jnp.sin(norm(*args)).mean()


# Models side by side, each with its weights; the gradients of each example, by weights that all share or of its own.
ENSEMBLES = {
    "grad of an ensemble": (lambda f: jax.grad(lambda *args: jax.vmap(f)(*args).sum(), (0, 1, 2)), True),
    "grads of an ensemble": (lambda f: jax.vmap(jax.grad(f, (0, 1, 2))), True),
    "grads of every example": (lambda f: jax.vmap(jax.grad(f, (0, 1, 2)), (0, None, None)), False),
    "grads of every example, in another axis": (
        lambda f: lambda x, s, b: jax.vmap(jax.grad(f, (1, 2)), (1, None, None))(jnp.swapaxes(x, 0, 1), s, b),
        False,
    ),
    "scales alone": (lambda f: jax.vmap(jax.grad(f, (0, 1)), (0, 0, None)), (True, False)),
    "biases alone": (lambda f: jax.vmap(jax.grad(f, (0, 2)), (0, None, 0)), (False, True)),
}


@pytest.mark.parametrize("name", ENSEMBLES)
@kinds
def test_an_ensemble_is_one_call_each_way(kind, name):
    transform, has_own = ENSEMBLES[name]
    scale_has_own, bias_has_own = has_own if isinstance(has_own, tuple) else (has_own, has_own)
    args = (
        draw_x((3, 8, 40)),
        draw_scale((3, 40) if scale_has_own else (40,)),
        draw_bias((3, 40) if bias_has_own else (40,)),
    )
    actual = jax.jit(transform(mean_loss(NORMS[kind])))
    assert count_native_calls(compiled_text(actual, *args)) == native_calls(kind, fwd=1, bwd=1)
    expected = jax.jit(transform(mean_loss(formula(kind))))(*args)
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-6), actual(*args), expected)


# Where no kernel has the heads of a batch, the formula runs for what is of each example.
NO_SUCH_HEADS = {
    "heads inside an ensemble": ((3, 5, 4, 40), (4, 40), (0, None, None)),
    "heads inside an ensemble of weights": ((3, 5, 4, 40), (3, 4, 40), (0, 0, 0)),
    "examples of one row": ((6, 40), (40,), (0, None, None)),
    "long rows": ((2, 3, 8200), (2, 8200), (0, 0, 0)),
}


@pytest.mark.parametrize("name", NO_SUCH_HEADS)
@kinds
def test_a_batch_of_heads_without_a_kernel(kind, name):
    dims, weight_dims, in_axes = NO_SUCH_HEADS[name]
    args = draw_operands(dims, weight_dims)

    def transform(norm):
        return jax.jit(jax.vmap(jax.grad(mean_loss(norm), (0, 1, 2)), in_axes))

    expected = transform(formula(kind))(*args)
    actual = transform(NORMS[kind])(*args)
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-6), actual, expected)


@pytest.mark.parametrize(("dims", "weight_dims"), [((3, 4, 5, 8), (3, 1, 5, 8)), ((2, 8200), (2, 8200))], ids=str)
@kinds
def test_the_formula_where_there_is_no_kernel(kind, dims, weight_dims):
    x, scale, bias = draw_operands(dims, weight_dims)
    y, _, dscale, _ = y_and_gradients(kind)(x, x, scale, bias)
    assert forward_errors(y, oracle.forward(kind, x, scale, bias, out_dtype=x.dtype)) == []
    assert gradient_error(dscale, oracle.gradients(kind, x, x, scale, lead=weight_dims[:-1]).dscale, DSCALE) <= 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_norm(kind):
    norm = {"rms": jaxnorm.rms_norm_quantized, "layer": jaxnorm.layer_norm_quantized}[kind]
    x, scale, bias = draw_operands((3, 4, 64), (4, 64))
    to = jaxnorm.Quantization(jnp.int8)
    q = norm(x, scale, bias, quantization=to)
    for head in range(4):
        of_head = norm(x[:, head], scale[head], bias[head], quantization=to, implementation="jnp")
        np.testing.assert_allclose(q.scales[:, head], of_head.scales, rtol=1e-5)
        np.testing.assert_allclose(q.values[:, head].astype("int32"), of_head.values.astype("int32"), atol=1)
    with pytest.raises(RuntimeError, match=rf"^{kind}_norm_quantized: .*quantises.*leading axes"):
        norm(x, scale, quantization=to, implementation="native")
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
    assert heads.unsupported(shape, axes, lead) is None
    assert heads.heads_of(shape, axes, lead) == expected
