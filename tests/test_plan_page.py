"""The page of a launch plan: its map of a row against what the kernels do, on the host, and in a browser."""

import itertools
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest
from internals import choose_fastest, ffi, launch, plan_page, tiling
from test_emulated_kernels import EMULATOR, SOURCES

from jaxnorm import info
from tools import plan_pages

LAUNCH, READ, WRITE, COPY, READ_COPIED = range(5)
FIELDS = ("call", "kernel", "kind", "block", "thread", "array", "first", "count")
ARRAYS = {"x": 0, "y": 1, "dx": 1, "dy": 2}

# Each regime of each table, with rows that vectors divide and that they do not: kind and dtype, rows, columns. Blocks
# of several rows of the forward are full: a thread group without a row would read another's once more.
FORWARD = (
    *(("rms-float32", 64, cols) for cols in (24, 57, 64, 100, 256, 510, 512)),
    *(("rms-float32", 5, cols) for cols in (516, 1024, 1025, 9216, 9217)),
    *(("rms-float32", 3, cols) for cols in (20_000, 20_001, 140_000)),
    *(("rms-float32", 1, cols) for cols in (262_152, 262_153)),
    *(("rms-bfloat16", 64, cols) for cols in (24, 57, 128, 129, 256, 512, 1001, 1024)),
    *(("rms-bfloat16", 5, cols) for cols in (1032, 1033, 4096, 9216, 9217, 14_336)),
    *(("rms-bfloat16", 3, cols) for cols in (20_000, 20_001, 270_000)),
    *(("rms-bfloat16", 1, cols) for cols in (524_304, 524_305)),
    *(("layer-float32", 64, cols) for cols in (64,)),
    *(("layer-float32", 5, cols) for cols in (1024, 5376, 9216)),
    *(("layer-float32", 1, cols) for cols in (262_152,)),
)
BACKWARD = (
    *(("rms-float32", 70, cols) for cols in (24, 57, 64, 128, 256, 512)),
    *(("rms-float32", 9, cols) for cols in (1024, 1025, 4100)),
    *(("rms-float32", 3, cols) for cols in (9216, 9217, 40_000, 140_000, 140_001)),
    *(("rms-float32", 2, cols) for cols in (262_152, 262_153)),
    *(("rms-bfloat16", 70, cols) for cols in (24, 57, 128, 256, 512, 768, 1001)),
    *(("rms-bfloat16", 9, cols) for cols in (1024, 2048, 2056, 5128)),
    *(("rms-bfloat16", 3, cols) for cols in (9216, 9217, 40_000, 140_000, 262_160)),
)


def case_of(way, case):
    name, rows, cols = case
    kind, dtype = name.split("-")
    plan = ffi.module("cuda").plan(way, kind, dtype, cols)
    return tiling.Case(way, kind, np.dtype(jnp.dtype(dtype)), rows, cols, plan)


def partial_rows(case):
    """How many the backward has room for."""
    return ffi.module("cuda").workspace("jaxnorm_rms_norm_bwd", case.dtype.name, case.cols, weights=1)[1] // case.cols


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """The accesses of all cases, by direction and case, as a structured array."""
    folder = tmp_path_factory.mktemp("accesses")
    compiler = ("nvcc", "-x", "c++", "-std=c++17", f"-I{EMULATOR}", f"-I{SOURCES}", "-include", EMULATOR / "emulator.h")

    def compile_object(source):
        logs = source.name.startswith("log_")
        how = ("-O0", "-Xcompiler=-w,-fsanitize=thread,-fno-builtin-memcpy") if logs else ("-O1", "-Xcompiler=-w")
        target = folder / f"{source.name}.o"
        subprocess.run([*compiler, *how, "-c", source, "-o", target], check=True)
        return target

    programs = [EMULATOR / f"log_{way}.cc" for way in ("backward", "forward")]
    others = [
        EMULATOR / "emulator.cc",
        EMULATOR / "accesses.cc",
        *(SOURCES / "cuda" / "engine" / name for name in ("plan.cc", "grad_schedule.cc")),
    ]
    with ThreadPoolExecutor(2) as pool:
        backward, forward, *objects = pool.map(compile_object, (*programs, *others))

    def run(program, cases):
        target = program.with_suffix("")
        link = ("-cudart", "none", "-lpthread", "-Xlinker", "--wrap=memcpy")
        subprocess.run(["nvcc", program, *objects, *link, "-o", target], check=True)
        done = subprocess.run(
            [target, *(str(word) for case in cases for word in case)], capture_output=True, check=True
        )
        records = np.frombuffer(done.stdout, np.dtype([(field, np.int32) for field in FIELDS]))
        ends = np.searchsorted(records["call"], np.arange(len(cases) + 1))
        return {case: records[begin:end] for case, begin, end in zip(cases, ends[:-1], ends[1:], strict=True)}

    return {"forward": run(forward, FORWARD), "backward": run(backward, BACKWARD)}


