"""The native parts of the ops in `toy/`, built for the CPU and registered as any library's are."""

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
# As the package's kernels are compiled, for the baseline instruction set. Symbols are hidden, or one library's table
# would stand for another's of the same name. No op calls all functions of the headers.
LIBRARY = ["-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden"]
WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wno-unused-function"]
FLAGS = [*LIBRARY, *WARNINGS, "-O2", "-ffp-contract=off", "-fno-math-errno"]


@functools.cache
def load(source: str, *names: str) -> None:
    """Builds a library, once in a process, and registers its handlers of these names."""
    with tempfile.TemporaryDirectory() as directory:
        library = Path(directory) / f"{source}.so"
        includes = ["-I", TESTS.parent / "src", "-I", TESTS, "-isystem", jax.ffi.include_dir()]
        subprocess.run([COMPILER, *FLAGS, *includes, TESTS / "toy" / f"{source}.cc", "-o", library], check=True)
        loaded = ctypes.cdll.LoadLibrary(library)
    for name in names:
        jax.ffi.register_ffi_target(f"toy_{name}", jax.ffi.pycapsule(getattr(loaded, name)), platform="cpu")
