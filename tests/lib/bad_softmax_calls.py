"""Bad input of softmax and cross-entropy, and what no kernel serves anywhere."""

import jax.numpy as jnp
from bad_calls import X
from statements import call

LABELS, KERNEL, BIAS = jnp.zeros((3, 4), "int32"), jnp.ones((8, 20)), jnp.ones(20)

WHERE = {
    "where of integers": call(X, where=jnp.ones(8, "int32")).raises(TypeError, "where", "booleans", "int32", "!= 0"),
    "where of a list": call(X, where=[True] * 8).raises(TypeError, "where", "booleans", "list", "asarray"),
    "where of another length": call(X, where=jnp.ones(7, "bool")).raises(
        ValueError, "where", r"\(7,\)", "broadcasts", r"\(3, 4, 8\)"
    ),
    "where with more axes": call(X, where=jnp.ones((1, 3, 4, 8), "bool")).raises(
        ValueError, "where", r"\(1, 3, 4, 8\)", r"\(3, 4, 8\)"
    ),
}
SOFTMAX = WHERE | {
    "NaN scale": call(X, scale=float("nan")).raises(ValueError, "scale", "finite", "nan"),
    "scale of an array": call(X, scale=jnp.ones(8)).raises(TypeError, "scale", "number"),
    "causal over another axis": call(X, causal=True, axis=0).raises(ValueError, "causal", "axis=-1", r"\(-3,\)"),
    "causal over two axes": call(X, causal=True, axis=(-2, -1)).raises(ValueError, "causal", r"\(-2, -1\)", "where"),
    "causal of one axis": call(jnp.ones(8), causal=True).raises(ValueError, "causal", r"\(8,\)"),
    "offset without causal": call(X, offset=1).raises(ValueError, "offset", "causal=True"),
    "window without causal": call(X, window=8).raises(ValueError, "window", "causal=True"),
    "offset of a float": call(X, causal=True, offset=1.0).raises(TypeError, "offset", "integers", "1.0"),
    "offset of a bool": call(X, causal=True, offset=True).raises(TypeError, "offset", "int", "True"),
    "offset of booleans": call(X, causal=True, offset=jnp.ones(3, "bool")).raises(TypeError, "offset", "bool"),
    "offset of queries": call(X, causal=True, offset=jnp.ones((3, 4), "int32")).raises(
        ValueError, "offset", r"\(3, 4\)", "leading", r"\(3,\)"
    ),
    "offset of another batch": call(X, causal=True, offset=jnp.ones(2, "int32")).raises(
        ValueError, "offset", r"\(2,\)", r"\(3,\)"
    ),
    "no window": call(X, causal=True, window=0).raises(ValueError, "window", "positive", "None"),
    "window of a float": call(X, causal=True, window=2.0).raises(TypeError, "window", "int", "2.0"),
}
CROSS_ENTROPY = {
    **{
        name: call(args[0], LABELS, **keywords).raises(error, *parts)
        for name, (args, keywords, error, parts) in WHERE.items()
    },
    "labels of floats": call(X, LABELS.astype("float32")).raises(TypeError, "labels", "integers", "float32", "argmax"),
    "labels of booleans": call(X, LABELS == 0).raises(TypeError, "labels", "integers", "bool"),
    "labels of a list": call(X, [[0] * 4] * 3).raises(TypeError, "labels", "integers", "list", "asarray"),
    "no labels": call(X, None).raises(TypeError, "labels", "integers", "NoneType"),
    "labels of other rows": call(X, LABELS[:2]).raises(ValueError, "labels", r"\(2, 4\)", r"\(3, 4\)", r"\(3, 4, 8\)"),
    "one-hot labels": call(X, X.astype("int32")).raises(ValueError, "labels", r"\(3, 4, 8\)", r"expected \(3, 4\)"),
    "labels of another axis": call(X, LABELS, axis=0).raises(ValueError, "labels", r"\(3, 4\)", r"expected \(4, 8\)"),
    "labels of one axis for two": call(X, LABELS, axis=(-2, -1)).raises(
        ValueError, "labels", r"\(3, 4\)", r"expected \(3,\)", r"the axes \(-2, -1\)"
    ),
    "an array as axis": call(X, LABELS, X > 0).raises(TypeError, "axis", r"shape \(3, 4, 8\)", "is it where"),
    "where of rows or of classes": call(jnp.ones((4, 4)), LABELS[0], where=jnp.ones(4, "bool")).raises(
        ValueError, "where", r"\(4,\)", r"where\[:, None\] for rows", r"where\[None\] for classes"
    ),
    "where of rows or of two axes of classes": call(
        jnp.ones((4, 4, 4)), LABELS[0], axis=(1, 2), where=jnp.ones(4, "bool")
    ).raises(ValueError, "where", r"where\[:, None, None\] for rows", r"where\[None, None\] for classes"),
    "where of some rows or of classes": call(jnp.ones((3, 4, 4)), LABELS, where=jnp.ones(4, "bool")).raises(
        ValueError, "where", r"where\[None, :, None\] for rows", r"where\[None, None\] for classes"
    ),
    "negative smoothing": call(X, LABELS, label_smoothing=-0.1).raises(ValueError, "label_smoothing", "0 to 1", "-0.1"),
    "smoothing above one": call(X, LABELS, label_smoothing=2).raises(ValueError, "label_smoothing", "0 to 1", "2.0"),
    "smoothing of text": call(X, LABELS, label_smoothing="much").raises(TypeError, "label_smoothing", "number", "much"),
    "negative z_loss": call(X, LABELS, z_loss=-1e-4).raises(ValueError, "z_loss", "negative", "-0.0001"),
    "logit_scale of columns": call(X, LABELS, logit_scale=X[0, 0]).raises(
        ValueError, "logit_scale", r"\(8,\)", r"expected \(\)", "one number"
    ),
    "a logit_scale of integers": call(X, LABELS, logit_scale=jnp.int32(2)).raises(
        TypeError, "logit_scale", "floating", "int32", "astype"
    ),
    "NaN logit_scale": call(X, LABELS, logit_scale=float("nan")).raises(ValueError, "logit_scale", "finite", "nan"),
    "soft_cap of 0": call(X, LABELS, soft_cap=0).raises(ValueError, "soft_cap", "positive", "0.0", "None"),
    "soft_cap of text": call(X, LABELS, soft_cap="30").raises(TypeError, "soft_cap", "number", "30"),
    "ignore_index of a float": call(X, LABELS, ignore_index=-100.0).raises(TypeError, "ignore_index", "int", "-100.0"),
    "ignore_index of a bool": call(X, LABELS, ignore_index=True).raises(TypeError, "ignore_index", "int", "True"),
    "labels first": call(LABELS, X).raises(TypeError, "logits are int32 and labels float32", "each other's place"),
    "labels of pixels": call(jnp.ones((2, 5, 4, 8)), jnp.zeros((2, 4, 8), "int32")).raises(
        ValueError, "labels", r"expected \(2, 5, 4\)", "axis=1 would fit"
    ),
}

