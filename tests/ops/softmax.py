"""Softmax and log-softmax: their rows and that of cross-entropy; masks of every form, causal ones, axes, long rows."""

import dataclasses
from functools import partial
from typing import Any

import bad_calls
import formulas
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ALONE, DTYPES, assert_near, bits, draw, draw_x
from coverage import cover
from hlo import collectives, compiled_text, count_native_calls, lowered_calls
from internals import Family
from jax import export
from jax.sharding import AxisType, PartitionSpec as P
from meshes import mesh_of, on_mesh
from native import is_platform_with_kernels
from op import Op, rows, weighted
from oracle import Forward, f64, round_to

import jaxnorm
from ops.linear_cross_entropy import TRANSFORMS

pytestmark = pytest.mark.any_code

# Of a difference in float32, of log2(e), and of their product, whose exponential is taken.
ROUNDING = 2.0**-24
ROUNDINGS = 3
# No whole vector, several rows at once, with and without a rest, each of the regimes; vocabularies.
SIZES = (
    *(rows(7, cols) for cols in (1, 24, 128, 257, 1024, 4096, 4097, 16_384, 50_257, 151_936)),
    rows(3, 5, 64),
    rows(3, 40_000),
    rows(2, 1_000_001),
)
LENGTHS = tuple(rows(9, cols) for cols in (1, 31, 128, 1021, 4096, 40_000))
MANY = tuple(rows(600, cols) for cols in (128, 384, 2048, 4096, 8192))


MASK = ("causal", "offset", "window", "where")


def counted(dims, causal=False, offset=0, window=None, where=True):
    """What of rows of these dims counts."""
    counts, offset, keys = np.broadcast_to(where, dims), np.asarray(offset, np.int64), np.arange(dims[-1])
    if not causal:
        return counts
    last = np.arange(dims[-2])[:, None] + offset.reshape(*offset.shape, *(1,) * (len(dims) - offset.ndim))
    return counts & (keys <= last) & (True if window is None else keys > last - window)


def logits(x, logit_scale=1.0, **mask):
    """z, its largest of each row, exp(z - largest), the sum of that, and what counts."""
    z, counts = f64(x) * float(np.float32(logit_scale)), counted(x.shape, **mask)
    top = z.max(-1, keepdims=True, where=counts, initial=-np.inf)
    z = np.where(counts, z, top)
    each = np.where(counts, np.exp(z - top), 0)
    return z, top, each, each.sum(-1, keepdims=True), counts


def exact_softmax(x, *, logit_scale=1.0, out_dtype=None, **mask):
    z, top, each, total, _ = logits(x, logit_scale, **mask)
    y = each / total
    return Forward(
        y, round_to(y, out_dtype or x.dtype), y, y * ROUNDING * (ROUNDINGS * (top - z) + np.abs(z) * (logit_scale != 1))
    )


def exact_log_softmax(x, *, logit_scale=1.0, out_dtype=None, **mask):
    z, top, _, total, counts = logits(x, logit_scale, **mask)
    y = np.where(counts, z - top - np.log(total), 0)
    # The logarithm of the sum is as exact as the sum is to 1.
    terms = top - z + np.log(total) + 1
    return Forward(y, round_to(y, out_dtype or x.dtype), terms, ROUNDING * np.abs(z) * (logit_scale != 1))


def gradients_of_softmax(cotangents, x, **options):
    # The derivative reads y as it was rounded.
    y, dy = f64(exact_softmax(x, **options).rounded), f64(cotangents[0])
    scale = float(np.float32(options.get("logit_scale", 1)))
    return {"x": (scale * y * (dy - (dy * y).sum(-1, keepdims=True)), None)}


def gradients_of_log_softmax(cotangents, x, *, logit_scale=1.0, out_dtype=None, **mask):
    _, _, each, total, counts = logits(x, logit_scale, **mask)
    dy = f64(cotangents[0]) * counts
    return {"x": (float(np.float32(logit_scale)) * (dy - each / total * dy.sum(-1, keepdims=True)), None)}


CAUSAL = {"causal": True}, {"causal": True, "window": 3}


# What all rows of this file have.
OF_LOGITS: dict[str, Any] = {
    "kind": "logits",
    "operands": ("x",),
    "arrays": 1,
    "dtypes": ALONE,
    "as_norm": lambda f: lambda x, *weights: weighted(f(x)[0], *weights),
    "small": rows(6, 10),
    "backward_sizes": (rows(600, 1000),),
    "lengths": LENGTHS,
    "many": MANY,
}


