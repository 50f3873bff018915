"""Models of Flax's two APIs and of Equinox behind one interface, and such with linear layers, for what changes them."""

from contextlib import ExitStack, contextmanager
from functools import partial, partialmethod
from types import SimpleNamespace

import equinox as eqx
import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import pytest
from cases import draw, draw_x

import jaxnorm
from jaxnorm import Float8Recipe, Quantization

DIMS = (3, 4, 16)
FEATURES, COLUMNS = DIMS[-1], 32
INT8, INT4, E4M3, E5M2 = (Quantization(dtype) for dtype in (jnp.int8, jnp.int4, jnp.float8_e4m3fn, jnp.float8_e5m2))

# Keras converts its variables by `__array__` without `copy`, which NumPy 2 warns of.
ignore_keras_own = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy")

own_dot = partial(jax.lax.dot_general, precision="highest")


def own_promotion(arrays, *, dtype):
    return arrays


class NamedLinear(flax.nnx.Linear):
    def __init__(self, rngs):
        super().__init__(FEATURES, FEATURES, rngs=rngs)


class ScaledLinear(flax.nnx.Linear):
    def __call__(self, x):
        return 2 * super().__call__(x)


class Mixed(flax.nnx.Module):
    """Layers in every place where a model may have them."""

    def __init__(self, rngs):
        linear = partial(flax.nnx.Linear, FEATURES, FEATURES, rngs=rngs)
        self.listed = flax.nnx.List([linear(), NamedLinear(rngs)])
        self.by_name = flax.nnx.Dict(inner=linear(use_bias=False))
        self.sequence = flax.nnx.Sequential(linear(), jnp.tanh)
        self.shared = self.listed[0]
        self.norm = flax.nnx.RMSNorm(FEATURES, rngs=rngs)
        self.general = flax.nnx.LinearGeneral(FEATURES, FEATURES, rngs=rngs)
        self.scaled = ScaledLinear(FEATURES, FEATURES, rngs=rngs)
        self.lora = flax.nnx.LoRALinear(FEATURES, FEATURES, lora_rank=2, rngs=rngs)
        self.own_dot = linear(dot_general=own_dot)
        self.own_promotion = linear(promote_dtype=own_promotion)
        self.complex = linear(param_dtype=jnp.complex64)

    def __call__(self, x):
        x = x + self.listed[1](jnp.sin(self.listed[0](self.norm(x))))
        return self.shared(self.by_name.inner(self.sequence(x)))


class ScaledDense(flax.linen.Dense):
    @flax.linen.compact
    def __call__(self, inputs):
        return 2 * flax.linen.Dense(self.features, name="inner")(inputs)


class NamedDense(flax.linen.Dense):
    """Flax's under another name."""


class LinenMixed(flax.linen.Module):
    """The like; modules of Flax that are not called are not there."""

    def setup(self):
        self.listed = [flax.linen.Dense(FEATURES), NamedDense(FEATURES, use_bias=False)]

    @flax.linen.compact
    def __call__(self, x):
        dense = partial(flax.linen.Dense, FEATURES)
        for layer in self.listed:
            x = jnp.sin(layer(x))
        x = flax.linen.LayerNorm()(dense(name="own_dot", dot_general=own_dot)(x))
        x = ScaledDense(FEATURES, name="scaled")(dense(name="own_class", dot_general_cls=lambda: own_dot)(x))
        x = x + flax.linen.DenseGeneral(FEATURES, name="general")(inputs=x) + dense(name="last")(inputs=x)
        y = flax.linen.Einsum((FEATURES, FEATURES), "...d,df->...f", name="einsum")(x)
        y = y + dense(name="complex", param_dtype=jnp.complex64)(x).real
        return y + flax.linen.Embed(4, FEATURES, name="embed")(jnp.arange(4))


class SubLinear(eqx.nn.Linear):
    pass


