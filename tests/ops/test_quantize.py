"""`quantize`: bit for bit NumPy's arithmetic, and the derivative that is agreed on."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cases import draw
from coverage import cover
from quantizing import to

import jaxnorm
from jaxnorm import quantize

LARGEST = {"float8_e4m3fn": 448, "float8_e5m2": 57344, "int8": 127, "int4": 7, "float4_e2m1fn": 6}
SHARED = ("token", "tensor", "groups of 64")
DIMS = (5, 3, 192)


def by_numpy(x, dtype, granularity, axis=-1):
    v = np.asarray(x, np.float32)
    rows = v.reshape(*v.shape[:-1], -1, 64) if granularity == "groups of 64" else v
    amax = np.abs(rows).max(None if granularity == "tensor" else axis, keepdims=True)
    scales = np.where(amax == 0, np.float32(1), amax / np.float32(LARGEST[dtype]))
    values = np.clip(rows * (1 / scales), -LARGEST[dtype], LARGEST[dtype])
    values = (np.rint(values) if dtype.startswith("int") else values).astype(getattr(ml_dtypes, dtype, dtype))
    return values.reshape(v.shape), {"tensor": lambda: scales.reshape(()), "groups of 64": lambda: scales[..., 0]}.get(
        granularity, lambda: scales
    )()


def assert_exact(quantized, x, dtype, granularity="token", axis=-1):
    """On a CPU bit for bit. XLA for GPUs decides how exactly it divides, so there the nearest value for its scales."""
    values, scales = by_numpy(x, dtype, granularity, axis)
    assert quantized.values.dtype == values.dtype
    assert quantized.scales.shape == scales.shape
    ours = np.asarray(quantized.values.astype(jnp.float32))
    if jax.default_backend() == "cpu":
        np.testing.assert_array_equal(ours, values.astype(np.float32))
        np.testing.assert_array_equal(quantized.scales, scales)
        return
    np.testing.assert_allclose(quantized.scales, scales, rtol=2.0**-22)
    each = np.asarray(quantized.scales, np.float64)
    if granularity == "groups of 64":
        each = np.repeat(each, 64, axis=-1)
    exact = np.clip(np.asarray(x, np.float64) / each, -LARGEST[dtype], LARGEST[dtype])
    nearest = np.abs(exact[..., None] - all_values(dtype)).min(-1)
    assert (np.abs(ours - exact) <= nearest + 2.0**-20 * np.abs(exact)).all()


def all_values(dtype):
    """Those that a dtype has."""
    if dtype.startswith("int"):
        return np.arange(-LARGEST[dtype], LARGEST[dtype] + 1.0)
    bits = 4 if dtype == "float4_e2m1fn" else 8
    values = np.arange(2**bits, dtype=np.uint8).view(getattr(ml_dtypes, dtype)).astype(np.float64)
    return values[np.isfinite(values)]


@cover(dtype=LARGEST.keys(), granularity=SHARED, x_dtype=["float32", "bfloat16", "float16"])
def test_exact(dtype, granularity, x_dtype):
    x = draw("x", DIMS, x_dtype).at[0, 0].set(0)
    assert_exact(jax.jit(quantize, static_argnums=1)(x, to(dtype, granularity)), x, dtype, granularity)


@pytest.mark.parametrize("axis", [0, 1, (0, 2)])
def test_axes(axis):
    x = draw("x", DIMS)
    assert_exact(quantize(x, to("int8"), axis=axis), x, "int8", "token", axis)


@pytest.mark.parametrize("dtype", LARGEST)
def test_ties_go_to_even(dtype):
    largest = LARGEST[dtype]
    # The scale is 1, and both neighbours of a tie are among the values.
    x = jnp.float32([largest, 0.5, 1.5, 2.5, -0.5, -2.5, 0.25, 0.75])
    assert_exact(quantize(x, to(dtype)), x, dtype)


# XLA for a CPU may lose a NaN in the maximum of many numbers.
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("size", [8, 192])
def test_a_scale_is_nan_where_a_value_is(size, axis):
    scales = quantize(draw("x", (size, size)).at[3, 5].set(jnp.nan), to("int8"), axis=axis).scales
    np.testing.assert_array_equal(np.isnan(scales.ravel()), np.arange(size) == (5, 3)[axis])


@pytest.mark.parametrize("granularity", SHARED)
def test_examples(granularity):
    x = draw("x", DIMS)
    quantized = jax.vmap(lambda x: quantize(x, to("int8", granularity)))(x)
    for i, example in enumerate(x):
        assert_exact(jax.tree.map(lambda leaf, i=i: leaf[i], quantized), example, "int8", granularity)


def test_straight_through():
    x, dy = draw("x", DIMS), draw("dy", DIMS)

    def loss(x):
        quantized = quantize(x, to("float8_e4m3fn"), straight_through=True)
        return (quantized.dequantize() * dy).sum()

    for transform in (jax.grad, lambda f: jax.jit(jax.grad(f)), lambda f: jax.grad(jax.checkpoint(f))):
        np.testing.assert_array_equal(transform(loss)(x), dy)
    np.testing.assert_allclose(jax.jvp(loss, (x,), (dy,))[1], (dy**2).sum(), rtol=1e-6)


def test_no_derivative():
    with pytest.raises(ValueError, match=r"quantize: .* no derivative.*straight_through=True"):
        jax.grad(lambda x: quantize(x, to("int8")).dequantize().sum())(draw("x", DIMS))


def test_powers_of_two_and_a_bound():
    x = draw("x", DIMS)
    scales = quantize(x, to("float4_e2m1fn", power_of_two=True)).scales
    np.testing.assert_array_equal(np.log2(scales) % 1, 0)
    assert quantize(x, to("int4", max_scale=0.125)).scales.max() == 0.125


X = jnp.ones((3, 128))
BAD_CALLS = {
    "no array": ((None, to("int8")), {}, TypeError, "x must be an array"),
    "integers": ((jnp.ones((3, 8), "int32"), to("int8")), {}, TypeError, "x must have a floating-point dtype"),
    "a dtype": ((X, jnp.int8), {}, TypeError, "quantization must be a jaxnorm.Quantization"),
    "a dtype by name": ((X,), {"dtype": jnp.int8}, TypeError, "'dtype'; .*quantization=jaxnorm.Quantization"),
    "the dtype of the result": ((X, to("int8")), {"out_dtype": "int8"}, TypeError, "that of quantization"),
    "the quantization first": ((to("int8"), X), {}, TypeError, "x and quantization in each other's place"),
    "an axis": ((X, to("int8")), {"axis": 2}, ValueError, "axis 2 is out of range"),
    "groups": ((X[:, :100], to("int8", "groups of 64")), {}, ValueError, "64 does not divide"),
    "groups of another axis": ((X, to("int8", "groups of 64")), {"axis": 0}, ValueError, "groups the last axis"),
    "no flag": ((X, to("int8")), {"straight_through": 1}, TypeError, "straight_through must be a bool"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_errors(name):
    args, keywords, error, message = BAD_CALLS[name]
    with pytest.raises(error, match=message):
        quantize(*args, **keywords)


def test_no_norm_quantises_to_4_bits():
    with pytest.raises(TypeError, match=r"rms_norm_quantized: .*int4, which is for weights; expected float8_e4m3fn"):
        jaxnorm.rms_norm_quantized(X, quantization=to("int4"))
    with pytest.raises(ValueError, match="power_of_two is for floats"):
        to("int4", power_of_two=True)


@pytest.mark.needs("kernels")
def test_the_same_as_a_norm():
    x = draw("x", (7, 256))
    y = jaxnorm.rms_norm(x, implementation="native")
    quantized = jaxnorm.rms_norm_quantized(x, quantization=to("int8"), implementation="native")
    assert_exact(quantized, y, "int8")
    assert_exact(quantize(y, to("int8")), y, "int8")


@pytest.mark.parametrize("shape", [(4, 0), (0, 0), (0, 64)], ids=str)
@pytest.mark.parametrize("layout", ["row", "column"])
def test_no_groups(shape, layout):
    to_groups = jaxnorm.Quantization(jnp.int8, "group", 64, scales_layout=layout)
    for quantized in (
        quantize(jnp.ones(shape), to_groups),
        jaxnorm.rms_norm_quantized(jnp.ones(shape), quantization=to_groups),
    ):
        assert quantized.dequantize().shape == shape


# What docs/numerics.md says of them.
@cover(dtype=list(LARGEST), value=[np.inf, -np.inf])
def test_an_infinity(dtype, value):
    x = jnp.asarray([[1, value, -2, 0], [1, 2, -3, 0]])
    quantized, alone = quantize(x, to(dtype)), quantize(x[1:], to(dtype))
    values = np.float32(quantized.values.astype(jnp.float32))
    np.testing.assert_array_equal(values[0], [0, np.nan if dtype.startswith("float8") else 0, 0, 0])
    np.testing.assert_array_equal(quantized.scales.ravel()[0], np.inf)
    assert np.isnan(quantized.dequantize()[0]).all()
    np.testing.assert_array_equal(quantized.dequantize()[1:], alone.dequantize())


@cover(norm=["rms_norm_quantized", "layer_norm_quantized"], dtype=["int8", "float8_e4m3fn"], value=[np.inf, 1e20])
def test_a_norm_of_what_is_too_large(norm, dtype, value):
    x = draw("x", (3, 64)).at[1, 5].set(value)
    quantized = jax.jit(lambda x: getattr(jaxnorm, norm)(x, quantization=to(dtype)))(x)
    nothing = np.nan if np.isinf(value) else 0
    expected = np.full(64, nothing if dtype.startswith("float8") else 0, np.float32)
    np.testing.assert_array_equal(np.abs(np.float32(quantized.values[1].astype(jnp.float32))), expected)
    np.testing.assert_array_equal(quantized.scales.ravel()[1], np.nan if np.isinf(value) else 1)
