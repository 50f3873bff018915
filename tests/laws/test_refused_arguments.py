"""Arguments that no function takes, and names that none has: the same words by every function that has the argument."""

import inspect
import pydoc
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bad_calls import LABELS, SCALE, STRUCT, TOKENS, X, in_order
from flax import linen
from table import OPS

import jaxnorm

POSITIONAL = {
    "rms_norm": ["x", "scale"],
    "layer_norm": ["x", "scale", "bias"],
    "add_rms_norm": ["x", "residual", "scale"],
    "add_layer_norm": ["x", "residual", "scale", "bias"],
    "rms_norm_add_rms_norm": ["x", "residual", "post_scale", "scale"],
    "gated_activation": ["x"],
    "gated_activation_quantized": ["x"],
    "gated_rms_norm": ["x", "gate", "scale"],
    "gated_rms_norm_quantized": ["x", "gate", "scale"],
    "group_norm": ["x", "scale", "bias"],
    "softmax": ["x"],
    "log_softmax": ["x"],
    "softmax_cross_entropy_with_integer_labels": ["logits", "labels", "axis", "where"],
    "linear_cross_entropy": ["x", "kernel", "labels"],
    "qk_norm_rotary": ["q", "k", "q_scale", "k_scale", "positions"],
    "qkv_norm_rotary": ["qkv", "q_scale", "k_scale", "positions"],
    "rms_norm_quantized": ["x", "scale"],
    "layer_norm_quantized": ["x", "scale", "bias"],
}


class Integers:
    """No array, but jax.numpy makes one of it."""

    def __jax_array__(self):
        return jnp.ones(8, "int32")


class Tensor:
    """As torch's."""

    def __dlpack__(self):
        raise AssertionError("not converted by itself")


class TorchDtype:
    def __repr__(self):
        return "torch.bfloat16"


SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "f16": "float16", "fp32": "float32", "f32": "float32"}
# A valid call: what is required by a function, by the names of its parameters.
VALID = {
    **dict.fromkeys(("x", "logits", "residual", "gate"), X),
    "q": TOKENS,
    "k": TOKENS[:, :, :1],
    "qkv": jnp.ones((2, 3, 4, 8)),
    "heads": 2,
    "kv_heads": 1,
    "labels": LABELS,
    "kernel": jnp.ones((8, 5)),
    "gate_first": True,
    "quantization": jaxnorm.Quantization("int8"),
}
WEIGHTS = ("scale", "bias", "post_scale", "smooth_scale", "q_scale", "k_scale")
ARRAYS = ("x", "logits", "residual", "gate", "q", "k", "qkv", "kernel", *WEIGHTS)
NAN = float("nan")


def no_float(dtype):
    return jnp.ones(8, dtype), TypeError, ("must have a floating-point dtype", f"got {dtype}", r"{name}\.astype")


