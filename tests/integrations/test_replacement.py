"""`replace_layers`: of `flax.nnx` in place, of `flax.linen` for calls within."""

import re
from functools import partial, partialmethod

import equinox
import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import keras
import norm_models
import optax
import pytest
from cases import bits, draw, draw_x
from flax_apis import assert_calls, assert_close, assert_gradients_close, scan_of_remat
from library_models import CHANGES, EquinoxMixed, EquinoxModel, NamedLinear, NnxModel, linen_model
from native import native_calls
from norm_models import CUSTOM, DIMS, FEATURES, LIBRARIES, MIXED, GemmaNorm, LinenMixed, gemma_norm, mixed, why_own

import jaxnorm

pytestmark = [pytest.mark.jax_version, pytest.mark.usefixtures("exact_products")]


each_library = pytest.mark.parametrize("library", LIBRARIES)


@each_library
def test_it_says_what_it_replaced_and_left(library):
    custom, replaced, left, _ = LIBRARIES[library]
    _, report = MIXED[library]().replaced(*custom)
    assert (dict(report.replaced), {path: (cls, why) for path, cls, why in report.left}) == (replaced, left)
    assert len(report.replaced) + len(report.left) == len(replaced | left)
    assert f"replaced  {'.'.join(map(str, path := next(iter(replaced))))}: {replaced[path].__name__}\n" in str(report)
    assert "left      batch: BatchNorm: jaxnorm has no such norm" in str(report)


@each_library
def test_kernels_run_where_it_replaced(library):
    custom, *_, calls = LIBRARIES[library]
    model = MIXED[library]()
    new, _ = model.replaced(*custom)
    assert_calls(new.apply, (new.parameters, draw_x(DIMS)), calls)
    assert_calls(model.apply, (model.parameters, draw_x(DIMS)), {})


@each_library
def test_results_and_gradients_stay(library):
    model, x = MIXED[library](), draw_x(DIMS)
    new, _ = model.replaced(*LIBRARIES[library][0])
    ours, theirs = (of.value_and_gradients(x, draw("dy", DIMS)) for of in (new, model))
    results = ([array for array in jax.tree.leaves(of) if array.dtype == jnp.float32] for of in (ours, theirs))
    assert_gradients_close(*results)


@pytest.mark.parametrize("library", ["nnx", "linen"])
def test_an_instance_norm_is_replaced(library):
    norm = flax.nnx.InstanceNorm(FEATURES, rngs=flax.nnx.Rngs(0)) if library == "nnx" else flax.linen.InstanceNorm()
    new, report = (NnxModel if library == "nnx" else linen_model)(norm).replaced()
    assert report.replaced == [((), type(norm))]
    assert_calls(new.apply, (new.parameters, draw_x(DIMS)), native_calls("group", fwd=1))


class Block(flax.nnx.Module):
    def __init__(self, rngs):
        self.norm, self.own = flax.nnx.RMSNorm(FEATURES, rngs=rngs), GemmaNorm(rngs)

    def __call__(self, x):
        return self.own(self.norm(x))


def test_nnx_says_what_lies_within_a_block_that_a_function_computes():
    model = flax.nnx.Dict(blocks=flax.nnx.List([Block(flax.nnx.Rngs(0))]), norm=GemmaNorm(flax.nnx.Rngs(0)))
    _, report = jaxnorm.replace_layers(model, {Block: lambda block, x: jaxnorm.rms_norm(x, block.norm.scale[...])})
    path = ("blocks", 0)
    why = why_own("GemmaNorm: lambda norm, x: jaxnorm.rms_norm(x, norm.scale[...])")
    assert report.replaced == [(path, Block)]
    assert report.within == [((*path, "norm"), flax.nnx.RMSNorm, path, None), ((*path, "own"), GemmaNorm, path, why)]
    assert report.left == [(("norm",), GemmaNorm, why)]
    assert str(report).splitlines()[1:3] == [
        "within    blocks.0.norm: RMSNorm: replaced, where the function of blocks.0 calls it",
        f"within    blocks.0.own: GemmaNorm: left, where the function of blocks.0 calls it: {why}",
    ]
    assert type(model.blocks[0].norm) is jaxnorm.nnx.RMSNorm
    assert len(jaxnorm.restore_layers(model)[1].replaced) == 2


