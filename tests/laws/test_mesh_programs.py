"""Programs of ops over meshes: transformations, shardings, types, processes, misuse."""

import os
import re
import socket
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ADDS, KINDS, NORMS, assert_near, bits, draw, draw_bias, draw_residual, draw_scale, draw_x, operands
from coverage import cover
from hlo import collectives, compiled_text, count_native_calls
from internals import columns
from jax import export, lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from meshes import mesh_of, mesh_of_three, on_mesh, placed
from native import native_calls
from table import GATED, NORMS as PLAIN
from transformations import loss_of

import jaxnorm

pytestmark = pytest.mark.jax_version

DIMS = (8, 4, 64)
kinds = pytest.mark.parametrize("kind", KINDS)
axis_types = pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])


def run(mesh, function, args, *specs, is_set=True):
    """What a function gives on a mesh of operands that are split so, the native calls and the collectives of that."""
    actual, text = on_mesh(mesh, function, args, specs, is_set=is_set)
    return actual, count_native_calls(text), collectives(text)


def value_and_gradients(norm):
    return jax.jit(jax.value_and_grad(loss_of(norm), (0, 1, 2)))


def layers(norm):
    """Three of them, each kept for the gradient by its inputs alone."""

    @jax.checkpoint
    def layer(y, _, *, weights):
        return y + norm(y, *weights), None

    return lambda x, *weights: lax.scan(partial(layer, weights=weights), x, length=3)[0]


@axis_types
@kinds
def test_scan_of_checkpointed_layers(devices, kind, axis_type):
    step, args = value_and_gradients(layers(NORMS[kind])), operands(DIMS)
    actual, calls, exchanged = run(mesh_of(devices, axis_type), step, args, P("a", "b"), P(), P())
    assert_near(actual, step(*args))
    assert (calls, set(exchanged)) == (native_calls(kind, fwd=2, bwd=1), {"all-reduce"})


@axis_types
@kinds
def test_vmap(devices, kind, axis_type):
    native = partial(NORMS[kind], implementation="native")
    norm, args = jax.jit(jax.vmap(native, (0, None, None))), operands((3, *DIMS))
    y, calls, exchanged = run(mesh_of(devices, axis_type), norm, args, P(None, "a", "b"), P(), P())
    assert (bits(y), (calls, exchanged)) == (bits(norm(*args)), (native_calls(kind, fwd=1), {}))


@axis_types
@kinds
def test_vmap_over_weights_that_are_spread(devices, kind, axis_type):
    members = len(devices)
    args = draw_x((members, 4, 64)), draw_scale((members, 64)), draw_bias((members, 64))
    step = jax.jit(jax.vmap(jax.grad(loss_of(NORMS[kind]), (0, 1, 2))))
    actual, calls, exchanged = run(mesh_of(devices, axis_type), step, args, *[P(("a", "b"))] * 3)
    assert_near(actual, step(*args))
    assert (calls, exchanged) == (native_calls(kind, fwd=1, bwd=1), {})


# Groups of devices are read off the sharding, whatever the order in which a mesh has the devices.
@kinds
@pytest.mark.parametrize("spec", [P("a", "b"), P("b", None, "a"), P(None, "a", "b")], ids=str)
def test_another_order_of_devices(devices, kind, spec):
    mesh, args = Mesh(np.reshape(devices[::-1], (2, -1)).T, ("a", "b")), operands(DIMS)
    step = value_and_gradients(NORMS[kind])
    assert_near(run(mesh, step, args, spec, P(), P(), is_set=False)[0], step(*args))


# Sharded parameters (FSDP), which are gathered, and nothing else is; and a result that alone is sharded.
@kinds
@pytest.mark.parametrize(
    ("spec", "of_result", "expected"),
    [(P(("a", "b")), None, {"all-gather": 2 * 4 * DIMS[-1]}), (P(), P("a", "b"), {})],
    ids=["weights", "result"],
)
def test_what_is_sharded_unlike_rows(devices, kind, spec, of_result, expected):
    mesh, args = mesh_of(devices, AxisType.Auto), operands(DIMS)
    norm = jax.jit(NORMS[kind], out_shardings=of_result and NamedSharding(mesh, of_result))
    y, _, exchanged = run(mesh, norm, args, *[spec] * 3, is_set=False)
    assert (bits(y), exchanged) == (bits(jax.jit(NORMS[kind])(*args)), expected)


