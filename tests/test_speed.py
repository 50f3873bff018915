"""Where `implementation=None` leaves a CUDA kernel out, since XLA's code for the formula is faster."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from hlo import count_native_calls
from internals import choose_fastest

import jaxnorm
from jaxnorm import info

pytestmark = pytest.mark.plans


@pytest.fixture(autouse=True)
def _fastest(monkeypatch):
    choose_fastest(monkeypatch)


def native_ways(function, dtype, cols, platform="cuda", arrays=1, **options):
    """Which ways of the gradient program are native calls."""
    x = jax.ShapeDtypeStruct((4, cols), dtype)
    scale = jax.ShapeDtypeStruct((cols,), dtype)

    def loss(*args):
        return sum(jnp.sum(jnp.sin(y.astype("float32"))) for y in jax.tree.leaves(function(*args, **options)))

    program = jax.jit(jax.grad(loss)).trace(*[x] * arrays, scale).lower(lowering_platforms=(platform,))
    return {name.rsplit("_", 1)[1] for name in count_native_calls(program.as_text())}


rms, layer = partial(jaxnorm.rms_norm), partial(jaxnorm.layer_norm)
add, add_layer = partial(jaxnorm.add_rms_norm), partial(jaxnorm.add_layer_norm)
gated = partial(jaxnorm.gated_rms_norm, gate_first=True)
with_y = partial(
    jaxnorm.rms_norm_quantized,
    quantization=jaxnorm.Quantization("float8_e4m3fn"),
    with_unquantized=True,
    straight_through=True,
)


@pytest.mark.parametrize(
    ("function", "arrays", "dtype", "cols", "ways"),
    [
        (rms, 1, "bfloat16", 4096, {"fwd", "bwd"}),
        (with_y, 1, "bfloat16", 20_480, {"fwd", "bwd"}),
        (with_y, 1, "float32", 16_384, {"fwd", "bwd"}),
        (with_y, 1, "float32", 20_480, {"bwd"}),
        (rms, 1, "bfloat16", 1153, {"bwd"}),
        (layer, 1, "float16", 1153, {"bwd"}),
        (rms, 1, "bfloat16", 1021, {"fwd", "bwd"}),
        (rms, 1, "bfloat16", 4097, {"fwd", "bwd"}),
        (rms, 1, "float32", 1153, {"fwd", "bwd"}),
        (layer, 1, "float32", 1156, {"fwd", "bwd"}),  # four elements a vector, so they divide it
        (layer, 1, "float32", 300_007, set()),
        (rms, 1, "bfloat16", 300_000, {"fwd", "bwd"}),
        (add, 2, "bfloat16", 4096, {"fwd", "bwd"}),
        (add, 2, "bfloat16", 1153, set()),
        (add, 2, "bfloat16", 4097, {"fwd"}),
        (add, 2, "float32", 1153, {"fwd"}),
        (add, 2, "float32", 300_007, {"fwd", "bwd"}),
        (add, 2, "bfloat16", 50_257, {"fwd", "bwd"}),
        (add, 2, "bfloat16", 100_003, {"fwd"}),
        (add_layer, 2, "float32", 1153, {"fwd"}),
        (add_layer, 2, "float32", 50_257, {"fwd", "bwd"}),
        (add_layer, 2, "float32", 4097, {"fwd"}),
        (gated, 2, "bfloat16", 4096, {"fwd", "bwd"}),
        (gated, 2, "float32", 1153, set()),
    ],
)
def test_rows_that_vectors_do_not_divide(function, arrays, dtype, cols, ways):
    assert native_ways(function, dtype, cols, arrays=arrays) == ways


def test_quantised_rows_that_vectors_do_not_divide():
    def calls(cols):
        quantized = jax.jit(partial(jaxnorm.rms_norm_quantized, quantization=jaxnorm.Quantization("int8")))
        x = jax.ShapeDtypeStruct((4, cols), "bfloat16")
        return count_native_calls(quantized.trace(x).lower(lowering_platforms=("cuda",)).as_text())

    assert (calls(4096), calls(4097)) == ({"jaxnorm_rms_norm_quantized_fwd": 1}, {})


@pytest.mark.parametrize("calls", [0, 1])
@pytest.mark.parametrize(("function", "few"), [(rms, 64), (add, 64), (layer, 256), (add_layer, 256)])
def test_few_elements_without_a_gradient(function, few, calls):
    x, scale = jax.ShapeDtypeStruct((few + calls, 4096), "bfloat16"), jax.ShapeDtypeStruct((4096,), "bfloat16")
    arrays = [x] * (2 if function in (add, add_layer) else 1)

    def count(function):
        program = jax.jit(function).trace(*arrays, scale).lower(lowering_platforms=("cuda",))
        return sum(count_native_calls(program.as_text()).values())

    assert count(function) == calls
    assert count(partial(function, implementation="native")) == 1
    assert count(lambda *args: jax.vjp(function, *args)) == 1  # a gradient may follow


@pytest.mark.parametrize("function", [rms, layer, gated])
def test_what_must_be_native_is(function):
    arrays = 2 if function is gated else 1
    assert native_ways(function, "bfloat16", 1153, arrays=arrays, implementation="native") == {"fwd", "bwd"}


def test_info_says_so(capsys):
    info.main(["--platform", "cuda", "--dtype", "bfloat16", "--shape", "8x1153"])
    forward, backward, alone, _ = capsys.readouterr().out.splitlines()[-4:]
    assert forward.startswith("forward           jnp, because XLA's code is faster for half types")
    assert "threads" in backward
    assert (
        "where no gradient is taken jnp, because XLA's code is faster for RMSNorm of at most 262144 elements" in alone
    )


@pytest.mark.parametrize(
    ("wrap", "backward"), [(lambda f: f, {}), (jax.grad, {"backward": "native"})], ids=["forward alone", "a gradient"]
)
def test_explain_says_so(wrap, backward):
    norms = jaxnorm.explain(wrap(lambda x: rms(x).astype("float32").sum()), jax.ShapeDtypeStruct((8, 1153), "bfloat16"))
    by_way = {norm.direction: norm.on("cuda") for norm in norms}
    assert {way: runs.implementation for way, runs in by_way.items()} == {"forward": "formula"} | backward
    assert by_way["forward"].why.startswith("XLA's code is faster")
    assert {norm.on("cpu").implementation for norm in norms} == {"native"}


@pytest.mark.parametrize(
    ("groups", "shape", "platform", "ways"),
    [
        (32, (512, 640), "cpu", set()),
        (8, (512, 640), "cpu", {"fwd", "bwd"}),
        (32, (8, 4, 640), "cpu", {"fwd", "bwd"}),
        (32, (512, 640), "cuda", set()),
        (32, (8, 16, 640), "cuda", {"bwd"}),
        (32, (8, 16, 16, 640), "cuda", {"fwd", "bwd"}),
        (32, (2, 16, 16, 640), "cuda", {"bwd"}),
        (21, (8, 8, 8, 63), "cuda", set()),
    ],
)
def test_groups_without_positions(groups, shape, platform, ways):
    x, scale = jax.ShapeDtypeStruct(shape, "float32"), jax.ShapeDtypeStruct(shape[-1:], "float32")
    gradient = jax.jit(jax.grad(lambda *args: jnp.sin(jaxnorm.group_norm(*args, num_groups=groups)).sum()))
    text = gradient.trace(x, scale).lower(lowering_platforms=(platform,)).as_text()
    assert {name.rsplit("_", 1)[1] for name in count_native_calls(text)} == ways


@pytest.mark.parametrize(
    ("shape", "platform", "ways"),
    [
        ((8, 64, 16, 16), "cpu", {"fwd", "bwd"}),
        ((1, 64, 8, 8), "cpu", set()),
        ((256, 64, 4, 2), "cpu", set()),
        ((8, 64, 16, 16), "cuda", set()),
    ],
)
def test_channels_before_positions(shape, platform, ways):
    x = jax.ShapeDtypeStruct(shape, "bfloat16")
    group_norm = partial(jaxnorm.group_norm, num_groups=32, channel_axis=1)
    gradient = jax.jit(jax.grad(lambda x: jnp.sin(group_norm(x).astype("float32")).sum()))
    text = gradient.trace(x).lower(lowering_platforms=(platform,)).as_text()
    assert {name.rsplit("_", 1)[1] for name in count_native_calls(text)} == ways


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (partial(jaxnorm.qk_norm_rotary, positions=3), ["n 8 64", "n 2 64"]),
        (partial(jaxnorm.qk_norm_rotary, positions=3, axis_of_heads=-3), ["8 n 64", "2 n 64"]),
        (partial(jaxnorm.qkv_norm_rotary, positions=3, heads=8, kv_heads=2), ["n 12 64"]),
    ],
)
@pytest.mark.parametrize(
    ("tokens", "platform", "calls"), [(1, "cuda", 1), (2, "cuda", 0), (64, "cuda", 0), (65, "cuda", 1), (2, "cpu", 1)]
)
def test_tokens_that_are_decoded(function, shapes, tokens, platform, calls):
    dims = [[tokens if length == "n" else int(length) for length in shape.split()] for shape in shapes]
    args = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in dims]
    text = jax.jit(function).trace(*args).lower(lowering_platforms=(platform,)).as_text()
    assert sum(count_native_calls(text).values()) == calls


def test_a_cpu_has_no_such_rows():
    assert native_ways(rms, "bfloat16", 1153, "cpu") == {"fwd", "bwd"}


# By the last axis of one array, or of each of two.
@pytest.mark.parametrize(
    ("shapes", "platform", "ways"),
    [
        ([(4, 64)], "cpu", {"fwd", "bwd"}),
        ([(4, 16)], "cpu", {"bwd"}),
        ([(4, 8)], "cpu", set()),
        ([(4, 3)] * 2, "cpu", {"fwd", "bwd"}),
        ([(4, 64)], "cuda", {"bwd"}),
        ([(4, 2002)], "cuda", {"bwd"}),
        ([(4, 64)] * 2, "cuda", {"bwd"}),
    ],
)
def test_gated_activations(shapes, platform, ways):
    args = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes]

    def loss(*args):
        return jnp.sin(jaxnorm.gated_activation(args if len(args) > 1 else args[0]).astype("float32")).sum()

    text = jax.jit(jax.grad(loss)).trace(*args).lower(lowering_platforms=(platform,)).as_text()
    assert {name.rsplit("_", 1)[1] for name in count_native_calls(text)} == ways
