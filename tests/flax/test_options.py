"""The options of both Flax APIs' norms beside Flax's: those of the functions."""

import inspect
import re
from functools import partial

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import pytest
from cases import ADDS, KINDS, bits, draw, draw_gate, draw_residual, draw_x
from coverage import cover
from flax_apis import ADD_NAMES, APIS, NAMES, QUANTIZED_NAMES, SERVED_BY_FLAX
from hlo import compiled_text, count_native_calls
from native import native_calls
from ops.gated_norm import QWEN, gated
from quantizing import QUANTIZED

import jaxnorm
import jaxnorm.equinox
import jaxnorm.keras
import jaxnorm.linen
import jaxnorm.nnx
from jaxnorm import Quantization

pytestmark = pytest.mark.jax_version

DIMS = (4, 6, 64)
INT8 = Quantization("int8")
NORMS = {"rms": jaxnorm.rms_norm, "layer": jaxnorm.layer_norm}
POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD
OWN = {"scale_offset": 0.0, "multiply_before_cast": True, "implementation": None}
# Each changes bits where the two halves of a result's dtype meet.
OPTIONS = [{"scale_offset": 1.0}, {"multiply_before_cast": False}, {"scale_offset": -0.5, "implementation": "jnp"}]


def named(api, kind, prefix=""):
    names = {"": NAMES, "Add": ADD_NAMES, "Quantized": QUANTIZED_NAMES}[prefix]
    return getattr(api.ours, names[kind])


def keywords(cls):
    """What the constructor says of our options; nnx's passes them on to that of a base."""
    constructors = [vars(base)["__init__"] for base in cls.__mro__ if "__init__" in vars(base)]
    parameters = [p for init in constructors if inspect.isfunction(init) for p in signature(init)]
    return {p.name: (p.default, p.kind) for p in parameters if p.name in OWN}


def signature(function):
    return inspect.signature(function).parameters.values()


@cover(kind=KINDS, api=APIS, options=OPTIONS)
def test_results_are_the_functions(api, kind, options):
    x = draw_x(DIMS, "bfloat16")
    apply, parameters = api.own(kind, x, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, **options)
    expected = jax.jit(lambda p, x: NORMS[kind](x, **p, **options))(parameters, x)
    assert bits(jax.jit(apply)(parameters, x)) == bits(expected)


@cover(kind=KINDS, api=APIS, options=OPTIONS)
def test_results_of_a_residual_are_the_functions(api, kind, options):
    inputs = draw_x(DIMS, "bfloat16"), draw_residual(DIMS, "bfloat16")
    apply, parameters = api.own(kind, *inputs, names=ADD_NAMES, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, **options)
    expected = jax.jit(lambda p, x, r: ADDS[kind](x, r, **p, **options))(parameters, *inputs)
    assert bits(jax.jit(apply)(parameters, *inputs)) == bits(expected)


# As in the model hubs, with activations of bfloat16 and parameters of float32.
@cover(kind=KINDS, api=APIS, names=[NAMES, ADD_NAMES], implementation=[None, "jnp"])
def test_a_narrow_x_hat_is_rounded_before_wide_parameters_multiply_it(api, kind, names, implementation):
    inputs = [draw_x(DIMS, "bfloat16"), draw_residual(DIMS, "bfloat16")][: 1 + (names is ADD_NAMES)]
    options = {"multiply_before_cast": False, "implementation": implementation}
    apply, parameters = api.own(kind, *inputs, names=names, **options)
    function = partial({1: NORMS, 2: ADDS}[len(inputs)][kind], out_dtype="float32", **options)
    expected = jax.jit(lambda p, *inputs: function(*inputs, **p))(parameters, *inputs)
    assert bits(jax.jit(apply)(parameters, *inputs)) == bits(expected)
    without = jax.jit(lambda p, *inputs: partial(function, multiply_before_cast=True)(*inputs, **p))
    assert bits(without(parameters, *inputs)) != bits(expected)


@cover(kind=KINDS, api=APIS, options=[{"scale_offset": 1.0}, {"scale_offset": 1.0, "implementation": "jnp"}])
def test_quantised_results_are_the_functions(api, kind, options):
    x = draw_x(DIMS)
    apply, parameters = api.quantized(kind, x, quantization=INT8, **options)
    expected = jax.jit(lambda p, x: QUANTIZED[kind](x, **p, quantization=INT8, **options))(parameters, x)
    assert bits(jax.jit(apply)(parameters, x)) == bits(expected)


