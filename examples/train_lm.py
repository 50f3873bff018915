"""Train a small language model on real text twice: with Flax's RMSNorm, and with jaxnorm's.

    python examples/train_lm.py                       # the Python standard library's own sources
    python examples/train_lm.py --text FILE --steps 2000 --dim 512 --layers 8 --heads 8 --dtype bfloat16

A byte-level, decoder-only transformer (pre-norm, rotary positions, query and key norms) is trained from one seed on
the same batches with either class. The loss curves should lie on each other; they are compared and plotted, and the
model that was trained with jaxnorm writes a few lines.
"""

import argparse
import os
import platform
import re
import sys
import time
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from matplotlib.figure import Figure
from tqdm import tqdm

import jaxnorm.nnx

BYTES = 256
SIZES = {"steps": 500, "batch": 8, "seq": 128, "layers": 4, "dim": 128, "heads": 4, "seed": 0}


class Attention(nnx.Module):
    """Causal self-attention whose queries and keys are normalised per head, then rotated by their position."""

    def __init__(self, dim, heads, linear, norm):
        self.heads = heads
        self.qkv = linear(dim, 3 * dim)
        self.q_norm = norm(dim // heads)
        self.k_norm = norm(dim // heads)
        self.out = linear(dim, dim)

    def __call__(self, x):
        q, k, v = jnp.split(self.qkv(x).reshape(*x.shape[:-1], 3 * self.heads, -1), 3, axis=-2)
        y = jax.nn.dot_product_attention(rotate(self.q_norm(q)), rotate(self.k_norm(k)), v, is_causal=True)
        return self.out(y.reshape(x.shape))


class Block(nnx.Module):
    """Attention and a two-layer perceptron, each reading the normalised residual stream and adding to it."""

    def __init__(self, dim, heads, linear, norm):
        self.attention_norm = norm(dim)
        self.attention = Attention(dim, heads, linear, norm)
        self.mlp_norm = norm(dim)
        self.up = linear(dim, 4 * dim)
        self.down = linear(4 * dim, dim)

    def __call__(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(jnp.square(jax.nn.relu(self.up(self.mlp_norm(x)))))


class LanguageModel(nnx.Module):
    """Bytes in, logits of the next byte out. `norm` is the class of every norm in it."""

    def __init__(self, norm, *, dim, heads, layers, dtype, rngs):
        linear = partial(nnx.Linear, use_bias=False, dtype=dtype, rngs=rngs)
        norm = partial(norm, dtype=dtype, rngs=rngs)
        self.embed = nnx.Embed(BYTES, dim, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List(Block(dim, heads, linear, norm) for _ in range(layers))
        self.norm = norm(dim)
        self.head = linear(dim, BYTES)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).astype(jnp.float32)


def rotate(x):
    """Rotary position embedding (https://arxiv.org/abs/2104.09864) of x: (batch, position, head, feature)."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None, None] * 10_000.0 ** (-jnp.arange(half) / half)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)


def loss_of(model, tokens):
    """Mean cross-entropy, in nats per byte, of every byte but the first given those before it."""
    return optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:]).mean()


@nnx.jit
def train_step(model, optimizer, tokens):
    loss, grads = nnx.value_and_grad(loss_of)(model, tokens)
    optimizer.update(model, grads)
    return loss


@nnx.jit
def validation_loss(model, batches):
    return jax.lax.map(partial(loss_of, model), batches).mean()


@nnx.jit(static_argnames="count")
def continue_text(model, window, key, count, temperature=0.7):
    """`count` bytes that the model writes after `window`."""

    def step(window, key):
        byte = jax.random.categorical(key, model(window[None])[0, -1] / temperature).astype(window.dtype)
        return jnp.append(window[1:], byte), byte

    return jax.lax.scan(step, window, jax.random.split(key, count))[1]


@dataclass
class Run:
    """What one training gave."""

    name: str
    model: nnx.Module
    losses: np.ndarray
    times: list[float]
    validation: float | None = None

    @property
    def step_time(self):
        """Without the first step, which compiles."""
        return float(np.median(self.times[1:]))


def train(norm, text, held_out, options):
    """Trains a new model with `norm`. Seed and batches depend on the options only, so that runs can be compared."""
    name = norm.__module__.split(".")[0]
    sizes = {"dim": options.dim, "heads": options.heads, "layers": options.layers}
    model = LanguageModel(norm, **sizes, dtype=jnp.dtype(options.dtype), rngs=nnx.Rngs(options.seed))
    warmup = max(1, options.steps // 10)
    schedule = optax.warmup_cosine_decay_schedule(0.0, options.rate, warmup, options.steps + 1, options.rate / 20)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    random = np.random.default_rng(options.seed)
    draw = partial(windows, text, options.batch, options.seq, random)
    losses, times = run_steps(name, options.steps, draw, partial(train_step, model, optimizer))

    batches = jnp.stack([windows(held_out, options.batch, options.seq, np.random.default_rng(i)) for i in range(16)])
    return Run(name, model, losses, times, float(validation_loss(model, batches)))


def run_steps(name, count, draw, step):
    """The losses of all steps, each of a batch that is drawn before it, and their times."""
    losses, times = [], []
    with tqdm(range(count), desc=f"{name:8}", unit="step", mininterval=0.5) as progress:
        for _ in progress:
            batch = draw()
            start = time.perf_counter()
            losses.append(float(step(batch)))
            times.append(time.perf_counter() - start)
            progress.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
    return np.array(losses), times


def windows(text, batch, seq, random):
    """`batch` stretches of `seq` + 1 bytes, or other tokens, from random places of `text`."""
    starts = random.integers(0, len(text) - seq, size=batch)
    return text[starts[:, None] + np.arange(seq + 1)]


def report(runs, options, count, unit):
    """Prints the curves' end points, how far they ever part, and the speed of both, of so many units in a step."""
    tail = max(1, options.steps // 20)
    for run in runs:
        validation = "" if run.validation is None else f" nats/byte (validation {run.validation:.4f})"
        print(
            f"{run.name:8} loss {run.losses[0]:.4f} -> {run.losses[-tail:].mean():.4f}{validation},"
            f" step {1e3 * run.step_time:.1f} ms, {count / run.step_time:,.0f} {unit}/s"
            f" (first step, with compilation: {run.times[0]:.1f} s)"
        )
    print("The end is the mean of the last twentieth; the step time is the median without the first step.")
    gap = np.abs(runs[0].losses - runs[1].losses)
    print(f"Largest difference between the curves: {gap.max():.2e} at step {gap.argmax() + 1} of {options.steps}.")


def write_sample(model, text, options, count=400):
    """Prints what the model writes after a function's head, given the text before one as context."""
    prompt = b"\n\ndef "
    context = np.append(text[: options.seq], np.frombuffer(prompt, np.uint8))[-options.seq :]
    sample = continue_text(model, jnp.asarray(context), jax.random.key(options.seed), count)
    written = (prompt + bytes(np.asarray(sample))).decode("utf-8", "replace").strip()
    print(f"\nWritten by the model that was trained with jaxnorm:\n\n{written}\n")


def plot(runs, options):
    figure = Figure(figsize=(9, 5), layout="constrained")
    draw_curves(figure.subplots(), runs, options, "RMSNorm", "training loss, nats per byte")
    save(figure, options.out)


def draw_curves(axes, runs, options, norm, what):
    steps = np.arange(1, options.steps + 1)
    for run, style in zip(runs, ({"lw": 3, "alpha": 0.4}, {"lw": 1, "color": "black"}), strict=True):
        axes.plot(steps, run.losses, label=f"{run.name}.nnx.{norm}, {1e3 * run.step_time:.1f} ms a step", **style)
    finish(axes, f"{hardware()}, {options.dtype}", what)
    axes.set_ylim(0, None)


def finish(axes, header, what):
    """Axes of losses by steps, with what ran where above them."""
    axes.set(xlabel="step", ylabel=what)
    axes.grid(alpha=0.3)
    axes.legend()
    command = " ".join(["python", f"examples/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    axes.set_title(f"{header}, jax {jax.__version__}, {date.today()}\n{command}", fontsize=9)


def save(figure, png):
    figure.savefig(png, dpi=150)
    print(f"Wrote {png}.")


def hardware():
    if jax.default_backend() != "cpu":
        return jax.devices()[0].device_kind
    info = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    return f"{named[1] if named else platform.machine()}, {os.cpu_count()} cores"


def read_text(options):
    """The training bytes and the last tenth, which is held out."""
    library = Path(os.__file__).parent
    files = [options.text] if options.text else sorted(library.glob("*.py"))
    text = np.frombuffer(b"\n\n".join(file.read_bytes() for file in files), np.uint8)
    split = len(text) * 9 // 10
    if len(text) - split <= options.seq + 1:
        place = options.text or f"{library}/*.py"
        needed = 10 * (options.seq + 2)
        raise SystemExit(f"{place} has {len(text)} bytes; --seq {options.seq} needs {needed}, a tenth of it held out")
    return text[:split], text[split:]


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"(default: {default})")
    parser.add_argument("--rate", type=float, default=4e-3, help="peak learning rate (default: 0.004)")
    parser.add_argument("--text", type=Path, help="file to train on (default: the standard library's sources)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of activations")
    parser.add_argument("--out", type=Path, default=Path("train_lm.png"), help="the plot (default: train_lm.png)")
    options = parser.parse_args()

    check_options(parser, options, dict.fromkeys(SIZES, 1) | {"seed": 0, "steps": 2, "seq": 2})
    if options.dim % (2 * options.heads):
        parser.error(f"--dim {options.dim} --heads {options.heads}: dim must be a multiple of 2 * heads")
    if options.text and not options.text.is_file():
        parser.error(f"--text {options.text}: is no file")
    return options


def check_options(parser, options, least):
    """That whole numbers are as large as least says, and that there is a learning rate, and a place for a plot."""
    for name, number in least.items():
        if getattr(options, name) < number:
            parser.error(f"--{name} {getattr(options, name)}: must be at least {number}")
    if not 0 < options.rate < float("inf"):
        parser.error(f"--rate {options.rate}: must be positive and finite")
    if options.out.suffix != ".png" or options.out.is_dir():
        parser.error(f"--out {options.out}: must be the name of a .png file")
    if not options.out.absolute().parent.is_dir():
        parser.error(f"--out {options.out}: its folder does not exist")


def main():
    options = parse_options()
    text, held_out = read_text(options)
    print(f"{len(text):,} bytes to train on, {len(held_out):,} held out; {hardware()}, {options.dtype}")
    runs = [train(norm, text, held_out, options) for norm in (nnx.RMSNorm, jaxnorm.nnx.RMSNorm)]
    report(runs, options, options.batch * options.seq, "tokens")
    write_sample(runs[1].model, held_out, options)
    plot(runs, options)


if __name__ == "__main__":
    main()
