"""Blocks of published models, computed by this package: what surrounds a norm goes into the norm's call.

Each is a function of a module, of either API of Flax, and the arguments of its call. It computes what the classes do
that `KNOWN` lists for it, and no others, whatever their children are called. Norms of published models are in
`known_norms`.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxnorm.integrations import replacing
from jaxnorm.integrations.flax import calls, known_norms, linen_layers, nnx_layers
from jaxnorm.integrations.flax.nnx_replace import class_before
from jaxnorm.integrations.flax.served import linen, nnx
from jaxnorm.ops.gated_activation.api import gated_activation
from jaxnorm.ops.norm.api import add_rms_norm
from jaxnorm.ops.qk_norm_rotary.api import qk_norm_rotary

# Norms of rows, and the functions that compute them; norms of groups.
FUNCTIONS: dict[type, calls.Functions] = {
    **dict.fromkeys((nnx.RMSNorm, nnx_layers.RMSNorm, linen.RMSNorm, linen_layers.RMSNorm), calls.RMS),
    **dict.fromkeys((nnx.LayerNorm, nnx_layers.LayerNorm, linen.LayerNorm, linen_layers.LayerNorm), calls.LAYER),
}
GROUPED = dict.fromkeys((nnx.GroupNorm, nnx_layers.GroupNorm, linen.GroupNorm, linen_layers.GroupNorm), True)
# What the hubs' `hidden_act` names, by this package's names. Theirs of gelu is exact.
OF_HUBS = {"silu": "silu", "swish": "silu", "gelu": "gelu_exact", "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu"}


def decoder_block(block: Any, x: jax.Array, *args: Any, **kwargs: Any) -> Any:
    """`h = x + attention(input_layernorm(x)); h + mlp(post_attention_layernorm(h))`, the first sum and its norm fused.

    Attention is `self_attn` or `attn` and gets the other arguments; its other results are the block's too. Llama,
    Mistral and Qwen in the model hubs have children of these names.
    """
    y, rest = _attended(block, x, *args, **kwargs)
    y, h = _added(block.post_attention_layernorm, y, x)
    return _with(h + block.mlp(y), rest)


def sandwich_block(block: Any, x: jax.Array, *args: Any, **kwargs: Any) -> Any:
    """`h = x + post_attention_layernorm(attention(input_layernorm(x)))`, then the MLP likewise: Gemma 2 and 3.

    The MLP is between `pre_feedforward_layernorm` and `post_feedforward_layernorm`. The first sum is fused with the
    norm after it.
    """
    y, rest = _attended(block, x, *args, **kwargs)
    y, h = _added(block.pre_feedforward_layernorm, block.post_attention_layernorm(y), x)
    return _with(block.post_feedforward_layernorm(block.mlp(y)) + h, rest)


def vit_block(block: Any, x: jax.Array, *args: Any, **kwargs: Any) -> Any:
    """`h = x + attention(norm1(x)); h + mlp(norm2(h))`, the first sum and its norm fused.

    Norms may be called `layer_norm1` and `layer_norm2`. Attention is `attention`, `attn` or `self_attn`, and gets the
    other arguments. `layer_scale1` and `layer_scale2`, with a parameter `lambda1`, scale what is added: LayerScale.
    """
    norm1, norm2 = (_child(block, f"norm{i}", f"layer_norm{i}") for i in (1, 2))
    attention = _child(block, "attention", "attn", "self_attn")
    y, h = _added(norm2, attention(norm1(x), *args, **kwargs), x, _branch_scale(block, "layer_scale1"))
    y = block.mlp(y)
    return h + (block.layer_scale2(y) if hasattr(block, "layer_scale2") else y)


def resnet_block(block: Any, x: jax.Array, deterministic: bool = True) -> Any:
    """`conv2(silu(norm2(conv1(silu(norm1(x))))))` plus x or `conv_shortcut(x)`, with norm and silu in one call.

    Norms are GroupNorms. A `dropout_layer` is before `conv2`.
    """
    return _resnet(block, x, None, "dropout_layer", deterministic)


def timed_resnet_block(block: Any, x: jax.Array, temb: jax.Array, deterministic: bool = True) -> Any:
    """`resnet_block` that adds `time_emb_proj(silu(time embedding))` before `norm2`.

    `dropout` is before `conv2`.
    """
    return _resnet(block, x, temb, "dropout", deterministic)


def gated_mlp_block(block: Any, x: jax.Array) -> Any:
    """`down_proj(activation(gate_proj(x)) * up_proj(x))`, with activation and product in one call.

    The activation is `act_fn`, a function of `jax.nn`, or what `config.hidden_act` names in the model hubs.
    """
    activation = getattr(block, "act_fn", None)
    if activation is None:
        activation = OF_HUBS.get(block.config.hidden_act, block.config.hidden_act)
    return _gated(block, x, activation)


def bonsai_vit_block(block: Any, x: jax.Array, head_mask: Any = None, *, rngs: Any) -> Any:
    """bonsai's `TransformerEncoder` of a ViT."""
    y, h = _added(block.layernorm_after, block.attention(block.layernorm_before(x), head_mask, rngs=rngs), x)
    y = block.linear2(jax.nn.gelu(block.linear1(y)))
    return block.dropout(y, rngs=rngs) + h


