"""How jaxnorm was built, and what runs for a given array: `python -m jaxnorm.info [--json]`."""

import dataclasses
import html
import json
import math
import platform as python_platform
from collections.abc import Iterator
from importlib import resources
from typing import Any

from jaxnorm.inspect import explain, question
from jaxnorm.inspect.tuned import installed
from jaxnorm.native import compat, ffi
from jaxnorm.ops.options import Choice, around
from jaxnorm.primitive import fallback, op, registry, weights
from jaxnorm.primitive.decide import Call, Decision, Platform, decide
from jaxnorm.primitive.reasons import RowCall
from jaxnorm.primitive.registry import Request

WAYS: tuple[op.Way, ...] = ("forward", "backward")
ALONE = "forward without a gradient"
PACKAGES = ("jaxnorm", "jax", "jaxlib", "nanobind-backend")
Report = dict[str, Any]


def versions() -> Report:
    return {"python": python_platform.python_version()} | {package: installed(package) for package in PACKAGES}


def native_modules() -> Report:
    """For each platform with kernels: whether its module is loaded, and how it was built or why it is missing."""
    report: Report = {}
    for platform in ffi.PLATFORMS:
        if not ffi.available(platform):
            report[platform] = {"loaded": False, "why_not": ffi.why_not(platform)}
            continue
        module = ffi.module(platform)
        built = (
            {"instruction_set": module.isa()}
            if platform == "cpu"
            else {"toolkit": module.toolkit(), "architectures": module.architectures()}
        )
        unfit = ffi.why_unfit(platform)
        report[platform] = {"loaded": True, **built, **({"not_used": unfit} if unfit else {})}
    return report


def call(function: str, request: Request, platform: str) -> Report:
    """What runs for a call of a public function, in each direction, and why."""
    of_function, how = registry.functions()[function]
    chosen = around(function) if "implementation" in question.parameters(function) else Choice()
    if how.by_xla:
        chosen = Choice(*[chosen.backward if how.by_xla[0] == "forward" else chosen.forward] * 2)
    asked: Call | None = how.call(request) if how.call else None
    ways: dict[str, Call] = {}
    if of_function is not None:
        spec, operands = how.request(request)
        spec = dataclasses.replace(spec, **(chosen.asks(function) if chosen.implementation is None else {}))
        asked = RowCall.of(of_function, spec, operands)
        ways = {"forward": asked, "backward": RowCall.of(of_function, spec, operands, "backward")}
        ways[ALONE] = RowCall.of(of_function, spec, operands, differentiated=False)
    here = Platform.here(platform)
    decision = decide(here, asked) if asked is not None else Decision("native")
    implementation, why = "native", f"jaxnorm._{platform} is loaded and has kernels for these dtypes"
    if chosen.implementation == "xla":
        implementation, why = "xla", f"{fallback.ASKED_FOR}{chosen.forward.how}"
    elif decision.why is not None and not (ways and decision.stage == "chosen"):
        implementation, why = "xla" if chosen.implementation is None else "an error", decision.why
    report = question.described(function, request)
    report |= {"platform": platform, "implementation": implementation, "why": why}
    if implementation == "native" and how.by_xla:
        way, why = how.by_xla
        report["slower"] = {way: why} | ({ALONE: why} if way == "forward" else {})
    if implementation == "native" and of_function is not None and of_function.native is not None:
        plan = of_function.native.plan
        if chosen.implementation is None:
            decisions = {way: decide(here, of_way) for way, of_way in ways.items()}
            report["slower"] = slower = {way: one.why for way, one in decisions.items() if one.why is not None}
            if not plan and len(slower) == len(ways):
                report |= {"implementation": "xla", "why": slower["forward"]}
        if platform == "cuda" and plan:
            report |= _plans(request, plan(spec, operands))
    return report


def _plans(request: Request, how: dict[str, Any]) -> Report:
    """The launch plans of the CUDA kernels, each way, as the op describes itself to them."""
    kind, how = how["kind"], {key: value for key, value in how.items() if key != "kind"}
    cols = math.prod(request.shape[-request.axes :])
    # The most blocks of one on the present GPU; without one, on an H100, H200 or B200.
    clusters = int(ffi.module("cuda").max_cluster()) if compat.default_platform() == "cuda" else 16
    plan, dtype = ffi.module("cuda").plan, request.addend_dtype or request.dtype  # that of what is normalised
    plans = {way: plan(way, kind, dtype.name, cols, max_cluster=clusters, **how) for way in WAYS}
    batch_dims = weights.stripped(request.scale_shape[: -request.axes])
    count, inner = weights.heads_of(request.shape, request.axes, batch_dims)
    if count > 1 and inner > 1:  # such rows are not fetched ahead
        plans["backward"]["ring"] = False
    return {"largest_cluster": clusters, "plans": plans}


