"""MaxText's norms, ported by their own classes: the bodies of `__call__` become functions, and a layer adds in one.

python examples/ports/maxtext.py
"""

import jax
import jax.numpy as jnp
from compare import Port, compare, randomised
from flax import nnx

from jaxnorm import add_rms_norm, layer_norm, rms_norm

# The model.


class RMSNorm(nnx.Module):
    """x_hat is rounded to `dtype`, and so is the scale, which is float32 until then."""

    def __init__(self, features, *, dtype, epsilon=1e-6, rngs):
        self.dtype, self.epsilon = dtype, epsilon
        self.scale = nnx.Param(nnx.initializers.ones(rngs.params(), (features,)))

    def __call__(self, x):
        x = jnp.asarray(x, jnp.float32)
        mean2 = jnp.mean(jax.lax.square(x), axis=-1, keepdims=True)
        y = jnp.asarray(x * jax.lax.rsqrt(mean2 + self.epsilon), self.dtype)
        return jnp.einsum("i...k,...k->i...k", y, jnp.asarray(self.scale[...], self.dtype))


class Gpt3LayerNorm(nnx.Module):
    """A LayerNorm whose parameter is the scale minus one."""

    def __init__(self, features, *, dtype, epsilon=1e-6, rngs):
        self.dtype, self.epsilon = dtype, epsilon
        self.scale = nnx.Param(nnx.initializers.zeros(rngs.params(), (features,)))
        self.bias = nnx.Param(nnx.initializers.zeros(rngs.params(), (features,)))

    def __call__(self, x):
        x = jnp.asarray(x, jnp.float32)
        centred = x - jnp.mean(x, axis=-1, keepdims=True)
        normed = centred * jax.lax.rsqrt(jnp.mean(jax.lax.square(centred), axis=-1, keepdims=True) + self.epsilon)
        return jnp.asarray(normed * (self.scale[...] + 1) + self.bias[...], self.dtype)


class DecoderLayer(nnx.Module):
    def __init__(self, features, heads, norm, *, dtype, rngs):
        self.pre_self_attention_norm = norm(features, dtype=dtype, rngs=rngs)
        self.self_attention = nnx.MultiHeadAttention(heads, features, dtype=dtype, decode=False, rngs=rngs)
        self.post_self_attention_norm = norm(features, dtype=dtype, rngs=rngs)
        self.wi = nnx.Linear(features, 4 * features, dtype=dtype, rngs=rngs)
        self.wo = nnx.Linear(4 * features, features, dtype=dtype, rngs=rngs)

    def mlp(self, x):
        return self.wo(nnx.silu(self.wi(x)))

    def __call__(self, inputs):
        attention = self.self_attention(self.pre_self_attention_norm(inputs))
        intermediate = inputs + attention
        return intermediate + self.mlp(self.post_self_attention_norm(intermediate))


# The port.


class PortedRMSNorm(RMSNorm):
    def options(self):
        scale = self.scale[...].astype(self.dtype)
        return {"scale": scale, "epsilon": self.epsilon, "multiply_before_cast": False, "out_dtype": self.dtype}

    def __call__(self, x):
        return rms_norm(x, **self.options())

    def of_sum(self, x, residual):
        return add_rms_norm(x, residual, **self.options())


class PortedGpt3LayerNorm(Gpt3LayerNorm):
    def __call__(self, x):
        weights = self.scale[...], self.bias[...]
        return layer_norm(x, *weights, scale_offset=1.0, epsilon=self.epsilon, out_dtype=self.dtype)


class PortedDecoderLayer(DecoderLayer):
    def __call__(self, inputs):
        attention = self.self_attention(self.pre_self_attention_norm(inputs))
        normed, intermediate = self.post_self_attention_norm.of_sum(attention, inputs)
        return intermediate + self.mlp(normed)


class Decoder(nnx.Module):
    def __init__(self, layer=DecoderLayer, norms=(RMSNorm, Gpt3LayerNorm), *, dtype, rngs):
        self.layer = layer(32, 4, norms[0], dtype=dtype, rngs=rngs)
        self.decoder_norm = norms[1](32, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        return self.decoder_norm(self.layer(x))


def port(dtype=jnp.float32):
    before, state = function_of(Decoder(dtype=dtype, rngs=nnx.Rngs(0)))
    norms = PortedRMSNorm, PortedGpt3LayerNorm
    after, _ = function_of(Decoder(PortedDecoderLayer, norms, dtype=dtype, rngs=nnx.Rngs(0)))
    return Port(before, after, randomised(state, jnp.float32), jax.random.normal(jax.random.key(0), (2, 8, 32), dtype))


def function_of(model):
    definition, state = nnx.split(model)
    return (lambda state, x: nnx.merge(definition, state)(x)), state


if __name__ == "__main__":
    print(compare(port()))
