"""Bad input of each op, and what no kernel serves anywhere."""

import re

import jax
import jax.numpy as jnp
import numpy as np
from statements import call

X, SCALE = jnp.ones((3, 4, 8)), jnp.ones(8)
TOKENS, LABELS = jnp.ones((2, 3, 2, 8)), jnp.zeros((3, 4), "int32")


def in_order(function, parts) -> str:
    """A pattern of what this function's error says."""
    return rf"(?s)^{function}: " + ".*".join(("", *parts))


NORM = {
    "short scale": call(X, jnp.ones(7)).raises(ValueError, "scale", r"\(7,\)", r"expected \(8,\)", r"\(3, 4, 8\)"),
    "scalar scale": call(X, jnp.ones(())).raises(ValueError, "scale", r"\(\)", r"\(8,\)"),
    "scale of length 1": call(X, jnp.ones(1)).raises(ValueError, "scale", r"\(1,\)", r"\(8,\)"),
    "scale of a column": call(X, jnp.ones((8, 1))).raises(ValueError, "scale", r"\(8, 1\)", r"\(8,\)"),
    "scale for other heads": call(X, jnp.ones((3, 8))).raises(ValueError, "scale", r"\(3, 8\)", r"\(8,\)", r"\(3, 4\)"),
    "scale with more axes than x": call(X, jnp.ones((1, 1, 1, 8))).raises(
        ValueError, "scale", r"\(1, 1, 1, 8\)", r"\(8,\)"
    ),
    "scale for the heads of another axis": call(X, jnp.ones((4, 3)), axis=0).raises(
        ValueError, "scale", r"\(4, 3\)", r"expected \(3,\)", "Reshape"
    ),
    "bias for other heads": call(X, SCALE, bias=jnp.ones((2, 1, 8))).raises(
        ValueError, "bias", r"\(2, 1, 8\)", r"\(3, 4\)"
    ),
    "scale of another axis": call(X, SCALE[:4]).raises(ValueError, "scale", r"\(4,\)", "axis=1 would fit"),
    "scale for two axes": call(X, SCALE, axis=(-2, -1)).raises(ValueError, "scale", r"\(8,\)", r"\(4, 8\)"),
    "long bias": call(X, SCALE, bias=jnp.ones(9)).raises(ValueError, "bias", r"\(9,\)", r"\(8,\)"),
}

# Of a norm of x + residual, beside these.
RESIDUAL = {
    "residual of another shape": call(X, X[:2]).raises(
        ValueError, "residual", r"\(2, 4, 8\)", r"\(3, 4, 8\)", "broadcast_to"
    ),
    "residual that would broadcast": call(X, X[0]).raises(ValueError, "residual", r"\(4, 8\)", r"\(3, 4, 8\)"),
}
PADDING = {
    "padding to zero": call(X, X, pad_to=0).raises(ValueError, "pad_to", "positive", "0"),
    "padding to less": call(X, X, pad_to=-8).raises(ValueError, "pad_to", "positive", "-8"),
    "padding of several axes": call(X, X, pad_to=8, axis=(-2, -1)).raises(
        ValueError, "pad_to", "axis=-1", r"\(-2, -1\)", "leave pad_to out"
    ),
    "padding of another axis": call(X, X, pad_to=8, axis=0).raises(ValueError, "pad_to", "axis=-1", r"\(-3,\)"),
}

