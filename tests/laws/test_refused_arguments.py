"""Arguments that no function takes, and names that none has: the same words by every function that has the argument."""

import inspect
import pydoc
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bad_calls import LABELS, SCALE, VALID, X, in_order, parameters, required_by, valid
from flax import linen
from table import EVERY

import jaxnorm
from jaxnorm import linen as jaxnorm_linen, nnx
from jaxnorm.ops.misuse import FORMER, are_related


def table(text):
    """What a text of `name: words; name: words` says of each name."""
    return dict(entry.split(": ") for entry in re.split(r";\s", text.strip()))


POSITIONAL = {
    function: names.split()
    for function, names in table("""
rms_norm: x scale; layer_norm: x scale bias; add_rms_norm: x residual scale; add_layer_norm: x residual scale bias;
rms_norm_add_rms_norm: x residual post_scale scale; gated_activation: x; gated_activation_quantized: x;
gated_rms_norm: x gate scale; gated_rms_norm_quantized: x gate scale; group_norm: x scale bias; softmax: x;
log_softmax: x; softmax_cross_entropy_with_integer_labels: logits labels axis where;
linear_cross_entropy: x kernel labels; qk_norm_rotary: q k q_scale k_scale positions;
qkv_norm_rotary: qkv q_scale k_scale positions; rms_norm_quantized: x scale; layer_norm_quantized: x scale bias;
quantize: x quantization; quantize_kernel: kernel quantization; quantized_dot: x kernel; float8_linear: x kernel;
embedding: table ids; segment_sum: data segment_ids num_segments; sample: logits key
""").items()
}
# Of the table.
OF_NO_ROW = {"linear_cross_entropy", "quantize", "quantize_kernel"}
OF_NO_ROW |= {"embedding", "segment_sum", "sample"}


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
WEIGHTS = ("scale", "bias", "post_scale", "smooth_scale", "q_scale", "k_scale")
ARRAYS = ("x", "logits", "residual", "gate", "q", "k", "qkv", "kernel", "table", *WEIGHTS)
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
    (jax.ShapeDtypeStruct((8,), "float32"), TypeError, ("must be an array", "ShapeDtypeStruct", "jax.eval_shape")),
)
BOX, LOGICAL_BOX = linen.Partitioned(SCALE, names=("e",)), linen.LogicallyPartitioned(SCALE, names=("e",))
NO_WEIGHTS = tuple(
    (value, TypeError, ("must be an array", said))
    for value, said in (
        ((1.0,) * 8, r"got tuple; pass jax.numpy.asarray\({name}\)"),
        (jaxnorm.AddedNorm(X, X), r"got AddedNorm; it is several results; pass one .*, {name}.y or {name}.residual"),
        (1e-6, "got float; did you mean epsilon=1e-06 or scale_offset=1e-06"),
        (1, "got int; did you mean epsilon=1 or scale_offset=1"),
        ({"scale": SCALE}, r"got dict; pass one of the arrays in it, as {name}\['scale'\]"),
        (BOX, r"got Partitioned; .*{name}.unbox\(\).*flax.core.meta.unbox"),
        (LOGICAL_BOX, "got LogicallyPartitioned; .*flax.core.meta.unbox"),
        (Tensor(), r"got Tensor; pass jax.numpy.from_dlpack\({name}\), .*detach"),
    )
)
SCALAR = (jnp.ones(()), ValueError, ("at least one axis",))
# What no number of a row is.
NO_NUMBERS = (
    (LABELS * 1.0, TypeError, ("integers", "float32", "number rows")),
    (LABELS == 0, TypeError, ("integers", "bool")),
    ([0.0], TypeError, ("integers", "float32")),
    ("rows", TypeError, ("integers", "str; pass an array of jax.numpy")),
    (None, TypeError, ("integers", "NoneType; pass the number")),
)
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
    "implementation": (("cuda", ValueError, ("cuda", "native", "xla")), (["xla"], ValueError, ("native",))),
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
    "labels": (
        *((LABELS * 1.0, TypeError, ("integers", "float32", "argmax")), (LABELS == 0, TypeError, ("integers", "bool"))),
        *(([[0] * 4] * 3, TypeError, ("integers", "list", "asarray")), (None, TypeError, ("integers", "NoneType"))),
        (LABELS[:2], ValueError, ((2, 4), (3, 4), (3, 4, 8))),
    ),
    "where": (
        *((value, TypeError, ("booleans", "!= 0")) for value in (jnp.ones(8, "int32"), jnp.ones(8))),
        ([True] * 8, TypeError, ("booleans", "list", "asarray")),
        *((jnp.ones(shape, bool), ValueError, (shape, "broadcasts|expected")) for shape in ((7,), (1, 3, 4, 8))),
    ),
    "label_smoothing": (
        *((value, ValueError, ("0 to 1", str(float(value)))) for value in (-0.1, 2)),
        ("much", TypeError, ("number", "much")),
    ),
    "z_loss": ((-1e-4, ValueError, ("negative", "-0.0001")),),
    "logit_scale": (
        (jnp.ones(8), ValueError, ((8,), r"expected \(\)", "one number")),
        (jnp.int32(2), TypeError, ("floating", "int32", "astype")),
        (NAN, ValueError, ("finite", "nan")),
    ),
    "soft_cap": ((0, ValueError, ("positive", "0.0", "None")), ("30", TypeError, ("number", "30"))),
    "ignore_index": tuple((value, TypeError, ("int", str(value))) for value in (-100.0, True)),
    "positions": (
        *((jnp.ones(3, dtype), TypeError, ("integers", dtype)) for dtype in ("bool", "complex64")),
        ([0, 1, 2], TypeError, ("list", "asarray")),
    ),
    "theta": ((-1.0, ValueError, ("positive", "-1.0")), ("1e4", TypeError, ("number", "'1e4'"))),
    "normalize": (("l2", ValueError, ("'rms'", "'layer'", "'l2'")), (None, TypeError, ("False", "None"))),
    "heads_axis": (
        *((axis, ValueError, (str(axis), "expected -2", "-3")) for axis in (0, -1)),
        *((axis, TypeError, ("int", str(axis))) for axis in (None, True)),
    ),
    "data": (
        NO_ARRAY[3],
        *NO_ARRAY[5:],
        (None, TypeError, ("must be an array", "pass the array of rows")),
    ),  # integers have sums, too
    "dtype": (("int8", TypeError, ("floating", "int8")), (TorchDtype(), TypeError, ("did you mean bfloat16",))),
    "out_sharding": ((("a",), TypeError, ("PartitionSpec", "got tuple")),),
    **dict.fromkeys(("ids", "segment_ids"), NO_NUMBERS),
    "num_segments": (
        *((n, TypeError, ("int", repr(n), "how many sums")) for n in (2.0, True)),
        (-1, ValueError, ("negative", "-1")),
    ),
    **dict.fromkeys(("multiply_before_cast", "gate_first", "interleaved", "causal", "indices_are_sorted"), FLAG),
    **dict.fromkeys(("straight_through", "with_unquantized", "return_logsumexp"), FLAG),
    **dict.fromkeys(
        ("pad_to", "num_groups", "group_size", "heads", "kv_heads", "rotary_dim"),
        tuple((value, TypeError, ("int", repr(value))) for value in (2.0, True, "8")),
    ),
    "quantization": tuple((value, TypeError, ("Quantization", repr(value))) for value in (None, "int8")),
}
# What is said where one of these is missing.
REMEDIES = {"x": "array to normalise", "residual": "use jaxnorm.rms_norm", "gate": "use jaxnorm.rms_norm"}
REMEDIES |= {"gate_first": "Mamba2", "labels": "numbers of the classes"}
REMEDIES |= {"kernel": "use jaxnorm.softmax_cross_entropy_with_integer_labels", "k": "queries alone"}
REMEDIES |= {"qkv": "the one product", "quantization": "quantization=jaxnorm.Quantization"}
# Which say of a scalar that K is missing.
PRODUCTS = ("quantized_dot", "float8_linear")
# Whose axis, or other argument, is one that they check themselves.
OWN = {*((name, "axis") for name in ("gated_activation", "gated_activation_quantized")), ("quantized_dot", "kernel")}


