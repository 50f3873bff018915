"""`jaxnorm.explain`, and the warnings where XLA's code runs though a kernel was to be expected."""

import inspect
import json
import os
import sys
import warnings
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import jax.export
import jax.numpy as jnp
import keras
import pytest
from bad_calls import INT8, of_x
from flax import linen, nnx
from internals import choose_fastest, fallback, functions
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P
from native import without_cuda
from processes import python

import jaxnorm
from jaxnorm import info, linen as jaxnorm_linen, nnx as jaxnorm_nnx

pytestmark = pytest.mark.jax_version

HERE = Path(__file__).name
X, SCALE = jnp.ones((4, 8)), jnp.ones(8)
HALF, MIXED = X.astype("float16"), "x is float16 and the result bfloat16"


def norm(x):
    return jaxnorm.rms_norm(x, SCALE)


def mixed(x):
    return jaxnorm.layer_norm(x.astype("float16"), out_dtype="bfloat16").astype("float32")


NUMBER = {function: function.__code__.co_firstlineno + 1 for function in (norm, mixed)}


def custom_vjp(function):
    wrapped = jax.custom_vjp(function)
    wrapped.defvjp(lambda x: jax.vjp(function, x), lambda pullback, dy: pullback(dy))
    return wrapped


def custom_jvp(function):
    wrapped = jax.custom_jvp(function)
    wrapped.defjvp(lambda x, dot: jax.jvp(function, x, dot))
    return wrapped


def sharded(function):
    mesh = jax.make_mesh((1,), ("i",), (AxisType.Auto,))
    return jax.shard_map(function, mesh=mesh, in_specs=P("i"), out_specs=P("i"))


def scan(function):
    return lambda x: lax.scan(lambda c, _: (c + function(c), None), x, None, length=2)


# How a norm may lie in a program.
AT_ANY_DEPTH = {"a call": lambda f: f, "jit": jax.jit, "jit of jit": lambda f: jax.jit(lambda x: jax.jit(f)(x) + 1)}
AT_ANY_DEPTH |= {"scan": scan, "scan of checkpoint of jit": lambda f: scan(jax.checkpoint(jax.jit(f)))}
AT_ANY_DEPTH |= {"while": lambda f: lambda x: lax.while_loop(lambda c: c.sum() < 9, lambda c: c + f(c), x)}
AT_ANY_DEPTH |= {"cond": lambda f: lambda x: lax.cond(x.sum() > 0, f, lambda x: x, x), "checkpoint": jax.checkpoint}
AT_ANY_DEPTH |= {"custom_vjp": custom_vjp, "custom_jvp": custom_jvp, "vmap": jax.vmap, "shard_map": sharded}


def summary(explained, platform="cpu"):
    return [(norm.name, norm.direction, norm.on(platform).implementation) for norm in explained]


@pytest.mark.parametrize("wrap", AT_ANY_DEPTH.values(), ids=AT_ANY_DEPTH)
@pytest.mark.parametrize(
    ("function", "expected", "why"),
    [
        pytest.param(norm, ("rms_norm", "forward", "native"), "", marks=pytest.mark.needs("kernels"), id="kernel"),
        pytest.param(mixed, ("layer_norm", "forward", "xla"), MIXED, id="formula"),
    ],
)
def test_at_any_depth(wrap, function, expected, why):
    explained = jaxnorm.explain(wrap(function), X)
    assert summary(explained) == [expected]
    assert f"{HERE}:{NUMBER[function]} ({function.__name__})" in explained[0].line
    assert all(why in runs.why for runs in explained[0].runs)


# JAX does not trace again what it has traced, and so would not tell of a formula.
def test_of_a_function_that_was_traced_before():
    function = jax.jit(mixed)
    function(X)
    assert summary(jaxnorm.explain(lambda x: function(x), X)) == summary(jaxnorm.explain(function, X)) != []


def loss(x):
    return norm(x).sum() + mixed(x).sum()


@pytest.mark.needs("kernels")
def test_directions():
    explained = jaxnorm.explain(jax.grad(loss), X)
    ways = [("rms_norm", "forward", "native"), ("rms_norm", "backward", "native"), ("layer_norm", "forward", "xla")]
    assert summary(explained) == ways
    assert ("rms_norm", "tangent", "xla") in summary(jaxnorm.explain(lambda x: jax.jvp(norm, (x,), (x,)), X))


