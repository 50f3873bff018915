"""Train a model like Gemma 3 as its Flax code stands, and again on jaxnorm's kernels, and compare.

    python examples/train_gemma.py                # a toy, for a CPU
    python examples/train_gemma.py --size 1b      # the sizes of Gemma 3 1B, on all GPUs, 45 GiB on each

gemma.py is the model, gemma_jaxnorm.py what its user adds. Both ways start from the same parameters and read the same
words of the Python standard library's sources, so the loss curves should lie on each other. Tokens a second, memory and
the time to compile are measured, each way in a process of its own, and written as a table and as JSON.

The batch is split over all devices. So are parameters and the optimiser's state, each array along one axis; a step
gathers the parameters, and gives each device its part of the gradients (https://arxiv.org/abs/1910.02054).
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import gemma
import gemma_jaxnorm
import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from train_lm import run_steps, windows

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the benchmarks, which are not installed
from bench import report


class Way(NamedTuple):
    """What is done to a model once it is made, and its loss."""

    name: str
    port: object
    loss: object


WAYS = {
    "flax": Way("Flax and Optax", None, gemma.loss_of),
    "norms": Way("jaxnorm, the norms alone", gemma_jaxnorm.port_norms, gemma.loss_of),
    "logits": Way("jaxnorm, with all logits", gemma_jaxnorm.port, gemma_jaxnorm.loss_of_logits),
    "jaxnorm": Way("jaxnorm", gemma_jaxnorm.port, gemma_jaxnorm.loss_of),
}


class Size(NamedTuple):
    """A model, and how it is trained: rows of the batch a device, tokens a row, steps, and the peak learning rate."""

    config: gemma.Config
    batch: int
    tokens: int
    steps: int
    rate: float


SIZES = {
    "toy": Size(gemma.Config(4096, 2, 128, 4, 2, 32, 512), batch=4, tokens=128, steps=60, rate=3e-3),
    # Gemma 3 1B, which has 4 heads of 256 and 1 of keys and values.
    "1b": Size(gemma.Config(262144, 26, 1152, 8, 2, 128, 6912), batch=2, tokens=4096, steps=60, rate=5e-4),
}


def tokens_of(text, vocabulary):
    """Words, numbers, spaces and signs of the text as numbers, the most frequent ones first; 0 stands for the rest."""
    files = [text] if text else sorted(Path(os.__file__).parent.glob("*.py"))
    words = re.findall(rb"[A-Za-z_]+|\d+|\s+|.", b"\n\n".join(file.read_bytes() for file in files))
    numbers = {word: i for i, (word, _) in enumerate(Counter(words).most_common(vocabulary - 1), 1)}
    return np.array([numbers.get(word, 0) for word in words], np.int32)


class Trainer:
    """One way to train, as functions of arrays that are split over the mesh axis "data"."""

    def __init__(self, way, size, devices, seed):
        self.mesh = Mesh(devices, ("data",), (AxisType.Auto,))
        self.loss = way.loss

        def create():
            return gemma.Gemma(size.config, nnx.Rngs(seed))

        model = nnx.eval_shape(create)
        self.replaced = way.port(model) if way.port else None
        self.definition, types = nnx.split(model)
        schedule = optax.warmup_cosine_decay_schedule(0.0, size.rate, max(1, size.steps // 10), size.steps + 1)
        self.optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95))
        self.splits = self.split(types)
        state = jax.eval_shape(self.optimizer.init, types)
        rows = jax.ShapeDtypeStruct((size.batch * len(devices), size.tokens + 1), np.int32)
        self.shardings = self.splits, self.split(state), self.on(P("data"))
        place = partial(jax.tree.map, lambda array, to: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=to))
        self.types = place((types, state, rows), self.shardings)
        self.create = create

    def on(self, spec):
        return NamedSharding(self.mesh, spec)

    def split(self, arrays):
        """How arrays lie: along the first axis that the devices divide, and small ones whole on each."""

        def spec(array):
            axis = next((i for i, n in enumerate(array.shape) if n % self.mesh.size == 0), None)
            whole = axis is None or array.size < 2**16
            return self.on(P() if whole else P(*[None] * axis, "data"))

        return jax.tree.map(spec, arrays)

    def started(self):
        """The parameters, which XLA would take minutes to compile as one program, and the optimiser's state."""
        params = jax.device_put(nnx.state(self.create()), self.splits)
        return params, jax.jit(self.optimizer.init, out_shardings=self.shardings[1])(params)

    def step(self, params, state, tokens):
        def loss(params):
            return self.loss(nnx.merge(self.definition, params), tokens)

        whole = jax.lax.with_sharding_constraint(params, self.on(P()))
        value, gradients = jax.value_and_grad(loss)(whole)
        gradients = jax.lax.with_sharding_constraint(gradients, self.splits)
        updates, state = self.optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    def lowered(self):
        results = (*self.shardings[:2], self.on(P()))
        return jax.jit(self.step, donate_argnums=(0, 1), out_shardings=results).lower(*self.types)


