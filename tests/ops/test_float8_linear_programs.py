"""`float8_linear` in programs: transformations, derivatives of derivatives, and what is kept for one."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import draw
from coverage import cover
from float8_recipes import RECIPES

import jaxnorm
from jaxnorm import Float8Recipe, Quantized, checkpoint_policies, float8_linear

pytestmark = [pytest.mark.jax_version, pytest.mark.usefixtures("exact_products")]

ROWS, DEPTH, COLUMNS = (8, 4), 64, 48


def operands(*, rows=ROWS, examples=()):
    return (
        draw("x", (*examples, *rows, DEPTH)),
        draw("kernel", (*examples, DEPTH, COLUMNS)),
        draw("bias", (*examples, COLUMNS)),
    )


# Its gradient by y has the same bits in every program: what is next to the middle of two float8 would go either way.
def loss(recipe, x, kernel, bias):
    dy = jnp.where(x[..., :1] > 0, 1, 3) * draw("dy", (COLUMNS,))
    return (float8_linear(x, kernel, bias=bias, recipe=recipe) * dy).sum()


def gradient(recipe):
    return jax.grad(partial(loss, recipe), (0, 1, 2))


# Of examples of kernels XLA for GPUs makes the products, and rounds: it divides less exactly.
BOUND = 1e-5 if jax.default_backend() == "cpu" else 2.0**-5


def assert_close(actual, expected, bound=BOUND):
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (e.shape, e.dtype)
        np.testing.assert_allclose(np.float64(a), np.float64(e), rtol=0, atol=bound * np.abs(np.float64(e)).max())


def in_a_loop(function):
    return lambda *args: jax.tree.map(
        lambda a: a[0], jax.lax.scan(lambda _, __: (None, function(*args)), None, length=2)[1]
    )


def of_scanned_layers(recipe):
    """The gradient of a loop that has the layer in its body."""

    def looped(x, kernel, bias):
        total, _ = jax.lax.scan(lambda total, one: (total + loss(recipe, one, kernel, bias), None), 0.0, x)
        return total

    return jax.grad(looped, (0, 1, 2))


PROGRAMS = {
    "jit": lambda recipe: jax.jit(gradient(recipe)),
    "a loop": lambda recipe: in_a_loop(gradient(recipe)),
    "checkpoint": lambda recipe: jax.grad(jax.checkpoint(partial(loss, recipe)), (0, 1, 2)),
    "save norms": lambda recipe: jax.jit(
        jax.grad(jax.checkpoint(partial(loss, recipe), policy=checkpoint_policies.save_norms), (0, 1, 2))
    ),
    "linearize": lambda recipe: (
        lambda *args: jax.linear_transpose(jax.linearize(partial(loss, recipe), *args)[1], *args)(jnp.float32(1))
    ),
    "cond": lambda recipe: jax.grad(
        lambda *args: jax.lax.cond(args[2][0] < 9, partial(loss, recipe), lambda *_: 0.0, *args), (0, 1, 2)
    ),
}


@cover(program=PROGRAMS, recipe=RECIPES)
def test_a_gradient_is_the_same_in_every_program(program, recipe):
    assert_close(program(recipe)(*operands()), gradient(recipe)(*operands()))


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
def test_the_body_of_a_loop(recipe):
    x, kernel, bias = operands()
    each = [gradient(recipe)(one, kernel, bias) for one in x]
    expected = jnp.stack([dx for dx, *_ in each]), sum(dw for _, dw, _ in each), sum(db for *_, db in each)
    assert_close(of_scanned_layers(recipe)(x, kernel, bias), expected)


AXES = {
    "x": (0, None, None),
    "kernel": (None, 0, None),
    "bias": (None, None, 0),
    "x and kernel": (0, 0, None),
    "all": (0, 0, 0),
}


def examples_of(axes, size=3):
    many, one = operands(rows=(5,), examples=(size,)), operands(rows=(5,))
    return [a if axis == 0 else b for a, b, axis in zip(many, one, axes, strict=True)]


def of_each(function, axes, args, size=3):
    results = [function(*(a[i] if axis == 0 else a for a, axis in zip(args, axes, strict=True))) for i in range(size)]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *results)


@cover(axes=AXES, recipe=RECIPES)
def test_gradients_of_examples(axes, recipe):
    args = examples_of(axes)
    assert_close(jax.vmap(gradient(recipe), axes)(*args), of_each(gradient(recipe), axes, args))


# Of what all examples share the gradients are summed: where each tensor has a scale, each example's has its own.
@cover(axes=AXES, recipe={"default": Float8Recipe(), "tensor": Float8Recipe("tensor")})
def test_the_gradient_of_examples(axes, recipe):
    args = examples_of(axes)
    y = jax.vmap(partial(float8_linear, recipe=recipe), axes[:2])(*args[:2]) if 0 in axes[:2] else None
    total = jax.grad(lambda *args: jax.vmap(partial(loss, recipe), axes)(*args).sum(), (0, 1, 2))(*args)
    each = of_each(gradient(recipe), axes, args)
    expected = [a if axis == 0 else a.sum(0) for a, axis in zip(each, axes, strict=True)]
    # Examples of rows are rows, so that all examples of a column of dy share a scale.
    is_rows = axes == AXES["x"] and recipe.scaling == "row"
    assert_close(total, expected, 0.05 if is_rows else 1e-5)
    if y is not None:
        assert_close(y, of_each(partial(float8_linear, recipe=recipe), axes[:2], args[:2]))


# A row is dead in one example alone, and its scale is that of all.
@pytest.mark.parametrize("save", ["quantized", "inputs"])
def test_examples_of_quantised_values_that_share_scales(save):
    values = draw("values", (2, 5, DEPTH)).at[0, 3].set(0).astype("float8_e4m3fn")
    scales, kernel = jnp.full((5, 1), 2e-5).at[3].set(1), operands()[1]

    def of_kernel(values, kernel):
        y = float8_linear(Quantized(values, scales), kernel, recipe=Float8Recipe(save=save), out_dtype="float32")
        return jnp.sin(y).sum()

    each = jnp.stack([jax.grad(of_kernel, 1)(one, kernel) for one in values])
    assert_close(jax.vmap(jax.grad(of_kernel, 1), (0, None))(values, kernel), each)
    kernels = jnp.stack([kernel] * 2)
    assert_close(jax.grad(lambda kernels: jax.vmap(of_kernel)(values, kernels).sum())(kernels), each)


def test_examples_of_examples():
    x, kernel, _ = operands(rows=(5,), examples=(2,))
    ys = jax.vmap(jax.vmap(float8_linear, (None, 0)), (0, None))(x, kernel)
    assert_close(ys, jnp.stack([jnp.stack([float8_linear(a, b) for b in kernel]) for a in x]))
    inner = jax.grad(lambda x, kernel: jnp.sin(float8_linear(x, kernel)).sum(), (0, 1))
    grads = jax.vmap(jax.vmap(inner, (None, 0)), (0, None))(x, kernel)
    assert_close(grads[1], jnp.stack([jnp.stack([inner(a, b)[1] for b in kernel]) for a in x]))


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)], ids=str)
def test_no_examples(axes):
    args = [a[:0] if axis == 0 else a[0] for a, axis in zip(operands(examples=(1,))[:2], axes, strict=True)]
    assert jax.vmap(float8_linear, axes)(*args).shape == (0, *ROWS, COLUMNS)
    grads = jax.vmap(jax.grad(lambda *args: float8_linear(*args).sum(), (0, 1)), axes)(*args)
    assert [g.shape[0] for g in grads] == [0, 0]


@pytest.mark.parametrize("rows", [(), (1,), (0,), (2, 0, 3)], ids=str)
def test_few_rows(rows):
    x, kernel, bias = draw("x", (*rows, DEPTH)), *operands()[1:]
    dx, dw, db = jax.jit(gradient(Float8Recipe()))(x, kernel, bias)
    assert float8_linear(x, kernel, bias=bias).shape == (*rows, COLUMNS)
    assert (dx.shape, dw.shape, db.shape) == (x.shape, kernel.shape, bias.shape)
    if not x.size:
        np.testing.assert_array_equal(dw, 0)


def rounded(array, axis):
    """What is rounded, and moves as what it is made of."""
    float8 = jaxnorm.Quantization("float8_e4m3fn")
    return jaxnorm.quantize(array, float8, axis=axis, straight_through=True).dequantize()


def plain(x, kernel, bias):
    """What forward mode and higher derivatives are those of."""
    return rounded(x, -1) @ rounded(kernel, 0) + bias


@pytest.mark.parametrize("recipe", [Float8Recipe(), Float8Recipe(save="inputs")], ids=["quantized", "inputs"])
def test_forward_mode_rounds_no_tangent(recipe):
    args, dots = operands(), [draw("tangent", a.shape) for a in operands()]
    _, y_dot = jax.jvp(lambda *args: float8_linear(*args[:2], bias=args[2], recipe=recipe), args, tuple(dots))
    assert_close(y_dot, jax.jvp(plain, args, tuple(dots))[1])


# Each of the operands, and mixed ones: the derivative by x moves as the kernel does.
@pytest.mark.long
@pytest.mark.parametrize("recipe", [Float8Recipe(), Float8Recipe(save="inputs")], ids=["quantized", "inputs"])
def test_second_derivatives(recipe):
    x, kernel, bias = draw("x", (2, 3)), draw("kernel", (3, 2)), draw("bias", (2,))

    def of(function):
        return lambda *args: jnp.sin(function(*args)).sum()

    ours = of(lambda *args: float8_linear(*args[:2], bias=args[2], recipe=recipe))
    expected = jax.jacfwd(jax.jacfwd(of(plain), (0, 1, 2)), (0, 1, 2))(x, kernel, bias)
    assert_close(jax.jacfwd(jax.jacfwd(ours, (0, 1, 2)), (0, 1, 2))(x, kernel, bias), expected)
    # dy is rounded in the first reverse pass and moves as it was in the second.
    for actual, e in zip(*map(jax.tree.leaves, (jax.hessian(ours, (0, 1, 2))(x, kernel, bias), expected)), strict=True):
        assert np.linalg.norm(actual - e) <= 1e-5 * np.linalg.norm(e) + 1e-6


def test_the_gradient_of_a_gradient():
    x, kernel, bias = operands(rows=(5,))

    def penalty(function, x, kernel):
        return (jax.grad(lambda x: jnp.sin(function(x, kernel, bias)).sum())(x) ** 2).sum()

    ours, theirs = (
        jax.grad(partial(penalty, function), (0, 1))(x, kernel)
        for function in (lambda x, kernel, bias: float8_linear(x, kernel, bias=bias), plain)
    )
    for actual, e in zip(ours, theirs, strict=True):
        assert np.linalg.norm(actual - e) <= 0.05 * np.linalg.norm(e)


@pytest.mark.parametrize("argnums", [(0,), (1,), (2,), (0, 2), (0, 1, 2)], ids=str)
def test_the_backward_computes_what_is_asked_for(argnums):
    every, asked = jax.grad(partial(loss, Float8Recipe()), (0, 1, 2)), jax.grad(partial(loss, Float8Recipe()), argnums)
    for i, actual in zip(argnums, asked(*operands()), strict=True):
        np.testing.assert_array_equal(actual, every(*operands())[i])
    program = str(jax.make_jaxpr(asked)(*operands()))
    assert program.count("jaxnorm_float8_linear_bwd[") == (argnums != (2,))


def scanned(recipe):
    """The gradient of layers, each of which keeps what its derivative reads."""

    def model(x, kernels):
        def layer(x, kernel):
            return x + float8_linear(jaxnorm.rms_norm(x), kernel, recipe=recipe), None

        return jax.lax.scan(layer, x, kernels)[0].astype(jnp.float32).sum()

    return jax.jit(jax.grad(model, (0, 1)))


def test_what_is_rounded_is_kept_in_place_of_the_inputs():
    x, kernels = draw("x", (512, 256), "bfloat16"), draw("kernels", (8, 256, 256), "bfloat16", std=0.1)
    kept = []
    for recipe in (Float8Recipe(), Float8Recipe(save="inputs")):
        text = scanned(recipe).lower(x, kernels).compile().as_text()
        forward, _ = (line for line in text.splitlines() if " while(" in line)
        kept.append(sorted(re.findall(r"\w+\[8,512,256\]", forward.partition(" while(")[0])))
    # What the norm reads, and its result.
    assert kept == [["bf16[8,512,256]", "f8e4m3fn[8,512,256]"], ["bf16[8,512,256]"] * 2]


# With the names kept nothing is rounded again; a loop's body has all that it computes again.
@pytest.mark.parametrize("policy", ["save_norms", "recompute_norms"])
def test_named_values_are_kept(policy):
    def model(x, kernel):
        layer = jax.checkpoint(float8_linear, policy=getattr(checkpoint_policies, policy))
        return jnp.sin(layer(jnp.sin(x), kernel)).sum()

    program = str(jax.make_jaxpr(jax.grad(model, (0, 1)))(*operands()[:2]))
    names = [name for name in checkpoint_policies.NAMES if f"name={name}" in program]
    assert names == ["jaxnorm_result", "jaxnorm_statistics"]
    assert program.count("jaxnorm_float8_linear_fwd[") == 1