class EquinoxMixed(eqx.Module):
    mlp: eqx.nn.MLP
    linear: eqx.nn.Linear
    scalar: eqx.nn.Linear
    sub_linear: SubLinear
    conv: eqx.nn.Conv1d
    embedding: eqx.nn.Embedding

    def __init__(self, key):
        self.mlp = eqx.nn.MLP(FEATURES, FEATURES, 2 * FEATURES, 1, key=key)
        self.linear = eqx.nn.Linear(FEATURES, COLUMNS, use_bias=False, key=key)
        self.scalar, self.sub_linear = eqx.nn.Linear(FEATURES, "scalar", key=key), SubLinear(FEATURES, 4, key=key)
        self.conv, self.embedding = eqx.nn.Conv1d(1, 1, 1, key=key), eqx.nn.Embedding(4, FEATURES, key=key)

    def __call__(self, x):
        return self.linear(x + self.mlp(x))


@partial(jax.jit, static_argnums=0)
def value_and_gradients(function, dy, *operands):
    """The function's value and the gradients of its operands, of one program."""
    y, pull_back = jax.vjp(function, *operands)
    return y, *pull_back(dy.astype(y.dtype))


class Model:
    """`apply` is a function of `parameters` and x.

    `quantised`, `in_float8` and `replaced`, which has other norms, give another model and the report.
    """

    def __call__(self, x):
        return jax.jit(self.apply)(self.parameters, x)

    def value_and_gradients(self, x, dy):
        """y, the gradients of the parameters, and that of x."""
        return value_and_gradients(self.apply, dy, self.parameters, x)


class NnxModel(Model):
    def __init__(self, module):
        self.module = module
        self.definition, self.parameters = flax.nnx.split(module)

    def apply(self, parameters, x):
        return flax.nnx.merge(self.definition, parameters)(x)

    def _changed(self, change, *args, **options):
        module, report = change(flax.nnx.clone(self.module), *args, **options)
        return NnxModel(module), report

    def quantised(self, kernels=INT8, inputs=None, **options):
        return self._changed(jaxnorm.quantize_linears, kernels, inputs, **options)

    in_float8 = partialmethod(_changed, jaxnorm.float8_linears)
    replaced = partialmethod(_changed, jaxnorm.replace_layers)


class LinenModel(Model):
    def __init__(self, module, variables, contexts=()):
        self.module, self.contexts = module, contexts
        self.others, self.parameters = flax.core.pop(variables, "params")

    def variables(self, parameters):
        return {**self.others, "params": parameters}

    @contextmanager
    def within(self):
        """Its contexts, and the report of the last."""
        with ExitStack() as stack:
            reports = [stack.enter_context(context()) for context in self.contexts]
            yield reports[-1] if reports else None

    def apply(self, parameters, x):
        with self.within():
            return self.module.apply(self.variables(parameters), x)

    def quantised(self, kernels=INT8, inputs=None, **options):
        variables = self.variables(self.parameters)
        new, report = jaxnorm.linen.quantize_linears(self.module, variables, draw_x(DIMS), kernels=kernels, **options)
        context = partial(jaxnorm.linen.using_quantized, inputs)
        return LinenModel(self.module, new, (*self.contexts, context)), report

    def _within(self, context, *args, **options):
        contexts = (*self.contexts, partial(context, *args, **options))
        model = LinenModel(self.module, self.variables(self.parameters), contexts)
        with model.within() as report:
            for _ in range(2):  # of calls that are alike a report has one
                self.module.apply(self.variables(self.parameters), draw_x(DIMS))
        return model, report

    in_float8 = partialmethod(_within, jaxnorm.linen.using_float8)
    replaced = partialmethod(_within, jaxnorm.linen.using_layers)


class EquinoxModel(Model):
    def __init__(self, module):
        self.module = module
        self.parameters, self.static = eqx.partition(module, eqx.is_array)

    def apply(self, parameters, x):
        function = eqx.combine(parameters, self.static)
        for _ in x.shape[1:]:
            function = jax.vmap(function)
        return function(x)

    def _changed(self, change, *args, **options):
        module, report = change(self.module, *args, **options)
        return type(self)(module), report

    def quantised(self, kernels=INT8, inputs=None, **options):
        return self._changed(jaxnorm.equinox.quantize_linears, kernels, inputs, **options)

    replaced = partialmethod(_changed, jaxnorm.equinox.replace_layers)


def draw_bias(key, shape, dtype):
    return draw("bias", shape).astype(dtype)


