"""Kernels that do not run on the GPU that is there, or lack cuBLASLt: XLA's code runs, and the remedy is named."""

import sys
from types import SimpleNamespace

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from formulas import norm as formula
from hlo import count_native_calls
from internals import fallback, ffi, fit
from processes import python

import jaxnorm
from jaxnorm import info

CUDA_12, CUDA_13 = "12.8.93", "13.0.88"


# What was compiled; the GPU with what the reason says, None for a kernel; by a new toolkit and with a new driver.
COMPILED = {
    "90-real": {"9.0": None, "8.9": "built for 90-real", "10.0": "compute capability 10.0"},
    "90": {"10.0": None},
    "90-virtual": {"9.0": None, "8.0": "built for 90-virtual"},
    # Machine code runs on later GPUs of its major version, and not on earlier ones.
    "80-real": {"8.6": None},
    "86-real": {"8.0": "built for 86-real"},
    "100-real": {"10.3": None},
    "80-real 86-real 89-real": {"9.0": "built for 80-real, 86-real, 89-real"},
    "75-virtual 80-real 90-real": {"12.1": None, "7.0": "JAXNORM_CUDA_ARCHITECTURES=70"},
    # Code with features of one GPU, or of its family.
    "90a": {"9.0": None, "10.0": "built for 90a"},
    "100f": {"10.3": None, "12.0": "built for 100f"},
    # CMake's own names say nothing here.
    "native": {"9.0": None},
    "all-major": {"6.0": None},
}
OLDER = [
    ("90-real", CUDA_13, "9.0", 0, None),
    ("90", CUDA_13, "12.0", 13010, None),
    # Older drivers: of another major version, and where they would have to compile PTX.
    ("90", CUDA_13, "9.0", 12080, "driver is of CUDA 12.8"),
    ("90", CUDA_12, "9.0", 12040, None),
    ("90", CUDA_12, "9.0", 13000, None),
    ("90", CUDA_12, "10.0", 12040, "PTX alone"),
    ("90", CUDA_12, "10.0", 12080, None),
    ("90", CUDA_12, "9.0", 12020, "12.4 or newer"),
]
NEW = [(code, CUDA_13, gpu, 13000, why) for code, whys in COMPILED.items() for gpu, why in whys.items()]


@pytest.mark.parametrize(("architectures", "toolkit", "capability", "driver", "reason"), [*NEW, *OLDER])
def test_why_not(architectures, toolkit, capability, driver, reason):
    found = fit.why_not(architectures=architectures, toolkit=toolkit, capability=capability, driver=driver)
    assert found is None if reason is None else reason in str(found)


# Of kernels for an H100.
MODULE = SimpleNamespace(
    architectures=lambda: "90-real", toolkit=lambda: CUDA_13, driver=lambda: 13000, workspace=lambda *_, **__: (0, 0)
)


@pytest.fixture
def machine(monkeypatch):
    """Makes this one, as far as can be seen, one with those GPUs."""

    def set_up(*capabilities):
        monkeypatch.setitem(ffi._modules, "cuda", MODULE)
        monkeypatch.setattr(ffi, "capabilities", lambda: set(capabilities))
        ffi.why_unfit.cache_clear()
        monkeypatch.setattr(fallback, "_told", set())

    yield set_up
    ffi.why_unfit.cache_clear()


def native_calls(function, *args):
    new = jax.jit(lambda *args: function(*args))  # JAX remembers what it made of another
    return sum(count_native_calls(jax.export.export(new, platforms=["cuda"])(*args).mlir_module()).values())


X = jnp.ones((4, 8))


@pytest.mark.parametrize("capabilities", [(), ("9.0",), ("9.0", "9.0")], ids=str)
def test_kernels_where_they_run_or_no_gpu_is_there(machine, capabilities):
    machine(*capabilities)
    assert native_calls(jaxnorm.rms_norm, X) == 1
    assert ffi.why_unfit("cuda") is None


