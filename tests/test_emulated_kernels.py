"""The CUDA kernels on the host, compiled as C++ against `emulator/`: their results, without a GPU."""

import functools
import hashlib
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from coverage import in_full

HERE = Path(__file__).parent
EMULATOR, TOY = HERE / "emulator", HERE / "toy"
ROOT = HERE.parent
SOURCES, UNITS = ROOT / "src", ROOT / "cmake" / "units.cmake"
ENGINE = tuple(SOURCES / "cuda" / "engine" / name for name in ("plan.cc", "grad_schedule.cc", "partials.cu"))
# A product is cuBLASLt's.
OTHERS = (*sorted(f for f in SOURCES.glob("ops/*/cuda/*.c[cu]") if f.parts[-3] != "quantized_dot"), *ENGINE)
# Results and gradients; with per-head weights; with padding; quantised results; gated norms; sandwich norms; rotary
# embedding; sharded rows; workspaces of other sizes than are wanted; whether every plan has a kernel; rows whose
# squares vanish; softmax and its gradients; cross-entropy and its gradient; GroupNorm and its gradients; gated
# activations and their gradients.
PROGRAMS = (
    *("run", "run_heads", "run_padding", "run_quantized", "run_gated", "run_sandwich", "run_rotary"),
    *("run_shards", "run_workspace", "run_plans", "run_extremes"),
    *("run_softmax", "run_softmax_grad", "run_cross_entropy", "run_cross_entropy_grad", "run_group_norm"),
    *("run_gated_activation", "run_float8"),
)

# One worker compiles the kernels for all of these tests, and the group that has the most tests comes first.
pytestmark = [pytest.mark.emulated, pytest.mark.xdist_group("emulated")]


# nvcc knows where CUDA's headers are, and hands C++ on to the compiler of the host.
COMPILE = (
    *("nvcc", "-x", "c++", "-std=c++17", "-O1"),
    *("-Xcompiler=-ffp-contract=off,-w", f"-I{EMULATOR}", f"-I{SOURCES}"),
)


@functools.cache
def kept():
    """Where CI keeps what was compiled of these sources, by this compiler; None: nowhere."""
    if "JAXNORM_EMULATED" not in os.environ:
        return None
    digest = hashlib.sha256(subprocess.run(["g++", "--version"], capture_output=True, check=True).stdout)
    for file in sorted(
        f for folder in (SOURCES, EMULATOR, TOY, UNITS.parent) for f in folder.rglob("*") if f.is_file()
    ):
        digest.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    folder = Path(os.environ["JAXNORM_EMULATED"]) / digest.hexdigest()[:16]
    for older in folder.parent.glob("*"):
        if older != folder:
            shutil.rmtree(older)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def compiled(source, folder, name, *flags):
    """What a source becomes in this folder, or in that of CI, where it may be already."""
    target = (kept() or folder) / name
    if not target.exists():
        subprocess.run([*COMPILE, *flags, "-c", source, "-o", folder / name], check=True)
        if kept():
            shutil.copy(folder / name, f"{target}.new")
            os.rename(f"{target}.new", target)
    return target


@pytest.fixture(scope="module")
def header(tmp_path_factory):
    """emulator.h, which takes most of the time of a small source, precompiled beside this path."""
    source = EMULATOR / "emulator.h"
    name = f"{source.name}.gch"
    return compiled(source, tmp_path_factory.mktemp("header"), name, "-Xcompiler=-x,c++-header").with_suffix("")


def compile_objects(sources, folder, header):
    def compile_object(source):
        return compiled(source, folder, f"{'_'.join(source.parts[-3:])}.o", "-include", header)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(compile_object, sources))


def failures(objects, program):
    subprocess.run(["nvcc", *objects, "-cudart", "none", "-lpthread", "-o", program], check=True)
    tier = {"EMULATE_ALL": "1"} if in_full(True) else {}
    done = subprocess.run([program], capture_output=True, text=True, check=False, env=os.environ | tier)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def objects(tmp_path_factory, header):
    folder = tmp_path_factory.mktemp("emulated")
    subprocess.run(["cmake", "-D", f"JAXNORM_UNITS={folder}/units", "-P", UNITS], check=True)
    # A unit of f16 alone has the same code as that of bf16: absent.cc stands for it, to save time.
    units = sorted(unit for unit in folder.glob("units/*.cu") if not unit.stem.endswith("_f16"))
    sources = [*units, *OTHERS, EMULATOR / "emulator.cc", EMULATOR / "absent.cc"]
    return compile_objects(sources, folder, header)


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_failures(program, objects, header, tmp_path):
    own = compile_objects([EMULATOR / f"{program}.cc"], tmp_path, header)
    assert failures([*objects, *own], tmp_path / program) == (0, "0 failures\n", "")


# Of which the emulator has one of its own.
def test_what_is_known_of_the_device(header, tmp_path):
    sources = [SOURCES / "cuda" / "engine" / "device.cu", EMULATOR / "run_device.cc"]
    assert failures(compile_objects(sources, tmp_path, header), tmp_path / "device") == (0, "0 failures\n", "")


# What multiplies the copies is the program itself, in place of cuBLASLt.
def test_products_of_arrays_that_begin_between_words(header, tmp_path):
    sources = [EMULATOR / "run_copied_dot.cc", EMULATOR / "emulator.cc"]
    assert failures(compile_objects(sources, tmp_path, header), tmp_path / "copied_dot") == (0, "0 failures\n", "")


# An op out of the package's tree is a file, and nothing of the package's own ops.
@pytest.mark.parametrize("op", ["l2_norm"])
def test_an_op_out_of_tree(op, header, tmp_path):
    sources = [
        TOY / f"{op}.cu",
        TOY / f"run_{op}.cc",
        EMULATOR / "emulator.cc",
        *ENGINE[:2],
    ]
    assert failures(compile_objects(sources, tmp_path, header), tmp_path / op) == (0, "0 failures\n", "")
