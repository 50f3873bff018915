"""Law 7 under `jax.experimental.jet`: the terms of a Taylor series are those of the formula."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from cases import ADDS, KINDS, NORMS, assert_close, draw_x
from coverage import over
from jax.sharding import AxisType, PartitionSpec as P
from meshes import mesh_of
from table import EACH

jet = pytest.importorskip("jax.experimental.jet")

pytestmark = pytest.mark.jax_version

ops = over(EACH)
ORDER = 3


def terms_of(function, args):
    """Three terms of the results, for a path through args that bends; jet takes each order at once."""
    series = [[jnp.cos(k * arg) / 4 for k in range(1, ORDER + 1)] for arg in args]
    return jax.jit(lambda args, series: jet.jet(function, args, series))(args, series)


def assert_terms_close(actual, expected):
    """Each order by itself, since later ones are larger; the results themselves are those of the other laws."""
    (y, terms), (e, expected_terms) = actual, expected
    for a, b in zip([y, *terms], [e, *expected_terms], strict=True):
        assert_close(a, b)


@ops
def test_the_terms_of_the_loss(op):
    args = op.draw(op.small)
    # The last operand of quantised norms has no derivative by convention, and the formula would have one.
    moving = [args[i] for i in op.all]

    def loss(function):
        def of_moving(*values):
            return op.loss(op.run(function))(*(dict(enumerate(args)) | dict(zip(op.all, values, strict=True))).values())

        return of_moving

    assert_terms_close(terms_of(loss(op.differentiable), moving), terms_of(loss(op.formula), moving))


# Its primitives are `linear` and `backward`.
@ops
def test_the_terms_of_a_gradient(op):
    args = op.draw(op.small)

    def gradient(function):
        def of_x(x):
            return op.gradient(op.run(function), 0)(x, *args[1:])

        return of_x

    assert_terms_close(terms_of(gradient(op.differentiable), args[:1]), terms_of(gradient(op.formula), args[:1]))


# Formulas that round on the way: x_hat, and a sum of two dtypes.
ROUNDINGS = {
    "x_hat": lambda x, **options: NORMS["rms"](x, multiply_before_cast=False, out_dtype="bfloat16", **options),
    "a sum": lambda x, **options: ADDS["rms"](x, jnp.ones_like(x, "bfloat16"), **options)[1],
}


@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("name", ROUNDINGS)
def test_terms_of_what_a_formula_rounds(name, implementation):
    function, x = partial(ROUNDINGS[name], implementation=implementation), draw_x((4, 16))
    (y, (dot,)), (expected, expected_dot) = jet.jet(function, (x,), ((x,),)), jax.jvp(function, (x,), (x,))
    assert_close(y.astype(jnp.float32), expected.astype(jnp.float32))
    # A tangent is rounded as the result is.
    assert jnp.abs(dot.astype(jnp.float32) - expected_dot.astype(jnp.float32)).max() <= 2**-6


@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_devices_exchange(any_devices, kind, implementation):
    norm = partial(NORMS[kind], axis_name="b", implementation=implementation)
    mesh = mesh_of(any_devices, AxisType.Auto)

    def terms(x):
        return jet.jet(norm, (x,), ([x],))

    split = jax.shard_map(terms, mesh=mesh, in_specs=P("a", "b"), out_specs=P("a", "b"))
    with pytest.raises(NotImplementedError, match=r"axis_name .*jax\.experimental\.jet.*jax\.jvp"):
        jax.eval_shape(split, draw_x((8, 16)))
