"""The cross-entropy of a product by chunks of rows: what the unchunked one gives, with one chunk's memory."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import assert_near, bits, draw
from coverage import cover

import jaxnorm
from ops.products import of_each

pytestmark = [pytest.mark.any_code, pytest.mark.usefixtures("exact_products")]

linear_cross_entropy = jaxnorm.linear_cross_entropy
cross_entropy = jaxnorm.softmax_cross_entropy_with_integer_labels
DIMS, CLASSES, IGNORED = (4, 6, 16), 40, -100
REDUCTIONS, OPTIONS = ("mean", "sum", "none"), {"label_smoothing": 0.1, "z_loss": 1e-2, "soft_cap": 3.0}
NAMES = ("x", "kernel", "bias", "row_weights", "logit_scale")  # what there are gradients of
# Which of the operands a call has beside x and kernel; a scale that is none is a Python number.
GIVEN = {"all": NAMES[2:], **{name: (name,) for name in NAMES[2:]}, "none": ()}
ALL_OR_NONE = {name: GIVEN[name] for name in ("all", "none")}


def split(dtype="float32", given=NAMES[2:], dims=DIMS, classes=CLASSES):
    """The operands that move, by their names, and labels. One row is ignored, another has weight 0."""
    rows = dims[:-1]
    labels = np.random.default_rng(7).integers(0, max(1, classes - 5), rows)
    weights = np.array(abs(draw("weights", rows)) + 0.1)
    if labels.ndim and labels.size > 1:
        labels[(0,) * labels.ndim] = IGNORED
        weights[(-1,) * weights.ndim] = 0
    arrays = {
        "x": draw("x", dims, dtype),
        "kernel": draw("kernel", (dims[-1], classes), dtype, std=0.3),
        "bias": draw("bias", (classes,), dtype),
        "row_weights": jnp.asarray(weights, dtype),
        "logit_scale": jnp.asarray(1.3, dtype),
    }
    return {name: arrays[name] for name in ("x", "kernel", *given)}, jnp.asarray(labels, "int32")


def masks(dims, classes):
    """Of classes, of which the last are padding; of each row's, and of one row none at all; of rows."""
    of_classes = jnp.arange(classes) < classes - 5
    of_rows = of_classes & ((draw("where", (*dims[:-1], classes)) > -0.5) | (jnp.arange(classes) == 3))
    of_rows = of_rows.at[(0,) * (len(dims) - 2) + (1,)].set(False)
    return {"all": None, "classes": of_classes, "rows": of_rows, "labels": draw("rows", dims[:-1]) > -0.5}


def loss(labels, **options):
    """Of a dict of the operands that move."""
    return lambda moving: linear_cross_entropy(labels=labels, ignore_index=IGNORED, **moving, **options)


def plain(
    logits, labels, *, where=None, label_smoothing=0.0, z_loss=0.0, logit_scale=1.0, soft_cap=None, ignore_index=None
):
    """Losses as Optax has them, with the targets in full, beside what trainers add; and logsumexp."""
    z = logits.astype(jnp.promote_types(logits.dtype, "float32")) * logit_scale
    z = z if soft_cap is None else soft_cap * jnp.tanh(z / soft_cap)
    counts = jnp.broadcast_to(True if where is None else where, z.shape)
    is_out = ~counts.any(-1) if ignore_index is None else ~counts.any(-1) | (labels == ignore_index)
    # Where nothing counts the gradient of logsumexp is no number.
    counted = jnp.where(is_out[..., None], 0, jnp.where(counts, z, -jnp.inf))
    log_total = jnp.where(is_out, 0, jax.nn.logsumexp(counted, axis=-1))
    targets = (1 - label_smoothing) * jax.nn.one_hot(labels, z.shape[-1], dtype=z.dtype)
    targets += label_smoothing * counts / jnp.maximum(counts.sum(-1, keepdims=True), 1)
    losses = log_total - (targets * z).sum(-1) + z_loss * log_total**2
    return jnp.where(is_out, 0, losses), log_total


