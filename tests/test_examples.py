"""The examples run as they are, on sizes for a CPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from coverage import in_full

pytestmark = pytest.mark.any_code

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name, *args, **environment):
    command = [sys.executable, "-W", "error", EXAMPLES / name, *args]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_fp8_inference():
    printed = run("fp8_inference.py", "--small", "--calls", "2")
    assert re.search(r"differs from the bfloat16 block's by [3-9]\.\d\d %.*streams are the same bits", printed)


def test_train_images(tmp_path):
    sizes = ["--batch", "4", "--size", "16", "--channels", "16"]
    printed = run("train_images.py", "--steps", "3", *sizes, "--out", tmp_path / "images.png")
    assert float(re.search(r"between the curves: (\S+) at step", printed)[1]) < 1e-4
    assert (tmp_path / "images.png").read_bytes().startswith(b"\x89PNG")


HOW = {"hidden": ["--split-hidden"], "two processes": ["--processes", "2"], **dict(in_full(("rows", [])))}


# On devices that this CPU simulates, by one process and by two. The losses are those of one device.
@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_train_sharded(how):
    printed = run("train_sharded.py", "--steps", "3", *how, JAX_PLATFORMS="cpu")
    assert float(re.search(r"between the curves: (\S+) in 3 steps", printed)[1]) < 1e-5
    assert re.search(r"rms_norm_bwd, \d x rms_norm_fwd", printed)


def test_more_devices_than_there_are():
    command = [sys.executable, EXAMPLES / "train_sharded.py", "--data", "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--batch 8: must be a multiple of --data 3" in done.stderr
