"""All signatures beside one table, the docstring of `jaxnorm`: an argument has one place, one default, one meaning."""

import doctest
import inspect
import re

import equinox
import flax
import jax
import jax.numpy as jnp
import keras
import pytest

import jaxnorm
from jaxnorm import blocks, checkpoint_policies, linen, nnx

pytestmark = pytest.mark.jax_version

# The arguments in order, with their defaults; a function may require one that has a default here.
TABLE = dict(re.findall(r"^- `(\w+)(?:=(.+?))?`: ", jaxnorm.__doc__, re.MULTILINE))
PLACES = list(TABLE)
MODULES = (jaxnorm, blocks, checkpoint_policies, jaxnorm.equinox, jaxnorm.keras, linen, nnx)
PUBLIC = {(m.__name__, name): getattr(m, name) for m in MODULES for name in m.__all__}
PUBLIC = {key: value for key, value in PUBLIC.items() if inspect.isfunction(value) or isinstance(value, type)}
# What has another default or meaning: a norm of groups has no activation unless one is asked for, as in Flax; a layer
# of NNX is told the heads of queries and of keys.
OTHERS = {*((name, "activation") for name in ("group_norm", "GroupNorm", "InstanceNorm")), ("QKNormRotary", "heads")}


def signatures(value):
    """The parameters of a function; of a layer those of each own constructor that no class of its library has."""
    if not isinstance(value, type):
        return [list(inspect.signature(value).parameters.values())]
    own = [base for base in value.__mro__ if base.__module__.startswith("jaxnorm.")]
    theirs = {p for base in {*value.__mro__} - {*own} for p in inspect.signature(base.__init__).parameters}
    is_layer = issubclass(value, (equinox.Module, flax.linen.Module, flax.nnx.Module, keras.layers.Layer))
    inits = [vars(base)["__init__"] for base in own if "__init__" in vars(base) and is_layer]
    return [[p for p in inspect.signature(init).parameters.values() if p.name not in theirs] for init in inits]


each_public = pytest.mark.parametrize(("module", "name"), PUBLIC)


@each_public
def test_arguments_have_one_place_and_one_default(module, name):
    for signature in signatures(PUBLIC[module, name]):
        known = [p for p in signature if p.name in TABLE and (name, p.name) not in OTHERS]
        for kind in {p.kind for p in known}:
            names = [p.name for p in known if p.kind is kind]
            # A layer of Linen has its fields in the order of its bases.
            assert names == sorted(names, key=PLACES.index) or module == "jaxnorm.linen"
        for p in known:
            assert p.default is p.empty or p.default == eval(TABLE[p.name], vars(jaxnorm)), p.name
        if module == "jaxnorm" and signature and signature[0].name in TABLE:
            assert {p.name for p in signature} <= TABLE.keys()


def test_arguments_of_models_have_one_default():
    functions = [value for value in PUBLIC.values() if not isinstance(value, type)]
    names = [name for name, _ in {(p.name, repr(p.default)) for f in functions for p in signatures(f)[0]}]
    assert [name for name in names if names.count(name) > 1 and name not in TABLE] == []


@each_public
def test_each_argument_has_an_entry_of_its_own(module, name):
    text, known = PUBLIC[module, name].__doc__ or "", str(inspect.signature(PUBLIC[module, name]))
    entries = re.findall(r"^  (\S[^:]*): ", inspect.cleandoc(text).partition("\nArgs:\n")[2].partition("\n\n")[0], re.M)
    assert [entry for entry in entries if not re.search(rf"[(\s]{re.escape(entry)}\b", known)] == []


@each_public
def test_docstrings_are_short_and_their_examples_run(module, name):
    value = PUBLIC[module, name]
    text = value.__doc__ or ""
    test = doctest.DocTestParser().get_doctest(text, vars(jaxnorm) | {"jax": jax, "jnp": jnp}, name, None, None)
    assert doctest.DocTestRunner(verbose=False).run(test).failed == 0
    assert 0 < len(text.splitlines()) <= 25
    assert test.examples or module != "jaxnorm" or isinstance(value, type)
