"""What computes the blocks of `jaxnorm.blocks.find`, for stand-ins; see tests/models for the published classes."""

import inspect
import sys
import types
from functools import partial

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import pytest
from cases import draw
from flax_apis import assert_calls, assert_close, assert_gradients_close
from library_models import NnxModel, own_promotion
from norm_models import CentredNorm, GemmaNorm

import jaxnorm
from jaxnorm.integrations.flax import blocks

pytestmark = [pytest.mark.jax_version, pytest.mark.usefixtures("exact_products")]

DIM = 16


def linear(rngs, out=DIM, use_bias=True):
    return flax.nnx.Linear(DIM, out, use_bias=use_bias, bias_init=flax.nnx.initializers.normal(), rngs=rngs)


def normal_norm(kind, rngs, **options):
    """One whose parameters are none of 0 and 1, and leave a block's values at those that `assert_close` is for."""
    init = flax.nnx.initializers.normal(0.25)
    bias = {} if issubclass(kind, flax.nnx.RMSNorm) else {"bias_init": init}
    return kind(DIM, scale_init=init, **bias, **options, rngs=rngs)


class Attention(flax.nnx.Module):
    """Stands for one: what it gives besides is a cache."""

    def __init__(self, rngs, *, pair):
        self.mix, self.pair = linear(rngs), pair

    def __call__(self, x, shift=0.0):
        y = self.mix(jnp.cumsum(x, axis=1)) + shift
        return (y, 2 * y) if self.pair else y


class GatedMlp(flax.nnx.Module):
    def __init__(self, rngs, act_fn=jax.nn.silu):
        self.gate_proj, self.up_proj, self.down_proj = (linear(rngs) for _ in range(3))
        self.act_fn, self.config = act_fn, types.SimpleNamespace(hidden_act="gelu")

    def __call__(self, x):
        act = self.act_fn or partial(jax.nn.gelu, approximate=False)
        return self.down_proj(act(self.gate_proj(x)) * self.up_proj(x))


class Decoder(flax.nnx.Module):
    def __init__(self, rngs, kind=flax.nnx.RMSNorm, *, pair=True):
        self.input_layernorm, self.post_attention_layernorm = (normal_norm(kind, rngs) for _ in range(2))
        self.self_attn, self.mlp = Attention(rngs, pair=pair), GatedMlp(rngs)

    def __call__(self, x, shift=0.0):
        y = self.self_attn(self.input_layernorm(x), shift)
        y, *rest = y if self.self_attn.pair else (y,)
        h = x + y
        h = h + self.mlp(self.post_attention_layernorm(h))
        return (h, *rest) if rest else h


class Sandwich(flax.nnx.Module):
    def __init__(self, rngs, make_norm):
        self.input_layernorm, self.post_attention_layernorm = make_norm(rngs), make_norm(rngs)
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = make_norm(rngs), make_norm(rngs)
        self.attn, self.mlp = Attention(rngs, pair=False), linear(rngs)

    def __call__(self, x):
        x = x + self.post_attention_layernorm(self.attn(self.input_layernorm(x)))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class KnownNorm(GemmaNorm):
    """Stands for bonsai's norm of Gemma 3, by its name."""

    __module__, __qualname__ = "bonsai.models.gemma3.modeling", "Gemma3RMSNorm"
    eps = 1e-6


class Vit(flax.nnx.Module):
    def __init__(self, rngs, *, scaled):
        self.norm1, self.norm2 = (normal_norm(flax.nnx.LayerNorm, rngs, use_fast_variance=False) for _ in range(2))
        self.attn, self.mlp = Attention(rngs, pair=False), linear(rngs)
        if scaled:
            scales = jax.random.normal(rngs.params(), (2, DIM))
            self.layer_scale1, self.layer_scale2 = (LayerScale(scale) for scale in scales)

    def __call__(self, x):
        first, second = (self.layer_scale1, self.layer_scale2) if hasattr(self, "layer_scale1") else (lambda y: y,) * 2
        h = x + first(self.attn(self.norm1(x)))
        return h + second(self.mlp(self.norm2(h)))


class LayerScale(flax.nnx.Module):
    def __init__(self, scale):
        self.lambda1 = flax.nnx.Param(scale)

    def __call__(self, x):
        return x * self.lambda1[...]


class Promoting(flax.nnx.RMSNorm):
    """A norm that Flax's own code computes."""

    def __init__(self, dim, **options):
        super().__init__(dim, promote_dtype=own_promotion, **options)


def rngs():
    return flax.nnx.Rngs(0)


