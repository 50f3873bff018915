"""Calls of each public function: valid ones, bad input of each op, and what no kernel serves anywhere."""

import inspect
import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from op import call, named

import jaxnorm
from jaxnorm import Quantization

X, SCALE, INT8 = jnp.ones((3, 4, 8)), jnp.ones(8), Quantization("int8")
TOKENS, LABELS = jnp.ones((2, 3, 2, 8)), jnp.zeros((3, 4), "int32")

# A valid call: what is required by a function, by the names of its parameters.
VALID = dict.fromkeys(("x", "logits", "residual", "gate", "data"), X) | dict.fromkeys(("labels", "ids"), LABELS)
VALID |= {"q": TOKENS, "k": TOKENS[:, :, :1], "qkv": jnp.ones((2, 3, 4, 8)), "heads": 2, "kv_heads": 1}
VALID |= {"kernel": jnp.ones((8, 5)), "table": jnp.ones((5, 8)), "segment_ids": LABELS[:, 0]}
VALID |= {"gate_first": True, "quantization": INT8}
OWN = {
    "group_norm": {"num_groups": 2},
    "sample": {"uniform": 0.5},
    "quantized_dot": {"kernel": jaxnorm.quantize_kernel(jnp.ones((8, 5)), INT8)},
}


def parameters(function):
    return inspect.signature(getattr(jaxnorm, function)).parameters.values()


def required_by(function):
    return [p.name for p in parameters(function) if p.default is p.empty]


def valid(function):
    return {name: VALID[name] for name in required_by(function)} | OWN.get(function, {})


def _qkv_norm_rotary(x):
    packed = math.prod(x.shape[-2:-1])
    kv_heads = packed // (3 if packed % 6 else 6)
    heads = packed - 2 * kv_heads
    scale, positions = jnp.ones(x.shape[-1:]), jnp.zeros(x.shape[:-2], int)
    return jaxnorm.qkv_norm_rotary(x, scale, scale, positions, heads=heads, kv_heads=kv_heads)


def _labels(x):
    return jnp.zeros(x.shape[:-1], int)


def _square(x):
    return jnp.zeros((x.shape[-1], x.shape[-1]))


# What a call of an x has for each parameter that is required beside it; and calls that want more.
BESIDE = {"residual": lambda x: x, "gate": lambda x: x, "gate_first": lambda _: True, "quantization": lambda _: INT8}
BESIDE |= {"labels": _labels, "kernel": _square}
OF_X = {
    "embedding": lambda x: jaxnorm.embedding(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), _labels(x)),
    "group_norm": lambda x: jaxnorm.group_norm(x, num_groups=math.gcd(32, x.shape[-1])),
    "qk_norm_rotary": lambda x: jaxnorm.qk_norm_rotary(x, x, positions=jnp.zeros(x.shape[:-2], int)),
    "qkv_norm_rotary": _qkv_norm_rotary,
    "quantize_kernel": lambda x: jaxnorm.quantize_kernel(x, Quantization("float8_e4m3fn")),
    "quantized_dot": lambda x: jaxnorm.quantized_dot(x, jaxnorm.quantize_kernel(_square(x), INT8)),
    "sample": lambda x: jaxnorm.sample(x, uniform=0.5, return_log_prob=True),
    "segment_sum": lambda x: jaxnorm.segment_sum(x, jnp.zeros(x.shape[:1], int), 8),
}


def of_x(name):
    """A call of this function, of an x of any shape that it takes."""
    function, (_, *others) = getattr(jaxnorm, name), required_by(name)
    return OF_X.get(name, lambda x: function(x, **{other: BESIDE[other](x) for other in others}))


def in_order(function, parts) -> str:
    """A pattern of what this function's error says: patterns, and shapes as they are."""
    return rf"(?s)^{function}: " + ".*".join(("", *(p if isinstance(p, str) else re.escape(str(p)) for p in parts)))


NORM = named(
    call(X, jnp.ones((3, 8))).raises(ValueError, "scale", (3, 8), (8,), (3, 4)),
    call(X, jnp.ones((4, 3)), axis=0).raises(ValueError, "scale", (4, 3), r"expected \(3,\)", "Reshape"),
    call(X, SCALE, bias=jnp.ones((2, 1, 8))).raises(ValueError, "bias", (2, 1, 8), (3, 4)),
    call(X, SCALE[:4]).raises(ValueError, "scale", (4,), "axis=1 would fit"),
    call(X, SCALE, axis=(-2, -1)).raises(ValueError, "scale", (8,), (4, 8)),
)

PADDING = named(
    call(X, X, pad_to=0).raises(ValueError, "pad_to", "positive", "0"),
    call(X, X, pad_to=-8).raises(ValueError, "pad_to", "positive", "-8"),
    call(X, X, pad_to=8, axis=(-2, -1)).raises(ValueError, "pad_to", "axis=-1", (-2, -1), "leave pad_to out"),
    call(X, X, pad_to=8, axis=0).raises(ValueError, "pad_to", "axis=-1", r"\(-3,\)"),
)

