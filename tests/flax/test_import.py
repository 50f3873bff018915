"""Flax is optional: jaxnorm does not import it, and its modules say what is missing."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.jax_version


def run_python(code, tmp_path):
    """Runs `code` in a fresh interpreter, away from the clone's root."""
    return subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)


def test_jaxnorm_does_not_import_flax(tmp_path):
    code = "import sys, jaxnorm; sys.exit('flax' in sys.modules)"
    assert run_python(code, tmp_path).returncode == 0


@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_a_missing_flax_is_named_with_its_remedy(api, tmp_path):
    # None in sys.modules is how Python marks a module that must not be found.
    code = f"import sys; sys.modules['flax'] = None; import jaxnorm.{api}"
    assert "ImportError: jaxnorm.nnx and jaxnorm.linen need Flax: pip install 'jaxnorm[flax]'" in (
        run_python(code, tmp_path).stderr
    )


@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_a_broken_flax_shows_its_own_error(api, tmp_path):
    code = f"import sys; sys.modules['flax.core'] = None; import jaxnorm.{api}"
    assert "import of flax.core halted" in run_python(code, tmp_path).stderr.splitlines()[-1]
