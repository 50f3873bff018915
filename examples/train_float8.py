"""Train a decoder like Llama twice: with linear layers in bfloat16, and in float8 by `jaxnorm.float8_linears`.

    python examples/train_float8.py --size small --steps 30         # a toy, for a CPU
    python examples/train_float8.py                                 # 103 M parameters, on one GPU
    python examples/train_float8.py --size 8b --layers 8 --seeds 1  # the widths of Llama 3 8B, for speed alone

A float8 model differs from a bfloat16 one by one line, in `Program`, which leaves the product that gives the logits as
it is. For each seed both start from the same parameters and read the same batches, of bytes of the Python standard
library's sources. Parameters and AdamW's state are float32, activations bfloat16. Printed are speed, time to compile,
temporary memory, and the loss over the last tenth of the steps, beside what another seed does to it.
"""

import argparse
import sysconfig
import time
from collections import namedtuple
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from matplotlib.figure import Figure
from tqdm import tqdm
from train_lm import BYTES, finish, rotate, save, windows

import jaxnorm
from jaxnorm.nnx import RMSNorm

# A model, and how it is trained: rows of a batch, bytes of a row, steps, and the peak learning rate.
Size = namedtuple("Size", "layers dim hidden heads kv_heads batch tokens steps rate")
SIZES = {
    "small": Size(2, 64, 160, 2, 1, batch=8, tokens=64, steps=2000, rate=4e-3),
    "100m": Size(8, 1024, 2816, 8, 8, batch=16, tokens=1024, steps=2000, rate=6e-4),
    "8b": Size(8, 4096, 14336, 32, 8, batch=4, tokens=2048, steps=30, rate=1e-4),  # Llama 3 8B has 32 layers
}


class Attention(nnx.Module):
    """Causal self-attention in which several heads share their keys and values."""

    def __init__(self, size, linear):
        self.head_dim = size.dim // size.heads
        self.query, self.out = linear(size.dim, size.dim), linear(size.dim, size.dim)
        self.key = linear(size.dim, size.kv_heads * self.head_dim)
        self.value = linear(size.dim, size.kv_heads * self.head_dim)

    def __call__(self, x):
        layers = self.query, self.key, self.value
        q, k, v = (layer(x).reshape(*x.shape[:-1], -1, self.head_dim) for layer in layers)
        is_flash = jax.default_backend() == "gpu" and x.dtype == jnp.bfloat16 and x.shape[1] % 64 == 0
        attend = partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn" if is_flash else "xla")
        y = attend(rotate(q), rotate(k), v)
        return self.out(y.reshape(x.shape))


class Perceptron(nnx.Module):
    def __init__(self, size, linear):
        self.gate, self.up = linear(size.dim, size.hidden), linear(size.dim, size.hidden)
        self.down = linear(size.hidden, size.dim)

    def __call__(self, x):
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    def __init__(self, size, linear, norm):
        self.attention_norm, self.attention = norm(size.dim), Attention(size, linear)
        self.mlp_norm, self.mlp = norm(size.dim), Perceptron(size, linear)

    def __call__(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Llama(nnx.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, size, seed):
        rngs = nnx.Rngs(seed)
        linear = partial(nnx.Linear, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)
        norm = partial(RMSNorm, dtype=jnp.bfloat16, rngs=rngs)
        self.embed = nnx.Embed(BYTES, size.dim, rngs=rngs)  # of float32, in which the gradient's many rows are added
        self.blocks = nnx.List(Block(size, linear, norm) for _ in range(size.layers))
        self.norm = norm(size.dim)
        self.head = linear(size.dim, BYTES)

    def __call__(self, tokens):
        x = self.embed(tokens).astype(jnp.bfloat16)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).astype(jnp.float32)