KERNEL_8 = jaxnorm.quantize_kernel(X.T, INT8)
# By what the public functions call themselves, and why no kernel serves them.
CALLS = {
    **{name: (of_x(name), None) for name in functions()},
    "quantize_kernel": (of_x("quantize_kernel"), "none for cpu"),
    "quantized_dot": (lambda x: jaxnorm.quantized_dot(x, KERNEL_8), "none for cpu"),
    "float8_linear": (of_x("float8_linear"), "none for cpu"),
    "embedding": (of_x("embedding"), "XLA gathers rows"),
    "rms_norm": (partial(jaxnorm.rms_norm, implementation="xla"), "is asked for"),
    "layer_norm": (lambda x: jaxnorm.layer_norm(x, axis=0), "not the trailing axes"),
}


@pytest.mark.needs("kernels")
@pytest.mark.parametrize("name", CALLS)
def test_every_function(name):
    function, why = CALLS[name]
    first, *others = jaxnorm.explain(function, X)
    runs = first.on("cpu")
    assert (first.name, runs.implementation) == (name, "xla" if why else "native")
    assert (why or "has a kernel") in runs.why
    assert {call.direction for call in (first, *others)} == {"forward"}

    def loss(x):
        return sum(leaf.sum() for leaf in jax.tree.leaves(function(x)) if leaf.dtype == jnp.float32)

    # A gradient of what has one is listed under no other name.
    differentiated = jaxnorm.explain(jax.grad(loss), X) if "quantize" not in name else ()
    assert {call.name for call in differentiated} <= {name}


# `quantize_kernel` has no argument `implementation`, products have no kernel on CPUs, a lookup has one for its
# gradient, and the two last calls have none whatever is chosen.
NOT_CHOSEN = ("quantize_kernel", "quantized_dot", "float8_linear", "embedding", "rms_norm", "layer_norm")
CHOSEN = [name for name in CALLS if name not in NOT_CHOSEN]


@pytest.mark.needs("kernels")
@pytest.mark.parametrize("chosen", ["xla", "native"])
@pytest.mark.parametrize("name", CHOSEN)
def test_where_a_choice_comes_from(name, chosen):
    with jaxnorm.implementation({name: chosen}):
        first, *_ = jaxnorm.explain(CALLS[name][0], X)
    why = first.on("cpu").why
    assert "is asked for" in why
    assert why.endswith(f" under jaxnorm.implementation({{{name!r}: {chosen!r}}})")


@pytest.mark.needs("kernels")
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("chosen", ["xla", "native"])
def test_where_the_choice_of_a_direction_comes_from(direction, chosen):
    with jaxnorm.implementation({"rms_norm": {direction: chosen}}):
        explained = jaxnorm.explain(jax.grad(lambda x: norm(x).sum()), X)
    whys = {norm.direction: norm.on("cpu") for norm in explained}
    asked = whys.pop(direction)
    assert asked.implementation == chosen
    assert "is asked for" in asked.why
    assert asked.why.endswith(f" under jaxnorm.implementation({{'rms_norm': {{{direction!r}: {chosen!r}}}}})")
    (other,) = whys.values()
    assert (other.implementation, other.why) == ("native", "jaxnorm._cpu has a kernel")


@pytest.mark.needs("kernels")
@pytest.mark.parametrize("chosen", [None, "xla", "native"])
@pytest.mark.parametrize(("name", "way"), [("embedding", "backward"), ("segment_sum", "forward")])
def test_the_direction_that_is_sums_of_rows_has_the_kernel(name, way, chosen):
    with jaxnorm.implementation({name: chosen}):
        explained = jaxnorm.explain(jax.grad(lambda x: jnp.sin(of_x(name)(x)).sum()), X)
    assert [call.direction for call in explained] == ["forward", "backward"]
    for call in explained:
        runs = call.on("cpu")
        assert runs.implementation == ((chosen or "native") if call.direction == way else "xla")
        assert ("is asked for" in runs.why) == (call.direction == way and chosen is not None)


@pytest.mark.needs("kernels")
@pytest.mark.parametrize(
    ("cols", "dtype", "runs"), [(511, "float32", "xla"), (512, "float32", "native"), (8, HALF.dtype, "native")]
)
def test_short_sums_are_left_to_xla_on_a_cpu(monkeypatch, cols, dtype, runs):
    choose_fastest(monkeypatch)
    (call,) = jaxnorm.explain(of_x("segment_sum"), jax.ShapeDtypeStruct((4, cols), dtype))
    assert call.on("cpu").implementation == runs