# What no function takes: the value, the error, and what is said, in this order; by whatever stands for an array or a
# weight, and by the name of the argument.
NO_ARRAY = (
    *map(no_float, ("int32", "bool", "complex64", "float8_e4m3fn")),
    (Integers(), TypeError, ("floating", "int32")),
    ([1.0] * 8, TypeError, ("must be an array", r"got list; pass jax.numpy.asarray\({name}\)")),
    ("rows", TypeError, ("must be an array", "got str; pass an array of jax.numpy")),
    (STRUCT, TypeError, ("must be an array", "ShapeDtypeStruct", "jax.eval_shape")),
)
BOX, LOGICAL_BOX = linen.Partitioned(SCALE, names=("e",)), linen.LogicallyPartitioned(SCALE, names=("e",))
NO_WEIGHTS = tuple(
    (value, TypeError, ("must be an array", said))
    for value, said in (
        ((1.0,) * 8, r"got tuple; pass jax.numpy.asarray\({name}\)"),
        (1e-6, "got float; did you mean epsilon=1e-06 or scale_offset=1e-06"),
        (1, "got int; did you mean epsilon=1 or scale_offset=1"),
        ({"scale": SCALE}, r"got dict; pass one of the arrays in it, as {name}\['scale'\]"),
        (BOX, r"got Partitioned; .*{name}.unbox\(\).*flax.core.meta.unbox"),
        (LOGICAL_BOX, "got LogicallyPartitioned; .*flax.core.meta.unbox"),
        (Tensor(), r"got Tensor; pass jax.numpy.from_dlpack\({name}\), .*detach"),
    )
)
SCALAR = (jnp.ones(()), ValueError, ("at least one axis",))
FLAG = tuple((value, TypeError, ("bool", repr(value))) for value in (1, None, "no"))
REFUSED = {
    "axis": (
        *((axis, ValueError, (str(axis), "out of range", "-3 <= axis < 3")) for axis in (3, -4)),
        *((axis, ValueError, (re.escape(str(axis)), "twice")) for axis in ((-1, -1), (2, -1))),
        ((), ValueError, ("empty", "at least one")),
        *((axis, TypeError, ("int", str(axis))) for axis in (1.5, True, None, "last")),
    ),
    "epsilon": (
        (-1e-6, ValueError, ("negative", "-1e-06")),
        *((value, ValueError, ("finite", said)) for value, said in ((10**400, "inf"), (NAN, "nan"), (1e39, r"1e\+39"))),
        *((value, TypeError, ("number", str(value))) for value in ("small", "1e-6", True, None)),
        (np.ones(2), TypeError, ("number",)),
    ),
    "scale_offset": ((NAN, ValueError, ("finite", "nan")), (None, TypeError, ("number", "None"))),
    "out_dtype": (
        *((dtype, TypeError, ("floating", dtype)) for dtype in ("int8", "float8_e5m2")),
        ("float99", TypeError, ("float99", "bfloat16, float16, float32")),
        ("float64", TypeError, ("float64", "x64")),
        (float, TypeError, ("float64", "or pass float32")),
        (TorchDtype(), TypeError, ("torch.bfloat16", "did you mean bfloat16")),
        *((short, TypeError, (f"did you mean {name}",)) for short, name in SHORT_DTYPES.items()),
    ),
    "implementation": (
        ("cuda", ValueError, ("cuda", "native", "xla")),
        (["xla"], ValueError, ("native",)),
    ),
    "axis_name": (
        ([["a"]], TypeError, ("name of an axis",)),
        ((), ValueError, ("at least one axis",)),
        ("a", ValueError, ("no axis 'a' is bound here", "jax.shard_map")),
    ),
    "activation": (
        ("mish", ValueError, ("'mish'", "'silu'")),
        (jnp.tanh, ValueError, ("'silu'", "of the result")),
        (np.ones(2), ValueError, ("'silu'",)),
    ),
    **dict.fromkeys(("multiply_before_cast", "gate_first", "interleaved", "return_v", "causal"), FLAG),
    **dict.fromkeys(
        ("pad_to", "num_groups", "group_size", "heads", "kv_heads", "rotary_dim"),
        tuple((value, TypeError, ("int", repr(value))) for value in (2.0, True, "8")),
    ),
    "quantization": tuple((value, TypeError, ("Quantization", repr(value))) for value in (None, "int8")),
}
# Whose axis, or other argument, is one that they check themselves.
OWN = {
    *((name, "axis") for name in ("gated_activation", "gated_activation_quantized")),
    *((name, "scale") for name in ("softmax", "log_softmax")),
}


def refused(function, argument):
    """What this argument of this function cannot be."""
    if (function, argument) in OWN or argument not in {*ARRAYS, *REFUSED}:
        return ()
    if argument in REFUSED:
        return REFUSED[argument]
    absent = (None, TypeError, ("must be an array", "NoneType"))
    return (
        *NO_ARRAY,
        *[SCALAR] * (argument in ("x", "logits")),
        *[absent] * (argument in required_by(function)),
        *(NO_WEIGHTS if argument in WEIGHTS else ()),
    )


def parameters(function):
    return inspect.signature(getattr(jaxnorm, function)).parameters.values()


def required_by(function):
    return [p.name for p in parameters(function) if p.default is p.empty]


def each_argument(function):
    return [p.name for p in parameters(function) if refused(function, p.name)]


