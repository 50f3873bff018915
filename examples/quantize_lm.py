"""Train a small Llama in bfloat16, quantise its linear layers by one call, and compare perplexity, time and memory.

    python examples/quantize_lm.py                    # the Python standard library's own sources, for a CPU
    python examples/quantize_lm.py --steps 3000 --batch 64 --seq 512 --dim 1024 --layers 12 --heads 16 --rate 1e-3
    python examples/quantize_lm.py --weights int4     # of the types of weights only this one

A byte-level, decoder-only transformer (RMSNorm, rotary positions, SwiGLU) is trained on nine tenths of the text. Each
row of the table is the same model with the weights of all linear layers quantised after the training, one scale an
output, and with their inputs quantised as well, one scale a token, or left in bfloat16. Perplexity is that of the last
tenth, for each byte. It ends with an error where a perplexity is too far from that of bfloat16.
"""

import argparse
import time
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from train_lm import (
    BYTES,
    add_language_options,
    check_language_options,
    check_options,
    fit,
    hardware,
    held_out_batches,
    loss_of,
    read_text,
)

import jaxnorm
import jaxnorm.nnx
from jaxnorm import Quantization

# For each type of weights that of the inputs of its product, and how far the perplexity may be from bfloat16's.
WEIGHTS = {"float8_e4m3fn": ("float8_e4m3fn", 0.01), "int8": ("int8", 0.01), "int4": ("int8", 0.05)}


class Attention(nnx.Module):
    """Causal self-attention with rotary positions. With a cache of keys and values, that of one more position."""

    def __init__(self, dim, heads, linear):
        self.heads = heads
        self.qkv = linear(dim, 3 * dim)
        self.out = linear(dim, dim)

    def __call__(self, x, position, cache):
        q, k, v = jnp.split(self.qkv(x).reshape(*x.shape[:-1], 3 * self.heads, -1), 3, axis=-2)
        positions = position + jnp.arange(x.shape[1])
        q, k = jaxnorm.qk_norm_rotary(q, k, positions=positions, normalize=False)
        if cache is not None:
            put = jax.lax.dynamic_update_slice_in_dim
            cache = k, v = put(cache[0], k, position, 1), put(cache[1], v, position, 1)
        is_past = jnp.arange(k.shape[1]) <= positions[:, None]
        y = jax.nn.dot_product_attention(q, k, v, mask=is_past[None, None])
        return self.out(y.reshape(x.shape)), cache


