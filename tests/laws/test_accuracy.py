"""Laws 1 and 2: results and gradients against the formula in float64, rounded once; statistics are float32."""

import math
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import DTYPES, KINDS, NORMS, bits, draw, draw_bias, draw_scale, draw_x
from coverage import cover, over
from hypothesis import given, strategies as st
from oracle import f64
from table import ADDED, EVERY, GROUP_NORMS, NORMS as PLAIN, OPS, PER_HEAD, PRODUCTS, SANDWICH
from tolerances import forward_errors, gradient_errors, result_errors

pytestmark = pytest.mark.usefixtures("exact_products")

EXACT, DIFFERENTIABLE = [op for op in OPS if op.exact], [op for op in OPS if op.exact_gradients]
# Every kernel's pair of input and output; and float16 with bfloat16, which has none and still must be right.
DTYPE_PAIRS = [(x, y) for x, y in product(DTYPES, DTYPES) if x != y]
# None is a call without that operand, which other kernels serve than one of ones or zeros.
WEIGHTS = {
    "scale": lambda op: [None, *DTYPES] if op.weights else [],
    "bias": lambda op: [None, *DTYPES] if len(op.weights) > 1 else [None],
}


def dtypes_of(op):
    return op.dtypes


def sizes(op):
    return [size for size in op.sizes if math.prod(size.dims) < 2**22]


def backward_sizes(op):
    # RMSNorm of one number and LayerNorm of two are a sign, whose gradient vanishes but for epsilon and for rounding.
    least = 1 if op in (*PLAIN, *GROUP_NORMS) else 24
    sizes = (*op.sizes, *op.backward_sizes)
    return [size for size in sizes if math.prod(size.dims) < 2**22 and size.dims[-1] >= least]


def lengths(op):
    """Rows with and without a vectorised part, and with a rest."""
    return [size for size in op.lengths if 31 <= size.dims[-1] <= 4096]


def short(op):
    """The like, two of them."""
    return [size for size in lengths(op) if size.dims[-1] in (64, 100, 128, 640, 1021)][:2]


def errors(op, args, implementation=None, **options) -> list[str]:
    results = jax.jit(partial(op.function, implementation=implementation, **options))(*args)
    return result_errors(op, results, args, **options)


def errors_of_gradients(op, args, implementation=None, **options) -> dict[str, float]:
    """The gradients' errors as multiples of law 1's limits, where they are above; and the complaints about y."""
    cotangents = op.cotangents(args, **options)

    def function(cotangents, *args):
        results, pullback = jax.vjp(partial(op.function, implementation=implementation, **options), *args)
        return results, pullback(cotangents)

    results, gradients = jax.jit(function)(cotangents, *args)
    above = {"results": np.inf} if result_errors(op, results, args, **options) else {}
    return above | gradient_errors(op, gradients, cotangents, args, **options)


@pytest.mark.on_emulator
@over([*EXACT, *PRODUCTS], dtypes=dtypes_of, size=sizes)
def test_results_of_every_size(op, dtypes, size):
    assert errors(op, op.draw(size, dtypes, (dtypes[0], None)), **size.options) == []


@pytest.mark.on_emulator
@over([*DIFFERENTIABLE, *PRODUCTS], dtypes=dtypes_of, size=backward_sizes)
def test_gradients_of_every_size(op, dtypes, size):
    assert errors_of_gradients(op, op.draw(size, dtypes), **size.options) == {}


@pytest.mark.on_emulator
@pytest.mark.parametrize("errors", [errors, errors_of_gradients], ids=["results", "gradients"])
@over(PLAIN + PER_HEAD, dtypes=lambda op: DTYPE_PAIRS, size=lengths)
def test_an_output_of_another_dtype(op, dtypes, size, errors):
    x_dtype, out_dtype = dtypes
    assert not errors(op, op.draw(size, (x_dtype,)), out_dtype=np.dtype(out_dtype))


# Of short rows, which vectors divide, float32 weights of half types come another way than those of x's dtype.
@pytest.mark.on_emulator
@over(EXACT, dtypes=dtypes_of, **WEIGHTS, size=short)
def test_weights_of_any_dtype(op, dtypes, scale, bias, size):
    assert errors(op, op.draw(size, dtypes, (scale, bias)), **size.options) == []


@pytest.mark.on_emulator
@over(DIFFERENTIABLE, dtypes=dtypes_of, **WEIGHTS, size=lambda op: lengths(op)[-1:])
def test_gradients_for_weights_of_any_dtype(op, dtypes, scale, bias, size):
    assert errors_of_gradients(op, op.draw(size, dtypes, (scale, bias)), **size.options) == {}


@pytest.mark.on_emulator
@over(
    EXACT,
    dtypes=dtypes_of,
    options=lambda op: op.options,
    weight_dtype=lambda op: DTYPES[: None if op.weights else 1],
    size=short,
)
def test_every_option(op, dtypes, options, weight_dtype, size):
    assert errors(op, op.draw(size, dtypes, weight_dtype), **options, **size.options) == []


@pytest.mark.on_emulator
@over(DIFFERENTIABLE, dtypes=dtypes_of, options=lambda op: op.options, size=lambda op: lengths(op)[-2:])
def test_gradients_with_options(op, dtypes, options, size):
    assert errors_of_gradients(op, op.draw(size, dtypes), **options, **size.options) == {}


