"""Measure prefill, a forward pass over a prompt, of a decoder with the sizes of Llama 3 8B, in bfloat16 and in float8.

    python examples/prefill_8b.py           # for a GPU that multiplies fp8 matrices; weights take 22 GiB of it
    python examples/prefill_8b.py --small   # for a CPU

Both programs have the same random weights. In float8 those of the layers' products were quantised ahead, with one scale
an output channel, as for a model that is served. Norms and the gated activation write 8-bit values with one scale a
token, which the next product takes as they are; what attention gives is quantised by a pass of its own. Residual
stream, attention, embedding and the product that gives the logits are bfloat16 in both. The programs are called in
turns, and each call is awaited.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from fp8_inference import products_of

from jaxnorm import (
    Quantization,
    add_rms_norm,
    gated_activation,
    gated_activation_quantized,
    qk_norm_rotary,
    quantize,
    quantized_dot,
    rms_norm,
    rms_norm_quantized,
)

FP8 = Quantization(jnp.float8_e4m3fn)
PRODUCTS = ("qkv", "out", "gate_up", "down")  # of a layer
EPSILON = 1e-5


class Sizes(NamedTuple):
    """Those of a decoder. It is hashable, so that a jitted function may take it as static."""

    dim: int
    hidden: int  # between the products of the MLP
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int


LLAMA_3_8B = Sizes(4096, 14336, 32, 8, 128, 128256)
SMALL = Sizes(128, 256, 4, 2, 32, 512)


class Ops(NamedTuple):
    """What the two programs do differently. A norm's result, and a gated one, go into products alone."""

    norm: Callable  # x, scale
    add_norm: Callable  # x, residual, scale: y, x + residual
    gated: Callable
    round: Callable  # what attention gives
    product: Callable  # x, kernel


OPS = {
    "bfloat16": Ops(
        norm=partial(rms_norm, epsilon=EPSILON),
        add_norm=partial(add_rms_norm, epsilon=EPSILON),
        gated=gated_activation,
        round=lambda x: x,
        product=jnp.matmul,
    ),
    "float8": Ops(
        norm=partial(rms_norm_quantized, quantization=FP8, epsilon=EPSILON),
        add_norm=lambda x, residual, scale: rms_norm_quantized(
            x, scale, residual=residual, quantization=FP8, epsilon=EPSILON
        ),
        gated=partial(gated_activation_quantized, quantization=FP8),
        round=partial(quantize, quantization=FP8),
        product=quantized_dot,
    ),
}


def prefill(weights, tokens, *, ops, sizes):
    """The last hidden state (batch, tokens, dim) of tokens (batch, tokens), and the logits of each prompt's last."""
    stream, branch = weights["embed"][tokens], None
    for layer in weights["layers"]:
        if branch is None:
            y = ops.norm(stream, layer["attention_norm"])
        else:
            y, stream = ops.add_norm(branch, stream, layer["attention_norm"])
        branch = ops.product(ops.round(attention(ops.product(y, layer["qkv"]), sizes)), layer["out"])
        y, stream = ops.add_norm(branch, stream, layer["mlp_norm"])
        branch = ops.product(ops.gated(ops.product(y, layer["gate_up"])), layer["down"])
    hidden = add_rms_norm(branch, stream, weights["norm"], epsilon=EPSILON, return_sum=False)
    return hidden, hidden[:, -1] @ weights["head"]


def attention(qkv, sizes):
    """Causal attention with rotary positions, of queries, keys and values side by side."""
    heads = qkv.reshape(*qkv.shape[:-1], -1, sizes.head_dim)
    q, k, v = jnp.split(heads, [sizes.heads, sizes.heads + sizes.kv_heads], axis=-2)
    q, k = qk_norm_rotary(q, k, theta=500_000.0, normalize=False)
    implementation = "cudnn" if jax.default_backend() == "gpu" else "xla"
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)
    return y.reshape(*y.shape[:-2], -1)


def draw(sizes, layers):
    """Random weights of bfloat16, made on the device. Layer by layer, so that float32 is needed for one array alone."""
    of_embed, of_norm, of_head, *of_layers = jax.random.split(jax.random.key(0), 3 + layers)
    return {
        "embed": normal(of_embed, (sizes.vocabulary, sizes.dim), 0, 1),
        "layers": [draw_layer(key, sizes) for key in of_layers],
        "norm": normal(of_norm, (sizes.dim,), 1, 0.1),
        "head": normal(of_head, (sizes.dim, sizes.vocabulary), 0, sizes.dim**-0.5),
    }