FIRST = {"gate_first": True}
GATED = named(
    call(X, X, SCALE.reshape(2, 4), **FIRST, group_size=4).raises(ValueError, "scale", (2, 4), (8,), "group_size"),
    call(X, X, **FIRST, group_size=3).raises(ValueError, "group_size 3", (3, 4, 8)),
    call(X, X, **FIRST, group_size=-4).raises(ValueError, "group_size -4", "positive"),
    call(X, X, **FIRST, activation="gelu").raises(ValueError, "activation", "'gelu'", "'silu' or 'sigmoid'"),
    call(X, X, gate_first=1).raises(TypeError, "gate_first", "bool", "1", "Mamba2"),
)


# By the name of the public function: what is taken for an argument of it.
MISUSE = {
    "rms_norm": named(
        call(X, X, scale=SCALE).raises(
            TypeError, "multiple values for argument 'scale'", r"second the residual\? Then use add_rms_norm\("
        ),
        call(X, SCALE, SCALE, 1e-5).raises(TypeError, "but 4 were given", "Then pass bias="),
        call(X, (8,), SCALE).raises(TypeError, "shape of the features, as in torch", "Leave it out"),
        call(X, 8, SCALE).raises(TypeError, "as in torch", "Leave it out"),
        call(X, (8,)).raises(TypeError, "scale must be an array", "as in torch"),
        call(SCALE, X).raises(ValueError, "scale has shape", "Are x and scale in each other's place"),
        call(X, np.float32(1)).raises(ValueError, "scale has shape", "did you mean epsilon"),
        call(X, foo=1).raises(TypeError, "keyword argument 'foo'", "x, scale, bias, epsilon"),
    ),
    "layer_norm": named(
        call(X, [8], SCALE, SCALE).raises(TypeError, "as in torch", "Leave it out"),
        call(X, (8,), SCALE).raises(TypeError, "as in torch", "Leave it out"),
        call(X, use_fast_variance=False).raises(TypeError, "'use_fast_variance'", "expected"),
    ),
}


# What no kernel serves anywhere: arguments, keywords, and the reason that an error gives where native is asked for by
# name. By default it runs.
NORM_WITHOUT_KERNEL = named(
    call(X, axis=0).has_no_kernel("trailing"),
    call(X, axis=(0, 2)).has_no_kernel("trailing"),
    call(X.astype("float16"), out_dtype="bfloat16").has_no_kernel("float16.*bfloat16"),
    call(jnp.ones((3, 0))).has_no_kernel("length 0"),
    call(jnp.ones((3, 4, 5, 8)), jnp.ones((3, 1, 5, 8))).has_no_kernel("not neighbours"),
    call(jnp.ones((3, 4, 5, 8)), jnp.ones((3, 1, 1, 8)), bias=jnp.ones((5, 8))).has_no_kernel("not neighbours"),
    call(jnp.ones((2, 8193)), jnp.ones((2, 8193))).has_no_kernel("8193 elements, more than 8192"),
    call(jnp.ones((2, 0, 8)), jnp.ones((0, 8))).has_no_kernel("no element"),
)
HALF, BRAIN = X.astype("float16"), X.astype("bfloat16")
RESIDUAL_WITHOUT_KERNEL = named(
    call(HALF, BRAIN, out_dtype="float16").has_no_kernel("x is float16 and residual bfloat16.*one of them float32"),
    call(X, BRAIN, out_dtype="float16").has_no_kernel("residual is bfloat16 and the result float16.*of them float32"),
)
LONG = jnp.ones((2, 16_385))
GATED_WITHOUT_KERNEL = named(
    call(LONG, LONG, **FIRST).has_no_kernel("rows of 16385 elements are normalised, .* at most 16384"),
    call(X, BRAIN, **FIRST).has_no_kernel("x is float32 and gate bfloat16; .* equal"),
    call(BRAIN, BRAIN, **FIRST, out_dtype="float32").has_no_kernel("x is bfloat16 and the result float32"),
)

