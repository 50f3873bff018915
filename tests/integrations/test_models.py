"""Models that hold layers of `jaxnorm.nnx` or `jaxnorm.linen`: parameters, checkpoints, transformations."""

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import pytest
from cases import bits, draw, draw_x
from flax_apis import assert_gradients_close, scan_of_remat, scanned, stacked, through_checkpoint

import jaxnorm

pytestmark = [pytest.mark.jax_version, pytest.mark.usefixtures("exact_products")]

DIMS = (3, 8)


class NnxModel(flax.nnx.Module):
    """An Embed, two RMSNorms and a LayerNorm out of `norms`, with something to learn between them."""

    def __init__(self, norms, rngs):
        features = DIMS[-1]
        self.first = norms.RMSNorm(features, rngs=rngs, scale_metadata={"origin": "first"})
        self.hidden = flax.nnx.Linear(features, features, rngs=rngs)
        self.second = norms.LayerNorm(features, rngs=rngs)
        self.third = norms.RMSNorm(features, rngs=rngs)
        self.embed = norms.Embed(DIMS[0], features, rngs=rngs, embedding_metadata={"origin": "embed"})

    def __call__(self, x):
        x = x + self.embed(jnp.arange(-1, 2))
        return self.third(x + jnp.tanh(self.second(self.hidden(self.first(x)))))


class LinenModel(flax.linen.Module):
    """The same, with the names that Flax gives."""

    norms: object

    @flax.linen.compact
    def __call__(self, x):
        partitioned = flax.linen.with_partitioning(flax.linen.initializers.ones, ("features",))
        embedding_init = flax.linen.with_partitioning(flax.linen.initializers.normal(), (None, "features"))
        x = x + self.norms.Embed(*DIMS, embedding_init=embedding_init)(jnp.arange(-1, 2))
        h = self.norms.RMSNorm(scale_init=partitioned)(x)
        h = self.norms.LayerNorm()(flax.linen.Dense(DIMS[-1])(h))
        return self.norms.RMSNorm()(x + jnp.tanh(h))


# What makes a model's parameters, with Flax's norms and with ours.
MODELS = {
    "nnx": (lambda of, seed=0: flax.nnx.state(NnxModel(of, flax.nnx.Rngs(seed))), flax.nnx, jaxnorm.nnx),
    "linen": (lambda of, seed=0: LinenModel(of).init(jax.random.key(seed), draw_x(DIMS)), flax.linen, jaxnorm.linen),
}


@pytest.mark.parametrize("api", MODELS)
def test_parameters_metadata_and_names_are_flaxs(api):
    make, *norms = MODELS[api]
    flaxs, ours = map(make, norms)
    assert (jax.tree.structure(ours), bits(ours)) == (jax.tree.structure(flaxs), bits(flaxs))


@pytest.mark.parametrize("to_ours", [True, False])
@pytest.mark.parametrize("api", MODELS)
def test_orbax_checkpoint_moves_across(api, to_ours, tmp_path):
    make, *norms = MODELS[api]
    written, read = norms if to_ours else reversed(norms)
    saved, target = make(written, seed=1), make(read)
    restored = through_checkpoint(tmp_path, saved, target)
    assert (bits(restored), jax.tree.structure(restored)) == (bits(saved), jax.tree.structure(target))


def of_nnx_jit(norms):
    step = flax.nnx.jit(flax.nnx.grad(lambda model, x: (model(x) * draw("dy", DIMS)).sum()))
    return step(NnxModel(norms, flax.nnx.Rngs(0)), draw_x(DIMS))


def of_nnx_scan_of_remat(norms):
    call = flax.nnx.remat(lambda x, model: model(x))
    loss = lambda models, x: (scanned(x, models, call) * draw("dy", DIMS)).sum()  # noqa: E731
    return flax.nnx.grad(loss)(stacked(lambda rngs: NnxModel(norms, rngs)), draw_x(DIMS))


def of_linen_scan_of_remat(norms):
    def branch(x):
        x = x + norms.Embed(*DIMS)(jnp.arange(DIMS[0]))
        return norms.LayerNorm()(jnp.tanh(flax.linen.Dense(DIMS[-1])(norms.RMSNorm()(x))))

    layer = scan_of_remat(branch)
    variables = layer.init(jax.random.key(0), draw_x(DIMS), None)
    return jax.grad(lambda v: (layer.apply(v, draw_x(DIMS), None)[0] * draw("dy", DIMS)).sum())(variables)


GRADIENTS = [("nnx", of_nnx_jit), ("nnx", of_nnx_scan_of_remat), ("linen", of_linen_scan_of_remat)]


@pytest.mark.parametrize(("api", "gradient"), GRADIENTS)
def test_gradients_by_flaxs_transformations_are_flaxs(api, gradient):
    _, flaxs, ours = MODELS[api]
    assert_gradients_close(gradient(ours), gradient(flaxs))


EMBED = jaxnorm.linen.Embed(4, 8)
# A call with and one without a kernel: the second goes through Flax's method of the same module.
CALLS = [(jaxnorm.linen.LayerNorm(), "float32"), (jaxnorm.linen.LayerNorm(), "int32"), (EMBED, "int32")]
CALLS += [(EMBED.clone(dtype="int32"), "int32")]


@pytest.mark.parametrize(("layer", "dtype"), CALLS)
def test_linen_captures_each_call_once(layer, dtype):
    x = draw_x(DIMS).astype(dtype)
    _, captured = layer.apply(layer.init(jax.random.key(0), x), x, capture_intermediates=True)
    assert len(captured["intermediates"]["__call__"]) == 1
