"""The cross-entropy of a product with all its operands over meshes, which split rows, columns or classes."""

import jax
import pytest
from cases import assert_near
from coverage import cover
from hlo import collectives
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from linear_losses import CLASSES, OPTIONS, REDUCTIONS, loss, masks, split, whole
from meshes import mesh_of, placed

pytestmark = [pytest.mark.any_code, pytest.mark.needs("several"), pytest.mark.usefixtures("exact_products")]


# The kernel's classes, with those of bias and mask, or the columns of x and kernel.
SPECS = {
    "rows": (P("a"), P(), P()),
    "rows over all": (P(("a", "b")), P(), P()),
    "rows and classes": (P("a"), P(None, "b"), P("b")),
    "classes": (P(), P(None, ("a", "b")), P(("a", "b"))),
    "columns": (P("a", None, "b"), P("b"), P()),
}


@cover(
    axis_type=[AxisType.Auto, AxisType.Explicit],
    specs=SPECS,
    reduction=REDUCTIONS,
    where=["classes", "rows"],
    implementation=[None, "jnp"],
)
def test_over_devices(devices, axis_type, specs, reduction, where, implementation):
    mesh, dims, classes = mesh_of(devices, axis_type), (8, 8, 16), 64
    moving, labels = split(dims=dims, classes=classes)
    mask = masks(dims, classes)[where]
    x_spec, kernel_spec, class_spec = specs
    rows = P(*x_spec[:1])

    def step(moving, labels, mask):
        options = {**OPTIONS, "reduction": reduction, "rows_per_chunk": 16, "implementation": implementation}
        return jax.value_and_grad(lambda moving: loss(labels, where=mask, **options)(moving).sum())(moving)

    expected = jax.device_get(jax.jit(step)(moving, labels, mask))
    with jax.set_mesh(mesh):
        of = {"x": x_spec, "kernel": kernel_spec, "bias": class_spec, "weights": rows, "logit_scale": P()}
        there = dict(zip(moving, placed(mesh, moving.values(), [of[name] for name in moving]), strict=True))
        others = placed(mesh, (labels, mask), (rows, class_spec if where == "classes" else rows))
        program = jax.jit(step).lower(there, *others).compile()
        actual = jax.device_get(program(there, *others))
    assert_near(actual, expected)
    if specs in (SPECS["rows"], SPECS["rows over all"]):  # the labels may be gathered, to know which classes they are
        assert collectives(program.as_text()).get("all-gather", 0) <= 4 * labels.size


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_in_a_shard_map(devices, check_vma, reduction):
    mesh, dims = mesh_of(devices, AxisType.Auto), (8, 8, 16)
    moving, labels = split(dims=dims)
    mask, rows = masks(dims, CLASSES)["classes"], P(("a", "b"))
    of = {"x": rows, "kernel": P(), "bias": P(), "weights": rows, "logit_scale": P()}

    def shard(moving, labels, mask):
        return jax.lax.psum(loss(labels, where=mask, reduction=reduction, rows_per_chunk=4)(moving).sum(), ("a", "b"))

    sharded = jax.shard_map(shard, mesh=mesh, in_specs=(of, rows, P()), out_specs=P(), check_vma=check_vma)
    ours = jax.jit(jax.value_and_grad(lambda moving: sharded(moving, labels, mask)))(moving)
    theirs = jax.jit(jax.value_and_grad(whole(labels, where=mask, reduction="sum")))(moving)
    assert_near(jax.device_get(ours), jax.device_get(theirs))
