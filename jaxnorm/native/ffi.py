"""The native modules: the one Python file that loads them and calls what they offer."""

import functools
import importlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import jax
import numpy as np
from jax.extend.mlir.dialects import stablehlo

from jaxnorm.native import compat, fit

# JAX's name of a platform in lowering rules -> XLA's name of it in registrations.
PLATFORMS = {"cpu": "cpu", "cuda": "CUDA"}
# What `jaxnorm.sharding.partition` makes of a call where XLA splits its program over devices.
PARTITIONED = "jaxnorm_partitioned"
# XLA of this one JAX makes two calls of one on a GPU if a result is stacked in a loop, as `scan` does for a derivative,
# and used in the loop besides (https://github.com/openxla/xla/pull/45799); of a result behind a barrier it does not.
DOUBLES_CALLS = jax.__version_info__ == (0, 11, 2)
WITHOUT_CUDA = "this jaxnorm was built without CUDA"
WITHOUT_KERNELS = "this is jaxnorm's wheel without kernels (py3-none-any); those for Linux (manylinux_2_28) have them"
DTYPES = frozenset(map(jax.numpy.dtype, ("float32", "float16", "bfloat16")))

_modules: dict[str, ModuleType] = {}
_errors: dict[str, ImportError] = {}


def available(platform: str) -> bool:
    """Whether platform has native kernels in this installation; that it has a device is not needed."""
    return platform in _modules


def module(platform: str) -> ModuleType:
    return _modules[platform]


def why_not(platform: str) -> str:
    """Why platform has no native kernels here, and the remedy if there is something that it would serve."""
    if platform not in PLATFORMS:
        return f"jaxnorm has native kernels for {' and '.join(PLATFORMS)}, none for {platform}"
    if compat.UNKNOWN:
        return compat.UNKNOWN
    if _is_broken(platform):
        return f"jaxnorm._{platform} does not load ({_errors[platform]}); install jaxnorm again in this environment"
    if only_python():
        return WITHOUT_KERNELS
    if platform == "cuda" and available("cpu"):
        remedy = (
            "; JAXNORM_CUDA=1 pip install . builds it with the CUDA toolkit that is there, JAXNORM_CUDA=pypi "
            "pip install . with NVIDIA's compiler from PyPI"
        )
        return f"{WITHOUT_CUDA}{remedy if has_gpu() else ''}"
    return (
        f"jaxnorm._{platform} is not installed: jaxnorm is imported from a source tree that was never built; "
        "pip install . in that tree builds it"
    )


@functools.cache
def only_python() -> bool:
    """Whether the wheel without kernels is installed, which is for every platform."""
    try:
        wheel = importlib.metadata.distribution("jaxnorm").read_text("WHEEL")
    except importlib.metadata.PackageNotFoundError:
        return False
    return "Root-Is-Purelib: true" in (wheel or "")


def _is_broken(platform: str) -> bool:
    """Whether platform's kernels are installed and do not load."""
    error = _errors.get(platform)
    return error is not None and not (isinstance(error, ModuleNotFoundError) and error.name == f"jaxnorm._{platform}")


def why_nowhere(platform: str) -> str | None:
    """Why no kernel at all runs on platform here; None where some do."""
    return why_unfit(platform) if available(platform) else why_not(platform)


@functools.cache
def why_unfit(platform: str) -> str | None:
    """Why platform's kernels, which are installed, do not load or do not run on the GPUs that are here; the remedy.

    None where they do. And where no GPU is: what is traced or exported there runs elsewhere. The wheel without kernels
    has its own reason.
    """
    if _is_broken(platform) or (platform in _errors and only_python()):
        return why_not(platform)
    if platform != "cuda" or not available(platform):
        return None
    native = module(platform)
    if not (present := capabilities()):
        return None
    built = {"architectures": native.architectures(), "toolkit": native.toolkit(), "driver": native.driver()}
    reasons = (fit.why_not(**built, capability=capability) for capability in sorted(present))
    return next(filter(None, reasons), None)


