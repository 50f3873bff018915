"""Train a small language model on real text twice: with Flax's RMSNorm, and with jaxnorm's.

    python examples/train_lm.py                       # the Python standard library's own sources
    python examples/train_lm.py --text FILE --steps 2000 --dim 512 --layers 8 --heads 8 --dtype bfloat16

A byte-level, decoder-only transformer (pre-norm, rotary positions, query and key norms) is trained from one seed on
the same batches with either class. The loss curves should lie on each other; they are compared and plotted, and the
model that was trained with jaxnorm writes a few lines.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from common import LanguageModel, Trainer, differences, hardware, loss_of, parser_of, plot, read_text, report, windows
from flax import nnx

import jaxnorm.nnx

NORMS = {"flax": nnx.RMSNorm, "jaxnorm": jaxnorm.nnx.RMSNorm}


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


def train(name, text, options):
    """Trains a new model with one of the norms, and gives the run and the model."""
    sizes = {"layers": options.layers, "dim": options.dim, "hidden": 3 * options.dim}
    sizes |= {"heads": options.heads, "kv_heads": options.heads, "dtype": jnp.dtype(options.dtype)}

    def create(seed):
        return LanguageModel(NORMS[name], **sizes, seed=seed)

    def draw(random):
        return (windows(text, options.batch, options.seq, random),)

    return Trainer(name, create, draw, loss_of, options.steps, options.rate).run(options.seed)


def held_out_batches(text, options, count=16):
    return jnp.stack([windows(text, options.batch, options.seq, np.random.default_rng(i)) for i in range(count)])


def write_sample(model, text, options, count=400):
    """Prints what the model writes after a function's head, given the text before one as context."""
    prompt = b"\n\ndef "
    context = np.append(text[: options.seq], np.frombuffer(prompt, np.uint8))[-options.seq :]
    sample = continue_text(model, jnp.asarray(context), jax.random.key(options.seed), count)
    written = (prompt + bytes(np.asarray(sample))).decode("utf-8", "replace").strip()
    print(f"\nWritten by the model that was trained with jaxnorm:\n\n{written}\n")


def parse_options():
    numbers = {"steps": (500, 2), "batch": (8, 1), "seq": (128, 2), "layers": (4, 1), "dim": (128, 1), "heads": (4, 1)}
    parser = parser_of(__doc__, numbers, "train_lm.png", rate=4e-3, dtype="float32")
    options = parser.parse_args()
    if options.dim % (2 * options.heads):
        parser.error(f"--dim {options.dim} --heads {options.heads}: dim must be a multiple of 2 * heads")
    return options


def main():
    options = parse_options()
    text = np.frombuffer(read_text(options.text, 10 * (options.seq + 2)), np.uint8)
    text, held_out = np.split(text, [len(text) * 9 // 10])
    print(f"{len(text):,} bytes to train on, {len(held_out):,} held out; {hardware()}, {options.dtype}")
    runs, models = zip(*(train(name, text, options) for name in NORMS), strict=True)
    report(runs, options.batch * options.seq, "tokens")
    for name, model in zip(NORMS, models, strict=True):
        print(f"{name:8} validation {validation_loss(model, held_out_batches(held_out, options)):.4f} nats/byte")
    differences(runs)
    write_sample(models[1], held_out, options)
    plot(options.out, runs, f"{hardware()}, {options.dtype}", "training loss, nats per byte")


if __name__ == "__main__":
    main()
