"""Bad input of `qk_norm_rotary` and `qkv_norm_rotary`, and what no kernel serves anywhere."""

from functools import partial

import jax.numpy as jnp
from statements import call

# Two sequences of 3 tokens, with 4 heads of queries and 2 of keys.
Q, K, SCALE = jnp.ones((2, 3, 4, 8)), jnp.ones((2, 3, 2, 8)), jnp.ones(8)
COS = jnp.ones((3, 4))
LONG = jnp.ones((2, 1, 520))

BAD = {
    "no axis of heads": call(jnp.ones(8), jnp.ones(8)).raises(ValueError, "heads_axis=-2", r"\(8,\)", "head size"),
    "heads on the first axis": call(Q, K, heads_axis=0).raises(ValueError, "heads_axis=0", "expected -2", "-3"),
    "heads on the last axis": call(Q, K, heads_axis=-1).raises(ValueError, "heads_axis=-1", "expected -2", "-3"),
    "heads on no axis": call(Q, K, heads_axis=None).raises(TypeError, "heads_axis", "int", "None"),
    "heads on an axis of a bool": call(Q, K, heads_axis=True).raises(TypeError, "heads_axis", "int", "True"),
    "heads behind no axis": call(Q[0, 0], K[0, 0], heads_axis=-3).raises(ValueError, "heads_axis=-3", r"\(4, 8\)"),
    "heads of another size": call(Q, K[..., :6]).raises(
        ValueError, "k has shape", r"\(2, 3, 2, 6\)", r"\(2, 3, any, 8\)", r"\(2, 3, 4, 8\)"
    ),
    "other tokens": call(Q, K[:, :2]).raises(ValueError, "k has shape", r"\(2, 2, 2, 8\)", r"\(2, 3, any, 8\)"),
    "k of another rank": call(Q, K[0]).raises(ValueError, "k has shape", r"\(3, 2, 8\)", r"\(2, 3, any, 8\)"),
    "heads before tokens": call(Q.swapaxes(1, 2), K.swapaxes(1, 2)).raises(ValueError, "k has shape", "heads_axis"),
    "short scale": call(Q, K, SCALE[:7]).raises(ValueError, "q_scale", r"\(7,\)", r"\(8,\)", r"\(4, 8\)", "Reshape"),
    "scale of q's heads for k": call(Q, K, SCALE, jnp.ones((4, 8))).raises(
        ValueError, "k_scale", r"\(4, 8\)", r"\(8,\)", r"\(2, 8\)"
    ),
    "a number for a scale": call(Q, K, jnp.ones(())).raises(ValueError, "q_scale", r"\(\)", "scale_offset"),
    "a scale without a norm": call(Q, K, SCALE, normalize=False).raises(
        ValueError, "q_scale", "normalize=False", "None"
    ),
    "an unknown norm": call(Q, K, normalize="l2").raises(ValueError, "normalize", "'rms'", "'layer'", "'l2'"),
    "no norm of None": call(Q, K, normalize=None).raises(TypeError, "normalize", "False", "None"),
    "odd rotary_dim": call(Q, K, rotary_dim=3).raises(ValueError, "rotary_dim=3", "even", "2 to 8", r"\(2, 3, 4, 8\)"),
    "long rotary_dim": call(Q, K, rotary_dim=10).raises(ValueError, "rotary_dim=10", "even", "2 to 8"),
    "no rotary_dim": call(Q, K, rotary_dim=0).raises(ValueError, "rotary_dim=0", "even", "2 to 8"),
    "odd heads": call(Q[..., :7], K[..., :7]).raises(
        ValueError, "last axis of q", r"\(2, 3, 4, 7\)", "odd", "rotary_dim"
    ),
    "cos without sin": call(Q, K, cos=COS).raises(ValueError, "cos is given without sin", "both or neither"),
    "sin without cos": call(Q, K, sin=COS).raises(ValueError, "sin is given without cos", "both or neither"),
    "tables and positions": call(Q, K, positions=jnp.arange(3), cos=COS, sin=COS).raises(
        ValueError, "positions and the tables cos and sin", "one of the two", "Leave positions out"
    ),
    "tables and frequencies": call(Q, K, frequencies=jnp.ones(4), cos=COS, sin=COS).raises(
        ValueError, "frequencies and the tables", "Leave frequencies out"
    ),
    "tables of other pairs": call(Q, K, cos=COS[:, :3], sin=COS[:, :3]).raises(
        ValueError, "cos has shape", r"\(3, 3\)", "rotary_dim / 2 = 4", r"\(2, 3\)", r"\(2, 3, 4, 8\)"
    ),
    "tables of other tokens": call(Q, K, cos=COS, sin=COS[:2]).raises(
        ValueError, "sin has shape", r"\(2, 4\)", r"\(2, 3\)"
    ),
    "tables with heads": call(Q, K, cos=COS[:, None], sin=COS[:, None]).raises(
        ValueError, "cos has shape", r"\(3, 1, 4\)", r"\(2, 3\)", "no axis for heads"
    ),
    "tables of a part of a head": call(Q, K, cos=COS[:, :2], sin=COS[:, :2]).raises(
        ValueError, "cos", "pass rotary_dim"
    ),
    "a table of a number": call(Q, K, cos=jnp.ones(()), sin=COS).raises(ValueError, "cos has shape", r"\(\)"),
    "tables of integers": call(Q, K, cos=COS.astype("int32"), sin=COS).raises(TypeError, "cos", "floating", "int32"),
    "positions of other tokens": call(Q, K, positions=jnp.arange(2)).raises(
        ValueError, "positions has shape", r"\(2,\)", r"\(2, 3\)", r"positions\[:, None\]"
    ),
    "positions of booleans": call(Q, K, positions=jnp.ones(3, bool)).raises(TypeError, "positions", "integers", "bool"),
    "complex positions": call(Q, K, positions=jnp.ones(3, "complex64")).raises(TypeError, "positions", "complex64"),
    "positions of a list": call(Q, K, positions=[0, 1, 2]).raises(TypeError, "positions", "list", "asarray"),
    "no axis to count along": call(Q[0, 0], K[0, 0]).raises(ValueError, "without an axis of tokens", "pass positions"),
    "frequencies of other pairs": call(Q, K, frequencies=jnp.ones(8)).raises(
        ValueError, "frequencies has shape", r"\(8,\)", r"\(4,\)", "rotary_dim"
    ),
    "negative theta": call(Q, K, theta=-1.0).raises(ValueError, "theta", "positive", "-1.0"),
    "theta of text": call(Q, K, theta="1e4").raises(TypeError, "theta", "number", "'1e4'"),
}
MISUSE = {
    "no keys": call(Q).raises(TypeError, "missing a required argument: 'k'", "queries alone"),
    "theta by position": call(Q, K, SCALE, SCALE, jnp.arange(3), 1e4).raises(
        TypeError, "takes 5 positional arguments", r"sixth theta\? Then pass theta=10000.0"
    ),
    "tables by position": call(Q, K, SCALE, SCALE, None, COS, COS).raises(
        TypeError, "but 7 were given", "cos, sin, theta"
    ),
}
WITHOUT_KERNEL = {
    "other dtypes": call(Q, K.astype("bfloat16")).has_no_kernel("q is float32 and k bfloat16"),
    "long heads": call(LONG, LONG).has_no_kernel("heads of 520 elements"),
}

