"""The two norms, their formula in plain jnp, and random operands."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np

import jaxnorm

KINDS = ("rms", "layer")
NORMS = {"rms": jaxnorm.rms_norm, "layer": jaxnorm.layer_norm}
ADDS = {"rms": jaxnorm.add_rms_norm, "layer": jaxnorm.add_layer_norm}
DTYPES = ("float32", "bfloat16", "float16")


def formula(kind):
    """The norm as anyone would write it in jnp, in float32: what transformations are compared with."""

    def norm(x, scale=None, bias=None, *, epsilon=1e-6, scale_offset=0.0):
        y = x.astype(jnp.float32)
        if kind == "layer":
            y = y - y.mean(-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + epsilon)
        if scale is not None:
            y = y * (scale.astype(jnp.float32) + scale_offset)
        if bias is not None:
            y = y + bias.astype(jnp.float32)
        return y.astype(x.dtype)

    return norm


def draw(name: str, dims, dtype="float32", mean=0.0, std=1.0):
    """Normal numbers that depend on the arguments only."""
    generator = np.random.default_rng(zlib.crc32(f"{name} {dims}".encode()))
    return jnp.asarray(mean + std * generator.standard_normal(dims, np.float32), dtype)


def draw_x(dims, dtype="float32"):
    # Off centre, so that a norm that mixes up mean and no mean is found out.
    x = draw("x", dims, "float32", 0.5, 2.0)
    if dims[-1] < 32:
        # A few numbers may by chance lie close together and far from zero. LayerNorm's mean is then lost in its own
        # rounding: law 2 has such rows, law 1 is about the arithmetic.
        x = jnp.where(jnp.arange(dims[-1]) % 2 == 0, 1 + jnp.abs(x), -1 - jnp.abs(x))
    return x.astype(dtype)


def draw_residual(dims, dtype="float32"):
    return draw("residual", dims, dtype, -0.3, 4.0)


def draw_scale(dims, dtype="float32"):
    return draw("scale", dims, dtype, 1.0, 0.3)


def draw_bias(dims, dtype="float32"):
    return draw("bias", dims, dtype, 0.1, 0.5)


def operands(dims, dtype="float32", axes=1):
    """x, scale and bias."""
    features = dims[len(dims) - axes :]
    return draw_x(dims, dtype), draw_scale(features, dtype), draw_bias(features, dtype)


def axis_of(axes: int):
    return -1 if axes == 1 else tuple(range(-axes, 0))


def bits(tree) -> list[bytes]:
    """For comparisons that must be exact, NaN and the sign of zero included."""
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]
