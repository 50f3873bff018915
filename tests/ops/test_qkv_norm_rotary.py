"""`qkv_norm_rotary`: how a product is laid out, values, one launch each way, and each axis over a mesh.

Models, tables and decoding are in `test_qk_norm_rotary.py`, for both functions.
"""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from cases import assert_close, bits, draw, draw_k_scale, draw_q_scale
from coverage import cover
from hlo import collectives, compiled_text, count_native_calls, lowered_calls
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from meshes import assert_one_device_gives, mesh_of, placed
from native import is_platform_with_kernels

import jaxnorm

pytestmark = pytest.mark.jax_version

B, T, H, K, D = 2, 6, 4, 2, 16
PACKED = H + 2 * K
CALLS = ("jaxnorm_qkv_norm_rotary_fwd", "jaxnorm_qkv_norm_rotary_bwd")
rotary = partial(jaxnorm.qkv_norm_rotary, heads=H, kv_heads=K)
NORMALIZE = ["rms", "layer", False]


def draw_qkv(dims=(B, T), dtype="float32", heads=PACKED):
    return draw("qkv", (*dims, heads, D), dtype, 0.3, 2.0)


def draw_scales(per_head=False):
    return draw_q_scale((H, D) if per_head else (D,)), draw_k_scale((K, D) if per_head else (D,))


def parts(qkv):
    return jnp.split(qkv, [H, H + K], -2)


def apart(qkv, *args, **options):
    """The same by slices, in plain jax.numpy."""
    q, k, v = parts(qkv)
    return *jaxnorm.qk_norm_rotary(q, k, *args, implementation="jnp", **options), v


def loss_of(function):
    return lambda *args: sum(jnp.sin((i + 1) * y.astype("float32")).sum() for i, y in enumerate(function(*args)))


def step(function, *args):
    results, pullback = jax.vjp(function, *args)
    return results, pullback(tuple(map(jnp.cos, results)))


