"""The launch plans of the documentation: `python -m tools.plan_pages` writes them, and MkDocs draws their pages.

The CUDA kernels have to be built to write a plan, and need no GPU. Plans are kept in the repository, so that the
documentation is built without the kernels; a test says when they have to be written again.
"""

import json
import sys
from pathlib import Path
from typing import Any

# `mkdocs` has its own folder on the path, and not the clone's root. What is installed comes first.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from jaxnorm import info
from jaxnorm.inspect import plan_page, question

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "plans"
# Every regime, in the order of length: the heads of attention, a vision transformer, Llama 3 8B, and long rows.
CALLS = {
    "heads": ("--op", "rms_norm", "--shape", "4x2048x32x128", "--dtype", "bfloat16"),
    "vit": ("--op", "layer_norm", "--shape", "64x577x1024", "--dtype", "bfloat16"),
    "llama": ("--op", "rms_norm", "--shape", "4x2048x4096", "--dtype", "bfloat16"),
    "cluster": ("--op", "rms_norm", "--shape", "2048x65536", "--dtype", "bfloat16"),
    "longest": ("--op", "rms_norm", "--shape", "256x1048576", "--dtype", "float32"),
}


def plan(name: str) -> str:
    """What the page of a call says, as JSON."""
    options, request = question.parse(["--platform", "cuda", *CALLS[name]])
    call = info.call(options.op, request, options.platform)
    return json.dumps(plan_page.content(call, request), separators=(",", ":")) + "\n"


def page(name: str) -> str:
    """The page of a plan that is kept."""
    return plan_page.drawn(json.loads((FOLDER / f"{name}.json").read_text()))


def on_post_build(config: Any) -> None:
    """MkDocs calls this with its settings, when the site is written."""
    folder = Path(config["site_dir"]) / "plans"
    folder.mkdir(exist_ok=True)
    for name in CALLS:
        (folder / f"{name}.html").write_text(page(name), encoding="utf-8")


def main() -> None:
    for name in CALLS:
        (FOLDER / f"{name}.json").write_text(plan(name))


if __name__ == "__main__":
    main()