def train(options):
    """Trains one way. Gives what ran where, and a row of the table: the program's time and memory, and the losses."""
    jax.config.update("jax_enable_compilation_cache", False)  # the time to compile is that of no cache
    size, devices = set_up(options)
    way = WAYS[options.way]
    trainer = Trainer(way, size, devices, options.seed)
    if trainer.replaced:
        print(trainer.replaced)
    start = time.perf_counter()
    lowered = trainer.lowered()
    traced = time.perf_counter()
    program = lowered.compile()
    compiled = time.perf_counter()
    losses, times = run(trainer, program, size, options)
    settled = times[len(times) // 5 or 1 :]
    lower, middle, upper = np.quantile(settled, (0.25, 0.5, 0.75))
    memory = program.memory_analysis()
    return header_of(size, devices, options), {
        "devices": len(devices),
        "way": way.name,
        "tokens/s": len(devices) * size.batch * size.tokens / middle,
        "ms": 1e3 * middle,
        "± ms": 1e3 * (upper - lower) / 2,
        "state GiB": memory.argument_size_in_bytes / 2**30,
        "temp GiB": memory.temp_size_in_bytes / 2**30,
        "peak GiB": peak_of(devices),
        "trace s": traced - start,
        "compile s": compiled - traced,
        "first loss": losses[0],
        "last loss": float(np.mean(losses[-max(1, size.steps // 10) :])),
        "losses": [float(f"{loss:.8g}") for loss in losses],
    }


def run(trainer, program, size, options):
    """The losses and the seconds of all steps."""
    tokens = tokens_of(options.text, size.config.vocabulary)
    if len(tokens) <= size.tokens:
        raise SystemExit(f"{options.text} has {len(tokens)} words, fewer than a row of {size.tokens} and one")
    random = np.random.default_rng(options.seed)
    params, state = trainer.started()

    def draw():
        rows = windows(tokens, size.batch * trainer.mesh.size, size.tokens, random)
        return jax.block_until_ready(jax.device_put(rows, trainer.on(P("data"))))

    def step(rows):
        nonlocal params, state
        params, state, loss = program(params, state, rows)
        return loss

    return run_steps(options.way, size.steps, draw, step)


def peak_of(devices):
    """The most memory that a device had in use, where devices tell."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in devices]
    return None if None in peaks else max(peaks) / 2**30


def set_up(options):
    """The model and its training, and the devices: GPUs, or as many as the CPU is to simulate."""
    size = SIZES[options.size]
    if options.devices:
        jax.config.update("jax_num_cpu_devices", options.devices)
    devices = jax.devices()[: options.devices]
    if len(devices) < (options.devices or 1):
        raise SystemExit(f"--devices {options.devices}: there are {len(devices)}")
    given = {name: getattr(options, name) for name in ("batch", "tokens", "steps", "rate")}
    size = size._replace(**{name: number for name, number in given.items() if number})
    flash = devices[0].platform == "gpu" and size.tokens % 64 == 0 and options.dtype != "float32"
    attention = options.attention or ("cudnn" if flash else "xla")
    config = replace(size.config, dtype=options.dtype, soft_cap=options.soft_cap, attention=attention)
    return size._replace(config=config), devices


def header_of(size, devices, options):
    """What ran where."""
    config = size.config
    return {
        **report.device(options.commit),
        "device": f"{len(devices)} x {devices[0].device_kind}" if len(devices) > 1 else devices[0].device_kind,
        "model": f"{config.layers} layers of {config.dim}, {config.heads} and {config.kv_heads} heads of "
        f"{config.head_dim}, GeGLU of {config.hidden}, vocabulary of {config.vocabulary}",
        "batch": f"{size.batch} x {size.tokens} tokens a device",
        "dtype": config.dtype,
        "attention": config.attention,
    }


def in_a_process(way, options, folder):
    """What `train` gives for one way, which no other's memory, compiled programs or tuning reach."""
    result = folder / f"{way}.json"
    command = [sys.executable, *(f"-W{warning}" for warning in sys.warnoptions), __file__, *sys.argv[1:]]
    # Nearly all of a GPU's memory, not three quarters of it.
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"} | os.environ
    done = subprocess.run([*command, "--way", way, "--result", str(result)], env=environment, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
    return json.loads(result.read_text())


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="toy", help="(default: toy)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["flax", "jaxnorm"], help="(default: flax jaxnorm)")
    parser.add_argument("--devices", type=int, help="how many, simulated by a CPU (default: all that are there)")
    for name, what in (("batch", "rows a device"), ("tokens", "of a row"), ("steps", "of the training")):
        parser.add_argument(f"--{name}", type=int, help=f"{what} (default: the size's)")
    parser.add_argument("--rate", type=float, help="peak learning rate (default: the size's)")
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    parser.add_argument("--soft-cap", type=float, help="of the logits, as Gemma 2 has it (default: none)")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of activations")
    parser.add_argument("--attention", choices=["xla", "cudnn"], help="(default: cudnn where it can)")
    parser.add_argument("--text", type=Path, help="file to train on (default: the standard library's sources)")
    parser.add_argument("--out", type=Path, default=Path("train_gemma/run"), help="CARD/RUN: write CARD.json")
    parser.add_argument("--commit", help="what is measured, where there is no git (default: the checkout's)")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()

    for name, least in {"devices": 1, "batch": 1, "tokens": 2, "steps": 2}.items():
        if (number := getattr(options, name)) is not None and number < least:
            parser.error(f"--{name} {number}: must be at least {least}")
    for name in ("rate", "soft_cap"):
        if (number := getattr(options, name)) is not None and not 0 < number < float("inf"):
            parser.error(f"--{name.replace('_', '-')} {number}: must be positive and finite")
    if options.text and not options.text.is_file():
        parser.error(f"--text {options.text}: is no file")
    return options


def main():
    options = parse_options()
    if options.way:
        options.result.write_text(json.dumps(train(options)))
        return
    with tempfile.TemporaryDirectory() as folder:
        results = [in_a_process(way, options, Path(folder)) for way in options.ways]
    rows = [row for _, row in results]
    report.write(results[0][0], rows, options.out)
    for row in rows[1:]:
        apart = max(abs(a - b) for a, b in zip(row["losses"], rows[0]["losses"], strict=True))
        print(
            f"{row['way']}: {row['tokens/s'] / rows[0]['tokens/s']:.3f} times as fast, losses {apart:.1e} apart at most"
        )


if __name__ == "__main__":
    main()
