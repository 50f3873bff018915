"""What models have of `qk_norm_rotary`, and of q and k of one product: tables, frequencies, decoding, positions."""

from functools import partial

import formulas
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import assert_close, bits, draw, draw_x
from coverage import cover
from op import without_names

import jaxnorm
from ops.rotary import NORMS, B, D, H, K, T, draw_qk, draw_qkv, draw_scales, loss_of, of_heads, rotated, step

pytestmark = pytest.mark.jax_version


def frequencies_of(dim, theta=10_000.0):
    return np.float32(theta ** (-np.arange(0, dim, 2) / dim))


def llama3(frequencies, factor=8.0, low=1.0, high=4.0, context=8192):
    """Llama 3.1's scaling: long waves are slowed down, and those between are mixed."""
    waves = 2 * np.pi / frequencies
    mix = np.clip((context / waves - low) / (high - low), 0, 1)
    return jnp.asarray((1 - mix) * frequencies / factor + mix * frequencies, "float32")


def tables_of(angles):
    return {"cos": jnp.cos(angles), "sin": jnp.sin(angles)}


ARANGE = jnp.arange(T)
ANGLES = ARANGE[:, None].astype("float32") * frequencies_of(D)
LLAMA = tables_of(jnp.concatenate([ANGLES, ANGLES], -1))  # as the model hubs' Llama makes them
GPTJ = tables_of(jnp.repeat(ANGLES, 2, -1))
# What is passed beside q, k and scales; and what to the formula, if not the same.
MODELS = {"Llama": {}, "Llama, by tables": LLAMA, "Llama, another base": {"theta": 5e5}}
MODELS |= {"Llama 3": {"frequencies": llama3(frequencies_of(D, 5e5))}, "GPT-J": {"interleaved": True}}
MODELS |= {"GPT-J, by tables": {"interleaved": True, **GPTJ}, "NeoX, a quarter": {"rotary_dim": 4}}
MODELS |= {"GPT-J, a half": {"rotary_dim": 8, "interleaved": True}}
MODELS |= {"positions of each sequence": {"positions": jnp.stack([ARANGE, ARANGE + 1000])}}
MODELS |= {"LayerNorm": {"normalize": "layer"}, "Gemma's offset and a scale for each head": {"scale_offset": 1.0}}
MODELS |= {"no norm": {"normalize": False}}
MODELS |= {"no norm, GPT-J, a half": {"normalize": False, "rotary_dim": 8, "interleaved": True}}
OF_FORMULA = {
    "Llama, by tables": {},
    "Llama, another base": {"frequencies": frequencies_of(D, 5e5)},
    "GPT-J, by tables": {"interleaved": True},
}


def by_model(name):
    """Plain jax.numpy, for q, k and scales."""
    options = {"normalize": "rms", "positions": ARANGE, **OF_FORMULA.get(name, MODELS[name])}
    formula, positions = formulas.rotary(NORMS[options.pop("normalize")]), options.pop("positions")
    return lambda q, k, *scales: formula(q, k, positions, *scales, **options)


def of_product(q, k, *args, **options):
    """`qkv_norm_rotary` of such q and k, and values that nobody reads."""
    counts = {"heads": q.shape[-2], "kv_heads": k.shape[-2]}
    product = jnp.concatenate([q, k, jnp.full_like(k, jnp.nan)], -2)
    shape = product.shape if q.ndim > 3 else (1, *product.shape)  # of four axes no two can be meant
    results = jaxnorm.qkv_norm_rotary(product.reshape(shape), *args, **counts, **options)
    return results.q.reshape(q.shape), results.k.reshape(k.shape)


apart = without_names(jaxnorm.qk_norm_rotary)
both = pytest.mark.parametrize("rotary", [apart, of_product], ids=["apart", "of one product"])


