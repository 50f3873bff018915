"""One suite for every platform: what it tests is the installed package on JAX's default backend."""

import functools
import itertools
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
# Threads of XLA's CPU client, which would be as many as its devices. A collective holds one until the other devices
# are there, so of two that do not wait for each other the last device may find none, and XLA aborts after 40 seconds.
os.environ.setdefault("NPROC", "32")
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
from coverage import one_of_each, set_pairs
from hypothesis import settings
from internals import run_every_kernel
from jax._src.interpreters import mlir
from native import are_cuda_kernels, description, is_built, is_platform_with_kernels, why_not_native

import jaxnorm

# Every new shape is a compilation, so examples are few; CI repeats the same ones.
settings.register_profile("jaxnorm", max_examples=20, deadline=None, database=None, derandomize="CI" in os.environ)
settings.load_profile("jaxnorm")


# Those that have models, which tests/models changes.
PACKAGES = ("bonsai", "diffusers", "transformers")


def pytest_addoption(parser):
    text = "each pair of values of the factors, optimised by XLA, whole models too; else one case of each test"
    parser.addoption("--full", action="store_true", help=text)
    parser.addoption("--seconds", type=float, default=40, help="for how long the fuzzer runs with --full")


def names_a_file(config):
    return config.args_source is not pytest.Config.ArgsSource.TESTPATHS


@pytest.hookimpl(tryfirst=True)  # before xdist reads them
def pytest_cmdline_main(config):
    """Where no file is named and pytest-xdist is installed every core, as XLA compiles on one; GPUs aside."""
    option = config.option
    if names_a_file(config) or jax.default_backend() == "gpu":
        return
    if "PYTEST_XDIST_WORKER" in os.environ:
        option.loadgroup = True  # a worker reads the command line, which does not say it
    elif getattr(option, "numprocesses", 0) is None:
        option.numprocesses, option.dist = min(8, len(os.sched_getaffinity(0))), "loadgroup"
        option.maxworkerrestart = "0"  # in place of a worker that crashed another may wait for ever


def share_contexts():
    """Many programs in one MLIR context, of which JAX makes one for each: that takes 4 ms and a megabyte.

    It makes no difference to a program, and is a quarter of the time of tests whose programs are in the cache.
    """
    number, make = itertools.count(), mlir.make_ir_context
    latest = functools.lru_cache(maxsize=1)(lambda _: make())
    mlir.make_ir_context = lambda: latest(next(number) // 64)  # a context keeps the constants of its programs


def pytest_configure(config):
    share_contexts()
    run_every_kernel()
    # A kernel takes the emulator a hundred times as long as a GPU.
    set_pairs(config.option.full and not emulated.IS_ON)
    if not config.option.full:
        jax.config.update("jax_disable_most_optimizations", True)
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # of the processes that tests start
    for mark in (
        "needs(name): runs where this is there, see `has`",
        "jax_version: depends on JAX's version: the tests of another Python",
        "any_code: does not depend on how well XLA compiles; in CI it never optimises",
        "on_emulator: a law to which the emulator holds the CUDA kernels, too",
        "deviceless: programs for a GPU; where JAX's CUDA plugin is, and CUDA kernels",
        "long: whole models and programs; with --full",
        "xdist_group(name): on one worker",  # where xdist is not installed
    ):
        config.addinivalue_line("markers", mark)


def pytest_sessionstart():
    if "CI" in os.environ and jax.default_backend() == "cpu" and jax.device_count() < 8:
        pytest.exit(f"the tests of several devices want 8 simulated ones, there are {jax.device_count()}", returncode=1)


def pytest_report_header():
    device, missing = jax.devices()[0], why_not_native()
    return [
        f"jaxnorm: {Path(jaxnorm.__file__).parent}",
        f"platform: {jax.default_backend()}, {jax.device_count()} x {device.device_kind}, jax {jax.__version__}",
        f"pages: {'opened in Chromium' if shutil.which('chromium') else 'not opened, there is no Chromium'}",
        f"implementation: {f'xla only, native is missing: {missing}' if missing else description()}",
    ]


def pytest_ignore_collect(collection_path, config):
    """A file that does not name one of the marks in `-m "A or B"` has no test to run, and need not be imported."""
    marks = config.option.markexpr.split(" or ")
    if collection_path.suffix == ".py" and all(map(str.isidentifier, marks)):
        names = [*marks, *['needs("cuda")'] * ("on_emulator" in marks)]
        return not any(name in collection_path.read_text() for name in names) or None
    return None


def has(config):
    """What a test may need, by the name in its mark `needs`."""
    on_gpu, full = jax.default_backend() == "gpu", config.option.full
    return {
        "kernels": is_platform_with_kernels(),  # calls the handlers themselves
        "plans": is_built("gpu"),  # launch plans, which need no GPU
        "emulated": full and emulated.can_be_built(),  # CUDA kernels on the host
        "clone": (Path(__file__).parents[1] / ".git").exists(),
        "plugin": deviceless.has_plugin() and is_built("gpu") and not on_gpu,
        "browser": shutil.which("chromium") is not None,
        "toys": is_platform_with_kernels() and not on_gpu and shutil.which("g++") is not None,  # of the toy op
        "build": shutil.which("cmake") is not None,
        "several": jax.device_count() > 1,  # spread over devices
        "gpu": on_gpu,
        "cuda": are_cuda_kernels(),  # on a GPU, and in the emulator
        "memory": on_gpu,  # arrays of more than 2**31 elements
        "request": full and names_a_file(config),
        **{package: find_spec(package) is not None for package in PACKAGES},
    }


@pytest.hookimpl(tryfirst=True)  # before xdist looks for groups
def pytest_collection_modifyitems(config, items):
    things, full = has(config), config.option.full

    def runs(item):
        needs = [mark.args[0] for mark in item.iter_markers("needs")]
        needs += ["several"] * ("devices" in item.fixturenames)
        needs += ["kernels"] * ("native" in item.name or "a kernel" in item.name)
        if "cuda" in needs:
            item.add_marker("on_emulator")
        if item.get_closest_marker("deviceless"):
            needs.append("plugin")
        return all(things[name] for name in needs)

    kept = [item for item in items if runs(item)]
    if not full:
        kept = one_of_each([item for item in kept if not item.get_closest_marker("long")])
    taken = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in taken])
    items[:] = [item for item in items if item in taken]


@pytest.fixture
def any_devices():
    """The devices of a mesh: a power of two of them, and one only where there is one only."""
    return jax.devices()[: 1 << (min(8, jax.device_count()).bit_length() - 1)]


@pytest.fixture
def devices(any_devices):
    """The like for a test that needs several."""
    return any_devices


@pytest.fixture
def exact_products():
    """GPUs round what they multiply to 19-bit floats by default, and two sides of a test not alike."""
    with jax.default_matmul_precision("highest"):
        yield
