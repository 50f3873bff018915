"""Blocks of models, computed by the functions of this package: what stands beside a norm goes into its call.

Each is a function of a module, of either API of Flax, and the arguments of its call, for the mapping of
`replace_norms`. It reads the module's children by the names that it says, so that it serves any class which has them
and computes the same. Norms may be Flax's, this package's, or of the known models' own classes; one of another class is
called as it is, and what stands beside it is computed beside it.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxnorm.flax import nnx_calls
from jaxnorm.flax.block_parts import added, silu_of_norm
from jaxnorm.flax.calls import nnx
from jaxnorm.ops.gated_activation.api import gated_activation
from jaxnorm.ops.norm.added_api import add_layer_norm
from jaxnorm.ops.norm.api import layer_norm

# What the hubs' `hidden_act` names, by this package's names. Theirs of gelu is exact.
OF_HUBS = {"silu": "silu", "swish": "silu", "gelu": "gelu_exact", "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu"}


def decoder_layer(block: Any, x: jax.Array, *args: Any, **kwargs: Any) -> Any:
    """`h = x + attention(input_layernorm(x)); h + mlp(post_attention_layernorm(h))`, the first sum with its norm.

    Attention is `self_attn` or `attn` and gets the other arguments; what it gives besides, the block gives too. The
    children of Llama, Mistral and Qwen in the model hubs have these names.
    """
    attention = _child(block, "self_attn", "attn")
    y, rest = _first(attention(block.input_layernorm(x), *args, **kwargs))
    y, h = added(block.post_attention_layernorm, y, x)
    return _with(h + block.mlp(y), rest)


def sandwich_layer(block: Any, x: jax.Array, *args: Any, **kwargs: Any) -> Any:
    """`h = x + post_attention_layernorm(attention(input_layernorm(x)))`, then so of the MLP: Gemma 2 and 3.

    The MLP stands between `pre_feedforward_layernorm` and `post_feedforward_layernorm`. The first sum goes with the
    norm after it.
    """
    attention = _child(block, "self_attn", "attn")
    y, rest = _first(attention(block.input_layernorm(x), *args, **kwargs))
    y, h = added(block.pre_feedforward_layernorm, block.post_attention_layernorm(y), x)
    return _with(block.post_feedforward_layernorm(block.mlp(y)) + h, rest)


def vit_layer(block: Any, x: jax.Array, *args: Any, **kwargs: Any) -> Any:
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


def dit_layer(block: Any, x: jax.Array, condition: jax.Array) -> Any:
    """A block of a DiT of flax.nnx: `h = x + gate * attention(norm1(x) * (1 + scale) + shift)`, then so of the MLP.

    `adaLN_modulation` of the silu of the condition, (batch, features), gives shift, scale and gate of attention, then
    of the MLP; a Sequential has the silu itself. Attention is `attention` or `attn`. Norms are LayerNorms of the last
    axis, with or without parameters. The gate, the sum, the norm and its modulation are one call.
    """
    modulation = block.adaLN_modulation
    activated = condition if isinstance(modulation, nnx.Sequential) else jax.nn.silu(condition)
    parts = jnp.split(modulation(activated)[:, None], 6, axis=-1)
    attention = _child(block, "attention", "attn")
    dtype = jnp.result_type(x, parts[0])
    y = attention(layer_norm(x, **_modulated(block.norm1, *parts[:2]), out_dtype=dtype))
    dtype = jnp.result_type(dtype, y)
    keywords = _modulated(block.norm2, *parts[3:5]) | {"branch_scale": parts[2], "out_dtype": dtype}
    y, h = add_layer_norm(y, x.astype(dtype), **keywords)
    return h + parts[5] * block.mlp(y)


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


def gated_mlp(block: Any, x: jax.Array) -> Any:
    """`down_proj(activation(gate_proj(x)) * up_proj(x))`, activation and product in one call.

    The activation is `act_fn`, a function of `jax.nn`, or else what `config.hidden_act` names in the model hubs.
    """
    activation = getattr(block, "act_fn", None)
    if activation is None:
        activation = OF_HUBS.get(block.config.hidden_act, block.config.hidden_act)
    return _gated(block, x, activation)


def silu_mlp(block: Any, x: jax.Array) -> Any:
    """`gated_mlp` with silu: SwiGLU."""
    return _gated(block, x, "silu")


def gelu_mlp(block: Any, x: jax.Array) -> Any:
    """`gated_mlp` with gelu by tanh: GeGLU."""
    return _gated(block, x, "gelu")


def _gated(block: Any, x: jax.Array, activation: Any) -> Any:
    return block.down_proj(gated_activation((block.gate_proj(x), block.up_proj(x)), activation=activation))


def _resnet(block: Any, x: jax.Array, temb: jax.Array | None, dropout: str, deterministic: bool) -> Any:
    h = block.conv1(silu_of_norm(block.norm1, x))
    if temb is not None:
        h = h + block.time_emb_proj(jax.nn.silu(temb))[:, None, None]
    h = silu_of_norm(block.norm2, h)
    if (layer := getattr(block, dropout, None)) is not None:
        h = layer(h, deterministic)
    shortcut = getattr(block, "conv_shortcut", None)
    return block.conv2(h) + (x if shortcut is None else shortcut(x))


def _modulated(norm: Any, shift: jax.Array, scale: jax.Array) -> dict[str, Any]:
    """The keywords of a LayerNorm and the modulation that follows it; parameters of the norm are taken in."""
    weight, bias = nnx_calls.parameters_of(norm)
    if bias is not None:
        shift = shift + bias * (1 + scale)
    if weight is not None:
        scale = weight * (1 + scale) - 1
    return {"scale": scale, "bias": shift, "scale_offset": 1.0, "epsilon": norm.epsilon}


def _branch_scale(block: Any, name: str) -> jax.Array | None:
    layer = getattr(block, name, None)
    return None if layer is None else layer.lambda1[...]


def _child(block: Any, *names: str) -> Any:
    """The first of these that a block has."""
    found = next((name for name in names if hasattr(block, name)), None)
    if found is None:
        raise AttributeError(
            f"jaxnorm.blocks: {type(block).__name__} has no {' or '.join(names)}: take a function for blocks with its "
            f"names, or write one."
        )
    return getattr(block, found)


def _first(results: Any) -> tuple[Any, Any]:
    """What is added to the stream, and what a block gives besides, if it gives a tuple."""
    return (results[0], results[1:]) if isinstance(results, tuple) else (results, None)


def _with(y: jax.Array, rest: Any) -> Any:
    return y if rest is None else (y, *rest)
