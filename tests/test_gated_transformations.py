"""Law 7 for the gated norm: what works on the formula works on it and gives the same."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import draw, operands
from gating import BWD, FWD, MAMBA, QWEN, draw_operands, formula, gated, gated_calls, variants
from hlo import count_native_calls
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from native import is_built
from test_sharding import mesh_of
from test_transformations import assert_close
from transformations import POLICIES, TRANSFORMATIONS, loss_of

import jaxnorm

ALL = (0, 1, 2)
DIMS = (6, 10)
# The order and whether a row has groups: what rules and shapes depend on.
SHAPES = {"groups gated first": (MAMBA, 5), "rows gated last": (QWEN, None)}

shapes = pytest.mark.parametrize("shape", SHAPES)
transformations = pytest.mark.parametrize("name", TRANSFORMATIONS)


def ours_and_formula(shape):
    variant, group_size = SHAPES[shape]
    return gated(variant, group_size=group_size), formula(variant, group_size)


GROUPED, GROUPED_FORMULA = ours_and_formula("groups gated first")


def of_x(norm):
    """A function of (x, scale, bias) that is linear in each weight, as a norm is; the gate depends on x too."""
    return lambda x, scale=None, bias=None: norm(x, 1.5 + jnp.cos(x), scale) + (0 if bias is None else bias)


@cache
def compiled(name):
    return jax.jit(TRANSFORMATIONS[name].transform(of_x(GROUPED))).lower(*operands(DIMS)).compile()


@transformations
def test_transformed_and_compiled(name):
    expected = jax.jit(TRANSFORMATIONS[name].transform(of_x(GROUPED_FORMULA)))(*operands(DIMS))
    assert_close(compiled(name)(*operands(DIMS)), expected)


@transformations
def test_native_calls_in_the_compiled_program(name):
    _, fwd, bwd = TRANSFORMATIONS[name]
    calls = count_native_calls(compiled(name).as_text())
    counted = {target for target, count in ((FWD, fwd), (BWD, bwd)) if count is not None}
    assert {name: count for name, count in calls.items() if name in counted} == gated_calls(fwd or 0, bwd or 0)


def gradient_under(name):
    return jax.jit(jax.grad(loss_of(jax.checkpoint(GROUPED, policy=POLICIES[name].policy)), ALL))


@pytest.mark.parametrize("name", POLICIES)
def test_native_calls_under_a_checkpoint_policy(name):
    calls = count_native_calls(gradient_under(name).lower(*draw_operands(DIMS)).as_text())
    assert calls == gated_calls(fwd=POLICIES[name].fwd, bwd=1)


@pytest.mark.parametrize("name", ["nothing_saveable", "everything_saveable"])
def test_gradient_under_a_checkpoint_policy(name):
    args = draw_operands(DIMS)
    assert_close(gradient_under(name)(*args), jax.jit(jax.grad(loss_of(GROUPED_FORMULA), ALL))(*args))


OF_EVERY_OPERAND = {
    "call": lambda norm: norm,
    "grad": lambda norm: jax.grad(loss_of(norm), ALL),
    "hessian": lambda norm: jax.hessian(loss_of(norm), ALL),
    "grad of grad": lambda norm: jax.grad(
        lambda *args: sum(jnp.sin(g).sum() for g in jax.grad(loss_of(norm), ALL)(*args)), ALL
    ),
    "jvp of grad": lambda norm: lambda *args: jax.jvp(jax.grad(loss_of(norm), ALL), args, tuple(map(jnp.cos, args))),
    "jvp of the gate": lambda norm: lambda x, g, s: jax.jvp(lambda g: norm(x, g, s), (g,), (jnp.cos(g),)),
    "jvp of the scale": lambda norm: lambda x, g, s: jax.jvp(lambda s: norm(x, g, s), (s,), (jnp.cos(s),)),
    "grad of the gate twice": lambda norm: jax.grad(
        lambda *args: jnp.sin(jax.grad(loss_of(norm), 1)(*args)).sum(), ALL
    ),
    "grad of the scale twice": lambda norm: jax.grad(
        lambda *args: jnp.sin(jax.grad(loss_of(norm), 2)(*args)).sum(), ALL
    ),
    "hessian without a scale": lambda norm: lambda x, g, s: jax.hessian(loss_of(norm), (0, 1))(x, g),
    "transpose of vjp": lambda norm: (
        lambda *args: jax.linear_transpose(jax.vjp(norm, *args)[1], norm(*args))(tuple(map(jnp.cos, args)))
    ),
}


@pytest.mark.parametrize("name", OF_EVERY_OPERAND)
def test_of_every_operand(name):
    args = draw_operands((3, 10))
    ours, exact = (OF_EVERY_OPERAND[name](norm) for norm in (GROUPED, GROUPED_FORMULA))
    assert_close(jax.jit(ours)(*args), jax.jit(exact)(*args))


@variants
def test_second_derivatives_of_every_activation(variant):
    args = draw_operands((2, 6))
    ours, exact = (OF_EVERY_OPERAND["jvp of grad"](norm) for norm in (gated(variant), formula(variant)))
    assert_close(jax.jit(ours)(*args), jax.jit(exact)(*args))


# Where every primitive runs alone.
@pytest.mark.parametrize("name", ["call", "grad"])
def test_outside_jit(name):
    args = draw_operands(DIMS)
    ours, exact = (OF_EVERY_OPERAND[name](norm) for norm in (GROUPED, GROUPED_FORMULA))
    assert_close(ours(*args), exact(*args))


# Over three examples of one operand, and of every one.
@pytest.mark.parametrize("moved", [(0,), (1,), (2,), (0, 1), ALL], ids=str)
@shapes
def test_vmap_of_grad(shape, moved):
    args = draw_operands((2, 10))
    axes = [0 if i in moved else None for i in ALL]
    examples = [jnp.stack([a, 2 * a, jnp.sin(a)]) if i in moved else a for i, a in enumerate(args)]
    ours, exact = (jax.vmap(OF_EVERY_OPERAND["grad"](norm), axes) for norm in ours_and_formula(shape))
    assert_close(jax.jit(ours)(*examples), jax.jit(exact)(*examples))


@pytest.mark.parametrize("moved", [(0,), (1,), (0, 1)], ids=str)
def test_rows_by_vmap_are_one_call_each_way(moved):
    x, gate, scale = draw_operands(DIMS)
    axes = [0 if i in moved else None for i in (0, 1)]
    examples = [jnp.stack([a] * 3) if i in moved else a for i, a in enumerate((x, gate))]
    gradients = jax.vmap(jax.grad(loss_of(lambda x, gate: GROUPED(x, gate, scale)), (0, 1)), axes)
    text = jax.jit(gradients).lower(*examples).compile().as_text()
    assert count_native_calls(text) == gated_calls(fwd=1, bwd=1)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("gate_spec", [P("a"), P()], ids=str)
def test_rows_on_a_mesh(devices, axis_type, gate_spec):
    mesh = mesh_of(devices, axis_type)
    args = draw_operands((8, 20))
    expected = jax.jit(jax.grad(loss_of(GROUPED_FORMULA), ALL))(*args)
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(args, (P("a"), gate_spec, P()), strict=True)
        ]
        assert_close(jax.jit(jax.grad(loss_of(GROUPED), ALL))(*placed), expected)


# Scale is whole on each device and x is not: it is split by itself, and its gradient is whole again.
@pytest.mark.parametrize("variant", [{}, {"group_size": 4}], ids=str)
def test_features_on_an_explicit_mesh(devices, variant):
    norm = partial(jaxnorm.gated_rms_norm, gate_first=True, **variant)
    x, gate, scale = draw_operands((6, 64))
    expected = jax.grad(loss_of(partial(norm, implementation="jnp")), ALL)(x, gate, scale)
    mesh = mesh_of(devices, AxisType.Explicit)
    with jax.set_mesh(mesh):
        x, gate = (jax.device_put(a, NamedSharding(mesh, P(None, "a"))) for a in (x, gate))
        assert jax.typeof(jax.jit(norm)(x, gate, scale)).sharding.spec == P(None, "a")
        assert_close(jax.jit(jax.grad(loss_of(norm), ALL))(x, gate, scale), expected)
        with pytest.raises(ValueError, match=r"^gated_rms_norm: scale is sharded as .*expected"):
            norm(x, gate, jax.device_put(scale, NamedSharding(mesh, P("b"))))


# Scale is replicated: its gradient is summed over the mesh, and so is that of a gate that is the same everywhere.
@pytest.mark.parametrize("gate_spec", [P("a"), P()], ids=str)
def test_shard_map_of_grad(devices, gate_spec):
    mesh = mesh_of(devices, AxisType.Auto)
    x, gate, scale = draw_operands((8, 20))
    each = 8 // mesh.shape["a"]
    gate = gate if gate_spec else gate[:each]
    specs = (P("a"), gate_spec, P())
    gradients = jax.shard_map(
        jax.grad(loss_of(GROUPED), ALL), mesh=mesh, in_specs=specs, out_specs=specs, check_vma=True
    )

    def whole(x, gate, scale):
        return GROUPED_FORMULA(x, gate if gate_spec else jnp.tile(gate, (mesh.shape["a"], 1)), scale)

    assert_close(jax.jit(gradients)(x, gate, scale), jax.grad(loss_of(whole), ALL)(x, gate, scale))


def test_exported_for_every_platform_and_any_number_of_rows():
    (rows,) = export.symbolic_shape("rows")
    x, features = jax.ShapeDtypeStruct((rows, 60), jnp.float32), jax.ShapeDtypeStruct((60,), jnp.float32)
    program = export.export(jax.jit(jax.grad(loss_of(GROUPED), ALL)), platforms=("cpu", "cuda", "tpu"))(x, x, features)
    each = is_built("cpu") + is_built("gpu")
    assert count_native_calls(program.mlir_module()) == ({FWD: each, BWD: each} if each else {})
    args = draw_operands((5, 60))
    reloaded = export.deserialize(program.serialize())
    assert_close(reloaded.call(*args), jax.grad(loss_of(GROUPED_FORMULA), ALL)(*args))


@variants
def test_jvp_of_half_types(variant):
    primals = draw_operands((3, 40), "bfloat16")
    dots = tuple(draw("dot", a.shape, a.dtype) for a in primals)
    _, y_dot = jax.jit(lambda *args: jax.jvp(gated(variant), primals, args))(*dots)
    wide = [jax.tree.map(lambda a: a.astype("float32"), arrays) for arrays in (primals, dots)]
    _, expected = jax.jvp(formula(variant), *wide)
    assert y_dot.dtype == "bfloat16"
    np.testing.assert_allclose(y_dot.astype("float32"), expected, rtol=2e-2, atol=2e-2)
