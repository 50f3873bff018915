"""`jaxnorm.checkpoint_policies`: what is kept of an op for the backward pass, and what is computed again."""

import jax
import jax.numpy as jnp
import pytest
from cases import assert_near, draw
from coverage import over
from hlo import count_native_calls
from table import EACH, OPS

from jaxnorm import checkpoint_policies as ours

pytestmark = pytest.mark.jax_version

jax_policies = jax.checkpoint_policies
# Native forward calls in a gradient: a second one where a policy drops something of what the first gave.
POLICIES = {
    "save norms": (ours.save_norms, 1),
    "all names": (jax_policies.save_only_these_names(*ours.NAMES), 1),
    "save norms and products": (jax_policies.save_from_both_policies(ours.save_norms, jax_policies.dots_saveable), 1),
    "recompute norms": (ours.recompute_norms, 2),
    "not all names": (jax_policies.save_only_these_names("jaxnorm_sum", "jaxnorm_statistics"), 2),
}
policies = over(OPS, default=EACH, policy=lambda op: POLICIES)


def block(op):
    """The op between two products, the second of which needs its result for a gradient.

    What it reads is exact, so that it is the same however XLA computes it: else a quantised value may be its neighbour.
    """

    def function(w, v, *args):
        y, *total = op.run()(jax.nn.leaky_relu(args[0] @ w, 0.5), *args[1:])
        return sum(jnp.sin(jnp.sin(a) @ v[: a.shape[-1]]).sum() for a in (y, *total))

    return function


def of_few_bits(array, step):
    """Of multiples of a power of two, whose products add up without an error."""
    return (jnp.round(array / step) * step).astype(array.dtype)


def operands(op):
    x, *others = op.draw(op.small)
    cols = x.shape[-1]
    w = of_few_bits(draw("w", (cols, cols), std=0.1), 1 / 64)
    # A padded y has more columns than x.
    return w, draw("v", (2 * cols, cols), std=0.1), of_few_bits(x, 1 / 8), *others


def gradients(function, op):
    return jax.jit(jax.grad(function, (0, 1, *(2 + i for i in op.all))))


@policies
def test_a_policy_changes_no_gradient(op, policy):
    checkpointed = jax.checkpoint(block(op), policy=policy[0])
    # TF32 makes of a last bit of a GPU's sine one of the tenth.
    with jax.default_matmul_precision("highest"):
        both = [gradients(function, op)(*operands(op)) for function in (checkpointed, block(op))]
    assert_near(*both, atol=1e-5)


@policies
def test_native_calls_under_a_policy(op, policy):
    function, calls = policy
    if function is POLICIES["not all names"][0] and not op.keeps_statistics:
        calls = 1  # nothing of the first is kept, so it is left out
    if op.keeps_operands_alone:
        calls = 1  # what it gave is not read again
    lowered = gradients(jax.checkpoint(block(op), policy=function), op).lower(*operands(op))
    # A CPU's compiler merges what is computed again, as there is no memory to be saved.
    texts = [lowered.as_text()] + ([lowered.compile().as_text()] if jax.default_backend() == "gpu" else [])
    for text in texts:
        assert count_native_calls(text) == op.calls(fwd=calls, bwd=1)


# So nothing is computed again where the names are kept: all that leaves the call goes through one of them.
@pytest.mark.parametrize("op", OPS, ids=str)
def test_every_result_is_named(op):
    args = op.draw(op.small)
    cotangents = op.cotangents(args, **op.small.options)
    jaxpr = jax.make_jaxpr(lambda *args: jax.vjp(op.run(), *args)[1](cotangents))(*args)
    (call,) = [eqn for eqn in jaxpr.eqns if "_fwd" in str(eqn.primitive) or "custom_jvp" in str(eqn.primitive)]
    users = [eqn for eqn in jaxpr.eqns if set(map(id, call.outvars)) & set(map(id, eqn.invars))]
    assert {str(eqn.primitive) for eqn in users} <= {"name", "bitcast_convert_type"}
