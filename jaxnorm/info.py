"""What jaxnorm is made of here, and what would run for a given array: `python -m jaxnorm.info [--json]`."""

import argparse
import importlib.metadata
import json
import math
import platform as python_platform
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxnorm import compat, ffi, heads, quantization, validation

PACKAGES = ("jaxnorm", "jax", "jaxlib", "nanobind-backend")
OPS = (
    "rms_norm",
    "layer_norm",
    "add_rms_norm",
    "add_layer_norm",
    "gated_rms_norm",
    "rms_norm_quantized",
    "layer_norm_quantized",
)
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
        report[platform] = {"loaded": True, **built}
    return report


def call(
    op: str,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    out_dtype: np.dtype[Any],
    axes: int,
    platform: str,
    scale_shape: tuple[int, ...] | None = None,
) -> Report:
    """What runs for the norm of an array over its last axes, each way, and why.

    A residual or gate has the array's dtype, and a gate comes last.
    """
    scale_shape = shape[-axes:] if scale_shape is None else scale_shape
    normalised = tuple(range(-axes, 0))
    residual_dtype = dtype if op.startswith("add_") else None
    is_gated = op.startswith("gated_")
    # What is quantised is float32.
    result_dtype = np.dtype(np.float32) if op.endswith("_quantized") else out_dtype
    cols = math.prod(shape[-axes:])
    reason = ffi.unsupported(normalised, shape, dtype, result_dtype, [], residual_dtype)
    lead = heads.stripped(scale_shape[:-axes])
    if reason is None:
        reason = heads.unsupported(shape, axes, lead, op)
    if reason is None and is_gated:
        reason = ffi.unsupported_gate(cols, dtype, dtype, out_dtype)
    if reason is None and not ffi.available(platform):
        reason = ffi.why_not(platform)
    report: Report = {
        "op": op,
        "shape": shape,
        "dtype": dtype.name,
        "out_dtype": out_dtype.name,
        "axes": axes,
        "scale_shape": scale_shape,
        "platform": platform,
        "implementation": "native" if reason is None else "jnp",
        "why": reason or f"jaxnorm._{platform} is loaded and has kernels for these dtypes",
    }
    if reason is None and platform == "cuda":
        clusters = _largest_cluster()
        report["largest_cluster"] = clusters
        kind = "rms" if "rms_norm" in op else "layer"
        # A quantised result changes no plan; the straight-through gradient's is the norm's.
        how = {"max_cluster": clusters, "gate": "last" if is_gated else "", "adds": residual_dtype is not None}
        plan = ffi.module("cuda").plan
        report["plans"] = {way: plan(way, kind, dtype.name, cols, **how) for way in ("forward", "backward")}
        count, inner = heads.heads_of(shape, axes, lead)
        if count > 1 and inner > 1:  # such rows are not fetched ahead
            report["plans"]["backward"]["ring"] = False
    return report


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
    lines.append(
        f"\n{norm['op']} of {norm['dtype']}[{shape}]{scale} to {norm['out_dtype']} over the last {axes} on "
        f"{norm['platform']}: {norm['implementation']}, because {norm['why']}"
    )
    for way, plan in norm.get("plans", {}).items():
        lines.append(f"{way:18}{plan['regime']}: {plan_in_words(plan)}")
    if "plans" in norm:
        lines.append(f"{'':18}(on a GPU whose largest cluster has {norm['largest_cluster']} blocks)")
    return "\n".join(lines)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m jaxnorm.info", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--op", choices=OPS, default="rms_norm")
    parser.add_argument("--shape", type=_shape, default=(4096, 4096), help="x's shape, as 4096x4096")
    parser.add_argument("--axes", type=int, default=1, help="how many trailing axes are normalised")
    parser.add_argument(
        "--scale-shape", type=_shape, help="scale's, as 32x128 for 32 heads; x's last axes if not given"
    )
    parser.add_argument("--dtype", type=jnp.dtype, default="float32", help="x's dtype, and a residual's or a gate's")
    parser.add_argument("--out-dtype", type=jnp.dtype, help="the result's dtype; x's, or float8_e4m3fn, if not given")
    parser.add_argument("--platform", help="cpu, cuda, tpu, ...; JAX's default if not given")
    options = parser.parse_args(arguments)
    if options.platform == "gpu":
        parser.error("--platform gpu is cuda or rocm here, as JAX lowers programs for one or the other")
    if not 1 <= options.axes <= len(options.shape):
        parser.error(f"--axes is {options.axes}, expected 1 to {len(options.shape)}, the rank of --shape")
    if options.op == "gated_rms_norm" and options.axes > 1:
        parser.error(f"--axes is {options.axes}, expected 1: gated_rms_norm is over the last axis")
    if options.scale_shape is not None:
        _check_scale_shape(parser, options)
    is_quantized = options.op.endswith("_quantized")
    options.out_dtype = options.out_dtype or (jnp.dtype("float8_e4m3fn") if is_quantized else options.dtype)
    if options.dtype not in validation.DTYPES:
        parser.error(f"{options.dtype} is no floating-point dtype of 16, 32 or 64 bits, and norms take no other")
    results = quantization.LARGEST if is_quantized else validation.DTYPES
    if options.out_dtype not in results:
        parser.error(
            f"{options.op} has no results of {options.out_dtype}, but of {', '.join(sorted(map(str, results)))}"
        )
    return options


def _check_scale_shape(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    others, last = options.shape[: -options.axes], options.shape[-options.axes :]
    lead = options.scale_shape[: -options.axes]
    if options.op == "gated_rms_norm" and lead:
        parser.error("--scale-shape has leading axes; the scale of gated_rms_norm has the last axis alone")
    if options.scale_shape[-options.axes :] != last or not heads.is_lead(lead, others):
        parser.error(
            f"--scale-shape is {options.scale_shape}, expected {last} and before it, if anything, what broadcasts "
            f"against {others}"
        )


def _shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(length) for length in text.split("x"))
    except ValueError:
        shape = (-1,)
    if min(shape) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no shape; write one as 8x128")
    return shape


def main(arguments: list[str] | None = None) -> None:
    options = _parse(arguments)
    report = {
        "versions": versions(),
        "native": native_modules(),
        "call": call(
            options.op,
            options.shape,
            options.dtype,
            options.out_dtype,
            options.axes,
            options.platform or compat.default_platform(),
            options.scale_shape,
        ),
    }
    print(json.dumps(report, indent=2) if options.json else in_words(report))


if __name__ == "__main__":
    main()
