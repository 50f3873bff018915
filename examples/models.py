"""Published models as their libraries have them: the norms that jaxnorm finds in each, and what that changes.

python -m examples.models

The models are small and their parameters random: nothing is downloaded. transformers and diffusers are in
`pip install '.[models]'`; bonsai and gemma are read from clones of their repositories on PYTHONPATH.
"""

import argparse
import importlib
import re
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import jaxnorm.linen
from examples.ports.compare import difference, randomised, results
from jaxnorm.replacement import Report

IDS = jnp.arange(2 * 16).reshape(2, 16) % 64
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 32}


class Model(NamedTuple):
    parameters: Any
    before: Callable[[Any, Any], jax.Array]  # of the parameters and the inputs
    after: Callable[[Any, Any], jax.Array]
    inputs: jax.Array
    report: Report  # it fills while `after` is traced


def of_linen(apply: Callable[[Any, Any], jax.Array], parameters: Any, inputs: jax.Array) -> Model:
    """A model of Linen, called within a context."""
    report = Report()

    def after(parameters: Any, inputs: Any) -> jax.Array:
        with jaxnorm.linen.replace_norms() as found:
            y = apply(parameters, inputs)
        report.replaced[:], report.left[:] = found.replaced, found.left
        return y

    return Model(parameters, apply, after, inputs, report)


def of_nnx(model: Any, call: Callable[[Any, Any], jax.Array], inputs: jax.Array) -> Model:
    """A model of NNX, before and after its norms are replaced."""
    sides = []
    for side in (model, nnx.clone(model)):
        report = jaxnorm.replace_norms(side) if sides else None
        definition, parameters, rest = nnx.split(side, nnx.Param, ...)
        # Bound here, as the next turn of the loop has others.
        sides.append(
            lambda parameters, inputs, definition=definition, rest=rest: call(
                nnx.merge(definition, parameters, rest), inputs
            )
        )
    return Model(parameters, *sides, inputs, report)


def hub(name: str, config: str, **options: Any) -> Model:
    """A language model of transformers."""
    import transformers

    model = getattr(transformers, f"Flax{name}")(getattr(transformers, config)(**options), seed=0)
    return of_linen(lambda parameters, ids: model(ids, params=parameters)[0], model.params, IDS)


def t5_norm() -> Model:
    """T5's norm alone: its attention calls `jnp.clip` in a way that JAX 0.10 no longer knows."""
    t5 = importlib.import_module("transformers.models.t5.modeling_flax_t5")
    return of_norm(t5.FlaxT5LayerNorm(32))


def of_norm(norm: Any) -> Model:
    """A norm of Linen by itself."""
    x = jax.random.normal(jax.random.key(2), (2, 16, 32))
    return of_linen(lambda p, x: norm.apply({"params": p}, x), norm.init(jax.random.key(0), x)["params"], x)


