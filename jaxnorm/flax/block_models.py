"""Blocks of known models that are computed as no other's are, and the table of all of them.

Norms of known models are in `jaxnorm.flax.known`.
"""

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxnorm.flax import blocks
from jaxnorm.flax.block_parts import added, gated, own_call
from jaxnorm.flax.calls import linen, nnx
from jaxnorm.ops.qk_norm_rotary.api import qk_norm_rotary


def bonsai_vit_block(block: Any, x: jax.Array, head_mask: Any = None, *, rngs: Any) -> Any:
    """bonsai's `TransformerEncoder` of a ViT."""
    y, h = added(block.layernorm_after, block.attention(block.layernorm_before(x), head_mask, rngs=rngs), x)
    y = block.linear2(jax.nn.gelu(block.linear1(y)))
    return block.dropout(y, rngs=rngs) + h


def bonsai_qwen3_mlp_block(block: Any, x: jax.Array) -> Any:
    """bonsai's `MLP` of Qwen3, whose products say how they are split over a mesh."""
    return gated(block, x, "silu", out_sharding=block.shd_cfg.act_btf)


def bonsai_gemma3_mlp_block(block: Any, x: jax.Array) -> Any:
    """bonsai's `Gemma3MLP`, whose products say how they are split over a mesh."""
    return gated(block, x, "gelu", out_sharding=block.config.shd_cfg.activation)


def bonsai_qwen3_attention_block(block: Any, x: jax.Array, cache: Any, segment_ids: jax.Array) -> Any:
    """bonsai's `Attention` of Qwen3: the norms of queries and keys and their rotation are one call.

    Over a mesh its own code computes it.
    """
    if block.shd_cfg.act_btnh is not None:
        return own_call(block, x, cache, segment_ids)
    model = sys.modules[type(block).__module__]
    tables = _tables(model, cache, segment_ids, block.head_dim)
    scales = block.q_norm.scale[...], block.k_norm.scale[...]
    q, k = qk_norm_rotary(block.q_proj(x), block.k_proj(x), *scales, **tables, epsilon=block.q_norm.epsilon)
    keys, values = _cached(cache, k, block.v_proj(x))
    tokens, kept = jnp.arange(q.shape[1]), jnp.arange(cache.size)
    start, current = cache.start_ind[...][:, None], cache.cur_ind[...]
    is_causal = (kept - start)[:, None] <= (current + tokens - start)[..., None]
    is_there = ((kept >= start) & (kept < current + len(tokens)))[:, None] == segment_ids[..., None]
    grouped = q.reshape(*q.shape[:2], block.num_kv_heads, block.n_rep, block.head_dim)
    logits = jnp.einsum("btkgh,bskh->btskg", grouped, keys) * block.scale
    logits = jnp.where((is_causal & is_there)[..., None, None], logits, model.LARGE_NEGATIVE)
    weights = jax.nn.softmax(logits.astype(jnp.float32), axis=2).astype(logits.dtype)
    y = jnp.einsum("btskg,bskh->btkgh", weights, values).reshape(q.shape)
    cache.cur_ind.set_value(current + len(tokens))
    return block.o_proj(y)


def bonsai_gemma3_attention_block(
    block: Any, x: jax.Array, cache: Any, segment_ids: jax.Array, mask: jax.Array | None
) -> Any:
    """bonsai's `Gemma3Attention`: the norms of queries and keys and their rotation are one call.

    Over a mesh its own code computes it.
    """
    if block.config.shd_cfg.activation is not None:
        return own_call(block, x, cache, segment_ids, mask)
    model = sys.modules[type(block).__module__]
    tables = _tables(model, cache, segment_ids, block.head_dim, block.rope_theta, factor=block.factor)
    q, k, v = (of(x).reshape(*x.shape[:2], -1, block.head_dim) for of in (block.q_proj, block.k_proj, block.v_proj))
    scales = block.q_norm.scale[...], block.k_norm.scale[...]
    q, k = qk_norm_rotary(q, k, *scales, **tables, epsilon=block.q_norm.eps, scale_offset=1.0)
    keys, values = (model.repeat_kv(kept, block.n_rep) for kept in _cached(cache, k, v))
    splits = dict.fromkeys(("attn_logit_sharding", "out_sharding"))
    y = model.sharded_attention(q, keys, values, mask=mask, scale=block.scale, **splits)
    cache.cur_ind.set_value(cache.cur_ind[...] + x.shape[1])
    return block.o_proj(y.reshape(*x.shape[:2], -1))


