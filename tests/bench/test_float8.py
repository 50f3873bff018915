"""`bench float8`: every way trains the same model, and what one of them keeps goes from step to step."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import float8, models

SPEC = replace(models.small(float8.EIGHT_B), attention="xla")
WAYS = [way for way in float8.WAYS if way != "qwix"]  # which is not among the requirements


@pytest.fixture(scope="module")
def steps():
    """Of each way the next state and the loss, and the state before."""
    inputs = models.batch(SPEC)
    executables, state = float8.programs_of(SPEC, "train step", WAYS, models.init(SPEC), inputs)
    # A step consumes its state.
    return {way: run(jax.tree.map(jnp.copy, state), *inputs) for way, run in executables.items()}, state


@pytest.mark.parametrize("way", WAYS)
def test_a_step_has_the_loss_and_changes_what_it_keeps(steps, way):
    results, ((params, kept), _) = steps
    ((next_params, next_kept), _), loss = results[way]
    np.testing.assert_allclose(loss, results["bf16"][1], rtol=0.02)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: (a != b).any(), params, next_params)))
    changed = [(a != b).any() for a, b in zip(*map(jax.tree.leaves, (kept, next_kept)), strict=True)]
    assert any(changed) == (way == "flax")


def test_each_product_but_the_last_has_a_state_of_its_own(steps):
    _, ((_, kept), _) = steps
    assert len(kept) == 6 * SPEC.layers  # of queries, keys, values, what attention gives, gate and up, down
    ((_, kept), _), _ = steps[0]["flax"]
    largest = [np.max(state["_overwrite_with_gradient"]["input_amax_history"]) for state in kept]
    assert min(largest) > 0
