"""`qk_norm_rotary` and `qkv_norm_rotary` on meshes: heads, tokens and what is beside them over devices."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from cases import DTYPES, assert_close, draw, draw_k_scale, draw_q_scale
from coverage import cover
from hlo import collectives, count_native_calls
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from meshes import assert_one_device_gives, mesh_of, on_mesh, placed
from native import is_platform_with_kernels

import jaxnorm
from ops.rotary import NORMALIZE, PACKED, D, H, K, draw_qk, draw_qkv, draw_scales, of_heads, step

pytestmark = [pytest.mark.jax_version, pytest.mark.needs("several")]


def program_over(mesh, function, args, specs, calls=2):
    """The text of a program for a mesh, whose results are those of one device, with so many native calls."""
    actual, text = on_mesh(mesh, function, args, specs)
    assert_one_device_gives(actual, jax.jit(function)(*args))
    assert list(count_native_calls(text).values()) == [1] * calls * is_platform_with_kernels()
    return text


def product(flat):
    return draw_qkv((8, 4)).reshape(8, 4, *([-1] if flat else [PACKED, D]))


# Heads over a mesh axis and sequences over another. A single head of keys is everywhere; three do not divide.
HEADS = {"grouped": (8, 4), "one for all": (8, 1), "as many": (4, 4)}
# Which of the two scales have a row for each head.
PER_HEAD = {"shared": (False, False), "per head": (True, True), "q's": (True, False), "k's": (False, True)}


@cover(
    heads=HEADS,
    axis_type=[AxisType.Auto, AxisType.Explicit],
    per_head=PER_HEAD,
    batch=["a", None],
    normalize=NORMALIZE,
    dtype=DTYPES,
    scale_dtype=DTYPES,
)
def test_heads_over_a_mesh(devices, heads, axis_type, per_head, batch, normalize, dtype, scale_dtype):
    mesh = mesh_of(devices, axis_type)
    shapes = [(count, D) if each else (D,) for count, each in zip(heads, per_head, strict=True)]
    scales = draw_q_scale(shapes[0], scale_dtype), draw_k_scale(shapes[1], scale_dtype)
    over_b = ["b" if count > 1 else None for count in heads]
    of_scales = (P(b) if each else P() for b, each in zip(over_b, per_head, strict=True))
    args = *draw_qk((8, 4), dtype, heads), *(scales if normalize else ())
    specs = [*(P(batch, None, b) for b in over_b), *of_scales][: len(args)]

    def rotary(*args):
        return jaxnorm.qk_norm_rotary(*args, positions=jnp.arange(32).reshape(8, 4), normalize=normalize)

    text = program_over(mesh, step(rotary), args, specs)
    # Nothing but the sums of the scales' gradients, in float32: over tokens, and where heads share one over heads.
    sums = [
        D * (count // (mesh.shape["b"] if b else 1)) if each else D
        for count, b, each in zip(heads, over_b, per_head, strict=True)
        if normalize and ((batch and mesh.shape["a"] > 1) or (b and not each))
    ]
    assert collectives(text) == ({"all-reduce": 4 * sum(sums)} if sums and mesh.size > 1 else {})


def test_heads_that_do_not_divide(devices):
    mesh = mesh_of(devices, AxisType.Auto)
    args = *draw_qk((8, 4), heads=(6, 3)), *draw_scales()
    program_over(mesh, step(jaxnorm.qk_norm_rotary), args, [P("a", None, "b"), P("a"), P(), P()])


# What is asked of the many heads of the one splits no single head of the other, nor its statistics.
@cover(heads=[(1, 8), (8, 1)], normalize=["rms", "layer"], with_scales=[False, True])
def test_a_single_head_beside_split_ones(devices, heads, normalize, with_scales):
    mesh = mesh_of(devices, AxisType.Auto)
    args = [*draw_qk(dims=(8, 4), heads=heads), *(draw_scales() if with_scales else ())]
    split = NamedSharding(mesh, P(None, None, ("a", "b")))

    def of_split(q, k, *scales):
        function = partial(jaxnorm.qk_norm_rotary, normalize=normalize)
        results, pullback = jax.vjp(function, q, k, *scales)
        results = [jax.lax.with_sharding_constraint(y, split) if y.shape[2] > 1 else y for y in results]
        return results, pullback(jaxnorm.QK(jnp.cos(q), jnp.sin(k)))

    specs = [*(P("a") if count > 1 else P() for count in heads), *[P()] * (len(args) - 2)]
    assert_close(jax.device_get(jax.jit(of_split)(*placed(mesh, args, specs))), jax.jit(of_split)(*args))


# The tokens of either axis over a mesh: nothing is exchanged but the gradients of scales.
TOKENS_OVER = {"batch": P("a"), "tokens": P(None, "b"), "both": P("a", "b"), "nothing": P()}


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
    scales = draw_scales(per_head) if normalize else ()
    tables = {"counted": {}, "positions": {"positions": jnp.arange(32).reshape(8, 4)}}.get(angles) or dict(
        zip(("cos", "sin"), draw("tables", (2, 4, D // 2)), strict=True) if angles == "tables" else ()
    )
    function = step(lambda *args: of_heads(*args, normalize=normalize, **tables))
    text = program_over(mesh, function, (product(flat), *scales), [spec, *(P() for _ in scales)])
    is_split = any(mesh.shape[axis] > 1 for axis in spec if axis)
    sums = 4 * sum(scale.size for scale in scales)
    assert collectives(text) == ({"all-reduce": sums} if sums and is_split else {})


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
        return step(lambda *args: of_heads(*args, **given))(qkv, q_scale, k_scale)

    program_over(mesh, function, (qkv, *scales, *angles), [*specs, *[of_angles] * len(angles)])


# Heads over a mesh that XLA splits: gathered, as a device that has some of q's has none of v's.
@cover(spec=[P(None, None, "b"), P("a", None, "b"), P(None, None, None, "a")], normalize=NORMALIZE)
def test_heads_over_automatic_axes_are_gathered(devices, spec, normalize):
    function = step(partial(of_heads, normalize=normalize))
    text = program_over(mesh_of(devices, AxisType.Auto), function, (draw_qkv((8, 4)),), [spec])
    assert set(collectives(text)) <= {"all-gather"}


@cover(flat=[False, True], normalize=NORMALIZE)
def test_heads_over_explicit_axes_are_the_formulas(devices, flat, normalize):
    mesh = mesh_of(devices, AxisType.Explicit)
    scales = draw_scales(per_head=True) if normalize else ()
    function, specs = partial(of_heads, normalize=normalize), [P("a", None, "b"), *(P() for _ in scales)]
    args, is_split = (product(flat), *scales), mesh.shape["b"] > 1
    program_over(mesh, step(function), args, specs, calls=0 if is_split else 2)
    if not is_split:
        return
    with jax.set_mesh(mesh):
        spread = placed(mesh, args, specs)
        (call, *_) = jaxnorm.explain(function, *spread)
        assert "an Explicit mesh splits the heads of qkv" in call.on("cpu").why
        with pytest.raises(RuntimeError, match=r"^qkv_norm_rotary: .* an Explicit mesh splits the heads of qkv"):
            jax.eval_shape(partial(function, implementation="native"), *spread)


of_two, of_seven = jaxnorm.qk_norm_rotary, partial(jaxnorm.qkv_norm_rotary, heads=6, kv_heads=1)
OF_QK, HEAD, ELEMENTS = [(8, 4, H, D), (8, 4, K, D)], P(None, None, "b"), P(None, None, None, "b")
# Functions, the shapes of what they are given, how these are split, and what is said of it.
NOT_SPLIT = {
    "tokens of k": (of_two, OF_QK, [P("a"), P("b")], "k is sharded as .*expected the tokens .* Reshard k"),
    "elements of q": (of_two, OF_QK, [ELEMENTS] * 2, "the last axis of q, .* is split over .* devices"),
    "heads": (of_seven, [(8, 4, 8, D)], [HEAD], ".*heads=6 and kv_heads=1"),
    "flat heads": (of_seven, [(8, 4, 8 * D)], [HEAD], ".*heads=6 and kv_heads=1"),
    "elements": (of_seven, [(8, 4, 8, D)], [ELEMENTS], ".*last axis of qkv, .* rotated together"),
}


@pytest.mark.parametrize("name", NOT_SPLIT)
def test_what_an_explicit_mesh_may_not_split(devices, name):
    mesh = mesh_of(devices, AxisType.Explicit)
    function, shapes, specs, message = NOT_SPLIT[name]
    if function is of_seven and mesh.shape["b"] == 1:
        pytest.skip("one device")
    with jax.set_mesh(mesh):
        args = placed(mesh, [jnp.ones(shape) for shape in shapes], specs)
        with pytest.raises(ValueError, match=f"^{'qkv' if function is of_seven else 'qk'}_norm_rotary: {message}"):
            jax.eval_shape(function, *args)


# Such an axis splits nothing, and its kernel runs.
@cover(flat=[False, True], normalize=NORMALIZE)
def test_heads_over_an_explicit_axis_of_one_device(devices, flat, normalize):
    mesh = jax.make_mesh((len(devices), 1), ("a", "b"), (AxisType.Explicit,) * 2, devices=devices)
    function = step(partial(of_heads, normalize=normalize))
    program_over(mesh, function, (product(flat),), [P("a", None, "b")])


# As tensor parallelism has it: a device's columns of the kernel are the q, k and v of its own heads.
def test_each_device_has_a_product_of_its_own_heads(devices):
    mesh = mesh_of(devices, AxisType.Auto)
    shards = mesh.shape["b"]
    by_device, scales = draw("qkv", (8, 4, shards, PACKED, D)), draw_scales()

    def split(x, *scales):
        return jax.tree.map(lambda y: y[:, :, None], of_heads(x[:, :, 0], *scales))

    specs = P("a", None, "b"), P(), P()
    on_mesh = jax.shard_map(split, mesh=mesh, in_specs=specs, out_specs=P("a", None, "b"))
    expected = jax.jit(step(jax.vmap(of_heads, (2, None, None), 2)))(by_device, *scales)
    assert_one_device_gives(jax.jit(step(on_mesh))(*placed(mesh, (by_device, *scales), specs)), expected)
