"""Train the language model of train_lm.py data- and tensor-parallel on several devices, and on one, and compare.

    python examples/train_sharded.py --data 4 --model 2                # 8 devices: GPUs, or simulated by this CPU
    python examples/train_sharded.py --data 4 --model 2 --processes 2  # the same, by two processes on this machine

The batch is split over the mesh axis "data". The matrices are split over "model" as in Megatron-LM: those that widen by
columns, those that narrow by rows. With --split-hidden the residual stream and the weights of its norms are split over
"model" as well. Nothing in the model says so: XLA splits the norms' native calls like everything else.
"""

import argparse
import os
import re
import socket
import subprocess
import sys
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from train_lm import LanguageModel, loss_of, read_text, windows

import jaxnorm.nnx


def spec_of(path, options):
    """How a parameter is split, by its name in the model."""
    hidden = "model" if options.split_hidden else None
    names = [str(name) for name in path]
    if "qkv" in names or "up" in names:
        return P(None, "model")
    if "out" in names or "down" in names:
        return P("model", None)
    if "embed" in names:
        return P(None, hidden)
    is_of_the_stream = names[-1] == "scale" and not {"q_norm", "k_norm"} & set(names)
    return P(hidden) if is_of_the_stream else P()


def new_model(mesh, options):
    """The model and its optimiser, each array made where it belongs."""

    @nnx.jit
    def create():
        sizes = {"dim": options.dim, "heads": options.heads, "layers": options.layers}
        model = LanguageModel(jaxnorm.nnx.RMSNorm, **sizes, dtype=jnp.float32, rngs=nnx.Rngs(options.seed))
        state = nnx.state(model)

        def place(path, array):
            return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, spec_of(path, options)))

        nnx.update(model, nnx.map_state(place, state))
        return model, nnx.Optimizer(model, optax.adamw(options.rate), wrt=nnx.Param)

    return create()


def train(mesh, text, options):
    """The losses of a training on mesh, and the program of a step."""
    model, optimizer = new_model(mesh, options)
    rows = NamedSharding(mesh, P("data"))

    @nnx.jit
    def step(model, optimizer, tokens):
        loss, gradients = nnx.value_and_grad(loss_of)(model, tokens)
        optimizer.update(model, gradients)
        return loss

    random = np.random.default_rng(options.seed)
    losses = []
    for _ in range(options.steps):
        # Every process draws the same batch, and gives its devices their part of it.
        batch = windows(text, options.batch, options.seq, random)
        tokens = jax.make_array_from_callback(batch.shape, rows, lambda part: batch[part])  # noqa: B023
        losses.append(float(step(model, optimizer, tokens)))
    return np.array(losses), step.lower(model, optimizer, tokens).compile().as_text()


def describe(program):
    """What one device runs and exchanges in a step."""
    calls = Counter(re.findall(r'custom_call_target="jaxnorm_(\w+)"', program))
    collectives = Counter(re.findall(r" (all-reduce|all-gather|reduce-scatter|all-to-all)(?:-start)?\(", program))
    for title, found in (("Native calls of jaxnorm", calls), ("Collectives", collectives)):
        print(f"{title} in a step: {', '.join(f'{n} x {name}' for name, n in sorted(found.items())) or 'none'}")


def start_processes(count):
    """Runs this program in each of `count` processes that know of each other; gives the first failure's status."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    command = [sys.executable, __file__, *sys.argv[1:], "--coordinator", address]
    processes = [subprocess.Popen([*command, "--process", str(i)]) for i in range(count)]
    return max(process.wait() for process in processes)


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"data": 4, "model": 2, "processes": 1, "steps": 20, "batch": 8, "seq": 64, "layers": 2}
    for name, default in (sizes | {"dim": 128, "heads": 4, "seed": 0}).items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"(default: {default})")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate (default: 0.001)")
    parser.add_argument("--split-hidden", action="store_true", help='split the residual stream over "model" too')
    parser.add_argument("--coordinator", help=argparse.SUPPRESS)
    parser.add_argument("--process", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.text = None
    devices = options.data * options.model
    if min(options.data, options.model, options.processes) < 1 or devices % options.processes:
        parser.error("--data * --model devices must be a positive multiple of --processes")
    if options.batch % options.data:
        parser.error(f"--batch {options.batch}: must be a multiple of --data {options.data}")
    if options.dim % (2 * options.heads) or options.heads % options.model:
        parser.error("--dim must be a multiple of 2 * heads, and --heads of --model")
    return options


def set_up(options):
    """The devices, of this machine's GPUs or as many of its CPU."""
    own = options.data * options.model // options.processes
    first = own * options.process
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(first, first + own))))
    jax.config.update("jax_num_cpu_devices", own)
    if options.processes > 1:
        jax.distributed.initialize(options.coordinator, options.processes, options.process)
    if jax.device_count() < options.data * options.model:
        raise SystemExit(f"{options.data} x {options.model} devices are asked for, and {jax.device_count()} are there")
    return np.reshape(jax.devices()[: options.data * options.model], (options.data, options.model))


def main():
    options = parse_options()
    if options.processes > 1 and options.coordinator is None:
        raise SystemExit(start_processes(options.processes))
    devices = set_up(options)
    text, _ = read_text(options)
    meshes = [Mesh(those, ("data", "model"), (AxisType.Auto,) * 2) for those in (devices, [[jax.local_devices()[0]]])]
    (losses, program), (alone, _) = (train(mesh, text, options) for mesh in meshes)
    if options.process == 0:
        report(devices, losses, alone, program, options)
    if options.processes > 1:
        jax.distributed.shutdown()


def report(devices, losses, alone, program, options):
    print(f"{options.data} x {options.model} devices of {jax.device_count()} x {devices[0, 0].device_kind}")
    describe(program)
    print(
        f"Loss on {devices.size} devices {losses[0]:.4f} -> {losses[-1]:.4f}, on one {alone[0]:.4f} -> {alone[-1]:.4f}"
    )
    print(f"Largest difference between the curves: {np.abs(losses - alone).max():.1e} in {options.steps} steps")


if __name__ == "__main__":
    main()
