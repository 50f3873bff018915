"""The page of a call, `python -m jaxnorm.info --html`: one file, no network. See docs/plans.md."""

import html
import json
from importlib import resources
from typing import Any

from jaxnorm.native import ffi

Report = dict[str, Any]

# What the example begins with: 3 rows of 8, which are read in blocks of 4.
EXAMPLE = (
    (1.0, -2.0, 0.5, 1.5, -1.0, 2.0, -0.5, 3.0),
    (2.0, -1.5, 3.0, 1.0, -2.0, 2.0, -4.0, 2.0),
    (4.0, -3.0, 1.5, -2.5, 3.0, -0.5, 2.5, 1.0),
)


def page(call: Report, words: str) -> str:
    """The page of a call, from what `jaxnorm.info` reports of it, and says of it in words."""
    shape = "\u00d7".join(map(str, call["shape"]))
    title = f"{call['op']} of {call['dtype']}[{shape}] on {call['platform']}"
    data = {
        "title": title,
        "words": words,
        "no_plan": f"There is no launch plan to show{why}." if (why := why_no_plan(call)) else "",
        "plans": call.get("plans", {}),
        "example": EXAMPLE if call["op"] == "rms_norm" else None,
    }
    # "<" would let a string of the data end it.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    template = resources.files("jaxnorm.inspect").joinpath("plan_page.html").read_text(encoding="utf-8")
    return template.replace("{title}", html.escape(title)).replace("{data}", text)


def why_no_plan(call: Report) -> str:
    """Why a call has no launch plan, behind the sentence that speaks of it; nothing where it has one."""
    if "plans" in call:
        return ""
    if call["platform"] == "cuda" and call["implementation"] == "native":
        return f": the kernels of {call['op']} have none of rows"
    whose = ": plans are those of the CUDA kernels"
    if not ffi.available("cuda"):
        return f"{whose}, which this jaxnorm was built without"
    if call["platform"] == "cuda":
        return ": the formula has none"
    return f"{whose}, and --platform cuda shows them, also without a GPU"
