"""Gemma as in Flax's examples, ported by one line after the model is made: its modules and checkpoints stay.

python examples/ports/flax_gemma.py
"""

import jax
import jax.numpy as jnp
from compare import Port, compare, randomised
from flax import nnx

import jaxnorm

# The model.


class RMSNorm(nnx.Module):
    def __init__(self, dim, *, rngs):
        self.scale = nnx.Param(nnx.initializers.zeros(rngs.params(), (dim,)))

    def __call__(self, x):
        var = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        normed = x * jax.lax.rsqrt(var + 1e-06)
        return normed * (1 + jnp.expand_dims(self.scale[...], axis=range(x.ndim - 1)))


class Attention(nnx.Module):
    def __init__(self, features, heads, *, rngs):
        self.heads = heads
        self.qkv = nnx.Linear(features, 3 * features, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(features, features, use_bias=False, rngs=rngs)
        self.query_norm = RMSNorm(features // heads, rngs=rngs)
        self.key_norm = RMSNorm(features // heads, rngs=rngs)

    def __call__(self, x):
        query, key, value = jnp.split(self.qkv(x).reshape(*x.shape[:-1], self.heads, -1), 3, axis=-1)
        y = jax.nn.dot_product_attention(self.query_norm(query), self.key_norm(key), value, is_causal=True)
        return self.out(y.reshape(x.shape))


class FeedForward(nnx.Module):
    def __init__(self, features, hidden, *, rngs):
        self.gate = nnx.Linear(features, hidden, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(features, hidden, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(hidden, features, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    def __init__(self, features, heads, *, rngs):
        self.pre_attention_norm = RMSNorm(features, rngs=rngs)
        self.attn = Attention(features, heads, rngs=rngs)
        self.post_attn_norm = RMSNorm(features, rngs=rngs)
        self.pre_ffw_norm = RMSNorm(features, rngs=rngs)
        self.mlp = FeedForward(features, 4 * features, rngs=rngs)
        self.post_ffw_norm = RMSNorm(features, rngs=rngs)

    def __call__(self, x):
        x = x + self.post_attn_norm(self.attn(self.pre_attention_norm(x)))
        return x + self.post_ffw_norm(self.mlp(self.pre_ffw_norm(x)))


class Transformer(nnx.Module):
    def __init__(self, features=32, heads=4, layers=1, *, param_dtype, rngs):
        self.embedder = nnx.Embed(64, features, param_dtype=param_dtype, rngs=rngs)
        self.layers = nnx.List([Block(features, heads, rngs=rngs) for _ in range(layers)])
        self.final_norm = RMSNorm(features, rngs=rngs)

    def __call__(self, tokens):
        x = self.embedder(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.embedder.attend(self.final_norm(x))


# The port.


def replaced(model):
    jaxnorm.replace_norms(
        model, {RMSNorm: lambda norm, x: jaxnorm.rms_norm(x, norm.scale[...], epsilon=1e-06, scale_offset=1.0)}
    )
    return model


def function_of(model):
    definition, state = nnx.split(model)
    return (lambda state, tokens: nnx.merge(definition, state)(tokens)), state


def port(dtype=jnp.float32):
    before, state = function_of(Transformer(param_dtype=dtype, rngs=nnx.Rngs(0)))
    after, _ = function_of(replaced(Transformer(param_dtype=dtype, rngs=nnx.Rngs(0))))
    tokens = jax.random.randint(jax.random.key(0), (2, 8), 0, 64)
    return Port(before, after, randomised(state, dtype), tokens)


if __name__ == "__main__":
    print(compare(port()))
