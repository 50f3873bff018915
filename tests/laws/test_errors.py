"""Bad input: each a clear error while tracing, which names the argument, what came, what was expected."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bad_calls import IDS, LABELS, OF_NO_ROW, SCALE, TABLE, TOKENS, X, in_order, valid
from coverage import cover, over
from flax import nnx
from op import call
from ops.products_calls import BAD_CALLS as OF_PRODUCTS
from ops.quantize import BAD_CALLS as BAD_QUANTIZE
from table import ADDED, EVERY, GATED_QUANTIZED, NORMS, QUANTIZED, QUANTIZED_ACTIVATIONS

import jaxnorm
from jaxnorm import Quantization

TOKEN = Quantization("int8")
OF_EACH_FUNCTION = list({op.public: op for op in reversed(EVERY)}.values())  # the first of each
WITH_QUANTIZATION = (*QUANTIZED, *GATED_QUANTIZED, *QUANTIZED_ACTIVATIONS)


def public(op):
    """The public function, and what it wants beside its arguments."""
    function = getattr(jaxnorm, op.public)
    return partial(function, quantization=TOKEN) if op in WITH_QUANTIZATION else function


def test_each_function_has_calls_without_a_kernel():
    assert all(op.without_kernel for op in OF_EACH_FUNCTION)


@over(OF_EACH_FUNCTION, name=lambda op: list(op.bad_calls))
def test_bad_input(op, name):
    """While tracing, too."""
    args, keywords, error, parts = op.bad_calls[name]
    with pytest.raises(error, match=in_order(op.public, parts)):
        public(op)(*args, **keywords)
    if args and isinstance(args[0], jax.Array):
        with pytest.raises(error, match=in_order(op.public, parts)):
            jax.eval_shape(lambda x: public(op)(x, *args[1:], **keywords), args[0])


@over(OF_EACH_FUNCTION, name=lambda op: list(op.without_kernel))
def test_native_by_name_where_there_is_no_kernel(op, name):
    args, keywords, reason = op.without_kernel[name]
    with pytest.raises(RuntimeError, match=rf"(?s)^{op.public}: .*native.*{reason}.*implementation=None"):
        jax.eval_shape(partial(public(op), implementation="native", **keywords), *args)


@over(OF_EACH_FUNCTION, name=lambda op: list(op.without_kernel))
def test_by_default_the_formula_where_there_is_no_kernel(op, name):
    args, keywords, _ = op.without_kernel[name]
    function = partial(public(op), **keywords, **({"straight_through": True} if op in WITH_QUANTIZATION else {}))

    def loss(x):
        return sum(leaf.astype("float32").sum() for leaf in jax.tree.leaves(function(x, *args[1:])))

    assert jax.tree.map(jnp.shape, jax.grad(loss)(args[0])) == jax.tree.map(jnp.shape, args[0])
    y = jax.tree.leaves(function(*args))[0]
    expected = jax.tree.leaves(jax.eval_shape(partial(function, implementation="xla"), *args))[0]
    assert (y.shape, y.dtype) == (expected.shape, expected.dtype)


@over(NORMS, dtype=lambda op: [np.longdouble, object])
def test_numpy_dtypes_that_jax_does_not_have(op, dtype):
    with pytest.raises(TypeError, match=in_order(op.public, ("x", "floating", np.dtype(dtype).name))):
        public(op)(np.ones(8, dtype))


@over(OF_EACH_FUNCTION, argument=lambda op: [*op.numbers, *["pad_to"] * (op in ADDED)])
def test_a_traced_number(op, argument):
    with pytest.raises(TypeError, match=in_order(op.public, (argument, "known while tracing"))):
        jax.jit(lambda value: public(op)(**valid(op.public) | {argument: value}))(1)


def test_errors_from_within_stay_what_they_are():
    class Broken:
        def __jax_array__(self):
            raise TypeError("got an unexpected keyword argument of its own")

    with pytest.raises(TypeError, match=r"^got an unexpected keyword argument of its own$"):
        jaxnorm.rms_norm(X, Broken())


BAD_OF_NO_ROW = OF_NO_ROW | OF_PRODUCTS | {"quantize": BAD_QUANTIZE}


@pytest.mark.parametrize(("of", "name"), [(of, name) for of, calls in BAD_OF_NO_ROW.items() for name in calls])
def test_a_bad_call_of_no_row(of, name):
    args, keywords, error, parts = BAD_OF_NO_ROW[of][name]
    with pytest.raises(error, match=in_order(of, parts)):
        getattr(jaxnorm, of)(*args, **keywords)


def test_how_many_segments_there_are_is_known_while_tracing():
    with pytest.raises(TypeError, match=r"^segment_sum: num_segments must be known while tracing.*Python int"):
        jax.jit(jaxnorm.segment_sum)(X, IDS, 5)
    with pytest.raises(TypeError, match=r"^segment_sum: segment_ids are traced, and num_segments .* pass an int"):
        jax.jit(jaxnorm.segment_sum)(X, IDS)
    nowhere = IDS - 1
    assert jax.jit(lambda x: jaxnorm.segment_sum(x, nowhere))(X).shape == (0, 4, 8)


# Of rows with an index, and of draws: the function, its first argument, and why no kernel serves it.
SYMBOLIC = jax.export.symbolic_shape("rows, cols")
WITHOUT_KERNEL = [
    ("embedding", jax.ShapeDtypeStruct((5, 8), "float64"), "the rows are float64, kernels take bfloat16, float16, f"),
    ("embedding", jax.ShapeDtypeStruct(SYMBOLIC, "float32"), r"the sums have a symbolic shape \(rows, cols\)"),
    ("segment_sum", jax.ShapeDtypeStruct((3, 8), "float64"), "the rows are float64"),
    ("segment_sum", jax.ShapeDtypeStruct((3, 8), "int32"), "data is int32"),
    ("segment_sum", jax.ShapeDtypeStruct((3, 8), "complex64"), "data is complex64"),
    ("segment_sum", jax.ShapeDtypeStruct((3, SYMBOLIC[1]), "float32"), r"the sums have a symbolic shape \(5, cols\)"),
    ("sample", jax.ShapeDtypeStruct((3, 8), "float64"), "x is float64, kernels take bfloat16, float16, f"),
    ("sample", jax.ShapeDtypeStruct((3, 0), "float32"), "a normalised axis has length 0"),
]


@pytest.mark.parametrize(("name", "array", "reason"), WITHOUT_KERNEL)
def test_native_by_name_of_no_row(name, array, reason):
    of = {"embedding": {"ids": IDS}, "segment_sum": {"segment_ids": IDS, "num_segments": 5}, "sample": {"uniform": 0.5}}
    function = partial(getattr(jaxnorm, name), **of[name])
    with jax.enable_x64(True):
        with pytest.raises(RuntimeError, match=rf"^{name}: .*native.*: {reason}.*implementation=None"):
            jax.eval_shape(partial(function, implementation="native"), array)
        assert jax.eval_shape(function, array).dtype == ("int32" if name == "sample" else array.dtype)


@over(QUANTIZED[:2], name=lambda op: ["x", "scale", "bias", "residual", "smooth_scale"])
def test_quantised_float64(op, name):
    with jax.enable_x64(True):
        wide = jnp.ones(8 if name in ("scale", "bias", "smooth_scale") else (3, 8), "float64")
        operands = {"x": jnp.ones((3, 8), "float32")} | {name: wide}
        with pytest.raises(TypeError, match=f"^{op.public}: {name} is float64.*float32.*{name}.astype"):
            public(op)(**operands)


@over([op for op in OF_EACH_FUNCTION if op in WITH_QUANTIZATION])
def test_a_derivative_without_straight_through(op):
    first, *_ = given = valid(op.public)
    with pytest.raises(ValueError, match=rf"^{op.public}: rounded values .*straight_through=True.*stop_gradient"):
        jax.grad(lambda x: public(op)(**given | {first: x}).dequantize().sum())(given[first])


@pytest.mark.parametrize("op", QUANTIZED[:2], ids=str)
def test_a_traced_flag(op):
    with pytest.raises(TypeError, match="straight_through must be known while tracing"):
        jax.jit(lambda flag: public(op)(X, straight_through=flag).values)(True)


# What looks like bad input and is not.
@pytest.mark.parametrize("op", NORMS, ids=str)
def test_a_parameter_of_nnx_is_an_array(op):
    np.testing.assert_array_equal(public(op)(X, nnx.Param(2 * SCALE)), public(op)(X, 2 * SCALE))


@over(NORMS, number=lambda op: {type(n).__name__: n for n in (1, np.float32(1), np.float64(1), jnp.float32(1))})
def test_epsilon_of_any_number_type(op, number):
    np.testing.assert_array_equal(public(op)(X, epsilon=number), public(op)(X, epsilon=1.0))


@over(NORMS, axis=lambda op: {repr(axis): axis for axis in (2, (2,), [-1], np.int64(2))})
def test_the_last_axis_by_any_name(op, axis):
    np.testing.assert_array_equal(public(op)(X, SCALE, axis=axis), public(op)(X, SCALE))


@cover(op=ADDED, pad_to={"int64": np.int64(16), "uint8": np.uint8(16)})
def test_padding_to_an_int_of_numpy(op, pad_to):
    assert public(op)(X, X, pad_to=pad_to)[0].shape == (3, 4, 16)


SYNONYMS = {
    "silu": ["swish", jax.nn.silu, nnx.swish],
    **{function.__name__: [function] for function in (jax.nn.sigmoid, jax.nn.gelu, jax.nn.relu)},
    "gelu_exact": [partial(jax.nn.gelu, approximate=False)],
}
ACTIVATIONS = {
    "gated_activation": ("silu", "gelu", "gelu_exact", "sigmoid"),
    "gated_rms_norm": ("silu", "sigmoid"),
    "group_norm": ("silu", "gelu", "relu"),
}


@pytest.mark.parametrize("name", [*ACTIVATIONS, "gated_activation_quantized", "gated_rms_norm_quantized"])
def test_an_activation_by_another_name(name):
    function = partial(getattr(jaxnorm, name), **valid(name))
    for activation in ACTIVATIONS[name.removesuffix("_quantized")]:
        for other in SYNONYMS[activation]:
            results = function(activation=other), function(activation=activation)
            jax.tree.map(np.testing.assert_array_equal, *results)


class Variable:
    """An array as Keras has it, whose dtype is a string."""

    def __init__(self, value):
        self.value, self.dtype, self.shape = value, value.dtype.name, value.shape

    def __jax_array__(self):
        return self.value


TENSOR, PRODUCT = Quantization("int8", "tensor"), jnp.ones((2, 3, 4, 8))
OF_VARIABLES = {
    "gated_activation": (jaxnorm.gated_activation, call(X)),
    "rms_norm": (jaxnorm.rms_norm, call(X, SCALE, bias=SCALE)),
    "add_layer_norm": (jaxnorm.add_layer_norm, call(X, X, SCALE, SCALE)),
    "gated_rms_norm": (partial(jaxnorm.gated_rms_norm, gate_first=True), call(X, X, SCALE)),
    "group_norm": (partial(jaxnorm.group_norm, num_groups=2), call(X, SCALE, SCALE)),
    "rms_norm_add_rms_norm": (jaxnorm.rms_norm_add_rms_norm, call(X, X, SCALE, SCALE)),
    "softmax": (jaxnorm.softmax, call(X, where=X > 0)),
    "loss": (jaxnorm.softmax_cross_entropy_with_integer_labels, call(X, LABELS, where=X > 0)),
    "lookup": (jaxnorm.embedding, call(TABLE, IDS)),
    "segments": (lambda data, ids: jaxnorm.segment_sum(data, ids, 5), call(X, IDS)),
    "linear loss": (jaxnorm.linear_cross_entropy, call(X, jnp.ones((8, 5)), LABELS)),
    "positions": (jaxnorm.qk_norm_rotary, call(TOKENS, TOKENS, SCALE, SCALE, jnp.arange(3))),
    "frequencies": (jaxnorm.qk_norm_rotary, call(TOKENS, TOKENS, frequencies=jnp.ones(4))),
    "tables": (jaxnorm.qk_norm_rotary, call(TOKENS, TOKENS, cos=jnp.ones((3, 4)), sin=jnp.ones((3, 4)))),
    "a product": (partial(jaxnorm.qkv_norm_rotary, heads=2, kv_heads=1), call(PRODUCT, SCALE, SCALE, jnp.arange(3))),
    "smooth scale": (partial(jaxnorm.layer_norm_quantized, quantization=TOKEN), call(X, SCALE, smooth_scale=SCALE)),
    "static scale": (partial(jaxnorm.rms_norm_quantized, quantization=TENSOR), call(X, static_scale=jnp.float32(0.1))),
    "quantize": (partial(jaxnorm.quantize, quantization=TOKEN), call(X)),
    "float8_linear": (jaxnorm.float8_linear, call(X, jnp.ones((8, 8)), bias=SCALE)),
    "quantized_dot": (
        lambda x, bias: jaxnorm.quantized_dot(x, jaxnorm.quantize_kernel(X[0].T, TOKEN), bias=bias),
        call(X, SCALE[:4]),
    ),
}


@pytest.mark.parametrize("name", OF_VARIABLES)
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_dtype_may_be_a_string(name, dtype):
    function, (args, keywords) = OF_VARIABLES[name]
    args, keywords = jax.tree.map(
        lambda a: a.astype(dtype) if dtype and a.ndim and a.dtype == "float32" else a, (args, keywords)
    )
    expected = function(*args, **keywords)
    wrapped = function(*map(Variable, args), **{key: Variable(a) for key, a in keywords.items()})
    jax.tree.map(np.testing.assert_array_equal, wrapped, expected)
    for keyword, array in keywords.items():
        jax.tree.map(np.testing.assert_array_equal, function(*args, **keywords | {keyword: Variable(array)}), expected)