def test_every_public_function_is_known():
    of_models = {"compare_layers", "float8_linears", "quantize_linears", "replace_layers", "restore_layers"}
    others = {"explain", "implementation", "tune"} | of_models
    named = {name for name in jaxnorm.__all__ if inspect.isfunction(getattr(jaxnorm, name))} - others
    assert set(functions()) == named


# Of a CPU's installation on a machine without a GPU: the reason once, and no advice to build for CUDA.
@pytest.mark.parametrize("gpu", [False, True])
def test_what_holds_for_all_calls_is_told_once(monkeypatch, gpu):
    without_cuda(monkeypatch, gpu=gpu)
    text = str(jaxnorm.explain(jax.grad(lambda x: norm(x).sum() + jaxnorm.softmax(x).sum()), X))
    assert (text.count("built without CUDA"), text.count("JAXNORM_CUDA=1")) == (1, gpu)


def test_arguments_that_are_no_arrays():
    (row,) = jaxnorm.explain(jaxnorm.group_norm, X, num_groups=2, activation="silu", implementation=None)
    assert (row.name, row.direction) == ("group_norm", "forward")
    (row,) = jaxnorm.explain(jaxnorm.rms_norm, jax.ShapeDtypeStruct((4, 8), "float32"), epsilon=1e-5)
    assert row.name == "rms_norm"


OF_ARRAY = r"must be a function, got an array float32\[4, 8\]; .*explain\(jaxnorm.rms_norm, x\), and not its result"
NO_FUNCTION = {
    "array": (X, OF_ARRAY),
    "text": ("program:step", "got 'program:step'; .*--explain"),
    "none": (None, "got NoneType; pass the function and its arguments apart"),
}


@pytest.mark.parametrize("name", NO_FUNCTION)
def test_what_is_no_function(name):
    value, message = NO_FUNCTION[name]
    with pytest.raises(TypeError, match=f"(?s)^explain: .*{message}"):
        jaxnorm.explain(value)


@pytest.mark.needs("kernels")
def test_an_ensemble_of_weights():
    (row, *_) = jaxnorm.explain(jax.vmap(lambda scale: jaxnorm.rms_norm(X, scale)), jnp.ones((3, 8)))
    assert row.on("cpu").implementation == "xla"
    assert "jax.vmap" in row.on("cpu").why


def test_operands():
    (row, *_) = jaxnorm.explain(norm, jax.ShapeDtypeStruct((2, 3, 8), "bfloat16"))
    assert row.operands == ("x: bfloat16[2,3,8]", "scale: float32[8]")


def test_it_is_a_table_and_a_tuple():
    explained = jaxnorm.explain(loss, X)
    text = str(explained)
    assert repr(explained) == text
    assert [word in text for word in ("line", "cpu", "cuda", MIXED, "x: float16[4,8]")] == [True] * 5
    assert isinstance(explained, tuple)
    assert (len(explained), str(jaxnorm.explain(jnp.sin, X))) == (2, "no function of jaxnorm is in this program")


PROGRAM = """
import jax, jax.numpy as jnp, jaxnorm

def step():
    return jax.grad(lambda x: jaxnorm.rms_norm(x, axis=0).sum())(jnp.ones((4, 8)))
"""


def run(directory, *arguments, **environment):
    (directory / "program.py").write_text(PROGRAM)
    path = os.pathsep.join((str(directory), str(Path(jaxnorm.__file__).parents[1])))
    return python(directory, *arguments, **{"JAX_PLATFORMS": "cpu", "PYTHONPATH": path, **environment})


def test_the_command(tmp_path):
    printed = run(tmp_path, "-m", "jaxnorm.info", "--explain", "program:step").stdout
    assert "program.py:5" in printed
    assert "not the trailing axes" in printed
    row, *_ = json.loads(run(tmp_path, "-m", "jaxnorm.info", "--json", "--explain", "program:step").stdout)
    assert (row["name"], row["runs"][0]["implementation"]) == ("rms_norm", "xla")


