"""`quantized_dot`: the product of what its operands stand for, sums beyond int32, and cuBLASLt's products."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import draw
from coverage import cover
from hlo import count_native_calls
from internals import choose_fastest, ffi
from jax.sharding import AxisType, PartitionSpec as P
from meshes import mesh_of, placed
from quantizing import to

from jaxnorm import Float8Recipe, Quantized, quantize, quantize_kernel, quantized_dot
from ops.products import E4M3, FORMS, Form, value_and_gradients, with_zeros

exact_products = pytest.mark.usefixtures("exact_products")

DIMS, OUTPUTS = (4, 6, 128), 48
# Those of x, None where it is an array, and of the kernel.
PAIRS = [
    *(("int8", "int8"), ("int8", "int4")),
    *(("float8_e4m3fn", "float8_e4m3fn"), ("float8_e4m3fn", "float8_e5m2"), ("float8_e5m2", "float8_e5m2")),
    ("float8_e4m3fn", "float4_e2m1fn"),
    *((None, dtype) for dtype in ("int8", "int4", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn")),
]


def operands(x_dtype=None, kernel_dtype="int8", granularity="token", *, dims=DIMS, outputs=OUTPUTS, dtype="float32"):
    x, kernel = draw("x", dims, dtype), draw("kernel", (dims[-1], outputs), dtype, std=0.3)
    x = x if x_dtype is None else quantize(x, to(x_dtype, granularity))
    return x, quantize_kernel(kernel, to(kernel_dtype, granularity))


def exactly(array):
    """What an operand stands for, in float64."""
    if isinstance(array, Quantized):
        lying = np.asarray(array.values.astype(jnp.float32), np.float64) * np.asarray(array.scales, np.float64)
        return lying.T if array.transposed else lying
    return np.asarray(array, np.float64)


@exact_products
@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("granularity", ["token", "tensor"])
@pytest.mark.parametrize("kernel_dtype", ["int8", "int4"])
def test_integers_are_exact(kernel_dtype, granularity, out_dtype):
    x, kernel = operands("int8", kernel_dtype, granularity)
    y = jax.jit(quantized_dot, static_argnames="out_dtype")(x, kernel, out_dtype=out_dtype)
    total = np.asarray(x.values, np.int32) @ np.asarray(kernel.values.astype(jnp.int8), np.int32).T
    scales = np.broadcast_arrays(x.scales, np.broadcast_to(kernel.scales, (OUTPUTS, 1))[:, 0])
    expected = (total.astype(np.float32) * np.minimum(*scales)) * np.maximum(*scales)
    np.testing.assert_array_equal(y, expected.astype(jnp.dtype(out_dtype)))


@exact_products
@cover(pair=PAIRS, granularity=["token", "tensor"], dtype=["float32", "bfloat16", "float16"], rows=["many", "one"])
def test_within_the_bound_of_a_sum(pair, granularity, dtype, rows):
    x, kernel = operands(*pair, granularity, dims=DIMS if rows == "many" else (1, DIMS[-1]), dtype=dtype)
    y = jax.jit(quantized_dot, static_argnames="out_dtype")(x, kernel, out_dtype="float32")
    a, b = exactly(x), exactly(kernel)
    bound = 2.0**-24 * (DIMS[-1] + 3) * (np.abs(a) @ np.abs(b))
    assert (np.abs(np.asarray(y, np.float64) - a @ b) <= bound).all()


# An array would be summed before the scale.
@exact_products
@cover(
    form={name: form for name, form in FORMS.items() if form.x is not None}
    | {"powers of two": Form(Float8Recipe(power_of_two=True), E4M3, E4M3)},
    factors=[(2.0**118, 2.0**-20), (2.0**-20, 2.0**118), (2.0**-60, 2.0**-60)],
)
def test_scales_whose_products_float32_does_not_hold(form, factors):
    of_x, of_kernel = factors

    x, kernel, _, dy = with_zeros((*DIMS, OUTPUTS))
    y, dx, dw = value_and_gradients(form, x, kernel, dy)
    expected = (y * (of_x * of_kernel), dx * of_kernel, dw * of_x)
    actual = value_and_gradients(form, x * of_x, kernel * of_kernel, dy)
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=2.0**-20, atol=2.0**-20 * np.abs(e).max())


@exact_products
@pytest.mark.parametrize(("largest", "is_finite"), [(1e34, True), (1e37, False)])
def test_an_array_is_summed_before_the_scale(largest, is_finite):
    kernel = quantize_kernel(jnp.full((64, 32), 1e-9), to("int8"))
    y = quantized_dot(jnp.full((8, 64), largest), kernel)
    assert bool(jnp.isfinite(y).all()) == is_finite


@exact_products
def test_dtypes_of_the_result():
    x, kernel = operands("int8")
    assert quantized_dot(x, kernel).dtype == jnp.bfloat16
    assert quantized_dot(x, kernel, out_dtype="float16").dtype == jnp.float16
    assert quantized_dot(draw("x", DIMS, "float16"), kernel).dtype == jnp.float16
    assert quantized_dot(draw("x", DIMS), kernel).shape == (*DIMS[:-1], OUTPUTS)


@exact_products
def test_float64_stays_wide():
    with jax.enable_x64(True):
        x, kernel = jnp.asarray(exactly(draw("x", DIMS))), operands()[1]
        y = quantized_dot(x, kernel)
        assert y.dtype == jnp.float64
        np.testing.assert_allclose(y, exactly(x) @ exactly(kernel), rtol=0, atol=1e-13)


# Values and scales do not move, by the convention.
@pytest.mark.jax_version
@exact_products
def test_second_derivatives_by_an_array():
    x, kernel = draw("x", DIMS[-1:]), operands()[1]
    w = exactly(kernel)
    hessian = jax.hessian(lambda x: (quantized_dot(x, kernel) ** 2).sum() / 2)(x)
    np.testing.assert_allclose(hessian, w @ w.T, rtol=1e-3, atol=1e-3)


# Columns of which int32 holds every sum of products, -128 times -128 (or -8) included; one more, and several parts.
LONGEST = {"int8": 2**17 - 1, "int4": 2**21 - 1}
LONG = [
    ("int8", LONGEST["int8"]),
    *(("int8", cols) for cols in (2**17, 133_144, 133_145, 400_003)),
    ("int4", LONGEST["int4"]),
    ("int4", 2**21),
]


def long_operands(cols, kernel_dtype, dims=(2,), outputs=3):
    """Integers of which some rows have the largest products of either sign throughout, the others any."""
    random = np.random.default_rng(cols)
    x, least = random.integers(-128, 128, (*dims, cols)).astype(np.int8), int(jnp.iinfo(kernel_dtype).min)
    kernel = random.integers(least, -least, (outputs, cols)).astype(np.int8)
    x[..., 0, :], kernel[0], kernel[1] = -128, least, -least - 1
    return x, kernel


def as_quantized(x, kernel, kernel_dtype="int8"):
    """With scales that round nothing."""
    scales = [jnp.full((*values.shape[:-1], 1), scale) for values, scale in ((x, 0.5), (kernel, 2.0))]
    kernel = Quantized(jnp.asarray(kernel).astype(kernel_dtype), scales[1], transposed=True)
    return Quantized(jnp.asarray(x), scales[0]), kernel


@cover(long=LONG, dims=[(2,), (1,), (2, 2)], how=["jit", "a row alone", "vmap over x", "vmap over both"])
def test_sums_of_integers_that_int32_does_not_hold(long, dims, how):
    kernel_dtype, cols = long
    x, kernel = long_operands(cols, kernel_dtype, dims)
    x = x.reshape(-1, cols)[0] if how == "a row alone" else x
    args = as_quantized(x, kernel, kernel_dtype)

    def product(x, kernel):
        return quantized_dot(x, kernel, out_dtype="float32")

    if how == "vmap over x":
        y = jax.jit(jax.vmap(product, (0, None)))(*args)
    elif how == "vmap over both":
        y = jax.jit(jax.vmap(product, (None, 0)))(args[0], jax.tree.map(lambda a: a[:, None], args[1]))
        y = jnp.moveaxis(y[..., 0], 0, -1)
    else:
        y = jax.jit(product)(*args)
    np.testing.assert_array_equal(y, np.float32(x.astype(np.int64) @ kernel.astype(np.int64).T))


@pytest.mark.parametrize("beyond", [False, True])
def test_a_sum_that_int32_holds_is_one_product(beyond):
    args = as_quantized(*(np.ones((8, LONGEST["int8"] + beyond), np.int8) for _ in range(2)))
    assert jax.jit(quantized_dot).lower(*args).as_text().count("dot_general") == 1 + beyond


def test_the_gradient_of_a_long_sum():
    x, kernel = long_operands(LONGEST["int8"] + 1, "int8")
    x, kernel = as_quantized(x, kernel)

    def loss(carrier):
        return (quantized_dot(Quantized(x.values, x.scales, carrier), kernel, out_dtype="float32") * 3).sum()

    dx = jax.jit(jax.grad(loss))(jnp.zeros(x.values.shape))
    np.testing.assert_array_equal(dx, np.broadcast_to(3 * 2.0 * np.asarray(kernel.values, np.float64).sum(0), dx.shape))


@pytest.mark.needs("several")
def test_a_long_sum_over_devices():
    x, kernel = long_operands(2**18, "int8")
    mesh, (x8, w8) = mesh_of(jax.devices(), AxisType.Auto), as_quantized(x, kernel)
    values = placed(mesh, (x8.values, w8.values), (P(None, "b"), P(None, "b")))
    with jax.set_mesh(mesh):
        args = [replace(of, values=v) for v, of in zip(values, (x8, w8), strict=True)]
        y = jax.jit(lambda *args: quantized_dot(*args, out_dtype="float32"))(*args)
    np.testing.assert_array_equal(y, np.float32(x.astype(np.int64) @ kernel.astype(np.int64).T))


NATIVE_PAIRS = [("float8_e4m3fn", "float8_e4m3fn"), ("float8_e4m3fn", "float8_e5m2"), ("float8_e5m2", "float8_e4m3fn")]
CALL = {"jaxnorm_quantized_dot": 1}
# For which cuBLASLt scales rows and columns.
HOPPER = {"9.0"}


@pytest.fixture
def is_there():
    if ffi.capabilities() != HOPPER:
        pytest.fail(f"these tests want a GPU of compute capability 9.0, there is {ffi.capabilities()}")
    assert ffi.why_no_cublaslt() is None


def on_gpu(test):
    return pytest.mark.needs("gpu")(pytest.mark.usefixtures("is_there")(test))


def native_operands(pair=NATIVE_PAIRS[0], dims=(40, 256), outputs=96, granularity="token"):
    x, kernel = draw("x", dims), draw("kernel", (dims[-1], outputs), std=0.1)
    return quantize(x, to(pair[0], granularity)), quantize_kernel(kernel, to(pair[1], granularity))


def native(x, kernel, **options):
    return jax.jit(lambda x, kernel: quantized_dot(x, kernel, implementation="native", **options))(x, kernel)


def assert_near(y, x, kernel, bias=0.0, digits=2.0**-12):
    """The units of a GPU keep about 13 bits of what they add up."""
    a, b = (np.asarray(array.dequantize(), np.float64) for array in (x, kernel))
    expected, size = a @ b + bias, np.abs(a) @ np.abs(b)
    allowed = digits * size + np.abs(expected) * float(jnp.finfo(y.dtype).eps)
    assert (np.abs(np.asarray(y, np.float64) - expected) <= allowed).all()


@on_gpu
@cover(
    pair=NATIVE_PAIRS,
    rows=[0, 1, 7, 16, 300],
    granularity=["token", "tensor"],
    out_dtype=["bfloat16", "float16", "float32"],
)
def test_shapes_and_dtypes(pair, rows, granularity, out_dtype):
    x, kernel = native_operands(pair, (rows, 256), granularity=granularity)
    assert_near(native(x, kernel, out_dtype=out_dtype), x, kernel)


@on_gpu
@cover(pair=NATIVE_PAIRS, out_dtype=["bfloat16", "float16"])
def test_bias(pair, out_dtype):
    x, kernel = native_operands(pair, (4, 10, 256))
    bias = draw("bias", (96,), out_dtype)
    y = native(x, kernel, out_dtype=out_dtype, bias=bias)
    assert y.shape == (4, 10, 96)
    assert_near(y, x, kernel, np.asarray(bias, np.float64))


@on_gpu
def test_the_same_bits_each_time():
    x, kernel = native_operands(dims=(500, 1024), outputs=512)
    assert len({np.asarray(native(x, kernel)).tobytes() for _ in range(3)}) == 1


@on_gpu
def test_in_a_loop():
    x, kernel = native_operands(dims=(64, 256), outputs=256)

    def step(x, _):
        y = quantized_dot(x, kernel, implementation="native")
        return quantize(y, to(NATIVE_PAIRS[0][0])), y

    _, ys = jax.jit(lambda x: jax.lax.scan(step, x, length=5))(x)
    for y in ys:
        assert_near(y, x, kernel)
        x = quantize(y, to(NATIVE_PAIRS[0][0]))


def flat(array):
    """The elements behind one more, and how an array of this shape comes of them; of float8 by way of its bits."""
    integers = jax.lax.bitcast_convert_type(array, jnp.int8) if array.dtype.itemsize == 1 else array
    padded = jnp.pad(integers.reshape(-1), (1, 0))
    return jax.lax.bitcast_convert_type(padded, array.dtype) if array.dtype.itemsize == 1 else padded


# XLA hands a call the slice itself where it has whole 128 bytes, and cuBLASLt gets copies: all at once where they have
# room, else one block after the other.
@on_gpu
@pytest.mark.parametrize(
    ("dims", "outputs"),
    [((128, 256), 128), ((4096, 4096), 8192), ((32, 32), 2**20 + 128)],
    ids=("one", "blocks", "wide"),
)
@pytest.mark.parametrize("moved", [("x",), ("kernel",), ("bias",), ("x", "kernel", "bias")], ids=" and ".join)
def test_between_words_the_bits_are_the_same(moved, dims, outputs):
    rows = dims[0] + 32 * len("".join(moved))  # no plan for such a product is kept, of aligned arrays or others
    whole = dict(zip(("x", "kernel"), native_operands(dims=(rows, dims[1]), outputs=outputs), strict=True))
    whole["bias"] = draw("bias", (outputs,), "bfloat16")

    def product(given):
        return quantized_dot(given["x"], given["kernel"], bias=given["bias"], implementation="native")

    def of_parts(given):
        parts = {
            name: jax.tree.map(lambda f, a: f[1:].reshape(a.shape), of, whole[name]) if name in moved else of
            for name, of in given.items()
        }
        return product(parts)

    given = {name: jax.tree.map(flat, of) if name in moved else of for name, of in whole.items()}
    compiled = jax.jit(of_parts).lower(given).compile()
    assert "dynamic_slice_fusion" in compiled.as_text().replace("-", "_")
    np.testing.assert_array_equal(*(np.asarray(y, np.float32) for y in (compiled(given), jax.jit(product)(whole))))


@on_gpu
def test_examples_of_rows_are_one_call():
    x, kernel = native_operands(dims=(3, 40, 256))
    of_examples = jax.jit(jax.vmap(lambda x: quantized_dot(x, kernel, implementation="native")))
    assert count_native_calls(of_examples.lower(x).as_text()) == CALL
    assert_near(of_examples(x), x, kernel)


@on_gpu
def test_gradients_of_native_products():
    x, w = draw("x", (40, 256)), draw("kernel", (256, 96), std=0.1)

    def loss(x, w, implementation):
        x, w = (f(a, to("float8_e4m3fn"), straight_through=True) for f, a in ((quantize, x), (quantize_kernel, w)))
        return (quantized_dot(x, w, out_dtype="float32", implementation=implementation) ** 2).sum()

    ours, theirs = (jax.jit(jax.grad(lambda x, w, how=how: loss(x, w, how), (0, 1)))(x, w) for how in ("native", "xla"))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=5e-3 * np.abs(b).max())


# Large ones only; those whose sums are to have all digits are XLA's, too.
@on_gpu
@pytest.mark.parametrize(("rows", "calls"), [(4096, CALL), (16, {})])
def test_by_default(monkeypatch, rows, calls):
    choose_fastest(monkeypatch)
    x, kernel = jax.eval_shape(partial(native_operands, dims=(rows, 512), outputs=8192))
    assert count_native_calls(jax.jit(quantized_dot).lower(x, kernel).as_text()) == calls
    with jax.default_matmul_precision("highest"):
        assert count_native_calls(jax.jit(quantized_dot).lower(x, kernel).as_text()) == {}


@on_gpu
@pytest.mark.parametrize(("dims", "outputs"), [((4, 100), 96), ((4, 256), 90)])
def test_no_kernel(dims, outputs):
    x, kernel = native_operands(dims=dims, outputs=outputs)
    with pytest.raises(RuntimeError, match=r"quantized_dot: implementation='native' .*multiples of 16"):
        quantized_dot(x, kernel, implementation="native")
    assert quantized_dot(x, kernel).shape == (4, outputs)