@pytest.mark.parametrize(("op", "argument"), [(op, name) for op in POSITIONAL for name in each_argument(op)])
def test_what_no_function_takes(op, argument):
    call = {name: VALID[name] for name in required_by(op)} | ({"num_groups": 2} if op == "group_norm" else {})
    call |= {"num_groups": None} if argument == "group_size" and op == "group_norm" else {}
    first, function = next(iter(call)), getattr(jaxnorm, op)
    for value, error, parts in refused(op, argument):
        said = in_order(op, (argument, *(part.format(name=argument) for part in parts)))
        with pytest.raises(error, match=said):
            function(**call | {argument: value})
        if argument != first:
            with pytest.raises(error, match=said):
                jax.eval_shape(lambda x, value=value: function(**call | {first: x, argument: value}), call[first])


def test_every_function_is_in_the_table():
    assert POSITIONAL.keys() == {*(op.public for op in OPS), "linear_cross_entropy"}


# Names that other libraries have, or that are mistyped, and what is meant where a function takes that.
MISSPELT = {
    **dict.fromkeys(("eps", "epsilom", "variance_epsilon", "layer_norm_eps"), "epsilon"),
    **dict.fromkeys(("weight", "gamma", "Scale"), "scale"),
    **dict.fromkeys(("beta", "b"), "bias"),
    **dict.fromkeys(("dim", "axes", "normalized_shape"), "axis"),
    **dict.fromkeys(("act", "nonlinearity", "activations"), "activation"),
    **dict.fromkeys(("groups", "num_group", "n_groups"), "num_groups"),
    **dict.fromkeys(("channels_per_group", "groupsize"), "group_size"),
    **dict.fromkeys(("z_loss_weight", "lse_square_scale"), "z_loss"),
    **dict.fromkeys(("rope_theta", "base"), "theta"),
    **dict.fromkeys(("num_heads", "num_attention_heads"), "heads"),
    **dict.fromkeys(("num_kv_heads", "num_key_value_heads"), "kv_heads"),
    "dtype": "out_dtype",
    "inputs": "x",
    "backend": "implementation",
    "pad": "pad_to",
    "quant": "quantization",
    "scale_ofset": "scale_offset",
    "zero_centered_gamma": "scale_offset=1.0",
    "smooth": "smooth_scale",
    "norm_before_gate": "gate_first=not norm_before_gate",
    "straightthrough": "straight_through",
    "mask": "where",
    "is_causal": "causal",
    "casual": "causal",
    "targets": "labels",
    "loss_mask": "weights",
    "smoothing": "label_smoothing",
    "ignore_label": "ignore_index",
    "final_logit_softcapping": "soft_cap",
    "temperature": "logit_scale=1 / temperature",
    "return_lse": "return_logsumexp",
    "position_ids": "positions",
    "inv_freq": "frequencies",
    "rotary_ndims": "rotary_dim",
    "norm": "normalize",
    "q_norm": "q_scale",
    "k_weight": "k_scale",
}


@pytest.mark.parametrize("function", POSITIONAL)
def test_a_misspelt_keyword(function):
    names = [p.name for p in parameters(function)]
    meant = {theirs: ours for theirs, ours in MISSPELT.items() if ours.partition("=")[0] in names}
    assert meant
    for theirs, ours in meant.items():
        ours = "weights" if (theirs, "weights" in names) == ("weight", True) else ours
        said = (f"unexpected keyword argument '{theirs}'", re.escape(f"did you mean {ours}?"))
        with pytest.raises(TypeError, match=in_order(function, said)):
            getattr(jaxnorm, function)(*map(VALID.get, required_by(function)), **{theirs: 1})


@pytest.mark.parametrize("function", POSITIONAL)
def test_signatures_are_seen_from_outside(function):
    parameters = inspect.signature(getattr(jaxnorm, function)).parameters.values()
    assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == POSITIONAL[function]
    assert all(p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in parameters)
    assert f"{function}({POSITIONAL[function][0]}: Any, " in pydoc.plain(pydoc.render_doc(getattr(jaxnorm, function)))
