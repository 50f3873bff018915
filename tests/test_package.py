"""The package as a whole: what it shows, how much there is to read, and that it is whole without the folders of an op.

The tree has a budget. Who adds takes away; a change that has to raise a figure says by how much, and for what.
"""

import ast
import graphlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import jaxnorm

pytestmark = pytest.mark.any_code

ROOT = Path(__file__).resolve().parent.parent
SOURCES = [
    path
    for directory in ("jaxnorm", "src")
    for path in sorted((ROOT / directory).rglob("*"))
    if path.suffix in (".py", ".h", ".cc", ".cu", ".cuh", ".html")
]
PYTHON = [path for path in SOURCES if path.suffix == ".py"]


def name(path):
    return str(path.relative_to(ROOT))


LINES, FILES, TESTS_TO_PRODUCT, LONGEST = 84_194, 480, 0.680, 450


@pytest.fixture(scope="module")
def lengths():
    """The lines of all files of the clone, by name: 120 bytes are one, and what is no text has none."""
    command = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate")
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    contents = {file: (ROOT / file).read_bytes() for file in listed if (ROOT / file).is_file()}
    return {
        file: sum(max(1, -(-len(line) // 120)) for line in content.splitlines()) if b"\0" not in content else 0
        for file, content in contents.items()
    }


@pytest.mark.needs("clone")
def test_the_tree_is_within_its_budget(lengths):
    assert sum(lengths.values()) <= LINES
    assert len(lengths) <= FILES


@pytest.mark.needs("clone")
def test_tests_are_shorter_than_what_they_test(lengths):
    tests, package, kernels = (
        sum(length for file, length in lengths.items() if file.startswith(folder))
        for folder in ("tests/", "jaxnorm/", "src/")
    )
    assert tests <= TESTS_TO_PRODUCT * (package + kernels)


def test_no_file_is_long():
    assert {path.suffix for path in SOURCES} == {".py", ".h", ".cc", ".cu", ".cuh", ".html"}  # they are found
    lengths = {name(path): len(path.read_text().splitlines()) for path in SOURCES}
    assert {path: length for path, length in lengths.items() if length > LONGEST} == {}


def test_the_engine_and_the_ffi_include_no_op():
    own = [path for path in SOURCES if name(path).startswith(("src/engine/", "src/ffi/"))]
    assert own
    assert [name(path) for path in own if '#include "ops/' in path.read_text()] == []


def test_primitives_are_made_in_one_place():
    of_ops = [path for path in PYTHON if name(path).startswith("jaxnorm/ops/")]
    assert of_ops
    assert [name(path) for path in of_ops if "Primitive(" in path.read_text()] == []


def test_no_function_is_long():
    lengths = {
        f"{name(path)}:{node.name}": lines_of_code(node)
        for path in PYTHON
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {function: length for function, length in lengths.items() if length > 51} == {}


def lines_of_code(function):
    """Those of a function without its docstring, which has an entry for each argument."""
    first, described = function.body[0], ast.get_docstring(function) is not None
    return function.end_lineno - function.lineno + 1 - described * (first.end_lineno - first.lineno + 1)


def imported(node, modules):
    """Those of the modules that a file imports, within functions too, but not for type checkers alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            child = ast.Module(child.orelse)
        if isinstance(child, ast.Import):
            yield from {alias.name for alias in child.names} & modules
        elif isinstance(child, ast.ImportFrom):
            names = (f"{child.module}.{alias.name}" for alias in child.names)
            yield from {name if name in modules else child.module for name in names} & modules
        else:
            yield from imported(child, modules)


@pytest.mark.parametrize("folder", ["jaxnorm", "bench", "tools", "tests/lib"])
def test_no_module_imports_itself_through_others(folder):
    root = ROOT / folder if folder == "tests/lib" else ROOT
    paths = {path.relative_to(root).with_suffix(""): path for path in sorted((ROOT / folder).rglob("*.py"))}
    files = {".".join(module.parts).removesuffix(".__init__"): path for module, path in paths.items()}
    imports = {m: {*imported(ast.parse(path.read_text()), files.keys())} - {m} for m, path in files.items()}
    graphlib.TopologicalSorter(imports).prepare()  # an error that names a circle


def shown(names):
    return {name for name in names if not name.startswith("__")}


def test_dir_shows_what_is_public():
    modules = {"blocks", "checkpoint_policies", "equinox", "info", "keras", "linen", "nnx"}
    assert shown(dir(jaxnorm)) == shown(jaxnorm.__all__) | modules
    assert all(hasattr(jaxnorm, name) for name in dir(jaxnorm))
    assert "__version__" in dir(jaxnorm)


# All but those on which others build, norm, quantize and quantized_dot.
OPS = ("sandwich_norm", "group_norm", "gated_activation", "softmax", "cross_entropy", "qk_norm_rotary", "float8_linear")
OPS += ("embedding", "sample")
IN_SOURCES = {"embedding": "segment_sum"}  # of which name its folder of src is, where it has another
NAMED_IN = {"jaxnorm/__init__.py", "cmake/ops.cmake"}
LAYERS = re.compile("jaxnorm/(integrations/|equinox|keras|replacement)")  # a layer is of its op, and goes with it

PROGRAM = """
import sys, jax, jaxnorm
from jaxnorm import info
print(jaxnorm.__path__[0], *(name for name in sys.modules if sys.argv[1] in name))
assert all(hasattr(jaxnorm, name) for name in jaxnorm.__all__)
print(jax.jit(jax.grad(lambda x: jaxnorm.layer_norm(x).sum()))(jax.numpy.arange(8.0)).shape)
info.main([])
"""


@pytest.mark.parametrize("op", OPS)
def test_the_product_names_an_op_in_few_places(op):
    paths = [path for folder in ("jaxnorm", "src", "cmake") for path in (ROOT / folder).rglob("*.*") if path.is_file()]
    texts = {str(p.relative_to(ROOT)): p.read_text() for p in paths if p.suffix not in (".so", ".pyc")}
    named = re.compile(rf"ops[./]{op}\b|\bjaxnorm_op\({op}\b")
    found = {path for path, text in texts.items() if named.search(text) and f"/ops/{op}/" not in path}
    assert {path for path in found if not LAYERS.match(path)} <= NAMED_IN


@pytest.mark.parametrize(
    "op", ["sandwich_norm", "softmax", "cross_entropy", "embedding", "sample"]
)  # those without layers
def test_what_is_left_is_whole(op, tmp_path):
    of_sources = IN_SOURCES.get(op, op)
    ignored = shutil.ignore_patterns("__pycache__", "*.so", op, of_sources)
    for folder in ("jaxnorm", "cmake", "src"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    for module in filter(None, map(importlib.util.find_spec, ("jaxnorm._cpu", "jaxnorm._cuda"))):
        (tmp_path / "jaxnorm" / Path(module.origin).name).symlink_to(module.origin)
    init, lines = (tmp_path / name for name in sorted(NAMED_IN, reverse=True))
    lines.write_text(re.sub(rf"(?m)^jaxnorm_op\({of_sources}\b.*\n", "", lines.read_text()))
    imports = re.findall(rf"(?m)^from jaxnorm\.ops\.{op}\..* import (.*)\n", init.read_text())
    names = "|".join(", ".join(imports).split(", "))
    init.write_text(re.sub(rf'(?m)^from jaxnorm\.ops\.{op}\..*\n|^ *"({names})",\n', "", init.read_text()))
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", PROGRAM, f"jaxnorm.ops.{op}"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.startswith(f"{tmp_path / 'jaxnorm'}\n(8,)\n"), done.stderr
    assert done.returncode == 0, done.stderr