def softmax(log=False):
    public = getattr(jaxnorm, "log_softmax" if log else "softmax")

    def function(x, **options):
        mask = {name: options[name] for name in MASK if name in options}
        y = public(x, **options)
        # The logarithm of what does not count is infinite.
        return (jnp.where(counted(x.shape, **mask), y, 0) if log and mask else y,)

    return Op(
        **OF_LOGITS,
        name="log softmax" if log else "softmax",
        public=public.__name__,
        function=function,
        formula=lambda x, **options: (formulas.softmax(x, log=log, **options),),
        exact=exact_log_softmax if log else exact_softmax,
        exact_gradients=gradients_of_log_softmax if log else gradients_of_softmax,
        # The logarithm of one column's share is 0, of which no digit is right if it is not.
        sizes=SIZES[log:],
        options=({"logit_scale": 0.125}, {"logit_scale": -3.0}, *CAUSAL),
        numbers=(),
        statistics=2 * log,  # of softmax y is kept, which is like x
        # The maximum and the sum, of which how many are the maximum's is apart for a logarithm; the sum of products, or
        # of the cotangents.
        exchanged=(2 + log, 1),
        bad_calls=bad_calls.SOFTMAX,
        without_kernel=bad_calls.SOFTMAX_WITHOUT_KERNEL,
    )


LABEL = 3


def labels_of(x):
    """The same for all rows, so that rows may lie anywhere."""
    return jnp.full(x.shape[:-1], min(LABEL, x.shape[-1] - 1), "int32")


def capped(x, logit_scale=1.0, soft_cap=None):
    z = f64(x) * float(np.float32(logit_scale))
    return z if soft_cap is None else soft_cap * np.tanh(z / soft_cap)


def exact_cross_entropy(x, *, label_smoothing=0.0, z_loss=0.0, out_dtype=None, where=True, **options):
    z = capped(x, **options)
    _, top, _, total, counts = logits(z, where=where)
    lse, at_label = top + np.log(total), z[..., labels_of(x)[(0,) * (x.ndim - 1)], None]
    mean = z.mean(-1, keepdims=True, where=counts)
    loss = lse - (1 - label_smoothing) * at_label - label_smoothing * mean + z_loss * lse**2
    # Only differences count, but in a z-loss.
    further = top - at_label + label_smoothing * (top - mean)
    terms = 1 + np.log(total) + further + z_loss * lse**2
    return Forward(loss, round_to(loss, out_dtype or "float32"), terms, np.zeros(()))


def gradients_of_cross_entropy(
    cotangents, x, *, label_smoothing=0.0, z_loss=0.0, logit_scale=1.0, soft_cap=None, where=True, **options
):
    z, factor = capped(x, logit_scale, soft_cap), float(np.float32(logit_scale))
    _, top, each, total, counts = logits(z, where=where)
    lse, dy = top + np.log(total), f64(cotangents[0])
    share = counts / counts.sum(-1, keepdims=True)
    one_hot = np.arange(x.shape[-1]) == f64(labels_of(x))[..., None]
    dz = (1 + 2 * z_loss * lse) * each / total - (1 - label_smoothing) * one_hot - label_smoothing * share
    slope = factor if soft_cap is None else factor * (1 - np.square(z / soft_cap))
    return {"x": (dy * dz * slope, None)}


def cross_entropy():
    def function(x, *, out_dtype=None, **options):
        public = jaxnorm.softmax_cross_entropy_with_integer_labels
        return (public(x, labels_of(x), **options)[..., None],)

    return Op(
        **OF_LOGITS,
        name="cross entropy",
        public="softmax_cross_entropy_with_integer_labels",
        function=function,
        formula=lambda x, **options: (formulas.cross_entropy(x, labels_of(x), **options)[..., None],),
        exact=exact_cross_entropy,
        exact_gradients=gradients_of_cross_entropy,
        sizes=SIZES,
        options=({"label_smoothing": 0.1, "z_loss": 1e-2}, {"logit_scale": 0.5, "soft_cap": 5.0}),
        numbers=("z_loss", "label_smoothing", "soft_cap", "ignore_index"),
        forward="jaxnorm_cross_entropy_fwd",
        backward="jaxnorm_cross_entropy_bwd",
        statistics=3,  # beside the two what tells a row that is -inf throughout
        labels=True,
        values=3,
        exchanged=(4, 0),  # the maximum, the two parts of the sum and the label's logit
        bad_calls=bad_calls.CROSS_ENTROPY,
        without_kernel=bad_calls.CROSS_ENTROPY_WITHOUT_KERNEL,
    )


