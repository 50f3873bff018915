"""The page of a launch plan, `python -m jaxnorm.info --html`: one file, no network. See docs/plans.md.

Everything that it says is worked out here; its scripts draw, and walk the map once more to test themselves.
"""

import html
import json
import math
from importlib import resources
from typing import Any

from jaxnorm.inspect.plan_page import launch, ruler
from jaxnorm.inspect.plan_page.tiling import Case, Pass, passes
from jaxnorm.native import ffi
from jaxnorm.ops.norm.op import LONGEST_GATED
from jaxnorm.primitive import op, weights
from jaxnorm.primitive.described import Request

SCRIPTS = ("tiling.js", "ruler.js", "map.js", "example.js", "selftest.js", "main.js")
WALKED = 1 << 22  # columns of the longest row of which the page walks the map
MAPPED = {"rms_norm": "rms", "layer_norm": "layer"}  # whose kernels a test holds the map to; the example is theirs
Report = dict[str, Any]


def page(call: Report, request: Request) -> str:
    """The page of a call, from what `jaxnorm.info` reports of it."""
    return drawn(content(call, request))


def content(call: Report, request: Request) -> Report:
    """What the page says, as its scripts read it."""
    shape = "\u00d7".join(map(str, call["shape"]))
    return {
        "title": f"{call['op']} of {call['dtype']}[{shape}] on {call['platform']}",
        "runs": _runs(call),
        "call": {"cols": _rows_and_cols(request)[1]},
        "example": MAPPED.get(call["op"]),
        "needed": launch.NEEDED,
        "ways": [_way(way, plan, call, request) for way, plan in call.get("plans", {}).items()],
    }


def drawn(content: Report) -> str:
    """The page that says this."""
    # "<" would let a string of the data end it.
    data = json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")
    script = "(() => {\n'use strict';\n" + "".join(file(name) for name in SCRIPTS) + "})();"
    filled = file("page.html").replace("{title}", html.escape(content["title"])).replace("{css}", file("style.css"))
    return filled.replace("{script}", script).replace("{data}", data)


def file(name: str) -> str:
    """The text of a file of the page."""
    return resources.files(__name__).joinpath(name).read_text(encoding="utf-8")


def _runs(call: Report) -> str:
    names = {
        "native": "a kernel of jaxnorm runs",
        "jnp": "the formula runs in jax.numpy",
        "an error": "this is an error",
    }
    said = f"On {call['platform']} {names[call['implementation']]}, because {call['why']}."
    if "plans" in call:
        return f"{said} Plans are for a GPU whose largest cluster has {call['largest_cluster']} blocks."
    return f"{said} There is no launch plan to show{why_no_plan(call)}."


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


def _rows_and_cols(request: Request) -> tuple[int, int]:
    return math.prod(request.shape[: -request.axes]), math.prod(request.shape[-request.axes :])


def _way(way: Any, plan: Report, call: Report, request: Request) -> Report:
    of_function, how = op.functions()[call["op"]]
    arguments = of_function.native.plan(*how.request(request))  # type: ignore[union-attr, misc]
    kind = arguments["kind"]
    more = {key: value for key, value in arguments.items() if key != "kind"}
    module, most, dtype = ffi.module("cuda"), call["largest_cluster"], request.addend_dtype or request.dtype
    rows, cols = _rows_and_cols(request)
    case = Case(way, kind, dtype, rows, cols, plan, most)

    def plan_of(length: int) -> Report:
        return dict(module.plan(way, kind, dtype.name, length, max_cluster=most, **more))

    longest = LONGEST_GATED if more.get("gated") else None
    marks = [_mark(mark, case.vector) for mark in ruler.marks(plan_of, cols, case.vector, longest)]
    shown: Report = {
        "way": way,
        "why": _why(case, marks),
        "slower": call.get("slower", {}).get(way),
        "ruler": marks,
        "no_map": _no_map(call, request),
        **{key: [] for key in ("passes", "kernels", "traffic")},
        "small_batch": None,
    }
    if shown["no_map"] is None:
        partial_rows = module.workspace(f"jaxnorm_{kind}_norm_bwd", dtype.name, cols, weights=1)[1] // cols
        kernels = launch.kernels(case, partial_rows)
        shown |= {
            "passes": [_pass(step) for step in passes(case)],
            "kernels": [{**kernel, "in_flight": launch.in_flight(case, kernel)} for kernel in kernels],
            "traffic": launch.traffic(case, partial_rows),
            "small_batch": launch.small_batch(case),
        }
    return shown


def _no_map(call: Report, request: Request) -> str | None:
    """Why there is no map of a call's rows."""
    if call["op"] not in MAPPED:
        return f"The map is drawn of {' and '.join(MAPPED)}. The kernels of {call['op']} share rows by the same rule."
    if request.out_dtype != request.dtype or weights.stripped(request.scale_shape[: -request.axes]):
        return (
            "The map is drawn of calls whose result has x's dtype and whose scale is one row: others have kernels of "
            "their own."
        )
    if not _rows_and_cols(request)[0]:
        return "There is no row."
    return None


def _pass(step: Pass) -> Report:
    tiling = step.tiling
    numbers = {name: getattr(tiling, name) for name in tiling.__dataclass_fields__}
    digest = tiling.digest() if tiling.cols <= WALKED else None
    return step._asdict() | {"tiling": numbers, "digest": digest}


def _why(case: Case, marks: list[Report]) -> list[str]:
    whole, rest = divmod(case.cols, case.vector)
    lies = f"{whole} vectors of 16 bytes" + (f" and {rest} element{'s' if rest > 1 else ''} more" if rest else "")
    own = next(mark for mark in marks if mark["from"] <= case.cols <= mark["to"])
    said = [
        f"A row of {case.cols} elements of {case.dtype.name} is {lies}. A row takes the first rule with room for it, "
        "whatever the number of rows, so that its bits do not depend on the rows beside it.",
        f"From {own['from']} to {own['to']} columns the rule is {own['regime']}: {own['rule']}",
    ]
    threads = case.plan["threads_per_row"]
    if not case.is_streamed:
        said.append(f"Here that is {threads} threads a row, with {case.plan['elements_per_thread']} elements each.")
    if not case.is_divided:
        said.append(
            "Vectors do not divide the row. The ruler is that of rows with as many elements past the last whole vector."
        )
    return said


def _mark(mark: Report, vector: int) -> Report:
    first, last = mark["first"], mark["last"]
    return {"from": mark["from"], "to": mark["to"], "regime": first["regime"], "rule": _rule(first, last, vector)}


def _rule(first: Report, last: Report, vector: int) -> str:
    blocks, vectors = first["blocks_per_row"], first["elements_per_thread"] // vector
    threads, rows = _range(first, last, "threads_per_row"), _range(first, last, "rows_per_block")
    held = f"{vectors} vector{'s' if vectors > 1 else ''} a thread"
    looping = f"{blocks} block{'s' if blocks > 1 else ''} of {first['threads_per_row'] // blocks} threads"
    return {
        "rows per block": f"{threads} threads share a row, {held}; a block has {rows} rows.",
        "block per row": f"a block of {threads} threads has a row, {held}.",
        "cluster per row": f"a cluster of {blocks} blocks has a row, {threads} threads in all, {held}.",
        "segments": "segments of 4096 columns of a row are summed up by one kernel; a second one finishes by columns.",
        "looped": f"{looping} read the row again in each pass.",
    }[first["regime"]]


def _range(first: Report, last: Report, key: str) -> str:
    return str(first[key]) if first[key] == last[key] else f"{first[key]} to {last[key]}"
