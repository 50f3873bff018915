"""Whole models before and after their norms are replaced: those of packages, `pip install '.[models]'`, and ports."""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.flatten_util
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from hlo import compiled_text, count_native_calls
from native import native_calls

import jaxnorm.linen
from jaxnorm import add_rms_norm, rms_norm
from jaxnorm.replacement import Report


class Model(NamedTuple):
    parameters: Any
    before: Callable[[Any, Any], jax.Array]  # of the parameters and the inputs
    after: Callable[[Any, Any], jax.Array]
    inputs: jax.Array
    report: Report  # it fills while `after` is traced


def of_linen(apply: Callable[[Any, Any], jax.Array], parameters: Any, inputs: jax.Array, custom: Any = None) -> Model:
    """A model of Linen, called within a context."""
    report = Report()

    def after(parameters: Any, inputs: Any) -> jax.Array:
        with jaxnorm.linen.replace_norms(custom) as found:
            y = apply(parameters, inputs)
        report.replaced[:], report.left[:] = found.replaced, found.left
        return y

    return Model(parameters, apply, after, inputs, report)


def results(model: Callable[..., jax.Array]) -> Callable[..., tuple[jax.Array, Any]]:
    """Of a model the output, and the gradient of a sum with weights of both signs, which no norm sends to zero."""

    def output_and_gradient(parameters: Any, inputs: jax.Array) -> tuple[jax.Array, Any]:
        y, pull_back = jax.vjp(lambda parameters: model(parameters, inputs), parameters)
        return y, pull_back(jax.random.normal(jax.random.key(3), y.shape).astype(y.dtype))[0]

    return output_and_gradient


def difference(expected: Any, actual: Any) -> float:
    """Of all numbers together: a gradient by one bias may be zero but for rounding."""
    types = [jax.tree.map(lambda a: (a.shape, a.dtype), tree) for tree in (expected, actual)]
    assert types[0] == types[1], f"not of the same types: {types}"
    a, b = (jax.flatten_util.ravel_pytree(jax.tree.map(jnp.float32, tree))[0] for tree in (expected, actual))
    return float(jnp.linalg.norm(b - a) / jnp.linalg.norm(a))


def randomised(parameters: Any, dtype: Any) -> Any:
    """Parameters of a dtype that are not those of initialisers, so that a forgotten scale or bias shows."""
    leaves, structure = jax.tree.flatten(parameters)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    leaves = [p + 0.1 * jax.random.normal(key, p.shape) for p, key in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(structure, [p.astype(dtype) for p in leaves])


# Models of packages, small and with random parameters: nothing is downloaded.

IDS = jnp.arange(2 * 16).reshape(2, 16) % 64
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 32}


def hub(name: str, config: str, **options: Any) -> Model:
    """A language model of transformers."""
    import transformers

    model = getattr(transformers, f"Flax{name}")(getattr(transformers, config)(**options), seed=0)
    return of_linen(lambda parameters, ids: model(ids, params=parameters)[0], model.params, IDS)


def t5_norm() -> Model:
    """T5's norm alone: its attention calls `jnp.clip` in a way that JAX 0.10 no longer knows."""
    t5 = importlib.import_module("transformers.models.t5.modeling_flax_t5")
    return of_norm(t5.FlaxT5LayerNorm(32))


def of_norm(norm: Any) -> Model:
    """A norm of Linen by itself."""
    x = jax.random.normal(jax.random.key(2), (2, 16, 32))
    return of_linen(lambda p, x: norm.apply({"params": p}, x), norm.init(jax.random.key(0), x)["params"], x)


