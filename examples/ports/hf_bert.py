"""BERT as in the model hubs, ported by modules: `AddLayerNorm` under the name of the LayerNorm that it replaces.

python examples/ports/hf_bert.py
"""

import jax
import jax.numpy as jnp
from compare import Port, compare, randomised
from flax import linen as nn

import jaxnorm.linen

# The model. Each sublayer ends in the norm of its result and its input: there is no stream beside the norms.


class BertOutput(nn.Module):
    features: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x, inputs):
        x = nn.Dense(self.features, dtype=self.dtype, name="dense")(x)
        return nn.LayerNorm(epsilon=1e-12, dtype=self.dtype, name="LayerNorm")(x + inputs)


class BertAttention(nn.Module):
    heads: int
    dtype: jnp.dtype
    output: type[nn.Module]

    @nn.compact
    def __call__(self, x):
        features = x.shape[-1]
        heads = (self.heads, features // self.heads)
        query, key, value = (
            nn.DenseGeneral(heads, dtype=self.dtype, name=name)(x) for name in ("query", "key", "value")
        )
        y = jax.nn.dot_product_attention(query, key, value)
        return self.output(features, self.dtype, name="output")(y.reshape(x.shape), x)


class BertLayer(nn.Module):
    heads: int
    dtype: jnp.dtype
    output: type[nn.Module]

    @nn.compact
    def __call__(self, x):
        features = x.shape[-1]
        x = BertAttention(self.heads, self.dtype, self.output, name="attention")(x)
        wide = nn.gelu(nn.Dense(4 * features, dtype=self.dtype, name="intermediate")(x), approximate=False)
        return self.output(features, self.dtype, name="output")(wide, x)


class BertEmbeddings(nn.Module):
    features: int
    dtype: jnp.dtype
    norms: object = nn

    @nn.compact
    def __call__(self, tokens):
        words = nn.Embed(64, self.features, dtype=self.dtype, name="word_embeddings")(tokens)
        positions = jnp.arange(tokens.shape[-1])
        positions = nn.Embed(16, self.features, dtype=self.dtype, name="position_embeddings")(positions)
        return self.norms.LayerNorm(epsilon=1e-12, dtype=self.dtype, name="LayerNorm")(words + positions)


class BertModel(nn.Module):
    features: int = 32
    heads: int = 4
    layers: int = 1
    dtype: jnp.dtype = jnp.float32
    output: type[nn.Module] = BertOutput
    norms: object = nn

    @nn.compact
    def __call__(self, tokens):
        x = BertEmbeddings(self.features, self.dtype, self.norms, name="embeddings")(tokens)
        for layer in range(self.layers):
            x = BertLayer(self.heads, self.dtype, self.output, name=f"layer_{layer}")(x)
        return x


# The port. The positions are broadcast against the words, so the embeddings add by themselves.


class PortedBertOutput(BertOutput):
    @nn.compact
    def __call__(self, x, inputs):
        x = nn.Dense(self.features, dtype=self.dtype, name="dense")(x)
        y, _ = jaxnorm.linen.AddLayerNorm(epsilon=1e-12, dtype=self.dtype, name="LayerNorm")(x, inputs)
        return y


def port(dtype=jnp.float32):
    before = BertModel(dtype=dtype)
    after = BertModel(dtype=dtype, output=PortedBertOutput, norms=jaxnorm.linen)
    tokens = jax.random.randint(jax.random.key(0), (2, 8), 0, 64)
    return Port(before.apply, after.apply, randomised(before.init(jax.random.key(0), tokens), dtype), tokens)


if __name__ == "__main__":
    print(compare(port()))