@pytest.mark.on_emulator
@both
@pytest.mark.parametrize("name", MODELS)
def test_results_and_gradients_are_the_models(name, rotary):
    args = *draw_qk(), *(() if "no norm" in name else draw_scales("each head" in name))
    assert_close(*(jax.jit(step(f))(*args) for f in (partial(rotary, **MODELS[name]), by_model(name))))


@pytest.mark.parametrize(("function", "args"), [(jaxnorm.qk_norm_rotary, draw_qk()), (of_heads, (draw_qkv(),))])
def test_without_a_norm_nothing_but_angles_is_kept(function, args):
    pullback = jax.eval_shape(lambda *args: jax.vjp(partial(function, normalize=False), *args)[1], *args)
    assert sum(leaf.size for leaf in jax.tree.leaves(pullback)) <= T + D // 2


# What is linear has no primal to read: each rule of a derivative has to do without.
WITHOUT_PRIMALS = {
    "grad of q": lambda f: jax.grad(loss_of(f)),
    "grad of k": lambda f: jax.grad(loss_of(f), 1),
    "jvp of k": lambda f: lambda q, k: jax.jvp(lambda k: f(q, k), (k,), (jnp.cos(k),)),
    "hessian": lambda f: lambda q, k: jax.hessian(loss_of(f), (0, 1))(q[:1], k[:1]),
    "grad of grad of k": lambda f: jax.grad(lambda q, k: jnp.sin(jax.grad(loss_of(f), 1)(q, k)).sum(), 1),
    "vmap of grad": lambda f: jax.vmap(jax.grad(loss_of(f), (0, 1))),
    "vmap of grad of k": lambda f: lambda q, k: jax.vmap(jax.grad(loss_of(f), 1), (None, 0))(q[0], k),
    "jacrev": lambda f: lambda q, k: jax.jacrev(f, (0, 1))(q[:1], k[:1]),
    "transpose of vjp": lambda f: lambda q, k: jax.linear_transpose(jax.vjp(f, q, k)[1], (q, k))((k.sum() * q, k)),
    "grad of scan": lambda f: jax.grad(
        lambda q, k: jax.lax.scan(lambda c, _: (jax.tree.map(jnp.sin, f(*c)), None), (q, k), length=3)[0][0].sum()
    ),
}


@both
@pytest.mark.parametrize("name", WITHOUT_PRIMALS)
def test_without_a_norm_transformed(name, rotary):
    functions = partial(rotary, normalize=False), by_model("no norm")
    assert_close(*(jax.jit(WITHOUT_PRIMALS[name](function))(*draw_qk()) for function in functions))


@pytest.mark.on_emulator
@cover(name=["Llama", "GPT-J, a half", "positions of each sequence"], per_head=[False, True])
def test_heads_before_tokens(name, per_head):
    options = MODELS[name]

    def swapped(q, k, *scales):
        results = jaxnorm.qk_norm_rotary(q.swapaxes(1, 2), k.swapaxes(1, 2), *scales, heads_axis=-3, **options)
        return tuple(y.swapaxes(1, 2) for y in results)

    args = *draw_qk(), *draw_scales(per_head)
    ours = partial(apart, **options)
    assert_close(*(jax.jit(step(f))(*args) for f in (swapped, ours)))


# One token of each sequence, which is at a place of its own: with its axis, and without.
@both
def test_decoding(rotary):
    q, k = draw_qk()
    whole, places = jax.jit(rotary)(q, k), jnp.array([1, 4])
    rows = jnp.arange(B)
    one = jax.jit(partial(rotary, positions=places[:, None]))(q[rows, places][:, None], k[rows, places][:, None])
    bare = jax.jit(partial(rotary, positions=places))(q[rows, places], k[rows, places])
    expected = [y[rows, places] for y in whole]
    assert_close([y[:, 0] for y in one], expected)
    assert_close(list(bare), expected)


