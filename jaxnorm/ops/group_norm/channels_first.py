"""GroupNorm of an x whose channels stand before the positions."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxnorm.ops.norm.api import layer_norm


def group_norm_channels_first(
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    *,
    num_groups: int,
    epsilon: float,
    channel_axis: int,
    out_dtype: Any,
) -> jax.Array:
    """`group_norm` of x of shape (..., channels, *positions), with scale and bias of shape (channels,).

    A group lies in one piece, so it is a row of LayerNorm's kernels; XLA multiplies and adds in one pass over what they
    give, which takes less time than to transpose x for `group_norm` and its result back.
    """
    leading, (channels, *positions) = x.shape[:channel_axis], x.shape[channel_axis:]
    row = channels // num_groups * math.prod(positions)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    y: jax.Array = layer_norm(x.reshape(*leading, num_groups, row), epsilon=epsilon, out_dtype=wide).reshape(x.shape)
    scale, bias = (w if w is None else jnp.reshape(w, (channels, *[1] * len(positions))) for w in (scale, bias))
    if scale is not None:
        y = y * scale.astype(wide)
    if bias is not None:
        y = y + bias.astype(wide)
    return y.astype(out_dtype)
