"""`quantized_dot` and `float8_linear` in programs: transformations, examples, second derivatives, and errors."""

import re
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import draw
from coverage import cover
from hlo import count_native_calls
from jax import export
from quantizing import QUANTIZED, to

import jaxnorm
from jaxnorm import Float8Recipe, Quantized, float8_linear, quantize, quantize_kernel, quantized_dot

pytestmark = [pytest.mark.jax_version, pytest.mark.usefixtures("exact_products")]

ROWS, DEPTH, COLUMNS = (8, 4), 64, 48
E4M3 = to("float8_e4m3fn")
# Those that differ in what is computed and kept.
RECIPES = {
    "default": Float8Recipe(),
    "inputs": Float8Recipe(save="inputs"),
    "tensor": Float8Recipe(scaling="tensor"),
    "wide weight gradient": Float8Recipe(weight_gradient="compute"),
}


@dataclass(frozen=True)
class Form:
    """A product of arrays that are quantised, by which op, and how each of them is."""

    recipe: Float8Recipe | None
    x: Any
    kernel: Any
    quantise: Any = quantize_kernel

    def rounded(self, x, kernel, **options):
        """x and the kernel; what moves passes through their rounding."""
        return x if self.x is None else quantize(x, self.x, **options), self.quantise(kernel, self.kernel, **options)

    def __call__(self, x, kernel, bias=None):
        if self.recipe is not None:
            return float8_linear(x, kernel, bias=bias, recipe=self.recipe, out_dtype="float32")
        return quantized_dot(*self.rounded(x, kernel, straight_through=True), bias=bias, out_dtype="float32")

    def plain(self, x, kernel, bias=0):
        """What forward mode and higher derivatives are those of."""
        x, kernel = self.rounded(x, kernel, straight_through=True)
        return (x if self.x is None else x.dequantize()) @ kernel.dequantize() + bias


LINEAR = {key: Form(of, *[to("float8_e4m3fn", of.scaling.replace("row", "token"))] * 2) for key, of in RECIPES.items()}
DOT = {
    "int8": Form(None, to("int8"), to("int8")),
    "int8, not transposed": Form(None, to("int8"), to("int8"), partial(quantize, axis=0)),
    "float8": Form(None, E4M3, E4M3),
    "a kernel of int4": Form(None, None, to("int4")),
}
FORMS = DOT | LINEAR
each_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def operands(*, rows=ROWS, examples=()):
    return (
        draw("x", (*examples, *rows, DEPTH)),
        draw("kernel", (*examples, DEPTH, COLUMNS)),
        draw("bias", (*examples, COLUMNS)),
    )


# Its gradient by y has the same bits in every program: what is next to the middle of two float8 would go either way.
def loss(form, x, kernel, bias):
    dy = jnp.where(x[..., :1] > 0, 1, 3) * draw("dy", (COLUMNS,))
    return (form(x, kernel, bias) * dy).sum()


def with_zeros(dims, dtype="float32", kernel_dtype=None, *, std=1.0):
    """x, kernel, bias and dy of these rows, depth and columns; x's first row and kernel's first column are zeros."""
    *rows, depth, columns = dims
    x, dy = (draw(name, (*rows, length), dtype, std=std) for name, length in (("x", depth), ("dy", columns)))
    kernel = draw("kernel", (depth, columns), kernel_dtype or dtype, std=std)
    return x.at[(0,) * len(rows)].set(0), kernel.at[:, 0].set(0), draw("bias", (columns,), dtype, std=std), dy


def value_and_gradients(function, *args):
    """The result, and the gradients for the last of these as its cotangent."""
    y, pull_back = jax.vjp(function, *args[:-1])
    return y, *pull_back(args[-1])


def gradient(form):
    return jax.grad(partial(loss, form), (0, 1, 2))


# Of examples of kernels XLA for GPUs makes the products, and rounds: it divides less exactly.
BOUND = 1e-5 if jax.default_backend() == "cpu" else 2.0**-5


