"""What the layers of `jaxnorm.nnx`, `linen`, `equinox` and `keras` say of arguments and calls that do not fit."""

import re

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import pytest
from cases import draw_x
from coverage import cover
from flax_apis import INT8, each, of

import jaxnorm

pytestmark = pytest.mark.jax_version

PLAIN, ADD, QUANTIZED = (of(*(f"{prefix}{kind}" for kind in ("rms", "layer"))) for prefix in ("", "add ", "quantized "))
GATED, GROUP, INSTANCE, ROTARY = (of(name) for name in ("gated", "group", "instance", "rotary"))
GROUPS = {"axis_name": "shard", "axis_index_groups": ((0, 1),)}


def bad(message, dims=(), has_mask=False, error=ValueError, **fields):
    """What the error says of these fields, inputs of these shapes, or a call with a mask."""
    return message, dims, has_mask, error, fields


def over(reduction, features=None, **fields):
    return {"reduction_axes": reduction, "feature_axes": reduction if features is None else features, **fields}


def offset(message, dims=(), **fields):
    return bad(message, dims, scale_offset=1.0, **fields)


def native(message, dims=(), **fields):
    return bad(message, dims, error=RuntimeError, implementation="native", **fields)


NOT_LIKE, ROWS_AXES = "reduction_axes=.* Give both alike", r"reduction_axes=\(-2,\) with feature_axes=\(-2,\)"
CHANNELS = {"use_scale": False, "use_bias": False}
MISH, ROUNDED = "unknown activation 'mish'", "multiply_before_cast=False, expected True: a "
GROUPS_ARE, TWO_AXES = r"axis_index_groups=\(\(0, 1\),\)", r"reduction_axes=\(1, 2\)"
EARLY = {"multiply_before_cast": False}
BAD = {
    "a kernel and a mask": (PLAIN | GROUP | INSTANCE, native("no kernel serves a mask", has_mask=True)),
    "an offset and a mask": (PLAIN, offset("got a mask, .*: a norm with scale_offset .*plain norm", has_mask=True)),
    "rounding and a mask": (PLAIN, bad("got a mask.* with multiply_before_cast=False", has_mask=True, **EARLY)),
    "a kernel and other axes": (PLAIN, native(f"no kernel serves {ROWS_AXES}", **over(-2))),
    "no number": (PLAIN, bad("scale_offset must be a number, got '1'", error=TypeError, scale_offset="1")),
    "an offset and fewer features": (PLAIN, offset(NOT_LIKE, **over((1, 2), -1))),
    "an offset and more features": (PLAIN, offset(NOT_LIKE, **over(-1, (0, 2)))),
    "sum: another shape": (ADD, bad(r"residual has shape \(6, 37\), expected x's", [(4, 6, 37), (6, 37)])),
    "gated: a mask": (GATED, bad("got a mask, expected None: a gated norm .* plain norm", has_mask=True)),
    "gated: groups": (GATED, bad(rf"{GROUPS_ARE}, expected None: a gated norm", **GROUPS)),
    "gated: another axis": (GATED, bad("reduction_axes=1, expected -1", **over(1))),
    "gated: two axes": (GATED, bad(f"{TWO_AXES}, expected -1", **over((1, 2)))),
    "another gate": (GATED, bad(r"gate has shape \(6, 60\), expected x's .*\(4, 6, 60\)", [(4, 6, 60), (6, 60)])),
    "gated: rounded twice": (GATED, bad(f"{ROUNDED}gated", **EARLY)),
    "rotary: rounded twice": (ROTARY, bad(f"{ROUNDED}rotary", **EARLY)),
    "quantised: rounded twice": (QUANTIZED, bad(f"{ROUNDED}quantised", **EARLY)),
    "quantised: a mask": (QUANTIZED, bad("got a mask.*plain norm", has_mask=True)),
    "quantised: groups": (QUANTIZED, bad(f"{GROUPS_ARE}.*expected None.*plain norm", **GROUPS)),
    "fewer features": (QUANTIZED, bad(rf"{TWO_AXES}.*feature_axes=-1.*\(4, 6, 128\).*alike", **over((1, 2), -1))),
    "more features": (QUANTIZED, bad(r"reduction_axes=-1.*feature_axes=\(1, 2\).*alike", **over(-1, (1, 2)))),
    "no axes": (QUANTIZED, bad("axis is empty", **over(()))),
    "an axis that x has not": (QUANTIZED, bad("axis 2 is out of range.*2 axes", [(6, 128)], **over((1, 2)))),
    "a scalar": (QUANTIZED, bad("axis -1 is out of range.*0 axes", [()])),
    "quantised: another shape": (QUANTIZED, bad(r"residual has shape \(6, 128\)", [(4, 6, 128), (6, 128)])),
    "groups: a mask": (GROUP | INSTANCE, offset("got a mask", has_mask=True)),
    "an unknown activation": (GROUP | INSTANCE, bad(MISH, activation="mish")),
    "an unknown activation of Flax's result": (GROUP | INSTANCE, bad(MISH, has_mask=True, activation="mish")),
    "some axes": (GROUP, offset("reduction_axes=.2, 3.", reduction_axes=(2, 3))),
    "a kernel and some axes": (GROUP, native("no kernel serves reduction_axes", reduction_axes=(2, 3))),
    "two axes of channels": (INSTANCE, offset("feature_axes=.2, 3.", feature_axes=(2, 3), **CHANNELS)),
}