def has_gpu() -> bool:
    """Whether NVIDIA's driver has a GPU here, be this JAX one for CUDA or not."""
    return os.path.exists("/dev/nvidiactl") or bool(capabilities())


def capabilities() -> set[str]:
    """Those of JAX's GPUs in this process. JAX is asked, and not CUDA, which would make a context to answer."""
    try:
        return {device.compute_capability for device in jax.local_devices(backend="cuda")}
    except RuntimeError:
        return set()


# cuBLASLt in the wheels that JAX installs with CUDA, and where in them it lies.
WHEELS = {
    "nvidia.cu13": os.path.join("lib", "libcublasLt.so.13"),
    "nvidia.cublas": os.path.join("lib", "libcublasLt.so.12"),
}


def cublaslt_paths() -> list[str]:
    """Those at which the wheels of this environment have it, the newest first. None of them is imported."""
    return [
        path
        for package, within in WHEELS.items()
        for directory in _directories(package)
        if os.path.exists(path := os.path.join(directory, within))
    ]


def _directories(package: str) -> list[str]:
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # its parent is not there either
        return []
    return list(spec.submodule_search_locations or ()) if spec else []


def why_no_cublaslt() -> str | None:
    """Why this process cannot call cuBLASLt now, and the remedy. Where it can, that is open then."""
    if not available("cuda"):
        return why_not("cuda")
    opened = module("cuda").cublaslt
    reason: str = opened([]) and opened(cublaslt_paths())
    remedy = "pip install -U 'jax[cuda13]' brings it, or 'jax[cuda12]' where the driver is older"
    return f"{reason}; {remedy}" if reason else None


def workspace(
    platform: str, target: str, dtype: np.dtype[Any], rows: Any, cols: int, **needs: int
) -> list[tuple[Any, ...]]:
    """The shape of what a native call of float32 keeps beside its results, in a list; empty where it keeps nothing.

    `dtype` is that of what is normalised, `rows` may be symbolic. `needs` are `weights`, how many of their gradients
    are wanted; `count` and `inner`, see `jaxnorm.primitive.weights.heads_of`; `with_dx`; and `keeps_row` and
    `widens_row`, whether a row of what is normalised is kept for each of its rows, and whether one of a half type may
    be as float32. Kernels of the CPU keep nothing. A handler takes a workspace of any size, so that an exported program
    outlives another choice here.
    """
    if platform != "cuda":
        return []
    of_heads = {name: max(1, needs[name]) for name in ("count", "inner") if name in needs}  # also of no heads
    per_row, fixed = _modules[platform].workspace(target, dtype.name, cols, **needs | of_heads)
    return [(rows * per_row + fixed if per_row else fixed,)] if per_row or fixed else []


def call(
    platform: str,
    target: str,
    ctx: Any,
    operands: Sequence[Any],
    *,
    attributes: Mapping[str, Any],
    workspace: Sequence[tuple[Any, ...]] = (),
    aliases: Mapping[int, int] | None = None,
) -> Sequence[Any]:
    """The results of a native call while it is lowered, with its workspace behind them."""
    results = [*ctx.avals_out, *(jax.core.ShapedArray(shape, np.float32) for shape in workspace)]
    lower = jax.ffi.ffi_lowering(target, operand_output_aliases=aliases)
    values: Sequence[Any] = lower(ctx.replace(avals_out=results), *operands, **attributes)[: len(ctx.avals_out)]
    if platform == "cuda" and DOUBLES_CALLS:
        return [stablehlo.OptimizationBarrierOp([value]).results[0] for value in values]
    return values


def _load(platform: str) -> None:
    if compat.UNKNOWN:
        return
    name = f"jaxnorm._{platform}"
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            fit.check_whole(spec.origin)
        native = importlib.import_module(name)
    except ImportError as error:
        _errors[platform] = error
        return
    handlers = native.handlers()
    for target, capsule in handlers.items():
        jax.ffi.register_ffi_target(target, capsule, platform=PLATFORMS[platform])
    compat.allow_export(handlers)
    _modules[platform] = native


for _platform in PLATFORMS:
    _load(_platform)
compat.allow_export([PARTITIONED])