# Of pairs.
GATED_ACTIVATION = named(
    call(jnp.ones((3, 7))).raises(ValueError, "x", (3, 7), "even", r"tuple \(gate, up\)"),
    call(jnp.ones((3, 3, 8)), axis=-2).raises(ValueError, "x", (3, 3, 8), r"\(..., 2, columns\)", "Leave axis out"),
    call(X, axis=1).raises(ValueError, "x", (3, 4, 8), "axis=1"),
    call(X, axis=0).raises(ValueError, "axis=0", (3, 4, 8), "-1", "-2"),
    call(X, axis=-4).raises(ValueError, "axis=-4", (3, 4, 8), "-2"),
    call(X[0, 0], axis=-2).raises(ValueError, "axis=-2", (8,)),
    call(X, axis=-1.0).raises(TypeError, "axis", "int", "-1.0"),
    call(X, axis=True).raises(TypeError, "axis", "int", "True"),
    call(X, axis=(-2, -1)).raises(TypeError, "axis", "int", (-2, -1)),
    call((X,)).raises(ValueError, "tuple of 1", r"\(gate, up\)"),
    call((X, X, X)).raises(ValueError, "tuple of 3", r"\(gate, up\)"),
    call((X, X), axis=-2).raises(ValueError, "axis=-2", r"tuple \(gate, up\)", "leave axis out"),
    call((X, None)).raises(TypeError, "up", "array", "NoneType"),
    call((None, X)).raises(TypeError, "gate", "array", "NoneType"),
    call((X.astype("int32"), X)).raises(TypeError, "gate", "floating", "int32"),
    call((jnp.ones(()), jnp.ones(()))).raises(ValueError, "gate", "at least one axis"),
    call((X, X[:2])).raises(ValueError, "up", (2, 4, 8), (3, 4, 8), r"broadcast_to\(up, gate.shape\)"),
    call((X, X[0])).raises(ValueError, "up", (4, 8), (3, 4, 8)),
    call(X, activation="mish").raises(
        ValueError, "activation", "'mish'", "'silu', 'gelu', 'gelu_exact', 'relu2' or 'sigmoid'"
    ),
    call(X, activation=jax.nn.relu).raises(ValueError, "activation", "'relu2'"),
    call(X, activation=None).raises(ValueError, "activation", "None", "'silu'"),
    call([X, X]).raises(TypeError, "got list", r"pass a tuple: \w+\(\(gate, up\)\)"),
)
ACTIVATION_WITHOUT_KERNEL = named(
    call(jnp.ones((3, 0))).has_no_kernel("length 0"),
    call((X, X.astype("bfloat16"))).has_no_kernel("gate is float32 and up bfloat16"),
    call(jnp.ones((3, 2, 0)), axis=-2).has_no_kernel("length 0"),
)

TWO, IMAGES, SQUARES = {"num_groups": 2}, jnp.ones((2, 64, 5, 5)), jnp.ones((2, 64, 4, 4))

GROUP = named(
    call(jnp.ones(8), **TWO).raises(ValueError, "x", (8,), "axis of examples", r"x\[None\]"),
    call(X).raises(ValueError, "neither of num_groups and group_size", "num_groups=32"),
    call(X, num_groups=2, group_size=4).raises(ValueError, "both of num_groups and group_size"),
    call(X, num_groups=3).raises(ValueError, "num_groups=3", (3, 4, 8), "-1"),
    call(X, group_size=3).raises(ValueError, "group_size=3", (3, 4, 8)),
    call(X, num_groups=32).raises(ValueError, "num_groups=32", "divisor"),
    call(X, num_groups=3, channel_axis=1).raises(ValueError, "num_groups=3", (3, 4, 8), "axis -2"),
    call(X, num_groups=0).raises(ValueError, "num_groups=0", "positive"),
    call(X, num_groups=-2).raises(ValueError, "num_groups=-2", "positive"),
    call(X, group_size=0).raises(ValueError, "group_size=0", "positive"),
    call(X, SCALE[:2], **TWO).raises(ValueError, "scale", (2,), (8,)),
    call(X, SCALE.reshape(2, 4), **TWO).raises(ValueError, "scale", r"scale.reshape\(-1\)"),
    call(X, SCALE[None, None], **TWO).raises(ValueError, "scale", r"scale.reshape\(-1\)"),
    call(X, X, **TWO).raises(ValueError, "scale", (3, 4, 8), "without them"),
    call(X, SCALE, jnp.ones((2, 8)), **TWO).raises(ValueError, "bias", (2, 8)),
    call(IMAGES, num_groups=32).raises(ValueError, "num_groups=32", (2, 64, 5, 5), "channel_axis=1 would fit"),
    call(IMAGES, group_size=16).raises(ValueError, "group_size=16", "channel_axis=1 would fit"),
    call(SQUARES, jnp.ones(64), **TWO).raises(ValueError, "scale", (64,), "channel_axis=1 would fit"),
    call(SQUARES, None, jnp.ones((2, 64)), **TWO).raises(ValueError, "bias", (2, 64), "channel_axis=1 would fit"),
    call(X, **TWO, activation="mish").raises(ValueError, "activation", "'mish'", "None, 'silu', 'relu' or 'gelu'"),
    call(X, **TWO, activation=partial(jax.nn.gelu, approximate=False)).raises(
        ValueError, "activation", "approximate=False", "of the result"
    ),
    call(X, **TWO, channel_axis=0).raises(ValueError, "channel_axis=0", (3, 4, 8), "examples"),
    call(X, **TWO, channel_axis=-3).raises(ValueError, "channel_axis=-3", "first"),
    call(X, **TWO, channel_axis=3).raises(ValueError, "axis", "3", "out of range"),
    call(X, **TWO, channel_axis=(1, 2)).raises(TypeError, "channel_axis", "int"),
    call(X, 2).raises(ValueError, "neither of num_groups", "num_groups=32"),
    call(X, reduction_axes=(1, 2)).raises(TypeError, "'reduction_axes'", "channel_axis"),
)
GROUP_WITHOUT_KERNEL = named(
    call(X[..., None], **TWO, channel_axis=2).has_no_kernel("channels are between"),
    call(X.astype("float16"), **TWO, out_dtype="bfloat16").has_no_kernel("float16.*bfloat16"),
    call(jnp.ones((3, 0, 8)), **TWO).has_no_kernel("length 0"),
)