FIRST = {"gate_first": True}
GATED = {
    "gate of another shape": call(X, X[:2], **FIRST).raises(
        ValueError, "gate", r"\(2, 4, 8\)", r"\(3, 4, 8\)", "broadcast_to"
    ),
    "gate that would broadcast": call(X, X[0], **FIRST).raises(ValueError, "gate", r"\(4, 8\)", r"\(3, 4, 8\)"),
    "scale of a group": call(X, X, SCALE[:4], **FIRST, group_size=4).raises(ValueError, "scale", r"\(4,\)", r"\(8,\)"),
    "scale of groups": call(X, X, SCALE.reshape(2, 4), **FIRST, group_size=4).raises(
        ValueError, "scale", r"\(2, 4\)", r"\(8,\)", "group_size"
    ),
    "group that does not divide": call(X, X, **FIRST, group_size=3).raises(ValueError, "group_size 3", r"\(3, 4, 8\)"),
    "group longer than a row": call(X, X, **FIRST, group_size=16).raises(ValueError, "group_size 16", "divisor"),
    "group of nothing": call(X, X, **FIRST, group_size=0).raises(ValueError, "group_size 0", "positive"),
    "negative group": call(X, X, **FIRST, group_size=-4).raises(ValueError, "group_size -4", "positive"),
    "unknown activation": call(X, X, **FIRST, activation="gelu").raises(
        ValueError, "activation", "'gelu'", "'silu' or 'sigmoid'"
    ),
    "order of a number": call(X, X, gate_first=1).raises(TypeError, "gate_first", "bool", "1", "Mamba2"),
}


def misspelt(*args, _expected="did you mean {}", **names):
    """Calls with names that other libraries have, or that are mistyped, and what is meant."""
    return {
        f"{theirs} for {ours}": call(*args, **{theirs: 1}).raises(
            TypeError, f"unexpected keyword argument '{theirs}'", _expected.format(re.escape(ours))
        )
        for theirs, ours in names.items()
    }


def of_others(*args, **names):
    """Calls with keywords of other functions, which the error names."""
    return misspelt(*args, _expected="did you mean {}, which take", **names)


STRUCT = jax.ShapeDtypeStruct((3, 4, 8), "float32")