# The block, the function, and the native calls of its forward pass.
BLOCKS = {
    "decoder": (lambda: Decoder(rngs()), "decoder_block", {"rms_norm": 2}),
    "of LayerNorms": (lambda: Decoder(rngs(), flax.nnx.LayerNorm, pair=False), "decoder_block", {"layer_norm": 2}),
    "no cache": (lambda: Decoder(rngs(), pair=False), "decoder_block", {"rms_norm": 2}),
    "decoder of others": (lambda: Decoder(rngs(), CentredNorm), "decoder_block", {}),
    "decoder of Flax's": (lambda: Decoder(rngs(), Promoting), "decoder_block", {}),
    "sandwich": (lambda: Sandwich(rngs(), partial(normal_norm, flax.nnx.RMSNorm)), "sandwich_block", {"rms_norm": 4}),
    "known sandwich": (lambda: Sandwich(rngs(), KnownNorm), "sandwich_block", {"rms_norm": 4}),
    "ViT": (lambda: Vit(rngs(), scaled=False), "vit_block", {"layer_norm": 2}),
    "LayerScale": (lambda: Vit(rngs(), scaled=True), "vit_block", {"layer_norm": 2}),
    "of act_fn": (lambda: GatedMlp(rngs(), jax.nn.gelu), "gated_mlp_block", {"gated_activation": 1}),
    "of hidden_act": (lambda: GatedMlp(rngs(), None), "gated_mlp_block", {"gated_activation": 1}),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_nnx(name):
    make, function, calls = BLOCKS[name]
    own, x = NnxModel(make()), draw("x", (2, 5, DIM))
    replaced, _ = own.replaced({type(own.module): getattr(blocks, function)})
    assert_close(*(jax.tree.leaves(model(x))[0] for model in (replaced, own)))
    assert jax.tree.structure(replaced(x)) == jax.tree.structure(own(x))

    def loss(parameters, model):
        return sum(jnp.square(y).sum() for y in jax.tree.leaves(model.apply(parameters, x)))

    assert_gradients_close(*(jax.tree.leaves(jax.grad(loss)(of.parameters, of)) for of in (replaced, own)))
    calls = {f"jaxnorm_{op}_fwd": count for op, count in calls.items()}
    assert_calls(replaced.apply, (replaced.parameters, x), calls)


class LinenResnet(flax.linen.Module):
    features: int

    def setup(self):
        init = flax.linen.initializers.normal(1.0)
        self.norm1, self.norm2 = (flax.linen.GroupNorm(2, scale_init=init, bias_init=init) for _ in range(2))
        self.conv1, self.conv2 = (flax.linen.Conv(self.features, (3, 3)) for _ in range(2))
        self.conv_shortcut = flax.linen.Conv(self.features, (1, 1)) if self.features != DIM else None
        self.dropout_layer = self.dropout = flax.linen.Dropout(0.5)
        self.time_emb_proj = flax.linen.Dense(self.features)

    def __call__(self, x, temb=None, deterministic=True):
        h = self.conv1(jax.nn.silu(self.norm1(x)))
        h = h if temb is None else h + self.time_emb_proj(jax.nn.silu(temb))[:, None, None]
        h = self.conv2(self.dropout(jax.nn.silu(self.norm2(h)), deterministic))
        return h + (x if self.conv_shortcut is None else self.conv_shortcut(x))


@pytest.mark.parametrize(("function", "features"), [("resnet_block", DIM), ("timed_resnet_block", 2 * DIM)])
def test_linen(function, features):
    block, x = LinenResnet(features), draw("x", (2, 4, 4, DIM))
    time = () if function == "resnet_block" else (x[:, 0, 0],)
    variables = block.init(jax.random.key(0), x, *time)

    def apply(variables, deterministic):
        random = {"rngs": {"dropout": jax.random.key(1)}, "deterministic": deterministic}
        return block.apply(variables, x, *time, **random)

    def replaced(variables, deterministic):
        with jaxnorm.linen.using_layers({LinenResnet: getattr(blocks, function)}) as report:
            y = apply(variables, deterministic)
        assert report.replaced == [((), LinenResnet)]
        return y

    for deterministic in (True, False):
        assert_close(replaced(variables, deterministic), apply(variables, deterministic))
    assert_calls(partial(replaced, deterministic=True), (variables,), {"jaxnorm_group_norm_fwd": 2})


@pytest.mark.parametrize("name", ["no cache", "known sandwich", "LayerScale"])
def test_a_stream_of_bfloat16_and_parameters_of_float32_give_the_models_dtype(name):
    make, function, _ = BLOCKS[name]
    own, x = NnxModel(make()), draw("x", (2, 5, DIM), "bfloat16")
    replaced, _ = own.replaced({type(own.module): getattr(blocks, function)})
    assert replaced(x).dtype == own(x).dtype == jnp.float32
    assert jnp.abs(replaced(x) - own(x)).max() < 0.03 * jnp.abs(own(x)).max()


def test_find_has_the_known_classes_that_are_imported(monkeypatch):
    name = "bonsai.models.vae.modeling"
    assert f"{name}.ResnetBlock" in jaxnorm.blocks.KNOWN
    assert Decoder not in jaxnorm.blocks.find(Decoder(rngs()))
    for base, model in ((flax.nnx.Module, Decoder(rngs())), (flax.linen.Module, LinenResnet(DIM))):
        known = type("ResnetBlock", (base,), {"__module__": name})
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(ResnetBlock=known))
        assert jaxnorm.blocks.find(model)[known] is blocks.resnet_block
        other = LinenResnet(DIM) if base is flax.nnx.Module else Decoder(rngs())
        assert known not in jaxnorm.blocks.find(other)


def test_each_function_is_of_a_published_class():
    functions = {
        function
        for name, function in vars(blocks).items()
        if inspect.isfunction(function) and function.__module__ == blocks.__name__ and not name.startswith("_")
    }
    assert functions - {jaxnorm.blocks.find} == set(jaxnorm.blocks.KNOWN.values())
    assert all(function.__name__.endswith("_block") for function in jaxnorm.blocks.KNOWN.values())


@pytest.mark.parametrize("make", [lambda: Decoder(rngs()), lambda: Vit(rngs(), scaled=True), lambda: GatedMlp(rngs())])
def test_a_class_of_ones_own_is_no_known_block_by_its_childrens_names(make):
    model = make()
    _, report = jaxnorm.replace_layers(model, jaxnorm.blocks.find(model))
    assert type(model) not in [cls for _, cls in report.replaced]
    assert not report.unused
