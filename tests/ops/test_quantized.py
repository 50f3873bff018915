"""What is particular to quantised norms. Law 5 to the last tie: bit for bit NumPy's quantisation of the norm."""

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    DTYPES,
    KINDS,
    NORMS,
    PAIRS,
    assert_close,
    bits,
    draw_bias,
    draw_residual,
    draw_scale,
    draw_smooth,
    draw_x,
)
from coverage import cover
from quantizing import (
    E4M3,
    E5M2,
    GRANULARITIES,
    IMPLEMENTATIONS,
    INT8,
    QUANTIZED,
    STATIC_SCALE,
    TO,
    assert_exact,
    assert_same,
    by_numpy,
    plain,
    quantize,
)

from jaxnorm import Quantization, Quantized

kinds = pytest.mark.parametrize("kind", KINDS)


def draw_operands(dims, dtype="float32", weight_dtype="float32"):
    features = dims[-1:]
    weights = (draw(features, weight_dtype) for draw in (draw_scale, draw_bias, draw_smooth))
    return draw_x(dims, dtype), *weights


# The formula's input is float32 whatever x is.
@cover(
    kind=KINDS,
    to=TO,
    granularity=GRANULARITIES.keys(),
    how=[*((dtype, None) for dtype in DTYPES), *(("float32", i) for i in IMPLEMENTATIONS if i)],
)
def test_every_dtype_and_granularity_is_exact(kind, to, granularity, how):
    dtype, implementation = how
    to = {"dtype": to, **GRANULARITIES[granularity]}
    assert_exact(kind, to, *draw_operands((7, 640), dtype), implementation=implementation)


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


@pytest.mark.on_emulator
@cover(kind=KINDS, granularity=["token", "groups of 128"], name=OPTIONS.keys(), implementation=IMPLEMENTATIONS)
def test_every_option_is_exact(kind, granularity, name, implementation):
    keywords, replaced, options = OPTIONS[name]
    operands = dict(zip(("x", "scale", "bias", "smooth"), draw_operands((5, 1024)), strict=True))
    to = {**E4M3, **GRANULARITIES[granularity], **keywords}
    assert_exact(kind, to, **operands | replaced, implementation=implementation, **options)


@cover(kind=KINDS, dtype=DTYPES, weight_dtype=["bfloat16", "float16"])
def test_weights_of_half_types_are_exact(kind, dtype, weight_dtype):
    assert_exact(kind, E4M3, *draw_operands((5, 321), dtype, weight_dtype), implementation=None)


@cover(kind=KINDS, dtypes=PAIRS, granularity=["token", "tensor"], implementation=IMPLEMENTATIONS)
def test_with_a_residual_is_exact(kind, dtypes, granularity, implementation):
    (dtype, residual_dtype), dims = dtypes, (7, 384)
    to = {**E4M3, **GRANULARITIES[granularity]}
    residual = draw_residual(dims, residual_dtype)
    assert_exact(kind, to, *draw_operands(dims, dtype), residual, implementation=implementation)


@cover(kind=KINDS, granularity=["token", "tensor"], implementation=IMPLEMENTATIONS)
def test_several_axes_are_exact(kind, granularity, implementation):
    dims, features = (5, 6, 40), (6, 40)
    operands = (draw_x(dims), draw_scale(features), draw_bias(features), draw_smooth(features))
    to = {**INT8, **GRANULARITIES[granularity]}
    result = assert_exact(kind, to, *operands, implementation=implementation, axes=2)
    assert result.scales.shape == ((5, 1, 1) if granularity == "token" else ())


def all_roundings():
    """Numbers of every sign, exponent and leading mantissa bits, on ties and on both sides of them."""
    upper = np.arange(2**16, dtype=np.uint32) << 16
    return jnp.asarray(np.concatenate([upper, upper | 1, upper | 0x7FFF, upper | 0x8000, upper | 0xFFFF]).view("f4"))


