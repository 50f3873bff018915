"""What jaxnorm is made of here, and what would run for a given array: `python -m jaxnorm.info [--json]`."""

import argparse
import dataclasses
import importlib.metadata
import inspect
import json
import math
import platform as python_platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import jaxnorm
from jaxnorm import _explain, _page
from jaxnorm.native import compat, ffi
from jaxnorm.ops import checks, misuse
from jaxnorm.ops.options import choice
from jaxnorm.primitive import op, reasons, weights

WAYS: tuple[op.Way, ...] = ("forward", "backward")
ALONE = "forward without a gradient"
PACKAGES = ("jaxnorm", "jax", "jaxlib", "nanobind-backend")
Report = dict[str, Any]


def versions() -> Report:
    found: Report = {"python": python_platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def native_modules() -> Report:
    """For each platform with kernels whether its module is loaded, and how it was built or why it is not there."""
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


def call(function: str, request: op.Request, platform: str) -> Report:
    """What runs for such a call of a public function, each way, and why."""
    of_function, how = op.functions()[function]
    spec, operands = how.request(request)
    place = reasons.Place(platform, of_function.has_kernels)
    asked = reasons.Call(of_function, spec, operands)
    reason = reasons.why_not(call=asked, place=place)
    implementation, why = "native", f"jaxnorm._{platform} is loaded and has kernels for these dtypes"
    chosen = choice(None)
    if chosen.implementation == "jnp":
        implementation, why = "jnp", f"the formula is asked for{chosen.how}"
    elif reason is not None:
        implementation, why = "jnp" if chosen.implementation is None else "an error", reason
    report: Report = {
        "op": function,
        "shape": request.shape,
        "dtype": request.dtype.name,
        "out_dtype": request.out_dtype.name,
        "axes": request.axes,
        "scale_shape": request.scale_shape,
        "residual_dtype": request.addend_dtype and request.addend_dtype.name,
        "platform": platform,
        "implementation": implementation,
        "why": why,
    }
    if implementation == "native" and of_function.native is not None:
        if chosen.implementation is None:
            calls: dict[str, op.CallRows] = {way: asked.rows(platform, way) for way in WAYS}
            calls[ALONE] = asked.rows(platform, "forward", differentiated=False)
            ways = {way: reasons.slower(of_function, spec, rows) for way, rows in calls.items()}
            report["slower"] = {way: reason for way, reason in ways.items() if reason}
        if platform == "cuda" and of_function.native.plan:
            report |= _plans(request, of_function.native.plan(spec, operands))
    return report


def _plans(request: op.Request, how: dict[str, Any]) -> Report:
    """The launch plans of the CUDA kernels, each way, as the op describes itself to them."""
    kind, how = how["kind"], {key: value for key, value in how.items() if key != "kind"}
    clusters, cols = _largest_cluster(), math.prod(request.shape[-request.axes :])
    plan, dtype = ffi.module("cuda").plan, request.addend_dtype or request.dtype  # that of what is normalised
    plans = {way: plan(way, kind, dtype.name, cols, max_cluster=clusters, **how) for way in WAYS}
    batch_dims = weights.stripped(request.scale_shape[: -request.axes])
    count, inner = weights.heads_of(request.shape, request.axes, batch_dims)
    if count > 1 and inner > 1:  # such rows are not fetched ahead
        plans["backward"]["ring"] = False
    return {"largest_cluster": clusters, "plans": plans}


def _largest_cluster() -> int:
    """How many blocks a cluster has at most on the present GPU; without one, on an H100, H200 or B200."""
    return int(ffi.module("cuda").max_cluster()) if compat.default_platform() == "cuda" else 16


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
    norm = report["call"]
    shape, scale_shape = ("x".join(map(str, norm[name])) for name in ("shape", "scale_shape"))
    axes = "axis" if norm["axes"] == 1 else f"{norm['axes']} axes"
    scale = f", scale[{scale_shape}]," if len(norm["scale_shape"]) > norm["axes"] else ""
    residual = f" and a residual of {norm['residual_dtype']}" if norm["residual_dtype"] else ""
    lines.append(
        f"\n{norm['op']} of {norm['dtype']}[{shape}]{residual}{scale} to {norm['out_dtype']} over the last {axes} on "
        f"{norm['platform']}: {norm['implementation']}, because {norm['why']}"
    )
    slower = norm.get("slower", {})
    for way, plan in norm.get("plans", {}).items():
        why = slower.get(way)
        lines.append(f"{way:18}jnp, because {why}" if why else f"{way:18}{plan['regime']}: {plan_in_words(plan)}")
    if slower.get(ALONE) != slower.get("forward"):
        lines.append(f"{'':18}where no gradient is taken jnp, because {slower[ALONE]}")
    if "plans" in norm:
        lines.append(f"{'':18}(on a GPU whose largest cluster has {norm['largest_cluster']} blocks)")
    return "\n".join(lines)


def parse(arguments: list[str] | None) -> tuple[argparse.Namespace, op.Request]:
    parser = argparse.ArgumentParser(prog="python -m jaxnorm.info", description=__doc__)
    parser.add_argument("--version", action="version", version=f"jaxnorm {jaxnorm.__version__}")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--op", choices=tuple(op.functions()), default="rms_norm")
    parser.add_argument("--shape", type=_shape, default=(4096, 4096), help="x's shape, as 4096x4096")
    parser.add_argument("--axes", type=int, default=1, help="how many trailing axes are normalised")
    parser.add_argument(
        "--scale-shape", type=_shape, help="scale's, as 32x128 for 32 heads; x's last axes if not given"
    )
    parser.add_argument("--dtype", type=_dtype, default="float32", help="the dtype of x, and of other operands")
    parser.add_argument("--residual-dtype", type=_dtype, help="the residual's; x's, or no residual, if not given")
    parser.add_argument("--out-dtype", type=_dtype, help="the result's dtype; x's, or float8_e4m3fn, if not given")
    parser.add_argument("--platform", help="cpu, cuda, tpu, ...; JAX's default if not given")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write a page of the launch plan to this file")
    parser.add_argument(
        "--explain", metavar="MODULE:FUNCTION", help="say it of every norm of a function that takes no argument"
    )
    options = parser.parse_args(arguments)
    if options.platform == "gpu":
        parser.error("--platform gpu is cuda or rocm here, as JAX lowers programs for one or the other")
    if not 1 <= options.axes <= len(options.shape):
        parser.error(f"--axes is {options.axes}, expected 1 to {len(options.shape)}, the rank of --shape")
    _, function = op.functions()[options.op]
    if options.axes > 1 and function.last_axis_only:
        parser.error(f"--axes is {options.axes}, expected 1: {options.op} is over the last axis")
    options.scale_shape = options.scale_shape or options.shape[-options.axes :]
    _check_scale_shape(parser, options, function)
    _check_dtypes(parser, options, function)
    request = op.Request(
        options.shape, options.dtype, options.out_dtype, options.axes, options.scale_shape, options.residual_dtype
    )
    return options, request


def _check_dtypes(parser: argparse.ArgumentParser, options: argparse.Namespace, function: op.Function) -> None:
    for argument in ("dtype", "residual_dtype"):
        dtype = getattr(options, argument)
        if dtype is not None and dtype not in checks.DTYPES:
            parser.error(f"--{argument.replace('_', '-')} is {dtype}, {misuse.no_dtype(dtype, _names(checks.DTYPES))}")
    if options.residual_dtype and "residual" not in inspect.signature(getattr(jaxnorm, function.name)).parameters:
        parser.error(f"--residual-dtype is given, and {function.name} adds no residual")
    results = function.out_dtypes or (options.dtype, *checks.DTYPES)
    options.out_dtype = options.out_dtype or results[0]
    if options.out_dtype not in results:
        known = ", ".join(_names(results))
        parser.error(f"{function.name} has no results of {options.out_dtype}, but of {known}")


def _check_scale_shape(parser: argparse.ArgumentParser, options: argparse.Namespace, function: op.Function) -> None:
    others, last = options.shape[: -options.axes], options.shape[-options.axes :]
    batch_dims = options.scale_shape[: -options.axes]
    if function.last_axis_only and batch_dims:
        parser.error(f"--scale-shape has leading axes; the scale of {options.op} has the last axis alone")
    if options.scale_shape[-options.axes :] != last or not weights.are_batch_dims(batch_dims, others):
        parser.error(
            f"--scale-shape is {options.scale_shape}, expected {last} and before it, if anything, what broadcasts "
            f"against {others}"
        )


def _names(dtypes: Iterable[np.dtype[Any]]) -> list[str]:
    return sorted({dtype.name for dtype in dtypes})


def _dtype(text: str) -> np.dtype[Any]:
    try:
        return np.dtype(jnp.dtype(text))
    except TypeError:
        results = (dtype for _, function in op.functions().values() for dtype in function.out_dtypes or ())
        remedy = misuse.no_dtype(text, _names((*checks.DTYPES, *results)))
        raise argparse.ArgumentTypeError(f"{text!r} is no dtype; {remedy}") from None


def _shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(length) for length in text.split("x"))
    except ValueError:
        shape = (-1,)
    if min(shape) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no shape; write one as 8x128")
    return shape


def main(arguments: list[str] | None = None) -> None:
    options, request = parse(arguments)
    if options.explain:
        norms = _explain.of_name(options.explain)
        print(json.dumps([dataclasses.asdict(norm) for norm in norms], indent=2) if options.json else norms)
        return
    report = {
        "versions": versions(),
        "native": native_modules(),
        "call": call(options.op, request, options.platform or compat.default_platform()),
    }
    if options.html:
        options.html.write_text(_page.page(report["call"], request), encoding="utf-8")
    print(json.dumps(report, indent=2) if options.json else in_words(report))


if __name__ == "__main__":
    main()