# Arguments of Quantization; then calls of quantised norms.
E4M3, E8M0 = "float8_e4m3fn", "float8_e8m0fnu"
QUANTIZATION = named(
    call(None).raises(TypeError, "dtype", "None", "float8_e4m3fn, float8_e5m2, int8"),
    call("float99").raises(TypeError, "dtype", "float99", "expected float8_e4m3fn"),
    call(jnp.bfloat16).raises(TypeError, "bfloat16", "expected float8_e4m3fn"),
    call("float8_e4m3b11fnuz").raises(TypeError, "float8_e4m3b11fnuz", "expected"),
    call("uint8").raises(TypeError, "uint8", "expected"),
    call("int8", "channel").raises(ValueError, "granularity", "'channel'", "'token'", "'group'"),
    call("int8", None).raises(ValueError, "granularity", "None"),
    call("int8", "group", 16).raises(ValueError, "group_size", "32 or 64 or 128", "16"),
    call("int8", "group", 64.5).raises(ValueError, "group_size", "64.5"),
    call("int8", "group", True).raises(ValueError, "group_size", "True"),
    call("int8", "token", 64).raises(ValueError, "group_size=64", "'group'", "'token'"),
    call("int8", "token", None, True).raises(ValueError, "power_of_two", "floats", "int8", "leave"),
    call("int4", "token", None, True).raises(ValueError, "power_of_two", "floats", "int4"),
    call("float8_e5m2", "tensor", None, True).raises(ValueError, "power_of_two", "'tensor'", "leave"),
    call("int8", "tensor", None, False, 1.0).raises(ValueError, "max_scale", "'tensor'", "leave"),
    call("int8", "token", None, False, 0.0).raises(ValueError, "max_scale", r"2\*\*-126", "0.0"),
    call("int8", "token", None, False, -1).raises(ValueError, "max_scale", r"2\*\*-126", "-1"),
    call("int8", "token", None, False, 1e-39).raises(ValueError, "max_scale", r"2\*\*-126"),
    call("int8", "token", None, False, np.inf).raises(ValueError, "max_scale", "finite", "inf"),
    call("int8", "token", None, False, np.nan).raises(ValueError, "max_scale", "finite", "nan"),
    call(E4M3, scales_dtype=E8M0).raises(ValueError, "scales_dtype=float8_e8m0fnu", "groups.*'token'.*'group'"),
    call("int8", "group", scales_dtype=E8M0).raises(ValueError, "scales_dtype", "floats", "int8", "leave"),
    call(E4M3, "group", max_scale=3.0, scales_dtype=E8M0).raises(ValueError, "max_scale", "power of two", "3.0"),
    call(E4M3, "group", scales_dtype="float16").raises(TypeError, "scales_dtype", "float16", "float32, float8_e8m0fnu"),
    call("int8", scales_dtype="fp4").raises(TypeError, "scales_dtype", "'fp4'", "float32"),
    call("int8", "group", scales_layout="F").raises(ValueError, "scales_layout", "'F'", "'row'", "'column'"),
    call("int8", scales_layout="column").raises(ValueError, "scales_layout=column", "groups.*'token'.*'group'"),
    call("int8", "token", None, False, "1").raises(TypeError, "max_scale", "number", "'1'"),
)

ROWS = jnp.ones((3, 4, 192))
TENSOR, GROUPS = Quantization("int8", "tensor"), Quantization("int8", "group")
OF_64, of_tensor = Quantization("int8", "group", 64), partial(call, ROWS, quantization=TENSOR)
QUANTIZED = named(
    call(ROWS, quantization=GROUPS).raises(ValueError, "group_size 128", "divide", (3, 4, 192)),
    call(ROWS, quantization=GROUPS, axis=(-2, -1)).raises(ValueError, "'group'", "axis=-1", (-2, -1), "reshape"),
    call(ROWS, quantization=GROUPS, axis=0).raises(ValueError, "granularity='group'", r"\(-3,\)"),
    of_tensor().raises(ValueError, "'tensor'", "static_scale", "None"),
    call(ROWS, static_scale=1.0).raises(ValueError, "static_scale", "'token'", "leave"),
    call(ROWS, quantization=OF_64, static_scale=1.0).raises(ValueError, "static_scale", "'group'", "leave"),
    of_tensor(static_scale=jnp.ones(192)).raises(ValueError, "static_scale", "scalar", (192,), "'token'"),
    of_tensor(static_scale=jnp.int32(1)).raises(TypeError, "static_scale", "floating", "int32"),
    of_tensor(static_scale=0).raises(ValueError, "static_scale", "at least"),
    of_tensor(static_scale=1e-45).raises(ValueError, "static_scale", "at least", "1e-45"),
    of_tensor(static_scale=float("nan")).raises(ValueError, "static_scale", "finite", "nan"),
    of_tensor(static_scale="1").raises(TypeError, "static_scale", "number", "'1'"),
)

