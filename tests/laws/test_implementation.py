"""Which implementation a call gets: by its argument, else by the context, else by the environment."""

import contextlib
import re
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest
from bad_calls import X
from coverage import over
from exporting import PLATFORMS
from hlo import compiled_text, count_native_calls
from jax import export
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from native import is_platform_with_kernels
from processes import python
from table import ADDED, EACH, GATED, GATED_QUANTIZED, GROUP_NORMS, NORMS, QKV_ROTARY, QUANTIZED, ROTARY

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
        return "xla"
    return None if "native_for=None" in text else "native"


@over((*NORMS, *ADDED, GATED[0], GROUP_NORMS[1], ROTARY[0], *QUANTIZED, *GATED_QUANTIZED))
def test_a_context_is_for_every_op(op):
    function, types = op.run(op.function), op.types(op.small)
    with implementation("xla"):
        assert chosen(function, *types) == "xla"
    assert chosen(function, *types) is None


@pytest.mark.needs("kernels")
def test_the_argument_wins_over_the_context():
    with implementation("xla"):
        assert chosen(implementation="native") == "native"
    with implementation("native"):
        assert chosen(implementation="xla") == "xla"


def both():
    return chosen(jaxnorm.layer_norm, X), chosen()


OF_LAYER, OF_RMS, LEFT = {"layer_norm": "xla"}, {"rms_norm": "xla"}, {"layer_norm": None}
# Contexts, from the outermost, and what layer_norm and rms_norm are under the innermost. A mapping stands on top of the
# contexts around it; a name takes their place.
NESTED = (
    *((("xla",), ("xla", "xla")), ((OF_LAYER,), ("xla", None)), (("native",), ("native", "native"))),
    *((("native", "xla"), ("xla", "xla")), (("native", "xla", None), (None, None))),
    *((("native", OF_LAYER), ("xla", "native")), (("native", OF_LAYER, OF_RMS), ("xla", "xla"))),
    *((("native", OF_LAYER, LEFT), (None, "native")), (("native", OF_LAYER, "native"), ("native", "native"))),
)


@pytest.mark.parametrize(
    ("contexts", "found"),
    [pytest.param(*row, marks=[pytest.mark.needs("kernels")] * ("native" in row[0])) for row in NESTED],
)
def test_contexts_nest(contexts, found):
    with contextlib.ExitStack() as around, implementation(contexts[0]):
        before = both()
        for context in contexts[1:]:
            around.enter_context(implementation(context))
        assert both() == found
        around.close()
        assert both() == before
    assert both() == (None, None)


