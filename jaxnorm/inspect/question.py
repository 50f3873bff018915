"""The call that `python -m jaxnorm.info` is asked about: its arguments, what is reported of it, and that in words."""

import argparse
import inspect
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxnorm
from jaxnorm.inspect.explain import of_arrays
from jaxnorm.ops import checks, misuse
from jaxnorm.primitive import registry, weights
from jaxnorm.primitive.registry import Function, Request

DESCRIPTION = "What jaxnorm is made of here, and what would run for a given array."


def parse(arguments: list[str] | None) -> tuple[argparse.Namespace, Request]:
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.platform == "gpu":
        parser.error("--platform gpu is cuda or rocm here, as JAX lowers programs for one or the other")
    _, function = registry.functions()[options.op]
    options.shape = options.shape or function.shape
    if not 1 <= options.axes <= len(options.shape):
        parser.error(f"--axes is {options.axes}, expected 1 to {len(options.shape)}, the rank of --shape")
    if options.axes > 1 and function.last_axis_only:
        parser.error(f"--axes is {options.axes}, expected 1: {options.op} is over the last axis")
    if options.columns is not None and not function.matrix:
        parser.error(f"--columns is given, and {options.op} has no matrix beside x")
    options.columns = options.shape[-1] if options.columns is None else options.columns
    options.scale_shape = options.scale_shape or options.shape[-options.axes :]
    _check_scale_shape(parser, options, function)
    _check_dtypes(parser, options, function)
    request = Request(
        options.shape,
        options.dtype,
        options.out_dtype,
        options.axes,
        options.scale_shape,
        options.columns,
        options.residual_dtype,
    )
    _check_call(parser, function, request)
    return options, request


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m jaxnorm.info", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"jaxnorm {jaxnorm.__version__}")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--op", type=_op, default="rms_norm", metavar="FUNCTION", help=f"one of {', '.join(registry.functions())}"
    )
    parser.add_argument("--shape", type=_shape, help="x's shape, or that of the rows, as 4096x4096")
    parser.add_argument("--axes", type=int, default=1, help="how many trailing axes are normalised")
    parser.add_argument("--scale-shape", type=_shape, help="scale's, as 32x128 for 32 heads; x's last axes if none")
    parser.add_argument(
        "--columns", type=int, help="classes, outputs, rows of a table or segments; as many as x has if not given"
    )
    parser.add_argument("--dtype", type=_dtype, help="the dtype of x, and of other operands; float32 if not given")
    parser.add_argument("--residual-dtype", type=_dtype, help="the residual's; x's, or no residual, if not given")
    parser.add_argument("--out-dtype", type=_dtype, help="the result's dtype; x's, or float8_e4m3fn, if not given")
    parser.add_argument("--platform", help="cpu, cuda, tpu, ...; JAX's default if not given")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write a page of the launch plan to this file")
    parser.add_argument(
        "--explain", metavar="MODULE:FUNCTION", help="say it of each call in a function without arguments"
    )
    return parser


def _check_dtypes(parser: argparse.ArgumentParser, options: argparse.Namespace, function: Function) -> None:
    known = function.dtypes or (np.dtype(np.float32), *checks.DTYPES)
    options.dtype = options.dtype or known[0]
    for argument, expected in {"dtype": known, "residual_dtype": tuple(checks.DTYPES)}.items():
        dtype = getattr(options, argument)
        if dtype is not None and dtype not in expected:
            parser.error(f"--{argument.replace('_', '-')} is {dtype}, {misuse.no_dtype(dtype, _names(expected))}")
    if options.residual_dtype and "residual" not in parameters(function.name):
        parser.error(f"--residual-dtype is given, and {function.name} adds no residual")
    of_any = (options.dtype, *checks.DTYPES)
    results = of_any if function.out_dtypes is None else function.out_dtypes or (options.dtype,)
    options.out_dtype = options.out_dtype or (options.dtype if options.dtype in results else results[0])
    if options.out_dtype not in results:
        parser.error(f"{function.name} has no results of {options.out_dtype}, but of {', '.join(_names(results))}")


