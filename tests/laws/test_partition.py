"""Norms that are split over devices, by XLA or a `shard_map`: nothing is gathered, and what is exchanged is counted."""

import itertools
import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import bits, draw_bias, draw_residual, draw_scale, draw_x
from hlo import collectives, count_native_calls
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_sharding import mesh_of, mesh_of_three

import jaxnorm
from jaxnorm import Quantization

pytestmark = pytest.mark.several

DIMS = (8, 4, 256)
ROWS, COLS = 8 * 4, 256


class Op(NamedTuple):
    function: Callable  # of (x, second, scale, bias), of which it takes what it wants
    differentiable: Callable | None = None  # where it is another
    statistics: int = 1  # f32 numbers a row that devices with parts of it exchange forward
    backward: int = 1  # and backward
    weights: int = 1  # how many weights have a gradient
    gathers: bool = False  # whether statistics are gathered, not added
    amax: bool = False  # whether a maximum is exchanged, which no gradient needs
    lead: tuple[int, ...] = ()


def quantized(quantization, **given):
    """The values, with the scales that are computed; differentiated, what carries their gradient.

    Not dequantised in the same program: XLA on a GPU may leave the rounding out then.
    """

    def norm(x, scale, **more):
        return jaxnorm.rms_norm_quantized(x, scale, quantization=quantization, straight_through=True, **given, **more)

    def forward(x, second, scale, bias, **more):
        q = norm(x, scale, **more)
        return [q.values] if given else [q.values, q.scales]

    return {"function": forward, "differentiable": lambda x, r, s, b, **more: norm(x, s, **more).carrier}


E4M3 = jnp.float8_e4m3fn
OPS = {
    "rms": Op(lambda x, r, s, b, **given: jaxnorm.rms_norm(x, s, **given)),
    "rms with bias": Op(lambda x, r, s, b, **given: jaxnorm.rms_norm(x, s, b, **given), weights=2),
    "layer": Op(
        lambda x, r, s, b, **given: jaxnorm.layer_norm(x, s, b, **given),
        statistics=2,
        backward=2,
        weights=2,
        gathers=True,
    ),
    "add rms": Op(lambda x, r, s, b, **given: jaxnorm.add_rms_norm(x, r, s, **given)),
    "add layer": Op(
        lambda x, r, s, b, **given: jaxnorm.add_layer_norm(x, r, s, b, **given),
        statistics=2,
        backward=2,
        weights=2,
        gathers=True,
    ),
    "heads": Op(lambda x, r, s, b, **given: jaxnorm.rms_norm(x, s, **given), lead=(4,)),
    "gate first": Op(lambda x, g, s, b, **given: jaxnorm.gated_rms_norm(x, g, s, gate_first=True, **given)),
    "gate last": Op(lambda x, g, s, b, **given: jaxnorm.gated_rms_norm(x, g, s, gate_first=False, **given)),
    "gated groups": Op(
        lambda x, g, s, b, **given: jaxnorm.gated_rms_norm(x, g, s, gate_first=True, group_size=64, **given),
        statistics=0,
        backward=0,
    ),
    "token": Op(**quantized(Quantization(E4M3)), amax=True),
    "group": Op(**quantized(Quantization(jnp.int8, "group", group_size=64))),
    "tensor": Op(**quantized(Quantization(E4M3, "tensor"), static_scale=jnp.float32(0.01))),
}
ops = pytest.mark.parametrize("name", OPS)
# "partly manual": a `shard_map` over a third axis, along which all is alike, leaves the two of a spec to XLA.
by_xla = pytest.mark.parametrize("mode", ["auto", "explicit", "partly manual"])
feature_specs = pytest.mark.parametrize("spec", [P(None, None, "b"), P("a", None, "b")], ids=str)
ROWS_OVER = [P("a"), P(("b", "a")), P("a", "b"), P(None, "b")]
# Without check_vma, JAX takes gradients for different along axes that a shard_map does not name, and adds them up.
row_modes = pytest.mark.parametrize(
    ("mode", "spec"),
    [
        *itertools.product(["auto", "explicit", "manual", "partly manual"], ROWS_OVER),
        *(("manual, unchecked", spec) for spec in ROWS_OVER[1:3]),
    ],
    ids=str,
)


def place(op, mesh, spec):
    """(x, second, scale, bias) with rows and features as spec says, and copies of weights where they need be."""
    spec = P(*spec, *(None for _ in range(3 - len(spec))))
    features = (*op.lead, COLS)
    of_weights = P(*spec[3 - len(features) :])
    x, second = draw_x(DIMS), draw_residual(DIMS)
    scale, bias = draw_scale(features), draw_bias(features)
    sharded = [(x, spec), (second, spec), (scale, of_weights), (bias, of_weights)]
    return [jax.device_put(array, NamedSharding(mesh, spec)) for array, spec in sharded]


