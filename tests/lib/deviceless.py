"""Programs compiled for an H200 on a machine without a GPU or a driver, by JAX's CUDA plugin.

XLA chooses fusions, custom calls and temporary memory without a device. What it would measure on one, as the tiles of a
matrix product, gets a default.
"""

import functools
import importlib.util
from pathlib import Path

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

H200 = Path(__file__).with_name("h200.txtpb")


def has_plugin() -> bool:
    plugins = importlib.util.find_spec("jax_plugins")
    return plugins is not None and importlib.util.find_spec("jax_plugins.xla_cuda13") is not None


@functools.cache
def topology(devices=1):
    target = {"target_config": H200.read_text(), "topology": f"1x1x{devices}"}
    return topologies.get_topology_desc(platform="cuda", **target)


def mesh(devices=1, name="x"):
    return topologies.make_mesh(topo=topology(devices), mesh_shape=(devices,), axis_names=(name,))


def types(arrays, sharding=None):
    """Those of these arrays or types, on the one device or so."""
    sharding = sharding or NamedSharding(mesh(), PartitionSpec())
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding), arrays)


def compiled(function, *args, **options):
    return optimised(jax.jit(function, **options).lower(*args))


def optimised(lowered):
    return lowered.compile(compiler_options={"xla_gpu_autotune_level": 0})


def kernels(program) -> list[str]:
    """The lines of a program's entry that are kernels or calls."""
    entry = program.as_text().split("ENTRY", 1)[1]
    opcodes = (" fusion(", " custom-call(", " dot(", " copy(", " reduce(")
    return [line.strip() for line in entry.splitlines() if any(opcode in line for opcode in opcodes)]
