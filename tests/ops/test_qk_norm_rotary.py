"""`qk_norm_rotary` as models have it: layouts, tables, scaled frequencies, decoding, heads over a mesh.

What holds for q and k of one product, too, is tested for `qkv_norm_rotary` with `both`.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import DTYPES, assert_close, bits, draw, draw_k_scale, draw_q_scale, draw_x
from coverage import cover
from hlo import collectives, compiled_text, count_native_calls
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import assert_one_device_gives, mesh_of, placed
from native import is_platform_with_kernels

import jaxnorm

pytestmark = pytest.mark.jax_version

B, T, H, K, D = 2, 6, 4, 2, 16
CALLS = ("jaxnorm_qk_norm_rotary_fwd", "jaxnorm_qk_norm_rotary_bwd")


def draw_qk(dtype="float32", dims=(B, T), heads=(H, K)):
    return tuple(draw(name, (*dims, count, D), dtype, 0.3, 2.0) for name, count in zip("qk", heads, strict=True))


def draw_scales():
    return draw_q_scale((D,)), draw_k_scale((D,))


def rms(x, scale=None, offset=0.0):
    h = x.astype(jnp.float32)
    h = h * jax.lax.rsqrt(jnp.square(h).mean(-1, keepdims=True) + 1e-6)
    return h if scale is None else h * (scale + offset)


def frequencies_of(dim, theta=10_000.0):
    return np.float32(theta ** (-np.arange(0, dim, 2) / dim))


def llama_tables(positions, frequencies):
    """As the model hubs' Llama makes them."""
    angles = positions[..., None].astype(jnp.float32) * frequencies
    doubled = jnp.concatenate([angles, angles], -1)
    return jnp.cos(doubled), jnp.sin(doubled)


def llama(x, cos, sin):
    """As the model hubs' Llama rotates."""
    first, second = jnp.split(x, 2, -1)
    return x * cos[..., None, :] + jnp.concatenate([-second, first], -1) * sin[..., None, :]


def gptj_tables(positions, frequencies):
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.repeat(jnp.cos(angles), 2, -1), jnp.repeat(jnp.sin(angles), 2, -1)


def gptj(x, cos, sin):
    """As GPT-J rotates every two."""
    every_two = jnp.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape)
    return x * cos[..., None, :] + every_two * sin[..., None, :]


def partly(rotate, dim):
    return lambda x, cos, sin: jnp.concatenate([rotate(x[..., :dim], cos, sin), x[..., dim:]], -1)


def llama3(frequencies, factor=8.0, low=1.0, high=4.0, context=8192):
    """Llama 3.1's scaling: long waves are slowed down, and those between are mixed."""
    waves = 2 * np.pi / frequencies
    mix = np.clip((context / waves - low) / (high - low), 0, 1)
    return np.float32((1 - mix) * frequencies / factor + mix * frequencies)


ARANGE = jnp.arange(T)
# What is passed beside q, k and scales; and, of plain jax.numpy, the rotation and its tables.
MODELS = {
    "Llama": ({}, llama, llama_tables(ARANGE, frequencies_of(D))),
    "Llama, by tables": (
        dict(zip(("cos", "sin"), llama_tables(ARANGE, frequencies_of(D)), strict=True)),
        llama,
        llama_tables(ARANGE, frequencies_of(D)),
    ),
    "Llama, another base": ({"theta": 5e5}, llama, llama_tables(ARANGE, frequencies_of(D, 5e5))),
    "Llama 3": (
        {"frequencies": jnp.asarray(llama3(frequencies_of(D, 5e5)))},
        llama,
        llama_tables(ARANGE, llama3(frequencies_of(D, 5e5))),
    ),
    "GPT-J": ({"interleaved": True}, gptj, gptj_tables(ARANGE, frequencies_of(D))),
    "GPT-J, by tables": (
        {"interleaved": True, **dict(zip(("cos", "sin"), gptj_tables(ARANGE, frequencies_of(D)), strict=True))},
        gptj,
        gptj_tables(ARANGE, frequencies_of(D)),
    ),
    "NeoX, a quarter": ({"rotary_dim": 4}, partly(llama, 4), llama_tables(ARANGE, frequencies_of(4))),
    "GPT-J, a half": ({"rotary_dim": 8, "interleaved": True}, partly(gptj, 8), gptj_tables(ARANGE, frequencies_of(8))),
    "positions of each sequence": (
        {"positions": jnp.stack([ARANGE, ARANGE + 1000])},
        llama,
        llama_tables(jnp.stack([ARANGE, ARANGE + 1000]), frequencies_of(D)),
    ),
}


