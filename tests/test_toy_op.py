"""An op that one file adds, out of the package's tree: everything that JAX does with a formula works with it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import bits, draw, draw_x
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from toy.l2_norm import NATIVE, l2_norm
from toys import ARE_BUILT, load

import jaxnorm

X = draw_x((8, 3, 40))
pytestmark = [pytest.mark.jax_version, pytest.mark.xdist_group("toy op")]


@pytest.fixture(scope="module", autouse=True)
def kernels():
    if ARE_BUILT:
        load()


def formula(x, epsilon=1e-6):
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + epsilon)).astype(x.dtype)


def loss_of(norm):
    return lambda x: jnp.sin(norm(x).astype(jnp.float32)).sum()


def tangents_of(function):
    return lambda x: jax.jvp(function, (x,), (jnp.cos(x),))


def scanned(norm):
    return lambda x: lax.scan(lambda carry, _: (carry + norm(carry), carry.mean()), x, None, length=3)


def shard_mapped(norm):
    mesh = jax.make_mesh((len(jax.devices()),), ("rows",), (AxisType.Auto,))
    return jax.shard_map(norm, mesh=mesh, in_specs=P("rows"), out_specs=P("rows"))


def checkpointed(policy):
    return lambda norm: jax.grad(jax.checkpoint(loss_of(norm), policy=policy))


TRANSFORMATIONS = {
    "call": lambda norm: norm,
    "grad": lambda norm: jax.grad(loss_of(norm)),
    "jvp": tangents_of,
    "linearize": lambda norm: lambda x: jax.linearize(norm, x)[1](jnp.cos(x)),
    "jacrev": lambda norm: jax.jacrev(lambda x: norm(x[0, :2])),
    "jacfwd": lambda norm: jax.jacfwd(lambda x: norm(x[0, :2])),
    "hessian": lambda norm: jax.hessian(lambda x: loss_of(norm)(x[0, :2])),
    "grad of grad": lambda norm: jax.grad(loss_of(jax.grad(loss_of(norm)))),
    "grad of jvp": lambda norm: jax.grad(loss_of(lambda x: tangents_of(norm)(x)[1])),
    "vmap": lambda norm: jax.vmap(norm, 1, 1),
    "vmap of grad": lambda norm: jax.vmap(jax.grad(loss_of(norm))),
    "grad of vmap": lambda norm: jax.grad(loss_of(jax.vmap(norm, 1))),
    "scan": scanned,
    "grad of scan": lambda norm: jax.grad(lambda x: scanned(norm)(x)[0].sum()),
    "checkpoint": checkpointed(None),
    "checkpoint that saves norms": checkpointed(jaxnorm.checkpoint_policies.save_norms),
    "checkpoint that recomputes norms": checkpointed(jaxnorm.checkpoint_policies.recompute_norms),
    "shard_map": shard_mapped,
    "grad of shard_map": lambda norm: jax.grad(loss_of(shard_mapped(norm))),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_transformations(name):
    transform = TRANSFORMATIONS[name]
    ours, theirs = (jax.tree.leaves(jax.jit(transform(norm))(X)) for norm in (l2_norm, formula))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_formula_is_what_runs_by_name(dtype):
    x = X.astype(dtype)
    assert bits(jax.jit(partial(l2_norm, implementation="jnp"))(x)) == bits(jax.jit(formula)(x))


@pytest.mark.several
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("spec", [P("i"), P(None, None, "i")], ids=str)
def test_sharded(devices, spec, axis_type):
    mesh = jax.make_mesh((len(devices),), ("i",), (axis_type,), devices=devices)
    x = jax.device_put(X, NamedSharding(mesh, spec))
    gradient = jax.jit(jax.grad(loss_of(l2_norm)))(x)
    assert gradient.sharding.is_equivalent_to(x.sharding, x.ndim)
    np.testing.assert_allclose(gradient, jax.grad(loss_of(formula))(X), rtol=1e-4, atol=1e-6)


def test_between_forward_and_backward_only_x_and_a_number_for_each_row_live():
    x = draw("x", (8, 3, 40), "bfloat16")
    pullback = jax.eval_shape(lambda x: jax.vjp(l2_norm, x)[1], x)
    kept = sorted((leaf.size, leaf.dtype.name) for leaf in jax.tree.leaves(pullback) if leaf.size > 1)
    assert kept == [(8 * 3, "float32"), (8 * 3 * 40, "bfloat16")]


def test_native_by_name_where_there_is_no_kernel():
    with pytest.raises(RuntimeError, match=r"^l2_norm: .*native.*has length 0.*implementation=None"):
        l2_norm(X[..., :0], implementation="native")


def test_errors_are_those_of_every_op():
    with pytest.raises(TypeError, match=r"^l2_norm: x must have a floating-point dtype"):
        l2_norm(jnp.arange(4))


# Rows alone and together, short ones and long ones, with and without a rest beside whole vectors.
@pytest.mark.toys
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (2, 5, 128), (3, 513), (2, 20_000)], ids=str)
def test_the_kernels_at_each_length(shape, dtype):
    x = draw("x", shape, dtype)
    (y, dx), (expected, dx_expected) = (
        jax.tree.map(lambda a: np.asarray(a, np.float64), (norm(x), jax.grad(loss_of(norm))(x)))
        for norm in (partial(l2_norm, implementation="native"), formula)
    )
    error = 4 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(y, expected, rtol=error, atol=1e-7)
    assert np.linalg.norm(dx - dx_expected) <= error * np.linalg.norm(dx_expected) + 1e-6


@pytest.mark.toys
def test_a_gradient_is_one_native_call_each_way():
    text = jax.jit(jax.grad(loss_of(partial(l2_norm, implementation="native")))).lower(X).compile().as_text()
    assert [text.count(f'custom_call_target="{target}"') for target in NATIVE.targets] == [1, 1]
