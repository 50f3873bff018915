"""Bad calls of `group_norm`, and what no kernel serves anywhere."""

from functools import partial

import jax
import jax.numpy as jnp
from statements import call

X, SCALE, TWO = jnp.ones((3, 4, 8)), jnp.ones(8), {"num_groups": 2}

GROUP = {
    "no x": call(None, **TWO).raises(TypeError, "x", "array", "NoneType", "the array to normalise"),
    "x of one example": call(jnp.ones(8), **TWO).raises(ValueError, "x", r"\(8,\)", "axis of examples", r"x\[None\]"),
    "neither number nor size": call(X).raises(ValueError, "neither of num_groups and group_size", "num_groups=32"),
    "both number and size": call(X, num_groups=2, group_size=4).raises(ValueError, "both of num_groups and group_size"),
    "a number that does not divide": call(X, num_groups=3).raises(ValueError, "num_groups=3", r"\(3, 4, 8\)", "-1"),
    "a size that does not divide": call(X, group_size=3).raises(ValueError, "group_size=3", r"\(3, 4, 8\)"),
    "more groups than channels": call(X, num_groups=32).raises(ValueError, "num_groups=32", "divisor"),
    "a number that does not divide other channels": call(X, num_groups=3, channel_axis=1).raises(
        ValueError, "num_groups=3", r"\(3, 4, 8\)", "axis -2"
    ),
    "no groups": call(X, num_groups=0).raises(ValueError, "num_groups=0", "positive"),
    "a negative number": call(X, num_groups=-2).raises(ValueError, "num_groups=-2", "positive"),
    "a size of nothing": call(X, group_size=0).raises(ValueError, "group_size=0", "positive"),
    "short scale": call(X, SCALE[:7], **TWO).raises(
        ValueError, "scale", r"\(7,\)", r"\(8,\)", r"\(3, 8\)", r"\(3, 4, 8\)"
    ),
    "a scale of groups": call(X, SCALE[:2], **TWO).raises(ValueError, "scale", r"\(2,\)", r"\(8,\)"),
    "a scale by group": call(X, SCALE.reshape(2, 4), **TWO).raises(ValueError, "scale", r"scale.reshape\(-1\)"),
    "a scale as of a checkpoint": call(X, SCALE[None, None], **TWO).raises(ValueError, "scale", r"scale.reshape\(-1\)"),
    "a scale for each position": call(X, X, **TWO).raises(ValueError, "scale", r"\(3, 4, 8\)", "without them"),
    "a bias for other examples": call(X, SCALE, jnp.ones((2, 8)), **TWO).raises(ValueError, "bias", r"\(2, 8\)"),
    "scalar scale": call(X, jnp.ones(()), **TWO).raises(ValueError, "scale", r"\(\)", r"\(8,\)"),
    "channels first": call(jnp.ones((2, 64, 5, 5)), num_groups=32).raises(
        ValueError, "num_groups=32", r"\(2, 64, 5, 5\)", "channel_axis=1 would fit"
    ),
    "groups of channels first": call(jnp.ones((2, 64, 5, 5)), group_size=16).raises(
        ValueError, "group_size=16", "channel_axis=1 would fit"
    ),
    "a scale of channels first": call(jnp.ones((2, 64, 4, 4)), jnp.ones(64), **TWO).raises(
        ValueError, "scale", r"\(64,\)", "channel_axis=1 would fit"
    ),
    "a bias of channels first": call(jnp.ones((2, 64, 4, 4)), None, jnp.ones((2, 64)), **TWO).raises(
        ValueError, "bias", r"\(2, 64\)", "channel_axis=1 would fit"
    ),
    "unknown activation": call(X, **TWO, activation="mish").raises(
        ValueError, "activation", "'mish'", "None, 'silu', 'relu' or 'gelu'"
    ),
    "the exact gelu": call(X, **TWO, activation=partial(jax.nn.gelu, approximate=False)).raises(
        ValueError, "activation", "approximate=False", "of the result"
    ),
    "channels of examples": call(X, **TWO, channel_axis=0).raises(
        ValueError, "channel_axis=0", r"\(3, 4, 8\)", "examples"
    ),
    "channels of examples from behind": call(X, **TWO, channel_axis=-3).raises(ValueError, "channel_axis=-3", "first"),
    "channel_axis above": call(X, **TWO, channel_axis=3).raises(ValueError, "axis", "3", "out of range"),
    "channel_axis of two": call(X, **TWO, channel_axis=(1, 2)).raises(TypeError, "channel_axis", "int"),
}
MISUSE = {
    "nothing": call().raises(TypeError, "missing a required argument: 'x'", "array to normalise"),
    "the number by position": call(X, 2).raises(ValueError, "neither of num_groups", "num_groups=32"),
    "an array too many": call(X, SCALE, SCALE, X, **TWO).raises(TypeError, "4 were given", "Pass the others by name"),
    "the number by position, last": call(X, SCALE, SCALE, 2).raises(TypeError, "4 were given", "num_groups=2"),
    "a residual": call(X, residual=X).raises(TypeError, "keyword argument 'residual'", "add it to x first"),
    "the normalised axes": call(X, axis=-1).raises(TypeError, "keyword argument 'axis'", "channel_axis"),
    "Flax's axes": call(X, reduction_axes=(1, 2)).raises(TypeError, "'reduction_axes'", "channel_axis"),
    "rounding": call(X, multiply_before_cast=True).raises(TypeError, "rounded once", "leave it out"),
}
WITHOUT_KERNEL = {
    "channels between positions": call(X[..., None], **TWO, channel_axis=2).has_no_kernel("channels are between"),
    "half types mixed": call(X.astype("float16"), **TWO, out_dtype="bfloat16").has_no_kernel("float16.*bfloat16"),
    "no positions": call(jnp.ones((3, 0, 8)), **TWO).has_no_kernel("length 0"),
}
