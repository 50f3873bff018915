"""Norms over several devices of one machine, on an Auto mesh, in wall time.

    python -m bench sharding --out bench/results/h200_x4_sharding

"rows": every device has as many rows, result and all gradients, on all devices and on one. The efficiency is the time
on one divided by the time on all: what is lost is the sum of weight gradients, and whatever else all devices wait for.

"features": each row is split over all devices, forward, ours and XLA's own partition of the jnp formula.

A program is a chain of norms, each of which takes what the one before gives (with gradients the result becomes the next
input, and the gradient of that the next cotangent). Programs are called several times without waiting for them, as a
training loop does, so that devices do not wait for the host. Times are of one norm, medians over turns.

    python -m bench sharding --trainer 8b --meshes 1x1 4x1 2x2 --out bench/results/h100_x4_steps_8b

measures training steps in their place.
"""

import statistics
from functools import partial

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bench import report, sharded_steps, timing
from bench.programs import NORMS, is_layer

LINKS = 10
CALLS = 4  # that are in flight at once
COLS = {"rows": 4096, "features": 16384}
DTYPES = ("float32", "bfloat16")


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
    cells = [(kind, dtype) for kind in NORMS for dtype in DTYPES]
    rows = [rows_cell(*cell, devices, args) for cell in cells] + [features_cell(*cell, devices, args) for cell in cells]
    header = {
        "device": f"{len(devices)} x {devices[0].device_kind}",
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "commit": args.commit or report.commit(),
    }
    report.write(header, rows, args.out)


def rows_cell(kind, dtype, devices, args):
    rows = (args.mib << 20) // COLS["rows"] // jnp.dtype(dtype).itemsize
    chain = partial(steps, partial(NORMS[kind], implementation="native"))
    one, all_devices = (
        (chain, operands(kind, dtype, rows * len(those), COLS["rows"], P("data"), P(), those, arrays=2))
        for those in (devices[:1], devices)
    )
    alone, together = compare([one, all_devices], args.turns)
    return {
        "what": "rows, step",
        "op": f"{kind}_norm",
        "dtype": dtype,
        "M": rows * len(devices),
        "N": COLS["rows"],
        "us": 1e6 * together,
        "us on one device": 1e6 * alone,
        "efficiency": alone / together,
        "XLA us": None,
        "x XLA": None,
    }


def features_cell(kind, dtype, devices, args):
    rows = (args.mib << 20) * len(devices) // COLS["features"] // jnp.dtype(dtype).itemsize
    given = operands(kind, dtype, rows, COLS["features"], P(None, "data"), P("data"), devices, arrays=1)
    chains = [partial(forwards, partial(NORMS[kind], implementation=how)) for how in ("native", "jnp")]
    ours, xla = compare([(chain, given) for chain in chains], args.turns)
    return {
        "what": "features, forward",
        "op": f"{kind}_norm",
        "dtype": dtype,
        "M": rows,
        "N": COLS["features"],
        "us": 1e6 * ours,
        "us on one device": None,
        "efficiency": None,
        "XLA us": 1e6 * xla,
        "x XLA": xla / ours,
    }


def operands(kind, dtype, rows, cols, spec, of_weights, devices, arrays):
    """Arrays of x's size and the weights, made where they belong."""
    mesh = Mesh(np.asarray(devices), "data", axis_types=(AxisType.Auto,))
    sharding, of_weights = NamedSharding(mesh, spec), NamedSharding(mesh, of_weights)

    @partial(jax.jit, out_shardings=([sharding] * arrays, [of_weights] * (2 if is_layer(kind) else 1)))
    def draw():
        # Cheap numbers that differ along rows and columns: a generator would take its own memory.
        row, col = jnp.arange(rows, dtype=jnp.float32)[:, None], jnp.arange(cols, dtype=jnp.float32)
        xs = [jnp.sin(row + 1.7 * col + i).astype(dtype) for i in range(arrays)]
        return xs, [1 + 0.1 * jnp.cos(col + i) for i in range(2 if is_layer(kind) else 1)]

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
    """The median seconds of a norm in programs (function, arguments), in turns."""

    def program(function, args):
        function = jax.jit(function)
        return lambda _: (None, function(*args))

    programs = {number: program(*pair) for number, pair in enumerate(pairs)}
    times, _ = timing.in_turns(programs, None, (), turns, CALLS)
    return [statistics.median(taken) / LINKS for taken in times.values()]
