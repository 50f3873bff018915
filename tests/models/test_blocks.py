"""`jaxnorm.blocks.find` for models of other packages: those that are installed, or whose repository is on PYTHONPATH.

    PYTHONPATH=bonsai python -m pytest tests/models/test_blocks.py

with a clone of https://github.com/jax-ml/bonsai, and pip's transformers<5 and diffusers==0.31.0.
"""

import importlib
from dataclasses import replace

import flax.nnx
import jax
import jax.numpy as jnp
import pytest
from cases import away_from_init
from hlo import compiled_text, count_native_calls

import jaxnorm
from jaxnorm.inspect import turns

# The packages warn of what they import.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.long, pytest.mark.usefixtures("exact_products")]


def draw(*shape, seed=1):
    return jax.random.normal(jax.random.key(seed), shape)


# Of bonsai's models, given the module that has one: the model, and what runs it.

TOKENS = jnp.array([[0, 0, 5, 9, 3, 4], [7, 8, 1, 2, 3, 4]])
HIDDEN = {"hidden_size": 32, "intermediate_size": 48}


def qwen3(of):
    sizes = {"vocab_size": 64, "emb_dim": 32, "mlp_dim": 48, "num_heads": 4, "head_dim": 16, "num_kv_heads": 2}
    config = replace(of.ModelConfig.qwen3_0_6b(), num_layers=2, **sizes)

    def run(module):
        cache, is_there = of.init_cache(config, 2, 6, 2, jnp.float32), TOKENS != 0
        first = module(TOKENS, cache=cache, segment_ids=1 * is_there)
        second = module(TOKENS[:, -1:], cache=cache, segment_ids=jnp.ones((2, 1), int))
        return jnp.where(is_there[..., None], first, 0), second

    return of.Qwen3(config, rngs=flax.nnx.Rngs(0)), run


def gemma3(of):
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16, "num_key_value_heads": 2, **HIDDEN}
    config = of.ModelConfig.gemma3_4b_it(norm_dtype=jnp.float32).text_config
    config = replace(config, layer_types=of._set_attention_modes(2, 2), **sizes)

    def run(module):
        caches = [of.LayerCache(config, i, 2, 8, jnp.float32) for i in range(2)]
        mask = jnp.tril(jnp.ones((1, 1, 6, 8), bool))
        return module(draw(2, 6, 32), caches, jnp.ones((2, 6), int), mask, mask)

    return of.Gemma3TextModel(config, rngs=flax.nnx.Rngs(0)), run


def siglip(of):
    config = replace(of.VisionConfig.gemma3_4b_it(), num_attention_heads=2, num_hidden_layers=2, **HIDDEN)
    return of.SiglipEncoder(config, rngs=flax.nnx.Rngs(0)), lambda module: module(draw(2, 6, 32), None)


def vit(of):
    sizes = {"image_size": (32, 32), "hidden_dim": 32, "num_heads": 2, "mlp_dim": 48, "num_labels": 8}
    config = replace(of.ModelConfig.vit_p16_224(), num_layers=2, **sizes)
    module = of.ViTClassificationModel(config, rngs=flax.nnx.Rngs(0))
    return module, lambda module: module(draw(2, 32, 32, 3), rngs=flax.nnx.Rngs(1))


