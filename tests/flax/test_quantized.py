"""`QuantizedRMSNorm` and `QuantizedLayerNorm` of both Flax APIs: Flax's parameters, and the functions' results."""

import inspect
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import DTYPES, KINDS, PAIRS, bits, draw, draw_residual, draw_smooth, draw_x
from coverage import cover
from flax_apis import APIS, NAMES, QUANTIZED_NAMES
from hlo import compiled_text, count_native_calls
from native import native_calls
from quantizing import GRANULARITIES, QUANTIZED, TO, static_scale_of

from jaxnorm import Quantization, Quantized

pytestmark = pytest.mark.jax_version

# Rows of one group of 128 and of two of 64; three axes, as norms of several axes and of axes in the middle need.
DIMS = (4, 6, 128)
INT8 = Quantization("int8")

# Fields of the module, and what the function is told for them.
SERVED_BY_KERNELS = [
    ({}, {}),
    ({"use_scale": False}, {}),
    ({"use_fast_variance": False}, {}),  # never used
    ({"epsilon": 0.1}, {"epsilon": 0.1}),  # large enough to be seen in the result
    ({"param_dtype": jnp.float16}, {}),
    ({"reduction_axes": 2, "feature_axes": (-1,)}, {}),
    ({"reduction_axes": (-1, -2), "feature_axes": (1, 2)}, {"axis": (-2, -1)}),
    ({"axis_index_groups": [[0, 1]]}, {}),  # read with an axis_name only
]
SERVED_BY_THE_FORMULA = [
    ({"reduction_axes": 1, "feature_axes": 1}, {"axis": 1}),
    ({"reduction_axes": (2, 0), "feature_axes": (0, -1)}, {"axis": (0, 2)}),
]


def draw_inputs(has_residual=False, dtype="float32", residual_dtype=None):
    residual = (draw_residual(DIMS, residual_dtype or dtype),) if has_residual else ()
    return draw_x(DIMS, dtype), *residual


def function(kind, quantization, parameters, x, residual=None, **options):
    """What the function gives for the module's parameters, of which nnx's are flat."""
    axes = np.atleast_1d(options.get("axis", -1))
    features = [x.shape[axis] for axis in axes]
    parameters = {name: array.reshape(features) for name, array in parameters.items()}
    return QUANTIZED[kind](x, **parameters, quantization=quantization, residual=residual, **options)


def assert_is_the_function(api, kind, inputs, fields, options, quantization=INT8, **call):
    apply, parameters = api.quantized(kind, *inputs, quantization=quantization, call=call, **fields)
    actual = jax.jit(partial(apply, **call))(parameters, *inputs)
    expected = jax.jit(partial(function, kind, quantization, **options, **call))(parameters, *inputs)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    assert [a.dtype for a in jax.tree.leaves(actual)] == [e.dtype for e in jax.tree.leaves(expected)]
    assert bits(actual) == bits(expected)


@cover(kind=KINDS, api=APIS, to=TO, granularity=GRANULARITIES.keys(), has_residual=[False, True])
def test_result_is_the_functions(api, kind, to, granularity, has_residual):
    quantization = Quantization(to, **GRANULARITIES[granularity])
    call = {"static_scale": static_scale_of(quantization), "smooth_scale": draw_smooth(DIMS[-1:])}
    assert_is_the_function(api, kind, draw_inputs(has_residual), {}, {}, quantization, **call)


@cover(kind=KINDS, api=APIS, dtype=DTYPES)
def test_result_for_every_dtype(api, kind, dtype):
    assert_is_the_function(api, kind, draw_inputs(dtype=dtype), {}, {})


@cover(kind=KINDS, api=APIS, dtypes=PAIRS)
def test_result_of_a_residual_for_every_dtype(api, kind, dtypes):
    assert_is_the_function(api, kind, draw_inputs(True, *dtypes), {}, {})


@cover(kind=KINDS, api=APIS, served=SERVED_BY_KERNELS)
def test_one_kernel_serves(api, kind, served):
    fields, options = served
    inputs = draw_inputs(has_residual=True)
    assert_is_the_function(api, kind, inputs, fields, options)
    apply, parameters = api.quantized(kind, *inputs, quantization=INT8, **fields)
    assert count_native_calls(compiled_text(apply, parameters, *inputs)) == native_calls(kind, quantized=1)


