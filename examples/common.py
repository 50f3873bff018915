"""What the examples share: a decoder like Llama in plain Flax, text, a training step over a mesh, and what is reported.

Nothing here knows of jaxnorm: an example gives a model its norms, or changes the model before the step is compiled.
"""

import argparse
import os
import platform
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from matplotlib.figure import Figure
from tqdm import tqdm

BYTES = 256


class Attention(nnx.Module):
    """Causal self-attention in which several heads may share their keys and values.

    Queries and keys are rotated by their position, and before that normalised by head where there is a `head_norm`.
    """

    def __init__(self, dim, heads, kv_heads, linear, head_norm=None, *, head_dim=None, theta=10_000.0):
        self.head_dim, self.theta = head_dim or dim // heads, theta
        self.query, self.out = linear(dim, heads * self.head_dim), linear(heads * self.head_dim, dim)
        self.key, self.value = (linear(dim, kv_heads * self.head_dim) for _ in "kv")
        if head_norm:
            self.query_norm, self.key_norm = head_norm(self.head_dim), head_norm(self.head_dim)

    def __call__(self, x):
        q, k, v = self.project(x)
        if hasattr(self, "query_norm"):
            q, k = self.query_norm(q), self.key_norm(k)
        return self.attend(rotate(q, self.theta), rotate(k, self.theta), v)

    def project(self, x):
        """Queries, keys and values, each (batch, tokens, heads, head_dim)."""
        layers = self.query, self.key, self.value
        return tuple(layer(x).reshape(*x.shape[:-1], -1, self.head_dim) for layer in layers)

    def attend(self, q, k, v):
        is_flash = jax.default_backend() == "gpu" and q.dtype == jnp.bfloat16 and q.shape[1] % 64 == 0
        implementation = "cudnn" if is_flash else "xla"
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)
        return self.out(y.reshape(*y.shape[:-2], -1))


def rotate(x, theta):
    """Rotary position embedding (https://arxiv.org/abs/2104.09864) of x: (batch, tokens, heads, head_dim)."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None, None] * theta ** (-jnp.arange(half) / half)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)


class Perceptron(nnx.Module):
    def __init__(self, dim, hidden, linear, activation=jax.nn.silu):
        self.gate, self.up = linear(dim, hidden), linear(dim, hidden)
        self.down = linear(hidden, dim)
        self.activation = activation

    def __call__(self, x):
        return self.down(self.activation(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    """Attention and a perceptron, each reading the normalised residual stream and adding to it."""

    def __init__(self, dim, hidden, norm, *attention):
        self.attention_norm, self.attention = norm(dim), Attention(dim, *attention)
        self.mlp_norm, self.mlp = norm(dim), Perceptron(dim, hidden, attention[2])

    def __call__(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class LanguageModel(nnx.Module):
    """Bytes in, logits of the next byte out. `norm` is the class of every norm; heads have norms if `head_norms`."""

    def __init__(self, norm, *, layers, dim, hidden, heads, kv_heads, dtype, seed, head_norms=True):
        rngs = nnx.Rngs(seed)
        linear = partial(nnx.Linear, use_bias=False, dtype=dtype, rngs=rngs)
        norm = partial(norm, dtype=dtype, rngs=rngs)
        self.embed = nnx.Embed(BYTES, dim, rngs=rngs)  # of float32, in which the gradient's many rows are added
        attention = heads, kv_heads, linear, norm if head_norms else None
        self.blocks = nnx.List(Block(dim, hidden, norm, *attention) for _ in range(layers))
        self.norm = norm(dim)
        self.head = linear(dim, BYTES)

    def __call__(self, tokens):
        x = self.embed(tokens).astype(self.head.dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).astype(jnp.float32)


def loss_of(model, tokens):
    """Mean cross-entropy, in nats, of every token but the first given those before it."""
    tokens = tokens.astype(jnp.int32)
    return optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:]).mean()


def read_text(file, least, pattern="*.py"):
    """The bytes of a file, or of the standard library's own sources."""
    library = Path(os.__file__).parent
    sources = (path for path in library.glob(pattern) if "site-packages" not in path.parts)
    text = b"\n\n".join(path.read_bytes() for path in ([file] if file else sorted(sources)))
    if len(text) < least:
        raise SystemExit(f"{file or library} has {len(text)} bytes, and {least} are needed")
    return text


