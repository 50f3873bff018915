"""Meshes, operands on them, and what devices with parts of rows have to exchange."""

import math
from collections import Counter
from contextlib import nullcontext
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from op import Size

# Without check_vma, JAX takes gradients for different along axes that a shard_map does not name, and adds them up.
MANUAL, UNCHECKED, PARTLY_MANUAL = "manual", "manual, unchecked", "partly manual"


def mesh_of(devices, axis_type):
    """Two axes; of one device, an axis of one is an axis all the same."""
    shape = (len(devices) // 2, 2) if len(devices) > 1 else (1, 1)
    return Mesh(np.reshape(devices, shape), ("a", "b"), axis_types=(axis_type, axis_type))


def mesh_of_three(devices, names="acb"):
    """Three axes, c of two devices, in the order of names."""
    b = min(2, len(devices) // 2)
    sizes = {"a": len(devices) // (2 * b), "b": b, "c": 2}
    return Mesh(np.reshape(devices, [sizes[name] for name in names]), tuple(names))


def mesh_for(mode, devices):
    if mode == PARTLY_MANUAL:
        return mesh_of_three(devices)
    return mesh_of(devices, AxisType.Explicit if mode == "explicit" else AxisType.Auto)


def placed(mesh, args, specs):
    shardings = jax.tree.map(partial(NamedSharding, mesh), tuple(specs))
    return [jax.device_put(a, sharding) for a, sharding in zip(args, shardings, strict=True)]


def on_mesh(mesh, function, args, specs, *, is_set=True, **options):
    """What a function gives on a mesh of operands that are split so, and the text of its program; options of jit."""
    with jax.set_mesh(mesh) if is_set else nullcontext():
        spread = placed(mesh, args, specs)
        compiled = jax.jit(function, **options).lower(*spread).compile()
        return compiled(*spread), compiled.as_text()


# Of three axes, batch, sequence and features, are the arrays that devices exchange statistics of.
DIMS = (8, 4, 256)


def size_of(op) -> Size:
    """The rows are for a head each, where weights are; groups have what is quantised together, or 64 columns."""
    weights = DIMS[1:] if len(op.small.weights) > 1 else DIMS[-1:]
    return Size(DIMS, weights, {name: max(64, length) for name, length in op.small.options.items()})


def specs_of(op, spec):
    """Those of the operands, for arrays of three axes. One with fewer has the first of them."""
    spec = P(*spec, *(None for _ in range(3 - len(spec))))
    ranks = [len(shape) for shape in op.shapes_at(size_of(op))]
    weight = P(*spec[3 - len(size_of(op).weights) :])
    return (*(P(*spec[:rank]) for rank in ranks[: op.arrays]), *[weight] * len(op.weights))


def result_spec(op, spec):
    """That of the result, for arrays of three axes that have this one."""
    return P(*[*spec][:2]) if op.is_by_row else spec


def place(op, mesh, spec):
    return placed(mesh, op.draw(size_of(op)), specs_of(op, spec))


def results(op, transform=lambda function: function, **given):
    """Those that differ over features, or have one number for each row."""
    # Not dequantised in the same program: XLA on a GPU may leave the rounding out then.
    return transform(lambda *args: [r for r in op.function(*args, **size_of(op).options, **given) if r.ndim][:2])


def gradients(op, transform=lambda function: function, **given):
    """Those of all operands, for cotangents that do not depend on the results."""

    def of_args(x, *others):
        function = transform(lambda *args: op.differentiable(*args, **size_of(op).options, **given)[0])
        y, pullback = jax.vjp(function, x, *others)
        cotangents = pullback(
            jnp.full_like(y, 0.7) if op.is_by_row else jnp.cos(x[tuple(map(slice, y.shape))]).astype(y.dtype)
        )
        return [cotangents[i] for i in op.all]

    return of_args


def split_by(mode, op, mesh, spec):
    """A function of the operands as the mode has it: for XLA as it is, or a `shard_map` of each device's parts."""
    if mode == PARTLY_MANUAL:  # over a third axis, along which all is alike: the two of a spec are left to XLA
        return partial(jax.shard_map, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"c"})
    if mode not in (MANUAL, UNCHECKED):
        return lambda function: function
    return partial(
        jax.shard_map, mesh=mesh, in_specs=specs_of(op, spec), out_specs=result_spec(op, spec), check_vma=mode == MANUAL
    )


def part_spec(op):
    """Batch and what is a part of each row: features, or where a row goes over positions, these."""
    return P("a", "b") if op.has_positions else P("a", None, "b")


def exchanged(op, mesh, spec, *, with_gradients, mode=MANUAL):
    """The bytes of each kind of collective on one device, as `collectives` gives them."""
    along = [axes if isinstance(axes, tuple) else (axes,) for axes in (*spec, None, None)][:3]
    batch, sequence, features = (math.prod(mesh.shape[axis] for axis in axes if axis) for axes in along)
    group_size = size_of(op).options.get("group_size", DIMS[2])
    if op.has_positions:  # groups of channels are on one device
        split, rows = sequence, DIMS[0] // batch * DIMS[2] // group_size // features
    else:
        split, rows = features, DIMS[0] * DIMS[1] // batch // sequence
    statistics = op.statistics if op.has_positions or group_size == DIMS[2] else 0
    total = Counter()
    if split > 1:
        # LayerNorm's are gathered, as they are no sums.
        kind, copies = ("all-gather", split) if op.kind == "layer" else ("all-reduce", 1)
        forward, backward = op.exchanged or (statistics, statistics)
        total[kind] += 4 * forward * rows * copies
        total["all-reduce"] += 4 * (op.has_row_scale and not with_gradients) * rows
        total["all-reduce"] += 4 * backward * rows * with_gradients
    # The heads are the sequence axis: its parts have weights of their own.
    parts, others = (sequence * features, batch) if len(op.small.weights) > 1 else (features, batch * sequence)
    if others > 1:
        shapes = op.shapes_at(size_of(op))
        # The gradient of branch_scale is a sum of XLA's own, which it adds up along one axis of x after the other.
        times = {"branch_scale": 1 if mode in (MANUAL, UNCHECKED) else (batch > 1) + (sequence > 1)}
        weights = sum(math.prod(shapes[i]) * times.get(op.operands[i], 1) for i in op.all if i >= op.arrays)
        total["all-reduce"] += 4 * weights // parts * with_gradients
    return {kind: size for kind, size in total.items() if size}


def assert_one_device_gives(actual, expected):
    """What devices compute of whole rows, to what one does: but for the order of sums, which are rounded once."""

    def close(a, e):
        assert (a.shape, a.dtype) == (e.shape, e.dtype)
        wide = np.float64(e)
        step = 2.0 ** (-1 - jnp.finfo(a.dtype).nmant) if a.dtype.itemsize == 2 else 1e-5
        np.testing.assert_allclose(np.float64(a), wide, rtol=2 * step, atol=1e-5 * np.abs(wide).max(initial=1))

    jax.tree.map(close, jax.device_get(actual), jax.device_get(expected))


def assert_parts_close(actual, expected):
    """What is computed of parts of rows, to what is computed of whole ones."""

    def close(a, e):
        if a.dtype.itemsize == 1:
            # Statistics that differ by a rounding move few values over the border to the next.
            steps = np.abs(np.asarray(a).view(np.int8).astype(int) - np.asarray(e).view(np.int8))
            assert steps.max() <= 1
            assert np.count_nonzero(steps) <= 1e-3 * steps.size
        else:
            # Relative to the largest: with a gate, large numbers cancel to small ones.
            np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5 * np.abs(e).max())

    jax.tree.map(close, actual, expected)
