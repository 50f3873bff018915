"""Bad input of each op, and what no kernel serves anywhere."""

import re

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen
from statements import call

X, SCALE = jnp.ones((3, 4, 8)), jnp.ones(8)


class Integers:
    """No array, but jax.numpy makes one of it."""

    def __jax_array__(self):
        return jnp.ones(8, "int32")


NORM = {
    "x of integers": call(jnp.ones((3, 8), "int32")).raises(TypeError, "x", "floating", "int32", "astype"),
    "x of booleans": call(jnp.ones((3, 8), "bool")).raises(TypeError, "x", "floating", "bool"),
    "complex x": call(jnp.ones((3, 8), "complex64")).raises(TypeError, "x", "floating", "complex64"),
    "x of 8 bits": call(X.astype("float8_e4m3fn")).raises(TypeError, "x", "floating", "float8_e4m3fn", "astype"),
    "x of text": call("rows").raises(TypeError, "x", "array", "str"),
    "x of lists": call([1.0, 2.0]).raises(TypeError, "x", "array", "list", "asarray"),
    "no x": call(None).raises(TypeError, "x", "array", "NoneType"),
    "scalar x": call(jnp.ones(())).raises(ValueError, "x", "at least one axis"),
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
    "scale of integers": call(X, jnp.ones(8, "int8")).raises(TypeError, "scale", "floating", "int8"),
    "complex scale": call(X, jnp.ones(8, "complex64")).raises(TypeError, "scale", "floating", "complex64"),
    "scale of lists": call(X, [1.0] * 8).raises(TypeError, "scale", "array", "list"),
    "scale of what becomes integers": call(X, Integers()).raises(TypeError, "scale", "floating", "int32"),
    "scale of another axis": call(X, SCALE[:4]).raises(ValueError, "scale", r"\(4,\)", "axis=1 would fit"),
    "scale for two axes": call(X, SCALE, axis=(-2, -1)).raises(ValueError, "scale", r"\(8,\)", r"\(4, 8\)"),
    "long bias": call(X, SCALE, bias=jnp.ones(9)).raises(ValueError, "bias", r"\(9,\)", r"\(8,\)"),
    "bias of integers": call(X, SCALE, bias=jnp.ones(8, "int32")).raises(TypeError, "bias", "floating", "int32"),
    "axis above": call(X, axis=3).raises(ValueError, "axis", "3", "out of range", "-3 <= axis < 3"),
    "axis below": call(X, axis=-4).raises(ValueError, "axis", "-4", "out of range"),
    "axis repeated": call(X, axis=(-1, -1)).raises(ValueError, "axis", r"\(-1, -1\)", "twice"),
    "axis repeated by another name": call(X, axis=(2, -1)).raises(ValueError, "axis", r"\(2, -1\)", "twice"),
    "no axis": call(X, axis=()).raises(ValueError, "axis", "empty", "at least one"),
    "axis of a float": call(X, axis=1.5).raises(TypeError, "axis", "int", "1.5"),
    "axis of a bool": call(X, axis=True).raises(TypeError, "axis", "int", "True"),
    "axis of None": call(X, axis=None).raises(TypeError, "axis", "int", "None"),
    "axis of text": call(X, axis="last").raises(TypeError, "axis", "int", "last"),
    "negative epsilon": call(X, epsilon=-1e-6).raises(ValueError, "epsilon", "negative", "-1e-06"),
    "epsilon of a huge int": call(X, epsilon=10**400).raises(ValueError, "epsilon", "finite", "inf"),
    "NaN epsilon": call(X, epsilon=float("nan")).raises(ValueError, "epsilon", "finite", "nan"),
    "infinite epsilon": call(X, epsilon=float("inf")).raises(ValueError, "epsilon", "finite", "inf"),
    "epsilon of text": call(X, epsilon="small").raises(TypeError, "epsilon", "number", "small"),
    "epsilon of digits": call(X, epsilon="1e-6").raises(TypeError, "epsilon", "number", "1e-6"),
    "epsilon of a bool": call(X, epsilon=True).raises(TypeError, "epsilon", "number", "True"),
    "epsilon beyond float32": call(X, epsilon=1e39).raises(ValueError, "epsilon", "finite", "1e\\+39"),
    "epsilon of None": call(X, epsilon=None).raises(TypeError, "epsilon", "number", "None"),
    "epsilon of an array": call(X, epsilon=np.ones(2)).raises(TypeError, "epsilon", "number"),
    "NaN offset": call(X, SCALE, scale_offset=float("nan")).raises(ValueError, "scale_offset", "finite", "nan"),
    "offset of None": call(X, SCALE, scale_offset=None).raises(TypeError, "scale_offset", "number", "None"),
    "order of None": call(X, SCALE, multiply_before_cast=None).raises(
        TypeError, "multiply_before_cast", "bool", "None"
    ),
    "order of text": call(X, SCALE, multiply_before_cast="no").raises(
        TypeError, "multiply_before_cast", "bool", "'no'"
    ),
    "axis_name of a list in a list": call(X, axis_name=[["a"]]).raises(TypeError, "axis_name", "name of an axis"),
    "unknown implementation": call(X, implementation="cuda").raises(
        ValueError, "implementation", "cuda", "native", "jnp"
    ),
    "implementation of a list": call(X, implementation=["jnp"]).raises(ValueError, "implementation", "native"),
    "integer out_dtype": call(X, out_dtype="int8").raises(TypeError, "out_dtype", "floating", "int8"),
    "8-bit out_dtype": call(X, out_dtype="float8_e5m2").raises(TypeError, "out_dtype", "floating", "float8_e5m2"),
    "unknown out_dtype": call(X, out_dtype="float99").raises(TypeError, "out_dtype", "float99"),
    "float64 result without x64": call(X, out_dtype="float64").raises(TypeError, "out_dtype", "float64", "x64"),
}