def bonsai_qwen3_mlp_block(block: Any, x: jax.Array) -> Any:
    """bonsai's `MLP` of Qwen3, whose products say how they are split over a mesh."""
    return _gated(block, x, "silu", out_sharding=block.shd_cfg.act_btf)


def bonsai_gemma3_mlp_block(block: Any, x: jax.Array) -> Any:
    """bonsai's `Gemma3MLP`, whose products say how they are split over a mesh."""
    return _gated(block, x, "gelu", out_sharding=block.config.shd_cfg.activation)


def bonsai_qwen3_attention_block(block: Any, x: jax.Array, cache: Any, segment_ids: jax.Array) -> Any:
    """bonsai's `Attention` of Qwen3: one call normalises and rotates queries and keys.

    Over a mesh its own code computes it.
    """
    if block.shd_cfg.act_btnh is not None:
        return _own_call(block, x, cache, segment_ids)
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
    """bonsai's `Gemma3Attention`: one call normalises and rotates queries and keys.

    Over a mesh its own code computes it.
    """
    if block.config.shd_cfg.activation is not None:
        return _own_call(block, x, cache, segment_ids, mask)
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
    """`FlaxLlamaRotaryEmbedding` of the model hubs: one call rotates keys and queries."""
    sin, cos = jnp.split(block.sincos[position_ids], 2, axis=-1)
    query, key = qk_norm_rotary(query, key, cos=cos[..., 0, :], sin=sin[..., 0, :], normalize=False)
    return jnp.asarray(key, block.dtype), jnp.asarray(query, block.dtype)


def _added(norm: Any, x: jax.Array, residual: jax.Array, branch_scale: jax.Array | None = None) -> Any:
    """`norm(h), h` of `h = branch_scale * x + residual`, of a norm of Flax, of this package or of a known model."""
    factors = () if branch_scale is None else (branch_scale,)
    residual = residual.astype(jnp.result_type(x, residual, *factors))  # the dtype of the sum
    functions = replacing.find(type(norm), FUNCTIONS)
    if functions is not None:
        add = partial(functions.add, branch_scale=branch_scale)
        results = calls.fused(add, norm, (x, residual), None, outside=True)
    else:
        results = _added_of_known(norm, x, residual, branch_scale)
    if results is not None:
        return results
    return calls.add_first(lambda total, mask: norm(total), (x, residual), None, branch_scale)


def _added_of_known(norm: Any, x: jax.Array, residual: jax.Array, branch_scale: jax.Array | None) -> Any:
    """`added` of an RMSNorm of a known model, whose sum has the residual's dtype; None of others."""
    cls = type(norm)
    own = known_norms.own(class_before(cls) or cls, norm)
    formula = own.plain if isinstance(own, known_norms.Own) else None
    if formula is None or formula.function != "rms_norm":
        return None
    parameters = known_norms.parameters_of(formula, norm)
    if formula.why_not(residual, parameters) is not None:
        return None
    scale, keywords = formula.arguments(residual.dtype, parameters)
    return add_rms_norm(x, residual, scale, branch_scale=branch_scale, **keywords)


def _silu_of_norm(norm: Any, x: jax.Array) -> jax.Array:
    """`silu(norm(x))` of a GroupNorm, in one call; of another norm in two."""
    is_grouped = replacing.find(type(norm), GROUPED)
    y = calls.grouped(norm, x, None, outside=True, activation="silu") if is_grouped else None
    return jax.nn.silu(norm(x)) if y is None else y


