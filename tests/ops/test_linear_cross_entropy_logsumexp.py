"""`linear_cross_entropy` with return_logsumexp: what it gives beside the loss, and its gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import assert_near, bits, draw
from coverage import cover
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from linear_losses import CLASSES, DIMS, IGNORED, OPTIONS, REDUCTIONS, loss, masks, split
from meshes import mesh_of, placed

import jaxnorm

pytestmark = [pytest.mark.any_code, pytest.mark.usefixtures("exact_products")]

GIVEN = {"all": ("bias", "weights", "logit_scale"), "none": ()}


def sums(labels, where=None, soft_cap=None):
    """In jax.numpy, of a dict of the operands that move."""

    def of(moving):
        z = (moving["x"] @ moving["kernel"] + moving.get("bias", 0)) * moving.get("logit_scale", 1)
        z = z if soft_cap is None else soft_cap * jnp.tanh(z / soft_cap)
        counts = jnp.broadcast_to(True if where is None else where, z.shape)
        is_out = (labels == IGNORED) | (moving.get("weights", 1) == 0) | ~counts.any(-1)
        # Where nothing counts the gradient of logsumexp is no number.
        z = jnp.where(is_out[..., None], 0, jnp.where(counts, z, -jnp.inf))
        return jnp.where(is_out, 0, jax.nn.logsumexp(z, axis=-1))

    return of


def both(labels, **options):
    return loss(labels, return_logsumexp=True, **options)


@cover(
    given=GIVEN,
    reduction=REDUCTIONS,
    where=["all", "classes", "rows"],
    rows_per_chunk=[None, 5],
    options=[{}, OPTIONS],
    implementation=[None, "native", "jnp"],
)
def test_values_and_gradients(given, reduction, where, rows_per_chunk, options, implementation):
    moving, labels = split(given=given)
    mask, cotangent = masks(DIMS, CLASSES)[where], draw("dy", labels.shape)
    chosen = {"where": mask, "reduction": reduction, "rows_per_chunk": rows_per_chunk, "implementation": implementation}
    alone, values = (jax.jit(f(labels, **options, **chosen)) for f in (loss, both))
    value, found = values(moving)
    assert bits(value) == bits(alone(moving))
    assert (found.shape, found.dtype) == (labels.shape, jnp.float32)
    expected = sums(labels, mask, options.get("soft_cap"))
    assert_near(found, expected(moving))

    def step(of_sums, of_loss):
        return jax.jit(jax.grad(lambda moving: (of_sums(moving) * cotangent).sum() + jnp.sin(of_loss(moving)).sum()))

    theirs = step(expected, alone)
    assert_near(step(lambda moving: values(moving)[1], lambda moving: values(moving)[0])(moving), theirs(moving))


# What is saved is that of the loss alone.
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_gradient_of_the_loss_alone(reduction):
    moving, labels = split()
    alone = jax.grad(lambda moving: loss(labels, reduction=reduction)(moving).sum())
    beside = jax.grad(lambda moving: both(labels, reduction=reduction)(moving)[0].sum())
    assert bits(jax.jit(beside)(moving)) == bits(jax.jit(alone)(moving))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_dtypes(dtype):
    with jax.enable_x64(dtype == "float64"):
        moving, labels = split(dtype, ())
        _, found = both(labels)(moving)
        assert found.dtype == ("float64" if dtype == "float64" else "float32")
        wide = {name: a.astype(found.dtype) for name, a in moving.items()}
        rtol = {"bfloat16": 1e-2, "float16": 1e-3, "float64": 1e-13}[dtype]
        np.testing.assert_allclose(found, sums(labels)(wide), rtol=rtol, atol=rtol)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: lambda moving: jax.jvp(f, (moving,), (jax.tree.map(jnp.cos, moving),)),
        lambda f: jax.grad(lambda moving: sum(jnp.sin(g).sum() for g in jax.tree.leaves(jax.grad(total(f))(moving)))),
        lambda f: (
            lambda moving: jax.vmap(lambda x: jax.grad(total(f))({**moving, "x": x}))(
                jnp.stack([moving["x"], 2 * moving["x"]])
            )
        ),
        lambda f: jax.grad(jax.checkpoint(total(f))),
    ],
    ids=["jvp", "second derivatives", "vmap", "checkpoint"],
)
def test_transformed(transform):
    moving, labels = split(given=("bias",))
    mask = masks(DIMS, CLASSES)["classes"]
    ours, theirs = (lambda moving: both(labels, where=mask, rows_per_chunk=7)(moving)[1]), sums(labels, mask)
    assert_near(*(jax.jit(transform(f))(moving) for f in (ours, theirs)))


def total(f):
    return lambda moving: jnp.sin(f(moving)).sum()


def test_hidden_classes_and_rows_reach_nothing():
    moving, labels = split(given=("bias", "weights"))
    is_class, at = masks(DIMS, CLASSES)["classes"], (2, 3)
    moving["weights"] = moving["weights"].at[at].set(0)
    spoilt = {
        **moving,
        "kernel": jnp.where(is_class, moving["kernel"], jnp.nan),
        "bias": jnp.where(is_class, moving["bias"], jnp.inf),
        "x": moving["x"].at[at].set(jnp.nan),
    }
    step = jax.jit(jax.value_and_grad(lambda moving: both(labels, where=is_class)(moving)[1].sum()))
    assert_near(step(spoilt), step(moving))
    assert both(labels, where=is_class)(spoilt)[1][at] == 0


@pytest.mark.needs("several")
@cover(axis_type=[AxisType.Auto, AxisType.Explicit], reduction=["mean", "none"])
def test_over_devices(devices, axis_type, reduction):
    mesh, dims = mesh_of(devices, axis_type), (8, 8, 16)
    moving, labels = split(dims=dims, given=())

    def step(moving, labels):
        value, pullback = jax.vjp(partial(both(labels, reduction=reduction, rows_per_chunk=16)), moving)
        return value, pullback(jax.tree.map(jnp.cos, value))

    expected = jax.device_get(jax.jit(step)(moving, labels))
    with jax.set_mesh(mesh):
        rows = P(("a", "b"))
        there = dict(zip(moving, placed(mesh, moving.values(), [rows, P()]), strict=True))
        (on_mesh,) = placed(mesh, (labels,), (rows,))
        actual = jax.device_get(jax.jit(step)(there, on_mesh))
    assert_near(actual, expected)


def test_a_flag_that_is_none():
    moving, labels = split(given=())
    with pytest.raises(TypeError, match="linear_cross_entropy: return_logsumexp must be a bool, got 1"):
        jaxnorm.linear_cross_entropy(moving["x"], moving["kernel"], labels, return_logsumexp=1)
