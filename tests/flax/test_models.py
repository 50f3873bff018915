"""Models that hold `jaxnorm.nnx` or `jaxnorm.linen` norms: checkpoints, transformations, and what is compiled."""

from functools import partial

import flax.linen
import flax.nnx
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import bits, draw, draw_x
from checkpoints import through_checkpoint
from flax_apis import assert_close, assert_gradients_close, scan_of_remat, scanned
from hlo import compiled_text, count_native_calls
from native import native_calls

import jaxnorm.linen
import jaxnorm.nnx

pytestmark = [pytest.mark.jax_version, pytest.mark.usefixtures("exact_products")]

DIMS = (3, 8)


class NnxModel(flax.nnx.Module):
    """Two RMSNorms and a LayerNorm out of `norms`, with something to learn between them."""

    def __init__(self, norms, rngs):
        features = DIMS[-1]
        self.first = norms.RMSNorm(features, rngs=rngs, scale_metadata={"origin": "first"})
        self.hidden = flax.nnx.Linear(features, features, rngs=rngs)
        self.second = norms.LayerNorm(features, rngs=rngs)
        self.third = norms.RMSNorm(features, rngs=rngs)

    def __call__(self, x):
        return self.third(x + jnp.tanh(self.second(self.hidden(self.first(x)))))


class LinenModel(flax.linen.Module):
    """The same, with the names that Flax gives."""

    norms: object

    @flax.linen.compact
    def __call__(self, x):
        partitioned = flax.linen.with_partitioning(flax.linen.initializers.ones, ("features",))
        h = self.norms.RMSNorm(scale_init=partitioned)(x)
        h = self.norms.LayerNorm()(flax.linen.Dense(DIMS[-1])(h))
        return self.norms.RMSNorm()(x + jnp.tanh(h))


CALLS_OF_THE_GRADIENT = native_calls("rms", fwd=2, bwd=2) | native_calls("layer", fwd=1, bwd=1)


def nnx_model(norms, seed=0):
    definition, state = flax.nnx.split(NnxModel(norms, flax.nnx.Rngs(seed)))
    return (lambda state, x: flax.nnx.merge(definition, state)(x)), state


def linen_model(norms, seed=0):
    model = LinenModel(norms)
    return model.apply, model.init(jax.random.key(seed), draw_x(DIMS))


# Each: what makes a model `(apply, parameters)`, with Flax's norms and with ours.
MODELS = {"nnx": (nnx_model, flax.nnx, jaxnorm.nnx), "linen": (linen_model, flax.linen, jaxnorm.linen)}


@pytest.fixture(params=MODELS.values(), ids=MODELS)
def both(request):
    """The model with Flax's norms and with ours, from one seed."""
    make, flaxs, ours = request.param
    return make(flaxs), make(ours)


def loss(apply):
    return lambda parameters, x: (apply(parameters, x) * draw("dy", DIMS)).sum()


def test_parameters_metadata_and_names_are_flaxs(both):
    (_, flaxs), (_, ours) = both
    assert jax.tree.structure(ours) == jax.tree.structure(flaxs)
    assert bits(ours) == bits(flaxs)


def test_gradient_is_one_call_each_way_per_norm(both):
    _, (apply, parameters) = both
    text = compiled_text(jax.grad(loss(apply)), parameters, draw_x(DIMS))
    assert count_native_calls(text) == CALLS_OF_THE_GRADIENT


DERIVATIVES = {
    "gradients": lambda apply: jax.grad(loss(apply), argnums=(0, 1)),
    "jvp": lambda apply: lambda p, x: jax.jvp(partial(apply, p), (x,), (draw("x_dot", DIMS),)),
    "hessian": lambda apply: jax.hessian(loss(apply)),
}


@pytest.mark.parametrize("derivative", DERIVATIVES.values(), ids=DERIVATIVES)
def test_derivatives_are_flaxs(both, derivative):
    flaxs, ours = (jax.tree.leaves(jax.jit(derivative(apply))(p, draw_x(DIMS))) for apply, p in both)
    assert_gradients_close(ours, flaxs)


