"""A logit_scale that is an array, as a learned temperature, in the loss of logits; of products in their own file."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import assert_near, draw, draw_x
from coverage import cover
from hlo import collectives, count_native_calls
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from linear_losses import exact
from meshes import mesh_of, placed
from native import is_platform_with_kernels

import jaxnorm

pytestmark = pytest.mark.any_code

cross_entropy = jaxnorm.softmax_cross_entropy_with_integer_labels
DIMS, IGNORED = (3, 4, 10), 5
OPTIONS = {"none": {}, "all": {"label_smoothing": 0.1, "z_loss": 1e-2, "soft_cap": 3.0, "ignore_index": IGNORED}}
SCALE = 1.7
CALLS = {"jaxnorm_cross_entropy_fwd": 1, "jaxnorm_cross_entropy_bwd": 1} if is_platform_with_kernels() else {}


def labels_of(dims):
    return jnp.asarray(np.random.default_rng(7).integers(0, dims[-1], dims[:-1]), jnp.int32)


def mask_of(dims):
    return ((draw("where", dims) > 0) | (jnp.arange(dims[-1]) % 3 == 0)).at[0, 1].set(False)


def step(labels, **options):
    """The losses, and the gradients of logits and scale for a cotangent."""

    def of(x, scale, dy):
        losses, pullback = jax.vjp(lambda x, scale: cross_entropy(x, labels, logit_scale=scale, **options), x, scale)
        return losses, *pullback(dy)

    return jax.jit(of)


@cover(
    options=OPTIONS,
    where=["all", "classes", "rows"],
    dtype=[("float32", None), ("float32", "native"), ("float32", "jnp"), ("float64", None)],
    axis=[-1, 1],
)
def test_values_and_gradients(options, where, dtype, axis):
    dtype, implementation = dtype
    with jax.enable_x64(dtype == "float64"):
        x, labels, dy = draw_x(DIMS, dtype), labels_of(DIMS), draw("dy", DIMS[:-1], dtype)
        masks = {"all": None, "classes": mask_of(DIMS), "rows": draw("rows", DIMS[:-1]) > -1}
        mask = masks[where]
        moved = mask if mask is None or where == "rows" else jnp.moveaxis(mask, -1, axis)
        if axis != -1 and implementation == "native":
            implementation = None
        function = step(labels, axis=axis, where=moved, implementation=implementation, **options)
        losses, dx, dscale = function(jnp.moveaxis(x, -1, axis), jnp.asarray(SCALE, dtype), dy)
    given = {**options, "where": mask[..., None] if where == "rows" else mask, "logit_scale": np.asarray(SCALE, dtype)}
    expected, of = exact(x, np.eye(DIMS[-1]), labels, dy, reduction="none", **given)
    near = {"rtol": 1e-4, "atol": 2e-5} if dtype == "float32" else {"rtol": 1e-11, "atol": 1e-12}
    for actual, e in ((losses, expected), (jnp.moveaxis(dx, axis, -1), of["x"]), (dscale, of["logit_scale"])):
        assert actual.dtype == dtype
        np.testing.assert_allclose(actual, e, **near)


# In float32: the product of a half type would be rounded to it, and the gradient once more.
@cover(dtype=["bfloat16", "float16"], scale_dtype=["float32", "bfloat16"], implementation=[None, "jnp"])
def test_half_types(dtype, scale_dtype, implementation):
    dims = (64, 100)
    x, labels, dy = draw("x", dims, dtype), labels_of(dims), draw("dy", dims[:-1])
    scale = jnp.asarray(1.5, scale_dtype)
    losses, dx, dscale = step(labels, implementation=implementation)(x, scale, dy)
    expected, of = exact(x, np.eye(dims[-1]), labels, dy, reduction="none", logit_scale=scale)
    assert (losses.dtype, dx.dtype, dscale.dtype) == ("float32", dtype, scale_dtype)
    np.testing.assert_allclose(losses, expected, rtol=2e-6)
    half = 2.0 ** -(9 if dtype == "bfloat16" else 12)
    assert np.linalg.norm(np.float64(dx) - of["x"]) <= half * np.linalg.norm(of["x"])
    np.testing.assert_allclose(np.float64(dscale), of["logit_scale"], rtol=2**-8 if scale_dtype == "bfloat16" else 1e-5)


# A power of two multiplies without rounding, in the kernel and before it.
@pytest.mark.parametrize("implementation", [None, "jnp"])
def test_a_number_and_an_array_give_the_same(implementation):
    x, labels = draw_x(DIMS), labels_of(DIMS)
    both = (cross_entropy(x, labels, logit_scale=s, implementation=implementation) for s in (0.5, jnp.float32(0.5)))
    np.testing.assert_allclose(*both, rtol=2e-6)


TRANSFORMS = {
    "second derivatives": lambda f: jax.hessian(f, (0, 1)),
    "jvp": lambda f: lambda x, s: jax.jvp(f, (x, s), (jnp.cos(x), 0.3 * s)),
    "vmap over the scale": lambda f: lambda x, s: jax.vmap(jax.grad(f, (0, 1)), (None, 0))(x, jnp.stack([s, -s])),
    "vmap over both": lambda f: lambda x, s: jax.vmap(jax.grad(f, (0, 1)))(jnp.stack([x, -x]), jnp.stack([s, -s])),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f), (0, 1)),
    "scan": lambda f: jax.grad(
        lambda x, s: jax.lax.scan(lambda c, a: (c + f(x, a * s), None), 0.0, jnp.arange(3.0))[0], (0, 1)
    ),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transformed(name):
    x, labels, where = draw_x((3, 10)), labels_of((3, 10)), mask_of((3, 10)).at[0, 0].set(True)

    def ours(x, scale):
        return jnp.sin(cross_entropy(x, labels, where=where, logit_scale=scale, **OPTIONS["all"])).sum()

    def theirs(x, scale):
        return jnp.sin(cross_entropy(x * scale, labels, where=where, implementation="jnp", **OPTIONS["all"])).sum()

    args = x, jnp.float32(SCALE)
    assert_near(*(jax.jit(TRANSFORMS[name](function))(*args) for function in (ours, theirs)))


@pytest.mark.needs("kernels")
def test_one_kernel_each_way():
    types = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((64, 100), (), (64,))]
    text = step(jnp.zeros(64, "int32"), implementation="native").lower(*types).compile().as_text()
    assert count_native_calls(text) == CALLS


def test_half_types_have_no_kernel():
    x, labels = draw_x((4, 10), "bfloat16"), labels_of((4, 10))
    with pytest.raises(RuntimeError, match=r"native.*half type times a traced logit_scale are float32"):
        cross_entropy(x, labels, logit_scale=jnp.float32(2), implementation="native")
    report = jaxnorm.explain(partial(cross_entropy, labels=labels), x, logit_scale=jnp.float32(2))
    assert "half type times a traced logit_scale" in str(report)


# A place that nothing is read of reaches no gradient.
@pytest.mark.parametrize("implementation", [None, "jnp"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_hidden(implementation, value, dtype):
    x, labels, where = draw_x((4, 10), dtype), jnp.asarray([3, 0, IGNORED, 6]), mask_of((4, 10))
    where = where.at[1].set(False)
    hidden = ~(where | (jnp.arange(10) == labels[:, None]) & where.any(-1, keepdims=True))
    hidden |= (labels == IGNORED)[:, None]
    function = step(labels, where=where, implementation=implementation, ignore_index=IGNORED)
    spoilt, clean = (function(jnp.where(hidden, v, x), jnp.float32(SCALE), jnp.ones(4)) for v in (value, 0))
    for a, e in zip(spoilt, clean, strict=True):
        np.testing.assert_array_equal(np.float32(a), np.float32(e))


# A label that does not count is read all the same.
@cover(value=[np.nan, np.inf, -np.inf], dtype=["float32", "bfloat16"], options=OPTIONS)
def test_what_is_not_finite_at_a_label_that_does_not_count_has_one_rule(value, dtype, options):
    labels = jnp.asarray([3, 0, 4, 6])
    is_label = jnp.arange(10) == labels[:, None]
    x, where = jnp.where(is_label, value, draw_x((4, 10), dtype)), mask_of((4, 10)) & ~is_label
    native, formula = (
        step(labels, where=where, implementation=implementation, **options)(x, jnp.float32(SCALE), jnp.ones(4))
        for implementation in (None, "jnp")
    )
    for a, e in zip(native, formula, strict=True):
        assert_near(a, e)


@pytest.mark.needs("several")
@cover(
    axis_type=[AxisType.Auto, AxisType.Explicit],
    spec=[P("a"), P("a", None, "b"), P(None, None, ("a", "b"))],
    dtype=["float32", "bfloat16"],
)
def test_on_a_mesh(devices, axis_type, spec, dtype):
    mesh, dims = mesh_of(devices, axis_type), (8, 4, 32)
    x, labels, where = draw_x(dims, dtype), labels_of(dims), (draw("where", (4, 32)) > 0) | (jnp.arange(32) == 9)

    def loss(x, scale):
        return jnp.sin(cross_entropy(x, labels, where=where, logit_scale=scale, **OPTIONS["all"])).sum()

    function, scale = jax.jit(jax.value_and_grad(loss, (0, 1))), jnp.float32(SCALE)
    expected = jax.device_get(function(x, scale))
    with jax.set_mesh(mesh):
        args = placed(mesh, (x, scale), (spec, P()))
        compiled = function.lower(*args).compile()
        actual = jax.device_get(compiled(*args))
    assert "all-gather" not in collectives(compiled.as_text())
    assert_near(*(jax.tree.map(lambda a: a.astype("float32"), tree) for tree in (actual, expected)))


@pytest.mark.needs("several")
@cover(dtype=["float32", "bfloat16"], options=OPTIONS)
def test_classes_over_devices(devices, dtype, options):
    mesh, dims = mesh_of(devices, AxisType.Auto), (8, 4, 16)
    x, labels = draw_x(dims, dtype), labels_of(dims)
    where = ((draw("where", (4, 16)) > 0) | (jnp.arange(16) == 9)).at[1].set(False)

    def split(x, scale, labels, where):
        return cross_entropy(x, labels, where=where, axis_name="b", logit_scale=scale, **options)

    specs = P("a", None, "b"), P(), P("a"), P(None, "b")
    sharded = jax.shard_map(split, mesh=mesh, in_specs=specs, out_specs=P("a"))
    whole = partial(cross_entropy, where=where, **options)
    ours, theirs = (
        jax.jit(jax.value_and_grad(lambda x, s, f=f: jnp.sin(f(x, s)).sum(), (0, 1)))(x, jnp.float32(SCALE))
        for f in (lambda x, s: sharded(x, s, labels, where), lambda x, s: whole(x, labels, logit_scale=s))
    )
    assert_near(*(jax.tree.map(lambda a: jax.device_get(a).astype("float32"), tree) for tree in (ours, theirs)))
