"""cuBLASLt is found where it is, and where it is not that is said; no GPU is asked."""

import sys
import types

import pytest
from internals import cublaslt, ffi
from processes import python

pytestmark = pytest.mark.needs("plans")

# In a process of its own, since a library that is open stays so.
OPEN = """
import importlib, sys
print(importlib.import_module("jaxnorm._cuda").cublaslt(sys.argv[1:]))
"""


def open_in_fresh_process(*paths) -> str:
    run = python(None, "-c", OPEN, *map(str, paths))
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def is_on_the_loaders_path() -> bool:
    return open_in_fresh_process() == ""


def make_wheel(root, package, name):
    library = root.joinpath(*package.split("."), "lib", name)
    library.parent.mkdir(parents=True)
    library.touch()
    return library


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """An empty directory in which packages are looked for, and nowhere else."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in [name for name in sys.modules if name.split(".")[0] == "nvidia"]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


OLD, NEW = ("nvidia.cublas", "libcublasLt.so.12"), ("nvidia.cu13", "libcublasLt.so.13")


def test_a_wheel_without_the_library(environment):
    assert cublaslt.paths() == []
    (environment / "nvidia" / "cublas").mkdir(parents=True)
    assert cublaslt.paths() == []


# The newer comes first.
@pytest.mark.parametrize("wheels", [[NEW], [OLD], [NEW, OLD]])
def test_the_wheel_of_each_cuda(environment, wheels):
    libraries = [make_wheel(environment, *wheel) for wheel in reversed(wheels)]
    assert cublaslt.paths() == [str(library) for library in reversed(libraries)]
    assert not any(name.split(".")[0] == "nvidia" and "." in name for name in sys.modules)


def test_where_it_was_looked_for_is_said(tmp_path):
    names = ["libcublasLt.so.13", "libcublasLt.so.12"]
    broken, missing = (tmp_path / name for name in names)
    broken.write_text("no library")
    reason = open_in_fresh_process(broken, missing)
    if is_on_the_loaders_path():
        assert reason == ""
    else:
        assert reason.startswith("cuBLASLt was not found")
        assert [name for name in (*names, str(broken), str(missing)) if name not in reason] == []


def test_another_library_will_not_do():
    reason = open_in_fresh_process("libc.so.6")
    assert reason == "" if is_on_the_loaders_path() else "libc.so.6 lacks functions" in reason


def test_a_reason_has_a_remedy():
    reason = cublaslt.why_not()
    assert reason is None or "pip install" in reason


def test_the_workspace_is_the_same_for_all_shapes():
    sizes = {ffi.module("cuda").workspace("jaxnorm_quantized_dot", "bfloat16", cols) for cols in (16, 4096, 1 << 20)}
    assert sizes == {(0, 8 << 20)}


# As of a process that was short of memory when it first asked.
def test_a_failure_is_not_kept(monkeypatch):
    reasons = iter(["not loaded", "no memory", ""])
    monkeypatch.setattr(ffi, "available", lambda platform: True)
    monkeypatch.setattr(ffi, "module", lambda platform: types.SimpleNamespace(cublaslt=lambda paths: next(reasons)))
    assert cublaslt.why_not().startswith("no memory; ")
    assert cublaslt.why_not() is None
