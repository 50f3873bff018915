"""Law 6: one kernel each way, and next to nothing kept in between, or what `jaxnorm.checkpoint_policies` say."""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from cases import assert_near, bits, draw
from coverage import over
from hlo import compiled_text, count_native_calls, lowered_calls
from native import is_platform_with_kernels
from op import rows
from table import EACH_OF_ALL, EVERY, GROUPED, NORMS, OPS, PER_HEAD

from jaxnorm import checkpoint_policies as ours


def wanted(call: str) -> set[str]:
    return set(re.findall(r"with_(d\w+) = true", call))


@over(EVERY, dtypes=lambda op: op.dtypes)
def test_a_gradient_is_one_call_each_way(op, dtypes):
    calls = count_native_calls(compiled_text(op.gradient(), *op.draw(op.small, dtypes)))
    assert calls == op.calls(fwd=1, bwd=1)


@over(PER_HEAD + GROUPED, size=lambda op: op.sizes)
def test_a_gradient_of_every_size_is_one_call_each_way(op, size):
    text = jax.jit(op.gradient(op.run(**size.options))).lower(*op.types(size)).as_text()
    assert count_native_calls(text) == op.calls(fwd=1, bwd=1)


def stack(op, x, scale, bias):
    for layer in range(3):
        x = x + jnp.tanh(op.norm()(x, scale * (layer + 1), bias))
    return x.sum()


# Where a loop stacks what a derivative reads, of whole lines of memory, and goes on with it.
def scanned(op, x, scale, bias):
    def layer(x, _):
        y = op.norm()(x, scale, bias)
        return x + y * y, None

    return jax.lax.scan(layer, x, length=3)[0].sum()


@pytest.mark.parametrize(("model", "rows_of", "count"), [(stack, None, 3), (scanned, rows(16, 64), 1)])
@pytest.mark.parametrize("op", NORMS, ids=str)
def test_every_norm_of_a_model_is_one_call_each_way(op, model, rows_of, count):
    gradient = jax.grad(partial(model, op), (0, 1, 2))
    calls = count_native_calls(compiled_text(gradient, *op.draw(rows_of or op.small)))
    assert calls == op.calls(fwd=count, bwd=count)


def subsets(op):
    """Each operand alone, the first two, and all of them."""
    return [*((i,) for i in op.all), op.all[:2], op.all]


@over(OPS, argnums=subsets)
def test_the_backward_computes_what_is_asked_for(op, argnums):
    args = op.draw(op.small)
    calls = lowered_calls(op.gradient(argnums=argnums), op.backward, *args)
    assert [wanted(call) for call in calls] == [{op.gradients[i] for i in argnums}] * is_platform_with_kernels()


@over(EVERY, argnums=subsets)
def test_what_is_not_asked_for_changes_no_bit(op, argnums):
    args = op.draw(op.small)
    every = dict(zip(op.all, jax.jit(op.gradient(argnums=op.all))(*args), strict=True))
    assert bits(jax.jit(op.gradient(argnums=argnums))(*args)) == bits([every[i] for i in argnums])


@pytest.mark.parametrize("op", OPS, ids=str)
def test_inference_writes_no_statistics(op):
    args, function = op.draw(op.small), partial(op.function, **op.small.options)
    (call,) = lowered_calls(function, op.forward, *args) if is_platform_with_kernels() else [None]
    expected = [result.size for result in jax.tree.leaves(jax.eval_shape(function, *args)) if result.ndim]
    expected = [len(args[0])] * op.values or expected
    written = re.findall(r"tensor<([\dx]+)x[a-z]\w*>", call.rpartition("->")[2]) if call else []
    if op.keeps_parts and jax.default_backend() == "gpu":
        *written, _ = written
    assert [math.prod(map(int, dims.split("x"))) for dims in written] == expected * is_platform_with_kernels()


