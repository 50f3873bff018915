"""Train a model like Gemma 3 as its Flax code stands, and again on jaxnorm's kernels, and compare.

    python examples/train_gemma.py                            # a toy, for a CPU
    python examples/train_gemma.py --size 1b                  # the sizes of Gemma 3 1B, on all GPUs, 45 GiB on each
    python examples/train_gemma.py --ways jaxnorm --mesh 4x2 1x1 --processes 2 --dtype float32

First stands what a trainer has before it knows of jaxnorm: RMSNorm with the factor 1 + scale before and after attention
and perceptron and over each head of queries and keys, fewer keys and values than queries, GeGLU, and an embedding that
is the output matrix too. All layers see all tokens before them. `soft_cap` is that of Gemma 2's logits. Then comes the
port: functions in place of the calls of three classes, and another loss. Modules and parameters stay.

All ways start from the same parameters and read the same words of the standard library's sources, so the loss curves
should lie on each other. XLA tunes once in a process, so that later ways may compile faster: name one to measure it.

Over a mesh "data" x "model" the batch is split over the first axis, and matrices over the second as in Megatron-LM:
those that widen by columns, those that narrow by rows. Parameters and the optimiser's state are split over "data", too,
each array along one axis; a step gathers the parameters, and gives each device its part of the gradients
(https://arxiv.org/abs/1910.02054). Nothing in the model says so: XLA splits native calls like everything else.

Source: Gemma Team, Gemma 3, 2025, https://arxiv.org/abs/2503.19786.
"""

import argparse
import math
import os
import re
import socket
import subprocess
import sys
from collections import Counter, namedtuple
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import (
    Attention,
    Perceptron,
    Trainer,
    differences,
    hardware,
    parser_of,
    plot,
    read_text,
    report,
    windows,
    with_sizes,
)
from flax import nnx
from jax.sharding import AxisType, Mesh, PartitionSpec as P

import jaxnorm

# A model, and how it is trained: rows of a batch for each device, tokens of a row, steps, and the peak learning rate.
SIZE = "vocabulary layers dim heads kv_heads head_dim hidden batch tokens steps rate soft_cap dtype"
Size = namedtuple("Size", SIZE, defaults=[None, "bfloat16"])
SIZES = {
    "toy": Size(4096, 2, 128, 4, 2, 32, 512, batch=4, tokens=128, steps=60, rate=3e-3),
    # Gemma 3 1B, which has 4 heads of 256 and 1 of keys and values.
    "1b": Size(262144, 26, 1152, 8, 2, 128, 6912, batch=2, tokens=4096, steps=60, rate=5e-4),
}


# The model.


class RMSNorm(nnx.Module):
    def __init__(self, dim):
        self.scale = nnx.Param(jnp.zeros(dim))

    def __call__(self, x):
        wide = x.astype(jnp.float32)
        x_hat = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-6)
        return (x_hat * (1 + self.scale[...])).astype(x.dtype)


class Block(nnx.Module):
    def __init__(self, size, linear):
        dim, heads = size.dim, (size.heads, size.kv_heads)
        self.pre_attention_norm, self.post_attention_norm = RMSNorm(dim), RMSNorm(dim)
        self.attention = Attention(dim, *heads, linear, RMSNorm, head_dim=size.head_dim)
        self.pre_perceptron_norm, self.post_perceptron_norm = RMSNorm(dim), RMSNorm(dim)
        self.perceptron = Perceptron(dim, size.hidden, linear, nnx.gelu)

    def __call__(self, x):
        x = x + self.post_attention_norm(self.attention(self.pre_attention_norm(x)))
        return x + self.post_perceptron_norm(self.perceptron(self.pre_perceptron_norm(x)))


class Gemma(nnx.Module):
    """Tokens in, hidden states out; `logits` makes the logits of these. Parameters are float32."""

    def __init__(self, size, seed):
        self.soft_cap, rngs = size.soft_cap, nnx.Rngs(seed)
        linear = partial(nnx.Linear, use_bias=False, dtype=jnp.dtype(size.dtype), rngs=rngs)
        init = nnx.initializers.normal(1 / math.sqrt(size.dim))
        self.embed = nnx.Embed(size.vocabulary, size.dim, dtype=jnp.dtype(size.dtype), embedding_init=init, rngs=rngs)
        self.blocks = nnx.List(Block(size, linear) for _ in range(size.layers))
        self.final_norm = RMSNorm(size.dim)

    def __call__(self, tokens):
        x = self.embedded(tokens)
        for block in self.blocks:
            x = block(x)
        return self.final_norm(x)

    def embedded(self, tokens):
        return self.embed(tokens) * math.sqrt(self.embed.features)

    def logits(self, hidden):
        logits, cap = self.embed.attend(hidden).astype(jnp.float32), self.soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


