"""The cross-entropy of a product in NumPy's float64, with its gradients by hand, and operands for it."""

import jax.numpy as jnp
import numpy as np
from cases import draw

IGNORED = -100
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
