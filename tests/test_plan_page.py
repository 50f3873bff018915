"""The page of a call: what it says, and the example to follow by hand."""

import json
import re
import subprocess
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jaxnorm
from jaxnorm import info

ROOT = Path(__file__).resolve().parents[1]
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
def page(tmp_path, capsys):
    """Writes the page of a call; its path, and what is printed."""

    def write(*arguments):
        path = tmp_path / "plan.html"
        info.main(["--html", str(path), *arguments])
        return path, capsys.readouterr().out

    return write


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
    assert x.shape == (3, 8)
    assert [f"{total:.2f}" for total in (x**2).sum(-1)] == SUMS
    rms = x / jaxnorm.rms_norm(jnp.asarray(x, jnp.float32), epsilon=1e-6)
    assert [[f"{value:.2f}" for value in row] for row in rms] == [[value] * 8 for value in RMS]
    text = (ROOT / "docs" / "plans.md").read_text()
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