UNKNOWN = {
    "misspelt": ({"layernorm": "xla"}, "no function 'layernorm'; did you mean layer_norm?"),
    "without the argument": ({"dequantize": "xla"}, "no function 'dequantize'"),
    "former": ({"layer_norm": "jnp"}, "'jnp' is 'xla' now"),
    "way": (
        {"softmax": {"backwards": "xla"}},
        "softmax has no direction 'backwards'; expected 'forward' or 'backward'",
    ),
    "of a direction": ({"layer_norm": {"backward": "XLA"}}, "unknown implementation 'XLA'"),
    "nested": ({"layer_norm": {"backward": {"forward": "xla"}}}, "unknown implementation {'forward': 'xla'}"),
    "no mapping": ("cuda", "implementation: unknown implementation 'cuda'; expected None, 'native' or"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_names(name):
    choices, message = UNKNOWN[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        implementation(choices)


def kernels_of_gradient(function=norm, *args):
    """The native calls of a gradient, by direction."""
    text = jax.jit(jax.grad(lambda *args: function(*args).sum())).lower(*(args or (X,))).as_text()
    return {target.rpartition("_")[2] for target in count_native_calls(text)}


KEPT = (
    *(({}, {"fwd", "bwd"}), ({"forward": "xla"}, {"bwd"}), ({"backward": "xla"}, {"fwd"})),
    *(({"forward": "native", "backward": "xla"}, {"fwd"}), ({"forward": "xla", "backward": "native"}, {"bwd"})),
    ({"forward": "xla", "backward": "xla"}, set()),
)


@pytest.mark.needs("kernels")
@pytest.mark.parametrize("function", [jaxnorm.rms_norm, jaxnorm.layer_norm, jaxnorm.softmax], ids=lambda f: f.__name__)
def test_a_mapping_chooses_by_direction(function):
    for choices, kept in KEPT:
        with implementation({function.__name__: choices}):
            assert kernels_of_gradient(function) == kept


# What one direction keeps the other reads, whichever of the two makes it.
@pytest.mark.needs("kernels")
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("op", [*EACH, QKV_ROTARY[0]], ids=str)
def test_a_gradient_of_which_one_direction_is_the_formula(op, direction):
    args, gradient = op.draw(op.small), op.gradient()
    with implementation({op.public: "native"}):
        native = jax.jit(gradient)(*args)
        with implementation({op.public: {direction: "xla"}}):
            program = jax.jit(gradient).lower(*args)
    kept = op.backward if direction == "forward" else op.forward
    assert count_native_calls(program.as_text()) == {kept: 1}
    for mixed, of_kernels in zip(program.compile()(*args), native, strict=True):
        assert jnp.allclose(mixed.astype("float32"), of_kernels.astype("float32"), rtol=1e-4, atol=1e-5)


@pytest.mark.needs("kernels")
def test_directions_nest():
    with implementation("xla"):
        with implementation({"rms_norm": {"backward": "native"}}):
            assert kernels_of_gradient() == {"bwd"}
            with implementation({"rms_norm": {"forward": None, "backward": "xla"}}):
                assert kernels_of_gradient() == {"fwd"}
        assert kernels_of_gradient() == set()


ways = pytest.mark.parametrize(("direction", "kept"), [("forward", "bwd"), ("backward", "fwd")])


@pytest.mark.needs("kernels")
@ways
def test_directions_over_a_mesh(devices, direction, kept):
    mesh = jax.make_mesh((len(devices),), ("i",), (AxisType.Auto,), devices=devices)
    x = jax.device_put(jnp.ones((len(devices), 4, 8)), NamedSharding(mesh, P("i")))
    with implementation({"rms_norm": {direction: "xla"}}):
        text = compiled_text(jax.grad(lambda x: norm(x).sum()), x)
    assert count_native_calls(text) == {f"jaxnorm_rms_norm_{kept}": 1}


@pytest.mark.needs("kernels")
@ways
def test_directions_of_what_calls_others(direction, kept):
    args = X[0], X[0].T, jnp.zeros(X[0].shape[0], "int32")
    with implementation({"linear_cross_entropy": {direction: "xla"}}):
        assert kernels_of_gradient(jaxnorm.linear_cross_entropy, *args) == {kept}


BACKWARD = {"rms_norm": {"backward": "native"}}


@pytest.mark.parametrize(
    "choice", ["native", {"rms_norm": "native"}, pytest.param(BACKWARD, marks=pytest.mark.needs("kernels"))], ids=str
)
def test_an_error_names_the_context_that_chose(choice):
    message = rf"^rms_norm under jaxnorm.implementation\({re.escape(repr(choice))}\): .* trailing"
    with implementation(choice), pytest.raises(RuntimeError, match=message):
        norm(X, axis=0)


def test_a_context_ends_with_an_error():
    with pytest.raises(ZeroDivisionError), implementation("xla"):
        raise ZeroDivisionError
    assert chosen() is None


def test_a_decorator():
    @implementation("xla")
    def function(x, depth=2):
        return norm(x) if depth == 0 else function(x, depth - 1)

    assert (function.__name__, [chosen(function) for _ in range(2)]) == ("function", ["xla", "xla"])
    assert chosen() is None


def test_a_context_within_a_jitted_function():
    @jax.jit
    def function(x):
        with implementation("xla"):
            return norm(x)

    assert chosen(function) == "xla"


@pytest.mark.needs("kernels")
def test_jit_keeps_what_was_traced_in_each_context_apart():
    traced = []

    @jax.jit
    def function(x):
        traced.append(chosen(norm, x))
        return norm(x)

    for _ in range(2):
        function(X)
        for name in ("xla", "native", "xla"):
            with implementation(name):
                function(X)
    assert traced == [None, "xla", "native"]


# JAX keeps what it has traced of inner functions too.
INNER = jax.jit(lambda x: norm(x).sum())
OUTER = {
    **{outer.__name__: outer(INNER) for outer in (jax.jit, jax.grad, jax.checkpoint, jax.vmap)},
    "linearize": lambda x: jax.linearize(INNER, x)[0],
    "scan": lambda x: jax.lax.scan(lambda x, _: (norm(x), None), x, length=3)[0],
}


@pytest.mark.parametrize("name", OUTER)
def test_inner_functions_are_traced_in_each_context(name):
    assert chosen(OUTER[name]) is None
    with implementation("xla"):
        assert chosen(OUTER[name]) == "xla"
    assert chosen(OUTER[name]) is None


def test_a_context_is_of_its_thread():
    with ThreadPoolExecutor(1) as thread:
        with implementation("xla"):
            assert (chosen(), thread.submit(chosen).result()) == ("xla", None)
        other = implementation("xla")
        thread.submit(other.__enter__).result()
        assert (chosen(), thread.submit(chosen).result()) == (None, "xla")
        thread.submit(other.__exit__, None, None, None).result()


def test_an_exported_program_stays_what_it_was():
    with implementation("xla"):
        formula = export.export(jax.jit(norm), platforms=PLATFORMS)(X)
    kernels = export.export(jax.jit(norm), platforms=PLATFORMS)(X)
    calls = [bool(count_native_calls(program.mlir_module())) for program in (formula, kernels)]
    assert calls == [False, is_platform_with_kernels()]
    assert jnp.allclose(formula.call(X), kernels.call(X))


@pytest.mark.parametrize("op", EACH, ids=str)
def test_a_derivative_in_the_context_of_the_formula(op):
    types = op.types(op.small)
    with implementation("xla"):
        assert not count_native_calls(jax.jit(op.gradient()).lower(*types).as_text())


PROGRAM = """
import jax, jax.numpy as jnp, jaxnorm
def chosen():
    text = str(jax.make_jaxpr(lambda x: jaxnorm.rms_norm(x))(jnp.ones((2, 8))))
    return "xla" if "jaxnorm_" not in text else "default" if "native_for=None" in text else "native"
print(chosen())
for name in ("xla", "native", None):
    with jaxnorm.implementation(name):
        print(chosen())
try:
    jaxnorm.rms_norm(jnp.ones((2, 8)), axis=0)
except RuntimeError as error:
    print(error)
"""


def run(value, directory, program):
    return python(directory, "-c", program, JAXNORM_IMPLEMENTATION=value)


@pytest.mark.needs("kernels")
@pytest.mark.parametrize("value", ["", "xla", "native"])
def test_the_environment_is_the_default(value, tmp_path):
    lines = run(value, tmp_path, PROGRAM).stdout.splitlines()
    assert lines[:4] == [value or "default", "xla", "native", value or "default"]
    assert [line.partition(":")[0] for line in lines[4:]] == ["rms_norm with JAXNORM_IMPLEMENTATION=native"] * (
        value == "native"
    )


def test_an_unknown_name_in_the_environment(tmp_path):
    printed = run("cuda", tmp_path, "import jaxnorm")
    assert printed.returncode == 1
    assert "ValueError: JAXNORM_IMPLEMENTATION=cuda, expected native or xla" in printed.stderr
