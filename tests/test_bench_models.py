"""The benchmarks of models at toy sizes, the files of results and what pages show of them."""

import json
import re
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import float8, model, model_norms, models, report, tables, unet
from bench.__main__ import COMMANDS, parse
from tools import doc_results

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench/results"
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]

LANGUAGE, IMAGES = models.small(models.LLAMA), replace(models.small(models.VIT), layers=1)
SANDWICH, CONDITIONED, JOINT = (models.small(spec) for spec in (models.GEMMA, models.DIT, models.QWEN))
AFTER_SUM, LEARNED, UNET = models.small(models.BERT), models.small(models.GPT2), unet.small(unet.WIDE)
# Models, and the norms with which they train as with XLA's.
TRAINED = [
    *((spec, norms) for spec in (LANGUAGE, IMAGES, AFTER_SUM, UNET) for norms in ("jaxnorm", "jaxnorm-joint")),
    *((spec, "flax") for spec in (IMAGES, UNET, LEARNED)),
    *((JOINT, norms) for norms in ("jaxnorm-lookup", "xla-float32")),
    (LEARNED, "jaxnorm-layers"),
    (replace(CONDITIONED, name="float32", dtype="float32"), "jaxnorm-default"),
    *((spec, norms) for spec in (JOINT, SANDWICH, CONDITIONED) for norms in ("jaxnorm-joint", "jaxnorm-default-loss")),
]
# What bfloat16 activations leave: XLA's norms, scanned and unrolled, gave losses that were up to 6e-4 apart, and
# gradients up to 1.4e-2. Without norms, losses are more than 0.05 from those with them.
LOSS_TOLERANCE = 2e-3
GRADIENT_TOLERANCE = 3e-2  # relative L2


def of_models(function):
    return pytest.mark.any_code(pytest.mark.long(function))


@cache
def loss_and_gradients(spec, norms):
    of = model.MODULES[type(spec)]
    loss, gradients = jax.jit(jax.value_and_grad(partial(of.loss, spec, norms)))(of.init(spec), *of.batch(spec))
    return float(loss), [np.float64(leaf) for leaf in jax.tree.leaves(gradients)]


@of_models
@pytest.mark.needs("kernels")
@pytest.mark.parametrize(("spec", "norms"), TRAINED, ids=lambda value: getattr(value, "name", value))
def test_a_model_with_native_norms_trains_as_with_jnp_norms(spec, norms):
    (native, ours), (by_jnp, expected) = loss_and_gradients(spec, norms), loss_and_gradients(spec, "xla")
    assert native == pytest.approx(by_jnp, abs=LOSS_TOLERANCE)
    for actual, wanted in zip(ours, expected, strict=True):
        assert np.linalg.norm(actual - wanted) < GRADIENT_TOLERANCE * np.linalg.norm(wanted)


@of_models
def test_a_model_without_norms_is_another_model():
    assert abs(loss_and_gradients(LANGUAGE, "none")[0] - loss_and_gradients(LANGUAGE, "xla")[0]) > 0.05