def unet() -> Model:
    import diffusers

    blocks = {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D")}
    blocks |= {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "block_out_channels": (32, 64)}
    model = diffusers.FlaxUNet2DConditionModel(
        sample_size=8, layers_per_block=1, attention_head_dim=4, cross_attention_dim=16, **blocks
    )
    texts = jax.random.normal(jax.random.key(1), (2, 5, 16))
    images = jax.random.normal(jax.random.key(2), (2, 4, 8, 8))
    parameters = model.init_weights(jax.random.key(0))
    return of_linen(lambda p, x: model.apply({"params": p}, x, jnp.ones(2), texts).sample, parameters, images)


def vae() -> Model:
    import diffusers

    model = diffusers.FlaxAutoencoderKL(block_out_channels=(32,), sample_size=8, norm_num_groups=8)
    images = jax.random.normal(jax.random.key(2), (2, 3, 8, 8))
    return of_linen(lambda p, x: model.apply({"params": p}, x).sample, model.init_weights(jax.random.key(0)), images)


# Each with its norms, all of which are found without a mapping, by their kinds.
PUBLISHED = {
    "transformers: Llama": (partial(hub, "LlamaForCausalLM", "LlamaConfig", **SIZES), {"rms": 5}),
    "transformers: Mistral": (
        partial(hub, "MistralForCausalLM", "MistralConfig", num_key_value_heads=2, **SIZES),
        {"rms": 5},
    ),
    "transformers: Gemma": (
        partial(hub, "GemmaForCausalLM", "GemmaConfig", head_dim=8, num_key_value_heads=4, **SIZES),
        {"rms": 5},
    ),
    "transformers: BERT": (partial(hub, "BertForMaskedLM", "BertConfig", **SIZES), {"layer": 6}),
    "transformers: GPT-2": (
        partial(hub, "GPT2LMHeadModel", "GPT2Config", vocab_size=64, n_embd=32, n_layer=2, n_head=4),
        {"layer": 5},
    ),
    "transformers: T5's norm": (t5_norm, {"rms": 1}),
    "diffusers: U-Net": (unet, {"layer": 12, "group": 21}),
    "diffusers: VAE": (vae, {"group": 18}),
}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what these packages call may be deprecated
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.needs(name.partition(":")[0])) for name in PUBLISHED]
)
def test_the_norms_of_a_model_are_found(name):
    make, norms = PUBLISHED[name]
    model = make()
    parameters = randomised(model.parameters, jnp.float32)
    expected, actual = (jax.jit(results(side))(parameters, model.inputs) for side in (model.before, model.after))
    assert difference(expected[0], actual[0]) < 5e-6
    assert difference(expected[1], actual[1]) < 1e-5
    assert len(model.report.replaced) == sum(norms.values())
    assert not model.report.left
    calls = [native_calls(kind, fwd=count) for kind, count in norms.items()]
    text = compiled_text(model.after, parameters, model.inputs)
    assert count_native_calls(text) == {target: count for each in calls for target, count in each.items()}


HUB = ("float32", "bfloat16")


def hub_norms(dtype):
    """Norms of transformers that compute in a dtype."""
    from transformers import GemmaConfig, LlamaConfig, MistralConfig
    from transformers.models.gemma.modeling_flax_gemma import FlaxGemmaRMSNorm
    from transformers.models.llama.modeling_flax_llama import FlaxLlamaRMSNorm
    from transformers.models.longt5.modeling_flax_longt5 import FlaxLongT5LayerNorm
    from transformers.models.mistral.modeling_flax_mistral import FlaxMistralRMSNorm
    from transformers.models.t5.modeling_flax_t5 import FlaxT5LayerNorm

    classes = {FlaxGemmaRMSNorm: GemmaConfig, FlaxLlamaRMSNorm: LlamaConfig, FlaxMistralRMSNorm: MistralConfig}
    norms = [cls(config(hidden_size=32), dtype) for cls, config in classes.items()]
    return [*norms, FlaxT5LayerNorm(32, dtype), FlaxLongT5LayerNorm(32, dtype)]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.needs("transformers")
@pytest.mark.parametrize("dtype", HUB)
@pytest.mark.parametrize("x_dtype", HUB)
@pytest.mark.parametrize("parameter_dtype", HUB)
def test_norms_of_transformers_in_every_dtype(dtype, x_dtype, parameter_dtype):
    for norm in hub_norms(jnp.dtype(dtype)):
        model = of_norm(norm)
        parameters = randomised(model.parameters, parameter_dtype)
        x = model.inputs.astype(x_dtype)
        expected, actual = (side(parameters, x) for side in (model.before, model.after))
        assert actual.dtype == expected.dtype
        # Of a half type one element in thousands may be rounded the other way.
        wide = [y.astype(jnp.float32) for y in (expected, actual)]
        assert jnp.mean(~jnp.isclose(*wide, rtol=1e-5, atol=1e-5)) < 1e-2, (norm, wide)
        assert jnp.allclose(*wide, rtol=1e-2, atol=1e-2)