def assert_close(actual, expected, bound=BOUND):
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (e.shape, e.dtype)
        np.testing.assert_allclose(np.float64(a), np.float64(e), rtol=0, atol=bound * np.abs(np.float64(e)).max())


def assert_norms_close(actual, expected, bound, least=0.0):
    """Of each the difference is as long, at most."""
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (e.shape, e.dtype)
        assert np.linalg.norm(np.float64(a) - np.float64(e)) <= bound * np.linalg.norm(np.float64(e)) + least


def in_a_loop(function):
    loop = partial(jax.lax.scan, init=None, xs=None, length=2)
    return lambda *args: jax.tree.map(lambda a: a[0], loop(lambda _, __: (None, function(*args)))[1])


PROGRAMS = {
    "jit": lambda form: jax.jit(gradient(form)),
    "a loop": lambda form: in_a_loop(gradient(form)),
    "checkpoint": lambda form: jax.grad(jax.checkpoint(partial(loss, form)), (0, 1, 2)),
    "save norms": lambda form: jax.jit(
        jax.grad(jax.checkpoint(partial(loss, form), policy=jaxnorm.checkpoint_policies.save_norms), (0, 1, 2))
    ),
    "linearize": lambda form: (
        lambda *args: jax.linear_transpose(jax.linearize(partial(loss, form), *args)[1], *args)(jnp.float32(1))
    ),
    "cond": lambda form: jax.grad(
        lambda *args: jax.lax.cond(args[2][0] < 9, partial(loss, form), lambda *_: 0.0, *args), (0, 1, 2)
    ),
}


@cover(program=PROGRAMS, form=FORMS)
def test_a_gradient_is_the_same_in_every_program(program, form):
    assert_close(program(form)(*operands()), gradient(form)(*operands()))


@each_form
def test_the_body_of_a_loop(form):
    def looped(x, *weights):
        return jax.lax.scan(lambda total, one: (total + loss(form, one, *weights), None), 0.0, x)[0]

    def unrolled(x, *weights):
        return sum(loss(form, one, *weights) for one in x)

    assert_close(*(jax.grad(function, (0, 1, 2))(*operands()) for function in (looped, unrolled)))


AXES = {
    "x": (0, None, None),
    "kernel": (None, 0, None),
    "bias": (None, None, 0),
    "x and kernel": (0, 0, None),
    "all": (0, 0, 0),
    "other axes": (1, 1, 0),
}


def examples_of(axes, size=3):
    many, one = operands(rows=(5,), examples=(size,)), operands(rows=(5,))
    return [b if axis is None else jnp.moveaxis(a, 0, axis) for a, b, axis in zip(many, one, axes, strict=True)]


def of_each(function, axes, args, size=3):
    """The results for examples, one by one."""

    def of_one(i):
        return function(*(a if at is None else jnp.take(a, i, at) for a, at in zip(args, axes, strict=True)))

    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(of_one, range(size)))


# Of what all examples share the gradients are summed: where each tensor has a scale, each example's has its own.
@cover(axes=AXES, form=FORMS)
def test_gradients_of_examples(axes, form):
    args = examples_of(axes)
    each = of_each(gradient(form), axes, args)
    assert_close(jax.vmap(gradient(form), axes)(*args), each)
    if form in (LINEAR["inputs"], LINEAR["wide weight gradient"]):
        return
    total = jax.grad(lambda *args: jax.vmap(partial(loss, form), axes)(*args).sum(), (0, 1, 2))(*args)
    expected = [a.sum(0) if axis is None else jnp.moveaxis(a, 0, axis) for a, axis in zip(each, axes, strict=True)]
    # Examples of rows are rows, so that all examples of a column of dy share a scale.
    is_rows = axes == AXES["x"] and form == LINEAR["default"]
    assert_close(total, expected, 0.05 if is_rows else 1e-5)
    assert_close(jax.vmap(form, axes)(*args), of_each(form, axes, args))


