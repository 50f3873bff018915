"""The norms of branch_scale * x + residual: the product is rounded before, and has XLA's gradients."""

import itertools
from dataclasses import replace
from functools import partial

import formulas
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ADDS, DTYPES, bits, draw, draw_branch_scale, draw_residual, draw_x
from coverage import cover, over
from hlo import compiled_text, count_native_calls
from native import target
from op import Size, rows
from quantizing import QUANTIZED, assert_same, sum_of, to
from tolerances import DSCALE, gradient_error

import jaxnorm
from ops.added_norm import added
from ops.norm import norm_of_sum


def scaled(kind):
    """One row of branch_scale for all, one for each example, one for each row."""

    def function(x, residual, scale=None, bias=None, branch_scale=None, **options):
        return ADDS[kind](x, residual, scale, bias, branch_scale=branch_scale, **options)

    def unfused(x, residual, scale, bias, branch_scale, **options):
        total = sum_of(x, residual, branch_scale)
        return added(kind).unfused(jnp.zeros_like(x), total, scale, bias, **options)

    def formula(x, residual, scale=None, bias=None, branch_scale=None):
        branch = x if branch_scale is None else branch_scale * x
        return formulas.added(kind)(branch, residual, scale, bias)

    def as_norm(f):
        return norm_of_sum(lambda x, *others: f(x, *others, jnp.sin(jnp.arange(1.0, 1 + x.shape[-1]))))

    return replace(
        added(kind),
        name=f"scaled {kind}",
        operands=("x", "residual", "scale", "bias", "branch_scale"),
        function=function,
        formula=formula,
        as_norm=as_norm,
        exact=None,
        exact_gradients=None,
        unfused=unfused,
        sizes=(
            *(rows(7, cols) for cols in (1, 24, 128, 257, 1024, 4096, 4097, 40_000)),
            *(rows(2048, 4096), Size((3, 4, 64), (3, 1, 64)), Size((3, 5, 1152), (3, 1, 1152))),
            *(Size((3, 4, 64), (3, 4, 64)), Size((2, 3, 4, 64), (2, 3, 1, 64))),
        ),
        options=({"scale_offset": 1.0}, {"multiply_before_cast": False}, {"out_dtype": np.dtype("float32")}),
        gradients=("dx", "dx", "dscale", "dbias", "dx"),
        kept=("x", "residual", "scale", "branch_scale"),
        bad_calls={},
    )


SCALED = (scaled("layer"), scaled("rms"))
DIMS = (3, 8, 64)


# As LayerScale has it, adaLN-Zero, and a weight for each row.
SHAPES = {str(shape): shape for shape in ((64,), (3, 1, 64), (1, 1, 64), (3, 8, 64), (1, 8, 64))}


@cover(implementation=("native", "xla"), dtype=DTYPES, scale_dtype=DTYPES, shape=SHAPES)
@pytest.mark.needs("kernels")
def test_the_product_is_rounded_before_it_is_added(implementation, dtype, scale_dtype, shape):
    x, residual = draw_x(DIMS, dtype), draw_residual(DIMS, dtype)
    branch_scale = draw_branch_scale(shape, scale_dtype)
    function = partial(jaxnorm.add_rms_norm, implementation=implementation)
    _, total = jax.jit(lambda *args: function(args[0], args[1], branch_scale=args[2]))(x, residual, branch_scale)
    assert_same((total,), (sum_of(x, residual, branch_scale),))


# As though the sum were a norm's operand by itself: so the gradient of x is a product with that of the residual.
@over(SCALED, dtypes=lambda op: op.dtypes, size=lambda op: [rows(33, 1021), Size((3, 40, 64), (3, 1, 64))])
def test_gradients_are_those_of_two_lines(op, dtypes, size):
    x, residual, scale, bias, branch_scale = op.draw(size, dtypes)
    cotangents = op.cotangents((x, residual, scale, bias, branch_scale))
    _, pullback = jax.vjp(op.function, x, residual, scale, bias, branch_scale)
    dx, dresidual, *_, dbranch = jax.jit(pullback)(cotangents)
    total = sum_of(x, residual, branch_scale)
    _, of_norm = jax.vjp(partial(ADDS[op.kind], jnp.zeros_like(x)), total, scale, bias)
    assert bits(dresidual) == bits(jax.jit(of_norm)(jaxnorm.AddedNorm(*cotangents))[0])
    wide = np.asarray(dresidual, np.float64)
    assert bits(dx) == bits(jnp.asarray((np.asarray(branch_scale, np.float64) * wide).astype(np.float32), x.dtype))
    exact = (wide * np.asarray(x, np.float64)).sum(0 if branch_scale.ndim == 1 else 1).reshape(branch_scale.shape)
    assert gradient_error(dbranch, exact, DSCALE) <= 1


@over(SCALED, dtype=lambda op: DTYPES)
def test_a_gradient_is_one_native_call_each_way(op, dtype):
    args = op.draw(Size(DIMS, (3, 1, 64)), (dtype, dtype), dtype)
    assert count_native_calls(compiled_text(op.gradient(), *args)) == op.calls(fwd=1, bwd=1)