THIRD, FOURTH = "Is the third the", "Is the fourth the"
# By the name of the public function: what is taken for an argument of it.
MISUSE = {
    "rms_norm": {
        "residual by position": call(X, SCALE, X).raises(
            TypeError,
            r"takes 2 positional arguments \(x, scale\) but 3 were given",
            rf"{THIRD} residual\? Then use add_rms_norm\(x, residual, scale\)",
            rf"{THIRD} bias\? Then pass bias=",
        ),
        "residual by position, scale by name": call(X, X, scale=SCALE).raises(
            TypeError, "multiple values for argument 'scale'", r"second the residual\? Then use add_rms_norm\("
        ),
        "epsilon by position": call(X, SCALE, 1e-5).raises(TypeError, r"third epsilon\? Then pass epsilon=1e-05"),
        "all by position": call(X, SCALE, SCALE, 1e-5).raises(TypeError, "but 4 were given", "Then pass bias="),
        "torch's order": call(X, (8,), SCALE).raises(TypeError, "shape of the features, as in torch", "Leave it out"),
        "torch's order of a number": call(X, 8, SCALE).raises(TypeError, "as in torch", "Leave it out"),
        "a shape for scale": call(X, (8,)).raises(TypeError, "scale must be an array", "as in torch"),
        "x twice": call(X, x=X).raises(TypeError, "multiple values for argument 'x'", "Pass it once"),
        "nothing": call().raises(TypeError, "missing a required argument: 'x'", "array to normalise"),
        "x and scale in each other's place": call(SCALE, X).raises(
            ValueError, "scale has shape", "Are x and scale in each other's place"
        ),
        "a scalar for scale": call(X, np.float32(1)).raises(ValueError, "scale has shape", "did you mean epsilon"),
        **of_others(X, residual="add_rms_norm or rms_norm_quantized or rms_norm_add_rms_norm"),
        **of_others(
            X,
            pad_to="add_rms_norm",
            **dict.fromkeys(("gate", "z", "gate_first", "group_size"), "gated_rms_norm or gated_rms_norm_quantized"),
            quantization="rms_norm_quantized or gated_rms_norm_quantized",
            smooth_scale="rms_norm_quantized or gated_rms_norm_quantized",
        ),
        "a keyword like no other": call(X, foo=1).raises(
            TypeError, "keyword argument 'foo'", "x, scale, bias, epsilon"
        ),
    },
    "layer_norm": {
        "residual by position": call(X, SCALE, SCALE, X).raises(
            TypeError,
            r"\(x, scale, bias\) but 4 were given",
            rf"{FOURTH} residual\? Then use add_layer_norm\(x, residual",
        ),
        "torch's order": call(X, [8], SCALE, SCALE).raises(TypeError, "as in torch", "Leave it out"),
        "torch's order without a bias": call(X, (8,), SCALE).raises(TypeError, "as in torch", "Leave it out"),
        "epsilon for bias": call(X, SCALE, 1e-5).raises(
            TypeError, "bias must be an array", "did you mean epsilon=1e-05"
        ),
        "epsilon by position": call(X, SCALE, SCALE, 1e-5).raises(TypeError, "Then pass epsilon=1e-05"),
        "residual by name": call(X, residual=X).raises(TypeError, "add_layer_norm or layer_norm_quantized"),
        **of_others(X, quantization="layer_norm_quantized", pad_to="add_layer_norm"),
        "Flax's use_fast_variance": call(X, use_fast_variance=False).raises(
            TypeError, "'use_fast_variance'", "expected"
        ),
    },
    "add_rms_norm": {
        "scale for residual": call(X, SCALE).raises(
            ValueError, r"residual has shape \(8,\)", r"Is it the scale\?", r"\(x, residual, scale\)"
        ),
        "no residual": call(X).raises(TypeError, "required argument: 'residual'", "use jaxnorm.rms_norm"),
        "None for residual": call(X, None, SCALE).raises(TypeError, "residual", "NoneType", "use jaxnorm.rms_norm"),
        "bias by position": call(X, X, SCALE, SCALE).raises(TypeError, rf"{FOURTH} bias\? Then pass bias="),
        "epsilon by position": call(X, X, SCALE, 1e-5).raises(TypeError, "Then pass epsilon=1e-05"),
        "residual twice": call(X, X, residual=X).raises(TypeError, "multiple values for argument 'residual'"),
        "skip for no residual": call(X, skip=X).raises(TypeError, "did you mean residual"),
        "an activation": call(X, X, activation="silu").raises(TypeError, "is an argument of", "gated_rms_norm"),
    },
    "add_layer_norm": {
        "scale for residual": call(X, SCALE).raises(ValueError, "residual has shape", r"Is it the scale\?"),
        "no residual": call(X).raises(TypeError, "required argument: 'residual'", "jaxnorm.layer_norm"),
        "epsilon by position": call(X, X, SCALE, SCALE, 1e-5).raises(TypeError, "fifth epsilon", "epsilon=1e-05"),
        "an array too many": call(X, X, SCALE, SCALE, X).raises(
            TypeError, "5 were given", "Pass the others by name: eps"
        ),
    },
    "gated_rms_norm": {
        "scale for gate": call(X, SCALE, **FIRST).raises(ValueError, "gate has shape", r"Is it the scale\?"),
        "no gate": call(X, **FIRST).raises(TypeError, "required argument: 'gate'", "use jaxnorm.rms_norm"),
        "no order": call(X, X).raises(TypeError, "required argument: 'gate_first'", "Mamba2"),
        "an array too many": call(X, X, SCALE, SCALE, **FIRST).raises(
            TypeError, "4 were given", "name: gate_first, act"
        ),
        "epsilon by position": call(X, X, SCALE, 1e-5, **FIRST).raises(TypeError, "Then pass epsilon=1e-05"),
        "bias": call(X, X, bias=SCALE).raises(TypeError, "keyword argument 'bias'", "add it to the result"),
        "beta": call(X, X, beta=SCALE).raises(TypeError, "keyword argument 'beta'", "add it to the result"),
        "residual": call(X, X, residual=X).raises(TypeError, "keyword argument 'residual'", "add it to x first"),
        "axis": call(X, X, axis=-1).raises(TypeError, "keyword argument 'axis'", "last axis"),
        "rounding": call(X, X, multiply_before_cast=True).raises(TypeError, "rounded once", "leave it out"),
    },
    "gated_rms_norm_quantized": {
        "scale for gate": call(X, SCALE, **FIRST).raises(ValueError, "gate has shape", r"Is it the scale\?"),
        "no gate": call(X, **FIRST).raises(TypeError, "required argument: 'gate'", "use jaxnorm.rms_norm"),
        "no order": call(X, X).raises(TypeError, "required argument: 'gate_first'", "Mamba2"),
        "a dtype of the result": call(X, X, **FIRST, dtype="int8").raises(TypeError, "'dtype'", "that of quantization"),
        "residual": call(X, X, residual=X).raises(TypeError, "keyword argument 'residual'", "add it to x first"),
        "bias": call(X, X, bias=SCALE).raises(TypeError, "keyword argument 'bias'", "with jaxnorm.quantize"),
    },
    "rms_norm_quantized": {
        "residual by position": call(X, SCALE, X).raises(
            TypeError, rf"{THIRD} residual\? Then pass residual=", rf"{THIRD} bias\? Then pass bias="
        ),
        "epsilon by position": call(X, SCALE, 1e-5).raises(TypeError, "Then pass epsilon=1e-05"),
        "scale for residual": call(X, residual=SCALE).raises(ValueError, "residual has shape", r"Is it the scale\?"),
        "a dtype of the result": call(X, dtype="int8").raises(TypeError, "'dtype'", "that of quantization"),
        "an out_dtype": call(X, out_dtype="int8").raises(TypeError, "'out_dtype'", "that of quantization"),
        "rounding": call(X, multiply_before_cast=True).raises(TypeError, "rounded once", "leave it out"),
        "padding": call(X, pad_to=8).raises(TypeError, "'pad_to'", "an argument of add_layer_norm, add_rms_norm"),
    },
    "layer_norm_quantized": {
        "residual by position": call(X, SCALE, SCALE, X).raises(TypeError, rf"{FOURTH} residual\? Then pass residual="),
        "epsilon by position": call(X, SCALE, SCALE, 1e-5).raises(TypeError, "Then pass epsilon=1e-05"),
        "a dtype of the result": call(X, dtype="int8").raises(TypeError, "'dtype'", "that of quantization"),
    },
}


