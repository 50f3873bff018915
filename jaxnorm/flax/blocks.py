"""Blocks of published models, computed by the functions of this package: what stands beside a norm goes into its call.

Each is a function of a module, of either API of Flax, and the arguments of its call. It computes what the classes do
that the table in `jaxnorm.flax.block_models` has it for, and no others, whatever the names of their children.
"""

from typing import Any

import jax

from jaxnorm.flax.block_parts import added, gated, silu_of_norm

# What the hubs' `hidden_act` names, by this package's names. Theirs of gelu is exact.
OF_HUBS = {"silu": "silu", "swish": "silu", "gelu": "gelu_exact", "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu"}


def decoder_block(block: Any, x: jax.Array, *args: Any, **kwargs: Any) -> Any:
    """`h = x + attention(input_layernorm(x)); h + mlp(post_attention_layernorm(h))`, the first sum with its norm.

    Attention is `self_attn` or `attn` and gets the other arguments; what it gives besides, the block gives too. The
    children of Llama, Mistral and Qwen in the model hubs have these names.
    """
    y, rest = _attended(block, x, *args, **kwargs)
    y, h = added(block.post_attention_layernorm, y, x)
    return _with(h + block.mlp(y), rest)


def sandwich_block(block: Any, x: jax.Array, *args: Any, **kwargs: Any) -> Any:
    """`h = x + post_attention_layernorm(attention(input_layernorm(x)))`, then so of the MLP: Gemma 2 and 3.

    The MLP stands between `pre_feedforward_layernorm` and `post_feedforward_layernorm`. The first sum goes with the
    norm after it.
    """
    y, rest = _attended(block, x, *args, **kwargs)
    y, h = added(block.pre_feedforward_layernorm, block.post_attention_layernorm(y), x)
    return _with(block.post_feedforward_layernorm(block.mlp(y)) + h, rest)


def vit_block(block: Any, x: jax.Array, *args: Any, **kwargs: Any) -> Any:
    """`h = x + attention(norm1(x)); h + mlp(norm2(h))`, the first sum with its norm.

    Norms may be called `layer_norm1` and `layer_norm2`. Attention is `attention`, `attn` or `self_attn`, and gets the
    other arguments. `layer_scale1` and `layer_scale2`, with a parameter `lambda1`, are factors of what is added:
    LayerScale.
    """
    norm1, norm2 = (_child(block, f"norm{i}", f"layer_norm{i}") for i in (1, 2))
    attention = _child(block, "attention", "attn", "self_attn")
    y, h = added(norm2, attention(norm1(x), *args, **kwargs), x, _branch_scale(block, "layer_scale1"))
    y = block.mlp(y)
    return h + (block.layer_scale2(y) if hasattr(block, "layer_scale2") else y)


def resnet_block(block: Any, x: jax.Array, deterministic: bool = True) -> Any:
    """`conv2(silu(norm2(conv1(silu(norm1(x))))))` and x, by `conv_shortcut` if there is one: each norm with its silu.

    Norms are GroupNorms. A `dropout_layer` stands before `conv2`.
    """
    return _resnet(block, x, None, "dropout_layer", deterministic)


def timed_resnet_block(block: Any, x: jax.Array, temb: jax.Array, deterministic: bool = True) -> Any:
    """`resnet_block` where `time_emb_proj` of the silu of an embedding of the time is added before `norm2`.

    `dropout` stands before `conv2`.
    """
    return _resnet(block, x, temb, "dropout", deterministic)


def gated_mlp_block(block: Any, x: jax.Array) -> Any:
    """`down_proj(activation(gate_proj(x)) * up_proj(x))`, activation and product in one call.

    The activation is `act_fn`, a function of `jax.nn`, or else what `config.hidden_act` names in the model hubs.
    """
    activation = getattr(block, "act_fn", None)
    if activation is None:
        activation = OF_HUBS.get(block.config.hidden_act, block.config.hidden_act)
    return gated(block, x, activation)


def _resnet(block: Any, x: jax.Array, temb: jax.Array | None, dropout: str, deterministic: bool) -> Any:
    h = block.conv1(silu_of_norm(block.norm1, x))
    if temb is not None:
        h = h + block.time_emb_proj(jax.nn.silu(temb))[:, None, None]
    h = silu_of_norm(block.norm2, h)
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
