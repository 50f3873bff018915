"""README, HACKING and docs: examples run; commands, files and names exist; links lead somewhere."""

import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import equinox
import pytest
from processes import STRICT

import jaxnorm
from bench import tables
from bench.__main__ import COMMANDS, parse
from jaxnorm import checkpoint_policies as policies, equinox as jaxnorm_equinox, keras, linen, nnx
from jaxnorm.ops.misuse import FORMER
from jaxnorm.primitive.op import Op

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "HACKING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
# Files of the repository that a page names as code.
NAMED_FILE = re.compile(r"`((?:bench|docs|examples)/[\w./-]+|README\.md|mkdocs\.yml)`")

# Pages about the tree as it is: the findings and the changelog also tell of what is gone.
PRESENT = [page for page in PAGES if page.name not in ("findings.md", "changelog.md")]
SOURCES = [
    *(ROOT / name for name in ("CMakeLists.txt", "pyproject.toml", "mkdocs.yml")),
    *(
        path
        for folder in ("jaxnorm", "src", "cmake", "bench", "examples", "tests", "tools")
        for path in (ROOT / folder).rglob("*.*")
        if path.suffix in (".py", ".h", ".cc", ".cu", ".cuh", ".cmake", ".sh") and path != Path(__file__).resolve()
    ),
]
# A key of the model hubs' configurations, names of the wheels' platforms, options of XLA, Flax's product of float8.
OF_OTHERS = {"partial_rotary_factor", "manylinux_2_28", "manylinux_2_34"}
OF_OTHERS |= {"xla_gpu_dot_merger_threshold_mb", "Fp8DirectDotGeneralOp", "fp8_ops"}
OF_OTHERS |= {"xla_gpu_dump_autotune_results_to", "xla_gpu_load_autotune_results_from"}

# Runs in an interpreter of its own: whatever JAX's devices are here, the examples want eight CPU devices. The blocks of
# a page share a namespace, and a traceback has the page's own line numbers.
RUN = """
import json, sys, traceback
failures = {}
for page, blocks in json.load(sys.stdin).items():
    namespace = {"__name__": page}
    try:
        for line, code in blocks:
            exec(compile("\\n" * line + code, page, "exec"), namespace)
    except Exception:
        failures[page] = traceback.format_exc()
json.dump(failures, sys.stdout)
"""


def blocks(page, language):
    """(lines before it, text) of each fenced block of a page in a language."""
    text = page.read_text()
    return [(text.count("\n", 0, m.start(2)), m[2]) for m in FENCE.finditer(text) if m[1] == language]


def drawn(page):
    """The text of a page as MkDocs shows it, with its tables."""
    return tables.drawn(page.read_text(), ROOT / "bench/results")


def prose(page):
    return FENCE.sub("", drawn(page))


def page_id(page):
    return str(page.relative_to(ROOT))


each_page = pytest.mark.parametrize("page", PAGES, ids=page_id)
WITH_PYTHON = [page for page in PAGES if blocks(page, "python")]


