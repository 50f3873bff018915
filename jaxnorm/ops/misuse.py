"""What a caller meant: remedies for calls that Python cannot bind, and for what is no array."""

import difflib
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar, cast

import jax
import numpy as np

from jaxnorm.primitive.registry import SIGNATURES

F = TypeVar("F", bound=Callable[..., Any])
Parameters = Mapping[str, inspect.Parameter]

# The names of before the first release, which goes without them; some only in one function.
FORMER = {"jnp": "xla", "axis_of_heads": "heads_axis"}
FORMER |= dict.fromkeys(("softmax.scale", "log_softmax.scale"), "logit_scale")
# Those of public modules. The next release does without them.
FORMER |= {
    "jaxnorm.compare": "compare_layers",
    "jaxnorm.replace_norms": "replace_layers",
    "jaxnorm.restore_norms": "restore_layers",
    "jaxnorm.nnx.replace_norms": "replace_layers",
    "jaxnorm.nnx.restore_norms": "restore_layers",
    "jaxnorm.linen.compare": "compare_layers",
    "jaxnorm.linen.replace_norms": "using_layers",
    "jaxnorm.linen.float8_linears": "using_float8",
    "jaxnorm.linen.quantized_linears": "using_quantized",
    "jaxnorm.equinox.replace_norms": "replace_layers",
    "jaxnorm.keras.replace_norms": "replace_layers",
    "jaxnorm.blocks.of": "find",
}
BLOCKS = (
    "find(model) for the classes of jaxnorm.blocks.KNOWN. For others write a function, as docs/porting.md shows under "
    "Whole blocks, and check it by jaxnorm.compare_layers"
)
FORMER |= {f"jaxnorm.blocks.{block}_layer": BLOCKS for block in ("decoder", "sandwich", "vit", "dit")}
FORMER |= {f"jaxnorm.blocks.{block}_block": BLOCKS for block in ("resnet", "timed_resnet")}
FORMER |= {f"jaxnorm.blocks.{activation}_mlp": BLOCKS for activation in ("gated", "silu", "gelu")}
FORMER |= {"linear_cross_entropy.weights": "row_weights", "quantized_dot.weights": "kernel"}
FORMER |= dict.fromkeys(("quantize_linears.weights", "QuantizedLinear.weights"), "kernels")
FORMER |= {f"{of}.activations": "inputs" for of in ("quantize_linears", "using_quantized", "QuantizedLinear")}
# The names that other libraries have -> ours, perhaps with its value.
SYNONYMS = {
    **dict.fromkeys(("eps", "variance_epsilon", "norm_eps", "layer_norm_eps", "rms_norm_eps"), "epsilon"),
    **dict.fromkeys(("weight", "weights", "gamma", "w", "g"), "scale"),
    **dict.fromkeys(("beta", "b"), "bias"),
    **dict.fromkeys(("input", "inputs", "hidden_states", "array", "a"), "x"),
    **dict.fromkeys(("dtype", "output_dtype", "result_dtype"), "out_dtype"),
    **dict.fromkeys(("axes", "dim", "dims", "reduction_axes", "normalized_shape"), "axis"),
    **dict.fromkeys(("impl", "backend", "mode"), "implementation"),
    **dict.fromkeys(("zero_centered_gamma", "unit_offset", "weight_offset"), "scale_offset=1.0"),
    **dict.fromkeys(("quant", "quantize", "quantized_dtype"), "quantization"),
    **dict.fromkeys(("mask", "valid"), "where"),
    **dict.fromkeys(("targets", "target", "label"), "labels"),
    **dict.fromkeys(("softcap", "logit_soft_cap", "logit_softcapping", "final_logit_softcapping"), "soft_cap"),
    **dict.fromkeys(("ignore_label", "ignore_id", "padding_index"), "ignore_index"),
    **dict.fromkeys(("z_loss_weight", "z_loss_multiplier", "lse_square_scale"), "z_loss"),
    "return_lse": "return_logsumexp",
    "smoothing": "label_smoothing",
    "temperature": "logit_scale=1 / temperature",
    **dict.fromkeys(("loss_mask", "loss_weights", "sample_weight"), "row_weights"),
    "is_causal": "causal",
    **dict.fromkeys(("rope_theta", "base", "rotary_base", "max_wavelength"), "theta"),
    **dict.fromkeys(("inv_freq", "freqs", "freq"), "frequencies"),
    **dict.fromkeys(("position_ids", "pos", "segment_pos"), "positions"),
    **dict.fromkeys(("rotary_ndims", "rot_dim", "n_rot"), "rotary_dim"),
    **dict.fromkeys(("q_norm", "q_weight", "q_gamma", "query_scale"), "q_scale"),
    **dict.fromkeys(("k_norm", "k_weight", "k_gamma", "key_scale"), "k_scale"),
    "head_axis": "heads_axis",
    **dict.fromkeys(("num_heads", "n_heads", "num_attention_heads", "q_heads"), "heads"),
    **dict.fromkeys(("num_kv_heads", "n_kv_heads", "num_key_value_heads"), "kv_heads"),
    **dict.fromkeys(("groups", "num_group", "n_groups", "ngroups", "nb_groups"), "num_groups"),
    **dict.fromkeys(("channels_per_group", "groupsize"), "group_size"),
    **dict.fromkeys(("act", "act_fn", "activation_fn", "nonlinearity"), "activation"),
    "feature_axis": "channel_axis",
    "query": "q",
    "key": "k",
    "norm": "normalize",
    "skip": "residual",
    "z": "gate",
    "norm_before_gate": "gate_first=not norm_before_gate",
    # What has another meaning in one function.
    **dict.fromkeys(("embedding.x", "embedding.weight", "embedding.weights", "embedding.embeddings"), "table"),
    **{f"embedding.{name}": "ids" for name in ("input", "inputs", "indices", "input_ids", "token_ids", "labels")},
    "embedding.out_dtype": "dtype",
    **dict.fromkeys(("segment_sum.x", "segment_sum.values", "segment_sum.operand", "segment_sum.src"), "data"),
    **{f"segment_sum.{name}": "segment_ids" for name in ("ids", "index", "indices", "labels")},
    **{f"segment_sum.{name}": "num_segments" for name in ("dim_size", "segments", "length")},
    **{f"sample.{name}": "key" for name in ("rng", "prng_key", "rng_key", "seed", "generator")},
    "sample.x": "logits",
    "sample.logit_scale": "temperature=1 / logit_scale",
}
QUANTIZATION = "as in quantization=jaxnorm.Quantization(jax.numpy.float8_e4m3fn)"
# Of an argument that a function has not, where no function of its name has it either.
INSTEAD = {
    "bias": "add it to the result",
    "residual": "add it to x first",
    "axis": "the last axis is normalised, so transpose x or leave it out",
    "out_dtype": f"the dtype of the result is that of quantization, {QUANTIZATION}",
    **dict.fromkeys(("return_sum", "return_v", "return_statistics"), "take what you want of the results by its name"),
    "multiply_before_cast": "all is rounded once, at the end, so leave it out",
    # Of one function.
    "embedding.axis": "rows are along the first axis of table, so transpose it",
    "embedding.mode": "a row that the table has not is NaN; for another rule change ids first, as by jax.numpy.clip",
    "embedding.residual": "add it to the result",
    "segment_sum.axis": "rows are along the first axis of data, so move it there, as by jax.numpy.moveaxis",
    "segment_sum.mode": "numbers that no segment has are in no sum, so leave it out",
    "segment_sum.residual": "add it to the result",
    "segment_sum.out_dtype": "the sums have data's dtype, so convert data first",
    **{f"segment_sum.{name}": "leave it out" for name in ("unique_indices", "bucket_size")},
    "sample.axis": "columns are along the last axis of logits, so move it there, as by jax.numpy.moveaxis",
    "sample.out_dtype": "ids are int32, so leave it out",
    **{f"sample.{name}": "add it to logits first" for name in ("bias", "residual")},
}
# The same of one whose result is quantised, and so not to be added to.
INSTEAD_OF_QUANTIZED = {"bias": "add it to an unquantised norm, and quantise the sum with jaxnorm.quantize"}
GATE_FIRST = "True multiplies by the gate before x is normalised (Mamba2), False after (Qwen3-Next)"
REQUIRED = {
    "x": "pass the array to normalise",
    "logits": "pass the array of logits",
    "labels": "pass the numbers of the classes",
    "kernel": "of logits use jaxnorm.softmax_cross_entropy_with_integer_labels",
    "q": "pass the queries",
    "k": "pass the keys, for queries alone an array like q with no heads",
    "qkv": "pass the one product of queries, keys and values",
    "table": "pass the table, an array (rows, columns)",
    "ids": "pass the numbers of the rows to look up",
    "data": "pass the array of rows to sum up",
    "segment_ids": "pass the number of the segment of each row",
    "residual": "without a residual use jaxnorm.rms_norm or jaxnorm.layer_norm",
    "gate": "without a gate use jaxnorm.rms_norm",
    "gate_first": GATE_FIRST,
    "quantization": QUANTIZATION,
}
NUMBERS = ("epsilon", "scale_offset")
SHAPE = "Is the second the shape of the features, as in torch? Leave it out, axis says which are normalised."
FACTOR = "it is an array of x's features or of x's shape"
PAIRS = ("gated_activation", "gated_activation_quantized")  # functions of a pair, which is a tuple
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")