@cover(api=APIS, options=[{"scale_offset": 1.0}, {"scale_offset": 1.0, "implementation": "jnp"}])
def test_gated_results_are_the_functions(api, options):
    inputs = draw_x(DIMS), draw_gate(DIMS)
    apply, parameters = api.gated(QWEN, inputs, **options)
    assert float(jnp.abs(parameters["scale"]).max()) == 0
    parameters = {"scale": draw("scale", DIMS[-1:])}
    expected = jax.jit(lambda p, x, gate: gated(QWEN, **options)(x, gate, **p))(parameters, *inputs)
    assert bits(jax.jit(apply)(parameters, *inputs)) == bits(expected)


@pytest.mark.needs("kernels")
@cover(kind=KINDS, api=APIS, implementation=[None, "native", "jnp"])
def test_the_implementation_is_what_runs(api, kind, implementation):
    x = draw_x(DIMS)
    apply, parameters = api.own(kind, x, implementation=implementation)
    expected = {} if implementation == "jnp" else native_calls(kind, fwd=1)
    assert count_native_calls(compiled_text(apply, parameters, x)) == expected


@cover(kind=KINDS, api=APIS, prefix=["", "Add", "Quantized"])
def test_an_offset_makes_the_default_scale_zeros(api, kind, prefix):
    cls = named(api, kind, prefix)
    inputs = (draw_x(DIMS), draw_residual(DIMS)) if prefix == "Add" else (draw_x(DIMS),)
    fields = {"quantization": INT8} if prefix == "Quantized" else {}
    ones, zeros, given = (
        api.build(cls, inputs, fields | more)[1]["scale"]
        for more in ({}, {"scale_offset": 1.0}, {"scale_offset": 1.0, "scale_init": jax.nn.initializers.ones})
    )
    assert (ones == 1).all()
    assert (zeros == 0).all()
    assert (given == 1).all()


@cover(kind=KINDS, api=APIS, prefix=["", "Add", "Quantized"])
def test_flaxs_arguments_come_first_and_ours_by_keyword(api, kind, prefix):
    flaxs, ours = (
        [(p.name, p.kind) for p in signature(cls.__init__)] for cls in (api.classes(kind)[0], named(api, kind, prefix))
    )
    first = 2 if api.rounds_operands else flaxs.index(("parent", POSITIONAL))  # nnx: all but self, num_features by name
    assert ours[:first] == flaxs[:first]
    by_keyword = {name: (default, inspect.Parameter.KEYWORD_ONLY) for name, default in OWN.items()}
    assert keywords(named(api, kind, prefix)) == by_keyword


def layers(*modules):
    public = {f"{m.__name__}.{name}": getattr(m, name) for m in modules for name in m.__all__}
    classes = {name: cls for name, cls in public.items() if isinstance(cls, type)}
    return {name: cls for name, cls in classes.items() if cls is not jaxnorm.nnx.QuantizedParam}


OF_FLAX = layers(jaxnorm.nnx, jaxnorm.linen)
OTHERS = layers(jaxnorm.equinox, jaxnorm.keras)
NEEDED = {
    "GatedRMSNorm": {"gate_first": True},
    "QuantizedLayerNorm": {"quantization": INT8},
    "QuantizedLinear": {"weights": INT8},
    "QuantizedRMSNorm": {"quantization": INT8},
}


def called(cls, *args, **keywords):
    """A call of a layer of Flax, which is made first."""
    fields = NEEDED.get(cls.__name__, {})
    if issubclass(cls, flax.linen.Module):
        return cls(**fields).init(jax.random.key(0), *args, **keywords)
    if cls is jaxnorm.nnx.GatedActivation:
        return cls()(*args, **keywords)
    return cls(*[32] * (1 + ("Linear" in cls.__name__)), **fields, rngs=flax.nnx.Rngs(0))(*args, **keywords)


def without_arguments(cls, keyword):
    """The error of a constructor that is called with a keyword alone."""
    with pytest.raises((TypeError, ValueError), match=rf"\b{cls.__name__}\b.*'{keyword}'") as error:
        cls(**{keyword: 1.0})
    assert not re.search(r"\b_[A-Z]", str(error.value))
    return str(error.value)