QUANTIZED_WITHOUT_KERNEL = named(
    call(X, axis=0).has_no_kernel("trailing"),
    call(X.astype("float16"), residual=X.astype("bfloat16")).has_no_kernel("float16.*bfloat16"),
    call(jnp.ones((3, 0))).has_no_kernel("length 0"),
    call(X, jnp.ones((4, 8))).has_no_kernel("quantises.*leading axes"),
)

# Two sequences of 3 tokens, with 4 heads of queries and 2 of keys.
Q, K, COS = jnp.ones((2, 3, 4, 8)), jnp.ones((2, 3, 2, 8)), jnp.ones((3, 4))
LONG_HEAD = jnp.ones((2, 1, 520))

ROTARY = named(
    call(jnp.ones(8), jnp.ones(8)).raises(ValueError, "heads_axis=-2", (8,), "head size"),
    call(Q[0, 0], K[0, 0], heads_axis=-3).raises(ValueError, "heads_axis=-3", (4, 8)),
    call(Q, K[..., :6]).raises(ValueError, "k has shape", (2, 3, 2, 6), r"\(2, 3, any, 8\)", (2, 3, 4, 8)),
    call(Q, K[:, :2]).raises(ValueError, "k has shape", (2, 2, 2, 8), r"\(2, 3, any, 8\)"),
    call(Q, K[0]).raises(ValueError, "k has shape", (3, 2, 8), r"\(2, 3, any, 8\)"),
    call(Q.swapaxes(1, 2), K.swapaxes(1, 2)).raises(ValueError, "k has shape", "heads_axis"),
    call(Q, K, SCALE, jnp.ones((4, 8))).raises(ValueError, "k_scale", (4, 8), (8,), (2, 8)),
    call(Q, K, SCALE, normalize=False).raises(ValueError, "q_scale", "normalize=False", "None"),
    call(Q, K, rotary_dim=3).raises(ValueError, "rotary_dim=3", "even", "2 to 8", (2, 3, 4, 8)),
    call(Q, K, rotary_dim=10).raises(ValueError, "rotary_dim=10", "even", "2 to 8"),
    call(Q, K, rotary_dim=0).raises(ValueError, "rotary_dim=0", "even", "2 to 8"),
    call(Q[..., :7], K[..., :7]).raises(ValueError, "last axis of q", (2, 3, 4, 7), "odd", "rotary_dim"),
    call(Q, K, cos=COS).raises(ValueError, "cos is given without sin", "both or neither"),
    call(Q, K, sin=COS).raises(ValueError, "sin is given without cos", "both or neither"),
    call(Q, K, positions=jnp.arange(3), cos=COS, sin=COS).raises(
        ValueError, "positions and the tables cos and sin", "one of the two", "Leave positions out"
    ),
    call(Q, K, frequencies=jnp.ones(4), cos=COS, sin=COS).raises(
        ValueError, "frequencies and the tables", "Leave frequencies out"
    ),
    call(Q, K, cos=COS[:, :3], sin=COS[:, :3]).raises(
        ValueError, "cos has shape", (3, 3), "rotary_dim / 2 = 4", (2, 3), (2, 3, 4, 8)
    ),
    call(Q, K, cos=COS, sin=COS[:2]).raises(ValueError, "sin has shape", (2, 4), (2, 3)),
    call(Q, K, cos=COS[:, None], sin=COS[:, None]).raises(ValueError, "cos has", (3, 1, 4), (2, 3), "axis for heads"),
    call(Q, K, cos=COS[:, :2], sin=COS[:, :2]).raises(ValueError, "cos", "pass rotary_dim"),
    call(Q, K, cos=jnp.ones(()), sin=COS).raises(ValueError, "cos has shape", ()),
    call(Q, K, cos=COS.astype("int32"), sin=COS).raises(TypeError, "cos", "floating", "int32"),
    call(Q, K, positions=jnp.arange(2)).raises(ValueError, "positions has", (2,), (2, 3), r"positions\[:, None\]"),
    call(Q[0, 0], K[0, 0]).raises(ValueError, "without an axis of tokens", "pass positions"),
    call(Q, K, frequencies=jnp.ones(8)).raises(ValueError, "frequencies has shape", (8,), (4,), "rotary_dim"),
)
ROTARY_WITHOUT_KERNEL = named(
    call(Q, K.astype("bfloat16")).has_no_kernel("q is float32 and k bfloat16"),
    call(LONG_HEAD, LONG_HEAD).has_no_kernel("heads of 520 elements"),
)

