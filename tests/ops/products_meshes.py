"""`quantized_dot` and `float8_linear` over devices: a mesh changes no result but the order of sums, and moves no x.

And with a formula for the kernel by which each device makes its part of a product, in programs that XLA splits.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import draw
from coverage import cover
from hlo import collectives, compiled_text
from internals import Call, Float8Linear, Platform, by_columns, by_rows, ffi, quantized_dot
from jax.experimental.compilation_cache import compilation_cache
from jax.interpreters import mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from meshes import mesh_of, mesh_of_three, placed
from quantizing import assert_same

import jaxnorm
from jaxnorm import float8_linear
from ops.products import DOT, FORMS, LINEAR, assert_norms_close, value_and_gradients, with_zeros

pytestmark = [pytest.mark.jax_version, pytest.mark.needs("several")]
exact_products = pytest.mark.usefixtures("exact_products")

ROWS, DEPTH, COLUMNS = (8, 16), 128, 64
TOKENS = math.prod(ROWS)
# The shardings of x, the kernel, bias and dy.
SPLIT = {
    "rows": (P("a"), P(), P(), P("a")),
    "both axes of rows": (P("a", "b"), P(), P(), P("a", "b")),
    "outputs": (P(), P(None, "b"), P("b"), P(None, None, "b")),
    "rows and outputs": (P("a"), P(None, "b"), P("b"), P("a", None, "b")),
    "what is summed": (P(None, None, "b"), P("b"), P(), P()),
    "rows and what is summed": (P("a", None, "b"), P("b"), P(), P("a")),
    "kernels over the rows' devices": (P("a"), P("a"), P(), P("a")),
}


operands = partial(with_zeros, (*ROWS, DEPTH, COLUMNS))
# Over devices a program has no kernels, and XLA for GPUs divides less exactly: what lies between two values of float8
# may become the other one.
BOUND = 1e-6 if jax.default_backend() == "cpu" else 2.0**-5


# Parts of a result that are added up over two devices are rounded before.
def assert_near(actual, expected, *, of_float32=1e-5, of_half=2.0**-7, of_largest=None):
    """To a step of each dtype, relative to each number and to the largest, or to `of_largest` of that."""
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (e.shape, e.dtype)
        step = of_float32 if a.dtype == jnp.float32 else of_half
        atol = (of_largest or step) * np.abs(np.float64(e)).max()
        np.testing.assert_allclose(np.float64(a), np.float64(e), rtol=step, atol=atol)


assert_one_device_gives = partial(assert_near, of_float32=BOUND, of_half=2.0**-8, of_largest=BOUND)


# On an Explicit mesh JAX asks for the sharding of a sum that is split, as of every product, but float8_linear has one.
@exact_products
@cover(split=SPLIT, axis_type=[AxisType.Auto, AxisType.Explicit], form=FORMS, implementation=[None, "xla"])
def test_over_devices(split, axis_type, form, implementation):
    if form.recipe is None and any(split[1][:1]):
        axis_type = AxisType.Auto
    mesh, args = mesh_of(jax.devices(), axis_type), operands()
    with jax.set_mesh(mesh), jaxnorm.implementation(implementation):
        actual = jax.jit(partial(value_and_gradients, form))(*placed(mesh, args, split))
    assert_one_device_gives(actual, jax.jit(partial(value_and_gradients, form))(*args))


# An Explicit mesh that no result can be split over is an error as of JAX's own product, where the sum is split too.
@exact_products
@pytest.mark.parametrize("of_kernel", [P(None, "a"), P("b", "a")], ids=["outputs", "what is summed and outputs"])
def test_one_axis_for_rows_and_outputs(of_kernel):
    mesh = mesh_of(jax.devices(), AxisType.Explicit)
    x, kernel, *_ = placed(mesh, operands(), (P("a"), of_kernel, P(), P()))
    for product in (jnp.dot, float8_linear):
        with jax.set_mesh(mesh), pytest.raises(Exception, match="illegally sharded result"):
            product(x, kernel)


# Scales are those of whole rows and columns, however these are split.
@exact_products
@cover(split=SPLIT)
def test_what_is_rounded_has_the_same_bits_on_any_mesh(split):
    mesh, args = mesh_of(jax.devices(), AxisType.Auto), operands()[:2]
    spec = Float8Linear(out_dtype=np.dtype("float32"))
    for function, array, sharded in zip((by_rows, by_columns), args, placed(mesh, args, split[:2]), strict=True):
        over_devices, alone = (jax.jit(partial(function, spec))(a) for a in (sharded, array))
        assert_same(over_devices, alone)


@exact_products
@pytest.mark.parametrize("split", [name for name in SPLIT if "kernels" not in name])
def test_no_operand_is_gathered(split):
    mesh = mesh_of(jax.devices(), AxisType.Auto)
    args = placed(mesh, operands(), SPLIT[split])
    # Of two devices one axis has but one.
    if all(mesh.shape[axis] == 1 for spec in SPLIT[split] for axis in spec if axis):
        assert not collectives(compiled_text(partial(value_and_gradients, LINEAR["default"]), *args))
        return
    for form in (*DOT.values(), LINEAR["default"]):
        assert set(collectives(compiled_text(form, *args[:3]))) == ({"all-reduce"} if "summed" in split else set())
    found = collectives(compiled_text(partial(value_and_gradients, LINEAR["default"]), *args))
    assert set(found) == {"all-reduce"}
    exact = {
        "rows": DEPTH * COLUMNS + 2 * COLUMNS,  # dw and its columns' scales, db
        "outputs": TOKENS * DEPTH + TOKENS,  # dx and its rows' scales
        "what is summed": TOKENS * COLUMNS + TOKENS + COLUMNS,  # y, and the scales of x and the kernel
    }
    if split in exact:
        assert found["all-reduce"] == 4 * exact[split]


def manual(mesh, split, form):
    """The same as a device computes it of its own rows, or outputs; kernels and biases are not split with rows."""
    *of_args, of_dy = split

    def of_shards(*args):
        return jax.shard_map(form, mesh=mesh, in_specs=tuple(of_args), out_specs=of_dy)(*args)

    return jax.jit(partial(value_and_gradients, of_shards))


# A device has scales of its own for the columns of its rows, so that dw, and dx by its outputs, is rounded otherwise.
@exact_products
@cover(
    split=["rows", "both axes of rows", "outputs", "rows and outputs"],
    dtype=["float32", "bfloat16"],
    form=DOT | {name: LINEAR[name] for name in ("default", "wide weight gradient")},
)
def test_in_a_shard_map(split, dtype, form):
    mesh, (*args, dy) = mesh_of(jax.devices(), AxisType.Auto), operands(dtype)
    args.append(dy.astype("float32"))
    wide = partial(form, out_dtype="float32")
    actual = manual(mesh, SPLIT[split], wide)(*args)
    expected = jax.jit(partial(value_and_gradients, wide))(*args)
    is_alike = form.recipe is None or (form == LINEAR["wide weight gradient"] and "outputs" not in split)
    if is_alike and dtype == "float32":
        assert_one_device_gives(actual, expected)
    else:  # parts of gradients of quantized_dot are rounded to 16 bits before they are added up
        alike = slice(None, None, 3) if form.recipe is not None else slice(1)
        assert_one_device_gives(actual[alike], expected[alike])
    assert_norms_close(actual[1:], expected[1:], 0.05)


def compile_anew(keeps):
    """Forgets what is compiled, and keeps what will be, as JAX_COMPILATION_CACHE_DIR says, or not."""
    jax.config.update("jax_enable_compilation_cache", keeps)
    compilation_cache.reset_cache()
    jax.clear_caches()


@pytest.fixture
def parts(monkeypatch):
    """The shapes of x and weights in each call of the kernel."""
    called, others, workspace_of = [], ffi.call, ffi.workspace

    def call(platform, target, ctx, values, **options):
        if target == quantized_dot.TRANSPOSE:
            return mlir.lower_fun(lambda matrix: [matrix.T])(ctx, *values)
        if target != quantized_dot.TARGET:
            return others(platform, target, ctx, values, **options)
        called.append(tuple(aval.shape for aval in ctx.avals_in[:3:2]))

        def formula(x, x_scales, weights, weight_scales, *bias):
            y = jnp.einsum("...k,nk->...n", x.astype(jnp.float32), weights.astype(jnp.float32))
            y = y * x_scales * weight_scales[:, 0]
            return [(y + bias[0].astype(jnp.float32) if bias else y).astype(ctx.avals_out[0].dtype)]

        return mlir.lower_fun(formula)(ctx, *values)

    def workspace(platform, target, *of_call, **needs):
        return () if target == quantized_dot.TARGET else workspace_of(platform, target, *of_call, **needs)

    for name in ("platforms", "nowhere", "unfit"):
        monkeypatch.setattr(quantized_dot.ProductCall, name, getattr(Call, name))
    monkeypatch.setattr(Platform, "here", lambda name: Platform(name))
    monkeypatch.setattr(ffi, "call", call)
    monkeypatch.setattr(ffi, "workspace", workspace)
    # A program that was compiled before, in another process too, is split no more.
    keeps = jax.config.jax_enable_compilation_cache
    compile_anew(keeps=False)
    yield called
    compile_anew(keeps=keeps)


def layer(x, kernel, bias, dy):
    return value_and_gradients(lambda x, kernel, bias: float8_linear(x, kernel, bias=bias), x, kernel, bias, dy)


LAYERS = {name: split for name, split in SPLIT.items() if name != "both axes of rows"}
# Over an Explicit mesh the products would want another x and dy.
SEQUENCES = {
    "sequence and outputs": (P("a", "b"), P("a", "b"), P("b"), P("a", None, "b")),
    "sequence and what is summed": (P("a", None, "b"), P(("b", "a")), P(), P("a", "b")),
}


# To that of whole arrays on each device, where XLA rounds too: its scales are not a GPU's kernels' to the bit.
@cover(
    case={
        f"{name}, {axes}": (split, axes)
        for axes, table in {"Auto": LAYERS | SEQUENCES, "Explicit": LAYERS}.items()
        for name, split in table.items()
    },
    dtype=["bfloat16", "float32"],
)
def test_a_layer(case, dtype, parts):
    (split, axes), args = case, operands(dtype, "float32")
    mesh = mesh_of(jax.devices(), getattr(AxisType, axes))
    with jax.set_mesh(mesh):
        results = jax.jit(layer)(*placed(mesh, args, split))
        assert len(parts) == 3
        whole = jax.jit(layer)(*placed(mesh, args, [P()] * 4))
    assert_near(results, whole)


# What is added up has the dtype of the result: y and dx x's, dw the kernel's. XLA for CPUs adds up bfloat16 in float32.
NARROW = 4 if jax.default_backend() == "cpu" else 2
EXCHANGED = {
    "outputs": NARROW * TOKENS * DEPTH + 4 * TOKENS,
    "what is summed": NARROW * TOKENS * COLUMNS + 4 * (TOKENS + COLUMNS),
    "rows": 4 * (DEPTH * COLUMNS + COLUMNS) + 4 * COLUMNS,
}


@pytest.mark.parametrize("split", EXCHANGED)
@pytest.mark.usefixtures("parts")
def test_what_is_added_up(split):
    mesh = mesh_of(jax.devices(), AxisType.Auto)
    text = compiled_text(layer, *placed(mesh, operands("bfloat16", "float32"), SPLIT[split]))
    # Of two devices the first axis has but one.
    along = mesh.shape["a" if split == "rows" else "b"]
    assert collectives(text) == ({"all-reduce": EXCHANGED[split]} if along > 1 else {})


# How x, weights and the result are split, and then the parts of x and weights that a device multiplies. What is summed
# stays as it is split in both, and then the result as it is split, x, and weights.
SUMMED, ROWS_AND_SUMMED = (P(None, None, "b"), P(None, "b")), (P("a", None, "b"), P(None, "b"))
PARTS = {
    "rows": (P("a"), P(), P("a"), P("a"), P()),
    "outputs": (P(), P("b"), P(None, None, "b"), P(), P("b")),
    "rows and outputs": (P("a"), P("b"), P("a", None, "b"), P("a"), P("b")),
    "what is summed": (*SUMMED, P(), *SUMMED),
    "what is summed, of x": (SUMMED[0], P(), P(), *SUMMED),
    "what is summed, of weights": (P(), SUMMED[1], P(), *SUMMED),
    "rows and what is summed": (*ROWS_AND_SUMMED, P("a"), *ROWS_AND_SUMMED),
    "rows, and weights over their devices": (P("a"), P(None, "a"), P("a"), P("a"), P()),
    "both axes, for rows and for outputs": (P("a", "b"), P(("a", "b")), P("a", "b"), P("a", "b"), P()),
    "what is summed, of weights over rows' devices too": (
        *(ROWS_AND_SUMMED[0], P(None, ("b", "a")), P("a")),
        *ROWS_AND_SUMMED,
    ),
    "rows over the outputs' devices": (P("a", "b"), P("b"), P("a", None, "b"), P("a"), P("b")),
    "what is summed, of the result over its devices": (*ROWS_AND_SUMMED, P("a", "b"), *ROWS_AND_SUMMED),
    "the result alone": (P(), P(), P("a", None, "b"), P("a"), P("b")),
}


def quantized(dtype):
    """x and weights as they are rounded, and a bias."""
    x, kernel, bias, _ = operands()
    return *DOT["float8"].rounded(x, kernel), bias.astype(dtype)


def product(x, weights, bias):
    return jaxnorm.quantized_dot(x, weights, bias=bias, out_dtype=bias.dtype)


def split_operands(mesh, of_x, of_weights, args):
    columns, of_x = P(*[*of_weights][:1]), jaxnorm.Quantized(of_x, P(*[*of_x][:2]))
    of_weights = jaxnorm.Quantized(of_weights, columns, transposed=True)
    return jax.device_put(args, jax.tree.map(partial(NamedSharding, mesh), (of_x, of_weights, columns)))


def part(mesh, shape, spec):
    """A device's part of a shape."""
    names = [jax.tree.leaves(axes) for axes in (*spec, *[None] * len(shape))]
    return tuple(n // math.prod(mesh.shape[name] for name in of) for n, of in zip(shape, names, strict=False))


def assert_product_of(found, mesh, split, parts, function=product, dtype="float32"):
    """It is that of one device, and these parts of x and weights are what devices multiplied."""
    args = quantized(dtype)
    y = jax.jit(function)(*split_operands(mesh, *split, args))
    assert found == [tuple(map(partial(part, mesh), ((*ROWS, DEPTH), (COLUMNS, DEPTH)), of)) for of in parts]
    assert_near(y, product(*args))


@cover(split=PARTS, dtype=["bfloat16", "float32"])
def test_each_device_makes_its_part(split, dtype, parts):
    *of_operands, of_y, of_x, of_weights = split
    mesh = mesh_of(jax.devices(), AxisType.Auto)
    function = jax.jit(product, out_shardings=NamedSharding(mesh, of_y))
    assert_product_of(parts, mesh, of_operands, [(of_x, of_weights)], function, dtype)


def test_within_a_shard_map(parts):
    mesh = mesh_of_three(jax.devices())
    function = jax.shard_map(product, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"c"})
    assert_product_of(parts, mesh, ROWS_AND_SUMMED, [ROWS_AND_SUMMED], function)