def gradients(op, transform=lambda function: function, **given):
    """Those of (x, second, scale, bias), for cotangents that do not depend on the result."""

    def of_args(x, *others):
        function = transform(partial(op.differentiable or op.function, **given))
        y, pullback = jax.vjp(function, x, *others)
        return pullback(jax.tree.map(lambda _: jnp.cos(x), y))

    return of_args


def mesh_for(mode, devices):
    if mode == "partly manual":
        return mesh_of_three(devices)
    return mesh_of(devices, AxisType.Explicit if mode == "explicit" else AxisType.Auto)


def split_by(mode, op, mesh, spec):
    """A function of (x, ...) as the mode has it: for XLA as it is, for a `shard_map` of the parts of each device."""
    if mode == "partly manual":
        return partial(jax.shard_map, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"c"})
    if not mode.startswith("manual"):
        return lambda function: function
    arrays = [arg.sharding.spec for arg in place(op, mesh, spec)]
    return partial(jax.shard_map, mesh=mesh, in_specs=tuple(arrays), out_specs=spec, check_vma=mode == "manual")


def exchanged(op, mesh, spec, *, with_gradients):
    """The bytes of each kind of collective on one device, as `collectives` gives them."""
    along = [axes if isinstance(axes, tuple) else (axes,) for axes in (*spec, None, None)][:3]
    batch, sequence, features = (math.prod(mesh.shape[axis] for axis in axes if axis) for axes in along)
    rows, cols = ROWS // batch // sequence, COLS // features
    total = Counter()
    if features > 1:
        kind, copies = ("all-gather", features) if op.gathers else ("all-reduce", 1)
        total[kind] += 4 * op.statistics * rows * copies
        total["all-reduce"] += 4 * (op.amax and not with_gradients) * rows
        total["all-reduce"] += 4 * op.backward * rows * with_gradients
    # The heads are the sequence axis: its parts have weights of their own.
    heads, others = (op.lead[0] // sequence, batch) if op.lead else (1, batch * sequence)
    if others > 1:
        total["all-reduce"] += 4 * op.weights * heads * cols * with_gradients
    return {kind: size for kind, size in total.items() if size}


def run(function, on_one_device, args, mesh):
    """What function gives on the mesh, what the other gives on one device, and the program on the mesh."""
    with jax.set_mesh(mesh):
        compiled = jax.jit(function).lower(*args).compile()
        actual = compiled(*args)
    return actual, jax.jit(on_one_device)(*(jnp.asarray(np.asarray(arg)) for arg in args)), compiled.as_text()


def assert_close(actual, expected):
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


@row_modes
@ops
def test_rows_are_computed_where_they_are(devices, name, mode, spec):
    op, mesh = OPS[name], mesh_for(mode, devices)
    function = split_by(mode, op, mesh, spec)(op.function)
    actual, expected, text = run(function, op.function, place(op, mesh, spec), mesh)
    assert bits(actual) == bits(expected)
    assert collectives(text) == {}
    assert list(count_native_calls(text).values()) == [1]


@row_modes
@ops
def test_gradients_of_rows_add_up_weights(devices, name, mode, spec):
    op, mesh = OPS[name], mesh_for(mode, devices)
    function = gradients(op, split_by(mode, op, mesh, spec))
    actual, expected, text = run(function, gradients(op), place(op, mesh, spec), mesh)
    assert_close(actual, expected)
    assert collectives(text) == exchanged(op, mesh, spec, with_gradients=True)
    assert list(count_native_calls(text).values()) == [1, 1]


@feature_specs
@by_xla
@ops
def test_parts_of_rows_exchange_their_statistics(devices, name, mode, spec):
    op, mesh = OPS[name], mesh_for(mode, devices)
    function = split_by(mode, op, mesh, spec)(op.function)
    actual, expected, text = run(function, op.function, place(op, mesh, spec), mesh)
    assert_close(actual, expected)
    assert collectives(text) == exchanged(op, mesh, spec, with_gradients=False)


@feature_specs
@by_xla
@ops
def test_gradients_of_parts_of_rows(devices, name, mode, spec):
    op, mesh = OPS[name], mesh_for(mode, devices)
    function = gradients(op, split_by(mode, op, mesh, spec))
    actual, expected, text = run(function, gradients(op), place(op, mesh, spec), mesh)
    assert_close(actual, expected)
    assert collectives(text) == exchanged(op, mesh, spec, with_gradients=True)