def dinov3(of):
    sizes = {"image_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, **HIDDEN}
    config = replace(of.ModelConfig.dinov3_vith16plus(), **sizes)
    return of.Dinov3ViTModel(config, rngs=flax.nnx.Rngs(0)), lambda module: module(draw(2, 3, 32, 32))


def vae(of):
    config = of.ModelConfig(block_out_channels=(8, 16), latent_channels=2, norm_num_groups=4)
    return of.VAE(config, flax.nnx.Rngs(0)), lambda module: module(draw(1, 8, 8, 3))


def qwen3_vl(of):
    sizes = {"num_attention_heads": 4, "head_dim": 16, "num_key_value_heads": 2, "num_hidden_layers": 1, **HIDDEN}
    config = replace(of.ModelConfig.qwen3vl_2b().text_config, **sizes)

    def run(module):
        cache = of.LayerCache(config, 2, 8, jnp.float32)
        return module(draw(2, 6, 32), cache, *draw(2, 2, 6, 8, seed=2), jnp.tril(jnp.ones((1, 1, 6, 8), bool)))

    return of.Qwen3VLDecoderLayer(config, 0, rngs=flax.nnx.Rngs(0)), run


# The native calls of a forward pass, with norms alone replaced, and with blocks.
BONSAI = {
    qwen3: ({"rms_norm": 18}, {"rms_norm": 10, "qk_norm_rotary": 4, "gated_activation": 4}),
    qwen3_vl: ({"rms_norm": 4}, {"rms_norm": 4}),
    gemma3: ({"rms_norm": 13}, {"rms_norm": 9, "qk_norm_rotary": 2, "gated_activation": 2}),
    siglip: ({"layer_norm": 4}, {"layer_norm": 4}),
    vit: ({"layer_norm": 5}, {"layer_norm": 5}),
    dinov3: ({"layer_norm": 5}, {"layer_norm": 5, "gated_activation": 2}),
    vae: ({"group_norm": 32}, {"group_norm": 32}),
}
MODULES = {siglip: "gemma3"}  # where a name is not the function's
ROUNDED = {dinov3: 1e-3}  # of its gradients the tolerance: its rotation is of bfloat16


def functions_of(model, run):
    """The forward pass and the gradient as functions of the parameters, and these."""
    definition, params, others = flax.nnx.split(model, flax.nnx.Param, ...)

    def forward(params):
        return jax.tree.leaves(run(flax.nnx.merge(definition, params, others)))

    def gradient(params):
        of_squares = jax.grad(lambda params: sum(jnp.square(y).mean() for y in forward(params)))
        return jax.tree.leaves(of_squares(params))

    return forward, gradient, params


def assert_close(arrays, expected, tolerance):
    largest = max(float(jnp.abs(array).max()) for array in expected)
    for array, other in zip(arrays, expected, strict=True):
        assert array.dtype == other.dtype
        assert float(jnp.abs(array - other).max()) < tolerance * largest


@pytest.mark.needs("bonsai")
@pytest.mark.parametrize("make", BONSAI, ids=lambda make: make.__name__)
def test_bonsai(make):
    model, run = make(importlib.import_module(f"bonsai.models.{MODULES.get(make, make.__name__)}.modeling"))
    flax.nnx.update(model, away_from_init(flax.nnx.state(model, flax.nnx.Param)))
    forward, gradient, params = functions_of(model, run)
    expected = jax.jit(forward)(params), jax.jit(gradient)(params)
    for calls, blocks in zip(BONSAI[make], ({}, jaxnorm.blocks.find(model)), strict=True):
        replaced = flax.nnx.clone(model)
        jaxnorm.replace_layers(replaced, blocks)
        forward, gradient, _ = functions_of(replaced, run)
        with jaxnorm.implementation("native"):
            found = count_native_calls(compiled_text(forward, params))
            assert found == {f"jaxnorm_{name}_fwd": count for name, count in calls.items()}
            assert_close(jax.jit(forward)(params), expected[0], 1e-5)
            assert_close(jax.jit(gradient)(params), expected[1], ROUNDED.get(make, 1e-5))
        jaxnorm.restore_layers(replaced)
        assert flax.nnx.graphdef(replaced) == flax.nnx.graphdef(model)


def hub_llama():
    of = importlib.import_module("transformers.models.llama.modeling_flax_llama")
    config = of.LlamaConfig(num_hidden_layers=2, num_attention_heads=2, vocab_size=64, **HIDDEN)
    return of.FlaxLlamaForCausalLMModule(config), (TOKENS, jnp.ones_like(TOKENS), jnp.indices(TOKENS.shape)[1])


def diffusers_vae():
    of = importlib.import_module("diffusers.models.vae_flax")
    return of.FlaxUpDecoderBlock2D(32, 64, num_layers=2), (draw(1, 4, 4, 32),)


def diffusers_unet():
    of = importlib.import_module("diffusers.models.resnet_flax")
    return of.FlaxResnetBlock2D(32, 64), (draw(2, 4, 4, 32), draw(2, 16))


# What each needs, and its native calls.
LINEN = {
    hub_llama: ("transformers", {"rms_norm": 5, "qk_norm_rotary": 2, "gated_activation": 2}),
    diffusers_vae: ("diffusers", {"group_norm": 4}),
    diffusers_unet: ("diffusers", {"group_norm": 2}),
}


@pytest.mark.parametrize(
    ("make", "calls"),
    [
        pytest.param(make, calls, marks=pytest.mark.needs(package), id=make.__name__)
        for make, (package, calls) in LINEN.items()
    ],
)
def test_linen(make, calls, monkeypatch):
    monkeypatch.setattr(turns, "TURNS", 2)
    monkeypatch.setattr(turns, "SECONDS", 1e-4)
    module, args = make()
    given = {"return_dict": False} if make is hub_llama else {}
    variables, custom = away_from_init(module.init(jax.random.key(0), *args, **given)), jaxnorm.blocks.find(module)
    with jaxnorm.implementation("native"):
        comparison = jaxnorm.linen.compare_layers(module, variables, *args, **given, custom=custom)
        with jaxnorm.linen.using_layers(custom):
            text = compiled_text(lambda variables: module.apply(variables, *args, **given), variables)
    assert count_native_calls(text) == {f"jaxnorm_{name}_fwd": count for name, count in calls.items()}
    assert comparison.outputs < 1e-5
    assert comparison.gradients < 1e-5
