"""The package as a whole: what it shows, and how much there is to read.

The tree has a budget. Who adds takes away; a change that has to raise a figure says by how much, and for what.
"""

import ast
import graphlib
import subprocess
from pathlib import Path

import pytest

import jaxnorm

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


LINES, FILES, TESTS_TO_PRODUCT, LONGEST = 81_460, 600, 0.685, 450


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
    first = function.body[0]
    described = ast.get_docstring(function) is not None
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