def hub_rotary_block(block: Any, key: jax.Array, query: jax.Array, position_ids: jax.Array) -> Any:
    """`FlaxLlamaRotaryEmbedding` of the model hubs: keys and queries are rotated by one call."""
    sin, cos = jnp.split(block.sincos[position_ids], 2, axis=-1)
    query, key = qk_norm_rotary(query, key, cos=cos[..., 0, :], sin=sin[..., 0, :], normalize=False)
    return jnp.asarray(key, block.dtype), jnp.asarray(query, block.dtype)


def _tables(model: Any, cache: Any, segment_ids: jax.Array, *angles: Any, **more: Any) -> dict[str, Any]:
    """The tables of rotation of bonsai's models, which note first where each example starts in the cache."""
    start = cache.start_ind[...]
    cache.start_ind.set_value(jnp.where(start < 0, model.count_left_pads(segment_ids), start))
    positions = model.compute_positions_from_segment_ids(segment_ids) + cache.cur_ind[...]
    sin, cos = model._generate_pos_embeddings(positions, *angles, **more)
    return {"sin": sin, "cos": cos}


def _cached(cache: Any, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """All keys and values, with these at their place."""
    at = (0, cache.cur_ind[...], 0, 0)
    for kept, new in ((cache.k_cache, k), (cache.v_cache, v)):
        kept.set_value(jax.lax.dynamic_update_slice(kept[...], new, at))
    return cache.k_cache[...], cache.v_cache[...]


Block = Callable[..., Any]
_BONSAI, _HUB, _DIFFUSERS = "bonsai.models", "transformers.models.llama.modeling_flax_llama", "diffusers.models"
KNOWN: dict[str, Any] = {
    f"{_BONSAI}.qwen3.modeling.DecoderLayer": blocks.decoder_block,
    f"{_BONSAI}.qwen3.modeling.Attention": bonsai_qwen3_attention_block,
    f"{_BONSAI}.qwen3.modeling.MLP": bonsai_qwen3_mlp_block,
    f"{_BONSAI}.qwen3_vl.modeling.Qwen3VLDecoderLayer": blocks.decoder_block,
    f"{_BONSAI}.qwen3_vl.modeling.Qwen3VLVisionBlock": blocks.vit_block,
    f"{_BONSAI}.gemma3.modeling.Gemma3DecoderLayer": blocks.sandwich_block,
    f"{_BONSAI}.gemma3.modeling.Gemma3Attention": bonsai_gemma3_attention_block,
    f"{_BONSAI}.gemma3.modeling.Gemma3MLP": bonsai_gemma3_mlp_block,
    f"{_BONSAI}.gemma3.modeling.SiglipEncoderLayer": blocks.vit_block,
    f"{_BONSAI}.vit.modeling.TransformerEncoder": bonsai_vit_block,
    f"{_BONSAI}.dinov3.modeling.Dinov3ViTLayer": blocks.vit_block,
    f"{_BONSAI}.dinov3.modeling.Dinov3GatedMLP": blocks.gated_mlp_block,
    f"{_BONSAI}.vae.modeling.ResnetBlock": blocks.resnet_block,
    f"{_HUB}.FlaxLlamaDecoderLayer": blocks.decoder_block,
    f"{_HUB}.FlaxLlamaMLP": blocks.gated_mlp_block,
    f"{_HUB}.FlaxLlamaRotaryEmbedding": hub_rotary_block,
    f"{_DIFFUSERS}.vae_flax.FlaxResnetBlock2D": blocks.resnet_block,
    f"{_DIFFUSERS}.resnet_flax.FlaxResnetBlock2D": blocks.timed_resnet_block,
}


def find(model: Any) -> dict[type, Block]:
    """The mapping of known blocks, for `replace_layers`: {class: function}, {} where none is known.

        jaxnorm.replace_layers(model, jaxnorm.blocks.find(model))  # a model of flax.nnx
        with jaxnorm.linen.using_layers(jaxnorm.blocks.find(module)):  # of flax.linen
            y = module.apply(variables, x)

    It has all classes of the model's API that are known and imported. Join it with one of your own,
    `jaxnorm.blocks.find(model) | {Block: function}`. Which classes are known, `KNOWN` says by their full names.
    """
    api = linen.Module if isinstance(model, linen.Module) else nnx.Module
    found = {}
    for name, function in KNOWN.items():
        module, _, cls = name.rpartition(".")
        imported = getattr(sys.modules.get(module), cls, None)
        if isinstance(imported, type) and issubclass(imported, api):
            found[imported] = function
    return found
