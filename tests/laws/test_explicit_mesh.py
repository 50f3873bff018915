"""Law 7 on Explicit meshes, whose shardings are in the types: these are as the formula's, in derivatives too."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ADDS, KINDS, NORMS, assert_near, draw_bias, draw_scale, draw_x
from hlo import collectives, compiled_text
from internals import columns
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh_of, placed
from transformations import loss_of

pytestmark = pytest.mark.jax_version

ROWS, HEADS, COLS = 8, 4, 16
X = draw_x((ROWS, HEADS, COLS))

kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def mesh(devices):
    mesh = mesh_of(devices, AxisType.Explicit)
    with jax.set_mesh(mesh):
        yield mesh


# A weight that is repeated, to have as many rows as the other, is split as x is.
UNLIKE_WEIGHTS = {
    "scale of heads, bias of all": ((HEADS, COLS), (COLS,), None, (P("a", "b"), P(), P())),
    "bias of heads, scale of all": ((COLS,), (HEADS, COLS), None, (P("a", "b"), P(), P())),
    "scale of examples, bias of all": ((ROWS, COLS), (COLS,), (0, 0, None), (P("a"), P("a"), P())),
    "bias of examples, scale of all": ((COLS,), (ROWS, COLS), (0, None, 0), (P("a"), P(), P("a"))),
    "scale of examples, bias of heads": ((ROWS, COLS), (HEADS, COLS), (0, 0, None), (P("a", "b"), P("a"), P())),
}


@pytest.mark.parametrize("name", UNLIKE_WEIGHTS)
@kinds
def test_weights_of_unlike_shapes(mesh, kind, name):
    scale_shape, bias_shape, axes, specs = UNLIKE_WEIGHTS[name]
    args = X, draw_scale(scale_shape), draw_bias(bias_shape)
    gradients = jax.jit(jax.value_and_grad(loss_of(jax.vmap(NORMS[kind], axes) if axes else NORMS[kind]), (0, 1, 2)))
    on_mesh = placed(mesh, args, specs)
    actual = gradients(*on_mesh)
    assert [jax.typeof(g) for g in actual[1]] == [jax.typeof(a) for a in on_mesh]
    assert_near(actual, gradients(*args))


# JAX 0.11 chooses between arrays of one sharding alone: which columns count, or are the label's, is split as x is.
def test_numbers_of_columns(mesh):
    (x,) = placed(mesh, [X], [P("a", None, "b")])
    numbers = jax.eval_shape(partial(columns, SimpleNamespace(axes=(-1,), shards=None)), x)
    assert numbers.sharding.spec == P(None, None, "b")


def padded(kind, x, pad_to):
    return ADDS[kind](x, 2 * x, pad_to=pad_to)[0]


@pytest.mark.parametrize("pad_to", [12, 9])
@kinds
def test_padding_of_features_that_are_split(mesh, kind, pad_to):
    (x,) = placed(mesh, [X], [P("a", None, "b")])
    norm = partial(padded, kind, pad_to=pad_to)

    def sums(x):
        total, _ = lax.scan(lambda total, _: (total + norm(x), None), jnp.zeros_like(norm(x)), length=2)
        return total

    for function in (norm, sums):
        y, y_dot = jax.jit(lambda x: jax.jvp(function, (x,), (x,)))(x)  # noqa: B023
        assert jax.typeof(y) == jax.typeof(y_dot)
        assert_near((y, y_dot), jax.jvp(function, (X,), (X,)))
    assert_near(jax.jit(jax.grad(loss_of(norm)))(x), jax.grad(loss_of(norm))(X))


@kinds
def test_the_tangent_of_a_bias_is_split_as_x_is(mesh, kind):
    (x,), bias = placed(mesh, [X], [P("a", "b")]), draw_bias((COLS,))
    norm = partial(NORMS[kind], x, None)
    jacobian = jax.jit(jax.jacfwd(norm))(bias)
    assert jax.typeof(jacobian).sharding.spec == P("a", "b", None, None)

    def gradient_of_tangent(bias):
        return jax.grad(lambda bias: jnp.sin(jax.jvp(norm, (bias,), (jnp.cos(bias),))[1]).sum())(bias)

    assert "all-gather" not in collectives(compiled_text(gradient_of_tangent, bias))


@kinds
def test_outside_of_jit_no_mesh_need_be_set(devices, kind):
    x = jax.device_put(X, NamedSharding(mesh_of(devices, AxisType.Explicit), P("a", None, "b")))
    y = NORMS[kind](x, draw_scale((COLS,)))
    assert jax.typeof(y).sharding.spec == P("a", None, "b")
    np.testing.assert_allclose(y, NORMS[kind](X, draw_scale((COLS,))), rtol=1e-4, atol=2e-5)