SOFTMAX_MISUSE = {
    "axis by position": call(X, -1).raises(TypeError, r"positional arguments \(x\) but 2", "Then pass axis=-1"),
    "where by position": call(X, X > 0).raises(TypeError, "but 2 were given", "by name: axis, where, scale, causal"),
    "a bias": call(X, bias=X).raises(TypeError, "keyword argument 'bias'", "add it to the result"),
}
MISUSE = {
    "softmax": SOFTMAX_MISUSE,
    "log_softmax": SOFTMAX_MISUSE,
    "softmax_cross_entropy_with_integer_labels": {
        "no labels": call(X).raises(TypeError, "missing a required argument: 'labels'", "numbers of the classes"),
        "an option by position": call(X, LABELS, -1, None, 0.1).raises(
            TypeError, r"\(logits, labels, axis, where\) but 5", "Then pass label_smoothing=0.1"
        ),
    },
    "linear_cross_entropy": {
        "no labels": call(X, KERNEL).raises(
            TypeError, "missing a required argument: 'labels'", "numbers of the classes"
        ),
        "no kernel": call(X).raises(TypeError, "missing a required argument: 'kernel'", "softmax_cross_entropy"),
        "reduction by position": call(X, KERNEL, LABELS, "sum").raises(
            TypeError, "but 4 were given", "name: bias, where, weights, reduction"
        ),
        "bias by position": call(X, KERNEL, LABELS, BIAS).raises(TypeError, "but 4 were given", "Then pass bias="),
    },
}

