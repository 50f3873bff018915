"""Where `implementation=None` leaves a kernel out, since XLA's code for the formula is faster."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from hlo import count_native_calls
from internals import choose_fastest

import jaxnorm
from jaxnorm import info

pytestmark = pytest.mark.needs("plans")


@pytest.fixture(autouse=True)
def _fastest(monkeypatch):
    choose_fastest(monkeypatch)


def native_calls(function, shapes, dtype="bfloat16", platform="cuda"):
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    return count_native_calls(jax.jit(function).trace(*args).lower(lowering_platforms=(platform,)).as_text())


def native_ways(function, shapes, dtype="bfloat16", platform="cuda"):
    """Which ways of the gradient program are native calls."""

    def loss(*args):
        return sum(jnp.sum(jnp.sin(y.astype("float32"))) for y in jax.tree.leaves(function(*args)))

    return {name.rsplit("_", 1)[1] for name in native_calls(jax.grad(loss), shapes, dtype, platform)}


rms, layer, add, add_layer = jaxnorm.rms_norm, jaxnorm.layer_norm, jaxnorm.add_rms_norm, jaxnorm.add_layer_norm
gated = partial(jaxnorm.gated_rms_norm, gate_first=True)
with_y = partial(
    jaxnorm.rms_norm_quantized,
    quantization=jaxnorm.Quantization("float8_e4m3fn"),
    with_unquantized=True,
    straight_through=True,
)
BOTH = {"fwd", "bwd"}


def row_shapes(function, cols, rows=4):
    """Those of x, of what has its rows, and of scale."""
    return [(rows, cols)] * (2 if function in (add, add_layer, gated) else 1) + [(cols,)]


OF_ROWS = [
    *((rms, "bfloat16", cols, BOTH) for cols in (1021, 4096, 4097, 300_000)),
    *((rms, "float32", 1153, BOTH), (rms, "bfloat16", 1153, {"bwd"}), (layer, "float16", 1153, {"bwd"})),
    (layer, "float32", 1156, BOTH),  # four elements a vector, so they divide it
    (layer, "float32", 300_007, set()),
    *((with_y, dtype, cols, BOTH) for dtype, cols in (("bfloat16", 20_480), ("float32", 16_384))),
    (with_y, "float32", 20_480, {"bwd"}),
    *((add, dtype, cols, BOTH) for dtype, cols in (("bfloat16", 4096), ("bfloat16", 50_257), ("float32", 300_007))),
    *((add, dtype, cols, {"fwd"}) for dtype, cols in (("bfloat16", 4097), ("bfloat16", 100_003), ("float32", 1153))),
    (add, "bfloat16", 1153, set()),
    *((add_layer, "float32", cols, ways) for cols, ways in ((1153, {"fwd"}), (4097, {"fwd"}), (50_257, BOTH))),
    *((gated, "bfloat16", 4096, BOTH), (gated, "float32", 1153, set())),
]


@pytest.mark.parametrize(("function", "dtype", "cols", "ways"), OF_ROWS)
def test_rows_that_vectors_do_not_divide(function, dtype, cols, ways):
    assert native_ways(function, row_shapes(function, cols), dtype) == ways


def test_a_cpu_has_no_such_rows():
    assert native_ways(rms, row_shapes(rms, 1153), platform="cpu") == BOTH


@pytest.mark.parametrize("function", [rms, layer, gated])
def test_what_must_be_native_is(function):
    assert native_ways(partial(function, implementation="native"), row_shapes(function, 1153)) == BOTH


def test_quantised_rows_that_vectors_do_not_divide():
    quantized = partial(jaxnorm.rms_norm_quantized, quantization=jaxnorm.Quantization("int8"))
    calls = [native_calls(quantized, [(4, cols)]) for cols in (4096, 4097)]
    assert calls == [{"jaxnorm_rms_norm_quantized_fwd": 1}, {}]


def calls_without_a_gradient(function, shapes):
    """Those by default, with native by name, and where a gradient may follow."""
    each = function, partial(function, implementation="native"), lambda *args: jax.vjp(function, *args)
    return [sum(native_calls(of, shapes).values()) for of in each]


@pytest.mark.parametrize("calls", [0, 1])
@pytest.mark.parametrize(("function", "few"), [(add, 64), (add_layer, 256)])
def test_sums_of_few_elements_without_a_gradient(function, few, calls):
    assert calls_without_a_gradient(function, row_shapes(function, 4096, few + calls)) == [calls, 1, 1]


# XLA fuses a norm with what is around it. Of longer rows a kernel is twice as fast.
@pytest.mark.parametrize("cols", [1024, 8192, 8200])
@pytest.mark.parametrize("function", [rms, layer])
def test_a_norm_without_a_gradient(function, cols):
    assert calls_without_a_gradient(function, row_shapes(function, cols, 4096)) == [cols > 8192, 1, 1]


# As adaLN has them: XLA would have to write what is added for the call, but for `branch_scale`.
@pytest.mark.parametrize("branch_scale", [False, True])
def test_a_sum_by_weights_of_examples(branch_scale):
    shapes = [*[(8, 512, 1024)] * 2, *[(8, 1, 1024)] * (3 if branch_scale else 2)]

    def modulated(x, residual, scale, bias, gate=None, **how):
        return add_layer(x, residual, scale, bias, branch_scale=gate, **how)

    assert calls_without_a_gradient(modulated, shapes) == [branch_scale, 1, 1]


def group_norm(num_groups, channel_axis=-1):
    return partial(jaxnorm.group_norm, num_groups=num_groups, channel_axis=channel_axis)


def gated_activation(*args):
    """By the last axis of one array, or of each of two."""
    return jaxnorm.gated_activation(args if len(args) > 1 else args[0])


@pytest.mark.parametrize(
    ("function", "dtype", "platform", "shapes", "ways"),
    [
        # Groups without positions.
        (group_norm(32), "float32", "cpu", [(512, 640), (640,)], set()),
        (group_norm(8), "float32", "cpu", [(512, 640), (640,)], BOTH),
        (group_norm(32), "float32", "cpu", [(8, 4, 640), (640,)], BOTH),
        (group_norm(32), "float32", "cuda", [(512, 640), (640,)], set()),
        (group_norm(32), "float32", "cuda", [(8, 16, 640), (640,)], {"bwd"}),
        (group_norm(32), "float32", "cuda", [(8, 16, 16, 640), (640,)], BOTH),
        (group_norm(32), "float32", "cuda", [(2, 16, 16, 640), (640,)], {"bwd"}),
        (group_norm(21), "float32", "cuda", [(8, 8, 8, 63), (63,)], set()),
        # Channels before positions.
        (group_norm(32, 1), "bfloat16", "cpu", [(8, 64, 16, 16)], BOTH),
        (group_norm(32, 1), "bfloat16", "cpu", [(1, 64, 8, 8)], set()),
        (group_norm(32, 1), "bfloat16", "cpu", [(256, 64, 4, 2)], set()),
        (group_norm(32, 1), "bfloat16", "cuda", [(8, 64, 16, 16)], set()),
        (gated_activation, "bfloat16", "cpu", [(4, 64)], BOTH),
        (gated_activation, "bfloat16", "cpu", [(4, 16)], {"bwd"}),
        (gated_activation, "bfloat16", "cpu", [(4, 8)], set()),
        (gated_activation, "bfloat16", "cpu", [(4, 3)] * 2, BOTH),
        (gated_activation, "bfloat16", "cuda", [(4, 64)], {"bwd"}),
        (gated_activation, "bfloat16", "cuda", [(4, 2002)], {"bwd"}),
        (gated_activation, "bfloat16", "cuda", [(4, 64)] * 2, {"bwd"}),
    ],
)
def test_by_shape(function, dtype, platform, shapes, ways):
    assert native_ways(function, shapes, dtype, platform) == ways


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (partial(jaxnorm.qk_norm_rotary, positions=3), lambda n: [(n, 8, 64), (n, 2, 64)]),
        (partial(jaxnorm.qk_norm_rotary, positions=3, heads_axis=-3), lambda n: [(8, n, 64), (2, n, 64)]),
        (partial(jaxnorm.qkv_norm_rotary, positions=3, heads=8, kv_heads=2), lambda n: [(n, 12, 64)]),
    ],
)
@pytest.mark.parametrize(
    ("tokens", "platform", "calls"), [(1, "cuda", 1), (2, "cuda", 0), (64, "cuda", 0), (65, "cuda", 1), (2, "cpu", 1)]
)
def test_tokens_that_are_decoded(function, shapes, tokens, platform, calls):
    assert sum(native_calls(function, shapes(tokens), platform=platform).values()) == calls


def test_info_says_so(capsys):
    info.main(["--platform", "cuda", "--dtype", "bfloat16", "--shape", "8x1153"])
    forward, backward, alone, _ = capsys.readouterr().out.splitlines()[-4:]
    assert forward.startswith("forward           xla, because XLA's code is faster for half types")
    assert "threads" in backward
    assert "no gradient is taken xla, because XLA's code is faster for RMSNorm of at most 8192 columns" in alone


@pytest.mark.parametrize(
    ("wrap", "backward"), [(lambda f: f, {}), (jax.grad, {"backward": "native"})], ids=["forward alone", "a gradient"]
)
def test_explain_says_so(wrap, backward):
    norms = jaxnorm.explain(wrap(lambda x: rms(x).astype("float32").sum()), jax.ShapeDtypeStruct((8, 1153), "bfloat16"))
    by_way = {norm.direction: norm.on("cuda") for norm in norms}
    assert {way: runs.implementation for way, runs in by_way.items()} == {"forward": "xla"} | backward
    assert by_way["forward"].why.startswith("XLA's code is faster")
    assert {norm.on("cpu").implementation for norm in norms} == {"native"}


@pytest.mark.parametrize(("temperature", "calls"), [(0, {}), (0.5, {"jaxnorm_sample_fwd": 1})])
def test_the_largest_logit(temperature, calls):
    choose = partial(jaxnorm.sample, uniform=0.5, temperature=temperature)
    assert native_calls(choose, [(4, 151_936)]) == calls