def whole(labels, *, where=None, reduction="mean", rows_per_chunk=None, return_logsumexp=False, **options):
    """The same in jax.numpy, without chunks."""
    where = where[..., None] if where is not None and where.shape == labels.shape else where

    def of(moving):
        x, kernel, bias, weights, scale = (moving.get(name) for name in NAMES)
        wide = "float64" if x.dtype == "float64" else "float32"
        z = jnp.einsum("...d,dv->...v", x, kernel.astype(x.dtype), preferred_element_type=wide)
        z = z if bias is None else z + bias
        # A barrier, as XLA leaves out a rounding between float32 numbers where it may.
        z = jax.lax.optimization_barrier((z if scale is None else z * scale).astype(x.dtype))
        each, sums = plain(z, labels, where=where, ignore_index=IGNORED, **options)
        counts = labels != IGNORED if where is None else (labels != IGNORED) & where.any(-1)
        weights = jnp.ones(labels.shape) if weights is None else weights
        weights = jnp.where(counts & (weights != 0), weights, 0)
        weighted, total = jnp.where(weights == 0, 0, each * weights), weights.sum()
        of_mean = weighted.sum() / jnp.where(total == 0, 1, total)
        value = {"mean": of_mean, "sum": weighted.sum(), "none": weighted}[reduction]
        return (value, jnp.where(weights == 0, 0, sums)) if return_logsumexp else value

    return of


def exact(labels, moving, dy=1.0, dsums=0.0, **options):
    """In float64 the value and logsumexp, and the gradients for their cotangents by name."""
    with jax.enable_x64(True):
        both = whole(labels, return_logsumexp=True, **options)
        (value, sums), pullback = jax.vjp(both, jax.tree.map(lambda a: a.astype("float64"), moving))
        wide = [jnp.broadcast_to(jnp.asarray(a, "float64"), of.shape) for a, of in ((dy, value), (dsums, sums))]
        return jax.device_get(((value, sums), pullback(tuple(wide))[0]))


def value_and_gradients(function):
    def of(moving, dy):
        value, pullback = jax.vjp(function, moving)
        return value, pullback(dy)[0]

    return jax.jit(of)


@cover(
    given=GIVEN,
    reduction=REDUCTIONS,
    where=["all", "classes", "rows", "labels"],
    rows_per_chunk=[None, 6, 5],
    options=[{}, OPTIONS],
    dtype=[("float32", None), ("float32", "native"), ("float32", "xla"), ("float64", None)],
    return_logsumexp=[False, True],
)
def test_values_and_gradients(given, reduction, where, rows_per_chunk, options, dtype, return_logsumexp):
    dtype, implementation = dtype
    options = {**options, "where": masks(DIMS, CLASSES)[where], "reduction": reduction}
    if options.keys() & OPTIONS and "logit_scale" not in given:
        options["logit_scale"] = 0.7
    chosen = {"rows_per_chunk": rows_per_chunk, "implementation": implementation}
    with jax.enable_x64(dtype == "float64"):
        moving, labels = split(dtype, given)
        dy, dsums = draw("dy", labels.shape if reduction == "none" else (), dtype), 0.0
        value, gradients = jax.device_get(value_and_gradients(loss(labels, **options, **chosen))(moving, dy))
        if return_logsumexp:
            function, alone = loss(labels, return_logsumexp=True, **options, **chosen), value
            dsums = draw("dsums", labels.shape, dtype)
            (value, sums), gradients = jax.device_get(value_and_gradients(function)(moving, (dy, dsums)))
            assert bits(value) == bits(alone)
    expected, of = exact(labels, moving, dy, dsums, **options)
    near = {"rtol": 1e-4, "atol": 2e-5} if dtype == "float32" else {"rtol": 1e-11, "atol": 1e-12}
    for actual, e in zip((value, sums) if return_logsumexp else (value,), expected, strict=False):
        assert (actual.shape, actual.dtype) == (e.shape, dtype)
        np.testing.assert_allclose(actual, e, **near)
    for name, gradient in gradients.items():
        assert (gradient.shape, gradient.dtype) == (moving[name].shape, dtype)
        np.testing.assert_allclose(gradient, of[name], **near, err_msg=name)