def _check_scale_shape(parser: argparse.ArgumentParser, options: argparse.Namespace, function: Function) -> None:
    others, last = options.shape[: -options.axes], options.shape[-options.axes :]
    batch_dims = options.scale_shape[: -options.axes]
    if function.last_axis_only and batch_dims:
        parser.error(f"--scale-shape has leading axes; the scale of {options.op} has the last axis alone")
    if options.scale_shape[-options.axes :] != last or not weights.are_batch_dims(batch_dims, others):
        parser.error(
            f"--scale-shape is {options.scale_shape}, expected {last} and before it, if anything, what broadcasts "
            f"against {others}"
        )


def _check_call(parser: argparse.ArgumentParser, function: Function, request: Request) -> None:
    """The error of the function itself, if such a call is one."""
    arrays, traceable = of_arrays(getattr(jaxnorm, function.name), (), _arguments(function, request))
    try:
        # By the formula, as what serves the call is the report's. Without x64 a float64 would be taken for a float32.
        with jax.enable_x64(True), jaxnorm.implementation("xla"):
            jax.eval_shape(traceable, arrays)
    except (TypeError, ValueError) as error:
        parser.error(str(error))


def _arguments(function: Function, request: Request) -> dict[str, Any]:
    """What the function is called with, arrays by their types."""
    known = parameters(function.name)
    given: dict[str, Any] = {"x": request.array(request.shape), "out_dtype": request.out_dtype}
    if "scale" in known and known["scale"].default is None:  # and no number
        given["scale"] = request.array(request.scale_shape)
    if not function.last_axis_only:
        given["axis"] = tuple(range(-request.axes, 0))
    if "quantization" in known:
        given["quantization"] = jaxnorm.Quantization(request.out_dtype)
    if "residual" in known and (request.addend_dtype or known["residual"].default is inspect.Parameter.empty):
        given["residual"] = request.array(request.shape, request.addend_dtype)
    return {name: value for name, value in given.items() if name in known} | function.arguments(request)


def _names(dtypes: Iterable[np.dtype[Any]]) -> list[str]:
    return sorted({dtype.name for dtype in dtypes})


def _dtype(text: str) -> np.dtype[Any]:
    try:
        return np.dtype(jnp.dtype(text))
    except TypeError:
        results = (dtype for _, function in registry.functions().values() for dtype in function.out_dtypes or ())
        remedy = misuse.no_dtype(text, _names((*checks.DTYPES, *results)))
        raise argparse.ArgumentTypeError(f"{text!r} is no dtype; {remedy}") from None


def _op(text: str) -> str:
    if text not in (known := registry.functions()):
        raise argparse.ArgumentTypeError(f"{text!r} is no function; {misuse.did_you_mean(text, known)}")
    return text


def _shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(length) for length in text.split("x"))
    except ValueError:
        shape = (-1,)
    if min(shape) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no shape; write one as 8x128")
    return shape


def parameters(function: str) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(getattr(jaxnorm, function)).parameters


def described(function: str, request: Request) -> dict[str, Any]:
    _, how = registry.functions()[function]
    return {
        "op": function,
        "shape": request.shape,
        "dtype": request.dtype.name,
        "out_dtype": request.out_dtype.name,
        "axes": request.axes,
        "scale_shape": request.scale_shape,
        "residual_dtype": request.addend_dtype and request.addend_dtype.name,
        **({"columns": request.columns} if how.matrix else {}),
    }


def in_words(norm: dict[str, Any]) -> str:
    _, how = registry.functions()[norm["op"]]
    shape, scale_shape = ("x".join(map(str, norm[name])) for name in ("shape", "scale_shape"))
    axes = "axis" if norm["axes"] == 1 else f"{norm['axes']} axes"
    scale = f", scale[{scale_shape}]," if len(norm["scale_shape"]) > norm["axes"] else ""
    residual = f" and a residual of {norm['residual_dtype']}" if norm["residual_dtype"] else ""
    matrix = f" and {how.matrix} of {norm['columns']} {how.columns}" if how.matrix else ""
    over = f" over the last {axes}" if how.over is None else how.over(norm["shape"])
    return f"{norm['op']} of {norm['dtype']}[{shape}]{residual}{scale}{matrix} to {norm['out_dtype']}{over}"
