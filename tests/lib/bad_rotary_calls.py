"""Bad input of `qk_norm_rotary`, and what no kernel serves anywhere."""

import jax.numpy as jnp
from bad_calls import NO_ARRAYS, misspelt
from statements import call

# Two sequences of 3 tokens, with 4 heads of queries and 2 of keys.
Q, K, SCALE = jnp.ones((2, 3, 4, 8)), jnp.ones((2, 3, 2, 8)), jnp.ones(8)
COS = jnp.ones((3, 4))
LONG = jnp.ones((2, 1, 520))

BAD = {
    "q of integers": call(Q.astype("int32"), K).raises(TypeError, "q", "floating", "int32", "astype"),
    "k of 8 bits": call(Q, K.astype("float8_e4m3fn")).raises(TypeError, "k", "floating", "float8_e4m3fn"),
    "no k": call(Q, None).raises(TypeError, "k must be an array", "NoneType"),
    "no axis of heads": call(jnp.ones(8), jnp.ones(8)).raises(ValueError, "axis_of_heads=-2", r"\(8,\)", "head size"),
    "heads on the first axis": call(Q, K, axis_of_heads=0).raises(ValueError, "axis_of_heads=0", "expected -2", "-3"),
    "heads on the last axis": call(Q, K, axis_of_heads=-1).raises(ValueError, "axis_of_heads=-1", "expected -2", "-3"),
    "heads on no axis": call(Q, K, axis_of_heads=None).raises(TypeError, "axis_of_heads", "int", "None"),
    "heads on an axis of a bool": call(Q, K, axis_of_heads=True).raises(TypeError, "axis_of_heads", "int", "True"),
    "heads behind no axis": call(Q[0, 0], K[0, 0], axis_of_heads=-3).raises(
        ValueError, "axis_of_heads=-3", r"\(4, 8\)"
    ),
    "heads of another size": call(Q, K[..., :6]).raises(
        ValueError, "k has shape", r"\(2, 3, 2, 6\)", r"\(2, 3, any, 8\)", r"\(2, 3, 4, 8\)"
    ),
    "other tokens": call(Q, K[:, :2]).raises(ValueError, "k has shape", r"\(2, 2, 2, 8\)", r"\(2, 3, any, 8\)"),
    "k of another rank": call(Q, K[0]).raises(ValueError, "k has shape", r"\(3, 2, 8\)", r"\(2, 3, any, 8\)"),
    "heads before tokens": call(Q.swapaxes(1, 2), K.swapaxes(1, 2)).raises(ValueError, "k has shape", "axis_of_heads"),
    "short scale": call(Q, K, SCALE[:7]).raises(ValueError, "q_scale", r"\(7,\)", r"\(8,\)", r"\(4, 8\)", "Reshape"),
    "scale of q's heads for k": call(Q, K, SCALE, jnp.ones((4, 8))).raises(
        ValueError, "k_scale", r"\(4, 8\)", r"\(8,\)", r"\(2, 8\)"
    ),
    "a number for a scale": call(Q, K, jnp.ones(())).raises(ValueError, "q_scale", r"\(\)", "scale_offset"),
    "scale of integers": call(Q, K, None, jnp.ones(8, "int8")).raises(TypeError, "k_scale", "floating", "int8"),
    "a scale without a norm": call(Q, K, SCALE, normalize=False).raises(
        ValueError, "q_scale", "normalize=False", "None"
    ),
    "an unknown norm": call(Q, K, normalize="l2").raises(ValueError, "normalize", "'rms'", "'layer'", "'l2'"),
    "no norm of None": call(Q, K, normalize=None).raises(TypeError, "normalize", "False", "None"),
    "odd rotary_dim": call(Q, K, rotary_dim=3).raises(ValueError, "rotary_dim=3", "even", "2 to 8", r"\(2, 3, 4, 8\)"),
    "long rotary_dim": call(Q, K, rotary_dim=10).raises(ValueError, "rotary_dim=10", "even", "2 to 8"),
    "no rotary_dim": call(Q, K, rotary_dim=0).raises(ValueError, "rotary_dim=0", "even", "2 to 8"),
    "rotary_dim of a float": call(Q, K, rotary_dim=4.0).raises(TypeError, "rotary_dim", "int", "4.0"),
    "rotary_dim of a bool": call(Q, K, rotary_dim=True).raises(TypeError, "rotary_dim", "int", "True"),
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
    "pairs of a number": call(Q, K, interleaved=1).raises(TypeError, "interleaved", "bool", "1"),
    "negative epsilon": call(Q, K, epsilon=-1.0).raises(ValueError, "epsilon", "negative"),
    "NaN offset": call(Q, K, scale_offset=float("nan")).raises(ValueError, "scale_offset", "finite"),
    "unknown implementation": call(Q, K, implementation="cuda").raises(ValueError, "implementation", "cuda"),
}
MISUSE = {
    "no keys": call(Q).raises(TypeError, "missing a required argument: 'k'", "queries alone"),
    "theta by position": call(Q, K, SCALE, SCALE, jnp.arange(3), 1e4).raises(
        TypeError, "takes 5 positional arguments", r"sixth theta\? Then pass theta=10000.0"
    ),
    "tables by position": call(Q, K, SCALE, SCALE, None, COS, COS).raises(
        TypeError, "but 7 were given", "cos, sin, theta"
    ),
    **{
        f"{what} for q_scale": call(Q, K, value).raises(
            TypeError, "q_scale must be an array", said.replace("scale[", "q_scale[")
        )
        for what, (value, said) in NO_ARRAYS.items()
        if what in ("a float", "text", "a shape and dtype")
    },
    **misspelt(
        Q,
        K,
        position_ids="positions",
        rope_theta="theta",
        base="theta",
        inv_freq="frequencies",
        q_norm="q_scale",
        k_weight="k_scale",
        norm="normalize",
        eps="epsilon",
        rotary_ndims="rotary_dim",
    ),
}
WITHOUT_KERNEL = {
    "other dtypes": call(Q, K.astype("bfloat16")).has_no_kernel("q is float32 and k bfloat16"),
    "long heads": call(LONG, LONG).has_no_kernel("heads of 520 elements"),
}
