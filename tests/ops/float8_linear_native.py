"""The kernels around the products of `float8_linear`, bit for bit NumPy's, and what they do in programs for a GPU."""

import re
from functools import partial
from itertools import starmap

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import draw
from coverage import cover
from deviceless import compiled, mesh, topology, types
from hlo import collectives, count_native_calls
from internals import Float8Linear, compat, ffi, float8_kernels, quantized_dot
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec as P
from quantizing import assert_same, by_numpy

from jaxnorm import Float8Recipe, Quantization, Quantized, float8_linear, quantize_kernel
from ops.products import assert_norms_close

# Of rows that a block keeps, or reads twice, with room for the magnitudes of all columns, or not; and odd ones.
SHAPES = [(1, 16), (48, 64), (3, 5, 7), (257, 33), (2, 4096, 512), (40000, 64), (24, 20480), (24, 40960), (5, 81920)]


def spec_of(power_of_two):
    return Float8Linear(out_dtype=np.dtype("float32"), power_of_two=power_of_two)


def expected(array, axes, fold, power_of_two):
    """Values and scales with what shares a scale behind, of the array by rows and columns."""
    v = np.asarray(array, np.float32) * (1 if fold is None else np.asarray(fold))
    v = v.reshape(-1, v.shape[-1])
    v = v if axes == (-1,) else v.T
    values, scales = by_numpy(v, Quantization("float8_e4m3fn", power_of_two=power_of_two))
    return values, np.where(np.abs(v).max(1, keepdims=True) == 0, np.float32(0), scales)


def array_of(shape, dtype, not_finite):
    x = draw("x", shape).astype(dtype)
    x = x.at[..., -1, :].set(0).at[..., 2].set(0) if shape[0] > 1 else x
    for i, value in enumerate(not_finite):
        x = x.at[..., i, i].set(value)
    return x


def factors_of(shape, folds):
    return [jnp.exp2(draw("factors", lengths)) if folds else None for lengths in (shape[-1:], (*shape[:-1], 1))]


@pytest.mark.needs("cuda")
@cover(
    shape=[(1, 16), (1024, 96), (100, 1000), (257, 33), (8192, 96), (40000, 64), (20000, 72), (120000, 24)],
    dtype=["bfloat16", "float32", "float16"],
    power_of_two=[False, True],
    not_finite=[(), (np.nan, np.inf)],
)
@emulated.wherever
def test_columns(shape, dtype, power_of_two, not_finite):
    x = array_of(shape, dtype, not_finite[: min(shape[-2:])])
    actual = jax.jit(lambda x: float8_kernels.by_columns(spec_of(power_of_two), x, "forward"))(x)
    values, scales = expected(x, (0,), None, power_of_two)
    assert_same([actual.values, actual.scales.reshape(-1, 1)], [values, scales])


@pytest.mark.needs("cuda")
@cover(
    shape=SHAPES,
    dtype=["bfloat16", "float32", "float16"],
    folds=[True, False],
    power_of_two=[False, True],
    not_finite=[(), (np.nan, np.inf)],
)
@pytest.mark.parametrize("wants", [(True, False), (True, True), (False, True)], ids=["rows", "both", "columns"])
@emulated.wherever
def test_a_gradient(shape, dtype, folds, power_of_two, not_finite, wants):
    dy = array_of(shape, dtype, not_finite[: min(shape[-2:])])
    of_columns, of_rows = (
        factors if wanted else None for factors, wanted in zip(factors_of(shape, folds), wants, strict=True)
    )
    spec = spec_of(power_of_two)
    found = jax.jit(partial(float8_kernels.gradient, spec, wants=wants))(dy, of_columns, of_rows)
    assert tuple(of is not None for of in found) == wants
    by_rows, by_columns = found
    if by_rows is not None:
        values, scales = expected(dy, (-1,), of_columns, power_of_two)
        assert_same(by_rows, [values.reshape(shape), scales.reshape(*shape[:-1], 1)])
        if not folds:
            assert_same(jax.jit(lambda x: float8_kernels.by_rows(spec, x, "forward"))(dy), by_rows)
    if by_columns is not None:
        values, scales = expected(dy, (0,), of_rows, power_of_two)
        of_matrix = by_columns.values.reshape(shape[-1], -1), by_columns.scales.reshape(-1, 1)
        assert_same(of_matrix, [values, scales])