def test_a_part_that_no_kernel_takes(parts, monkeypatch):
    monkeypatch.setattr(
        quantized_dot.ProductCall, "nowhere", lambda self: "a part" if self.operands.x.shape[-1] < DEPTH else None
    )
    assert_product_of(parts, mesh_of(jax.devices(), AxisType.Auto), SUMMED, [])


# What devices cannot split evenly is on each of them if it is summed; of rows and outputs the last part is shorter.
def test_uneven_parts(parts):
    mesh = mesh_of(jax.devices(), AxisType.Auto)
    shapes = (3 * mesh.shape["a"] - 1, 2 * 33), (65, 2 * 33)
    of_x, of_weights = (draw("x", shape) for shape in shapes)
    x, weights = DOT["float8"].rounded(of_x, of_weights.T)

    def split(*both):
        put = [
            jax.tree.map(lambda a, s=spec: jax.lax.with_sharding_constraint(a, NamedSharding(mesh, s)), of)
            for of, spec in zip(both, (P("a"), P("b")), strict=True)
        ]
        return jaxnorm.quantized_dot(*put, out_dtype="float32")

    y, of_outputs = jax.jit(split)(x, weights), -(-65 // mesh.shape["b"])
    assert parts == [((3 if mesh.shape["a"] > 1 else 2, 66), (of_outputs, 66))]
    assert_near(y, jaxnorm.quantized_dot(x, weights, out_dtype="float32"))
