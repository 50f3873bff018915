"""Softmax and log-softmax: masks of every form, causal ones, axes, and long rows."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import DTYPES, assert_near, bits, draw, draw_x
from coverage import cover
from hlo import collectives, compiled_text, count_native_calls, lowered_calls
from jax import export
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from meshes import mesh_of, placed
from native import is_platform_with_kernels

import jaxnorm

pytestmark = pytest.mark.any_code

OURS = {"softmax": jaxnorm.softmax, "log_softmax": jaxnorm.log_softmax}
THEIRS = {"softmax": jax.nn.softmax, "log_softmax": jax.nn.log_softmax}
names = pytest.mark.parametrize("name", OURS)
DIMS = (2, 3, 2, 2, 3, 5)


def finite(function):
    """The function, with 0 in place of the logarithm of 0."""

    def with_zeros(*args, **options):
        y = function(*args, **options)
        return jnp.where(y == -jnp.inf, 0, y)

    return with_zeros


def derivatives(function, x):
    """The result and the gradient."""
    return function(x), jax.grad(lambda x: jnp.sin(function(x)).sum())(x)


def assert_alike(name, x, ours=None, theirs=None):
    functions = partial(OURS[name], **ours or {}), partial(THEIRS[name], **(theirs or ours or {}))
    assert_near(*(jax.jit(partial(derivatives, finite(function)))(x) for function in functions))


def mask_of(shape):
    """One that leaves something of each row."""
    return (draw("where", shape) > 0) | (jnp.arange(shape[-1]) % 3 == 0)


@names
@pytest.mark.parametrize("axis", [-1, 1, (0, 2)], ids=str)
def test_over_any_axes(name, axis):
    where = mask_of((4, 6, 5)).at[0].set(True).at[:, 0].set(True)
    assert_alike(name, draw_x((4, 6, 5)), {"axis": axis, "where": where})


# Along which of x's leading axes the rows of a mask differ: up to two runs of them, which a kernel takes, and three.
RUNS = ("00000", "11111", "10000", "00001", "01100", "01010", "11001", "10101")


@names
def test_masks_of_every_form(name):
    x = draw_x(DIMS)
    masks = [mask_of((*(n if run == "1" else 1 for n, run in zip(DIMS[:-1], runs, strict=True)), 5)) for runs in RUNS]
    masks += [mask_of((2, 1, 2, 1, 1, 1)), mask_of((3, 5)), jnp.asarray(True)]

    def of_all(function, x):
        def results(x):
            return [finite(function)(x, where=where) for where in masks]

        return results(x), jax.grad(lambda x: sum(jnp.sin(y).sum() for y in results(x)))(x)

    assert_near(*(jax.jit(partial(of_all, functions[name]))(x) for functions in (OURS, THEIRS)))


@cover(name=list(OURS), shape=[(2, 7, 4), (3, 4, 9), (2, 3, 33, 40)], with_where=[False, True])
def test_causal(name, shape, with_where):
    x = draw_x(shape)
    tril = jnp.tril(jnp.ones(shape[-2:], bool))
    given = {"where": mask_of(shape)} if with_where else {}
    assert_alike(name, x, {"causal": True, **given}, {"where": tril & given.get("where", True)})


# In front of the first query, behind the last, and where sums of int32 would wrap.
OFFSETS = {
    "of a cache": 4,
    "before all keys": -(2**40),
    "beyond all keys": 2**40,
    "for all": np.int16(2),
    "for each example": np.int8([3, -2]),
    "for each example, unsigned": np.uint32([[1], [2**32 - 1]]),
    "for each head": np.int32([[0, 1, -50], [2**31 - 1, -(2**31), 5]]),
}


def seen(shape, offset, window):
    """Which keys each query has."""
    offset = np.asarray(offset, np.int64)
    last = np.arange(shape[-2])[:, None] + offset.reshape(*offset.shape, *(1,) * (len(shape) - offset.ndim))
    keys = np.arange(shape[-1])
    return np.broadcast_to((keys <= last) & (True if window is None else keys > last - window), shape)


# jax.numpy makes 32 bits of NumPy's 64, in which these are others.
WIDE = {
    "scalar": (np.int64(2**63 - 1), [0, 1, 2, 3, 4, 5, 6, 7]),
    "least": (np.int64(-(2**63)), []),
    "unsigned": (np.uint64(2**64 - 1), [0, 1, 2, 3, 4, 5, 6, 7]),
    "2**32": (np.array([2**32, 2**33 + 5]), [0, 1, 2, 3, 4, 5, 6, 7]),
    "-2**32": (np.array([-(2**32), -(2**63)]), []),
    "unsigned array": (np.array([2**32, 2**64 - 1], np.uint64), [0, 1, 2, 3, 4, 5, 6, 7]),
    "array of no axes": (np.array(-(2**32)), []),
    "16 bits": (np.array([-(2**15), -8], np.int16), []),
    "8 bits": (np.array([255, 8], np.uint8), [0, 1, 2, 3, 4, 5, 6, 7]),
}


@cover(name=list(OURS), case=WIDE, window=[None, 2**40, np.int64(2**62)], implementation=["native", "jnp"])
def test_an_offset_of_numpy(name, case, window, implementation):
    offset, seen = case
    x = draw_x((2, 4, 8))
    y = OURS[name](x, causal=True, offset=offset, window=window, implementation=implementation)
    where = np.isin(np.arange(8), seen)
    np.testing.assert_array_equal(y, OURS[name](x, where=where, implementation=implementation))


@pytest.mark.on_emulator
@cover(name=list(OURS), offset=OFFSETS, window=[None, 1, 3, 2**40], with_where=[False, True], traced=[False, True])
def test_offset_and_window(name, offset, window, with_where, traced):
    x = draw_x((2, 3, 4, 9))
    given = {"where": mask_of((2, 1, 4, 9))} if with_where else {}

    def function(offset, x):
        return OURS[name](x, causal=True, offset=offset, window=window, **given)

    # A window that is longer than any cache hides nothing, however far the offset.
    where = seen(x.shape, offset, window if window != 2**40 else None) & given.get("where", True)
    is_traced = traced and not isinstance(offset, int)
    jit = (lambda function: partial(jax.jit(function), offset)) if is_traced else (lambda f: partial(f, offset))
    actual = derivatives(finite(jit(function)), x)
    assert_near(actual, derivatives(finite(partial(OURS[name], where=where)), x))
    hidden = 0 if name == "softmax" else -np.inf
    np.testing.assert_array_equal(np.asarray(jit(function)(x))[~np.asarray(where)], hidden)
    np.testing.assert_array_equal(np.asarray(actual[1])[~np.asarray(where)], 0)


# As in decoding: each row with what was before it is that of the whole.
@cover(name=list(OURS), window=[None, 3])
def test_rows_one_by_one(name, window):
    x = draw_x((2, 6, 6))
    of = partial(OURS[name], causal=True, window=window)
    _, rows = jax.lax.scan(lambda at, row: (at + 1, of(row[:, None], offset=at)[:, 0]), 0, jnp.moveaxis(x, 1, 0))
    assert bits(jnp.moveaxis(rows, 0, 1)) == bits(jax.jit(of)(x))


@cover(name=list(OURS), axes=[(0, 0), (1, None), (None, 0)], window=[None, 2])
def test_vmap_of_an_offset(name, axes, window):
    x, offset = draw_x((3, 4, 6)), jnp.asarray([1, -2, 5])
    of = partial(OURS[name], causal=True, window=window)
    x_axis, offset_axis = axes
    args = jnp.moveaxis(x, 0, x_axis or 0) if x_axis is not None else x[0], offset if offset_axis == 0 else offset[0]
    whole = jnp.broadcast_to(x, x.shape) if x_axis is not None else jnp.broadcast_to(x[0], x.shape)
    by_example = offset if offset_axis == 0 else jnp.full(3, offset[0])
    rows = jax.vmap(lambda x, offset: finite(of)(x, offset=offset), axes)(*args)
    assert_near(rows, finite(of)(whole, offset=by_example))


def test_causal_is_that_of_attention():
    q, k = draw("q", (1, 6, 1, 8)), draw("k", (1, 8, 1, 8))
    v = jnp.eye(8)[None, :, None]  # so the result is what values are weighted by
    with jax.default_matmul_precision("highest"):
        expected = jax.nn.dot_product_attention(q, k, v, is_causal=True)[0, :, 0]
        scores = (q[0, :, 0] @ k[0, :, 0].T)[None]
    assert_near(jaxnorm.softmax(scores, scale=8**-0.5, causal=True)[0], expected)


@pytest.mark.on_emulator
@names
def test_rows_of_which_nothing_counts(name):
    x = draw_x((3, 40)).at[1].set(jnp.nan)
    where = jnp.asarray([True, False, True])[:, None]
    y, dx = jax.jit(lambda x: (OURS[name](x, where=where), jax.vjp(partial(OURS[name], where=where), x)[1](x)[0]))(x)
    np.testing.assert_array_equal(y[1], 0 if name == "softmax" else -jnp.inf)
    np.testing.assert_array_equal(dx[1] if name == "log_softmax" else y[1] * 0, jnp.zeros(40))
    assert np.isfinite(y[0]).all()


# What is masked may be anything.
@pytest.mark.on_emulator
@names
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_does_not_count_is_not_seen(name, value):
    where = jnp.arange(37) % 4 != 1
    x = draw_x((5, 37))
    spoilt = jnp.where(where, x, value)
    function = jax.jit(lambda x: OURS[name](x, where=where))
    assert bits(function(spoilt)) == bits(function(x))
    gradient = jax.jit(jax.grad(lambda x: jnp.sin(finite(function)(x)).sum()))
    assert_near(gradient(spoilt), gradient(x))


@pytest.mark.on_emulator
@names
def test_infinities(name):
    x = jnp.stack([jnp.full(9, -jnp.inf), jnp.arange(9.0).at[4].set(jnp.inf), jnp.arange(9.0).at[4].set(-jnp.inf)])
    np.testing.assert_allclose(OURS[name](x), THEIRS[name](x), rtol=2e-6)


@cover(cols=[1, 50_257, 151_936, 262_144, 2**20, 1_000_003], dtype=DTYPES)
def test_long_rows_sum_to_one(cols, dtype):
    y = jax.jit(partial(jaxnorm.softmax, out_dtype="float32"))(draw_x((2, cols), dtype))
    np.testing.assert_allclose(np.asarray(y, np.float64).sum(-1), 1, rtol=2e-6)


# Rows far from 0, and a scale that makes them so.
@pytest.mark.on_emulator
@names
@pytest.mark.parametrize("offset", [-1e4, 1e4, 3e38])
def test_rows_far_from_zero(name, offset):
    x = draw_x((4, 200)) if abs(offset) < 1e38 else jnp.zeros((4, 200))
    x = x + offset
    np.testing.assert_allclose(OURS[name](x), THEIRS[name](x - x.max(-1, keepdims=True)), rtol=2e-6, atol=1e-30)


@names
def test_a_scale_is_a_factor(name):
    x = draw_x((4, 50))
    assert_near(OURS[name](x, scale=-0.3), THEIRS[name](-0.3 * x))


# Over each axis of x and of a mask that has an axis of its own, alone and together.
@cover(name=list(OURS), axes=[(0, None), (2, None), (None, 0), (0, 2), (2, 0)], causal=[False, True])
def test_vmap(name, axes, causal):
    x_axis, where_axis = axes
    x, where = draw_x((4, 3, 6)), mask_of((4, 1, 6))
    xs = x if x_axis is None else jnp.stack([x, jnp.sin(x)], x_axis)
    wheres = where if where_axis is None else jnp.stack([where, where | (jnp.arange(6) == 1)], where_axis)

    def of(function):
        def loss(x, where):
            return jnp.sin(finite(function)(x, where)).sum()

        return jax.jit(jax.vmap(jax.value_and_grad(loss), (x_axis, where_axis)))(xs, wheres)

    def expected(x, where):
        return THEIRS[name](x, where=where & (jnp.tril(jnp.ones((3, 6), bool)) | (not causal)))

    assert_near(of(lambda x, where: OURS[name](x, where=where, causal=causal)), of(expected))


# A mask without the batch stays as small as it is.
@pytest.mark.kernels
@names
def test_vmap_repeats_no_mask(name):
    x, where = draw_x((8, 4, 16)), mask_of((16,))
    (call,) = lowered_calls(jax.vmap(partial(OURS[name], where=where)), f"jaxnorm_{name}_fwd", x)
    assert "tensor<1x1x16xi1>" in call


@names
@pytest.mark.parametrize(
    "options",
    [{"causal": True}, {"causal": True, "offset": 5}, {"causal": True, "offset": 5, "window": 4}, {"where": True}],
    ids=str,
)
def test_a_masked_gradient_is_one_call_each_way(name, options):
    if "where" in options:
        options = {"where": mask_of((3, 1, 16))}
    text = compiled_text(jax.grad(lambda x: jnp.sin(finite(OURS[name])(x, **options)).sum()), draw_x((3, 8, 16)))
    calls = {f"jaxnorm_{name}_{way}": 1 for way in ("fwd", "bwd")} if is_platform_with_kernels() else {}
    assert count_native_calls(text) == calls


@names
def test_an_exported_window(name):
    of = partial(finite(OURS[name]), causal=True, window=5)
    step = jax.jit(jax.grad(lambda x, offset: of(x, offset=offset)[..., 2].sum()))
    shapes = (export.symbolic_shape("n, 4, 16"), "float32"), ((), "int32")
    types = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    x, program = draw_x((3, 4, 16)), export.export(step, platforms=("cpu", "cuda", "tpu"))(*types)
    assert bits(export.deserialize(program.serialize()).call(x, np.int32(3))) == bits(step(x, np.int32(3)))


# Queries, keys and masks that are split over devices: each has the lengths of its own queries.
@pytest.mark.several
@cover(
    name=list(OURS),
    axis_type=[AxisType.Auto, AxisType.Explicit],
    spec=[P("a", "b"), P(None, "a"), P(None, None, "b"), P("a", None, "b")],
    options=[{}, {"offset": np.arange(-2, 6)}, {"offset": 3, "window": 4}],
)
def test_a_causal_mask_on_a_mesh(devices, name, axis_type, spec, options):
    mesh = mesh_of(devices, axis_type)
    x, where = draw_x((8, 16, 24)), mask_of((8, 1, 24))
    of = partial(finite(OURS[name]), causal=True, **options)
    step = jax.value_and_grad(lambda x, where: jnp.sin(of(x, where=where)).sum())
    expected = jax.jit(step)(x, where)
    with jax.set_mesh(mesh):
        args = placed(mesh, (x, where), (spec, P(spec[0], None, *spec[2:])))
        compiled = jax.jit(step).lower(*args).compile()
        assert_near(jax.device_get(compiled(*args)), jax.device_get(expected), atol=1e-4)
    assert "all-gather" not in collectives(compiled.as_text())


@pytest.mark.several
@names
@pytest.mark.parametrize(("implementation", "window"), [(None, None), (None, 5), ("jnp", None)])
def test_masks_in_a_shard_map_over_columns(devices, name, implementation, window):
    mesh = mesh_of(devices, AxisType.Auto)
    x, where = draw_x((8, 6, 16)), mask_of((8, 1, 16)).at[0].set(False)
    options = {"causal": True, "offset": 2, "window": window, "implementation": implementation}

    def split(x, where):
        return finite(OURS[name])(x, where=where, axis_name="b", **options)

    specs = P("a", None, "b"), P("a", None, "b")
    sharded = jax.shard_map(split, mesh=mesh, in_specs=specs, out_specs=specs[0])
    whole = finite(partial(OURS[name], **options))

    def results(function):
        return jax.device_get(jax.jit(jax.value_and_grad(lambda x: jnp.sin(function(x)).sum()))(x))

    assert_near(results(lambda x: sharded(x, where)), results(lambda x: whole(x, where=where)), atol=1e-4)
