"""What `bench rotary`, `bench groups`, `bench activations` and `bench rounding` measure, but for the clock."""

import jax
import numpy as np
import pytest
from cases import assert_near

from bench import activations, groups, rotary, rounding

SMALL = {
    "rotary": (rotary.SUBJECT, (2, 3, 4, 2, 16)),
    "joint rotary": (rotary.JOINT, (2, 3, 4, 2, 16)),
    "groups": (groups.SUBJECT, (2, 3, 4, 64)),
    "activations": (activations.SUBJECT, (6, 40)),
}


@pytest.mark.kernels
@pytest.mark.parametrize("way", ["forward", "step"])
@pytest.mark.parametrize("name", SMALL)
def test_both_sides_compute_the_same(name, way):
    subject, shape = SMALL[name]
    operands = subject.operands(shape, "float32", 0)
    ours, xla = (jax.jit(subject.programs(how)[way])(*operands) for how in ("native", "jnp"))
    assert_near(ours, xla)


@pytest.mark.parametrize("name", SMALL)
def test_each_seed_gives_others(name):
    subject, shape = SMALL[name]
    of_both = (subject.operands(shape, "bfloat16", seed)[:2] for seed in (0, 1))
    # Those that are read forward: dy comes last.
    count = 2 if name == "rotary" else 1
    arrays, others = (of_one[:count] for of_one in of_both)
    assert sum(array.size for array in arrays) == subject.elements(shape)
    assert all((array != other).any() for array, other in zip(arrays, others, strict=True))


# Bit for bit on a CPU; of the formula XLA for GPUs decides how exactly it divides.
@pytest.mark.parametrize("way", ["rows", "kernel", "gradient"])
def test_kernels_round_as_xla_does(way):
    operands = rounding.SUBJECT.operands((64, 48), "bfloat16", 0)
    sides = (jax.jit(rounding.SUBJECT.programs(how)[way])(*operands) for how in ("native", "jnp"))
    for ours, xla in zip(*map(jax.tree.leaves, sides), strict=True):
        assert (ours.shape, ours.dtype) == (xla.shape, xla.dtype)
        same = np.asarray(ours).view(np.uint8) == np.asarray(xla).view(np.uint8)
        assert same.all() if jax.default_backend() == "cpu" else same.mean() > 0.9