# A line of a call's text, and how often it is there with norms that join: every norm of the stream but the first adds.
@of_models
@pytest.mark.needs("kernels")
@pytest.mark.parametrize(
    ("spec", "sign", "count"),
    [
        (IMAGES, "has_residual = true", 2),
        (AFTER_SUM, "has_residual = true", 4),
        (SANDWICH, "custom_call @jaxnorm_rms_norm_add_rms_norm_fwd", 4),
        (JOINT, "custom_call @jaxnorm_qkv_norm_rotary_fwd", 2),
        (UNET, 'custom_call @jaxnorm_group_norm_fwd.*activation = "silu"', 11),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_norms_take_neighbours_in(spec, sign, count):
    module = model.MODULES[type(spec)]
    for norms, expected in (("jaxnorm", 0), ("jaxnorm-joint", count)):
        forward = models.forward(partial(module.loss, spec, norms))
        text = jax.jit(forward).lower(module.init(spec), *module.batch(spec)).as_text()
        assert len(re.findall(sign, text)) == expected


@of_models
@pytest.mark.parametrize("spec", [LANGUAGE, JOINT], ids=lambda spec: spec.name)
@pytest.mark.parametrize("norms", ["xla", "jaxnorm-default"])
def test_decoding_gives_the_logits_of_the_training_model(spec, norms):
    """Tokens are fed one by one to a cache that is as long: the last step sees all of them, as the last token does.

    One layer only: its keys and values depend on the tokens, the next one's on what was in the cache before them.
    """
    spec = replace(spec, layers=1, tokens=4)
    params, (tokens, _) = models.init(spec), models.batch(spec)
    step = jax.jit(models.decode_step(spec, norms))
    _, _, cache = models.full_cache(spec)
    for position in range(spec.tokens):
        state = (tokens[:, position], jnp.array(position), cache)
        (chosen, _, cache), logits = step(state, models.serving(spec))
    expected = models.hidden(spec, model_norms.norms_of(spec, "xla"), params, tokens)[:, -1]
    expected = models.wide_product(expected, params["head"])
    assert np.linalg.norm(np.float64(logits - expected)) < 2e-2 * np.linalg.norm(np.float64(expected))
    assert (chosen == logits.argmax(-1)).all()


@of_models
@pytest.mark.needs("kernels")
def test_every_program_has_a_row_for_each_kind_of_norm(tmp_path, monkeypatch):
    toy = models.small
    monkeypatch.setattr(models, "small", lambda spec: replace(toy(spec), layers=1))  # half the time to compile
    out = tmp_path / "card/run"
    args = parse(["model", "--small", "--turns=2", "--parts", "vit", "decode", "--batches=1", "--out", str(out)])
    args.main(args)
    decode = "Llama-like, decode 1"
    programs = [("ViT-like", "forward"), ("ViT-like", "train step"), (decode, "token"), (decode, "loop")]
    rows = report.load(out)["rows"]
    expected = [(*program, norms) for program in programs for norms in ("xla", "jaxnorm", "none")]
    assert [(row["model"], row["program"], row["norms"]) for row in rows] == expected


EXECUTABLE = SimpleNamespace(memory_analysis=lambda: SimpleNamespace(temp_size_in_bytes=2**20))


def test_what_is_won_back_is_a_share_of_what_jnp_norms_cost():
    times = {"xla": [5.0, 6.0, 7.0], "jaxnorm": [4.5, 5.5, 6.5], "none": [3.0, 4.0, 5.0]}
    keyed = {("forward", norms): seconds for norms, seconds in times.items()}
    _, ours, none = model.rows_of("a model", keyed, dict.fromkeys(keyed, EXECUTABLE))
    expected = {"ms": 5500.0, "norms us": 1.5e6, "temp MiB": 1.0, "won back %": 25.0}
    assert {name: ours[name] for name in expected} == expected
    assert (none["norms us"], none["won back %"]) == (0, None)


@of_models
def test_lookups_are_measured_in_pairs(tmp_path):
    out = tmp_path / "card/run"
    options = ["--small", "--lookups", "--turns=2", "--layers=1", "--programs=train step"]
    args = parse(["model", *options, "--out", str(out)])
    args.main(args)
    pairs = [("jaxnorm-flax-lookup", None), ("flax", None)]
    pairs += [("jaxnorm-lookup", "jaxnorm-flax-lookup"), ("jaxnorm-layers", "flax")]
    rows = report.load(out)["rows"]
    expected = [(name, *pair) for name in ("Qwen-like", "GPT-2-like") for pair in pairs]
    assert [(row["model"], row["variant"], row["against"]) for row in rows] == expected


def test_a_lookup_is_faster_by_the_median_of_its_turns():
    times = {"jaxnorm-flax-lookup": [3.0, 4.0, 6.0], "jaxnorm-lookup": [2.0, 3.2, 4.0], "flax": [5.0] * 3}
    keyed = {("train step", variant): seconds for variant, seconds in times.items()}
    rows = list(model.rows_of_twins(LEARNED, keyed, dict.fromkeys(keyed, EXECUTABLE)))
    assert [row["faster %"] for row in rows] == [None, pytest.approx(50), None]


def test_tokens_are_log_uniform():
    ids = models.log_uniform(models.random_key(0), (20_000,), 10**4)
    shares = [(ids < bound).mean() for bound in (0, 9, 99, 999, 10**4)]  # of exp(u) < 1, 10, 100, ...
    np.testing.assert_allclose(shares, [0, 0.25, 0.5, 0.75, 1], atol=0.02)


@of_models
@pytest.mark.parametrize("count", [1, 2])
def test_every_way_in_float8_trains_the_same_model(count):
    spec = replace(models.small(float8.EIGHT_B), attention="xla")
    inputs = models.batch(spec)
    executables, state = float8.programs_of(spec, "train step", float8.WAYS, models.init(spec), inputs, count)
    # A step consumes its state.
    results = {way: run(jax.tree.map(jnp.copy, state), *inputs) for way, run in executables.items()}
    for (params, _), loss in results.values():
        np.testing.assert_allclose(loss, results["bf16"][1], rtol=0.02)
        assert all(jax.tree.leaves(jax.tree.map(lambda a, b: (a != b).any(), state[0], params)))


HEADER = {"gpu": "NVIDIA H200", "jax": "0.0", "commit": "abc"}


def result(op="rms_norm forward", cols=256, ratio=2.0, **changes):
    """One row as `python -m bench gpu` writes it."""
    row = {"op": op, "dtype": "float32", "shape": f"grid {cols}", "M": 4, "N": cols, "us": 2.0, "GB/s": 4000.0 + cols}
    return row | {"copy GB/s": 4250.0, "x XLA": ratio, "error / tolerance": 0.1} | changes


@pytest.fixture
def results(tmp_path):
    """A small run of two lengths."""
    rows = [result(op, cols) for op in ("rms_norm forward", "layer_norm backward") for cols in (1024, 256)]
    steps = [result("rms_norm step", 256, 8.0), result("rms_norm step", 1024, 0.5)]
    report.save(HEADER, [*rows, *steps], tmp_path / "h200/norms", failed=["one"])
    return tmp_path


def test_a_run_is_read_back_beside_others_of_its_card(results):
    rows = [{"a": 1 / 3, "b": "é | 1, 2", "c": [1, {"d": 2.0}]}, {"a": None, "e": True}]
    report.save({"jax": "0.0", "what": "long, " * 40}, rows, results / "h200/other")
    other, norms = report.load(results / "h200/other"), report.load(results / "h200/norms")
    columns = ["a", "b", "c", "e"]
    assert other["columns"] == columns
    rounded = [rows[0] | {"a": 0.33333}, rows[1]]
    assert other["rows"] == [{column: row.get(column) for column in columns} for row in rounded]
    assert {"date", "command", "jax"} < set(other["header"])
    assert (len(norms["rows"]), norms["failed"], report.load(results / "h200/none")) == (6, ["one"], None)
    # A line for each row.
    text = (results / "h200.json").read_text()
    assert '\n["rms_norm forward", "float32", "grid 1024", 4, 1024, 2.0, 5024.0, 4250.0, 2.0, 0.1],\n' in text
    assert report.to_json(json.loads(text)) == text


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_results_say_what_ran_and_are_as_the_programs_write_them(path):
    runs = json.loads(path.read_text())
    assert report.to_json(runs) == path.read_text()
    shown = {run for _, *runs in tables.TABLES.values() for run in runs}
    for name, run in runs.items():
        assert f"{path.stem}/{name}" in shown
        assert {"date", "command", "jax", "commit"} <= set(run["header"])
        assert {len(row) for row in run["rows"]} == {len(run["columns"])}


def test_remarks():
    assert report.op_name("layer_quantized, groups of 128", "forward") == "layer_norm_quantized forward, groups of 128"
    rows = [result(), result(ratio=0.94), result(ratio=None), result(**{"error / tolerance": float("nan")})]
    name = "rms_norm forward, float32, grid 256 (4x256)"
    assert report.remarks(rows) == [f"{name}: 0.94 x XLA", f"{name}: WRONG, nan times the tolerance"]


def test_tables_are_written_drawn_and_checked(results, capsys, monkeypatch):
    page = results / "README.md"
    page.write_text("before\n<!-- table: h200-grid -->\nold\n<!-- end -->\n<!-- table: cpu -->\n<!-- end -->\n")
    options = ["--pages", str(page), "--results", str(results)]
    assert tables.main(parse(["tables", "--check", *options])) == 1
    assert "+| `rms_norm` forward, float32 | 4256 (2.00) | 5024 (2.00) |" in capsys.readouterr().out
    assert tables.main(parse(["tables", *options])) == 0
    assert tables.main(parse(["tables", "--check", *options])) == 0
    assert "old" not in page.read_text()
    assert "Not measured yet: cpu/norms." in page.read_text()
    monkeypatch.setattr(doc_results, "RESULTS", results)
    drawn = doc_results.on_page_markdown("<!-- drawn: h200-headline -->\n\nbelow", page=None, config=None, files=None)
    assert drawn.startswith("- NVIDIA H200, 2 programs with a single op, forward and backward: 2.00 times as fast")
    ends = "from 0.50 (`rms_norm` step, float32, 4x1024) to 8.00 (`rms_norm` step, float32, 4x256)"
    assert drawn.endswith(f" {ends}.\n\nbelow")
    with pytest.raises(SystemExit, match="no table is called other; there are h200-headline"):
        tables.table("other", results)


def test_a_step_is_compared_as_a_whole():
    times = {"xla": (10.0, 1000.0), "jaxnorm-default-norm": (9.5, 500.0), "jaxnorm-default": (10.3, 1200.0)}
    rows = [
        {"model": "Toy", "program": "train step", "norms": norms, "ms": ms, "± us": 100.0, "norms us": us}
        for norms, (ms, us) in times.items()
    ]
    header = HEADER | {"date": "2000-01-01", "command": "python"}
    *_, line = tables.steps({"header": header, "rows": rows})
    assert line == "| Toy, train step | 10.00 | 10.0 | 5.0 % faster | **2.0 % slower** | ±1.0 |"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_have_what_the_results_say(page):
    assert tables.render(page.read_text(), RESULTS) == page.read_text()


def test_the_picture_shows_what_the_results_say():
    assert tables.table("picture", RESULTS) == (ROOT / tables.PICTURE).read_text()


def test_pages_show_every_table_and_all_were_measured():
    shown = re.findall(r"<!-- (?:table|drawn): (.+?) -->", "".join(page.read_text() for page in PAGES))
    assert {*shown, "picture"} == set(tables.TABLES)
    assert [name for name in tables.TABLES if "Not measured yet" in tables.table(name, RESULTS)] == []


# On a CPU XLA adds in order: both lookups train to the same bits in two processes.
@pytest.mark.long
def test_processes_that_train_are_compared(tmp_path):
    out = tmp_path / "card/run"
    args = parse(["reproducible", "--small", "--rows", "0", "--out", str(out)])
    args.main(args)
    (row,) = report.load(out)["rows"]
    assert (row["differ"], row["first gradients that differ"]) == (0, [])
    assert row["arrays"] > 40


@pytest.mark.long
def test_ways_to_choose_a_token_are_timed_in_loops(tmp_path):
    args = parse(["sampling", "--small", "--loop", "--turns=2", "--out", str(tmp_path / "card/run")])
    args.main(args)
    rows = report.load(args.out)["rows"]
    assert [row["choice"] for row in rows] == ["argmax", "jax.numpy top-p", "jaxnorm top-p"]
    assert [row["faster %"] is None for row in rows] == [False, True, False]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as exit_:
        parse([command, "--help"])
    assert exit_.value.code == 0
    assert f"python -m bench {command}" in capsys.readouterr().out