# The same of one product, whose heads are 4, 2 and 2.
QKV = jnp.ones((2, 3, 8, 16))
of_heads = partial(call, heads=4, kv_heads=2)
OF_PRODUCT = {
    "a number for qkv": of_heads(jnp.ones(())).raises(ValueError, "qkv has shape", r"\(\)", "Reshape qkv"),
    "other heads": of_heads(QKV[:, :, :7]).raises(
        ValueError, "qkv has shape", r"\(2, 3, 7, 16\)", r"\(\.\.\., tokens, 8, head size\)", "heads .* kv_heads = 8"
    ),
    "flat heads of other size": of_heads(jnp.ones((2, 3, 100))).raises(
        ValueError, r"\(2, 3, 100\)", r"\(batch, tokens, 8 \* head size\)", "at most three axes"
    ),
    "flat heads of four axes": of_heads(jnp.ones((2, 2, 3, 128))).raises(
        ValueError, r"\(2, 2, 3, 128\)", r"\(\.\.\., tokens, 8, head size\)", "at most three axes", "Reshape qkv"
    ),
    "heads that may be flat": of_heads(QKV[0]).raises(
        ValueError, r"\(3, 8, 16\)", "may be the last axis but one", r"\(1, 3, 8, 16\)", r"\(3, 8, 8, 2\)"
    ),
    "a token that may be several": of_heads(QKV[0, 0], positions=0).raises(
        ValueError, r"\(8, 16\)", "may be the last axis but one", r"\(1, 1, 8, 16\)", r"\(1, 8, 8, 2\)"
    ),
    "no heads": call(QKV, heads=0, kv_heads=4).raises(ValueError, "heads must be positive", "0"),
    "negative heads of keys": call(QKV, heads=10, kv_heads=-1).raises(ValueError, "kv_heads must be positive", "-1"),
    "scale of all heads": of_heads(QKV, jnp.ones((8, 16))).raises(
        ValueError, "q_scale", r"\(8, 16\)", r"\(16,\)", "head size of qkv", r"\(4, 16\)"
    ),
    "scale of q's heads for k": of_heads(QKV, None, jnp.ones((4, 16))).raises(
        ValueError, "k_scale", r"\(4, 16\)", r"\(16,\)", r"\(2, 16\)"
    ),
    "short scale of flat heads": of_heads(QKV.reshape(2, 3, 128), SCALE).raises(
        ValueError, "q_scale", r"\(8,\)", r"\(16,\)", r"\(2, 3, 8, 16\) by heads"
    ),
    "a scale without a norm": of_heads(QKV, jnp.ones(16), normalize=False).raises(
        ValueError, "q_scale", "normalize=False", "None"
    ),
    "odd heads": of_heads(QKV[..., :7]).raises(ValueError, "last axis of qkv", r"\(2, 3, 8, 7\)", "odd", "rotary_dim"),
    "long rotary_dim": of_heads(QKV, rotary_dim=18).raises(ValueError, "rotary_dim=18", "2 to 16", "qkv"),
    "tables of other tokens": of_heads(QKV, cos=jnp.ones((2, 8)), sin=jnp.ones((2, 8))).raises(
        ValueError, "cos has shape", r"\(2, 8\)", r"\(2, 3\) of qkv"
    ),
    "tables and positions": of_heads(QKV, positions=jnp.arange(3), cos=jnp.ones((3, 8)), sin=jnp.ones((3, 8))).raises(
        ValueError, "positions and the tables cos and sin", "Leave positions out"
    ),
    "positions of other tokens": of_heads(QKV, positions=jnp.arange(2)).raises(
        ValueError, "positions has shape", r"\(2,\)", r"\(2, 3\) of qkv"
    ),
    "no axis to count along": of_heads(QKV[0, 0], jnp.ones(16)).raises(
        ValueError, "qkv has shape", "without an axis of tokens", "pass positions"
    ),
    "no number of heads": call(QKV, kv_heads=2).raises(TypeError, "missing a required argument: 'heads'", "heads="),
    "no product": call(heads=4, kv_heads=2).raises(TypeError, "missing a required argument: 'qkv'", "one product"),
    "q, k and v": of_heads(Q, K, K, None, SCALE).raises(TypeError, "takes 4 positional arguments", "5 were given"),
    "heads on another axis": of_heads(QKV, heads_axis=-3).raises(TypeError, "heads_axis", "qk_norm_rotary"),
}
PRODUCT_WITHOUT_KERNEL = {
    "long heads": call(jnp.ones((2, 1, 3, 520)), heads=1, kv_heads=1).has_no_kernel("heads of 520 elements"),
}
