"""`replace_norms(custom="match")`: what norms of a model's own classes compute is found by calling them."""

import re

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import pytest
from cases import bits, draw
from flax_apis import assert_close, assert_gradients_close, scan_of_remat, scanned
from hlo import compiled_text, count_native_calls
from native import native_calls

import jaxnorm
import jaxnorm.linen
import jaxnorm.nnx
from jaxnorm.flax import known

pytestmark = [pytest.mark.jax_version, pytest.mark.any_code]

FEATURES = 24
HALF = jnp.bfloat16


def x_hat(x, epsilon):
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + epsilon)


def gemma(norm, x, scale):
    return (x_hat(x.astype(jnp.float32), norm.eps) * (1 + scale)).astype(x.dtype)


def llama(norm, x, scale):
    return scale * x_hat(x.astype(jnp.float32), norm.eps).astype(x.dtype)


def t5(norm, x, scale):
    return scale * x_hat(x.astype(jnp.float32), 3e-5)


def centred(norm, x, scale):
    x = x - x.mean(-1, keepdims=True)
    return x_hat(x, norm.eps) * scale


def bert(norm, x, bias, scale):
    return centred(norm, x.astype(jnp.float32), scale) + bias


def without_epsilon(norm, x, scale):
    return (x_hat(x.astype(jnp.float32), 0) * scale).astype(x.dtype)


def mamba2(norm, x, gate, scale):
    return gemma(norm, x * jax.nn.silu(gate), scale - 1)


def gated_after(norm, x, gate, scale):
    return gemma(norm, x, scale) * jax.nn.silu(gate)


def optional_gate(norm, x, gate, scale):
    return gemma(norm, x, scale - 1) if gate is None else mamba2(norm, x, gate, scale)


def classes(formula, names, gate=""):
    """A class of each Flax API whose norms compute a formula; `eps` is an attribute that not all of them read."""
    arguments = {"": "x", "gate": "x, gate", "optional": "x, gate=None"}[gate]
    passed = "x, gate" if gate else "x"
    scope = {"formula": formula}
    exec(
        f"def of_nnx(self, {arguments}):\n"
        f"    return formula(self, {passed}, *(getattr(self, name)[...] for name in {names}))\n"
        f"def __call__(self, {arguments}):\n"
        f"    ones = lambda key, shape: 1 + 0.1 * flax.linen.initializers.normal()(key, shape, self.param_dtype)\n"
        f"    return formula(self, {passed}, *(self.param(name, ones, (x.shape[-1],)) for name in {names}))\n",
        globals() | scope,
        scope,
    )

    def __init__(self, dtype=jnp.float32):
        self.eps = 1e-5
        for name in names:
            setattr(self, name, flax.nnx.Param(1 + 0.1 * draw(name, (FEATURES,)).astype(dtype)))

    name = f"{formula.__name__.title().replace('_', '')}Norm"
    fields = {"eps": 1e-5, "param_dtype": jnp.float32}
    annotations = {"eps": float, "param_dtype": object}
    members = {"__call__": flax.linen.compact(scope["__call__"]), "__annotations__": annotations}
    return (
        type(name, (flax.nnx.Module,), {"__init__": __init__, "__call__": scope["of_nnx"]}),
        type(name, (flax.linen.Module,), fields | members),
    )


# The classes of each formula, and the function with the options that it is found to be.
NORMS = {
    "gemma": (classes(gemma, ["scale"]), "rms_norm", "epsilon=norm.eps, scale_offset=1.0"),
    "llama": (classes(llama, ["w"]), "rms_norm", "epsilon=norm.eps, multiply_before_cast=False"),
    "t5": (classes(t5, ["w"]), "rms_norm", "epsilon=3e-05"),
    "centred": (classes(centred, ["scale"]), "layer_norm", "epsilon=norm.eps"),
    "bert": (classes(bert, ["beta", "gamma"]), "layer_norm", "epsilon=norm.eps"),
    "no epsilon": (classes(without_epsilon, ["scale"]), "rms_norm", "epsilon=0.0"),
    "mamba2": (classes(mamba2, ["w"], "gate"), "gated_rms_norm", "epsilon=norm.eps, gate_first=True"),
    "gated after": (
        classes(gated_after, ["w"], "gate"),
        "gated_rms_norm",
        "epsilon=norm.eps, scale_offset=1.0, gate_first=False",
    ),
    "optional gate": (classes(optional_gate, ["w"], "optional"), "rms_norm", "epsilon=norm.eps"),
}
each_norm = pytest.mark.parametrize("name", NORMS)