@each_form
def test_examples_of_examples(form):
    x, kernel, _ = operands(rows=(5,), examples=(2,))
    ys = jax.vmap(jax.vmap(form, (None, 0)), (0, None))(x, kernel)
    assert_close(ys, jnp.stack([jnp.stack([form(a, b) for b in kernel]) for a in x]))
    inner = jax.grad(lambda x, kernel: jnp.sin(form(x, kernel)).sum(), (0, 1))
    grads = jax.vmap(jax.vmap(inner, (None, 0)), (0, None))(x, kernel)
    assert_close(grads[1], jnp.stack([jnp.stack([inner(a, b)[1] for b in kernel]) for a in x]))


@each_form
@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)], ids=str)
def test_no_examples(axes, form):
    args = [a[:0] if axis == 0 else a[0] for a, axis in zip(operands(examples=(1,))[:2], axes, strict=True)]
    assert jax.vmap(form, axes)(*args).shape == (0, *ROWS, COLUMNS)
    grads = jax.vmap(jax.grad(lambda *args: form(*args).sum(), (0, 1)), axes)(*args)
    assert [g.shape[0] for g in grads] == [0, 0]


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


@each_form
@pytest.mark.parametrize("rows", [ROWS, (), (1,), (0,), (2, 0, 3)], ids=str)
def test_few_rows(rows, form):
    x, kernel, bias = draw("x", (*rows, DEPTH)), *operands()[1:]
    with jax.numpy_rank_promotion("raise"):
        dx, dw, db = jax.grad(lambda *args: form(*args).sum(), (0, 1, 2))(x, kernel, bias)
    assert form(x, kernel, bias).shape == (*rows, COLUMNS)
    assert (dx.shape, dw.shape, db.shape) == (x.shape, kernel.shape, bias.shape)
    if not x.size:
        np.testing.assert_array_equal(dw, 0)


@each_form
def test_an_exported_program(form):
    (x, kernel, bias), dy = operands(), draw("dy", (*ROWS, COLUMNS))
    (rows,) = export.symbolic_shape("rows")
    types = [jax.ShapeDtypeStruct((rows, *a.shape[1:]), a.dtype) for a in (x, dy)]
    function = jax.jit(partial(value_and_gradients, form))
    program = export.export(function, platforms=("cpu", "cuda", "tpu"))(types[0], kernel, bias, types[1])
    assert {*count_native_calls(program.mlir_module())} <= {"jaxnorm_quantize_fwd"}  # of x, before its product
    read = export.deserialize(program.serialize())
    for count in (1, 5):
        args = x[:count], kernel, bias, dy[:count]
        assert_close(read.call(*args), function(*args), 1e-6 if jax.default_backend() == "cpu" else 2.0**-5)


@each_form
def test_forward_mode_rounds_no_tangent(form):
    dots = tuple(draw("tangent", a.shape) for a in operands())
    assert_close(jax.jvp(form, operands(), dots)[1], jax.jvp(form.plain, operands(), dots)[1])


# Each of the operands, and mixed ones: the derivative by x moves as the kernel does.
@pytest.mark.long
@pytest.mark.parametrize("form", [LINEAR["default"], LINEAR["inputs"]], ids=["quantized", "inputs"])
def test_second_derivatives(form):
    x, kernel, bias = draw("x", (2, 3)), draw("kernel", (3, 2)), draw("bias", (2,))

    def of(function):
        return lambda *args: jnp.sin(function(*args)).sum()

    expected = jax.jacfwd(jax.jacfwd(of(form.plain), (0, 1, 2)), (0, 1, 2))(x, kernel, bias)
    assert_close(jax.jacfwd(jax.jacfwd(of(form), (0, 1, 2)), (0, 1, 2))(x, kernel, bias), expected)
    # dy is rounded in the first reverse pass and moves as it was in the second.
    assert_norms_close(jax.hessian(of(form), (0, 1, 2))(x, kernel, bias), expected, 1e-5, 1e-6)


