"""`GatedActivation` of both Flax APIs: the function's results, and no parameters."""

import jax
import pytest
from cases import bits, draw_gate, draw_up, draw_x
from flax import nnx

import jaxnorm
import jaxnorm.linen
import jaxnorm.nnx

pytestmark = pytest.mark.jax_version

DIMS = (4, 6, 60)
PAIR = (draw_gate(DIMS), draw_up(DIMS))
CALLS = {
    "by default": (draw_x(DIMS), {}),
    "stacked": (draw_x((4, 2, 60)), {"axis": -2, "activation": "gelu"}),
    "a pair": (PAIR, {"activation": jax.nn.sigmoid, "implementation": "jnp"}),
}


@pytest.mark.parametrize("name", CALLS)
def test_linen(name):
    x, fields = CALLS[name]
    module = jaxnorm.linen.GatedActivation(**fields)
    assert module.init(jax.random.key(0), x) == {}
    assert bits(module.apply({}, x)) == bits(jaxnorm.gated_activation(x, **fields))


@pytest.mark.parametrize("name", CALLS)
def test_nnx(name):
    x, options = CALLS[name]
    module = jaxnorm.nnx.GatedActivation(**options)
    assert not jax.tree.leaves(nnx.state(module))
    assert bits(nnx.jit(lambda m, x: m(x))(module, x)) == bits(jax.jit(lambda x: module(x))(x))
    assert bits(module(x)) == bits(jaxnorm.gated_activation(x, **options))