# Ports of a layer with the norms of two libraries, and of Gemma as Flax's examples have it.


class Layer(nn.Module):
    """Tokens in, hidden states out. A norm is a function of what the last half gave and of the stream, if there is one:
    it gives the normalised sum, and the sum.
    """

    norm: Callable[[str], Callable[..., tuple[jax.Array, jax.Array]]]
    dtype: Any

    @nn.compact
    def __call__(self, tokens):
        x, stream = self.norm("attention_norm")(nn.Embed(64, 32, dtype=self.dtype)(tokens), None)
        attention = nn.MultiHeadDotProductAttention(4, use_bias=False, dtype=self.dtype)
        x, stream = self.norm("mlp_norm")(attention(x, mask=nn.make_causal_mask(tokens)), stream)
        wide = nn.silu(nn.Dense(96, use_bias=False, dtype=self.dtype)(x))
        return self.norm("final_norm")(nn.Dense(32, use_bias=False, dtype=self.dtype)(wide), stream)[0]


def after_addition(norm):
    def of(name):
        def add_and_normalise(x, stream):
            stream = x if stream is None else stream + x
            return norm(name=name)(stream), stream

        return add_and_normalise

    return of


class LlamaRMSNorm(nn.Module):
    """That of the model hubs: x_hat is rounded, then multiplied."""

    features: int
    epsilon: float = 1e-5
    dtype: Any = jnp.float32

    def setup(self):
        self.weight = self.param("weight", nn.initializers.ones, (self.features,))

    def __call__(self, hidden_states):
        wide = hidden_states.astype(jnp.float32)
        variance = jnp.square(wide).mean(-1, keepdims=True)
        return self.weight * (wide / jnp.sqrt(variance + self.epsilon)).astype(self.dtype)


def llama_norm(norm, x):
    out_dtype = jnp.result_type(norm.weight, norm.dtype)
    return rms_norm(x, norm.weight, epsilon=norm.epsilon, multiply_before_cast=False, out_dtype=out_dtype)


class T5LayerNorm(nn.Module):
    """An RMSNorm, computed and returned in float32."""

    eps: float = 1e-6

    @nn.compact
    def __call__(self, hidden):
        weight = self.param("weight", nn.initializers.ones, hidden.shape[-1:])
        variance = jnp.mean(hidden.astype(jnp.float32) ** 2, axis=-1, keepdims=True)
        return weight.astype(jnp.float32) * (hidden / jnp.sqrt(variance + self.eps))


class PortedT5LayerNorm(nn.Module):
    """The same, with the addition before it."""

    eps: float = 1e-6

    @nn.compact
    def __call__(self, x, residual):
        weight = self.param("weight", nn.initializers.ones, x.shape[-1:])
        if residual is None:
            return rms_norm(x, weight, epsilon=self.eps, out_dtype=jnp.float32), x
        return add_rms_norm(x, residual, weight, epsilon=self.eps, out_dtype=jnp.float32)


def llama(dtype):
    layer = Layer(after_addition(partial(LlamaRMSNorm, 32, dtype=dtype)), dtype)
    return of_linen(layer.apply, layer.init(jax.random.key(0), IDS), IDS, {LlamaRMSNorm: llama_norm})


def t5(dtype):
    before, after = Layer(after_addition(T5LayerNorm), dtype), Layer(lambda name: PortedT5LayerNorm(name=name), dtype)
    return Model(before.init(jax.random.key(0), IDS), before.apply, after.apply, IDS, Report())


class GemmaRMSNorm(nnx.Module):
    def __init__(self, dim, *, rngs):
        self.scale = nnx.Param(nnx.initializers.zeros(rngs.params(), (dim,)))

    def __call__(self, x):
        var = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        normed = x * jax.lax.rsqrt(var + 1e-06)
        return normed * (1 + jnp.expand_dims(self.scale[...], axis=range(x.ndim - 1)))


