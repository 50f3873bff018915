"""Norms over several devices of one machine, on an Auto mesh, in wall time.

    python -m bench sharding --out bench/results/h200_x4_sharding

"rows": every device has as many rows, result and all gradients, on all devices and on one. The efficiency is the time
on one divided by the time on all: what is lost is the sum of weight gradients, and whatever else all devices wait for.

"features": each row is split over all devices, forward, ours and XLA's own partition of the jnp formula. "positions":
so is each group of GroupNorm, and "classes" each row of softmax. "MiB exchanged" is what a device gets for one of them.

A program is a chain of norms, each of which takes what the one before gives (with gradients the result becomes the next
input, and the gradient of that the next cotangent). Programs are called several times without waiting for them, as a
training loop does, so that devices do not wait for the host. Times are of one norm, medians over turns.

    python -m bench sharding --trainer 8b --meshes 1x1 4x1 2x2 --out bench/results/h100_x4_steps_8b

measures training steps in their place.
"""

import math
import statistics
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxnorm
from bench import report, sharded_steps, sharded_tables, timing
from bench.collectives import collectives
from bench.norms import NORMS

LINKS = 10
CALLS = 4  # that are in flight at once
DTYPES = ("float32", "bfloat16")
WEIGHTS = {"rms": 1, "layer": 2}
COLUMNS = ("what", "op", "dtype", "M", "N", "us", "us on one device", "efficiency", "XLA us", "x XLA")
COLUMNS += ("MiB exchanged", "XLA's")


def rows_of(cols, size):
    """The shape of so many numbers."""
    return size // cols, cols


def images_of(size):
    """The same, of images in a row each, with 512 channels."""
    return 8, size // 8 // 512, 512


class Split(NamedTuple):
    """A call that each device computes a part of every row or group for."""

    what: str
    op: str
    function: Callable  # of x, the weights, and `implementation`
    dims: Callable[[int], tuple[int, ...]]  # x's shape, of so many numbers
    spec: P
    weights: int = 0
    of_weights: P = P()


FEATURES = [
    Split("features, forward", f"{kind}_norm", norm, partial(rows_of, 16384), P(None, "data"), WEIGHTS[kind], P("data"))
    for kind, norm in NORMS.items()
]
POSITIONS = Split(
    "positions, forward", "group_norm", partial(jaxnorm.group_norm, num_groups=32), images_of, P(None, "data"), 2
)
CLASSES = Split("classes, forward", "softmax", jaxnorm.softmax, partial(rows_of, 16384), P(None, "data"))


def add_arguments(parser):
    report.add_arguments(parser)
    parser.add_argument("--devices", type=int, default=jax.device_count(), help="(default: all)")
    parser.add_argument("--mib", type=int, default=256, help="of x on each device (default: 256)")
    parser.add_argument("--turns", type=int, default=5, help="of each program")
    sharded_steps.add_arguments(parser)


def main(args):
    if args.trainer:
        return sharded_steps.main(args)
    devices = jax.devices()[: args.devices]
    if len(devices) < args.devices:
        raise SystemExit(f"--devices {args.devices}: there are {len(devices)}")
    rows = [rows_cell(kind, dtype, devices, args) for kind in NORMS for dtype in DTYPES]
    rows += [split_cell(split, dtype, devices, args) for split in (*FEATURES, POSITIONS, CLASSES) for dtype in DTYPES]
    header = {
        "device": f"{len(devices)} x {devices[0].device_kind}",
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "commit": args.commit or report.commit(),
    }
    report.write(header, rows, args.out)


def rows_cell(kind, dtype, devices, args):
    size = (args.mib << 20) // jnp.dtype(dtype).itemsize
    chain = partial(steps, partial(NORMS[kind], implementation="native"))
    one, all_devices = (
        (chain, operands(rows_of(4096, size * len(those)), dtype, WEIGHTS[kind], P("data"), P(), those, arrays=2))
        for those in (devices[:1], devices)
    )
    (alone, _), (together, _) = compare([one, all_devices], args.turns)
    return dict.fromkeys(COLUMNS) | {
        "what": "rows, step",
        "op": f"{kind}_norm",
        "dtype": dtype,
        "M": rows_of(4096, size * len(devices))[0],
        "N": 4096,
        "us": 1e6 * together,
        "us on one device": 1e6 * alone,
        "efficiency": alone / together,
    }


def split_cell(split, dtype, devices, args):
    dims = split.dims((args.mib << 20) * len(devices) // jnp.dtype(dtype).itemsize)
    given = operands(dims, dtype, split.weights, split.spec, split.of_weights, devices, arrays=1)
    chains = [partial(forwards, partial(split.function, implementation=how)) for how in ("native", "jnp")]
    (ours, exchanged), (xla, by_xla) = compare([(chain, given) for chain in chains], args.turns)
    return dict.fromkeys(COLUMNS) | {
        "what": split.what,
        "op": split.op,
        "dtype": dtype,
        "M": math.prod(dims[:-1]),
        "N": dims[-1],
        "us": 1e6 * ours,
        "XLA us": 1e6 * xla,
        "x XLA": xla / ours,
        "MiB exchanged": exchanged,
        "XLA's": by_xla,
    }


def operands(dims, dtype, weights, spec, of_weights, devices, arrays):
    """Arrays of x's shape and the weights, made where they belong."""
    mesh = Mesh(np.asarray(devices), "data", axis_types=(AxisType.Auto,))
    sharding, of_weights = NamedSharding(mesh, spec), NamedSharding(mesh, of_weights)

    @partial(jax.jit, out_shardings=([sharding] * arrays, [of_weights] * weights))
    def draw():
        # Cheap numbers that differ along all axes: a generator would take its own memory.
        col = jnp.arange(dims[-1], dtype=jnp.float32)
        angle = sum(jax.lax.broadcasted_iota(jnp.float32, dims, axis) * (1 + 0.7 * axis) for axis in range(len(dims)))
        return [jnp.sin(angle + i).astype(dtype) for i in range(arrays)], [
            1 + 0.1 * jnp.cos(col + i) for i in range(weights)
        ]

    return draw()


def steps(norm, xs, weights):
    """Results and gradients of a chain of norms, and the sums of the weights' gradients."""
    x, dy = xs
    sums = [jnp.zeros_like(weight) for weight in weights]
    for _ in range(LINKS):
        y, pullback = jax.vjp(norm, x, *weights)
        dx, *more = pullback(dy)
        x, dy, sums = y, dx, [a + b for a, b in zip(sums, more, strict=True)]
        x, dy = jax.lax.optimization_barrier((x, dy))
    return x, dy, sums


def forwards(norm, xs, weights):
    """A chain of norms. XLA may not make one operation of two."""
    (x,) = xs
    for _ in range(LINKS):
        x = jax.lax.optimization_barrier(norm(x, *weights))
    return x


def compare(pairs, turns):
    """The median seconds of a norm in programs (function, arguments), in turns, and what a device exchanges for it."""
    programs = [jax.jit(function).lower(*args).compile() for function, args in pairs]
    calls = {i: lambda _, i=i: (None, programs[i](*pairs[i][1])) for i in range(len(pairs))}
    times, _ = timing.in_turns(calls, None, (), turns, CALLS)
    exchanged = [{kind: n / LINKS for kind, n in collectives(program.as_text()).items()} for program in programs]
    seconds = [statistics.median(taken) / LINKS for taken in times.values()]
    return list(zip(seconds, map(sharded_tables.in_mib, exchanged), strict=True))
