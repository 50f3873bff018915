"""pad_to: y's last axis padded with zeros, which the backward does not read."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ADDS, KINDS, NORMS, bits, draw, draw_bias, draw_residual, draw_scale, draw_x, formula, operands
from hlo import compiled_text, count_native_calls
from native import native_calls
from test_transformations import assert_close
from transformations import TRANSFORMATIONS

# The dtypes of x and the residual.
PAIRS = [("float32", "float32"), ("float16", "float16"), ("bfloat16", "float32")]
# Columns and the multiple: no padding, less and more than a vector, longer than the row; short and long rows.
SIZES = [(64, 64), (100, 128), (100, 101), (3, 256), (1000, 256), (4097, 128), (40_000, 4096)]

kinds = pytest.mark.parametrize("kind", KINDS)
pairs = pytest.mark.parametrize(("dtype", "residual_dtype"), PAIRS)
sizes = pytest.mark.parametrize(("cols", "pad_to"), SIZES)


def draw_operands(dims, dtype="float32", residual_dtype="float32"):
    weights = draw_scale(dims[-1:]), draw_bias(dims[-1:])
    return draw_x(dims, dtype), draw_residual(dims, residual_dtype), *weights


def padded(y, pad_to):
    return jnp.pad(y, [(0, 0)] * (y.ndim - 1) + [(0, -y.shape[-1] % pad_to)])


def y_and_gradients(kind, **options):
    def function(dy, dsum, *args):
        results, pullback = jax.vjp(partial(ADDS[kind], **options), *args)
        return results, pullback((dy, dsum))

    return jax.jit(function)


@sizes
@pairs
@kinds
def test_bit_for_bit_the_plain_norm(kind, dtype, residual_dtype, cols, pad_to):
    dims = (7, cols)
    args = draw_operands(dims, dtype, residual_dtype)
    dy, dsum = draw("dy", (7, -(-cols // pad_to) * pad_to), dtype), draw("dsum", dims, residual_dtype)
    (y, total), gradients = y_and_gradients(kind, pad_to=pad_to)(dy, dsum, *args)
    (plain_y, plain_total), plain_gradients = y_and_gradients(kind)(dy[:, :cols], dsum, *args)
    assert bits((y, total)) == bits((padded(plain_y, pad_to), plain_total))
    # dy's rows may lie on other boundaries than the plain norm's, and sums over rows are then added in another order.
    assert bits(gradients[:2]) == bits(plain_gradients[:2])
    assert_close(plain_gradients[2:], gradients[2:])


@kinds
def test_what_is_padded_does_not_reach_the_gradient(kind):
    args = draw_operands((5, 100))
    dy, dsum = draw("dy", (5, 128)), draw("dsum", (5, 100))
    run = y_and_gradients(kind, pad_to=64)
    assert bits(run(dy.at[:, 100:].set(jnp.nan), dsum, *args)[1]) == bits(run(dy, dsum, *args)[1])


# Many rows, arrays beyond the caches, whose results may go past them; and what is not finite.
@pytest.mark.parametrize(("dims", "pad_to"), [((4099, 24), 32), ((2048, 4000), 4096), ((2048, 4096), 4097)], ids=str)
@kinds
def test_large_arrays(kind, dims, pad_to):
    x, *others = draw_operands(dims)
    args = x.at[3, 5].set(jnp.inf), *others
    y, total = jax.jit(partial(ADDS[kind], pad_to=pad_to))(*args)
    plain_y, plain_total = jax.jit(ADDS[kind])(*args)
    assert bits((y, total)) == bits((padded(plain_y, pad_to), plain_total))


@kinds
def test_weights_for_each_head(kind):
    x, residual, *_ = draw_operands((5, 4, 100))
    y, _ = ADDS[kind](x, residual, draw_scale((4, 100)), draw_bias((4, 100)), pad_to=64)
    plain, _ = ADDS[kind](x, residual, draw_scale((4, 100)), draw_bias((4, 100)))
    assert bits(y) == bits(padded(plain, 64))


@kinds
def test_the_formula(kind):
    args = draw_operands((5, 100))
    dy, dsum = draw("dy", (5, 128)), draw("dsum", (5, 100))
    actual = y_and_gradients(kind, pad_to=64)(dy, dsum, *args)
    assert_close(y_and_gradients(kind, pad_to=64, implementation="jnp")(dy, dsum, *args), actual)


def of_x(add):
    """A function of (x, scale, bias), of x's shape, into which all of the padded y goes, linear in each weight."""

    def function(x, scale=None, bias=None):
        y, total = add(x, jnp.cos(x), scale, bias)
        return jnp.roll(y, 3, -1)[..., : x.shape[-1]] * jnp.sin(total)

    return function


