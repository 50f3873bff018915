"""The contexts of `jaxnorm.linen`: `jax.jit` keeps apart what it has traced in each."""

import threading
from contextlib import ExitStack

import flax.linen
import jax
import jax.numpy as jnp
import pytest
from flax_apis import assert_same

from jaxnorm import Float8Recipe, linen

X = jnp.ones((4, 32))
TRACED: list[flax.linen.Module] = []


class Model(flax.linen.Module):
    """Its second half is traced by itself."""

    @flax.linen.compact
    def __call__(self, x):
        TRACED.append(self)
        return flax.linen.jit(Part)(name="part")(flax.linen.Dense(32)(flax.linen.RMSNorm()(x)))


class Part(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x):
        # Of numbers that XLA rounds in one way, whatever it compiles them with.
        return flax.linen.Dense(32, kernel_init=flax.linen.initializers.uniform(1.0))(flax.linen.LayerNorm()(x))


def quantized(variables):
    return linen.quantize_linears(Model(), variables, X, kernels=jnp.int8)[0]


def nothing(norm, x):
    return x


def is_first(path, module):
    return path == ("Dense_0",)


CONTEXTS = {
    "using_layers": linen.using_layers,
    "a mapping": lambda: linen.using_layers({flax.linen.RMSNorm: nothing}),
    "using_float8": linen.using_float8,
    "another recipe": lambda: linen.using_float8(Float8Recipe(save="inputs")),
    "only": lambda: linen.using_float8(only=is_first),
    "using_quantized": linen.using_quantized,
    "quantized inputs": lambda: linen.using_quantized(jnp.int8),
}


def start():
    return jax.jit(lambda variables: Model().apply(variables, X)), Model().init(jax.random.key(0), X)


def within(step, variables, *names):
    """What the contexts' reports have, and the program."""
    with ExitStack() as stack:
        reports = [stack.enter_context(CONTEXTS[name]()) for name in names]
        if any("quantized" in name for name in names):
            variables = quantized(variables)
        program = str(step.trace(variables).jaxpr)
    return [report.replaced for report in reports], program


@pytest.mark.parametrize("first", [None, "using_layers", "using_float8"])
@pytest.mark.parametrize("name", CONTEXTS)
def test_a_program_is_traced_in_each_context(name, first):
    step, variables = start()
    fresh = within(*start(), name)
    assert all(fresh[0])
    within(step, variables, *([first] if first else []))
    if first != name:
        assert within(step, variables, name) == fresh
    assert within(step, variables)[1] == within(*start())[1] != fresh[1]


@pytest.mark.parametrize("name", CONTEXTS)
def test_equal_contexts_share_a_program(name):
    (step, _), variables = start(), variables_of(name)
    TRACED.clear()
    for turn in range(3):
        with CONTEXTS[name]() as report:
            jax.eval_shape(step, variables)
        assert bool(report.replaced) == (turn == 0)
    assert (len(TRACED), str(report)) == (1, "nothing to replace in what was traced within")


def variables_of(name):
    variables = Model().init(jax.random.key(0), X)
    return quantized(variables) if "quantized" in name else variables


@pytest.mark.parametrize("name", CONTEXTS)
def test_parameters_are_made_within_as_without(name):
    with CONTEXTS[name]():
        within = Model().init(jax.random.key(0), X)
    assert_same(within, Model().init(jax.random.key(0), X))


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_context_captures_each_call_once(name):
    with CONTEXTS[name]():
        _, captured = Model().apply(variables_of(name), X, capture_intermediates=True)
    calls = flax.traverse_util.flatten_dict(captured["intermediates"])
    assert {len(results) for results in calls.values()} == {1}


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_context_decorates_a_function(name):
    variables = variables_of(name)
    decorated = CONTEXTS[name]()(lambda variables: Model().apply(variables, X))
    with CONTEXTS[name]():
        expected = Model().apply(variables, X)
    assert_same(decorated(variables), expected)


LINEARS = ("using_float8", "using_quantized")


@pytest.mark.parametrize("names", [pair for of in LINEARS for pair in (("using_layers", of), (of, "using_layers"))])
def test_contexts_nest(names):
    step, variables = start()
    for inner in names:
        within(step, variables, inner)
    both = within(step, variables, *names)
    assert both == within(*start(), *names)
    assert all(both[0])


def test_a_context_is_of_its_thread():
    step, variables = start()
    found = {}
    with linen.using_layers():
        thread = threading.Thread(target=lambda: found.update(other=within(step, variables)[1]))
        thread.start()
        thread.join()
        assert within(step, variables)[1] != found["other"]
    assert within(step, variables)[1] == found["other"]
