"""CPU kernels in a thread with a small stack, which is what musl gives a thread and some servers theirs."""

import threading

import jax
import numpy as np
import pytest
from table import EACH, GATED, SOFTMAX

STACK = 128 << 10
# What kernels keep of rows depends on the op, and with a gate on where that stands.
ALL = tuple(dict.fromkeys((*EACH, *SOFTMAX, *GATED[1:])))

pytestmark = pytest.mark.kernels


def results_and_gradients(op):
    def run(*args):
        results, pullback = jax.vjp(op.differentiable, *args)
        return op.function(*args), pullback(results)

    return run


@pytest.fixture
def small_stacks():
    before = threading.stack_size(STACK)
    yield
    threading.stack_size(before)


@pytest.mark.any_code
@pytest.mark.parametrize("op", ALL, ids=str)
def test_a_small_stack(op, small_stacks):
    results = []
    with jax.default_device(jax.devices("cpu")[0]):
        args = op.draw(op.small)
        program = jax.jit(results_and_gradients(op)).lower(*args).compile()
        thread = threading.Thread(target=lambda: results.append(jax.block_until_ready(program(*args))))
        thread.start()
        thread.join()
        expected = program(*args)
    for actual, value in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(actual, value)
