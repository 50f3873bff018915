"""Quantised norms. Law 5 to the last tie: bit for bit NumPy's quantisation of the norm. And what else they give."""

from functools import partial

import cases
import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quantizing
from cases import ADDS, DTYPES, KINDS, NORMS, PAIRS, assert_close, bits, draw, draw_residual, draw_smooth, draw_x
from coverage import cover
from hlo import count_native_calls
from native import is_platform_with_kernels, native_calls
from quantizing import GRANULARITIES, IMPLEMENTATIONS, QUANTIZED, TO, assert_exact, assert_same, quantize, to

import jaxnorm
from jaxnorm import Quantization

kinds = pytest.mark.parametrize("kind", KINDS)
TO_INT8 = Quantization("int8")
NAMED = {"rms": jaxnorm.rms_norm_quantized, "layer": jaxnorm.layer_norm_quantized}


def draw_operands(dims, dtype="float32", weight_dtype="float32", axes=1):
    """x, scale, bias and smooth factors."""
    weights = (draw(dims[-axes:], weight_dtype) for draw in (cases.draw_scale, cases.draw_bias, draw_smooth))
    return draw_x(dims, dtype), *weights


OF_AXES = ("token", "tensor")


# Half types of x alone are left to the kernels, as the formula's input is float32 whatever x is.
@cover(
    kind=KINDS,
    to=TO,
    shared=[*((granularity, (7, 640), 1) for granularity in GRANULARITIES), *((of, (5, 6, 40), 2) for of in OF_AXES)],
    how=[
        *((dtype, None, i) for dtype in DTYPES for i in (IMPLEMENTATIONS if dtype == "float32" else (None,))),
        *((*pair, i) for pair in PAIRS for i in IMPLEMENTATIONS),
    ],
    weight_dtype=DTYPES,
)
def test_every_dtype_and_granularity_is_exact(kind, to, shared, how, weight_dtype):
    (granularity, dims, axes), (dtype, residual_dtype, implementation) = shared, how
    residual = residual_dtype and draw_residual(dims, residual_dtype)
    operands, to = draw_operands(dims, dtype, weight_dtype, axes), {"dtype": to, **GRANULARITIES[granularity]}
    result = assert_exact(kind, to, *operands, residual, implementation=implementation, axes=axes)
    if axes > 1:
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

    y = quantizing.plain(kind, implementation, **options)(*operands)
    assert_same([jax.jit(function)(*operands).values], quantizing.by_numpy(y, quantization, static_scale=1.0)[:1])


X, SCALE, BIAS, SMOOTH = draw_operands((3, 256))
ORDINARY = {"x": X, "scale": SCALE, "bias": BIAS, "smooth": SMOOTH}
PLAIN = {"bias": jnp.zeros(256), "smooth": jnp.ones(256)}
# The operands that are replaced, and keywords of the norm.
CALLS = {
    "ordinary": {},
    "no weights": {"scale": None, "bias": None, "smooth": None},
    "scale alone": {"bias": None, "smooth": None},
    "bias alone": {"scale": None, "smooth": None},
    "smooth factors alone": {"scale": None, "bias": None},
    "Gemma's offset": {"scale_offset": 1.0},
    "a large epsilon": {"epsilon": 1.0},
    "a row of zeros": {**PLAIN, "x": X.at[1].set(0)},
    "rows of zeros and a bias": {**PLAIN, "x": 0 * X, "bias": BIAS},
    "NaN in a row": {**PLAIN, "x": X.at[1, 77].set(np.nan)},
    "infinity in a row": {**PLAIN, "x": X.at[1, 77].set(-np.inf)},
    "NaN in a column": {**PLAIN, "scale": SCALE.at[255].set(np.nan)},
    "infinity in a column": {**PLAIN, "scale": SCALE.at[200].set(np.inf)},
    "two infinities": {**PLAIN, "bias": BIAS.at[jnp.array([0, 255])].set(np.array([np.inf, -np.inf]))},
    "huge results": {**PLAIN, "scale": 1e38 * SCALE},
    "results beyond float32": {**PLAIN, "scale": 1e38 * SCALE, "smooth": 100 * jnp.ones(256)},
    "tiny results": {**PLAIN, "scale": 1e-36 * SCALE},
    "subnormal results": {**PLAIN, "scale": 1e-20 * SCALE, "smooth": 1e-20 * SMOOTH},
    "subnormal and normal results": {**PLAIN, "smooth": jnp.logspace(-44, 0, 256)},
    "subnormal and tiny results": {**PLAIN, "scale": 1e-36 * SCALE, "smooth": jnp.logspace(-4, 0, 256)},
    "zeros of either sign": {**PLAIN, "scale": 0 * SCALE},
    "zeros of either sign and no bias": {**PLAIN, "scale": 0 * SCALE, "bias": None},
    "a square beyond float32": {**PLAIN, "x": X.at[1, 5].set(1e20)},
    "no elements": dict.fromkeys(("scale", "bias", "smooth")) | {"x": jnp.zeros((3, 0))},
    "one large number": {**PLAIN, "x": 1e-3 * X.at[1, 5].set(1e8)},
}
# Which threads of a host count subnormal numbers as zero is no matter of the kernels.
CALLS = {name: given for name, given in CALLS.items() if not (emulated.IS_ON and "subnormal" in name)}
OF_GROUPS = {**quantizing.E4M3, **GRANULARITIES["groups of 128"]}
# Keywords of Quantization.
CALLS_TO = {
    "float8_e4m3fn": quantizing.E4M3,
    "float8_e5m2": quantizing.E5M2,
    "int8": quantizing.INT8,
    "groups": {**quantizing.E4M3, **GRANULARITIES["groups of 64"]},
    "wide groups": OF_GROUPS,
    "a given scale": {**quantizing.E4M3, **GRANULARITIES["tensor"]},
    "a bound": {**quantizing.INT8, "max_scale": 0.25},
    "the least bound": {**quantizing.E5M2, **GRANULARITIES["groups of 128"], "max_scale": 2.0**-126},
    **{
        f"{name}, {how}": {**to, **options}
        for name, to in {"row": quantizing.E4M3, "groups": OF_GROUPS}.items()
        for how, options in {
            "a bound that clips": {"max_scale": 1e-3},
            "a bound that does not": {"max_scale": 1e3},
            "powers of two": {"power_of_two": True},
            "powers of two, bounded": {"power_of_two": True, "max_scale": 0.0078125},
        }.items()
    },
}


