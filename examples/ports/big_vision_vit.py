"""A ViT as in big_vision, whose norms are Flax's: the model is called as before, within `replace_norms`.

python examples/ports/big_vision_vit.py
"""

import jax
import jax.numpy as jnp
from compare import Port, compare, randomised
from flax import linen as nn

import jaxnorm.linen

# The model.


class MlpBlock(nn.Module):
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):
        features = x.shape[-1]
        x = nn.gelu(nn.Dense(4 * features, dtype=self.dtype)(x))
        return nn.Dense(features, dtype=self.dtype)(x)


class Encoder1DBlock(nn.Module):
    heads: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype)(y, y)
        y = nn.LayerNorm()(x)
        return x + MlpBlock(self.dtype)(y), {}


class Encoder(nn.Module):
    """The blocks are scanned, their parameters stacked."""

    depth: int
    heads: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):
        block = nn.scan(
            nn.remat(Encoder1DBlock, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=self.depth,
        )
        x, _ = block(self.heads, self.dtype, name="encoderblock")(x)
        return nn.LayerNorm(name="encoder_norm")(x)


class MAPHead(nn.Module):
    """Multihead attention pooling."""

    heads: int

    @nn.compact
    def __call__(self, x):
        probe = self.param("probe", nn.initializers.xavier_uniform(), (1, 1, x.shape[-1]), x.dtype)
        probe = jnp.tile(probe, [x.shape[0], 1, 1])
        x = nn.MultiHeadDotProductAttention(self.heads)(probe, x)
        return (x + MlpBlock(x.dtype)(nn.LayerNorm()(x)))[:, 0]


class ViT(nn.Module):
    width: int = 32
    depth: int = 2
    heads: int = 4
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, image):
        patches = nn.Conv(self.width, (4, 4), strides=(4, 4), padding="VALID", name="embedding")(image)
        x = patches.reshape(patches.shape[0], -1, self.width)
        x = x + self.param("pos_embedding", nn.initializers.normal(0.2), (1, *x.shape[1:]), x.dtype)
        x = Encoder(self.depth, self.heads, self.dtype, name="Transformer")(x)
        x = MAPHead(self.heads, name="MAPHead_0")(x)
        return nn.Dense(10, name="head")(x)


# The port.


def port(dtype=jnp.float32):
    model = ViT(dtype=dtype)
    image = jax.random.normal(jax.random.key(0), (2, 16, 16, 3), dtype)

    def after(variables, image):
        with jaxnorm.linen.replace_norms():
            return model.apply(variables, image)

    return Port(model.apply, after, randomised(model.init(jax.random.key(0), image), dtype), image)


if __name__ == "__main__":
    print(compare(port()))
