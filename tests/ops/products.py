"""`quantized_dot` and `float8_linear`: their rows, and what they have besides: examples, forward mode, what is kept."""

import dataclasses
import re
from functools import partial
from typing import Any

import formulas
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ALONE, draw
from coverage import cover
from op import Op, Size, call, named
from oracle import Forward, f64, round_to
from quantizing import QUANTIZED, array_by_numpy, to

import jaxnorm
from jaxnorm import Float8Recipe, Quantized, float8_linear, quantize, quantize_kernel, quantized_dot

pytestmark = [pytest.mark.jax_version, pytest.mark.usefixtures("exact_products")]

ROWS, DEPTH, COLUMNS = (8, 4), 64, 48
E4M3 = to("float8_e4m3fn")
# Those that differ in what is computed and kept.
RECIPES = {
    "default": Float8Recipe(),
    "inputs": Float8Recipe(save="inputs"),
    "wide weight gradient": Float8Recipe(weight_gradient="compute"),
    "powers of two": Float8Recipe(power_of_two=True),
}


@dataclasses.dataclass(frozen=True)
class Form:
    """A product of arrays that are quantised, by which op, and how each of them is."""

    recipe: Float8Recipe | None
    x: Any
    kernel: Any
    quantise: Any = quantize_kernel

    def rounded(self, x, kernel, **options):
        """x and the kernel; what moves passes through their rounding."""
        x = x if self.x is None else quantize(x, self.x, implementation="xla", **options)
        return x, self.quantise(kernel, self.kernel, **options)

    def __call__(self, x, kernel, bias=None, *, out_dtype=None, **options):
        options |= {"bias": bias, "out_dtype": out_dtype or x.dtype}
        if self.recipe is not None:
            return float8_linear(x, kernel, recipe=self.recipe, **options)
        return quantized_dot(*self.rounded(x, kernel, straight_through=True), **options)

    def plain(self, x, kernel, bias=0):
        """What forward mode and higher derivatives are those of."""
        x, kernel = self.rounded(x, kernel, straight_through=True)
        return (x if self.x is None else x.dequantize()) @ kernel.dequantize() + bias


def of_recipe(recipe):
    how = dataclasses.replace(E4M3, power_of_two=recipe.power_of_two)
    return Form(recipe, how, how)


LINEAR = {name: of_recipe(recipe) for name, recipe in RECIPES.items()}
DOT = {
    "int8": Form(None, to("int8"), to("int8")),
    "int8, not transposed": Form(None, to("int8"), to("int8"), partial(quantize, axis=0)),
    "float8": Form(None, E4M3, E4M3),
    "a kernel of int4": Form(None, None, to("int4")),
}
FORMS = DOT | LINEAR


by_formula = partial(quantize, implementation="xla")  # where its kernel is not built, too
X, KERNEL, TO_INT8, NATIVE = draw("x", (2, 3, 64)), draw("kernel", (64, 48)), to("int8"), {"implementation": "native"}
W, KERNEL_8, Q8 = KERNEL.T, quantize_kernel(KERNEL, TO_INT8), by_formula(X, E4M3)
GROUPS, LYING = to("float8_e4m3fn", "groups of 32"), dataclasses.replace(by_formula(KERNEL, E4M3), transposed=True)
BAD_LINEAR = named(
    call(jnp.float32(1), KERNEL).raises(ValueError, "x is a scalar, expected", "K"),
    call(X[..., :32], KERNEL).raises(ValueError, r"\(2, 3, 32\) and kernel \(64, 48\)", "K must be the same"),
    call(X, W).raises(ValueError, r"\(2, 3, 64\) and kernel \(48, 64\)", "pass kernel.T"),
    call(X, jnp.stack([KERNEL] * 2)).raises(ValueError, r"kernel has shape \(2, 64, 48\)", "jax.vmap"),
    call(X, KERNEL[:, 0]).raises(ValueError, r"kernel has shape \(64,\), expected two axes \(K, N\)"),
    call(X, by_formula(KERNEL, E4M3)).raises(ValueError, "expected it transposed", "jaxnorm.quantize_kernel"),
    call(X, KERNEL_8).raises(TypeError, "kernel has values of int8", "or use jaxnorm.quantized_dot"),
    call(X, LYING).raises(ValueError, r"\(2, 3, 64\) and kernel \(48, 64\)"),
    call(X, quantize_kernel(KERNEL, GROUPS)).raises(ValueError, r"scales of shape \(48, 2\), expected \(48, 1\)"),
    call(by_formula(X, TO_INT8), KERNEL).raises(TypeError, "values of int8, expected float8_e4m3fn"),
    call(by_formula(X, GROUPS), KERNEL).raises(ValueError, "no scales of groups"),
    call(by_formula(X, E4M3, axis=0), KERNEL).raises(ValueError, "along the last axis"),
    call(X, KERNEL, recipe=E4M3).raises(TypeError, "recipe must be a jaxnorm.Float8Recipe"),
)
BAD_DOTS = named(
    call(X, KERNEL).raises(TypeError, "must be a jaxnorm.Quantized, as of", "quantize_kernel"),
    call(KERNEL_8, X).raises(TypeError, "x and kernel in each other's place"),
    call(KERNEL_8, KERNEL_8).raises(ValueError, r"x lies transposed, as a kernel of shape \(64, 48\)"),
    call(X, quantize_kernel(W, TO_INT8)).raises(ValueError, r"3, 64\) and kernel \(48, 64\)", "transpose"),
    call(X, by_formula(W, TO_INT8)).raises(ValueError, r"3, 64\) and kernel \(48, 64\)", "transpose"),
    call(X[..., :32], KERNEL_8).raises(ValueError, r"\(2, 3, 32\) and kernel \(64, 48\)", "the same"),
    call(jnp.float32(1), KERNEL_8).raises(ValueError, r"x has shape \(\)"),
    call(X, quantize_kernel(jnp.stack([KERNEL] * 2), TO_INT8)).raises(ValueError, r"\(2, 48, 64\)", "vmap"),
    call(X, quantize_kernel(KERNEL, to("int8", "groups of 32"))).raises(ValueError, "no scales of groups"),
    call(X, by_formula(KERNEL, TO_INT8)).raises(ValueError, r"64, 1\), expected \(1, 48\)", "_kernel"),
    call(Q8, KERNEL_8).raises(TypeError, "float8_e4m3fn and the kernel of int8"),
    call(by_formula(X, to("int4")), KERNEL_8).raises(TypeError, "expected int8 for x", "Only kernels have 4"),
)
LENGTHS = r"\(40, 64\), and cuBLASLt wants multiples of 16"
WITHOUT_KERNEL = {
    "quantized_dot": named(call(X, KERNEL_8).has_no_kernel("x is float32 .*, and cuBLASLt is taken for float8")),
    "float8_linear": named(call(X, KERNEL[:, :40]).has_no_kernel(LENGTHS)),
}