def arrays_of(name, dtype=jnp.float32):
    x = draw("x", (2, 3, FEATURES)).astype(dtype)
    return (x, draw("gate", x.shape).astype(dtype)) if "gate" in name or name == "mamba2" else (x,)


def made(name, api, dtype=jnp.float32):
    """The norm, and `apply(parameters, *arrays)` with its parameters; `custom` is of `replace_norms`."""
    cls = NORMS[name][0][api == "linen"]
    if api == "linen":
        module = cls(param_dtype=dtype)
        variables = module.init(jax.random.key(0), *arrays_of(name))

        def apply(variables, *arrays, custom=None, report=None):
            if custom is None:
                return module.apply(variables, *arrays)
            with jaxnorm.linen.replace_norms(custom) as filled:
                y = module.apply(variables, *arrays)
            if report is not None:
                report.append(filled)
            return y

        return apply, variables
    definition, state = flax.nnx.split(cls(dtype))

    def apply(state, *arrays, custom=None, report=None):
        module = flax.nnx.merge(definition, state)
        if custom is not None:
            filled = jaxnorm.replace_norms(module, custom)
            if report is not None:
                report.append(filled)
        return module(*arrays)

    return apply, state


def report_of(name, api, dtype=jnp.float32):
    apply, parameters = made(name, api, dtype)
    reports = []
    y = apply(parameters, *arrays_of(name, dtype), custom="match", report=reports)
    return reports[0], y, apply(parameters, *arrays_of(name, dtype))


each_api = pytest.mark.parametrize("api", ["nnx", "linen"])


@each_api
@each_norm
def test_a_norm_is_found(name, api):
    report, y, expected = report_of(name, api)
    classes, function, options = NORMS[name]
    assert report.replaced == [((), classes[api == "linen"])]
    assert not report.left
    assert f"jaxnorm.{function}(x" in report.mapping
    assert options in report.mapping
    assert str(report).endswith(f"\n{report.mapping}")
    assert_close(y, expected)


@each_api
@each_norm
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_norm_in_a_half_type(name, dtype, api):
    report, y, expected = report_of(name, api, dtype)
    assert len(report.replaced) == 1
    assert y.dtype == expected.dtype
    eps = float(jnp.finfo(dtype).eps)
    assert jnp.allclose(y.astype(jnp.float32), expected.astype(jnp.float32), rtol=3 * eps, atol=3 * eps)


@each_api
@each_norm
def test_kernels_run(name, api):
    apply, parameters = made(name, api)
    text = compiled_text(lambda p, *arrays: apply(p, *arrays, custom="match"), parameters, *arrays_of(name))
    kind = "gated_rms" if len(arrays_of(name)) == 2 else "layer" if NORMS[name][1] == "layer_norm" else "rms"
    assert count_native_calls(text) == native_calls(kind, fwd=1)


@each_api
@each_norm
def test_gradients_stay(name, api):
    apply, parameters = made(name, api)
    arrays = arrays_of(name)
    weights = draw("dy", arrays[0].shape)

    def gradients(custom):
        def loss(parameters, *arrays):
            return (apply(parameters, *arrays, custom=custom) * weights).sum()

        return jax.tree.leaves(jax.grad(loss, argnums=tuple(range(1 + len(arrays))))(parameters, *arrays))

    assert_gradients_close(gradients("match"), gradients(None))


