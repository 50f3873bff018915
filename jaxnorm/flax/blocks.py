"""Blocks of published models, computed by the functions of this package: what stands beside a norm goes into its call.

Each is a function of a module, of either API of Flax, and the arguments of its call. It computes what the classes do
that the table in `jaxnorm.flax.block_models` has it for, and no others, whatever the names of their children.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxnorm.flax import calls, known, linen_calls, linen_norms, linen_others, nnx_calls, nnx_norms, nnx_others
from jaxnorm.flax.calls import linen, nnx
from jaxnorm.flax.formula import Own, parameters_of
from jaxnorm.flax.nnx_replace import class_before
from jaxnorm.flax.replacement import find
from jaxnorm.ops.gated_activation.api import gated_activation
from jaxnorm.ops.norm.added_api import add_rms_norm

# Norms of rows, and the functions that compute them.
FUNCTIONS: dict[type, calls.Functions] = {
    **dict.fromkeys((nnx.RMSNorm, nnx_norms.RMSNorm, linen.RMSNorm, linen_norms.RMSNorm), calls.RMS),
    **dict.fromkeys((nnx.LayerNorm, nnx_norms.LayerNorm, linen.LayerNorm, linen_norms.LayerNorm), calls.LAYER),
}
GROUPED = dict.fromkeys((nnx.GroupNorm, nnx_others.GroupNorm, linen.GroupNorm, linen_others.GroupNorm), True)


def added(norm: Any, x: jax.Array, residual: jax.Array, branch_scale: jax.Array | None = None) -> Any:
    """`norm(h), h` of `h = branch_scale * x + residual`, of a norm of Flax, of this package or of a known model."""
    factors = () if branch_scale is None else (branch_scale,)
    residual = residual.astype(jnp.result_type(x, residual, *factors))  # the dtype of the sum
    functions = find(type(norm), FUNCTIONS)
    if functions is not None:
        add = partial(functions.add, branch_scale=branch_scale)
        rows = (x, residual)
        if isinstance(norm, nnx.Module):
            results = nnx_calls.fused(add, norm, None, rows)
        else:
            results = linen_calls.fused(add, norm, rows, None, linen_calls.there)
        if results is not None:
            return results
    elif (results := _added_of_known(norm, x, residual, branch_scale)) is not None:
        return results
    return calls.add_first(lambda total, mask: norm(total), (x, residual), None, branch_scale)


def _added_of_known(norm: Any, x: jax.Array, residual: jax.Array, branch_scale: jax.Array | None) -> Any:
    """`added` of an RMSNorm of a known model, whose sum has the residual's dtype; None of others."""
    cls = type(norm)
    own = known.own(class_before(cls) or cls, norm)
    formula = own.plain if isinstance(own, Own) else None
    if formula is None or formula.function != "rms_norm":
        return None
    parameters = parameters_of(formula, norm)
    if formula.why_not(residual, parameters) is not None:
        return None
    scale, keywords = formula.arguments(residual.dtype, parameters)
    return add_rms_norm(x, residual, scale, branch_scale=branch_scale, **keywords)


def silu_of_norm(norm: Any, x: jax.Array) -> jax.Array:
    """`silu(norm(x))` of a GroupNorm, in one call; of another norm in two."""
    y = None
    if find(type(norm), GROUPED):
        if isinstance(norm, nnx.Module):
            y = nnx_others.grouped(norm, None, x, activation="silu")
        else:
            y = linen_others.grouped(norm, x, None, linen_calls.there, activation="silu")
    return jax.nn.silu(norm(x)) if y is None else y


def gated(block: Any, x: jax.Array, activation: Any, **split: Any) -> Any:
    """`down_proj(activation(gate_proj(x)) * up_proj(x))`, whose products say how they are `split` over a mesh."""
    y = gated_activation((block.gate_proj(x, **split), block.up_proj(x, **split)), activation=activation)
    return block.down_proj(y, **split)


def own_call(block: Any, *args: Any, **kwargs: Any) -> Any:
    """The block as its own code computes it."""
    cls: Any = type(block)
    return (class_before(cls) or cls).__call__(block, *args, **kwargs)


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
