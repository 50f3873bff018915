"""The ops as anyone would write them in jnp, in float32: what transformations are compared with."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np


def norm(kind):
    def formula(x, scale=None, bias=None, *, epsilon=1e-6, scale_offset=0.0):
        y = x.astype(jnp.float32)
        if kind == "layer":
            y = y - y.mean(-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + epsilon)
        if scale is not None:
            y = y * (scale.astype(jnp.float32) + scale_offset)
        if bias is not None:
            y = y + bias.astype(jnp.float32)
        return y.astype(x.dtype)

    return formula


def padded(y, multiple):
    return jnp.pad(y, [(0, 0)] * (y.ndim - 1) + [(0, -y.shape[-1] % multiple)])


def added(kind):
    def formula(x, residual, scale=None, bias=None, *, pad_to=1):
        total = (x + residual).astype(residual.dtype)
        return padded(norm(kind)(total, scale, bias).astype(x.dtype), pad_to), total

    return formula


def sandwich(x, residual, post_scale=None, scale=None):
    total = (norm("rms")(x, post_scale) + residual).astype(residual.dtype)
    return norm("rms")(total, scale).astype(x.dtype), total


def rotary(kind):
    """Of halves, as Llama and GPT-NeoX have it, or of every two, as GPT-J."""

    def formula(
        q, k, positions, q_scale=None, k_scale=None, *, rotary_dim=None, interleaved=False, frequencies=None, **options
    ):
        dim = rotary_dim or q.shape[-1]
        if frequencies is None:
            frequencies = np.float32(10_000.0 ** (-np.arange(0, dim, 2) / dim))
        angles = jax.lax.stop_gradient(positions)[..., None, None] * frequencies
        cos, sin = jnp.cos(angles), jnp.sin(angles)

        def rotated(x, scale):
            h = x.astype(jnp.float32)
            h = h if kind == "no" else norm(kind)(h, scale, **options)
            pairs = h[..., :dim].reshape(*h.shape[:-1], *((dim // 2, 2) if interleaved else (2, dim // 2)))
            a, b = (pairs[..., 0], pairs[..., 1]) if interleaved else (pairs[..., 0, :], pairs[..., 1, :])
            turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], -1 if interleaved else -2)
            return jnp.concatenate([turned.reshape(*h.shape[:-1], dim), h[..., dim:]], -1).astype(x.dtype)

        return rotated(q, q_scale), rotated(k, k_scale)

    return formula


# `jax.experimental.jet` cannot take `jax.nn.relu`.
ACTIVATIONS = {
    None: lambda v: v,
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "gelu_exact": lambda v: jax.nn.gelu(v, approximate=False),
    "relu": lambda v: jnp.where(v <= 0, 0, v),
    # No gradient at what is not a number.
    "relu2": lambda v: jnp.where(v > 0, v, jnp.where(v <= 0, 0, jax.lax.stop_gradient(v))) ** 2,
    "sigmoid": jax.nn.sigmoid,
}


def activated(activation, gate, up):
    return (ACTIVATIONS[activation](gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(gate.dtype)


def gated(variant):
    def formula(x, gate, scale=None, *, group_size=None):
        a = ACTIVATIONS[variant.activation](gate)
        h = x * a if variant.gate_first else x
        groups = h.reshape(*h.shape[:-1], -1, group_size or h.shape[-1])
        y = (groups * jax.lax.rsqrt(jnp.square(groups).mean(-1, keepdims=True) + 1e-6)).reshape(h.shape)
        y = y if scale is None else y * scale
        return y if variant.gate_first else y * a

    return formula


def group_norm(activation):
    def formula(x, scale=None, bias=None, *, group_size=None):
        groups = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, group_size or x.shape[-1])
        over = (*range(1, x.ndim - 1), -1)
        y = groups - groups.mean(over, keepdims=True)
        y = (y * jax.lax.rsqrt(jnp.square(y).mean(over, keepdims=True) + 1e-6)).reshape(x.shape)
        y = y if scale is None else y * scale.astype(jnp.float32)
        y = y if bias is None else y + bias.astype(jnp.float32)
        return ACTIVATIONS[activation](y).astype(x.dtype)

    return formula


def dequantized(norm, quantization, static_scale=None):
    """What a quantised norm means, times smooth factors, and its straight-through gradient: that of the norm."""

    def formula(*args, **options):
        y = norm(*args[:3], **options)
        return rounded(y * args[3] if len(args) > 3 else y, quantization, static_scale)

    return formula


def rounded(y, quantization, static_scale=None):
    """What y, quantised, stands for, and the derivative of y."""
    is_float = jnp.issubdtype(quantization.dtype, jnp.floating)
    largest = float((jnp.finfo if is_float else jnp.iinfo)(quantization.dtype).max)
    fixed = jax.lax.stop_gradient(y)  # here, since jet has no rule for all that rounds
    groups = fixed.reshape(*y.shape[:-1], -1, quantization.group_size or y.shape[-1])
    scales = jnp.abs(groups).max(-1, keepdims=True) / largest if static_scale is None else static_scale
    values = jnp.clip(groups / scales, -largest, largest)
    values = values.astype(quantization.dtype) if is_float else jnp.round(values)
    values = jax.lax.optimization_barrier(values)  # or XLA for GPUs leaves the rounding to float8 out
    exact = (values.astype(jnp.float32) * scales).reshape(y.shape)
    return y + (exact - fixed)


def _values(v, recipe, axes):
    """v with a scale for what lies along these axes, in float8; and the scales."""
    scales = jnp.abs(v).max(axes, keepdims=True, initial=0.0) / 448.0
    scales = jnp.exp2(jnp.ceil(jnp.log2(scales))) if recipe.power_of_two else scales
    values = jnp.clip(v / jnp.where(scales == 0, 1, scales), -448.0, 448.0).astype("float8_e4m3fn")
    return jax.lax.optimization_barrier(values).astype(jnp.float32), scales  # see `rounded`


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def float8_product(recipe, x, kernel):
    """Of x rounded by rows and the kernel by columns; dy times the other's scales is rounded once for each gradient."""
    return _float8_product(recipe, x, kernel)[0]


