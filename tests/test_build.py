"""What the build compiles for, without compiling."""

import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.build

CHOOSE = Path(__file__).parents[1] / "cmake" / "architectures.cmake"
CUDA_13 = "75 80 86 87 88 89 90 100 110 103 120 121"
EVERY = "75-virtual 80-real 86-real 89-real 90-real 100-real 120"


# The GPUs that are present, what the compiler knows, and what is compiled for; with a part of what CMake says.
@pytest.mark.parametrize(
    ("present", "known", "chosen", "said"),
    [
        ("9.0", CUDA_13, "90", ""),
        ("12.1", CUDA_13, "121", ""),
        ("9.0 9.0", CUDA_13, "90", ""),
        ("8.9 9.0", CUDA_13, "89 90", ""),
        ("", CUDA_13, EVERY, ""),
        ("", "", EVERY, ""),
        # A compiler that says nothing is believed to know it.
        ("9.0", "", "90", ""),
        # A GPU that is newer than the compiler gets PTX, one that is older than the kernels nothing of its own.
        ("13.0", CUDA_13, EVERY, "nvcc does not know the GPU's compute capability 13.0"),
        ("9.0 13.0", CUDA_13, EVERY, "does not know"),
        ("7.0", CUDA_13, EVERY, "no CUDA kernel runs on the GPU of compute capability 7.0"),
        # Compilers that know less or no longer know all.
        ("", "75 80 86 87 89 90", "75-virtual 80-real 86-real 89-real 90", ""),
        ("12.0", "75 80 86 87 89 90", "75-virtual 80-real 86-real 89-real 90", "does not know"),
        ("", "80 86 89 90 100 120 130", "80-real 86-real 89-real 90-real 100-real 120", ""),
    ],
)
def test_architectures(tmp_path, present, known, chosen, said):
    present, known = (";".join(names.split()) for names in (present, known))
    script = tmp_path / "script.cmake"
    script.write_text(
        f"cmake_minimum_required(VERSION 3.24)\ninclude({CHOOSE})\n"
        f'jaxnorm_choose_architectures(chosen "{present}" "{known}")\n'
        'list(JOIN chosen " " chosen)\nmessage(STATUS "chosen: ${chosen}")\n'
    )
    run = subprocess.run(["cmake", "-P", str(script)], capture_output=True, text=True, check=True)
    assert f"chosen: {chosen}\n" in run.stdout
    assert said in run.stdout