def by_model(name, norm=rms):
    """Plain jax.numpy, for q, k and scales."""
    _, rotate, tables = MODELS[name]
    return lambda q, k, *scales: tuple(
        rotate(norm(x, scale), *tables).astype(x.dtype) for x, scale in zip((q, k), scales or (None, None), strict=True)
    )


def of_product(q, k, *args, **options):
    """`qkv_norm_rotary` of such q and k, and values that nobody reads."""
    counts = {"heads": q.shape[-2], "kv_heads": k.shape[-2]}
    product = jnp.concatenate([q, k, jnp.full_like(k, jnp.nan)], -2)
    shape = product.shape if q.ndim > 3 else (1, *product.shape)  # of four axes no two can be meant
    results = jaxnorm.qkv_norm_rotary(product.reshape(shape), *args, return_v=False, **counts, **options)
    return tuple(y.reshape(x.shape) for y, x in zip(results, (q, k), strict=True))


both = pytest.mark.parametrize("rotary", [jaxnorm.qk_norm_rotary, of_product], ids=["apart", "of one product"])


def loss_of(function):
    return lambda *args: sum(jnp.sin(y.astype(jnp.float32)).sum() for y in function(*args))


def with_gradients(function, args):
    return jax.jit(lambda *args: (function(*args), jax.grad(loss_of(function), range(len(args)))(*args)))(*args)


def with_pullback(function):
    def step(q, k, *scales):
        results, pullback = jax.vjp(function, q, k, *scales)
        return results, pullback((jnp.cos(q), jnp.sin(k)))

    return step


@pytest.mark.on_emulator
@both
@pytest.mark.parametrize("name", MODELS)
def test_results_and_gradients_are_the_models(name, rotary):
    args = *draw_qk(), *draw_scales()
    ours = partial(rotary, **MODELS[name][0])
    assert_close(with_gradients(ours, args), with_gradients(by_model(name), args))


@both
@pytest.mark.parametrize("name", ["Llama", "GPT-J, a half"])
def test_without_a_norm(name, rotary):
    ours = partial(rotary, normalize=False, **MODELS[name][0])
    plain = by_model(name, norm=lambda x, _: x)
    assert_close(with_gradients(ours, draw_qk()), with_gradients(plain, draw_qk()))


def test_without_a_norm_nothing_but_angles_is_kept():
    rotary = partial(jaxnorm.qk_norm_rotary, normalize=False)
    pullback = jax.eval_shape(lambda *args: jax.vjp(rotary, *args)[1], *draw_qk())
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
    ours, plain = (
        WITHOUT_PRIMALS[name](partial(rotary, normalize=False)),
        WITHOUT_PRIMALS[name](by_model("Llama", norm=lambda x, _: x)),
    )
    assert_close(jax.jit(ours)(*draw_qk()), jax.jit(plain)(*draw_qk()))


@both
def test_layer_norm(rotary):
    def layer(x, scale):
        centred = x - x.mean(-1, keepdims=True)
        return centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-6) * scale

    args = *draw_qk(), *draw_scales()
    ours = partial(rotary, normalize="layer")
    assert_close(with_gradients(ours, args), with_gradients(by_model("Llama", layer), args))


@both
def test_a_scale_for_each_head_and_gemmas_offset(rotary):
    args = *draw_qk(), draw_q_scale((H, D)), draw_k_scale((K, D))
    ours = partial(rotary, scale_offset=1.0)
    assert_close(with_gradients(ours, args), with_gradients(by_model("Llama", partial(rms, offset=1.0)), args))