class Around(flax.nnx.Module):
    def __init__(self, rngs):
        self.block, self.last = Block(rngs), GemmaNorm(rngs)

    def __call__(self, x):
        return self.last(self.block(x))


def test_nnx_says_which_block_is_next_around():
    _, report = jaxnorm.replace_layers(Around(flax.nnx.Rngs(0)), dict.fromkeys((Around, Block, GemmaNorm), gemma_norm))
    assert report.replaced == [((), Around)]
    around = {("block",): (), ("block", "norm"): ("block",), ("block", "own"): ("block",), ("last",): ()}
    assert {path: block for path, _, block, _ in report.within} == around
    assert "within    last: GemmaNorm: replaced, where the function of (the model itself) calls it" in str(report)


class Mixin:
    """First among the bases, it decides how instances lie in memory."""


class MixedInNorm(Mixin, flax.nnx.LayerNorm):
    pass


class MixedInGemmaNorm(Mixin, GemmaNorm):
    pass


@pytest.mark.parametrize("make", [lambda rngs: MixedInNorm(FEATURES, rngs=rngs), MixedInGemmaNorm])
def test_nnx_a_class_with_a_mixin(make):
    norm = make(flax.nnx.Rngs(0))
    expected, cls = norm(draw_x(DIMS)), type(norm)
    assert jaxnorm.replace_layers(norm, CUSTOM)[1].replaced == [((), cls)]
    assert isinstance(norm, cls)
    assert type(norm).__qualname__ == cls.__qualname__
    assert_close(norm(draw_x(DIMS)), expected)


def test_nnx_a_model_without_values():
    model = flax.nnx.eval_shape(mixed)
    assert dict(jaxnorm.replace_layers(model, CUSTOM)[1].replaced) == norm_models.REPLACED


# Options of a norm that no kernel serves, and how the report says so.
OPTIONS = {
    "promote_dtype": ({"promote_dtype": lambda operands, dtype: operands}, "promote_dtype"),
    "groups": ({"axis_name": "i", "axis_index_groups": ((0, 1),)}, "axis_index_groups"),
    "epsilon": ({"epsilon": jnp.float32(1e-6)}, "an epsilon that is no Python number"),
    "dtype": ({"dtype": jnp.complex64}, "complex64"),
    "param_dtype": ({"param_dtype": jnp.complex64}, "complex64"),
    "fewer features": ({"reduction_axes": (-2, -1)}, "reduction_axes=(-2, -1) with feature_axes=(-1,)"),
}


OF_LAYERS = [(flax.nnx.RMSNorm, name) for name in OPTIONS]
OF_LAYERS += [(flax.nnx.Embed, name) for name in ("promote_dtype", "dtype", "param_dtype")]


@pytest.mark.parametrize(("cls", "name"), OF_LAYERS)
def test_nnx_options_that_no_kernel_serves(cls, name):
    options, why = OPTIONS[name]
    layer = cls(*[FEATURES] * (1 + (cls is flax.nnx.Embed)), **options, rngs=flax.nnx.Rngs(0))
    _, report = jaxnorm.replace_layers(layer)
    assert report.left == [((), cls, f"no kernel serves {why}")]
    assert type(layer) is cls


def test_nnx_axes_from_the_front_are_known_with_x():
    norm = NnxModel(flax.nnx.RMSNorm(FEATURES, reduction_axes=2, feature_axes=2, rngs=flax.nnx.Rngs(0)))
    new, report = norm.replaced()
    assert report.replaced
    assert_calls(new.apply, (new.parameters, draw_x(DIMS)), native_calls("rms", fwd=1))
    assert bits(new(draw_x((*DIMS, 1)))) == bits(norm(draw_x((*DIMS, 1))))


def test_nnx_modules_of_linen_in_a_model():
    model = flax.nnx.bridge.ToNNX(flax.linen.LayerNorm(), rngs=flax.nnx.Rngs(0)).lazy_init(draw_x(DIMS))
    (left,) = jaxnorm.replace_layers(model)[1].left
    assert left.why.endswith("call it within jaxnorm.linen.using_layers()")
    with jaxnorm.linen.using_layers() as report:
        model = NnxModel(model)
        assert_calls(model.apply, (model.parameters, draw_x(DIMS)), native_calls("layer", fwd=1))
    assert report.replaced