# As exact as what is written in jax.numpy without chunks, which rounds the logits once as well: of a mean each gradient
# is rounded once. On a GPU XLA's float32 products of 64 rows are less exact than those of 128, whoever makes them.
@cover(dtype=["bfloat16", "float16", "float32"], reduction=REDUCTIONS, given=GIVEN, where=["all", "classes"])
def test_gradients_are_as_exact_as_those_of_one_chunk(dtype, reduction, given, where):
    dims, classes = (1024, 64), 1000
    moving, labels = split(dtype, given, dims, classes)
    options = {"where": masks(dims, classes)[where], "reduction": reduction}
    dy = jnp.ones(labels.shape if reduction == "none" else ())
    ours, theirs = (
        value_and_gradients(function)(moving, dy)[1]
        for function in (loss(labels, **options, rows_per_chunk=128), whole(labels, **options))
    )
    (_, sums), of = exact(labels, moving, **options)
    slack = 0 if (given, reduction, where) == ((), "mean", "all") else 2.0**-9
    for name, gradient in ours.items():
        assert gradient.dtype == dtype
        errors = [np.linalg.norm(np.asarray(a[name], np.float64) - of[name]) for a in (ours, theirs)]
        assert errors[0] <= 1.05 * errors[1] + slack * np.linalg.norm(of[name]), name
    found = loss(labels, **options, return_logsumexp=True)(moving)[1]
    assert found.dtype == jnp.float32
    near = {"bfloat16": 1e-2, "float16": 1e-3, "float32": 1e-5}[dtype]
    np.testing.assert_allclose(found, sums, rtol=near, atol=near)


# As of a table of float32 in a model of bfloat16, of whose gradient XLA for CPUs makes a product of its own.
@pytest.mark.parametrize(("dims", "classes"), [(DIMS, CLASSES), ((4, 128, 64), 512)], ids=str)
def test_a_table_of_another_dtype(dims, classes):
    moving, labels = split(given=(), dims=dims, classes=classes)

    def step(function, dtype):
        def of(x, table):
            return function(labels, reduction="sum")({"x": x, "kernel": table.T})

        return jax.jit(jax.value_and_grad(of, (0, 1)))(moving["x"].astype(dtype), moving["kernel"].T)

    (value, (dx, ours)), (expected, (_, theirs)) = step(loss, "bfloat16"), step(whole, "float32")
    assert (value.dtype, dx.dtype, ours.dtype) == ("float32", "bfloat16", "float32")
    np.testing.assert_allclose(value, expected, rtol=1e-2)
    np.testing.assert_allclose(ours, theirs, atol=1e-2 * float(jnp.abs(theirs).max()))


# 257 has no bfloat16, and 1 has one.
def test_logits_are_rounded_once():
    x, kernel, bias = jnp.ones((1, 2), "bfloat16"), jnp.full((2, 2), 128.5, "bfloat16"), jnp.asarray([-256.0, -257])
    for given in ({"bias": bias}, {"bias": bias, "logit_scale": jnp.float32(0.5)}):
        value = linear_cross_entropy(x, kernel, jnp.asarray([0]), **given)
        np.testing.assert_allclose(value, np.log1p(np.exp(-float(given.get("logit_scale", 1)))), rtol=1e-6)


def total(function):
    return lambda moving: jnp.sin(function(moving)).sum()


def second(function):
    gradient = jax.grad(total(function))
    return jax.grad(lambda moving: sum(jnp.sin(g).sum() for g in jax.tree.leaves(gradient(moving))))


def scanned(function):
    def step(moving, total, a):
        return total + function({**moving, "x": a * moving["x"]}).sum(), None

    return jax.grad(lambda moving: jax.lax.scan(partial(step, moving), 0.0, jnp.arange(3.0))[0])