@each_api
@each_norm
def test_the_mapping_may_be_pasted(name, api):
    report, y, _ = report_of(name, api)
    cls = NORMS[name][0][api == "linen"]
    names = {cls.__name__: cls, "jaxnorm": jaxnorm, "jnp": jnp}
    custom = eval(f"dict({report.mapping})", names)["custom"]
    apply, parameters = made(name, api)
    assert bits(apply(parameters, *arrays_of(name), custom=custom)) == bits(y)


class Nnx(flax.nnx.Module):
    """Has a parameter; subclasses compute something."""

    def __init__(self):
        self.scale = flax.nnx.Param(jnp.ones(FEATURES))


class Scaled(Nnx):
    def __call__(self, x):
        return x * self.scale[...]


class Capped(Nnx):
    """A norm of rows that are far from 0."""

    def __call__(self, x):
        return x * jax.lax.rsqrt(jnp.maximum(jnp.square(x).mean(-1, keepdims=True), 1e-5)) * self.scale[...]


class OverColumns(Nnx):
    def __call__(self, x):
        return x * jax.lax.rsqrt(jnp.square(x).mean(-2, keepdims=True) + 1e-6) * self.scale[...]


class Strict(Nnx):
    def __call__(self, x):
        raise ValueError("no x is good enough\nfor this norm")


class Counting(Nnx):
    """Counts its calls, in an attribute that is no variable."""

    calls = 0

    def __call__(self, x):
        self.calls += 1
        return x_hat(x, 1e-6) * self.scale[...]


class Dropping(Nnx):
    def __init__(self):
        super().__init__()
        self.rngs = flax.nnx.Rngs(0)

    def __call__(self, x):
        return x_hat(x, 1e-6) * self.scale[...] * (self.rngs.default() is not None)


class Pair(Nnx):
    def __call__(self, x):
        return x_hat(x, 1e-6) * self.scale[...], x


class Third(Nnx):
    def __call__(self, x, y, z):
        return x


LEFT = {
    Scaled: r"it is no norm that jaxnorm has: random rows differ by \d.* of their largest element from the nearest, ",
    Capped: "it is no norm that jaxnorm has: random rows differ by .* rms_norm with epsilon=",
    OverColumns: "it is no norm that jaxnorm has: random rows differ by ",
    Strict: "its call on random rows raises ValueError: no x is good enough$",
    Counting: "its call changes its state$",
    Dropping: "its call changes its state$",
    Pair: "its call gives something else than one array of x's shape$",
    Third: "its call takes no array, or more than two$",
}


@pytest.mark.parametrize("cls", LEFT, ids=lambda cls: cls.__name__)
def test_what_does_not_match_is_left(cls):
    module = cls()
    values, definition = bits(flax.nnx.state(module, flax.nnx.Param)), flax.nnx.graphdef(module)
    report = jaxnorm.replace_norms(module, custom="match")
    ((path, left, why),) = report.left
    assert (path, left, report.replaced, report.mapping) == ((), cls, [], "")
    assert re.match(LEFT[cls], why)
    assert type(module) is cls
    assert flax.nnx.graphdef(module) == definition
    assert bits(flax.nnx.state(module, flax.nnx.Param)) == values


def test_linen_what_does_not_match_is_left():
    class Sowing(flax.linen.Module):
        @flax.linen.compact
        def __call__(self, x):
            self.sow("moments", "mean", x.mean())
            return x_hat(x, 1e-6) * self.param("scale", flax.linen.initializers.ones, x.shape[-1:])

    class Random(flax.linen.Module):
        @flax.linen.compact
        def __call__(self, x):
            noise = jax.random.normal(self.make_rng("noise"), x.shape)
            return noise * self.param("scale", flax.linen.initializers.ones, x.shape[-1:])

    whys = []
    for module in (Sowing(), Random()):
        variables = module.init({"params": jax.random.key(0), "noise": jax.random.key(1)}, *arrays_of("gemma"))
        variables = {"params": variables["params"]}
        with jaxnorm.linen.replace_norms("match") as report:
            module.apply(variables, *arrays_of("gemma"), rngs={"noise": jax.random.key(1)})
        assert not report.replaced
        whys += [why for _, _, why in report.left]
    assert whys[0] == "its call changes its state"
    assert "raises InvalidRngError" in whys[1]


