"""Gemma 3 as in the model hubs: a mapping names its norm class, also that of queries and keys.

python examples/ports/hf_gemma.py
"""

import jax
import jax.numpy as jnp
from compare import Port, compare, randomised
from flax import linen as nn

import jaxnorm.linen
from jaxnorm import rms_norm

# The model, as its library has it.


class GemmaRMSNorm(nn.Module):
    dim: int
    eps: float = 1e-6

    def setup(self):
        self.weight = self.param("weight", nn.initializers.zeros, (self.dim,))

    def __call__(self, x):
        wide = x.astype(jnp.float32)
        output = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + self.eps)
        return (output * (1.0 + self.weight.astype(jnp.float32))).astype(x.dtype)


class GemmaAttention(nn.Module):
    heads: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):
        features = x.shape[-1]
        head_dim = features // self.heads
        query, key, value = (
            nn.DenseGeneral((heads, head_dim), use_bias=False, dtype=self.dtype, name=f"{name}_proj")(x)
            for name, heads in {"q": self.heads, "k": 1, "v": 1}.items()
        )
        query = GemmaRMSNorm(head_dim, name="q_norm")(query)
        key = GemmaRMSNorm(head_dim, name="k_norm")(key)
        y = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        return nn.DenseGeneral(features, axis=(-2, -1), use_bias=False, dtype=self.dtype, name="o_proj")(y)


class GemmaMLP(nn.Module):
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):
        features = x.shape[-1]
        gate, up = (nn.Dense(4 * features, False, self.dtype, name=f"{name}_proj")(x) for name in ("gate", "up"))
        return nn.Dense(features, False, self.dtype, name="down_proj")(nn.gelu(gate) * up)


class GemmaDecoderLayer(nn.Module):
    dim: int
    heads: int
    dtype: jnp.dtype

    def setup(self):
        self.input_layernorm = GemmaRMSNorm(self.dim)
        self.self_attn = GemmaAttention(self.heads, self.dtype)
        self.post_attention_layernorm = GemmaRMSNorm(self.dim)
        self.pre_feedforward_layernorm = GemmaRMSNorm(self.dim)
        self.mlp = GemmaMLP(self.dtype)
        self.post_feedforward_layernorm = GemmaRMSNorm(self.dim)

    def __call__(self, x):
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x)))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class GemmaModel(nn.Module):
    dim: int = 32
    heads: int = 4
    layers: int = 1
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(64, self.dim, dtype=self.dtype, name="embed_tokens")(tokens)
        x = x * jnp.asarray(self.dim**0.5, x.dtype)
        for layer in range(self.layers):
            x = GemmaDecoderLayer(self.dim, self.heads, self.dtype, name=f"layers_{layer}")(x)
        return GemmaRMSNorm(self.dim, name="norm")(x)


# The port.


def gemma_norm(norm, x):
    return rms_norm(x, norm.weight, epsilon=norm.eps, scale_offset=1.0)


def port(dtype=jnp.float32):
    model = GemmaModel(dtype=dtype)
    tokens = jax.random.randint(jax.random.key(0), (2, 8), 0, 64)

    def after(variables, tokens):
        with jaxnorm.linen.replace_norms({GemmaRMSNorm: gemma_norm}):
            return model.apply(variables, tokens)

    return Port(model.apply, after, randomised(model.init(jax.random.key(0), tokens), dtype), tokens)


if __name__ == "__main__":
    print(compare(port()))