# What stands behind --explain and names no function, and the remedy; in no case a traceback.
@pytest.mark.parametrize(
    ("name", "message"),
    [
        *(("program", "write module:function"), (":step", "write module:function")),
        *(("./program.py:step", "write module:function"), ("program.py:step", "did you mean program:step?")),
        *(("progam:step", "there is no module 'progam'"), ("program:stop", "has no 'stop'; did you mean step?")),
        *(("program:X", "program:X is an array float32[4, 8]"), ("program:takes_x", "takes arguments")),
    ],
)
def test_a_name_that_names_no_function(tmp_path, monkeypatch, capsys, name, message):
    (tmp_path / "program.py").write_text(f"{PROGRAM}\nX = jnp.ones((4, 8))\n\ndef takes_x(x):\n    return x\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "program", raising=False)
    with pytest.raises(SystemExit, match="2"):
        info.main(["--explain", name])
    assert message in capsys.readouterr().err


def test_an_error_of_the_function_itself_is_shown(tmp_path, monkeypatch):
    (tmp_path / "program_of_error.py").write_text("import nowhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        info.main(["--explain", "program_of_error:step"])


def test_a_warning_where_it_is_asked_for(tmp_path):
    program = "import program; program.step(); program.step()"
    assert run(tmp_path, "-c", program).stderr == ""
    told = run(tmp_path, "-c", program, JAXNORM_WARN_FALLBACK="1").stderr
    assert told.count("UserWarning") == 1
    assert "program.py:5: UserWarning: rms_norm, forward: jaxnorm runs XLA's code and no kernel, because the no" in told


@pytest.fixture
def warns(monkeypatch):
    monkeypatch.setattr(fallback, "_warns", True)
    monkeypatch.setattr(fallback, "_told", set())


@pytest.mark.needs("kernels")
@pytest.mark.parametrize("function", [mixed, CALLS["layer_norm"][0]], ids=["dtypes", "axes"])
def test_a_warning_for_each_line(warns, function):
    with pytest.warns(UserWarning, match="jaxnorm runs XLA's code and no kernel") as told:
        function(X)
    function(X)
    assert [Path(warning.filename).name for warning in told] == [HERE]


@pytest.mark.needs("kernels")
@pytest.mark.parametrize("of", [norm, CALLS["rms_norm"][0], of_x("gated_rms_norm")], ids=["kernel", "asked", "gate"])
def test_no_warning_where_all_is_as_expected(warns, of):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.jit(of).lower(X).compile()
        jax.export.export(jax.jit(of), platforms=["tpu"])(X)


# More than a grid has blocks: what tells it on any machine, and is what lowering asks.
MANY = {"rms_norm": (2**31, 8), "softmax": (2**20, 2**11, 8), "qk_norm_rotary": (2**27, 16, 8)}
MANY |= {"qkv_norm_rotary": (2**27, 16, 8), "softmax_cross_entropy_with_integer_labels": (2**31, 8)}


@pytest.mark.needs("plans")
@pytest.mark.parametrize("way", ["forward", "gradient"])
@pytest.mark.parametrize("name", MANY)
def test_more_rows_than_a_grid(name, way):
    def loss(x):
        return jax.tree.leaves(of_x(name)(x))[0].astype("float32").sum()

    called = of_x(name) if way == "forward" else jax.grad(loss)
    explanation = jaxnorm.explain(called, jax.ShapeDtypeStruct(MANY[name], "bfloat16"))
    on_cuda = [run for norm in explanation for run in norm.runs if run.platform == "cuda"]
    assert on_cuda
    assert all(run.implementation == "xla" and "2147483648 rows" in run.why for run in on_cuda)


def test_a_function_of_jaxnorm_has_the_line_of_explain():
    (norm,) = jaxnorm.explain(jaxnorm.rms_norm, jnp.ones((2, 8)))
    assert norm.line.endswith("(test_a_function_of_jaxnorm_has_the_line_of_explain)")


def of_nnx():
    return nnx.Sequential(jaxnorm_nnx.RMSNorm(8, rngs=nnx.Rngs(0)), nnx.Linear(8, 8, rngs=nnx.Rngs(0)))


LAYERS = {
    "nnx": of_nnx,
    "equinox": lambda: eqx.filter_jit(eqx.filter_vmap(eqx.nn.Sequential([jaxnorm.equinox.RMSNorm(8)]))),
    "keras": lambda: keras.Sequential([keras.Input((8,)), jaxnorm.keras.RMSNormalization()]),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_has_the_users_line(name):
    model = LAYERS[name]()

    def program(x):
        return model(x)

    (norm,) = jaxnorm.explain(program, X)
    assert HERE in norm.line
    assert norm.line.endswith("program)")


def test_a_module_of_which_no_line_is_the_users():
    module = linen.Sequential([jaxnorm_linen.LayerNorm(), linen.Dense(8)])
    (norm,) = jaxnorm.explain(module.apply, module.init(jax.random.key(0), X), X)
    assert "Sequential.__call__" in norm.line
