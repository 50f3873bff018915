"""What the build compiles for and with, without compiling."""

import ctypes
import importlib.metadata
import os
import stat
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import cuda_wheels
import pytest
from internals import fit

import jaxnorm

ROOT = Path(__file__).parents[1]
CUDA_13, COMMON = "75 80 86 87 88 89 90 100 110 103 120 121", "80-real 90-real 100"

with_cmake = pytest.mark.needs("build")


def cmake(tmp_path, file, *lines):
    """What CMake prints for these lines, with a file of the folder cmake."""
    script, include = tmp_path / "script.cmake", f"include({ROOT}/cmake/{file}.cmake)"
    script.write_text("\n".join(("cmake_minimum_required(VERSION 3.24)", include, *lines)))
    return subprocess.run(["cmake", "-P", str(script)], capture_output=True, text=True, check=True).stdout


# The GPUs that are present, what the compiler knows, and what is compiled for; with a part of what CMake says.
@with_cmake
@pytest.mark.parametrize(
    ("present", "known", "chosen", "said"),
    [
        ("9.0", CUDA_13, "90", ""),
        ("12.1", CUDA_13, "121", ""),
        ("9.0 9.0", CUDA_13, "90", ""),
        ("8.9 9.0", CUDA_13, "89 90", ""),
        ("", CUDA_13, COMMON, ""),
        ("", "", COMMON, ""),
        # A compiler that says nothing is believed to know it.
        ("9.0", "", "90", ""),
        # A GPU that is newer than the compiler gets PTX, one that is older than the kernels nothing of its own.
        ("13.0", CUDA_13, COMMON, "nvcc does not know the GPU's compute capability 13.0"),
        ("9.0 13.0", CUDA_13, COMMON, "does not know"),
        ("7.0", CUDA_13, COMMON, "no CUDA kernel runs on the GPU of compute capability 7.0"),
        # Compilers that know less or no longer know all.
        ("12.0", "75 80 86 87 89 90", "80-real 90", "does not know"),
        ("", "80 86 89 90 100 120 130", "80-real 90-real 100", ""),
    ],
)
def test_architectures(tmp_path, present, known, chosen, said):
    present, known = (";".join(names.split()) for names in (present, known))
    printed = cmake(
        tmp_path,
        "architectures",
        f'jaxnorm_choose_architectures(chosen "{present}" "{known}")',
        'list(JOIN chosen " " chosen)\nmessage(STATUS "chosen: ${chosen}")',
    )
    assert f"chosen: {chosen}\n" in printed
    assert said in printed


