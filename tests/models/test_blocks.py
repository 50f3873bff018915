"""`jaxnorm.blocks.of` for models of other packages: those that are installed, or whose repository is on PYTHONPATH.

    PYTHONPATH=bonsai python -m pytest tests/models/test_blocks.py

with a clone of https://github.com/jax-ml/bonsai, and pip's transformers<5 and diffusers==0.31.0.
"""

import dataclasses
import importlib

import flax.nnx
import jax
import jax.numpy as jnp
import pytest
from hlo import compiled_text, count_native_calls

import jaxnorm
import jaxnorm.blocks
import jaxnorm.linen
from jaxnorm.inspect import turns

# The packages warn of what they import.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.long, pytest.mark.usefixtures("exact_products")]


def small(config, **sizes):
    return dataclasses.replace(config, **sizes)


def away_from_init(model):
    """The model with parameters of which none is 0 or 1 throughout, so that none can be left out unseen."""

    def moved(path, variable):
        key = jax.random.key(sum(map(ord, "".join(map(str, path)))))
        return variable.replace(variable[...] + 0.1 * jax.random.normal(key, variable.shape, variable.dtype))

    params = flax.nnx.state(model, flax.nnx.Param)
    flax.nnx.update(model, flax.nnx.map_state(moved, params))
    return model


def qwen3():
    model = importlib.import_module("bonsai.models.qwen3.modeling")
    sizes = {"vocab_size": 64, "emb_dim": 32, "mlp_dim": 48, "num_heads": 4, "head_dim": 16, "num_kv_heads": 2}
    config = small(model.ModelConfig.qwen3_0_6b(), num_layers=2, **sizes)
    tokens = jnp.array([[0, 0, 5, 9, 3, 4], [7, 8, 1, 2, 3, 4]])

    def run(module):
        cache = model.init_cache(config, 2, 6, 2, jnp.float32)
        first = module(tokens, cache=cache, segment_ids=1 * (tokens != 0))
        second = module(tokens[:, -1:], cache=cache, segment_ids=jnp.ones((2, 1), int))
        return jnp.where((tokens != 0)[..., None], first, 0), second

    return model.Qwen3(config, rngs=flax.nnx.Rngs(0)), run


def gemma3():
    model = importlib.import_module("bonsai.models.gemma3.modeling")
    config = small(
        model.ModelConfig.gemma3_4b_it(norm_dtype=jnp.float32).text_config,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        head_dim=16,
        layer_types=model._set_attention_modes(2, 2),
        num_key_value_heads=2,
    )
    x = jax.random.normal(jax.random.key(1), (2, 6, 32))

    def run(module):
        caches = [model.LayerCache(config, i, 2, 8, jnp.float32) for i in range(2)]
        mask = jnp.tril(jnp.ones((1, 1, 6, 8), bool))
        return module(x, caches, jnp.ones((2, 6), int), mask, mask)

    return model.Gemma3TextModel(config, rngs=flax.nnx.Rngs(0)), run


def siglip():
    model = importlib.import_module("bonsai.models.gemma3.modeling")
    config = small(model.VisionConfig.gemma3_4b_it(), hidden_size=32, intermediate_size=48, num_attention_heads=2)
    x = jax.random.normal(jax.random.key(1), (2, 6, 32))
    module = model.SiglipEncoder(small(config, num_hidden_layers=2), rngs=flax.nnx.Rngs(0))
    return module, lambda module: module(x, None)


def vit():
    model = importlib.import_module("bonsai.models.vit.modeling")
    sizes = {"image_size": (32, 32), "hidden_dim": 32, "num_heads": 2, "mlp_dim": 48, "num_labels": 8}
    config = small(model.ModelConfig.vit_p16_224(), num_layers=2, **sizes)
    images = jax.random.normal(jax.random.key(1), (2, 32, 32, 3))
    module = model.ViTClassificationModel(config, rngs=flax.nnx.Rngs(0))
    return module, lambda module: module(images, rngs=flax.nnx.Rngs(1))


def dinov3(**options):
    model = importlib.import_module("bonsai.models.dinov3.modeling")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = small(model.ModelConfig.dinov3_vith16plus(), image_size=32, **sizes, **options)
    images = jax.random.normal(jax.random.key(1), (2, 3, 32, 32))
    return model.Dinov3ViTModel(config, rngs=flax.nnx.Rngs(0)), lambda module: module(images)


def vae():
    model = importlib.import_module("bonsai.models.vae.modeling")
    config = model.ModelConfig(block_out_channels=(8, 16), latent_channels=2, norm_num_groups=4)
    images = jax.random.normal(jax.random.key(1), (1, 8, 8, 3))
    return model.VAE(config, flax.nnx.Rngs(0)), lambda module: module(images)


