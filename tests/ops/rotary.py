"""`qk_norm_rotary` and `qkv_norm_rotary`: their rows; and how a product is laid out, values, one launch each way.

`rotary_models.py` has both as models do, `rotary_meshes.py` on meshes.
"""

from dataclasses import replace
from functools import partial

import bad_calls
import formulas
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import DTYPES, assert_close, bits, both_ways, draw, draw_k_scale, draw_q_scale
from coverage import cover
from hlo import compiled_text, count_native_calls, lowered_calls
from native import is_platform_with_kernels
from op import Op, Size
from oracle import f64, round_to

import jaxnorm

pytestmark = pytest.mark.jax_version

NORMS, STATISTICS = {True: "rms", "rms": "rms", "layer": "layer", False: "no"}, {"rms": 1, "layer": 2, "no": 0}
TABLES = ("sizes", "backward_sizes", "lengths", "many")
# Of the sine and cosine, which lie within 1: two units in the last place.
ANGLES = 2.0**-22
ROTATED = tuple((dtype, dtype, "float32") for dtype in DTYPES)


def grouped(dims):
    """The shape of k, or of its scales: half of q's heads where that is a number."""
    return (*dims[:-2], max(1, dims[-2] // 2) if dims[-2] else 0, dims[-1]) if len(dims) > 1 else dims


def rotated(h, positions, *, rotary_dim=None, interleaved=False, sign=1, sizes=False):
    """The rotation by NumPy in float64, of angles in float32, as they are defined, or of the terms that are summed."""
    dim = rotary_dim or h.shape[-1]
    dtype = np.float64 if positions.dtype == np.float64 else np.float32
    frequencies = (10_000.0 ** (-np.arange(0, dim, 2) / dim)).astype(dtype)
    angles = f64(np.asarray(positions)[..., None, None] * frequencies)
    cos, sin = np.cos(angles), sign * np.sin(angles)
    first, second = (slice(0, dim, 2), slice(1, dim, 2)) if interleaved else (slice(dim // 2), slice(dim // 2, dim))
    a, b, y = h[..., first], h[..., second], h.copy()
    if sizes:
        y[..., first] = y[..., second] = np.abs(a) + np.abs(b)
        return y
    y[..., first], y[..., second] = a * cos - b * sin, b * cos + a * sin
    return y


def exact(kind, x, positions, scale, rotation, **options):
    h = oracle.Forward(f64(x), x, np.abs(f64(x)), np.zeros(()))
    if kind != "no":
        h = oracle.forward(kind, x, scale, out_dtype=np.dtype("float64"), **options)
    y = rotated(h.exact, positions, **rotation)
    terms = rotated(np.broadcast_to(h.terms, y.shape), positions, **rotation, sizes=True)
    slack = ANGLES * rotated(h.exact, positions, **rotation, sizes=True)
    return oracle.Forward(y, round_to(y, x.dtype), terms, slack if x.dtype == np.float32 else 0 * slack)


def exact_gradients(kind, dy, x, positions, scale, rotation, **options):
    dh, lead = rotated(f64(dy), positions, **rotation, sign=-1), () if scale is None else scale.shape[:-1]
    if kind == "no":
        return oracle.Gradients(dh, None, None, dh)
    return oracle.gradients(kind, x, dh, scale, lead=lead, **options)


def rotation_of(x, interleaved, partial):
    return {"interleaved": interleaved} | ({"rotary_dim": x.shape[-1] // 4 * 2 or 2} if partial else {})


def rotary(normalize, *, interleaved=False, partial=False):
    """partial: half of a head is rotated."""
    kind = NORMS[normalize]
    statistics = STATISTICS[kind]

    def rotation(x):
        return rotation_of(x, interleaved, partial)

    def function(q, k, positions, q_scale=None, k_scale=None, **options):
        return jaxnorm.qk_norm_rotary(q, k, q_scale, k_scale, positions, **rotation(q), normalize=normalize, **options)

    def formula(q, k, *others, **options):
        return formulas.rotary(kind)(q, k, *others, **rotation(q), **options)

    def exact_of_both(q, k, positions, *scales, **options):
        pairs = zip((q, k), scales or (None, None), strict=True)
        return [exact(kind, x, positions, scale, rotation(x), **options) for x, scale in pairs]

    def exact_gradients_of_both(cotangents, q, k, positions, *scales, **options):
        found = {}
        for name, dy, x, scale in zip("qk", cotangents, (q, k), scales or (None, None), strict=True):
            of_x = exact_gradients(kind, dy, x, positions, scale, rotation(x), **options)
            found |= {name: (of_x.dx, of_x.dx_terms), f"{name}_scale": (of_x.dscale, None)}
        return found

    def as_norm(f):
        def norm(x, scale=None, bias=None):
            heads = x.reshape(*x.shape[:-1], 1, x.shape[-1])
            positions = jnp.arange(x.size // x.shape[-1] or 1, dtype="float32").reshape(x.shape[:-1])
            q, k = f(heads, jnp.cos(heads), positions, scale, bias)
            return (q * jnp.sin(k)).reshape(x.shape)

        return norm

    return Op(
        name=f"rotary {kind}",
        public="qk_norm_rotary",
        kind=kind,
        operands=("q", "k", "positions", "q_scale", "k_scale"),
        arrays=3,
        shapes={"k": grouped, "positions": lambda dims: dims[:-2]},
        dtypes=ROTATED,
        has_out_dtype=False,
        has_pairs=True,
        function=function,
        formula=formula,
        as_norm=as_norm,
        product=lambda q, k: q * jnp.cos(k).sum(-2, keepdims=True),
        exact=exact_of_both,
        exact_gradients=exact_gradients_of_both,
        small=Size((6, 2, 10), (10,)),
        # No whole vector and several, models' heads, the longest; one head of keys and several; more tokens than a task
        # takes.
        sizes=tuple(
            Size(dims, dims[-1:])
            for dims in (*((3, 5, 4, cols) for cols in (2, 24, 64, 100, 128, 512)), *((1, 1, 128), (2, 300, 6, 64)))
        ),
        options=({"scale_offset": 1.0}, {"epsilon": 1.0}),
        backward_sizes=(Size((2, 2100, 4, 24), (24,)),),
        lengths=tuple(Size((9, 4, cols), (cols,)) for cols in (64, 100, 128)),
        many=(Size((600, 4, 128), (128,)), Size((600, 8, 64), (64,))),
        gradients=("dq", "dk", "", "dq_scale", "dk_scale"),
        # The frequencies, and the statistics of k.
        kept_beside=lambda q, k, *_: [
            rotation(q).get("rotary_dim", q.shape[-1]) // 2,
            *[k.size // k.shape[-1]] * statistics,
        ],
        statistics=statistics,
        bad_calls=bad_calls.ROTARY,
        without_kernel=bad_calls.ROTARY_WITHOUT_KERNEL,
    )


def per_head(op, **shapes):
    """The same with a scale for each head, of these shapes by those of all heads."""

    def of(size):
        return size._replace(weights=size.dims[-2:])

    return replace(
        op,
        name=f"{op.name} per head",
        shapes={**op.shapes, **shapes},
        small=of(op.small),
        **{table: tuple(map(of, getattr(op, table))) for table in TABLES},
    )


def counts(packed):
    """How many heads of q, and of k, so many in one product are."""
    kv_heads = max(1, packed // 4)
    return {"heads": packed - 2 * kv_heads, "kv_heads": kv_heads}


def parts(qkv):
    heads, kv_heads = counts(qkv.shape[-2]).values()
    return qkv[..., :heads, :], qkv[..., heads : heads + kv_heads, :], qkv[..., heads + kv_heads :, :]


def qkv_rotary(normalize, *, interleaved=False, partial=False):
    """The same of one product, by what its parts give."""
    apart = rotary(normalize, interleaved=interleaved, partial=partial)

    def function(qkv, positions, q_scale=None, k_scale=None, **options):
        given = rotation_of(qkv, interleaved, partial) | counts(qkv.shape[-2]) | options
        return jaxnorm.qkv_norm_rotary(qkv, q_scale, k_scale, positions, normalize=normalize, **given)

    def formula(qkv, *others, **options):
        q, k, v = parts(qkv)
        return *apart.formula(q, k, *others, **options), v

    def exact_of_all(qkv, *others, **options):
        q, k, v = parts(np.asarray(qkv))
        return [*apart.exact(q, k, *others, **options), oracle.Forward(f64(v), v, np.abs(f64(v)), np.zeros(()))]

    def exact_gradients_of_all(cotangents, qkv, *others, **options):
        q, k, _ = parts(np.asarray(qkv))
        *of_rotated, dv = cotangents
        found = apart.exact_gradients(of_rotated, q, k, *others, **options)
        each = found.pop("q"), found.pop("k"), (f64(dv), np.abs(f64(dv)))
        return {"qkv": [np.concatenate(arrays, -2) for arrays in zip(*each, strict=True)], **found}

    def unfused(qkv, positions, q_scale=None, k_scale=None, **options):
        heads, kv_heads = counts(qkv.shape[-2]).values()
        # Its gradient is a concatenation; that of slices is a sum, in which -0 becomes 0.
        q, k, v = jnp.split(qkv, [heads, heads + kv_heads], axis=-2)
        return *apart.function(q, k, positions, q_scale, k_scale, **options), v

    def as_norm(f):
        def norm(x, scale=None, bias=None):
            positions = jnp.arange(x.size // x.shape[-1] or 1, dtype="float32").reshape(x.shape[:-1])
            q, k, v = f(jnp.stack([x, jnp.cos(x), jnp.tanh(x)], -2), positions, scale, bias)
            return (q * jnp.sin(k) + v).reshape(x.shape)

        return norm

    def with_packed(size, count=None):
        heads = size.dims[-2]
        # Of a single head of a token too few elements are rounded for a share of them to mean much.
        count = count or (2 * heads if heads > 1 else 24)
        return size._replace(dims=(*size.dims[:-2], count, size.dims[-1]))

    return replace(
        apart,
        name=f"qkv {apart.name}",
        public="qkv_norm_rotary",
        operands=("qkv", "positions", "q_scale", "k_scale"),
        arrays=2,
        has_positions=True,  # the heads of a token stay together
        shapes={"positions": lambda dims: dims[:-2]},
        dtypes=tuple((dtype, "float32") for dtype in DTYPES),
        function=function,
        formula=formula,
        as_norm=as_norm,
        product=lambda q, k, v: q * (jnp.cos(k) * jnp.sin(v)).sum(-2, keepdims=True),
        unfused=unfused,
        has_unfused_gradients=True,
        exact=exact_of_all,
        exact_gradients=exact_gradients_of_all,
        small=with_packed(apart.small, 4),
        **{table: tuple(map(with_packed, getattr(apart, table))) for table in TABLES},
        forward="jaxnorm_qkv_norm_rotary_fwd",
        backward="jaxnorm_qkv_norm_rotary_bwd",
        gradients=("dqkv", "", "dq_scale", "dk_scale"),
        kept=("qkv", "positions", "q_scale", "k_scale"),
        kept_beside=lambda qkv, *_: apart.kept_beside(*parts(qkv)),
        normalised=lambda qkv: parts(qkv)[0],
        bad_calls=bad_calls.OF_PRODUCT,
        without_kernel=bad_calls.PRODUCT_WITHOUT_KERNEL,
    )


def of_each(name):
    return lambda dims: (counts(dims[-2])[name], dims[-1])


IN_PART = {"normalize": "layer", "interleaved": True, "partial": True}
QKV_ROTARY = (
    qkv_rotary(True),
    per_head(qkv_rotary(**IN_PART), q_scale=of_each("heads"), k_scale=of_each("kv_heads")),
)
ROTARY = (per_head(rotary(**IN_PART), k_scale=grouped), rotary(True), *QKV_ROTARY)


B, T, H, K, D = 2, 6, 4, 2, 16
PACKED, NORMALIZE = H + 2 * K, ["rms", "layer", False]


def draw_qk(dims=(B, T), dtype="float32", heads=(H, K)):
    return tuple(draw(name, (*dims, count, D), dtype, 0.3, 2.0) for name, count in zip("qk", heads, strict=True))


def draw_qkv(dims=(B, T), dtype="float32"):
    return draw("qkv", (*dims, PACKED, D), dtype, 0.3, 2.0)


def draw_scales(per_head=False):
    return draw_q_scale((H, D) if per_head else (D,)), draw_k_scale((K, D) if per_head else (D,))


of_heads = partial(jaxnorm.qkv_norm_rotary, heads=H, kv_heads=K)


def loss_of(function):
    return lambda *args: sum(jnp.sin((i + 1) * y.astype("float32")).sum() for i, y in enumerate(function(*args)))


step = partial(both_ways, cotangents_of=partial(jax.tree.map, jnp.cos))


CALLS = ("jaxnorm_qkv_norm_rotary_fwd", "jaxnorm_qkv_norm_rotary_bwd")


def apart(qkv, *args, implementation="xla", **options):
    """The same by slices, in plain jax.numpy."""
    q, k, v = jnp.split(qkv, [H, H + K], -2)
    return jaxnorm.QKV(*jaxnorm.qk_norm_rotary(q, k, *args, implementation=implementation, **options), v)


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
    results, gradient = jax.jit(step(partial(of_heads, **options)))(qkv.reshape(shape))
    assert_close(results, apart(qkv, **options))
    assert [y.shape for y in results] == [(*tokens, count, D) for count in (H, K, K)]
    (expected,) = step(partial(apart, **options))(qkv)[1]
    assert_close(gradient, (expected.reshape(shape),))


def test_tokens_of_unknown_number_are_no_heads():
    dims = jax.export.symbolic_shape(f"t, {PACKED * D}")
    results = jax.eval_shape(of_heads, jax.ShapeDtypeStruct(dims, "float32"))
    assert [y.shape for y in results] == [(dims[0], count, D) for count in (H, K, K)]


@pytest.mark.parametrize("shape", ["2, 3, 4, d", "t, 8, d", "t, d"])
def test_a_head_size_of_unknown_length(shape):
    x = jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape), "float32")
    function, name = (lambda x: jaxnorm.qk_norm_rotary(x, x), "q") if shape[0] == "2" else (of_heads, "qkv")
    with pytest.raises(ValueError, match=rf"^{name}\w*_norm_rotary: the last axis of {name}, .* has a symbolic length"):
        jax.eval_shape(function, x)


# Law 5, of each option with the kernels: the bits of the parts by themselves.
@cover(normalize=NORMALIZE, per_head=[False, True], interleaved=[False, True], dtype=["float32", "bfloat16"])
def test_bits_are_those_of_the_parts(normalize, per_head, interleaved, dtype):
    args = draw_qkv(dtype=dtype), *(draw_scales(per_head) if normalize else ())
    options = {"normalize": normalize, "interleaved": interleaved, "rotary_dim": D // 2}
    functions = partial(of_heads, **options), partial(apart, implementation=None, **options)
    ours, by_parts = (jax.jit(step(function))(*args) for function in functions)
    assert bits(ours) == bits(by_parts)


@pytest.mark.needs("kernels")
@pytest.mark.parametrize("normalize", NORMALIZE)
def test_a_step_is_two_calls_and_moves_nothing_beside(normalize):
    qkv = draw_qkv()
    cotangents = jaxnorm.QKV(*jnp.split(qkv, [H, H + K], -2))
    text = compiled_text(lambda x, dy: jax.vjp(partial(of_heads, normalize=normalize), x)[1](dy), qkv, cotangents)
    assert count_native_calls(text) == dict.fromkeys(CALLS[normalize is False :], 1)
    assert not any(f" {op}(" in text for op in ("slice", "concatenate", "pad", "copy", "transpose"))


# Values that nobody reads are not copied, and what was theirs has no gradient, even of what is no number.
@cover(normalize=NORMALIZE)
def test_values_that_are_not_read(normalize):
    qkv, function = draw_qkv().at[..., H + K :, :].set(jnp.nan), lambda qkv: of_heads(qkv, normalize=normalize)[:2]
    results, (gradient,) = jax.jit(step(function))(qkv)
    expected, (of_parts,) = step(lambda x: apart(x, normalize=normalize)[:2])(qkv.at[..., H + K :, :].set(0))
    assert_close(results, expected)
    assert_close(gradient, of_parts)
    assert not gradient[..., H + K :, :].any()
    (call,) = lowered_calls(function, CALLS[0], qkv) if is_platform_with_kernels() else ["with_v = false"]
    assert "with_v = false" in call


@cover(read=[(0,), (1,), (2,), (0, 2)], normalize=NORMALIZE)
def test_the_gradient_of_some_results(read, normalize):
    scales = draw_scales() if normalize else ()
    functions = (partial(f, normalize=normalize) for f in (of_heads, apart))
    ours, plain = (
        jax.jit(jax.grad(loss_of(lambda *args, f=f: [f(*args)[i] for i in read]), range(1 + len(scales))))
        for f in functions
    )
    assert_close(ours(draw_qkv(), *scales), plain(draw_qkv(), *scales))


TRANSFORMED = {
    "jvp of the scales": lambda f, x, *s: jax.jvp(lambda *s: f(x, *s), s, s),
    "jvp of everything": lambda f, *args: jax.jvp(f, args, tuple(map(jnp.cos, args))),
    "linearize": lambda f, *args: jax.linearize(f, *args)[1](*args),
    "linear_transpose": lambda f, x, q, k: jax.linear_transpose(lambda q: f(x, q, k)[0], q)(x[..., :H, :]),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transformed(name):
    of = (jax.jit(partial(TRANSFORMED[name], function)) for function in (of_heads, apart))
    assert_close(*(f(draw_qkv(), *draw_scales()) for f in of))