@pytest.mark.needs("cuda")
@pytest.mark.parametrize("shape", [(1, 1), (16, 16), (128, 256), (100, 1000), (257, 33), (16, 4099), (4096, 48)])
@emulated.wherever
def test_bytes(shape):
    codes = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8).view(jnp.float8_e4m3fn)
    swapped = jax.ShapeDtypeStruct(shape[::-1], codes.dtype)
    actual = jax.jit(jax.ffi.ffi_call(quantized_dot.TRANSPOSE, swapped))(codes)
    np.testing.assert_array_equal(np.asarray(actual).view(np.uint8), codes.T.view(np.uint8))


TOKENS, DEPTH, OUTPUTS = 8192, 4096, 4096


# Programs are lowered as for a GPU of compute capability 9.0, whether there is one or not, and do not run.
@pytest.fixture
def on_hopper(monkeypatch):
    monkeypatch.setattr(ffi, "capabilities", lambda: {"9.0"})
    for module, why in ((ffi, "why_no_cublaslt"), (ffi, "why_unfit")):
        monkeypatch.setattr(module, why, lambda *_: None)


def both_ways(recipe):
    def function(x, kernel, dy):
        y, pull_back = jax.vjp(lambda *args: float8_linear(*args, recipe=recipe), x, kernel)
        return y, pull_back(dy)

    return function