class GemmaAttention(nnx.Module):
    def __init__(self, features, heads, *, rngs):
        self.heads = heads
        self.qkv = nnx.Linear(features, 3 * features, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(features, features, use_bias=False, rngs=rngs)
        self.query_norm = GemmaRMSNorm(features // heads, rngs=rngs)
        self.key_norm = GemmaRMSNorm(features // heads, rngs=rngs)

    def __call__(self, x):
        query, key, value = jnp.split(self.qkv(x).reshape(*x.shape[:-1], self.heads, -1), 3, axis=-1)
        y = jax.nn.dot_product_attention(self.query_norm(query), self.key_norm(key), value, is_causal=True)
        return self.out(y.reshape(x.shape))


class GemmaFeedForward(nnx.Module):
    def __init__(self, features, hidden, *, rngs):
        self.gate = nnx.Linear(features, hidden, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(features, hidden, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(hidden, features, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.gate(x)) * self.up(x))


class GemmaBlock(nnx.Module):
    def __init__(self, features, heads, *, rngs):
        self.pre_attention_norm = GemmaRMSNorm(features, rngs=rngs)
        self.attn = GemmaAttention(features, heads, rngs=rngs)
        self.post_attn_norm = GemmaRMSNorm(features, rngs=rngs)
        self.pre_ffw_norm = GemmaRMSNorm(features, rngs=rngs)
        self.mlp = GemmaFeedForward(features, 4 * features, rngs=rngs)
        self.post_ffw_norm = GemmaRMSNorm(features, rngs=rngs)

    def __call__(self, x):
        x = x + self.post_attn_norm(self.attn(self.pre_attention_norm(x)))
        return x + self.post_ffw_norm(self.mlp(self.pre_ffw_norm(x)))


class GemmaTransformer(nnx.Module):
    def __init__(self, features=32, heads=4, layers=1, *, param_dtype, rngs):
        self.embedder = nnx.Embed(64, features, param_dtype=param_dtype, rngs=rngs)
        self.layers = nnx.List([GemmaBlock(features, heads, rngs=rngs) for _ in range(layers)])
        self.final_norm = GemmaRMSNorm(features, rngs=rngs)

    def __call__(self, tokens):
        x = self.embedder(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.embedder.attend(self.final_norm(x))


def gemma(dtype):
    """Ported by one line after the model is made."""

    def function_of(model):
        definition, state = nnx.split(model)
        return (lambda state, tokens: nnx.merge(definition, state)(tokens)), state

    before, ported = (GemmaTransformer(param_dtype=dtype, rngs=nnx.Rngs(0)) for _ in range(2))
    norm = lambda norm, x: rms_norm(x, norm.scale[...], epsilon=1e-06, scale_offset=1.0)  # noqa: E731
    report = jaxnorm.replace_norms(ported, {GemmaRMSNorm: norm})
    before, state = function_of(before)
    return Model(state, before, function_of(ported)[0], IDS, report)


# Each with its norms.
each_port = pytest.mark.parametrize(("port", "norms"), [(llama, 3), (t5, 3), (gemma, 7)])


@pytest.mark.jax_version
@pytest.mark.usefixtures("exact_products")
@each_port
def test_a_port_in_float32(port, norms):
    """Some ten roundings of float32 on the way through a model."""
    model = port(jnp.float32)
    operands = randomised(model.parameters, jnp.float32), model.inputs
    before, after = (jax.jit(results(side)).lower(*operands).compile() for side in (model.before, model.after))
    output, gradient = map(difference, before(*operands), after(*operands))
    assert output < 2e-6
    assert gradient < 1e-5
    assert count_native_calls(after.as_text()) == native_calls("rms", fwd=norms, bwd=norms)


@pytest.mark.jax_version
@pytest.mark.usefixtures("exact_products")
@each_port
def test_a_port_in_bfloat16_is_as_close_to_float32_as_it_was(port, norms):
    """But for what XLA does not round within its own fusions: by chance a little closer, or not quite."""
    model, wide = port(jnp.bfloat16), port(jnp.float32).before
    parameters = randomised(model.parameters, jnp.bfloat16)
    expected = jax.jit(results(wide))(jax.tree.map(jnp.float32, parameters), model.inputs)
    before, after = (jax.jit(results(side))(parameters, model.inputs) for side in (model.before, model.after))
    assert [a.dtype for a in jax.tree.leaves(after)] == [b.dtype for b in jax.tree.leaves(before)]
    for exact, *rounded in zip(expected, before, after, strict=True):
        errors = [difference(exact, jax.tree.map(jnp.float32, tree)) for tree in rounded]
        assert errors[1] < 2 * errors[0]
