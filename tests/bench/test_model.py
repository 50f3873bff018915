"""The model benchmark at toy sizes: its programs compute what they say, and its arithmetic is right."""

import argparse
import json
import re
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import model, model_blocks, model_norms, models, unet

pytestmark = [pytest.mark.any_code, pytest.mark.long]

LANGUAGE, IMAGES = models.small(models.LLAMA), replace(models.small(models.VIT), layers=1)
GROUPED, SANDWICH, CONDITIONED = (models.small(spec) for spec in (models.LLAMA_GROUPED, models.GEMMA, models.DIT))
PACKED, AFTER_SUM, UNET = models.small(models.LLAMA_PACKED), models.small(models.BERT), unet.small(unet.WIDE)
JOINT = models.small(models.QWEN)
# Models, and the norms with which they train as with jnp norms. The first four have the calls that take neighbours in
# and those that do not, the others what their architecture adds to these, asked for and by default.
TRAINED = [
    *((spec, norms) for spec in (LANGUAGE, IMAGES, AFTER_SUM, UNET) for norms in ("jaxnorm", "jaxnorm-add")),
    *(
        (spec, norms)
        for spec in (GROUPED, JOINT, SANDWICH, CONDITIONED)
        for norms in ("jaxnorm-rotary", "jaxnorm-default")
    ),
]
# What bfloat16 activations leave: jnp norms, scanned and unrolled, give losses that are up to 6e-4 apart, and gradients
# up to 1.4e-2. Without norms, losses are more than 0.05 from those with them.
LOSS_TOLERANCE = 2e-3
GRADIENT_TOLERANCE = 3e-2  # relative L2
COLUMNS = ["model", "program", "norms", "ms", "± us", "norms us", "temp MiB", "won back %", "ceiling %"]


@cache
def loss_and_gradients(spec, norms):
    module = model.MODULES[type(spec)]
    gradient = jax.jit(jax.value_and_grad(partial(module.loss, spec, norms)))
    loss, gradients = gradient(module.init(spec), *module.batch(spec))
    if module is models and not spec.scan:
        gradients["layers"] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *gradients["layers"])
    return float(loss), [np.float64(leaf) for leaf in jax.tree.leaves(gradients)]


def largest_error(actual, expected):
    """Of a gradient, relative L2."""
    return max(np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(actual[1], expected[1], strict=True))


def benchmark(tmp_path, *arguments):
    """The table that `python -m bench model` writes."""
    parser = argparse.ArgumentParser()
    model.add_arguments(parser)
    model.main(parser.parse_args(["--small", "--turns", "2", "--out", str(tmp_path / "table"), *arguments]))
    return json.loads((tmp_path / "table.json").read_text())


@pytest.mark.kernels
@pytest.mark.parametrize(("spec", "norms"), TRAINED, ids=lambda value: getattr(value, "name", value))
def test_a_model_with_native_norms_trains_as_with_jnp_norms(spec, norms):
    native, jnp_norms = loss_and_gradients(spec, norms), loss_and_gradients(spec, "jnp")

    assert native[0] == pytest.approx(jnp_norms[0], abs=LOSS_TOLERANCE)
    assert largest_error(native, jnp_norms) < GRADIENT_TOLERANCE