@pytest.mark.parametrize("to_ours", [True, False])
@pytest.mark.parametrize("api", MODELS)
def test_orbax_checkpoint_moves_across(api, to_ours, tmp_path):
    make, *norms = MODELS[api]
    written, read = norms if to_ours else reversed(norms)
    _, saved = make(written, seed=1)
    _, target = make(read)
    restored = through_checkpoint(tmp_path, saved, target)
    assert bits(restored) == bits(saved)
    assert jax.tree.structure(restored) == jax.tree.structure(target)


@pytest.mark.parametrize("to_ours", [True, False])
def test_serialized_linen_checkpoint_moves_across(to_ours):
    norms = (flax.linen, jaxnorm.linen)
    written, read = norms if to_ours else reversed(norms)
    _, saved = linen_model(written, seed=1)
    _, target = linen_model(read)
    assert bits(flax.serialization.from_bytes(target, flax.serialization.to_bytes(saved))) == bits(saved)


def of_nnx_jit(norms):
    step = flax.nnx.jit(flax.nnx.grad(lambda model, x: (model(x) * draw("dy", DIMS)).sum()))
    return step(NnxModel(norms, flax.nnx.Rngs(0)), draw_x(DIMS))


def of_nnx_scan_of_remat(norms):
    create = flax.nnx.split_rngs(splits=3)(flax.nnx.vmap(lambda rngs: NnxModel(norms, rngs)))
    call = flax.nnx.remat(lambda x, model: model(x))
    loss = lambda models, x: (scanned(x, models, call) * draw("dy", DIMS)).sum()  # noqa: E731
    return flax.nnx.grad(loss)(create(flax.nnx.Rngs(0)), draw_x(DIMS))


def of_linen_scan_of_remat(norms):
    layer = scan_of_remat(lambda x: norms.LayerNorm()(jnp.tanh(flax.linen.Dense(DIMS[-1])(norms.RMSNorm()(x)))))
    variables = layer.init(jax.random.key(0), draw_x(DIMS), None)
    return jax.grad(lambda v: (layer.apply(v, draw_x(DIMS), None)[0] * draw("dy", DIMS)).sum())(variables)


GRADIENTS = [("nnx", of_nnx_jit), ("nnx", of_nnx_scan_of_remat), ("linen", of_linen_scan_of_remat)]


@pytest.mark.parametrize(("api", "gradient"), GRADIENTS)
def test_gradients_by_flaxs_transformations_are_flaxs(api, gradient):
    _, flaxs, ours = MODELS[api]
    assert_gradients_close(gradient(ours), gradient(flaxs))


# A call with and one without a kernel: the second goes through Flax's method of the same module.
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32])
def test_linen_captures_each_call_once(dtype):
    norm = jaxnorm.linen.LayerNorm()
    x = draw_x(DIMS).astype(dtype)
    _, captured = norm.apply(norm.init(jax.random.key(0), x), x, capture_intermediates=True)
    assert len(captured["intermediates"]["__call__"]) == 1


@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
def test_nnx_promote_dtype_of_ones_own(name):
    def promote(operands, dtype):
        return tuple(None if operand is None else operand.astype(jnp.bfloat16) for operand in operands)

    flaxs, ours = (
        getattr(norms, name)(DIMS[-1], promote_dtype=promote, rngs=flax.nnx.Rngs(0))(draw_x(DIMS))
        for norms in (flax.nnx, jaxnorm.nnx)
    )
    assert_close(ours, flaxs)


@pytest.mark.parametrize("fast", [True, False])
def test_a_mean_far_from_zero_costs_no_accuracy(fast):
    """Law 2, which holds whatever `use_fast_variance` asks Flax for."""
    norm = jaxnorm.nnx.LayerNorm(4096, use_fast_variance=fast, rngs=flax.nnx.Rngs(0))
    np.testing.assert_allclose(norm(draw("far", (8, 4096), mean=1e4)).std(-1), 1, rtol=1e-3)
