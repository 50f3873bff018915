"""Which implementation a call gets: by its argument, else by the context, else by the environment."""

import os
import re
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import pytest
from bad_calls import X
from coverage import over
from exporting import PLATFORMS
from hlo import compiled_text, count_native_calls
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from table import ADDED, EACH, GATED, GATED_QUANTIZED, GROUP_NORMS, NORMS, QUANTIZED, ROTARY

import jaxnorm
from jaxnorm import implementation

pytestmark = pytest.mark.jax_version


def norm(x, **options):
    return jaxnorm.rms_norm(x, **options)


def chosen(function=norm, *args, **options):
    """What the calls that are traced were told to be."""
    text = str(jax.make_jaxpr(lambda *args: function(*args, **options))(*(args or (X,))))
    # Formulas of activations and of what is quantised have a primitive too, for its derivative.
    if not re.search("jaxnorm_(?!straight_through|activation)", text):
        return "jnp"
    return None if "native_for=None" in text else "native"


def test_by_default_none_is_chosen():
    assert chosen() is None


@pytest.mark.parametrize("name", ["jnp", pytest.param("native", marks=pytest.mark.kernels)])
def test_a_context_chooses(name):
    with implementation(name):
        assert chosen() == name
    assert chosen() is None


@over((*NORMS, *ADDED, GATED[0], GROUP_NORMS[1], ROTARY[0], *QUANTIZED, *GATED_QUANTIZED))
def test_a_context_is_for_every_op(op):
    function, types = op.run(op.function), op.types(op.small)
    with implementation("jnp"):
        assert chosen(function, *types) == "jnp"
    assert chosen(function, *types) is None


@pytest.mark.kernels
def test_the_argument_wins_over_the_context():
    with implementation("jnp"):
        assert chosen(implementation="native") == "native"
    with implementation("native"):
        assert chosen(implementation="jnp") == "jnp"


@pytest.mark.kernels
def test_contexts_nest_and_none_undoes_them():
    with implementation("native"):
        with implementation("jnp"):
            assert chosen() == "jnp"
            with implementation(None):
                assert chosen() is None
        assert chosen() == "native"


def both():
    return chosen(jaxnorm.layer_norm, X), chosen()


def test_a_mapping_chooses_by_function():
    with implementation({"layer_norm": "jnp"}):
        assert both() == ("jnp", None)
    assert both() == (None, None)