def loss_of(model, tokens):
    """Mean cross-entropy, in nats, of every token but the first given those before it."""
    logits = model.logits(model(tokens[:, :-1]))
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


# The port.


def norm(module, x):
    return jaxnorm.rms_norm(x, module.scale[...], scale_offset=1.0)


def attention(module, x):
    """The norms of queries and keys and their rotation are one call."""
    q, k, v = module.project(x)
    scales = module.query_norm.scale[...], module.key_norm.scale[...]
    q, k = jaxnorm.qk_norm_rotary(q, k, *scales, theta=module.theta, scale_offset=1.0)
    return module.attend(q, k, v)


def decoder(model, tokens):
    """The hidden states: what a layer gives is normalised, added, and normalised for the next, all in one call."""
    halves = []  # the norm before, the layer, the norm after
    for block in model.blocks:
        halves.append((block.pre_attention_norm, block.attention, block.post_attention_norm))
        halves.append((block.pre_perceptron_norm, block.perceptron, block.post_perceptron_norm))
    stream = model.embedded(tokens)
    y = halves[0][0](stream)
    for (_, layer, after), (before, *_) in pairwise([*halves, (model.final_norm,)]):
        scales = after.scale[...], before.scale[...]
        y, stream = jaxnorm.rms_norm_add_rms_norm(layer(y), stream, *scales, scale_offset=1.0)
    return y


def port_norms(model):
    """The norms alone, and the embedding."""
    return jaxnorm.replace_layers(model, {RMSNorm: norm})


def port(model):
    """The norms with their neighbours."""
    return jaxnorm.replace_layers(model, {RMSNorm: norm, Attention: attention, Gemma: decoder})


def linear_loss_of(model, tokens):
    """`loss_of`, without ever having all logits."""
    kernel = model.embed.embedding[...].T
    return jaxnorm.linear_cross_entropy(model(tokens[:, :-1]), kernel, tokens[:, 1:], soft_cap=model.soft_cap)


def loss_of_logits(model, tokens):
    """The same of logits, whose gradient takes their place."""
    logits = model.embed.attend(model(tokens[:, :-1]))
    return jaxnorm.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:], soft_cap=model.soft_cap).mean()


# What is done to a model once it is made, and its loss.
WAYS = {
    "flax": (None, loss_of),
    "norms": (port_norms, loss_of),
    "logits": (port, loss_of_logits),
    "jaxnorm": (port, linear_loss_of),
}


# The trainer.


def tokens_of(text, vocabulary):
    """Words, numbers, spaces and signs of the text as numbers, the most frequent ones first; 0 stands for the rest."""
    words = re.findall(rb"[A-Za-z_]+|\d+|\s+|.", text)
    numbers = {word: i for i, (word, _) in enumerate(Counter(words).most_common(vocabulary - 1), 1)}
    return np.array([numbers.get(word, 0) for word in words], np.int32)


def split(path, array, hidden=None):
    """How a step has a parameter, by its name in the model; `hidden` is the axis of the residual stream."""
    if {"query", "key", "value", "gate", "up"} & set(path):
        return P(None, "model")
    if {"out", "down"} & set(path):
        return P("model")
    if "embedding" in path:
        return P(None, hidden)
    is_of_the_stream = "scale" in path and not {"query_norm", "key_norm"} & set(path)
    return P(hidden) if is_of_the_stream else P()


def keep(spec, array, count):
    """The same, and over "data" along the first axis that so many devices divide; small arrays are whole on each."""
    axes = [*spec, *[None] * (array.ndim - len(spec))]
    free = [i for i, n in enumerate(array.shape) if n % count == 0 and axes[i] is None]
    if free and array.size >= 2**16:
        axes[free[0]] = "data"
    return P(*axes)


