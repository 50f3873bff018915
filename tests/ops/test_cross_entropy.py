"""Cross-entropy: labels, what losses are made of, masks, classes that are split, and the gradient's memory."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import DTYPES, assert_near, bits, draw, draw_x
from coverage import cover
from hlo import collectives, count_native_calls, lowered_calls
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh_of
from native import is_platform_with_kernels
from tolerances import DX, gradient_error

import jaxnorm

pytestmark = pytest.mark.any_code

cross_entropy = jaxnorm.softmax_cross_entropy_with_integer_labels
DIMS = (3, 4, 10)
OPTIONS = {
    "none": {},
    "smoothing": {"label_smoothing": 0.2},
    "z_loss": {"z_loss": 1e-2},
    "all": {"label_smoothing": 0.1, "z_loss": 1e-2, "logit_scale": 0.7, "soft_cap": 3.0, "ignore_index": 5},
}
options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def labels_of(dims):
    return jnp.asarray(np.random.default_rng(7).integers(0, dims[-1], dims[:-1]), jnp.int32)


def formula(
    logits, labels, *, where=None, label_smoothing=0.0, z_loss=0.0, logit_scale=1.0, soft_cap=None, ignore_index=None
):
    """As Optax has it, with the targets in full, beside what trainers add."""
    z = logits * logit_scale
    z = z if soft_cap is None else soft_cap * jnp.tanh(z / soft_cap)
    counts = jnp.broadcast_to(True if where is None else where, z.shape)
    targets = (1 - label_smoothing) * jax.nn.one_hot(labels, z.shape[-1])
    targets += label_smoothing * counts / counts.sum(-1, keepdims=True)
    log_total = jax.nn.logsumexp(z, -1, where=counts)
    losses = log_total - (targets * z).sum(-1) + z_loss * log_total**2
    return losses if ignore_index is None else jnp.where(labels == ignore_index, 0, losses)


def derivatives(function, x):
    """The losses, their tangents, and the gradient of both."""

    def of_both(x):
        return jax.jvp(function, [x], [jnp.cos(x)])

    return of_both(x), jax.grad(lambda x: sum(jnp.sin(y).sum() for y in of_both(x)))(x)


def assert_alike(ours, theirs, x):
    assert_near(*(jax.jit(partial(derivatives, function))(x) for function in (ours, theirs)))


@cover(options={**OPTIONS}, mask=[None, (3, 1, 10)])
def test_the_formula(options, mask):
    x, labels = draw_x(DIMS), labels_of(DIMS)
    given = dict(options)
    if mask is not None:
        given["where"] = (draw("where", mask) > 0) | (jnp.arange(mask[-1]) % 3 == 0)
    assert_alike(*(lambda x, f=f: f(x, labels, **given) for f in (cross_entropy, formula)), x)


@options
def test_second_derivatives(options):
    x, labels = draw_x((2, 10)), labels_of((2, 10))

    def hessian(function):
        return jax.jit(jax.hessian(lambda x: jnp.sin(function(x, labels, **options)).sum()))(x)

    assert_near(hessian(cross_entropy), hessian(formula))


@pytest.mark.parametrize("axis", [0, 1])
def test_another_axis(axis):
    options = OPTIONS["all"]
    x, labels = draw_x(DIMS), labels_of(DIMS)
    moved = jnp.moveaxis(x, -1, axis)
    assert_near(cross_entropy(moved, labels, axis=axis, **options), formula(x, labels, **options))


# Labels are flat indices of a slice along the axes, in their order.
@cover(axes=[(1, 2), (-1, 1), (0, 3), (2, 0, -1), [3]], has_where=[None, "rows", "classes"])
def test_several_axes(axes, has_where):
    options, x = OPTIONS["all"], draw_x((2, 3, 4, 5))
    order = [axis % 4 for axis in axes]
    others = [axis for axis in range(4) if axis not in order]
    flat = x.transpose(*others, *order).reshape(*(x.shape[axis] for axis in others), -1)
    labels = labels_of(flat.shape)
    where, of_flat = None, None
    if has_where == "rows":
        where = draw("where", labels.shape) > -0.5
        of_flat = where[..., None]
    elif has_where == "classes":
        where = (draw("where", x.shape) > 0).at[:, 0].set(True)
        of_flat = where.transpose(*others, *order).reshape(flat.shape)

    def of(function, x, **given):
        return jax.jit(jax.value_and_grad(lambda x: jnp.sin(function(x, labels, **given, **options)).sum()))(x)

    loss, dx = of(cross_entropy, x, axis=tuple(axes), where=where)
    expected, of_flat_x = of(cross_entropy, flat, where=of_flat)
    back = np.argsort([*others, *order])
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    np.testing.assert_array_equal(dx, of_flat_x.reshape([x.shape[i] for i in (*others, *order)]).transpose(*back))


# Of labels' shape, or of what broadcasts to it, as Optax reads it.
@cover(shape=[(3, 4), (4,), (3, 1), (1, 4), ()], axis=[-1, 1])
def test_where_of_rows(shape, axis):
    x, labels, where = draw_x(DIMS), labels_of(DIMS), draw("where", shape) > 0
    moved, rows = jnp.moveaxis(x, -1, axis), jnp.broadcast_to(where, labels.shape)
    losses = cross_entropy(moved, labels, axis, where)
    np.testing.assert_array_equal(losses, jnp.where(rows, cross_entropy(moved, labels, axis), 0))


# Each operand with an axis of examples, or two of them.
@cover(axes=[(0, None, None), (1, 0, None), (None, 1, None), (2, 1, 0), (0, None, 1)], what=["losses", "gradient"])
def test_vmap(axes, what):
    args = draw_x(DIMS), labels_of(DIMS), (draw("where", (4, 10)) > 0) | (jnp.arange(10) == 2)
    others = jnp.sin(args[0]), (args[1] + 3) % 10, args[2] | (jnp.arange(10) == 5)
    examples = [a if at is None else jnp.stack([a, b], at) for a, b, at in zip(args, others, axes, strict=True)]

    def of(function):
        def losses(x, labels, where):
            return function(x, labels, where=where, label_smoothing=0.1)

        def loss(*args):
            return jnp.sin(losses(*args)).sum()

        return jax.jit(jax.vmap(losses if what == "losses" else jax.grad(loss), axes))(*examples)

    assert_near(of(cross_entropy), of(formula))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "uint32", "int64", "uint64"])
def test_labels_of_every_dtype(dtype):
    x = draw_x((6, 300))
    labels = np.asarray([0, 1, 2, 100, 126, 127], dtype)
    with jax.enable_x64(True):
        losses = cross_entropy(x, labels)
    np.testing.assert_array_equal(losses, cross_entropy(x, labels.astype("int32")))


# Never out of bounds, also where 32 bits would make another number of it.
@pytest.mark.on_emulator
@pytest.mark.parametrize("label", [-1, -100, 10, 2**31 - 1, -(2**31), 2**32, 2**32 + 3, -(2**32) + 3])
def test_a_label_that_names_no_class(label):
    x = draw_x((4, 10))
    with jax.enable_x64(True):
        labels = jnp.asarray([1, label, 3, 4], "int64")
        losses, dx = jax.jit(jax.value_and_grad(lambda x: cross_entropy(x, labels).sum()))(x)
        rows = jax.jit(cross_entropy)(x, labels)
    assert np.isnan(losses)
    assert np.isnan(rows).tolist() == [False, True, False, False]
    assert np.isfinite(dx).all()


# Without 64-bit types jax.numpy would make another number of a label, perhaps a class's.
@pytest.mark.parametrize("label", [2**32, 2**32 + 3, -(2**32) + 3, 2**63 - 1])
def test_a_label_that_does_not_fit_32_bits(label):
    x, labels = draw_x((4, 10)), np.asarray([1, label, 3, 4])
    assert np.isnan(cross_entropy(x, labels)).tolist() == [False, True, False, False]
    assert np.isnan(cross_entropy(x[0], np.int64(label)))
    each = jaxnorm.linear_cross_entropy(x, jnp.eye(10), labels, reduction="none")
    assert np.isnan(each).tolist() == [False, True, False, False]


# Beyond the labels' dtype it is no label.
@cover(index=[2**40, 2**32 + 3, -(2**40), 2**32 - 100], dtype=["int64", "int32", "uint32", "int8"], x64=[False, True])
def test_an_ignore_index_names_itself_or_nothing(index, dtype, x64):
    x, bounds = draw_x((4, 10)), np.iinfo(dtype)
    labels = np.asarray([1, index if bounds.min <= index <= bounds.max else 2, 3, 4], dtype)
    with jax.enable_x64(x64), jax.default_matmul_precision("highest"):
        ours = cross_entropy(x, labels, ignore_index=index)
        of_linear = jaxnorm.linear_cross_entropy(x, jnp.eye(10), labels, reduction="none", ignore_index=index)
        named = cross_entropy(x, labels.astype("int32") % 10)
    expected = np.where(labels.astype(object) == index, 0, named)
    np.testing.assert_array_equal(ours, expected)
    np.testing.assert_allclose(of_linear, expected, rtol=1e-5)


@pytest.mark.on_emulator
def test_an_ignored_row_leaves_no_trace():
    x = draw_x((4, 10))
    labels = jnp.asarray([1, -100, 3, -7])
    losses, dx = jax.jit(
        lambda x: (
            cross_entropy(x, labels, ignore_index=-100),
            jax.grad(lambda x: cross_entropy(x, labels, ignore_index=-100, z_loss=1e-3)[:3].sum())(x),
        )
    )(x)
    assert losses[1] == 0
    assert np.isnan(losses[3])
    assert not dx[1].any()


@pytest.mark.on_emulator
def test_a_row_without_classes_has_no_loss():
    x, labels = draw_x((3, 10)), labels_of((3, 10))
    where = jnp.asarray([True, False, True])[:, None]
    step = jax.value_and_grad(lambda x: cross_entropy(x, labels, where=where, z_loss=1.0, label_smoothing=0.3).sum())
    loss, dx = jax.jit(step)(x)
    assert cross_entropy(x, labels, where=where)[1] == 0
    assert np.isfinite(loss)
    assert not dx[1].any()


# A class that does not count and is the label's: its own logit is in the loss, and has a gradient.
@pytest.mark.on_emulator
def test_a_label_that_does_not_count():
    x, where = draw_x((1, 10)), jnp.arange(10) != 3
    assert_alike(*(lambda x, f=f: f(x, jnp.asarray([3]), where=where) for f in (cross_entropy, formula)), x)


@pytest.mark.on_emulator
def test_infinities():
    x = jnp.zeros((4, 6)).at[0, 2].set(-jnp.inf).at[1, 1].set(-jnp.inf).at[2, 3].set(jnp.inf).at[3].set(-jnp.inf)
    losses = cross_entropy(x, jnp.ones(4, "int32"))
    np.testing.assert_allclose(losses[0], np.log(5), rtol=1e-6)
    assert losses[1] == np.inf
    assert np.isnan(losses[2:]).all()


@cover(cols=[1, 50_257, 151_936, 262_144, 1_000_003], dtype=["float32", "bfloat16"])
def test_large_vocabularies(cols, dtype):
    x, label = draw_x((3, cols), dtype), jnp.asarray([0, cols // 2, cols - 1])
    z = np.asarray(x, np.float64)
    top = z.max(-1)
    expected = top + np.log(np.exp(z - top[:, None]).sum(-1)) - z[range(3), label]
    np.testing.assert_allclose(jax.jit(cross_entropy)(x, label), expected, rtol=1e-6, atol=1e-6 * (cols == 1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_the_dtype_of_losses(dtype):
    with jax.enable_x64(dtype == "float64"):
        x = draw_x((2, 8)).astype(dtype)
        losses, dx = jax.value_and_grad(lambda x: cross_entropy(x, jnp.zeros(2, "int32")).sum())(x)
    assert (losses.dtype, dx.dtype) == ("float64" if dtype == "float64" else "float32", dtype)


def projected(hidden, kernel, labels):
    return cross_entropy(hidden @ kernel, labels).mean()


def hidden_and_kernel(rows=256, cols=8192):
    return jax.ShapeDtypeStruct((rows, 64), "float32"), jax.ShapeDtypeStruct((64, cols), "float32")


GRADIENT = "jaxnorm_cross_entropy_bwd"


@pytest.mark.needs("kernels")
def test_the_gradient_takes_the_place_of_computed_logits():
    args = *hidden_and_kernel(), jax.ShapeDtypeStruct((256,), "int32")
    (call,) = lowered_calls(jax.grad(projected), GRADIENT, *args)
    assert "output_operand_alias" in call
    compiled = jax.jit(jax.grad(projected)).lower(*args).compile()
    # One array of logits, what is computed for each row, and what a GPU's library keeps for a product.
    assert compiled.memory_analysis().temp_size_in_bytes < 1.5 * 4 * 256 * 8192


@pytest.mark.needs("several")
@pytest.mark.needs("kernels")
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("kernel_spec", [P(), P(None, "b")], ids=str)
def test_on_a_mesh_too(devices, axis_type, kernel_spec):
    mesh = mesh_of(devices, axis_type)
    cols = (1 << 17) * mesh.size  # a shard is four times and more what a GPU's library keeps for a product, 32 MiB
    types = zip(
        (*hidden_and_kernel(cols=cols), jax.ShapeDtypeStruct((256,), "int32")),
        (P("a"), kernel_spec, P("a")),
        strict=True,
    )
    with jax.set_mesh(mesh):
        args = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec)) for a, spec in types]
        compiled = jax.jit(jax.grad(projected)).lower(*args).compile()
    (call,) = [line for line in compiled.as_text().splitlines() if f'custom_call_target="{GRADIENT}"' in line]
    assert "output_to_operand_aliasing" in call
    shard = 4 * 256 * cols // mesh.shape["a"] // (mesh.shape["b"] if any(kernel_spec) else 1)
    assert compiled.memory_analysis().temp_size_in_bytes < 1.3 * shard


# XLA would copy what is not the program's to overwrite.
@pytest.mark.needs("kernels")
@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint, jax.jit], ids=["call", "checkpoint", "jit"])
@pytest.mark.parametrize("dims", [(256, 8192), (2, 128, 8192)], ids=str)
def test_the_gradient_of_an_argument_has_its_own_place(wrap, dims):
    labels = jnp.zeros(256, "int32")
    function = jax.grad(wrap(lambda x: cross_entropy(x.reshape(256, 8192), labels).mean()))
    x = jax.ShapeDtypeStruct(dims, "float32")
    (call,) = lowered_calls(function, GRADIENT, x)
    assert "output_operand_alias" not in call
    compiled = jax.jit(function).lower(x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.1 * 4 * 256 * 8192


# They are copied first.
def test_logits_that_are_needed_afterwards():
    hidden, kernel, labels = draw("h", (16, 8)), draw("k", (8, 40)), labels_of((16, 40))

    def loss(kernel):
        logits = hidden @ kernel
        return cross_entropy(logits, labels).mean(), logits

    (_, logits), _ = jax.jit(jax.value_and_grad(loss, has_aux=True))(kernel)
    np.testing.assert_allclose(logits, hidden @ kernel, rtol=1e-5)


# Classes that a shard_map splits: each device has a part of the labels' numbers.
@pytest.mark.needs("several")
@cover(options={name: OPTIONS[name] for name in ("none", "all")}, has_mask=[False, True])
def test_classes_over_devices(devices, options, has_mask):
    mesh = mesh_of(devices, AxisType.Auto)
    x, labels = draw_x((8, 4, 16)), labels_of((8, 4, 16))
    where = ((draw("where", (4, 16)) > 0) | (jnp.arange(16) == 9)).at[1].set(False) if has_mask else None
    smoothing = options.get("label_smoothing", 0) > 0

    def split(x, labels, where):
        return cross_entropy(x, labels, where=where, axis_name="b", **options)

    specs = P("a", None, "b"), P("a"), P(None, "b")
    sharded = jax.shard_map(split, mesh=mesh, in_specs=specs, out_specs=P("a"))

    def step(function):
        return jax.jit(jax.value_and_grad(lambda x: jnp.sin(function(x)).sum()))

    ours = step(lambda x: sharded(x, labels, where))
    assert_near(*map(jax.device_get, (ours(x), step(lambda x: cross_entropy(x, labels, where=where, **options))(x))))
    assert "all-gather" not in collectives(ours.lower(x).compile().as_text())
    if is_platform_with_kernels():
        calls = count_native_calls(ours.lower(x).compile().as_text())
        assert calls == {"jaxnorm_cross_entropy_fwd": 1, GRADIENT: 1}
    rows = 8 * 4 // mesh.shape["a"]
    exchanged = collectives(step(lambda x: sharded(x, labels, None)).lower(x).compile().as_text())
    # The maximum, the two parts of the sum, the label's logit and where it is wanted the sum of logits; and the loss.
    assert exchanged == {"all-reduce": 4 * (4 + smoothing) * rows + 4 * (mesh.shape["a"] > 1)}


# A partition by XLA, with masks; labels are whole on each device.
@pytest.mark.needs("several")
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("spec", [P("a"), P("a", None, "b"), P(None, None, ("a", "b"))], ids=str)
def test_on_a_mesh(devices, axis_type, spec):
    mesh = mesh_of(devices, axis_type)
    x, labels = draw_x((8, 4, 32)), labels_of((8, 4, 32))
    where = (draw("where", (4, 32)) > 0) | (jnp.arange(32) == 9)
    step = jax.value_and_grad(lambda x: jnp.sin(cross_entropy(x, labels, where=where, **OPTIONS["all"])).sum())
    expected = jax.device_get(jax.jit(step)(x))
    with jax.set_mesh(mesh):
        compiled = jax.jit(step).lower(jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))).compile()
        assert_near(jax.device_get(compiled(jax.device_put(x, jax.sharding.NamedSharding(mesh, spec)))), expected)
    assert "all-gather" not in collectives(compiled.as_text())


@pytest.mark.needs("several")
def test_classes_of_several_axes_on_an_explicit_mesh(devices):
    mesh = mesh_of(devices, AxisType.Explicit)
    with jax.set_mesh(mesh):
        x, labels = draw_x((8, 4, 16)), jax.device_put(jnp.zeros(8, "int32"), P("a"))
        assert cross_entropy(jax.device_put(x, P("a")), labels, axis=(1, 2)).shape == (8,)
        with pytest.raises(
            ValueError, match=r"split over an Explicit mesh along .*\(-2, -1\) of the classes.* reshard"
        ):
            cross_entropy(jax.device_put(x, P("a", None, "b")), labels, axis=(1, 2))


@pytest.mark.needs("several")
def test_labels_that_are_sharded_unlike_logits(devices):
    mesh = mesh_of(devices, AxisType.Explicit)
    with jax.set_mesh(mesh):
        x, labels = draw_x((8, 4, 16)), labels_of((8, 4, 16))
        x, labels = jax.device_put(x, P("a")), jax.device_put(labels, P(None, "b"))
        with pytest.raises(ValueError, match=r"labels is sharded as .*'b'.* expected .*'a'.* Reshard"):
            cross_entropy(x, labels)


def test_a_row_has_its_bits_wherever_its_label_is():
    x = jnp.tile(draw_x((1, 100)), (5, 1))
    labels = jnp.asarray([3, 3, 99, 0, 3])
    losses = jax.jit(cross_entropy)(x, labels)
    assert bits(losses[0]) == bits(losses[1]) == bits(losses[4])


# At each place in a vector, and in the rest behind the last.
@pytest.mark.on_emulator
@cover(dtype=DTYPES, cols=[24, 100, 257])
def test_the_gradient_wherever_the_label_is(dtype, cols):
    x, labels = draw_x((cols, cols), dtype), jnp.arange(cols)
    dx = jax.jit(jax.grad(lambda x: cross_entropy(x, labels).sum()))(x)
    powers = np.exp(np.asarray(x, np.float64))
    assert gradient_error(dx, powers / powers.sum(-1, keepdims=True) - np.eye(cols), DX) <= 1
