"""NVIDIA's compiler from PyPI: whether a build asks for it, and where it then is.

Run as a program, it prints the path of `nvcc`, or says why there is none and fails; with `--driver` it succeeds where
there is a driver.
"""

import ctypes
import importlib.metadata
import importlib.util
import os
import shutil
import sys
from pathlib import Path

# One minor version for all. They do not pin each other, and ptxas refuses what a newer NVVM makes. Before 13.2.78 nvcc
# looks for the libraries in another folder than the one with them; CUDA 12 has no package with nvcc.
NVCC, LEAST = "nvidia-cuda-nvcc", (13, 2, 78)
OF_ONE_VERSION = ("nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-runtime")
HEADERS = "nvidia-cuda-cccl"
REQUIREMENTS = [f"{NVCC}>=13.2.78,==13.2.*", *(f"{package}==13.2.*" for package in (*OF_ONE_VERSION, HEADERS))]
# A driver runs what a CUDA of its own major version compiled, as it writes 13.0.
LEAST_DRIVER = 13000


def wanted() -> list[str]:
    """What a build requires in this environment, on this machine; says on stderr why, where it is not asked for."""
    asked = os.environ.get("JAXNORM_CUDA", "")
    if asked == "pypi":
        return REQUIREMENTS
    if asked not in ("", "1") or has_nvcc() or (version := driver()) is None:
        return []
    text = f"jaxnorm: there is a driver of CUDA {version // 1000}.{version % 1000 // 10} and no nvcc"
    if version < LEAST_DRIVER:
        print(f"{text}; NVIDIA's compiler from PyPI would want a driver of CUDA 13", file=sys.stderr)
        return []
    print(f"{text}, so that NVIDIA's compiler comes from PyPI (JAXNORM_CUDA=0 builds without CUDA)", file=sys.stderr)
    return REQUIREMENTS


def has_nvcc() -> bool:
    """Whether CMake finds a CUDA compiler by itself."""
    return bool(os.environ.get("CUDACXX")) or shutil.which("nvcc") is not None


def driver(library: str = "libcuda.so.1") -> int | None:
    """The newest CUDA that the driver serves, 13020 for 13.2; None without one. That needs no GPU."""
    try:
        cuda = ctypes.CDLL(library)
    except OSError:
        return None
    version = ctypes.c_int(0)
    # A toolkit's stub of the driver answers with an error.
    return version.value if cuda.cuDriverGetVersion(ctypes.byref(version)) == 0 and version.value else None


def find_nvcc() -> Path:
    """Where it is among the packages of this interpreter. Raises LookupError, with the remedy, if none there works."""
    remedy = f"pip install {' '.join(map(repr, REQUIREMENTS))}"
    version = _version(NVCC)
    if version is None:
        raise LookupError(f"{NVCC} is not installed where the build looks for packages; {remedy}")
    if _numbers(version) < LEAST:
        raise LookupError(f"{NVCC} is {version}, and nvcc works in packages from 13.2.78 on; {remedy}")
    for package in OF_ONE_VERSION:
        other = _version(package)
        if other is None or _numbers(other)[:2] != _numbers(version)[:2]:
            raise LookupError(f"{NVCC} is {version} and {package} {other or 'missing'}; they go together; {remedy}")
    if _version(HEADERS) is None:
        raise LookupError(f"{HEADERS} is not installed beside {NVCC}, and has headers that it wants; {remedy}")
    spec = importlib.util.find_spec("nvidia")
    folders = map(Path, spec.submodule_search_locations or ()) if spec else ()
    found = [nvcc for folder in folders for nvcc in folder.glob(f"cu{_numbers(version)[0]}/bin/nvcc")]
    if not found:
        raise LookupError(f"{NVCC} {version} has no nvcc where packages of that version had it; set CUDACXX to it")
    return found[0]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split(".") if number.isdigit())


if __name__ == "__main__":
    if "--driver" in sys.argv:
        sys.exit(driver() is None)
    try:
        print(find_nvcc())
    except LookupError as reason:
        sys.exit(str(reason))
