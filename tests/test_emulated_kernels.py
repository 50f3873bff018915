"""The CUDA kernels on the host, compiled as C++ against `emulator/`: their results, without a GPU."""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "emulator"
SOURCES = HERE.parent.parent / "src"
WAYS = ("norm_grad", "gated_norm_grad", "forward", "forward_added", "forward_quantized", "gated")
KERNELS = [f"ops/{way}_{dtype}.cu" for dtype in ("f32", "bf16") for way in WAYS]

pytestmark = pytest.mark.emulated


def compile_object(source, folder):
    target = folder / f"{source.name}.o"
    # nvcc knows where CUDA's headers are, and hands C++ on to the compiler of the host.
    host = "-Xcompiler=-ffp-contract=off,-U_FORTIFY_SOURCE,-w"  # longjmp between stacks is what fortifying forbids
    flags = ["-x", "c++", "-std=c++17", "-O1", host, f"-I{HERE}", f"-I{SOURCES}"]
    subprocess.run(["nvcc", *flags, "-include", "emulator.h", "-c", source, "-o", target], check=True)
    return target


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    folder = tmp_path_factory.mktemp("emulated")
    units = [*KERNELS, "ops/shard_apply.cu", "ops/shard_statistics.cu", "ops/add.cu", "ops/grad.cc", "dispatch.cc"]
    units += ["engine/partials.cu", "engine/plan.cc", "engine/grad_schedule.cc"]
    sources = [*(SOURCES / "cuda" / unit for unit in units), HERE / "emulator.cc", HERE / "absent.cc"]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda source: compile_object(source, folder), sources))


# Results and gradients; of several rows of weights; with padding; quantised results; gated norms; rows that are split
# over devices.
@pytest.mark.parametrize("program", ["run", "run_heads", "run_padding", "run_quantized", "run_gated", "run_parts"])
def test_no_failures(program, objects, tmp_path):
    own = compile_object(HERE / f"{program}.cc", tmp_path)
    target = tmp_path / program
    subprocess.run(["nvcc", *objects, own, "-cudart", "none", "-lpthread", "-o", target], check=True)
    done = subprocess.run([target], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 failures\n", "")