def test_a_model_without_norms_is_another_model():
    assert abs(loss_and_gradients(LANGUAGE, "none")[0] - loss_and_gradients(LANGUAGE, "jnp")[0]) > 0.05


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("spec", "norms"),
    [
        (LANGUAGE, "jnp"),
        *((spec, "jaxnorm-add") for spec in (LANGUAGE, AFTER_SUM)),
        *((spec, "jaxnorm-rotary") for spec in (SANDWICH, CONDITIONED)),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_scanned_and_rematerialised_layers_compute_the_same(spec, norms):
    scanned = loss_and_gradients(replace(spec, scan=True, remat="full"), norms)

    assert largest_error(scanned, loss_and_gradients(spec, norms)) < GRADIENT_TOLERANCE


@pytest.mark.kernels
@pytest.mark.parametrize(("norms", "adds"), [("jaxnorm", False), ("jaxnorm-add", True)])
@pytest.mark.parametrize(
    ("spec", "sign"),
    [
        *(pytest.param(spec, "has_residual = true", id=spec.name) for spec in (IMAGES, AFTER_SUM)),
        pytest.param(SANDWICH, "custom_call @jaxnorm_rms_norm_add_rms_norm_fwd", id="Gemma-like"),
    ],
)
def test_every_norm_but_the_first_adds(spec, sign, norms, adds):
    params, inputs = models.init(spec), models.batch(spec)
    text = jax.jit(models.forward(partial(models.loss, spec, norms))).lower(params, *inputs).as_text()
    assert text.count(sign) == 2 * spec.layers * adds


@pytest.mark.kernels
@pytest.mark.parametrize(("norms", "adds"), [("jaxnorm", False), ("jaxnorm-add", True)])
def test_norms_of_a_unet_take_its_activation_in(norms, adds):
    text = jax.jit(models.forward(partial(unet.loss, UNET, norms))).lower(unet.init(UNET), *unet.batch(UNET)).as_text()
    calls = re.findall("custom_call @jaxnorm_group_norm_fwd.*", text)
    assert calls
    assert all(('activation = "silu"' in call) == adds for call in calls)


@pytest.mark.parametrize(
    ("spec", "name", "parts"),
    [(PACKED, "gate_up", ("gate", "up")), (replace(LANGUAGE, joint=True), "qkv", ("query", "key", "value"))],
)
def test_one_product_computes_what_several_do(spec, name, parts):
    params, inputs = models.init(LANGUAGE), models.batch(LANGUAGE)
    layers = [{**layer, name: jnp.concatenate([layer[part] for part in parts], axis=1)} for layer in params["layers"]]

    packed = models.loss(spec, "jnp", {**params, "layers": layers}, *inputs)
    assert packed == pytest.approx(models.loss(LANGUAGE, "jnp", params, *inputs), abs=LOSS_TOLERANCE)


def test_norms_after_sums_are_the_last_of_a_model():
    params, norms = models.init(AFTER_SUM), model_norms.norms_of(AFTER_SUM, "jnp")
    y = models.hidden(AFTER_SUM, norms, params, models.batch(AFTER_SUM)[0]).astype(jnp.float32)
    assert jnp.abs(y.mean(-1)).max() < 1e-2
    assert jnp.abs(y.std(-1) - 1).max() < 1e-2


@pytest.mark.parametrize(("spec", "dims"), [(IMAGES, (4, 12, 64)), (UNET, (4, 8, 8, 16))])
def test_flax_computes_the_same_norms(spec, dims):
    norm_of = unet.norm_of if spec is UNET else model_norms.norm_of
    x = jax.random.normal(jax.random.key(0), dims)
    weights = jax.random.normal(jax.random.key(1), (2, dims[-1]))
    flax, formula = (norm_of(spec, norms)(x, weights) for norms in ("flax", "jnp"))
    assert jnp.abs(flax - formula).max() < 1e-5


def modulated(x, part, shift, scale):
    """What a block of a conditioned model reads, as the paper has it."""
    h = x + part
    centred = h - h.mean(-1, keepdims=True)
    return centred / jnp.sqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-6) * (1 + scale) + shift


@pytest.mark.kernels
@pytest.mark.parametrize("norms", ["jnp", "jaxnorm", "jaxnorm-add"])
def test_a_scale_and_a_shift_for_each_example_have_the_gradients_of_a_modulation(norms):
    norms = model_norms.norms_of(CONDITIONED, norms)
    x, part, dy = jax.random.normal(jax.random.key(0), (3, 4, 12, 64))
    shift, scale = jax.random.normal(jax.random.key(1), (2, 4, 1, 64))

    def ours(x, part, shift, scale):
        return norms.closing(norms.add(x, part), model_blocks.adaptive(shift, scale))

    (y, pullback), (expected_y, expected) = (jax.vjp(f, x, part, shift, scale) for f in (ours, modulated))
    for actual, wanted in zip((y, *pullback(dy)), (expected_y, *expected(dy)), strict=True):
        assert np.linalg.norm(actual - wanted) < 1e-5 * np.linalg.norm(wanted)


@pytest.mark.kernels
def test_decoding_with_added_norms_gives_the_same_logits():
    params, state = models.serving(models.init(LANGUAGE)), models.full_cache(LANGUAGE)
    (_, added), (_, plain) = (
        jax.jit(models.decode_step(LANGUAGE, norms))(state, params) for norms in ("jaxnorm-add", "jnp")
    )

    assert np.linalg.norm(np.float64(added - plain)) < 2e-2 * np.linalg.norm(np.float64(plain))


@pytest.mark.parametrize("spec", [LANGUAGE, GROUPED], ids=lambda spec: spec.name)
def test_decoding_gives_the_logits_of_the_training_model(spec):
    """Tokens are fed one by one to a cache that is as long: the last step sees all of them, as the last token does.

    One layer only: its keys and values depend on the tokens, the next one's on what was in the cache before them.
    """
    spec = replace(spec, layers=1, tokens=4)
    params, norms = models.init(spec), model_norms.norms_of(spec, "jnp")
    tokens, _ = models.batch(spec)
    step = jax.jit(models.decode_step(spec, "jnp"))
    _, _, cache = models.full_cache(spec)
    for position in range(spec.tokens):
        state = (tokens[:, position], jnp.array(position), cache)
        (chosen, _, cache), logits = step(state, models.serving(params))

    expected = model_blocks.product(models.hidden(spec, norms, params, tokens)[:, -1], params["head"])
    assert np.linalg.norm(np.float64(logits - expected)) < 2e-2 * np.linalg.norm(np.float64(expected))
    assert (chosen == logits.argmax(-1)).all()