@with_cmake
def test_which_gpus_run_the_kernels_of_a_wheel(tmp_path):
    join = 'list(JOIN JAXNORM_EVERY_ARCHITECTURE " " every)\nmessage(STATUS "every: ${every}")'
    printed = cmake(tmp_path, "architectures", join)
    every = printed.split("every: ")[1].strip()
    known = ["7.0", "7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "12.0", "12.1", "13.0"]
    built = {"architectures": every, "toolkit": "13.0.88", "driver": 13000}
    why_not = {gpu: fit.why_not(capability=gpu, **built) for gpu in known}
    assert [gpu for gpu in known if why_not[gpu] is None] == known[1:-1]
    assert "build jaxnorm for it" in why_not["13.0"]


# What there is as a compiler, what it prints, and why it cannot build the kernels.
@with_cmake
@pytest.mark.parametrize(
    ("compiler", "text", "why"),
    [
        ("", "", "there is no CUDA compiler. Install the CUDA toolkit"),
        ("/bin/nvcc", "Cuda compilation tools, release 12.4, V12.4.131", "/bin/nvcc is nvcc 12.4, older than 12.8."),
        ("/bin/nvcc", "Cuda compilation tools, release 12.8, V12.8.61", ""),
        ("/bin/nvcc", "Cuda compilation tools, release 13.0, V13.0.48", ""),
        ("/bin/clang++", "clang version 20.1.0", ""),  # CMake judges it
    ],
)
def test_compilers(tmp_path, compiler, text, why):
    judge = f'jaxnorm_judge_compiler(why "{compiler}" "{text}")\nmessage(STATUS "why: ${{why}}.")'
    printed = cmake(tmp_path, "architectures", judge)
    assert (f"why: {why}" if why else "why: .\n") in printed
    assert ("JAXNORM_CUDA=pypi" in printed) == bool(why)


def test_an_object_is_kept_by_what_it_is_of(tmp_path):
    """Another folder of headers changes nothing; a header, an option or the source does."""

    def kept_after(folder, value=1, option="-O1", name="f"):
        place = tmp_path / folder
        place.mkdir(exist_ok=True)
        (place / "value.h").write_text(f"#define VALUE {value}\n")
        (place / "f.cc").write_text(f'#include "value.h"\nint {name}() {{ return VALUE; }}\n')
        command = f"{ROOT}/tools/compile_once c++ {option} -isystem {place} -MD -MT f.o -MF f.d -o f.o -c {place}/f.cc"
        subprocess.run(
            command.split(), cwd=place, env=os.environ | {"JAXNORM_OBJECTS": f"{tmp_path}/objects"}, check=True
        )
        assert f"{place}/value.h" in (place / "f.d").read_text()
        objects = [path.read_bytes() for path in (tmp_path / "objects").iterdir()]
        assert (place / "f.o").read_bytes() in objects
        return len(objects)

    assert [kept_after("here"), kept_after("there"), kept_after("here", value=2)] == [1, 1, 2]
    assert [kept_after("here", option="-O2"), kept_after("here", name="g"), kept_after("there")] == [3, 4, 4]


def configured(tmp_path, driver, **environment):
    """What CMake says of CUDA, where no compiler runs: `project` and all that finds one do nothing."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "cuda_wheels.py").write_text(f"raise SystemExit({int(not driver)})")
    lines = [
        "cmake_minimum_required(VERSION 3.24)\nproject(none LANGUAGES NONE)",
        f'set(Python_EXECUTABLE "{sys.executable}")',
        "function(jaxnorm_add_module)\nmessage(FATAL_ERROR built)\nendfunction()",
        f'list(APPEND CMAKE_MODULE_PATH "{tmp_path}")\ninclude({ROOT}/cmake/cuda.cmake)',
    ]
    (tmp_path / "CheckLanguage.cmake").write_text("function(check_language)\nendfunction()")
    (tmp_path / "cmake").mkdir()
    (tmp_path / "cmake" / "architectures.cmake").symlink_to(ROOT / "cmake" / "architectures.cmake")
    (tmp_path / "CMakeLists.txt").write_text("\n".join(lines))
    environment = {name: value for name, value in os.environ.items() if name != "JAXNORM_CUDA"} | environment
    build = ["cmake", "-S", str(tmp_path), "-B", str(tmp_path / "build")]
    first = subprocess.run(build, capture_output=True, text=True, env=environment)
    install = ["cmake", "--install", str(tmp_path / "build"), "--prefix", str(tmp_path / "prefix")]
    last = subprocess.run(install, capture_output=True, text=True) if first.returncode == 0 else None
    return first.stdout + first.stderr, last.stdout.splitlines()[-1] if last else ""


# An nvcc is nothing without a driver, if JAXNORM_CUDA does not ask for it; the build's last line says so.
@with_cmake
@pytest.mark.parametrize(
    ("asked", "driver", "why"),
    [
        ("", False, "there is no NVIDIA driver; JAXNORM_CUDA=1 builds"),
        ("", True, "there is no CUDA compiler"),
        ("0", True, "JAXNORM_CUDA=0"),
    ],
)
def test_without_cuda(tmp_path, asked, driver, why):
    said, last = configured(tmp_path, driver, JAXNORM_CUDA=asked)
    assert f"jaxnorm: built without CUDA, because {why}" in said
    assert f"jaxnorm: built without CUDA, because {why}" in last


@with_cmake
def test_cuda_that_is_asked_for_and_missing(tmp_path):
    said, _ = configured(tmp_path, False, JAXNORM_CUDA="1")
    assert "JAXNORM_CUDA=1 asks for the CUDA kernels, and there is no CUDA compiler." in " ".join(said.split())


# What the environment asks for, what this machine has, and whether NVIDIA's compiler is required; with what is said.
@pytest.mark.parametrize(
    ("asked", "nvcc", "driver", "required", "said"),
    [
        ("pypi", False, None, True, ""),
        ("pypi", True, None, True, ""),
        ("", False, None, False, ""),
        ("", False, 13000, True, "driver of CUDA 13.0 and no nvcc"),
        ("1", False, 13020, True, "JAXNORM_CUDA=0"),
        ("", True, 13000, False, ""),
        ("0", False, 13000, False, ""),
        # It could not run what CUDA 13 compiled.
        ("", False, 12080, False, "driver of CUDA 12.8 and no nvcc"),
    ],
)
def test_requirements(monkeypatch, capsys, asked, nvcc, driver, required, said):
    monkeypatch.setenv("JAXNORM_CUDA", asked)
    monkeypatch.setattr(cuda_wheels, "has_nvcc", lambda: nvcc)
    monkeypatch.setattr(cuda_wheels, "driver", lambda: driver)
    assert cuda_wheels.wanted() == (cuda_wheels.REQUIREMENTS if required else [])
    assert said in (told := capsys.readouterr().err)
    assert bool(told) == bool(said)


def test_nvcc_on_path_or_by_name(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDACXX", raising=False)
    assert not cuda_wheels.has_nvcc()
    monkeypatch.setenv("CUDACXX", "/opt/cuda/bin/nvcc")
    assert cuda_wheels.has_nvcc()
    monkeypatch.delenv("CUDACXX")
    (tmp_path / "nvcc").touch(stat.S_IRWXU)
    assert cuda_wheels.has_nvcc()


class Driver:
    """A driver, or a stub of one, as `ctypes` would load it."""

    def __init__(self, version, error=0):
        self.version, self.error = version, error

    def cuDriverGetVersion(self, result):
        ctypes.cast(result, ctypes.POINTER(ctypes.c_int))[0] = self.version
        return self.error


@pytest.mark.parametrize(("library", "version"), [(Driver(13020), 13020), (Driver(0), None), (Driver(0, 34), None)])
def test_driver(monkeypatch, library, version):
    monkeypatch.setattr(cuda_wheels.ctypes, "CDLL", lambda name: library)
    assert cuda_wheels.driver() == version


def test_no_driver():
    assert cuda_wheels.driver("libno-such-driver.so.1") is None


ALL = dict.fromkeys(["nvidia-cuda-nvcc", *cuda_wheels.OF_ONE_VERSION, cuda_wheels.HEADERS], "13.2.86")


def install(folder, versions, compiler="cu13"):
    """As if these packages were installed there."""
    for package, version in versions.items():
        info = folder / f"{package.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    (folder / "nvidia" / compiler / "bin").mkdir(parents=True)
    (folder / "nvidia" / compiler / "bin" / "nvcc").touch()


def find(folder):
    """What CMake gets to know, as the build environment's interpreter sees its packages."""
    command = [sys.executable, "-S", ROOT / "tools" / "cuda_wheels.py"]
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": str(folder)}, capture_output=True, text=True)


def test_the_compiler_is_found(tmp_path):
    install(tmp_path, ALL)
    assert find(tmp_path).stdout == f"{tmp_path}/nvidia/cu13/bin/nvcc\n"


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        ({"nvidia-cuda-nvcc": None}, "nvidia-cuda-nvcc is not installed"),
        ({"nvidia-cuda-nvcc": "13.1.115"}, "is 13.1.115, and nvcc works in packages from 13.2.78 on"),
        ({"nvidia-nvvm": "13.5.37"}, "nvidia-cuda-nvcc is 13.2.86 and nvidia-nvvm 13.5.37; they go together"),
        ({"nvidia-cuda-crt": None}, "nvidia-cuda-crt missing"),
        ({"nvidia-cuda-cccl": None}, "nvidia-cuda-cccl is not installed"),
    ],
)
def test_a_compiler_that_would_not_work(tmp_path, others, reason):
    install(tmp_path, {package: version for package, version in (ALL | others).items() if version})
    found = find(tmp_path)
    assert found.returncode == 1
    assert reason in found.stderr
    assert "pip install 'nvidia-cuda-nvcc>=13.2.78,==13.2.*' 'nvidia-nvvm==13.2.*'" in found.stderr