def unet() -> Model:
    import diffusers

    blocks = {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D")}
    blocks |= {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "block_out_channels": (32, 64)}
    model = diffusers.FlaxUNet2DConditionModel(
        sample_size=8, layers_per_block=1, attention_head_dim=4, cross_attention_dim=16, **blocks
    )
    texts = jax.random.normal(jax.random.key(1), (2, 5, 16))
    images = jax.random.normal(jax.random.key(2), (2, 4, 8, 8))
    parameters = model.init_weights(jax.random.key(0))
    return of_linen(lambda p, x: model.apply({"params": p}, x, jnp.ones(2), texts).sample, parameters, images)


def vae() -> Model:
    import diffusers

    model = diffusers.FlaxAutoencoderKL(block_out_channels=(32,), sample_size=8, norm_num_groups=8)
    images = jax.random.normal(jax.random.key(2), (2, 3, 8, 8))
    return of_linen(lambda p, x: model.apply({"params": p}, x).sample, model.init_weights(jax.random.key(0)), images)


def bonsai_qwen3() -> Model:
    modeling = importlib.import_module("bonsai.models.qwen3.modeling")
    sizes = {"num_layers": 2, "vocab_size": 64, "emb_dim": 32, "mlp_dim": 64, "num_heads": 4, "head_dim": 8}
    rotary = {"rope_theta": 10_000, "rope_scaling_factor": 1, "local_rope_theta": 1e4}
    options = {"num_kv_heads": 2, "norm_eps": 1e-6, "tie_word_embeddings": False}
    config = modeling.ModelConfig(**sizes, **rotary, **options)

    def call(model: Any, ids: jax.Array) -> jax.Array:
        cache = modeling.init_cache(config, 2, 16, 0, jnp.float32)
        return model(ids, cache=cache, segment_ids=jnp.ones_like(ids))

    return of_nnx(modeling.Qwen3(config, rngs=nnx.Rngs(0)), call, IDS)


def bonsai_mamba2() -> Model:
    modeling = importlib.import_module("bonsai.models.mamba2.modeling")
    sizes = {"vocab_size": 64, "hidden_size": 32, "state_size": 8, "head_dim": 8, "chunk_size": 8}
    model = modeling.Mamba2Model(modeling.ModelConfig(num_hidden_layers=2, **sizes), rngs=nnx.Rngs(0))
    return of_nnx(model, lambda model, ids: model(ids)["last_hidden_state"], IDS)


def bonsai_vit() -> Model:
    modeling = importlib.import_module("bonsai.models.vit.modeling")
    sizes = {"image_size": (16, 16), "patch_size": (4, 4), "num_channels": 3, "hidden_dim": 32, "mlp_dim": 64}
    options = {"attn_dropout_prob": 0.0, "dropout_prob": 0.0, "eps": 1e-12, "num_heads": 4}
    config = modeling.ModelConfig(**sizes, **options, num_layers=2, num_labels=8)
    images = jax.random.normal(jax.random.key(2), (2, 16, 16, 3))
    model = modeling.ViTClassificationModel(config, rngs=nnx.Rngs(0))
    return of_nnx(model, lambda model, x: model(x, rngs=None), images)


def bonsai_vae() -> Model:
    modeling = importlib.import_module("bonsai.models.vae.modeling")
    model = modeling.VAE(modeling.ModelConfig(block_out_channels=(16, 32), norm_num_groups=8), rngs=nnx.Rngs(0))
    return of_nnx(model, lambda model, x: model(x), jax.random.normal(jax.random.key(2), (1, 16, 16, 3)))


def gemma_norm() -> Model:
    """gemma's own RMSNorm; a whole model imports libraries that are not on PyPI for every Python."""
    return of_norm(importlib.import_module("gemma.gm.nn._layers").RMSNorm())


def maxtext_norm() -> Model:
    """MaxText's own RMSNorm with an offset, as its models of Qwen3-Next have it."""
    normalizations = importlib.import_module("maxtext.layers.normalizations")
    norm = normalizations.RMSNorm(32, scale_offset=1.0, rngs=nnx.Rngs(0))
    return of_nnx(norm, lambda norm, x: norm(x), jax.random.normal(jax.random.key(2), (2, 16, 32)))


MODELS: dict[str, Callable[[], Model]] = {
    "transformers: Llama": lambda: hub("LlamaForCausalLM", "LlamaConfig", **SIZES),
    "transformers: Mistral": lambda: hub("MistralForCausalLM", "MistralConfig", num_key_value_heads=2, **SIZES),
    "transformers: Gemma": lambda: hub("GemmaForCausalLM", "GemmaConfig", head_dim=8, num_key_value_heads=4, **SIZES),
    "transformers: BERT": lambda: hub("BertForMaskedLM", "BertConfig", **SIZES),
    "transformers: GPT-2": lambda: hub("GPT2LMHeadModel", "GPT2Config", vocab_size=64, n_embd=32, n_layer=2, n_head=4),
    "transformers: T5's norm": t5_norm,
    "diffusers: U-Net": unet,
    "diffusers: VAE": vae,
    "bonsai: Qwen3": bonsai_qwen3,
    "bonsai: Mamba2": bonsai_mamba2,
    "bonsai: ViT": bonsai_vit,
    "bonsai: VAE": bonsai_vae,
    "gemma: its norm": gemma_norm,
    "MaxText: its norm": maxtext_norm,
}


def row(name: str, turns: int) -> str:
    """A row of the table, of a model whose parameters are not those of initialisers."""
    model = MODELS[name]()
    inputs = (randomised(model.parameters, jnp.float32), model.inputs)
    runs = [jax.jit(results(side)).lower(*inputs).compile() for side in (model.before, model.after)]
    output, gradient = map(difference, *(run(*inputs) for run in runs))
    calls = len(re.findall(r'custom_call_target="jaxnorm_', runs[1].as_text()))
    before, after = milliseconds(runs, inputs, turns)
    norms = f"{len(model.report.replaced)} of {len(model.report.replaced) + len(model.report.left)}"
    # The call, and a line of a mapping for each class that is left.
    lines = 1 + len({cls for _, cls, _ in model.report.left})
    return f"| {name} | {norms} | {lines} | {output:.0e} | {gradient:.0e} | {calls} | {before:.1f} | {after:.1f} |"


def milliseconds(runs: list[Any], inputs: tuple[Any, ...], turns: int) -> list[float]:
    """Of the output and its gradient, before and after: medians, measured in turns."""
    times: list[list[float]] = [[], []]
    for _ in range(turns):
        for run, of in zip(runs, times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(run(*inputs))
            of.append(time.perf_counter() - start)
    return [1e3 * statistics.median(of) for of in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=20, help="how often each model is timed")
    turns = parser.parse_args().turns
    print("| model | norms found | lines | output differs | gradient differs | native calls | ms before | ms after |")
    print("|---|---|---|---|---|---|---|---|")
    absent = {}
    for name in MODELS:
        try:
            print(row(name, turns), flush=True)
        except ImportError as error:
            absent[name] = error
    for name, error in absent.items():
        print(f"\nNot run: {name}: {error}")


if __name__ == "__main__":
    main()
