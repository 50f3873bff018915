"""The quantised norms. Law 5: bit for bit NumPy's quantisation of the norm; laws 3, 4 and 8 for them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import DTYPES, KINDS, NORMS, bits, draw_bias, draw_residual, draw_scale, draw_x
from quantizing import (
    GRANULARITIES,
    IMPLEMENTATIONS,
    QUANTIZED,
    STATIC_SCALE,
    TO,
    assert_exact,
    assert_same,
    by_numpy,
    draw_smooth,
    plain,
    quantize,
)
from test_add import PAIRS

from jaxnorm import Quantization, Quantized

kinds = pytest.mark.parametrize("kind", KINDS)
dtypes = pytest.mark.parametrize("dtype", DTYPES)
to_dtypes = pytest.mark.parametrize("to", TO)
granularities = pytest.mark.parametrize("granularity", GRANULARITIES)
implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
E4M3, E5M2, INT8 = ({"dtype": to} for to in TO)


def draw_operands(dims, dtype="float32", weight_dtype="float32"):
    features = dims[-1:]
    weights = (draw(features, weight_dtype) for draw in (draw_scale, draw_bias, draw_smooth))
    return draw_x(dims, dtype), *weights


# The formula's input is float32 whatever x is.
@pytest.mark.parametrize(
    ("dtype", "implementation"), [*((dtype, None) for dtype in DTYPES), *(("float32", i) for i in IMPLEMENTATIONS if i)]
)
@granularities
@to_dtypes
@kinds
def test_every_dtype_and_granularity_is_exact(kind, to, granularity, dtype, implementation):
    to = {"dtype": to, **GRANULARITIES[granularity]}
    assert_exact(kind, to, *draw_operands((7, 640), dtype), implementation=implementation)


# No whole vector, several rows at once, with and without a rest, long.
@pytest.mark.parametrize("cols", [1, 3, 24, 31, 128, 257, 1021, 4096, 4097, 40_000])
@kinds
def test_rows_of_every_length_are_exact(kind, cols):
    assert_exact(kind, E4M3, *draw_operands((7, cols), "bfloat16"), implementation=None)


@pytest.mark.parametrize("cols", [64, 128, 192, 1024, 4096, 16_384, 40_000, 262_144])
@kinds
def test_groups_in_rows_of_every_length_are_exact(kind, cols):
    to = {**E4M3, "granularity": "group", "group_size": 64}
    assert_exact(kind, to, *draw_operands((5, cols), "bfloat16"), implementation=None)


# Keywords of Quantization, operands that are replaced, keywords of the norm.
OPTIONS = {
    "no weights": ({}, {"scale": None, "bias": None, "smooth": None}, {}),
    "scale alone": ({}, {"bias": None, "smooth": None}, {}),
    "bias alone": ({}, {"scale": None, "smooth": None}, {}),
    "smooth factors alone": ({}, {"scale": None, "bias": None}, {}),
    "Gemma's offset": ({}, {}, {"scale_offset": 1.0}),
    "a large epsilon": ({}, {}, {"epsilon": 1.0}),
    "a bound that clips": ({"max_scale": 1e-3}, {}, {}),
    "a bound that does not": ({"max_scale": 1e3}, {}, {}),
    "powers of two": ({"power_of_two": True}, {}, {}),
    "powers of two, bounded": ({"power_of_two": True, "max_scale": 0.0078125}, {}, {}),
}


@implementations
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("granularity", ["token", "groups of 128"])
@kinds
def test_every_option_is_exact(kind, granularity, name, implementation):
    keywords, replaced, options = OPTIONS[name]
    operands = dict(zip(("x", "scale", "bias", "smooth"), draw_operands((5, 1024)), strict=True))
    to = {**E4M3, **GRANULARITIES[granularity], **keywords}
    assert_exact(kind, to, **operands | replaced, implementation=implementation, **options)


@pytest.mark.parametrize("weight_dtype", ["bfloat16", "float16"])
@dtypes
@kinds
def test_weights_of_half_types_are_exact(kind, dtype, weight_dtype):
    assert_exact(kind, E4M3, *draw_operands((5, 321), dtype, weight_dtype), implementation=None)


@implementations
@pytest.mark.parametrize("granularity", ["token", "tensor"])
@pytest.mark.parametrize(("dtype", "residual_dtype"), PAIRS)
@kinds
def test_with_a_residual_is_exact(kind, dtype, residual_dtype, granularity, implementation):
    dims = (7, 384)
    to = {**E4M3, **GRANULARITIES[granularity]}
    residual = draw_residual(dims, residual_dtype)
    assert_exact(kind, to, *draw_operands(dims, dtype), residual, implementation=implementation)


# Rows of x and of the residual that take a whole block's shared memory, beside what the CUDA kernels declare.
@kinds
def test_rows_that_leave_no_room_are_exact(kind):
    dims = (3, 229_376)
    assert_exact(kind, E4M3, *draw_operands(dims, "float32"), draw_residual(dims, "float32"), implementation=None)


@implementations
@pytest.mark.parametrize("granularity", ["token", "tensor"])
@kinds
def test_several_axes_are_exact(kind, granularity, implementation):
    dims, features = (5, 6, 40), (6, 40)
    operands = (draw_x(dims), draw_scale(features), draw_bias(features), draw_smooth(features))
    to = {**INT8, **GRANULARITIES[granularity]}
    result = assert_exact(kind, to, *operands, implementation=implementation, axes=2)
    assert result.scales.shape == ((5, 1, 1) if granularity == "token" else ())


# The rows that a thread takes at once, more of them than one task has, and arrays beyond every cache.
@pytest.mark.parametrize("dims", [(1, 24), (2, 24), (3, 24), (5, 24), (4099, 24), (2048, 4096)], ids=str)
@kinds
def test_any_number_of_rows_is_exact(kind, dims):
    assert_exact(kind, E4M3, *draw_operands(dims, "bfloat16"), implementation=None)


def all_roundings():
    """Numbers of every sign, exponent and leading mantissa bits, on ties and on both sides of them."""
    upper = np.arange(2**16, dtype=np.uint32) << 16
    return jnp.asarray(np.concatenate([upper, upper | 1, upper | 0x7FFF, upper | 0x8000, upper | 0xFFFF]).view("f4"))


# Rows of ones have a mean square of 1, so that y is the scale; rows of zeros leave the bias.
@implementations
@to_dtypes
@kinds
def test_every_rounding_is_exact(kind, to, implementation):
    numbers = all_roundings()
    x, scale, bias = (jnp.ones, numbers, None) if kind == "rms" else (jnp.zeros, None, numbers)
    operands, options = (x((1, numbers.size)), scale, bias), {"epsilon": 0.0 if kind == "rms" else 1.0}
    quantization = Quantization(to, "tensor")

    def function(*args):
        return QUANTIZED[kind](
            *args, quantization=quantization, static_scale=1.0, implementation=implementation, **options
        )

    y = plain(kind, implementation, **options)(*operands)
    assert_same([jax.jit(function)(*operands).values], by_numpy(y, quantization, static_scale=1.0)[:1])


X, SCALE, BIAS = draw_x((3, 256)), draw_scale((256,)), draw_bias((256,))
ORDINARY = {"x": X, "scale": SCALE, "bias": jnp.zeros(256), "smooth": jnp.ones(256)}
# The operands that are not ordinary.
EDGES = {
    "a row of zeros": {"x": X.at[1].set(0)},
    "rows of zeros and a bias": {"x": 0 * X, "bias": BIAS},
    "NaN in a row": {"x": X.at[1, 77].set(np.nan)},
    "infinity in a row": {"x": X.at[1, 77].set(-np.inf)},
    "NaN in a column": {"scale": SCALE.at[255].set(np.nan)},
    "infinity in a column": {"scale": SCALE.at[200].set(np.inf)},
    "two infinities": {"bias": BIAS.at[jnp.array([0, 255])].set(np.array([np.inf, -np.inf]))},
    "huge results": {"scale": 1e38 * SCALE},
    "results beyond float32": {"scale": 1e38 * SCALE, "smooth": 100 * jnp.ones(256)},
    "tiny results": {"scale": 1e-36 * SCALE},
    "subnormal results": {"scale": 1e-20 * SCALE, "smooth": 1e-20 * draw_smooth((256,))},
    "subnormal and normal results": {"smooth": jnp.logspace(-44, 0, 256)},
    "subnormal and tiny results": {"scale": 1e-36 * SCALE, "smooth": jnp.logspace(-4, 0, 256)},
    "zeros of either sign": {"scale": 0 * SCALE},
    "zeros of either sign and no bias": {"scale": 0 * SCALE, "bias": None},
    "one large number": {"x": 1e-3 * X.at[1, 5].set(1e8)},
}
# Keywords of Quantization.
EDGES_TO = {
    "float8_e4m3fn": E4M3,
    "float8_e5m2": E5M2,
    "int8": INT8,
    "groups": {**E4M3, **GRANULARITIES["groups of 64"]},
    "powers of two": {**E4M3, "power_of_two": True},
    "a bound": {**INT8, "max_scale": 0.25},
    "the least bound": {**E5M2, **GRANULARITIES["groups of 128"], "max_scale": 2.0**-126},
    "a given scale": {**E4M3, **GRANULARITIES["tensor"]},
}


@implementations
@pytest.mark.parametrize("name", EDGES)
@pytest.mark.parametrize("to", EDGES_TO)
@kinds
def test_edges_are_exact(kind, to, name, implementation):
    assert_exact(kind, EDGES_TO[to], **ORDINARY | EDGES[name], implementation=implementation)


@granularities
@kinds
def test_no_rows(kind, granularity):
    result = assert_exact(kind, {**E4M3, **GRANULARITIES[granularity]}, jnp.zeros((3, 0, 128)), implementation=None)
    assert result.values.shape == (3, 0, 128)


@kinds
def test_rows_of_no_elements(kind):
    result = quantize(kind, Quantization("int8"))(jnp.zeros((3, 0)))
    np.testing.assert_array_equal(result.scales, np.ones((3, 1)))


# Law 3. On a GPU few rows may have a kernel of their own.
@pytest.mark.parametrize(
    ("granularity", "cols"),
    [*(("token", n) for n in (1, 31, 128, 1021, 4096, 40_000)), *(("groups of 64", n) for n in (64, 1024, 40_000))],
)
@dtypes
@kinds
def test_a_row_alone(kind, dtype, granularity, cols):
    x, scale, bias, smooth = draw_operands((41, cols), dtype)
    function = quantize(kind, Quantization("float8_e4m3fn", **GRANULARITIES[granularity]))
    alone, many = function(x[2:3], scale, bias, smooth), function(x, scale, bias, smooth)
    assert bits((alone.values, alone.scales)) == bits((many.values[2:3], many.scales[2:3]))


# On a GPU more rows than have a block at once have a kernel with fewer registers.
@pytest.mark.parametrize("dims", [(2500, 4096), (40_000, 128), (9000, 1024)], ids=str)
@dtypes
@kinds
def test_few_rows_among_many(kind, dtype, dims):
    x, scale, _, smooth = draw_operands(dims, dtype)
    scale = scale.at[::7].set(-0.0)
    function = quantize(kind, Quantization("float8_e4m3fn"))
    few, many = function(x[5:9], scale, None, smooth), function(x, scale, None, smooth)
    assert bits((few.values, few.scales)) == bits((many.values[5:9], many.scales[5:9]))


# XLA may hand a kernel the slice itself, whose first row is aligned to nothing.
@pytest.mark.parametrize("cols", [31, 128, 1021])
@dtypes
@kinds
def test_rows_at_an_odd_element(kind, dtype, cols):
    x, *weights = draw_operands((9, cols), dtype)
    function = quantize(kind, Quantization("float8_e5m2"))
    shifted = jax.jit(lambda flat: function(flat[1:].reshape(x.shape), *weights))
    assert bits(shifted(jnp.pad(x.reshape(-1), (1, 0)))) == bits(function(x, *weights))


# Law 4.
@granularities
@kinds
def test_runs_repeat_themselves(kind, granularity):
    function = quantize(kind, Quantization("int8", **GRANULARITIES[granularity]))
    operands = draw_operands((513, 640))
    first = bits(function(*operands))
    assert all(bits(function(*operands)) == first for _ in range(3))


@pytest.mark.parametrize(
    "scale", [STATIC_SCALE, np.float64(STATIC_SCALE), jnp.float32(STATIC_SCALE), jnp.bfloat16(0.013)], ids=repr
)
def test_a_static_scale_is_returned_as_float32(scale):
    result = QUANTIZED["rms"](X, quantization=Quantization("int8", "tensor"), static_scale=scale)
    assert_same([result.scales], [np.float32(scale)])


# To the nearest, unless it is clipped: half of a step is lost at most.
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("granularity", ["token", "groups of 64", "groups of 128"])
@kinds
def test_dequantised(kind, granularity, dtype):
    result = quantize(kind, Quantization("int8", **GRANULARITIES[granularity]))(X, SCALE)
    steps = np.repeat(result.scales, X.shape[1] // result.scales.shape[1], 1)
    exact = np.float32(result.values) * steps
    assert_same([result.dequantize(dtype)], [jnp.asarray(exact, dtype)])
    y = NORMS[kind](X, SCALE)
    assert np.all(np.abs(exact - y) <= 0.5001 * steps)


def test_dequantised_with_a_scale_for_each_example():
    values, scales = jnp.ones((3, 2, 8), "int8"), jnp.array([1.0, 2.0, 3.0])
    np.testing.assert_array_equal(Quantized(values, scales).dequantize(), scales[:, None, None] * np.ones((3, 2, 8)))


def test_a_quantization_is_static():
    one, same = Quantization(jnp.int8, "group"), Quantization("int8", "group", group_size=128)
    assert (one, hash(one)) == (same, hash(same))
    traced = []

    @jax.jit
    def function(x, quantization):
        traced.append(quantization)
        return QUANTIZED["rms"](x, quantization=quantization)

    assert len(jax.tree.leaves(function(X, one))) == len(jax.tree.leaves(function(X, same))) == 2
    assert traced == [one]