@kinds
def test_rows_that_do_not_divide(devices, kind):
    mesh, args = mesh_of(devices, AxisType.Auto), operands((2 * len(devices) + 1, 64))

    def norm(x, *weights):
        x = lax.with_sharding_constraint(jnp.sin(x), NamedSharding(mesh, P(("a", "b"))))
        return NORMS[kind](x, *weights)

    exact = value_and_gradients(lambda x, *weights: NORMS[kind](jnp.sin(x), *weights))
    assert_near(run(mesh, value_and_gradients(norm), args, P(), P(), P(), is_set=False)[0], exact(*args))


@pytest.mark.parametrize("spec", [P("a", "b"), P("a", None, "b")], ids=str)
def test_padding(devices, spec):
    args = draw_x((8, 4, 48)), draw_residual((8, 4, 48)), draw_scale((48,))

    def loss(x, residual, scale):
        y, total = jaxnorm.add_rms_norm(x, residual, scale, pad_to=32)
        return (y * draw("dy", y.shape)).sum() + jnp.sin(total).sum()

    step = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
    assert_near(run(mesh_of(devices, AxisType.Auto), step, args, spec, spec, P(), is_set=False)[0], step(*args))


@axis_types
def test_a_donated_residual(devices, axis_type):
    mesh = mesh_of(devices, axis_type)
    args = draw_x(DIMS), draw_residual(DIMS), draw_scale(DIMS[-1:])
    function, specs = lambda *args: jaxnorm.add_rms_norm(*args)[::-1], (P("a", "b"), P("a", "b"), P())
    actual, text = on_mesh(mesh, function, args, specs, donate_argnums=1)
    assert bits(actual) == bits(jaxnorm.add_rms_norm(*args)[::-1])
    assert "output_to_operand_aliasing" in text
    assert " copy(" not in text


# XLA numbers the devices that a shard_map leaves it in the order of x's axes, whatever order the mesh has.
@kinds
@pytest.mark.parametrize("names", ["abc", "bca", "cba"])
@pytest.mark.parametrize("spec", [P("a", "b"), P("b", None, "a"), P(None, None, ("b", "a"))], ids=str)
def test_shard_map_over_one_axis_of_three(devices, kind, spec, names):
    mesh, args = mesh_of_three(devices[::-1], names), operands(DIMS)

    @partial(jax.shard_map, mesh=mesh, in_specs=(P("c"), P(), P()), out_specs=P("c"), axis_names={"c"})
    def norm(x, *weights):
        return NORMS[kind](lax.with_sharding_constraint(x, spec), *weights)

    actual, calls, exchanged = run(mesh, value_and_gradients(norm), args, P("c"), P(), P())
    assert_near(actual, value_and_gradients(NORMS[kind])(*args))
    # LayerNorm's exchange, of 2 * 4 bytes a row and part. x is never gathered.
    assert exchanged.get("all-gather", 0) <= (kind == "layer") * 8 * 16 * 4
    # Of parts of rows the forward is no one call.
    assert native_calls(kind, fwd=spec == P("a", "b"), bwd=1).items() <= calls.items()


# Each stage has layers of its own and hands its rows to the next; XLA splits what is in a stage.
def test_stages_of_a_pipeline(devices):
    mesh = mesh_of_three(devices, "cab")

    def step_by(implementation):
        norm = layers(partial(jaxnorm.rms_norm, implementation=implementation))

        @partial(jax.shard_map, mesh=mesh, in_specs=P("c"), out_specs=P("c"), axis_names={"c"})
        def stage(x, weights):
            return lax.ppermute(norm(x, *weights), "c", [(0, 1), (1, 0)])

        return jax.value_and_grad(loss_of(stage), (0, 1))

    args = draw_x((2, *DIMS)), draw_scale((2, 64))
    (actual, calls, ours), (expected, _, formula) = (
        run(mesh, step_by(how), args, P("c", "a"), P("c")) for how in (None, "xla")
    )
    assert_near(actual, expected)
    assert (calls, ours) == (native_calls("rms", fwd=2, bwd=1), formula)


def test_native_for_several_platforms_in_a_shard_map_over_one_axis(devices):
    norm, mesh = partial(jaxnorm.rms_norm, implementation="native"), mesh_of(devices, AxisType.Auto)
    sharded = jax.shard_map(norm, mesh=mesh, in_specs=P("a"), out_specs=P("a"), axis_names={"a"})
    (x,) = placed(mesh, [draw_x(DIMS)], [P("a", "b")])
    with pytest.raises(RuntimeError, match="for several platforms"):
        export.export(jax.jit(sharded), platforms=("cpu", "cuda"))(x)


