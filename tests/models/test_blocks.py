"""`jaxnorm.blocks.of` for models of other packages: those that are installed, or whose repository is on PYTHONPATH.

    PYTHONPATH=bonsai python -m pytest tests/models/test_blocks.py

with a clone of https://github.com/jax-ml/bonsai, and pip's transformers<5 and diffusers==0.31.0.
"""

import dataclasses
import importlib
import importlib.util

import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import compiled_text, count_native_calls
from native import native_calls

import jaxnorm
import jaxnorm.linen


@pytest.fixture(autouse=True)
def full_precision():
    with jax.default_matmul_precision("highest"):
        yield


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
        **{
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "head_dim": 16,
        },
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
        cache = model.LayerCache(config, 0, 2, 8, jnp.float32)
        return module(x, cache, *angles, jnp.tril(jnp.ones((1, 1, 6, 8), bool)))

    return model.Qwen3VLDecoderLayer(config, 0, rngs=flax.nnx.Rngs(0)), run


# The model, and the native calls of its forward pass, before with its norms alone and after with its blocks.
BONSAI = {
    "qwen3": (qwen3, {}),
    "qwen3_vl": (qwen3_vl, {}),
    "gemma3": (gemma3, {}),
    "siglip": (siglip, {}),
    "vit": (vit, {}),
    "dinov3": (dinov3, {}),
    "vae": (vae, {}),
}
