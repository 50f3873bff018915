"""`linen.float8_linears`: the `Dense` layers that are called within compute `float8_linear`, with their parameters."""

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import bits, draw, draw_x
from flax_apis import assert_close, assert_gradients_close, scan_of_remat
from linears import DIMS, FEATURES
from linen_linears import CHANGED, LEFT_ALWAYS, Mixed

import jaxnorm
import jaxnorm.linen
from jaxnorm import Float8Recipe, Quantization, float8_dot_general, float8_linear
from jaxnorm.linen import float8_linears

pytestmark = pytest.mark.jax_version

COLUMNS = 32
E4M3 = Quantization(jnp.float8_e4m3fn)
RECIPES = {"default": Float8Recipe(), "other": Float8Recipe("tensor", "compute", power_of_two=True, save="inputs")}
LEFT = {
    **LEFT_ALWAYS,
    ("general",): (
        flax.linen.DenseGeneral,
        "only flax.linen.Dense is computed in float8: give this one dot_general=recipe.dot_general",
    ),
    ("einsum",): (flax.linen.Einsum, "only flax.linen.Dense is computed in float8"),
    ("embed",): (flax.linen.Embed, "only flax.linen.Dense is computed in float8"),
}


@pytest.fixture
def variables():
    return Mixed().init(jax.random.key(0), draw_x(DIMS))


def dense(**fields):
    layer = flax.linen.Dense(COLUMNS, bias_init=lambda key, shape, dtype: draw("bias", shape).astype(dtype), **fields)
    return layer, layer.init(jax.random.key(0), draw_x(DIMS))


def test_it_says_what_it_changed_and_left(variables):
    with float8_linears() as report:
        for _ in range(2):
            Mixed().apply(variables, draw_x(DIMS))
    assert dict(report.replaced) == CHANGED
    assert {path: (cls, why) for path, cls, why in report.left} == LEFT
    assert len(report.replaced) + len(report.left) == len(CHANGED | LEFT)


def test_it_makes_the_same_parameters(variables):
    with float8_linears():
        within = Mixed().init(jax.random.key(0), draw_x(DIMS))
    assert jax.tree.structure(within) == jax.tree.structure(variables)
    assert bits(within) == bits(variables)


def test_boxed_parameters_stay_boxed():
    init = flax.linen.with_partitioning(flax.linen.initializers.lecun_normal(), ("a", None))
    layer = flax.linen.Dense(COLUMNS, kernel_init=init)
    expected = layer.init(jax.random.key(0), draw_x(DIMS))
    with float8_linears():
        within = layer.init(jax.random.key(0), draw_x(DIMS))
        y = layer.apply(within, draw_x(DIMS))
    assert jax.tree.structure(within) == jax.tree.structure(expected)
    kernel, bias = expected["params"]["kernel"].unbox(), expected["params"]["bias"]
    assert bits(y) == bits(float8_linear(draw_x(DIMS), kernel, bias=bias))


def value_and_gradients(apply, variables, x, dy):
    """y and the gradients of the kernel, the bias and x, of one program."""

    @jax.jit
    def both(variables, x, dy):
        y, pull_back = jax.vjp(apply, variables, x)
        of_variables, dx = pull_back(dy.astype(y.dtype))
        return y, of_variables["params"]["kernel"], of_variables["params"]["bias"], dx

    return both(variables, x, dy)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_layer_is_the_function_of_its_parameters(recipe, dtype):
    layer, variables = dense(dtype=dtype)
    x, dy = draw_x(DIMS).astype(dtype), draw("dy", (*DIMS[:-1], COLUMNS))

    def within(variables, x):
        with float8_linears(recipe):
            return layer.apply(variables, x)

    def function(variables, x):
        kernel, bias = (variables["params"][name] for name in ("kernel", "bias"))
        return float8_linear(x, kernel, bias=bias, recipe=recipe)

    actual, expected = (value_and_gradients(apply, variables, x, dy) for apply in (within, function))
    assert [a.dtype for a in actual] == [dtype, jnp.float32, jnp.float32, dtype]
    assert bits(actual) == bits(expected)