# The tokens' axes, and positions of which not all neighbours differ.
@both
@cover(shape=[(), (5,), (3, 1), (2, 1, 5), (1, 3, 1)], axes=[None, (0, 0, None), (0, 0, 0)])
def test_positions_that_broadcast(shape, axes, rotary):
    q, k = draw_qk(dims=(2, 3, 5))
    positions = jnp.floor(50 * jnp.abs(draw("positions", shape)))
    whole = jnp.broadcast_to(positions, (2, 3, 5))
    expected = jax.jit(rotary)(q, k, positions=whole)
    function, args = lambda q, k, positions: rotary(q, k, positions=positions), (q, k, positions)
    if axes:
        function = jax.vmap(function, axes)
        args = [a if axis is None else jnp.stack([a] * 3) for a, axis in zip(args, axes, strict=True)]
    actual = jax.jit(function)(*args)
    assert_close(tuple(y[2] if axes else y for y in actual), expected)


# With scales of an ensemble: the formula's sums, and the rows' kernel.
@both
@cover(
    axes=[(0, 0, None, None), (None, None, 0, None), (None, None, None, 1), (None, None, 0, 0), (1, 1, 0, 0)],
    what=["results", "gradients"],
)
def test_vmap(axes, what, rotary):
    args = *draw_qk((B, 3, T)), *draw_scales()
    stacked = [a if axis is None else jnp.stack([a, 2 * a, a + 1], axis) for a, axis in zip(args, axes, strict=True)]

    def of(function):
        whole = function if what == "results" else jax.grad(loss_of(function), (0, 1, 2, 3))
        return jax.jit(jax.vmap(whole, axes))(*stacked)

    assert_close(of(rotary), of(by_model("Llama")))


@both
def test_angles_have_no_gradient(rotary):
    q, k = draw_qk()
    for angles in ({"positions": ARANGE.astype("float32"), "frequencies": jnp.asarray(frequencies_of(D))}, LLAMA):
        gradients = jax.grad(lambda angles: loss_of(partial(rotary, **angles))(q, k))(angles)
        assert [float(jnp.abs(gradient).max()) for gradient in gradients.values()] == [0.0] * 2


@both
def test_float64_tables_are_not_rounded(rotary):
    with jax.enable_x64(True):
        q, k = (x.astype("float64") for x in draw_qk())
        results = rotary(q, k, normalize=False)
    expected = rotated(np.asarray(q), np.arange(T, dtype="float64"))
    np.testing.assert_allclose(results[0], expected, rtol=1e-12, atol=1e-14)


@both
def test_a_row_of_a_long_sequence_has_the_bits_of_the_row_alone(rotary):
    q, k = (draw_x((500, count, D)) for count in (H, K))
    whole = jax.jit(rotary)(q, k)
    alone = jax.jit(partial(rotary, positions=jnp.array([321])))(q[321:322], k[321:322])
    assert bits(alone) == bits([y[321:322] for y in whole])


@cover(heads=[(0, K), (H, 0), (0, 0)], heads_axis=[-2, -3])
def test_no_heads(heads, heads_axis):
    q, k = (jnp.ones((B, T, n, D) if heads_axis == -2 else (B, n, T, D)) for n in heads)
    args = q, k, *(jnp.ones((n, D)) for n in heads)
    rotated = partial(jaxnorm.qk_norm_rotary, heads_axis=heads_axis)
    results, gradients = jax.jit(lambda *args: (lambda y, pullback: (y, pullback(y)))(*jax.vjp(rotated, *args)))(*args)
    assert [a.shape for a in (*results, *gradients)] == [q.shape, k.shape, *(a.shape for a in args)]


# Without 64-bit types jax.numpy would make others of them.
@both
@pytest.mark.parametrize("positions", [np.int64(2**32 + 5), np.arange(T) + 2**33, 2**40], ids=str)
def test_positions_that_do_not_fit_32_bits(positions, rotary):
    q, k = draw_qk()
    ours = rotary(q, k, positions=positions)
    assert bits(ours) == bits(rotary(q, k, positions=np.float32(positions)))