# Of a norm of x + residual, beside these.
RESIDUAL = {
    "residual of another shape": call(X, X[:2]).raises(
        ValueError, "residual", r"\(2, 4, 8\)", r"\(3, 4, 8\)", "broadcast_to"
    ),
    "residual that would broadcast": call(X, X[0]).raises(ValueError, "residual", r"\(4, 8\)", r"\(3, 4, 8\)"),
    "residual of integers": call(X, X.astype("int32")).raises(TypeError, "residual", "floating", "int32", "astype"),
    "residual of 8 bits": call(X, X.astype("float8_e4m3fn")).raises(TypeError, "residual", "floating", "float8_e4m3fn"),
    "no residual": call(X, None).raises(TypeError, "residual", "array", "NoneType"),
}
PADDING = {
    "padding to zero": call(X, X, pad_to=0).raises(ValueError, "pad_to", "positive", "0"),
    "padding to less": call(X, X, pad_to=-8).raises(ValueError, "pad_to", "positive", "-8"),
    "padding to a float": call(X, X, pad_to=8.0).raises(TypeError, "pad_to", "int", "8.0"),
    "padding to a bool": call(X, X, pad_to=True).raises(TypeError, "pad_to", "int", "True"),
    "padding to text": call(X, X, pad_to="8").raises(TypeError, "pad_to", "int", "8"),
    "padding of several axes": call(X, X, pad_to=8, axis=(-2, -1)).raises(
        ValueError, "pad_to", "axis=-1", r"\(-2, -1\)", "leave pad_to out"
    ),
    "padding of another axis": call(X, X, pad_to=8, axis=0).raises(ValueError, "pad_to", "axis=-1", r"\(-3,\)"),
}