@cover(function=QUANTIZED, straight_through=(False, True), shape=SHAPES, dtype=DTYPES)
def test_quantised(function, straight_through, shape, dtype):
    x, residual = draw_x(DIMS, dtype), draw_residual(DIMS, dtype)
    branch_scale, scale = draw_branch_scale(shape, dtype), draw("scale", DIMS[-1:], dtype, 1.0)
    quantize = jax.jit(partial(function, quantization=to("float8_e4m3fn"), straight_through=straight_through))
    result, total = quantize(x, scale, residual=residual, branch_scale=branch_scale)
    expected = sum_of(x, residual, branch_scale)
    assert_same((total,), (expected,))
    assert_same((result.values, result.scales), (quantize(expected, scale).values, quantize(expected, scale).scales))


@pytest.mark.needs("kernels")
def test_a_quantised_sum_is_one_native_call():
    x, branch_scale = draw_x(DIMS), draw_branch_scale((3, 1, 64))

    def function(x, branch_scale):
        return jaxnorm.rms_norm_quantized(x, residual=x, branch_scale=branch_scale, quantization=to("int8"))[:2]

    assert count_native_calls(compiled_text(function, x, branch_scale)) == {target("rms", "quantized_fwd"): 1}


@cover(dtype=DTYPES, shape=SHAPES)
def test_in_a_sandwich_it_multiplies_the_first_norm(dtype, shape):
    x, residual = draw_x(DIMS, dtype), draw_residual(DIMS, dtype)
    branch_scale, scale = draw_branch_scale(shape, dtype), draw("scale", DIMS[-1:], dtype, 1.0)
    y, total = jax.jit(partial(jaxnorm.rms_norm_add_rms_norm))(x, residual, scale, scale, branch_scale=branch_scale)
    normed = jax.jit(jaxnorm.rms_norm)(x, scale)
    expected = jax.jit(jaxnorm.add_rms_norm)(normed, residual, scale, branch_scale=branch_scale)
    assert_same((y, total), expected)


X = jnp.ones((4, 4, 8))
BAD = {
    "(B, D)": (jnp.ones((4, 8)), r"branch_scale has shape \(4, 8\).*Reshape it to \(4, 1, 8\)"),
    "(B, 1, 1)": (jnp.ones((4, 1, 1)), r"branch_scale has shape \(4, 1, 1\), expected \(8,\)"),
    "another batch": (jnp.ones((3, 1, 8)), r"branch_scale has shape \(3, 1, 8\)"),
    "a number": (2.0, r"branch_scale must be an array.*it is an array of x's features or of x's shape"),
    "a scalar": (jnp.float32(2), r"branch_scale has shape \(\).*it is an array of x's features or of x's shape"),
}
FUNCTIONS = {
    "add_rms_norm": jaxnorm.add_rms_norm,
    "add_layer_norm": jaxnorm.add_layer_norm,
    "rms_norm_add_rms_norm": jaxnorm.rms_norm_add_rms_norm,
    "rms_norm_quantized": lambda x, r, **o: jaxnorm.rms_norm_quantized(x, residual=r, quantization=to("int8"), **o),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_wrong_shapes(name, bad):
    value, message = BAD[bad]
    with pytest.raises((ValueError, TypeError), match=f"^{name}: {message}"):
        FUNCTIONS[name](X, X, branch_scale=value)


def test_without_a_residual():
    with pytest.raises(ValueError, match=r"^rms_norm_quantized: branch_scale without residual"):
        jaxnorm.rms_norm_quantized(X, branch_scale=jnp.ones(8), quantization=to("int8"))


@pytest.mark.needs("kernels")
def test_rows_of_weights_that_are_not_neighbours_have_no_kernel():
    with pytest.raises(RuntimeError, match="not neighbours"):
        jaxnorm.add_rms_norm(
            jnp.ones((2, 3, 4, 8)), jnp.ones((2, 3, 4, 8)), branch_scale=jnp.ones((2, 1, 4, 8)), implementation="native"
        )


OF_SCALE = {"(D,)": (64,), "(T, D)": (8, 64)}


@over(
    SCALED,
    shape=lambda _: SHAPES,
    of_scale=lambda _: OF_SCALE,
    dtypes=lambda _: [*itertools.product(DTYPES, DTYPES)],
    is_mapped=lambda _: [False, True],
)
def test_each_weight_is_kept_as_it_came(op, shape, of_scale, dtypes, is_mapped):
    shape = shape[1:] if is_mapped and shape[0] == 1 else shape
    x, residual = draw_x(DIMS, dtypes[0]), draw_residual(DIMS, dtypes[0])
    scale, bias = (draw(name, of_scale, dtypes[0], 1.0) for name in ("scale", "bias"))
    args = x, residual, scale, bias, draw_branch_scale(shape, dtypes[1])
    axis = 0 if shape[0] == DIMS[0] else None
    function = jax.vmap(op.function, (0, 0, None, None, axis)) if is_mapped else op.function
    pullback = jax.eval_shape(lambda *args: jax.vjp(function, *args)[1], *args)
    found = sorted((leaf.size, leaf.dtype.name) for leaf in jax.tree.leaves(pullback) if leaf.size > 1)
    kept = [(args[i].size, args[i].dtype.name) for i in map(op.operands.index, op.kept)]
    assert found == sorted([*kept, *[(24, "float32")] * op.statistics])