class OwnModel:
    """Stands for a model of a library that the docs do not name."""


OPTIMIZER = flax.nnx.Optimizer(flax.nnx.RMSNorm(4, rngs=flax.nnx.Rngs(0)), optax.sgd(0.1), wrt=flax.nnx.Param)
WRONG = {
    "a linen model": (flax.linen.LayerNorm(), None, "a module of flax.linen, LayerNorm: .*jaxnorm.linen.using_layers"),
    "Equinox": (equinox.nn.LayerNorm(4), None, "a flax.nnx module, .*, got LayerNorm.*Equinox is in docs/porting.md"),
    "Keras": (keras.layers.LayerNormalization(), None, "got LayerNormalization.*of Keras is in docs/porting.md"),
    "others": ([OwnModel()], None, "a flax.nnx module, or a list, .*, got list.*docs/porting.md"),
    "variables": ({"params": {"scale": 1.0}}, None, "a flax.nnx module, .*, got dict"),
    "a function of arrays": (norm_models.gemma_formula, None, "a flax.nnx module, .*, got function.*docs/porting.md"),
    "a class": (GemmaNorm, None, "a flax.nnx module, .*, got the class GemmaNorm.*make one"),
    "a state": (flax.nnx.State({}), None, r"a flax.nnx module, .*, got State.*nnx\.merge"),
    "a graph definition": (flax.nnx.graphdef(flax.nnx.Dict()), None, r"a flax.nnx module, .*, got .*nnx\.merge"),
    "split": (flax.nnx.split(flax.nnx.Dict()), None, r"got what nnx.split gives, a tuple: .*model = nnx\.merge\("),
    "an optimizer": (OPTIMIZER, None, "a flax.nnx module, .*, got an Optimizer: pass the model that it trains"),
    "None": (None, None, "a flax.nnx module, .*, got None"),
    "match": (flax.nnx.Dict(), "match", r"not guessed.*custom=\{Norm: lambda .* check it by jaxnorm.compare_layers"),
    "pairs": (flax.nnx.Dict(), [(GemmaNorm, gemma_norm)], r"must be a mapping .* Give dict\(custom\)"),
    "a list": (flax.nnx.Dict(), [GemmaNorm], "must be a mapping .* Give each class its function"),
    "a function": (flax.nnx.Dict(), lambda norm, x: x, "custom must be a mapping"),
    "an instance": (flax.nnx.Dict(), {1: len}, "must map subclasses of flax.nnx.module.Module, got 1"),
    "another class": (flax.nnx.Dict(), {flax.linen.RMSNorm: len}, "must map subclasses of flax.nnx.module.Module"),
    "a class for a function": (flax.nnx.Dict(), {GemmaNorm: GemmaNorm}, "must map GemmaNorm to a function"),
}


@pytest.mark.parametrize("name", WRONG)
def test_nnx_errors(name):
    model, custom, message = WRONG[name]
    with pytest.raises(TypeError, match=f"^replace_layers: .*{message}"):
        jaxnorm.replace_layers(model, custom)


def test_nnx_a_model_that_a_transformation_makes_is_replaced():
    def create():
        model = flax.nnx.RMSNorm(FEATURES, rngs=flax.nnx.Rngs(0))
        jaxnorm.replace_layers(model)
        return model

    def merge(state):
        model = flax.nnx.merge(definition, state)
        assert jaxnorm.replace_layers(model)[1].replaced
        return model

    definition, state = flax.nnx.split(flax.nnx.LayerNorm(FEATURES, rngs=flax.nnx.Rngs(0)))
    assert type(flax.nnx.jit(create)()) is jaxnorm.nnx.RMSNorm
    assert type(flax.nnx.jit(merge)(state)) is jaxnorm.nnx.LayerNorm


