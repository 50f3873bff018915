"""cuBLASLt's products of float8: as exact as XLA's, and called where they were measured to be faster."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import draw
from coverage import cover
from hlo import count_native_calls
from internals import choose_fastest, cublaslt, ffi
from quantizing import to

import jaxnorm
from jaxnorm import quantize, quantized_dot

PAIRS = [("float8_e4m3fn", "float8_e4m3fn"), ("float8_e4m3fn", "float8_e5m2"), ("float8_e5m2", "float8_e4m3fn")]
CALL = {"jaxnorm_quantized_dot": 1}
# For which cuBLASLt scales rows and columns.
HOPPER = {"9.0"}


@pytest.fixture(autouse=True)
def is_there():
    if ffi.capabilities() != HOPPER:
        pytest.fail(f"these tests want a GPU of compute capability 9.0, there is {ffi.capabilities()}")
    assert cublaslt.why_not() is None


def operands(pair=PAIRS[0], dims=(40, 256), outputs=96, granularity="token"):
    x, weights = draw("x", dims), draw("weights", (outputs, dims[-1]), std=0.1)
    return quantize(x, to(pair[0], granularity)), quantize(weights, to(pair[1], granularity))


def native(x, weights, **options):
    return jax.jit(lambda x, weights: quantized_dot(x, weights, implementation="native", **options))(x, weights)


def assert_near(y, x, weights, bias=0.0, digits=2.0**-12):
    """The units of a GPU keep about 13 bits of what they add up."""
    a, b = (np.asarray(array.dequantize(), np.float64) for array in (x, weights))
    expected, size = a @ b.T + bias, np.abs(a) @ np.abs(b).T
    allowed = digits * size + np.abs(expected) * float(jnp.finfo(y.dtype).eps)
    assert (np.abs(np.asarray(y, np.float64) - expected) <= allowed).all()


@pytest.mark.needs("gpu")
@cover(pair=PAIRS, rows=[1, 7, 16, 300], granularity=["token", "tensor"], out_dtype=["bfloat16", "float16", "float32"])
def test_shapes_and_dtypes(pair, rows, granularity, out_dtype):
    x, weights = operands(pair, (rows, 256), granularity=granularity)
    assert_near(native(x, weights, out_dtype=out_dtype), x, weights)


@pytest.mark.needs("gpu")
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16"])
def test_bias(out_dtype):
    x, weights = operands(dims=(4, 10, 256))
    bias = draw("bias", (96,), out_dtype)
    y = native(x, weights, out_dtype=out_dtype, bias=bias)
    assert y.shape == (4, 10, 96)
    assert_near(y, x, weights, np.asarray(bias, np.float64))


@pytest.mark.needs("gpu")
def test_no_rows():
    x, weights = operands(dims=(0, 256))
    assert native(x, weights).shape == (0, 96)


@pytest.mark.needs("gpu")
def test_the_same_bits_each_time():
    x, weights = operands(dims=(500, 1024), outputs=512)
    assert len({np.asarray(native(x, weights)).tobytes() for _ in range(3)}) == 1


@pytest.mark.needs("gpu")
def test_in_a_loop():
    x, weights = operands(dims=(64, 256), outputs=256)

    def step(x, _):
        y = quantized_dot(x, weights, implementation="native")
        return quantize(y, to(PAIRS[0][0])), y

    _, ys = jax.jit(lambda x: jax.lax.scan(step, x, length=5))(x)
    for y in ys:
        assert_near(y, x, weights)
        x = quantize(y, to(PAIRS[0][0]))


def flat(array):
    """The elements behind one more, and how an array of this shape comes of them; of float8 by way of its bits."""
    integers = jax.lax.bitcast_convert_type(array, jnp.int8) if array.dtype.itemsize == 1 else array
    padded = jnp.pad(integers.reshape(-1), (1, 0))
    return jax.lax.bitcast_convert_type(padded, array.dtype) if array.dtype.itemsize == 1 else padded


# XLA hands a call the slice itself where it has whole 128 bytes, and cuBLASLt gets copies: all at once where they have
# room, else one block after the other.
@pytest.mark.needs("gpu")
@pytest.mark.parametrize(
    ("dims", "outputs"),
    [((128, 256), 128), ((4096, 4096), 8192), ((32, 32), 2**20 + 128)],
    ids=("one", "blocks", "wide"),
)
@pytest.mark.parametrize("moved", [("x",), ("weights",), ("bias",), ("x", "weights", "bias")], ids=" and ".join)
def test_between_words_the_bits_are_the_same(moved, dims, outputs):
    rows = dims[0] + 32 * len("".join(moved))  # no plan for such a product is kept, of aligned arrays or others
    whole = dict(zip(("x", "weights"), operands(dims=(rows, dims[1]), outputs=outputs), strict=True))
    whole["bias"] = draw("bias", (outputs,), "bfloat16")

    def product(given):
        return quantized_dot(given["x"], given["weights"], bias=given["bias"], implementation="native")

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


@pytest.mark.needs("gpu")
def test_examples_of_rows_are_one_call():
    x, weights = operands(dims=(3, 40, 256))
    of_examples = jax.jit(jax.vmap(lambda x: quantized_dot(x, weights, implementation="native")))
    assert count_native_calls(of_examples.lower(x).as_text()) == CALL
    assert_near(of_examples(x), x, weights)


@pytest.mark.needs("gpu")
def test_gradients():
    x, w = draw("x", (40, 256)), draw("weights", (96, 256), std=0.1)

    def loss(x, w, implementation):
        x, w = (quantize(array, to("float8_e4m3fn"), straight_through=True) for array in (x, w))
        return (quantized_dot(x, w, out_dtype="float32", implementation=implementation) ** 2).sum()

    ours, theirs = (jax.jit(jax.grad(lambda x, w, how=how: loss(x, w, how), (0, 1)))(x, w) for how in ("native", "jnp"))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=5e-3 * np.abs(b).max())


# Large ones only; those whose sums are to have all digits are XLA's, too.
@pytest.mark.needs("gpu")
@pytest.mark.parametrize(("rows", "calls"), [(4096, CALL), (16, {})])
def test_by_default(monkeypatch, rows, calls):
    choose_fastest(monkeypatch)
    x, weights = (
        jax.eval_shape(lambda a: quantize(a, to("float8_e4m3fn")), jax.ShapeDtypeStruct((n, 512), jnp.float32))
        for n in (rows, 8192)
    )
    assert count_native_calls(jax.jit(quantized_dot).lower(x, weights).as_text()) == calls
    with jax.default_matmul_precision("highest"):
        assert count_native_calls(jax.jit(quantized_dot).lower(x, weights).as_text()) == {}


@pytest.mark.needs("gpu")
@pytest.mark.parametrize(
    ("dims", "outputs", "why"), [((4, 100), 96, "multiples of 16"), ((4, 256), 90, "multiples of 16")]
)
def test_no_kernel(dims, outputs, why):
    x, weights = operands(dims=dims, outputs=outputs)
    with pytest.raises(RuntimeError, match=f"quantized_dot: implementation='native' .*{why}"):
        quantized_dot(x, weights, implementation="native")
    assert jaxnorm.quantized_dot(x, weights).shape == (4, outputs)
