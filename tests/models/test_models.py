"""Published models, as their packages have them: `pip install '.[models]'`, and clones on PYTHONPATH for the others."""

import jax
import jax.numpy as jnp
import pytest
from hlo import compiled_text, count_native_calls
from native import native_calls

from examples.models import MODELS, of_norm, randomised
from examples.ports.compare import difference, results

# What these packages call may be deprecated.
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.long]

# The norms of each model, all of which are found without a mapping, and their kinds.
NORMS = {
    "transformers: Llama": {"rms": 5},
    "transformers: Mistral": {"rms": 5},
    "transformers: Gemma": {"rms": 5},
    "transformers: BERT": {"layer": 6},
    "transformers: GPT-2": {"layer": 5},
    "transformers: T5's norm": {"rms": 1},
    "diffusers: U-Net": {"layer": 12, "group": 21},
    "diffusers: VAE": {"group": 18},
}
HUB = ("float32", "bfloat16")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.needs(name.partition(":")[0])) for name in NORMS]
)
def test_the_norms_of_a_model_are_found(name):
    model = MODELS[name]()
    parameters = randomised(model.parameters, jnp.float32)
    expected, actual = (jax.jit(results(side))(parameters, model.inputs) for side in (model.before, model.after))
    assert difference(expected[0], actual[0]) < 5e-6
    assert difference(expected[1], actual[1]) < 1e-5
    assert len(model.report.replaced) == sum(NORMS[name].values())
    assert not model.report.left
    calls = [native_calls(kind, fwd=count) for kind, count in NORMS[name].items()]
    text = compiled_text(model.after, parameters, model.inputs)
    assert count_native_calls(text) == {target: count for each in calls for target, count in each.items()}


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
        model = of_norm(norm)
        parameters = randomised(model.parameters, parameter_dtype)
        x = model.inputs.astype(x_dtype)
        expected, actual = (side(parameters, x) for side in (model.before, model.after))
        assert actual.dtype == expected.dtype
        # Of a half type one element in thousands may be rounded the other way.
        wide = [y.astype(jnp.float32) for y in (expected, actual)]
        assert jnp.mean(~jnp.isclose(*wide, rtol=1e-5, atol=1e-5)) < 1e-2, (norm, wide)
        assert jnp.allclose(*wide, rtol=1e-2, atol=1e-2)