@pytest.mark.parametrize("options", [{}, {"dtype": jnp.float16}, {"param_dtype": jnp.bfloat16}, {"use_bias": False}])
@pytest.mark.parametrize("x_dtype", [jnp.float32, jnp.bfloat16, jnp.int32])
def test_the_results_dtype_is_flaxs(options, x_dtype):
    layer, variables = dense(**options)
    x = draw_x(DIMS).astype(x_dtype)
    expected = layer.apply(variables, x)
    with float8_linears() as report:
        y = layer.apply(variables, x)
    assert report.left == []
    assert (y.dtype, y.shape) == (expected.dtype, expected.shape)


def test_dtypes_of_flax_alone_are_left():
    layer, variables = dense(param_dtype=jnp.complex64)
    with float8_linears() as report:
        y = layer.apply(variables, draw_x(DIMS))
    assert report.left == [((), flax.linen.Dense, "it is of complex64")]
    assert bits(y) == bits(layer.apply(variables, draw_x(DIMS)))


def test_it_holds_within_only(variables):
    def program():
        return str(jax.make_jaxpr(lambda x: Mixed().apply(variables, x))(draw_x(DIMS)))

    assert "float8" not in program()
    with float8_linears():
        assert program().count("jaxnorm_float8_linear_fwd[") == len(CHANGED)


def test_only_chooses_layers(variables):
    with float8_linears(only=lambda path, layer: path == ("last",)) as report:
        Mixed().apply(variables, draw_x(DIMS))
    assert dict(report.replaced) == {("last",): flax.linen.Dense}
    unasked = {path for path, _, why in report.left if why == "only is false of it"}
    assert unasked == CHANGED.keys() - {("last",)}


def test_it_goes_with_replace_norms(variables):
    with jaxnorm.linen.replace_norms() as norms, float8_linears() as report:
        y = Mixed().apply(variables, draw_x(DIMS))
    with float8_linears():
        expected = Mixed().apply(variables, draw_x(DIMS))
    assert dict(norms.replaced) == {("LayerNorm_0",): flax.linen.LayerNorm}
    assert dict(report.replaced) == CHANGED
    assert jnp.linalg.norm(y - expected) <= 0.05 * jnp.linalg.norm(expected)


def test_scan_of_remat():
    layer = scan_of_remat(lambda x: jnp.sin(flax.linen.Dense(FEATURES)(x)))
    x = draw_x(DIMS)
    variables = layer.init(jax.random.key(0), x, None)

    def run(variables):
        with float8_linears() as report:
            y = layer.apply(variables, x, None)[0]
        assert report.replaced == [(("Dense_0",), flax.linen.Dense)]
        return y.sum()

    def one_by_one(variables):
        y, parameters = x, variables["params"]["Dense_0"]
        for kernel, bias in zip(parameters["kernel"], parameters["bias"], strict=True):
            y = y + jnp.sin(float8_linear(y, kernel, bias=bias))
        return y.sum()

    ours, theirs = (jax.jit(jax.value_and_grad(function))(variables) for function in (run, one_by_one))
    assert_gradients_close(ours, theirs)


def test_it_captures_each_call_once(variables):
    with float8_linears():
        _, captured = Mixed().apply(variables, draw_x(DIMS), capture_intermediates=True)
    assert len(captured["intermediates"]["last"]["__call__"]) == 1


def test_it_decorates_a_function(variables):
    run = float8_linears()(lambda variables, x: Mixed().apply(variables, x))
    with float8_linears():
        expected = Mixed().apply(variables, draw_x(DIMS))
    assert bits(run(variables, draw_x(DIMS))) == bits(expected)


