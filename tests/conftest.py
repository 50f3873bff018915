"""One suite for every platform: what it tests is the installed package on JAX's default backend."""

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

# First: it lets the installed jaxnorm come before the clone's, which has no native modules.
import bench  # noqa: F401

# A mesh needs devices, and one CPU can stand for several. Must be set before JAX is imported.
_FLAGS = os.environ.get("XLA_FLAGS", "")
if "xla_force_host_platform_device_count" not in _FLAGS:
    os.environ["XLA_FLAGS"] = f"{_FLAGS} --xla_force_host_platform_device_count=8".strip()
# The backend that Keras starts on, which it reads when it is imported.
os.environ["KERAS_BACKEND"] = "jax"
# Several workers (`-n 2`) share one GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import emulated

if emulated.IS_ON:
    emulated.load()

import deviceless
import jax
import pytest
from coverage import one_of_each, set_tier
from hypothesis import settings
from internals import run_every_kernel
from lowering import share_contexts
from native import are_cuda_kernels, description, is_built, is_platform_with_kernels, why_not_native

import jaxnorm

# Every new shape is a compilation, so examples are few; CI repeats the same ones.
settings.register_profile("jaxnorm", max_examples=20, deadline=None, database=None, derandomize="CI" in os.environ)
settings.load_profile("jaxnorm")


# How much of the table runs, and where it is the default.
TIERS = {
    "quick": "one case of each test, without XLA's optimiser; the default on CPU where no file is named",
    "once": "each value of a factor once; the default for a file that is named",
    "rest": "the tier `once` without what `quick` has",
    "pairs": "each pair of values of the factors",
    "full": "all combinations of factors; the default on a GPU",
}


def pytest_addoption(parser):
    for tier, text in TIERS.items():
        parser.addoption(f"--{tier}", dest="tier", action="store_const", const=tier, help=text)
    parser.addoption("--seconds", type=float, default=40, help="for how long the fuzzer runs with --full")
    parser.addoption("--large", action="store_true", help="run the tests marked large on CPU too (30 GiB of memory)")


@pytest.hookimpl(tryfirst=True)  # before xdist reads them
def pytest_cmdline_main(config):
    """The tier. Where no file is named and pytest-xdist is installed every core, as XLA compiles on one; GPUs aside."""
    option, on_gpu = config.option, jax.default_backend() == "gpu"
    no_file = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    option.tier = option.tier or ("full" if on_gpu else "quick" if no_file else "once")
    if not no_file or on_gpu:
        return
    if "PYTEST_XDIST_WORKER" in os.environ:
        option.loadgroup = True  # a worker reads the command line, which does not say it
    elif getattr(option, "numprocesses", 0) is None:
        option.numprocesses, option.dist = min(8, len(os.sched_getaffinity(0))), "loadgroup"


def pytest_configure(config):
    share_contexts()
    run_every_kernel()
    set_tier(config.option.tier)
    if config.option.tier == "quick":
        jax.config.update("jax_disable_most_optimizations", True)
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # of the processes that tests start
    config.addinivalue_line("markers", "jax_version: depends on JAX's version: the tests of another Python")
    config.addinivalue_line("markers", "any_code: does not depend on how well XLA compiles; in CI it never optimises")
    config.addinivalue_line("markers", "kernels: calls the handlers themselves; on a platform that has them")
    config.addinivalue_line("markers", "plans: launch plans, which need no GPU; where jaxnorm is built with CUDA")
    config.addinivalue_line("markers", "emulated: CUDA kernels on the host; where there is a CUDA compiler")
    config.addinivalue_line("markers", "on_emulator: a law to which the emulator holds the CUDA kernels, too")
    config.addinivalue_line("markers", "full: in the full tier alone")
    config.addinivalue_line("markers", "browser: opens pages; where there is Chromium")
    config.addinivalue_line("markers", "toys: native part of the toy op; on the CPU, where there is a C++ compiler")
    config.addinivalue_line("markers", "xdist_group(name): on one worker")  # where xdist is not installed
    config.addinivalue_line("markers", "deviceless: programs for a GPU; where JAX's CUDA plugin is, and CUDA kernels")
    config.addinivalue_line("markers", "build: settings of the build; where there is CMake")
    config.addinivalue_line("markers", "long: whole models and programs; not in the quick tier")
    config.addinivalue_line("markers", "several: spread over devices; where there are several")
    config.addinivalue_line("markers", "gpu: about what only a GPU has; on a GPU")
    config.addinivalue_line("markers", "cuda: about what only the CUDA kernels have; on a GPU, and in the emulator")
    config.addinivalue_line("markers", "package(name): models of a package, where it is installed or on PYTHONPATH")
    config.addinivalue_line("markers", "large: arrays of more than 2**31 elements; on a GPU, or with --large")