def _gated(block: Any, x: jax.Array, activation: Any, **split: Any) -> Any:
    """`down_proj(activation(gate_proj(x)) * up_proj(x))`, whose products say how they are `split` over a mesh."""
    y = gated_activation((block.gate_proj(x, **split), block.up_proj(x, **split)), activation=activation)
    return block.down_proj(y, **split)


def _own_call(block: Any, *args: Any, **kwargs: Any) -> Any:
    cls: Any = type(block)
    return (class_before(cls) or cls).__call__(block, *args, **kwargs)


def _resnet(block: Any, x: jax.Array, temb: jax.Array | None, dropout: str, deterministic: bool) -> Any:
    h = block.conv1(_silu_of_norm(block.norm1, x))
    if temb is not None:
        h = h + block.time_emb_proj(jax.nn.silu(temb))[:, None, None]
    h = _silu_of_norm(block.norm2, h)
    if (layer := getattr(block, dropout, None)) is not None:
        h = layer(h, deterministic)
    shortcut = getattr(block, "conv_shortcut", None)
    return block.conv2(h) + (x if shortcut is None else shortcut(x))


def _branch_scale(block: Any, name: str) -> jax.Array | None:
    layer = getattr(block, name, None)
    return None if layer is None else layer.lambda1[...]


def _child(block: Any, *names: str) -> Any:
    """The first of these that a block has."""
    return next(getattr(block, name) for name in names if hasattr(block, name))


def _attended(block: Any, x: jax.Array, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """What attention adds to the stream, and what a block gives besides, if it gives a tuple."""
    results = _child(block, "self_attn", "attn")(block.input_layernorm(x), *args, **kwargs)
    return (results[0], results[1:]) if isinstance(results, tuple) else (results, None)


def _with(y: jax.Array, rest: Any) -> Any:
    return y if rest is None else (y, *rest)


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
    f"{_BONSAI}.qwen3.modeling.DecoderLayer": decoder_block,
    f"{_BONSAI}.qwen3.modeling.Attention": bonsai_qwen3_attention_block,
    f"{_BONSAI}.qwen3.modeling.MLP": bonsai_qwen3_mlp_block,
    f"{_BONSAI}.qwen3_vl.modeling.Qwen3VLDecoderLayer": decoder_block,
    f"{_BONSAI}.qwen3_vl.modeling.Qwen3VLVisionBlock": vit_block,
    f"{_BONSAI}.gemma3.modeling.Gemma3DecoderLayer": sandwich_block,
    f"{_BONSAI}.gemma3.modeling.Gemma3Attention": bonsai_gemma3_attention_block,
    f"{_BONSAI}.gemma3.modeling.Gemma3MLP": bonsai_gemma3_mlp_block,
    f"{_BONSAI}.gemma3.modeling.SiglipEncoderLayer": vit_block,
    f"{_BONSAI}.vit.modeling.TransformerEncoder": bonsai_vit_block,
    f"{_BONSAI}.dinov3.modeling.Dinov3ViTLayer": vit_block,
    f"{_BONSAI}.dinov3.modeling.Dinov3GatedMLP": gated_mlp_block,
    f"{_BONSAI}.vae.modeling.ResnetBlock": resnet_block,
    f"{_HUB}.FlaxLlamaDecoderLayer": decoder_block,
    f"{_HUB}.FlaxLlamaMLP": gated_mlp_block,
    f"{_HUB}.FlaxLlamaRotaryEmbedding": hub_rotary_block,
    f"{_DIFFUSERS}.vae_flax.FlaxResnetBlock2D": resnet_block,
    f"{_DIFFUSERS}.resnet_flax.FlaxResnetBlock2D": timed_resnet_block,
}


def find(model: Any) -> dict[type, Block]:
    """The mapping of known blocks, {class: function}, for `replace_layers`; {} where none is known.

        jaxnorm.replace_layers(model, jaxnorm.blocks.find(model))  # a model of flax.nnx
        with jaxnorm.linen.using_layers(jaxnorm.blocks.find(module)):  # of flax.linen
            y = module.apply(variables, x)

    It has the known classes of the model's API that are imported. Add your own: `jaxnorm.blocks.find(model) | {Block:
    function}`. `KNOWN` lists the known classes by their full names.
    """
    api = linen.Module if isinstance(model, linen.Module) else nnx.Module
    found = {}
    for name, function in KNOWN.items():
        module, _, cls = name.rpartition(".")
        imported = getattr(sys.modules.get(module), cls, None)
        if isinstance(imported, type) and issubclass(imported, api):
            found[imported] = function
    return found
