"""Gemma as in DeepMind's library, ported by modules: `jaxnorm.linen.RMSNorm(scale_offset=1.0)` has its parameters.

python examples/ports/deepmind_gemma.py
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from compare import Port, compare, randomised
from flax import linen as nn

import jaxnorm.linen

# The model.


class RMSNorm(nn.Module):
    """In the dtype of x, as all of the model."""

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.zeros, x.shape[-1:])
        normed = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
        return normed * (1 + jnp.expand_dims(scale, range(x.ndim - 1)))


class Einsum(nn.Module):
    shape: tuple[int, ...]

    @nn.compact
    def __call__(self, equation, x):
        return jnp.einsum(equation, x, self.param("w", nn.initializers.normal(0.2), self.shape))


class Attention(nn.Module):
    heads: int
    head_dim: int
    norm: Callable[..., nn.Module]

    @nn.compact
    def __call__(self, x):
        features = x.shape[-1]
        query = Einsum((self.heads, features, self.head_dim), name="q_einsum")("BTD,NDH->BTNH", x)
        key, value = Einsum((2, 1, features, self.head_dim), name="kv_einsum")("BSD,CKDH->CBSKH", x)
        query, key = self.norm(name="_query_norm")(query), self.norm(name="_key_norm")(key)
        y = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        return Einsum((self.heads, self.head_dim, features), name="attn_vec_einsum")("BTNH,NHD->BTD", y)


class FeedForward(nn.Module):
    hidden: int

    @nn.compact
    def __call__(self, x):
        features = x.shape[-1]
        gate, up = Einsum((2, self.hidden, features), name="gating_einsum")("BTF,NHF->NBTH", x)
        return Einsum((self.hidden, features), name="linear")("BTH,HF->BTF", nn.gelu(gate) * up)


class Block(nn.Module):
    heads: int
    norm: Callable[..., nn.Module]

    @nn.compact
    def __call__(self, x):
        features = x.shape[-1]
        y = Attention(self.heads, features // self.heads, self.norm, name="attn")(self.norm(name="pre_attn_norm")(x))
        x = x + self.norm(name="post_attention_norm")(y)
        y = FeedForward(4 * features, name="mlp")(self.norm(name="pre_ffw_norm")(x))
        return x + self.norm(name="post_ffw_norm")(y)


class Transformer(nn.Module):
    features: int = 32
    heads: int = 4
    layers: int = 1
    norm: Callable[..., nn.Module] = RMSNorm

    @nn.compact
    def __call__(self, tokens):
        table = self.param("input_embedding", nn.initializers.normal(), (64, self.features))
        x = table[tokens] * jnp.sqrt(self.features).astype(table.dtype)
        for layer in range(self.layers):
            x = Block(self.heads, self.norm, name=f"layer_{layer}")(x)
        return self.norm(name="final_norm")(x) @ table.T


# The port: another class under the same names. Its arithmetic is float32, also where x is bfloat16.


def port(dtype=jnp.float32):
    before = Transformer()
    after = Transformer(norm=partial(jaxnorm.linen.RMSNorm, scale_offset=1.0))
    tokens = jax.random.randint(jax.random.key(0), (2, 8), 0, 64)
    return Port(before.apply, after.apply, randomised(before.init(jax.random.key(0), tokens), dtype), tokens)


if __name__ == "__main__":
    print(compare(port()))
