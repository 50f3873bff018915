"""T5's encoder as in the model hubs, ported by functions: a residual addition and the norm after it become one call.

python examples/ports/hf_t5.py
"""

import jax
import jax.numpy as jnp
from compare import Port, compare, randomised
from flax import linen as nn

from jaxnorm import add_rms_norm, rms_norm

# The model.


class T5LayerNorm(nn.Module):
    """An RMSNorm, computed and returned in float32."""

    eps: float = 1e-6

    @nn.compact
    def __call__(self, hidden):
        weight = self.param("weight", nn.initializers.ones, hidden.shape[-1:])
        variance = jnp.mean(hidden.astype(jnp.float32) ** 2, axis=-1, keepdims=True)
        return weight.astype(jnp.float32) * (hidden / jnp.sqrt(variance + self.eps))


class T5Attention(nn.Module):
    heads: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, hidden):
        features = hidden.shape[-1]
        query, key, value = (
            nn.DenseGeneral((self.heads, features // self.heads), use_bias=False, dtype=self.dtype, name=name)(hidden)
            for name in "qkv"
        )
        length = jnp.arange(hidden.shape[1])
        near = jnp.abs(length[:, None] - length)  # buckets of one position
        bias = nn.Embed(16, self.heads, dtype=self.dtype, name="relative_attention_bias")(near).transpose(2, 0, 1)
        y = jax.nn.dot_product_attention(query, key, value, bias[None], scale=1.0)
        return nn.DenseGeneral(features, axis=(-2, -1), use_bias=False, dtype=self.dtype, name="o")(y)


class T5FeedForward(nn.Module):
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, hidden):
        wide = nn.relu(nn.Dense(4 * hidden.shape[-1], use_bias=False, dtype=self.dtype, name="wi")(hidden))
        return nn.Dense(hidden.shape[-1], use_bias=False, dtype=self.dtype, name="wo")(wide)


class T5Encoder(nn.Module):
    features: int = 32
    heads: int = 4
    blocks: int = 1
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, tokens):
        hidden = nn.Embed(64, self.features, dtype=self.dtype, name="shared")(tokens)
        for block in range(self.blocks):
            for name, sublayer in {
                "attention": T5Attention(self.heads, self.dtype, name=f"attention_{block}"),
                "mlp": T5FeedForward(self.dtype, name=f"mlp_{block}"),
            }.items():
                hidden = hidden + sublayer(T5LayerNorm(name=f"{name}_norm_{block}")(hidden))
        return T5LayerNorm(name="final_layer_norm")(hidden)


# The port. `x` is what the last sublayer gave, which the norm of the next one adds to the stream.


class PortedT5LayerNorm(nn.Module):
    eps: float = 1e-6

    @nn.compact
    def __call__(self, x, residual=None):
        weight = self.param("weight", nn.initializers.ones, x.shape[-1:])
        if residual is None:
            return rms_norm(x, weight, epsilon=self.eps, out_dtype=jnp.float32), x
        return add_rms_norm(x, residual, weight, epsilon=self.eps, out_dtype=jnp.float32)


class PortedT5Encoder(T5Encoder):
    @nn.compact
    def __call__(self, tokens):
        x, hidden = nn.Embed(64, self.features, dtype=self.dtype, name="shared")(tokens), None
        for block in range(self.blocks):
            for name, sublayer in {
                "attention": T5Attention(self.heads, self.dtype, name=f"attention_{block}"),
                "mlp": T5FeedForward(self.dtype, name=f"mlp_{block}"),
            }.items():
                normed, hidden = PortedT5LayerNorm(name=f"{name}_norm_{block}")(x, hidden)
                x = sublayer(normed)
        return PortedT5LayerNorm(name="final_layer_norm")(x, hidden)[0]


def port(dtype=jnp.float32):
    before, after = T5Encoder(dtype=dtype), PortedT5Encoder(dtype=dtype)
    tokens = jax.random.randint(jax.random.key(0), (2, 8), 0, 64)
    return Port(before.apply, after.apply, randomised(before.init(jax.random.key(0), tokens), dtype), tokens)


if __name__ == "__main__":
    print(compare(port()))
