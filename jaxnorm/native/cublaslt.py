"""cuBLASLt, NVIDIA's library of matrix products, in which some ops run on a GPU: where it is, and why there is none."""

import importlib.util
import os

from jaxnorm.native import ffi

# What the wheels that JAX installs with CUDA have, and where in them the library lies.
WHEELS = {
    "nvidia.cu13": os.path.join("lib", "libcublasLt.so.13"),
    "nvidia.cublas": os.path.join("lib", "libcublasLt.so.12"),
}


def paths() -> list[str]:
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


def why_not() -> str | None:
    """Why this process cannot call it now, and the remedy. Where it can, it is open then."""
    if not ffi.available("cuda"):
        return ffi.why_not("cuda")
    opened = ffi.module("cuda").cublaslt
    reason: str = opened([]) and opened(paths())
    remedy = "pip install -U 'jax[cuda13]' brings it, or 'jax[cuda12]' where the driver is older"
    return f"{reason}; {remedy}" if reason else None
