"""What `bench rotary` measures, but for the clock."""

import jax
import pytest
from cases import assert_near

from bench import rotary


@pytest.mark.kernels
@pytest.mark.parametrize("way", ["forward", "step"])
def test_both_sides_compute_the_same(way):
    operands = rotary.operands((2, 3, 4, 2, 16), "float32", 0)
    ours, xla = (jax.jit(rotary.programs(how)[way])(*operands) for how in ("native", "jnp"))
    assert_near(ours, xla)


def test_each_seed_gives_others():
    (q, k, *_), (other, *_) = (rotary.operands((2, 3, 4, 2, 16), "bfloat16", seed) for seed in (0, 1))
    assert (q.shape, k.shape) == ((2, 3, 4, 16), (2, 3, 2, 16))
    assert (q != other).any()