SOFTMAX = (softmax(), softmax(log=True))
CROSS_ENTROPY = (cross_entropy(),)
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


SHOWN = {"all": {}, "where": {"where": mask_of((2, 4, 5))}, "window": {"causal": True, "offset": 1, "window": 3}}
OF_SCALE = ("second derivatives", "jvp", "tangents", *(f"{of} logit_scale" for of in ("grad of", "vmap over")), "scan")
SCALE = {"logit_scale": jnp.float32(1.5)}


@cover(name=list(OURS), of=OF_SCALE, shown=SHOWN, how=[(-1, None), (-1, "xla"), (1, None)])
def test_a_traced_scale(name, of, shown, how):
    (axis, implementation), moving = how, {"x": draw_x((2, 4, 5)), **SCALE}
    mask = shown if axis == -1 else {}
    ours = partial(OURS[name], axis=axis, implementation=implementation, **mask)
    theirs = partial(THEIRS[name], axis=axis, where=counted((2, 4, 5), **mask))
    both = lambda moving: finite(ours)(**moving), lambda moving: finite(theirs)(moving["x"] * moving["logit_scale"])
    assert_near(*(jax.jit(TRANSFORMS[of](f))(moving) for f in both))


# A power of two rounds nothing: the product of a half type is float32, and what is rounded at the end is the same.
@cover(name=list(OURS), dtype=DTYPES, scale_dtype=["float32", "bfloat16"])
def test_a_traced_scale_rounds_once(name, dtype, scale_dtype):
    x, dy, of = draw_x((8, 100), dtype), draw("dy", (8, 100), dtype), partial(OURS[name], implementation="xla")
    y, pull_back = jax.vjp(lambda x, s: of(x, logit_scale=s), x, jnp.asarray(0.25, scale_dtype))
    expected, of_number = jax.vjp(partial(of, logit_scale=0.25), x)
    assert [a.dtype for a in (y, *pull_back(dy))] == [dtype, dtype, scale_dtype]
    assert bits((y, pull_back(dy)[0])) == bits((expected, *of_number(dy)))


# In front of the first query, behind the last, and where sums of int32 would wrap.
OFFSETS = {
    "none": 0,
    "of a cache": 4,
    "before all keys": -(2**40),
    "beyond all keys": 2**40,
    "for all": np.int16(2),
    "for each example": np.int8([3, -2]),
    "for each example, unsigned": np.uint32([[1], [2**32 - 1]]),
    "for each head": np.int32([[0, 1, -50], [2**31 - 1, -(2**31), 5]]),
}


# jax.numpy makes 32 bits of NumPy's 64, in which these are others.
ALL_SEEN = np.int64(2**63 - 1), np.uint64(2**64 - 1), np.array([2**32, 2**33 + 5])
ALL_SEEN += np.array([2**32, 2**64 - 1], np.uint64), np.array([255, 8], np.uint8)
NONE_SEEN = np.int64(-(2**63)), np.array([-(2**32), -(2**63)]), np.array(-(2**32)), np.array([-(2**15), -8], np.int16)
WIDE = {f"{v.dtype} {v}": (v, seen) for seen, values in ((True, ALL_SEEN), (False, NONE_SEEN)) for v in values}


@cover(name=list(OURS), case=WIDE, window=[None, 2**40, np.int64(2**62)], implementation=["native", "xla"])
def test_an_offset_of_numpy(name, case, window, implementation):
    offset, seen = case
    x = draw_x((2, 4, 8))
    y = OURS[name](x, causal=True, offset=offset, window=window, implementation=implementation)
    np.testing.assert_array_equal(y, OURS[name](x, where=np.full(8, seen), implementation=implementation))


