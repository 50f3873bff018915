"""`quantized_dot` in programs that XLA splits: each device makes its part."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from cases import draw
from coverage import cover
from internals import quantized_dot
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh_of, mesh_of_three
from split_products import assert_near
from split_products import parts as parts

import jaxnorm

pytestmark = [pytest.mark.jax_version, pytest.mark.needs("several")]

ROWS, DEPTH, OUTPUTS = (8, 16), 128, 64
# How x, weights and the result are split, and then the parts of x and weights that a device multiplies. What is summed
# stays as it is split in both, and then the result as it is split, x, and weights.
SPLIT = {
    "rows": (P("a"), P(), P("a"), P("a"), P()),
    "outputs": (P(), P("b"), P(None, None, "b"), P(), P("b")),
    "rows and outputs": (P("a"), P("b"), P("a", None, "b"), P("a"), P("b")),
    "what is summed": (P(None, None, "b"), P(None, "b"), P(), P(None, None, "b"), P(None, "b")),
    "what is summed, of x": (P(None, None, "b"), P(), P(), P(None, None, "b"), P(None, "b")),
    "what is summed, of weights": (P(), P(None, "b"), P(), P(None, None, "b"), P(None, "b")),
    "rows and what is summed": (P("a", None, "b"), P(None, "b"), P("a"), P("a", None, "b"), P(None, "b")),
    "rows, and weights over their devices": (P("a"), P(None, "a"), P("a"), P("a"), P()),
    "both axes, for rows and for outputs": (P("a", "b"), P(("a", "b")), P("a", "b"), P("a", "b"), P()),
    "what is summed, of weights over rows' devices too": (
        P("a", None, "b"),
        P(None, ("b", "a")),
        P("a"),
        P("a", None, "b"),
        P(None, "b"),
    ),
    "rows over the outputs' devices": (P("a", "b"), P("b"), P("a", None, "b"), P("a"), P("b")),
    "what is summed, of the result over its devices": (
        P("a", None, "b"),
        P(None, "b"),
        P("a", "b"),
        P("a", None, "b"),
        P(None, "b"),
    ),
    "the result alone": (P(), P(), P("a", None, "b"), P("a"), P("b")),
}


def operands(dtype):
    """x and weights as they are rounded, and a bias."""
    x, weights, bias = draw("x", (*ROWS, DEPTH)), draw("weights", (OUTPUTS, DEPTH)), draw("bias", (OUTPUTS,), dtype)
    to = jaxnorm.Quantization(jnp.float8_e4m3fn)
    return jaxnorm.quantize(x, to), jaxnorm.quantize(weights, to), bias


def product(x, weights, bias):
    return jaxnorm.quantized_dot(x, weights, bias=bias, out_dtype=bias.dtype)


def split_operands(mesh, of_x, of_weights, args):
    columns = P(*[*of_weights][:1])
    of_x, of_weights = (jaxnorm.Quantized(*specs) for specs in ((of_x, P(*[*of_x][:2])), (of_weights, columns)))
    return jax.device_put(args, jax.tree.map(partial(NamedSharding, mesh), (of_x, of_weights, columns)))


def part(mesh, shape, spec):
    """A device's part of a shape."""
    names = [jax.tree.leaves(axes) for axes in (*spec, *[None] * len(shape))]
    return tuple(n // math.prod(mesh.shape[name] for name in of) for n, of in zip(shape, names, strict=False))


@cover(split=SPLIT, dtype=["bfloat16", "float32"])
def test_each_device_makes_its_part(split, dtype, parts):
    of_x, of_weights, of_y, *multiplied = split
    mesh, args = mesh_of(jax.devices(), AxisType.Auto), operands(dtype)
    function = jax.jit(product, out_shardings=NamedSharding(mesh, of_y))
    y = function(*split_operands(mesh, of_x, of_weights, args))
    shapes = (*ROWS, DEPTH), (OUTPUTS, DEPTH)
    assert parts == [tuple(map(partial(part, mesh), shapes, multiplied))]
    assert_near(y, product(*args), dtype)


# In the part of a mesh that a `shard_map` leaves to XLA, too.
def test_within_a_shard_map(parts):
    mesh, args = mesh_of_three(jax.devices()), operands("float32")
    of_x, of_weights = P("a", None, "b"), P(None, "b")
    function = jax.shard_map(product, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"c"})
    y = jax.jit(function)(*split_operands(mesh, of_x, of_weights, args))
    assert parts == [(part(mesh, (*ROWS, DEPTH), of_x), part(mesh, (OUTPUTS, DEPTH), of_weights))]
    assert_near(y, product(*args), "float32")


def test_a_part_that_no_kernel_takes(parts, monkeypatch):
    monkeypatch.setattr(
        quantized_dot, "_why_not_here", lambda _, spec, args, **__: "a part" if args.x.shape[-1] < DEPTH else None
    )
    mesh, args = mesh_of(jax.devices(), AxisType.Auto), operands("float32")
    y = jax.jit(product)(*split_operands(mesh, P(None, None, "b"), P(None, "b"), args))
    assert not parts
    assert_near(y, product(*args), "float32")


# What devices cannot split evenly is on each of them if it is summed; of rows and outputs the last part is shorter.
def test_uneven_parts(parts):
    mesh = mesh_of(jax.devices(), AxisType.Auto)
    shapes = (3 * mesh.shape["a"] - 1, 2 * 33), (65, 2 * 33)
    x, weights = (jaxnorm.quantize(draw("x", shape), jaxnorm.Quantization(jnp.float8_e4m3fn)) for shape in shapes)

    def split(x, weights):
        x, weights = (
            jaxnorm.Quantized(
                *(jax.lax.with_sharding_constraint(a, NamedSharding(mesh, spec)) for a in (of.values, of.scales))
            )
            for of, spec in ((x, P("a")), (weights, P("b")))
        )
        return jaxnorm.quantized_dot(x, weights, out_dtype="float32")

    y = jax.jit(split)(x, weights)
    of_outputs = -(-65 // mesh.shape["b"])
    assert parts == [((3 if mesh.shape["a"] > 1 else 2, 66), (of_outputs, 66))]
    assert_near(y, jaxnorm.quantized_dot(x, weights, out_dtype="float32"), "float32")
