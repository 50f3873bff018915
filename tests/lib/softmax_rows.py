"""Rows of the table for softmax, log-softmax and cross-entropy."""

from typing import Any

import bad_softmax_calls as bad_calls
import formulas
import jax.numpy as jnp
import numpy as np
from norm_rows import ALONE
from op import Op, rows
from oracle import Forward, f64, round_to

import jaxnorm

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
    counts = np.broadcast_to(where, dims)
    if causal:
        counts = counts & np.tri(*dims[-2:], offset, bool)
    return counts & ~np.tri(*dims[-2:], offset - window, bool) if window is not None else counts


def logits(x, scale=1.0, **mask):
    """z, its largest of each row, exp(z - largest), the sum of that, and what counts."""
    z, counts = f64(x) * float(np.float32(scale)), counted(x.shape, **mask)
    top = z.max(-1, keepdims=True, where=counts, initial=-np.inf)
    z = np.where(counts, z, top)
    each = np.where(counts, np.exp(z - top), 0)
    return z, top, each, each.sum(-1, keepdims=True), counts


def exact_softmax(x, *, scale=1.0, out_dtype=None, **mask):
    z, top, each, total, _ = logits(x, scale, **mask)
    y = each / total
    return Forward(
        y, round_to(y, out_dtype or x.dtype), y, y * ROUNDING * (ROUNDINGS * (top - z) + np.abs(z) * (scale != 1))
    )


def exact_log_softmax(x, *, scale=1.0, out_dtype=None, **mask):
    z, top, _, total, counts = logits(x, scale, **mask)
    y = np.where(counts, z - top - np.log(total), 0)
    # The logarithm of the sum is as exact as the sum is to 1.
    terms = top - z + np.log(total) + 1
    return Forward(y, round_to(y, out_dtype or x.dtype), terms, ROUNDING * np.abs(z) * (scale != 1))


def gradients_of_softmax(cotangents, x, **options):
    # The derivative reads y as it was rounded.
    y, dy = f64(exact_softmax(x, **options).rounded), f64(cotangents[0])
    scale = float(np.float32(options.get("scale", 1)))
    return {"x": (scale * y * (dy - (dy * y).sum(-1, keepdims=True)), None)}


def gradients_of_log_softmax(cotangents, x, *, scale=1.0, out_dtype=None, **mask):
    _, _, each, total, counts = logits(x, scale, **mask)
    dy = f64(cotangents[0]) * counts
    return {"x": (float(np.float32(scale)) * (dy - each / total * dy.sum(-1, keepdims=True)), None)}


CAUSAL = {"causal": True}, {"causal": True, "window": 3}


def as_norm(f):
    def function(x, scale=None, bias=None):
        y = f(x)[0]
        y = y if scale is None else y * scale
        return y if bias is None else y + bias

    return function


# What all rows of this file have.
OF_LOGITS: dict[str, Any] = {
    "kind": "logits",
    "operands": ("x",),
    "arrays": 1,
    "dtypes": ALONE,
    "as_norm": as_norm,
    "small": rows(6, 10),
    "backward_sizes": (rows(600, 1000),),
    "lengths": LENGTHS,
    "many": MANY,
    "gradients": ("dx",),
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
        options=({"scale": 0.125}, {"scale": -3.0}, *CAUSAL),
        numbers=("scale",),
        forward=f"jaxnorm_{public.__name__}_fwd",
        backward=f"jaxnorm_{public.__name__}_bwd",
        kept=("x",),  # of softmax y, which is like it
        statistics=2 * log,
        # The maximum and the sum, of which how many are the maximum's is apart for a logarithm; the sum of products, or
        # of the cotangents.
        exchanged=(2 + log, 1),
        bad_calls=bad_calls.SOFTMAX | bad_calls.MISUSE[public.__name__],
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
        kept=("x",),
        statistics=3,  # beside the two what tells a row that is -inf throughout
        labels=True,
        values=3,
        exchanged=(4, 0),  # the maximum, the two parts of the sum and the label's logit
        bad_calls=bad_calls.CROSS_ENTROPY | bad_calls.MISUSE["softmax_cross_entropy_with_integer_labels"],
        without_kernel=bad_calls.CROSS_ENTROPY_WITHOUT_KERNEL,
    )
