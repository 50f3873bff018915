"""What whole blocks win in a training step beside norms alone, of models of flax.nnx as their authors wrote them.

    PYTHONPATH=bonsai python examples/blocks.py --out blocks

with a clone of https://github.com/jax-ml/bonsai; without one, of a DiT that is written out here. Each model is timed
three ways, in turns: with its own norms ("own"), after `replace_norms(model)`, or a mapping of norms of its own
("norms"), and after `replace_norms(model, jaxnorm.blocks.of(model))` ("blocks"). Parameters are bfloat16, and a step
goes along the gradient.
"""

import argparse
import dataclasses
import importlib
import importlib.util
import re
import statistics
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

import jaxnorm
import jaxnorm.blocks

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import report, timing

RATE = 1e-4


class Mlp(nnx.Module):
    def __init__(self, dim, hidden, rngs):
        self.up, self.down = nnx.Linear(dim, hidden, rngs=rngs), nnx.Linear(hidden, dim, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


class DitBlock(nnx.Module):
    """A block of a DiT with adaLN-Zero, https://arxiv.org/abs/2212.09748, its gates not zero."""

    def __init__(self, dim, heads, rngs):
        norm = partial(nnx.LayerNorm, dim, use_scale=False, use_bias=False, rngs=rngs)
        self.norm1, self.norm2 = norm(), norm()
        self.attention = nnx.MultiHeadAttention(heads, dim, decode=False, rngs=rngs)
        self.mlp = Mlp(dim, 4 * dim, rngs)
        self.adaLN_modulation = nnx.Linear(dim, 6 * dim, rngs=rngs)

    def __call__(self, x, condition):
        parts = jnp.split(self.adaLN_modulation(nnx.silu(condition))[:, None], 6, axis=-1)
        shift1, scale1, gate1, shift2, scale2, gate2 = parts
        x = x + gate1 * self.attention(self.norm1(x) * (1 + scale1) + shift1)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


def dit_block(block, x, condition):
    """A `DitBlock`, with the gate, the sum, the norm and its modulation in one call."""
    parts = jnp.split(block.adaLN_modulation(nnx.silu(condition))[:, None], 6, axis=-1)
    shift1, scale1, gate1, shift2, scale2, gate2 = parts
    options = {"scale_offset": 1.0, "epsilon": block.norm1.epsilon}
    y = block.attention(jaxnorm.layer_norm(x, scale1, shift1, **options))
    y, h = jaxnorm.add_layer_norm(y, x, scale2, shift2, branch_scale=gate1, **options)
    return h + gate2 * block.mlp(y)


class Dit(nnx.Module):
    def __init__(self, layers, dim, heads, rngs):
        self.layers = nnx.List([DitBlock(dim, heads, rngs) for _ in range(layers)])

    def __call__(self, x, condition):
        for layer in self.layers:
            x = layer(x, condition)
        return x


def draw(*shape):
    return jax.random.normal(jax.random.key(1), shape, jnp.bfloat16)


def mean_of_squares(model, *inputs):
    return jnp.square(model(*inputs).astype(jnp.float32)).mean()


def dit(size):
    model = Dit(size(4, 1), size(1152, 32), size(16, 2), nnx.Rngs(0))
    tokens = draw(size(32, 2), size(256, 16), size(1152, 32))
    return model, mean_of_squares, (tokens, tokens[:, 0]), {DitBlock: dit_block}


def qwen3(size):
    of = importlib.import_module("bonsai.models.qwen3.modeling")
    config = dataclasses.replace(
        of.ModelConfig.qwen3_1_7b(),
        num_layers=size(4, 1),
        vocab_size=size(32768, 64),
        **({} if size(True, False) else {"emb_dim": 32, "mlp_dim": 48, "num_heads": 2, "num_kv_heads": 2}),
    )
    tokens = jax.random.randint(jax.random.key(1), (size(4, 2), size(1024, 16)), 1, config.vocab_size)

    def loss(model, tokens):
        cache = of.init_cache(config, *tokens.shape, 0)
        logits = model(tokens, cache=cache, segment_ids=jnp.ones_like(tokens)).astype(jnp.float32)
        chosen = jnp.take_along_axis(logits, jnp.roll(tokens, -1, 1)[..., None], axis=-1)[..., 0]
        return (jax.nn.logsumexp(logits, axis=-1) - chosen).mean()

    return of.Qwen3(config, rngs=nnx.Rngs(0)), loss, (tokens,), {}


def gemma3(size):
    of = importlib.import_module("bonsai.models.gemma3.modeling")
    config = of.TextConfig.gemma3_4b_it(norm_dtype=jnp.float32)
    layers = size(4, 1)
    small = {} if size(True, False) else {"hidden_size": 32, "intermediate_size": 48, "head_dim": 16}
    kinds = of._set_attention_modes(2, layers)
    config = dataclasses.replace(config, num_hidden_layers=layers, layer_types=kinds, **small)
    x = draw(size(4, 2), size(1024, 16), config.hidden_size)

    def loss(model, x):
        batch, length, _ = x.shape
        caches = [of.LayerCache(config, i, batch, length, jnp.bfloat16) for i in range(layers)]
        mask = jnp.tril(jnp.ones((1, 1, length, length), bool))
        return mean_of_squares(model, x, caches, jnp.ones((batch, length), int), mask, mask)

    return of.Gemma3TextModel(config, rngs=nnx.Rngs(0)), loss, (x,), {}


def vit(size):
    of = importlib.import_module("bonsai.models.vit.modeling")
    small = {} if size(True, False) else {"image_size": (32, 32)}
    sizes = {"hidden_dim": size(1024, 32), "num_heads": size(16, 2), "mlp_dim": size(4096, 48)}
    config = dataclasses.replace(of.ModelConfig.vit_p16_224(), num_layers=size(4, 1), **sizes, **small)
    images = draw(size(64, 2), *config.image_size, 3)

    def loss(model, images):
        return mean_of_squares(partial(model, rngs=nnx.Rngs(0)), images)

    return of.ViTClassificationModel(config, rngs=nnx.Rngs(0)), loss, (images,), {}


def dinov3(size):
    of = importlib.import_module("bonsai.models.dinov3.modeling")
    sizes = {"hidden_size": size(1280, 32), "intermediate_size": size(5120, 48), "num_attention_heads": size(20, 2)}
    config = dataclasses.replace(of.ModelConfig.dinov3_vith16plus(), num_hidden_layers=size(4, 1), **sizes)
    images = draw(size(64, 2), 3, size(224, 32), size(224, 32))

    def loss(model, images):
        return mean_of_squares(lambda images: model(images)["last_hidden_state"], images)

    return of.Dinov3ViTModel(config, nnx.Rngs(0)), loss, (images,), {}


def vae(size):
    of = importlib.import_module("bonsai.models.vae.modeling")
    config = of.ModelConfig() if size(True, False) else of.ModelConfig((8, 16), 2, 4)
    images = draw(size(8, 1), size(256, 8), size(256, 8), 3)
    return of.VAE(config, nnx.Rngs(0)), mean_of_squares, (images,), {}


MODELS = {model.__name__: model for model in (vae, qwen3, gemma3, vit, dinov3, dit)}


def to_bfloat16(variable):
    array = variable[...]
    return variable.replace(array.astype(jnp.bfloat16) if jnp.issubdtype(array.dtype, jnp.floating) else array)


def steps_of(name, size):
    """A training step for each way, the parameters that they share, and the inputs."""
    model, loss, inputs, blocks = MODELS[name](size)
    nnx.update(model, nnx.map_state(lambda _, variable: to_bfloat16(variable), nnx.state(model, nnx.Param)))
    blocks |= jaxnorm.blocks.of(model)
    norms = {cls: function for cls, function in blocks.items() if "norm" in cls.__name__.lower()}
    steps = {}
    for way, custom in {"own": None, "norms": norms, "blocks": blocks}.items():
        replaced = nnx.clone(model)
        if custom is not None:
            jaxnorm.replace_norms(replaced, custom)
        definition, params, others = nnx.split(replaced, nnx.Param, ...)
        steps[way] = jax.jit(partial(step, definition, others, loss), donate_argnums=0)
    return steps, params, inputs


def step(definition, others, loss, params, *inputs):
    value, gradient = jax.value_and_grad(lambda params: loss(nnx.merge(definition, params, others), *inputs))(params)
    return jax.tree.map(lambda param, grad: param - RATE * grad, params, gradient), value


def rows_of(name, turns, size):
    """The lines of the table of a model."""
    steps, params, inputs = steps_of(name, size)
    programs = {}
    for way, jitted in steps.items():
        print(f"compiling {name}, {way}", file=sys.stderr, flush=True)
        programs[way] = jitted.lower(params, *inputs).compile()
    times, _ = timing.in_turns(programs, params, inputs, turns, size(4, 1))
    for way, taken in times.items():
        lower, median, upper = statistics.quantiles(taken, n=4)
        gains = [100 * (own / mine - 1) for own, mine in zip(times["own"], taken, strict=True)]
        calls = Counter(re.findall(r'custom_call_target="jaxnorm_(\w+)"', programs[way].as_text()))
        yield {
            "model": name,
            "way": way,
            "step ms": 1e3 * median,
            "± us": 1e6 * (upper - lower) / 2,
            "faster %": statistics.median(gains),
            "temp MiB": programs[way].memory_analysis().temp_size_in_bytes / 2**20,
            "native calls": ", ".join(f"{count} {call}" for call, count in sorted(calls.items())) or "none",
        }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    has_bonsai = importlib.util.find_spec("bonsai") is not None
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[m for m in MODELS if has_bonsai or m == "dit"])
    parser.add_argument("--turns", type=int, default=15, help="of each program (at least 2)")
    parser.add_argument("--small", action="store_true", help="toy sizes, to try the program")
    report.add_arguments(parser)
    options = parser.parse_args()
    rows = []
    for name in options.models:
        rows += rows_of(name, options.turns, lambda full, small: small if options.small else full)
        report.write(report.device(options.commit), rows, options.out)  # a run that is cut off keeps the others


if __name__ == "__main__":
    main()