@pytest.mark.parametrize("capabilities", [("8.0",), ("9.0", "12.0")], ids=str)
def test_the_formula_where_they_do_not(machine, capabilities):
    machine(*capabilities)
    with pytest.warns(UserWarning, match=rf"compute capability {capabilities[-1]}; build jaxnorm for it"):
        assert native_calls(jax.grad(lambda x: jaxnorm.rms_norm(x).sum()), X) == 0


def test_one_warning_only(machine):
    machine("8.0")
    with pytest.warns(UserWarning, match="build jaxnorm for it"):
        native_calls(jaxnorm.rms_norm, X)
    assert native_calls(jaxnorm.layer_norm, X) == 0  # a second one would be an error


def test_native_by_name_is_an_error(machine):
    machine("8.0")
    message = r"rms_norm: .*cannot (be compiled for cuda|serve this call): .*capability 8\.0"
    with pytest.raises(RuntimeError, match=message):
        native_calls(lambda x: jaxnorm.rms_norm(x, implementation="native"), X)


def test_other_platforms_are_as_before(machine):
    machine("8.0")
    with jax.default_device(jax.devices("cpu")[0]):
        np.testing.assert_allclose(jax.jit(jaxnorm.rms_norm)(np.asarray(X)), formula("rms")(X), rtol=1e-6)
    assert ffi.why_unfit("cpu") is None


def test_info_says_it(machine, capsys):
    machine("8.0")
    info.main(["--json", "--platform", "cuda"])
    report = capsys.readouterr().out
    assert '"implementation": "xla"' in report
    assert report.count("compute capability 8.0") == 2


@pytest.mark.needs("plans")
def test_the_module_knows_the_driver():
    assert ffi.module("cuda").driver() >= 0


# cuBLASLt is found where it is, and where it is not that is said; no GPU is asked.
plans = pytest.mark.needs("plans")
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


WHEEL_12, WHEEL_13 = ("nvidia.cublas", "libcublasLt.so.12"), ("nvidia.cu13", "libcublasLt.so.13")


@plans
def test_a_wheel_without_the_library(environment):
    assert ffi.cublaslt_paths() == []
    (environment / "nvidia" / "cublas").mkdir(parents=True)
    assert ffi.cublaslt_paths() == []


# The newer comes first.
@plans
@pytest.mark.parametrize("wheels", [[WHEEL_13], [WHEEL_12], [WHEEL_13, WHEEL_12]])
def test_the_wheel_of_each_cuda(environment, wheels):
    libraries = [make_wheel(environment, *wheel) for wheel in reversed(wheels)]
    assert ffi.cublaslt_paths() == [str(library) for library in reversed(libraries)]
    assert not any(name.split(".")[0] == "nvidia" and "." in name for name in sys.modules)


@plans
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


@plans
def test_another_library_will_not_do():
    reason = open_in_fresh_process("libc.so.6")
    assert reason == "" if is_on_the_loaders_path() else "libc.so.6 lacks functions" in reason


@plans
def test_a_reason_has_a_remedy():
    reason = ffi.why_no_cublaslt()
    assert reason is None or "pip install" in reason


@plans
def test_the_workspace_is_the_same_for_all_shapes():
    sizes = {ffi.module("cuda").workspace("jaxnorm_quantized_dot", "bfloat16", cols) for cols in (16, 4096, 1 << 20)}
    assert sizes == {(0, 8 << 20)}


# As of a process that was short of memory when it first asked.
@plans
def test_a_failure_is_not_kept(monkeypatch):
    reasons = iter(["not loaded", "no memory", ""])
    monkeypatch.setattr(ffi, "available", lambda platform: True)
    monkeypatch.setattr(ffi, "module", lambda platform: SimpleNamespace(cublaslt=lambda paths: next(reasons)))
    assert ffi.why_no_cublaslt().startswith("no memory; ")
    assert ffi.why_no_cublaslt() is None