def test_the_gradient_of_a_gradient():
    x, kernel, bias = operands(rows=(5,))

    def penalty(function, x, kernel):
        return (jax.grad(lambda x: jnp.sin(function(x, kernel, bias)).sum())(x) ** 2).sum()

    form = LINEAR["default"]
    ours, theirs = (jax.grad(partial(penalty, f), (0, 1))(x, kernel) for f in (form, form.plain))
    assert_norms_close(ours, theirs, 0.05)


# A Quantized by itself passes nothing on, and a norm in front takes what passes through what it quantises.
@cover(form={name: FORMS[name] for name in ("int8", "float8", "default", "inputs")})
def test_a_quantised_x(form):
    x, kernel, _ = operands()
    norm = partial(QUANTIZED["rms"], quantization=form.x, straight_through=True)

    def of(x, kernel):
        if form.recipe is not None:
            return float8_linear(x, kernel, recipe=form.recipe, out_dtype="float32").sum()
        return quantized_dot(x, quantize_kernel(kernel, form.kernel, straight_through=True), out_dtype="float32").sum()

    y = quantize(x, form.x)
    np.testing.assert_array_equal(jax.grad(lambda scales: of(Quantized(y.values, scales), kernel))(y.scales), 0)
    ours = jax.grad(lambda x, kernel: of(norm(x), kernel), (0, 1))(x, kernel)
    exact = jax.grad(lambda x, kernel: (jaxnorm.rms_norm(x) @ kernel).sum(), (0, 1))(x, kernel)
    assert_norms_close(ours, exact, 0.1)


@pytest.mark.parametrize("argnums", [(0,), (1,), (2,), (0, 2), (0, 1, 2)], ids=str)
def test_the_backward_computes_what_is_asked_for(argnums):
    form = LINEAR["default"]
    every, asked = gradient(form), jax.grad(partial(loss, form), argnums)
    for i, actual in zip(argnums, asked(*operands()), strict=True):
        np.testing.assert_array_equal(actual, every(*operands())[i])
    program = str(jax.make_jaxpr(asked)(*operands()))
    assert program.count("jaxnorm_float8_linear_bwd[") == len({0, 1} & {*argnums})


def test_what_is_rounded_is_kept_in_place_of_the_inputs():
    x, kernels = draw("x", (512, 256), "bfloat16"), draw("kernels", (8, 256, 256), "bfloat16", std=0.1)
    kept = []
    for recipe in (Float8Recipe(), Float8Recipe(save="inputs")):

        def model(x, kernels, recipe=recipe):
            def layer(x, kernel):
                return x + float8_linear(jaxnorm.rms_norm(x), kernel, recipe=recipe), None

            return jax.lax.scan(layer, x, kernels)[0].astype(jnp.float32).sum()

        text = jax.jit(jax.grad(model, (0, 1))).lower(x, kernels).compile().as_text()
        forward, _ = (line for line in text.splitlines() if " while(" in line)
        kept.append(sorted(re.findall(r"\w+\[8,512,256\]", forward.partition(" while(")[0])))
    # What the norm reads, and its result.
    assert kept == [["bf16[8,512,256]", "f8e4m3fn[8,512,256]"], ["bf16[8,512,256]"] * 2]


# With the names kept nothing is rounded again; a loop's body has all that it computes again.
@pytest.mark.parametrize("policy", ["save_norms", "recompute_norms"])
def test_named_values_are_kept(policy):
    def model(x, kernel):
        layer = jax.checkpoint(float8_linear, policy=getattr(jaxnorm.checkpoint_policies, policy))
        return jnp.sin(layer(jnp.sin(x), kernel)).sum()

    program = str(jax.make_jaxpr(jax.grad(model, (0, 1)))(*operands()[:2]))
    names = [name for name in jaxnorm.checkpoint_policies.NAMES if f"name={name}" in program]
    assert (names, program.count("jaxnorm_float8_linear_fwd[")) == (["jaxnorm_result", "jaxnorm_statistics"], 1)