def windows(text, batch, tokens, random):
    """`batch` stretches of `tokens` + 1 from random places of the text."""
    starts = random.integers(0, len(text) - tokens, size=batch)
    return text[starts[:, None] + np.arange(tokens + 1)]


def adamw(rate, steps):
    """AdamW of clipped gradients, with a rate that rises for a twentieth of the steps and falls to a tenth."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, max(1, steps // 20), steps + 1, rate / 10)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1))


@dataclass
class Run:
    """What one training gave."""

    name: str
    losses: np.ndarray
    step_time: float  # the median of the seconds from the end of a step to that of the next
    trainer: "Trainer"

    @property
    def end(self):
        """The mean loss of the last tenth of the steps."""
        return self.losses[-max(1, len(self.losses) // 10) :].mean()


class Trainer:
    """A compiled step of training, over a mesh with the axis "data", among which the batch is split.

    `create(seed)` makes a model, `change(model)` gives it and a report of what it changed, and `loss(model, *batch)` is
    minimised, of the arrays that `draw(random)` gives. `split(path, array)` says how a step has a parameter, and
    `keep(spec, array)` how parameters and the optimiser's state lie between steps.
    """

    def __init__(self, name, create, draw, loss, steps, rate, *, change=None, mesh=None, split=None, keep=None):
        self.name, self.create, self.draw, self.loss, self.steps = name, create, draw, loss, steps
        self.optimizer = adamw(rate, steps)
        self.mesh = mesh or Mesh(jax.devices()[:1], ("data",), (AxisType.Auto,))
        model = nnx.eval_shape(partial(create, 0))
        model, self.changed = change(model) if change else (model, None)
        self.definition, params = nnx.split(model)
        self.parameters = sum(array.size for array in jax.tree.leaves(params))
        split, keep = split or (lambda path, array: P()), keep or (lambda spec, array: spec)
        state = jax.eval_shape(self.optimizer.init, params)
        batch = draw(np.random.default_rng(0))
        types = params, state, batch

        def shardings(tree, spec_of):
            def sharding(path, array):
                return NamedSharding(self.mesh, spec_of([str(getattr(key, "key", key)) for key in path], array))

            return jax.tree_util.tree_map_with_path(sharding, tree)

        self.used = shardings(params, split)
        self.kept = shardings((params, state), lambda path, array: keep(split(path, array), array))
        self.rows = shardings(batch, lambda path, array: P("data"))
        place = partial(jax.tree.map, lambda array, to: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=to))
        results = (*self.kept, NamedSharding(self.mesh, P()))
        start = time.perf_counter()
        step = jax.jit(self.step, donate_argnums=(0, 1), out_shardings=results)
        self.program = step.lower(*place(types, (*self.kept, self.rows))).compile()
        self.compile_time = time.perf_counter() - start

    def step(self, params, state, batch):
        def loss_of(params):
            return self.loss(nnx.merge(self.definition, params), *batch)

        loss, gradients = jax.value_and_grad(loss_of)(jax.lax.with_sharding_constraint(params, self.used))
        gradients = jax.lax.with_sharding_constraint(gradients, self.kept[0])
        updates, state = self.optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    def run(self, seed):
        """One training, and its model. Parameters and batches depend on the seed alone: runs can be compared."""
        params = placed(nnx.state(self.create(seed)), self.kept[0])
        state = jax.jit(self.optimizer.init, out_shardings=self.kept[1])(params)
        random, losses, ends = np.random.default_rng(seed), [], []
        with tqdm(range(self.steps), desc=f"{self.name:8}", unit="step", mininterval=0.5) as progress:
            for _ in progress:
                batch = placed(self.draw(random), self.rows)
                params, state, loss = self.program(params, state, batch)
                losses.append(loss)
                # Of the step before, so that the device has its next work while this one waits.
                if len(losses) > 1:
                    progress.set_postfix(loss=f"{float(losses[-2]):.3f}", refresh=False)
                    ends.append(time.perf_counter())
        losses = np.array([float(loss) for loss in losses])
        times = np.diff([*ends, time.perf_counter()])
        return Run(self.name, losses, float(np.median(times)), self), nnx.merge(self.definition, params)

    def found(self, pattern):
        """How often each of these stands in the compiled step."""
        return dict(sorted(Counter(re.findall(pattern, self.program.as_text())).items()))


def placed(arrays, shardings):
    """Arrays that all processes have, each of whose devices takes its part."""

    def place(array, to):
        return jax.make_array_from_callback(array.shape, to, lambda part: array[part])

    return jax.tree.map(place, arrays, shardings)


def with_sizes(options, size):
    """A size, a named tuple, with those of its numbers that were asked for."""
    return size._replace(**{name: n for name, n in vars(options).items() if name in size._fields and n is not None})


def report(runs, count, unit):
    """Prints where each curve ends, and the speed of so many units a step, memory, and native calls."""
    for run in runs:
        memory = run.trainer.program.memory_analysis()
        print(
            f"{run.name:8} loss {run.losses[0]:.4f} -> {run.end:.4f}, step {1e3 * run.step_time:.1f} ms, "
            f"{count / run.step_time:,.0f} {unit}/s, compiled in {run.trainer.compile_time:.1f} s, "
            f"{memory.argument_size_in_bytes / 2**20:,.0f} MiB of state, {memory.temp_size_in_bytes / 2**20:,.0f} of "
            "temporaries"
        )
        calls = run.trainer.found(r'custom_call_target="jaxnorm_(\w+)"')
        print(f"{'':8} native calls: {', '.join(f'{n} x {name}' for name, n in calls.items()) or 'none'}")
    print("The end is the mean loss of the last tenth of the steps.")


def differences(runs):
    """Prints how far the curves ever part from the first."""
    for run in runs[1:]:
        gap = np.abs(run.losses - runs[0].losses)
        print(
            f"Largest difference between the curves of {run.name} and {runs[0].name}: {gap.max():.1e} at step "
            f"{gap.argmax() + 1} of {len(gap)}"
        )


def draw_curves(axes, runs, header, what, width=1):
    """The losses by steps, means of so many, with what ran where above them."""
    for i, run in enumerate(runs):
        losses = np.convolve(run.losses, np.full(width, 1 / width), "valid")
        label = f"{run.name}, {1e3 * run.step_time:.1f} ms a step"
        axes.plot(np.arange(width, len(run.losses) + 1), losses, label=label, lw=1 if i else 3, alpha=1 if i else 0.4)
    axes.set(xlabel="step", ylabel=what)
    axes.grid(alpha=0.3)
    axes.legend()
    command = " ".join(["python", f"examples/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    axes.set_title(f"{header}, jax {jax.__version__}, {date.today()}\n{command}", fontsize=9)


def plot(png, *curves):
    figure = Figure(figsize=(9, 5), layout="constrained")
    draw_curves(figure.subplots(), *curves)
    save(figure, png)


def save(figure, png):
    figure.savefig(png, dpi=150)
    print(f"Wrote {png}.")


def hardware():
    if jax.default_backend() != "cpu":
        return f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    info = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    return f"{named[1] if named else platform.machine()}, {os.cpu_count()} cores"


def parser_of(doc, numbers, out, *, rate=None, dtype=None, text=True):
    """A parser of whole numbers, each with its default and the least, and of what examples ask for besides."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)

    def add(name, kind, default, what=""):
        known = "the size's" if default is None else default
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"{what}(default: {known})")

    for name, (default, least) in (numbers | {"seed": (0, 0)}).items():
        add(name, at_least(least), default)
    add("rate", at_least(1e-9, float), rate, "peak learning rate ")
    add("out", picture, out, "the plot ")
    if dtype:
        parser.add_argument("--dtype", choices=["float32", "bfloat16"], default=dtype, help="of activations")
    if text:
        parser.add_argument("--text", type=file, help="file to train on (default: the standard library's sources)")
    return parser


def at_least(least, kind=int):
    def number(text):
        if not least <= kind(text) < float("inf"):
            raise argparse.ArgumentTypeError(f"{text}: must be at least {least}")
        return kind(text)

    return number


def file(text):
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"{text}: is no file")
    return Path(text)


def picture(text):
    if not text.endswith(".png") or not Path(text).absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: must be the name of a .png file, in a folder that exists")
    return Path(text)