# The same of one product, whose heads are 4, 2 and 2.
QKV = jnp.ones((2, 3, 8, 16))
of_heads = partial(call, heads=4, kv_heads=2)
OF_PRODUCT = named(
    of_heads(jnp.ones(())).raises(ValueError, "qkv has shape", (), "Reshape qkv"),
    of_heads(QKV[:, :, :7]).raises(
        ValueError, "qkv has shape", (2, 3, 7, 16), r"\(\.\.\., tokens, 8, head size\)", "heads .* kv_heads = 8"
    ),
    of_heads(jnp.ones((2, 3, 100))).raises(
        ValueError, (2, 3, 100), r"\(batch, tokens, 8 \* head size\)", "at most three axes"
    ),
    of_heads(jnp.ones((2, 2, 3, 128))).raises(
        ValueError, (2, 2, 3, 128), r"\(\.\.\., tokens, 8, head size\)", "at most three axes", "Reshape qkv"
    ),
    of_heads(QKV[0]).raises(ValueError, (3, 8, 16), "may be the last axis but one", (1, 3, 8, 16), (3, 8, 8, 2)),
    of_heads(QKV[0, 0], positions=0).raises(ValueError, (8, 16), "the last axis but one", (1, 1, 8, 16), (1, 8, 8, 2)),
    call(QKV, heads=0, kv_heads=4).raises(ValueError, "heads must be positive", "0"),
    call(QKV, heads=10, kv_heads=-1).raises(ValueError, "kv_heads must be positive", "-1"),
    of_heads(QKV, jnp.ones((8, 16))).raises(ValueError, "q_scale", (8, 16), (16,), "head size of qkv", (4, 16)),
    of_heads(QKV, None, jnp.ones((4, 16))).raises(ValueError, "k_scale", (4, 16), (16,), (2, 16)),
    of_heads(QKV.reshape(2, 3, 128), SCALE).raises(ValueError, "q_scale", (8,), (16,), r"\(2, 3, 8, 16\) by heads"),
    of_heads(QKV, jnp.ones(16), normalize=False).raises(ValueError, "q_scale", "normalize=False", "None"),
    of_heads(QKV[..., :7]).raises(ValueError, "last axis of qkv", (2, 3, 8, 7), "odd", "rotary_dim"),
    of_heads(QKV, rotary_dim=18).raises(ValueError, "rotary_dim=18", "2 to 16", "qkv"),
    of_heads(QKV, cos=jnp.ones((2, 8)), sin=jnp.ones((2, 8))).raises(ValueError, "cos has", (2, 8), r"\(2, 3\) of qkv"),
    of_heads(QKV, positions=jnp.arange(3), cos=jnp.ones((3, 8)), sin=jnp.ones((3, 8))).raises(
        ValueError, "positions and the tables cos and sin", "Leave positions out"
    ),
    of_heads(QKV, positions=jnp.arange(2)).raises(ValueError, "positions has shape", (2,), r"\(2, 3\) of qkv"),
    of_heads(QKV[0, 0], jnp.ones(16)).raises(ValueError, "qkv has shape", "an axis of tokens", "pass positions"),
    of_heads(Q, K, K, None, SCALE).raises(TypeError, "takes 4 positional arguments", "5 were given"),
    of_heads(QKV, heads_axis=-3).raises(TypeError, "heads_axis", "qk_norm_rotary"),
)
PRODUCT_WITHOUT_KERNEL = named(call(jnp.ones((2, 1, 3, 520)), heads=1, kv_heads=1).has_no_kernel("heads of 520"))

KERNEL, BIAS = jnp.ones((8, 20)), jnp.ones(20)

