"""`float8_linear` in programs that XLA splits: each device makes its part of the products."""

import math

import jax
import jax.numpy as jnp
import pytest
from cases import draw
from coverage import cover
from hlo import collectives, compiled_text
from internals import PRODUCTS_BY_KERNELS, float8_op
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from meshes import mesh_of, placed
from split_products import assert_near
from split_products import parts as parts

import jaxnorm

pytestmark = [pytest.mark.jax_version, pytest.mark.needs("several")]

ROWS, DEPTH, OUTPUTS = (8, 16), 128, 64


@pytest.fixture(autouse=True)
def by_kernels(parts, monkeypatch):
    monkeypatch.setattr(float8_op.formula, "BY_XLA", PRODUCTS_BY_KERNELS)


def step(x, kernel, bias, dy):
    y, pull_back = jax.vjp(lambda x, kernel, bias: jaxnorm.float8_linear(x, kernel, bias=bias), x, kernel, bias)
    return y, *pull_back(dy)


# The shardings of x, the kernel, bias and dy.
TOKENS = math.prod(ROWS)
LAYERS = {
    "rows": (P("a"), P(), P(), P("a")),
    "outputs": (P(), P(None, "b"), P("b"), P(None, None, "b")),
    "rows and outputs": (P("a"), P(None, "b"), P("b"), P("a", None, "b")),
    "what is summed": (P(None, None, "b"), P("b"), P(), P()),
    "rows and what is summed": (P("a", None, "b"), P("b"), P(), P("a")),
    "the kernel over the rows' devices": (P("a"), P("a"), P(), P("a")),
}
# Over an Explicit mesh the products would want another x and dy.
SEQUENCES = {
    "sequence and outputs": (P("a", "b"), P("a", "b"), P("b"), P("a", None, "b")),
    "sequence and what is summed": (P("a", None, "b"), P(("b", "a")), P(), P("a", "b")),
}


def layer_operands(dtype):
    x, kernel, bias = (
        draw("x", (*ROWS, DEPTH), dtype),
        draw("kernel", (DEPTH, OUTPUTS)),
        draw("bias", (OUTPUTS,), dtype),
    )
    return x, kernel, bias, draw("dy", (*ROWS, OUTPUTS), dtype)


def check_layer(mesh, split, dtype, parts):
    """To that of whole arrays on each device, where XLA rounds too: its scales are not a GPU's kernels' to the bit."""
    args = layer_operands(dtype)
    with jax.set_mesh(mesh):
        results = jax.jit(step)(*placed(mesh, args, split))
        assert len(parts) == 3
        whole = jax.jit(step)(*placed(mesh, args, [P()] * 4))
    for actual, expected in zip(results, whole, strict=True):
        assert_near(actual, expected, "float32" if actual.dtype == jnp.float32 else dtype)


@cover(split=LAYERS, dtype=["bfloat16", "float32"], axis_type=[AxisType.Auto, AxisType.Explicit])
def test_a_layer(split, dtype, axis_type, parts):
    check_layer(mesh_of(jax.devices(), axis_type), split, dtype, parts)


@cover(split=SEQUENCES, dtype=["bfloat16", "float32"])
def test_a_layer_whose_sequence_is_split(split, dtype, parts):
    check_layer(mesh_of(jax.devices(), AxisType.Auto), split, dtype, parts)


# What is added up has the dtype of the result: y and dx x's, dw the kernel's. XLA for CPUs adds up bfloat16 in float32.
NARROW = 4 if jax.default_backend() == "cpu" else 2
EXCHANGED = {
    "outputs": NARROW * TOKENS * DEPTH + 4 * TOKENS,
    "what is summed": NARROW * TOKENS * OUTPUTS + 4 * (TOKENS + OUTPUTS),
    "rows": 4 * (DEPTH * OUTPUTS + OUTPUTS) + 4 * OUTPUTS,
}


@pytest.mark.parametrize("split", EXCHANGED)
def test_what_is_added_up(split, parts):
    mesh = mesh_of(jax.devices(), AxisType.Auto)
    text = compiled_text(step, *placed(mesh, layer_operands("bfloat16"), LAYERS[split]))
    # Of two devices the first axis has but one.
    along = mesh.shape["a" if split == "rows" else "b"]
    assert collectives(text) == ({"all-reduce": EXCHANGED[split]} if along > 1 else {})