# How the function of a mapping may come by a parameter; all but the first way only read.
READS = {
    "param": lambda norm: norm.param("scale", flax.linen.initializers.normal(), (FEATURES,)),
    "get_variable": lambda norm: norm.get_variable("params", "scale"),
    "variables": lambda norm: norm.variables.get("params", {}).get("scale"),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_linen_a_function_may_only_read(read):
    custom = {norm_models.LinenGemmaNorm: lambda norm, x: jaxnorm.rms_norm(x, read(norm), scale_offset=1.0)}
    variables = LinenMixed().init(jax.random.key(0), draw_x(DIMS))
    with jaxnorm.linen.using_layers(custom) as report:
        within = LinenMixed().init(jax.random.key(0), draw_x(DIMS))
        y = LinenMixed().apply(within, draw_x(DIMS))
    with jaxnorm.linen.using_layers(norm_models.LINEN_CUSTOM):
        assert_close(y, LinenMixed().apply(variables, draw_x(DIMS)))
    assert (dict(report.replaced), bits(within)) == (norm_models.LINEN_REPLACED, bits(variables))


@pytest.mark.parametrize("cls", [jaxnorm.linen.RMSNorm, jaxnorm.linen.LayerNorm])
def test_linen_norms_of_ours_are_left(cls):
    with jaxnorm.linen.using_layers() as report:
        cls().init(jax.random.key(0), draw_x(DIMS))
    assert report.left == [((), cls, "it is jaxnorm's already")]


def layer_formula(x, gamma, beta):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(jnp.square(x - mean).mean(-1, keepdims=True) + 1e-6) * gamma + beta


class LinenLayerNormOfOnes(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x):
        ones = flax.linen.initializers.ones
        return layer_formula(x, *(self.param(name, ones, x.shape[-1:]) for name in ("gamma", "beta")))


class LayerNormOfOnes(flax.nnx.Module):
    def __init__(self):
        self.gamma, self.beta = (flax.nnx.Param(jnp.ones(DIMS[-1])) for _ in range(2))

    def __call__(self, x):
        return layer_formula(x, self.gamma[...], self.beta[...])


def mapping_of(report):
    """The mapping that the report's one line says, as it is pasted into a program."""
    ((_, cls, why),) = report.left
    return eval(re.search(r"custom=({.*?}), and check", why)[1], {"jaxnorm": jaxnorm, cls.__name__: cls})


@pytest.mark.parametrize("library", ["nnx", "linen"])
def test_the_reports_line_computes_their_class(library):
    model = NnxModel(LayerNormOfOnes()) if library == "nnx" else linen_model(LinenLayerNormOfOnes())
    new, report = model.replaced(mapping_of(model.replaced()[1]))
    assert report.replaced
    assert_close(new(draw_x(DIMS)), model(draw_x(DIMS)))


def test_a_class_of_the_mapping_that_the_model_does_not_have_is_named():
    custom = {LayerNormOfOnes: gemma_norm, GemmaNorm: gemma_norm}
    _, report = jaxnorm.replace_layers(GemmaNorm(flax.nnx.Rngs(0)), custom)
    assert report.unused == [LayerNormOfOnes]
    assert str(report).endswith("\nunused    custom: LayerNormOfOnes: there is no module of this class")
    assert not jaxnorm.replace_layers(LayerNormOfOnes(), {flax.nnx.Module: gemma_norm})[1].unused
    with jaxnorm.linen.using_layers(norm_models.LINEN_CUSTOM | {LinenLayerNormOfOnes: gemma_norm}) as report:
        LinenMixed().init(jax.random.key(0), draw_x(DIMS))
    assert report.unused == [LinenLayerNormOfOnes]


MODELS = (LinenMixed(), LinenMixed, mixed)
WRONG_OF_LINEN = {
    "match": ("match", "not guessed.*norm.get_variable.*jaxnorm.linen.compare_layers"),
    "another class": ({GemmaNorm: len}, "must map subclasses of flax.linen.module.Module"),
    **{f"model {i}": (m, r"must be a mapping .*with jaxnorm.linen.using_layers\(\):") for i, m in enumerate(MODELS)},
}


@pytest.mark.parametrize("name", WRONG_OF_LINEN)
def test_linen_errors(name):
    custom, message = WRONG_OF_LINEN[name]
    with pytest.raises(TypeError, match=f"^using_layers: .*{message}"):
        jaxnorm.linen.using_layers(custom)


class KerasModel(EquinoxModel):
    replaced = partialmethod(EquinoxModel._changed, jaxnorm.keras.replace_layers)


# A norm and a linear layer.
LAYERS = {
    "nnx": lambda: NnxModel(flax.nnx.Sequential(flax.nnx.RMSNorm(FEATURES, rngs=RNGS), NamedLinear(RNGS))),
    "linen": lambda: linen_model(flax.linen.Sequential([flax.linen.RMSNorm(), flax.linen.Dense(FEATURES)])),
    "equinox": lambda: EquinoxModel([equinox.nn.RMSNorm(FEATURES), *EquinoxMixed(jax.random.key(0)).mlp.layers[:1]]),
}
LAYERS["keras"] = lambda: KerasModel(keras.Sequential([keras.layers.RMSNormalization(), keras.layers.Dense(FEATURES)]))
RNGS, CHANGES_OF = flax.nnx.Rngs(0), CHANGES | {"jaxnorm's": lambda model: model.replaced()}
ALIKE = [(name, name) for name in CHANGES_OF]
OTHERS = [("quantised", "computed in float8"), ("computed in float8", "quantised")]
SECOND = [("nnx", pair) for pair in ALIKE + OTHERS] + [("linen", pair) for pair in ALIKE + OTHERS[:1]]
SECOND += [("equinox", pair) for pair in ALIKE if "float8" not in pair[0]] + [("keras", ALIKE[-1])]


@pytest.mark.parametrize(("library", "pair"), SECOND)
def test_a_second_time_each_says_what_was_done_before(library, pair):
    first, second = pair
    _, report = CHANGES_OF[second](CHANGES_OF[first](LAYERS[library]())[0])
    assert [why for *_, why in report.left] == [f"it is {first} already"]
    assert not report.replaced
    assert not report.unused


OF_LINEN = {
    "jaxnorm's": partial(jaxnorm.linen.using_layers, {flax.linen.RMSNorm: lambda norm, x: x}),
    "quantised": jaxnorm.linen.using_quantized,
    "computed in float8": jaxnorm.linen.using_float8,
}


@pytest.mark.parametrize(("first", "second"), [*ALIKE, *OTHERS, ("computed in float8", "around quantised")])
def test_contexts_of_linen_say_what_another_has_done(first, second):
    model, contexts = LAYERS["linen"](), [OF_LINEN[first], OF_LINEN[second.removeprefix("around ")]]
    if first == "quantised" or second.startswith("around"):
        model = model.quantised()[0]
    with contexts[0]() as outer, contexts[1]() as inner:
        model.module.apply({"params": model.parameters}, draw_x(DIMS))
    report, done = (outer, "quantised") if second.startswith("around") else (inner, first)
    assert [why for *_, why in report.left] == [f"it is {done} already"]
    assert not report.replaced
    assert not report.unused


@pytest.mark.parametrize(
    ("context", "make"),
    [
        (jaxnorm.linen.using_layers, flax.linen.LayerNorm),
        (jaxnorm.linen.using_float8, partial(flax.linen.Dense, FEATURES)),
    ],
)
def test_linen_scan_of_remat(context, make):
    model, layer, x = scan_of_remat(lambda x: jnp.sin(make(name="layer")(x))), make(), draw_x(DIMS)
    variables = model.init(jax.random.key(0), x, None)

    def run(variables):
        with context() as report:
            y = model.apply(variables, x, None)[0]
        assert report.replaced == [(("layer",), type(layer))]
        return y

    def one_by_one(variables, y=x):
        for i in range(3):
            parameters = jax.tree.map(lambda leaf, i=i: leaf[i], variables["params"]["layer"])
            with context():
                y = y + jnp.sin(layer.apply({"params": parameters}, y))
        return y

    assert_close(run(variables), one_by_one(variables))
    of_run, of_layers = (jax.jit(jax.grad(lambda v, of=of: of(v).sum()))(variables) for of in (run, one_by_one))
    assert_gradients_close(of_run, of_layers)
    if context is jaxnorm.linen.using_layers:
        assert_calls(run, (variables,), native_calls("layer", fwd=1))