SOFTMAX = named(
    call(X, causal=True, axis=0).raises(ValueError, "causal", "axis=-1", r"\(-3,\)"),
    call(X, causal=True, axis=(-2, -1)).raises(ValueError, "causal", (-2, -1), "where"),
    call(jnp.ones(8), causal=True).raises(ValueError, "causal", (8,)),
    call(X, offset=1).raises(ValueError, "offset", "causal=True"),
    call(X, window=8).raises(ValueError, "window", "causal=True"),
    call(X, causal=True, offset=1.0).raises(TypeError, "offset", "integers", "1.0"),
    call(X, causal=True, offset=True).raises(TypeError, "offset", "int", "True"),
    call(X, causal=True, offset=jnp.ones(3, "bool")).raises(TypeError, "offset", "bool"),
    call(X, causal=True, offset=jnp.ones((3, 4), "int32")).raises(ValueError, "offset", (3, 4), "leading", (3,)),
    call(X, causal=True, offset=jnp.ones(2, "int32")).raises(ValueError, "offset", (2,), (3,)),
    call(X, causal=True, window=0).raises(ValueError, "window", "positive", "None"),
    call(X, causal=True, window=2.0).raises(TypeError, "window", "int", "2.0"),
)
CROSS_ENTROPY = named(
    call(X, X.astype("int32")).raises(ValueError, "labels", (3, 4, 8), r"expected \(3, 4\)"),
    call(X, LABELS, axis=0).raises(ValueError, "labels", (3, 4), r"expected \(4, 8\)"),
    call(X, LABELS, axis=(-2, -1)).raises(ValueError, "labels", (3, 4), r"expected \(3,\)", r"the axes \(-2, -1\)"),
    call(X, LABELS, X > 0).raises(TypeError, "axis", r"shape \(3, 4, 8\)", "is it where"),
    call(jnp.ones((4, 4)), LABELS[0], where=jnp.ones(4, "bool")).raises(
        ValueError, "where", (4,), r"where\[:, None\] for rows", r"where\[None\] for classes"
    ),
    call(jnp.ones((4, 4, 4)), LABELS[0], axis=(1, 2), where=jnp.ones(4, "bool")).raises(
        ValueError, "where", r"where\[:, None, None\] for rows", r"where\[None, None\] for classes"
    ),
    call(jnp.ones((3, 4, 4)), LABELS, where=jnp.ones(4, "bool")).raises(
        ValueError, "where", r"where\[None, :, None\] for rows", r"where\[None, None\] for classes"
    ),
    call(LABELS, X).raises(TypeError, "logits are int32 and labels float32", "each other's place"),
    call(jnp.ones((2, 5, 4, 8)), jnp.zeros((2, 4, 8), "int32")).raises(
        ValueError, "labels", r"expected \(2, 5, 4\)", "axis=1 would fit"
    ),
)

SOFTMAX_WITHOUT_KERNEL = named(
    call(X, axis=0).has_no_kernel("trailing"),
    call(X, axis=(-2, -1)).has_no_kernel(r"\(-2, -1\) together, kernels take one"),
    call(X.astype("float16"), out_dtype="bfloat16").has_no_kernel("float16.*bfloat16"),
    call(jnp.ones((3, 0))).has_no_kernel("length 0"),
    call(BRAIN, logit_scale=jnp.float32(2)).has_no_kernel("half type times a traced logit_scale are float32"),
)
CROSS_ENTROPY_WITHOUT_KERNEL = named(
    call(X, jnp.zeros((4, 8), "int32"), axis=0).has_no_kernel("trailing"),
    call(jnp.ones((3, 0)), jnp.zeros(3, "int32")).has_no_kernel("length 0"),
    call(BRAIN, LABELS, logit_scale=jnp.float32(2)).has_no_kernel("half type times a traced logit_scale are float32"),
)
LINEAR = named(
    call(X, KERNEL.T, LABELS).raises(ValueError, "kernel", (20, 8), r"expected \(8, classes\)", r"kernel\.T"),
    call(X, jnp.ones((8, 2, 10)), LABELS).raises(ValueError, "kernel", (8, 2, 10)),
    call(X, LABELS, KERNEL).raises(TypeError, "kernel is int32 and labels float32", "each other's place"),
    call(LABELS, KERNEL, X).raises(TypeError, "x is int32 and labels float32", "each other's place"),
    call(KERNEL, X, LABELS).raises(ValueError, "kernel", "x and kernel in each other's place"),
    call(KERNEL.T[:6].T, jnp.ones((5, 8)), LABELS[0]).raises(ValueError, "x and kernel in each other's place"),
    call(X, KERNEL, LABELS, bias=BIAS[1:]).raises(ValueError, "bias", (19,), r"expected \(20,\)", (8, 20), "Reshape"),
    call(X, KERNEL[:, :4], LABELS, where=jnp.ones(4, bool)).raises(
        ValueError, "where", (4,), (3, 4), (3, 4, 4), r"where\[None, :, None\] for rows or where\[None, None\] for"
    ),
    call(X, KERNEL, LABELS, row_weights=jnp.ones(3)).raises(
        ValueError, "row_weights", (3,), r"expected \(3, 4\)", (3, 4, 8), r"broadcast_to\(row_weights\[:, None\], lab"
    ),
    call(X, KERNEL, LABELS, row_weights=BIAS).raises(ValueError, (20,), r"w\[labels\]"),
    call(X, KERNEL, LABELS, row_weights=jnp.ones(5)).raises(ValueError, (5,), "broadcast"),
    call(X, KERNEL, LABELS, row_weights=LABELS == 0).raises(TypeError, "row_weights", "bool", "astype"),
    call(X, KERNEL, LABELS, reduction="max").raises(ValueError, "reduction", "max", "'mean'"),
    call(X, KERNEL, LABELS, rows_per_chunk=0).raises(ValueError, "rows_per_chunk", "positive"),
    call(X, KERNEL, LABELS, rows_per_chunk=2.0).raises(TypeError, "rows_per_chunk", "int", "2.0"),
)

