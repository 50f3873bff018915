"""`quantized_dot`: the product of what its operands stand for, rounded once, and the derivative that is agreed on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import draw
from coverage import cover
from hlo import collectives, compiled_text, count_native_calls
from jax import export
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from meshes import mesh_of, placed
from quantizing import to

import jaxnorm
from jaxnorm import Quantized, quantize, quantized_dot

pytestmark = pytest.mark.usefixtures("exact_products")

DIMS, OUTPUTS = (4, 6, 128), 48
# Those of x, None where it is an array, and of the weights.
PAIRS = [
    *(("int8", "int8"), ("int8", "int4")),
    *(("float8_e4m3fn", "float8_e4m3fn"), ("float8_e4m3fn", "float8_e5m2"), ("float8_e5m2", "float8_e5m2")),
    ("float8_e4m3fn", "float4_e2m1fn"),
    *((None, dtype) for dtype in ("int8", "int4", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn")),
]


def operands(x_dtype=None, weight_dtype="int8", granularity="token", *, dims=DIMS, outputs=OUTPUTS, dtype="float32"):
    x, weights = draw("x", dims, dtype), draw("weights", (outputs, dims[-1]), dtype, std=0.3)
    x = x if x_dtype is None else quantize(x, to(x_dtype, granularity))
    return x, quantize(weights, to(weight_dtype, granularity))


def exactly(array):
    """What an operand stands for, in float64."""
    if isinstance(array, Quantized):
        return np.asarray(array.values.astype(jnp.float32), np.float64) * np.asarray(array.scales, np.float64)
    return np.asarray(array, np.float64)


@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("granularity", ["token", "tensor"])
@pytest.mark.parametrize("weight_dtype", ["int8", "int4"])
def test_integers_are_exact(weight_dtype, granularity, out_dtype):
    x, weights = operands("int8", weight_dtype, granularity)
    y = jax.jit(quantized_dot, static_argnames="out_dtype")(x, weights, out_dtype=out_dtype)
    total = np.asarray(x.values, np.int32) @ np.asarray(weights.values.astype(jnp.int8), np.int32).T
    scales = np.broadcast_arrays(x.scales, np.broadcast_to(weights.scales, (OUTPUTS, 1))[:, 0])
    expected = (total.astype(np.float32) * np.minimum(*scales)) * np.maximum(*scales)
    np.testing.assert_array_equal(y, expected.astype(jnp.dtype(out_dtype)))


@cover(pair=PAIRS, granularity=["token", "tensor"], dtype=["float32", "bfloat16", "float16"], rows=["many", "one"])
def test_within_the_bound_of_a_sum(pair, granularity, dtype, rows):
    x, weights = operands(*pair, granularity, dims=DIMS if rows == "many" else (1, DIMS[-1]), dtype=dtype)
    y = jax.jit(quantized_dot, static_argnames="out_dtype")(x, weights, out_dtype="float32")
    a, b = exactly(x), exactly(weights).T
    bound = 2.0**-24 * (DIMS[-1] + 3) * (np.abs(a) @ np.abs(b))
    assert (np.abs(np.asarray(y, np.float64) - a @ b) <= bound).all()


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize(("of_x", "of_weights"), [(2.0**118, 2.0**-20), (2.0**-20, 2.0**118), (2.0**-60, 2.0**-60)])
def test_scales_whose_products_float32_does_not_hold(of_x, of_weights, dtype):
    x, weights = draw("x", (8, 64)), draw("weights", (32, 64))

    def product(x, weights):
        return quantized_dot(
            *(quantize(of, jaxnorm.Quantization(dtype), axis=-1) for of in (x, weights)), out_dtype="float32"
        )

    expected = product(x, weights) * (of_x * of_weights)
    np.testing.assert_allclose(product(x * of_x, weights * of_weights), expected, rtol=2.0**-20)


@pytest.mark.parametrize(("largest", "is_finite"), [(1e34, True), (1e37, False)])
def test_an_array_is_summed_before_the_scale(largest, is_finite):
    weights = quantize(jnp.full((32, 64), 1e-9), jaxnorm.Quantization("int8"), axis=-1)
    y = quantized_dot(jnp.full((8, 64), largest), weights)
    assert bool(jnp.isfinite(y).all()) == is_finite


def test_dtypes_of_the_result():
    x, weights = operands("int8")
    assert quantized_dot(x, weights).dtype == jnp.bfloat16
    assert quantized_dot(x, weights, out_dtype="float16").dtype == jnp.float16
    assert quantized_dot(draw("x", DIMS, "float16"), weights).dtype == jnp.float16
    assert quantized_dot(draw("x", DIMS), weights).shape == (*DIMS[:-1], OUTPUTS)


def test_float64_stays_wide():
    with jax.enable_x64(True):
        x, weights = jnp.asarray(exactly(draw("x", DIMS))), operands()[1]
        y = quantized_dot(x, weights)
        assert y.dtype == jnp.float64
        np.testing.assert_allclose(y, exactly(x) @ exactly(weights).T, rtol=0, atol=1e-13)


def test_bias():
    x, weights = operands("int8")
    bias = draw("bias", (OUTPUTS,))
    y = quantized_dot(x, weights, bias=bias, out_dtype="float32")
    np.testing.assert_allclose(y, exactly(x) @ exactly(weights).T + exactly(bias), rtol=1e-5, atol=1e-5)


def loss(x, w, bias, x_dtype, weight_dtype):
    weights = quantize(w, to(weight_dtype), straight_through=True)
    x = x if x_dtype is None else quantize(x, to(x_dtype), straight_through=True)
    return jnp.sin(quantized_dot(x, weights, bias=bias, out_dtype="float32")).sum()


def expected_gradients(x, w, bias, x_dtype, weight_dtype):
    x = exactly(x if x_dtype is None else quantize(x, to(x_dtype)))
    w = exactly(quantize(w, to(weight_dtype)))
    dy = np.cos(x @ w.T + exactly(bias))
    return dy @ w, dy.reshape(-1, OUTPUTS).T @ x.reshape(-1, DIMS[-1]), dy.sum(tuple(range(dy.ndim - 1)))


def assert_gradients(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=0, atol=1e-4 * np.abs(b).max())


TRANSFORMS = {
    "outside jit": lambda gradient: gradient,
    "jit": jax.jit,
    "vmap over x": lambda gradient: (
        lambda *args: [a if i == 0 else a.sum(0) for i, a in enumerate(jax.vmap(gradient, (0, None, None))(*args))]
    ),
    "in a loop": lambda gradient: (
        lambda *args: [a[0] for a in jax.lax.scan(lambda _, __: (None, gradient(*args)), None, length=2)[1]]
    ),
}


@pytest.mark.jax_version
@cover(pair=[("int8", "int8"), ("float8_e4m3fn", "float8_e4m3fn"), (None, "int4")], how=TRANSFORMS.keys())
def test_gradients(pair, how):
    args = draw("x", DIMS), draw("w", (OUTPUTS, DIMS[-1]), std=0.3), draw("bias", (OUTPUTS,))
    gradient = TRANSFORMS[how](jax.grad(lambda *args: loss(*args, *pair), (0, 1, 2)))
    assert_gradients(gradient(*args), expected_gradients(*args, *pair))


@pytest.mark.jax_version
@pytest.mark.parametrize("transform", [jax.checkpoint, lambda f: jax.vmap(f, (None, 0, None))])
def test_gradients_of_what_is_transformed(transform):
    x, w, bias = draw("x", DIMS), draw("w", (3, OUTPUTS, DIMS[-1]), std=0.3), draw("bias", (OUTPUTS,))
    of_all = transform(lambda *args: loss(*args, "int8", "int8"))
    many = transform is not jax.checkpoint
    gradients = jax.grad(lambda *args: of_all(*args).sum(), (0, 1, 2))(x, w if many else w[0], bias)
    expected = [expected_gradients(x, each, bias, "int8", "int8") for each in (w if many else w[:1])]
    dx, dw, dbias = zip(*expected, strict=True)
    assert_gradients(gradients, (sum(dx), np.stack(dw) if many else dw[0], sum(dbias)))


@pytest.mark.jax_version
def test_forward_mode_and_second_derivatives():
    x, weights = draw("x", (3, DIMS[-1])), operands()[1]
    w = exactly(weights)

    def of_x(x):
        return (quantized_dot(x, weights) ** 2).sum() / 2

    tangent = draw("tangent", x.shape)
    np.testing.assert_allclose(jax.jvp(of_x, (x,), (tangent,))[1], (exactly(tangent) * (x @ w.T @ w)).sum(), rtol=1e-4)
    np.testing.assert_allclose(jax.hessian(of_x)(x[0]), w.T @ w, rtol=1e-3, atol=1e-3)


def test_values_and_scales_stand_still():
    x, weights = operands("float8_e4m3fn", "float8_e4m3fn")

    def of_scales(scales):
        return quantized_dot(x, Quantized(weights.values, scales), out_dtype="float32").sum()

    np.testing.assert_array_equal(jax.grad(of_scales)(weights.scales), 0)


AXES = {"both": (0, 0), "x alone": (0, None), "weights alone": (None, 0), "other axes": (1, 1)}


@pytest.mark.jax_version
@cover(axes=AXES.keys(), x_dtype=["int8", None])
def test_examples(axes, x_dtype):
    of_x, of_weights = AXES[axes]
    x, w = draw("x", (3, 5, 3, 128)), draw("w", (3, 3, 128))

    def product(x, w):
        x = x if x_dtype is None else quantize(x, to(x_dtype))
        return quantized_dot(x, quantize(w, to("int8")), out_dtype="float32")

    x = x if of_x == 0 else jnp.moveaxis(x, 2, 1) if of_x else x[0]
    w = w[0] if of_weights is None else w
    ys = jax.vmap(product, AXES[axes])(x, w)
    for i, y in enumerate(ys):
        taken = [a if axis is None else jnp.take(a, i, axis) for a, axis in ((x, of_x), (w, of_weights))]
        np.testing.assert_allclose(y, product(*taken), rtol=1e-5, atol=1e-5)


@pytest.mark.jax_version
def test_examples_of_examples():
    x, w = draw("x", (2, 5, 128)), draw("w", (3, 16, 128))

    def product(x, w):
        return quantized_dot(quantize(x, to("int8")), quantize(w, to("int8")), out_dtype="float32")

    ys = jax.vmap(jax.vmap(product, (None, 0)), (0, None))(x, w)
    np.testing.assert_array_equal(ys, [[product(a, b) for b in w] for a in x])


# The shardings of x, of the weights, and what is exchanged of a result of float32: rows or outputs over devices
# nothing, of what is summed the result.
SPLIT = {
    "rows": (P("a"), P(), None),
    "outputs": (P(), P("b"), None),
    "rows and outputs": (P("a"), P("b"), None),
    "what is summed": (P(None, None, "b"), P(None, "b"), "all-reduce"),
}


@pytest.mark.jax_version
@pytest.mark.needs("several")
@pytest.mark.parametrize("pair", [("int8", "int8"), ("float8_e4m3fn", "float8_e4m3fn"), (None, "int4")])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("split", SPLIT)
def test_over_devices(split, axis_type, pair):
    of_x, of_weights, exchanged = SPLIT[split]
    if axis_type == AxisType.Explicit and exchanged:
        return  # JAX asks for the result's sharding there, as of every product
    mesh = mesh_of(jax.devices(), axis_type)
    x, weights = operands(*pair)
    scales = P(*of_weights[:1])
    placed_weights = Quantized(*placed(mesh, (weights.values, weights.scales), (of_weights, scales)))
    if pair[0] is None:
        (placed_x,) = placed(mesh, (x,), (of_x,))
    else:
        placed_x = Quantized(*placed(mesh, (x.values, x.scales), (of_x, P(*of_x[:1]))))

    def product(x, weights):
        return quantized_dot(x, weights, out_dtype="float32")

    with jax.set_mesh(mesh):
        text = compiled_text(product, placed_x, placed_weights)
        y = jax.jit(product)(placed_x, placed_weights)
    assert set(collectives(text)) == ({exchanged} if exchanged else set())
    np.testing.assert_allclose(np.asarray(y), quantized_dot(x, weights, out_dtype="float32"), rtol=1e-5, atol=1e-4)


@pytest.mark.jax_version
@pytest.mark.needs("several")
def test_gradients_in_a_shard_map():
    mesh = mesh_of(jax.devices(), AxisType.Auto)
    x, w, bias = draw("x", (8, 6, 128)), draw("w", (OUTPUTS, 128), std=0.3), draw("bias", (OUTPUTS,))

    def of_shard(x, w, bias):
        return jax.lax.psum(loss(x, w, bias, "int8", "int8"), "a")

    total = jax.shard_map(of_shard, mesh=mesh, in_specs=(P("a"), P(), P()), out_specs=P())
    assert_gradients(jax.grad(total, (0, 1, 2))(x, w, bias), expected_gradients(x, w, bias, "int8", "int8"))


@pytest.mark.jax_version
def test_an_exported_program():
    _, weights = operands("float8_e4m3fn", "float8_e4m3fn")
    rows = export.symbolic_shape("rows")
    x = Quantized(jax.ShapeDtypeStruct((*rows, 128), jnp.float8_e4m3fn), jax.ShapeDtypeStruct((*rows, 1), jnp.float32))
    program = export.export(jax.jit(quantized_dot), platforms=("cpu", "cuda", "tpu"))(x, weights)
    assert not count_native_calls(program.mlir_module())
    given = operands("float8_e4m3fn", "float8_e4m3fn", dims=(5, 128))[0]
    np.testing.assert_array_equal(program.call(given, weights), quantized_dot(given, weights))


X, W = draw("x", (5, 64)), draw("weights", (48, 64))
WEIGHTS = quantize(W, to("int8"))
BAD_CALLS = {
    "weights of no scales": ((X, W), {}, TypeError, "weights must be a jaxnorm.Quantized"),
    "weights first": ((WEIGHTS, X), {}, TypeError, "x and weights in each other's place"),
    "K first": ((X, quantize(W.T, to("int8"))), {}, ValueError, r"\(5, 64\) and weights \(64, 48\).*transpose"),
    "another K": ((X[:, :32], WEIGHTS), {}, ValueError, r"\(5, 32\) and weights \(48, 64\).*the same"),
    "no axis": ((jnp.float32(1), WEIGHTS), {}, ValueError, r"x has shape \(\)"),
    "several matrices": ((X, quantize(jnp.stack([W, W]), to("int8"))), {}, ValueError, r"\(2, 48, 64\).*vmap"),
    "groups of weights": ((X, quantize(W, to("int8", "groups of 64"))), {}, None, ""),
    "groups": (
        (draw("x", (5, 128)), quantize(draw("w", (48, 128)), to("int8", "groups of 64"))),
        {},
        ValueError,
        "groups",
    ),
    "scales along outputs": ((X, quantize(W, to("int8"), axis=0)), {}, ValueError, r"scales of shape \(1, 64\).*last"),
    "float8 and int8": (
        (quantize(X, to("float8_e4m3fn")), WEIGHTS),
        {},
        TypeError,
        "float8_e4m3fn and weights of int8",
    ),
    "x of 4 bits": (
        (quantize(X, to("int4")), WEIGHTS),
        {},
        TypeError,
        "int4 and weights of int8, expected int8 for x.*Only weights have 4",
    ),
    "x of integers": ((jnp.ones((5, 64), "int8"), WEIGHTS), {}, TypeError, "x must have a floating-point dtype"),
    "a long bias": ((X, WEIGHTS), {"bias": jnp.ones(49)}, ValueError, r"bias has shape \(49,\), expected \(48,\)"),
    "an integer result": ((X, WEIGHTS), {"out_dtype": "int8"}, TypeError, "out_dtype"),
    "an implementation": ((X, WEIGHTS), {"implementation": "triton"}, ValueError, "unknown implementation"),
    "no kernel for it": ((X, WEIGHTS), {"implementation": "native"}, RuntimeError, "the kernel multiplies float8"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_errors(name):
    args, keywords, error, message = BAD_CALLS[name]
    if error is None:  # one group is a row
        assert quantized_dot(*args, **keywords).shape == (5, 48)
        return
    with pytest.raises(error, match=message):
        quantized_dot(*args, **keywords)


def test_a_norm_in_front():
    x, scale = draw("x", DIMS), draw("scale", DIMS[-1:])
    weights = quantize(draw("weights", (OUTPUTS, DIMS[-1]), std=0.3), to("int8"))
    y = jaxnorm.rms_norm_quantized(x, scale, quantization=to("int8"))
    expected = exactly(y) @ exactly(weights).T
    np.testing.assert_allclose(quantized_dot(y, weights, out_dtype="float32"), expected, rtol=1e-4, atol=1e-4)


# Each operand with an axis of examples, of which there are none.
@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("x_dtype", [None, "int8"])
def test_no_examples(axes, x_dtype):
    x, weights = operands(x_dtype)
    args = [
        a if axis is None else jax.tree.map(lambda v: v[:0], to_examples(a))
        for a, axis in zip((x, weights), axes, strict=True)
    ]
    assert jax.vmap(quantized_dot, axes)(*args).shape == (0, *DIMS[:-1], OUTPUTS)


def to_examples(array):
    return jax.tree.map(lambda v: v[None], array)


@pytest.mark.parametrize("x_dtype", [None, "int8"])
def test_ranks_are_not_promoted(x_dtype):
    x, weights = operands(x_dtype)
    with jax.numpy_rank_promotion("raise"):
        assert quantized_dot(x, weights, bias=jnp.ones(OUTPUTS)).shape == (*DIMS[:-1], OUTPUTS)