def stacked(tree):
    return jax.tree.map(lambda a: jnp.stack([a, 2 * a]), tree)


def grad_of(name, f):
    return lambda moving: jax.grad(lambda a: total(f)({**moving, name: a}))(moving[name])


def vmap_over(name, f):
    return lambda moving: jax.vmap(lambda a: jax.grad(total(f))({**moving, name: a}))(stacked(moving[name]))


def along(f, moving):
    return jax.jvp(f, (moving,), (jax.tree.map(jnp.cos, moving),))


TRANSFORMS = {
    "second derivatives": second,
    "jvp": lambda f: partial(along, f),
    "tangents": lambda f: jax.grad(lambda moving: sum(map(jnp.sum, along(f, moving)))),
    **{f"grad of {name}": partial(grad_of, name) for name in NAMES},
    **{f"vmap over {name}": partial(vmap_over, name) for name in NAMES},
    "vmap over everything": lambda f: lambda moving: jax.vmap(jax.grad(total(f)))(stacked(moving)),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(total(f))),
    "scan": scanned,
}
OF_BOTH = [name for name in TRANSFORMS if not name.endswith(NAMES[2:])]  # operands that there always are


@cover(
    case=[*((name, "all") for name in TRANSFORMS), *((name, "none") for name in OF_BOTH)],
    result=["loss", "logsumexp"],
    reduction=["mean", "none"],
    where=["rows", "classes"],
)
def test_transformed(case, result, reduction, where):
    name, given = case
    moving, labels = split(given=GIVEN[given])
    options = {**OPTIONS, "reduction": reduction, "where": masks(DIMS, CLASSES)[where]}
    options |= {} if moving.get("logit_scale") is not None else {"logit_scale": 0.7}

    def of(function, **chunks):
        if result == "loss":
            return TRANSFORMS[name](function(labels, **options, **chunks))
        both = function(labels, **options, **chunks, return_logsumexp=True)
        return TRANSFORMS[name](lambda moving: both(moving)[1])

    with jax.numpy_rank_promotion("raise"):
        ours = jax.jit(of(loss, rows_per_chunk=7))(moving)
    assert_near(ours, jax.jit(of(whole))(moving))


# What is saved beside logsumexp is that of the loss alone.
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_gradient_of_the_loss_alone(reduction):
    moving, labels = split()
    alone = jax.grad(lambda moving: loss(labels, reduction=reduction)(moving).sum())
    both = loss(labels, reduction=reduction, return_logsumexp=True)
    assert bits(jax.jit(jax.grad(lambda moving: both(moving)[0].sum()))(moving)) == bits(jax.jit(alone)(moving))


@pytest.mark.parametrize("lead", [(), (0,), (1, 0), (1,), (37,), (2, 3, 5)], ids=str)
@pytest.mark.parametrize("columns", [16, 0])
def test_any_number_of_rows(lead, columns):
    moving, labels = split(dims=(*lead, columns), classes=9)
    where = jnp.arange(9) < 7
    value, gradients = jax.jit(jax.value_and_grad(loss(labels, where=where, rows_per_chunk=4)))(moving)
    (expected, _), of = exact(labels, moving, where=where)
    assert_near((value, gradients), (jnp.float32(expected), {name: jnp.float32(of[name]) for name in moving}))


@cover(where=["classes", "rows", "labels"], reduction=["mean", "none"], rows_per_chunk=[None, 5])
def test_vmap_over_masks(where, reduction, rows_per_chunk):
    moving, labels = split()
    mask = masks(DIMS, CLASSES)[where]
    both = jnp.stack([mask, mask ^ (jnp.arange(mask.shape[-1]) == mask.shape[-1] - 2)])

    def of(function, **options):
        of_mask = partial(function, labels, reduction=reduction, **options)
        return jax.jit(jax.vmap(lambda where: jax.grad(total(of_mask(where=where)))(moving)))(both)

    assert_near(of(loss, rows_per_chunk=rows_per_chunk), of(whole))