def test_a_compiler_in_another_folder(tmp_path):
    install(tmp_path, ALL, compiler="cu14")
    assert "has no nvcc" in find(tmp_path).stderr


def test_one_place_has_the_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert jaxnorm.__version__ in (version, "unknown")  # it was never installed
    assert f"\n## {version}\n" in (ROOT / "docs" / "changelog.md").read_text()


@pytest.mark.needs("clone")
def test_the_wheel_without_kernels(tmp_path):
    """It has no native module, the installed wheel's metadata, and README with links that lead somewhere."""
    options = {"wheel.cmake": "false", "wheel.py-api": "py3"}
    build = f"import build_backend; build_backend.build_wheel({str(tmp_path)!r}, {options})"
    subprocess.run([sys.executable, "-c", build], cwd=ROOT, env=os.environ | {"PYTHONPATH": "tools"}, check=True)
    (wheel,) = map(zipfile.ZipFile, tmp_path.glob("*-py3-none-any.whl"))
    assert [name for name in wheel.namelist() if name.endswith(".so")] == []
    metadata = wheel.read(f"jaxnorm-{jaxnorm.__version__}.dist-info/METADATA").decode()
    installed = importlib.metadata.distribution("jaxnorm").read_text("METADATA")
    assert metadata.partition("\n\n")[0] == installed.partition("\n\n")[0]
    assert metadata.count("](") == metadata.count("](https://")


@pytest.mark.needs("clone")
def test_one_command_names_the_owner():
    named = (ROOT / "docs" / "releasing.md").read_text().partition("s/OWNER/NAME/g' ")[2].split("\n")[0].split()
    found = subprocess.run(["git", "grep", "-lw", "--untracked", "OWNER"], cwd=ROOT, capture_output=True, text=True)
    assert {*found.stdout.split()} <= {*named, "docs/releasing.md", "tests/test_build.py"}
