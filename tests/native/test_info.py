"""`python -m jaxnorm.info`: what is there, and what would run for an array; and the page of a call."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest
from bad_calls import of_x
from internals import choose_fastest, functions, reasons
from native import is_built, without_cuda
from table import OPS

import jaxnorm

# Queries or keys, with a scale for each of 32 heads.
WAYS = ("forward", "backward")
HEADS = "--shape 8x2048x32x128 --scale-shape 32x128"


@pytest.fixture
def info(monkeypatch, capsys):
    """Runs the program in this process; what it prints."""

    def run(*arguments) -> str:
        monkeypatch.setattr(sys, "argv", ["info", *arguments])
        monkeypatch.delitem(sys.modules, "jaxnorm.info", raising=False)  # or runpy warns
        runpy.run_module("jaxnorm.info", run_name="__main__")
        return capsys.readouterr().out

    return run


def call(info, *arguments):
    return json.loads(info("--json", *arguments))["call"]


def test_what_is_there(info):
    report = json.loads(info("--json"))
    versions = report["versions"]
    loaded = {name: module["loaded"] for name, module in report["native"].items()}
    assert (versions["jax"], versions["jaxlib"]) == (jax.__version__, jaxlib.__version__)
    assert loaded == {"cpu": is_built("cpu"), "cuda": is_built("gpu")}


@pytest.mark.needs("kernels")
@pytest.mark.parametrize(
    "op", sorted({*(op.public for op in OPS), "linear_cross_entropy", "embedding", "segment_sum", "sample"})
)
def test_every_op_is_native(info, op):
    report, platform = call(info, "--op", op, "--dtype", "bfloat16"), {"gpu": "cuda"}.get(jax.default_backend(), "cpu")
    assert (report["op"], report["implementation"], report["platform"]) == (op, "native", platform)


TO, QUANTIZED = ("float8_e4m3fn", "float8_e5m2", "int8"), "--op rms_norm_quantized --shape 8x64 --out-dtype"
OF_LOSS = "--op linear_cross_entropy --shape 8x16 --columns 100"
OF_LOOKUP = "--op embedding --shape 2x8x16 --columns 100 --out-dtype bfloat16"
OF_SUMS = "--op segment_sum --shape 8x2x16 --columns 5"
IN_WORDS = {
    **{f"{QUANTIZED} {to}": ["rms_norm_quantized of float32[8x64] to " + to] for to in TO},
    "--shape 8x4096 --dtype bfloat16": [jax.__version__, "bfloat16[8x4096]", "because"],
    "--op group_norm --shape 8x4x4x96": ["group_norm of float32[8x4x4x96] to float32 in 32 groups of channels on"],
    OF_LOOKUP: ["embedding of float32[2x8x16] and table of 100 rows to bfloat16, of which the gradient is sums"],
    OF_SUMS: ["segment_sum of float32[8x2x16] and segment_ids of 5 segments to float32"],
    OF_LOSS: ["linear_cross_entropy of float32[8x16] and kernel of 100 classes to float32"],
}


@pytest.mark.parametrize("arguments", IN_WORDS)
def test_in_words(info, arguments):
    words = info(*arguments.split())
    assert all(part in words for part in IN_WORDS[arguments])


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        *(("--platform tpu", "none for tpu"), ("--platform rocm", "none for rocm")),
        *(("--dtype float64", "x is float64"), ("--dtype float16 --out-dtype bfloat16", "one of them float32")),
        *(("--shape 4x0", "length 0"), ("--op gated_rms_norm --shape 4x20000", "take at most 16384")),
        ("--op gated_rms_norm_quantized --shape 4x20000", "take at most 16384"),
        ("--op gated_rms_norm --out-dtype bfloat16", "want them equal"),
        ("--op rms_norm_add_rms_norm --out-dtype bfloat16", "kernels with two norms want them equal"),
        ("--shape 8x16x4x9000 --scale-shape 4x9000", "more than 8192"),
        ("--op softmax --axes 2", "kernels take one"),
        (f"--op rms_norm_quantized {HEADS}", "no kernel that quantises"),
        ("--op qk_norm_rotary --shape 4096x4096", "heads of 4096 elements"),
        ("--op qkv_norm_rotary --shape 8x64x1024", "heads of 1024 elements"),
        ("--op qkv_norm_rotary --shape 8x6x64 --dtype float64", "qkv is float64"),
        ("--op quantize_kernel --out-dtype int8", "in jax.numpy on every platform"),
        ("--op quantized_dot --platform cpu", "a kernel for cuda, none for cpu"),
        ("--op quantized_dot --platform cuda --dtype int8", "cuBLASLt is taken for float8"),
        ("--op quantized_dot --platform cuda --columns 8", "(8, 4096), and cuBLASLt wants multiples"),
        ("--op float8_linear --platform cpu", "a kernel for cuda, none for cpu"),
        ("--op float8_linear --platform cuda --columns 8", "(8, 4096), and cuBLASLt wants multiples"),
        ("--op embedding --dtype float64", "the rows are float64, kernels take bfloat16, float16, float32"),
        ("--op segment_sum --shape 8x0 --dtype float64", "the rows are float64"),
        ("--op qk_norm_rotary --shape 8x64 --out-dtype bfloat16", "want them equal"),
        ("--op qk_norm_rotary --shape 8x64 --dtype float64", "q is float64"),
    ],
)
def test_where_the_formula_runs(info, arguments, why):
    report = call(info, *arguments.split())
    assert report["implementation"] == "xla"
    assert why in report["why"]


@pytest.mark.needs("kernels")
@pytest.mark.parametrize("op", ["rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm"])
def test_a_scale_for_each_head(info, op):
    report = call(info, "--op", op, *HEADS.split())
    assert (report["scale_shape"], report["implementation"]) == ([32, 128], "native")
    assert "float32[8x2048x32x128], scale[32x128], to float32" in info("--op", op, *HEADS.split())


OF_ROWS = ("gated_rms_norm", "rms_norm_add_rms_norm")


@pytest.mark.needs("plans")
@pytest.mark.parametrize("op", ["rms_norm", "layer_norm", "add_rms_norm", "layer_norm_quantized", *OF_ROWS])
def test_launch_plans(info, op):
    axes = 1 if op in OF_ROWS else 2
    options = f"--platform cuda --op {op} --shape 3x8x128 --dtype bfloat16 --axes {axes}"
    report = call(info, *options.split())
    assert list(report["plans"]) == ["forward", "backward"]
    for plan in report["plans"].values():
        assert plan["threads_per_row"] * plan["elements_per_thread"] >= (128, 8 * 128)[axes - 1]


@pytest.mark.needs("plans")
@pytest.mark.parametrize(("scale_shape", "ring"), [("32x128", True), ("2048x1x128", False), ("128", True)])
def test_the_backward_fetches_ahead(info, scale_shape, ring):
    report = call(info, "--platform", "cuda", "--shape", "8x2048x32x128", "--scale-shape", scale_shape)
    assert report["plans"]["backward"]["ring"] is ring


@pytest.mark.needs("plans")
@pytest.mark.parametrize("cols", [1, 128, 4096, 65_536, 10**9])
def test_launch_plans_in_words(info, cols):
    words = info("--platform", "cuda", "--shape", f"3x{cols}")
    assert all(way in words for way in ("forward  ", "backward  ", "threads"))


def test_the_version(info, capsys):
    with pytest.raises(SystemExit, match="0"):
        info("--version")
    assert capsys.readouterr().out == f"jaxnorm {jaxnorm.__version__}\n"


@pytest.mark.needs("kernels")
@pytest.mark.parametrize("op", ["add_rms_norm", "add_layer_norm", "rms_norm_quantized", "layer_norm_quantized"])
def test_a_residual_of_another_dtype(info, op):
    arguments = ("--op", op, "--shape", "8x64", "--dtype", "bfloat16", "--residual-dtype")
    report = call(info, *arguments, "float32")
    assert (report["residual_dtype"], report["implementation"]) == ("float32", "native")
    assert "bfloat16[8x64] and a residual of float32 to" in info(*arguments, "float32")
    report = call(info, *arguments, "float16")
    assert report["implementation"] == "xla"
    assert "x is bfloat16 and residual float16" in report["why"]


# The plan is that of the sum, which has the residual's dtype.
@pytest.mark.needs("plans")
def test_launch_plans_with_a_residual_of_another_dtype(info):
    dtypes = ("bfloat16 --residual-dtype float32", "float32", "bfloat16")
    reports = [call(info, *f"--platform cuda --op add_rms_norm --dtype {dtype}".split()) for dtype in dtypes]
    plans = [report["plans"]["forward"] for report in reports]
    assert plans[0] == plans[1] != plans[2]


@pytest.mark.needs("kernels")
def test_the_implementation_of_the_context(info):
    with jaxnorm.implementation("xla"):
        report = call(info)
    assert report["implementation"] == "xla"
    assert report["why"] == "XLA's code is asked for under jaxnorm.implementation('xla')"
    with jaxnorm.implementation("native"):
        assert call(info)["implementation"] == "native"
        report = call(info, "--dtype", "float64")
    assert (report["implementation"], report["why"][:12]) == ("an error", "x is float64")


@pytest.mark.needs("kernels")
def test_a_direction_that_is_the_formula_is_said_by_itself(info):
    with jaxnorm.implementation({"rms_norm": {"backward": "xla"}}):
        report = call(info, "--platform", "cpu")
    assert report["implementation"] == "native"
    assert report["slower"] == {
        "backward": "XLA's code is asked for under jaxnorm.implementation({'rms_norm': {'backward': 'xla'}})"
    }


# The kernel is that of sums: what is chosen for the other direction changes nothing.
@pytest.mark.needs("kernels")
@pytest.mark.parametrize(("op", "way", "other"), [("embedding", *WAYS[::-1]), ("segment_sum", *WAYS)])
def test_of_two_directions_one_has_a_kernel(info, op, way, other):
    asked = ("--op", op, "--shape", "8x64", "--platform", "cpu")
    with jaxnorm.implementation({op: {other: "xla"}}):
        report, words = call(info, *asked), info(*asked)
    assert (report["implementation"], report["slower"][other]) == ("native", "XLA gathers rows at the rate of memory")
    assert f"{way:18}native" in words
    with jaxnorm.implementation({op: {way: "xla"}}):
        report = call(info, *asked)
    assert (report["implementation"], "slower" in report) == ("xla", False)
    assert report["why"].startswith("XLA's code is asked for under")


BAD = (
    *("--shape 4,4", "--axes 3", "--axes 0", "--op gated_rms_norm --axes 2", "--out-dtype int8"),
    *(f"--op gated_rms_norm {HEADS}", "--op rms_norm_quantized --out-dtype bfloat16"),
    *(f"--shape 8x128 --scale-shape {shape}" for shape in ("64", "4x128", "2x8x128")),
)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *((arguments, "error: ") for arguments in BAD),
        ("--dtype bf16", "'bf16' is no dtype; did you mean bfloat16?"),
        ("--dtype number", "expected one of bfloat16, float16, float32, float4_e2m1fn, float64, float8"),
        ("--dtype int8", "--dtype is int8, expected one of bfloat16, float16, float32, float64."),
        ("--op add_rms_norm --residual-dtype int8", "--residual-dtype is int8, expected one of bfloat16"),
        ("--residual-dtype float32", "rms_norm adds no residual"),
        ("--op gated_rms_norm --residual-dtype float32", "gated_rms_norm adds no residual"),
        ("--out-dtype fp16", "'fp16' is no dtype; did you mean float16?"),
        ("--op RMSNorm", "'RMSNorm' is no function; did you mean rms_norm?"),
        ("--op linear_cross_entropie", "did you mean linear_cross_entropy?"),
        *(("--op attention", "expected one of add_layer_norm, "), ("--columns 8", "rms_norm has no matrix beside x")),
        ("--op quantize --dtype int8", "--dtype is int8, expected one of bfloat16"),
        ("--op segment_sum --out-dtype bfloat16", "segment_sum has no results of bfloat16, but of float32"),
        ("--html /nowhere/plan.html", "--html: [Errno 2] No such file or directory: '/nowhere/plan.html'"),
    ],
)
def test_errors_name_the_remedy(info, capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        info(*arguments.split())
    assert message in capsys.readouterr().err


SHAPES = ("8x64", "8x63", "64", "0x64", "8x0", "2x3x4x96", "5x1x64", "2x2x7", "1x1")


@pytest.mark.parametrize("op", functions())
def test_it_refuses_the_shapes_that_the_function_refuses(info, capsys, op):
    def refusal(ask, *arguments):
        try:
            ask(*arguments)
        except SystemExit:
            return capsys.readouterr().err.partition(": error: ")[2].splitlines()[0]
        except (TypeError, ValueError) as error:
            return str(error).splitlines()[0]

    found, expected = {}, {}
    for text in SHAPES:
        x = jax.ShapeDtypeStruct(map(int, text.split("x")), "float32")
        dtype = ("--dtype", "float32") if op == "quantized_dot" else ()
        found[text] = refusal(info, "--op", op, "--shape", text, *dtype)
        expected[text] = refusal(jax.eval_shape, of_x(op), x)
    assert found == expected
    assert None in found.values()


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("gpu", [False, True])
def test_how_to_build_for_cuda_is_said_once(info, monkeypatch, gpu, platform):
    without_cuda(monkeypatch, gpu=gpu)
    words = info("--platform", platform)
    assert words.count("built without CUDA") == words.count("JAXNORM_CUDA=1") == 1
    assert words.count("no GPU here") == (not gpu)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_a_page_of_a_build_without_cuda_promises_no_plan(info, monkeypatch, tmp_path, platform):
    without_cuda(monkeypatch, gpu=False)
    path = tmp_path / "plan.html"
    words = info("--platform", platform, "--html", str(path))
    for text in (words, path.read_text()):
        assert "which this jaxnorm was built without" in text
        assert "--platform cuda" not in text


@pytest.mark.needs("kernels")
def test_each_way_that_is_not_native_is_said(info, monkeypatch):
    choose_fastest(monkeypatch)
    few = ("--op", "group_norm", "--platform", "cpu", "--shape", "512x640")
    assert call(info, *few)["implementation"] == "xla"
    assert "cpu: xla, because XLA's code is faster for groups of at most 64" in info(*few)
    monkeypatch.setattr(reasons, "slower", lambda op, spec, rows: "of a reason" if rows.way == "backward" else None)
    words = info("--op", "softmax", "--platform", "cpu")
    assert "cpu: native, because" in words
    assert "forward           native" in words
    assert "backward          xla, because of a reason" in words


# What the example begins with comes to these, as docs/plans.md says.
SUMS, RMS = ["21.75", "44.25", "50.00"], ["1.65", "2.35", "2.50"]
CALLS = {
    "rows that share a block": ("--platform", "cuda", "--shape", "4096x257", "--dtype", "bfloat16"),
    "a cluster": ("--platform", "cuda", "--shape", "64x140000", "--dtype", "bfloat16"),
    "segments": ("--platform", "cuda", "--op", "layer_norm", "--shape", "64x300001"),
    "gates": ("--platform", "cuda", "--op", "gated_rms_norm", "--shape", "64x1001"),
    "no plan": ("--platform", "tpu", "--op", "softmax"),
    "no row of x": ("--platform", "cpu", "--op", "linear_cross_entropy", "--shape", "8x16", "--columns", "100"),
}


@pytest.fixture
def page(tmp_path, info):
    """Writes the page of a call; its path, and what is printed."""
    path = tmp_path / "plan.html"
    return lambda *arguments: (path, info("--html", str(path), *arguments))


def data_of(path):
    return json.loads(re.search(r'id="data">(.*?)</script>', path.read_text())[1])


@pytest.mark.parametrize("name", CALLS)
def test_the_page_says_what_info_prints_and_asks_for_nothing(name, page):
    path, printed = page(*CALLS[name])
    data, text = data_of(path), path.read_text()
    said, *ways = data["words"].splitlines()
    assert said.partition(", because ")[0] in printed
    assert all(way in printed for way in ways)
    assert re.findall(r"(?:src|href|url|import|fetch)\s*[=(]|https?://", text) == []
    assert bool(data["example"]) == data["title"].startswith("rms_norm of")
    assert bool(data["plans"]) != bool(data["no_plan"])


def test_the_example_begins_with_these_sums(page):
    path, _ = page("--platform", "tpu")
    x = np.array(data_of(path)["example"])
    assert (x.shape, [f"{total:.2f}" for total in (x**2).sum(-1)]) == ((3, 8), SUMS)
    rms = x / jaxnorm.rms_norm(jnp.asarray(x, jnp.float32), epsilon=1e-6)
    assert [[f"{value:.2f}" for value in row] for row in rms] == [[value] * 8 for value in RMS]
    text = (Path(__file__).resolve().parents[2] / "docs" / "plans.md").read_text()
    assert re.findall(r"\| \d \| (\S+) \| (\S+) \|", text) == list(zip(SUMS, RMS, strict=True))


@pytest.mark.needs("browser")
def test_the_steps_come_to_these_sums(page, tmp_path):
    path, _ = page("--platform", "tpu")
    browser = ("chromium", "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/browser")
    command = [*browser, "--dump-dom", f"{path.as_uri()}#end"]
    document = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = re.findall(r"sum of squares, RMS</th><td[^>]*>([^<]*)</td><td[^>]*>([^<]*)</td>", document)
    assert found == list(zip(SUMS, RMS, strict=True))
    assert "Step 6 of 6" in document