@cover(kind=KINDS, api=APIS, served=SERVED_BY_THE_FORMULA)
def test_the_formula_serves_other_axes(api, kind, served):
    fields, options = served
    inputs = draw_inputs(has_residual=True)
    assert_is_the_function(api, kind, inputs, fields, options)
    apply, parameters = api.quantized(kind, *inputs, quantization=INT8, **fields)
    assert count_native_calls(compiled_text(apply, parameters, *inputs)) == {}


# Of nnx, `dtype` is what operands are rounded to, but for a residual stream; of linen, the result's, which is 8 bits.
@cover(kind=KINDS, api=APIS, x_dtype=["float32", "float16"], has_residual=[False, True])
def test_dtype_is_that_of_flaxs_operands(api, kind, x_dtype, has_residual):
    x, *residual = draw_inputs(has_residual, x_dtype)
    apply, parameters = api.quantized(kind, x, *residual, quantization=INT8, dtype=jnp.bfloat16)
    actual = apply(parameters, x, *residual)
    if api.rounds_operands:
        parameters = jax.tree.map(lambda p: p.astype(jnp.bfloat16), parameters)
        x = x if has_residual else x.astype(jnp.bfloat16)
    assert bits(actual) == bits(function(kind, INT8, parameters, x, *residual))


def loss_of(apply):
    """Of what is dequantised, or was not quantised, and of the sum if there is one."""

    def loss(*args):
        results = apply(*args)
        y, *total = results if isinstance(results, tuple) else (results,)
        y = y.dequantize() if isinstance(y, Quantized) else y
        return (y * draw("dy", DIMS)).sum() + sum(jnp.sin(t).sum() for t in total)

    return loss


@cover(kind=KINDS, api=APIS, has_residual=[False, True])
def test_straight_through_gradient_is_that_of_the_unquantised_module(api, kind, has_residual):
    inputs = draw_inputs(has_residual)
    _, plain = (api.both_added if has_residual else api.both)(kind, *inputs)
    ours = api.quantized(kind, *inputs, quantization=INT8, straight_through=True)
    wrt = tuple(range(1 + len(inputs)))
    gradients = [jax.jit(jax.grad(loss_of(apply), wrt))(parameters, *inputs) for apply, parameters in (ours, plain)]
    assert bits(gradients[0]) == bits(gradients[1])


@cover(kind=KINDS, api=APIS, has_residual=[False, True])
def test_native_calls_of_a_gradient(api, kind, has_residual):
    inputs = draw_inputs(has_residual, "bfloat16")
    apply, parameters = api.quantized(kind, *inputs, quantization=INT8, straight_through=True)
    gradient = jax.grad(loss_of(apply), tuple(range(1 + len(inputs))))
    assert count_native_calls(compiled_text(gradient, parameters, *inputs)) == native_calls(kind, quantized=1, bwd=1)


@cover(kind=KINDS, api=APIS)
def test_no_gradient_without_straight_through(api, kind):
    apply, parameters = api.quantized(kind, draw_x(DIMS), quantization=INT8)
    with pytest.raises(ValueError, match=rf"^{kind}_norm_quantized: .*straight_through=True"):
        jax.grad(lambda p: apply(p, draw_x(DIMS)).dequantize().sum())(parameters)


@cover(kind=KINDS, api=APIS)
def test_parameters_are_those_of_the_unquantised_module(api, kind):
    _, (_, plain) = api.both(kind, draw_x(DIMS), param_dtype=jnp.bfloat16)
    _, parameters = api.quantized(kind, draw_x(DIMS), quantization=INT8, param_dtype=jnp.bfloat16)
    assert plain.keys() == parameters.keys()
    assert [(p.shape, p.dtype) for p in plain.values()] == [(p.shape, p.dtype) for p in parameters.values()]
    assert bits(parameters) == bits(plain)


@cover(kind=KINDS, api=APIS)
def test_constructor_and_class(api, kind):
    ours = getattr(api.ours, QUANTIZED_NAMES[kind])
    assert issubclass(ours, getattr(api.ours, NAMES[kind]))
    options = inspect.signature(ours.__init__).parameters
    assert options["quantization"].kind == options["straight_through"].kind == inspect.Parameter.KEYWORD_ONLY
    assert options["quantization"].default is inspect.Parameter.empty
    assert options["straight_through"].default is False


