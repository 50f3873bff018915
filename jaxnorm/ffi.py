"""The native modules: the one Python file that loads them, and what it knows about what they can do."""

import importlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

import jax
import numpy as np

from jaxnorm import compat

# JAX's name of a platform in lowering rules -> XLA's name of it in registrations.
PLATFORMS = {"cpu": "cpu", "cuda": "CUDA"}
TARGETS = (
    *(f"jaxnorm_{kind}_norm_{way}" for kind in ("rms", "layer") for way in ("fwd", "quantized_fwd", "bwd")),
    *(f"jaxnorm_gated_rms_norm_{way}" for way in ("fwd", "bwd")),
)
# For rows that are split over devices.
CUDA_TARGETS = tuple(f"jaxnorm_{kind}_norm_{way}" for kind in ("rms", "layer") for way in ("statistics", "apply"))
# What `jaxnorm.partition` makes of them where XLA splits a program over devices.
PARTITIONED = "jaxnorm_partitioned"
DTYPES = frozenset(map(jax.numpy.dtype, ("float32", "float16", "bfloat16")))

# The longest row that is gated.
GATED_COLS = 1 << 14

_modules: dict[str, ModuleType] = {}
_errors: dict[str, ImportError] = {}


def available(platform: str) -> bool:
    """Whether platform has native kernels in this installation; that it has a device is not needed."""
    return platform in _modules


def module(platform: str) -> ModuleType:
    return _modules[platform]


def why_not(platform: str) -> str:
    """Why platform has no native kernels here, and the remedy."""
    if platform not in PLATFORMS:
        return f"jaxnorm has native kernels for {' and '.join(PLATFORMS)}, none for {platform}"
    error = _errors[platform]
    if not isinstance(error, ModuleNotFoundError) or error.name != f"jaxnorm._{platform}":
        return f"jaxnorm._{platform} does not load ({error}); install jaxnorm again in this environment"
    if platform == "cuda" and available("cpu"):
        return (
            "this jaxnorm was built without CUDA; with a CUDA toolkit present, JAXNORM_CUDA=1 pip install . builds it"
        )
    return (
        f"jaxnorm._{platform} is not installed: jaxnorm is imported from a source tree that was never built; "
        "pip install . in that tree builds it"
    )


def unsupported(
    axes: tuple[int, ...],
    shape: tuple[Any, ...],
    x_dtype: np.dtype[Any],
    out_dtype: np.dtype[Any],
    weight_dtypes: Iterable[np.dtype[Any]],
    residual_dtype: np.dtype[Any] | None = None,
) -> str | None:
    """What of this norm no kernel serves, as a sentence; None if the kernels serve all of it."""
    lengths = [shape[axis] for axis in axes]
    if axes != tuple(range(-len(axes), 0)):
        return f"the normalised axes {axes} are not the trailing axes of x"
    if not all(isinstance(length, int) for length in lengths):
        return f"the normalised axes have a symbolic length {lengths}"
    if 0 in lengths:
        return "a normalised axis has length 0"
    x, result = ("x", x_dtype), ("the result", out_dtype)
    residual = [] if residual_dtype is None else [("residual", residual_dtype)]
    for name, dtype in (x, *residual, result, *(("a weight", dtype) for dtype in weight_dtypes)):
        if dtype not in DTYPES:
            return f"{name} is {dtype}, kernels take {', '.join(sorted(d.name for d in DTYPES))}"
    # What is normalised has the residual's dtype, where there is one.
    for (a, a_dtype), (b, b_dtype) in itertools.pairwise((x, *residual, result)):
        if a_dtype != b_dtype and np.float32 not in (a_dtype, b_dtype):
            return f"{a} is {a_dtype} and {b} {b_dtype}; kernels want them equal, or one of them float32"
    return None


def unsupported_gate(
    cols: Any, x_dtype: np.dtype[Any], gate_dtype: np.dtype[Any], out_dtype: np.dtype[Any]
) -> str | None:
    """What of this norm's gate no kernel serves, beside what `unsupported` says of the norm."""
    if isinstance(cols, int) and cols > GATED_COLS:
        return f"rows of {cols} elements are normalised, kernels with a gate take at most {GATED_COLS}"
    for name, dtype in (("gate", gate_dtype), ("the result", out_dtype)):
        if dtype != x_dtype:
            return f"x is {x_dtype} and {name} {dtype}; kernels with a gate want them equal"
    return None


def call(
    target: str,
    ctx: Any,
    operands: Sequence[Any],
    *,
    workspaces: Sequence[tuple[Any, ...]],
    aliases: Mapping[int, int] | None = None,
    **attributes: Any,
) -> Sequence[Any]:
    """The results of a native call while it is lowered, which has workspaces of float32 behind them."""
    results = [*ctx.avals_out, *(jax.core.ShapedArray(shape, np.float32) for shape in workspaces)]
    lower = jax.ffi.ffi_lowering(target, operand_output_aliases=aliases)
    return lower(ctx.replace(avals_out=results), *operands, **attributes)[: len(ctx.avals_out)]


# What kernels keep beside their results, as shapes of float32 by their order. Those of the CPU keep nothing.


def drawn_rows(platform: str, kind: str, x_dtype: np.dtype[Any], cols: int) -> list[tuple[Any, ...]]:
    """A forward that normalises rows of this dtype: how many of them its clusters have drawn."""
    return [(1,)] if platform == "cuda" and _modules["cuda"].has_drawn_rows(kind, x_dtype.name, cols) else []


def row_sums(platform: str, rows: tuple[Any, ...], x_dtype: np.dtype[Any], cols: int) -> list[tuple[Any, ...]]:
    """A backward that gives dx: two sums of each segment of a row, where rows are cut into segments."""
    segments = _modules["cuda"].row_segments(x_dtype.name, cols) if platform == "cuda" else 0
    return [(*rows, 2 * segments)] if segments else []


def weight_sums(
    platform: str, arrays: int, x_dtype: np.dtype[Any], cols: int, count: int = 1, inner: int = 1
) -> list[tuple[Any, ...]]:
    """A backward that gives so many of dscale and dbias: partial sums of each.

    There are `count` heads, each of `inner` neighbouring rows.
    """
    if platform != "cuda" or not arrays:
        return []
    return [(arrays, _modules["cuda"].partial_rows(x_dtype.name, cols, count, inner), count * cols)]


def _load(platform: str) -> None:
    try:
        native = importlib.import_module(f"jaxnorm._{platform}")
    except ImportError as error:
        _errors[platform] = error
        return
    for target, capsule in native.handlers().items():
        jax.ffi.register_ffi_target(target, capsule, platform=PLATFORMS[platform])
    _modules[platform] = native


for _platform in PLATFORMS:
    _load(_platform)
compat.allow_export([*TARGETS, *CUDA_TARGETS, PARTITIONED])