def lowered(function, rows=(2, TOKENS // 2), outputs=OUTPUTS):
    shapes = (*rows, DEPTH), (DEPTH, outputs), (*rows, outputs)
    types = [jax.ShapeDtypeStruct(dims, dtype) for dims, dtype in zip(shapes, DTYPES, strict=True)]
    return jax.jit(function).trace(*types).lower(lowering_platforms=("cuda",)).as_text()


DTYPES = (jnp.bfloat16, jnp.float32, jnp.bfloat16)
# What kernels do in a step, and how many products are XLA's.
STEP = {"quantized_dot": 3, "round_rows": 1, "round_columns": 1, "round_gradient": 1, "transpose_bytes": 2}
CALLS = {
    "default": (Float8Recipe(), STEP, 0),
    "inputs": (Float8Recipe(save="inputs"), STEP | {"round_rows": 2, "round_columns": 2}, 0),
    "wide weight gradient": (
        Float8Recipe(weight_gradient="compute"),
        {"quantized_dot": 2, "round_rows": 2, "round_columns": 1, "transpose_bytes": 1},
        1,
    ),
}


def calls_of(text):
    return {name.removeprefix("jaxnorm_"): count for name, count in count_native_calls(text).items()}


@pytest.mark.needs("plans")
@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("name", CALLS)
def test_the_calls_of_a_step(name):
    recipe, of_kernels, of_xla = CALLS[name]
    text = lowered(both_ways(recipe))
    assert (calls_of(text), text.count("stablehlo.dot_general")) == (of_kernels, of_xla)


# The first product is of x by the kernel, the second of dy by the kernel, the third of x by dy.
@pytest.mark.needs("plans")
@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("products", [("y",), ("dx", "dw"), ("y", "dx", "dw"), ()])
def test_which_products_may_have_fewer_digits(products):
    text = lowered(both_ways(Float8Recipe(fast_accumulation=products)))
    calls = [line for line in text.splitlines() if "jaxnorm_quantized_dot" in line]
    assert ["fast_accumulation = true" in call for call in calls] == [name in products for name in ("y", "dx", "dw")]
    by_xla = lowered(both_ways(Float8Recipe(fast_accumulation=products)), outputs=OUTPUTS + 8)
    dots = [line for line in by_xla.splitlines() if "stablehlo.dot_general" in line]
    assert ["HIGHEST" not in dot for dot in dots] == [name in products for name in ("y", "dx", "dw")]


@pytest.mark.deviceless
@pytest.mark.usefixtures("on_hopper")
def test_a_compiled_step_has_three_products_and_no_wide_one():
    shapes = (TOKENS, DEPTH), (DEPTH, OUTPUTS), (TOKENS, OUTPUTS)
    arrays = [types(jax.ShapeDtypeStruct(dims, dtype)) for dims, dtype in zip(shapes, DTYPES, strict=True)]
    program = compiled(both_ways(Float8Recipe()), *arrays)
    assert calls_of(program.as_text()) == STEP
    assert not re.search(r"__cublas|__triton_gemm| dot\(", program.as_text())


def accumulated(kernel, x):
    """The kernel's gradient, summed over micro-batches x."""
    quantise = partial(quantize_kernel, quantization=Quantization("float8_e4m3fn"), straight_through=True)
    rounded, pull_back = jax.vjp(quantise, kernel)

    def of_micro_batch(total, x):
        gradient = jax.grad(lambda kernel: jnp.sin(float8_linear(x, kernel)).astype(jnp.float32).sum())(rounded)
        return jax.tree.map(jnp.add, total, gradient), None

    return pull_back(jax.lax.scan(of_micro_batch, jax.tree.map(jnp.zeros_like, rounded), x)[0])[0]


def test_micro_batches_of_a_kernel_that_was_rounded_ahead():
    x, kernel = draw("x", (3, 8, 64)), draw("kernel", (64, 32))
    of = jax.grad(lambda kernel, x: jnp.sin(float8_linear(x, kernel)).sum())
    assert_norms_close(accumulated(kernel, x), sum(of(kernel, one) for one in x), 0.01)


# What a micro-batch does to the kernel's gradient is one addition, and there is no transposition of 4 bytes.
@pytest.mark.deviceless
@pytest.mark.usefixtures("on_hopper")
def test_micro_batches_round_their_kernel_once():
    shapes = {(DEPTH, OUTPUTS): "float32", (4, TOKENS, DEPTH): "bfloat16"}
    text = compiled(accumulated, *types(list(starmap(jax.ShapeDtypeStruct, shapes.items())))).as_text()
    body = next(part for part in text.split("\n\n") if "jaxnorm_quantized_dot" in part)
    assert calls_of(body) == {"quantized_dot": 2, "round_rows": 1, "round_gradient": 1, "transpose_bytes": 1}
    assert calls_of(text) == calls_of(body) | {"round_columns": 1}
    wide = re.findall(rf"= f32\[{DEPTH},{OUTPUTS}\]\S* (?!get-tuple)(\S+)\(", body)
    assert wide == ["fusion"]
    assert not re.search(r"= f32\S* transpose\(", text)


# Kernels that are split over the devices of the tokens, as FSDP does, travel as they are rounded.
@pytest.mark.deviceless
@pytest.mark.parametrize("spec", [P("x", None), P(None, "x")], ids=str)
@pytest.mark.parametrize("by", ["kernels", "XLA"])
def test_fsdp_gathers_a_byte_for_each_weight(spec, by, request):
    if by == "kernels":
        request.getfixturevalue("on_hopper")
    of_tokens, of_kernel = (NamedSharding(mesh(4), split) for split in (P("x", None), spec))
    text = compiled_over(of_tokens, of_kernel, of_tokens)
    assert calls_of(text) == (SPLIT_STEP if by == "kernels" else {})
    # Once for y and dx.
    assert {dims[:8] for dims in matrices(text, "all-gather")} == {"f8e4m3fn"}
    assert 0 <= collectives(text)["all-gather"] - DEPTH * OUTPUTS <= 8 * (DEPTH + OUTPUTS)  # scales
    # Of an operation both what is given and what comes of it.
    whole = f"[{DEPTH},{OUTPUTS}]"
    assert sorted({dims[:3] for dims in matrices(text, "reduce-scatter")}) == ["f32"]
    assert matrices(text, "reduce-scatter").count(f"f32{whole}") == 1
    assert not re.search(r" (all-to-all|collective-permute)(-start)?\(", text)


# What XLA splits it rounds by itself: a row or column has one scale over all devices.
SPLIT_STEP = {"quantized_dot": 3, "transpose_bytes": 4}


def compiled_over(*shardings, rows=(TOKENS,)):
    """A step whose x, kernel and dy are split so, as its results are."""
    shapes = (*rows, DEPTH), (DEPTH, OUTPUTS), (*rows, OUTPUTS)
    given = zip(shapes, DTYPES, shardings, strict=True)
    arrays = [types(jax.ShapeDtypeStruct(dims, dtype), sharding) for dims, dtype, sharding in given]
    of_x, of_kernel, of_y = shardings
    return compiled(both_ways(Float8Recipe()), *arrays, out_shardings=(of_y, (of_x, of_kernel))).as_text()


# A kernel that is split by columns or by rows over "tensor", and over "data" as the tokens are: y or dx is added up in
# its own dtype, as XLA adds up that of a product of bfloat16. Where "tensor" splits the sequence, too, it is what is
# rounded that travels in its place, of x for y and dw, or of dy for dx and dw; nothing is sent from all to all.
BATCH = (8, TOKENS // 8)
TENSOR_PARALLEL = {
    "columns": (P("data"), P("data", "tensor"), P("data", None, "tensor")),
    "rows": (P("data", None, "tensor"), P(("tensor", "data")), P("data")),
    "columns, sequence": (P("data", "tensor"), P("data", "tensor"), P("data", None, "tensor")),
    "rows, sequence": (P("data", None, "tensor"), P(("tensor", "data")), P("data", "tensor")),
}


@pytest.mark.deviceless
@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("name", TENSOR_PARALLEL)
def test_tensor_parallel_layers(name):
    over = topologies.make_mesh(topo=topology(4), mesh_shape=(2, 2), axis_names=("data", "tensor"))
    text = compiled_over(*(NamedSharding(over, spec) for spec in TENSOR_PARALLEL[name]), rows=BATCH)
    assert calls_of(text) == SPLIT_STEP
    # Half of the tokens, and half of the kernel, for y and for dx; of dw, which is added up, a device keeps half.
    tokens, half = TOKENS // 2 * DEPTH, DEPTH // 2 * OUTPUTS
    expected = {"all-gather": half, "reduce-scatter": 4 * half // 2}
    if "sequence" in name:  # dy is rounded twice, x once
        expected["all-gather"] += tokens if "columns" in name else 2 * tokens
        expected["reduce-scatter"] += 2 * tokens // 2
    else:
        expected["all-reduce"] = 2 * tokens
    found, scales = collectives(text), 4 * (TOKENS + DEPTH + OUTPUTS)
    assert set(found) <= {"all-reduce", *expected}
    for kind, size in found.items():
        assert 0 <= size - expected.get(kind, 0) <= 2 * scales


def matrices(text, operation):
    """The types of two axes that this operation has in a compiled program."""
    lines = re.findall(rf"= (.*) {operation}-start\(", text)
    return [dims for line in lines for dims in re.findall(r"\w+\[\d+,\d+\]", line)]


# Tokens that are no multiple of 16 are summed in dw alone, with zeros behind them.
@pytest.mark.needs("plans")
@pytest.mark.usefixtures("on_hopper")
def test_any_number_of_tokens():
    text = lowered(both_ways(Float8Recipe()), rows=(TOKENS + 7,))
    assert calls_of(text) == STEP
    assert "stablehlo.pad" in text
    assert "stablehlo.dot_general" not in text


@pytest.mark.needs("plans")
@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("dims", [(0,), (4, 0), (0, 32)], ids=str)
def test_no_elements(dims):
    step = jax.grad(lambda x, kernel: float8_linear(x, kernel).sum(), (0, 1))
    traced = jax.jit(step).trace(jnp.ones(dims), jnp.ones((dims[-1], 32)))
    assert "quantized_dot" in calls_of(traced.lower(lowering_platforms=("cuda",)).as_text())


@pytest.mark.needs("plans")
@pytest.mark.usefixtures("on_hopper")
def test_scales_of_examples_are_those_of_their_rows():
    def loss(kernel, *of_x):
        each = jax.vmap(lambda *x: float8_linear(Quantized(*x), kernel, out_dtype="float32"))
        return each(*of_x).sum()

    shapes = {(DEPTH, OUTPUTS): "float32", (2, TOKENS, DEPTH): "float8_e4m3fn", (2,): "float32"}
    text = (
        jax.jit(jax.grad(loss))
        .trace(*starmap(jax.ShapeDtypeStruct, shapes.items()))
        .lower(lowering_platforms=("cuda",))
    )
    (call,) = [line for line in text.as_text().splitlines() if "jaxnorm_round_gradient" in line]
    assert f"tensor<{2 * TOKENS}xf32>" in call


# cuBLASLt wants multiples of 16 of what is summed, and of columns.
@pytest.mark.needs("plans")
@pytest.mark.usefixtures("on_hopper")
def test_a_kernel_that_no_product_takes():
    text = lowered(both_ways(Float8Recipe()), outputs=OUTPUTS + 8)
    assert "quantized_dot" not in calls_of(text)
    assert text.count("stablehlo.dot_general") == 3


@pytest.mark.needs("plans")
@pytest.mark.usefixtures("on_hopper")
def test_a_gradient_that_must_be_native(monkeypatch):
    def gradient(x, kernel, _):
        layer = lambda *args: float8_linear(*args, implementation="native").astype(jnp.float32)  # noqa: E731
        return jax.value_and_grad(lambda *args: layer(*args).sum(), (0, 1))(x, kernel)

    monkeypatch.setattr(compat, "default_platform", lambda: "cuda")
    assert calls_of(lowered(gradient)) == STEP
    with pytest.raises(RuntimeError, match=r"float8_linear: implementation='native' cannot serve this call: .* 16"):
        lowered(gradient, outputs=OUTPUTS + 8)
