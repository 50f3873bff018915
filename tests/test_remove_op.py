"""An op is a folder: `tools/remove_op.py` takes it out of a copy of this tree, and the rest is whole."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from coverage import in_full

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (".ci", "jaxnorm", "src", "cmake", "tests", "bench", "docs", "examples", "tools")
OPS = ("sandwich_norm", "group_norm", "gated_activation", "softmax", "cross_entropy", "qk_norm_rotary", "float8_linear")
# Where the product names an op, beside its two folders.
NAMED_IN = {"jaxnorm/__init__.py", "cmake/ops.cmake"}

pytest.importorskip("libcst")
# In a group, which workers begin with: it takes longest.
pytestmark = [pytest.mark.any_code, pytest.mark.long, pytest.mark.xdist_group("remove op")]


class Copy:
    """This tree, the native modules that are installed, and Python programs that find both before what is installed."""

    def __init__(self, folder):
        self.root = folder / "tree"
        for name in FOLDERS:
            shutil.copytree(ROOT / name, self.root / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        for path in filter(Path.is_file, (*ROOT.glob("*.*"), ROOT / "LICENSE")):
            shutil.copy(path, self.root)
        for module in filter(None, map(importlib.util.find_spec, ("jaxnorm._cpu", "jaxnorm._cuda"))):
            shutil.copy(module.origin, self.root / "jaxnorm")
        self.installed = folder / "installed"
        self.installed.mkdir()
        (self.installed / "jaxnorm").symlink_to(self.root / "jaxnorm")

    def run(self, *arguments):
        environment = os.environ | {"PYTHONPATH": str(self.installed), "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=self.root, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def build(self):
        """The CPU's native module anew, of what is left, without optimisation: in a quarter of the time."""
        options = ("--quiet", "--no-deps", "--config-settings=cmake.build-type=None", "--wheel-dir", "dist")
        pip = [sys.executable, "-m", "pip", "wheel", *options, "."]
        subprocess.run(pip, cwd=self.root, env=os.environ | {"JAXNORM_CUDA": "0"}, check=True)
        (wheel,) = (self.root / "dist").glob("*.whl")
        for module in (self.root / "jaxnorm").glob("*.so"):
            module.unlink()
        with zipfile.ZipFile(wheel) as archive:
            archive.extract("jaxnorm/_cpu.abi3.so", self.root)

    def pytest(self, *arguments):
        return self.run("-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-q", *arguments)


@pytest.fixture(scope="module", params=(OPS[0], *in_full(*OPS[1:])))
def without(request, tmp_path_factory):
    """The op, and a copy without it with what the tool printed."""
    copy = Copy(tmp_path_factory.mktemp(request.param))
    copy.printed = copy.run("tools/remove_op.py", request.param)
    return request.param, copy


@pytest.mark.parametrize("without", ["sandwich_norm"], indirect=True)
def test_the_product_names_an_op_in_few_places(without):
    op, copy = without
    touched = set(re.findall(r"^(?:jaxnorm|src|cmake|CMakeLists)[^:]*", copy.printed, re.MULTILINE))
    assert touched <= NAMED_IN | {f"jaxnorm/ops/{op}", f"src/ops/{op}"}
    assert "still named in" not in copy.printed


def test_what_is_left_is_whole(without):
    op, copy = without
    program = "import sys, jaxnorm; print(jaxnorm.__path__[0], *(name for name in sys.modules if sys.argv[1] in name))"
    assert copy.run("-c", program, f"jaxnorm.ops.{op}") == f"{copy.root / 'jaxnorm'}\n"
    if importlib.util.find_spec("ruff"):
        copy.run("-m", "ruff", "check", "--select", "F", ".")
    copy.pytest("--collect-only", "--once")


@pytest.mark.parametrize("without", ["sandwich_norm"], indirect=True)
def test_the_package_builds_and_the_other_ops_keep_their_laws(without):
    _, copy = without
    copy.build()
    handlers = copy.run("-c", "from jaxnorm.native import ffi; print(*ffi.module('cpu').handlers())")
    assert "jaxnorm_rms_norm_fwd" in handlers
    assert "add_rms_norm" not in handlers
    some = ("tests/laws/test_errors.py", "tests/laws/test_explain.py")
    copy.pytest("--quick", *(("tests/laws",) if in_full(True) else some), "tests/native/test_info.py")
    copy.pytest("--once", "tests/test_package.py", "tests/test_docs.py", "-k", "not examples_run or guide or porting")
