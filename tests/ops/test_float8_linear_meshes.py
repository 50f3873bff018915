"""`float8_linear` over devices: a mesh changes no result but the order of sums, and moves no x. And exported."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import draw
from coverage import cover
from float8_recipes import RECIPES
from hlo import collectives, compiled_text, count_native_calls
from internals import Float8Linear, rounded_kernel, rounded_x
from jax import export
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from meshes import mesh_of, placed
from quantizing import assert_same

import jaxnorm
from jaxnorm import Float8Recipe, float8_linear

pytestmark = [pytest.mark.jax_version, pytest.mark.usefixtures("exact_products")]

ROWS, DEPTH, COLUMNS = (8, 16), 64, 48
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


def operands(dtype="float32"):
    """x, kernel, bias and dy; the first row of x and the first column of the kernel are zeros."""
    x, kernel = draw("x", (*ROWS, DEPTH), dtype), draw("kernel", (DEPTH, COLUMNS), dtype)
    return (
        x.at[0, 0].set(0),
        kernel.at[:, 0].set(0),
        draw("bias", (COLUMNS,), dtype),
        draw("dy", (*ROWS, COLUMNS), dtype),
    )


def value_and_gradients(recipe, x, kernel, bias, dy):
    y, pull_back = jax.vjp(lambda *args: float8_linear(*args[:2], bias=args[2], recipe=recipe), x, kernel, bias)
    return y, *pull_back(dy)


# Over devices, and exported, a program has no kernels, and XLA for GPUs divides less exactly: what lies between two
# values of float8 may become the other one.
BOUND = 1e-6 if jax.default_backend() == "cpu" else 2.0**-5


def assert_one_device_gives(actual, expected, bound=BOUND):
    for a, e in zip(actual, expected, strict=True):
        assert (a.shape, a.dtype) == (e.shape, e.dtype)
        step = bound if a.dtype == jnp.float32 else 2.0**-8
        np.testing.assert_allclose(np.float64(a), np.float64(e), rtol=step, atol=bound * np.abs(np.float64(e)).max())


@pytest.mark.needs("several")
@cover(
    split=SPLIT,
    axis_type={"auto": AxisType.Auto, "explicit": AxisType.Explicit},
    recipe=RECIPES,
    implementation=[None, "jnp"],
)
def test_over_devices(split, axis_type, recipe, implementation):
    mesh, args = mesh_of(jax.devices(), axis_type), operands()
    with jax.set_mesh(mesh), jaxnorm.implementation(implementation):
        actual = jax.jit(partial(value_and_gradients, recipe))(*placed(mesh, args, split))
    assert_one_device_gives(actual, jax.jit(partial(value_and_gradients, recipe))(*args))


# An Explicit mesh that no result can be split over is an error as of JAX's own product, where the sum is split too.
@pytest.mark.needs("several")
@pytest.mark.parametrize("of_kernel", [P(None, "a"), P("b", "a")], ids=["outputs", "what is summed and outputs"])
def test_one_axis_for_rows_and_outputs(of_kernel):
    mesh = mesh_of(jax.devices(), AxisType.Explicit)
    x, kernel, *_ = placed(mesh, operands(), (P("a"), of_kernel, P(), P()))
    for product in (jnp.dot, float8_linear):
        with jax.set_mesh(mesh), pytest.raises(Exception, match="illegally sharded result"):
            product(x, kernel)


# Scales are those of whole rows and columns, however these are split.
@pytest.mark.needs("several")
@cover(split=SPLIT, scaling=["row", "tensor"])
def test_what_is_rounded_has_the_same_bits_on_any_mesh(split, scaling):
    mesh, args = mesh_of(jax.devices(), AxisType.Auto), operands()[:2]
    spec = Float8Linear(out_dtype=np.dtype("float32"), scaling=scaling)
    for function, array, sharded in zip((rounded_x, rounded_kernel), args, placed(mesh, args, split[:2]), strict=True):
        over_devices, alone = (jax.jit(partial(function, spec))(a)[:2] for a in (sharded, array))
        assert_same(over_devices, alone)


@pytest.mark.needs("several")
@pytest.mark.parametrize("split", [name for name in SPLIT if "kernels" not in name])
def test_no_operand_is_gathered(split):
    mesh = mesh_of(jax.devices(), AxisType.Auto)
    text = compiled_text(partial(value_and_gradients, Float8Recipe()), *placed(mesh, operands(), SPLIT[split]))
    # Of two devices one axis has but one.
    if all(mesh.shape[axis] == 1 for spec in SPLIT[split] for axis in spec if axis):
        assert not collectives(text)
        return
    assert set(collectives(text)) == {"all-reduce"}
    rows = math.prod(ROWS)
    exact = {
        "rows": DEPTH * COLUMNS + 2 * COLUMNS,  # dw and its columns' scales, db
        "outputs": rows * DEPTH + rows,  # dx and its rows' scales
        "what is summed": rows * COLUMNS + rows + COLUMNS,  # y, and the scales of x and the kernel
    }
    if split in exact:
        assert collectives(text)["all-reduce"] == 4 * exact[split]


def manual(mesh, split, recipe):
    """The same as a device computes it of its own rows, or outputs; kernels and biases are not split with rows."""
    of_x, of_kernel, of_bias, of_dy = split

    def of_shards(x, kernel, bias):
        layer = lambda *args: float8_linear(*args[:2], bias=args[2], recipe=recipe)  # noqa: E731
        return jax.shard_map(layer, mesh=mesh, in_specs=(of_x, of_kernel, of_bias), out_specs=of_dy)(x, kernel, bias)

    def function(x, kernel, bias, dy):
        y, pull_back = jax.vjp(of_shards, x, kernel, bias)
        return y, *pull_back(dy)

    return function


# A device has scales of its own for the columns of its rows, so that dw, and dx by its outputs, is rounded otherwise.
@pytest.mark.needs("several")
@pytest.mark.parametrize("split", ["rows", "both axes of rows", "outputs", "rows and outputs"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_in_a_shard_map(split, dtype):
    mesh, args = mesh_of(jax.devices(), AxisType.Auto), operands(dtype)
    y, dx, dw, db = jax.jit(manual(mesh, SPLIT[split], Float8Recipe()))(*args)
    expected = jax.jit(partial(value_and_gradients, Float8Recipe()))(*args)
    assert_one_device_gives((y, db), (expected[0], expected[3]))
    for actual, e in ((dx, expected[1]), (dw, expected[2])):
        assert (actual.shape, actual.dtype) == (e.shape, e.dtype)
        assert np.linalg.norm(np.float64(actual) - np.float64(e)) <= 0.05 * np.linalg.norm(np.float64(e))


@pytest.mark.needs("several")
def test_a_wide_weight_gradient_in_a_shard_map_is_that_of_one_device():
    mesh, args, recipe = mesh_of(jax.devices(), AxisType.Auto), operands(), Float8Recipe(weight_gradient="compute")
    actual = jax.jit(manual(mesh, SPLIT["both axes of rows"], recipe))(*args)
    assert_one_device_gives(actual, jax.jit(partial(value_and_gradients, recipe))(*args))


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
def test_an_exported_program(recipe):
    (rows,) = export.symbolic_shape("rows")
    x, kernel, bias, dy = operands()
    types = [jax.ShapeDtypeStruct((rows, *a.shape[1:]), a.dtype) for a in (x, dy)]
    function = jax.jit(partial(value_and_gradients, recipe))
    program = export.export(function, platforms=("cpu", "cuda", "tpu"))(types[0], kernel, bias, types[1])
    assert not count_native_calls(program.mlir_module())
    read = export.deserialize(program.serialize())
    for count in (1, 5):
        args = x[:count], kernel, bias, dy[:count]
        assert_one_device_gives(read.call(*args), function(*args))