@cover(cls=OF_FLAX | OTHERS)
def test_an_unknown_argument_is_an_error_of_the_public_class(cls):
    without_arguments(cls, "scale_ofset")


@cover(cls=OF_FLAX)
def test_an_epsilon_of_another_name_is_named(cls):
    error = without_arguments(cls, "eps")
    assert error.startswith(f"{cls.__name__}: got an unexpected keyword argument 'eps'; ")
    assert error.endswith("did you mean epsilon?") is not bool(re.search("Linear|Activation", cls.__name__))


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
    message = rf"^{cls.__name__}: missing a required argument: '(num_features|head_dim|in_features)'; pass \1=\.\.\.\.$"
    with pytest.raises(TypeError, match=message):
        cls(**NEEDED.get(cls.__name__, {}), rngs=flax.nnx.Rngs(0))


# Flax's own code has neither option: the formula serves what it expresses.
@cover(kind=KINDS, api=APIS, fields=SERVED_BY_FLAX)
def test_other_axes_with_an_offset(api, kind, fields):
    x = draw_x(DIMS)

    def result():
        apply, parameters = api.own(kind, x, **fields, scale_offset=1.0)
        return jax.jit(apply)(parameters, x), parameters

    if fields["reduction_axes"] != fields["feature_axes"]:
        with pytest.raises(ValueError, match=rf"^{NAMES[kind]}: reduction_axes=.* Give both alike"):
            result()
        return
    y, parameters = result()
    expected = jax.jit(lambda p, x: NORMS[kind](x, **p, scale_offset=1.0, axis=fields["reduction_axes"]))(parameters, x)
    assert bits(y) == bits(expected)


@cover(kind=KINDS, api=APIS, dtype=["float64"])
def test_float64_with_an_offset_is_the_formulas_result(api, kind, dtype):
    with jax.enable_x64(True):
        x = draw_x(DIMS).astype(dtype)
        apply, parameters = api.own(kind, x, scale_offset=1.0)
        y = jax.jit(apply)(parameters, x)
        assert y.dtype == dtype
        assert bits(y) == bits(jax.jit(lambda p, x: NORMS[kind](x, **p, scale_offset=1.0))(parameters, x))


# An option, what of Flax is asked for with it, and what is said.
NOT_TOGETHER = {
    "an offset and a mask": (
        {"scale_offset": 1.0},
        {"mask": True},
        ValueError,
        "got a mask, expected None: a norm with scale_offset .* plain norm",
    ),
    "an early rounding and a mask": (
        {"multiply_before_cast": False},
        {"mask": True},
        ValueError,
        "got a mask, expected None: a norm with multiply_before_cast=False",
    ),
    "a kernel and a mask": ({"implementation": "native"}, {"mask": True}, RuntimeError, "no kernel serves a mask"),
    "a kernel and other axes": (
        {"implementation": "native", "reduction_axes": -2, "feature_axes": -2},
        {},
        RuntimeError,
        r"no kernel serves reduction_axes=\(-2,\) with feature_axes=\(-2,\)",
    ),
    "an offset that is no number": ({"scale_offset": "1"}, {}, TypeError, "scale_offset must be a number, got '1'"),
}


@cover(kind=KINDS, api=APIS, name=NOT_TOGETHER.keys())
def test_what_does_not_go_together(api, kind, name):
    fields, call, error, message = NOT_TOGETHER[name]

    def module_call():
        apply, parameters = api.own(kind, draw_x(DIMS), **fields)
        apply(parameters, draw_x(DIMS), **call)

    with pytest.raises(error, match=f"^{NAMES[kind]}: .*{message}"):
        module_call()


@cover(api=APIS, make=["gated", "quantized"])
def test_gated_and_quantised_norms_are_rounded_once(api, make):
    def module_call():
        if make == "gated":
            inputs = draw_x(DIMS), draw_gate(DIMS)
            apply, parameters = api.gated(QWEN, inputs, multiply_before_cast=False)
        else:
            inputs = (draw_x(DIMS),)
            apply, parameters = api.quantized("rms", *inputs, quantization=INT8, multiply_before_cast=False)
        apply(parameters, *inputs)

    with pytest.raises(ValueError, match=f"multiply_before_cast=False, expected True: a {make[:5]}"):
        module_call()