def plan_in_words(plan: Report) -> str:
    threads, rows, blocks = plan["threads_per_row"], plan["rows_per_block"], plan["blocks_per_row"]
    held = f"{plan['elements_per_thread']} elements a thread, " + (
        "fetched ahead by way of shared memory" if plan["ring"] else "held in registers"
    )
    return {
        "rows per block": f"{rows} rows a block, {threads} threads a row, {held}",
        "block per row": f"one block of {threads} threads a row, {held}",
        "cluster per row": f"one cluster of {blocks} blocks a row, {threads} threads in all, {held}",
        "segments": f"{plan['segments']} segments a row, summed up by one kernel and finished by columns by the next",
        "looped": f"{blocks} block(s) a row, {threads} threads in all, which read the row again in each pass",
    }[plan["regime"]]


def in_words(report: Report) -> str:
    lines = [f"{name:18}{version or 'not installed'}" for name, version in report["versions"].items()]
    for platform, module in report["native"].items():
        built = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in module.items() if key != "loaded")
        lines.append(f"{platform + ' kernels':18}{'loaded: ' + built if module['loaded'] else module['why_not']}")
    if report["native"]["cuda"].get("why_not") == ffi.WITHOUT_CUDA:
        lines[-1] += " (there is no GPU here; JAXNORM_CUDA=1 pip install . builds it all the same)"
    norm = report["call"]
    why = norm["why"]
    if why == report["native"].get(norm["platform"], {}).get("why_not"):
        why = "its kernels are not here, see above"
    return "\n".join([*lines, "", call_in_words(norm, why)])


def call_in_words(norm: Report, why: str) -> str:
    said = f"{question.in_words(norm)} on {norm['platform']}: {norm['implementation']}, because {why}"
    return "\n".join([said, *_ways_in_words(norm)])


def _ways_in_words(norm: Report) -> Iterator[str]:
    """What runs each way, where that is not the same or has a plan."""
    of_function, _ = registry.functions()[norm["op"]]
    by_convention = of_function is not None and of_function.convention is not None
    slower, plans = norm.get("slower", {}), norm.get("plans", {})
    for way in WAYS if norm["implementation"] == "native" and (slower or plans) else ():
        asked = " (with straight_through=True)" if by_convention and way == "backward" else ""
        if why := slower.get(way):
            yield f"{way:18}xla, because {why}{asked}"
        else:
            plan = f"{plans[way]['regime']}: {plan_in_words(plans[way])}" if way in plans else "native"
            yield f"{way:18}{plan}{asked}"
    if slower.get(ALONE) != slower.get("forward"):
        yield f"{'':18}where no gradient is taken xla, because {slower[ALONE]}"
    if plans:
        yield f"{'':18}(on a GPU whose largest cluster has {norm['largest_cluster']} blocks)"


# What the example begins with: 3 rows of 8, which are read in blocks of 4.
EXAMPLE = (
    (1.0, -2.0, 0.5, 1.5, -1.0, 2.0, -0.5, 3.0),
    (2.0, -1.5, 3.0, 1.0, -2.0, 2.0, -4.0, 2.0),
    (4.0, -3.0, 1.5, -2.5, 3.0, -0.5, 2.5, 1.0),
)


def html_page(call: Report, words: str) -> str:
    """The page of a call, `--html`, from what is reported of it, and said of it in words: one file, no network."""
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


def main(arguments: list[str] | None = None) -> None:
    options, request = question.parse(arguments)
    if options.explain:
        try:
            norms = explain.of_name(options.explain)
        except explain.NoFunction as error:
            question.make_parser().error(f"--explain: {error}")
        print(json.dumps([dataclasses.asdict(norm) for norm in norms], indent=2) if options.json else norms)
        return
    report = {
        "versions": versions(),
        "native": native_modules(),
        "call": call(options.op, request, options.platform or compat.default_platform()),
    }
    if options.html:
        try:
            page = html_page(report["call"], call_in_words(report["call"], report["call"]["why"]))
            options.html.write_text(page, encoding="utf-8")
        except OSError as error:
            question.make_parser().error(f"--html: {error}")
    print(json.dumps(report, indent=2) if options.json else in_words(report))
    if options.html and not options.json:
        why = why_no_plan(report["call"])
        print(f"\n{options.html} is the page{', without a launch plan' if why else ''}{why}")