SOFTMAX_WITHOUT_KERNEL = {
    "a leading axis": call(X, axis=0).has_no_kernel("trailing"),
    "two axes": call(X, axis=(-2, -1)).has_no_kernel(r"\(-2, -1\) together, kernels take one"),
    "half types mixed": call(X.astype("float16"), out_dtype="bfloat16").has_no_kernel("float16.*bfloat16"),
    "rows of no elements": call(jnp.ones((3, 0))).has_no_kernel("length 0"),
}
CROSS_ENTROPY_WITHOUT_KERNEL = {
    "a leading axis": call(X, jnp.zeros((4, 8), "int32"), axis=0).has_no_kernel("trailing"),
    "rows of no elements": call(jnp.ones((3, 0)), jnp.zeros(3, "int32")).has_no_kernel("length 0"),
    "a half type times an array": call(X.astype("bfloat16"), LABELS, logit_scale=jnp.float32(2)).has_no_kernel(
        "half type times a traced logit_scale are float32"
    ),
}
LINEAR = MISUSE["linear_cross_entropy"] | {
    "an embedding": call(X, KERNEL.T, LABELS).raises(
        ValueError, "kernel", r"\(20, 8\)", r"expected \(8, classes\)", r"kernel\.T"
    ),
    "a kernel of three axes": call(X, jnp.ones((8, 2, 10)), LABELS).raises(ValueError, "kernel", r"\(8, 2, 10\)"),
    "labels of other rows": call(X, KERNEL, LABELS[:2]).raises(ValueError, "labels", r"\(2, 4\)", r"\(3, 4\)", "of x"),
    "labels for the kernel": call(X, LABELS, KERNEL).raises(
        TypeError, "kernel is int32 and labels float32", "each other's place"
    ),
    "labels first": call(LABELS, KERNEL, X).raises(TypeError, "x is int32 and labels float32", "each other's place"),
    "the kernel first": call(KERNEL, X, LABELS).raises(ValueError, "kernel", "x and kernel in each other's place"),
    "the kernel before rows": call(KERNEL.T[:6].T, jnp.ones((5, 8)), LABELS[0]).raises(
        ValueError, "x and kernel in each other's place"
    ),
    "labels of floats": call(X, KERNEL, LABELS * 1.0).raises(TypeError, "labels", "integers", "float32"),
    "bias of other classes": call(X, KERNEL, LABELS, bias=BIAS[1:]).raises(
        ValueError, "bias", r"\(19,\)", r"expected \(20,\)", r"\(8, 20\)", "Reshape"
    ),
    "where of floats": call(X, KERNEL, LABELS, where=BIAS).raises(TypeError, "where", "booleans", "!= 0"),
    "where of rows": call(X, KERNEL, LABELS, where=LABELS == 0).raises(
        ValueError, "where", r"\(3, 4\)", r"expected \(20,\)", r"\(3, 4, 20\)", r"weights=where\.astype"
    ),
    "where of some rows' classes": call(X, KERNEL, LABELS, where=jnp.ones((4, 20), bool)).raises(
        ValueError, "where", r"\(4, 20\)", r"broadcast_to\(where, \(3, 4, 20\)\)"
    ),
    "weights of the batch": call(X, KERNEL, LABELS, weights=jnp.ones(3)).raises(
        ValueError, "weights", r"\(3,\)", r"expected \(3, 4\)", r"\(3, 4, 8\)", r"broadcast_to\(weights\[:, None\], lab"
    ),
    "weights of classes": call(X, KERNEL, LABELS, weights=BIAS).raises(ValueError, r"\(20,\)", r"weights\[labels\]"),
    "weights of other rows": call(X, KERNEL, LABELS, weights=jnp.ones(5)).raises(ValueError, r"\(5,\)", "broadcast"),
    "weights of booleans": call(X, KERNEL, LABELS, weights=LABELS == 0).raises(TypeError, "weights", "bool", "astype"),
    "logit_scale of classes": call(X, KERNEL, LABELS, logit_scale=BIAS).raises(
        ValueError, "logit_scale", r"\(20,\)", r"expected \(\)"
    ),
    "an unknown reduction": call(X, KERNEL, LABELS, reduction="max").raises(ValueError, "reduction", "max", "'mean'"),
    "no rows in a chunk": call(X, KERNEL, LABELS, rows_per_chunk=0).raises(ValueError, "rows_per_chunk", "positive"),
    "rows of a float": call(X, KERNEL, LABELS, rows_per_chunk=2.0).raises(TypeError, "rows_per_chunk", "int", "2.0"),
    "soft_cap of 0": call(X, KERNEL, LABELS, soft_cap=0.0).raises(ValueError, "soft_cap", "positive"),
}
