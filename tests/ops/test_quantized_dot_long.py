"""Products of integers that are longer than int32 holds the sums of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from coverage import cover
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from meshes import mesh_of, placed

from jaxnorm import Quantized, quantized_dot

# Columns of which int32 holds every sum of products, -128 times -128 (or -8) included; one more, and several parts.
LONGEST = {"int8": 2**17 - 1, "int4": 2**21 - 1}
LONG = [
    ("int8", LONGEST["int8"]),
    *(("int8", cols) for cols in (2**17, 133_144, 133_145, 400_003)),
    ("int4", LONGEST["int4"]),
    ("int4", 2**21),
]


def long_operands(cols, weight_dtype, dims=(2,), outputs=3):
    """Integers of which some rows have the largest products of either sign throughout, the others any."""
    random = np.random.default_rng(cols)
    x = random.integers(-128, 128, (*dims, cols)).astype(np.int8)
    least = int(jnp.iinfo(weight_dtype).min)
    weights = random.integers(least, -least, (outputs, cols)).astype(np.int8)
    x[..., 0, :], weights[0], weights[1] = -128, least, -least - 1
    return x, weights


def as_quantized(x, weights, weight_dtype="int8"):
    """With scales that round nothing."""
    scales = [jnp.full((*values.shape[:-1], 1), scale) for values, scale in ((x, 0.5), (weights, 2.0))]
    return Quantized(jnp.asarray(x), scales[0]), Quantized(jnp.asarray(weights).astype(weight_dtype), scales[1])


@cover(long=LONG, dims=[(2,), (1,), (2, 2)], how=["jit", "vmap over x", "vmap over both"])
def test_sums_of_integers_that_int32_does_not_hold(long, dims, how):
    weight_dtype, cols = long
    x, weights = long_operands(cols, weight_dtype, dims)
    args = as_quantized(x, weights, weight_dtype)

    def product(x, weights):
        return quantized_dot(x, weights, out_dtype="float32")

    if how == "vmap over x":
        y = jax.jit(jax.vmap(product, (0, None)))(*args)
    elif how == "vmap over both":
        y = jax.jit(jax.vmap(product, (None, 0)))(args[0], jax.tree.map(lambda a: a[:, None], args[1]))
        y = jnp.moveaxis(y[..., 0], 0, -1)
    else:
        y = jax.jit(product)(*args)
    np.testing.assert_array_equal(y, np.float32(x.astype(np.int64) @ weights.astype(np.int64).T))


def test_a_row_alone_of_more_columns_than_int32_holds_sums_of():
    x, weights = long_operands(LONGEST["int8"] + 1, "int8")
    y = quantized_dot(*as_quantized(x[0], weights), out_dtype="float32")
    np.testing.assert_array_equal(y, np.float32(x[0].astype(np.int64) @ weights.astype(np.int64).T))


@pytest.mark.parametrize("beyond", [False, True])
def test_a_sum_that_int32_holds_is_one_product(beyond):
    args = as_quantized(*(np.ones((8, LONGEST["int8"] + beyond), np.int8) for _ in range(2)))
    assert jax.jit(quantized_dot).lower(*args).as_text().count("dot_general") == 1 + beyond


def test_the_gradient_of_a_long_sum():
    x, weights = long_operands(LONGEST["int8"] + 1, "int8")
    x, weights = as_quantized(x, weights)

    def loss(carrier):
        return (quantized_dot(Quantized(x.values, x.scales, carrier), weights, out_dtype="float32") * 3).sum()

    dx = jax.jit(jax.grad(loss))(jnp.zeros(x.values.shape))
    np.testing.assert_array_equal(
        dx, np.broadcast_to(3 * 2.0 * np.asarray(weights.values, np.float64).sum(0), dx.shape)
    )


# Each device has a part of every sum.
@pytest.mark.needs("several")
def test_a_long_sum_over_devices():
    x, weights = long_operands(2**18, "int8")
    mesh, (x8, w8) = mesh_of(jax.devices(), AxisType.Auto), as_quantized(x, weights)
    values = placed(mesh, (x8.values, w8.values), (P(None, "b"), P(None, "b")))
    with jax.set_mesh(mesh):
        args = [Quantized(v, of.scales) for v, of in zip(values, (x8, w8), strict=True)]
        y = jax.jit(lambda *args: quantized_dot(*args, out_dtype="float32"))(*args)
    np.testing.assert_array_equal(y, np.float32(x.astype(np.int64) @ weights.astype(np.int64).T))