def refused(function, argument):
    """What this argument of this function cannot be."""
    if (function, argument) in OWN or argument not in {*ARRAYS, *REFUSED}:
        return ()
    if argument in REFUSED:
        return REFUSED[argument]
    absent = (None, TypeError, ("must be an array", "NoneType", REMEDIES.get(argument, "pass")))
    return (
        *NO_ARRAY,
        *[SCALAR] * (argument in ("x", "logits") and function not in PRODUCTS),
        *[absent] * (argument in required_by(function)),
        *(NO_WEIGHTS if argument in WEIGHTS else ()),
    )


def each_argument(function):
    return [p.name for p in parameters(function) if refused(function, p.name)]


@pytest.mark.parametrize(("op", "argument"), [(op, name) for op in POSITIONAL for name in each_argument(op)])
def test_what_no_function_takes(op, argument):
    call = valid(op)
    call |= {"num_groups": None} if argument == "group_size" and op == "group_norm" else {}
    first, function = next(iter(call)), getattr(jaxnorm, op)
    for value, error, parts in refused(op, argument):
        said = in_order(op, (argument, *(part.format(name=argument) if part is str(part) else part for part in parts)))
        with pytest.raises(error, match=said):
            function(**call | {argument: value})
        if argument != first:
            with pytest.raises(error, match=said):
                jax.eval_shape(lambda x, value=value: function(**call | {first: x, argument: value}), call[first])