class Program:
    """A compiled step of training, and what every run of it gave."""

    def __init__(self, name, size):
        self.name, self.size = name, size
        model = nnx.eval_shape(lambda: Llama(size, 0))
        if name == "float8":
            jaxnorm.float8_linears(model, only=lambda path, layer: path != ("head",))  # the one line
        self.definition, parameters = nnx.split(model)
        self.parameters = sum(array.size for array in jax.tree.leaves(parameters))
        warmup = max(1, size.steps // 20)
        rate = optax.warmup_cosine_decay_schedule(0.0, size.rate, warmup, size.steps + 1, size.rate / 10)
        self.optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.95, weight_decay=0.1))
        state = parameters, jax.eval_shape(self.optimizer.init, parameters)
        tokens = jax.ShapeDtypeStruct((size.batch, size.tokens + 1), np.uint8)
        lowered = jax.jit(self.step, donate_argnums=(0, 1)).lower(*state, tokens)
        start = time.perf_counter()
        self.compiled = lowered.compile()
        self.compile_time = time.perf_counter() - start
        self.curves, self.times = [], []

    def step(self, parameters, state, tokens):
        def loss_of(parameters):
            logits = nnx.merge(self.definition, parameters)(tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:].astype(jnp.int32)).mean()

        loss, gradients = jax.value_and_grad(loss_of)(parameters)
        updates, state = self.optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, loss

    def train(self, text, seed):
        """One run. Parameters and batches depend on the seed alone, so that both programs have the same."""
        parameters = nnx.state(Llama(self.size, seed))
        state = jax.jit(self.optimizer.init)(parameters)
        random, losses, ends = np.random.default_rng(seed), [], []
        with tqdm(range(self.size.steps), desc=f"{self.name:8} seed {seed}", unit="step", mininterval=0.5) as progress:
            for _ in progress:
                tokens = windows(text, self.size.batch, self.size.tokens, random)
                parameters, state, loss = self.compiled(parameters, state, tokens)
                losses.append(loss)
                # Of the step before, so that the device has its next work while this one waits.
                if len(losses) > 1:
                    progress.set_postfix(loss=f"{float(losses[-2]):.3f}", refresh=False)
                    ends.append(time.perf_counter())
        self.curves.append(np.array(jax.device_get(losses)))
        self.times += list(np.diff(ends))

    def tokens_per_second(self):
        return self.size.batch * self.size.tokens / np.median(self.times)

    def ends(self):
        """For each seed, the mean loss of the last tenth of the steps."""
        return np.array([curve[-max(1, len(curve) // 10) :].mean() for curve in self.curves])


def read_text(options, tokens):
    library = Path(sysconfig.get_paths()["stdlib"])
    sources = (file for file in library.rglob("*.py") if "site-packages" not in file.parts)
    files = [options.text] if options.text else sorted(sources)
    text = np.frombuffer(b"\n\n".join(file.read_bytes() for file in files), np.uint8)
    if len(text) <= tokens:
        raise SystemExit(f"{options.text or library} has {len(text)} bytes, fewer than a row of {tokens} and one")
    return text


def report(wide, narrow):
    for program in (wide, narrow):
        temporaries = program.compiled.memory_analysis().temp_size_in_bytes / 2**20
        print(
            f"{program.name:8} {program.tokens_per_second():,.0f} tokens/s, compiled in {program.compile_time:.1f} s,"
            f" {temporaries:,.0f} MiB of temporaries, loss {' '.join(f'{end:.4f}' for end in program.ends())}"
        )
    print("The loss is the mean of the last tenth of the steps, in nats per byte, for each seed.")
    speed, ends = narrow.tokens_per_second() / wide.tokens_per_second(), wide.ends()
    change = 100 * (narrow.ends() / ends - 1)
    print(f"float8 to bfloat16: speed x {speed:.2f}, loss {change.mean():+.3f} % in the mean (seeds: {len(ends)}).")
    if len(ends) > 1:
        print(
            f"That is {change.min():+.3f} % to {change.max():+.3f} % for single seeds;"
            f" those of bfloat16 are up to {100 * np.ptp(ends) / ends.mean():.3f} % apart."
        )


def plot(programs, header, png):
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for program, color in zip(programs, ("black", "tab:orange"), strict=True):
        for seed, curve in enumerate(program.curves):
            width = max(1, len(curve) // 50)
            label = None if seed else f"{program.name}, {program.tokens_per_second():,.0f} tokens/s"
            smooth = np.convolve(curve, np.full(width, 1 / width), "valid")
            axes.plot(np.arange(width, len(curve) + 1), smooth, lw=1, color=color, alpha=0.7, label=label)
    finish(axes, header, f"training loss, mean of {width} steps, nats per byte")
    save(figure, png)


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="100m", help="(default: 100m)")
    parser.add_argument("--seeds", type=int, default=3, help="how many (default: 3)")
    for name, what in (("layers", "of the model"), ("batch", "rows"), ("tokens", "of a row"), ("steps", "of a run")):
        parser.add_argument(f"--{name}", type=int, help=f"{what} (default: the size's)")
    parser.add_argument("--rate", type=float, help="peak learning rate (default: the size's)")
    parser.add_argument("--text", type=Path, help="file to train on (default: the standard library's sources)")
    parser.add_argument("--png", type=Path, default=Path("train_float8.png"), help="(default: train_float8.png)")
    options = parser.parse_args()

    for name, least in {"seeds": 1, "layers": 1, "batch": 1, "tokens": 2, "steps": 3, "rate": 0.0}.items():
        if (number := getattr(options, name)) is not None and number < least:
            parser.error(f"--{name} {number}: must be at least {least}")
    if options.png.suffix != ".png" or not options.png.absolute().parent.is_dir():
        parser.error(f"--png {options.png}: must be the name of a .png file, in a folder that exists")
    return options


def main():
    options = parse_options()
    jax.config.update("jax_enable_compilation_cache", False)  # the time to compile is that of no cache
    given = {name: getattr(options, name) for name in ("layers", "batch", "tokens", "steps", "rate")}
    size = SIZES[options.size]._replace(**{name: number for name, number in given.items() if number is not None})
    text = read_text(options, size.tokens)
    programs = [Program(name, size) for name in ("bfloat16", "float8")]
    header = f"{jax.devices()[0].device_kind}, {programs[0].parameters / 1e6:,.1f} M parameters"
    header += f", {size.batch} x {size.tokens} tokens a step"
    print(f"{header}, {len(text):,} bytes of text")
    for seed in range(options.seeds):
        for program in programs:
            program.train(text, seed)
    report(*programs)
    plot(programs, header, options.png)


if __name__ == "__main__":
    main()