@cover(kind=KINDS, api=APIS)
def test_vmap_and_scan_of_a_module(api, kind):
    stacked = draw("stacked", (3, *DIMS))
    apply, parameters = api.quantized(kind, stacked[0], quantization=INT8)
    expected = [jax.jit(apply)(parameters, x) for x in stacked]
    expected = jax.tree.map(lambda *leaves: jnp.stack(leaves), *expected)
    assert bits(jax.jit(jax.vmap(apply, (None, 0)))(parameters, stacked)) == bits(expected)
    assert bits(jax.lax.scan(lambda _, x: (None, apply(parameters, x)), None, stacked)[1]) == bits(expected)


# What has no equivalent is an error: fields of the module, inputs, keywords of the call, and what the message must hold
# in this order.
BAD_CALLS = {
    "a mask": ({}, (), {"mask": True}, ("got a mask", "plain norm")),
    "axis index groups": (
        {"axis_name": "shard", "axis_index_groups": ((0, 1),)},
        (),
        {},
        ("axis_index_groups=((0, 1),)", "expected None", "plain norm"),
    ),
    "fewer features than are reduced": (
        {"reduction_axes": (1, 2), "feature_axes": -1},
        (),
        {},
        ("reduction_axes=(1, 2)", "feature_axes=-1", "(4, 6, 128)", "alike"),
    ),
    "more features than are reduced": (
        {"reduction_axes": -1, "feature_axes": (1, 2)},
        (),
        {},
        ("reduction_axes=-1", "feature_axes=(1, 2)", "alike"),
    ),
    "no axes": ({"reduction_axes": (), "feature_axes": ()}, (), {}, ("axis is empty",)),
    "an axis that x has not": (
        {"reduction_axes": (1, 2), "feature_axes": (1, 2)},
        (jnp.ones((6, 128)),),
        {},
        ("axis 2 is out of range", "2 axes"),
    ),
    "a scalar": ({}, (jnp.float32(1),), {}, ("axis -1 is out of range", "0 axes")),
    "a residual of another shape": ({}, (jnp.ones(DIMS), jnp.ones((6, 128))), {}, ("residual has shape (6, 128)",)),
}
# Options that one of the APIs has.
BAD_OPTIONS = {
    "nnx": ({"promote_dtype": lambda arrays, dtype: arrays}, ("promote_dtype=", "Leave it out")),
    "linen": ({"force_float32_reductions": False}, ("force_float32_reductions=False", "True", "Leave it out")),
}


def assert_is_an_error(api, kind, fields, inputs, call, parts):
    message = rf"(?s)^{QUANTIZED_NAMES[kind]}: .*" + ".*".join(map(re.escape, parts))

    def module_call():
        apply, parameters = api.quantized(kind, draw_x(DIMS), quantization=INT8, **fields)
        apply(parameters, *(inputs or (draw_x(DIMS),)), **call)

    with pytest.raises(ValueError, match=message):
        module_call()


@cover(kind=KINDS, api=APIS, name=BAD_CALLS.keys())
def test_what_has_no_equivalent(api, kind, name):
    assert_is_an_error(api, kind, *BAD_CALLS[name])


@cover(kind=KINDS, api=APIS)
def test_an_option_that_only_flaxs_code_has(api, kind):
    name = next(name for name in APIS if APIS[name] is api)
    fields, parts = BAD_OPTIONS[name]
    assert_is_an_error(api, kind, fields, (), {}, parts)


@cover(kind=KINDS, api=APIS)
def test_dtypes_without_quantised_norms(api, kind):
    apply, parameters = api.quantized(kind, draw_x(DIMS), quantization=INT8)
    with pytest.raises(TypeError, match=rf"^{kind}_norm_quantized: x must have a floating-point dtype .* int32"):
        apply(parameters, jnp.ones(DIMS, "int32"))
    with jax.enable_x64(True), pytest.raises(TypeError, match=rf"^{kind}_norm_quantized: x is float64"):
        apply(parameters, jnp.ones(DIMS, "float64"))


@cover(kind=KINDS, api=APIS)
def test_a_dtype_for_a_quantization(api, kind):
    def module_call():
        apply, parameters = api.quantized(kind, draw_x(DIMS), quantization="int8")
        apply(parameters, draw_x(DIMS))

    with pytest.raises(TypeError, match=rf"^{kind}_norm_quantized: quantization must be a jaxnorm.Quantization"):
        module_call()