def draw_layer(key, sizes):
    shapes = {
        "qkv": (sizes.dim, (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim),
        "out": (sizes.heads * sizes.head_dim, sizes.dim),
        "gate_up": (sizes.dim, 2 * sizes.hidden),
        "down": (sizes.hidden, sizes.dim),
    }
    keys = iter(jax.random.split(key, 6))
    norms = {name: normal(next(keys), (sizes.dim,), 1, 0.1) for name in ("attention_norm", "mlp_norm")}
    return norms | {name: normal(next(keys), shape, 0, shape[0] ** -0.5) for name, shape in shapes.items()}


@partial(jax.jit, static_argnums=(1, 2, 3))
def normal(key, shape, mean, std):
    return (mean + std * jax.random.normal(key, shape)).astype(jnp.bfloat16)


def quantize_layers(weights):
    """The same weights with those of the layers' products in float8. Other arrays are shared, not copied."""

    def quantized(layer):
        return layer | {name: quantize_kernel(layer[name]) for name in PRODUCTS}

    return weights | {"layers": [quantized(layer) for layer in weights["layers"]]}


@jax.jit
def quantize_kernel(kernel):
    """Outputs first, as `quantized_dot` takes weights, and one scale for each."""
    return quantize(kernel.T, FP8)


@dataclass
class Program:
    """A compiled forward pass, its weights, and what its calls took."""

    name: str
    weights: dict
    compiled: jax.stages.Compiled
    seconds: list[float] = field(default_factory=list)

    def call(self, tokens):
        return jax.block_until_ready(self.compiled(self.weights, tokens))


def build(name, weights, tokens, sizes):
    function = jax.jit(partial(prefill, ops=OPS[name], sizes=sizes))
    return Program(name, weights, function.lower(weights, tokens).compile())


def measure(programs, tokens, turns):
    """Times each program once a turn, after a first call whose results it gives."""
    results = [program.call(tokens) for program in programs]
    for _ in range(turns):
        for program in programs:
            start = time.perf_counter()
            program.call(tokens)
            program.seconds.append(time.perf_counter() - start)
    return results


@jax.jit
def relative_error(array, expected):
    array, expected = (a.astype(jnp.float32) for a in (array, expected))
    return jnp.linalg.norm((array - expected).ravel()) / jnp.linalg.norm(expected.ravel())


def report(programs, results, tokens, options):
    sizes = options.sizes
    print(
        f"{jax.devices()[0].device_kind}, jax {jax.__version__}: {options.layers} layers of {sizes.dim}, MLP of"
        f" {sizes.hidden}, {sizes.heads} and {sizes.kv_heads} heads of {sizes.head_dim}, vocabulary of"
        f" {sizes.vocabulary}; {options.batch} x {options.tokens} tokens, medians of {options.turns} turns\n"
    )
    print(
        f"{'program':8}  {'ms':>9}  {'tokens/s':>9}  {'speedup':>7}  {'weights MiB':>11}  {'temporary MiB':>13}"
        f"  {'error of the last hidden state':>30}"
    )
    base, expected = np.median(programs[0].seconds), results[0][0]
    for program, (hidden, _) in zip(programs, results, strict=True):
        seconds = np.median(program.seconds)
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(program.weights)) / 2**20
        memory = program.compiled.memory_analysis()
        temporary = f"{memory.temp_size_in_bytes / 2**20:.2f}" if memory else "unknown"
        error = "-" if hidden is expected else f"{relative_error(hidden, expected):.5f}"
        print(
            f"{program.name:8}  {1e3 * seconds:9.3f}  {tokens.size / seconds:9.0f}  {base / seconds:7.3f}"
            f"  {size:11.2f}  {temporary:>13}  {error:>30}"
        )
    print("\nThe error is the L2 norm of the difference from bfloat16, over that of bfloat16. Products, as compiled:")
    for program in programs:
        products = products_of(program.compiled.as_text())
        print(f"{program.name:8}  " + ", ".join(f"{count} x {name}" for name, count in products.items()))


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="toy sizes, 2 layers and 64 tokens, for a CPU")
    parser.add_argument("--layers", type=int, help="(default: 32)")
    parser.add_argument("--tokens", type=int, help="of each prompt (default: 8192)")
    parser.add_argument("--batch", type=int, default=1, help="how many prompts (default: 1)")
    parser.add_argument("--turns", type=int, default=10, help="how many calls of each program are timed (default: 10)")
    options = parser.parse_args()

    options.sizes, layers, tokens = (SMALL, 2, 64) if options.small else (LLAMA_3_8B, 32, 8192)
    options.layers = layers if options.layers is None else options.layers
    options.tokens = tokens if options.tokens is None else options.tokens
    for name in ("layers", "tokens", "batch", "turns"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: must be at least 1")
    return options


def main():
    options = parse_options()
    sizes = options.sizes
    tokens = jax.random.randint(jax.random.key(1), (options.batch, options.tokens), 0, sizes.vocabulary)
    weights = draw(sizes, options.layers)
    programs = [build("bfloat16", weights, tokens, sizes), build("float8", quantize_layers(weights), tokens, sizes)]
    results = measure(programs, tokens, options.turns)
    report(programs, results, tokens, options)


if __name__ == "__main__":
    main()