# The formula keeps the law too, and serves where no kernel does. A sum of half types is left out: XLA may not round it
# before it is normalised.
@over(
    [*EXACT, *PRODUCTS], dtypes=lambda op: [d for d in op.dtypes if op not in (*ADDED, *SANDWICH) or d[1] == "float32"]
)
def test_the_formula(op, dtypes):
    size = lengths(op)[0]
    assert errors(op, op.draw(size, dtypes), implementation="xla", **size.options) == []


@pytest.mark.parametrize("op", [*DIFFERENTIABLE, *PRODUCTS], ids=str)
def test_gradients_of_the_formula(op):
    size = lengths(op)[-1]
    assert errors_of_gradients(op, op.draw(size), implementation="xla", **size.options) == {}


@pytest.mark.parametrize("op", EVERY, ids=str)
def test_gradients_have_the_dtypes_of_their_primals(op):
    args = op.draw(op.small, ("bfloat16", "float32", "float32")[: op.arrays], ("bfloat16", "float16", "float32"))
    assert [gradient.dtype for gradient in op.gradient()(*args)] == [args[i].dtype for i in op.all]


# Axes that have no kernel take XLA's code and keep the same promise.
@cover(kind=KINDS, axis=[0, 1, (0, 1), (0, 2)])
def test_results_over_leading_axes(kind, axis):
    axes = axis if isinstance(axis, tuple) else (axis,)
    last = tuple(range(-len(axes), 0))
    x = draw_x(np.moveaxis(np.empty((6, 10, 14)), axes, last).shape)
    expected = oracle.forward(kind, np.asarray(x), axes=len(axes), out_dtype=x.dtype)
    y = np.moveaxis(np.asarray(NORMS[kind](jnp.moveaxis(x, last, axes), axis=axis)), axes, last)
    assert forward_errors(y, expected) == []


SHAPES = st.sampled_from(DTYPES), st.lists(st.integers(1, 9), max_size=3)
GIVEN = st.booleans(), st.booleans()


def of_rows(leading, cols):
    """A shape with so many rows more that the share of law 1 is one of 200 elements at least: of nine, it would be all,
    and one that a bias cancels is as float32 has it."""
    missing = -(-200 // (math.prod(leading) * cols))
    return (*leading, cols) if missing == 1 else (missing, *leading, cols)


@pytest.mark.parametrize("op", PLAIN, ids=str)
@given(*SHAPES, st.integers(1, 3000), *GIVEN)
def test_results_of_random_shapes(op, dtype, leading, cols, has_scale, has_bias):
    scale = draw_scale((cols,), dtype) if has_scale else None
    bias = draw_bias((cols,), dtype) if has_bias else None
    assert errors(op, (draw_x(of_rows(leading, cols), dtype), scale, bias)) == []


@pytest.mark.parametrize("op", PLAIN, ids=str)
@given(*SHAPES, st.integers(3, 3000), *GIVEN)
def test_gradients_of_random_shapes(op, dtype, leading, cols, has_scale, has_bias):
    scale = draw_scale((cols,)) if has_scale else None
    bias = draw_bias((cols,)) if has_bias else None
    assert errors_of_gradients(op, (draw_x(of_rows(leading, cols), dtype), scale, bias)) == {}


# Statistics are float32 and the variance is that of the deviations.
# E[x²] - mean² loses everything here: 1e8 + 1 has no float32 of its own. The lengths meet every regime.
FAR_OFF_CENTRE = [(64, 128), (16, 1021), (8, 8192), (4, 32_768), (3, 100_003)]


@pytest.mark.parametrize("dims", FAR_OFF_CENTRE)
def test_rows_far_off_centre_are_centred_and_have_unit_variance(dims):
    y = jax.jit(NORMS["layer"])(draw("x", dims, "float32", 1e4, 1.0))
    np.testing.assert_allclose(f64(y).std(-1), 1.0, atol=1e-3)
    np.testing.assert_allclose(f64(y).mean(-1), 0.0, atol=2e-3)  # a float32 near 1e4 is good to 5e-4


@pytest.mark.parametrize("dims", FAR_OFF_CENTRE)
def test_gradients_of_rows_far_off_centre(dims):
    x, dy = draw("x", dims, "float32", 1e4, 1.0), draw("dy", dims)
    gradient = jax.jit(lambda x: jax.vjp(NORMS["layer"], x)[1](dy)[0])
    centred = f64(x) - f64(x).mean(-1, keepdims=True)
    np.testing.assert_allclose(gradient(x), gradient(jnp.asarray(centred, "float32")), atol=5e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cols", [64, 1021, 8192, 100_003])
def test_float16_near_its_maximum_does_not_overflow(kind, cols):
    signs = jnp.where(jnp.arange(cols) % 2 == 0, 1, -1).astype("float16")
    y = jax.jit(NORMS[kind])(65_504 * signs[None])
    np.testing.assert_allclose(f64(y), f64(signs[None]), atol=2e-3 if kind == "layer" else 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_power_of_two_scales_out(kind, dtype):
    x = draw("x", (8, 1000), dtype)
    norm = jax.jit(lambda x: NORMS[kind](x, epsilon=0.0))
    assert bits(norm(x * 64)) == bits(norm(x))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_zeros_give_the_bias(kind):
    bias = draw("bias", (100,))
    y = jax.jit(NORMS[kind])(jnp.zeros((3, 100)), draw("scale", (100,)), bias)
    np.testing.assert_array_equal(y, np.broadcast_to(bias, (3, 100)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_constant_row_has_no_deviation(dtype):
    y = jax.jit(NORMS["layer"])(jnp.full((3, 1024), 3.0, dtype))
    assert not np.any(y)
