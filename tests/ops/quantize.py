"""`quantize`: bit for bit NumPy's arithmetic, the derivative that is agreed on, and how scales lie."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cases import DTYPES, draw, draw_x
from coverage import cover
from emulated import wherever
from hlo import collectives, count_native_calls
from jax import export
from jax.sharding import AxisType, PartitionSpec as P
from meshes import assert_parts_close, mesh_of, on_mesh
from native import is_platform_with_kernels
from op import call, named
from quantizing import E5M2, GRANULARITIES, OF_ARRAYS, QUANTIZED, TO, array_by_numpy, assert_same, to

import jaxnorm
from jaxnorm import Quantization, Quantized, quantize, quantize_kernel

SHARED, DIMS, BY_ROW = ("token", "tensor", "groups of 64"), (5, 3, 192), {"scales_layout": "row"}
COLUMNS = {**E5M2, **GRANULARITIES["groups of 64"], "scales_layout": "column"}
MX = Quantization("float8_e4m3fn", "group", 32, scales_dtype="float8_e8m0fnu")


def assert_exact(quantized, x, dtype, granularity="token", axis=-1):
    """Bit for bit. XLA for GPUs decides how exactly it divides: without a kernel the nearest value for its scales."""
    expected = array_by_numpy(x, to(dtype, granularity), axis)
    has_kernel = dtype in TO and granularity != "tensor" and axis == -1
    if jax.default_backend() == "cpu" or has_kernel:
        assert_same([quantized.values, quantized.scales], expected)
        return
    assert (quantized.values.dtype, quantized.scales.shape) == (expected[0].dtype, expected[1].shape)
    np.testing.assert_allclose(quantized.scales, expected[1], rtol=2.0**-22)
    each = np.asarray(quantized.scales, np.float64)
    if granularity == "groups of 64":
        each = np.repeat(each, 64, axis=-1)
    exact = np.clip(np.asarray(x, np.float64) / each, -OF_ARRAYS[dtype], OF_ARRAYS[dtype])
    nearest = np.abs(exact[..., None] - all_values(dtype)).min(-1)
    ours = np.asarray(quantized.values.astype(jnp.float32))
    assert (np.abs(ours - exact) <= nearest + 2.0**-20 * np.abs(exact)).all()


def all_values(dtype):
    """Those that a dtype has."""
    if dtype.startswith("int"):
        return np.arange(-OF_ARRAYS[dtype], OF_ARRAYS[dtype] + 1.0)
    bits = 4 if dtype == "float4_e2m1fn" else 8
    values = np.arange(2**bits, dtype=np.uint8).view(getattr(ml_dtypes, dtype)).astype(np.float64)
    return values[np.isfinite(values)]


@cover(dtype=OF_ARRAYS.keys(), granularity=SHARED, x_dtype=DTYPES)
def test_exact(dtype, granularity, x_dtype):
    x = draw("x", DIMS, x_dtype).at[0, 0].set(0)
    assert_exact(jax.jit(quantize, static_argnums=1)(x, to(dtype, granularity)), x, dtype, granularity)


@pytest.mark.parametrize("axis", [0, 1, (0, 2)])
def test_axes(axis):
    x = draw("x", DIMS)
    assert_exact(quantize(x, to("int8"), axis=axis), x, "int8", "token", axis)


# Of vectors of half types and of float32: what fills each plan's threads, and a column less; rows in clusters, and
# those that no cluster holds.
LENGTHS = (*(n - rest for n in (4, 8, 64, 128, 256, 512, 1024, 8192, 12_288, 16_384) for rest in (0, 1)), 14_336)
LENGTHS += (20_480, 40_000, 100_003, 262_144, 524_288, 600_000)
GROUPS = (128, 640, 4096, 40_960)
OPTIONS = ({}, {"max_scale": 0.013}, {"power_of_two": True}, {"power_of_two": True, "max_scale": 2.0**-7})


def extreme(dims, dtype):
    """Rows of which some have zeros, a NaN, infinities, the smallest numbers and the largest, as far as they are."""
    x, top = draw_x((max(dims[0], 9), dims[1]), dtype), jnp.finfo(dtype).max
    x = x.at[0].set(0).at[1].set(-0.0).at[2, -1].set(jnp.nan).at[3, 0].set(-jnp.inf).at[4].set(jnp.nan)
    return x.at[5].mul(jnp.finfo(dtype).tiny * 8).at[6, -1].set(top).at[7].set(-top)[: dims[0]]


def natively(x, quantization):
    q = jax.jit(partial(quantize, implementation="native"), static_argnums=1)(x, quantization)
    return [q.values, q.scales]


@pytest.mark.on_emulator
@cover(dtype=TO, row=itertools.product(("bfloat16", "float32"), LENGTHS), options=OPTIONS)
@pytest.mark.needs("kernels")
@wherever
def test_kernels_of_rows(dtype, row, options):
    x_dtype, cols = row
    x = extreme((9 if cols > 600 else 150, cols), x_dtype)
    quantization = Quantization(dtype, **{} if dtype == "int8" and "power_of_two" in options else options)
    assert_same(natively(x, quantization), array_by_numpy(x, quantization))


@pytest.mark.on_emulator
@cover(dtype=TO, x_dtype=DTYPES, cols=GROUPS, size=[32, 64, 128], options=OPTIONS)
@pytest.mark.needs("kernels")
@wherever
def test_kernels_of_groups(dtype, x_dtype, cols, size, options):
    options = {} if dtype == "int8" and "power_of_two" in options else options
    x, quantization = extreme((9, cols), x_dtype), Quantization(dtype, "group", size, **options)
    assert_same(natively(x, quantization), array_by_numpy(x, quantization))


@pytest.mark.needs("memory")
@pytest.mark.parametrize("shared", [{}, {"granularity": "group"}], ids=str)
def test_more_elements_than_an_int32_counts(shared):
    block, function = draw_x((64, 4096), "bfloat16"), jax.jit(quantize, static_argnums=1)
    q = function(jnp.tile(block, (2**13 + 1, 1)), quantization := Quantization("int8", **shared))
    assert_same([q.values[-64:], q.scales[-64:]], array_by_numpy(block, quantization))


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8), (1, 1), (5, 1), (4, 3, 8)], ids=str)
def test_empty_and_small(shape):
    x = draw("x", shape)
    assert_exact(quantize(x, to("int8")), x, "int8")
    assert_exact(jax.vmap(lambda x: quantize(x, to("int8")), 1, 1)(jnp.stack([x, x], 1)), jnp.stack([x, x], 1), "int8")


@pytest.mark.needs("kernels")
@pytest.mark.parametrize(
    ("options", "why"), [(to("int4"), "int4"), (to("int8", "tensor"), "all of x"), (to("int8"), "trailing")]
)
def test_without_a_kernel(options, why):
    axis = 0 if why == "trailing" else -1
    with pytest.raises(RuntimeError, match=f"quantize: implementation='native' .*{why}"):
        quantize(X, options, axis=axis, implementation="native")


@pytest.mark.needs("kernels")
def test_one_call():
    def step(total, x):
        q = quantize(x, to("int8"), axis=(-2, -1), straight_through=True)
        return total + (q.dequantize() ** 2).sum(), q.scales

    function = jax.jit(jax.value_and_grad(lambda x: jax.lax.scan(step, 0.0, x)[0]))
    x = draw("x", DIMS)
    calls = count_native_calls(function.lower(x).compile().as_text())
    assert calls == ({"jaxnorm_quantize_fwd": 1} if is_platform_with_kernels() else {})
    whole = jnp.stack([quantize(example, to("int8"), axis=(0, 1)).dequantize() for example in x])
    np.testing.assert_allclose(function(x)[1], 2 * whole, rtol=1e-6)


# Of a row that shares a scale devices exchange 4 bytes, and groups stay whole.
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("split", [P("a", None, None), P("a", None, "b")], ids=str)
@pytest.mark.parametrize("granularity", ["token", "groups of 64"])
def test_meshes(devices, axis_type, split, granularity):
    x, mesh = draw("x", (8, 4, 256)), mesh_of(devices, axis_type)
    function = jax.jit(lambda x: quantize(x, to("float8_e4m3fn", granularity)))
    actual, text = on_mesh(mesh, function, [x], [split])
    assert_parts_close(*((q.values, q.scales) for q in (actual, function(x))))
    exchanges = split[2] is not None and granularity == "token"
    assert collectives(text) == ({"all-reduce": 4 * 32 // mesh.shape["a"]} if exchanges else {})


# The scale is 1, and both neighbours of a tie are among the values.
@pytest.mark.parametrize("dtype", OF_ARRAYS)
def test_ties_go_to_even(dtype):
    x = jnp.float32([OF_ARRAYS[dtype], 0.5, 1.5, 2.5, -0.5, -2.5, 0.25, 0.75])
    assert_exact(quantize(x, to(dtype)), x, dtype)


# XLA for a CPU may lose a NaN in the maximum of many numbers.
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("size", [8, 192])
def test_a_scale_is_nan_where_a_value_is(size, axis):
    scales = quantize(draw("x", (size, size)).at[3, 5].set(jnp.nan), to("int8"), axis=axis).scales
    np.testing.assert_array_equal(np.isnan(scales.ravel()), np.arange(size) == (5, 3)[axis])


# What docs/numerics.md says of them.
@cover(dtype=list(OF_ARRAYS), value=[np.inf, -np.inf])
def test_an_infinity(dtype, value):
    x = jnp.asarray([[1, value, -2, 0], [1, 2, -3, 0]])
    quantized, alone = quantize(x, to(dtype)), quantize(x[1:], to(dtype))
    values = np.float32(quantized.values.astype(jnp.float32))
    np.testing.assert_array_equal(values[0], [0, np.nan if dtype.startswith("float8") else 0, 0, 0])
    np.testing.assert_array_equal(quantized.scales.ravel()[0], np.inf)
    assert np.isnan(quantized.dequantize()[0]).all()
    np.testing.assert_array_equal(quantized.dequantize()[1:], alone.dequantize())


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


def test_powers_of_two_and_a_bound():
    x = draw("x", DIMS)
    scales = quantize(x, to("float4_e2m1fn", power_of_two=True)).scales
    np.testing.assert_array_equal(np.log2(scales) % 1, 0)
    assert quantize(x, to("int4", max_scale=0.125)).scales.max() == 0.125


X = jnp.ones((3, 128))
BAD_CALLS = named(
    call(X, dtype=jnp.int8).raises(TypeError, "'dtype'; ", "quantization=jaxnorm.Quantization"),
    call(to("int8"), X).raises(TypeError, "x and quantization in each other's place"),
    call(X[:, :100], to("int8", "groups of 64")).raises(ValueError, "64 does not divide"),
    call(X, to("int8", "groups of 64"), axis=0).raises(ValueError, "groups the last axis"),
)


def test_errors_elsewhere():
    with pytest.raises(ValueError, match=r"quantize: .* no derivative.*straight_through=True"):
        jax.grad(lambda x: quantize(x, to("int8")).dequantize().sum())(X)
    with pytest.raises(TypeError, match=r"rms_norm_quantized: .*int4, which is for weights; expected float8_e4m3fn"):
        jaxnorm.rms_norm_quantized(X, quantization=to("int4"))


def gated(x, to):
    return jaxnorm.gated_rms_norm_quantized(x, jnp.cos(x), gate_first=True, quantization=to)


# `quantize`, and norms that quantise, of an array.
FUNCTIONS = {
    "quantize": quantize,
    "norm": lambda x, to: jaxnorm.rms_norm_quantized(x, quantization=to).quantized,
    "gated": gated,
}
each_function = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)


@each_function
@pytest.mark.parametrize("shape", [(4, 0), (0, 0), (0, 64)], ids=str)
@pytest.mark.parametrize("layout", ["row", "column"])
def test_no_groups(shape, layout, function):
    to_groups = Quantization(jnp.int8, "group", 64, scales_layout=layout)
    assert function(jnp.ones(shape), to_groups).dequantize().shape == shape


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
        return quantize(x, quantization)

    assert len(jax.tree.leaves(function(X, one))) == len(jax.tree.leaves(function(X, same))) == 2
    assert traced == [one]


@cover(kind=QUANTIZED, to=["float8_e4m3fn", "float8_e5m2"], group=[32, 64, 128], dtype=DTYPES)
def test_scales_as_exponents(kind, to, group, dtype):
    x = draw_x((5, 1024), dtype).at[0].set(0).at[1, 5].set(jnp.nan).at[2, 5].set(jnp.inf).at[3].mul(1e-3)
    options = {"power_of_two": True}, {"scales_dtype": jnp.float8_e8m0fnu}
    wide, narrow = (jax.jit(partial(kind, quantization=Quantization(to, "group", group, **how)))(x) for how in options)
    assert (narrow.scales.dtype, narrow.scales.shape) == (jnp.float8_e8m0fnu, (5, 1024 // group))
    exponents = np.asarray(wide.scales).view(np.uint32) >> 23
    np.testing.assert_array_equal(np.asarray(narrow.scales).view(np.uint8), exponents.astype(np.uint8))
    finite = jnp.array([0, 3, 4])
    assert_same([narrow.values, narrow.dequantize()[finite]], [wide.values, wide.dequantize()[finite]])


def mx_operands(rows, outputs):
    """x and weights, what they are quantised to, and the operands of `jax.nn.scaled_matmul`."""
    x, w = draw("x", (rows, 256)), draw("w", (outputs, 256), std=0.1)
    a, b = jaxnorm.rms_norm_quantized(x, quantization=MX).quantized, quantize(w, MX)
    return (x, w), (a, b), [array[None] for array in (a.values, b.values, a.scales, b.scales)]


def test_a_scaled_product_takes_them():
    assert jax.eval_shape(jax.nn.scaled_matmul, *mx_operands(16, 32)[-1]).shape == (1, 16, 32)


@pytest.mark.needs("gpu")
def test_a_scaled_product():
    """Each value is off by at most 2**-4 of itself."""
    (x, w), quantized, operands = mx_operands(128, 128)
    y = jax.nn.scaled_matmul(*operands, preferred_element_type=jnp.float32)[0]
    a, b = (np.asarray(array.dequantize(), np.float64) for array in quantized)
    np.testing.assert_allclose(y, a @ b.T, atol=1e-2)
    exact = np.asarray(jaxnorm.rms_norm(x), np.float64) @ np.asarray(w, np.float64).T
    assert np.linalg.norm(y - exact) <= 2.0**-4 * np.linalg.norm(exact)


@each_function
@pytest.mark.parametrize("scales", [{}, {"scales_dtype": "float8_e8m0fnu"}], ids=["float32", "exponents"])
def test_scales_by_column(scales, function):
    x, to = draw_x((4, 6, 192)), {**COLUMNS, **scales}
    ours, expected = (jax.jit(function, static_argnums=1)(x, Quantization(**of)) for of in (to, to | BY_ROW))
    assert ours.scales.shape == (3, 4, 6)
    assert_same([ours.values, ours.scales], [expected.values, jnp.moveaxis(expected.scales, -1, 0)])
    assert_same([ours.dequantize()], [expected.dequantize()])


# As many examples as rows and groups, so that no shape tells them apart.
@each_function
def test_examples_with_scales_by_column(function):
    x, to = draw_x((4, 4, 256)), Quantization(**COLUMNS)
    whole = jax.vmap(lambda x: function(x, to))(x)
    assert whole.scales.shape == (4, 4, 4)
    assert_same([whole.dequantize()], [jnp.stack([function(example, to).dequantize() for example in x])])


@pytest.mark.parametrize("function", [*FUNCTIONS.values(), quantize_kernel])
def test_a_layout_is_static(function):
    x, to = draw_x((192, 192)), Quantization(**COLUMNS)
    result = function(x, to)
    assert len(jax.tree.leaves(result)) == 2
    read = export.deserialize(export.export(jax.jit(lambda x: function(x, to)))(x).serialize()).call(x)
    assert (read.groups_axis, read.transposed) == (-2, function is quantize_kernel)
    assert jax.tree.structure(read) == jax.tree.structure(result)
    assert_same([read.dequantize()], [result.dequantize()])


def test_a_program_of_before_there_was_a_layout():
    """Its `Quantized` has none, as one by row has none now."""
    program = export.export(jax.jit(lambda x: Quantized(x, x[:, :1])))(jnp.ones((2, 4)))
    assert b"-1" not in bytes(program.serialize()).split(b"jaxnorm.Quantized")[1][:16]
    assert export.deserialize(program.serialize()).call(jnp.ones((2, 4))).groups_axis == -1