class Log:
    """The accesses of a case."""

    def __init__(self, case, records):
        self.case = case
        self.launches = records[records["kind"] == LAUNCH]
        self.records = records

    def of(self, kernel, kind, array):
        """Block, thread, and number in the array, of each element of each access of a kernel, in no order."""
        own = self.records[
            (self.records["kernel"] == self.launches["kernel"][kernel])
            & (self.records["kind"] == kind)
            & (self.records["array"] == ARRAYS[array])
        ]
        count = own["count"].astype(np.int64)
        within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        element = np.repeat(own["first"].astype(np.int64), count) + within
        return np.repeat(own["block"], count), np.repeat(own["thread"], count), element

    def owners(self, kernel, kind, array, own):
        """Whose each access of an element is, as one number for block of the row, thread of its group, and element."""
        block, thread, element = self.of(kernel, kind, array)
        owner = block % own.blocks * own.threads + thread % own.threads
        return owner.astype(np.int64) * self.case.rows * self.case.cols + element


def expected_owners(case, own):
    """The same by the page's formula, in order."""
    of_rows = np.arange(case.rows) * case.cols
    keys = []
    for block, thread, _, first, count in own.vectors_of_blocks():
        within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        owner = np.repeat(block * own.threads + thread, count).astype(np.int64)
        keys.append(owner * case.rows * case.cols + np.repeat(first, count) + within)
    return np.sort((np.concatenate(keys)[:, None] + of_rows).ravel())


def words_of(keys, case):
    """Owners of 16-byte words, from those of elements."""
    elements = case.rows * case.cols
    words = elements // case.vector + 1
    return np.unique(keys // elements * words + keys % elements // case.vector)


def check_reads(log, kernel, steps, array):
    """That a kernel reads an array as its passes say."""
    found = [log.owners(kernel, kind, array, steps[0].tiling) for kind in (READ, COPY)]  # a thread may copy its own
    found = np.sort(np.concatenate(found))
    expected = np.sort(np.concatenate([expected_owners(log.case, step.tiling) for step in steps]))
    if steps[0].words:
        assert np.isin(expected, found).all()
    else:
        np.testing.assert_array_equal(found, expected)


def check_writes(log, kernel, step, array):
    found = np.sort(log.owners(kernel, WRITE, array, step.tiling))
    expected = expected_owners(log.case, step.tiling)
    if step.words:
        assert np.isin(words_of(found, log.case), words_of(expected, log.case)).all()
    else:
        np.testing.assert_array_equal(found, expected)
    *_, element = log.of(kernel, WRITE, array)
    np.testing.assert_array_equal(np.sort(element), np.arange(log.case.rows * log.case.cols))


def check_copied(log, kernel, step, array):
    """That copies have each element, and that each is read by its thread."""
    *_, element = log.of(kernel, COPY, array)
    assert np.isin(np.arange(log.case.rows * log.case.cols), element).all()
    assert not log.case.is_divided or len(element) == log.case.rows * log.case.cols
    found = np.unique(log.owners(kernel, READ_COPIED, array, step.tiling))
    np.testing.assert_array_equal(found, expected_owners(log.case, step.tiling))


both = pytest.mark.parametrize(
    ("way", "case"),
    [("forward", case) for case in FORWARD] + [("backward", case) for case in BACKWARD],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value)),
)