# Rows of ones have a mean square of 1, so that y is the scale; rows of zeros leave the bias.
@pytest.mark.on_emulator
@cover(kind=KINDS, to=TO, implementation=IMPLEMENTATIONS)
def test_every_rounding_is_exact(kind, to, implementation):
    numbers = all_roundings()
    x, scale, bias = (jnp.ones, numbers, None) if kind == "rms" else (jnp.zeros, None, numbers)
    operands, options = (x((1, numbers.size)), scale, bias), {"epsilon": 0.0 if kind == "rms" else 1.0}
    quantization = Quantization(to, "tensor")

    def function(x, scale, bias):
        return QUANTIZED[kind](
            x, scale, bias=bias, quantization=quantization, static_scale=1.0, implementation=implementation, **options
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
# Which threads of a host count subnormal numbers as zero is no matter of the kernels.
EDGES = {name: edge for name, edge in EDGES.items() if not (emulated.IS_ON and "subnormal" in name)}
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


@pytest.mark.on_emulator
@cover(kind=KINDS, to=EDGES_TO.keys(), name=EDGES.keys(), implementation=IMPLEMENTATIONS)
def test_edges_are_exact(kind, to, name, implementation):
    assert_exact(kind, EDGES_TO[to], **ORDINARY | EDGES[name], implementation=implementation)


@cover(kind=KINDS, granularity=GRANULARITIES.keys())
def test_no_rows(kind, granularity):
    result = assert_exact(kind, {**E4M3, **GRANULARITIES[granularity]}, jnp.zeros((3, 0, 128)), implementation=None)
    assert result.values.shape == (3, 0, 128)


@kinds
def test_rows_of_no_elements(kind):
    result = quantize(kind, Quantization("int8"))(jnp.zeros((3, 0)))
    np.testing.assert_array_equal(result.scales, np.ones((3, 1)))


# On a GPU more rows than have a block at once have a kernel with fewer registers.
@cover(kind=KINDS, dtype=DTYPES, dims=[(2500, 4096), (40_000, 128), (9000, 1024)])
def test_few_rows_among_many_with_a_scale_of_negative_zeros(kind, dtype, dims):
    x, scale, _, smooth = draw_operands(dims, dtype)
    scale = scale.at[::7].set(-0.0)
    function = quantize(kind, Quantization("float8_e4m3fn"))
    few, many = function(x[5:9], scale, None, smooth), function(x, scale, None, smooth)
    assert bits((few.values, few.scales)) == bits((many.values[5:9], many.scales[5:9]))


@pytest.mark.parametrize(
    "scale", [STATIC_SCALE, np.float64(STATIC_SCALE), jnp.float32(STATIC_SCALE), jnp.bfloat16(0.013)], ids=repr
)
def test_a_static_scale_is_returned_as_float32(scale):
    result = QUANTIZED["rms"](X, quantization=Quantization("int8", "tensor"), static_scale=scale)
    assert_same([result.scales], [np.float32(scale)])


# To the nearest, unless it is clipped: half of a step is lost at most.
@cover(kind=KINDS, granularity=["token", "groups of 64", "groups of 128"], dtype=["float32", "bfloat16"])
def test_dequantised(kind, granularity, dtype):
    result = quantize(kind, Quantization("int8", **GRANULARITIES[granularity]))(X, SCALE)
    steps = np.repeat(result.scales, X.shape[1] // result.scales.shape[1], 1)
    exact = np.float32(result.values) * steps
    assert_same([result.dequantize(dtype)], [jnp.asarray(exact, dtype)])
    y = NORMS[kind](X, SCALE)
    assert np.all(np.abs(exact - y) <= 0.5001 * steps)


# XLA leaves no rounding out, though it might have more precision to offer.
@cover(kind=KINDS, to=TO, granularity=["token", "groups of 64"], implementation=[None, "jnp"])
def test_dequantised_by_the_program_that_quantises(kind, to, granularity, implementation):
    function = quantize(kind, Quantization(to, **GRANULARITIES[granularity]), implementation)
    dequantized = jax.jit(lambda *args: function(*args).dequantize())(X, SCALE)
    scales = function(X, SCALE).scales
    values = np.asarray(dequantized) / np.repeat(scales, X.shape[1] // scales.shape[1], 1)
    rounded = np.rint(values) if to == "int8" else values.astype(to).astype(np.float32)
    np.testing.assert_allclose(values, rounded, rtol=1e-5)


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


# Weights have a batch of their own only in the formula: it adds in another order than the kernel, so that a number on a
# tie may go either way.
@cover(kind=KINDS, moved=[(1,), (2,), (3,), (0, 1, 2, 3, 4)], granularity=GRANULARITIES.keys())
def test_vmap_over_weights(kind, moved, granularity):
    function = quantize(kind, Quantization("int8", **GRANULARITIES[granularity]))
    args = *draw_operands((6, 128)), draw_residual((6, 128))
    axes = [0 if i in moved else None for i in range(5)]
    examples = [jnp.stack([a, 2 * a, jnp.sin(a)]) if i in moved else a for i, a in enumerate(args)]
    batched, total = jax.jit(jax.vmap(function, axes))(*examples)
    for i in range(3):
        one, one_total = function(*(a[i] if j in moved else a for j, a in enumerate(examples)))
        assert_close((batched.scales[i], total[i]), (one.scales, one_total))
        differences = np.abs(np.int32(batched.values[i]) - np.int32(one.values))
        assert (differences.max() <= 1, differences.mean() < 0.01) == (True, True)


def test_a_type_of_its_own_for_its_shape_only():
    result = jax.eval_shape(
        quantize("rms", Quantization("float8_e4m3fn", "group", 64)), jax.ShapeDtypeStruct((2**40, 128), "bfloat16")
    )
    assert (result.values.shape, result.values.dtype) == ((2**40, 128), jnp.float8_e4m3fn)
    assert (result.scales.shape, result.scales.dtype) == ((2**40, 2), jnp.float32)