@pytest.mark.on_emulator
@cover(name=["Llama", "GPT-J, a half", "positions of each sequence"], per_head=[False, True])
def test_heads_before_tokens(name, per_head):
    scales = (draw_q_scale((H, D)), draw_k_scale((K, D))) if per_head else draw_scales()
    options = MODELS[name][0]

    def swapped(q, k, *scales):
        results = jaxnorm.qk_norm_rotary(q.swapaxes(1, 2), k.swapaxes(1, 2), *scales, axis_of_heads=-3, **options)
        return tuple(y.swapaxes(1, 2) for y in results)

    args = *draw_qk(), *scales
    ours = partial(jaxnorm.qk_norm_rotary, **options)
    assert_close(with_gradients(swapped, args), with_gradients(ours, args))


# One token of each sequence, which is at a place of its own: with its axis, and without.
@both
def test_decoding(rotary):
    q, k = draw_qk()
    whole = jax.jit(rotary)(q, k)
    places = jnp.array([1, 4])
    rows = jnp.arange(B)
    one = jax.jit(partial(rotary, positions=places[:, None]))(q[rows, places][:, None], k[rows, places][:, None])
    bare = jax.jit(partial(rotary, positions=places))(q[rows, places], k[rows, places])
    expected = [y[rows, places] for y in whole]
    assert_close([y[:, 0] for y in one], expected)
    assert_close(list(bare), expected)


# The tokens' axes, and positions of which not all neighbours differ.
@both
@cover(shape=[(), (5,), (3, 1), (2, 1, 5), (1, 3, 1)], examples={"whole": None, "by vmap": 0, "with positions": 1})
def test_positions_that_broadcast(shape, examples, rotary):
    q, k = draw_qk(dims=(2, 3, 5))
    positions = jnp.floor(50 * jnp.abs(draw("positions", shape)))
    whole = jnp.broadcast_to(positions, (2, 3, 5))
    expected = jax.jit(rotary)(q, k, positions=whole)
    function = lambda q, k, positions: rotary(q, k, positions=positions)  # noqa: E731
    if examples is None:
        actual = jax.jit(function)(q, k, positions)
    else:
        given = jnp.stack([positions] * 3) if examples else positions
        many = jax.jit(jax.vmap(function, (0, 0, 0 if examples else None)))(
            jnp.stack([q] * 3), jnp.stack([k] * 3), given
        )
        actual = tuple(y[2] for y in many)
    assert_close(actual, expected)


# Queries one after the other, with scales of an ensemble: the formula's sums, and the rows' kernel.
@both
def test_vmap_over_scales(rotary):
    q, k = draw_qk()
    scales = [jnp.stack([scale, 2 * scale, scale + 1]) for scale in draw_scales()]

    def of(function):
        gradients = jax.vmap(jax.grad(loss_of(function), (0, 1, 2, 3)), (None, None, 0, 0))
        return jax.jit(gradients)(q, k, *scales)

    assert_close(of(rotary), of(by_model("Llama")))


@both
def test_half_types_are_rounded_once(rotary):
    q, k = draw_qk("bfloat16")
    results = jax.jit(rotary)(q, k, *draw_scales())
    wide = jax.jit(rotary)(q.astype("float32"), k.astype("float32"), *draw_scales())
    assert [y.dtype for y in results] == ["bfloat16"] * 2
    for y, exact in zip(results, wide, strict=True):
        assert np.mean(np.asarray(y) == np.asarray(exact.astype("bfloat16"))) > 0.995


# Positions, frequencies and tables are no variables.
@both
def test_angles_have_no_gradient(rotary):
    q, k = draw_qk()
    by_positions = lambda positions, frequencies: loss_of(  # noqa: E731
        lambda q, k: rotary(q, k, positions=positions, frequencies=frequencies)
    )(q, k)
    by_tables = lambda cos, sin: loss_of(lambda q, k: rotary(q, k, cos=cos, sin=sin))(q, k)  # noqa: E731
    tables = llama_tables(ARANGE, frequencies_of(D))
    gradients = [
        *jax.grad(by_positions, (0, 1))(ARANGE.astype("float32"), jnp.asarray(frequencies_of(D))),
        *jax.grad(by_tables, (0, 1))(*tables),
    ]
    assert [float(jnp.abs(gradient).max()) for gradient in gradients] == [0.0] * 4


