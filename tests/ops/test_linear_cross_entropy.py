"""The cross-entropy of a product by chunks of rows: what the unchunked one gives, with one chunk's memory."""

from functools import partial

import bad_softmax_calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import assert_near, draw
from coverage import cover
from hlo import collectives, count_native_calls
from jax import export
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from meshes import mesh_of, placed
from native import is_platform_with_kernels

import jaxnorm

pytestmark = [pytest.mark.any_code, pytest.mark.usefixtures("exact_products")]

linear_cross_entropy = jaxnorm.linear_cross_entropy
DIMS, CLASSES = (4, 6, 16), 40
REDUCTIONS = ("mean", "sum", "none")
OPTIONS = {"label_smoothing": 0.1, "z_loss": 1e-2, "logit_scale": 0.7, "soft_cap": 3.0, "ignore_index": -100}
CALLS = {"jaxnorm_cross_entropy_fwd": 1, "jaxnorm_cross_entropy_bwd": 1} if is_platform_with_kernels() else {}


def inputs(dims=DIMS, classes=CLASSES, dtype="float32"):
    labels = np.random.default_rng(7).integers(0, classes, dims[:-1])
    labels[(0,) * labels.ndim] = -100
    return draw("x", dims, dtype), draw("kernel", (dims[-1], classes), dtype, std=0.3), jnp.asarray(labels, "int32")


def whole(x, kernel, labels, *, reduction="mean", rows_per_chunk=None, **options):
    losses = jaxnorm.softmax_cross_entropy_with_integer_labels(x @ kernel, labels, **options)
    count = (labels != options.get("ignore_index", -1)).sum()
    return {"mean": losses.sum() / count, "sum": losses.sum(), "none": losses}[reduction]


def loss(function, labels, **options):
    """Not linear in the result, which is scaled so that its digits are not lost in the loss."""
    return lambda *args: jnp.sin(function(*args, labels, **options) / 10).sum()


def assert_same(transform, **options):
    *args, labels = inputs()
    ours, theirs = (jax.jit(transform(loss(function, labels, **options))) for function in (linear_cross_entropy, whole))
    assert_near(ours(*args), theirs(*args))


# All rows, chunks that divide them and that do not.
chunks = cover(reduction=REDUCTIONS, rows_per_chunk=[None, 6, 5], options=[{}, OPTIONS])


@chunks
def test_values_and_gradients(reduction, rows_per_chunk, options):
    options = {"ignore_index": -100, **options, "reduction": reduction, "rows_per_chunk": rows_per_chunk}
    assert_same(lambda function: jax.value_and_grad(function, (0, 1)), **options)


def second(function):
    gradient = jax.grad(function, (0, 1))
    return jax.grad(lambda *args: sum(jnp.sin(g).sum() for g in gradient(*args)), (0, 1))


TRANSFORMS = {
    "second derivatives": second,
    "jvp": lambda f: lambda *args: jax.jvp(f, args, tuple(map(jnp.cos, args))),
    "grad of x": jax.grad,
    "grad of kernel": lambda f: jax.grad(f, 1),
    "vmap over x": lambda f: lambda x, kernel: jax.vmap(jax.grad(f, (0, 1)), (0, None))(jnp.stack([x, -x]), kernel),
    "vmap over both": lambda f: lambda *args: jax.vmap(jax.grad(f, (0, 1)))(*(jnp.stack([a, 2 * a]) for a in args)),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f), (0, 1)),
    "scan": lambda f: jax.grad(
        lambda x, k: jax.lax.scan(lambda s, a: (s + f(a * x, k), a), 0.0, jnp.arange(3.0))[0], (0, 1)
    ),
}


@pytest.mark.parametrize(
    ("name", "reduction"), [*((name, "mean") for name in TRANSFORMS), ("second derivatives", "none"), ("jvp", "none")]
)
def test_transformed(name, reduction):
    assert_same(TRANSFORMS[name], **OPTIONS, reduction=reduction, rows_per_chunk=7)


@pytest.mark.parametrize("dims", [(1, 16), (37, 16), (2, 3, 5, 16)], ids=str)
def test_rows_of_any_number(dims):
    *args, labels = inputs(dims)
    labels = labels.at[(0,) * labels.ndim].set(3)
    step = [
        jax.value_and_grad(partial(f, labels=labels, rows_per_chunk=4), (0, 1)) for f in (linear_cross_entropy, whole)
    ]
    assert_near(*(jax.jit(function)(*args) for function in step))


def test_no_rows():
    x, kernel, labels = jnp.ones((0, 16)), jnp.ones((16, 8)), jnp.ones(0, "int32")
    loss, gradients = jax.jit(jax.value_and_grad(partial(linear_cross_entropy, labels=labels), (0, 1)))(x, kernel)
    assert loss == 0
    assert not gradients[1].any()


