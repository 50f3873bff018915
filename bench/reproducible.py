"""Whether two processes train a language model to the same bits, and what a step takes.

    python -m bench reproducible --out bench/results/h200/reproducible

A process trains the GPT-2-like model of `bench model`, with fewer layers, for 20 steps of AdamW. Both of a row have one
compilation cache, and with it one choice of XLA's code. "differ" is how many arrays of parameters, of the first step's
gradients and of the last step's state have other bits in the second process.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace

import jax
import numpy as np

from bench import models, report

DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
# By the lookup of tokens, the attention and XLA's flags.
ROWS = [
    ("jaxnorm-lookup", "xla", ""),
    ("jaxnorm-flax-lookup", "xla", ""),
    ("jaxnorm-lookup", "cudnn", ""),
    ("jaxnorm-lookup", "xla", DETERMINISTIC),
    ("jaxnorm-flax-lookup", "xla", DETERMINISTIC),
]
STEPS = 20


def add_arguments(parser):
    report.add_arguments(parser)
    parser.add_argument("--rows", nargs="+", type=int, default=range(len(ROWS)), choices=range(len(ROWS)))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--small", action="store_true", help="toy sizes, to try the program")
    parser.add_argument("--train", nargs=2, metavar=("LOOKUP", "ATTENTION"), help="be one of the processes")


def train(lookup, attention, layers, small):
    """The digests of the first step's gradients and of all parameters, by their paths, and the time of a step."""
    import optax

    spec = models.small(models.GPT2) if small else replace(models.GPT2, batch=8, layers=layers)
    spec, optimiser = replace(spec, attention=attention), optax.adamw(1e-3)
    gradient = jax.value_and_grad(lambda params, *inputs: models.loss(spec, lookup, params, *inputs))

    def step(state, inputs, targets):
        params, moments = state
        loss, grads = gradient(params, inputs, targets)
        updates, moments = optimiser.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), (loss, grads)

    params, inputs = models.init(spec), models.batch(spec)
    state, run = (params, optimiser.init(params)), jax.jit(step)
    state, (_, grads) = run(state, *inputs)
    found = {f"gradient {path}": digest for path, digest in digests(grads)}
    start = time.perf_counter()
    for _ in range(STEPS - 1):
        state, _ = run(state, *inputs)
    jax.block_until_ready(state)
    return found | dict(digests(state[0])), (time.perf_counter() - start) / (STEPS - 1)


def digests(tree):
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield jax.tree_util.keystr(path), hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest()[:16]


def run_twice(lookup, attention, flags, args):
    """A row of the table."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip(),
        }
        command = [sys.executable, "-m", "bench", "reproducible", "--layers", str(args.layers), "--train"]
        command += [lookup, attention, *["--small"] * args.small]
        runs = [subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True) for _ in range(2)]
    (first, _), (second, seconds) = (json.loads(run.stdout) for run in runs)
    differ = [name for name, digest in first.items() if second[name] != digest]
    return {
        "variant": lookup,
        "attention": attention,
        "flags": flags,
        "ms": 1e3 * seconds,
        "arrays": len(first),
        "differ": len(differ),
        "first gradients that differ": [name for name in differ if name.startswith("gradient")][:4],
    }


def main(args):
    if args.train:
        print(json.dumps(train(*args.train, args.layers, args.small)))
        return
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # both processes have the GPU, and this one
    rows = []
    for place in args.rows:
        rows.append(run_twice(*ROWS[place], args))
        report.write(report.device(args.commit), rows, args.out)