def test_every_function_is_in_the_table():
    assert POSITIONAL.keys() == {*(op.public for op in EVERY), *OF_NO_ROW}


each_function = pytest.mark.parametrize("function", POSITIONAL)


@each_function
def test_a_missing_argument(function):
    for name in required_by(function):
        others = {other: value for other, value in valid(function).items() if other != name}
        said = (f"missing a required argument: '{name}'", REMEDIES.get(name, f"pass {name}=|pass the"))
        with pytest.raises(TypeError, match=in_order(function, said)):
            getattr(jaxnorm, function)(**others)


@each_function
def test_an_argument_too_many(function):
    positional = POSITIONAL[function]
    args, names = [VALID.get(name, SCALE) for name in positional], [p.name for p in parameters(function)]
    by_name, count, called = names[len(args) :], len(args), getattr(jaxnorm, function)
    number = next((name for name in ("theta", "epsilon", "axis", "label_smoothing") if name in by_name), None)
    it = f"Is the {('second', 'third', 'fourth', 'fifth', 'sixth')[count - 1]}"
    arrays = [f"{it} the {name}\\? Then pass {name}=" for name in ("residual", "bias") if name in by_name]
    added = rf"{it} the residual\? Then use add_{function}\(x, residual, "
    arrays = [added, *arrays] if f"add_{function}" in POSITIONAL else arrays
    others = f"Pass the others by name: {', '.join(by_name[:2])}"
    is_pair = function.startswith("gated_activation")
    for value, said in (
        (1e-5, [rf"{it} {number}\? Then pass {number}=1e-05" if number else others]),
        (2, [rf"{it} {'num_groups' if function == 'group_norm' else number}\? Then pass .*=2" if number else others]),
        ("rows", [others]),
        (X, [rf"pass a tuple: {function}\(\(gate, up\)\)"] if is_pair else arrays or [others]),
    ):
        taken = rf"takes {count} positional arguments \({', '.join(positional)}\) but {count + 1} were given"
        with pytest.raises(TypeError, match=in_order(function, (taken, *said))):
            called(*args, value)
    with pytest.raises(TypeError, match=in_order(function, (f"multiple values for argument '{names[0]}'", "once"))):
        called(*args, **{names[0]: args[0]})


MISTYPED = table("""
epsilom: epsilon; Scale: scale; activations: activation; pad: pad_to; scale_ofset: scale_offset; smooth: smooth_scale;
straightthrough: straight_through; casual: causal
""")
# The names that other libraries have for an argument.
SYNONYMS = table("""
x: inputs; epsilon: eps variance_epsilon layer_norm_eps; scale: weight gamma; bias: beta b;
axis: dim axes normalized_shape; activation: act nonlinearity; num_groups: groups num_group n_groups;
group_size: channels_per_group groupsize; z_loss: z_loss_weight lse_square_scale; theta: rope_theta base;
heads_axis: axis_of_heads head_axis; heads: num_heads num_attention_heads; kv_heads: num_kv_heads num_key_value_heads;
out_dtype: dtype; implementation: backend; quantization: quant; scale_offset=1.0: zero_centered_gamma; gate: z;
gate_first=not norm_before_gate: norm_before_gate; where: mask; causal: is_causal; labels: targets;
row_weights: loss_mask; residual: skip; label_smoothing: smoothing; ignore_index: ignore_label;
soft_cap: final_logit_softcapping; logit_scale=1 / temperature: temperature; return_logsumexp: return_lse;
positions: position_ids; frequencies: inv_freq; rotary_dim: rotary_ndims; normalize: norm; q_scale: q_norm;
k_scale: k_weight
""")
MEANT = MISTYPED | {theirs: ours for ours, names in SYNONYMS.items() for theirs in names.split()}
# What is to be done without an argument that no function like it has.
INSTEAD = {"bias": "add it to (the result|an unquantised norm)", "residual": "add it to x first"}
INSTEAD |= {"axis": "last axis|did you mean channel_axis"}
INSTEAD |= {"multiply_before_cast": "rounded once, at the end, so leave it out", "out_dtype": "that of quantization"}
INSTEAD |= dict.fromkeys(("return_sum", "return_v", "return_statistics"), "of the results by its name")
# Of functions of rows with an index and of some others, where what is said is their own.
OF_ROWS = table("""
embedding axis: along the first axis of table, so transpose it; segment_sum axis: along the first axis;
embedding residual: add it to the result; segment_sum residual: add it to the result;
embedding x: did you mean (table|ids); embedding labels: did you mean ids|is an argument of;
embedding scale: did you mean table|is an argument of; embedding out_dtype: did you mean dtype;
segment_sum x: did you mean data; segment_sum ids: did you mean segment_ids;
segment_sum labels: did you mean segment_ids|is an argument of; segment_sum out_dtype: the sums have data's dtype;
qk_norm_rotary key: did you mean k; softmax temperature: did you mean logit_scale=1 / temp;
log_softmax temperature: did you mean logit_scale=1 / temp;
softmax_cross_entropy_with_integer_labels temperature: did you mean logit_scale=1 / temp;
linear_cross_entropy temperature: did you mean logit_scale=1 / temp; sample axis: along the last axis of logits;
sample x: did you mean logits; sample out_dtype: ids are int32;
sample logit_scale: did you mean temperature|is an argument of;
sample scale: did you mean temperature|is an argument of; sample residual: add it to logits first;
sample bias: add it to logits first
""")