@pytest.mark.plans
@pytest.mark.emulated
@pytest.mark.xdist_group("emulated")
@both
def test_the_map_is_what_the_kernels_do(way, case, logs):
    log = Log(case_of(way, case), logs[way][case])
    names = [kernel["name"] for kernel in launch.kernels(log.case, partial_rows(log.case))]
    steps = tiling.passes(log.case)
    for index, name in enumerate(names):
        reads = [step for step in steps if (step.kernel, step.via) == (name, "memory") and step.step != "store"]
        for array in reads[0].arrays if reads else ():
            check_reads(log, index, reads, array)
    for step in steps:
        for array in step.arrays:
            if step.step == "store":
                check_writes(log, names.index(step.kernel), step, array)
            # Elements of long rows that vectors do not divide are stored to shared memory one by one: no copies.
            elif step.via == "shared memory" and (log.case.is_divided or not log.case.is_long):
                check_copied(log, names.index(step.kernel), step, array)


@pytest.mark.plans
@pytest.mark.emulated
@pytest.mark.xdist_group("emulated")
@both
def test_the_launches_are_those_of_the_page(way, case, logs):
    log = Log(case_of(way, case), logs[way][case])
    launches = [tuple(int(number) for number in record)[3:7] for record in log.launches]
    expected = launch.kernels(log.case, partial_rows(log.case))
    assert len(launches) == len(expected)
    for found, kernel in zip(launches, expected, strict=True):
        blocks = found[0] if kernel["is_most"] else kernel["blocks"]
        assert found == (blocks, kernel["threads"], kernel["cluster"], kernel["shared"])


# A call of each kind of page: every regime each way, rows that vectors do not divide, small batches; ops and calls
# without a map; no plan.
CALLS = {
    "rows that share a block": ("--shape", "4096x257", "--dtype", "bfloat16"),
    "a block": ("--shape", "4096x4096"),
    "a cluster": ("--shape", "64x140000", "--dtype", "bfloat16"),
    "segments": ("--op", "layer_norm", "--shape", "64x300001"),
    "a small batch": ("--op", "layer_norm", "--shape", "4x4096"),
    "another op": ("--op", "gated_rms_norm", "--shape", "64x1001"),
    "a scale for each head": ("--shape", "64x32x128", "--scale-shape", "32x128"),
    "no row": ("--shape", "0x128"),
    "float64": ("--dtype", "float64"),
}
WITH_MAP = list(CALLS)[:5]


@pytest.fixture
def page(tmp_path, capsys):
    """Writes the page of a call; its path."""

    def write(*arguments):
        path = tmp_path / "plan.html"
        info.main(["--html", str(path), *arguments])
        assert "because" in capsys.readouterr().out
        return path

    return write