TABLE, IDS = jnp.ones((5, 8)), jnp.zeros(3, "int32")
EMBEDDING = named(
    call(X, LABELS).raises(ValueError, "table has shape", (3, 4, 8), r"expected \(rows, columns\)", "Reshape table"),
    call(SCALE, LABELS).raises(ValueError, "table has shape", (8,), r"expected \(rows, columns\)"),
    call(LABELS, TABLE).raises(TypeError, "table is int32 and ids float32", "each other's place"),
    call(TABLE.astype("int8"), LABELS).raises(TypeError, "table", "floating-point dtype", "int8", "table.astype"),
    call(TABLE, LABELS, dtype="float64").raises(TypeError, "dtype=float64", "x64"),
    call(TABLE, LABELS, out_sharding="a").raises(TypeError, "out_sharding", "PartitionSpec", "str"),
    call(inputs=LABELS).raises(TypeError, "'inputs'", r"did you mean ids\?"),
    call(weight=TABLE).raises(TypeError, "'weight'", r"did you mean table\?"),
    call(TABLE, LABELS, mode="clip").raises(TypeError, "'mode'", "embedding has no mode: .* NaN", "jax.numpy.clip"),
)
SEGMENT_SUM = named(
    call(X, LABELS, 5).raises(ValueError, "segment_ids have shape", (3, 4), r"expected \(3,\)", (3, 4, 8)),
    call(X, IDS[:2], 5).raises(ValueError, "segment_ids have shape", (2,), r"expected \(3,\)"),
    call(X[0, 0, 0], IDS, 5).raises(ValueError, "data", "at least one axis"),
    call(IDS, X, 5).raises(TypeError, "data is int32 and segment_ids float32", "each other's place"),
    call(X, IDS, 5, unique_indices=True).raises(TypeError, "'unique_indices'", "has no unique_indices: leave it out"),
    call(X, IDS, 5, mode="drop").raises(TypeError, "'mode'", "numbers that no segment has are in no sum"),
    call(X, IDS, dim_size=5).raises(TypeError, "'dim_size'", r"did you mean num_segments\?"),
)
KEY = jax.random.key(0)
SAMPLE = named(
    call(X).raises(ValueError, "neither of key and uniform", "also where temperature is 0"),
    call(X, KEY, uniform=0.5).raises(ValueError, "both key and uniform"),
    call(X, temperature=0).raises(ValueError, "neither of key and uniform", r"jax.random.key\(seed\)"),
    call(X, 3).raises(TypeError, "key", "int", r"jax.random.key\(seed\)"),
    call(X, X[0, 0]).raises(TypeError, "key", "float32", "uniform=..."),
    call(X, jax.random.split(KEY, 3)).raises(ValueError, "key has shape", (3,), "one key", "jax.vmap"),
    call(X, jax.random.split(jax.random.PRNGKey(0), 3)).raises(ValueError, "key has shape", (3, 2), "jax.vmap"),
    call(X, uniform=1.0).raises(ValueError, "uniform", r"\[0, 1\)", "1.0"),
    call(X, uniform=jnp.ones(3)).raises(ValueError, "uniform has shape", (3,), (3, 4), (3, 4, 8)),
    call(X, KEY, temperature=-1).raises(ValueError, "temperature", "negative", "-1"),
    call(X, KEY, temperature=None).raises(TypeError, "temperature", "number", "None"),
    call(X, KEY, temperature=float("inf")).raises(ValueError, "temperature", "finite", "inf"),
    call(X, KEY, top_k=-2).raises(ValueError, "top_k", "0 or -1 for all", "-2"),
    call(X, KEY, top_k=2.0).raises(TypeError, "top_k", "int", "2.0", "None keeps all"),
    call(X, KEY, top_k=SCALE).raises(TypeError, "top_k", "integers", "float32"),
    call(X, KEY, top_k=LABELS[0, :3]).raises(ValueError, "top_k has shape", (3,), (3, 4), "leading axes"),
    call(X, KEY, top_p="0.9").raises(TypeError, "top_p", "number", "0.9"),
    call(X, KEY, top_p=float("nan")).raises(ValueError, "top_p", "finite", "nan"),
    call(X, KEY, top_p=LABELS > 0).raises(TypeError, "top_p", "numbers", "bool"),
    call(X, KEY, min_p=-0.1).raises(ValueError, "min_p", "negative", "-0.1"),
    call(X, KEY, where=jnp.ones(3, bool)).raises(ValueError, "where", (3,), (3, 4, 8)),
    call(X, rng=KEY).raises(TypeError, "'rng'", r"did you mean key\?"),
    call(X, KEY, logit_scale=2).raises(TypeError, "'logit_scale'", "did you mean temperature"),
)
# What has no row in the table.
OF_NO_ROW = {"Quantization": QUANTIZATION, "linear_cross_entropy": LINEAR}
OF_NO_ROW |= {"embedding": EMBEDDING, "segment_sum": SEGMENT_SUM, "sample": SAMPLE}