@pytest.mark.on_emulator
@cover(kind=KINDS, to=CALLS_TO.keys(), name=CALLS.keys(), implementation=IMPLEMENTATIONS)
def test_every_option_and_edge_is_exact(kind, to, name, implementation):
    assert_exact(kind, CALLS_TO[to], **ORDINARY | CALLS[name], implementation=implementation)


# On a GPU more rows than have a block at once have a kernel with fewer registers.
@cover(kind=KINDS, dtype=DTYPES, dims=[(2500, 4096), (40_000, 128), (9000, 1024)])
def test_few_rows_among_many_with_a_scale_of_negative_zeros(kind, dtype, dims):
    x, scale, _, smooth = draw_operands(dims, dtype)
    scale, function = scale.at[::7].set(-0.0), quantize(kind, Quantization("float8_e4m3fn"))
    few, many = function(x[5:9], scale, None, smooth), function(x, scale, None, smooth)
    assert bits((few.values, few.scales)) == bits((many.values[5:9], many.scales[5:9]))


@pytest.mark.parametrize("number", [float, np.float64, jnp.float32, jnp.bfloat16])
def test_a_static_scale_is_returned_as_float32(number):
    result = QUANTIZED["rms"](X, quantization=Quantization("int8", "tensor"), static_scale=number(0.013))
    assert_same([result.scales], [np.float32(number(0.013))])