def pytest_sessionstart():
    if "CI" in os.environ and jax.default_backend() == "cpu" and jax.device_count() < 8:
        pytest.exit(f"the tests of several devices want 8 simulated ones, there are {jax.device_count()}", returncode=1)


def pytest_report_header():
    device = jax.devices()[0]
    missing = why_not_native()
    return [
        f"jaxnorm: {Path(jaxnorm.__file__).parent}",
        f"platform: {jax.default_backend()}, {jax.device_count()} x {device.device_kind}, jax {jax.__version__}",
        f"pages: {'opened in Chromium' if shutil.which('chromium') else 'not opened, there is no Chromium'}",
        f"implementation: {f'jnp only, native is missing: {missing}' if missing else description()}",
    ]


def pytest_ignore_collect(collection_path, config):
    """A file that does not name one of the marks in `-m "A or B"` has no test to run, and need not be imported."""
    marks = config.option.markexpr.split(" or ")
    if collection_path.suffix == ".py" and all(map(str.isidentifier, marks)):
        return not any(mark in collection_path.read_text() for mark in marks) or None
    return None


@pytest.hookimpl(tryfirst=True)  # before xdist looks for groups
def pytest_collection_modifyitems(config, items):
    on_gpu = jax.default_backend() == "gpu"
    has = {
        "kernels": is_platform_with_kernels(),
        "plans": is_built("gpu"),
        "emulated": emulated.can_be_built() and config.option.tier != "quick",
        "full": config.option.tier == "full",
        "browser": shutil.which("chromium") is not None,
        "toys": not on_gpu and shutil.which("g++") is not None,
        "deviceless": deviceless.has_plugin() and is_built("gpu") and not on_gpu,
        "build": shutil.which("cmake") is not None,
        "several": jax.device_count() > 1,
        "gpu": on_gpu,
        "cuda": are_cuda_kernels(),
        "large": on_gpu or config.getoption("--large"),
    }
    absent = {name for name, present in has.items() if not present}
    kept = [item for item in items if not absent & {mark.name for mark in item.iter_markers()}]
    kept = [item for item in kept if all(find_spec(mark.args[0]) for mark in item.iter_markers("package"))]
    if config.option.tier in ("quick", "rest"):
        others = {"long"}
        if config.option.tier == "rest":  # of `quick` where there are no CUDA kernels, as in README's command
            others |= {"plans", "emulated", "deviceless"}
        one = set(one_of_each([item for item in kept if not others & {mark.name for mark in item.iter_markers()}]))
        kept = [item for item in kept if (item in one) == (config.option.tier == "quick")]
    taken = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in taken])
    items[:] = kept


@pytest.fixture
def devices():
    """The devices of a mesh: a power of two of them, and one only where there is one only."""
    return jax.devices()[: 1 << (min(8, jax.device_count()).bit_length() - 1)]


@pytest.fixture
def exact_products():
    """GPUs round what they multiply to 19-bit floats by default, and two sides of a test not alike."""
    with jax.default_matmul_precision("highest"):
        yield
