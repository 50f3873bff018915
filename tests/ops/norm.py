"""The norms of x: their rows, with one weight for all and with weights for each head; how these broadcast, ensembles.

And `multiply_before_cast=False`: x_hat is rounded to the narrower of the dtypes of what is normalised and the result.
"""

from dataclasses import replace
from functools import partial

import bad_calls
import cases
import formulas
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from coverage import cover, over
from hlo import compiled_text, count_native_calls
from internals import weights
from op import Op, Size, rows
from quantizing import QUANTIZED
from tolerances import DSCALE, DX, forward_errors, gradient_error, gradient_errors

import jaxnorm
from bench import shapes

# As the model hubs' Llama is with weights of float32: x_hat is rounded to x's dtype and the product is not.
HUB = {"multiply_before_cast": False, "out_dtype": np.dtype("float32")}
STATISTICS = {"rms": 1, "layer": 2}


def size_of(shape):
    dims = shapes.few_rows(shape).dims
    options = {} if shape.axes == 1 else {"axis": cases.axis_of(shape.axes)}
    return Size(dims, dims[len(dims) - shape.axes :], options)


def norm(kind):
    def function(*args, **options):
        return (cases.NORMS[kind](*args, **options),)

    def exact(x, scale=None, bias=None, *, axis=-1, out_dtype=None, **options):
        return oracle.forward(
            kind, x, scale, bias, axes=np.size(axis), out_dtype=np.dtype(out_dtype or x.dtype), **options
        )

    def exact_gradients(dy, x, scale=None, bias=None, *, axis=-1, **options):
        axes = np.size(axis)
        weight = scale if scale is not None else bias
        lead = () if weight is None else weight.shape[: weight.ndim - axes]
        options = {name: value for name, value in options.items() if name in ("epsilon", "scale_offset")}
        found = oracle.gradients(kind, x, dy[0], scale, axes=axes, lead=lead, **options)
        return {"x": (found.dx, found.dx_terms), "scale": (found.dscale, None), "bias": (found.dbias, None)}

    return Op(
        name=kind,
        public=f"{kind}_norm",
        kind=kind,
        operands=("x", "scale", "bias"),
        arrays=1,
        dtypes=cases.ALONE,
        function=function,
        formula=lambda *args, **options: (formulas.norm(kind)(*args, **options),),
        exact=exact,
        exact_gradients=exact_gradients,
        small=rows(6, 10),
        sizes=(*map(size_of, (*shapes.MODELS, *shapes.DECODE, *shapes.ODD, *shapes.RANKS, *shapes.grid(itemsize=4))),),
        # 0 is a legal epsilon; 1e-12 is BERT's, 1e-5 Llama's, 1 is seen in the output's first digit.
        options=(
            *({"epsilon": epsilon} for epsilon in (0.0, 1e-12, 1e-5, 1.0)),
            *({"scale_offset": 1.0}, {"multiply_before_cast": False}, HUB),
        ),
        # Rows beyond the number of partial sums that dscale is made of, and a number of rows that it does not divide.
        # And long rows, more of them than the kernel by columns has blocks.
        backward_sizes=(rows(4099, 8), rows(2000, 129), rows(70_001, 3), rows(9, 200_000)),
        lengths=tuple(
            rows(max(5, min(65, 2**18 // cols)), cols)
            for cols in (1, 31, 128, 1021, 4096, 16_384, 65_536, 100_003, 262_144)
        ),
        many=tuple(rows(600, cols) for cols in (128, 384, 768, 1021, 2048, 2880, 5120, 5376, 8192, 16_384)),
        kept=("x", "scale"),
        statistics=STATISTICS[kind],
        bad_calls=bad_calls.NORM | bad_calls.MISUSE[f"{kind}_norm"],
        without_kernel=bad_calls.NORM_WITHOUT_KERNEL,
    )


def by_head(function):
    """The op by a call for each head, whose axis is the weights' first."""

    def unfused(*args, **options):
        *arrays, scale, bias = args
        compiled = jax.jit(partial(function, **options))
        axis = arrays[0].ndim - scale.ndim
        calls = [
            compiled(*(jnp.take(a, i, axis) for a in arrays), scale[i].reshape(-1), bias[i].reshape(-1))
            for i in range(scale.shape[0])
        ]
        return tuple(jnp.stack(results, axis) for results in zip(*calls, strict=True))

    return unfused


# Weights for each head. Heads whose rows alternate, come in stretches, are one for each head; few rows and so many that
# there are several partial sums; no whole vector, and several; more heads than a task has.
HEADS = (
    *(Size((2, 9, 4, 64), (4, 64)), Size((2, 9, 4, 64), (1, 1, 1, 64)), Size((2, 4, 9, 128), (4, 1, 128))),
    *(Size((2, 4, 9, 128), (1, 4, 1, 128)), Size((3, 40, 100), (3, 1, 100)), Size((3, 5, 7, 256), (3, 5, 1, 256))),
    *(Size((3, 1, 5, 2, 1000), (3, 1, 5, 1, 1000)), Size((40, 100), (40, 100)), Size((3, 700, 256), (700, 256))),
    *(Size((1100, 7, 64), (7, 64)), Size((2, 3, 700, 128), (3, 1, 128)), Size((2, 2500, 100), (2, 1, 100))),
)


def per_head(kind):
    op = norm(kind)

    def as_norm(f):
        def function(x, scale=None, bias=None):
            weights = [None if weight is None else weight.reshape(2, 5) for weight in (scale, bias)]
            return f(x.reshape(*x.shape[:-1], 2, 5), *weights)[0].reshape(x.shape)

        return function

    return replace(
        op,
        name=f"{kind} per head",
        as_norm=as_norm,
        unfused=by_head(op.function),
        has_unfused_gradients=True,
        small=Size((6, 2, 5), (2, 5)),
        sizes=HEADS,
        unfused_sizes=tuple(HEADS[i] for i in (0, 2, 4, 9, 10, 11)),
        options=({"multiply_before_cast": False, "scale_offset": 1.0}, HUB),
        backward_sizes=(),
        lengths=(Size((9, 7, 3, 64), (3, 64)), Size((9, 3, 7, 100), (3, 1, 100)), HEADS[8], HEADS[10]),
        many=(),
    )


def norm_of_sum(f):
    """A norm of x alone of one that adds first."""

    def function(x, scale=None, bias=None):
        y, total = f(x, jnp.cos(x), scale, bias)
        return y * jnp.sin(total)

    return function


ALL = tuple(norm(kind) for kind in cases.KINDS)
PER_HEAD = tuple(per_head(kind) for kind in cases.KINDS)


# Each operand alone, of a dtype of its own; and the two with other leads, which are broadcast to the same.
@cover(
    kind=cases.KINDS,
    dims=[((4, 64), None), (None, (4, 64)), ((4, 64), (64,)), ((1, 64), (3, 4, 64)), ((3, 1, 64), (4, 64))],
)
def test_scale_and_bias_of_different_shapes(kind, dims):
    scale_dims, bias_dims = dims
    x, dy = cases.draw_x((2, 3, 4, 64), "bfloat16"), cases.draw("dy", (2, 3, 4, 64), "bfloat16")
    scale = None if scale_dims is None else cases.draw_scale(scale_dims, "bfloat16")
    bias = None if bias_dims is None else cases.draw_bias(bias_dims, "float16")

    y, (dx, *of_weights) = jax.jit(cases.with_gradients(cases.NORMS[kind]))(dy, x, scale, bias)
    assert forward_errors(y, oracle.forward(kind, x, scale, bias, out_dtype=x.dtype)) == []
    assert gradient_error(dx, oracle.gradients(kind, x, dy, scale).dx, DX) <= 1
    for which, weight, gradient in zip(("dscale", "dbias"), (scale, bias), of_weights, strict=True):
        if weight is not None:
            assert (gradient.shape, gradient.dtype) == (weight.shape, weight.dtype)
            exact = oracle.gradients(kind, x, dy, scale, lead=weight.shape[:-1])
            assert gradient_error(gradient, getattr(exact, which), DSCALE) <= 1


# So many rows that blocks of a GPU take several turns: by vectors, by elements, with rows left over.
@pytest.mark.on_emulator
@cover(
    kind=cases.KINDS,
    dtype=["bfloat16", "float32"],
    adds=[False, True],
    dims=[(9, 250, 1152), (4, 300, 64), (3, 200, 521)],
)
@pytest.mark.needs("kernels")
def test_weights_for_each_of_several_examples(kind, dtype, adds, dims):
    examples, _, cols = dims
    x, dy = cases.draw_x(dims, dtype), cases.draw("dy", dims, dtype)
    dsum = cases.draw_residual(dims, dtype)
    scale, bias = cases.draw_scale((examples, 1, cols), dtype), cases.draw_bias((examples, 1, cols), dtype)

    @jax.jit
    def gradients(x, dy, dsum, scale, bias):
        add, alone = (partial(norms[kind], implementation="native") for norms in (cases.ADDS, cases.NORMS))
        if adds:
            return jax.vjp(lambda x, *of: add(jnp.zeros_like(x), x, *of), x, scale, bias)[1](
                jaxnorm.AddedNorm(dy, dsum)
            )
        return jax.vjp(alone, x, scale, bias)[1](dy)

    dx, dscale, dbias = gradients(x, dy, dsum, scale, bias)
    for i in range(examples):
        alone = gradients(x[i], dy[i], dsum[i], scale[i, 0], bias[i, 0])
        assert cases.bits(dx[i]) == cases.bits(alone[0])
    exact = oracle.gradients(kind, x, dy, scale, lead=scale.shape[:-1])
    assert gradient_error(dscale, exact.dscale, DSCALE) <= 1
    assert gradient_error(dbias, exact.dbias, DSCALE) <= 1


@pytest.mark.parametrize("kind", cases.KINDS)
def test_several_normalised_axes(kind):
    x, scale = cases.draw_x((3, 4, 5, 8)), cases.draw_scale((4, 5, 8))
    y = jax.jit(lambda x, scale: cases.NORMS[kind](x, scale, axis=(-2, -1)))(x, scale)
    assert forward_errors(y, oracle.forward(kind, x, scale, axes=2, out_dtype=x.dtype)) == []


def mean_loss(function):
    return lambda *args: jnp.sin(function(*args)[0]).mean()


# Models side by side, each with its weights; the gradients of each example, by weights that all share or of its own.
# Which of scale and bias have an axis of models, and what is done.
ENSEMBLES = {
    "grad of an ensemble": ((True, True), lambda f: jax.grad(lambda *args: jax.vmap(f)(*args).sum(), (0, 1, 2))),
    "grads of an ensemble": ((True, True), lambda f: jax.vmap(jax.grad(f, (0, 1, 2)))),
    "grads of every example": ((False, False), lambda f: jax.vmap(jax.grad(f, (0, 1, 2)), (0, None, None))),
    "grads of every example, in another axis": (
        (False, False),
        lambda f: lambda x, s, b: jax.vmap(jax.grad(f, (1, 2)), (1, None, None))(jnp.swapaxes(x, 0, 1), s, b),
    ),
    "scales alone": ((True, False), lambda f: jax.vmap(jax.grad(f, (0, 1)), (0, 0, None))),
    "biases alone": ((False, True), lambda f: jax.vmap(jax.grad(f, (0, 2)), (0, None, 0))),
}


@over(ALL, ensemble=lambda op: ENSEMBLES)
def test_an_ensemble_is_one_call_each_way(op, ensemble):
    has_own, transform = ensemble
    dims = [(3, 40) if own else (40,) for own in has_own]
    args = cases.draw_x((3, 8, 40)), cases.draw_scale(dims[0]), cases.draw_bias(dims[1])
    actual = jax.jit(transform(mean_loss(op.function)))
    assert count_native_calls(compiled_text(actual, *args)) == op.calls(fwd=1, bwd=1)
    cases.assert_near(actual(*args), jax.jit(transform(mean_loss(op.formula)))(*args), atol=1e-6)


# Where no kernel has the heads of a batch, XLA's code runs for what is of each example.
NO_SUCH_HEADS = {
    "heads inside an ensemble": (Size((3, 5, 4, 40), (4, 40)), (0, None, None)),
    "heads inside an ensemble of weights": (Size((3, 5, 4, 40), (3, 4, 40)), (0, 0, 0)),
    "examples of one row": (Size((6, 40), (40,)), (0, None, None)),
    "long rows": (Size((2, 3, 8200), (2, 8200)), (0, 0, 0)),
}


@over(ALL, batch=lambda op: NO_SUCH_HEADS)
def test_a_batch_of_heads_without_a_kernel(op, batch):
    size, in_axes = batch
    args = op.draw(size)
    actual, expected = (
        jax.jit(jax.vmap(jax.grad(mean_loss(function), (0, 1, 2)), in_axes))(*args)
        for function in (op.function, op.formula)
    )
    cases.assert_near(actual, expected, atol=1e-6)


@over(ALL, size=lambda op: [Size((3, 4, 5, 8), (3, 1, 5, 8)), Size((2, 8200), (2, 8200))])
def test_the_formula_where_there_is_no_kernel(op, size):
    x, scale, bias = op.draw(size)
    y, pullback = jax.vjp(lambda *args: op.function(*args)[0], x, scale, bias)
    dscale = pullback(x)[1]
    assert forward_errors(y, op.exact(x, scale, bias)) == []
    exact = oracle.gradients(op.kind, x, x, scale, lead=size.weights[:-1])
    assert gradient_error(dscale, exact.dscale, DSCALE) <= 1


@pytest.mark.parametrize("kind", cases.KINDS)
def test_a_quantised_norm(kind):
    norm = QUANTIZED[kind]
    x, scale, bias = cases.draw_x((3, 4, 64)), cases.draw_scale((4, 64)), cases.draw_bias((4, 64))
    to = jaxnorm.Quantization(jnp.int8)
    q = norm(x, scale, bias=bias, quantization=to)
    for head in range(4):
        of_head = norm(x[:, head], scale[head], bias=bias[head], quantization=to, implementation="xla")
        np.testing.assert_allclose(q.scales[:, head], of_head.scales, rtol=1e-5)
        np.testing.assert_allclose(q.values[:, head].astype("int32"), of_head.values.astype("int32"), atol=1)
    assert cases.bits(norm(x, scale[:1], quantization=to)) == cases.bits(norm(x, scale[0], quantization=to))


# (count, inner): rows r of x with the weights r // inner % count.
@pytest.mark.parametrize(
    ("shape", "axes", "lead", "expected"),
    [
        *(((2, 3, 5, 8), 1, (), (1, 1)), ((2, 3, 5, 8), 1, (5,), (5, 1)), ((2, 3, 5, 8), 1, (3, 1), (3, 5))),
        *(((2, 3, 5, 8), 1, (2, 1, 1), (2, 15)), ((2, 3, 5, 8), 1, (2, 3, 5), (30, 1))),
        *(((2, 3, 5, 8), 2, (2, 1), (2, 3)), ((2, 3, 0, 8), 1, (3, 1), (3, 1))),
    ],
)
def test_heads_of_a_shape(shape, axes, lead, expected):
    assert weights.unsupported(shape, axes, lead) is None
    assert weights.heads_of(shape, axes, lead) == expected


DIMS, HALF, IMPLEMENTATIONS = (6, 5, 160), ("bfloat16", "float16"), ("native", "xla", None)


def of_hub(kind, x, scale, bias=None, *, scale_offset=0.0, out_dtype="float32"):
    """Cast to the input's dtype, then multiplied, as the model hubs' classes do."""
    x_hat = oracle.round_to(oracle.forward(kind, x, out_dtype=np.dtype("float64")).exact, x.dtype)
    y = np.asarray(x_hat, np.float32) * (np.asarray(scale, np.float32) + np.float32(scale_offset))
    return np.asarray(y if bias is None else y + np.asarray(bias, np.float32), out_dtype)


def assert_rounded_alike(y, expected):
    """Sums in another order may move a rounding of x_hat, of one element in a thousand."""
    assert (y.shape, y.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_allclose(y, expected, 0.02, 1e-6)
    apart = np.abs(np.asarray(y, np.float64) - np.asarray(expected, np.float64))
    assert np.mean(apart > 4e-7 * np.abs(expected) + 1e-6) < 1e-3


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("weights", ["float32", "same", "for each head"])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("kind", cases.KINDS)
def test_a_wide_result_is_of_a_rounded_x_hat(kind, dtype, weights, implementation):
    shape, weight = DIMS[1 if weights == "for each head" else 2 :], dtype if weights == "same" else "float32"
    x, scale, bias = cases.draw_x(DIMS, dtype), cases.draw_scale(shape, weight), cases.draw_bias(shape, weight)
    options = {"multiply_before_cast": False, "out_dtype": "float32", "implementation": implementation}
    y = jax.jit(partial(cases.NORMS[kind], scale_offset=0.5, **options))(x, scale, bias)
    assert_rounded_alike(y, of_hub(kind, x, scale, bias, scale_offset=0.5))


SUMS = {
    **{f"{kind}, to {to}": (kind, partial(cases.ADDS[kind], pad_to=to)) for kind in cases.KINDS for to in (None, 64)},
    "two norms": ("rms", lambda x, r, scale, **o: jaxnorm.rms_norm_add_rms_norm(x, r, scale, scale, **o)),
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", SUMS)
def test_so_it_is_of_a_sum(name, implementation):
    (kind, function), scale = SUMS[name], cases.draw_scale(DIMS[-1:])
    norm = jax.jit(partial(function, multiply_before_cast=False, implementation=implementation))
    y, total = norm(cases.draw_x(DIMS), cases.draw_residual(DIMS, "bfloat16"), scale)
    assert_rounded_alike(y[..., : DIMS[-1]], of_hub(kind, total, scale))
    assert not y[..., DIMS[-1] :].any()


def test_a_wide_x_is_rounded_to_a_narrow_result():
    x, scale = cases.draw_x(DIMS), cases.draw_scale(DIMS[-1:])
    y = cases.NORMS["rms"](x, scale, multiply_before_cast=False, out_dtype="bfloat16")
    x_hat = oracle.round_to(oracle.forward("rms", x, out_dtype=np.dtype("float64")).exact, jnp.bfloat16)
    expected = jnp.asarray(np.asarray(x_hat, np.float32) * np.asarray(scale)).astype(jnp.bfloat16)
    assert np.mean(np.asarray(y != expected)) < 1e-3


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("op", ALL, ids=str)
def test_gradients_take_no_note_of_the_rounding(op, dtype, implementation):
    args = op.draw(rows(*DIMS), (dtype,))
    cotangents, function = op.cotangents(args, **HUB), partial(op.function, implementation=implementation, **HUB)
    step = jax.jit(lambda cotangents, *args: jax.vjp(function, *args)[1](cotangents)).lower(cotangents, *args).compile()
    assert count_native_calls(step.as_text()) == (op.calls(fwd=1, bwd=1) if implementation != "xla" else {})
    assert gradient_errors(op, step(cotangents, *args), cotangents, args, **HUB) == {}
