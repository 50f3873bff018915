"""A decoder like Gemma 3's in plain Flax NNX, with its loss: what a trainer has before it knows of jaxnorm.

RMSNorm with the factor 1 + scale stands before and after attention and perceptron and over each head of queries and
keys. Those are rotated by position, keys and values are fewer than queries, the perceptron is GeGLU, and the embedding
is the output matrix too. All layers see all tokens before them. `soft_cap` is that of Gemma 2's logits.

Source: Gemma Team, Gemma 3, 2025, https://arxiv.org/abs/2503.19786.
"""

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import nnx


@dataclass(frozen=True)
class Config:
    vocabulary: int
    layers: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    soft_cap: float | None = None
    theta: float = 10_000.0
    dtype: str = "bfloat16"  # of activations; parameters are float32
    attention: str = "xla"  # or "cudnn"


class RMSNorm(nnx.Module):
    def __init__(self, dim):
        self.scale = nnx.Param(jnp.zeros(dim))

    def __call__(self, x):
        wide = x.astype(jnp.float32)
        x_hat = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-6)
        return (x_hat * (1 + self.scale[...])).astype(x.dtype)


class Attention(nnx.Module):
    def __init__(self, config, linear):
        self.config = config
        self.query = linear(config.dim, config.heads * config.head_dim)
        self.key = linear(config.dim, config.kv_heads * config.head_dim)
        self.value = linear(config.dim, config.kv_heads * config.head_dim)
        self.out = linear(config.heads * config.head_dim, config.dim)
        self.query_norm = RMSNorm(config.head_dim)
        self.key_norm = RMSNorm(config.head_dim)

    def __call__(self, x):
        q, k, v = self.project(x)
        q, k = (rotate(norm(h), self.config.theta) for norm, h in ((self.query_norm, q), (self.key_norm, k)))
        return self.attend(q, k, v)

    def project(self, x):
        """Queries, keys and values, each (batch, tokens, heads, head_dim)."""
        products = (matrix(x) for matrix in (self.query, self.key, self.value))
        return tuple(product.reshape(*x.shape[:-1], -1, self.config.head_dim) for product in products)

    def attend(self, q, k, v):
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=self.config.attention)
        return self.out(y.reshape(*y.shape[:-2], -1))


def rotate(x, theta):
    """Rotary position embedding (https://arxiv.org/abs/2104.09864) of x: (batch, tokens, heads, head_dim)."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None, None] * theta ** (-jnp.arange(half) / half)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


class Perceptron(nnx.Module):
    def __init__(self, config, linear):
        self.gate = linear(config.dim, config.hidden)
        self.up = linear(config.dim, config.hidden)
        self.down = linear(config.hidden, config.dim)

    def __call__(self, x):
        return self.down(nnx.gelu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    def __init__(self, config, linear):
        self.pre_attention_norm = RMSNorm(config.dim)
        self.attention = Attention(config, linear)
        self.post_attention_norm = RMSNorm(config.dim)
        self.pre_perceptron_norm = RMSNorm(config.dim)
        self.perceptron = Perceptron(config, linear)
        self.post_perceptron_norm = RMSNorm(config.dim)

    def __call__(self, x):
        x = x + self.post_attention_norm(self.attention(self.pre_attention_norm(x)))
        return x + self.post_perceptron_norm(self.perceptron(self.pre_perceptron_norm(x)))


class Gemma(nnx.Module):
    """Tokens in, hidden states out; `logits` makes the logits of these."""

    def __init__(self, config, rngs):
        self.config = config
        dtype = jnp.dtype(config.dtype)
        linear = partial(nnx.Linear, use_bias=False, dtype=dtype, rngs=rngs)
        init = nnx.initializers.normal(1 / math.sqrt(config.dim))
        self.embed = nnx.Embed(config.vocabulary, config.dim, dtype=dtype, embedding_init=init, rngs=rngs)
        self.blocks = nnx.List(Block(config, linear) for _ in range(config.layers))
        self.final_norm = RMSNorm(config.dim)

    def __call__(self, tokens):
        x = self.embedded(tokens)
        for block in self.blocks:
            x = block(x)
        return self.final_norm(x)

    def embedded(self, tokens):
        return self.embed(tokens) * math.sqrt(self.config.dim)

    def logits(self, hidden):
        logits, cap = self.embed.attend(hidden).astype(jnp.float32), self.config.soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


def loss_of(model, tokens):
    """Mean cross-entropy, in nats, of every token but the first given those before it."""
    logits = model.logits(model(tokens[:, :-1]))
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