def rows_of(array):
    return f64(array).reshape(-1, array.shape[-1])


def rounded(how, array, axes):
    """What an array stands for that is quantised with a scale for what lies along these axes, in float64."""
    if how is None:
        return f64(array)
    values, scales = array_by_numpy(array, how, axes)
    return f64(values.astype(jnp.float32)) * f64(scales)


def folded(how, dy, factor, axes, along):
    """dy as it is rounded for one product, in float64, without the scales of the other factor that went into it."""
    _, scales = array_by_numpy(factor, how, along)
    scales = jnp.where(jnp.abs(factor).max(along, keepdims=True) == 0, 0, scales)
    with np.errstate(invalid="ignore"):
        return np.nan_to_num(rounded(how, dy.astype(jnp.float32) * scales, axes) / f64(scales))


def gradients_of(form, x, kernel, dy, *, rounds=True):
    """dx and dw of the rounded operands, dy rounded once for each product, or not at all; and their terms' sizes."""
    a, b = rounded(form.x, x, -1), rounded(form.kernel, kernel, 0)
    if form.recipe is None:  # its derivative multiplies what moves by the other in its own dtype
        a, b = f64(round_to(a, kernel.dtype)), f64(round_to(b, x.dtype))
    rounds = rounds and form.recipe is not None
    u = folded(form.x, dy, kernel, -1, 0) if rounds else dy
    is_wide = not rounds or form.recipe.weight_gradient == "compute"
    v = dy if is_wide else folded(form.x, dy, x, tuple(range(x.ndim - 1)), -1)
    factors = (rows_of(u), b.T), (rows_of(a).T, rows_of(v))
    return [(p @ q, np.abs(p) @ np.abs(q)) for p, q in factors]


def row(name, form):
    """Its derivative is by convention: forward mode rounds no tangent, reverse mode dy once for each product."""

    def exact(x, kernel, bias=None, *, out_dtype=None):
        a, b = rounded(form.x, x, -1), rounded(form.kernel, kernel, 0)
        addend = 0.0 if bias is None else f64(bias)
        y = a @ b + addend
        return Forward(y, round_to(y, np.dtype(out_dtype or x.dtype)), np.abs(a) @ np.abs(b) + np.abs(addend), 0.0)

    def exact_gradients(cotangents, x, kernel, bias=None, **_):
        (dy,) = cotangents
        (dx, of_dx), (dw, _) = gradients_of(form, x, kernel, dy)
        return {"x": (dx.reshape(x.shape), of_dx), "kernel": (dw, None), "bias": (rows_of(dy).sum(0), None)}

    def formula(x, kernel, bias=None):
        if form.recipe is None:
            x = x if form.x is None else formulas.rounded(x, form.x)
            y = x @ formulas.rounded(kernel.T, form.kernel).T
        else:
            y = formulas.float8_product(form.recipe, x, kernel)
        return (y if bias is None else y + bias,)

    mix = jnp.cos(jnp.arange(100.0)).reshape(10, 10)
    return Op(
        name=f"{'quantized_dot' if form.recipe is None else 'float8_linear'}, {name}",
        public="quantized_dot" if form.recipe is None else "float8_linear",
        kind="elements",
        operands=("x", "kernel", "bias"),
        arrays=1,
        shapes={"bias": lambda shape: shape[-1:]},
        dtypes=ALONE[: 1 if form == LINEAR["wide weight gradient"] else None],  # x is rounded to its own dtype again
        function=lambda *args, **options: (form(*args, **options),),
        formula=formula,
        as_norm=lambda function: lambda x, scale, bias=None: function(x, scale[:, None] * mix, bias)[0],
        exact=exact,
        exact_gradients=exact_gradients,
        small=Size((6, 10), (10, 10)),
        sizes=(
            Size((24, 96), (96, 48)),
            Size((4, 6, 128), (128, 33)),
            Size((300, 31), (31, 17)),
            Size((1, 64), (64, 300)),
        ),
        lengths=(Size((7, 31), (31, 17)), Size((24, 128), (128, 48))),
        statistics=0,
        is_product=True,
        numbers=(),
        bad_calls=BAD_DOTS if form.recipe is None else BAD_LINEAR,
        without_kernel=WITHOUT_KERNEL["quantized_dot" if form.recipe is None else "float8_linear"],
    )


PRODUCTS = tuple(row(name, form) for name, form in FORMS.items())
# The first of those whose rules differ.
EACH_PRODUCT = (PRODUCTS[0], PRODUCTS[2], *PRODUCTS[4:6])


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


# Of what all examples share the gradients are summed.
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


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
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
