"""The examples run as they are, on sizes for a CPU."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_fp8_inference():
    command = [sys.executable, "-W", "error", EXAMPLES / "fp8_inference.py", "--small", "--calls", "2"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert re.search(r"differs from the bfloat16 block's by [3-9]\.\d\d %.*streams are the same bits", run.stdout)