@pytest.mark.parametrize("mapped", [(0, None, None), (None, 0, None), (None, None, 0)], ids=["x", "kernel", "labels"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_of_mapped_operands_of_16_bits_are_those_of_a_loop(dtype, mapped):
    shapes = [(8, 16), (16, 32), (8,)]
    sizes = [shape if axis is None else (3, *shape) for shape, axis in zip(shapes, mapped, strict=True)]
    labels = jnp.arange(math.prod(sizes[2])).reshape(sizes[2]) % 32
    arrays = [draw("x", sizes[0], dtype), draw("kernel", sizes[1], dtype), labels]

    def gradients(x, kernel, labels):
        return jax.grad(lambda x, kernel: linear_cross_entropy(x, kernel, labels).sum(), (0, 1))(x, kernel)

    expected = of_each(gradients, mapped, arrays)
    for of, e in zip(jax.jit(jax.vmap(gradients, mapped))(*arrays), expected, strict=True):
        np.testing.assert_allclose(np.float32(of), np.float32(e), rtol=2.0**-7, atol=2.0**-9)


# A class that does not count and is the label's: its own logit is in the loss, as without a product.
@cover(implementation=[None, "xla"], reduction=REDUCTIONS)
def test_a_label_that_does_not_count(implementation, reduction):
    moving, labels = split()
    labels = labels.at[1, 2].set(CLASSES - 1)
    options = {"where": masks(DIMS, CLASSES)["classes"], "reduction": reduction}
    dy = jnp.ones(labels.shape if reduction == "none" else ())
    ours = value_and_gradients(loss(labels, implementation=implementation, **options))(moving, dy)
    assert_near(ours, value_and_gradients(whole(labels, **options))(moving, dy))


def test_wrong_labels_and_ignored_ones():
    moving, labels = split(given=())
    assert np.isnan(loss(jnp.full(labels.shape, CLASSES))(moving))
    assert loss(jnp.full(labels.shape, IGNORED))(moving) == 0
    losses = loss(jnp.full(labels.shape, 3).at[1, 2].set(-1), reduction="none")(moving)
    assert np.argwhere(np.isnan(losses)).tolist() == [[1, 2]]


# As an ignored one it is out of the mean, whatever it has and its label is, however it is said that it does not count.
@cover(reduction=REDUCTIONS, rows_per_chunk=[None, 5], form=["rows", "a column", "all", "row_weights"])
def test_rows_that_do_not_count(reduction, rows_per_chunk, form):
    moving, labels = split()
    counts = masks(DIMS, CLASSES)["labels"].at[2].set(False)
    wrong, column = labels.at[2, 1].set(CLASSES), counts[..., None]
    mask = {"rows": counts, "a column": column, "all": jnp.broadcast_to(column, (*DIMS[:2], CLASSES))}.get(form)
    options = {"reduction": reduction, "rows_per_chunk": rows_per_chunk}
    dy = jnp.ones(labels.shape if reduction == "none" else ())
    spoilt = {**moving, "x": jnp.where(column, moving["x"], jnp.nan)}
    spoilt |= {"row_weights": jnp.where(counts, moving["row_weights"], 0)} if mask is None else {}
    masked = value_and_gradients(loss(wrong, where=mask, **options))(spoilt, dy)
    assert_near(masked, value_and_gradients(loss(jnp.where(counts, labels, IGNORED), **options))(moving, dy))
    losses = cross_entropy(draw("logits", (*DIMS[:2], CLASSES)), wrong, where=mask, ignore_index=IGNORED)
    np.testing.assert_array_equal(losses == 0, (labels == IGNORED) | (False if mask is None else ~counts))


def test_weights_that_add_up_to_nothing():
    moving, labels = split()
    for weights in (jnp.zeros(labels.shape), jnp.zeros(labels.shape).at[1, :2].set(jnp.asarray([1.0, -1.0]))):
        value, gradients = jax.value_and_grad(loss(labels))({**moving, "row_weights": weights})
        assert value == 0
        assert not any(np.asarray(g).any() for g in jax.tree.leaves(gradients))
