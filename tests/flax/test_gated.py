"""`GatedRMSNorm` of both Flax APIs: Flax's parameters, and the function's results."""

import inspect

import jax
import jax.numpy as jnp
import pytest
from cases import DTYPES, bits, draw_gate, draw_x
from flax_apis import APIS
from hlo import compiled_text, count_native_calls
from ops.gated_norm import MAMBA, QWEN, gated
from table import GATED

pytestmark = [pytest.mark.jax_version, pytest.mark.parametrize("api", APIS.values(), ids=APIS)]

DIMS = (4, 6, 60)
# Fields of the module beside Flax's, and of the function beside those.
FIELDS = {
    "Mamba2": (MAMBA, {"group_size": 20}, {}),
    "Qwen3-Next": (QWEN, {}, {}),
    "no scale": (QWEN, {}, {"use_scale": False}),
    "a large epsilon": (MAMBA, {}, {"epsilon": 0.1}),
    "a half parameter": (MAMBA, {}, {"param_dtype": jnp.bfloat16}),
    "the last axis by number": (MAMBA, {}, {"reduction_axes": 2, "feature_axes": (-1,)}),
}

fields = pytest.mark.parametrize("name", FIELDS)


def draw_inputs(dtype="float32"):
    return draw_x(DIMS, dtype), draw_gate(DIMS, dtype)


def built_and_called(api, inputs, flax, **call):
    """A module may find what is wrong when it makes its parameters or when it is called."""
    apply, parameters = api.gated(MAMBA, inputs, **flax)
    return apply(parameters, *inputs, **call)


@fields
def test_results_are_the_functions(api, name):
    variant, options, flax = FIELDS[name]
    inputs = draw_inputs()
    apply, parameters = api.gated(variant, inputs, **options, **flax)
    epsilon = {key: flax[key] for key in ("epsilon",) if key in flax}
    expected = jax.jit(lambda p, x, gate: gated(variant, **options, **epsilon)(x, gate, **p))(parameters, *inputs)
    assert bits(jax.jit(apply)(parameters, *inputs)) == bits(expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_kernel_serves_each_way(api, dtype):
    inputs = draw_inputs(dtype)
    apply, parameters = api.gated(MAMBA, inputs, group_size=20, dtype=dtype)
    assert apply(parameters, *inputs).dtype == dtype
    gradient = jax.grad(lambda *args: jnp.sin(apply(*args).astype("float32")).sum(), argnums=(0, 1, 2))
    assert count_native_calls(compiled_text(gradient, parameters, *inputs)) == GATED[0].calls(fwd=1, bwd=1)


def test_the_result_has_the_dtype_that_flax_promotes_to(api):
    inputs = draw_inputs("bfloat16")
    apply, parameters = api.gated(QWEN, inputs)
    assert apply(parameters, *inputs).dtype == "float32"


def test_parameters_are_flaxs(api):
    inputs = draw_inputs()
    _, ours = api.gated(MAMBA, inputs, param_dtype=jnp.bfloat16)
    _, flaxs = api.build(api.flax.RMSNorm, inputs[:1], {"param_dtype": jnp.bfloat16})
    assert ours.keys() == flaxs.keys()
    assert bits(ours) == bits(flaxs)


def test_the_order_has_no_default(api):
    with pytest.raises(TypeError, match="gate_first"):
        api.build(api.ours.GatedRMSNorm, draw_inputs(), {})


def test_the_call_takes_x_and_gate(api):
    assert list(inspect.signature(api.ours.GatedRMSNorm.__call__).parameters) == ["self", "x", "gate", "mask"]


# Fields or arguments that say what the function does not.
NOT_EXPRESSED = {
    "a mask": ({}, {"mask": True}, "got a mask, expected None: a gated norm .* plain norm"),
    "axis index groups": (
        {"axis_name": "devices", "axis_index_groups": ((0, 1),)},
        {},
        r"axis_index_groups=\(\(0, 1\),\), expected None: a gated norm",
    ),
    "another axis": ({"reduction_axes": 1, "feature_axes": 1}, {}, "reduction_axes=1, expected -1"),
    "two axes": ({"reduction_axes": (1, 2), "feature_axes": (1, 2)}, {}, r"reduction_axes=\(1, 2\), expected -1"),
}


@pytest.mark.parametrize("name", NOT_EXPRESSED)
def test_what_the_function_does_not_express(api, name):
    flax, call, message = NOT_EXPRESSED[name]
    inputs = draw_inputs()
    with pytest.raises(ValueError, match=f"^GatedRMSNorm: .*{message}"):
        built_and_called(api, inputs, flax, **call)


def test_a_gate_of_another_shape_is_an_error(api):
    x, gate = draw_inputs()
    apply, parameters = api.gated(MAMBA, (x, gate))
    with pytest.raises(ValueError, match=r"^GatedRMSNorm: gate has shape \(6, 60\), expected x's shape \(4, 6, 60\)"):
        apply(parameters, x, gate[0])


def test_a_flag_of_flaxs_own_code_is_an_error(api):
    inputs = draw_inputs()
    is_nnx = api.rounds_operands
    flax = {"promote_dtype": lambda *args, **options: args} if is_nnx else {"force_float32_reductions": False}
    with pytest.raises(ValueError, match=f"^GatedRMSNorm: {next(iter(flax))}"):
        built_and_called(api, inputs, flax)
