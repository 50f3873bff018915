"""What `hlo.collectives` reads in a program, which the laws of meshes count."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from hlo import collectives, compiled_text
from jax.sharding import PartitionSpec as P
from meshes import mesh_of

# As XLA for GPUs writes them: the start of an asynchronous collective has the operands too.
ASYNCHRONOUS = """HloModule jit_f

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %c = f32[] add(%a, %b)
}

ENTRY %main (x: f32[8]) -> f32[16] {
  %start = (f32[8]{0}, bf16[4]{0}, f32[16]{0}, bf16[8]{0}) all-gather-start(%x, %y), dimensions={0}
  %done = (f32[16]{0}, bf16[8]{0}) all-gather-done(%start)
  %sums = (f32[16]{0}, f32[2]{0}) all-reduce-start(%z, %w), to_apply=%add
  ROOT %sum = (f32[16]{0}, f32[2]{0}) all-reduce-done(%sums)
}
"""


# JAX 0.11's XLA makes a tuple of the operands, those of an all-reduce among them.
IN_TUPLES = ASYNCHRONOUS.replace(
    "(f32[8]{0}, bf16[4]{0}, f32[16]{0}, bf16[8]{0}) all-gather",
    "((f32[8]{0}, bf16[4]{0}), (f32[16]{0}, bf16[8]{0})) all-gather",
).replace(
    "(f32[16]{0}, f32[2]{0}) all-reduce-start", "((f32[16]{0}, f32[2]{0}), (f32[16]{0}, f32[2]{0})) all-reduce-start"
)
ONE_IN_A_TUPLE = ASYNCHRONOUS.replace(
    "(f32[16]{0}, f32[2]{0}) all-reduce-start", "((f32[18]{0}), f32[18]{0}) all-reduce-start"
)


@pytest.mark.parametrize("text", [ASYNCHRONOUS, IN_TUPLES, ONE_IN_A_TUPLE])
def test_of_an_asynchronous_collective_the_results_count(text):
    assert collectives(text) == {"all-gather": 4 * 16 + 2 * 8, "all-reduce": 4 * (16 + 2)}


# A list of groups, and as many by a formula.
@pytest.mark.parametrize(("groups", "counts"), [("{{0},{1}}", 0), ("[2,1]<=[2]", 0), ("{{0,1}}", 1), ("[1,2]<=[2]", 1)])
def test_groups_of_one_device_exchange_nothing(groups, counts):
    text = ASYNCHRONOUS.replace("to_apply=%add", f"replica_groups={groups}, to_apply=%add")
    assert collectives(text).get("all-reduce", 0) == counts * 4 * (16 + 2)


def test_a_loop_counts_as_often_as_it_runs(devices):
    mesh = mesh_of(devices, jax.sharding.AxisType.Auto)

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=P("a"), out_specs=P(None))
    def sums(x):
        def step(x, _):
            return jax.lax.psum(jnp.cos(x), "a") / 2, None

        x = jax.lax.psum(x, "a")
        return jax.lax.scan(lambda x, _: (jax.lax.scan(step, x, length=3)[0], None), x, length=5)[0]

    size = mesh.shape["a"]
    expected = {"all-reduce": 4 * 16 * (1 + 5 * 3)} if size > 1 else {}
    assert collectives(compiled_text(sums, jnp.ones(16 * size))) == expected