def add_formula(kind):
    def add(x, residual, scale, bias):
        return padded(formula(kind)(x + residual, scale, bias), 16), x + residual

    return add


# The laws are those of the other norms; here is what pads in another way under each kind of transformation.
NAMES = (
    "grad",
    "vjp",
    "jvp",
    "linear_transpose",
    "linear_transpose of vjp",
    "hessian",
    "grad of grad",
    "vmap over x's last axis",
    "vmap over everything",
    "vmap of every grad of everything",
    "grad of vmap over scale",
    "grad of scan of checkpoint",
    "map over rows",
)


@pytest.mark.parametrize("name", NAMES)
@kinds
def test_transformed(kind, name):
    transform, fwd, bwd = TRANSFORMATIONS[name]
    args = operands((6, 10))
    compiled = jax.jit(transform(of_x(partial(ADDS[kind], pad_to=16)))).lower(*args).compile()
    assert_close(compiled(*args), jax.jit(transform(of_x(add_formula(kind))))(*args))
    if fwd is not None and bwd is not None:
        assert count_native_calls(compiled.as_text()) == native_calls(kind, fwd, bwd)


@kinds
def test_no_pass_pads(kind):
    """y comes padded from the native call, and dy goes into one as it is."""
    text = compiled_text(
        y_and_gradients(kind, pad_to=64), *map(draw, "ab", [(5, 128), (5, 100)]), *draw_operands((5, 100))
    )
    assert count_native_calls(text) == native_calls(kind, fwd=1, bwd=1)
    assert " pad(" not in text


X = jnp.ones((3, 4, 8))
BAD = {
    "zero": (0, {}, ValueError, ("positive", "0")),
    "negative": (-8, {}, ValueError, ("positive", "-8")),
    "a float": (8.0, {}, TypeError, ("int", "8.0")),
    "a bool": (True, {}, TypeError, ("int", "True")),
    "text": ("8", {}, TypeError, ("int", "8")),
    "several axes": (8, {"axis": (-2, -1)}, ValueError, ("axis=-1", r"\(-2, -1\)", "leave pad_to out")),
    "another axis": (8, {"axis": 0}, ValueError, ("axis=-1", r"\(-3,\)")),
}


@pytest.mark.parametrize("name", BAD)
@kinds
def test_bad_pad_to(kind, name):
    pad_to, options, error, parts = BAD[name]
    with pytest.raises(error, match=rf"(?s)^add_{kind}_norm: pad_to.*" + ".*".join(parts)):
        jax.eval_shape(lambda x: ADDS[kind](x, x, pad_to=pad_to, **options), X)


@kinds
def test_a_traced_pad_to(kind):
    with pytest.raises(TypeError, match=rf"add_{kind}_norm: pad_to must be known while tracing"):
        jax.jit(lambda n: ADDS[kind](X, X, pad_to=n))(8)


@pytest.mark.parametrize("pad_to", [np.int64(16), np.uint8(16)], ids=repr)
@kinds
def test_an_int_of_numpy(kind, pad_to):
    assert ADDS[kind](X, X, pad_to=pad_to)[0].shape == (3, 4, 16)


@kinds
def test_nothing_else_pads(kind):
    with pytest.raises(TypeError, match="pad_to"):
        NORMS[kind](X, pad_to=8)