# The outer one takes the mesh's first axis: XLA of JAX 0.12 ends the process where axes are taken in another order.
def test_shard_maps_in_each_other(devices):
    mesh, args = mesh_of_three(devices, "cab"), operands(DIMS)[:2]

    @partial(jax.shard_map, in_specs=(P(None, "a"), P()), out_specs=P(None, "a"), axis_names={"a"})
    def inner(x, scale):
        return jaxnorm.rms_norm(x, scale, implementation="native")

    outer = jax.shard_map(inner, mesh=mesh, in_specs=(P("c"), P()), out_specs=P("c"), axis_names={"c"})
    actual, _, exchanged = run(mesh, outer, args, P("c", "a", "b"), P("b"))
    assert_near(actual, jaxnorm.rms_norm(*args))
    assert exchanged.keys() <= {"all-reduce"}


@pytest.mark.parametrize(
    ("x_spec", "scale_spec", "expected"), [(P("a", None, "b"), P("a"), P("b")), (P("a"), P("b"), P(None))], ids=str
)
@pytest.mark.parametrize("op", [*PLAIN, GATED[0]], ids=str)
def test_a_weight_that_is_sharded_unlike_x(devices, op, x_spec, scale_spec, expected):
    mesh = Mesh(np.reshape(devices, (2, -1)), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    message = f"{op.public}: scale is sharded as {scale_spec} over an Explicit mesh, expected {expected}"
    with pytest.raises(ValueError, match=re.escape(message)):
        run(mesh, lambda x, scale: op.function(*[x] * op.arrays, scale), operands(DIMS)[:2], x_spec, scale_spec)


GROUPS = jaxnorm.Quantization(jnp.int8, "group", group_size=64)
OF_GROUPS = {
    "rms_norm_quantized": partial(jaxnorm.rms_norm_quantized, quantization=GROUPS),
    "gated_rms_norm": lambda x: jaxnorm.gated_rms_norm(x, x, gate_first=True, group_size=64),
    "gated_rms_norm_quantized": lambda x: jaxnorm.gated_rms_norm_quantized(x, x, gate_first=True, quantization=GROUPS),
}


@pytest.mark.parametrize("name", OF_GROUPS)
def test_a_group_that_is_split(devices, name):
    mesh = Mesh(devices, "b", axis_types=(AxisType.Explicit,))
    with pytest.raises(ValueError, match=rf"^{name}: .* split over {len(devices)} devices .* group of 64 columns"):
        run(mesh, OF_GROUPS[name], [draw_x((8, 64))], P(None, "b"))


# Explicit meshes, whose shardings are in the types: these are as the formula's, in derivatives too.
ROWS, HEADS, COLS = 8, 4, 16
X = draw_x((ROWS, HEADS, COLS))


@pytest.fixture
def mesh(any_devices):
    mesh = mesh_of(any_devices, AxisType.Explicit)
    with jax.set_mesh(mesh):
        yield mesh


# A weight that is repeated, to have as many rows as the other, is split as x is.
UNLIKE_WEIGHTS = {
    "scale of heads, bias of all": ((HEADS, COLS), (COLS,), None, (P("a", "b"), P(), P())),
    "bias of heads, scale of all": ((COLS,), (HEADS, COLS), None, (P("a", "b"), P(), P())),
    "scale of examples, bias of all": ((ROWS, COLS), (COLS,), (0, 0, None), (P("a"), P("a"), P())),
    "bias of examples, scale of all": ((COLS,), (ROWS, COLS), (0, None, 0), (P("a"), P(), P("a"))),
    "scale of examples, bias of heads": ((ROWS, COLS), (HEADS, COLS), (0, 0, None), (P("a", "b"), P("a"), P())),
}


@pytest.mark.parametrize("name", UNLIKE_WEIGHTS)
@kinds
def test_weights_of_unlike_shapes(mesh, kind, name):
    scale_shape, bias_shape, axes, specs = UNLIKE_WEIGHTS[name]
    args = X, draw_scale(scale_shape), draw_bias(bias_shape)
    gradients = jax.jit(jax.value_and_grad(loss_of(jax.vmap(NORMS[kind], axes) if axes else NORMS[kind]), (0, 1, 2)))
    on_mesh = placed(mesh, args, specs)
    actual = gradients(*on_mesh)
    assert [jax.typeof(g) for g in actual[1]] == [jax.typeof(a) for a in on_mesh]
    assert_near(actual, gradients(*args))


# JAX 0.11 chooses between arrays of one sharding alone: which columns count, or are the label's, is split as x is.
def test_numbers_of_columns(mesh):
    (x,) = placed(mesh, [X], [P("a", None, "b")])
    numbers = jax.eval_shape(partial(columns, SimpleNamespace(axes=(-1,), shards=None)), x)
    assert numbers.sharding.spec == P(None, None, "b")


def padded(kind, x, pad_to):
    return ADDS[kind](x, 2 * x, pad_to=pad_to)[0]


@pytest.mark.parametrize("pad_to", [12, 9])
@kinds
def test_padding_of_features_that_are_split(mesh, kind, pad_to):
    (x,) = placed(mesh, [X], [P("a", None, "b")])
    norm = partial(padded, kind, pad_to=pad_to)

    def sums(x):
        total, _ = lax.scan(lambda total, _: (total + norm(x), None), jnp.zeros_like(norm(x)), length=2)
        return total

    for function in (norm, sums):
        y, y_dot = jax.jit(lambda x: jax.jvp(function, (x,), (x,)))(x)  # noqa: B023
        assert jax.typeof(y) == jax.typeof(y_dot)
        assert_near((y, y_dot), jax.jvp(function, (X,), (X,)))
    assert_near(jax.jit(jax.grad(loss_of(norm)))(x), jax.grad(loss_of(norm))(X))


@kinds
def test_the_tangent_of_a_bias_is_split_as_x_is(mesh, kind):
    (x,), bias = placed(mesh, [X], [P("a", "b")]), draw_bias((COLS,))
    norm = partial(NORMS[kind], x, None)
    jacobian = jax.jit(jax.jacfwd(norm))(bias)
    assert jax.typeof(jacobian).sharding.spec == P("a", "b", None, None)

    def gradient_of_tangent(bias):
        return jax.grad(lambda bias: jnp.sin(jax.jvp(norm, (bias,), (jnp.cos(bias),))[1]).sum())(bias)

    assert "all-gather" not in collectives(compiled_text(gradient_of_tangent, bias))


@kinds
def test_outside_of_jit_no_mesh_need_be_set(any_devices, kind):
    x = jax.device_put(X, NamedSharding(mesh_of(any_devices, AxisType.Explicit), P("a", None, "b")))
    y = NORMS[kind](x, draw_scale((COLS,)))
    assert jax.typeof(y).sharding.spec == P("a", None, "b")
    np.testing.assert_allclose(y, NORMS[kind](X, draw_scale((COLS,))), rtol=1e-4, atol=2e-5)


# One program over the devices of two processes: one GPU each, where there are two, or two simulated devices of the CPU.
PROGRAM = """
import os, sys
from functools import partial
import numpy as np
import jax, jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
import jaxnorm

address, process, name, axis_type, spec = sys.argv[1:]
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(address, 2, int(process))
mesh = Mesh(np.reshape(jax.devices(), (2, -1)), ("a", "b"), axis_types=(AxisType[axis_type],) * 2)
rows, features = {"rows": (("a", "b"), None), "features": (None, ("a", "b")), "both": ("b", "a")}[spec]

random = np.random.default_rng(0)
x, scale, bias = (random.normal(size=size).astype(np.float32) for size in ((8, 64), 64, 64))
norm = getattr(jaxnorm, name)
step = jax.jit(jax.value_and_grad(lambda x, scale, bias: jnp.sin(norm(x, scale, bias=bias)).sum(), (0, 1, 2)))

def place(array, *spec):
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, P(*spec)), lambda part: array[part])

with jax.set_mesh(mesh):
    args = place(x, rows, features), place(scale, features), place(bias, features)
    results = jax.tree.leaves(step(*args))
    whole = jax.jit(lambda *arrays: arrays, out_shardings=NamedSharding(mesh, P()))(*results)
    actual = [np.asarray(array.addressable_data(0)) for array in whole]
for a, e in zip(actual, jax.tree.leaves(step(x, scale, bias)), strict=True):
    np.testing.assert_allclose(a, e, rtol=1e-4, atol=2e-5)
"""


@cover(name=["rms_norm", "layer_norm"], axis_type=["Auto", "Explicit"], spec=["rows", "features", "both"])
def test_two_processes(name, axis_type, spec):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    have_gpus, processes = jax.default_backend() == "gpu" and jax.device_count() > 1, []
    for process in range(2):
        devices = {"CUDA_VISIBLE_DEVICES": str(process)} if have_gpus else {"JAX_PLATFORMS": "cpu"}
        environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"} | devices
        command = [sys.executable, "-P", "-c", PROGRAM, address, str(process), name, axis_type, spec]
        processes.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)