def explained(function: F) -> F:
    """The function, whose error says what was meant where a call does not fit its signature."""
    name, parameters = function.__name__, inspect.signature(function).parameters
    SIGNATURES[name] = parameters

    @functools.wraps(function)
    def called(*args: Any, **keywords: Any) -> Any:
        try:
            return function(*args, **keywords)
        except TypeError as error:
            # An error of the function's body has the body's frame behind this one.
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise
            why = unbound(name, parameters, args, keywords)
            if why is None:
                raise
        raise TypeError(f"{name}: {why}")

    return cast(F, called)


def unbound(name: str, parameters: Parameters, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> str | None:
    """Why the arguments do not fit the parameters, and what may have been meant."""
    positional = _positional(parameters)
    given = positional[: len(args)]
    others = {p.kind: p.name for p in parameters.values() if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    for keyword in keywords:
        if keyword not in parameters and (f"{name}.{keyword}" in FORMER or inspect.Parameter.VAR_KEYWORD not in others):
            return f"got an unexpected keyword argument {keyword!r}; {_meant(name, parameters, keyword)}"
        if keyword in given:
            at = given.index(keyword)
            remedy = _surplus(name, parameters, at + 1, args[at]) if keyword == "scale" else "Pass it once."
            return f"got multiple values for argument {keyword!r}. {remedy}"
    if (surplus := args[len(positional) :]) and inspect.Parameter.VAR_POSITIONAL not in others:
        is_torchs = positional[:2] == ["x", "scale"] and (is_shape(args[1]) or is_number(args[1]))
        return (
            f"takes {len(positional)} positional arguments ({', '.join(positional)}) but {len(args)} were given. "
            f"{SHAPE if is_torchs else _surplus(name, parameters, len(positional) + 1, surplus[0])}"
        )
    for p in parameters.values():
        if p.default is p.empty and p.name not in (*given, *keywords, *others.values()):
            remedy = REQUIRED.get(p.name, f"pass {p.name}=...")
            return f"missing a required argument: {p.name!r}; {remedy}."
    return None


def _meant(name: str, parameters: Parameters, keyword: str) -> str:
    ours = FORMER.get(f"{name}.{keyword}") or SYNONYMS.get(f"{name}.{keyword}")
    ours = ours or (SYNONYMS | FORMER).get(keyword, keyword)
    ours = SYNONYMS.get(f"{name}.{ours}", ours)
    for missing in (keyword, ours):
        if f"{name}.{missing}" in INSTEAD:
            return f"{name} has no {missing}: {INSTEAD[f'{name}.{missing}']}."
    if ours == "axis" and "channel_axis" in parameters:
        ours = "channel_axis"
    argument = ours.partition("=")[0]
    if argument not in parameters and f"{keyword}s" in parameters:
        argument = ours = f"{keyword}s"
    if argument in parameters:
        return f"did you mean {ours}?"
    if name not in SIGNATURES:  # but a layer
        return did_you_mean(keyword, parameters, "some")
    if argument == "out_dtype" and "quantization" in parameters:
        return f"{name} has no {keyword}: {INSTEAD[argument]}."
    others = having(argument)
    if related := sorted((other for other in others if are_related(name, other)), key=len):  # the simplest first
        return f"did you mean {' or '.join(related)}, which {'takes' if len(related) == 1 else 'take'} {argument}?"
    remedies = INSTEAD | (INSTEAD_OF_QUANTIZED if "quantization" in parameters else {})
    if argument in remedies:
        return f"{name} has no {argument}: {remedies[argument]}."
    if others:
        return f"{argument} is an argument of {', '.join(others)}."
    return did_you_mean(keyword, parameters, "some")


def renamed(name: object) -> str:
    """The remedy where something has its name of before the first release."""
    return f" {name!r} is {FORMER[name]!r} now." if isinstance(name, str) and name in FORMER else ""


def no_attribute(module: str) -> Callable[[str], NoReturn]:
    """`__getattr__` of a public module, whose error says what goes by another name now."""

    def __getattr__(name: str) -> NoReturn:
        now = FORMER.get(f"{module}.{name}")
        remedy = f": use {module}.{now}" if now else ""
        raise AttributeError(f"module {module!r} has no attribute {name!r}{remedy}", name=name, obj=sys.modules[module])

    return __getattr__


def are_related(name: str, other: str) -> bool:
    """Whether a function's name has the words of another's, as add_rms_norm has rms_norm's."""
    return f"_{name}_" in f"_{other}_"


def having(argument: str) -> list[str]:
    """The functions with an argument of this name."""
    return sorted(function for function, parameters in SIGNATURES.items() if argument in parameters)


def did_you_mean(name: str, known: Iterable[str], how_many: str = "one") -> str:
    """The remedy where something has another name."""
    plain = {other.lower().replace("_", ""): other for other in known if not other.startswith("_")}
    if close := difflib.get_close_matches(name.lower().replace("_", ""), plain, 1):
        return f"did you mean {plain[close[0]]}?"
    return f"expected {how_many} of {', '.join(plain.values())}."


def _surplus(name: str, parameters: Parameters, place: int, value: object) -> str:
    """What the array or number in this place, which is one too many, may have been."""
    by_name = [argument for argument in parameters if argument not in _positional(parameters)]
    pass_others = f"Pass the others by name: {', '.join(by_name)}."
    if name not in SIGNATURES:  # but a layer
        return pass_others
    if name in PAIRS and place == 2 and not isinstance(value, str) and not is_number(value):
        return pair(name)
    it = f"the {ORDINALS[place - 1]}"
    if is_number(value):
        names = [*["num_groups"] * isinstance(value, int), "theta", "epsilon", "axis", "label_smoothing"]
        if number := next((argument for argument in names if argument in by_name), None):
            return f"Is {it} {number}? Then pass {number}={value}."
        return pass_others
    hints = []
    for argument in () if isinstance(value, str) else ("residual", "bias"):
        meant = f"Is {it} the {argument}? Then"
        if argument in by_name:
            hints.append(f"{meant} pass {argument}=...")
        elif argument not in parameters:
            positional = {other: _positional(of) for other, of in SIGNATURES.items() if are_related(name, other)}
            calls = (f"{other}({', '.join(of)})" for other, of in positional.items() if argument in of)
            hints += [f"{meant} use {call}." for call in calls]
    return " ".join(hints or [pass_others])


def pair(function: str) -> str:
    return f"Are they gate and up? Then pass a tuple: {function}((gate, up))."


def _positional(parameters: Parameters) -> list[str]:
    return [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]


def is_number(value: object) -> bool:
    return isinstance(value, (int, float, complex, np.number)) and not isinstance(value, bool)


def is_shape(value: object) -> bool:
    return isinstance(value, (tuple, list)) and bool(value) and all(isinstance(length, int) for length in value)


def no_array(name: str, value: object) -> str:
    """The remedy where an array is expected for the argument `name`."""
    if value is None and name in REQUIRED:
        return f"{REQUIRED[name]}."
    if is_number(value) and name == "branch_scale":
        return f"{FACTOR}, as jax.numpy.full(x.shape[-1:], {value}, x.dtype)."
    if is_number(value) and (name == "bias" or name.endswith("scale")):
        return f"did you mean {' or '.join(f'{other}={value}' for other in NUMBERS)}?"
    if name == "scale" and is_shape(value):
        return SHAPE
    if isinstance(value, Mapping):
        return f"pass one of the arrays in it, as {name}['scale']."
    if isinstance(value, jax.ShapeDtypeStruct):
        return "it has a shape and no values; let jax.eval_shape call the function with it."
    if isinstance(value, tuple) and (names := getattr(value, "_fields", ())):
        return f"it is several results; pass one of them, {' or '.join(f'{name}.{field}' for field in names)}."
    if callable(getattr(value, "unbox", None)):
        return f"it is a box of Flax's metadata; pass {name}.unbox(), or all parameters with flax.core.meta.unbox."
    if hasattr(value, "__dlpack__"):
        return f"pass jax.numpy.from_dlpack({name}), of a tensor of torch that requires a gradient {name}.detach()."
    if (isinstance(value, Sequence) and not isinstance(value, (str, bytes))) or is_number(value):
        return f"pass jax.numpy.asarray({name})."
    return "pass an array of jax.numpy."


def fitting(argument: str, values: Sequence[int]) -> str:
    """The remedy where an axis is not the one that was meant, and these would fit."""
    return f" {' or '.join(f'{argument}={value}' for value in values)} would fit." if values else ""


def no_weight(function: str, name: str, shape: tuple[Any, ...], x_shape: tuple[Any, ...]) -> str:
    """The remedy where a weight's shape does not go with x's."""
    if shape == () and name == "branch_scale":
        return f"A number: {FACTOR}, as jax.numpy.full(x.shape[-1:], {name}, x.dtype)."
    if shape == ():
        return f"A number: did you mean {' or '.join(f'{other}=...' for other in NUMBERS)}?"
    if len(x_shape) == 1 < len(shape) and shape[-1:] == x_shape:
        return f"Are x and {name} in each other's place?"
    if "axis" not in SIGNATURES.get(function, {}):
        return f"Reshape {name}."
    axes = [axis for axis, length in enumerate(x_shape) if shape == (length,)]
    return f"Reshape {name}, or change axis.{fitting('axis', axes)}"


def not_like_x(name: str, shape: tuple[Any, ...], x_shape: tuple[Any, ...]) -> str:
    """The remedy where an array that must have x's shape has another."""
    if shape == x_shape[-1:]:
        return f"Is it the scale? That comes behind {name}: (x, {name}, scale)."
    return f"Reshape or broadcast one of them, as with jax.numpy.broadcast_to({name}, x.shape)."


# Short names of dtypes, which NumPy does not know or takes for others.
DTYPES = {
    "bf16": "bfloat16",
    **dict.fromkeys(("fp16", "f16"), "float16"),
    **dict.fromkeys(("fp32", "f32"), "float32"),
    **dict.fromkeys(("fp64", "f64"), "float64"),
}


def no_dtype(value: object, known: Iterable[str]) -> str:
    """The remedy where one of the known dtypes is expected."""
    name = str(value).removeprefix("torch.")
    if (meant := DTYPES.get(name, name)) in known:
        return f"did you mean {meant}?"
    return f"expected one of {', '.join(sorted(known))}."