@each_function
def test_an_argument_of_other_functions(function):
    of_each = {other: {p.name for p in parameters(other)} for other in POSITIONAL}
    for ours in sorted((INSTEAD.keys() | set().union(*of_each.values())) - of_each[function] - {"dtype"}):
        related = [other for other in POSITIONAL if are_related(function, other) and ours in of_each[other]]
        said = "did you mean .*, which takes? " if related else INSTEAD.get(ours, "is an argument of")
        said = OF_ROWS.get(f"{function} {ours}", said)
        for name in {ours, *SYNONYMS.get(ours, "").split()} - of_each[function]:
            parts = f"keyword argument '{name}'", FORMER.get(f"{function}.{name}", said)
            with pytest.raises(TypeError, match=in_order(function, parts)) as raised:
                getattr(jaxnorm, function)(*map(VALID.get, required_by(function)), **{name: 1})
            assert all(other in str(raised.value) for other in related)


# Of functions and layers that name what was renamed: the libraries have them by the same names.
@pytest.mark.parametrize("former", [name for name in FORMER if "." in name and name[:8] != "jaxnorm."])
def test_a_former_name_of_one_function(former):
    function, name = former.split(".")
    owner = next(of for of in (jaxnorm, nnx, jaxnorm_linen) if function in of.__all__)
    said = in_order(function, (f"keyword argument '{name}'", f"did you mean {FORMER[former]}"))
    with pytest.raises(TypeError, match=said):
        getattr(owner, function)(**{name: 1})


def each_of(names):
    return [(op, name) for op in POSITIONAL for name in each_argument(op) if name in names]


@pytest.mark.parametrize(("op", "name"), each_of(WEIGHTS))
def test_a_weight_of_another_shape(op, name):
    expected = (5,) if op in (*PRODUCTS, "linear_cross_entropy") else (8,)
    for shape in ((), (1,), (7,), (9,), (8, 1), (1, 1, 1, 1, 8)):
        with pytest.raises(ValueError, match=in_order(op, (f"{name} has shape", shape, "expected", expected))):
            getattr(jaxnorm, op)(**valid(op) | {name: jnp.ones(shape)})


@pytest.mark.parametrize(("op", "name"), each_of(["residual", "gate"]))
def test_an_array_of_another_shape_than_x(op, name):
    is_scale = rf"Is it the scale\? That comes behind {name}: \(x, {name}, scale\)"
    broadcast = "broadcast_to"
    for shape, remedy in {(2, 4, 8): broadcast, (4, 8): broadcast, (3, 4, 1): broadcast, (8,): is_scale}.items():
        with pytest.raises(ValueError, match=in_order(op, (name, shape, (3, 4, 8), remedy))):
            getattr(jaxnorm, op)(**valid(op) | {name: jnp.ones(shape)})


@each_function
def test_a_misspelt_keyword(function):
    names = [p.name for p in parameters(function)]
    meant = {theirs: ours for theirs, ours in MEANT.items() if ours.partition("=")[0] in names}
    assert meant
    for theirs, ours in meant.items():
        said = (f"unexpected keyword argument '{theirs}'", re.escape(f"did you mean {ours}?"))
        with pytest.raises(TypeError, match=in_order(function, said)):
            getattr(jaxnorm, function)(*map(VALID.get, required_by(function)), **{theirs: 1})


@each_function
def test_signatures_are_seen_from_outside(function):
    parameters = inspect.signature(getattr(jaxnorm, function)).parameters.values()
    assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == POSITIONAL[function]
    assert all(p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in parameters)
    assert f"{function}({POSITIONAL[function][0]}: Any, " in pydoc.plain(pydoc.render_doc(getattr(jaxnorm, function)))