# A product as it comes out of a layer, with all of its axes or some, and what says where its tokens are.
POSITIONS = jnp.array([3, 5])
LAYOUTS = {
    "flat": ((B, T, PACKED * D), (B, T), {}),
    "flat, no batch": ((B * T, PACKED * D), (B * T,), {}),
    "heads of a batch of batches": ((1, B, T, PACKED, D), (1, B, T), {}),
    "heads, no batch, with scales": ((B * T, PACKED, D), (B * T,), {"q_scale": jnp.ones(D)}),
    "flat, as many tokens as heads, with scales": ((B, PACKED, PACKED * D), (B, PACKED), {"k_scale": jnp.ones(D)}),
    "heads, as many tokens as heads": ((B, PACKED, PACKED, D), (B, PACKED), {}),
    "heads of a token of each sequence": ((B, PACKED, D), (B,), {"positions": POSITIONS}),
    "flat, as many tokens as heads, with positions": (
        (B, PACKED, PACKED * D),
        (B, PACKED),
        {"positions": jnp.arange(B * PACKED).reshape(B, PACKED)},
    ),
    "heads, with tables": ((T, PACKED, D), (T,), dict.fromkeys(("cos", "sin"), jnp.ones((T, D // 2)))),
    "flat, with frequencies": ((PACKED, PACKED * D), (PACKED,), {"frequencies": jnp.ones(D // 2)}),
    "a flat token": ((PACKED * D,), (), {"positions": 7}),
    "heads of a token, with scales": ((PACKED, D), (), {"positions": 7, "k_scale": jnp.ones((K, D))}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name):
    shape, tokens, options = LAYOUTS[name]
    qkv = draw("qkv", (*tokens, PACKED, D))
    results, gradient = jax.jit(lambda x: step(partial(rotary, **options), x))(qkv.reshape(shape))
    assert_close(results, apart(qkv, **options))
    assert [y.shape for y in results] == [(*tokens, count, D) for count in (H, K, K)]
    (expected,) = step(partial(apart, **options), qkv)[1]
    assert_close(gradient, (expected.reshape(shape),))


def test_tokens_of_unknown_number_are_no_heads():
    dims = jax.export.symbolic_shape(f"t, {PACKED * D}")
    results = jax.eval_shape(rotary, jax.ShapeDtypeStruct(dims, "float32"))
    assert [y.shape for y in results] == [(dims[0], count, D) for count in (H, K, K)]


@pytest.mark.parametrize("shape", ["t, 8, d", "t, d"])
def test_a_head_size_of_unknown_length(shape):
    qkv = jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape), "float32")
    with pytest.raises(ValueError, match=r"^qkv_norm_rotary: the last axis of qkv, .* has a symbolic length"):
        jax.eval_shape(rotary, qkv)


# Law 5, of each option with the kernels: the bits of the parts by themselves.
@cover(normalize=NORMALIZE, per_head=[False, True], interleaved=[False, True], dtype=["float32", "bfloat16"])
def test_bits_are_those_of_the_parts(normalize, per_head, interleaved, dtype):
    scales = draw_scales(per_head) if normalize else ()
    options = {"normalize": normalize, "interleaved": interleaved, "rotary_dim": D // 2}

    def by_parts(qkv, *scales):
        q, k, v = parts(qkv)
        return *jaxnorm.qk_norm_rotary(q, k, *scales, **options), v

    both = [jax.jit(partial(step, f))(draw_qkv(dtype=dtype), *scales) for f in (partial(rotary, **options), by_parts)]
    assert bits(both[0]) == bits(both[1])


@pytest.mark.kernels
@pytest.mark.parametrize("normalize", NORMALIZE)
def test_a_step_is_two_calls_and_moves_nothing_beside(normalize):
    text = compiled_text(lambda x, dy: jax.vjp(partial(rotary, normalize=normalize), x)[1](dy), *with_cotangents())
    assert count_native_calls(text) == dict.fromkeys(CALLS[normalize is False :], 1)
    assert not any(f" {op}(" in text for op in ("slice", "concatenate", "pad", "copy", "transpose"))


def with_cotangents():
    qkv = draw_qkv()
    return qkv, tuple(parts(qkv))


def test_without_a_norm_nothing_but_angles_is_kept():
    pullback = jax.eval_shape(lambda x: jax.vjp(partial(rotary, normalize=False), x)[1], draw_qkv())
    assert sum(leaf.size for leaf in jax.tree.leaves(pullback)) <= T + D // 2


# Values that nobody wants, or reads, are not copied, and what was theirs has no gradient, even of what is no number.
UNREAD = {
    "not returned": lambda qkv, **options: rotary(qkv, return_v=False, **options),
    "not read": lambda qkv, **options: rotary(qkv, **options)[:2],
}


@cover(name=UNREAD, normalize=NORMALIZE)
def test_values_that_are_not_read(name, normalize):
    qkv = draw_qkv().at[..., H + K :, :].set(jnp.nan)
    function = partial(name, normalize=normalize)
    results, (gradient,) = jax.jit(partial(step, function))(qkv)
    expected, (of_parts,) = step(lambda x: apart(x, normalize=normalize)[:2], qkv.at[..., H + K :, :].set(0))
    assert_close(results, expected)
    assert_close(gradient, of_parts)
    assert not gradient[..., H + K :, :].any()
    (call,) = lowered_calls(function, CALLS[0], qkv) if is_platform_with_kernels() else ["with_v = false"]
    assert "with_v = false" in call


# The cotangents that are not there, one after the other.
@cover(read=[(0,), (1,), (2,), (0, 2)], normalize=NORMALIZE)
def test_the_gradient_of_some_results(read, normalize):
    scales = draw_scales() if normalize else ()
    functions = (partial(f, normalize=normalize) for f in (rotary, apart))
    ours, plain = (
        jax.jit(jax.grad(loss_of(lambda *args, f=f: [f(*args)[i] for i in read]), range(1 + len(scales))))
        for f in functions
    )
    assert_close(ours(draw_qkv(), *scales), plain(draw_qkv(), *scales))


@cover(axes=[(0, None, None), (None, 0, None), (None, None, 1), (1, 0, 0)], what=["results", "gradients"])
def test_vmap_of_each_operand(axes, what):
    args = draw_qkv((B, 3, T)), *draw_scales()
    examples = [
        jnp.stack([a, 2 * a, a + 1], axis) if axis is not None else a for a, axis in zip(args, axes, strict=True)
    ]

    def of(function):
        whole = function if what == "results" else jax.grad(loss_of(function), (0, 1, 2))
        return jax.jit(jax.vmap(whole, axes))(*examples)

    assert_close(of(rotary), of(apart))


TRANSFORMED = {
    "jvp of the scales": lambda f, x, *s: jax.jvp(lambda *s: f(x, *s), s, s),
    "jvp of everything": lambda f, *args: jax.jvp(f, args, tuple(map(jnp.cos, args))),
    "linearize": lambda f, *args: jax.linearize(f, *args)[1](*args),
    "hessian": lambda f, x, *s: jax.hessian(loss_of(f), (0, 1))(x[:1, :2], *s),
    "grad of scan of remat": lambda f, x, *s: jax.grad(
        lambda x: jax.lax.scan(lambda c, _: (jnp.concatenate(jax.checkpoint(f)(c, *s), -2), None), x, length=3)[0].sum()
    )(x),
    "linear_transpose": lambda f, x, q, k: jax.linear_transpose(lambda q: f(x, q, k)[0], q)(x[..., :H, :]),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transformed(name):
    of = (jax.jit(partial(TRANSFORMED[name], function)) for function in (rotary, apart))
    assert_close(*(f(draw_qkv(), *draw_scales()) for f in of))


def test_a_function_and_a_direction_are_chosen_by_name():
    gradient = jax.grad(loss_of(rotary))
    with jaxnorm.implementation({"qkv_norm_rotary": {"backward": "jnp"}}):
        text = jax.jit(gradient).lower(draw_qkv()).as_text()
    assert count_native_calls(text) == {CALLS[0]: 1} if is_platform_with_kernels() else {}


# The tokens of either axis over a mesh: nothing is exchanged but the gradients of scales.
TOKENS_OVER = {"batch": P("a"), "tokens": P(None, "b"), "both": P("a", "b"), "nothing": P()}


@pytest.mark.several
@cover(
    spec=TOKENS_OVER,
    axis_type=[AxisType.Auto, AxisType.Explicit],
    normalize=NORMALIZE,
    per_head=[False, True],
    flat=[False, True],
    angles=["counted", "positions", "tables"],
)
def test_tokens_over_a_mesh(devices, spec, axis_type, normalize, per_head, flat, angles):
    mesh = mesh_of(devices, axis_type)
    qkv = draw_qkv((8, 4)).reshape(8, 4, -1) if flat else draw_qkv((8, 4))
    scales = draw_scales(per_head) if normalize else ()
    tables = {"counted": {}, "positions": {"positions": jnp.arange(32).reshape(8, 4)}}.get(angles) or dict(
        zip(("cos", "sin"), draw("tables", (2, 4, D // 2)), strict=True) if angles == "tables" else ()
    )
    function = partial(step, lambda *args: rotary(*args, normalize=normalize, **tables))
    expected = jax.jit(function)(qkv, *scales)
    with jax.set_mesh(mesh):
        on_mesh = placed(mesh, (qkv, *scales), [spec, *(P() for _ in scales)])
        compiled = jax.jit(function).lower(*on_mesh).compile()
        actual = compiled(*on_mesh)
    assert_one_device_gives(actual, expected)
    is_split = any(mesh.shape[axis] > 1 for axis in spec if axis)
    sums = 4 * sum(scale.size for scale in scales)
    assert collectives(compiled.as_text()) == ({"all-reduce": sums} if sums and is_split else {})
    assert list(count_native_calls(compiled.as_text()).values()) == [1, 1] * is_platform_with_kernels()


# Positions, tables and scales that are split: as tokens are, or as nothing is.
@pytest.mark.several
@pytest.mark.parametrize("operand", ["positions", "cos and sin", "q_scale", "k_scale"])
def test_what_is_beside_a_product_over_a_mesh(devices, operand):
    mesh = mesh_of(devices, AxisType.Auto)
    qkv, scales = draw_qkv((8, 4)), draw_scales(per_head=True)
    angles = (jnp.arange(32.0).reshape(8, 4),) if operand == "positions" else tuple(draw("tables", (2, 8, 4, D // 2)))
    names = ("positions",) if operand == "positions" else ("cos", "sin")
    specs = [P("a"), *(P("b") if operand == name else P() for name in ("q_scale", "k_scale"))]
    of_angles = P("a", "b") if operand in ("positions", "cos and sin") else P()

    def function(qkv, q_scale, k_scale, *angles):
        given = dict(zip(names, angles, strict=True))
        return step(lambda *args: rotary(*args, **given), qkv, q_scale, k_scale)

    args = qkv, *scales, *angles
    expected = jax.jit(function)(*args)
    actual = jax.jit(function)(*placed(mesh, args, [*specs, *[of_angles] * len(angles)]))
    assert_close(jax.device_get(actual), jax.device_get(expected))


# Heads over a mesh that XLA splits: gathered, as a device that has some of q's has none of v's.
@pytest.mark.several
@cover(spec=[P(None, None, "b"), P("a", None, "b"), P(None, None, None, "a")], normalize=NORMALIZE)
def test_heads_over_automatic_axes_are_gathered(devices, spec, normalize):
    mesh = mesh_of(devices, AxisType.Auto)
    function = partial(step, partial(rotary, normalize=normalize))
    expected = jax.jit(function)(draw_qkv((8, 4)))
    (on_mesh,) = placed(mesh, (draw_qkv((8, 4)),), [spec])
    assert_one_device_gives(jax.jit(function)(on_mesh), expected)
    text = compiled_text(function, on_mesh)
    assert list(count_native_calls(text).values()) == [1] * (2 * is_platform_with_kernels())
    assert set(collectives(text)) <= {"all-gather"}


@pytest.mark.several
@cover(flat=[False, True], normalize=NORMALIZE)
def test_heads_over_explicit_axes_are_the_formulas(devices, flat, normalize):
    mesh = mesh_of(devices, AxisType.Explicit)
    scales = draw_scales(per_head=True) if normalize else ()
    function = partial(step, partial(rotary, normalize=normalize))
    qkv = draw_qkv((8, 4)).reshape(8, 4, -1) if flat else draw_qkv((8, 4))
    expected = jax.jit(function)(qkv, *scales)
    with jax.set_mesh(mesh):
        on_mesh = placed(mesh, (qkv, *scales), [P("a", None, "b"), *(P() for _ in scales)])
        assert_one_device_gives(jax.jit(function)(*on_mesh), expected)
        if mesh.shape["b"] == 1:
            return
        (call, *_) = jaxnorm.explain(partial(rotary, normalize=normalize), *on_mesh)
        assert "an Explicit mesh splits the heads of qkv" in call.on("cpu").why
        with pytest.raises(RuntimeError, match=r"^qkv_norm_rotary: .* an Explicit mesh splits the heads of qkv"):
            jax.eval_shape(partial(rotary, implementation="native", normalize=normalize), *on_mesh)


@pytest.mark.several
@pytest.mark.parametrize("where", ["heads", "flat heads", "a head's elements"])
def test_what_an_explicit_mesh_may_not_split(devices, where):
    mesh = mesh_of(devices, AxisType.Explicit)
    if mesh.shape["b"] == 1:
        pytest.skip("one device")
    spec, dims, message = {
        "heads": (P(None, None, "b"), (8, 4, 8, D), "heads=6 and kv_heads=1"),
        "flat heads": (P(None, None, "b"), (8, 4, 8 * D), "heads=6 and kv_heads=1"),
        "a head's elements": (P(None, None, None, "b"), (8, 4, 8, D), "last axis of qkv, .* rotated together"),
    }[where]
    with jax.set_mesh(mesh):
        args = placed(mesh, (jnp.ones(dims),), [spec])
        with pytest.raises(ValueError, match=f"^qkv_norm_rotary: .*{message}"):
            jax.eval_shape(partial(jaxnorm.qkv_norm_rotary, heads=6, kv_heads=1), *args)


# Such an axis splits nothing, and its kernel runs.
@pytest.mark.several
@cover(flat=[False, True], normalize=NORMALIZE)
def test_heads_over_an_explicit_axis_of_one_device(devices, flat, normalize):
    mesh = jax.make_mesh((len(devices), 1), ("a", "b"), (AxisType.Explicit,) * 2, devices=devices)
    function = partial(step, partial(rotary, normalize=normalize))
    qkv = draw_qkv((8, 4)).reshape(8, 4, -1) if flat else draw_qkv((8, 4))
    with jax.set_mesh(mesh):
        (on_mesh,) = placed(mesh, (qkv,), [P("a", None, "b")])
        compiled = jax.jit(function).lower(on_mesh).compile()
        assert_one_device_gives(compiled(on_mesh), jax.jit(function)(jnp.asarray(qkv)))
    assert list(count_native_calls(compiled.as_text()).values()) == [1, 1] * is_platform_with_kernels()


# As tensor parallelism has it: a device's columns of the kernel are the q, k and v of its own heads.
@pytest.mark.several
def test_each_device_has_a_product_of_its_own_heads(devices):
    mesh = mesh_of(devices, AxisType.Auto)
    shards = mesh.shape["b"]
    by_device = draw("qkv", (8, 4, shards, PACKED, D))
    scales = draw_scales()

    def split(x, *scales):
        return tuple(y[:, :, None] for y in rotary(x[:, :, 0], *scales))

    specs = P("a", None, "b"), P(), P()
    on_mesh = jax.shard_map(split, mesh=mesh, in_specs=specs, out_specs=P("a", None, "b"))
    expected = jax.jit(partial(step, jax.vmap(rotary, (2, None, None), 2)))(by_device, *scales)
    assert_one_device_gives(jax.jit(partial(step, on_mesh))(*placed(mesh, (by_device, *scales), specs)), expected)