def nnx_linear(features=COLUMNS, cls=flax.nnx.Linear, **fields):
    return NnxModel(cls(FEATURES, features, bias_init=draw_bias, **fields, rngs=flax.nnx.Rngs(0)))


def linen_linear(features=COLUMNS, cls=flax.linen.Dense, x=None, **fields):
    return linen_model(cls(features, bias_init=draw_bias, **fields), x)


def linen_model(module, x=None):
    return LinenModel(module, module.init(jax.random.key(0), draw_x(DIMS) if x is None else x))


APIS = {
    "nnx": SimpleNamespace(linear=nnx_linear, mixed=lambda: NnxModel(Mixed(flax.nnx.Rngs(0)))),
    "linen": SimpleNamespace(linear=linen_linear, mixed=lambda: linen_model(LinenMixed())),
    "equinox": SimpleNamespace(
        linear=lambda **of: EquinoxModel(eqx.nn.Linear(FEATURES, COLUMNS, **of, key=jax.random.key(0))),
        mixed=lambda: EquinoxModel(EquinoxMixed(jax.random.key(0))),
    ),
}
CHANGES = {
    "quantised": lambda model, *to, **options: model.quantised(*to, **options),
    "computed in float8": lambda model, *recipe, **options: model.in_float8(*recipe, **options),
}
OTHER = {"quantised": INT4, "computed in float8": Float8Recipe(power_of_two=True)}  # than the default
CHANGED_BY = {f"{api} {done}": (api, done) for api in ("nnx", "linen") for done in CHANGES}
CHANGED_BY["equinox quantised"] = ("equinox", "quantised")
_OWN_CALL, _BY_PRODUCT = "its __call__ is not Flax's", ": give this one dot_general=recipe.dot_general"


def own(what):
    return f"it has a {what} of its own"


def each_left(cls, **whys):
    """Layers of a class by name, with what is said of each, and of one that is complex."""
    return {(name,): (cls, why) for name, why in {**whys, "complex": "it is of complex64"}.items()}


def expected_report(api, done):
    """Of `mixed`: the path and class of each layer that is changed, and of each that is left, with the reason."""
    if api == "nnx":
        linear, paths = flax.nnx.Linear, [("listed", 0), ("by_name", "inner"), ("sequence", "layers", 0)]
        why = f"only flax.nnx.Linear is {done}{_BY_PRODUCT if done != 'quantised' else ''}"
        return dict.fromkeys(paths, linear) | {("listed", 1): NamedLinear}, {
            **each_left(linear, own_dot=own("dot_general"), own_promotion=own("promote_dtype")),
            ("general",): (flax.nnx.LinearGeneral, why),
            ("scaled",): (ScaledLinear, _OWN_CALL),
            ("lora",): (flax.nnx.LoRALinear, _OWN_CALL),
        }
    if api == "linen":
        dense, general = flax.linen.Dense, flax.linen.DenseGeneral
        why = "Dense and DenseGeneral are quantised" if done == "quantised" else f"Dense is {done}"
        why = f"only flax.linen.{why}"
        changed = {("listed_0",): dense, ("listed_1",): NamedDense, ("scaled", "inner"): dense, ("last",): dense}
        left = each_left(dense, own_dot=own("dot_general"), own_class=own("dot_general_cls"))
        left |= {(name,): (cls, why) for name, cls in (("einsum", flax.linen.Einsum), ("embed", flax.linen.Embed))}
        left[("scaled",)] = ScaledDense, _OWN_CALL
        if done == "quantised":
            return changed | {("general",): general}, left
        return changed, left | {("general",): (general, f"{why}{_BY_PRODUCT}")}
    only = "only equinox.nn.Linear"
    return dict.fromkeys([("mlp", "layers", 0), ("mlp", "layers", 1), ("linear",)], eqx.nn.Linear), {
        ("scalar",): (eqx.nn.Linear, "it has scalar features"),
        ("sub_linear",): (SubLinear, f"{only} itself is quantised"),
        ("conv",): (eqx.nn.Conv1d, f"{only} is quantised"),
        ("embedding",): (eqx.nn.Embedding, f"{only} is quantised"),
    }
