"""The cross-entropy of a product with a bias, a mask of classes, weights of rows and a traced scale of the logits."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import assert_near, draw
from coverage import cover
from hlo import count_native_calls
from jax import export
from linear_losses import CLASSES, DIMS, IGNORED, NAMES, OPTIONS, REDUCTIONS, exact, loss, masks, split, whole
from native import is_platform_with_kernels

import jaxnorm

pytestmark = [pytest.mark.any_code, pytest.mark.usefixtures("exact_products")]

# Which of the operands a call has beside x and kernel; a scale that is none is a Python number.
GIVEN = {
    "all": ("bias", "weights", "logit_scale"),
    "bias": ("bias",),
    "weights": ("weights",),
    "logit_scale": ("logit_scale",),
    "none": (),
}
CALLS = {"jaxnorm_cross_entropy_fwd": 1, "jaxnorm_cross_entropy_bwd": 1} if is_platform_with_kernels() else {}


def value_and_gradients(function):
    def of(moving, dy):
        value, pullback = jax.vjp(function, moving)
        return value, pullback(dy)[0]

    return jax.jit(of)


@cover(
    given=GIVEN,
    reduction=REDUCTIONS,
    where=["all", "classes", "rows"],
    rows_per_chunk=[None, 6, 5],
    options=[{}, OPTIONS],
    dtype=[("float32", None), ("float32", "native"), ("float32", "jnp"), ("float64", None)],
)
def test_values_and_gradients(given, reduction, where, rows_per_chunk, options, dtype):
    dtype, implementation = dtype
    with jax.enable_x64(dtype == "float64"):
        moving, labels = split(dtype, given)
        options = {**options, "where": masks(DIMS, CLASSES)[where], "reduction": reduction}
        dy = draw("dy", labels.shape if reduction == "none" else (), dtype)
        function = loss(labels, **options, rows_per_chunk=rows_per_chunk, implementation=implementation)
        value, gradients = jax.device_get(value_and_gradients(function)(moving, dy))
    expected, of = exact(labels=labels, dy=dy, ignore_index=IGNORED, **moving, **options)
    assert value.dtype == dtype
    near = {"rtol": 1e-4, "atol": 2e-5} if dtype == "float32" else {"rtol": 1e-11, "atol": 1e-12}
    np.testing.assert_allclose(value, expected, **near)
    for name, gradient in gradients.items():
        assert (gradient.shape, gradient.dtype) == (moving[name].shape, dtype)
        np.testing.assert_allclose(gradient, of[name], **near, err_msg=name)


# As exact as what is written in jax.numpy without chunks, which rounds the logits once as well.
@cover(dtype=["bfloat16", "float16"], reduction=REDUCTIONS, given=GIVEN, where=["all", "classes"])
def test_half_types(dtype, reduction, given, where):
    dims, classes = (512, 32), 200
    moving, labels = split(dtype, given, dims, classes)
    options = {"where": masks(dims, classes)[where], "reduction": reduction}
    dy = jnp.ones(labels.shape if reduction == "none" else ())
    ours, theirs = (
        value_and_gradients(function)(moving, dy)[1]
        for function in (loss(labels, **options, rows_per_chunk=128), whole(labels, **options))
    )
    _, wide = exact(labels=labels, ignore_index=IGNORED, **moving, **options)
    for name, gradient in ours.items():
        assert gradient.dtype == dtype
        errors = [np.linalg.norm(np.asarray(a[name], np.float64) - wide[name]) for a in (ours, theirs)]
        assert errors[0] <= 1.05 * errors[1] + 2.0**-9 * np.linalg.norm(wide[name]), name


# 257 has no bfloat16, and 1 has one.
def test_logits_are_rounded_once():
    x, kernel, bias = jnp.ones((1, 2), "bfloat16"), jnp.full((2, 2), 128.5, "bfloat16"), jnp.asarray([-256.0, -257])
    for given in ({"bias": bias}, {"bias": bias, "logit_scale": jnp.float32(0.5)}):
        value = jaxnorm.linear_cross_entropy(x, kernel, jnp.asarray([0]), **given)
        np.testing.assert_allclose(value, np.log1p(np.exp(-float(given.get("logit_scale", 1)))), rtol=1e-6)


def second(function):
    gradient = jax.grad(lambda moving: jnp.sin(function(moving)).sum())
    return jax.grad(lambda moving: sum(jnp.sin(g).sum() for g in jax.tree.leaves(gradient(moving))))


def scanned(function):
    def step(moving, total, a):
        return total + function({**moving, "x": a * moving["x"]}).sum(), None

    return jax.grad(lambda moving: jax.lax.scan(partial(step, moving), 0.0, jnp.arange(3.0))[0])


def total(function):
    return lambda moving: jnp.sin(function(moving)).sum()


TRANSFORMS = {
    "second derivatives": second,
    "jvp": lambda f: lambda moving: jax.jvp(f, (moving,), (jax.tree.map(jnp.cos, moving),)),
    **{
        f"grad of {name}": lambda f, name=name: (
            lambda moving: jax.grad(lambda a: total(f)({**moving, name: a}))(moving[name])
        )
        for name in NAMES
    },
    **{
        f"vmap over {name}": lambda f, name=name: (
            lambda moving: jax.vmap(lambda a: jax.grad(total(f))({**moving, name: a}))(
                jnp.stack([moving[name], 2 * moving[name]])
            )
        )
        for name in NAMES
    },
    "checkpoint": lambda f: jax.grad(jax.checkpoint(total(f))),
    "scan": scanned,
}


@cover(name=TRANSFORMS, reduction=["mean", "none"], where=["rows", "classes"])
def test_transformed(name, reduction, where):
    moving, labels = split()
    options = {**OPTIONS, "reduction": reduction, "where": masks(DIMS, CLASSES)[where]}
    with jax.numpy_rank_promotion("raise"):
        ours = jax.jit(name(loss(labels, **options, rows_per_chunk=7)))(moving)
    assert_near(ours, jax.jit(name(whole(labels, **options)))(moving))


@pytest.mark.parametrize("lead", [(), (0,), (1, 0)], ids=str)
def test_one_row_or_none(lead):
    moving = {
        name: jnp.cos(jnp.arange(np.prod(shape))).reshape(shape)
        for name, shape in {
            "x": (*lead, 16),
            "kernel": (16, 9),
            "bias": (9,),
            "weights": lead,
            "logit_scale": (),
        }.items()
    }
    labels, where = jnp.full(lead, 3), jnp.arange(9) < 7
    value, gradients = jax.jit(jax.value_and_grad(loss(labels, where=where)))(moving)
    expected, of = exact(labels=labels, where=where, **moving)
    assert_near((value, gradients), (jnp.float32(expected), {name: jnp.float32(of[name]) for name in moving}))


@cover(where=["classes", "rows"], reduction=["mean", "none"], rows_per_chunk=[None, 5])
def test_vmap_over_masks(where, reduction, rows_per_chunk):
    moving, labels = split()
    mask = masks(DIMS, CLASSES)[where]
    both = jnp.stack([mask, mask | (jnp.arange(CLASSES) == CLASSES - 2)])

    def of(function, **options):
        return jax.jit(
            jax.vmap(
                lambda where: jax.grad(total(function(labels, where=where, reduction=reduction, **options)))(moving)
            )
        )

    assert_near(of(loss, rows_per_chunk=rows_per_chunk)(both), of(whole)(both))


# A class that does not count and is the label's: its own logit is in the loss, as without a product.
@pytest.mark.parametrize("implementation", [None, "jnp"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_label_that_does_not_count(implementation, reduction):
    moving, labels = split()
    labels = labels.at[1, 2].set(CLASSES - 1)
    options = {"where": masks(DIMS, CLASSES)["classes"], "implementation": implementation, "reduction": reduction}
    step = [value_and_gradients(f(labels, **options)) for f in (loss, whole)]
    dy = jnp.ones(labels.shape if reduction == "none" else ())
    assert_near(*(f(moving, dy) for f in step))


def test_weights_that_add_up_to_nothing():
    moving, labels = split()
    for weights in (jnp.zeros(labels.shape), jnp.zeros(labels.shape).at[1, :2].set(jnp.asarray([1.0, -1.0]))):
        value, gradients = jax.value_and_grad(loss(labels))({**moving, "weights": weights})
        assert value == 0
        assert not any(np.asarray(g).any() for g in jax.tree.leaves(gradients))


# A row of weight 0 is as an ignored one, a wrong label there too.
def test_a_row_of_weight_0():
    moving, labels = split()
    at = (2, 3)
    weights = moving["weights"].at[at].set(0)
    ignored = jax.value_and_grad(loss(labels.at[at].set(IGNORED)))(moving)
    spoilt = {**moving, "weights": weights, "x": moving["x"].at[at].set(jnp.nan)}
    assert_near(jax.value_and_grad(loss(labels.at[at].set(CLASSES)))(spoilt), ignored)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_one_call_each_way(reduction):
    moving, labels = split(dims=(64, 16), classes=256)
    function = loss(labels, reduction=reduction, where=masks((64, 16), 256)["classes"], rows_per_chunk=16)
    text = jax.jit(jax.grad(lambda moving: function(moving).sum())).lower(moving).compile().as_text()
    assert count_native_calls(text) == CALLS


# The booleans of all logits would have 32 times the bytes of a chunk.
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_gradient_has_the_memory_of_one_chunk(reduction):
    types = {"x": (16384, 32), "kernel": (32, 4096), "bias": (4096,), "weights": (16384,), "logit_scale": ()}
    moving = {name: jax.ShapeDtypeStruct(shape, "bfloat16") for name, shape in types.items()}

    def step(moving, labels):
        options = {"reduction": reduction, "rows_per_chunk": 256, "where": jnp.arange(4096) < 4000}
        return jax.grad(lambda moving: loss(labels, **options)(moving).sum())(moving)

    memory = jax.jit(step).lower(moving, jax.ShapeDtypeStruct((16384,), "int32")).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 12 * 2 * 256 * 4096


def test_exported_for_any_number_of_rows():
    moving, labels = split(dims=(24, 16))
    mask = masks((24, 16), CLASSES)["classes"]
    (rows,) = export.symbolic_shape("rows")
    types = {
        k: jax.ShapeDtypeStruct((rows, *a.shape[1:]) if k in ("x", "weights") else a.shape, a.dtype)
        for k, a in moving.items()
    }

    @jax.jit
    def step(moving, labels):
        return jax.value_and_grad(loss(labels, where=mask))(moving)

    program = export.export(step, platforms=("cpu", "cuda", "tpu"))(types, jax.ShapeDtypeStruct((rows,), "int32"))
    assert_near(jax.jit(program.call)(moving, labels), step(moving, labels))


@pytest.mark.parametrize("mapped", [(0, None, None), (None, 0, None), (None, None, 0)], ids=["x", "kernel", "labels"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_of_mapped_operands_of_16_bits_are_those_of_a_loop(dtype, mapped):
    shapes = [(8, 16), (16, 32), (8,)]
    sizes = [shape if axis is None else (3, *shape) for shape, axis in zip(shapes, mapped, strict=True)]
    labels = jnp.arange(math.prod(sizes[2])).reshape(sizes[2]) % 32
    arrays = [draw("x", sizes[0], dtype), draw("kernel", sizes[1], dtype), labels]

    def gradients(x, kernel, labels):
        return jax.grad(lambda x, kernel: jaxnorm.linear_cross_entropy(x, kernel, labels).sum(), (0, 1))(x, kernel)

    examples = [
        gradients(*(a if axis is None else a[i] for a, axis in zip(arrays, mapped, strict=True))) for i in range(3)
    ]
    actual = jax.jit(jax.vmap(gradients, mapped))(*arrays)
    for of, expected in zip(actual, zip(*examples, strict=True), strict=True):
        expected = np.stack([np.asarray(e, np.float32) for e in expected])
        np.testing.assert_allclose(np.asarray(of, np.float32), expected, rtol=2.0**-7, atol=2.0**-9)
