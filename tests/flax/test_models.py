"""Models that hold `jaxnorm.nnx` or `jaxnorm.linen` norms: parameters, checkpoints, transformations."""

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import pytest
from cases import bits, draw, draw_x
from checkpoints import through_checkpoint
from flax_apis import assert_gradients_close, scan_of_remat, scanned, stacked

import jaxnorm

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


def nnx_state(norms, seed=0):
    return flax.nnx.state(NnxModel(norms, flax.nnx.Rngs(seed)))


def linen_variables(norms, seed=0):
    return LinenModel(norms).init(jax.random.key(seed), draw_x(DIMS))


# What makes a model's parameters, with Flax's norms and with ours.
MODELS = {"nnx": (nnx_state, flax.nnx, jaxnorm.nnx), "linen": (linen_variables, flax.linen, jaxnorm.linen)}


@pytest.mark.parametrize("api", MODELS)
def test_parameters_metadata_and_names_are_flaxs(api):
    make, *norms = MODELS[api]
    flaxs, ours = map(make, norms)
    assert jax.tree.structure(ours) == jax.tree.structure(flaxs)
    assert bits(ours) == bits(flaxs)


@pytest.mark.parametrize("to_ours", [True, False])
@pytest.mark.parametrize("api", MODELS)
def test_orbax_checkpoint_moves_across(api, to_ours, tmp_path):
    make, *norms = MODELS[api]
    written, read = norms if to_ours else reversed(norms)
    saved, target = make(written, seed=1), make(read)
    restored = through_checkpoint(tmp_path, saved, target)
    assert bits(restored) == bits(saved)
    assert jax.tree.structure(restored) == jax.tree.structure(target)


def of_nnx_jit(norms):
    step = flax.nnx.jit(flax.nnx.grad(lambda model, x: (model(x) * draw("dy", DIMS)).sum()))
    return step(NnxModel(norms, flax.nnx.Rngs(0)), draw_x(DIMS))


def of_nnx_scan_of_remat(norms):
    call = flax.nnx.remat(lambda x, model: model(x))
    loss = lambda models, x: (scanned(x, models, call) * draw("dy", DIMS)).sum()  # noqa: E731
    return flax.nnx.grad(loss)(stacked(lambda rngs: NnxModel(norms, rngs)), draw_x(DIMS))


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
