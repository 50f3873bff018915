"""Programs around norms that XLA splits: transformations, other shardings than one would choose, and misuse."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import pytest
from cases import NORMS, assert_near, bits, draw, draw_bias, draw_residual, draw_scale, draw_x
from hlo import collectives, compiled_text, count_native_calls
from jax import export
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh_of, mesh_of_three
from native import native_calls
from table import GATED
from table import NORMS as PLAIN
from transformations import loss_of

import jaxnorm

pytestmark = [pytest.mark.several, pytest.mark.jax_version]

DIMS = (8, 4, 64)
kinds = pytest.mark.parametrize("kind", NORMS)
axis_types = pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])


def operands(dims=DIMS, dtype="float32"):
    return draw_x(dims, dtype), draw_scale(dims[-1:], dtype), draw_bias(dims[-1:], dtype)


def placed(mesh, args, *specs):
    return meshes.placed(mesh, args, specs)


def layers(norm):
    """Three of them, each kept for the gradient by its inputs alone."""

    @jax.checkpoint
    def layer(y, _, *, weights):
        return y + norm(y, *weights), None

    return lambda x, *weights: jax.lax.scan(partial(layer, weights=weights), x, length=3)[0]


@axis_types
@kinds
def test_scan_of_checkpointed_layers(devices, kind, axis_type):
    mesh = mesh_of(devices, axis_type)
    step = jax.jit(jax.value_and_grad(loss_of(layers(NORMS[kind])), (0, 1, 2)))
    with jax.set_mesh(mesh):
        args = placed(mesh, operands(), P("a", "b"), P(), P())
        text = step.lower(*args).compile().as_text()
        actual = step(*args)
    assert_near(actual, step(*operands()))
    assert set(collectives(text)) == {"all-reduce"}
    assert count_native_calls(text) == native_calls(kind, fwd=2, bwd=1)


@axis_types
@kinds
def test_vmap(devices, kind, axis_type):
    mesh = mesh_of(devices, axis_type)
    x, *weights = operands((3, *DIMS))
    norm = jax.vmap(NORMS[kind], (0, None, None))
    with jax.set_mesh(mesh):
        args = placed(mesh, (x, *weights), P(None, "a", "b"), P(), P())
        text, y = compiled_text(norm, *args), jax.jit(norm)(*args)
    assert bits(y) == bits(jax.jit(norm)(x, *weights))
    assert collectives(text) == {}
    assert count_native_calls(text) == native_calls(kind, fwd=1)


# An ensemble whose members are spread over devices: each has its own weights, and their gradients.
@axis_types
@kinds
def test_vmap_over_weights_that_are_spread(devices, kind, axis_type):
    mesh = mesh_of(devices, axis_type)
    members = len(devices)
    args = draw_x((members, 4, 64)), draw_scale((members, 64)), draw_bias((members, 64))
    step = jax.jit(jax.vmap(jax.grad(loss_of(NORMS[kind]), (0, 1, 2))))
    with jax.set_mesh(mesh):
        spread = placed(mesh, args, *[P(("a", "b"))] * 3)
        text, actual = step.lower(*spread).compile().as_text(), step(*spread)
    assert_near(actual, step(*args))
    assert collectives(text) == {}
    assert count_native_calls(text) == native_calls(kind, fwd=1, bwd=1)


# Groups of devices are read off the sharding, whatever the order in which a mesh has the devices.
@kinds
@pytest.mark.parametrize("spec", [P("a", "b"), P("b", None, "a"), P(None, "a", "b")], ids=str)
def test_another_order_of_devices(devices, kind, spec):
    mesh = Mesh(np.reshape(devices[::-1], (2, -1)).T, ("a", "b"))
    step = jax.jit(jax.value_and_grad(loss_of(NORMS[kind]), (0, 1, 2)))
    assert_near(step(*placed(mesh, operands(), spec, P(), P())), step(*operands()))


# The parts of a sum are float32 until they are added.
@kinds
def test_gradients_of_bfloat16_weights(devices, kind):
    mesh = mesh_of(devices, AxisType.Auto)
    args = operands((64, 8, 64), "bfloat16")
    step = jax.jit(jax.grad(loss_of(NORMS[kind]), (1, 2)))
    actual = step(*placed(mesh, args, P(("a", "b")), P(), P()))
    expected = step(*args)
    jax.tree.map(lambda a, e: np.testing.assert_allclose(*np.float32((a, e)), rtol=2**-8, atol=1e-3), actual, expected)


# Sharded parameters (FSDP): they are gathered, and nothing else is.
@kinds
def test_weights_that_are_spread_where_rows_are(devices, kind):
    mesh = mesh_of(devices, AxisType.Auto)
    args = placed(mesh, operands(), P(("a", "b")), P(("a", "b")), P(("a", "b")))
    assert collectives(compiled_text(NORMS[kind], *args)) == {"all-gather": 2 * 4 * DIMS[-1]}
    assert bits(jax.jit(NORMS[kind])(*args)) == bits(jax.jit(NORMS[kind])(*operands()))


@kinds
def test_rows_that_do_not_divide(devices, kind):
    mesh = mesh_of(devices, AxisType.Auto)
    rows = 2 * len(devices) + 1

    def norm(x, *weights):
        x = jax.lax.with_sharding_constraint(jnp.sin(x), NamedSharding(mesh, P(("a", "b"))))
        return NORMS[kind](x, *weights)

    args = operands((rows, 64))
    step = jax.jit(jax.value_and_grad(loss_of(norm), (0, 1, 2)))
    exact = jax.value_and_grad(loss_of(lambda x, *weights: NORMS[kind](jnp.sin(x), *weights)), (0, 1, 2))
    assert_near(step(*placed(mesh, args, P(), P(), P())), exact(*args))


@kinds
def test_only_the_result_is_sharded(devices, kind):
    mesh = mesh_of(devices, AxisType.Auto)
    norm = jax.jit(NORMS[kind], out_shardings=NamedSharding(mesh, P("a", "b")))
    args = placed(mesh, operands(), P(), P(), P())
    assert collectives(norm.lower(*args).compile().as_text()) == {}
    assert bits(norm(*args)) == bits(jax.jit(NORMS[kind])(*operands()))


@pytest.mark.parametrize("spec", [P("a", "b"), P("a", None, "b")], ids=str)
def test_padding(devices, spec):
    mesh = mesh_of(devices, AxisType.Auto)
    args = draw_x((8, 4, 48)), draw_residual((8, 4, 48)), draw_scale((48,))

    def loss(x, residual, scale):
        y, total = jaxnorm.add_rms_norm(x, residual, scale, pad_to=32)
        return (y * draw("dy", y.shape)).sum() + jnp.sin(total).sum()

    step = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
    assert_near(step(*placed(mesh, args, spec, spec, P())), step(*args))


# The stream takes the donated buffer, on each device.
@axis_types
def test_a_donated_residual(devices, axis_type):
    mesh = mesh_of(devices, axis_type)
    args = draw_x(DIMS), draw_residual(DIMS), draw_scale(DIMS[-1:])
    function = jax.jit(lambda x, r, s: jaxnorm.add_rms_norm(x, r, s)[::-1], donate_argnums=1)
    with jax.set_mesh(mesh):
        spread = placed(mesh, args, P("a", "b"), P("a", "b"), P())
        text = function.lower(*spread).compile().as_text()
        actual = function(*spread)
    assert bits(actual) == bits(jaxnorm.add_rms_norm(*args)[::-1])
    assert "output_to_operand_aliasing" in text
    assert " copy(" not in text


# XLA numbers the devices that a shard_map leaves it in the order of x's axes, whatever order the mesh has.
@kinds
@pytest.mark.parametrize("names", ["abc", "bca", "cba"])
@pytest.mark.parametrize("spec", [P("a", "b"), P("b", None, "a"), P(None, None, ("b", "a"))], ids=str)
def test_shard_map_over_one_axis_of_three(devices, kind, spec, names):
    mesh = mesh_of_three(devices[::-1], names)

    @partial(jax.shard_map, mesh=mesh, in_specs=(P("c"), P(), P()), out_specs=P("c"), axis_names={"c"})
    def norm(x, *weights):
        return NORMS[kind](jax.lax.with_sharding_constraint(x, spec), *weights)

    step = jax.jit(jax.value_and_grad(loss_of(norm), (0, 1, 2)))
    args = placed(mesh, operands(), P("c"), P(), P())
    with jax.set_mesh(mesh):
        text = step.lower(*args).compile().as_text()
        actual = step(*args)
    assert_near(actual, jax.jit(jax.value_and_grad(loss_of(NORMS[kind]), (0, 1, 2)))(*operands()))
    # LayerNorm's exchange, of 2 * 4 bytes a row and part. x is never gathered.
    assert collectives(text).get("all-gather", 0) <= (kind == "layer") * 8 * 16 * 4
    # Of parts of rows the forward is no one call.
    expected = native_calls(kind, fwd=spec == P("a", "b"), bwd=1)
    assert expected.items() <= count_native_calls(text).items()


# Each stage has layers of its own and hands its rows to the next; XLA splits what is in a stage.
def test_stages_of_a_pipeline(devices):
    mesh = mesh_of_three(devices, "cab")

    def step_by(implementation):
        norm = layers(partial(jaxnorm.rms_norm, implementation=implementation))

        @partial(jax.shard_map, mesh=mesh, in_specs=P("c"), out_specs=P("c"), axis_names={"c"})
        def stage(x, weights):
            return jax.lax.ppermute(norm(x, *weights), "c", [(0, 1), (1, 0)])

        return jax.jit(jax.value_and_grad(loss_of(stage), (0, 1)))

    with jax.set_mesh(mesh):
        args = placed(mesh, [draw_x((2, *DIMS)), draw_scale((2, 64))], P("c", "a"), P("c"))
        texts = [step_by(how).lower(*args).compile().as_text() for how in (None, "jnp")]
        actual, expected = (step_by(how)(*args) for how in (None, "jnp"))
    assert_near(actual, expected)
    assert collectives(texts[0]) == collectives(texts[1])
    assert count_native_calls(texts[0]) == native_calls("rms", fwd=2, bwd=1)


def test_native_for_several_platforms_in_a_shard_map_over_one_axis(devices):
    norm = partial(jaxnorm.rms_norm, implementation="native")
    mesh = mesh_of(devices, AxisType.Auto)
    sharded = jax.shard_map(norm, mesh=mesh, in_specs=P("a"), out_specs=P("a"), axis_names={"a"})
    (x,) = placed(mesh, [draw_x(DIMS)], P("a", "b"))
    with pytest.raises(RuntimeError, match="for several platforms"):
        export.export(jax.jit(sharded), platforms=("cpu", "cuda"))(x)


# The outer one takes the mesh's first axis: XLA of JAX 0.12 ends the process where axes are taken in another order.
def test_shard_maps_in_each_other(devices):
    mesh = mesh_of_three(devices, "cab")

    @partial(jax.shard_map, in_specs=(P(None, "a"), P()), out_specs=P(None, "a"), axis_names={"a"})
    def inner(x, scale):
        return jaxnorm.rms_norm(x, scale, implementation="native")

    outer = jax.jit(jax.shard_map(inner, mesh=mesh, in_specs=(P("c"), P()), out_specs=P("c"), axis_names={"c"}))
    args = operands()[:2]
    with jax.set_mesh(mesh):
        spread = placed(mesh, args, P("c", "a", "b"), P("b"))
        text = outer.lower(*spread).compile().as_text()
        actual = outer(*spread)
    assert_near(actual, jaxnorm.rms_norm(*args))
    assert collectives(text).keys() <= {"all-reduce"}


@axis_types
def test_native_over_several_devices(devices, axis_type):
    mesh = mesh_of(devices, axis_type)
    norm = partial(jaxnorm.rms_norm, implementation="native")
    with jax.set_mesh(mesh):
        (x,) = placed(mesh, [draw_x(DIMS)], P("a", "b"))
        assert bits(jax.jit(norm)(x)) == bits(norm(draw_x(DIMS)))


@pytest.mark.parametrize(
    ("x_spec", "scale_spec", "expected"), [(P("a", None, "b"), P("a"), P("b")), (P("a"), P("b"), P(None))], ids=str
)
@pytest.mark.parametrize("op", [*PLAIN, GATED[0]], ids=str)
def test_a_weight_that_is_sharded_unlike_x(devices, op, x_spec, scale_spec, expected):
    mesh = Mesh(np.reshape(devices, (2, -1)), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        x, scale = placed(mesh, operands()[:2], x_spec, scale_spec)
        message = f"{op.public}: scale is sharded as {scale_spec} over an Explicit mesh, expected {expected}"
        with pytest.raises(ValueError, match=re.escape(message)):
            jax.eval_shape(op.function, *[x] * op.arrays, scale)


@pytest.mark.parametrize("name", ["rms_norm_quantized", "gated_rms_norm", "gated_rms_norm_quantized"])
def test_a_group_that_is_split(devices, name):
    mesh = Mesh(devices, "b", axis_types=(AxisType.Explicit,))
    to = jaxnorm.Quantization(jnp.int8, "group", group_size=64)
    norms = {
        "rms_norm_quantized": lambda x: jaxnorm.rms_norm_quantized(x, quantization=to),
        "gated_rms_norm": lambda x: jaxnorm.gated_rms_norm(x, x, gate_first=True, group_size=64),
        "gated_rms_norm_quantized": lambda x: jaxnorm.gated_rms_norm_quantized(x, x, gate_first=True, quantization=to),
    }
    with jax.set_mesh(mesh):
        (x,) = placed(mesh, [draw_x((8, 64))], P(None, "b"))
        with pytest.raises(ValueError, match=rf"^{name}: .* split over {len(devices)} devices .* group of 64 columns"):
            jax.eval_shape(norms[name], x)