class Block(nnx.Module):
    """Attention and SwiGLU (https://arxiv.org/abs/2002.05202), each of the normalised residual stream."""

    def __init__(self, dim, heads, linear, norm):
        hidden = -(-8 * dim // 96) * 32  # 8/3 of dim, in whole 32s
        self.attention_norm, self.mlp_norm = norm(dim), norm(dim)
        self.attention = Attention(dim, heads, linear)
        self.gate, self.up, self.down = linear(dim, hidden), linear(dim, hidden), linear(hidden, dim)

    def __call__(self, x, position, cache):
        y, cache = self.attention(self.attention_norm(x), position, cache)
        x = x + y
        y = self.mlp_norm(x)
        return x + self.down(jax.nn.silu(self.gate(y)) * self.up(y)), cache


class Llama(nnx.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, *, dim, heads, layers, rngs):
        linear = partial(nnx.Linear, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)
        norm = partial(jaxnorm.nnx.RMSNorm, dtype=jnp.bfloat16, rngs=rngs)
        self.embed = nnx.Embed(BYTES, dim, dtype=jnp.bfloat16, rngs=rngs)
        self.blocks = nnx.List(Block(dim, heads, linear, norm) for _ in range(layers))
        self.norm = norm(dim)
        self.head = linear(dim, BYTES)

    def __call__(self, tokens):
        return self.run(tokens)[0]

    def run(self, tokens, position=0, caches=None):
        """The logits, and the caches with keys and values of these tokens, which begin at `position`."""
        x = self.embed(tokens)
        caches = list(caches or [None] * len(self.blocks))
        for i, block in enumerate(self.blocks):
            x, caches[i] = block(x, position, caches[i])
        return self.head(self.norm(x)).astype(jnp.float32), caches


def decode(model, count):
    """The most likely bytes after a line feed, one after the other."""
    heads = model.blocks[0].attention.heads
    empty = jnp.zeros((1, count, heads, model.embed.features // heads), jnp.bfloat16)

    def step(carry, position):
        byte, caches = carry
        logits, caches = model.run(byte, position, caches)
        return (logits.argmax(-1), caches), byte

    caches = [(empty, empty) for _ in model.blocks]
    return jax.lax.scan(step, (jnp.full((1, 1), ord("\n")), caches), jnp.arange(count))[1]


@dataclass
class Row:
    """What one type of weights and inputs gives."""

    weights: str
    inputs: str
    weight_bytes: int  # on the device
    working_bytes: int | None  # beside weights, of a forward pass
    perplexity: float
    forward: float  # seconds of a batch
    token: float  # seconds of a decoded one


def measure(model, weights, inputs, batches, options):
    definition, state = nnx.split(model)
    forward = jax.jit(lambda state, tokens: loss_of(nnx.merge(definition, state), tokens))
    forward = forward.lower(state, batches[0]).compile()
    decoding = jax.jit(lambda state: decode(nnx.merge(definition, state), options.seq)).lower(state).compile()
    loss = np.mean([float(forward(state, tokens)) for tokens in batches])
    with np.errstate(over="ignore"):  # of a training that diverged
        perplexity = float(np.exp(loss))
    memory = forward.memory_analysis()
    return Row(
        weights,
        inputs,
        sum(leaf.on_device_size_in_bytes() for leaf in jax.tree.leaves(state)),
        memory and memory.temp_size_in_bytes,
        perplexity,
        seconds(forward, options.calls, state, batches[0]),
        seconds(decoding, options.calls, state) / options.seq,
    )


def seconds(function, calls, *args):
    """The median time of a call, after a first one."""
    times = []
    for _ in range(calls + 1):
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        times.append(time.perf_counter() - start)
    return float(np.median(times[1:]))


def compare(model, batches, options):
    """A row for the model, and two for each type of weights."""
    yield measure(model, "bfloat16", "bfloat16", batches, options)
    for name in options.weights:
        for inputs in (WEIGHTS[name][0], None):
            quantized = nnx.clone(model)
            jaxnorm.quantize_linears(quantized, Quantization(name), inputs and Quantization(inputs))
            yield measure(quantized, name, inputs or "bfloat16", batches, options)


def report(rows, options):
    """Prints the table. Gives what is too far from bfloat16."""
    print(
        f"\n{'weights':13}  {'inputs':13}  {'weights MiB':>11}  {'working MiB':>11}  {'perplexity':>10}  {'change':>8}"
        f"  {'ms/batch':>8}  {'ms/token':>8}"
    )
    far, expected = [], None
    for row in rows:
        expected = expected or row.perplexity
        change = row.perplexity / expected - 1
        working = "unknown" if row.working_bytes is None else f"{row.working_bytes / 2**20:.2f}"
        print(
            f"{row.weights:13}  {row.inputs:13}  {row.weight_bytes / 2**20:11.2f}  {working:>11}"
            f"  {row.perplexity:10.4f}  {100 * change:+7.2f}%  {1e3 * row.forward:8.2f}  {1e3 * row.token:8.3f}",
            flush=True,
        )
        most = WEIGHTS.get(row.weights, (None, 0))[1]
        if not abs(change) <= most:
            far.append(
                f"{row.weights} with {row.inputs}: {100 * change:+.2f} %, at most {100 * most:.0f} % are expected"
            )
    print(
        f"Medians of {options.calls} calls: a batch is {options.batch} x {options.seq} bytes and its loss, a token one"
        f" of {options.seq} that are decoded one by one. Weights are counted as the device has them: some keep an int4"
        " in a byte."
    )
    return far


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_language_options(parser)
    parser.add_argument("--calls", type=int, default=10, help="how many are timed (default: 10)")
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=list(WEIGHTS), help="(default: all)")
    options = parser.parse_args()
    check_language_options(parser, options)
    check_options(parser, options, {"calls": 1})
    return options


def main():
    options = parse_options()
    text, held_out = read_text(options)
    print(f"{len(text):,} bytes to train on, {len(held_out):,} held out; {hardware()}, jax {jax.__version__}")
    model = Llama(dim=options.dim, heads=options.heads, layers=options.layers, rngs=nnx.Rngs(options.seed))
    losses, _ = fit(model, "bfloat16", text, options)
    print(f"Loss {losses[0]:.4f} -> {losses[-max(1, options.steps // 20) :].mean():.4f} nats/byte")
    # What is compared is as a trained model is handed on: all of it in bfloat16.
    nnx.update(model, jax.tree.map(lambda p: p.astype(jnp.bfloat16), nnx.state(model)))
    far = report(compare(model, held_out_batches(held_out, options), options), options)
    if far:
        raise SystemExit("\n".join(["The perplexity changes too much.", *far]))
    print("Each perplexity is as near to bfloat16's as is expected.")


if __name__ == "__main__":
    main()