def test_a_quantised_norm_in_front():
    class Block(flax.linen.Module):
        @flax.linen.compact
        def __call__(self, x):
            norm = jaxnorm.linen.QuantizedRMSNorm(quantization=E4M3, straight_through=True)
            return flax.linen.Dense(COLUMNS)(norm(x))

    x = draw_x(DIMS)
    with float8_linears():
        variables = Block().init(jax.random.key(0), x)
        y = Block().apply(variables, x)
    kernel, bias = (variables["params"]["Dense_0"][name] for name in ("kernel", "bias"))
    quantized = jaxnorm.rms_norm_quantized(x, jnp.ones(FEATURES), quantization=E4M3)
    assert (kernel.shape, y.dtype) == ((FEATURES, COLUMNS), jnp.bfloat16)
    assert bits(y) == bits(float8_linear(quantized, kernel, bias=bias))


def test_a_dot_general_of_a_layer():
    layer, variables = dense(dtype=jnp.bfloat16, dot_general=float8_dot_general)
    x, parameters = draw_x(DIMS, "bfloat16"), variables["params"]
    expected = float8_linear(x, parameters["kernel"].astype(x.dtype)) + parameters["bias"].astype(x.dtype)
    assert bits(layer.apply(variables, x)) == bits(expected)
    assert flax.linen.Dense(4, dot_general=float8_dot_general) == flax.linen.Dense(
        4, dot_general=Float8Recipe().dot_general
    )


GENERAL = {
    "heads": ({"features": (4, 8)}, (3, 5, 16), 1),
    "from heads": ({"features": 16, "axis": (-2, -1)}, (3, 5, 4, 8), 2),
    "axes in front": ({"features": 16, "axis": (0, 1)}, (3, 5, 8), 2),
}


@pytest.mark.parametrize("name", GENERAL)
def test_a_dot_general_of_several_axes(name):
    fields, dims, summed = GENERAL[name]
    layer, x = flax.linen.DenseGeneral(**fields, dot_general=float8_dot_general), draw_x(dims)
    variables = layer.init(jax.random.key(0), x)
    kernel = variables["params"]["kernel"]
    axes = fields.get("axis", (-1,))
    rows = jnp.moveaxis(x, axes, range(-summed, 0))
    rows = rows.reshape(*rows.shape[:-summed], -1)
    y = float8_linear(rows, kernel.reshape(rows.shape[-1], -1))
    assert_close(layer.apply(variables, x), y.reshape(*y.shape[:-1], *kernel.shape[summed:]))


def test_a_dot_general_of_attention_trains():
    attention = flax.linen.MultiHeadDotProductAttention(
        4, qkv_dot_general=float8_dot_general, out_dot_general=float8_dot_general
    )
    plain, x = flax.linen.MultiHeadDotProductAttention(4), draw("x", (2, 8, FEATURES))
    variables = plain.init(jax.random.key(0), x)
    ours, theirs = (jax.jit(jax.grad(lambda v, m=m: (m.apply(v, x) ** 2).sum()))(variables) for m in (attention, plain))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        # Two layers each way, of 0.05 each. The gradient of the keys' bias is zero, whatever the layers are.
        assert jnp.linalg.norm(a - b) <= 0.2 * jnp.linalg.norm(b) + 1e-5


def test_a_dot_general_of_einsum():
    x, kernel = draw_x(DIMS), draw("kernel", (FEATURES, 2, 8))
    y = jnp.einsum("btd,dcf->btcf", x, kernel, _dot_general=float8_dot_general)
    assert_close(y, float8_linear(x, kernel.reshape(FEATURES, 16)).reshape(3, 4, 2, 8))


def test_a_report_of_nothing():
    with float8_linears() as report:
        flax.linen.LayerNorm().init(jax.random.key(0), draw_x(DIMS))
    assert str(report) == "nothing to replace in what was traced within"


def test_errors():
    with pytest.raises(TypeError, match=r"^float8_linears: recipe must be a jaxnorm.Float8Recipe, got Mixed"):
        float8_linears(Mixed())
    with pytest.raises(TypeError, match=r"^float8_linears: only must be a function of .*, got 'last'\.$"):
        float8_linears(only="last")
    layer, variables = dense()
    with float8_linears(), pytest.raises(flax.errors.ScopeParamShapeError):
        layer.apply(variables, np.ones((2, 3), np.float32))