# Though there are many chunks: of a mean each gradient is rounded once. On a GPU XLA's float32 products of 64 rows are
# less exact than those of 128, whoever makes them.
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_gradients_are_as_exact_as_those_of_one_chunk(dtype):
    x, kernel, labels = inputs((1024, 64), 1000, dtype)

    def gradients(function, **options):
        return jax.jit(jax.grad(partial(function, labels=labels, ignore_index=-100, **options), (0, 1)))

    with jax.enable_x64(True):
        exact = jax.device_get(gradients(whole)(x.astype("float64"), kernel.astype("float64")))
    ours, theirs = gradients(linear_cross_entropy, rows_per_chunk=128)(x, kernel), gradients(whole)(x, kernel)
    for actual, other, wide in zip(ours, theirs, exact, strict=True):
        assert actual.dtype == dtype
        errors = [np.linalg.norm(np.asarray(a, np.float64) - wide) for a in (actual, other)]
        assert errors[0] <= 1.05 * errors[1]


def test_a_kernel_of_another_dtype():
    x, kernel, labels = inputs()
    ours, theirs = (
        jax.value_and_grad(partial(f, labels=labels, ignore_index=-100), (0, 1)) for f in (linear_cross_entropy, whole)
    )
    value, (dx, dkernel) = ours(x.astype("bfloat16"), kernel)
    assert (value.dtype, dx.dtype, dkernel.dtype) == ("float32", "bfloat16", "float32")
    np.testing.assert_allclose(value, theirs(x, kernel)[0], rtol=1e-2)


# As of a table of float32 in a model of bfloat16, of whose gradient XLA for CPUs makes a product of its own.
def test_a_table_of_another_dtype():
    x, kernel, labels = inputs((4, 128, 64), 512)
    gradient = jax.grad(lambda table, f: f(x.astype("bfloat16"), table.T, labels, ignore_index=-100).sum())
    ours, theirs = (jax.jit(partial(gradient, f=f))(kernel.T) for f in (linear_cross_entropy, whole))
    assert ours.dtype == "float32"
    np.testing.assert_allclose(ours, theirs, atol=1e-2 * float(jnp.abs(theirs).max()))


def test_wrong_labels_and_ignored_ones():
    x, kernel, _ = inputs()
    assert np.isnan(linear_cross_entropy(x, kernel, jnp.full(DIMS[:-1], CLASSES)))
    assert linear_cross_entropy(x, kernel, jnp.full(DIMS[:-1], -7), ignore_index=-7) == 0
    losses = linear_cross_entropy(x, kernel, jnp.full(DIMS[:-1], 3).at[1, 2].set(-1), reduction="none")
    assert np.argwhere(np.isnan(losses)).tolist() == [[1, 2]]


def compiled(function, dims=(4096, 32), classes=4096, dtype="bfloat16"):
    types = (dims, dtype), ((dims[-1], classes), dtype), (dims[:-1], "int32")
    return jax.jit(function).lower(*(jax.ShapeDtypeStruct(*of) for of in types)).compile()


def products(text: str) -> int:
    """Of matrices, whatever a backend makes of them."""
    return sum(text.count(name) for name in (" dot(", '"__onednn$matmul"', "__cublas$gemm", "__cublas$lt$matmul"))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_gradient_has_the_memory_of_one_chunk(reduction):
    def loss(*args):
        return linear_cross_entropy(*args, reduction=reduction, rows_per_chunk=256).sum()

    one = 2 * 256 * 4096
    for function in (loss, jax.grad(loss, (0, 1))):
        # A CPU's products of half types are those of float32.
        assert compiled(function).memory_analysis().temp_size_in_bytes < 8 * one


# The logits, their gradient with x, and with the kernel; the logits are made again only for single losses.
@pytest.mark.parametrize(("reduction", "argnums", "count"), [("mean", (0, 1), 3), ("mean", 0, 2), ("none", (0, 1), 3)])
def test_matrix_products(reduction, argnums, count):
    def loss(*args):
        return linear_cross_entropy(*args, reduction=reduction, rows_per_chunk=256).sum()

    text = compiled(jax.grad(loss, argnums), dtype="float32").as_text()
    assert products(text) == count
    assert count_native_calls(text) == CALLS


@pytest.mark.needs("kernels")
def test_chunks_of_logits_become_their_gradients():
    *args, labels = inputs((64, 16), 256)
    text = (
        jax.jit(jax.grad(lambda *args: linear_cross_entropy(*args, labels, rows_per_chunk=16))).lower(*args).as_text()
    )
    (call,) = [line for line in text.splitlines() if "@jaxnorm_cross_entropy_bwd(" in line]
    assert "output_operand_alias" in call


ROWS = [P("a"), P("a", "b"), P(("a", "b")), P(None, "b")]