# By itself, and by the program that quantises: XLA leaves no rounding out, though it might have precision to offer.
@cover(
    kind=KINDS,
    to=TO,
    granularity=["token", "groups of 64", "groups of 128"],
    implementation=[None, "xla"],
    dtype=["float32", "bfloat16"],
)
def test_dequantised(kind, to, granularity, implementation, dtype):
    function = quantize(kind, Quantization(to, **GRANULARITIES[granularity]), implementation)
    result = function(X, SCALE)
    steps = np.repeat(result.scales, X.shape[1] // result.scales.shape[1], 1)
    exact = np.float32(result.values) * steps
    assert_same([result.dequantize(dtype)], [jnp.asarray(exact, dtype)])
    values = np.asarray(jax.jit(lambda *args: function(*args).dequantize())(X, SCALE)) / steps
    rounded = np.rint(values) if to == "int8" else values.astype(to).astype(np.float32)
    np.testing.assert_allclose(values, rounded, rtol=1e-5)
    if to == "int8":  # to the nearest, unless it is clipped: half of a step is lost at most
        assert np.all(np.abs(exact - NORMS[kind](X, SCALE)) <= 0.5001 * steps)


# Weights have a batch of their own only in the formula: it adds in another order than the kernel, so that a number on a
# tie may go either way.
@cover(kind=KINDS, moved=[(1,), (2,), (3,), (0, 1, 2, 3, 4)], granularity=GRANULARITIES.keys())
def test_vmap_over_weights(kind, moved, granularity):
    function = quantize(kind, to("int8", granularity))
    args = *draw_operands((6, 128)), draw_residual((6, 128))
    axes = [0 if i in moved else None for i in range(5)]
    examples = [jnp.stack([a, 2 * a, jnp.sin(a)]) if i in moved else a for i, a in enumerate(args)]
    batched, total = jax.jit(jax.vmap(function, axes))(*examples)
    for i in range(3):
        one, one_total = function(*(a[i] if j in moved else a for j, a in enumerate(examples)))
        assert_close((batched.scales[i], total[i]), (one.scales, one_total))
        differences = np.abs(np.int32(batched.values[i]) - np.int32(one.values))
        assert (differences.max() <= 1, differences.mean() < 0.01) == (True, True)


# Rows of every regime of the kernels; 4097 columns are no whole vectors.
@pytest.mark.on_emulator
@cover(
    kind=KINDS,
    dtype=DTYPES,
    cols=[64, 640, 4096, 4097, 20480],
    given=[(), ("residual",), ("smooth",), ("residual", "smooth")],
)
def test_the_unquantised_result(kind, dtype, cols, given):
    x, *of_norm = draw_x((3, cols), dtype), cases.draw_scale((cols,), dtype), cases.draw_bias((cols,), dtype)
    residual = draw_residual((3, cols), dtype) if "residual" in given else None
    args = x, *of_norm, draw_smooth((cols,)) if "smooth" in given else None, residual
    quantization = Quantization("float8_e4m3fn")
    first, *_, y = quantize(kind, quantization, with_unquantized=True)(*args)
    if residual is None:
        expected = jax.jit(lambda x: NORMS[kind](x, *of_norm, implementation="native"))(x)
    else:
        expected = jax.jit(lambda x: ADDS[kind](x, residual, *of_norm, implementation="native")[0])(x)
    assert_same([y], [expected])
    alone = quantize(kind, quantization)(*args)
    alone = alone if residual is None else alone[0]
    assert_same([first.values, first.scales], [alone.values, alone.scales])


@pytest.mark.on_emulator
@cover(kind=KINDS, with_residual=[False, True], implementation=[None, "xla"])
def test_statistics(kind, with_residual, implementation):
    x = draw_x((3, 4, 64))
    residual = draw_residual(x.shape) if with_residual else None
    options = {"quantization": TO_INT8, "implementation": implementation, "epsilon": 0.5}
    result = NAMED[kind](x, residual=residual, **options)
    assert (result.y, result.residual is None) == (None, not with_residual)
    rows = np.asarray(x if residual is None else x + residual, np.float64)
    mean = rows.mean(-1, keepdims=True) if kind == "layer" else None
    variance = ((rows - (0 if mean is None else mean)) ** 2).mean(-1, keepdims=True)
    assert result.statistics.rstd.shape == (3, 4, 1)
    np.testing.assert_allclose(result.statistics.rstd, 1 / np.sqrt(variance + 0.5), rtol=1e-6)
    assert (result.statistics.mean is None) == (mean is None)
    if mean is not None:
        np.testing.assert_allclose(result.statistics.mean, mean, rtol=1e-5, atol=1e-6)


def test_examples_of_all_results():
    function = partial(jaxnorm.layer_norm_quantized, quantization=TO_INT8, with_unquantized=True)
    found = jax.vmap(lambda x: function(x, residual=x))(jnp.stack([X, 2 * X]))
    assert [type(result).__name__ for result in found] == ["Quantized", "ArrayImpl", "ArrayImpl", "RowStatistics"]
    assert bits(jax.tree.map(lambda a: a[0], found)) == bits(function(X, residual=X))
    np.testing.assert_array_equal(found.residual[0], X + X)


DIMS = (12, 128)
WEIGHTS = DIMS[-1:]


@cover(kind=KINDS, with_residual=[False, True], smooth=[False, True], implementation=[None, "xla"])
def test_gradients_of_all_results(kind, with_residual, smooth, implementation):
    operands = draw_operands(DIMS)[:3] + ((draw_residual(DIMS),) if with_residual else ())
    factor = draw_smooth(WEIGHTS) if smooth else None
    w, v, u = (draw(name, DIMS) for name in "wvu")
    options = {"straight_through": True, "with_unquantized": True, "implementation": implementation}

    def ours(x, scale, bias, residual=None):
        given = {"quantization": TO_INT8, "smooth_scale": factor, "residual": residual}
        first, total, y, stats = NAMED[kind](x, scale, bias=bias, **given, **options)
        of_sum = 0 if total is None else (total * u).sum()
        return (first.dequantize() * w + y * v).sum() + of_sum + stats.rstd.sum()

    def theirs(x, scale, bias, residual=None):
        total = x if residual is None else x + residual
        y = NORMS[kind](total, scale, bias, implementation="xla")
        factors = 1 if factor is None else factor
        return (y * factors * w + y * v).sum() + (0 if residual is None else (total * u).sum())

    numbers = tuple(range(len(operands)))
    gradient = jax.jit(jax.grad(ours, numbers))
    for a, e in zip(gradient(*operands), jax.grad(theirs, numbers)(*operands), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-4)
    if is_platform_with_kernels() and implementation is None:
        assert count_native_calls(gradient.lower(*operands).as_text()) == native_calls(kind, quantized=1, bwd=1)
