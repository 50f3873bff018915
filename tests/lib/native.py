"""Which native kernels are under test."""

import importlib
import importlib.util
from functools import cache

import emulated
import jax
import jax.numpy as jnp
from internals import ffi

import jaxnorm

# The platforms that have kernels: JAX's backend, and the module that holds them.
MODULES = {"cpu": "jaxnorm._cuda" if emulated.IS_ON else "jaxnorm._cpu", "gpu": "jaxnorm._cuda"}


def are_cuda_kernels() -> bool:
    """Whether those of CUDA are under test, be it in the emulator."""
    return MODULES.get(jax.default_backend()) == MODULES["gpu"]


def is_platform_with_kernels() -> bool:
    return jax.default_backend() in MODULES and not ffi.only_python()


@cache
def why_not_native() -> str | None:
    """Why the native kernels do not run on the default backend; None if they do."""
    try:
        jax.block_until_ready(jaxnorm.rms_norm(jnp.ones((1, 8)), implementation="native"))
    except RuntimeError as error:
        return str(error)
    return None


def description() -> str:
    module = importlib.import_module(MODULES[jax.default_backend()])
    if hasattr(module, "isa"):
        return f"native, {module.isa()} kernels"
    return f"native, CUDA {module.toolkit()} kernels for {module.architectures()}"


def is_built(platform: str) -> bool:
    return importlib.util.find_spec(MODULES[platform]) is not None


def target(kind: str, direction: str) -> str:
    return f"jaxnorm_{kind}_norm_{direction}"


def native_calls(kind: str, fwd: int = 0, bwd: int = 0, quantized: int = 0) -> dict[str, int]:
    """What `count_native_calls` must give here: the counts named, nothing where there are no kernels."""
    counts = {target(kind, "fwd"): fwd, target(kind, "quantized_fwd"): quantized, target(kind, "bwd"): bwd}
    return {name: count for name, count in counts.items() if count} if is_platform_with_kernels() else {}


def without_cuda(monkeypatch, *, gpu):
    """Makes this a build for the CPU alone, on a machine with a GPU or without."""
    monkeypatch.delitem(ffi._modules, "cuda", raising=False)
    monkeypatch.setitem(ffi._errors, "cuda", ModuleNotFoundError(name="jaxnorm._cuda"))
    monkeypatch.setattr(ffi, "has_gpu", lambda: gpu)
