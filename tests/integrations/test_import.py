"""Libraries of models are optional: jaxnorm does not import them, and its modules say what is missing."""

import importlib
import importlib.metadata
import re

import pytest
from processes import python

from jaxnorm.ops.misuse import FORMER

pytestmark = pytest.mark.jax_version


# None in sys.modules is how Python marks a module that must not be found.
WITHOUT_FLAX = "import sys; sys.modules['flax'] = None; import jaxnorm"
LIBRARIES = "{'flax', 'equinox', 'keras'}"
PRINTED = {
    f"import sys, jaxnorm; print({LIBRARIES} & set(sys.modules))": "set()\n",
    **{f"import sys, jaxnorm.{module}; print('flax' in sys.modules)": "False\n" for module in ("equinox", "keras")},
    **{
        f"import jaxnorm; assert '{module}' in dir(jaxnorm); print(jaxnorm.{module}.__name__)": f"jaxnorm.{module}\n"
        for module in ("blocks", "equinox", "info", "keras", "linen", "nnx")
    },
    f"import inspect; {WITHOUT_FLAX}; print('info' in [name for name, _ in inspect.getmembers(jaxnorm)])": "True\n",
}


@pytest.mark.parametrize("code", PRINTED)
def test_what_is_imported(code, tmp_path):
    assert python(tmp_path, "-c", code).stdout == PRINTED[code]


@pytest.mark.parametrize("name", [name for name in FORMER if name.startswith("jaxnorm.")])
def test_a_former_name_of_a_module(name):
    module, _, former = name.rpartition(".")
    public, missing = importlib.import_module(module), f"module '{module}' has no attribute "
    with pytest.raises(AttributeError, match=re.escape(f"{missing}'{former}': use {module}.{FORMER[name]}")):
        getattr(public, former)
    assert re.match(r"\w+", FORMER[name])[0] in public.__all__
    with pytest.raises(AttributeError, match=f"^{missing}'lniens'$"):
        _ = public.lniens


def requirement(library):
    """What pyproject.toml asks of it: no index has jaxnorm."""
    return next(text for text in importlib.metadata.requires("jaxnorm") if text.startswith(library)).partition(";")[0]


WITHOUT = "import sys; sys.modules['{0}'] = None; import jaxnorm; assert '{0}' not in dir(jaxnorm); jaxnorm.{0}"
FLAX, ENDS = "flax>=0.12.7", (".nnx", ".linen", "; jaxnorm.nnx", "; jaxnorm.linen", "; jaxnorm.blocks")
MISSING = {
    WITHOUT.format(module): f"jaxnorm.{module} needs {library}: pip install '{requirement(module).strip()}'"
    for module, library in (("equinox", "Equinox"), ("keras", "Keras 3"))
} | {WITHOUT_FLAX + end: f"jaxnorm.nnx and jaxnorm.linen need Flax: pip install '{FLAX}'" for end in ENDS}


@pytest.mark.parametrize("code", MISSING)
def test_a_missing_library_is_named_with_its_remedy(code, tmp_path):
    assert f"ImportError: {MISSING[code]}" in python(tmp_path, "-c", code).stderr


STARTS = "Keras starts on the backend tensorflow, which is not installed; expected jax"
BACKENDS = [("tensorflow", STARTS), ("numpy", "Keras runs on the backend numpy, expected jax")]


@pytest.mark.parametrize(("backend", "message"), BACKENDS)
def test_another_backend_of_keras(backend, message, tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", backend)
    error = python(tmp_path, "-c", "import jaxnorm.keras").stderr
    assert f"ImportError: jaxnorm.keras: {message}. Set the environment variable KERAS_BACKEND=jax" in error


@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_a_broken_flax_shows_its_own_error(api, tmp_path):
    code = f"import sys; sys.modules['flax.core'] = None; import jaxnorm.{api}"
    assert "import of flax.core halted" in python(tmp_path, "-c", code).stderr.splitlines()[-1]
