"""The cross-entropy of a product: operands, the call, the same without chunks, and NumPy's float64 with gradients."""

import jax.numpy as jnp
import numpy as np
from cases import draw

import jaxnorm

DIMS, CLASSES = (4, 6, 16), 40
IGNORED = -100
REDUCTIONS = ("mean", "sum", "none")
OPTIONS = {"label_smoothing": 0.1, "z_loss": 1e-2, "soft_cap": 3.0}
NAMES = ("x", "kernel", "bias", "weights", "logit_scale")  # what there are gradients of


def operands(dims, classes, dtype="float32"):
    """By their names. One row is ignored, another has weight 0, and the last classes are padding."""
    rows = dims[:-1]
    labels = np.random.default_rng(7).integers(0, classes - 5, rows)
    labels[(0,) * labels.ndim] = IGNORED
    weights = np.array(abs(draw("weights", rows)) + 0.1)
    weights[(-1,) * weights.ndim] = 0
    return {
        "x": draw("x", dims, dtype),
        "kernel": draw("kernel", (dims[-1], classes), dtype, std=0.3),
        "labels": jnp.asarray(labels, "int32"),
        "bias": draw("bias", (classes,), dtype),
        "weights": jnp.asarray(weights, dtype),
        "logit_scale": jnp.asarray(1.3, dtype),
    }


def masks(dims, classes):
    """Of classes, of each row's, and of one row none at all."""
    of_classes = jnp.arange(classes) < classes - 5
    of_rows = of_classes & ((draw("where", (*dims[:-1], classes)) > -0.5) | (jnp.arange(classes) == 3))
    return {"all": None, "classes": of_classes, "rows": of_rows.at[(0,) * (len(dims) - 2) + (1,)].set(False)}


def loss(labels, **options):
    """Of a dict of the operands that move."""
    return lambda moving: jaxnorm.linear_cross_entropy(labels=labels, ignore_index=IGNORED, **moving, **options)


def whole(labels, **options):
    """The same in jax.numpy, without chunks."""

    def of(moving):
        x, kernel, bias, weights, scale = (moving.get(name) for name in NAMES)
        wide = "float64" if x.dtype == "float64" else "float32"
        z = jnp.einsum("...d,dv->...v", x, kernel.astype(x.dtype), preferred_element_type=wide)
        z = z if bias is None else z + bias
        z = (z if scale is None else z * scale).astype(x.dtype)
        given = {k: v for k, v in options.items() if k not in ("reduction", "rows_per_chunk")}
        each = jaxnorm.softmax_cross_entropy_with_integer_labels(z, labels, ignore_index=IGNORED, **given)
        weights = jnp.ones(labels.shape) if weights is None else weights
        weights = jnp.where((labels == IGNORED) | (weights == 0), 0, weights)
        weighted = jnp.where(weights == 0, 0, each * weights)
        of_mean = weighted.sum() / weights.sum()
        return {"mean": of_mean, "sum": weighted.sum(), "none": weighted}[options.get("reduction", "mean")]

    return of


def split(dtype="float32", given=NAMES[2:], dims=DIMS, classes=CLASSES):
    """The operands that move, and the labels."""
    arrays = operands(dims, classes, dtype)
    return {name: arrays[name] for name in ("x", "kernel", *given)}, arrays["labels"]


def exact(
    x,
    kernel,
    labels,
    dy=1.0,
    *,
    bias=0.0,
    where=True,
    weights=1.0,
    reduction="mean",
    label_smoothing=0.0,
    z_loss=0.0,
    logit_scale=1.0,
    soft_cap=None,
    ignore_index=None,
):
    """The value, and the gradients for its cotangent dy by name."""
    x, kernel, bias, scale, dy = (np.asarray(a, np.float64) for a in (x, kernel, bias, logit_scale, dy))
    labels, classes = np.asarray(labels), kernel.shape[1]
    counts = np.broadcast_to(True if where is None else where, (*labels.shape, classes))
    of_mean = np.where(labels == ignore_index, 0, np.broadcast_to(np.asarray(weights, np.float64), labels.shape))
    has_loss = (of_mean != 0) & counts.any(-1)
    weights = np.where(has_loss, of_mean, 0)
    x = np.where(has_loss[..., None], x, 0)
    before = x @ kernel + bias
    z = before * scale if soft_cap is None else soft_cap * np.tanh(before * scale / soft_cap)
    e = np.where(counts, np.exp(z), 0)
    total, count = (np.where(has_loss[..., None], a.sum(-1, keepdims=True), 1) for a in (e, counts))
    lse, is_label = np.log(total), np.arange(classes) == labels[..., None]
    targets = (1 - label_smoothing) * is_label + label_smoothing * counts / count
    losses = (lse + z_loss * lse**2 - (targets * z).sum(-1, keepdims=True))[..., 0] * has_loss
    divisor = (of_mean.sum() or 1) if reduction == "mean" else 1
    value = weights * losses / divisor
    value = value if reduction == "none" else value.sum()
    factor = (weights * dy / divisor)[..., None]
    slope = 1 if soft_cap is None else 1 - np.square(z / soft_cap)
    du = factor * slope * ((1 + 2 * z_loss * lse) * e / total - targets)
    gradients = {
        "x": scale * du @ kernel.T,
        "kernel": scale * x.reshape(-1, x.shape[-1]).T @ du.reshape(-1, classes),
        "bias": scale * du.reshape(-1, classes).sum(0),
        "weights": np.where(of_mean == 0, 0, dy * (losses - value * (reduction == "mean")) / divisor),
        "logit_scale": (np.where(du == 0, 0, before) * du).sum(),
    }
    return value, gradients
