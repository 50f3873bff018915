"""The native part of the op in `toy/`, built for the CPU and registered as any library's is."""

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import jax

TESTS = Path(__file__).parents[1]
COMPILER = shutil.which("g++")
ARE_BUILT = jax.default_backend() == "cpu" and COMPILER is not None
# As the package's kernels are compiled, for the baseline instruction set. Symbols are hidden, or the table would stand
# for another of the same name. No op calls all functions of the headers.
LIBRARY = ["-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden"]
WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wno-unused-function"]
FLAGS = [*LIBRARY, *WARNINGS, "-O2", "-ffp-contract=off", "-fno-math-errno"]


@functools.cache
def load() -> None:
    """Builds the library, once in a process, and registers its handlers."""
    with tempfile.TemporaryDirectory() as directory:
        library = Path(directory) / "l2_norm.so"
        includes = ["-I", TESTS.parent / "src", "-I", TESTS, "-isystem", jax.ffi.include_dir()]
        subprocess.run([COMPILER, *FLAGS, *includes, TESTS / "toy" / "l2_norm_cpu.cc", "-o", library], check=True)
        loaded = ctypes.cdll.LoadLibrary(library)
    for name in ("l2_norm_fwd", "l2_norm_bwd"):
        jax.ffi.register_ffi_target(f"toy_{name}", jax.ffi.pycapsule(getattr(loaded, name)), platform="cpu")
