"""`AddRMSNorm` and `AddLayerNorm` of both Flax APIs: the sum of a residual connection and Flax's norm of it."""

import jax
import jax.numpy as jnp
import pytest
from cases import ADDS, KINDS, PAIRS, bits, draw, draw_residual, draw_x
from coverage import cover
from flax_apis import ADD_NAMES, APIS, SERVED_BY_FLAX, SERVED_BY_KERNELS, assert_close, assert_gradients_close
from hlo import compiled_text, count_native_calls
from native import native_calls

pytestmark = pytest.mark.jax_version

DIMS = (4, 6, 37)


def draw_pair(dtype="float32", residual_dtype="float32"):
    return draw_x(DIMS, dtype), draw_residual(DIMS, residual_dtype)


@cover(kind=KINDS, api=APIS, dtypes=PAIRS)
def test_results_are_the_functions(api, kind, dtypes):
    inputs = draw_pair(*dtypes)
    _, (apply, parameters) = api.both_added(kind, *inputs)
    function = jax.jit(lambda p, x, r: ADDS[kind](x, r, **p, out_dtype="float32"))
    assert bits(jax.jit(apply)(parameters, *inputs)) == bits(function(parameters, *inputs))


@cover(kind=KINDS, api=APIS, dtypes=PAIRS)
def test_results_are_flaxs_norm_of_the_sum(api, kind, dtypes):
    inputs = draw_pair(*dtypes)
    (add_first, flaxs_parameters), (apply, parameters) = api.both_added(kind, *inputs)
    flaxs = add_first(flaxs_parameters, *inputs)  # not in one program, where XLA may leave the sum unrounded
    ours = jax.jit(apply)(parameters, *inputs)
    assert_close(ours[0], flaxs[0])
    assert bits(ours[1]) == bits(flaxs[1])


@cover(kind=KINDS, api=APIS, fields=SERVED_BY_KERNELS)
def test_a_kernel_serves_each_way(api, kind, fields):
    inputs = draw_pair()
    _, (apply, parameters) = api.both_added(kind, *inputs, **fields)
    assert count_native_calls(compiled_text(apply, parameters, *inputs)) == native_calls(kind, fwd=1)
    gradient = jax.grad(lambda *args: sum(jnp.sin(result).sum() for result in apply(*args)), argnums=(0, 1, 2))
    assert count_native_calls(compiled_text(gradient, parameters, *inputs)) == native_calls(kind, fwd=1, bwd=1)


@cover(kind=KINDS, api=APIS, fields=SERVED_BY_FLAX)
def test_other_axes_are_flaxs_result_of_the_sum(api, kind, fields):
    inputs = draw_pair()
    flaxs, ours = (jax.jit(apply)(p, *inputs) for apply, p in api.both_added(kind, *inputs, **fields))
    assert bits(ours) == bits(flaxs)


@cover(kind=KINDS, api=APIS)
def test_mask_is_flaxs_result_of_the_sum(api, kind):
    inputs, mask = draw_pair("bfloat16", "float32"), draw("mask", DIMS) > 0
    flaxs, ours = (
        jax.jit(lambda p, *inputs: apply(p, *inputs, mask=mask))(p, *inputs)  # noqa: B023
        for apply, p in api.both_added(kind, *inputs)
    )
    assert bits(ours) == bits(flaxs)


@cover(kind=KINDS, api=APIS)
def test_a_wide_stream_is_not_rounded(api, kind):
    inputs = draw_pair("bfloat16", "float32")
    _, (apply, parameters) = api.both_added(kind, *inputs, dtype=jnp.bfloat16)
    y, new_residual = apply(parameters, *inputs)
    if api.rounds_operands:
        parameters = jax.tree.map(lambda p: p.astype(jnp.bfloat16), parameters)
    assert (y.dtype, new_residual.dtype) == (jnp.bfloat16, jnp.float32)
    assert bits((y, new_residual)) == bits(ADDS[kind](*inputs, **parameters))


@cover(kind=KINDS, api=APIS, dtypes=PAIRS)
def test_gradients_are_flaxs(api, kind, dtypes):
    inputs = draw_pair(*dtypes)

    def gradients(apply, parameters):
        def loss(*args):
            y, total = apply(*args)
            return (y * draw("dy", DIMS)).sum() + (total * draw("dsum", DIMS)).sum()

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(parameters, *inputs)

    flaxs, ours = (gradients(*norm) for norm in api.both_added(kind, *inputs))
    assert_gradients_close(ours, flaxs, through=dtypes[1])


@cover(kind=KINDS, api=APIS)
def test_parameters_are_flaxs(api, kind):
    (_, flaxs), (_, ours) = api.both_added(kind, *draw_pair(), param_dtype=jnp.bfloat16)
    assert flaxs.keys() == ours.keys()
    assert bits(ours) == bits(flaxs)


@cover(kind=KINDS, api=APIS)
def test_a_residual_of_another_shape_is_an_error(api, kind):
    x, residual = draw_pair()
    _, (apply, parameters) = api.both_added(kind, x, residual)
    with pytest.raises(ValueError, match=rf"{ADD_NAMES[kind]}: residual has shape \(6, 37\), expected x's"):
        apply(parameters, x, residual[0])


BRANCH_SCALES = {"(D,)": (37,), "(B, 1, D)": (4, 1, 37)}


MASKS = {"by a kernel": None, "by Flax": jnp.ones(DIMS, bool)}


@cover(kind=KINDS, api=APIS, shape=BRANCH_SCALES, mask=MASKS)
def test_a_scale_of_the_branch(api, kind, shape, mask):
    x, residual = draw_pair()
    gate = draw("branch_scale", shape)
    _, (apply, parameters) = api.both_added(kind, x, residual)
    y, total = apply(parameters, x, residual, branch_scale=gate, mask=mask)
    function = ADDS[kind](x, residual, **parameters, branch_scale=gate)
    assert bits(total) == bits(function[1])
    assert_close(y, function[0])


@cover(kind=KINDS, api=APIS, mask=MASKS)
def test_without_the_sum(api, kind, mask):
    inputs = draw_pair()
    _, (apply, parameters) = api.both_added(kind, *inputs)
    assert bits(apply(parameters, *inputs, mask=mask, return_sum=False)) == bits(
        apply(parameters, *inputs, mask=mask)[0]
    )
