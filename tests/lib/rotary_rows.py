"""Rows of the table for the norms of queries and keys with rotary embedding, of arrays or of one product."""

from dataclasses import replace

import bad_rotary_calls
import formulas
import jax.numpy as jnp
import numpy as np
import oracle
from cases import DTYPES
from op import Op, Size
from oracle import f64, round_to

import jaxnorm

NORMS = {True: "rms", "rms": "rms", "layer": "layer", False: "no"}
STATISTICS = {"rms": 1, "layer": 2, "no": 0}
TABLES = ("sizes", "backward_sizes", "lengths", "many")
# Of the sine and cosine, which lie within 1: two units in the last place.
ANGLES = 2.0**-22
ALIKE = tuple((dtype, dtype, "float32") for dtype in DTYPES)


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


def split(options):
    """Options of the rotation, and of the norm."""
    own = ("rotary_dim", "interleaved", "sign")
    return {k: v for k, v in options.items() if k in own}, {k: v for k, v in options.items() if k not in own}


def exact(kind, x, positions, scale, **options):
    of_rotation, of_norm = split(options)
    if kind == "no":
        h = oracle.Forward(f64(x), x, np.abs(f64(x)), np.zeros(()))
    else:
        h = oracle.forward(kind, x, scale, out_dtype=np.dtype("float64"), **of_norm)
    y = rotated(h.exact, positions, **of_rotation)
    terms = rotated(np.broadcast_to(h.terms, y.shape), positions, **of_rotation, sizes=True)
    slack = ANGLES * rotated(h.exact, positions, **of_rotation, sizes=True)
    return oracle.Forward(y, round_to(y, x.dtype), terms, slack if x.dtype == np.float32 else 0 * slack)


def exact_gradients(kind, dy, x, positions, scale, **options):
    of_rotation, of_norm = split(options)
    lead = () if scale is None else scale.shape[:-1]
    if kind == "no":
        dx = rotated(f64(dy), positions, **of_rotation, sign=-1)
        return oracle.Gradients(dx, None, None, dx)
    return oracle.gradients(kind, x, rotated(f64(dy), positions, **of_rotation, sign=-1), scale, lead=lead, **of_norm)


def dim_of(x, partial):
    return {"rotary_dim": x.shape[-1] // 4 * 2 or 2} if partial else {}


def rotary(normalize, *, interleaved=False, partial=False):
    """partial: half of a head is rotated."""
    kind = NORMS[normalize]
    statistics = STATISTICS[kind]

    def function(q, k, positions, q_scale=None, k_scale=None, **options):
        options |= {"normalize": normalize, "interleaved": interleaved, **dim_of(q, partial)}
        return jaxnorm.qk_norm_rotary(q, k, q_scale, k_scale, positions, **options)

    def formula(q, k, positions, q_scale=None, k_scale=None, **options):
        options |= {"interleaved": interleaved, **dim_of(q, partial)}
        return formulas.rotary(kind)(q, k, positions, q_scale, k_scale, **options)

    def exact_of_both(q, k, positions, q_scale=None, k_scale=None, **options):
        options |= {"interleaved": interleaved, **dim_of(q, partial)}
        return [exact(kind, x, positions, scale, **options) for x, scale in ((q, q_scale), (k, k_scale))]

    def exact_gradients_of_both(cotangents, q, k, positions, q_scale=None, k_scale=None, **options):
        options |= {"interleaved": interleaved, **dim_of(q, partial)}
        found = {}
        for name, dy, x, scale in zip("qk", cotangents, (q, k), (q_scale, k_scale), strict=True):
            of_x = exact_gradients(kind, dy, x, positions, scale, **options)
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
        dtypes=ALIKE,
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
        forward="jaxnorm_qk_norm_rotary_fwd",
        backward="jaxnorm_qk_norm_rotary_bwd",
        gradients=("dq", "dk", "", "dq_scale", "dk_scale"),
        kept=("q", "k", "positions", "q_scale", "k_scale"),
        # The frequencies, and the statistics of k.
        kept_beside=lambda q, k, *_: [
            [*dim_of(q, partial).values(), q.shape[-1]][0] // 2,
            *[k.size // k.shape[-1]] * statistics,
        ],
        statistics=statistics,
        bad_calls=bad_rotary_calls.BAD | bad_rotary_calls.MISUSE,
        without_kernel=bad_rotary_calls.WITHOUT_KERNEL,
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


def rotary_per_head(normalize, **rotation):
    return per_head(rotary(normalize, **rotation), k_scale=grouped)


def counts(packed):
    """How many heads of q, and of k, so many in one product are."""
    kv_heads = max(1, packed // 4)
    return {"heads": packed - 2 * kv_heads, "kv_heads": kv_heads}


def parts(qkv):
    """Queries, keys and values."""
    heads, kv_heads = counts(qkv.shape[-2]).values()
    return qkv[..., :heads, :], qkv[..., heads : heads + kv_heads, :], qkv[..., heads + kv_heads :, :]


def copied(v):
    return oracle.Forward(f64(v), v, np.abs(f64(v)), np.zeros(()))


def qkv_rotary(normalize, *, interleaved=False, partial=False):
    """The same of one product, by what its parts give."""
    apart = rotary(normalize, interleaved=interleaved, partial=partial)

    def function(qkv, positions, q_scale=None, k_scale=None, **options):
        options |= {"normalize": normalize, "interleaved": interleaved, **dim_of(qkv, partial)}
        return jaxnorm.qkv_norm_rotary(qkv, q_scale, k_scale, positions, **counts(qkv.shape[-2]), **options)

    def formula(qkv, *others, **options):
        q, k, v = parts(qkv)
        return *apart.formula(q, k, *others, **options), v

    def exact_of_all(qkv, *others, **options):
        q, k, v = parts(np.asarray(qkv))
        return [*apart.exact(q, k, *others, **options), copied(v)]

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
        count = count or (2 * heads if heads > 1 else 12)
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
        required={"heads": 2, "kv_heads": 1, "positions": jnp.zeros((3, 4))},
        bad_calls=bad_rotary_calls.OF_PRODUCT,
        without_kernel=bad_rotary_calls.PRODUCT_WITHOUT_KERNEL,
    )


def qkv_rotary_per_head(normalize, **rotation):
    def of_each(name):
        return lambda dims: (counts(dims[-2])[name], dims[-1])

    return per_head(qkv_rotary(normalize, **rotation), q_scale=of_each("heads"), k_scale=of_each("kv_heads"))