def trainers(options, size, rows):
    """One for each mesh and way."""
    tokens = tokens_of(read_text(options.text, size.tokens), size.vocabulary)
    if len(tokens) <= size.tokens:
        raise SystemExit(f"{options.text} has {len(tokens)} words, fewer than a row of {size.tokens} and one")

    def draw(random):
        return (windows(tokens, rows, size.tokens, random),)

    for data, model in options.mesh:
        # A mesh of one device is each process' own.
        devices = jax.devices()[: data * model] if data * model > 1 else jax.local_devices()[:1]
        mesh = Mesh(np.reshape(devices, (data, model)), ("data", "model"), (AxisType.Auto,) * 2)
        lies = {"split": partial(split, hidden="model" if options.split_hidden else None)}
        lies |= {"keep": partial(keep, count=data), "mesh": mesh}
        for way in options.ways:
            change, loss = WAYS[way]
            name = way if len(options.mesh) == 1 else f"{way} {data}x{model}"
            yield Trainer(name, partial(Gemma, size), draw, loss, size.steps, size.rate, change=change, **lies)


def start_processes(count):
    """Runs this program in each of `count` processes that know of each other; gives the first failure's status."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    command = [sys.executable, *(f"-W{warning}" for warning in sys.warnoptions), __file__, *sys.argv[1:]]
    command += ["--coordinator", address]
    processes = [subprocess.Popen([*command, "--process", str(i)]) for i in range(count)]
    return max(process.wait() for process in processes)


def mesh(text):
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"{text}: must be two numbers like 4x2, of data and of model")
    return tuple(map(int, text.split("x")))


def parse_options():
    numbers = {"batch": (None, 1), "tokens": (None, 2), "steps": (None, 2), "processes": (1, 1)}
    parser = parser_of(__doc__, numbers, "train_gemma.png", dtype="bfloat16")
    parser.add_argument("--size", choices=SIZES, default="toy", help="(default: toy)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["flax", "jaxnorm"], help="(default: flax jaxnorm)")
    parser.add_argument(
        "--mesh", nargs="+", type=mesh, help="DATAxMODEL devices, simulated by a CPU (default: all x 1)"
    )
    parser.add_argument("--split-hidden", action="store_true", help='split the residual stream over "model" too')
    parser.add_argument("--soft-cap", type=float, help="of the logits, as Gemma 2 has it (default: none)")
    parser.add_argument("--coordinator", help=argparse.SUPPRESS)
    parser.add_argument("--process", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    for data, model in options.mesh or []:
        if SIZES[options.size].kv_heads % model:
            parser.error(f"--mesh {data}x{model}: the model has {SIZES[options.size].kv_heads} heads of keys to split")
        if data * model > 1 and data * model % options.processes:
            parser.error(f"--mesh {data}x{model}: must be a multiple of --processes {options.processes}")
    return options


def set_up(options):
    """The devices, of this machine's GPUs or as many of its CPU."""
    # Nearly all of a GPU's memory, not three quarters of it.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    if options.mesh:
        devices = max(map(math.prod, options.mesh))
        own = devices // options.processes
        first = own * options.process
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(first, first + own))))
        jax.config.update("jax_num_cpu_devices", own)
    if options.processes > 1:
        jax.distributed.initialize(options.coordinator, options.processes, options.process)
    options.mesh = options.mesh or [(jax.device_count(), 1)]
    if jax.device_count() < max(map(math.prod, options.mesh)):
        raise SystemExit(f"--mesh: there are {jax.device_count()} devices")


def main():
    options = parse_options()
    if options.processes > 1 and options.coordinator is None:
        raise SystemExit(start_processes(options.processes))
    set_up(options)
    jax.config.update("jax_enable_compilation_cache", False)  # the time to compile is that of no cache
    size = with_sizes(options, SIZES[options.size])
    rows = size.batch * math.prod(options.mesh[0])
    runs = []
    for trainer in trainers(options, size, rows):
        if trainer.changed:
            print(trainer.changed)
        runs.append(trainer.run(options.seed)[0])
    if options.process == 0:
        report(runs, rows * size.tokens, "tokens")
        for run in runs:
            collectives = run.trainer.found(r" (all-reduce|all-gather|reduce-scatter|all-to-all)(?:-start)?\(")
            print(f"{run.name:8} collectives in a step: {collectives or 'none'}")
        differences(runs)
        plot(options.out, runs, f"{hardware()}, {options.dtype}", "training loss, nats a token")
    if options.processes > 1:
        jax.distributed.shutdown()


if __name__ == "__main__":
    main()
