"""The native modules load; where they do not, the package works without and says why."""

import json
import shutil
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import KINDS, NORMS, operands
from formulas import norm as formula
from internals import GROUP_SIZES, LONGEST_GATED, LONGEST_PER_HEAD, SMALLEST_SCALE, ffi
from native import why_not_native
from processes import python


# Without this a package built wrongly would pass every other test in jnp.
@pytest.mark.needs("kernels")
def test_the_native_kernels_are_under_test():
    assert why_not_native() is None


# Python decides by these which calls have a kernel, also where no module is loaded.
@pytest.mark.needs("kernels")
@pytest.mark.parametrize("platform", list(filter(ffi.available, ffi.PLATFORMS)))
def test_limits_are_those_of_the_kernels(platform):
    assert ffi.module(platform).limits() == {
        "per_head_cols": LONGEST_PER_HEAD,
        "gated_cols": LONGEST_GATED,
        "rotary_cols": 512,
        "groups": GROUP_SIZES,
        "smallest_scale": SMALLEST_SCALE,
    }


# A tangent has no kernel on any platform: asking for the native norm asks for that of y.
@pytest.mark.needs("kernels")
@pytest.mark.parametrize("kind", KINDS)
def test_tangents_of_native_by_name(kind):
    x, scale, bias = operands((5, 64))
    native, exact = partial(NORMS[kind], implementation="native"), formula(kind)
    _, y_dot = jax.jvp(lambda x: native(x, scale, bias), (x,), (jnp.cos(x),))
    _, expected = jax.jvp(lambda x: exact(x, scale, bias), (x,), (jnp.cos(x),))
    np.testing.assert_allclose(y_dot, expected, rtol=1e-4, atol=1e-5)


def run(directory, program):
    """A fresh Python on CPU."""
    return python(directory, "-c", program, JAX_PLATFORMS="cpu")


# A library that the module needs is missing, or built for something else: the loader raises ImportError.
BREAK_NATIVE = """
import importlib.abc, sys
class Broken(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name in ("jaxnorm._cpu", "jaxnorm._cuda"):
            raise ImportError("libmissing.so.7: cannot open shared object file")
sys.meta_path.insert(0, Broken())
import numpy as np
import jax
import jaxnorm
x = np.arange(12, dtype=np.float32).reshape(3, 4)
"""


# In a program, in plain jnp, and how near they are.
OF_BROKEN = {
    "y": ("jax.jit(jaxnorm.rms_norm)", formula("rms"), {"rtol": 1e-6}),
    "gradient": (
        "jax.grad(lambda x: (jaxnorm.layer_norm(x) ** 3).sum())",
        jax.grad(lambda x: (formula("layer")(x) ** 3).sum()),
        {"rtol": 1e-3, "atol": 1e-5},
    ),
}


@pytest.mark.parametrize("name", OF_BROKEN)
def test_a_broken_module_leaves_the_formula(tmp_path, name):
    program, expected, tolerance = OF_BROKEN[name]
    printed = run(tmp_path, f"{BREAK_NATIVE}print(np.asarray({program}(x)).tolist())").stdout
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    np.testing.assert_allclose(json.loads(printed), expected(x), **tolerance)


def test_native_by_name_says_why_a_module_is_broken(tmp_path):
    printed = run(tmp_path, BREAK_NATIVE + "jaxnorm.rms_norm(x, implementation='native')").stderr
    assert "RuntimeError: rms_norm: " in printed
    assert "libmissing.so.7" in printed


def test_info_says_why_a_module_is_broken(tmp_path):
    program = BREAK_NATIVE + "import runpy; sys.argv = ['info']; runpy.run_module('jaxnorm.info', run_name='__main__')"
    assert "libmissing.so.7" in run(tmp_path, program).stdout


# Ops of several families, each way; JAX starts where it asks for the first array.
USE = """
import jax, jax.numpy as jnp
import jaxnorm
x = jnp.ones((3, 4))
jax.grad(lambda x: jaxnorm.rms_norm(x).sum())(x), jaxnorm.layer_norm(x), jaxnorm.softmax(x)
"""
BREAK = BREAK_NATIVE.partition("import numpy")[0]
ERROR = 'ImportError("libmissing.so.7: cannot open shared object file")'
OLD_GLIBC = BREAK.replace(ERROR, """ImportError("version `GLIBC_2.99' not found")""")
NOT_BUILT = BREAK.replace(ERROR, 'ModuleNotFoundError("no module", name=name)')


def copy_of_the_package(directory, share):
    """A copy in which so much of the CPU's library is there."""
    source, copy = Path(ffi.__file__).parents[1], directory / "jaxnorm"
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    library = Path(ffi.module("cpu").__file__)
    (copy / library.name).write_bytes(library.read_bytes()[: int(share * library.stat().st_size)])


def told_by(directory, program):
    done = run(directory, program)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stderr.splitlines() if "Warning: " in line]


# Of a library that ends too early the loader reads what is not there, which ends the process.
@pytest.mark.needs("kernels")
def test_one_warning_where_a_library_is_truncated(tmp_path):
    copy_of_the_package(tmp_path, share=0.9)
    (warning,) = told_by(tmp_path, USE)
    assert "XLA's code on cpu: jaxnorm._cpu does not load" in warning
    assert "too short" in warning
    assert "install jaxnorm again" in warning


def test_one_warning_where_a_library_does_not_load(tmp_path):
    (warning,) = told_by(tmp_path, OLD_GLIBC + USE)
    assert "jaxnorm._cpu does not load (version `GLIBC_2.99' not found)" in warning


def test_one_warning_where_the_wheel_has_no_kernels(tmp_path):
    (warning,) = told_by(tmp_path, NOT_BUILT + "from jaxnorm.native import ffi; ffi.only_python = lambda: True\n" + USE)
    assert "this is jaxnorm's wheel without kernels" in warning


def test_no_warning_where_nothing_was_built(tmp_path):
    assert told_by(tmp_path, NOT_BUILT + USE) == []


def test_importing_the_package_starts_no_backend(tmp_path):
    program = "import jaxnorm; from jax._src import xla_bridge; print(xla_bridge.backends_are_initialized())"
    assert run(tmp_path, program).stdout == "False\n"