def assert_is_an_error(layer, case, prefix=None):
    """A module may find what is wrong when it is made, when it makes its parameters, or when it is called."""
    message, dims, has_mask, error, fields = case
    call = {"mask": jnp.ones(layer.row.dims, bool)} if has_mask else {}

    def made_and_called():
        inputs = layer.draw()
        apply, parameters = layer.build(inputs, **fields)
        apply(parameters, *(map(jnp.ones, dims) if dims else inputs), **call)

    with pytest.raises(error, match=rf"(?s)^{prefix or layer.row.name}: .*{message}"):
        made_and_called()


@each([(layers, {name: case}) for name, (layers, case) in BAD.items()])
def test_what_does_not_go_together(layer, case):
    is_of_groups = layer.row.kind == "group" and case[0] == MISH
    assert_is_an_error(layer, case, f"({layer.row.name}|group_norm)" if is_of_groups else None)


@cover(layer=GATED | QUANTIZED)
def test_an_option_that_only_flaxs_code_has(layer):
    fields = {"promote_dtype": lambda arrays, dtype: arrays} if layer.is_nnx else {"force_float32_reductions": False}
    assert_is_an_error(layer, bad(f"{next(iter(fields))}=.*Leave it out", **fields))


@cover(layer=QUANTIZED)
def test_dtypes_without_quantised_norms(layer):
    apply, parameters = layer.build(layer.draw())
    name = f"^{layer.row.kind}_norm_quantized"
    with pytest.raises(TypeError, match=rf"{name}: x must have a floating-point dtype .* int32"):
        apply(parameters, jnp.ones(layer.row.dims, "int32"))
    with jax.enable_x64(True), pytest.raises(TypeError, match=rf"{name}: x is float64"):
        apply(parameters, jnp.ones(layer.row.dims, "float64"))
    message = "quantization must be a jaxnorm.Quantization"
    assert_is_an_error(layer, bad(message, error=TypeError, quantization="int8"), name[1:])


@each([(GROUP, [{"group_size": 3}, {"num_groups": None}]), (GATED, [{}])])
def test_what_has_no_default(layer, case):
    flaxs = (ValueError, "Either `num_groups` or `group_size` should be specified")
    error, message = flaxs if case else (TypeError, "gate_first")
    with pytest.raises(error, match=message):
        layer.api.build(layer.cls, layer.draw(), case)


def layers(*modules):
    public = {f"{m.__name__}.{name}": getattr(m, name) for m in modules for name in m.__all__}
    classes = {name: cls for name, cls in public.items() if isinstance(cls, type)}
    return {name: cls for name, cls in classes.items() if cls is not jaxnorm.nnx.QuantizedParam}


OF_FLAX = layers(jaxnorm.nnx, jaxnorm.linen)
OTHERS = layers(jaxnorm.equinox, jaxnorm.keras)
NEEDED = {
    "GatedRMSNorm": {"gate_first": True},
    **{f"Quantized{norm}Norm": {"quantization": INT8} for norm in ("Layer", "RMS")},
    "QuantizedLinear": {"kernels": INT8},
}


def called(cls, *args, **keywords):
    """A call of a layer of Flax, which is made first."""
    fields = NEEDED.get(cls.__name__, {})
    if cls is jaxnorm.linen.Embed:
        fields = {"num_embeddings": 32, "features": 32}
    if issubclass(cls, flax.linen.Module):
        return cls(**fields).init(jax.random.key(0), *args, **keywords)
    if cls is jaxnorm.nnx.GatedActivation:
        return cls()(*args, **keywords)
    sizes = [32] * (1 + bool(re.search("Linear|Embed", cls.__name__)))
    return cls(*sizes, **fields, rngs=flax.nnx.Rngs(0))(*args, **keywords)


def without_arguments(cls, keyword):
    """The error of a constructor that is called with a keyword alone; Keras' looks for what is missing first."""
    sizes = {"input_dim": 4, "output_dim": 4} if cls is jaxnorm.keras.Embedding else {}
    with pytest.raises((TypeError, ValueError), match=rf"\b{cls.__name__}\b.*'{keyword}'") as error:
        cls(**sizes, **{keyword: 1.0})
    assert not re.search(r"\b_[A-Z]", str(error.value))
    return str(error.value)


@cover(cls=OF_FLAX | OTHERS)
def test_an_unknown_argument_is_an_error_of_the_public_class(cls):
    without_arguments(cls, "scale_ofset")


@cover(cls=OF_FLAX)
def test_an_epsilon_of_another_name_is_named(cls):
    error = without_arguments(cls, "eps")
    assert error.startswith(f"{cls.__name__}: got an unexpected keyword argument 'eps'; ")
    assert error.endswith("did you mean epsilon?") is not bool(re.search("Linear|Activation|Embed", cls.__name__))


@cover(cls=OF_FLAX)
def test_a_call_that_does_not_fit_is_an_error_of_the_public_class(cls):
    name, x = cls.__name__, draw_x((2, 32))
    with pytest.raises(TypeError, match=rf"^{name}: got an unexpected keyword argument 'masc'; "):
        called(cls, masc=None)
    with pytest.raises(TypeError, match=rf"^{name}: missing a required argument: '(x|q|inputs)'; pass "):
        called(cls)
    with pytest.raises(TypeError, match=rf"^{name}: takes \d positional arguments? \(.*\) but 9 were given\. Pass "):
        called(cls, *[x] * 9)


@cover(cls=[cls for name, cls in OF_FLAX.items() if ".nnx." in name and "Activation" not in name])
def test_missing_features_are_an_error_of_the_public_class(cls):
    named = "num_features|head_dim|in_features|num_embeddings"
    message = rf"^{cls.__name__}: missing a required argument: '({named})'; pass \1=\.\.\.\.$"
    with pytest.raises(TypeError, match=message):
        cls(**NEEDED.get(cls.__name__, {}), rngs=flax.nnx.Rngs(0))