class Convention(flax.nnx.Module):
    """x_hat is rounded to the module's own dtype, whatever x's is."""

    def __init__(self, dtype):
        self.scale, self.dtype = flax.nnx.Param(1 + 0.1 * draw("scale", (FEATURES,))), dtype

    def __call__(self, x, scale_by=1.0):
        return x_hat(x.astype(jnp.float32), 1e-6).astype(self.dtype) * self.scale[...] * scale_by


def test_calls_that_were_not_tried_are_the_modules_own():
    norm, own = Convention(HALF), Convention(HALF)
    assert jaxnorm.replace_norms(norm, "match").replaced
    x = draw("x", (2, 3, FEATURES))
    for arguments, options in [
        ((x,), {}),  # float32, which is rounded to bfloat16 within
        ((x.astype(HALF), 2.0), {}),
        ((x.astype(HALF),), {"scale_by": 2.0}),
        ((x[None, None].astype(HALF),), {}),
    ]:
        assert bits(norm(*arguments, **options)) == bits(own(*arguments, **options))
    assert count_native_calls(compiled_text(norm, x)) == {}
    assert count_native_calls(compiled_text(norm, x.astype(HALF))) == native_calls("rms", fwd=1)
    norm.scale[...] = norm.scale[...].astype(jnp.float16)
    assert norm(x.astype(HALF)).dtype == jnp.promote_types(HALF, jnp.float16)


def gemma_norms(count):
    return flax.nnx.List([NORMS["gemma"][0][0]() for _ in range(count)])


def test_a_model_without_values():
    model = flax.nnx.eval_shape(lambda: gemma_norms(1))
    assert len(jaxnorm.replace_norms(model, "match").replaced) == 1


def test_a_model_that_is_made_in_a_transformation():
    @jax.jit
    def run(x):
        model = gemma_norms(1)
        assert len(jaxnorm.replace_norms(model, "match").replaced) == 1
        return model[0](x)

    (x,) = arrays_of("gemma")
    assert_close(run(x), gemma_norms(1)[0](x))


def test_modules_that_are_alike_are_tried_once(monkeypatch):
    cls, calls = NORMS["gemma"][0][0], []
    own = cls.__call__
    monkeypatch.setattr(cls, "__call__", lambda self, x: calls.append(x) or own(self, x))
    jaxnorm.replace_norms(gemma_norms(1), "match")
    of_one = len(calls)
    jaxnorm.replace_norms(gemma_norms(3), "match")
    assert len(calls) == 2 * of_one > 0


def test_norms_of_a_class_that_differ_are_comments():
    model = gemma_norms(2)
    model[1].eps = 1e-3
    model[1].scale = flax.nnx.Param(model[1].scale[...].astype(jnp.float16))
    model.append(Convention(HALF))
    model.append(Convention(jnp.float32))
    report = jaxnorm.replace_norms(model, "match")
    assert len(report.replaced) == 4
    assert (
        report.mapping
        == """\
custom={
    GemmaNorm: lambda norm, x: jaxnorm.rms_norm(x, norm.scale[...], epsilon=norm.eps, scale_offset=1.0),
    Convention: lambda norm, x: jaxnorm.rms_norm(x, norm.scale[...], epsilon=1e-06, multiply_before_cast=False, \
out_dtype=jnp.result_type(x, norm.scale[...])),
    # others are Convention: lambda norm, x: jaxnorm.rms_norm(x, norm.scale[...], epsilon=1e-06, \
out_dtype=jnp.result_type(x, norm.scale[...])),
}"""
    )


