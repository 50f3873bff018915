"""What quantised norms give beside values and float32 scales: y, statistics, and scales as products read them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ADDS, DTYPES, KINDS, NORMS, draw, draw_bias, draw_residual, draw_scale, draw_smooth, draw_x
from coverage import cover
from hlo import count_native_calls
from jax import export
from native import is_platform_with_kernels
from quantizing import E5M2, GRANULARITIES, QUANTIZED, assert_same

import jaxnorm
from jaxnorm import Quantization, Quantized, quantize

DIMS = (6, 256)
TOKEN = Quantization("float8_e4m3fn")
MX = Quantization("float8_e4m3fn", "group", 32, scales_dtype="float8_e8m0fnu")
COLUMNS = {**E5M2, **GRANULARITIES["groups of 64"], "scales_layout": "column"}


def weights(cols, dtype="float32"):
    return draw_scale((cols,), dtype), draw_bias((cols,), dtype)


def quantized(kind, x, scale=None, bias=None, *, to=TOKEN, residual=None, smooth=None, **options):
    given = {"residual": residual, "smooth_scale": smooth}
    return QUANTIZED[kind](x, scale, bias=bias, quantization=to, **given, **options)


# Rows of every regime of the kernels; 4097 columns are no whole vectors.
@pytest.mark.on_emulator
@cover(
    kind=KINDS,
    dtype=DTYPES,
    cols=[64, 640, 4096, 4097, 20480],
    given=[(), ("residual",), ("smooth",), ("residual", "smooth")],
)
def test_the_unquantised_result(kind, dtype, cols, given):
    x, of_norm = draw_x((3, cols), dtype), weights(cols, dtype)
    residual = draw_residual((3, cols), dtype) if "residual" in given else None
    smooth = draw_smooth((cols,)) if "smooth" in given else None

    def both(x, **options):
        return quantized(kind, x, *of_norm, residual=residual, smooth=smooth, **options)

    first, *_, y = jax.jit(lambda x: both(x, with_unquantized=True))(x)
    if residual is None:
        expected = jax.jit(lambda x: NORMS[kind](x, *of_norm, implementation="native"))(x)
    else:
        expected = jax.jit(lambda x: ADDS[kind](x, residual, *of_norm, implementation="native")[0])(x)
    assert_same([y], [expected])
    alone = jax.jit(both)(x)
    alone = alone if residual is None else alone[0]
    assert_same([first.values, first.scales], [alone.values, alone.scales])


@pytest.mark.on_emulator
@cover(kind=KINDS, with_residual=[False, True], implementation=[None, "jnp"])
def test_statistics(kind, with_residual, implementation):
    x = draw_x((3, 4, 64))
    residual = draw_residual(x.shape) if with_residual else None
    result = quantized(kind, x, residual=residual, return_statistics=True, implementation=implementation, epsilon=0.5)
    assert len(result) == 2 + with_residual
    rows = np.asarray(x if residual is None else x + residual, np.float64)
    mean = rows.mean(-1, keepdims=True) if kind == "layer" else None
    variance = ((rows - (0 if mean is None else mean)) ** 2).mean(-1, keepdims=True)
    assert result[-1].rstd.shape == (3, 4, 1)
    np.testing.assert_allclose(result[-1].rstd, 1 / np.sqrt(variance + 0.5), rtol=1e-6)
    assert (result[-1].mean is None) == (mean is None)
    if mean is not None:
        np.testing.assert_allclose(result[-1].mean, mean, rtol=1e-5, atol=1e-6)


def test_the_order_of_results():
    x = draw_x(DIMS)
    results = quantized("rms", x, residual=x, with_unquantized=True, return_statistics=True)
    assert [type(result).__name__ for result in results] == ["Quantized", "ArrayImpl", "ArrayImpl", "RowStatistics"]
    np.testing.assert_array_equal(results[1], x + x)


@cover(kind=KINDS, with_residual=[False, True], smooth=[False, True], implementation=[None, "jnp"])
def test_gradients(kind, with_residual, smooth, implementation):
    operands = (draw_x(DIMS), *weights(DIMS[-1]), *((draw_residual(DIMS),) if with_residual else ()))
    factor = draw_smooth(DIMS[-1:]) if smooth else None
    w, v, u = (draw(name, DIMS) for name in "wvu")

    def ours(x, scale, bias, residual=None):
        options = {"straight_through": True, "with_unquantized": True, "return_statistics": True}
        first, *total, y, stats = quantized(
            kind, x, scale, bias, residual=residual, smooth=factor, implementation=implementation, **options
        )
        return (first.dequantize() * w + y * v).sum() + sum((t * u).sum() for t in total) + stats.rstd.sum()

    def theirs(x, scale, bias, residual=None):
        total = x if residual is None else x + residual
        y = NORMS[kind](total, scale, bias, implementation="jnp")
        factors = 1 if factor is None else factor
        return (y * factors * w + y * v).sum() + (0 if residual is None else (total * u).sum())

    numbers = tuple(range(len(operands)))
    gradient = jax.jit(jax.grad(ours, numbers))
    for a, e in zip(gradient(*operands), jax.grad(theirs, numbers)(*operands), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-4)
    if is_platform_with_kernels() and implementation is None:
        calls = count_native_calls(gradient.lower(*operands).as_text())
        assert calls == {f"jaxnorm_{kind}_norm_quantized_fwd": 1, f"jaxnorm_{kind}_norm_bwd": 1}


def test_no_derivative_of_the_unquantised_result():
    with pytest.raises(ValueError, match=r"rms_norm_quantized: .*straight_through=True"):
        jax.grad(lambda x: quantized("rms", x, with_unquantized=True)[1].sum())(draw_x(DIMS))


def test_examples():
    x = draw_x((3, *DIMS))
    function = jax.jit(lambda x: quantized("layer", x, with_unquantized=True, return_statistics=True))
    for whole, row in zip(jax.tree.leaves(jax.vmap(function)(x)), jax.tree.leaves(function(x[0])), strict=True):
        np.testing.assert_array_equal(np.asarray(whole[0]), np.asarray(row))


@cover(kind=KINDS, to=["float8_e4m3fn", "float8_e5m2"], group=[32, 64, 128], dtype=DTYPES)
def test_scales_as_exponents(kind, to, group, dtype):
    x = draw_x((5, 1024), dtype).at[0].set(0).at[1, 5].set(jnp.nan).at[2, 5].set(jnp.inf).at[3].mul(1e-3)
    wide, narrow = (
        jax.jit(lambda x, to=to: quantized(kind, x, to=to))(x)
        for to in (
            Quantization(to, "group", group, power_of_two=True),
            Quantization(to, "group", group, scales_dtype=jnp.float8_e8m0fnu),
        )
    )
    assert (narrow.scales.dtype, narrow.scales.shape) == (jnp.float8_e8m0fnu, (5, 1024 // group))
    exponents = np.asarray(wide.scales).view(np.uint32) >> 23
    np.testing.assert_array_equal(np.asarray(narrow.scales).view(np.uint8), exponents.astype(np.uint8))
    assert_same([narrow.values], [wide.values])
    finite = jnp.array([0, 3, 4])
    assert_same([narrow.dequantize()[finite]], [wide.dequantize()[finite]])


def mx_operands(x, w):
    """Those of `jax.nn.scaled_matmul`."""
    of_norm, of_weights = jaxnorm.rms_norm_quantized(x, quantization=MX), quantize(w, MX)
    return [a[None] for a in (of_norm.values, of_weights.values, of_norm.scales, of_weights.scales)]


def test_a_scaled_product_takes_them():
    x, w = draw("x", (16, 256)), draw("w", (32, 256), std=0.1)
    assert jax.eval_shape(jax.nn.scaled_matmul, *mx_operands(x, w)).shape == (1, 16, 32)


@pytest.mark.needs("gpu")
def test_a_scaled_product():
    """Each value is off by at most 2**-4 of itself."""
    x, w = draw("x", (128, 256)), draw("w", (128, 256), std=0.1)
    of_norm, of_weights = jaxnorm.rms_norm_quantized(x, quantization=MX), quantize(w, MX)
    y = jax.nn.scaled_matmul(*mx_operands(x, w), preferred_element_type=jnp.float32)[0]
    a, b = (np.asarray(array.dequantize(), np.float64) for array in (of_norm, of_weights))
    np.testing.assert_allclose(y, a @ b.T, atol=1e-2)
    exact = np.asarray(jaxnorm.rms_norm(x), np.float64) @ np.asarray(w, np.float64).T
    assert np.linalg.norm(y - exact) <= 2.0**-4 * np.linalg.norm(exact)


@pytest.mark.parametrize("to", [COLUMNS, {**COLUMNS, "scales_dtype": "float8_e8m0fnu"}], ids=["float32", "exponents"])
def test_scales_by_column(to):
    x = draw_x((4, 6, 192))
    by_row, by_column = Quantization(**{**to, "scales_layout": "row"}), Quantization(**to)
    ours, expected = (jax.jit(lambda x, to=to: quantized("rms", x, to=to))(x) for to in (by_column, by_row))
    assert ours.scales.shape == (3, 4, 6)
    assert_same([ours.values, ours.scales], [expected.values, jnp.moveaxis(expected.scales, -1, 0)])
    assert_same([ours.dequantize()], [expected.dequantize()])
    of_array = quantize(x, by_column)
    assert of_array.scales.shape == (3, 4, 6)
    assert_same([of_array.dequantize()], [quantize(x, by_row).dequantize()])


# As many examples as rows and groups, so that no shape tells them apart.
@pytest.mark.parametrize("function", [quantize, lambda x, to: quantized("rms", x, to=to)], ids=["quantize", "norm"])
def test_examples_with_scales_by_column(function):
    x, to = draw_x((4, 4, 256)), Quantization(**COLUMNS)
    whole = jax.vmap(lambda x: function(x, to))(x)
    assert whole.scales.shape == (4, 4, 4)
    assert_same([whole.dequantize()], [jnp.stack([function(example, to).dequantize() for example in x])])


def test_a_layout_is_static():
    x = draw_x((4, 192))

    def function(x):
        return quantized("rms", x, to=Quantization(**COLUMNS))

    result = function(x)
    assert len(jax.tree.leaves(result)) == 2
    program = export.deserialize(export.export(jax.jit(function))(x).serialize())
    assert program.call(x).groups_axis == jax.tree.map(lambda leaf: leaf, result).groups_axis == -2
    assert_same([program.call(x).dequantize()], [result.dequantize()])


def test_a_program_of_before_there_was_a_layout():
    """Its `Quantized` has none, as one by row has none now."""
    program = export.export(jax.jit(lambda x: Quantized(x, x[:, :1])))(jnp.ones((2, 4)))
    assert b"-1" not in bytes(program.serialize()).split(b"jaxnorm.Quantized")[1][:16]
    assert export.deserialize(program.serialize()).call(jnp.ones((2, 4))).groups_axis == -1


@pytest.mark.parametrize("name", ["with_unquantized", "return_statistics"])
def test_no_flag(name):
    with pytest.raises(TypeError, match=f"rms_norm_quantized: {name} must be a bool"):
        quantized("rms", jnp.ones(DIMS), **{name: 1})


def test_a_gated_norm_has_the_same_scales():
    x, gate = draw_x((4, 192)), draw("gate", (4, 192))
    ours, expected = (
        jaxnorm.gated_rms_norm_quantized(x, gate, gate_first=True, quantization=Quantization(**{**COLUMNS, **other}))
        for other in ({"group_size": 32}, {"group_size": 32, "scales_layout": "row"})
    )
    assert ours.scales.shape == (6, 4)
    assert_same([ours.dequantize()], [expected.dequantize()])
