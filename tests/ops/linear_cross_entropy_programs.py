"""The cross-entropy of a product in programs: one chunk's memory and few products, devices, and what is exported."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from cases import assert_near, both_ways
from coverage import cover
from hlo import collectives, count_native_calls
from jax import export
from jax.sharding import AxisType, PartitionSpec as P
from meshes import mesh_of, on_mesh
from native import is_platform_with_kernels

import jaxnorm
from ops import linear_cross_entropy as linear
from ops.linear_cross_entropy import ALL_OR_NONE, GIVEN, OPTIONS, REDUCTIONS, grad_of, loss, masks, split, whole

pytestmark = [pytest.mark.any_code, pytest.mark.usefixtures("exact_products")]

CALLS = {"jaxnorm_cross_entropy_fwd": 1, "jaxnorm_cross_entropy_bwd": 1} if is_platform_with_kernels() else {}


def compiled(function, given, rows=4096, dtype="bfloat16", **options):
    """A program of the operands with a mask of classes, if they are all there."""
    shapes = {"x": (rows, 32), "kernel": (32, 4096), "bias": (4096,), "row_weights": (rows,), "logit_scale": ()}
    moving = {name: jax.ShapeDtypeStruct(shapes[name], dtype) for name in ("x", "kernel", *given)}

    def of(moving, labels):
        where = (jnp.arange(4096) < 4000)[None] if given else None  # of 4096 rows
        return function(lambda moving: loss(labels, where=where, rows_per_chunk=256, **options)(moving).sum())(moving)

    return jax.jit(of).lower(moving, jax.ShapeDtypeStruct((rows,), "int32")).compile()


# A CPU's products of half types are those of float32. The booleans of all logits would have 32 times a chunk's bytes.
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(("given", "rows", "chunks"), [("none", 4096, 8), ("all", 16384, 12)])
def test_a_gradient_has_the_memory_of_one_chunk(reduction, given, rows, chunks):
    for function in (lambda f: f, jax.grad):
        memory = compiled(function, GIVEN[given], rows, reduction=reduction).memory_analysis()
        assert memory.temp_size_in_bytes < chunks * 2 * 256 * 4096


def products(text: str) -> int:
    """Of matrices, whatever a backend makes of them."""
    return sum(text.count(name) for name in (" dot(", '"__onednn$matmul"', "__cublas$gemm", "__cublas$lt$matmul"))


# The logits, their gradient with x, and with the kernel; the logits are made again only for single losses.
@pytest.mark.parametrize("given", ALL_OR_NONE)
@pytest.mark.parametrize(
    ("reduction", "of", "count"), [("mean", "both", 3), ("mean", "x", 2), ("sum", "both", 3), ("none", "both", 3)]
)
def test_matrix_products(reduction, of, count, given):
    def gradient(f):
        return jax.grad(f) if of == "both" else partial(grad_of, "x")(f)

    text = compiled(gradient, GIVEN[given], dtype="float32", reduction=reduction).as_text()
    assert (products(text), count_native_calls(text)) == (count, CALLS)


@pytest.mark.needs("kernels")
def test_chunks_of_logits_become_their_gradients():
    moving, labels = split(given=(), dims=(64, 16), classes=256)
    text = jax.jit(jax.grad(loss(labels, rows_per_chunk=16))).lower(moving).as_text()
    (call,) = [line for line in text.splitlines() if "@jaxnorm_cross_entropy_bwd(" in line]
    assert "output_operand_alias" in call


def steps_on(mesh, step, args, specs):
    """What a step gives on one device and on a mesh, and its program there."""
    there, text = on_mesh(mesh, step, args, specs)
    return jax.device_get(there), jax.device_get(jax.jit(step)(*args)), text


# The kernel's classes, with those of bias and mask, or the columns of x and kernel.
SPECS = {
    "rows": (P("a"), P(), P()),
    "rows over all": (P(("a", "b")), P(), P()),
    "rows and classes": (P("a"), P(None, "b"), P("b")),
    "classes": (P(), P(None, ("a", "b")), P(("a", "b"))),
    "columns": (P("a", None, "b"), P("b"), P()),
}


@cover(
    axis_type=[AxisType.Auto, AxisType.Explicit],
    specs=SPECS,
    reduction=REDUCTIONS,
    where=["all", "classes", "rows", "labels"],
    implementation=[None, "xla"],
    given=ALL_OR_NONE,
    return_logsumexp=[False, True],
)
def test_over_devices(devices, axis_type, specs, reduction, where, implementation, given, return_logsumexp):
    dims, classes = (8, 8, 16), 64
    moving, labels = split(given=given, dims=dims, classes=classes)
    mask, (x_spec, kernel_spec, class_spec) = masks(dims, classes)[where], specs
    options = {**OPTIONS, "reduction": reduction, "rows_per_chunk": 16, "implementation": implementation}

    def step(moving, labels, *mask):
        function = loss(labels, where=mask[0] if mask else None, return_logsumexp=return_logsumexp, **options)
        # Away from zero, where a last bit of a large sum would be much of its cosine.
        return both_ways(function, partial(jax.tree.map, lambda v: 2 + jnp.cos(v)))(moving)

    rows = P(*x_spec[:1])
    of = {"x": x_spec, "kernel": kernel_spec, "bias": class_spec, "row_weights": rows, "logit_scale": P()}
    of = {name: of[name] for name in moving}
    args, of_args = (moving, labels), (of, rows)
    if mask is not None:
        args, of_args = (*args, mask), (*of_args, class_spec if where == "classes" else rows)
    actual, expected, text = steps_on(mesh_of(devices, axis_type), step, args, of_args)
    assert_near(actual, expected)
    if specs in (SPECS["rows"], SPECS["rows over all"]):  # the labels may be gathered, to know which classes they are
        assert collectives(text).get("all-gather", 0) <= 4 * labels.size * (mask is not None)


# Of sums over rows there is one exchange: of the loss, the number of rows that count, and the gradient of the kernel.
@cover(
    axis_type=[AxisType.Auto, AxisType.Explicit],
    spec=[P("a"), P("a", "b"), P(("a", "b")), P(None, "b")],
    kernel_spec=[P(), P(None, "b"), P("b")],
)
def test_rows_over_devices(devices, axis_type, spec, kernel_spec):
    mesh = mesh_of(devices, axis_type)
    moving, labels = split(given=(), dims=(8, 64, 16), classes=256)

    def step(moving, labels):
        return jax.value_and_grad(loss(labels, rows_per_chunk=16))(moving)

    actual, expected, text = steps_on(mesh, step, (moving, labels), ({"x": spec, "kernel": kernel_spec}, spec))
    assert_near(actual, expected)
    whole, found = 4 * 16 * 256, collectives(text)
    if any(mesh.shape[name] > 1 for axes in spec if axes for name in axes):
        # XLA for GPUs leaves each of b's devices its part of the sum where that is wanted.
        summed = found["all-reduce"] + mesh.shape["b"] * found.get("reduce-scatter", 0)
        assert whole <= summed <= whole + 32
    assert (found.get("all-gather", 0), count_native_calls(text)) == (whole if any(kernel_spec) else 0, CALLS)


# The kernel has more axes than x.
@cover(
    axis_type=[AxisType.Auto, AxisType.Explicit], reduction=REDUCTIONS, spec=[P(), P("b")], kernel_spec=[P(), P("b")]
)
def test_one_row_over_devices(devices, axis_type, reduction, spec, kernel_spec):
    moving, _ = split(given=(), dims=(16,))
    step = jax.value_and_grad(loss(jnp.int32(3), reduction=reduction))
    actual, expected, _ = steps_on(mesh_of(devices, axis_type), step, (moving,), ({"x": spec, "kernel": kernel_spec},))
    assert_near(actual, expected)


# The mean of means is that of all where each device has as many rows that count, and no weights.
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(("given", "reduction"), [("none", "mean"), ("all", "sum"), ("all", "none")])
def test_in_a_shard_map(devices, check_vma, given, reduction):
    mesh, dims = mesh_of(devices, AxisType.Auto), (8, 8, 16)
    moving, labels = split(given=GIVEN[given], dims=dims)
    labels = jnp.maximum(labels, 0) if reduction == "mean" else labels
    mask, rows = masks(dims, linear.CLASSES)["classes"], P(("a", "b"))
    of = {"x": rows, "kernel": P(), "bias": P(), "row_weights": rows, "logit_scale": P()}
    over_devices = jax.lax.pmean if reduction == "mean" else jax.lax.psum

    def shard(moving, labels, mask):
        value = loss(labels, where=mask, reduction=reduction, rows_per_chunk=4)(moving).sum()
        return over_devices(value, ("a", "b"))

    specs = {name: of[name] for name in moving}, rows, P()
    sharded = jax.shard_map(shard, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)
    ours = jax.jit(jax.value_and_grad(lambda moving: sharded(moving, labels, mask)))(moving)
    alone = whole(labels, where=mask, reduction="mean" if reduction == "mean" else "sum")
    assert_near(jax.device_get(ours), jax.device_get(jax.jit(jax.value_and_grad(alone))(moving)))


@pytest.mark.parametrize("given", ALL_OR_NONE)
def test_exported_for_any_number_of_rows(given):
    moving, labels = split(given=GIVEN[given], dims=(24, 16))
    mask = masks((24, 16), linear.CLASSES)["classes"] if given == "all" else None
    (rows,) = export.symbolic_shape("rows")
    types = {
        k: jax.ShapeDtypeStruct((rows, *a.shape[1:]) if k in ("x", "row_weights") else a.shape, a.dtype)
        for k, a in moving.items()
    }

    @jax.jit
    def step(moving, labels):
        return jax.value_and_grad(loss(labels, where=mask))(moving)

    program = export.export(step, platforms=("cpu", "cuda", "tpu"))(types, jax.ShapeDtypeStruct((rows,), "int32"))
    assert_near(jax.jit(program.call)(moving, labels), step(moving, labels))


# All rows are one chunk where their logits take 4 GiB at most; `explain` tells it.
@pytest.mark.parametrize(("rows", "chunks"), [(8192, 1), (2**14, 4), (2**16, 16)])
def test_how_many_chunks_there_are_by_default(rows, chunks):
    x, kernel = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((rows, 2560), (2560, 151_936)))
    labels = jax.ShapeDtypeStruct((rows,), "int32")
    (call,) = jaxnorm.explain(jaxnorm.linear_cross_entropy, x, kernel, labels)
    assert f"chunks of rows: {chunks}" in call.operands
