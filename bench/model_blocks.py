"""The layers of the models that `bench model` times."""

from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Around(NamedTuple):
    """What stands around attention or an MLP."""

    norm: tuple  # weights of the norm of what it reads or, where norms come after the sum, of that
    post: tuple = ()  # weights of a norm of what it gives; () is none
    gate: jax.Array | None = None  # factor of what it gives


def wide_product(x, matrix):
    return x @ matrix.astype(x.dtype)


_PRODUCT = ContextVar("product", default=wide_product)


def product(x, matrix):
    return _PRODUCT.get()(x, matrix)


@contextmanager
def products(function):
    """Has models that are traced within multiply by matrices so."""
    token = _PRODUCT.set(function)
    try:
        yield
    finally:
        _PRODUCT.reset(token)


def modulations(condition, matrix):
    """The shifts, scales and gates that a condition (batch, dim) asks for, each (batch, 1, dim).

    Source: adaLN-Zero of Peebles and Xie, Scalable Diffusion Models with Transformers, https://arxiv.org/abs/2212.09748.
    """
    joint = product(jax.nn.silu(condition), matrix)[:, None, :]
    return jnp.split(joint, joint.shape[-1] // condition.shape[-1], axis=-1)


def adaptive(shift, scale):
    """The weights of a norm that is modulated, `norm(x) * (1 + scale) + shift`: float32, as those of every norm."""
    return 1 + scale.astype(jnp.float32), shift.astype(jnp.float32)


def arounds(spec, layer, condition):
    """Of attention, and of the MLP."""
    if not spec.conditioned:
        return [Around(layer[f"{name}_norm"], layer.get(f"{name}_post_norm", ())) for name in ("attention", "mlp")]
    parts = modulations(condition, layer["modulation"])
    return [Around(adaptive(shift, scale), gate=gate) for shift, scale, gate in (parts[:3], parts[3:])]


def split_heads(x, size):
    return x.reshape(*x.shape[:-1], -1, size)


def block(spec, norms, layer, stream, attend, positions=None, condition=None):
    """One layer: the next stream, and what `attend` keeps besides its result."""

    def attention(y):
        names = ("qkv",) if spec.joint else ("query", "key", "value")
        heads = [split_heads(product(y, layer[name]), spec.head_size) for name in names]
        if spec.language:
            rotate = norms.joint_heads if spec.joint else norms.heads
            heads = [*rotate(*heads, layer["query_norm"], layer["key_norm"], positions)]
        result, kept = attend(*heads)
        return product(result.reshape(*heads[-1].shape[:-2], -1), layer["out"]), kept

    def mlp(y):
        if spec.packed:
            y = norms.gated(product(y, layer["gate_up"]))
        else:
            activation, up = getattr(jax.nn, spec.activation), product(y, layer["up"])
            y = activation(product(y, layer["gate"])) * up if spec.language else activation(up)
        return product(y, layer["down"]), None

    around_attention, around_mlp = arounds(spec, layer, condition)
    stream, kept = _half(spec, norms, around_attention, stream, attention)
    stream, _ = _half(spec, norms, around_mlp, stream, mlp)
    return stream, kept


def _half(spec, norms, around, stream, apply):
    y, x = (stream, stream) if spec.after_sum else norms.stream(stream, around.norm)
    part, kept = apply(y)
    stream = norms.add(x, part, around.post, around.gate)
    return norms.closing(stream, around.norm) if spec.after_sum else stream, kept
