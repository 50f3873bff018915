"""What outlives its process: compiled programs in JAX's cache, and exported ones."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import KINDS, NORMS, operands
from coverage import in_full
from hlo import count_native_calls
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh_of
from native import native_calls
from transformations import loss_of

pytestmark = pytest.mark.jax_version

DIMS = (8, 4, 64)
PLATFORMS = ("cpu", "cuda", "tpu")

# Each process runs one of these programs, and says in JSON what came of it.
CACHED = """
import sys
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import jaxnorm

events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name.rpartition("/")[2]))
x, scale, norm = jnp.ones((8, 64)), jnp.ones(64), jaxnorm.layer_norm
if sys.argv[1] != "one device":
    axis_type = AxisType.Explicit if sys.argv[1] == "Explicit" else AxisType.Auto
    mesh = jax.make_mesh((2, jax.device_count() // 2), ("a", "b"), (axis_type,) * 2)
    jax.set_mesh(mesh)
    if sys.argv[1] == "shard_map over one axis":
        norm = jax.shard_map(norm, in_specs=(P("a"), P()), out_specs=P("a"), axis_names={"a"})
    rows, features = sys.argv[2].split()
    x = jax.device_put(x, NamedSharding(mesh, P(eval(rows), eval(features))))
    scale = jax.device_put(scale, NamedSharding(mesh, P(eval(features))))
events.clear()
step = jax.jit(jax.grad(lambda x, scale: norm(x, scale).sum(), (0, 1)))
step(x, scale)
print(json.dumps({"hits": events.count("cache_hits"), "misses": events.count("cache_misses")}))
"""
EXPORTED = """
import sys
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
import jaxnorm

program = jax.export.deserialize(open(sys.argv[1], "rb").read())
args = [arg for _, arg in sorted(np.load(sys.argv[2]).items())]
if program.nr_devices > 1:
    mesh = jax.make_mesh((program.nr_devices,), ("rows",), (jax.sharding.AxisType.Auto,))
    specs = P("rows"), P(), P()
    args = [jax.device_put(arg, NamedSharding(mesh, spec)) for arg, spec in zip(args, specs)]
results = jax.tree.leaves(jax.jit(program.call)(*args))
np.savez(sys.argv[3], *results)
print(json.dumps({"program": jax.jit(program.call).lower(*args).compile().as_text()}))
"""


def loss_and_gradients(norm):
    return jax.value_and_grad(loss_of(norm), (0, 1, 2))


def run(program, *args, **environment):
    command = [sys.executable, "-P", "-c", "import json\n" + program, *map(str, args)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


ROWS, FEATURES = "'a' None", "None 'b'"


@pytest.mark.several
@pytest.mark.parametrize(
    ("mesh", "spec"),
    [
        ("one device", ROWS),
        ("Auto", FEATURES),
        ("Explicit", ROWS),
        ("shard_map over one axis", FEATURES),
        *in_full(("Auto", ROWS), ("Explicit", FEATURES), ("shard_map over one axis", ROWS)),
    ],
)
def test_a_second_process_finds_what_the_first_compiled(tmp_path, mesh, spec):
    options = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    assert run(CACHED, mesh, spec, **options) == {"hits": 0, "misses": 1}
    assert run(CACHED, mesh, spec, **options) == {"hits": 1, "misses": 0}


def run_exported(tmp_path, program, args):
    """What another process, which has this package and nothing of this file, makes of an exported program."""
    paths = [tmp_path / name for name in ("program", "args.npz", "results.npz")]
    paths[0].write_bytes(program.serialize())
    np.savez(paths[1], *args)
    text = run(EXPORTED, *paths)["program"]
    return [array for _, array in sorted(np.load(paths[2]).items())], text


def assert_close(actual, expected):
    for a, e in zip(actual, jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_exported_for_any_number_of_rows(tmp_path, kind):
    (rows,) = export.symbolic_shape("rows")
    features = jax.ShapeDtypeStruct(DIMS[-1:], jnp.float32)
    function = jax.jit(loss_and_gradients(NORMS[kind]))
    x = jax.ShapeDtypeStruct((rows, *DIMS[1:]), jnp.float32)
    program = export.export(function, platforms=PLATFORMS)(x, features, features)
    actual, text = run_exported(tmp_path, program, operands(DIMS))
    assert_close(actual, function(*operands(DIMS)))
    assert count_native_calls(text) == native_calls(kind, fwd=1, bwd=1)


def sharded_by(how, norm, mesh):
    """norm over all devices: split by XLA, or by a shard_map over all axes or one of them."""
    if how in ("Auto", "Explicit"):
        return norm
    axes, spec = (("a", "b"), P(("a", "b"))) if how == "shard_map" else ("a", P("a"))
    return jax.shard_map(norm, mesh=mesh, in_specs=(spec, P(), P()), out_specs=spec, axis_names=set(axes))


# Of a shard_map over one axis, a program for several platforms has the formula.
@pytest.mark.several
@pytest.mark.parametrize(
    ("how", "platforms", "is_native"),
    [
        *((how, PLATFORMS, True) for how in ("Auto", "Explicit", "shard_map")),
        ("shard_map over one axis", PLATFORMS, False),
        ("shard_map over one axis", None, True),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_exported_for_several_devices(tmp_path, devices, kind, how, platforms, is_native):
    mesh = mesh_of(devices, AxisType.Explicit if how == "Explicit" else AxisType.Auto)
    with jax.set_mesh(mesh):
        function = jax.jit(loss_and_gradients(sharded_by(how, NORMS[kind], mesh)))
        specs = P(("a", "b")), P(), P()
        args = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(operands(DIMS), specs, strict=True)]
        program = export.export(function, platforms=platforms)(*args)
    actual, text = run_exported(tmp_path, program, operands(DIMS))
    assert_close(actual, jax.jit(loss_and_gradients(NORMS[kind]))(*operands(DIMS)))
    assert count_native_calls(text) == (native_calls(kind, fwd=1, bwd=1) if is_native else {})


# Of unknown shapes XLA splits the formula.
@pytest.mark.several
@pytest.mark.parametrize("kind", KINDS)
def test_exported_for_several_devices_and_any_number_of_rows(tmp_path, devices, kind):
    mesh = mesh_of(devices, AxisType.Auto)
    (rows,) = export.symbolic_shape(f"{len(devices)}*rows")
    types = [((rows, *DIMS[1:]), P(("a", "b"))), (DIMS[-1:], P()), (DIMS[-1:], P())]
    args = [jax.ShapeDtypeStruct(dims, jnp.float32, sharding=NamedSharding(mesh, spec)) for dims, spec in types]
    program = export.export(jax.jit(loss_and_gradients(NORMS[kind])), platforms=PLATFORMS)(*args)
    actual, text = run_exported(tmp_path, program, operands(DIMS))
    assert_close(actual, jax.jit(loss_and_gradients(NORMS[kind]))(*operands(DIMS)))
    assert count_native_calls(text) == {}
