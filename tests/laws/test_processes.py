"""One program over the devices of two processes, by `jax.distributed`."""

import os
import socket
import subprocess
import sys

import jax
import pytest
from coverage import cover

pytestmark = pytest.mark.jax_version

# Each process has one GPU, where there are two, or two simulated devices of the CPU.
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
    have_gpus = jax.default_backend() == "gpu" and jax.device_count() > 1
    processes = []
    for process in range(2):
        devices = {"CUDA_VISIBLE_DEVICES": str(process)} if have_gpus else {"JAX_PLATFORMS": "cpu"}
        environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"} | devices
        command = [sys.executable, "-P", "-c", PROGRAM, address, str(process), name, axis_type, spec]
        processes.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)
