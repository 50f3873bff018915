"""Llama as in the model hubs, ported without an edit: the model is a library's, so a mapping names its norm class.

python examples/ports/hf_llama.py
"""

import jax
import jax.numpy as jnp
from compare import Port, compare, randomised
from flax import linen as nn

import jaxnorm.linen
from jaxnorm import rms_norm

# The model, as its library has it.


class LlamaRMSNorm(nn.Module):
    features: int
    epsilon: float = 1e-5
    dtype: jnp.dtype = jnp.float32

    def setup(self):
        self.weight = self.param("weight", nn.initializers.ones, (self.features,))

    def __call__(self, hidden_states):
        wide = hidden_states.astype(jnp.float32)
        variance = jnp.square(wide).mean(-1, keepdims=True)
        normed = wide / jnp.sqrt(variance + self.epsilon)
        return self.weight * normed.astype(self.dtype)


class LlamaAttention(nn.Module):
    heads: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):
        features = x.shape[-1]
        heads = (self.heads, features // self.heads)
        query, key, value = (
            nn.DenseGeneral(heads, use_bias=False, dtype=self.dtype, name=f"{name}_proj")(x) for name in "qkv"
        )
        y = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        return nn.DenseGeneral(features, axis=(-2, -1), use_bias=False, dtype=self.dtype, name="o_proj")(y)


class LlamaMLP(nn.Module):
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):
        features = x.shape[-1]
        gate, up = (nn.Dense(3 * features, False, self.dtype, name=f"{name}_proj")(x) for name in ("gate", "up"))
        return nn.Dense(features, False, self.dtype, name="down_proj")(nn.silu(gate) * up)


class LlamaDecoderLayer(nn.Module):
    features: int
    heads: int
    dtype: jnp.dtype

    def setup(self):
        self.input_layernorm = LlamaRMSNorm(self.features, dtype=self.dtype)
        self.self_attn = LlamaAttention(self.heads, self.dtype)
        self.post_attention_layernorm = LlamaRMSNorm(self.features, dtype=self.dtype)
        self.mlp = LlamaMLP(self.dtype)

    def __call__(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaModel(nn.Module):
    features: int = 32
    heads: int = 4
    layers: int = 1
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(64, self.features, dtype=self.dtype, name="embed_tokens")(tokens)
        for layer in range(self.layers):
            x = LlamaDecoderLayer(self.features, self.heads, self.dtype, name=f"layers_{layer}")(x)
        return LlamaRMSNorm(self.features, dtype=self.dtype, name="norm")(x)


# The port.


def llama_norm(norm, x):
    return rms_norm(
        x,
        norm.weight,
        epsilon=norm.epsilon,
        multiply_before_cast=False,  # x_hat is rounded, then multiplied
        out_dtype=jnp.result_type(norm.weight, norm.dtype),
    )


def port(dtype=jnp.float32):
    model = LlamaModel(dtype=dtype)
    tokens = jax.random.randint(jax.random.key(0), (2, 8), 0, 64)

    def after(variables, tokens):
        with jaxnorm.linen.replace_norms({LlamaRMSNorm: llama_norm}):
            return model.apply(variables, tokens)

    return Port(model.apply, after, randomised(model.init(jax.random.key(0), tokens), dtype), tokens)


if __name__ == "__main__":
    print(compare(port()))