def on_mesh(mesh, reduction, spec, kernel_spec, implementation=None):
    """What a step gives on a mesh and on one device, and its program."""
    *args, labels = inputs((8, 64, 16), 256)
    step = jax.value_and_grad(
        lambda *args: linear_cross_entropy(
            *args, reduction=reduction, rows_per_chunk=16, ignore_index=-100, implementation=implementation
        ).sum(),
        (0, 1),
    )
    expected = jax.device_get(jax.jit(step)(*args, labels))
    with jax.set_mesh(mesh):
        on_mesh = placed(mesh, (*args, labels), (spec, kernel_spec, spec))
        program = jax.jit(step).lower(*on_mesh).compile()
        return jax.device_get(program(*on_mesh)), expected, program.as_text()


# Of sums over rows there is one exchange: of the loss, the number of rows that count, and the gradient of the kernel.
@pytest.mark.needs("several")
@cover(axis_type=[AxisType.Auto, AxisType.Explicit], spec=ROWS, kernel_spec=[P(), P(None, "b"), P("b")])
def test_rows_over_devices(devices, axis_type, spec, kernel_spec):
    mesh = mesh_of(devices, axis_type)
    actual, expected, text = on_mesh(mesh, "mean", spec, kernel_spec)
    assert_near(actual, expected)
    whole = 4 * 16 * 256
    found = collectives(text)
    if any(mesh.shape[name] > 1 for axes in spec if axes for name in axes):
        # XLA for GPUs leaves each of b's devices its part of the sum where that is wanted.
        summed = found["all-reduce"] + mesh.shape["b"] * found.get("reduce-scatter", 0)
        assert whole <= summed <= whole + 32
    assert found.get("all-gather", 0) == (whole if any(kernel_spec) else 0)
    assert count_native_calls(text) == CALLS


@pytest.mark.needs("several")
@cover(axis_type=[AxisType.Auto, AxisType.Explicit], reduction=REDUCTIONS, implementation=[None, "jnp"])
def test_any_reduction_over_devices(devices, axis_type, reduction, implementation):
    actual, expected, text = on_mesh(mesh_of(devices, axis_type), reduction, P("a"), P(), implementation)
    assert_near(actual, expected)
    assert "all-gather" not in collectives(text)


# The kernel has more axes than x.
@pytest.mark.needs("several")
@cover(
    axis_type=[AxisType.Auto, AxisType.Explicit], reduction=REDUCTIONS, spec=[P(), P("b")], kernel_spec=[P(), P("b")]
)
def test_one_row_over_devices(devices, axis_type, reduction, spec, kernel_spec):
    mesh = mesh_of(devices, axis_type)
    *args, _ = inputs((16,))
    loss = partial(linear_cross_entropy, labels=jnp.int32(3), reduction=reduction)
    step = jax.jit(jax.value_and_grad(loss, (0, 1)))
    expected = jax.device_get(step(*args))
    with jax.set_mesh(mesh):
        assert_near(jax.device_get(step(*placed(mesh, args, (spec, kernel_spec)))), expected)


@pytest.mark.needs("several")
@pytest.mark.parametrize("check_vma", [True, False])
def test_in_a_shard_map(devices, check_vma):
    mesh = mesh_of(devices, AxisType.Auto)
    *args, labels = inputs((8, 64, 16), 256)
    labels = labels.at[0, 0].set(3)

    def shard(*args):
        return jax.lax.pmean(linear_cross_entropy(*args, rows_per_chunk=16), ("a", "b"))

    rows = P(("a", "b"))
    sharded = jax.shard_map(shard, mesh=mesh, in_specs=(rows, P(), rows), out_specs=P(), check_vma=check_vma)
    steps = [
        jax.jit(jax.value_and_grad(partial(f, labels=labels), (0, 1)))
        for f in (lambda x, k, labels: sharded(x, k, labels), whole)
    ]
    assert_near(*(jax.device_get(step(*args)) for step in steps))


def test_exported_for_any_number_of_rows():
    x, kernel, labels = inputs((24, 16))
    (rows,) = export.symbolic_shape("rows")
    types = [
        jax.ShapeDtypeStruct(shape, a.dtype)
        for shape, a in (((rows, 16), x), (kernel.shape, kernel), ((rows,), labels))
    ]
    step = jax.jit(jax.value_and_grad(partial(linear_cross_entropy, ignore_index=-100), (0, 1)))
    program = export.export(step, platforms=("cpu", "cuda", "tpu"))(*types)
    assert_near(jax.jit(program.call)(x, kernel, labels), step(x, kernel, labels))


@pytest.mark.parametrize("name", bad_softmax_calls.LINEAR)
def test_bad_input(name):
    args, keywords, error, parts = bad_softmax_calls.LINEAR[name]
    with pytest.raises(error, match=r"(?s)^linear_cross_entropy: " + ".*".join(("", *parts))):
        linear_cross_entropy(*args, **keywords)