FIRST = {"gate_first": True}
GATED = {
    "no gate": call(X, None, **FIRST).raises(TypeError, "gate", "array", "NoneType"),
    "gate of another shape": call(X, X[:2], **FIRST).raises(
        ValueError, "gate", r"\(2, 4, 8\)", r"\(3, 4, 8\)", "broadcast_to"
    ),
    "gate that would broadcast": call(X, X[0], **FIRST).raises(ValueError, "gate", r"\(4, 8\)", r"\(3, 4, 8\)"),
    "gate of integers": call(X, X.astype("int32"), **FIRST).raises(TypeError, "gate", "floating", "int32", "astype"),
    "gate of 8 bits": call(X, X.astype("float8_e4m3fn"), **FIRST).raises(
        TypeError, "gate", "floating", "float8_e4m3fn"
    ),
    "x without axes": call(jnp.ones(()), jnp.ones(()), **FIRST).raises(ValueError, "x", "at least one axis"),
    "scale of a group": call(X, X, SCALE[:4], **FIRST, group_size=4).raises(ValueError, "scale", r"\(4,\)", r"\(8,\)"),
    "scale of groups": call(X, X, SCALE.reshape(2, 4), **FIRST, group_size=4).raises(
        ValueError, "scale", r"\(2, 4\)", r"\(8,\)", "group_size"
    ),
    "group that does not divide": call(X, X, **FIRST, group_size=3).raises(ValueError, "group_size 3", r"\(3, 4, 8\)"),
    "group longer than a row": call(X, X, **FIRST, group_size=16).raises(ValueError, "group_size 16", "divisor"),
    "group of nothing": call(X, X, **FIRST, group_size=0).raises(ValueError, "group_size 0", "positive"),
    "negative group": call(X, X, **FIRST, group_size=-4).raises(ValueError, "group_size -4", "positive"),
    "group of a float": call(X, X, **FIRST, group_size=4.0).raises(TypeError, "group_size", "int", "4.0"),
    "group of a bool": call(X, X, **FIRST, group_size=True).raises(TypeError, "group_size", "int", "True"),
    "unknown activation": call(X, X, **FIRST, activation="gelu").raises(
        ValueError, "activation", "'gelu'", "'silu' or 'sigmoid'"
    ),
    "activation of another function": call(X, X, **FIRST, activation=jnp.tanh).raises(
        ValueError, "activation", "'silu' or 'sigmoid'", "of the result"
    ),
    "order of a number": call(X, X, gate_first=1).raises(TypeError, "gate_first", "bool", "1", "Mamba2"),
    "order of None": call(X, X, gate_first=None).raises(TypeError, "gate_first", "bool", "None"),
    "negative epsilon": call(X, X, **FIRST, epsilon=-1.0).raises(ValueError, "epsilon", "negative"),
    "NaN offset": call(X, X, **FIRST, scale_offset=float("nan")).raises(ValueError, "scale_offset", "finite"),
    "integer out_dtype": call(X, X, **FIRST, out_dtype="int8").raises(TypeError, "out_dtype", "floating", "int8"),
    "unknown implementation": call(X, X, **FIRST, implementation="cuda").raises(ValueError, "implementation", "cuda"),
}


class Tensor:
    """As torch's."""

    def __dlpack__(self):
        raise AssertionError("not converted by itself")


class TorchDtype:
    def __repr__(self):
        return "torch.bfloat16"


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


BOX, LOGICAL_BOX = linen.Partitioned(SCALE, names=("e",)), linen.LogicallyPartitioned(SCALE, names=("e",))
STRUCT = jax.ShapeDtypeStruct((3, 4, 8), "float32")
# What is passed for an array: the remedy.
NO_ARRAYS = {
    "a list": ([1.0] * 8, r"got list; pass jax.numpy.asarray\(scale\)"),
    "a tuple": ((1.0,) * 8, r"got tuple; pass jax.numpy.asarray\(scale\)"),
    "a float": (1e-6, "got float; did you mean epsilon=1e-06 or scale_offset=1e-06"),
    "an int": (1, "got int; did you mean epsilon=1 or scale_offset=1"),
    "text": ("scale", "got str; pass an array of jax.numpy"),
    "parameters": ({"scale": SCALE}, r"got dict; pass one of the arrays in it, as scale\['scale'\]"),
    "a shape and dtype": (jax.ShapeDtypeStruct((8,), "float32"), "got ShapeDtypeStruct; .*jax.eval_shape"),
    "a box of Linen": (BOX, r"got Partitioned; .*scale.unbox\(\).*flax.core.meta.unbox"),
    "another box of Linen": (LOGICAL_BOX, "got LogicallyPartitioned; .*flax.core.meta.unbox"),
    "a tensor of torch": (Tensor(), r"got Tensor; pass jax.numpy.from_dlpack\(scale\), .*detach"),
}
SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "f16": "float16", "fp32": "float32", "f32": "float32"}