def qwen3_vl():
    model = importlib.import_module("bonsai.models.qwen3_vl.modeling")
    config = model.ModelConfig.qwen3vl_2b().text_config
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 16}
    config = small(config, num_key_value_heads=2, num_hidden_layers=1, **sizes)
    x = jax.random.normal(jax.random.key(1), (2, 6, 32))
    angles = jax.random.normal(jax.random.key(2), (2, 2, 6, 8))

    def run(module):
        cache = model.LayerCache(config, 2, 8, jnp.float32)
        return module(x, cache, *angles, jnp.tril(jnp.ones((1, 1, 6, 8), bool)))

    return model.Qwen3VLDecoderLayer(config, 0, rngs=flax.nnx.Rngs(0)), run


# The native calls of a forward pass, with norms alone replaced, and with blocks; of results, the tolerance.
BONSAI = {
    qwen3: ({"rms_norm": 18}, {"rms_norm": 10, "qk_norm_rotary": 4, "gated_activation": 4}),
    qwen3_vl: ({"rms_norm": 4}, {"rms_norm": 4}),
    gemma3: ({"rms_norm": 13}, {"rms_norm": 9, "qk_norm_rotary": 2, "gated_activation": 2}),
    siglip: ({"layer_norm": 4}, {"layer_norm": 4}),
    vit: ({"layer_norm": 5}, {"layer_norm": 5}),
    dinov3: ({"layer_norm": 5}, {"layer_norm": 5, "gated_activation": 2}),
    vae: ({"group_norm": 32}, {"group_norm": 32}),
}
ROUNDED = {dinov3: 1e-3}  # bfloat16 where it rotates


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
    model, run = make()
    away_from_init(model)
    forward, gradient, params = functions_of(model, run)
    expected = jax.jit(forward)(params), jax.jit(gradient)(params)
    for calls, blocks in zip(BONSAI[make], ({}, jaxnorm.blocks.of(model)), strict=True):
        replaced = flax.nnx.clone(model)
        jaxnorm.replace_norms(replaced, blocks)
        forward, gradient, _ = functions_of(replaced, run)
        with jaxnorm.implementation("native"):
            found = count_native_calls(compiled_text(forward, params))
            assert found == {f"jaxnorm_{name}_fwd": count for name, count in calls.items()}
            assert_close(jax.jit(forward)(params), expected[0], 1e-5)
            assert_close(jax.jit(gradient)(params), expected[1], ROUNDED.get(make, 1e-5))
        jaxnorm.restore_norms(replaced)
        assert flax.nnx.graphdef(replaced) == flax.nnx.graphdef(model)


def hub_llama():
    of = importlib.import_module("transformers.models.llama.modeling_flax_llama")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "vocab_size": 64}
    config = of.LlamaConfig(num_hidden_layers=2, max_position_embeddings=64, **sizes)
    tokens = jax.random.randint(jax.random.key(1), (2, 8), 0, 64)
    places = jnp.broadcast_to(jnp.arange(8), (2, 8))
    return of.FlaxLlamaForCausalLMModule(config), (tokens, jnp.ones_like(tokens), places), {"return_dict": False}


def diffusers_vae():
    of = importlib.import_module("diffusers.models.vae_flax")
    return of.FlaxUpDecoderBlock2D(32, 64, num_layers=2), (jax.random.normal(jax.random.key(1), (1, 4, 4, 32)),), {}


def diffusers_unet():
    of = importlib.import_module("diffusers.models.resnet_flax")
    images, time = (jax.random.normal(jax.random.key(1), shape) for shape in ((2, 4, 4, 32), (2, 16)))
    return of.FlaxResnetBlock2D(32, 64), (images, time), {}


LINEN = {
    hub_llama: {"rms_norm": 5, "qk_norm_rotary": 2, "gated_activation": 2},
    diffusers_vae: {"group_norm": 4},
    diffusers_unet: {"group_norm": 2},
}


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, marks=pytest.mark.needs("transformers" if make is hub_llama else "diffusers"))
        for make in LINEN
    ],
    ids=lambda make: make.__name__,
)
def test_linen(make, monkeypatch):
    monkeypatch.setattr(turns, "TURNS", 2)
    monkeypatch.setattr(turns, "SECONDS", 1e-4)
    module, args, kwargs = make()
    variables = module.init(jax.random.key(0), *args, **kwargs)
    leaves, tree = jax.tree.flatten(variables)
    keys = jax.random.split(jax.random.key(2), len(leaves))
    moved = [leaf + 0.1 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    variables, custom = jax.tree.unflatten(tree, moved), jaxnorm.blocks.of(module)
    with jaxnorm.implementation("native"):
        comparison = jaxnorm.linen.compare(module, variables, *args, **kwargs, custom=custom)
        with jaxnorm.linen.replace_norms(custom):
            text = compiled_text(lambda variables: module.apply(variables, *args, **kwargs), variables)
    assert count_native_calls(text) == {f"jaxnorm_{name}_fwd": count for name, count in LINEN[make].items()}
    assert comparison.outputs < 1e-5
    assert comparison.gradients < 1e-5
