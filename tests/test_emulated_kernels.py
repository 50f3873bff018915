"""The CUDA kernels on the host, compiled as C++ against `emulator/`: what no law reaches, without a GPU."""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import emulated
import pytest

HERE = Path(__file__).parent
EMULATOR, TOY, SOURCES = HERE / "emulator", HERE / "toy", HERE.parent / "src"
PLANS = tuple(SOURCES / "cuda" / "engine" / name for name in ("plan.cc", "grad_schedule.cc"))
# Workspaces of other sizes than are wanted; whether every plan has a kernel. All else is the laws': see
# tests/laws/test_lengths.py.
PROGRAMS = ("run_workspace", "run_plans")

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


def printed(program):
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def failures(objects, program):
    subprocess.run(["nvcc", *objects, "-cudart", "none", "-lpthread", "-o", program], check=True)
    return printed(program)


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_failures(program):
    assert printed(emulated.program(program)) == (0, "0 failures\n", "")


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
    sources = [TOY / f"{op}.cu", TOY / f"run_{op}.cc", EMULATOR / "emulator.cc", *PLANS]
    assert failures(compile_objects(sources, tmp_path, header), tmp_path / op) == (0, "0 failures\n", "")
