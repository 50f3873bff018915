"""Law 6: one kernel each way, and next to nothing kept in between."""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from cases import bits
from coverage import over
from hlo import compiled_text, count_native_calls, lowered_calls
from native import is_platform_with_kernels
from op import rows
from table import GROUPED, NORMS, OPS, PER_HEAD

ops = pytest.mark.parametrize("op", OPS, ids=str)


def wanted(call: str) -> set[str]:
    return set(re.findall(r"with_(d\w+) = true", call))


@over(OPS, dtypes=lambda op: op.dtypes)
def test_a_gradient_is_one_call_each_way(op, dtypes):
    calls = count_native_calls(compiled_text(op.gradient(), *op.draw(op.small, dtypes)))
    assert calls == op.calls(fwd=1, bwd=1)


@over(PER_HEAD + GROUPED, size=lambda op: op.sizes)
def test_a_gradient_of_every_size_is_one_call_each_way(op, size):
    text = jax.jit(op.gradient(op.run(**size.options))).lower(*op.types(size)).as_text()
    assert count_native_calls(text) == op.calls(fwd=1, bwd=1)


@pytest.mark.parametrize("op", NORMS, ids=str)
def test_every_norm_of_a_model_is_one_call_each_way(op):
    def model(x, scale, bias):
        for layer in range(3):
            x = x + jnp.tanh(op.norm()(x, scale * (layer + 1), bias))
        return x.sum()

    calls = count_native_calls(compiled_text(jax.grad(model, (0, 1, 2)), *op.draw(op.small)))
    assert calls == op.calls(fwd=3, bwd=3)


# Where a loop stacks what a derivative reads, of whole lines of memory, and goes on with it.
@pytest.mark.parametrize("op", NORMS, ids=str)
def test_the_norm_of_scanned_layers_is_one_call_each_way(op):
    def model(x, scale, bias):
        def layer(x, _):
            y = op.norm()(x, scale, bias)
            return x + y * y, None

        return jax.lax.scan(layer, x, length=3)[0].sum()

    calls = count_native_calls(compiled_text(jax.grad(model, (0, 1, 2)), *op.draw(rows(16, 64))))
    assert calls == op.calls(fwd=1, bwd=1)


def subsets(op):
    """Each operand alone, the first two, and all of them."""
    return [*((i,) for i in op.all), op.all[:2], op.all]


@over(OPS, argnums=subsets)
def test_the_backward_computes_what_is_asked_for(op, argnums):
    args = op.draw(op.small)
    calls = lowered_calls(op.gradient(argnums=argnums), op.backward, *args)
    assert [wanted(call) for call in calls] == [{op.gradients[i] for i in argnums}] * is_platform_with_kernels()


@over(OPS, argnums=subsets)
def test_what_is_not_asked_for_changes_no_bit(op, argnums):
    args = op.draw(op.small)
    every = dict(zip(op.all, jax.jit(op.gradient(argnums=op.all))(*args), strict=True))
    assert bits(jax.jit(op.gradient(argnums=argnums))(*args)) == bits([every[i] for i in argnums])


@ops
def test_inference_writes_no_statistics(op):
    args = op.draw(op.small)
    function = partial(op.function, **op.small.options)
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