# On top of the contexts around it; a name takes their place.
@pytest.mark.kernels
def test_mappings_nest():
    with implementation("native"), implementation({"layer_norm": "jnp"}):
        assert both() == ("jnp", "native")
        with implementation({"rms_norm": "jnp"}):
            assert both() == ("jnp", "jnp")
        with implementation({"layer_norm": None}):
            assert both() == (None, "native")
        with implementation("native"):
            assert both() == ("native", "native")


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"layernorm": "jnp"}, "no function 'layernorm'; did you mean layer_norm?"),
        ({"dequantize": "jnp"}, "no function 'dequantize'"),
        ({"layer_norm": "xla"}, "unknown implementation 'xla'"),
        (
            {"layer_norm": {"backwards": "jnp"}},
            "layer_norm has no direction 'backwards'; expected 'forward' or 'backward'",
        ),
        ({"layer_norm": {"backward": "xla"}}, "unknown implementation 'xla'"),
        ({"layer_norm": {"backward": {"forward": "jnp"}}}, "unknown implementation {'forward': 'jnp'}"),
    ],
    ids=("misspelt", "without the argument", "unknown", "direction", "of a direction", "nested"),
)
def test_a_mapping_of_unknown_names(choices, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        implementation(choices)


def kernels_of_gradient(function=norm, *args):
    """The native calls of a gradient, by direction."""
    text = jax.jit(jax.grad(lambda *args: function(*args).sum())).lower(*(args or (X,))).as_text()
    return {target.rpartition("_")[2] for target in count_native_calls(text)}


@pytest.mark.kernels
@pytest.mark.parametrize("function", [norm, jaxnorm.layer_norm, jaxnorm.softmax], ids=lambda f: f.__name__)
def test_a_mapping_chooses_by_direction(function):
    name = "rms_norm" if function is norm else function.__name__
    for choices, kept in (
        ({}, {"fwd", "bwd"}),
        ({"forward": "jnp"}, {"bwd"}),
        ({"backward": "jnp"}, {"fwd"}),
        ({"forward": "native", "backward": "jnp"}, {"fwd"}),
        ({"forward": "jnp", "backward": "native"}, {"bwd"}),
        ({"forward": "jnp", "backward": "jnp"}, set()),
    ):
        with implementation({name: choices}):
            assert kernels_of_gradient(function) == kept


# What one direction keeps the other reads, whichever of the two makes it.
@pytest.mark.kernels
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("op", EACH, ids=str)
def test_a_gradient_of_which_one_direction_is_the_formula(op, direction):
    args, gradient = op.draw(op.small), op.gradient()
    with implementation({op.public: "native"}):
        native = jax.jit(gradient)(*args)
        with implementation({op.public: {direction: "jnp"}}):
            program = jax.jit(gradient).lower(*args)
    kept = op.backward if direction == "forward" else op.forward
    assert count_native_calls(program.as_text()) == {kept: 1}
    for mixed, of_kernels in zip(program.compile()(*args), native, strict=True):
        assert jnp.allclose(mixed.astype("float32"), of_kernels.astype("float32"), rtol=1e-4, atol=1e-5)


# On top of the contexts around it, each direction by itself.
@pytest.mark.kernels
def test_directions_nest():
    with implementation("jnp"):
        with implementation({"rms_norm": {"backward": "native"}}):
            assert kernels_of_gradient() == {"bwd"}
            with implementation({"rms_norm": {"forward": None, "backward": "jnp"}}):
                assert kernels_of_gradient() == {"fwd"}
        assert kernels_of_gradient() == set()


# XLA splits the formula of one direction, and calls the kernel of the other on each device.
@pytest.mark.kernels
@pytest.mark.several
@pytest.mark.parametrize(("direction", "kept"), [("forward", "bwd"), ("backward", "fwd")])
def test_directions_over_a_mesh(devices, direction, kept):
    mesh = jax.make_mesh((len(devices),), ("i",), (AxisType.Auto,), devices=devices)
    x = jax.device_put(jnp.ones((len(devices), 4, 8)), NamedSharding(mesh, P("i")))
    with implementation({"rms_norm": {direction: "jnp"}}):
        text = compiled_text(jax.grad(lambda x: norm(x).sum()), x)
    assert count_native_calls(text) == {f"jaxnorm_rms_norm_{kept}": 1}


# What `linear_cross_entropy` calls within follows its directions.
@pytest.mark.kernels
def test_directions_of_what_calls_others():
    args = X[0], X[0].T, jnp.zeros(X[0].shape[0], "int32")
    with implementation({"linear_cross_entropy": {"backward": "jnp"}}):
        assert kernels_of_gradient(jaxnorm.linear_cross_entropy, *args) == {"fwd"}
    with implementation({"linear_cross_entropy": {"forward": "jnp"}}):
        assert kernels_of_gradient(jaxnorm.linear_cross_entropy, *args) == {"bwd"}


@pytest.mark.kernels
def test_an_error_of_one_direction():
    message = r"^rms_norm under jaxnorm.implementation\(\{'rms_norm': \{'backward': 'native'\}\}\): .* trailing"
    with implementation({"rms_norm": {"backward": "native"}}), pytest.raises(RuntimeError, match=message):
        norm(X, axis=0)


def test_an_error_names_the_function_that_a_mapping_chose_for():
    message = r"^rms_norm under jaxnorm.implementation\(\{'rms_norm': 'native'\}\): .* trailing"
    with implementation({"rms_norm": "native"}), pytest.raises(RuntimeError, match=message):
        norm(X, axis=0)


def test_a_context_ends_with_an_error():
    with pytest.raises(ZeroDivisionError), implementation("jnp"):
        raise ZeroDivisionError
    assert chosen() is None


def test_a_decorator():
    @implementation("jnp")
    def function(x, depth=2):
        return norm(x) if depth == 0 else function(x, depth - 1)

    assert function.__name__ == "function"
    assert [chosen(function) for _ in range(2)] == ["jnp", "jnp"]
    assert chosen() is None


def test_a_context_within_a_jitted_function():
    @jax.jit
    def function(x):
        with implementation("jnp"):
            return norm(x)

    assert chosen(function) == "jnp"


@pytest.mark.kernels
def test_jit_keeps_what_was_traced_in_each_context_apart():
    traced = []

    @jax.jit
    def function(x):
        traced.append(chosen(norm, x))
        return norm(x)

    for _ in range(2):
        function(X)
        for name in ("jnp", "native", "jnp"):
            with implementation(name):
                function(X)
    assert traced == [None, "jnp", "native"]


# JAX keeps what it has traced of inner functions too.
@pytest.mark.parametrize(
    "outer", [jax.jit, jax.grad, jax.checkpoint, jax.vmap, jax.linearize], ids=lambda f: f.__name__
)
def test_inner_functions_are_traced_in_each_context(outer):
    inner = jax.jit(lambda x: norm(x).sum())
    function = (lambda x: jax.linearize(inner, x)[0]) if outer is jax.linearize else outer(inner)
    assert chosen(function) is None
    with implementation("jnp"):
        assert chosen(function) == "jnp"
    assert chosen(function) is None


def test_a_loop_in_a_context():
    def function(x):
        return jax.lax.scan(lambda x, _: (norm(x), None), x, length=3)[0]

    with implementation("jnp"):
        assert chosen(function) == "jnp"
    assert chosen(function) is None


def test_a_context_is_of_its_thread():
    entered, seen = threading.Event(), threading.Event()
    found = {}

    def first():
        with implementation("jnp"):
            entered.set()
            assert seen.wait(60)
            found["first"] = chosen()

    def second():
        assert entered.wait(60)
        found["second"] = chosen()
        seen.set()

    threads = [threading.Thread(target=target) for target in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"first": "jnp", "second": None}


def test_an_exported_program_stays_what_it_was():
    with implementation("jnp"):
        formula = export.export(jax.jit(norm), platforms=PLATFORMS)(X)
    kernels = export.export(jax.jit(norm), platforms=PLATFORMS)(X)
    assert not count_native_calls(formula.mlir_module())
    assert jnp.allclose(formula.call(X), kernels.call(X))


@pytest.mark.kernels
def test_kernels_are_exported_after_the_formula():
    with implementation("jnp"):
        export.export(jax.jit(norm), platforms=PLATFORMS)(X)
    assert count_native_calls(export.export(jax.jit(norm), platforms=PLATFORMS)(X).mlir_module())


@pytest.mark.parametrize("op", EACH, ids=str)
def test_a_derivative_in_the_context_of_the_formula(op):
    types = op.types(op.small)
    with implementation("jnp"):
        assert not count_native_calls(jax.jit(op.gradient()).lower(*types).as_text())


def test_an_unknown_name():
    with pytest.raises(ValueError, match=r"^implementation: unknown implementation 'cuda'; expected None, 'native' or"):
        implementation("cuda")


def test_an_error_says_that_the_context_asked():
    message = r"^rms_norm under jaxnorm.implementation\('native'\): .* trailing"
    with implementation("native"), pytest.raises(RuntimeError, match=message):
        norm(X, axis=0)


PROGRAM = """
import jax, jax.numpy as jnp, jaxnorm
def chosen():
    text = str(jax.make_jaxpr(lambda x: jaxnorm.rms_norm(x))(jnp.ones((2, 8))))
    return "jnp" if "jaxnorm_" not in text else "default" if "native_for=None" in text else "native"
print(chosen())
for name in ("jnp", "native", None):
    with jaxnorm.implementation(name):
        print(chosen())
try:
    jaxnorm.rms_norm(jnp.ones((2, 8)), axis=0)
except RuntimeError as error:
    print(error)
"""


def run(value, directory, program):
    environment = {**os.environ, "JAXNORM_IMPLEMENTATION": value}
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=directory, capture_output=True, text=True
    )


@pytest.mark.kernels
@pytest.mark.parametrize("value", ["", "jnp", "native"])
def test_the_environment_is_the_default(value, tmp_path):
    lines = run(value, tmp_path, PROGRAM).stdout.splitlines()
    assert lines[:4] == [value or "default", "jnp", "native", value or "default"]
    assert [line.partition(":")[0] for line in lines[4:]] == ["rms_norm with JAXNORM_IMPLEMENTATION=native"] * (
        value == "native"
    )


def test_an_unknown_name_in_the_environment(tmp_path):
    printed = run("cuda", tmp_path, "import jaxnorm")
    assert printed.returncode == 1
    assert "ValueError: JAXNORM_IMPLEMENTATION=cuda, expected native or jnp" in printed.stderr