def test_stacked_layers():
    cls = NORMS["gemma"][0][0]
    model = cls()
    model.scale = flax.nnx.Param(draw("scale", (3, FEATURES)))
    x = draw("x", (2, FEATURES))
    expected = scanned(x, model)
    assert jaxnorm.replace_norms(model, "match").replaced == [((), cls)]
    assert_close(scanned(x, model), expected)


def test_what_needs_no_match_is_as_without():
    def model():
        return flax.nnx.List([
            flax.nnx.LayerNorm(FEATURES, rngs=flax.nnx.Rngs(0)),
            flax.nnx.BatchNorm(FEATURES, rngs=flax.nnx.Rngs(0)),
            flax.nnx.Linear(FEATURES, FEATURES, rngs=flax.nnx.Rngs(0)),
            flax.nnx.bridge.ToNNX(flax.linen.LayerNorm(), rngs=flax.nnx.Rngs(0)).lazy_init(*arrays_of("gemma")),
        ])  # fmt: skip

    assert jaxnorm.replace_norms(model(), "match") == jaxnorm.replace_norms(model())


def test_linen_within_init_parameters_stay():
    module = NORMS["gemma"][0][1]()
    with jaxnorm.linen.replace_norms("match") as report:
        within = module.init(jax.random.key(0), *arrays_of("gemma"))
    assert bits(within) == bits(module.init(jax.random.key(0), *arrays_of("gemma")))
    assert (report.replaced, report.left) == ([], [])


def test_linen_a_model_of_layers():
    norm = NORMS["llama"][0][1]
    layer = scan_of_remat(lambda x: norm(name="norm")(x))
    (x,) = arrays_of("llama")
    variables = layer.init(jax.random.key(0), x, None)

    @jax.jit
    def run(variables, x):
        with jaxnorm.linen.replace_norms("match") as report:
            y = layer.apply(variables, x, None)[0]
        assert report.replaced == [(("norm",), norm)]
        return y

    assert_close(run(variables, x), layer.apply(variables, x, None)[0])


@pytest.mark.parametrize("custom", ["Match", "", "find"])
def test_another_string_is_an_error(custom):
    message = f'^replace_norms: custom must be a mapping .* or "match", got {custom!r}'
    with pytest.raises(ValueError, match=message):
        jaxnorm.replace_norms(gemma_norms(1), custom)
    with pytest.raises(ValueError, match=message):
        jaxnorm.linen.replace_norms(custom)


# Stand for classes of libraries that are not installed: what counts is the path.
@pytest.fixture
def known_classes(monkeypatch):
    classes = NORMS["gemma"][0]
    for cls in classes:
        monkeypatch.setattr(cls, "__module__", "somebodys.models")
    entry = known._rms("scale", "eps", 1.0)
    monkeypatch.setitem(known.KNOWN, "somebodys.models.GemmaNorm", entry)
    return classes


@each_api
def test_a_known_class_needs_no_mapping(known_classes, api):
    apply, parameters = made("gemma", api)
    reports = []
    y = apply(parameters, *arrays_of("gemma"), custom={}, report=reports)
    assert reports[0].replaced == [((), known_classes[api == "linen"])]
    assert reports[0].mapping == ""
    assert_close(y, apply(parameters, *arrays_of("gemma")))


def test_a_known_class_twice_and_its_subclasses(known_classes):
    class Named(known_classes[0]):
        pass

    class Other(known_classes[0]):
        def __call__(self, x):
            return x

    model = flax.nnx.List([known_classes[0](), Named(), Other()])
    assert [path for path, _ in jaxnorm.replace_norms(model).replaced] == [(0,), (1,)]
    second = jaxnorm.replace_norms(model)
    assert not second.replaced
    assert [path for path, _, why in second.left if why == "it is jaxnorm's already"] == [(0,), (1,)]


def test_a_mapping_wins_over_the_table(known_classes):
    norm = known_classes[0]()
    jaxnorm.replace_norms(norm, {known_classes[0]: lambda norm, x: x + 1})
    assert norm(jnp.ones(FEATURES))[0] == 2