def _float8_product(recipe, x, kernel):
    (a, of_rows), (b, of_columns) = _values(x, recipe, -1), _values(kernel, recipe, 0)
    return (a @ b * of_rows) * of_columns.reshape(-1), (a, of_rows, b, of_columns.reshape(-1))


def _float8_gradients(recipe, kept, dy):
    a, of_rows, b, of_columns = kept
    rows = tuple(range(dy.ndim - 1))
    u, of_u = _values(dy * of_columns, recipe, -1)
    v, of_v = _values(dy * of_rows, recipe, rows)
    dx = u @ b.T * of_u
    if recipe.weight_gradient == "compute":
        return dx, jnp.einsum("...k,...n->kn", a * of_rows, dy)
    return dx, jnp.einsum("...k,...n->kn", a, v) * of_v.reshape(-1)


float8_product.defvjp(_float8_product, _float8_gradients)


def softmax(x, *, log=False, logit_scale=1.0):
    z = x.astype(jnp.float32) * logit_scale
    z = z - jax.lax.stop_gradient(z.max(-1, keepdims=True, initial=-jnp.inf))
    total = jnp.exp(z).sum(-1, keepdims=True)
    return (z - jnp.log(total) if log else jnp.exp(z) / total).astype(x.dtype)


def cross_entropy(logits, labels, *, label_smoothing=0.0, z_loss=0.0, logit_scale=1.0, soft_cap=None):
    z = logits.astype(jnp.float32) * logit_scale
    z = z if soft_cap is None else soft_cap * jnp.tanh(z / soft_cap)
    top = jax.lax.stop_gradient(z.max(-1, keepdims=True, initial=-jnp.inf))
    logsumexp = (jnp.log(jnp.exp(z - top).sum(-1, keepdims=True)) + top)[..., 0]
    at_label = jnp.take_along_axis(z, labels[..., None], -1)[..., 0]
    loss = logsumexp - (1 - label_smoothing) * at_label + z_loss * logsumexp**2
    return loss - label_smoothing * z.mean(-1) if label_smoothing else loss
