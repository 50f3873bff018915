"""Cross-entropy: labels, what losses are made of, masks, a traced scale, split classes, and the gradient's memory."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import DTYPES, assert_near, bits, draw, draw_x
from coverage import cover
from hlo import collectives, compiled_text, count_native_calls, lowered_calls
from jax.sharding import AxisType, PartitionSpec as P
from meshes import mesh_of, on_mesh
from native import is_platform_with_kernels
from tolerances import DX, gradient_error

import jaxnorm
from ops.linear_cross_entropy import TRANSFORMS as TRANSFORMS_OF_ALL, plain, value_and_gradients

pytestmark = pytest.mark.any_code

cross_entropy = jaxnorm.softmax_cross_entropy_with_integer_labels
DIMS, IGNORED, SCALE = (3, 4, 10), 5, 1.7
OPTIONS = {"none": {}, "smoothing": {"label_smoothing": 0.2}, "z_loss": {"z_loss": 1e-2}}
OPTIONS |= {"all": {"label_smoothing": 0.1, "z_loss": 1e-2, "soft_cap": 3.0, "ignore_index": IGNORED}}
# A scale of the logits that is a number, and an array as a learned temperature is.
SCALES = {"number": 0.7, "array": None}
GRADIENT = "jaxnorm_cross_entropy_bwd"
CALLS = {"jaxnorm_cross_entropy_fwd": 1, GRADIENT: 1} if is_platform_with_kernels() else {}


def labels_of(dims):
    return jnp.asarray(np.random.default_rng(7).integers(0, dims[-1], dims[:-1]), jnp.int32)


def mask_of(dims):
    """Of one row no class counts."""
    return ((draw("where", dims) > 0) | (jnp.arange(dims[-1]) % 3 == 0)).at[0, 1].set(False)


def formula(logits, labels, **options):
    return plain(logits, labels, **options)[0]


def of_scale(scale, function=cross_entropy, **given):
    """A function of logits and of a scale, which a number replaces."""
    return lambda x, s: function(x, logit_scale=s if scale is None else scale, **given)


def of_moving(scale, function=cross_entropy, *, axis=-1, **given):
    """A function of a dict of logits, of which the last axis becomes this one, and their scale."""
    losses = of_scale(scale, partial(function, axis=axis) if axis != -1 else function, **given)
    return lambda moving: losses(jnp.moveaxis(moving["x"], -1, axis), moving["logit_scale"])


def step(function, x, scale, dy):
    """The losses and the gradients by name, compiled."""
    return jax.device_get(value_and_gradients(function)({"x": x, "logit_scale": scale}, dy))


def exact(x, dy, scale, **given):
    """The like in float64; a scale that is a number does not move."""
    number = scale if isinstance(scale, float) else None
    with jax.enable_x64(True):
        wide = (jnp.asarray(np.float64(a)) for a in (x, SCALE if scale is None else scale, dy))
        return step(of_moving(number, formula, **given), *wide)


@cover(
    options=OPTIONS,
    where=["all", "classes", "rows"],
    dtype=[("float32", None), ("float32", "native"), ("float32", "xla"), ("float64", None)],
    axis=[-1, 0, 1],
    scale=SCALES,
)
def test_values_and_gradients(options, where, dtype, axis, scale):
    dtype, implementation = dtype
    with jax.enable_x64(dtype == "float64"):
        x, labels, dy = draw_x(DIMS, dtype), labels_of(DIMS), draw("dy", DIMS[:-1], dtype)
        mask = {"all": None, "classes": mask_of(DIMS), "rows": draw("rows", DIMS[:-1]) > -1}[where]
        moved = mask if mask is None or where == "rows" else jnp.moveaxis(mask, -1, axis)
        given = {"axis": axis, "where": moved, "implementation": implementation if axis == -1 else None}
        function = of_moving(scale, labels=labels, **given, **options)
        results = step(function, x, jnp.asarray(SCALE, dtype), dy)
    where = mask[..., None] if where == "rows" else mask
    expected = exact(x, dy, scale, labels=labels, where=where, **options)
    near = {"rtol": 1e-4, "atol": 2e-5} if dtype == "float32" else {"rtol": 1e-11, "atol": 1e-12}
    for actual, e in zip(*map(jax.tree.leaves, (results, expected)), strict=True):
        assert actual.dtype == dtype
        np.testing.assert_allclose(actual, e, **near)


TRANSFORMS = {
    "hessian": lambda f: jax.hessian(lambda moving: jnp.sin(f(moving)).sum()),
    **{
        name: TRANSFORMS_OF_ALL[name]
        for name in ("second derivatives", "jvp", "tangents", "vmap over logit_scale", "vmap over everything")
    },
    **{name: TRANSFORMS_OF_ALL[name] for name in ("checkpoint", "scan")},
}


@cover(name=TRANSFORMS, options=OPTIONS, scale=SCALES, has_mask=[False, True])
def test_transformed(name, options, scale, has_mask):
    moving, labels = {"x": draw_x((3, 10)), "logit_scale": jnp.float32(SCALE)}, labels_of((3, 10))
    where = mask_of((3, 10)).at[0, 0].set(True) if has_mask else None
    given = {"labels": labels, "where": where, **options}
    assert_near(*(jax.jit(name(of_moving(scale, f, **given)))(moving) for f in (cross_entropy, formula)))


# In float32: the product of a half type would be rounded to it, and the gradient once more.
@cover(dtype=DTYPES, scale=[(1.5, "float32"), (1.5, "bfloat16")], implementation=[None, "xla"])
def test_dtypes_of_a_traced_scale(dtype, scale, implementation):
    dims, scale = (64, 100), jnp.asarray(*scale)
    x, labels, dy = draw("x", dims, dtype), labels_of(dims), draw("dy", dims[:-1])
    function = of_moving(None, labels=labels, implementation=implementation)
    if dtype == "float32":
        text = compiled_text(value_and_gradients(function), {"x": x, "logit_scale": scale}, dy)
        assert count_native_calls(text) == (CALLS if implementation is None else {})
    losses, of = step(function, x, scale, dy)
    expected, exactly = exact(x, dy, scale, labels=labels)
    assert (losses.dtype, of["x"].dtype, of["logit_scale"].dtype) == ("float32", dtype, scale.dtype)
    np.testing.assert_allclose(losses, expected, rtol=2e-6)
    half = {"bfloat16": 2.0**-9, "float16": 2.0**-12, "float32": 1e-6}[dtype]
    assert np.linalg.norm(np.float64(of["x"]) - exactly["x"]) <= half * np.linalg.norm(exactly["x"])
    rtol = 2**-8 if scale.dtype == "bfloat16" else 1e-5
    np.testing.assert_allclose(np.float64(of["logit_scale"]), exactly["logit_scale"], rtol=rtol)


# A label that does not count is read all the same.
@cover(value=[np.nan, np.inf, -np.inf], dtype=["float32", "bfloat16"], options=OPTIONS)
def test_what_is_not_finite_at_a_label_that_does_not_count_has_one_rule(value, dtype, options):
    labels = jnp.asarray([3, 0, 4, 6])
    is_label = jnp.arange(10) == labels[:, None]
    x, where = jnp.where(is_label, value, draw_x((4, 10), dtype)), mask_of((4, 10)) & ~is_label
    given = {"labels": labels, "where": where, **options}
    native, formula = (
        step(of_moving(None, implementation=how, **given), x, jnp.float32(SCALE), jnp.ones(4)) for how in (None, "xla")
    )
    assert_near(native, formula)


# Its own logit is in the loss, and has a gradient.
@pytest.mark.on_emulator
@pytest.mark.parametrize("name", ["jvp", "tangents"])
def test_a_label_that_does_not_count(name):
    moving, given = {"x": draw_x((1, 10)), "logit_scale": jnp.float32(0)}, {"where": jnp.arange(10) != 3}
    losses = (of_moving(1.0, f, labels=jnp.asarray([3]), **given) for f in (cross_entropy, formula))
    assert_near(*(jax.jit(TRANSFORMS_OF_ALL[name](of))(moving) for of in losses))


# Labels are flat indices of a slice along the axes, in their order.
@cover(axes=[(1, 2), (-1, 1), (0, 3), (2, 0, -1), [3]], has_where=[None, "rows", "classes"])
def test_several_axes(axes, has_where):
    options, x = {**OPTIONS["all"], "logit_scale": 0.7}, draw_x((2, 3, 4, 5))
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
    x, labels = draw_x((6, 300)), np.asarray([0, 1, 2, 100, 126, 127], dtype)
    with jax.enable_x64(True):
        losses = cross_entropy(x, labels)
    np.testing.assert_array_equal(losses, cross_entropy(x, labels.astype("int32")))


# Never out of bounds. Without 64-bit types jax.numpy would make another number of a label, perhaps a class's.
@pytest.mark.on_emulator
@pytest.mark.parametrize("label", [-1, -100, 10, 2**31 - 1, -(2**31), 2**32, 2**32 + 3, -(2**32) + 3, 2**63 - 1])
@pytest.mark.parametrize("x64", [False, True])
def test_a_label_that_names_no_class(label, x64):
    x, labels = draw_x((4, 10)), np.asarray([1, label, 3, 4])
    with jax.enable_x64(x64):
        labels = jnp.asarray(labels) if x64 else labels
        losses, dx = jax.jit(jax.value_and_grad(lambda x: cross_entropy(x, labels).sum()))(x)
        rows = jax.jit(lambda x: cross_entropy(x, labels))(x)
        of_product = jaxnorm.linear_cross_entropy(x, jnp.eye(10), labels, reduction="none")
        assert np.isnan(cross_entropy(x[0], labels[1]))
    assert np.isnan(losses)
    assert np.isnan(rows).tolist() == np.isnan(of_product).tolist() == [False, True, False, False]
    assert np.isfinite(dx).all()


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


@cover(cols=[1, 50_257, 151_936, 262_144, 1_000_003], dtype=["float32", "bfloat16"])
def test_large_vocabularies(cols, dtype):
    x, label = draw_x((3, cols), dtype), jnp.asarray([0, cols // 2, cols - 1])
    z = np.asarray(x, np.float64)
    top = z.max(-1)
    expected = top + np.log(np.exp(z - top[:, None]).sum(-1)) - z[range(3), label]
    np.testing.assert_allclose(jax.jit(cross_entropy)(x, label), expected, rtol=1e-6, atol=1e-6 * (cols == 1))


def projected(hidden, kernel, labels):
    return cross_entropy(hidden @ kernel, labels).mean()


def types_of(rows=256, cols=8192):
    """Those of hidden, kernel and labels."""
    shapes = ((rows, 64), "float32"), ((64, cols), "float32"), ((rows,), "int32")
    return [jax.ShapeDtypeStruct(*of) for of in shapes]


def of_argument(x):
    return cross_entropy(x.reshape(256, 8192), jnp.zeros(256, "int32")).mean()


# A loss, its operands' types, whether the gradient takes the logits' place, and how many arrays of logits there is
# room for: of a product one, what is computed for each row, and what a GPU's library keeps for a product. XLA would
# copy what is not the program's to overwrite.
IN_PLACE = {
    "a product": (projected, types_of(), True, 1.5),
    **{
        f"{name} {dims}": (wrap(of_argument), [jax.ShapeDtypeStruct(dims, "float32")], False, 0.1)
        for name, wrap in {"call": lambda f: f, "checkpoint": jax.checkpoint, "jit": jax.jit}.items()
        for dims in ((256, 8192), (2, 128, 8192))
    },
}


@pytest.mark.needs("kernels")
@pytest.mark.parametrize("name", IN_PLACE)
def test_the_gradient_takes_the_place_of_computed_logits(name):
    loss, types, is_in_place, logits = IN_PLACE[name]
    (call,) = lowered_calls(jax.grad(loss), GRADIENT, *types)
    assert ("output_operand_alias" in call) == is_in_place
    compiled = jax.jit(jax.grad(loss)).lower(*types).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < logits * 4 * 256 * 8192


@pytest.mark.needs("kernels")
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("kernel_spec", [P(), P(None, "b")], ids=str)
def test_on_a_mesh_too(devices, axis_type, kernel_spec):
    mesh = mesh_of(devices, axis_type)
    cols = (1 << 17) * mesh.size  # a shard is four times and more what a GPU's library keeps for a product, 32 MiB
    specs = P("a"), kernel_spec, P("a")
    with jax.set_mesh(mesh):
        args = [
            jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=jax.sharding.NamedSharding(mesh, spec))
            for a, spec in zip(types_of(cols=cols), specs, strict=True)
        ]
        compiled = jax.jit(jax.grad(projected)).lower(*args).compile()
    (call,) = [line for line in compiled.as_text().splitlines() if f'custom_call_target="{GRADIENT}"' in line]
    assert "output_to_operand_aliasing" in call
    shard = 4 * 256 * cols // mesh.shape["a"] // (mesh.shape["b"] if any(kernel_spec) else 1)
    assert compiled.memory_analysis().temp_size_in_bytes < 1.3 * shard


# They are copied first.
def test_logits_that_are_needed_afterwards():
    hidden, kernel, labels = draw("h", (16, 8)), draw("k", (8, 40)), labels_of((16, 40))

    def loss(kernel):
        logits = hidden @ kernel
        return cross_entropy(logits, labels).mean(), logits

    (_, logits), _ = jax.jit(jax.value_and_grad(loss, has_aux=True))(kernel)
    np.testing.assert_allclose(logits, hidden @ kernel, rtol=1e-5)


def loss_of(function):
    return jax.jit(jax.value_and_grad(lambda x, s: jnp.sin(function(x, s)).sum(), (0, 1)))


def wide(tree):
    return jax.tree.map(lambda a: jax.device_get(a).astype("float32"), tree)


# A partition by XLA, with masks; labels are whole on each device.
@cover(
    axis_type=[AxisType.Auto, AxisType.Explicit],
    spec=[P("a"), P("a", None, "b"), P(None, None, ("a", "b"))],
    dtype=["float32", "bfloat16"],
    scale=SCALES,
)
def test_on_a_mesh(devices, axis_type, spec, dtype, scale):
    mesh, dims = mesh_of(devices, axis_type), (8, 4, 32)
    x, labels, where = draw_x(dims, dtype), labels_of(dims), (draw("where", (4, 32)) > 0) | (jnp.arange(32) == 9)
    function, args = loss_of(of_scale(scale, labels=labels, where=where, **OPTIONS["all"])), (x, jnp.float32(SCALE))
    expected = wide(function(*args))
    actual, text = on_mesh(mesh, function, args, (spec, P()))
    assert_near(wide(actual), expected)
    assert "all-gather" not in collectives(text)


# Classes that a shard_map splits: each device has a part of the labels' numbers.
@cover(options=OPTIONS, has_mask=[False, True], dtype=["float32", "bfloat16"], scale=SCALES)
def test_classes_over_devices(devices, options, has_mask, dtype, scale):
    mesh, dims = mesh_of(devices, AxisType.Auto), (8, 4, 16)
    x, labels = draw_x(dims, dtype), labels_of(dims)
    where = ((draw("where", (4, 16)) > 0) | (jnp.arange(16) == 9)).at[1].set(False) if has_mask else None

    def of_shard(x, s, labels, where):
        return of_scale(scale, labels=labels, where=where, axis_name="b", **options)(x, s)

    specs, args = (P("a", None, "b"), P(), P("a"), P(None, "b")), (x, jnp.float32(SCALE))
    sharded = jax.shard_map(of_shard, mesh=mesh, in_specs=specs, out_specs=P("a"))
    ours = loss_of(lambda x, s: sharded(x, s, labels, where))
    theirs = loss_of(of_scale(scale, labels=labels, where=where, **options))
    assert_near(wide(ours(*args)), wide(theirs(*args)))
    text = ours.lower(*args).compile().as_text()
    assert "all-gather" not in collectives(text)
    if scale or dtype == "float32":
        assert count_native_calls(text) == CALLS
    if scale and not has_mask:
        rows, smoothing = 8 * 4 // mesh.shape["a"], "label_smoothing" in options
        # The maximum, the two parts of the sum, the label's logit, for smoothing the sum of logits; and the loss.
        assert collectives(text) == {"all-reduce": 4 * (4 + smoothing) * rows + 4 * (mesh.shape["a"] > 1)}


def test_what_an_explicit_mesh_may_split(devices):
    with jax.set_mesh(mesh_of(devices, AxisType.Explicit)):
        x, labels = jax.device_put(draw_x((8, 4, 16)), P("a")), jax.device_put(jnp.zeros(8, "int32"), P("a"))
        assert cross_entropy(x, labels, axis=(1, 2)).shape == (8,)
        with pytest.raises(ValueError, match=r"over an Explicit mesh along .*\(-2, -1\) of the classes.* reshard"):
            cross_entropy(jax.device_put(x, P("a", None, "b")), labels, axis=(1, 2))
        labels = jax.device_put(labels_of((8, 4, 16)), P(None, "b"))
        with pytest.raises(ValueError, match=r"labels is sharded as .*'b'.* expected .*'a'.* Reshard"):
            cross_entropy(x, labels)


def test_a_row_has_its_bits_wherever_its_label_is():
    x, labels = jnp.tile(draw_x((1, 100)), (5, 1)), jnp.asarray([3, 3, 99, 0, 3])
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