@pytest.mark.on_emulator
@cover(
    name=list(OURS),
    offset=OFFSETS,
    window=[None, 1, 3, 2**40],
    rows=[(4, 9), (7, 4), (33, 40)],
    with_where=[False, True],
    traced=[False, True],
)
def test_offset_and_window(name, offset, window, rows, with_where, traced):
    x = draw_x((2, 3, *rows))
    given = {"where": mask_of((2, 1, *rows))} if with_where else {}

    def function(offset, x):
        return OURS[name](x, causal=True, offset=offset, window=window, **given)

    # A window that is longer than any cache hides nothing, however far the offset.
    where = counted(x.shape, True, offset, window if window != 2**40 else None, **given)
    is_traced = traced and not isinstance(offset, int)
    jit = (lambda function: partial(jax.jit(function), offset)) if is_traced else (lambda f: partial(f, offset))
    actual = derivatives(finite(jit(function)), x)
    assert_near(actual, derivatives(finite(partial(OURS[name], where=where)), x))
    hidden = 0 if name == "softmax" else -np.inf
    np.testing.assert_array_equal(np.asarray(jit(function)(x))[~where], hidden)
    np.testing.assert_array_equal(np.asarray(actual[1])[~where], 0)


# In programs of before a window is an array, of where it begins.
@pytest.mark.on_emulator
@cover(name=list(OURS), rows=[(7, 9), (33, 40)], with_where=[False, True])
def test_a_window_of_before(monkeypatch, name, rows, with_where):
    x, given = draw_x((2, 3, *rows)), {"where": mask_of((2, 1, *rows))} if with_where else {}
    of, call = finite(partial(OURS[name], causal=True, offset=2, window=5, **given)), Family.__call__

    def former(family, spec, operands, implementation):
        starts = jnp.maximum(operands.lengths, 0) - spec.window
        return call(family, dataclasses.replace(spec, window=None), operands._replace(starts=starts), implementation)

    expected = derivatives(of, x)
    monkeypatch.setattr(Family, "__call__", former)
    assert bits(derivatives(of, x)) == bits(expected)


# As in decoding: each row with what was before it is that of the whole.
@cover(name=list(OURS), window=[None, 3])
def test_rows_one_by_one(name, window):
    x, of = draw_x((2, 6, 6)), partial(OURS[name], causal=True, window=window)
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


@pytest.mark.on_emulator
@names
def test_rows_of_which_nothing_counts(name):
    x = draw_x((3, 40)).at[1].set(jnp.nan)
    where = jnp.asarray([True, False, True])[:, None]
    y, dx = jax.jit(lambda x: (OURS[name](x, where=where), jax.vjp(partial(OURS[name], where=where), x)[1](x)[0]))(x)
    np.testing.assert_array_equal(y[1], 0 if name == "softmax" else -jnp.inf)
    np.testing.assert_array_equal(dx[1] if name == "log_softmax" else y[1] * 0, jnp.zeros(40))
    assert np.isfinite(y[0]).all()


@pytest.mark.on_emulator
@names
def test_infinities(name):
    x = jnp.stack([jnp.full(9, -jnp.inf), jnp.arange(9.0).at[4].set(jnp.inf), jnp.arange(9.0).at[4].set(-jnp.inf)])
    x = jnp.concatenate([x, jnp.full((1, 9), 3e38)])
    np.testing.assert_allclose(OURS[name](x), THEIRS[name](x), rtol=2e-6)


@cover(cols=[1, 50_257, 151_936, 262_144, 2**20, 1_000_003], dtype=DTYPES)
def test_long_rows_sum_to_one(cols, dtype):
    y = jax.jit(partial(jaxnorm.softmax, out_dtype="float32"))(draw_x((2, cols), dtype))
    np.testing.assert_allclose(np.asarray(y, np.float64).sum(-1), 1, rtol=2e-6)


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
@pytest.mark.needs("kernels")
@names
def test_vmap_repeats_no_mask(name):
    x, where = draw_x((8, 4, 16)), mask_of((16,))
    (call,) = lowered_calls(jax.vmap(partial(OURS[name], where=where)), f"jaxnorm_{name}_fwd", x)
    assert "tensor<1x1x16xi1>" in call


@names
@pytest.mark.parametrize(
    "options",
    [*CAUSAL, {"causal": True, "offset": 5}, {"causal": True, "offset": 5, "window": 4}, {"where": True}, SCALE],
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
    actual, text = on_mesh(mesh, step, (x, where), (spec, P(spec[0], None, *spec[2:])))
    assert_near(jax.device_get(actual), jax.device_get(jax.jit(step)(x, where)), atol=1e-4)
    assert "all-gather" not in collectives(text)


@names
@pytest.mark.parametrize(("implementation", "window"), [(None, None), (None, 5), ("xla", None)])
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