@pytest.mark.kernels
@pytest.mark.parametrize("norms", ["jnp", "jaxnorm-default"])
def test_a_loop_on_the_device_decodes_what_single_steps_do(norms):
    """In float32, which leaves no doubt about the likeliest token."""
    tokens, position, cache = models.full_cache(LANGUAGE)
    state = start = (tokens, position, jax.tree.map(lambda x: x.astype(jnp.float32), cache))
    params, step = models.init(LANGUAGE), jax.jit(models.decode_step(LANGUAGE, norms))
    for _ in range(3):
        state, logits = step(state, params)

    (tokens, position, cache), looped = jax.jit(models.decode_loop(LANGUAGE, norms, length=3))(start, params)

    assert position == 3
    assert (tokens == state[0]).all()
    for actual, expected in zip(jax.tree.leaves((looped, cache)), jax.tree.leaves((logits, state[2])), strict=True):
        assert np.linalg.norm(actual - expected) < 1e-3 * np.linalg.norm(expected)


@pytest.mark.kernels
def test_every_program_has_a_row_for_each_kind_of_norm(tmp_path, monkeypatch):
    toy = models.small
    monkeypatch.setattr(models, "small", lambda spec: replace(toy(spec), layers=1))  # half the time to compile

    table = benchmark(tmp_path, "--parts", "vit", "decode", "--batches", "1")

    decode = "Llama-like, decode 1"
    programs = [("ViT-like", "forward"), ("ViT-like", "train step"), (decode, "token"), (decode, "loop")]
    expected = [(*program, norms) for program in programs for norms in ("jnp", "jaxnorm", "none")]
    assert [(row["model"], row["program"], row["norms"]) for row in table["rows"]] == expected
    assert all(list(row) == COLUMNS for row in table["rows"])
    assert "floor of ViT-like norms:" in table["header"]


@pytest.mark.kernels
def test_a_model_without_rows_has_no_floor(tmp_path):
    name = unet.WIDE.name
    table = benchmark(tmp_path, "--parts", "unet", "--programs", "forward")

    names = [(row["model"], row["program"], row["norms"], row["ceiling %"]) for row in table["rows"]]
    assert names == [(name, "forward", norms, None) for norms in ("jnp", "jaxnorm", "none")]
    assert not any(key.startswith("floor") for key in table["header"])


def test_what_is_won_back_is_a_share_of_what_jnp_norms_cost():
    times = {"jnp": [5.0, 6.0, 7.0], "jaxnorm": [4.5, 5.5, 6.5], "none": [3.0, 4.0, 5.0]}
    keyed = {("forward", norms): seconds for norms, seconds in times.items()}

    _, ours, _ = model.rows_of("a model", keyed, dict.fromkeys(keyed, 2**20), floor=0.5)

    expected = {"ms": 5500.0, "norms us": 1.5e6, "temp MiB": 1.0, "won back %": 25.0, "ceiling %": 75.0}
    assert {name: ours[name] for name in expected} == expected


# Two layers of 2 x 3 tokens with 8 features in 2 heads: 5 norms of 6 rows over 96 bytes, and 4 over heads, of 12 rows.
# Grouped queries halve the 2 of keys, and sandwich norms are 4 more of 6 rows.
@pytest.mark.parametrize(
    ("changes", "backward", "fused", "expected"),
    [
        ({}, False, False, 9 * 2 * 96),
        ({}, True, False, 9 * 5 * 96 + 2 * 4 * (5 * 6 + 4 * 12)),  # and a statistic for each row, written and read
        ({}, True, True, 5 * 2 * 96 + 4 * 1 * 96 + 2 * 4 * (5 * 6 + 4 * 12)),
        ({"kv_heads": 1}, True, False, 8 * 5 * 96 + 2 * 4 * (5 * 6 + 3 * 12)),
        ({"after_sum": True}, False, True, 0),
        ({"after_sum": True}, True, True, 5 * 2 * 96 + 4 * 1 * 96 + 2 * 4 * (5 * 6 + 4 * 12)),
        ({"sandwich": True}, True, False, 13 * 5 * 96 + 2 * 4 * (9 * 6 + 4 * 12)),
        ({"sandwich": True}, True, True, 5 * 2 * 96 + 4 * 1 * 96 + 4 * 2 * 96 + 2 * 4 * (9 * 6 + 4 * 12)),
    ],
)
def test_the_floor_is_a_count_of_bytes(changes, backward, fused, expected):
    tiny = replace(LANGUAGE, layers=2, dim=8, heads=2, batch=2, tokens=3, **changes)

    assert model.norm_bytes(tiny, backward, fused) == expected
