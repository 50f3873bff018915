"""The CUDA kernels without a GPU: a `_cuda` whose handlers run the emulator, in place of the CPU's kernels.

`JAXNORM_EMULATE=1 python -m pytest --full -m on_emulator` has it: what is compiled for a CPU is lowered as for CUDA,
and calls these handlers. Another value is the path of such a module. `python tests/lib/emulated.py OP ...` builds one,
of these ops or of all, and prints its path.
"""

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ASKED = os.environ.get("JAXNORM_EMULATE", "0")
IS_ON = ASKED not in ("", "0")
# What it is compiled of, and what tests/test_emulated_kernels.py runs.
PARTS = ("CMakeLists.txt", "cmake", "src", "tests/emulator", "tests/toy")
REGISTERED_AS = {"cpu": None, "CUDA": "cpu"}  # XLA's platforms


def can_be_built() -> bool:
    return all(map(shutil.which, ("nvcc", "cmake", "g++"))) and importlib.util.find_spec("nanobind") is not None


def copy(root: Path) -> None:
    """Copies the sources to root, so that they can be changed there."""
    for part in PARTS:
        (root / part).parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (ROOT / part).is_dir() else shutil.copy)(ROOT / part, root / part)


def build(root: Path, folder: Path, ops: str = "", target: str = "_cuda") -> list[Path]:
    """The module of the sources in root, built in a folder; what did not change since is not compiled again.

    Of some ops, ";" between them, or of all; or what tests/test_emulated_kernels.py runs, the target `programs`.
    """
    import nanobind

    settings = {
        "JAXNORM_OPS": ops,
        "CMAKE_PROJECT_INCLUDE": "tests/emulator/module.cmake",
        "Python_EXECUTABLE": sys.executable,
        "nanobind_DIR": nanobind.cmake_dir(),
    }
    generator = ("-G", "Ninja") if shutil.which("ninja") else ()
    options = [word for name, value in settings.items() for word in ("-D", f"{name}={value}")]
    _run("cmake", *generator, "-S", root, "-B", folder, *options)
    _run("cmake", "--build", folder, "--parallel", str(len(os.sched_getaffinity(0))), "--target", target)
    return [*folder.glob("_cuda.*so"), *folder.glob("programs/*")]


def _run(*command) -> None:
    environment = os.environ | {"JAXNORM_CUDA": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} failed\n{done.stdout}{done.stderr}")


@functools.cache
def kept() -> Path:
    """Where stays what is compiled of these sources by this compiler: in CI's cache, in place of that of others."""
    digest = hashlib.sha256(subprocess.run(["g++", "--version"], capture_output=True, check=True).stdout)
    paths = [path for part in PARTS for path in (ROOT / part, *(ROOT / part).rglob("*"))]
    for file in sorted(path for path in paths if path.is_file() and path.suffix != ".pyc"):
        digest.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    within = Path(os.environ.get("JAXNORM_EMULATED", f"{tempfile.gettempdir()}/jaxnorm_emulated_{os.getuid()}"))
    folder = within / digest.hexdigest()[:16]
    for older in within.glob("*") if "JAXNORM_EMULATED" in os.environ else ():
        if older != folder:
            shutil.rmtree(older)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _built(name: str, ops: str, target: str) -> list[Path]:
    """What such a build of this tree gives, built if it was not."""
    folder = kept() / name
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:  # other processes wait for the first
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "built").exists():
            with tempfile.TemporaryDirectory() as own:
                for product in build(ROOT, Path(own), ops, target):
                    shutil.move(product, folder)
            (folder / "built").touch()
    return [path for path in folder.iterdir() if path.name not in ("lock", "built")]


def module(ops: str = "") -> Path:
    return _built(ops or "all", ops, "_cuda")[0]


def program(name: str) -> Path:
    (found,) = (path for path in _built("programs", "", "programs") if path.name == name)
    return found


@functools.cache
def library() -> ctypes.CDLL:
    found = ctypes.CDLL(str(module() if ASKED == "1" else ASKED))
    found.emulator_movable.restype = ctypes.c_void_p
    found.emulator_movable.argtypes = (ctypes.c_void_p,)
    return found


def movable(handler):
    """The capsule of a handler whose arrays `moved` has elsewhere."""
    import jax

    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    return jax.ffi.pycapsule(library().emulator_movable(pointer_of(handler, None)))


@contextlib.contextmanager
def moved(apart: int = 0):
    """Within, arrays of kernels begin an element behind whole vectors, and each so many further behind than the last.

    What lies beside them has to stay as it is.
    """
    library().emulator_move(1, apart)
    try:
        yield
    finally:
        library().emulator_move(0, 0)


@contextlib.contextmanager
def larger_device():
    """Within, the device has 256 multiprocessors, as a GPU may, and not eight."""
    library().emulator_set_multiprocessors(256)
    try:
        yield
    finally:
        library().emulator_set_multiprocessors(8)


def wherever(test):
    """The test, and in the emulator once more with arrays that are aligned to an element."""

    @functools.wraps(test)
    def run(*args, **options):
        test(*args, **options)
        if IS_ON:
            with moved():
                test(*args, **options)

    return run


def load() -> None:
    """Before jaxnorm is imported: it is to find this module, and to take a CPU for a GPU."""
    import jax
    from jax.interpreters import mlir

    spec = importlib.util.spec_from_file_location("jaxnorm._cuda", library()._name)
    sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[spec.name])
    register_target, register_lowering = jax.ffi.register_ffi_target, mlir.register_lowering

    def register_ffi_target(name, handler, platform="cpu", **options):
        if name.startswith("jaxnorm_"):
            platform = REGISTERED_AS[platform]
            handler = movable(handler) if platform else handler
        if platform:
            register_target(name, handler, platform=platform, **options)

    def for_cuda(rule):
        """A rule that asks its context for the platform."""

        def lower(ctx, *args, **params):
            if tuple(ctx.module_context.platforms) == ("cpu",):
                ctx = ctx.replace(module_context=ctx.module_context.replace(platforms=("cuda",)))
            return rule(ctx, *args, **params)

        return lower

    def register_rule(primitive, rule, platform=None, **options):
        if not primitive.name.startswith("jaxnorm_"):
            register_lowering(primitive, rule, platform, **options)
        elif platform is None:
            register_lowering(primitive, for_cuda(rule) if "cacheable" in options else rule, **options)
        elif platform == "cuda":
            register_lowering(primitive, rule, "cuda", **options)
            register_lowering(primitive, rule, "cpu", **options)

    jax.ffi.register_ffi_target, mlir.register_lowering = register_ffi_target, register_rule
    from internals import compat

    default_platform = compat.default_platform
    compat.default_platform = lambda backend=None: default_platform(backend).replace("cpu", "cuda")


if __name__ == "__main__":
    print(module(";".join(sys.argv[1:])))
