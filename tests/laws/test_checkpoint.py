"""`jaxnorm.checkpoint_policies`: what is kept of a norm for the backward pass, and what is computed again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import draw, draw_bias, draw_residual, draw_scale, draw_x
from hlo import count_native_calls
from native import is_platform_with_kernels

import jaxnorm
from jaxnorm import Quantization
from jaxnorm import checkpoint_policies as ours

jax_policies = jax.checkpoint_policies
DIMS = (16, 64)
TO = Quantization(jnp.float8_e4m3fn)


NORMS = {
    "rms": lambda x, r, s, b: jaxnorm.rms_norm(x, s),
    "layer": lambda x, r, s, b: jaxnorm.layer_norm(x, s, b),
    "add rms": lambda x, r, s, b: sum(jaxnorm.add_rms_norm(x, r, s)),
    "add layer": lambda x, r, s, b: sum(jaxnorm.add_layer_norm(x, r, s, b)),
    "gated": lambda x, r, s, b: jaxnorm.gated_rms_norm(x, r, s, gate_first=True),
    "quantised": lambda x, r, s, b: jaxnorm.rms_norm_quantized(
        x, s, b, quantization=TO, straight_through=True
    ).dequantize(),
}
# Native forward calls in a gradient: a second one where a policy drops something of what the first gave.
POLICIES = {
    "save norms": (ours.save_norms, 1),
    "all names": (jax_policies.save_only_these_names(*ours.NAMES), 1),
    "save norms and products": (jax_policies.save_from_both_policies(ours.save_norms, jax_policies.dots_saveable), 1),
    "recompute norms": (ours.recompute_norms, 2),
    "not all names": (jax_policies.save_only_these_names("jaxnorm_sum", "jaxnorm_statistics"), 2),
}


def block(norm):
    """The norm between two products, the second of which needs its result for a gradient."""
    return lambda w, v, *args: jnp.sin(jnp.sin(norm(jnp.sin(args[0] @ w), *args[1:])) @ v).sum()


def operands():
    weights = [draw(name, (64, 64), std=0.1) for name in "wv"]
    return (*weights, draw_x(DIMS), draw_residual(DIMS), draw_scale(DIMS[-1:]), draw_bias(DIMS[-1:]))


def gradients(function):
    return jax.jit(jax.grad(function, (0, 1, 2, 3, 4)))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", NORMS)
def test_a_policy_changes_no_gradient(name, policy):
    checkpointed = jax.checkpoint(block(NORMS[name]), policy=POLICIES[policy][0])
    actual, expected = (gradients(function)(*operands()) for function in (checkpointed, block(NORMS[name])))
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5), actual, expected)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", NORMS)
def test_native_calls_under_a_policy(name, policy):
    function, calls = POLICIES[policy]
    lowered = gradients(jax.checkpoint(block(NORMS[name]), policy=function)).lower(*operands())
    # A CPU's compiler merges what is computed again, as there is no memory to be saved.
    texts = [lowered.as_text()] + ([lowered.compile().as_text()] if jax.default_backend() == "gpu" else [])
    for text in texts:
        found = sorted(count_native_calls(text).values())
        assert found == ([1, calls] if is_platform_with_kernels() else [])


@pytest.mark.parametrize("name", NORMS)
def test_every_result_is_named(name):
    """So nothing is computed again where the names are kept: all that leaves the call goes through one of them."""
    jaxpr = jax.make_jaxpr(lambda *args: jax.vjp(NORMS[name], *args)[1](args[0]))(*operands()[2:])
    (call,) = [eqn for eqn in jaxpr.eqns if "forward" in str(eqn.primitive) or "custom_jvp" in str(eqn.primitive)]
    users = [eqn for eqn in jaxpr.eqns if set(map(id, call.outvars)) & set(map(id, eqn.invars))]
    assert {str(eqn.primitive) for eqn in users} <= {"name", "bitcast_convert_type"}