# What no kernel serves anywhere: arguments, keywords, and the reason that an error gives where native is asked for by
# name. By default it runs.
NORM_WITHOUT_KERNEL = {
    "a leading axis": call(X, axis=0).has_no_kernel("trailing"),
    "axes with a gap": call(X, axis=(0, 2)).has_no_kernel("trailing"),
    "half types mixed": call(X.astype("float16"), out_dtype="bfloat16").has_no_kernel("float16.*bfloat16"),
    "rows of no elements": call(jnp.ones((3, 0))).has_no_kernel("length 0"),
    "heads that are not neighbours": call(jnp.ones((3, 4, 5, 8)), jnp.ones((3, 1, 5, 8))).has_no_kernel(
        "not neighbours"
    ),
    "scale and bias of heads that are not neighbours": call(
        jnp.ones((3, 4, 5, 8)), jnp.ones((3, 1, 1, 8)), bias=jnp.ones((5, 8))
    ).has_no_kernel("not neighbours"),
    "heads with long rows": call(jnp.ones((2, 8193)), jnp.ones((2, 8193))).has_no_kernel(
        "8193 elements, more than 8192"
    ),
    "no heads": call(jnp.ones((2, 0, 8)), jnp.ones((0, 8))).has_no_kernel("no element"),
}
HALF, BRAIN = X.astype("float16"), X.astype("bfloat16")
RESIDUAL_WITHOUT_KERNEL = {
    "half types mixed": call(HALF, BRAIN, out_dtype="float16").has_no_kernel(
        "x is float16 and residual bfloat16.*one of them float32"
    ),
    "half types mixed in sum and y": call(X, BRAIN, out_dtype="float16").has_no_kernel(
        "residual is bfloat16 and the result float16.*one of them float32"
    ),
}
LONG = jnp.ones((2, 16_385))
GATED_WITHOUT_KERNEL = {
    "long rows": call(LONG, LONG, **FIRST).has_no_kernel("rows of 16385 elements are normalised, .* at most 16384"),
    "a gate of another dtype": call(X, BRAIN, **FIRST).has_no_kernel("x is float32 and gate bfloat16; .* equal"),
    "a result of another dtype": call(BRAIN, BRAIN, **FIRST, out_dtype="float32").has_no_kernel(
        "x is bfloat16 and the result float32"
    ),
}