def in_browser(path):
    """The document once its scripts have run."""
    browser = ("chromium", "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={path.parent}/browser")
    run = subprocess.run([*browser, "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=120)
    return run.stdout


def body_of(document):
    return re.search("<body[^>]*>", document)[0]


@pytest.mark.plans
@pytest.mark.browser
@pytest.mark.parametrize("name", CALLS)
def test_the_page_finds_each_element_once(name, page):
    document = in_browser(page("--platform", "cuda", *CALLS[name]))
    walked = re.search(r'<body data-selftest="ok" data-walked="(\d+)">', body_of(document))
    assert walked, body_of(document)
    assert (int(walked[1]) >= 6) == (name in WITH_MAP)


@pytest.mark.browser
def test_the_page_of_a_call_without_a_plan(page):
    document = in_browser(page("--platform", "tpu"))
    assert 'data-selftest="ok"' in body_of(document)
    assert "none for tpu. There is no launch plan to show" in document


# Of no other op than that of the title.
@pytest.mark.browser
@pytest.mark.parametrize("op", ["rms_norm", "layer_norm", "group_norm", "gated_rms_norm", "softmax", "quantize"])
def test_the_example_is_of_the_op(op, page):
    document = in_browser(page("--platform", "tpu", "--op", op))
    sums = {"rms_norm": {"x²"}, "layer_norm": {"x", "(x \u2212 mean)²"}}.get(op, set())
    assert set(re.findall("sum of ([^,<]*), of each thread", document)) == sums
    assert (re.search('<h2 id="example-heading"', document) is not None) == bool(sums)
    assert 'data-selftest="ok"' in body_of(document)


# That the page's test of itself sees what is wrong: a map that is not Python's, an element that is nobody's.
@pytest.mark.plans
@pytest.mark.browser
@pytest.mark.parametrize(
    ("number", "message"), [(r'"digest":\d+', "is not Python's"), (r'"vectors":\d+', "column 64 comes 0 times")]
)
def test_the_page_sees_what_is_wrong(number, message, page):
    path = page("--platform", "cuda", "--shape", "64x128")
    name = number.partition(":")[0]
    path.write_text(re.sub(number, f"{name}:2", path.read_text(), count=1))
    assert message in body_of(in_browser(path))


@pytest.mark.plans
@pytest.mark.parametrize("name", CALLS)
def test_the_page_asks_for_nothing(name, page):
    text = page("--platform", "cuda", *CALLS[name]).read_text()
    outside = re.findall(r"(?:src|href|url|import|fetch)\s*[=(]|https?://[^\s\"']+", text)
    assert set(outside) <= {"http://www.w3.org/2000/svg"}  # a name, and no address
    assert len(text) < 200_000


def test_a_page_has_all_of_its_files(page):
    text = page("--platform", "tpu").read_text()
    assert all(plan_page.file(name) in text for name in (*plan_page.SCRIPTS, "style.css"))


@pytest.mark.plans
@pytest.mark.parametrize("name", plan_pages.CALLS)
def test_the_plans_of_the_docs_are_current(name, monkeypatch):
    choose_fastest(monkeypatch)
    assert (plan_pages.FOLDER / f"{name}.json").read_text() == plan_pages.plan(name)


@pytest.mark.browser
@pytest.mark.parametrize("name", plan_pages.CALLS)
def test_the_pages_of_the_docs_find_each_element_once(name, tmp_path):
    plan_pages.on_post_build({"site_dir": tmp_path})
    assert 'data-selftest="ok"' in body_of(in_browser(tmp_path / "plans" / f"{name}.html"))


def test_the_docs_embed_each_page(tmp_path):
    plan_pages.on_post_build({"site_dir": tmp_path})
    for name in plan_pages.CALLS:
        assert plan_pages.page(name) == (tmp_path / "plans" / f"{name}.html").read_text() != ""
    text = (plan_pages.FOLDER.parent / "plans.md").read_text()
    assert re.findall(r'<iframe src="plans/([\w-]+)\.html"', text) == list(plan_pages.CALLS)


# The rule may change more often than once between two lengths that the search asks for.
@pytest.mark.plans
@pytest.mark.parametrize(("way", "kind", "dtype"), [("forward", "rms", "bfloat16"), ("backward", "layer", "float32")])
def test_the_ruler_has_every_rule(way, kind, dtype):
    def plan_of(cols):
        return ffi.module("cuda").plan(way, kind, dtype, cols)

    vector = 16 // jnp.dtype(dtype).itemsize
    marks = plan_page.ruler.marks(plan_of, 4096, vector)
    lengths = np.concatenate([np.arange(vector, 20_000, vector), np.arange(20_000, 1 << 21, 64 * vector)])
    owners = [next(mark for mark in marks if mark["from"] <= cols <= mark["to"]) for cols in lengths]
    differ = [
        int(cols)
        for cols, mark in zip(lengths, owners, strict=True)
        if plan_page.ruler.rule_of(plan_of(int(cols))) != plan_page.ruler.rule_of(mark["first"])
    ]
    assert differ == []
    assert all(last["to"] + vector == first["from"] for last, first in itertools.pairwise(marks))