@both
def test_float64_tables_are_not_rounded(rotary):
    with jax.enable_x64(True):
        q, k = (x.astype("float64") for x in draw_qk())
        results = rotary(q, k, normalize=False)
        angles = np.arange(T)[:, None, None] * 10_000.0 ** (-np.arange(0, D, 2) / D)
        a, b = np.split(np.asarray(q), 2, -1)
        expected = np.concatenate(
            [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1
        )
    np.testing.assert_allclose(results[0], expected, rtol=1e-12, atol=1e-14)


# Heads over a mesh axis and sequences over another. A single head of keys is everywhere; three do not divide.
HEADS = {"grouped": (8, 4), "one for all": (8, 1), "as many": (4, 4)}
# Which of the two scales have a row for each head.
PER_HEAD = {"shared": (False, False), "per head": (True, True), "q's": (True, False), "k's": (False, True)}


@pytest.mark.several
@cover(
    heads=HEADS,
    axis_type=[AxisType.Auto, AxisType.Explicit],
    per_head=PER_HEAD,
    batch=["a", None],
    normalize=["rms", "layer"],
    dtype=DTYPES,
    scale_dtype=DTYPES,
)
def test_heads_over_a_mesh(devices, heads, axis_type, per_head, batch, normalize, dtype, scale_dtype):
    mesh = mesh_of(devices, axis_type)
    q, k = draw_qk(dtype, dims=(8, 4), heads=heads)
    shapes = [(count, D) if each else (D,) for count, each in zip(heads, per_head, strict=True)]
    args = q, k, draw_q_scale(shapes[0], scale_dtype), draw_k_scale(shapes[1], scale_dtype)
    positions = jnp.arange(32).reshape(8, 4)
    over_b = ["b" if count > 1 else None for count in heads]
    of_scales = (P(b) if each else P() for b, each in zip(over_b, per_head, strict=True))
    specs = [*(P(batch, None, b) for b in over_b), *of_scales]

    step = with_pullback(lambda *args: jaxnorm.qk_norm_rotary(*args, positions, normalize=normalize))
    expected = jax.jit(step)(*args)
    with jax.set_mesh(mesh):
        on_mesh = placed(mesh, args, specs)
        compiled = jax.jit(step).lower(*on_mesh).compile()
        actual = compiled(*on_mesh)
    assert_one_device_gives(actual, expected)
    # Nothing but the sums of the scales' gradients, in float32: over tokens, and where heads share one over heads.
    sums = [
        D * (count // (mesh.shape["b"] if b else 1)) if each else D
        for count, b, each in zip(heads, over_b, per_head, strict=True)
        if (batch and mesh.shape["a"] > 1) or (b and not each)
    ]
    assert collectives(compiled.as_text()) == ({"all-reduce": 4 * sum(sums)} if sums and mesh.size > 1 else {})
    assert list(count_native_calls(compiled.as_text()).values()) == [1, 1] * is_platform_with_kernels()


# Keys of fewer heads than devices: their gradients are right, wherever they are computed.
@pytest.mark.several
def test_heads_that_do_not_divide(devices):
    mesh = mesh_of(devices, AxisType.Auto)
    q, k = draw_qk(dims=(8, 4), heads=(6, 3))
    args = q, k, *draw_scales()

    step = with_pullback(jaxnorm.qk_norm_rotary)
    expected = jax.jit(step)(*args)
    actual = jax.jit(step)(*placed(mesh, args, [P("a", None, "b"), P("a"), P(), P()]))
    assert_close(jax.device_get(actual), jax.device_get(expected))


# What is asked of the many heads of the one splits no single head of the other, nor its statistics.
@pytest.mark.several
@cover(heads=[(1, 8), (8, 1)], normalize=["rms", "layer"], with_scales=[False, True])
def test_a_single_head_beside_split_ones(devices, heads, normalize, with_scales):
    mesh = mesh_of(devices, AxisType.Auto)
    args = [*draw_qk(dims=(8, 4), heads=heads), *(draw_scales() if with_scales else ())]
    split = NamedSharding(mesh, P(None, None, ("a", "b")))

    def step(q, k, *scales):
        function = partial(jaxnorm.qk_norm_rotary, normalize=normalize)
        results, pullback = jax.vjp(function, q, k, *scales)
        results = [jax.lax.with_sharding_constraint(y, split) if y.shape[2] > 1 else y for y in results]
        return results, pullback((jnp.cos(q), jnp.sin(k)))

    expected = jax.jit(step)(*args)
    specs = [P("a") if count > 1 else P() for count in heads]
    assert_close(jax.device_get(jax.jit(step)(*placed(mesh, args, [*specs, *[P()] * (len(args) - 2)]))), expected)


@pytest.mark.several
def test_rotary_alone_over_a_mesh(devices):
    mesh = mesh_of(devices, AxisType.Auto)
    args = draw_qk(dims=(8, 4), heads=(4, 2))

    step = with_pullback(partial(jaxnorm.qk_norm_rotary, normalize=False))
    expected = jax.jit(step)(*args)
    on_mesh = placed(mesh, args, [P("a", None, "b")] * 2)
    assert_close(jax.device_get(jax.jit(step)(*on_mesh)), jax.device_get(expected))
    assert collectives(compiled_text(step, *on_mesh)) == {}


@pytest.mark.several
@pytest.mark.parametrize("where", ["tokens of k", "a head's elements"])
def test_what_an_explicit_mesh_may_not_split(devices, where):
    mesh = mesh_of(devices, AxisType.Explicit)
    specs, message = {
        "tokens of k": ((P("a"), P("b")), "k is sharded as .*expected the tokens .* Reshard k"),
        "a head's elements": ((P(None, None, None, "b"),) * 2, "the last axis of q, .* is split over .* devices"),
    }[where]
    with jax.set_mesh(mesh):
        args = placed(mesh, draw_qk(dims=(8, 4)), specs)
        with pytest.raises(ValueError, match=f"^qk_norm_rotary: {message}"):
            jax.eval_shape(jaxnorm.qk_norm_rotary, *args)


def test_a_head_size_of_unknown_length():
    dims = jax.export.symbolic_shape("2, 3, 4, d")
    q = jax.ShapeDtypeStruct(dims, "float32")
    with pytest.raises(ValueError, match=r"last axis of q, .* has a symbolic length"):
        jax.eval_shape(jaxnorm.qk_norm_rotary, q, q)


@both
def test_a_row_of_a_long_sequence_has_the_bits_of_the_row_alone(rotary):
    q, k = (draw_x((500, count, D)) for count in (H, K))
    whole = jax.jit(rotary)(q, k)
    alone = jax.jit(partial(rotary, positions=jnp.array([321])))(q[321:322], k[321:322])
    assert bits(alone) == bits([y[321:322] for y in whole])


@cover(heads=[(0, K), (H, 0), (0, 0)], axis_of_heads=[-2, -3])
def test_no_heads(heads, axis_of_heads):
    q, k = (jnp.ones((B, T, n, D) if axis_of_heads == -2 else (B, n, T, D)) for n in heads)
    args = q, k, *(jnp.ones((n, D)) for n in heads)
    rotated = partial(jaxnorm.qk_norm_rotary, axis_of_heads=axis_of_heads)
    results, gradients = jax.jit(lambda *args: (lambda y, pullback: (y, pullback(y)))(*jax.vjp(rotated, *args)))(*args)
    assert [a.shape for a in (*results, *gradients)] == [q.shape, k.shape, *(a.shape for a in args)]


# Without 64-bit types jax.numpy would make others of them.
@both
@pytest.mark.parametrize("positions", [np.int64(2**32 + 5), np.arange(T) + 2**33, 2**40], ids=str)
def test_positions_that_do_not_fit_32_bits(positions, rotary):
    q, k = draw_qk()
    ours = rotary(q, k, positions=positions)
    assert bits(ours) == bits(rotary(q, k, positions=np.float32(positions)))
