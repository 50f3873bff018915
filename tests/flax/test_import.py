"""Libraries of models are optional: jaxnorm does not import them, and its modules say what is missing."""

import importlib.metadata
import subprocess
import sys

import pytest

import jaxnorm

pytestmark = pytest.mark.jax_version


def run_python(code, tmp_path):
    """Runs `code` in a fresh interpreter, away from the clone's root."""
    return subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)


def test_jaxnorm_does_not_import_a_library_of_models(tmp_path):
    code = "import sys, jaxnorm; sys.exit(bool({'flax', 'equinox', 'keras'} & set(sys.modules)))"
    assert run_python(code, tmp_path).returncode == 0


@pytest.mark.parametrize("module", ["equinox", "keras"])
def test_their_modules_do_not_import_flax(module, tmp_path):
    code = f"import sys, jaxnorm.{module}; sys.exit('flax' in sys.modules)"
    assert run_python(code, tmp_path).returncode == 0


@pytest.mark.parametrize("module", ["blocks", "equinox", "info", "keras", "linen", "nnx"])
def test_a_module_is_imported_when_it_is_first_named(module, tmp_path):
    code = f"import jaxnorm; assert '{module}' in dir(jaxnorm); print(jaxnorm.{module}.__name__)"
    assert run_python(code, tmp_path).stdout == f"jaxnorm.{module}\n"


def test_a_name_that_jaxnorm_has_not():
    with pytest.raises(AttributeError, match=r"^module 'jaxnorm' has no attribute 'lniens'$"):
        _ = jaxnorm.lniens


# None in sys.modules is how Python marks a module that must not be found.
WITHOUT_FLAX = "import sys; sys.modules['flax'] = None; import jaxnorm"


@pytest.mark.parametrize("end", [".nnx", ".linen", "; jaxnorm.nnx", "; jaxnorm.linen", "; jaxnorm.blocks"])
def test_a_missing_flax_is_named_with_its_remedy(end, tmp_path):
    code = WITHOUT_FLAX + end
    assert "ImportError: jaxnorm.nnx and jaxnorm.linen need Flax: pip install 'flax>=0.12.7'" in (
        run_python(code, tmp_path).stderr
    )


@pytest.mark.parametrize(("module", "library"), [("equinox", "Equinox"), ("keras", "Keras 3")])
def test_another_missing_library_is_named_with_its_remedy(module, library, tmp_path):
    code = f"import sys; sys.modules['{module}'] = None; import jaxnorm; assert '{module}' not in dir(jaxnorm)"
    error = run_python(f"{code}; jaxnorm.{module}", tmp_path).stderr
    # What pyproject.toml asks of the library: no index has jaxnorm.
    requirement = next(text for text in importlib.metadata.requires("jaxnorm") if text.startswith(module))
    asked = requirement.partition(";")[0].strip()
    assert f"ImportError: jaxnorm.{module} needs {library}: pip install '{asked}'" in error


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("tensorflow", "Keras starts on the backend tensorflow, which is not installed; expected jax"),
        ("numpy", "Keras runs on the backend numpy, expected jax"),
    ],
)
def test_another_backend_of_keras(backend, message, tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", backend)
    error = run_python("import jaxnorm.keras", tmp_path).stderr
    assert f"ImportError: jaxnorm.keras: {message}. Set the environment variable KERAS_BACKEND=jax" in error


def test_without_flax_dir_shows_what_can_be_had(tmp_path):
    code = f"{WITHOUT_FLAX}; names = [name for name, _ in inspect.getmembers(jaxnorm)]; print('info' in names)"
    assert run_python(f"import inspect; {code}", tmp_path).stdout == "True\n"


@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_a_broken_flax_shows_its_own_error(api, tmp_path):
    code = f"import sys; sys.modules['flax.core'] = None; import jaxnorm.{api}"
    assert "import of flax.core halted" in run_python(code, tmp_path).stderr.splitlines()[-1]