def no_arrays(*args, **keywords):
    return {
        f"{what} for scale": call(*args, value, **keywords).raises(TypeError, "scale must be an array", said)
        for what, (value, said) in NO_ARRAYS.items()
    }


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
        "a shape for x": call(STRUCT).raises(TypeError, "x must be an array", "ShapeDtypeStruct", "jax.eval_shape"),
        **no_arrays(X),
        **misspelt(
            X,
            eps="epsilon",
            epsilom="epsilon",
            variance_epsilon="epsilon",
            weight="scale",
            gamma="scale",
            Scale="scale",
            beta="bias",
            dtype="out_dtype",
            dim="axis",
            axes="axis",
            normalized_shape="axis",
            scale_ofset="scale_offset",
            zero_centered_gamma="scale_offset=1.0",
            backend="implementation",
        ),
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
        **{
            f"out_dtype {short}": call(X, out_dtype=short).raises(TypeError, "out_dtype", f"did you mean {name}")
            for short, name in SHORT_DTYPES.items()
        },
        "out_dtype of torch": call(X, out_dtype=TorchDtype()).raises(
            TypeError, "torch.bfloat16", "did you mean bfloat16"
        ),
        "out_dtype of Python's float": call(X, out_dtype=float).raises(TypeError, "float64", "or pass float32"),
        "out_dtype of nothing known": call(X, out_dtype="float99").raises(TypeError, "bfloat16, float16, float32"),
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
        **misspelt(
            X, eps="epsilon", layer_norm_eps="epsilon", weight="scale", b="bias", beta="bias", dtype="out_dtype"
        ),
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
        "a list for residual": call(X, [X]).raises(TypeError, "residual", "list", r"asarray\(residual\)"),
        "bias by position": call(X, X, SCALE, SCALE).raises(TypeError, rf"{FOURTH} bias\? Then pass bias="),
        "epsilon by position": call(X, X, SCALE, 1e-5).raises(TypeError, "Then pass epsilon=1e-05"),
        "residual twice": call(X, X, residual=X).raises(TypeError, "multiple values for argument 'residual'"),
        "skip for no residual": call(X, skip=X).raises(TypeError, "did you mean residual"),
        **no_arrays(X, X),
        **misspelt(X, X, eps="epsilon", weight="scale", gamma="scale", beta="bias", dtype="out_dtype", pad="pad_to"),
        "an activation": call(X, X, activation="silu").raises(TypeError, "is an argument of", "gated_rms_norm"),
    },
    "add_layer_norm": {
        "scale for residual": call(X, SCALE).raises(ValueError, "residual has shape", r"Is it the scale\?"),
        "no residual": call(X).raises(TypeError, "required argument: 'residual'", "jaxnorm.layer_norm"),
        "epsilon by position": call(X, X, SCALE, SCALE, 1e-5).raises(TypeError, "fifth epsilon", "epsilon=1e-05"),
        "an array too many": call(X, X, SCALE, SCALE, X).raises(
            TypeError, "5 were given", "Pass the others by name: eps"
        ),
        **misspelt(X, X, eps="epsilon", weight="scale", beta="bias", dtype="out_dtype"),
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
        **no_arrays(X, X, **FIRST),
        **misspelt(
            X,
            X,
            eps="epsilon",
            weight="scale",
            dtype="out_dtype",
            norm_before_gate="gate_first=not norm_before_gate",
            activations="activation",
            groupsize="group_size",
        ),
    },
    "gated_rms_norm_quantized": {
        "scale for gate": call(X, SCALE, **FIRST).raises(ValueError, "gate has shape", r"Is it the scale\?"),
        "no gate": call(X, **FIRST).raises(TypeError, "required argument: 'gate'", "use jaxnorm.rms_norm"),
        "no order": call(X, X).raises(TypeError, "required argument: 'gate_first'", "Mamba2"),
        "a dtype of the result": call(X, X, **FIRST, dtype="int8").raises(TypeError, "'dtype'", "that of quantization"),
        "residual": call(X, X, residual=X).raises(TypeError, "keyword argument 'residual'", "add it to x first"),
        "bias": call(X, X, bias=SCALE).raises(TypeError, "keyword argument 'bias'", "with jaxnorm.quantize"),
        **misspelt(X, X, eps="epsilon", weight="scale", smooth="smooth_scale", groupsize="group_size"),
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
        **no_arrays(X),
        **misspelt(X, eps="epsilon", weight="scale", beta="bias", quant="quantization"),
    },
    "layer_norm_quantized": {
        "residual by position": call(X, SCALE, SCALE, X).raises(TypeError, rf"{FOURTH} residual\? Then pass residual="),
        "epsilon by position": call(X, SCALE, SCALE, 1e-5).raises(TypeError, "Then pass epsilon=1e-05"),
        "a dtype of the result": call(X, dtype="int8").raises(TypeError, "'dtype'", "that of quantization"),
        **misspelt(X, eps="epsilon", weight="scale", smooth="smooth_scale", straightthrough="straight_through"),
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