@over(OPS, dtypes=lambda op: op.dtypes)
def test_what_lives_between_forward_and_backward(op, dtypes):
    """The operands that the row names, "residual" standing for the sum, statistics and labels."""
    args = op.draw(op.small, dtypes)
    pullback = jax.eval_shape(lambda *args: jax.vjp(partial(op.differentiable, **op.small.options), *args)[1], *args)
    found = sorted((leaf.size, leaf.dtype.name) for leaf in jax.tree.leaves(pullback) if leaf.size > 1)
    kept = [(args[i].size, args[i].dtype.name) for i in map(op.operands.index, op.kept)]
    groups = args[0].shape[-1] // op.small.options.get("group_size", args[0].shape[-1])
    rows = math.prod(op.normalised(args[0]).shape[:-1]) * groups
    # Smooth factors multiply the cotangent, and the result has been dequantised by scales of its rows.
    others = [(args[i].size, args[i].dtype.name) for i in range(len(args)) if op.operands[i] == "smooth"]
    others += [(rows, "int32")] * op.labels
    others += [(size, "float32") for size in op.kept_beside(*args)]
    assert found == sorted([*kept, *others, *[(rows, "float32")] * op.statistics])


@pytest.mark.parametrize("op", NORMS, ids=str)
def test_a_gradient_of_the_bias_alone_needs_no_x(op):
    x, scale, bias = op.draw(op.small)
    gradient = jax.grad(lambda bias: op.function(x, scale, bias)[0].sum())
    assert gradient(bias).tolist() == [len(x)] * len(bias)


# What is kept of an op for the backward pass, and what is computed again.
jax_policies = jax.checkpoint_policies
# Native forward calls in a gradient: a second one where a policy drops something of what the first gave.
POLICIES = {
    "save norms": (ours.save_norms, 1),
    "all names": (jax_policies.save_only_these_names(*ours.NAMES), 1),
    "save norms and products": (jax_policies.save_from_both_policies(ours.save_norms, jax_policies.dots_saveable), 1),
    "recompute norms": (ours.recompute_norms, 2),
    "not all names": (jax_policies.save_only_these_names("jaxnorm_sum", "jaxnorm_statistics"), 2),
}


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


@pytest.mark.jax_version
@over(EACH_OF_ALL, policy=lambda op: POLICIES)
def test_a_gradient_under_a_policy(op, policy):
    policy, calls = policy
    if policy is POLICIES["not all names"][0] and not op.keeps_statistics:
        calls = 1  # nothing of the first is kept, so it is left out
    if op.keeps_operands_alone:
        calls = 1  # what it gave is not read again
    # TF32 makes of a last bit of a GPU's sine one of the tenth.
    with jax.default_matmul_precision("highest"):
        lowered, plain = (
            jax.jit(jax.grad(function, (0, 1, *(2 + i for i in op.all)))).lower(*operands(op))
            for function in (jax.checkpoint(block(op), policy=policy), block(op))
        )
    program = lowered.compile()
    assert_near(program(*operands(op)), plain.compile()(*operands(op)), atol=1e-5)
    # A CPU's compiler merges what is computed again, as there is no memory to be saved.
    for text in [lowered.as_text()] + ([program.as_text()] if jax.default_backend() == "gpu" else []):
        assert count_native_calls(text) == op.calls(fwd=calls, bwd=1)


# So nothing is computed again where the names are kept: all that leaves the call goes through one of them.
@pytest.mark.jax_version
@pytest.mark.parametrize("op", OPS, ids=str)
def test_every_result_is_named(op):
    args = op.draw(op.small)
    cotangents = op.cotangents(args, **op.small.options)
    jaxpr = jax.make_jaxpr(lambda *args: jax.vjp(op.run(), *args)[1](cotangents))(*args)
    (call,) = [eqn for eqn in jaxpr.eqns if "_fwd" in str(eqn.primitive) or "custom_jvp" in str(eqn.primitive)]
    users = [eqn for eqn in jaxpr.eqns if set(map(id, call.outvars)) & set(map(id, eqn.invars))]
    assert {str(eqn.primitive) for eqn in users} <= {"name", "bitcast_convert_type"}