@pytest.fixture(scope="module")
def failures():
    """The traceback of each page whose examples fail."""
    code = {page_id(page): blocks(page, "python") for page in WITH_PYTHON}
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    run = subprocess.run(
        # -P: the installed package, and not the source tree.
        [*STRICT, "-P", "-c", RUN],
        input=json.dumps(code),
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.any_code
@pytest.mark.parametrize("page", WITH_PYTHON, ids=page_id)
def test_examples_run(page, failures):
    assert page_id(page) not in failures, failures.get(page_id(page))


def anchors(page):
    text, found = prose(page), []
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        slug = re.sub(r"[^\w\s-]", "", re.sub(r"`|\[([^\]]*)\]\([^)]*\)", r"\1", heading)).strip().lower()
        found.append(re.sub(r"\s+", "-", slug))
    return found


@each_page
def test_links_lead_somewhere(page):
    for target in LINK.findall(prose(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.is_file(), f"{target}: there is no {file}"
        assert not anchor or anchor in anchors(file), f"{target}: {file.name} has {anchors(file)}"


@each_page
def test_headings_of_a_page_differ(page):
    assert len(anchors(page)) == len(set(anchors(page)))


@each_page
def test_named_files_exist(page):
    missing = [name for name in NAMED_FILE.findall(drawn(page)) if not (ROOT / name).exists()]
    assert not missing


def spans(page):
    """The code spans of a page that are no commands."""
    found = re.findall(r"`([^`\n]+(?:\n[^`\n]+)?)`", prose(page))
    return [span for span in found if not re.match(r"\S*python |pip |mkdocs ", span)]


@pytest.fixture(scope="module")
def words():
    """Every name in the sources."""
    return {word for path in SOURCES for word in re.findall(r"\w+", path.read_text())}


# A path from the root, in which `<op>` stands for any name.
@pytest.mark.parametrize("page", PRESENT, ids=page_id)
def test_paths_exist(page):
    is_path = re.compile(r"(?!dist/)[\w.<>*-]+(/[\w.<>*-]*)+|\w+\.(py|h|cc|cuh?|md)").fullmatch
    patterns = {path: re.sub(r"<\w+>", "*", path).rstrip("/") for path in filter(is_path, spans(page))}
    assert [path for path, pattern in patterns.items() if not any(ROOT.glob(pattern))] == []


# What looks like a name of the code: snake_case, CamelCase, kConstant.
@pytest.mark.parametrize("page", PRESENT, ids=page_id)
def test_names_exist(page, words):
    named = {word for span in spans(page) if "/" not in span for word in re.findall(r"[A-Za-z_]\w+", span)}
    named = {word for word in named if "_" in word or re.match(r"k[A-Z]|[A-Z]+[a-z0-9]+[A-Z]", word)}
    assert {word for word in named - words - OF_OTHERS if not hasattr(equinox, word)} == set()


def commands(page):
    """Each command of the sh blocks and of code spans, as words; environment variables left out.

    Tables that are drawn tell of commands of older commits.
    """
    lines = [line for _, text in blocks(page, "sh") for line in text.replace("\\\n", "").splitlines()]
    lines += re.findall(r"`(python (?:-m|tools/)[^`]+|pip install [^`]+|mkdocs \w+)`", FENCE.sub("", page.read_text()))
    for line in lines:
        for command in re.split(r" && |; ", line):
            yield [word for word in shlex.split(command, comments=True) if not re.match(r"[A-Z_]+=", word)]


def extras():
    text = (ROOT / "pyproject.toml").read_text()
    section = text.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    return set(re.findall(r"^(\w+) = \[", section, re.MULTILINE))


@each_page
def test_commands_name_what_exists(page):
    for program, *args in commands(page):
        if Path(program).name == "pip":
            for extra in re.findall(r"\[([\w,]+)\]", " ".join(args)):
                assert set(extra.split(",")) <= extras()
        elif args[:2] == ["-m", "bench"]:
            check_bench(args[2:])
        elif args and args[0].endswith(".py"):
            assert (ROOT / args[0]).is_file()
            options = [arg for arg in args if arg.startswith("--")]
            assert all(option in (ROOT / args[0]).read_text() for option in options)


def check_bench(args):
    assert args[0] in COMMANDS
    if "--help" not in args:
        parse(args)  # an unknown option ends this


MODULES = (jaxnorm, nnx, linen, jaxnorm.blocks, keras, jaxnorm_equinox, policies, jaxnorm.reports)


def test_the_reference_has_every_public_name():
    reference = (ROOT / "docs/api.md").read_text()
    names = {(module, name) for module in MODULES for name in module.__all__ if callable(getattr(module, name))}
    public = {f"{module.__name__}.{name}" for module, name in names}
    assert set(re.findall(r"^::: (\S+)$", reference, re.MULTILINE)) == public | {"jaxnorm"}


def test_the_table_of_what_changes_a_model_has_what_there_is():
    section = (ROOT / "docs/flax.md").read_text().partition("## What changes a model")[2]
    rows = re.findall(r"^\| (\w+): \S+ \| (.*) \|$", section, re.MULTILINE)
    modules = {"NNX": (jaxnorm, jaxnorm.blocks), "Linen": (linen, jaxnorm.blocks)}
    modules |= {"Equinox": (jaxnorm_equinox,), "Keras": (keras,), "Haiku": ()}
    assert [front for front, _ in rows] == list(modules)
    for column in zip(*(row.split(" | ") for _, row in rows), strict=True):
        said = [set(re.findall(r"(\w+)`", cell)) for cell in column]
        there = [{name for module in of for name in module.__all__} & set().union(*said) for of in modules.values()]
        assert (said, [cell == "no" for cell in column]) == (there, [not names for names in there])


def test_nothing_has_its_name_of_before():
    def used(name):
        owner, _, last = name.rpartition(".")
        if owner.startswith("jaxnorm"):
            return rf"\b{last}\b" if "_" in last and last not in still else rf"\b{name}\b"
        return rf"\b{owner}\([^)]*\b{last}=" if owner else rf"""["'`]{name}["'`]|\b{name}="""

    still = {"resnet_block", "timed_resnet_block"}.union(*(module.__all__ for module in MODULES))

    former = re.compile("|".join(map(used, FORMER)))
    modules = [path for path in (ROOT / "jaxnorm").rglob("*.py") if path.name not in ("misuse.py", "partition.py")]
    assert [page_id(path) for path in (*PRESENT, *modules) if former.search(path.read_text())] == []


def test_readme_is_short():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 180
    assert lines.index("```python") < 25
    assert lines.index("## Install") <= 40


@pytest.mark.parametrize("hook", re.findall(r"tools/\w+\.py", (ROOT / "mkdocs.yml").read_text()))
def test_hooks_of_mkdocs_find_the_clone(hook, tmp_path):
    # As `mkdocs` has it: without the clone's root on the path.
    run = [sys.executable, "-P", "-c", f"import runpy; runpy.run_path({str(ROOT / hook)!r})"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("command", ["examples/train_lm.py", "pytest"])
def test_the_commands_that_ci_runs_stand_in_readme(command):
    lines = rf"^python3 -m venv.*{command}$"
    assert len(re.findall(lines, (ROOT / "README.md").read_text(), re.MULTILINE)) == 1


def test_every_constant_of_the_plan_is_explained():
    sources = [path for path in (ROOT / "src").rglob("plan.*") if path.suffix in (".h", ".cc")]
    assert sources
    constants = {name for path in sources for name in re.findall(r"constexpr \w+ (k\w+) =", path.read_text())}
    explained = (ROOT / "docs/kernels.md").read_text()
    assert not {name for name in constants if f"`{name}`" not in explained}


def test_constants_have_the_values_that_are_stated():
    literal = re.compile(r"\b(k[A-Z]\w*) = (-?\d+)(?: << (\d+))?[;,]")
    found = [match for path in SOURCES for match in literal.findall(path.read_text())]
    values = {(name, str(int(value) << int(shift or 0))) for name, value, shift in found}
    stated = re.findall(r"`(k[A-Z]\w*)` = (-?\d+) ", (ROOT / "docs/kernels.md").read_text())
    assert stated
    assert [constant for constant in stated if constant not in values] == []


def test_every_field_of_an_op_is_explained():
    page = (ROOT / "docs/adding-an-op.md").read_text()
    assert {field.name for field in dataclasses.fields(Op) if f"`{field.name}`" not in page} == set()
