"""Models of packages, `pip install '.[models]'`, before and after their norms and embeddings are replaced.

They are small and have random parameters: nothing is downloaded.
"""

import importlib
from functools import partial

import jax
import jax.flatten_util
import jax.numpy as jnp
import pytest
from cases import away_from_init
from hlo import compiled_text, count_native_calls
from native import native_calls

import jaxnorm.linen

# What these packages call may be deprecated.
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.long]


def results(model):
    """Of a model the output, and the gradient of a sum with weights of both signs, which no norm sends to zero."""

    def output_and_gradient(parameters, inputs):
        y, pull_back = jax.vjp(lambda parameters: model(parameters, inputs), parameters)
        return y, pull_back(jax.random.normal(jax.random.key(3), y.shape).astype(y.dtype))[0]

    return output_and_gradient


def difference(expected, actual):
    """Of all numbers together: a gradient by one bias may be zero but for rounding."""
    types = [jax.tree.map(lambda a: (a.shape, a.dtype), tree) for tree in (expected, actual)]
    assert types[0] == types[1], f"not of the same types: {types}"
    a, b = (jax.flatten_util.ravel_pytree(jax.tree.map(jnp.float32, tree))[0] for tree in (expected, actual))
    return float(jnp.linalg.norm(b - a) / jnp.linalg.norm(a))


def draw(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def hub(name, config, **options):
    """A language model of transformers: a function of parameters and inputs, and these, as of all models here."""
    import transformers

    config = getattr(transformers, f"{config}Config")(**options)
    model = getattr(transformers, f"Flax{name}")(config, seed=0)
    ids = jnp.arange(2 * 16).reshape(2, 16) % 64
    return lambda parameters, ids: model(ids, params=parameters)[0], model.params, ids


def t5_norm():
    """T5's norm alone: its attention calls `jnp.clip` in a way that JAX 0.10 no longer knows."""
    t5 = importlib.import_module("transformers.models.t5.modeling_flax_t5")
    return of_norm(t5.FlaxT5LayerNorm(32))


def of_norm(norm):
    """A norm of Linen by itself."""
    x = draw(2, 2, 16, 32)
    return lambda p, x: norm.apply({"params": p}, x), norm.init(jax.random.key(0), x)["params"], x


def unet():
    import diffusers

    blocks = {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "block_out_channels": (32, 64)}
    blocks |= {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "layers_per_block": 1}
    model = diffusers.FlaxUNet2DConditionModel(sample_size=8, attention_head_dim=4, cross_attention_dim=16, **blocks)
    texts, parameters = draw(1, 2, 5, 16), model.init_weights(jax.random.key(0))
    return lambda p, x: model.apply({"params": p}, x, jnp.ones(2), texts).sample, parameters, draw(2, 2, 4, 8, 8)


def vae():
    import diffusers

    model = diffusers.FlaxAutoencoderKL(block_out_channels=(32,), sample_size=8, norm_num_groups=8)
    parameters = model.init_weights(jax.random.key(0))
    return lambda p, x: model.apply({"params": p}, x).sample, parameters, draw(2, 2, 3, 8, 8)


SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 32}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
# Each with its norms, all of which are found without a mapping, by their kinds, and how many embeddings it has.
PUBLISHED = {
    "transformers: Llama": (partial(hub, "LlamaForCausalLM", "Llama", **SIZES), {"rms": 5}, 1),
    "transformers: Mistral": (
        partial(hub, "MistralForCausalLM", "Mistral", num_key_value_heads=2, **SIZES),
        {"rms": 5},
        1,
    ),
    "transformers: Gemma": (
        partial(hub, "GemmaForCausalLM", "Gemma", head_dim=8, num_key_value_heads=4, **SIZES),
        {"rms": 5},
        1,
    ),
    "transformers: BERT": (partial(hub, "BertForMaskedLM", "Bert", **SIZES), {"layer": 6}, 3),
    "transformers: GPT-2": (partial(hub, "GPT2LMHeadModel", "GPT2", **GPT2), {"layer": 5}, 2),
    "transformers: T5's norm": (t5_norm, {"rms": 1}, 0),
    "diffusers: U-Net": (unet, {"layer": 12, "group": 21}, 0),
    "diffusers: VAE": (vae, {"group": 18}, 0),
}


def with_ours(model, reports):
    """The model within a context, whose report is then the last of the reports."""

    def after(parameters, inputs):
        with jaxnorm.linen.using_layers() as report:
            y = model(parameters, inputs)
        reports.append(report)
        return y

    return after


@pytest.mark.parametrize("name", [pytest.param(of, marks=pytest.mark.needs(of.partition(":")[0])) for of in PUBLISHED])
def test_the_norms_and_embeddings_of_a_model_are_found(name):
    make, norms, embeddings = PUBLISHED[name]
    model, parameters, inputs = make()
    parameters, reports = away_from_init(parameters, jnp.float32), []
    after = with_ours(model, reports)
    expected, actual = (jax.jit(results(side))(parameters, inputs) for side in (model, after))
    assert difference(expected[0], actual[0]) < 5e-6
    assert difference(expected[1], actual[1]) < 1e-5
    report = reports[-1]
    assert len(report.replaced) == sum(norms.values()) + embeddings
    assert not report.left
    calls = [native_calls(kind, fwd=count) for kind, count in norms.items()]
    text = compiled_text(after, parameters, inputs)
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


@pytest.mark.needs("transformers")
@pytest.mark.parametrize("dtype", HUB)
@pytest.mark.parametrize("x_dtype", HUB)
@pytest.mark.parametrize("parameter_dtype", HUB)
def test_norms_of_transformers_in_every_dtype(dtype, x_dtype, parameter_dtype):
    for norm in hub_norms(jnp.dtype(dtype)):
        model, parameters, x = of_norm(norm)
        operands = away_from_init(parameters, parameter_dtype), x.astype(x_dtype)
        expected, actual = (side(*operands) for side in (model, with_ours(model, [])))
        assert actual.dtype == expected.dtype
        # Of a half type one element in thousands may be rounded the other way.
        wide = [y.astype(jnp.float32) for y in (expected, actual)]
        assert jnp.mean(~jnp.isclose(*wide, rtol=1e-5, atol=1e-5)) < 1e-2, (norm, wide)
        assert jnp.allclose(*wide, rtol=1e-2, atol=1e-2)
