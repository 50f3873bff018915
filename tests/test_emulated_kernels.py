"""The CUDA kernels on the host, compiled as C++ against `emulator/`: their results, without a GPU."""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import emulated
import pytest
from coverage import in_full

HERE = Path(__file__).parent
EMULATOR, TOY, SOURCES = HERE / "emulator", HERE / "toy", HERE.parent / "src"
PLANS = tuple(SOURCES / "cuda" / "engine" / name for name in ("plan.cc", "grad_schedule.cc"))
# Results and gradients; with per-head weights; with padding; quantised results; gated norms; sandwich norms; rotary
# embedding; sharded rows; workspaces of other sizes than are wanted; whether every plan has a kernel; rows whose
# squares vanish; softmax and its gradients; cross-entropy and its gradient; GroupNorm and its gradients; what
# float8_linear rounds. With `JAXNORM_EMULATE=1` the laws launch every kernel of gated activations, and of the other ops
# fewer than these programs.
PROGRAMS = (
    *("run", "run_heads", "run_padding", "run_quantized", "run_gated", "run_sandwich", "run_rotary"),
    *("run_shards", "run_workspace", "run_plans", "run_extremes"),
    *("run_softmax", "run_softmax_grad", "run_cross_entropy", "run_cross_entropy_grad", "run_group_norm"),
    "run_float8",
)

# One worker compiles the kernels for all of these tests, and the group that has the most tests comes first.
pytestmark = [pytest.mark.emulated, pytest.mark.xdist_group("emulated")]


# nvcc knows where CUDA's headers are, and hands C++ on to the compiler of the host.
COMPILE = (
    *("nvcc", "-x", "c++", "-std=c++17", "-O1"),
    *("-Xcompiler=-ffp-contract=off,-w", f"-I{EMULATOR}", f"-I{SOURCES}"),
)


def compiled(source, folder, name, *flags):
    """What a source becomes, in this folder and then where it is kept, where it may be already."""
    target = emulated.kept() / name
    if not target.exists():
        subprocess.run([*COMPILE, *flags, "-c", source, "-o", folder / name], check=True)
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


def printed(program, **variables):
    environment = os.environ | variables
    done = subprocess.run([program], capture_output=True, text=True, check=False, env=environment)
    return done.returncode, done.stdout, done.stderr


def failures(objects, program):
    subprocess.run(["nvcc", *objects, "-cudart", "none", "-lpthread", "-o", program], check=True)
    return printed(program)


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_failures(program):
    tier = {"EMULATE_ALL": "1"} if in_full(True) else {}
    assert printed(emulated.program(program), **tier) == (0, "0 failures\n", "")


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
        *PLANS,
    ]
    assert failures(compile_objects(sources, tmp_path, header), tmp_path / op) == (0, "0 failures\n", "")
